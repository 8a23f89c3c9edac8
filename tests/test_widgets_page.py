"""The explorer as a page: it shows what the library computes, answers every control, and fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser_helpers import page_of
from figures_helpers import SCHEMES, empty, one_run, table, trained

from normlab.analysis.profiles import Profiles, View
from normlab.errors import NormlabError
from normlab.widgets.page import explorer_page, page_data


def noisy() -> pd.DataFrame:
    """Seeds that differ, so that intervals are open; a scheme that diverged and a value that is missing."""
    runs = trained(table(statuses={("lns", 4): "diverged"}))
    random = np.random.default_rng(0)
    layered = runs["layer"].notna()
    runs.loc[layered, "value"] = runs.loc[layered, "value"] * np.exp(random.normal(0, 0.2, int(layered.sum())))
    gone = (runs["scheme"] == "bhyt") & (runs["depth"] == 4) & (runs["layer"] == 2) & (runs["seed"] == 1)
    runs.loc[gone, "value"] = np.inf
    return runs


def test_a_page_is_one_file_that_fetches_nothing(tmp_path: Path):
    path = explorer_page(table(), tmp_path / "site" / "explorer.html")
    text = path.read_text(encoding="utf-8")
    assert "<script src=" not in text and "/*data*/" not in text and "/*plotly*/" not in text
    with pytest.raises(NormlabError, match="no run has been trained yet"):
        explorer_page(empty(), tmp_path / "empty.html")
    with pytest.raises(NormlabError, match="nothing was measured at block"):
        explorer_page(table(), tmp_path / "none.html", sites=["block"])
    assert not (tmp_path / "none.html").exists()


def test_the_data_are_the_tables_to_four_digits():
    data = page_data(Profiles(noisy()))
    cube = data["series"]["block_out|token_l2_mean|all"][4]["bhyt"]
    assert cube["seeds"] == [0, 1, 2] and cube["steps"] == [0, 10, 20] and cube["layers"] == [0, 1, 2, 3, 4]
    assert cube["values"][1][0][2] is None
    runs = noisy()
    one = runs[(runs["scheme"] == "bhyt") & (runs["depth"] == 4) & (runs["seed"] == 2) & (runs["step"] == 20)]
    one = one[(one["metric"] == "token_l2_mean") & (one["layer"] == 3)]["value"].item()
    assert cube["values"][2][2][3] == pytest.approx(one, rel=1e-3)
    assert "LNS: diverged" in data["remarks"][4] and not any(page_data(Profiles(one_run("bhyt")))["spreads"].values())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, chromium: str) -> Iterator[Any]:
    path = explorer_page(noisy(), tmp_path_factory.mktemp("site") / "explorer.html")
    with page_of(chromium) as (page, errors):
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg")
        yield page
        assert errors == [] and [url for url in requests if not url.startswith("file:")] == []


def curve(page: Any, name: str) -> list[float] | None:
    """The y values of a trace, None where the plot has no such trace."""
    read = "name => document.getElementById('plot').data.find(t => t.name === name)?.y ?? null"
    y = page.evaluate(read, name)
    return None if y is None else [np.nan if v is None else v for v in y]


def wait_for(page: Any, name: str, values: np.ndarray | None, rtol: float = 2e-3) -> None:
    """Until the plot shows these values, or no such trace."""
    agrees = """([name, values, rtol]) => {
        const y = document.getElementById('plot').data.find(t => t.name === name)?.y ?? null;
        if (y === null || values === null) return y === values;
        const near = (a, b) => a === null || b === null ? a === b : Math.abs(a - b) <= rtol * Math.abs(b);
        return y.length === values.length && y.every((v, i) => near(v, values[i]));
    }"""
    wanted = None if values is None else [float(v) if np.isfinite(v) else None for v in values]
    page.wait_for_function(agrees, arg=[name, wanted, rtol], timeout=10_000)


def slide(page: Any, name: str, key: str) -> None:
    page.locator(f"#{name}").focus()
    page.keyboard.press(key)


@pytest.mark.parametrize(
    ("way", "options"),
    [("absolute", {}), ("relative", {"relative": True}), ("pre_rmsnorm", {"reference": "pre_rmsnorm"})],
)
def test_the_page_shows_what_the_library_computes(page: Any, way: str, options: dict[str, Any]):
    profiles = Profiles(noisy())
    page.select_option("#way", way)
    slide(page, "depth", "End")
    for key, step in (("Home", 0), ("ArrowRight", 10), ("End", 20)):
        slide(page, "step", key)
        lines = {
            line.scheme: line
            for line in profiles.lines(View("token_l2_mean", "block_out", "all", 4, step, tuple(SCHEMES), **options))
        }
        for scheme in SCHEMES:
            line = lines.get(scheme)
            wait_for(page, scheme, None if line is None else line.values)
            if line is not None:
                wait_for(page, f"{scheme} band", np.concatenate([line.low, line.high[::-1]]), rtol=1e-2)
    page.select_option("#way", "absolute")


@pytest.mark.parametrize(
    ("way", "options"),
    [("absolute", {}), ("relative", {"relative": True}), ("pre_rmsnorm", {"reference": "pre_rmsnorm"})],
)
def test_the_page_draws_the_theory_that_the_library_computes(page: Any, way: str, options: dict[str, Any]):
    page.select_option("#way", way)
    slide(page, "depth", "End")
    page.locator("#theory").check()
    view = View("token_l2_mean", "block_out", "all", 4, 20, tuple(SCHEMES), **options)
    told = {line.scheme: line for line in Profiles(noisy()).predicted(view)}
    assert set(told) == set(SCHEMES)
    for scheme, line in told.items():
        wait_for(page, f"{scheme} theory", line.values)
    assert "with rings: theory, before training" in page.locator("#said").inner_text()
    page.locator("#theory").uncheck()
    wait_for(page, "bhyt theory", None)
    page.select_option("#way", "absolute")


def test_every_control_of_the_page_answers_the_keyboard(page: Any):
    slide(page, "depth", "Home")
    page.wait_for_function("() => document.getElementById('plot').layout.xaxis.range[1] === 2")
    page.locator("#scheme-bhyt").focus()
    page.keyboard.press("Space")
    wait_for(page, "bhyt", None)
    page.keyboard.press("Space")
    page.wait_for_function("() => document.getElementById('plot').data.some(trace => trace.name === 'bhyt')")
    assert page.locator("#depth").get_attribute("aria-valuetext") == "2"
    slide(page, "step", "Home")
    assert page.locator("#step").get_attribute("aria-valuetext") == "0"
    page.locator("#play").focus()
    page.keyboard.press("Enter")  # goes to the end by itself, and stops there
    page.wait_for_function("() => document.getElementById('step').getAttribute('aria-valuetext') === '20'")
    page.wait_for_function("() => document.getElementById('play').textContent === 'play'")
    page.locator("#band").focus()
    page.keyboard.press("Space")
    wait_for(page, "bhyt band", None)
    page.keyboard.press("Space")
    page.locator("#dark").focus()
    page.keyboard.press("Space")
    assert page.evaluate("document.documentElement.classList.contains('dark')")
    page.keyboard.press("Space")
    page.select_option("#metric", "grad_l2_total")
    assert page.evaluate("document.getElementById('site').value") == "block_in_grad"
    page.wait_for_function("() => document.getElementById('plot').data.find(t => t.name === 'bhyt').y.length === 2")
    page.locator("#log").focus()
    page.keyboard.press("Space")
    page.wait_for_function("() => document.getElementById('plot').layout.yaxis.type === 'linear'")


def test_the_address_keeps_the_view(page: Any):
    page.select_option("#metric", "feature_var_mean")
    slide(page, "step", "Home")
    page.wait_for_url("**metric=feature_var_mean**step=0**")  # written once the reader rests
    address, before = page.url, curve(page, "lns")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".js-plotly-plot .main-svg")
    assert (
        curve(page, "lns") == before and page.evaluate("document.getElementById('metric').value") == "feature_var_mean"
    )
