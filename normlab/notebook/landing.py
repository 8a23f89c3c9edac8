"""The landing page of a folder of notebooks' pages: a model to try, a sentence on the runs, and links."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import plotly.graph_objects as go
from nbformat import NotebookNode

from normlab.analysis import claims
from normlab.analysis.selection import DIVERGED, Selection, choose, deepest, seeds_in_words, title_of
from normlab.errors import NormlabError
from normlab.figures import themed
from normlab.figures.theme import head_of
from normlab.files import whole_file
from normlab.notebook import comparable
from normlab.notebook.exporters import EXPLORER_FILE, MODEL_FILE, PLOTLY, NotebookPage, claim_of
from normlab.runs import read_runs

CLEARLY = 0.05  # nats: another seed moves a held-out loss by as much
HERE, COME_ALONG = "Trained on this machine just now", "Runs that come with normlab"
PICTURE_TAG = "picture"  # of the cell whose figure is on the card; default: the first figure
CARD_TAG = "card:"  # prefix of a tag of the first cell: the notebook has a card with this heading, others a line


def findings(path: str | Path) -> dict[str, str]:
    """Findings of the runs at `path`, as heading -> sentences.

    What was trained, which schemes learned, losses and growth at the depth of `deepest`, and limits of the evidence.

    Raises:
        NormlabError: no runs there, or runs that differ in more than a table can show.
    """
    runs = comparable(path)
    chosen, counts = choose(runs, depth=None), claims.learned(runs)
    depth, same = deepest(chosen.runs), choose(runs, depth=None, same_rate=True)
    here, grown = counts[counts["depth"] == depth], claims.growth(runs).query("depth == @depth")
    known = chosen.runs.groupby(["scheme", "depth"])["trigram_loss"].count()
    known = known.loc[pd.MultiIndex.from_frame(counts[["scheme", "depth"]])].set_axis(counts.index)
    lost = same.runs.loc[same.runs["status"].eq(DIVERGED) & same.runs["depth"].eq(depth), "scheme"]
    factors = grown["estimate"].mask(grown["estimate"].isna() & grown["a"].isin(lost), np.inf)
    seeds = seeds_in_words(here["seeds"])
    if here["seeds"].max() > 1:
        trust = f"{seeds} per scheme: the notebooks give each difference its interval and its verdict."
    else:
        trust = (
            f"One seed per scheme, so nothing has an interval. Another seed moves a loss by about {CLEARLY} nats: "
            "smaller differences between schemes mean nothing."
        )
    rates = [f"{rate:g}" for rate in sorted(runs["lr"].unique())]
    at, best = "", ""
    if len(rates) > 1:
        at, best = f" at learning rates {', '.join(rates)}", ", at each scheme's best rate"
    return {
        "Trained": f"{runs['run'].nunique()} runs of {len(chosen.schemes)} schemes{at}, {_where(path, runs)}. "
        f"{_capital(chosen.describe().replace(' · ', ', '))}.",
        "Learned": _learned(counts, best, known),
        "Loss": f"Held-out loss at {depth} layers, in nats per token{best}: "
        f"{_in_order(here['scheme'], here['eval_loss'])}.",
        "Growth": f"L2 norm of a token after the last of {depth} layers over that after the first: "
        f"{_in_order(grown['a'], factors)}. {_growth_rate(same, depth)} "
        "A stream may grow by a large factor and stay small.",
        "Trust": f"{trust} These are small models, trained briefly.",
    }


def _capital(text: str) -> str:
    """The text with its first letter in upper case; names keep theirs."""
    return text[:1].upper() + text[1:]


def _growth_rate(same: Selection, depth: int) -> str:
    """The learning rate at which growth is compared, or each scheme's where they share none."""
    own = same.runs.loc[same.runs["depth"] == depth, "lr"].nunique() > 1
    remark = ", so the factors differ not by normalization alone" if own else ""
    return f"{_capital(same.rate(depth))}{remark}."


def _where(path: str | Path, runs: pd.DataFrame) -> str:
    """The runs' precision, and the device, from their manifests."""
    names = set(runs["run"].unique())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged runs, which reading the table has told
        manifests = [run.manifest for run in read_runs(path) if run.name in names]
    devices = sorted({_device(manifest.get("environment", {})) for manifest in manifests})
    return f"in {' and '.join(sorted(runs['dtype'].unique()))} on {' and '.join(devices)}"


def _device(environment: Mapping[str, str]) -> str:
    device = environment.get("device", "an unknown device")
    return f"a CPU with {environment['cpu_capability']}" if device == "cpu" else device


def _learned(counts: pd.DataFrame, best: str, known: pd.Series) -> str:
    """The number of runs that have learned, the schemes with runs that have not, and those of which it is unknown.

    Args:
        counts: of `claims.learned`.
        best: at which rate.
        known: runs of each row that store the loss of a trigram model.
    """
    trigram = "the loss of a trigram model"
    if counts["trigram_loss"].isna().all():
        return f"These runs do not know {trigram}, so nothing says which of them have learned."
    total, below = known.sum(), counts["below_trigram"].sum()
    text = f"{below} of {total} runs{best and f'{best},'} have learned: their loss is below those of a unigram, "
    text += f"a bigram and a trigram model of the same text (the trigram's is {counts['trigram_loss'].mean():.2f} "
    text += "nats per token)."
    if others := _named(counts[counts["below_trigram"] < known]):
        text += f" Others: {others}. Conclude nothing from their losses."
    if unknown := _named(counts[known < counts["seeds"]]):
        text += f" Runs that do not know {trigram}, and are not counted: {unknown}."
    return text


def _named(rows: pd.DataFrame) -> str:
    return "; ".join(f"{title_of(row.scheme)} at {row.depth} layers" for row in rows.itertuples())


def _in_order(schemes: pd.Series, values: pd.Series) -> str:
    """Titles and values, smallest first, infinite and missing ones in words: "LNS 2.25; Pre-LN diverged"."""
    rows = sorted(zip(values.isna(), values.fillna(0.0), map(title_of, schemes), strict=True))
    words = {(False, np.inf): "diverged", (True, 0.0): "unknown"}
    return "; ".join(f"{title} {words.get((missing, value), f'{value:.2f}')}" for missing, value, title in rows)


def picture_of(notebook: NotebookNode) -> go.Figure | None:
    """The figure of the cell tagged `picture`, else the first figure; None in a notebook that shows none."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells.sort(key=lambda cell: PICTURE_TAG not in cell.metadata.get("tags", ()))
    shown = (output["data"][PLOTLY] for cell in cells for output in cell.outputs if PLOTLY in output.get("data", {}))
    figure = next(shown, None)
    return None if figure is None else go.Figure(data=figure["data"], layout=figure["layout"], skip_invalid=True)


def sentence_of(claim: str) -> str:
    """The first sentence of a claim, as Markdown, without the word and the papers before it."""
    text = re.sub(r"^\*\*Claim(?:\.\*\*|\*\* .*?\)\.) ", "", claim)
    return re.split(r"(?<=[.?!])\s+(?=[A-Z])", text)[0]


def heading_of(notebook: NotebookNode) -> str:
    """The heading of the notebook's card, from its tag; empty where it has none."""
    tags = notebook.cells[0].metadata.get("tags", ()) if notebook.cells else ()
    return next((tag.removeprefix(CARD_TAG) for tag in tags if tag.startswith(CARD_TAG)), "")


def write_index(
    folder: str | Path, executed: Sequence[str | Path], runs: str | Path, shipped: str | Path | None = None
) -> Path:
    """Write `index.html` in `folder`: the live model, a sentence on `runs`, cards and links of executed notebooks.

    A notebook with a card has its picture there; the others have a line.

    Args:
        shipped: runs that come with normlab. If they are not `runs`, they have their sentence below.

    Raises:
        NormlabError: no notebook has a page.
    """
    folder, cards, links = Path(folder), [], []
    for path in map(Path, executed):
        notebook = nbformat.read(path, as_version=4)
        (title, claim), picture = claim_of(notebook), picture_of(notebook)
        entry = {"page": f"{path.stem}.html", "title": title or path.stem, "sentence": sentence_of(claim)}
        if heading := heading_of(notebook):
            drawn = {} if picture is None else {"picture": card_picture(picture)}
            cards.append(entry | {"title": heading} | drawn)
        else:
            links.append(entry)
    if not cards + links:
        raise NormlabError(f"no notebook has a page in {folder}: there is nothing to link to")
    sets = {Path(runs).resolve(): HERE} | ({} if shipped is None else {Path(shipped).resolve(): COME_ALONG})
    said = {heading: claims.apart(comparable(path)) for path, heading in sets.items()}
    about = {"metadata": {"name": "index"}, "cards": cards, "links": links, "found": findings(runs), "said": said}
    about |= {"explorer": EXPLORER_FILE, "model": MODEL_FILE if (folder / MODEL_FILE).is_file() else ""}
    page, _ = NotebookPage(template_name="landing").from_notebook_node(nbformat.v4.new_notebook(), about)
    with whole_file(folder / "index.html") as staged:
        staged.write_text(page, encoding="utf-8")
    return folder / "index.html"


def card_picture(figure: go.Figure) -> dict[str, Any]:
    """A figure for a card: its title, and its drawing for a light and for a dark page."""
    title = re.sub(r"<[^>]*>", "", head_of(figure.layout.title.text or "").replace("<br>", " "))
    figure.update_layout(title=None, margin_t=48)
    return {"title": title} | {theme: json.loads(themed(figure, theme).to_json()) for theme in ("light", "dark")}
