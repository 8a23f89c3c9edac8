"""`difference_report`: compare two saved or hub models, or a model and arrays, and write a page and a table."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from normlab.differences import Difference, diff
from normlab.errors import NormlabError
from normlab.files import whole_files
from normlab.report import short_names
from normlab.report.inputs import Loaded, batches, check_input, check_size, float_type, load

ARRAYS = (".npz", ".safetensors")


def difference_report(
    a: str,
    b: str,
    text: str | Path,
    *,
    length: int = 64,
    rows: int = 4,
    gradients: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    any_size: bool = False,
    out: str | Path | None = None,
) -> Difference:
    """Compare models `a` and `b` on a text (`normlab.diff`). Into `out` go `report.html` and the tables.

    `difference.csv` has one row per site, `added.csv` one per block.

    Args:
        a: directory or hub name; the reference. Its tokenizer reads the text.
        b: another, or a file of arrays (.npz or .safetensors) that one wrote on the same tokens.
        text: a UTF-8 text file; its first `rows` pieces of `length` tokens are used.
        gradients: also compare the gradients that arrive at the blocks' inputs.
        dtype: in which the arrays of a file were computed.
        any_size: as `normlab.report.inputs.load` takes it.
        out: a directory; default: nothing is written.

    Raises:
        NormlabError: the text or a model cannot be read; what `normlab.diff` raises.
    """
    text = Path(text)
    check_size(length, rows)
    check_input(text)
    is_file = Path(b).suffix in ARRAYS
    if is_file and gradients:
        raise NormlabError("gradients are compared between two models: leave out --gradients")
    computed_in = None if dtype is None else float_type(dtype)
    loaded = _causal(a, load(a, device=device, any_size=any_size))
    batch = {"input_ids": torch.cat([part["input_ids"] for part in batches(loaded, text, length, rows)])}
    other: Any = b if is_file else _causal(b, load(b, loaded.reader, device=device, any_size=any_size)).model
    result = diff(loaded.model, other, batch, gradients=gradients, dtype=computed_in)
    if out is not None:
        short = short_names([a, b])
        write_difference(result, Path(out), f"{short[a]} and {Path(b).name if is_file else short[b]}")
    return result


def _causal(name: str, loaded: Loaded) -> Loaded:
    """The model, if it is a causal language model with a head of its own."""
    if loaded.task != "causal" or loaded.no_loss:
        what = loaded.no_loss or f"it is a {loaded.task} model"
        raise NormlabError(f"{name}: {what}; this compares causal language models")
    return loaded


def write_difference(result: Difference, folder: Path, title: str) -> Path:
    """Write the tables of a comparison and its page; return the page's path."""
    from normlab.figures.differences import added_figure, difference_figure
    from normlab.report.page import Section, drawn, write_page

    def shown(table: pd.DataFrame) -> str:
        return str(table.to_html(index=False, float_format=lambda x: f"{x:.3g}", border=0, na_rep=""))

    causes = "".join(f"<li>{html.escape(cause)}</li>" for cause in (*result.causes, *result.notes))
    opening = f"<p><b>{html.escape(result.verdict)}</b></p><ul>{causes}</ul>"
    words = f"<p>Difference and noise are root mean squares over tokens of |x - y| / |x|. {result.compared}</p>"
    all_sites = Section("All sites, in order of computation", f'{words}<div class="scroll">{shown(result.table)}</div>')
    sections = [drawn(difference_figure(result.table)), all_sites]
    if not result.added.empty:
        words = (
            "<p>Each block of the second model reads what the first model's block reads, and is compared with it. "
            "Row 0 is of the embeddings, the last one of what follows the blocks. Logits: their difference in the "
            "first model where this block's output is the second model's.</p>"
        )
        blocks = Section("What each block adds", f'{words}<div class="scroll">{shown(result.added)}</div>')
        sections[1:1] = [drawn(added_figure(result.added)), blocks]
    with whole_files(folder) as staged:
        result.table.to_csv(staged / "difference.csv", index=False)
        result.added.to_csv(staged / "added.csv", index=False)
        page = write_page(staged, title, opening, sections)
    return folder / page.name
