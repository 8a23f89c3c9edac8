"""nbconvert exporters of executed notebooks, for readers without a kernel.

Pages fetch nothing from the network. They share files in their folder: `plotly.min.js`, `explorer.html`
(`normlab.widgets.explorer_page`), which replaces an explorer, and `model/index.html` (`normlab.widgets.live_page`),
which replaces an `Intervene` of a model that comes with normlab.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import HTMLExporter, NotebookExporter
from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode
from PIL import Image
from plotly.offline import get_plotlyjs
from traitlets.config import Config

from normlab.errors import NormlabError
from normlab.files import whole_files
from normlab.release import shipped_models
from normlab.report.page import PLOTLY_FILE, dark_script, write_plotly

EXPLORER_FILE = "explorer.html"
MODEL_FILE = "model/index.html"  # `normlab.widgets.live_page`
EXPLORER_TAG = "explorer:"  # prefix of a cell's tag with the explorer's first view: "explorer:way=relative"
INSTALL_TAG = "install"  # of the cell that installs normlab on Colab
PLOTLY = "application/vnd.plotly.v1+json"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_TEMPLATES = Path(__file__).parent / "templates"
_NEEDS_KERNEL = (
    "<p class='needs-kernel'>Here are controls that compute as you move them, so they need Python: "
    "<code>make lab</code> opens this notebook with them.</p>"
)


def _cleared(*tags: str) -> Config:
    """Remove cells with these tags, injected parameters, timings and the state of widgets (a copy of plotly.js)."""
    return Config(
        TagRemovePreprocessor={"enabled": True, "remove_cell_tags": {"injected-parameters", *tags}},
        ClearMetadataPreprocessor={
            "enabled": True,
            "preserve_cell_metadata_mask": {"tags"},
            "preserve_nb_metadata_mask": {"kernelspec", "language_info", "title"},
        },
    )


class StandIns(Preprocessor):
    """Replaces widgets by their page, their picture, or a line; sets the page's title and figures' dark theme."""

    def preprocess(self, nb: NotebookNode, resources: dict[str, Any]) -> tuple[NotebookNode, dict[str, Any]]:
        title, _ = claim_of(nb)
        if title:
            nb.metadata["title"] = title
        resources["dark_script"] = dark_script()
        return super().preprocess(nb, resources)

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if _WIDGET in data:
                frame = _live_frame(str(data.get("text/plain", "")), cell)
                still = {} if frame else {PLOTLY: data[PLOTLY]} if PLOTLY in data else {}
                output["data"] = still or {"text/html": frame or _NEEDS_KERNEL}
        return cell, resources


def _live_frame(widget: str, cell: NotebookNode) -> str:
    """The page that replaces a widget, by its text, such as "Intervene(bhyt-d8)"; nothing where there is none."""
    kind, _, about = widget.partition("(")
    model = about.removesuffix(")")
    tags = cell.metadata.get("tags", ())
    view = "&".join(tag.removeprefix(EXPLORER_TAG) for tag in tags if tag.startswith(EXPLORER_TAG))
    pages = {
        "NormExplorer": ("the explorer", f"{EXPLORER_FILE}#{view}"),
        "Intervene": ("a trained model", f"{MODEL_FILE}#model={model}&against=&step=none"),
    }
    if kind not in pages or (kind == "Intervene" and model not in shipped_models()):
        return ""
    title, source = pages[kind]
    return f"<iframe class='explorer' title='{title}' loading='lazy' src='{source}'></iframe>"


class PlainImages(Preprocessor):
    """Keeps text, tables and figures' images; drops widgets and interactive figures, blank without a kernel."""

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        cell.metadata.pop("papermill", None)  # nbconvert clears that of code cells only
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [kept for kept in map(_plain_output, cell.outputs) if kept is not None]
        return cell, resources


def _plain_output(output: NotebookNode) -> NotebookNode | None:
    if "data" not in output:
        return output if output.get("name") == "stdout" else None
    data = output["data"]
    if "image/png" in data:
        return nbformat.v4.new_output("display_data", {"image/png": _of_few_colours(data["image/png"])})
    if PLOTLY in data or _WIDGET in data:
        return None
    if "text/html" in data:  # a table; its text form may hold an address in memory
        output["data"] = {"text/html": data["text/html"]}
    if "execution_count" in output:
        output["execution_count"] = None
    return output


def _of_few_colours(png: str) -> str:
    """Reduce a base64 PNG to 256 colours: a third of the size, and it looks alike.

    The palette covers all colours that occur, not the most frequent: a dot next to a heat map keeps its own.
    """
    small, palette = BytesIO(), Image.Quantize.MAXCOVERAGE
    with Image.open(BytesIO(b64decode(png))) as image:
        image.convert("RGB").quantize(256, palette, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return b64encode(small.getvalue()).decode()


class ImageNotebook(NotebookExporter):
    """A notebook with the images of its figures and without run-time details, as it is committed."""

    export_from_notebook = None  # type: ignore[assignment]  # not in JupyterLab's menu

    @property
    def default_config(self) -> Config:
        return Config(_cleared(), ImageNotebook={"preprocessors": [PlainImages(enabled=True)]})


class NotebookPage(HTMLExporter):
    """A notebook as a web page with interactive figures and explorers.

    python -m nbconvert --to normlab.notebook.exporters.NotebookPage FILE
    """

    export_from_notebook = None  # type: ignore[assignment]

    @property
    def default_config(self) -> Config:
        template = {"template_name": "notebook_page", "extra_template_basedirs": [str(_TEMPLATES)]}
        own = {"preprocessors": [StandIns(enabled=True)]} | template
        config = Config(_cleared(INSTALL_TAG), NotebookPage=own)
        config.merge(super().default_config)
        return config


def claim_of(notebook: NotebookNode) -> tuple[str, str]:
    """A notebook's title and the paragraph of its claim, as Markdown; each is empty if there is none."""
    text = "\n".join(cell.source for cell in notebook.cells[:1] if cell.cell_type == "markdown")
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "")
    claim = next((part for part in text.split("\n\n") if part.startswith("**Claim")), "")
    return title, " ".join(claim.split())


def share_plotly(page: str | Path) -> None:
    """Move plotly.js out of a page: the page then reads `plotly.min.js` in its folder.

    Raises:
        NormlabError: plotly.js is not in the page.
    """
    page = Path(page)
    before, inside, after = page.read_text(encoding="utf-8").partition(f"<script>{get_plotlyjs()}</script>")
    if not inside:
        raise NormlabError(f"{page} does not have plotly.js in its own <script>")
    with whole_files(page.parent) as staged:
        (staged / page.name).write_text(f'{before}<script src="{PLOTLY_FILE}"></script>{after}', encoding="utf-8")
        write_plotly(staged)
