"""The explorer as a page: it shows what the library computes, answers every control, and fetches nothing."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from browser_helpers import page_in
from figures_helpers import SCHEMES, configs_of, empty, profile, table, two_rates

from normlab.analysis.profiles import Profiles, View
from normlab.errors import NormlabError
from normlab.figures.profile import PlotOptions, drawing, plain
from normlab.figures.theme import style_of
from normlab.schemes import tagged
from normlab.widgets.explorer import NormExplorer, explorer_page, page_data
from normlab.widgets.plot import static_text

WAYS: dict[str, dict[str, Any]] = {
    "absolute": {},
    "relative": {"relative": True},
    "pre_rmsnorm": {"reference": "pre_rmsnorm"},
}


def noisy() -> pd.DataFrame:
    """Seeds that differ, so that intervals are open; a scheme that diverged and a value that is missing."""
    runs = table(statuses={("lns", 4): "diverged"})
    random = np.random.default_rng(0)
    layered = runs["layer"].notna()
    runs.loc[layered, "value"] = runs.loc[layered, "value"] * np.exp(random.normal(0, 0.2, int(layered.sum())))
    gone = (runs["scheme"] == "bhyt") & (runs["depth"] == 4) & (runs["layer"] == 2) & (runs["seed"] == 1)
    runs.loc[gone, "value"] = np.inf
    return runs


def test_a_page_is_one_file_that_fetches_nothing(tmp_path):
    path = explorer_page(table(), tmp_path / "site" / "explorer.html")
    text = path.read_text(encoding="utf-8")
    assert "<script src=" not in text and "/*data*/" not in text and "/*plotly*/" not in text
    with pytest.raises(NormlabError, match="no run has been trained yet"):
        explorer_page(empty(), tmp_path / "empty.html")
    elsewhere = table()[lambda runs: runs["site"] != "block_in_grad"]
    with pytest.raises(NormlabError, match="nothing was measured at block_out"):
        explorer_page(elsewhere.replace({"site": {"block_out": "attn_norm_in"}}), tmp_path / "empty.html")
    assert not (tmp_path / "empty.html").exists()


def shown_at(view: dict[str, Any], step: int, name: str) -> dict[str, Any]:
    """A trace as the page draws it at a step."""
    (first,) = [trace for trace in view["traces"] if trace["name"] == name]
    return first | view["frames"][view["steps"].index(step)]["data"][name]


@pytest.fixture(scope="module")
def of_noisy() -> tuple[Profiles, dict[str, Any]]:
    profiles = Profiles(noisy(), configs_of(noisy()))
    return profiles, page_data(profiles)["views"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("log", [False, True])
def test_every_frame_is_what_the_explorer_draws(of_noisy, way, log):
    profiles, views = of_noisy
    found = views[f"block_out|token_l2_mean|all|4|best|{way}"]
    view = View("token_l2_mean", "block_out", "all", 4, 0, tuple(SCHEMES), **WAYS[way])
    for place, step in enumerate(found["steps"]):
        drawn = go.Figure(plain(drawing(profiles, replace(view, step=step), PlotOptions(log=log, theory=True))))
        frame = found["frames"][place]
        labels = frame["labels"]["log" if log else "linear"]
        traces = [shown_at(found, step, trace["name"]) for trace in found["traces"] if trace["name"] in frame["data"]]
        layout = found["layout"] | frame["layout"] | {"yaxis": found["axes"]["log" if log else "linear"]}
        assert "shaded" not in layout["title"]["text"]  # the page says so where a band is drawn
        layout["title"] = layout["title"] | {"text": layout["title"]["text"].replace(*found["about"])}
        made = go.Figure({"data": [*traces, *labels], "layout": layout})
        wanted = {trace.name: trace for trace in drawn.data}
        assert {trace.name for trace in made.data} == set(wanted)
        for trace in made.data:
            other = wanted[trace.name]
            for mine, its in ((trace.y, other.y), (trace.customdata, other.customdata)):
                numbers = [np.array([] if part is None else part, float) for part in (mine, its)]
                assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, nan_ok=True)
            assert trace.hovertemplate == other.hovertemplate
        drawn.layout.template = made.layout.template = None
        for one in (drawn, made):
            one.layout.yaxis.range = [float(f"{end:.3g}") for end in one.layout.yaxis.range]
        assert made.layout == drawn.layout


def test_the_axis_of_ratios_is_logarithmic_and_so_is_the_range_that_fits_some_lines():
    asked = {"view": "block_out|token_l2_mean|all|4|best|pre_rmsnorm", "theory": False}
    view = NormExplorer(table()).answer(asked)
    assert view["axes"]["linear"]["type"] == "log"
    low, high = view["ranges"]["bhyt"]
    ratios = [y for frame in range(3) for y in shown_at(view, view["steps"][frame], "bhyt")["y"]]
    assert 10**low <= min(ratios) and max(ratios) <= 10**high and low < 0


def holds(bounds: list[float], values: list[float]) -> bool:
    return bounds[0] <= min(values) and max(values) <= bounds[1]


def test_a_range_that_fits_a_scheme_fits_its_theory_and_its_published_values_too():
    explorer = NormExplorer(table(), configs=configs_of(table()))
    views = {}
    for way in ("absolute", "pre_rmsnorm"):
        view = views[way] = explorer.answer({"view": f"block_out|token_l2_mean|all|4|best|{way}", "theory": True})
        assert set(view["predicted"]) == set(SCHEMES)
        for scheme, bounds in view["predicted"].items():
            said = shown_at(view, 20, f"{scheme} theory")["y"]
            assert holds(bounds, np.log10(said).tolist() if way == "pre_rmsnorm" else said)
    printed = views["absolute"]["published"]
    own: dict[str, list[float]] = {}
    for scheme, value in zip(printed["schemes"], printed["trace"]["y"], strict=True):
        own.setdefault(scheme, []).append(value)
    assert set(own) == set(printed["ranges"]["linear"]) == set(printed["ranges"]["log"]) and len(own) > 1
    for scheme, values in own.items():
        assert holds(printed["ranges"]["linear"][scheme], values)
        assert holds(printed["ranges"]["log"][scheme], np.log10(values).tolist())
        assert not holds(printed["ranges"]["linear"][scheme], printed["trace"]["y"])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, browser: Any, of_noisy: tuple[Profiles, Any]) -> Iterator[Any]:
    path = explorer_page(of_noisy[0], tmp_path_factory.mktemp("site") / "explorer.html")
    with page_in(browser) as (page, errors):
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg")
        assert not page.locator("[name=mask]").is_visible() and not page.locator("[name=rate]").is_visible()
        page.locator("[name=more]").click()
        until(page, "querySelector('.main-svg').clientWidth === document.querySelector('.plot').clientWidth")
        yield page
        assert errors == [] and [url for url in requests if not url.startswith("file:")] == []


PLOT = "document.querySelector('.plot')"


def wait_for(page: Any, name: str, values: np.ndarray | None, rtol: float = 2e-3) -> None:
    """Until the plot shows these values, or no such trace."""
    agrees = f"""([name, values, rtol]) => {{
        const y = {PLOT}.data.find(t => t.name === name)?.y ?? null;
        if (y === null || values === null) return y === values;
        const near = (a, b) => a === null || b === null ? a === b : Math.abs(a - b) <= rtol * Math.abs(b);
        return y.length === values.length && y.every((v, i) => near(v, values[i]));
    }}"""
    wanted = None if values is None else [float(v) if np.isfinite(v) else None for v in values]
    page.wait_for_function(agrees, arg=[name, wanted, rtol], timeout=10_000)


def until(page: Any, condition: str) -> None:
    """Until something holds of the plot."""
    page.wait_for_function(f"() => {PLOT}.{condition}", timeout=10_000)


def slide(page: Any, name: str, key: str) -> None:
    page.locator(f"[name={name}]").focus()
    page.keyboard.press(key)


@pytest.mark.parametrize("way", WAYS)
def test_the_page_shows_what_the_library_computes(page, of_noisy, way):
    profiles, _ = of_noisy
    view = View("token_l2_mean", "block_out", "all", 4, 0, tuple(SCHEMES), **WAYS[way])
    page.select_option("[name=way]", way)
    slide(page, "depth", "End")
    for key, step in (("Home", 0), ("ArrowRight", 10), ("End", 20)):
        slide(page, "step", key)
        lines = {line.scheme: line for line in profiles.lines(replace(view, step=step))}
        for scheme in SCHEMES:
            line = lines.get(scheme)
            wait_for(page, scheme, None if line is None else line.values)
            if line is not None:
                known = np.isfinite(line.low)
                band = np.concatenate([line.low[known], line.high[known][::-1]])
                wait_for(page, f"{scheme} band", band, rtol=1e-2)
    page.select_option("[name=way]", "absolute")


def test_a_page_of_many_schemes_opens_with_the_short_list(page, tmp_path):
    many = (*SCHEMES, "keel", "mhc", "gpas", "ngpt")
    path = explorer_page(table(many, depths=(2,), seeds=(0,)), tmp_path / "explorer.html")
    with page.context.browser.new_page() as own:
        own.goto(path.as_uri())
        own.wait_for_selector(".js-plotly-plot .main-svg")
        names = own.evaluate(f"() => {PLOT}.data.map(trace => trace.name)")
        assert set(names) == {style_of(name).title for name in tagged("short")}
        assert not own.locator(".scheme input[value=keel]").is_visible()
        own.locator("[name=more]").click()
        assert own.locator(".families .scheme").count() == 5
        own.locator(".scheme input[value=keel]").check()
        until(own, "data.some(trace => trace.name === 'Keel')")
    assert page.locator(".families .scheme").count() == 0


def test_every_control_of_the_page_answers_the_keyboard(page):
    def press(name: str, key: str = "Space") -> None:
        page.locator(name).focus()
        page.keyboard.press(key)

    slide(page, "depth", "Home")
    until(page, "layout.xaxis.range[1] === 2")
    press(".scheme input[value=bhyt]")
    wait_for(page, "bhyt", None)
    press(".scheme input[value=bhyt]")
    until(page, "data.some(trace => trace.name === 'bhyt')")
    assert page.locator("[name=depth]").get_attribute("aria-valuetext") == "2"
    slide(page, "step", "Home")
    assert page.locator("[name=step]").get_attribute("aria-valuetext") == "0"
    press("[name=play]", "Enter")  # goes to the end by itself, and stops there
    page.wait_for_function("() => document.querySelector('[name=step]').getAttribute('aria-valuetext') === '20'")
    page.wait_for_function("() => document.querySelector('[name=play]').textContent === 'play'")
    until(page, "layout.title.text.includes('shaded: smallest to largest seed')")
    press("[name=band]")
    wait_for(page, "bhyt band", None)
    until(page, "layout.title.text.includes('shaded') === false")
    press("[name=band]")
    press("#dark")
    assert page.evaluate("document.body.classList.contains('dark')")
    press("#dark")
    page.select_option("[name=metric]", "grad_l2_total")
    assert page.evaluate("document.querySelector('[name=site]').value") == "block_in_grad"
    until(page, "data.find(t => t.name === 'bhyt').y.length === 2")
    for kind in ("log", "linear"):
        press("[name=log]")
        until(page, f"layout.yaxis.type === '{kind}'")


SHARED = """() => {
    const plots = [...document.querySelectorAll('.plot')];
    const [first, second] = plots.map(plot => plot.layout?.yaxis.range.join());
    return plots.length === 2 && first === second && plots.every(plot => plot.querySelector('.gtitle'));
}"""


@pytest.fixture(scope="module")
def of_two_rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explorer_page(two_rates(), tmp_path_factory.mktemp("rates") / "explorer.html")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_rate_has_a_slider_and_a_second_view_differs_on_the_same_axis(of_two_rates, page, width):
    with page.context.browser.new_page(viewport={"width": width, "height": 800}) as own:
        own.goto(of_two_rates.as_uri())
        own.wait_for_selector(".js-plotly-plot .main-svg")
        rows = own.evaluate("[...document.querySelectorAll('.what, .moves')].map(row => row.clientHeight)")
        assert width == 390 or max(rows) < 50  # two rows of controls
        slide(own, "rate", "End")
        until(own, "layout.title.text.includes('rate 0.003')")
        if width == 1280:  # on a phone the names stand below, and lines have their schemes' titles
            wait_for(own, "bhyt", 2 * np.array(profile("bhyt", 4, 20)))
        own.wait_for_url("**rate=0.003**")
        assert "Pre-LN: not trained at learning rate 0.003" in own.locator(".remarks").inner_text()
        own.locator("[name=compare]").click()
        own.wait_for_function(SHARED)
        depths = own.evaluate("[...document.querySelectorAll('[name=depth]')].map(slider => slider.ariaValueText)")
        assert depths == ["4", "2"] and own.locator("[name=rate]").last.is_hidden()
        boxes = [own.locator(".plot").nth(at).bounding_box() for at in (0, 1)]
        assert (boxes[0]["y"] == boxes[1]["y"]) == (width == 1280)
        for box, title in zip(boxes, own.locator(".gtitle").all(), strict=True):  # whole
            text = title.bounding_box()
            assert box["x"] <= text["x"] and text["x"] + text["width"] <= box["x"] + box["width"]
        assert own.evaluate("document.documentElement.scrollWidth") <= width


SAID = """([source, data, view, frame, state]) => {
    const { titleOf, remarksOf } = new Function(source + '; return { titleOf, remarksOf };')();
    return [titleOf(view, frame, state).text, remarksOf(data, view, frame, state)];
}"""


def test_the_words_on_bands_and_log_axes_are_of_the_schemes_that_are_ticked(page):
    runs = pd.concat([table(("pre_rmsnorm",), depths=(4,)), table(("lns",), depths=(4,), seeds=(0,))])
    gone = runs["scheme"].eq("lns") & runs["step"].eq(0) & runs["metric"].eq("grad_l2_mean")
    explorer = NormExplorer(runs.assign(value=runs["value"].mask(gone, 0.0)))
    view = explorer.answer({"view": "block_in_grad|grad_l2_mean|all|4|best|absolute", "theory": False})
    below = ["LNS: zero, below a log axis"]
    for step, schemes, band, log, shaded, remarks in (
        (0, ["pre_rmsnorm", "lns"], True, True, True, below),
        (0, ["pre_rmsnorm"], True, True, True, []),
        (0, ["lns"], True, True, False, below),  # one seed
        (20, ["pre_rmsnorm", "lns"], False, True, False, []),
        (0, ["pre_rmsnorm", "lns"], True, False, True, []),
    ):
        state = {"schemes": schemes, "band": band, "log": log, "theory": False}
        frame = view["frames"][view["steps"].index(step)]
        given = [static_text("explorer.js"), explorer.choices, view, frame, state]
        title, said = page.evaluate(SAID, json.loads(json.dumps(given)))
        assert said == remarks and ("shaded: smallest to largest seed" in title) == shaded
        explorer.schemes, explorer.band, explorer.metric, explorer.step = schemes, band, "grad_l2_mean", step
        assert title == explorer.figure.layout.title.text  # on a linear axis


def test_an_axis_fits_the_lines_that_are_left(page):
    page.select_option("[name=metric]", "token_l2_mean")
    slide(page, "depth", "End")
    slide(page, "step", "End")
    until(page, "layout.yaxis.range[1] > 8")
    page.locator(".scheme input[value=pre_rmsnorm]").uncheck()
    wait_for(page, "pre_rmsnorm", None)
    until(page, "layout.yaxis.range[1] < 8")
    until(page, "querySelectorAll('.legendtext').length === 3")  # LNS diverged
    page.locator(".scheme input[value=pre_rmsnorm]").check()
    until(page, "querySelectorAll('.legendtext').length === 0")


def test_the_address_keeps_the_view(page):
    line = f"{PLOT}.data.find(trace => trace.name === 'lns').y"
    page.select_option("[name=metric]", "feature_var_mean")
    slide(page, "step", "Home")
    page.wait_for_url("**metric=feature_var_mean**step=0**")  # written once the reader rests
    address, before = page.url, page.evaluate(line)
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".js-plotly-plot .main-svg")
    assert page.evaluate(line) == before
    assert page.evaluate("document.querySelector('[name=metric]').value") == "feature_var_mean"
