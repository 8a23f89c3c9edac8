"""Widgets in JupyterLab in a real browser: a click on a block shows its column; schemes train while one looks on."""

from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from browser_helpers import PLOT, jupyter_lab, page_of, run_all, set_theme, shoot
from training_helpers import TINY, write_text

MODELS = """
import torch
from normlab import NormlabConfig, NormlabForCausalLM
from normlab.widgets import Intervene, SkipMap

def model_of(scheme, depth):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=50)
    return NormlabForCausalLM(NormlabConfig(scheme=scheme, num_hidden_layers=depth, **sizes)).eval()

tokens = torch.randint(0, 50, (3, 12))
"""
SKIP_MAP = 'SkipMap(model_of("lns", 6), [{"input_ids": tokens}], name="lns")'
INTERVENE = """
display(Intervene(model_of("bhyt", 6), tokens))
display(SkipMap(model_of("pre_rmsnorm", 1), [{"input_ids": tokens}], name="pre_rmsnorm"))
"""
THEATRE = """
from normlab.widgets import TrainTheatre

recipe = {recipe}
theatre = TrainTheatre(["pre_rmsnorm", "bhyt"], {out!r}, recipe, cache_dir={out!r} + "-cache")
theatre
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, chromium: str) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lab")
    recipe = TINY | {"corpus": str(write_text(folder / "text.txt")), "steps": 5000, "probe_every": 20}
    sources = {
        "skip_map": MODELS + SKIP_MAP,
        "intervene": MODELS + INTERVENE,
        "theatre": THEATRE.format(recipe=recipe, out=str(folder / "runs")),
    }
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for name, source in sources.items():
        cells = [nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=about), folder / f"{name}.ipynb")
    with jupyter_lab(folder) as address:
        yield address


def click_at(page: Any, axis: str, x: float, y: float) -> None:
    """Click on the plot where its axes have these values."""
    place = f"""([x, y]) => {{
        const plot = {PLOT}, box = plot.getBoundingClientRect(), layout = plot._fullLayout;
        const across = layout['xaxis{axis}'], up = layout['yaxis{axis}'];
        return [box.left + across._offset + across.l2p(x), box.top + up._offset + up.l2p(y)];
    }}"""
    across, down = page.evaluate(place, [x, y])
    page.mouse.move(across - 3, down)
    page.mouse.move(across, down, steps=3)
    page.wait_for_timeout(200)  # a plot knows what is under the mouse once it has hovered
    page.mouse.click(across, down)


def button(page: Any, text: str) -> Any:
    return page.locator("button.widget-button").filter(has_text=text)


def trace(name: str, what: str) -> str:
    return f"Array.from({PLOT}.data.find(trace => trace.name === '{name}').{what} ?? [])"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_click_on_a_block_shows_its_column(address, chromium):
    with page_of(chromium, width=1400) as (page, errors):
        run_all(page, address, "skip_map.ipynb")
        chosen = f"block => {trace('chosen', 'x')}[0] === block"
        page.wait_for_function(chosen, arg=1, timeout=60_000)
        page.wait_for_timeout(1000)
        cost = page.evaluate(f"() => {trace('cost', 'y')}")
        click_at(page, "", 3, cost[2])
        page.wait_for_function(chosen, arg=3, timeout=20_000)
        assert page.evaluate(f"() => {trace('column', 'x')}") == [4, 5, 6]
        click_at(page, "2", 2, 5)
        page.wait_for_function(chosen, arg=2, timeout=20_000)
        assert page.evaluate(f"() => {trace('column', 'x')}") == [3, 4, 5, 6]
        page.get_by_text("without block 2:").wait_for(timeout=10_000)
        page.locator(".widget-hslider .noUi-handle").first.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(chosen, arg=3, timeout=20_000)
        shoot(page, "skip_map")
        assert errors == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_keys_are_the_readers_and_controls_and_plots_have_names_and_the_pages_theme(address, chromium):
    with page_of(chromium, width=1400, height=1300) as (page, errors):
        run_all(page, address, "intervene.ipynb")
        page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot .main-svg[role=img]').length === 1")
        page.locator(".live").get_by_role("button", name="γ").click()
        fader = page.get_by_role("slider", name="γ, all blocks")
        fader.focus()
        page.keyboard.press("ArrowUp")
        # What the reader sees, not its logarithm.
        page.wait_for_function("fader => fader.getAttribute('aria-valuetext') === '×1.2'", arg=fader.element_handle())
        page.wait_for_function("() => document.querySelector('.live .loss b.worse, .live .loss b + b')")
        size = page.locator(".live .profile svg").get_attribute("aria-label")
        assert size.startswith("size of the residual stream, ")
        named = page.locator(".js-plotly-plot .main-svg[role=img]").get_attribute("aria-label")
        assert named.startswith("loss added by skipping it, ")
        assert page.locator(".modebar-btn").count() and not page.locator(".modebar-btn[data-title^=Share]").count()
        cells = page.locator(".jp-Notebook .jp-Cell").count()
        for control in (fader, page.locator(".live select").first, page.locator(".live button").first):
            control.focus()
            page.keyboard.type("ddbr")  # delete, add and make raw
        page.wait_for_timeout(500)
        assert page.locator(".jp-Notebook .jp-Cell").count() == cells and not page.locator(".jp-RawCell").count()
        shoot(page, "intervene")
        set_theme(page, "JupyterLab Dark")
        dark = "plot => plot.layout.template.layout.paper_bgcolor === '#14171b'"
        page.wait_for_function(f"() => [...document.querySelectorAll('.js-plotly-plot')].every({dark})", timeout=20_000)
        page.wait_for_function("() => document.querySelector('.live').classList.contains('dark')", timeout=20_000)
        shoot(page, "intervene-dark")
        assert errors == []


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_schemes_train_while_the_kernel_is_free(address, chromium):
    with page_of(chromium, width=1400) as (page, errors):
        run_all(page, address, "theatre.ipynb")
        button(page, "start").click()
        grown = f"count => {trace('bhyt train', 'x')}.length > count && {trace('pre_rmsnorm last', 'y')}.length > 0"
        page.wait_for_function(grown, arg=5, timeout=120_000)
        # The kernel answers while both train.
        page.locator(".jp-CodeCell").last.locator(".cm-content").click()
        page.keyboard.type("print(6 * 7, {run.state for run in theatre.runs.values()})")
        page.keyboard.press("Shift+Enter")
        page.get_by_text("42 {'training'}").wait_for(timeout=20_000)
        button(page, "stop").click()
        button(page, "continue").wait_for(timeout=60_000)
        asleep = page.evaluate(f"() => {trace('bhyt train', 'x')}.length")
        button(page, "continue").click()
        page.wait_for_function(f"step => {trace('bhyt train', 'x')}.at(-1) > step + 5", arg=asleep, timeout=60_000)
        page.locator(".widget-dropdown select").first.select_option(index=1)
        page.wait_for_function(f"() => {PLOT}.layout.yaxis2.title.text.startsWith('variance')", timeout=20_000)
        shoot(page, "train_theatre")
        button(page, "stop").click()
        page.get_by_text("stopped").first.wait_for(timeout=60_000)
        assert errors == []
