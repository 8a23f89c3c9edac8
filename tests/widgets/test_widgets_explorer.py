"""The explorer without a browser: every control changes the plot's data as it says, whatever the table lacks."""

from __future__ import annotations

import re
import threading
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from figures_helpers import MEAN_OF_SEEDS, SCHEMES, activation, configs_of, empty, one_run, table

import normlab
from normlab.analysis.profiles import Profiles
from normlab.analysis.theory import COLLISION, predict
from normlab.errors import NormlabError
from normlab.figures import METRICS
from normlab.training.config import TrainConfig
from normlab.widgets import NormExplorer
from normlab.widgets.pane import ABSOLUTE, RELATIVE


@pytest.fixture
def explorer() -> NormExplorer:
    return NormExplorer(table())


def drawn(figure: object, scheme: str) -> list[float]:
    """The y values of a trace; none where there is no such trace."""
    found = [list(trace.y) for trace in figure.data if trace.name == scheme]  # type: ignore[attr-defined]
    return found[0] if found else []


def expected(scheme: str, depth: int, step: int) -> list[float]:
    return [MEAN_OF_SEEDS * activation(scheme, layer, step) for layer in range(depth + 1)]


def test_it_opens_on_the_deepest_model_after_training(explorer: NormExplorer):
    for scheme in SCHEMES:
        assert drawn(explorer.figure, scheme) == pytest.approx(expected(scheme, 4, 20))
    assert explorer.figure.layout.yaxis.type == "linear"


def test_the_sliders_move_the_lines(explorer: NormExplorer):
    pane = explorer.panes[0]
    pane.step.value = 0
    assert drawn(explorer.figure, "bhyt") == pytest.approx(expected("bhyt", 4, 0))
    assert "before training" in explorer.figure.layout.title.text
    pane.depth.value = 2
    assert drawn(explorer.figure, "bhyt") == pytest.approx(expected("bhyt", 2, 0))
    assert tuple(explorer.figure.layout.xaxis.range) == (0, 2)


def test_play_goes_on_from_the_step_that_is_shown(explorer: NormExplorer):
    pane = explorer.panes[0]
    assert (pane.play.value, pane.play.max) == (2, 2)  # at its end, where the button begins anew with step 0
    pane.play.value = 0
    assert pane.step.value == 0 and drawn(explorer.figure, "lns") == pytest.approx(expected("lns", 4, 0))
    pane.play.playing = True
    pane.play.value = 1
    assert pane.play.playing and pane.step.value == 10
    pane.step.value = 0  # the reader takes the slider
    assert not pane.play.playing and pane.play.value == 0
    pane.play.value = 2
    assert pane.step.value == 20 and drawn(explorer.figure, "lns") == pytest.approx(expected("lns", 4, 20))
    pane.step.value = 0
    pane.depth.value = 2
    assert (pane.play.value, pane.step.value) == (0, 0)


def test_the_axis_stays_still_while_training_plays(explorer: NormExplorer):
    pane = explorer.panes[0]
    before = explorer.figure.layout.yaxis.range
    for step in pane.step.options:
        pane.step.value = step
        assert explorer.figure.layout.yaxis.range == before


def test_a_scheme_is_shown_while_its_box_is_ticked(explorer: NormExplorer):
    pane = explorer.panes[0]
    pane.schemes["lns"].value = False
    assert drawn(explorer.figure, "lns") == [] and drawn(explorer.figure, "bhyt")
    pane.schemes["lns"].value = True
    assert drawn(explorer.figure, "lns") == pytest.approx(expected("lns", 4, 20))
    for box in pane.schemes.values():
        box.value = False
    assert "No scheme is selected" in explorer.figure.layout.annotations[0].text


def test_a_metric_offers_the_sites_where_it_was_measured(explorer: NormExplorer):
    pane = explorer.panes[0]
    pane.metric.value = "grad_l2_total"
    assert [value for _, value in pane.site.options] == ["block_in_grad"] and explorer.view.site == "block_in_grad"
    assert len(drawn(explorer.figure, "bhyt")) == 4  # gradients arrive at blocks 1 to 4
    assert METRICS["grad_l2_total"].definition in explorer.figure.layout.title.text


def test_relative_divides_by_layer_one(explorer: NormExplorer):
    explorer.panes[0].shown_as.value = RELATIVE
    line = expected("lns", 4, 20)
    assert drawn(explorer.figure, "lns") == pytest.approx([value / line[1] for value in line])
    explorer.panes[0].shown_as.value = ABSOLUTE
    assert drawn(explorer.figure, "lns") == pytest.approx(line)


def test_against_a_reference_shows_paired_ratios_with_their_interval(explorer: NormExplorer):
    explorer.panes[0].shown_as.value = "pre_rmsnorm"
    ratio = [a / b for a, b in zip(expected("bhyt", 4, 20), expected("pre_rmsnorm", 4, 20), strict=True)]
    assert drawn(explorer.figure, "bhyt") == pytest.approx(ratio)
    assert drawn(explorer.figure, "pre_rmsnorm") == pytest.approx([1.0] * 5)
    (line,) = [t for t in explorer.figure.data if t.name == "bhyt"]
    # Seeds scale both schemes alike, so the pairs agree and the interval closes.
    assert list(line.customdata[-1]) == pytest.approx([ratio[-1], ratio[-1]])
    assert "paired by seed" in explorer.figure.layout.yaxis.title.text


def test_bands_axis_theme_and_published_values_can_be_switched(explorer: NormExplorer):
    pane = explorer.panes[0]
    assert max(drawn(explorer.figure, "bhyt band")) == pytest.approx(1.02 * activation("bhyt", 4, 20))
    pane.band.value = False
    assert drawn(explorer.figure, "bhyt band") == []
    assert explorer.figure.layout.yaxis.type == "linear" and explorer.figure.layout.yaxis.tickmode == "auto"
    pane.log_axis.value = True
    assert explorer.figure.layout.yaxis.type == "log"
    pane.metric.value = "feature_var_mean"
    assert pane.log_axis.value and explorer.figure.layout.yaxis.type == "log"  # as the reader left it
    pane.metric.value = "token_l2_mean"
    pane.papers.value = True
    assert sorted(drawn(explorer.figure, "published")) == [139, 366, 704]
    light = explorer.figure.layout.template.layout.paper_bgcolor
    explorer.dark.value = True
    assert explorer.figure.layout.template.layout.paper_bgcolor != light
    (line,) = [t for t in explorer.figure.data if t.name == "pre_rmsnorm"]
    assert line.line.color != "#000000"


def predicted(scheme: str, depth: int, metric: str = "token_l2_mean", **changes: Any) -> list[float]:
    config = TrainConfig(scheme=scheme, depth=depth, width=32, **changes)
    rows = predict(config.model_config(config.vocab_size, 0), collision=COLLISION)
    rows = rows[(rows["site"] == "block_out") & (rows["metric"] == metric) & (rows["mask"] == "all")]
    return rows["value"].tolist()


def test_theory_is_a_line_with_rings_where_it_says_something():
    explorer = NormExplorer(table(), configs=configs_of(table()))
    pane = explorer.panes[0]
    assert drawn(explorer.figure, "lns theory") == []
    pane.theory.value = True
    for step in (20, 0):
        pane.step.value = step
        for scheme in SCHEMES:
            assert drawn(explorer.figure, f"{scheme} theory") == pytest.approx(predicted(scheme, 4))
    assert "with rings: theory, before training" in pane.message.value
    low, high = explorer.figure.layout.yaxis.range
    assert low < min(predicted("lns", 4)) < high
    pane.depth.value, pane.shown_as.value = 2, RELATIVE
    line = predicted("lns", 2)
    assert drawn(explorer.figure, "lns theory") == pytest.approx([value / line[1] for value in line])
    pane.shown_as.value = "pre_rmsnorm"
    ratio = np.array(predicted("lns", 2)) / predicted("pre_rmsnorm", 2)
    assert drawn(explorer.figure, "lns theory") == pytest.approx(ratio.tolist())
    pane.schemes["lns"].value = False
    assert drawn(explorer.figure, "lns theory") == []
    pane.metric.value = "grad_l2_mean"
    assert not [trace.name for trace in explorer.figure.data if "theory" in trace.name]
    assert "theory says nothing here of the gradient norm of a token" in pane.message.value


def test_theory_is_of_the_models_that_the_runs_had():
    wide = {"model": {"initializer_range": 0.1}}
    explorer = NormExplorer(table(), configs=configs_of(table(), **wide))
    explorer.panes[0].theory.value = True
    assert drawn(explorer.figure, "bhyt theory") == pytest.approx(predicted("bhyt", 4, **wide))
    assert predicted("bhyt", 4, **wide) != pytest.approx(predicted("bhyt", 4), rel=0.5)


def of_two_models() -> dict[str, Any]:
    runs, configs = table(), configs_of(table())
    others = runs.loc[runs["seed"] == 1, "run"].unique()
    return configs | {name: configs[name] | {"block_length": 32} for name in others}


def of_another_version() -> dict[str, Any]:
    return {name: config | {"later": 1} for name, config in configs_of(table()).items()}


@pytest.mark.parametrize(
    "configs",
    [None, of_two_models(), of_another_version(), configs_of(table(), outlier_channels=2)],
    ids=["unknown", "two models", "another version", "outliers"],
)
def test_theory_is_silent_about_models_that_it_does_not_know(configs: dict[str, Any] | None):
    explorer = NormExplorer(table(), configs=configs)
    explorer.panes[0].theory.value = True
    assert not [trace.name for trace in explorer.figure.data if "theory" in trace.name]
    assert "theory says nothing here" in explorer.panes[0].message.value


def test_theory_can_be_that_of_another_model():
    config = TrainConfig(scheme="lns", depth=4, width=64, block_length=32)
    rows = predict(config.model_config(config.vocab_size, 0))
    figure = normlab.figures.profile(table(), theory=rows)
    wanted = rows[(rows["site"] == "block_out") & (rows["metric"] == "token_l2_mean") & (rows["mask"] == "all")]
    assert drawn(figure, "lns theory") == pytest.approx(wanted["value"].tolist())
    assert [trace.name for trace in figure.data if "theory" in trace.name] == ["lns theory"]


def test_two_views_stand_side_by_side_and_do_not_disturb_each_other(explorer: NormExplorer):
    explorer.compare.click()
    first, second = explorer.panes
    second.step.value = 0
    assert drawn(first.figure, "bhyt") == pytest.approx(expected("bhyt", 4, 20))
    assert drawn(second.figure, "bhyt") == pytest.approx(expected("bhyt", 4, 0))
    explorer.compare.click()
    assert len(explorer.panes) == 1
    explorer.compare.click()
    assert explorer.panes[1] is second and second.step.value == 0


@pytest.mark.parametrize("way", [ABSOLUTE, RELATIVE, "lns"])
def test_the_code_it_gives_makes_the_same_figure(way: str, monkeypatch: pytest.MonkeyPatch):
    explorer = NormExplorer(table(), configs=configs_of(table()))
    pane = explorer.panes[0]
    pane.depth.value, pane.step.value, pane.shown_as.value, pane.band.value = 2, 10, way, False
    pane.schemes["pre_rmsnorm"].value, pane.theory.value, pane.papers.value = False, True, True
    monkeypatch.setattr(normlab, "load_runs", lambda path: table(), raising=False)
    monkeypatch.setattr(normlab, "read_configs", lambda path: configs_of(table()), raising=False)
    lines = explorer.code().splitlines()
    assert len(lines) == 3
    names: dict[str, object] = {}
    exec("\n".join([*lines[:2], "figure = " + lines[2]]), names)
    made = names["figure"]
    assert drawn(made, "bhyt theory") != [] and bool(drawn(made, "published")) == (way == ABSOLUTE)
    assert made.to_plotly_json() == explorer.static().to_plotly_json()  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [2, 4])
def test_published_values_are_shown_whole_or_said_not_to_be_there(depth: int):
    explorer = NormExplorer(table(), theme="dark")
    pane = explorer.panes[0]
    pane.depth.value, pane.papers.value = depth, True
    (reported,) = [trace for trace in explorer.figure.data if trace.name == "published"]
    assert explorer.figure.layout.xaxis.range[1] >= max(reported.x) > depth and reported.cliponaxis is False
    lines = {trace.line.color for trace in explorer.figure.data if trace.name in SCHEMES}
    assert set(reported.marker.color) <= lines and "diamonds: published values" in pane.message.value
    pane.shown_as.value = RELATIVE
    assert drawn(explorer.figure, "published") == []
    assert "no published value stands beside this view" in pane.message.value
    assert tuple(explorer.figure.layout.xaxis.range) == (0, depth)


def test_with_no_scheme_chosen_its_code_draws_no_line(explorer: NormExplorer):
    for box in explorer.panes[0].schemes.values():
        box.value = False
    assert "schemes=[]" in explorer.code()
    made = normlab.figures.profile(table(), schemes=[])
    assert not made.data and made.layout.annotations[0].text == "No scheme is selected."


def test_a_scheme_may_have_any_name():
    runs = table(schemes=("lns", "bhyt")).replace({"scheme": {"lns": "my <norm> 2"}})
    explorer = NormExplorer(pd.concat([runs, one_run("my <norm> 2", seed=3, status="diverged")]))
    assert drawn(explorer.figure, "my <norm> 2")
    assert "my &lt;norm&gt; 2: 1 of 4 seeds diverged" in explorer.panes[0].message.value
    assert "normlab-scheme-my--norm--2 label" in explorer.children[0].value  # type: ignore[attr-defined]


def test_buttons_hand_the_view_over_and_each_view_has_a_name_of_its_own(explorer: NormExplorer, tmp_path: Path):
    explorer.folder, pane = tmp_path, explorer.panes[0]
    for put in (ABSOLUTE, RELATIVE, "lns"):
        pane.shown_as.value = put
        explorer.export("csv")
    names = [f"token_l2_mean-block_out-depth4-step20{way}.csv" for way in ("", "-against-lns", "-relative")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    explorer.exports[2].click()
    link = re.fullmatch(
        r"<a style='.+' download='(.+)' href='data:text/csv;base64,(.+)'>download \1</a>", explorer.message.value
    )
    assert link is not None and link[1] == names[1] and b64decode(link[2]) == (tmp_path / names[1]).read_bytes()


def test_the_view_is_exported_as_numbers(explorer: NormExplorer, tmp_path: Path):
    explorer.folder = tmp_path / "new"
    path = explorer.export("csv")
    assert path is not None
    numbers = pd.read_csv(path)
    assert len(numbers) == 5 * 5 and set(numbers["seeds"]) == {3} and set(numbers["depth"]) == {4}
    assert numbers[numbers["scheme"] == "bhyt"]["value"].tolist() == pytest.approx(expected("bhyt", 4, 20))
    with pytest.raises(NormlabError, match="choose png, svg, csv"):
        explorer.export("gif")


def test_an_image_without_a_browser_is_one_line(explorer: NormExplorer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("normlab.widgets.explorer.image_bytes", lambda *args: None)
    assert explorer.export("png") is None and "Chrome" in explorer.message.value


def test_the_view_is_exported_as_an_image(explorer: NormExplorer, tmp_path: Path, chromium: str):
    explorer.folder = tmp_path
    path = explorer.export("svg")
    assert path is not None and "Pre-LN" in path.read_text()


@pytest.mark.parametrize(
    ("runs", "remark"),
    [
        (empty(), "no run has been trained yet"),
        (one_run("bhyt")[lambda t: t["site"] == "model"], "No layer was measured"),
    ],
    ids=["empty", "no_layers"],
)
def test_with_nothing_to_show_it_says_so(runs: pd.DataFrame, remark: str):
    explorer = NormExplorer(runs)
    (shown,) = explorer.children
    for figure in (go.Figure(shown.figure), explorer.figure, explorer.static()):  # type: ignore[attr-defined]
        assert remark in figure.layout.annotations[0].text
    for ask in (lambda: explorer.view, explorer.code, explorer.table, lambda: explorer.export("csv")):
        with pytest.raises(NormlabError, match=remark):
            ask()


def test_it_shows_what_there_is_and_says_what_is_missing():
    runs = pd.concat(
        [one_run("pre_rmsnorm"), one_run("lns", status="diverged"), one_run("dyt", depth=2).assign(value=np.nan)],
        ignore_index=True,
    )
    explorer = NormExplorer(runs)
    assert drawn(explorer.figure, "pre_rmsnorm") and drawn(explorer.figure, "lns") == []
    remark = explorer.panes[0].message.value
    assert "LNS: diverged, nothing measured at step 20" in remark and "DyT: not trained at depth 4" in remark
    explorer.panes[0].step.value = 0
    assert len(drawn(explorer.figure, "lns")) == 5
    explorer.panes[0].depth.value = 2
    assert "LNS" in explorer.figure.layout.annotations[0].text


def test_what_a_log_axis_cannot_show_is_said():
    runs = table()
    runs.loc[(runs["scheme"] == "lns") & (runs["site"] == "block_in_grad"), "value"] = 0.0
    pane = NormExplorer(runs).panes[0]
    assert "log axis" not in pane.message.value
    pane.metric.value = "grad_l2_mean"
    assert "log axis" not in pane.message.value
    pane.log_axis.value = True
    assert "LNS: zero, below a log axis" in pane.message.value
    pane.log_axis.value = False
    assert "log axis" not in pane.message.value


def test_one_run_can_be_explored_and_unknown_schemes_are_named():
    explorer = NormExplorer(one_run("bhyt"))
    assert len(drawn(explorer.figure, "bhyt")) == 5
    with pytest.raises(NormlabError, match="no run of 'lns'"):
        NormExplorer(one_run("bhyt"), schemes=["lns"])


def test_controls_moved_from_many_threads_leave_a_figure_that_agrees_with_them(explorer: NormExplorer):
    pane = explorer.panes[0]
    failed: list[BaseException] = []

    def shake(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(12):
                move = random.integers(4)
                if move == 0:
                    pane.depth.value = int(random.choice([2, 4]))
                elif move == 1:
                    pane.play.value = int(random.integers(3))
                elif move == 2:
                    pane.schemes["lns"].value = bool(random.integers(2))
                else:
                    pane.shown_as.value = str(random.choice([ABSOLUTE, RELATIVE, "bhyt"]))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=shake, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    view = pane.view
    lines = {line.scheme: line for line in Profiles(table()).lines(view)}
    sent = {trace["name"]: trace["y"]["floats"] for trace in pane.plot.figure["data"]}  # what the browser has
    assert pane.play.value == pane.step.index
    for scheme in SCHEMES:
        shown = np.frombuffer(sent.get(scheme, b""))
        assert shown.tolist() == (lines[scheme].values.tolist() if scheme in lines else [])
        assert drawn(pane.figure, scheme) == shown.tolist()
