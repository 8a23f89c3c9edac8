"""The explorer's traits: each changes the figure as it says, whatever the table lacks; the browser's pane follows."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser_helpers import page_in
from figures_helpers import SCHEMES, activation, configs_of, empty, one_run, profile, table, two_rates
from widget_helpers import Mounted

import normlab
from normlab.analysis.theory import COLLISION, predict
from normlab.errors import NormlabError
from normlab.figures import METRICS
from normlab.schemes import tagged
from normlab.training.config import TrainConfig
from normlab.widgets import NormExplorer
from normlab.widgets.explorer import _ABOUT, ABSOLUTE, RELATIVE


@pytest.fixture
def explorer() -> NormExplorer:
    return NormExplorer(table())


def drawn(figure: object, scheme: str) -> list[float]:
    """The y values of a trace; none where there is no such trace."""
    found = [list(trace.y) for trace in figure.data if trace.name == scheme]  # type: ignore[attr-defined]
    return found[0] if found else []


def test_it_opens_on_the_deepest_model_after_training_and_follows_its_traits(explorer):
    for scheme in SCHEMES:
        assert drawn(explorer.figure, scheme) == pytest.approx(profile(scheme, 4, 20))
    explorer.step = 0
    assert drawn(explorer.figure, "bhyt") == pytest.approx(profile("bhyt", 4, 0))
    assert "before training" in explorer.figure.layout.title.text
    explorer.depth = 2
    assert drawn(explorer.figure, "bhyt") == pytest.approx(profile("bhyt", 2, 0))
    explorer.schemes = [name for name in SCHEMES if name != "lns"]
    assert drawn(explorer.figure, "lns") == [] and drawn(explorer.figure, "bhyt")
    explorer.schemes = []
    assert "No scheme is selected" in explorer.figure.layout.annotations[0].text
    assert repr(explorer) == f"NormExplorer({len(SCHEMES)} schemes)"


def test_a_depth_that_is_not_there_is_the_one_it_opens_on(explorer):
    explorer.depth = 2
    explorer.depth = 5
    assert explorer.depth == explorer.choices["start"] == 4
    assert drawn(explorer.figure, "bhyt") == pytest.approx(profile("bhyt", 4, 20))


def test_the_rate_is_a_coordinate_and_schemes_without_it_are_named():
    explorer = NormExplorer(two_rates())
    assert explorer.rate == 1e-3 and "depth 4 · learning rate 0.001" in explorer.figure.layout.title.text
    assert explorer.choices["rates"] == {2: [["best", None]], 4: [["best", None], ["0.001", 1e-3], ["0.003", 3e-3]]}
    explorer.rate = 3e-3
    assert drawn(explorer.figure, "bhyt") == pytest.approx([2 * value for value in profile("bhyt", 4, 20)])
    assert drawn(explorer.figure, "pre_rmsnorm") == []
    assert "depth 4 · learning rate 0.003" in explorer.figure.layout.title.text
    named = normlab.figures.profile(two_rates(), rate=3e-3)
    assert drawn(named, "bhyt") == drawn(explorer.figure, "bhyt")
    view = explorer.answer({"view": "block_out|token_l2_mean|all|4|0.003|pre_rmsnorm", "theory": False})
    assert "Pre-LN: not trained at learning rate 0.003" in view["frames"][-1]["remarks"]
    explorer.depth = 2  # which has one rate
    assert explorer.rate is None and drawn(explorer.figure, "pre_rmsnorm")
    with pytest.raises(NormlabError, match="no run of depth 2 at learning rate 0.003 in the table, which has: 0.001"):
        normlab.figures.profile(two_rates(), depth=2, rate=3e-3)


def test_best_is_each_schemes_best_rate_and_names_it():
    runs = two_rates()
    at_bhyts = runs["scheme"].eq("bhyt") & runs["lr"].eq(3e-3) & runs["metric"].eq("loss")
    runs["value"] = runs["value"].where(~at_bhyts, runs["value"] - 1)
    explorer = NormExplorer(runs)
    explorer.rate = None
    named = "each scheme's learning rate: 0.001 (Pre-LN; LNS; BHyT without tanh; Pre-LN, gain λ/κ), 0.003 (BHyT)"
    for figure in (explorer.figure, normlab.figures.profile(runs, rate="best")):
        assert named in figure.layout.title.text
        assert drawn(figure, "bhyt") == pytest.approx([2 * value for value in profile("bhyt", 4, 20)])
        assert drawn(figure, "lns") == pytest.approx(profile("lns", 4, 20))
    assert "learning rate 0.001" in normlab.figures.profile(runs).layout.title.text


def test_each_schemes_own_rates_are_in_the_title_and_runs_that_cannot_be_shown_say_why():
    runs = pd.concat([one_run("bhyt", lr=1e-2), one_run("lns", lr=1e-3), one_run("lns", lr=1e-2)], ignore_index=True)
    own = NormExplorer(runs[runs["run"] != "lns-4-0-0.01"])
    assert "each scheme's learning rate: 0.001 (LNS), 0.01 (BHyT)" in own.figure.layout.title.text
    twice = pd.concat([runs, one_run("bhyt", lr=1e-3), one_run("lns", lr=1e-3).assign(run="other")], ignore_index=True)
    explorer = NormExplorer(twice)
    explorer.rate = 1e-3
    assert "2 runs of lns" in explorer.figure.layout.annotations[0].text


def test_a_metric_takes_a_site_where_it_was_measured(explorer):
    explorer.metric = "grad_l2_total"
    assert explorer.site == explorer.view.site == "block_in_grad"
    assert len(drawn(explorer.figure, "bhyt")) == 4  # gradients arrive at blocks 1 to 4
    assert METRICS["grad_l2_total"].definition in explorer.figure.layout.title.text
    with pytest.raises(NormlabError, match="no metric 'loudness'"):
        explorer.metric = "loudness"


def test_relative_divides_by_layer_one_and_a_reference_pairs_seeds(explorer):
    explorer.way = RELATIVE
    line = profile("lns", 4, 20)
    assert drawn(explorer.figure, "lns") == pytest.approx([value / line[1] for value in line])
    explorer.way = "pre_rmsnorm"
    ratio = [a / b for a, b in zip(profile("bhyt", 4, 20), profile("pre_rmsnorm", 4, 20), strict=True)]
    assert drawn(explorer.figure, "bhyt") == pytest.approx(ratio)
    assert drawn(explorer.figure, "pre_rmsnorm") == pytest.approx([1.0] * 5)
    (shown,) = [trace for trace in explorer.figure.data if trace.name == "bhyt"]
    # Seeds scale both schemes alike, so the pairs agree and the interval closes.
    assert list(shown.customdata[-1]) == pytest.approx([ratio[-1], ratio[-1]])
    assert "paired by seed" in explorer.figure.layout.yaxis.title.text
    assert explorer.figure.layout.yaxis.type == "log" and "shaded: 95% interval" in explorer.figure.layout.title.text


def test_switches_change_bands_axis_and_published_values():
    explorer = NormExplorer(table())
    assert max(drawn(explorer.figure, "bhyt band")) == pytest.approx(1.02 * activation("bhyt", 4, 20))
    assert "shaded: smallest to largest seed" in explorer.figure.layout.title.text
    explorer.band, explorer.log, explorer.published = False, True, True
    figure = explorer.figure
    assert drawn(figure, "bhyt band") == [] and figure.layout.yaxis.type == "log"
    (printed,) = [trace for trace in figure.data if trace.name == "published"]
    assert sorted(printed.y) == [139, 366, 704] and figure.layout.xaxis.range[1] >= max(printed.x) > 4
    assert set(printed.marker.color) <= {trace.line.color for trace in figure.data if trace.name in SCHEMES}
    explorer.way = RELATIVE
    assert drawn(explorer.figure, "published") == [] and tuple(explorer.figure.layout.xaxis.range) == (0, 4)


def test_a_still_figure_has_the_axis_of_its_own_step(explorer):
    explorer.step = 0
    high = explorer.figure.layout.yaxis.range[1]
    top = max(max(trace.y) for trace in explorer.figure.data if trace.name in SCHEMES)
    assert top <= high < 1.2 * top
    assert normlab.figures.profile(table(), step=0).layout.yaxis.range == explorer.static().layout.yaxis.range


@cache
def predicted(scheme: str, depth: int, metric: str = "token_l2_mean", **changes: Any) -> tuple[float, ...]:
    config = TrainConfig(scheme=scheme, depth=depth, width=32, **changes)
    rows = predict(config.model_config(config.vocab_size, 0), collision=COLLISION)
    rows = rows[(rows["site"] == "block_out") & (rows["metric"] == metric) & (rows["mask"] == "all")]
    return tuple(rows["value"])


def remarks(explorer: NormExplorer, view: str = "block_out|token_l2_mean") -> str:
    """Remarks under a view after training: on the step, on theory and on a log axis."""
    found = explorer.answer({"view": f"{view}|all|4|best|{ABSOLUTE}", "theory": True})
    return " · ".join([*found["frames"][-1]["remarks"], *found["frames"][-1]["unseen"], *found["remarks"].values()])


def test_theory_is_a_line_with_rings_where_it_says_something():
    explorer = NormExplorer(table(), configs=configs_of(table()))
    assert drawn(explorer.figure, "lns theory") == []
    explorer.theory = True
    for step in (20, 0):
        explorer.step = step
        for scheme in SCHEMES:
            assert drawn(explorer.figure, f"{scheme} theory") == pytest.approx(predicted(scheme, 4))
    low, high = explorer.figure.layout.yaxis.range
    assert low < min(predicted("lns", 4)) < high
    explorer.depth, explorer.way = 2, RELATIVE
    line = predicted("lns", 2)
    assert drawn(explorer.figure, "lns theory") == pytest.approx([value / line[1] for value in line])
    explorer.way = "pre_rmsnorm"
    ratio = np.array(predicted("lns", 2)) / predicted("pre_rmsnorm", 2)
    assert drawn(explorer.figure, "lns theory") == pytest.approx(ratio.tolist())
    explorer.metric = "grad_l2_mean"
    assert not [trace.name for trace in explorer.figure.data if "theory" in trace.name]
    assert "with rings: theory, before training" in remarks(explorer)
    gradient = remarks(explorer, "block_in_grad|grad_l2_mean")
    assert "theory says nothing here of the gradient norm of a token" in gradient
    wide = {"init_std": 0.1}  # it is of the models that the runs had
    explorer = NormExplorer(table(), configs=configs_of(table(), **wide))
    explorer.theory = True
    assert drawn(explorer.figure, "bhyt theory") == pytest.approx(predicted("bhyt", 4, **wide))
    assert predicted("bhyt", 4, **wide) != pytest.approx(predicted("bhyt", 4), rel=0.5)


def test_theory_is_silent_about_models_that_it_does_not_know():
    known = configs_of(table())
    others = table().query("seed == 1")["run"].unique()
    unknown = {
        "two models": known | {name: known[name] | {"block_length": 32} for name in others},
        "another version": {name: config | {"later": 1} for name, config in known.items()},
        "outliers": configs_of(table(), outlier_channels=2),
        "no word of them": None,
    }
    for about, configs in unknown.items():
        explorer = NormExplorer(table(), configs=configs)
        explorer.theory = True
        assert not [trace.name for trace in explorer.figure.data if "theory" in trace.name], about
        assert "theory says nothing here" in remarks(explorer), about


def test_models_that_were_trained_unlike_are_told_under_the_title_and_in_the_page_under_the_plot():
    ours = table(("pre_rmsnorm",)).assign(recipe="steps=20 optimizer=adamw", dtype="float32")
    other = table(("lns",)).assign(recipe="steps=20 optimizer=muon", dtype="bfloat16")
    runs = pd.concat([ours, other], ignore_index=True)
    view = "block_out|token_l2_mean|all|4|best|{}"
    explorer = NormExplorer(runs)
    figures = [normlab.figures.profile(runs), normlab.figures.profile(runs, reference="pre_rmsnorm"), explorer.figure]
    titles = [figure.layout.title.text for figure in figures]
    alike = NormExplorer(table(("pre_rmsnorm", "lns")))
    for way in (ABSOLUTE, RELATIVE, "pre_rmsnorm"):
        answer, plain = (one.answer({"view": view.format(way), "theory": False}) for one in (explorer, alike))
        titles.append(answer["remarks"]["unlike"])
        assert answer["layout"] == plain["layout"] and plain["remarks"]["unlike"] == "", "no plot moves for it"
    for title in titles:
        small = title.replace("<br>", " ")
        assert "3 runs in float32" in small and "3 runs in bfloat16" in small
        assert "trained differently: optimizer adamw and muon (LNS)" in small
    for alike in (NormExplorer(runs, schemes=["lns"]), NormExplorer(table())):
        assert "unlike" not in alike.figure.layout.title.text and "runs in" not in alike.figure.layout.title.text
    assert "same seeds" not in _ABOUT and "same text" not in _ABOUT


def test_what_a_log_axis_does_not_show_is_told_by_step_and_scheme():
    runs = table(("pre_rmsnorm", "lns", "bhyt"), depths=(4,))
    runs = runs.replace({"metric": {"feature_var_mean": "saturation_95"}})  # of which an axis with zeros is linear
    measured = runs["metric"].isin(["grad_l2_mean", "saturation_95"])
    for scheme, step in (("lns", 0), ("bhyt", 20)):
        runs.loc[measured & runs["scheme"].eq(scheme) & runs["step"].eq(step), "value"] = 0.0
    explorer = NormExplorer(runs)
    below = [["LNS: zero, below a log axis"], [], ["BHyT: zero, below a log axis"]]
    found = explorer.answer({"view": f"block_in_grad|grad_l2_mean|all|4|best|{ABSOLUTE}", "theory": False})
    assert [frame["unseen"] for frame in found["frames"]] == below and found["remarks"]["log"] == ""
    found = explorer.answer({"view": f"block_out|saturation_95|all|4|best|{ABSOLUTE}", "theory": False})
    assert found["axes"]["log"]["type"] == "linear" and not any(frame["unseen"] for frame in found["frames"])
    assert found["remarks"]["log"] == "values that are not above 0 keep the axis linear"
    explorer.metric, explorer.log, titles = "grad_l2_mean", True, []
    for explorer.step in (0, 10, 20):
        titles.append(explorer.figure.layout.title.text)
    assert [[said for (said,) in below[::2] if said in title] for title in titles] == below
    explorer.metric, explorer.step = "saturation_95", 0
    assert "keep the axis linear" in explorer.figure.layout.title.text
    explorer.log = False
    assert "keep the axis linear" not in explorer.figure.layout.title.text


def test_with_nothing_to_show_it_says_so():
    no_layers = one_run("bhyt").query("site == 'model'")
    for runs, remark in ((empty(), "no run has been trained yet"), (no_layers, "No layer was measured")):
        explorer = NormExplorer(runs)
        assert remark in explorer.figure.layout.annotations[0].text and remark in explorer.choices["missing"]
        with pytest.raises(NormlabError, match=remark):
            explorer.view  # noqa: B018


def test_it_shows_what_there_is_and_says_what_is_missing():
    parts = [one_run("pre_rmsnorm"), one_run("lns", status="diverged"), one_run("dyt", depth=2).assign(value=np.nan)]
    runs = pd.concat(parts, ignore_index=True)
    explorer = NormExplorer(runs)
    assert drawn(explorer.figure, "pre_rmsnorm") and drawn(explorer.figure, "lns") == []
    said = remarks(explorer)
    assert "LNS: diverged, nothing measured at step 20" in said and "DyT: not trained at depth 4" in said
    explorer.step = 0
    assert len(drawn(explorer.figure, "lns")) == 5
    explorer.depth = 2
    assert "LNS" in explorer.figure.layout.annotations[0].text
    zeros = table()
    zeros.loc[(zeros["scheme"] == "lns") & (zeros["site"] == "block_in_grad"), "value"] = 0.0
    some = NormExplorer(zeros)
    assert "LNS: zero, below a log axis" in remarks(some, "block_in_grad|grad_l2_mean")
    assert "log axis" not in remarks(some)
    zeros.loc[(zeros["scheme"] == "rmsnorm_gain") & (zeros["site"] == "block_in_grad"), "value"] = 0.0
    said = remarks(NormExplorer(zeros), "block_in_grad|grad_l2_mean")
    assert "LNS: zero, below a log axis · Pre-LN, gain λ/κ: zero, below a log axis" in said
    configs = {run: config for run, config in configs_of(table()).items() if "gain" not in run}
    assert "(nothing of Pre-LN, gain λ/κ)" in remarks(NormExplorer(table(), configs=configs))


def test_it_opens_on_schemes_that_were_not_measured_at_its_step():
    explorer = NormExplorer(pd.concat([one_run("pre_rmsnorm"), one_run("lns", status="diverged")]), schemes=["lns"])
    assert "LNS: diverged, nothing measured at step 20" in explorer.figure.layout.annotations[0].text
    explorer.step = 0
    assert len(drawn(explorer.figure, "lns")) == 5 and not explorer.log


def test_one_run_any_name_and_unknown_schemes():
    assert len(drawn(NormExplorer(one_run("bhyt")).figure, "bhyt")) == 5
    with pytest.raises(NormlabError, match="no run of 'lns'"):
        NormExplorer(one_run("bhyt"), schemes=["lns"])
    named = table(schemes=("lns", "bhyt")).replace({"scheme": {"lns": "my <norm> 2"}})
    assert drawn(NormExplorer(named).figure, "my <norm> 2")


def test_of_many_schemes_it_opens_with_the_short_list_and_keeps_the_rest_by_family():
    explorer = NormExplorer(table(tuple(normlab.SCHEMES), depths=(2,), seeds=(0,)))
    assert set(explorer.schemes) == set(tagged("short"))
    families = explorer.choices["families"]
    assert sum(map(len, families.values())) == len(normlab.SCHEMES) - len(tagged("short"))
    assert all(normlab.SCHEMES[name].family == family for family, names in families.items() for name in names)
    explorer.schemes = [*explorer.schemes, "keel"]
    assert "keel" in {trace.name for trace in explorer.figure.data}


PLOT = "document.querySelector('.plot')"


def test_python_and_the_browser_hear_of_each_other(browser, monkeypatch):
    """The widget's script in a browser: views come from the kernel, and its code makes the same figure."""
    explorer = NormExplorer(two_rates(), configs=configs_of(two_rates()))
    explorer.rate = None  # before it is shown
    seen: list[int] = []
    explorer.observe(lambda change: seen.append(change["new"]), names="step")
    with page_in(browser) as (page, errors):
        shown = Mounted(page, explorer)
        line = f"([name, count]) => ({PLOT}?.data ?? []).some(line => line.name === name && line.y.length === count)"
        shown.until(line, ["bhyt", 5])
        page.locator("[name=step]").focus()
        page.keyboard.press("Home")
        shown.until(f"() => {PLOT}.layout.title.text.includes('before training')")
        shown.until(lambda: explorer.step == 0)
        assert seen == [0] and explorer.rate is None
        explorer.depth, explorer.schemes, explorer.step = 2, ["lns", "bhyt"], 10
        shown.push()
        shown.until(line, ["BHyT", 3])  # fewer lines have their titles as names, in a legend
        page.locator("[name=more]").click()
        page.get_by_role("button", name="code").click()  # and it follows
        page.locator("[name=theory]").check()
        shown.until(f"() => {PLOT}.data.length === 6")
        page.locator("[name=band]").uncheck()
        page.get_by_role("button", name="compare").click()
        shown.until("() => document.querySelectorAll('.plot')[1]?.layout?.xaxis.range[1] === 4")  # another depth
        page.locator("[name=step]").last.focus()
        page.keyboard.press("Home")
        lines = page.locator("pre").first.inner_text().splitlines()
        shown.until(lambda: explorer.theory and not explorer.band)
        assert explorer.step == 10  # the second view is its own
        monkeypatch.setattr(normlab, "load_runs", lambda path, variants: two_rates(), raising=False)
        monkeypatch.setattr(normlab, "read_configs", lambda path: configs_of(two_rates()), raising=False)
        names: dict[str, Any] = {}
        assert ", variants=False)" in lines[1]  # as the notebooks load them
        exec("\n".join([*lines[:2], "figure = " + lines[2]]), names)
        assert names["figure"].to_plotly_json() == explorer.figure.to_plotly_json()
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").first.click()
        numbers = pd.read_csv(download.value.path())
        assert download.value.suggested_filename == "token_l2_mean-block_out-depth2-step10.csv"
        for scheme in ("lns", "bhyt"):
            values = numbers[numbers["scheme"] == scheme]["value"].tolist()
            assert values == pytest.approx(profile(scheme, 2, 10), rel=1e-3)
        page.locator("[name=published]").first.check()
        diamonds = "(PLOT?.data ?? []).find(trace => trace.name === 'published')?.y".replace("PLOT", PLOT)
        shown.until(f"() => {diamonds}")
        shown.until(lambda: explorer.published)
        assert page.evaluate(diamonds) == drawn(explorer.figure, "published") != []
        explorer.schemes = ["rmsnorm_gain"]
        shown.push()
        shown.until(f"() => {PLOT}.data.length === 2 && !{diamonds} && {PLOT}.layout.yaxis.range[1] < 100")
        low, high = page.evaluate(f"{PLOT}.layout.yaxis.range")
        values = page.evaluate(f"{PLOT}.data.flatMap(trace => trace.y)")
        assert low <= min(values) and max(values) <= high  # theory's too
        assert drawn(explorer.figure, "published") == [] and explorer.figure.layout.yaxis.range[1] < 100
        assert "diamonds" not in page.locator(".remarks").first.inner_text()
        assert not errors


def test_it_opens_on_a_log_axis_where_an_earlier_step_would_flatten_the_lines():
    runs = table(depths=(2,))
    earlier = runs["step"].eq(10) & runs["metric"].eq("token_l2_mean")
    assert not NormExplorer(runs).log
    assert NormExplorer(runs.assign(value=runs["value"].mask(earlier, 10 * runs["value"]))).log
