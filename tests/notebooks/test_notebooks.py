"""Notebooks run from a fresh kernel, show the figures they claim, and are committed as plain images."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from io import BytesIO

import nbformat
import pytest
from notebook_helpers import NOTEBOOKS, PLOTLY
from PIL import Image

from normlab.notebook.exporters import ImageNotebook

ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_has_a_title_parameters_and_what_would_falsify_it(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    _, first, *_ = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.metadata.get("tags") == ["parameters"] and "FAST = True" in first.source
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "falsify" in prose and "**Claim" in prose and "## Exercises" in prose


@pytest.mark.parametrize("name", ALL)
def test_a_committed_notebook_is_small_and_shows_images_only(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < 1_500_000
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            assert PLOTLY not in output.get("data", {}) and "/root" not in str(output) and "/home" not in str(output)


def test_keeping_images_only_drops_everything_that_needs_a_kernel():
    png = BytesIO()
    Image.linear_gradient("L").convert("RGB").save(png, "PNG")
    full = b64encode(png.getvalue()).decode()
    outputs = [
        {"output_type": "display_data", "data": {PLOTLY: {}, "image/png": full}, "metadata": {}},
        {"output_type": "display_data", "data": {PLOTLY: {}}, "metadata": {}},
        {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}},
        {"output_type": "stream", "name": "stderr", "text": "a warning"},
        {"output_type": "stream", "name": "stdout", "text": "a result"},
        {
            "output_type": "execute_result",
            "data": {"text/html": "<table>", "text/plain": "<Styler at 0x7f>"},
            "metadata": {},
            "execution_count": 3,
        },
    ]
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.from_dict(o) for o in outputs], execution_count=3)
    injected = nbformat.v4.new_code_cell("RUNS = '/somewhere'", metadata={"tags": ["injected-parameters"]})
    timed = nbformat.v4.new_markdown_cell("text", metadata={"papermill": {"duration": 0.1}})
    notebook = nbformat.v4.new_notebook(cells=[cell, timed, injected])
    notebook.metadata["papermill"] = {"duration": 1.0}
    kept = nbformat.reads(ImageNotebook().from_notebook_node(notebook)[0], as_version=4)
    nbformat.validate(kept)
    cell, text = kept.cells
    assert "papermill" not in text.metadata
    assert [list(o.get("data", {"text": 0})) for o in cell.outputs] == [["image/png"], ["text"], ["text/html"]]
    assert cell.execution_count is None and "papermill" not in kept.metadata
    image = Image.open(BytesIO(b64decode(cell.outputs[0].data["image/png"])))
    assert image.mode == "P" and image.size == (256, 256)
    assert image.convert("RGB").getpixel((9, 200)) == pytest.approx((200, 200, 200), abs=2)
