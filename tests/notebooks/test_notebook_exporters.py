"""Exported pages: one plotly.js for all, an explorer that works without a kernel, an index that leads to each."""

import json
import re
from base64 import b64decode, b64encode
from html import unescape
from io import BytesIO
from typing import Any

import browser_helpers
import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from figures_helpers import table
from nbformat import NotebookNode
from notebook_helpers import PLOTLY, WIDGET
from PIL import Image
from plotly.offline import get_plotlyjs

import normlab
from normlab.errors import NormlabError
from normlab.figures import loss_curves
from normlab.figures.theme import style_of, titled
from normlab.notebook.exporters import ImageNotebook, NotebookPage, share_plotly
from normlab.widgets import Intervene, NormExplorer, explorer_page


def frames_in(page: str) -> list[str]:
    """The targets of the page's frames."""
    return [unescape(source) for source in re.findall(r'<iframe[^>]* src="([^"]*)"', page)]


def shows(text: str, **still: Any) -> NotebookNode:
    """The output of a cell that ends in a widget, with its picture if there is one."""
    return nbformat.v4.new_output("display_data", {WIDGET: {"model_id": "0"}, "text/plain": text} | still)


def executed(*outputs: NotebookNode, tags: tuple[str, ...] = ()) -> NotebookNode:
    """A notebook as it comes from papermill: parameters injected, the state of widgets with a plotly.js inside."""
    cells = [
        nbformat.v4.new_markdown_cell("# Growth\n\n**Claim.** It grows\nwith depth.\n\nMore words."),
        nbformat.v4.new_code_cell("RUNS = '/elsewhere'", metadata={"tags": ["injected-parameters"]}),
        nbformat.v4.new_code_cell("figure", outputs=list(outputs), metadata={"tags": list(tags)}),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {"0": get_plotlyjs()}}}
    return notebook


def page_of(notebook: NotebookNode) -> str:
    return NotebookPage().from_notebook_node(notebook)[0]


def test_a_page_holds_its_figures_and_shares_plotly():
    figure = nbformat.v4.new_output("display_data", {PLOTLY: json.loads(loss_curves(table()).to_json())})
    page = page_of(executed(figure))
    assert page.count('<script>draw("figure-') == page.count("showSendToCloud: false") == 1  # no button that uploads
    assert '<script src="plotly.min.js"></script>' in page
    assert len(page) < 1_000_000 and "plotly.js v" not in page and "/elsewhere" not in page
    assert "<title>Growth</title>" in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=.https?:", page)


def test_an_explorer_stands_where_its_widget_stood_and_opens_as_the_cell_says():
    text = NormExplorer(table())._repr_mimebundle_()[0]["text/plain"]
    assert frames_in(page_of(executed(shows(text)))) == ["explorer.html#"]
    page = page_of(executed(shows(text), tags=("explorer:way=relative",)))
    assert frames_in(page) == ["explorer.html#way=relative"]


def test_other_controls_leave_their_picture_or_a_line_that_says_what_they_need():
    page = page_of(executed(shows("SkipMap(children=())")))
    assert not frames_in(page) and 'class="needs-kernel"' in page and "SkipMap(" not in page
    page = page_of(executed(shows("SkipMap(children=())", **{PLOTLY: {"data": [], "layout": {}}})))
    assert 'draw("figure-' in page and '<p class="needs-kernel"' not in page and "SkipMap(" not in page


def test_a_page_of_models_stands_only_for_a_model_that_it_has():
    ours = shows("Intervene(bhyt-d8)", **{PLOTLY: {"data": [], "layout": {}}})
    assert frames_in(page_of(executed(ours))) == ["model/index.html#model=bhyt-d8&against=&step=none"]
    for name in ("GPT2LMHeadModel", "NormlabForCausalLM", "bhyt-d9"):
        page = page_of(executed(shows(f"Intervene({name})", **{PLOTLY: {"data": [], "layout": {}}})))
        assert not frames_in(page) and 'draw("figure-' in page
    assert 'class="needs-kernel"' in page_of(executed(shows("Intervene(GPT2LMHeadModel)")))


def test_a_model_has_its_name_while_it_is_the_one_that_comes_with_normlab():
    def shown(model: Any) -> str:
        return Intervene(model, torch.arange(12)[None])._repr_mimebundle_()[0]["text/plain"]

    model = normlab.load_model("lns-d4")
    assert shown(model) == shown(normlab.load_model("lns-d4", dtype=torch.bfloat16)) == "Intervene(lns-d4)"
    hook = model.register_forward_hook(lambda *_: None)
    assert shown(model) == "Intervene(NormlabForCausalLM)"
    hook.remove()
    model.model.norm.eps *= 2
    assert shown(model) == "Intervene(NormlabForCausalLM)"
    model.model.norm.eps /= 2
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[5, 7] += 1e-3
    assert shown(model) == "Intervene(NormlabForCausalLM)"


def test_the_explorers_page_reads_the_shared_plotly_in_a_browser(tmp_path, browser):
    share_plotly(explorer_page(table(), tmp_path / "explorer.html"))
    assert (tmp_path / "explorer.html").stat().st_size < 500_000
    (tmp_path / "page.html").write_text(page_of(executed(shows("NormExplorer()"), tags=("explorer:way=relative",))))
    with browser_helpers.page_in(browser) as (page, _):
        page.goto((tmp_path / "page.html").as_uri())
        frame = page.frame_locator("iframe.explorer")
        frame.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()
        assert frame.locator("[name=way]").input_value() == "relative"
        tall = frame.locator("html").evaluate("page => page.offsetHeight")
        page.wait_for_function("tall => document.querySelector('iframe').clientHeight === tall", arg=tall)


def test_on_a_small_screen_a_title_is_whole_and_a_figure_fits_or_scrolls_with_a_hint(tmp_path, browser):
    lines = go.Figure([go.Scatter(x=[1, 2], y=[1, 2], name=name) for name in ("one", "two")])
    drawn = loss_curves(table()), titled(lines, "Two lines", "", 400)
    shown = [nbformat.v4.new_output("display_data", {PLOTLY: json.loads(figure.to_json())}) for figure in drawn]
    (tmp_path / "page.html").write_text(page_of(executed(*shown)))
    (tmp_path / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    with browser_helpers.page_in(browser) as (page, errors):
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 390, "height": 800})
        page.goto((tmp_path / "page.html").as_uri())
        wide, narrow = page.locator(".figure").all()
        narrow.locator(".legend").wait_for()
        title = page.locator("figcaption > b").first
        assert title.inner_text() == re.sub("<br>", " ", drawn[0].layout.title.text)
        for whole in (title, narrow.locator(".main-svg").first, narrow.locator(".legend")):
            box = whole.bounding_box()
            assert box["x"] + box["width"] <= 390
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.locator(".gtitle").count() == 0 and not errors
        papers = [narrow.locator(".main-svg").first, page.locator("body")]
        assert {paper.evaluate("it => getComputedStyle(it).backgroundColor") for paper in papers} == {"rgb(20, 23, 27)"}
        assert style_of("pre_rmsnorm", "dark").color in wide.evaluate("it => JSON.stringify(it.firstElementChild.data)")
        page.locator(".figure.more").wait_for()
        assert "more" in wide.get_attribute("class") and "more" not in narrow.get_attribute("class")
        wide.evaluate("box => box.scrollTo(box.scrollWidth, 0)")
        page.locator(".figure.more").wait_for(state="detached")


def test_a_dot_beside_a_heat_map_keeps_its_colour():
    """The map alone has thousands of colours, the dot a few pixels: the palette must have a place for both."""
    across, down = np.meshgrid(np.arange(256), np.arange(256))
    pixels = np.stack([across, down, (across + down) // 2], -1).astype(np.uint8)
    dot = 255, 0, 255
    pixels[100:104, 100:104] = dot
    drawn = BytesIO()
    Image.fromarray(pixels).save(drawn, "PNG")
    figure = nbformat.v4.new_output("display_data", {"image/png": b64encode(drawn.getvalue()).decode()})
    (shown,) = nbformat.reads(ImageNotebook().from_notebook_node(executed(figure))[0], 4).cells[-1].outputs
    with Image.open(BytesIO(b64decode(shown.data["image/png"]))) as image:
        assert max(abs(a - b) for a, b in zip(image.convert("RGB").getpixel((101, 101)), dot, strict=True)) < 16


def test_a_page_without_plotly_inside_is_refused(tmp_path):
    (tmp_path / "page.html").write_text("<script>1</script>")
    with pytest.raises(NormlabError, match=r"page\.html does not have plotly\.js"):
        share_plotly(tmp_path / "page.html")


def test_the_cell_that_installs_is_left_out_of_pages_and_kept_in_the_notebook():
    notebook = executed(tags=("install",))
    assert "figure" not in re.sub(r"<(style|script).*?</\1>", "", page_of(notebook), flags=re.DOTALL)
    kept = nbformat.reads(ImageNotebook().from_notebook_node(notebook)[0], 4)
    assert [cell.source for cell in kept.cells[1:]] == ["figure"]


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
