"""The landing page of a folder of notebooks' pages: tables of the runs, and a card per notebook.

findings      tables of the runs
picture_of    the figure on a notebook's card
sentence_of   the first sentence of a notebook's claim
write_index   writes the page
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
from nbformat import NotebookNode

import normlab
from normlab.analysis import claims
from normlab.analysis.selection import choose, deepest
from normlab.errors import NormlabError
from normlab.figures import themed
from normlab.notebook.exporters import EXPLORER_FILE, MODEL_FILE, PLOTLY, NotebookPage, claim_of

PICTURE_TAG = "picture"  # of the cell whose figure is on the card; default: the first figure


def findings(path: str | Path) -> dict[str, str]:
    """Tables of the runs at `path`, as HTML by heading: losses, and growth at the deepest depth of three schemes.

    Raises:
        NormlabError: no runs there, or runs that differ in more than a table can show.
    """
    runs = normlab.load_runs(path)
    about, growth = choose(runs, depth=None).describe(), claims.growth(runs)
    tables = {
        f"Held-out loss by number of blocks, in nats per token ({about})": claims.losses(runs),
        "L2 norm of a token after the last block, over that after the first": claims.shown(
            growth[growth["depth"] == deepest(runs)]
        ).set_index("scheme"),
    }
    return {heading: table.to_html(border=0) for heading, table in tables.items()}


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


def write_index(folder: str | Path, executed: Sequence[str | Path], runs: str | Path) -> Path:
    """Write `index.html` in `folder`: findings of `runs`, then a card per executed notebook, and the explorer's.

    A card has a picture and a sentence, and links to the notebook's page.

    Raises:
        NormlabError: no notebook has a page.
    """
    folder, cards = Path(folder), []
    for path in map(Path, executed):
        notebook = nbformat.read(path, as_version=4)
        (title, claim), picture = claim_of(notebook), picture_of(notebook)
        card = {"page": f"{path.stem}.html", "title": title or path.stem, "sentence": sentence_of(claim)}
        cards.append(card | ({"picture": _picture(picture)} if picture is not None else {}))
    if not cards:
        raise NormlabError(f"no notebook has a page in {folder}: there is nothing to link to")
    about = {"metadata": {"name": "index"}, "cards": cards, "found": findings(runs)}
    about |= {"explorer": EXPLORER_FILE, "model": MODEL_FILE}
    page, _ = NotebookPage(template_name="landing").from_notebook_node(nbformat.v4.new_notebook(), about)
    (folder / "index.html").write_text(page, encoding="utf-8")
    return folder / "index.html"


def _picture(figure: go.Figure) -> dict[str, Any]:
    """A figure for a card: its title, and its drawing for a light and for a dark page."""
    title = re.sub(r"<br>.*|<[^>]*>", "", figure.layout.title.text or "", flags=re.DOTALL)
    figure.update_layout(title=None, margin_t=48)
    return {"title": title} | {theme: json.loads(themed(figure, theme).to_json()) for theme in ("light", "dark")}
