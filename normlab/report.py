"""`probe_report`: measure a saved or hub model on a plain text file, and write a table and an HTML report."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normlab.errors import NormlabError, first_line
from normlab.probes.geometry import angular_distance, logit_lens_kl
from normlab.probes.metrics import METRICS
from normlab.probes.recording import record
from normlab.probes.sites import sites
from normlab.probes.skipping import skip_sensitivity
from normlab.probes.spans import cheapest_spans, mergekit_config
from normlab.probes.stats import LayerStats

try:
    from normlab.figures.layers import COLORS, layer_figure
except ImportError as error:  # pragma: no cover - needs an environment without plotly
    raise NormlabError("the report needs plotly: pip install 'normlab[notebooks]'") from error

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .6rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:.8rem;overflow:auto}"""


def probe_report(
    model: str | nn.Module,
    text: str | Path,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    length: int = 256,
    rows: int = 16,
    progress: bool = True,
) -> str:
    """Measure a causal language model on a text file, layer by layer.

    Writes `table.parquet` and `table.csv` (site, layer, metric, mask, value), `skip_sensitivity.csv`,
    `angular_distance.csv`, `logit_lens.csv`, `spans.csv` (what costs least to drop), `mergekit-drop-N.yaml` for N
    blocks, and `report.html` (one self-contained file) into `out`.

    Args:
        model: directory or hub name, or a model (then give `tokenizer`).
        text: UTF-8 text file.
        tokenizer: default: the one saved with the model.
        out: directory; default `probe-<model name>`.
        length, rows: the text's first `rows` pieces of `length` tokens are used (less when the text or the model's
            context is shorter).
        progress: show progress bars.

    Returns:
        A short summary that names the files.

    Raises:
        NormlabError: the text is missing, empty, binary or too short; the model or its tokenizer cannot be loaded;
        plotly is missing.
    """
    content = _read(Path(text))
    name = model if isinstance(model, str) else type(model).__name__
    loaded, tokenizer = _load(model, tokenizer)
    device = next(loaded.parameters()).device
    batches = _batches(loaded, tokenizer, content, length, rows)
    stats = _measure(loaded, [{k: v.to(device) for k, v in batch.items()} for batch in batches])
    few = batches[: max(1, len(batches) // 4)]
    tables = {
        "skip_sensitivity": skip_sensitivity(loaded, few, parts=["block", "attention", "mlp"], progress=progress),
        "angular_distance": angular_distance(loaded, few, progress=progress),
        "logit_lens": logit_lens_kl(loaded, few, progress=progress),
    }
    if sites(loaded).depth > 1:
        tables["spans"] = cheapest_spans(loaded, batches[: max(2, len(few))], progress=progress)
    folder = Path(out) if out is not None else Path(f"probe-{Path(name).name}")
    page = _page(name, str(text), stats, tables, batches)
    folder.mkdir(parents=True, exist_ok=True)
    table = stats.to_pandas()
    table.to_parquet(folder / "table.parquet", index=False)
    table.to_csv(folder / "table.csv", index=False)
    for key, frame in tables.items():
        frame.to_csv(folder / f"{key}.csv", index=key == "angular_distance")
    dtype = str(next(loaded.parameters()).dtype).removeprefix("torch.")
    for row in tables["spans"].itertuples() if "spans" in tables else ():
        config = mergekit_config(name, row.keep, dtype)
        (folder / f"mergekit-drop-{row.length}.yaml").write_text(config, encoding="utf-8")
    (folder / "report.html").write_text(page, encoding="utf-8")
    loss = tables["skip_sensitivity"]["loss"].iloc[0]
    return "\n".join(
        [
            *str(sites(loaded)).splitlines(),
            f"loss {loss:.4f} nats a token",
            *(_span_line(row) for row in (tables["spans"].itertuples() if "spans" in tables else ())),
            f"table:  {folder / 'table.parquet'}",
            f"report: {folder / 'report.html'}",
        ]
    )


def _span_line(row: Any) -> str:
    """One length of the table of spans, in the conventions of transformers and of mergekit."""
    kept = " and ".join(str(part) for part in row.keep)
    blocks = f"block {row.first}" if row.length == 1 else f"blocks {row.first}-{row.last}"
    return (
        f"cheapest {row.length} to drop: {blocks}, loss {row.skip_delta_loss:+.4f} [{row.low:+.4f}, {row.high:+.4f}]; "
        f"layers[{row.start}:{row.stop}] in transformers, mergekit keeps {kept}"
    )


def _read(path: Path) -> str:
    if not path.is_file():
        raise NormlabError(f"{path} is not a file: give a text file")
    raw = path.read_bytes()
    if b"\0" in raw:
        raise NormlabError(f"{path} is binary: give a text file")
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NormlabError(f"{path} is not UTF-8 text: convert it first") from error
    if not content.strip():
        raise NormlabError(f"{path} is empty: give a text file")
    return content


def _load(model: str | nn.Module, tokenizer: Any) -> tuple[nn.Module, Any]:
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise NormlabError("a model without a name has no tokenizer: pass tokenizer=")
        return model.eval(), tokenizer
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise NormlabError("loading a model by name needs transformers: pip install transformers") from error
    what = "model"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model)
        what = "tokenizer"
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise NormlabError(f"no {what} could be loaded from {model}: {first_line(error)}") from error
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _batches(model: Any, tokenizer: Any, content: str, length: int, rows: int) -> list[dict[str, torch.Tensor]]:
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None) or length
    length = min(length, context)
    ids = tokenizer(content[: 20 * length * rows], verbose=False)["input_ids"][: length * rows]
    if len(ids) < 16:
        raise NormlabError(f"the text has only {len(ids)} tokens: give at least 16")
    length = min(length, len(ids))
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces.split(4)]


def _measure(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> LayerStats:
    with record(model, list(METRICS)) as recorder:
        for batch in batches:
            recorder.backward(model(**batch).loss)
    return recorder.stats()


def _page(name: str, text: str, stats: LayerStats, tables: dict[str, pandas.DataFrame], batches: list) -> str:
    rows, length = sum(len(batch["input_ids"]) for batch in batches), batches[0]["input_ids"].shape[1]
    table = stats.to_pandas()
    figures = [layer_figure(table, metric) for metric in stats.metrics if metric not in stats.absent]
    figures = [
        _skip_figure(tables["skip_sensitivity"]),
        _lens_figure(tables["logit_lens"]),
        _angle_figure(tables["angular_distance"]),
        *figures,
    ]
    parts = [
        f"<h1>{html.escape(name)}, layer by layer</h1>",
        f"<p>{rows} pieces of {length} tokens of {html.escape(text)}; "
        f"loss {tables['skip_sensitivity']['loss'].iloc[0]:.4f} nats a token. "
        f"Skipping, angles and the lens use {tables['skip_sensitivity']['tokens'].iloc[0]} of the labels.</p>",
        f"<pre>{html.escape(chr(10).join(stats.manifest['sites']))}</pre>",
    ]
    if stats.absent:
        parts.append(f"<p>Do not apply to this model: {html.escape(', '.join(stats.absent))}.</p>")
    for i, figure in enumerate(figures):
        parts.append(figure.to_html(full_html=False, include_plotlyjs=i == 0))
    massive = stats.massive(top=3).query("mask == 'all'").drop(columns="mask")
    parts += ["<h2>Largest features</h2>", massive.to_html(index=False, float_format=lambda x: f"{x:.4g}", border=0)]
    if "spans" in tables:
        lines = "".join(f"<li>{html.escape(_span_line(row))}</li>" for row in tables["spans"].itertuples())
        parts.append(
            "<h2>What to cut</h2><p>The span of blocks that costs least to drop, at each length, in nats a token with "
            f"its 95% interval, chosen on other text than it is measured on where there is enough.</p><ul>{lines}</ul>"
        )
    definitions = "".join(f"<li><b>{name}</b>: {html.escape(METRICS[name].definition)}</li>" for name in stats.metrics)
    parts.append(f"<h2>Definitions</h2><ul>{definitions}</ul>")
    title = html.escape(name)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{"".join(parts)}</html>'


def _figure(title: str, definition: str, y: str) -> plotly.graph_objects.Figure:
    import plotly.graph_objects as go

    layout = {"text": title, "subtitle": {"text": definition}}
    return go.Figure(
        layout={"title": layout, "template": "simple_white", "xaxis": {"title": "layer"}, "yaxis": {"title": y}}
    )


def _skip_figure(table: pandas.DataFrame) -> plotly.graph_objects.Figure:
    figure = _figure(
        "skip_delta_loss by layer",
        "loss with the part skipped minus loss of the whole model; bars: 95% interval",
        "nats a token",
    )
    for color, (part, line) in zip(COLORS, table.groupby("part", sort=False), strict=False):
        bars = {"type": "data", "array": [0 if math.isnan(e) else e for e in (line["high"] - line["skip_delta_loss"])]}
        figure.add_scatter(
            x=line["layer"],
            y=line["skip_delta_loss"],
            error_y=bars,
            name=str(part),
            mode="lines+markers",
            line={"color": color},
        )
    return figure


def _lens_figure(table: pandas.DataFrame) -> plotly.graph_objects.Figure:
    figure = _figure("logit_lens_kl by layer", "KL(prediction from the layer || final prediction)", "nats")
    figure.add_scatter(x=table["layer"], y=table["value"], mode="lines+markers", line={"color": COLORS[0]})
    return figure


def _angle_figure(table: pandas.DataFrame) -> plotly.graph_objects.Figure:
    figure = _figure(
        "angular_distance between layers", "arccos(cos(h_l, h_m))/pi, mean over tokens; 0 = embeddings", "layer"
    )
    figure.add_heatmap(z=table.values, x=list(table.columns), y=list(table.index), colorscale="Viridis", zmin=0)
    return figure
