"""The explorer without a browser: every control changes the plot's data as it says, whatever the table lacks."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from figures_helpers import SCHEMES, activation, empty, one_run, table

import normlab
from normlab.errors import NormlabError
from normlab.labels import METRICS
from normlab.profiles import Profiles
from normlab.widgets import NormExplorer
from normlab.widgets.pane import ABSOLUTE, RELATIVE


@pytest.fixture
def explorer() -> NormExplorer:
    return NormExplorer(table())


def drawn(figure: object, scheme: str) -> list[float]:
    (trace,) = [t for t in figure.data if t.name == scheme]  # type: ignore[attr-defined]
    return list(trace.y) if trace.visible else []


def expected(scheme: str, depth: int, step: int) -> list[float]:
    return [1.01 * activation(scheme, layer, step) for layer in range(depth + 1)]  # seeds add 0, 1 and 2 per cent


def test_it_opens_on_the_deepest_model_after_training(explorer: NormExplorer):
    for scheme in SCHEMES:
        assert drawn(explorer.figure, scheme) == pytest.approx(expected(scheme, 4, 20))
    assert explorer.figure.layout.yaxis.type == "log"


def test_the_sliders_move_the_lines(explorer: NormExplorer):
    pane = explorer.panes[0]
    pane.step.value = 0
    assert drawn(explorer.figure, "bhyt") == pytest.approx(expected("bhyt", 4, 0))
    assert "before training" in explorer.figure.layout.title.text
    pane.depth.value = 2
    assert drawn(explorer.figure, "bhyt") == pytest.approx(expected("bhyt", 2, 0))
    assert tuple(explorer.figure.layout.xaxis.range) == (0, 2)
    pane.play.value = 1
    assert pane.step.value == 10 and drawn(explorer.figure, "lns") == pytest.approx(expected("lns", 2, 10))


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
    explorer.panes[0].put.value = RELATIVE
    line = expected("lns", 4, 20)
    assert drawn(explorer.figure, "lns") == pytest.approx([value / line[1] for value in line])
    explorer.panes[0].put.value = ABSOLUTE
    assert drawn(explorer.figure, "lns") == pytest.approx(line)


def test_against_a_reference_shows_paired_ratios_with_their_interval(explorer: NormExplorer):
    explorer.panes[0].put.value = "pre_rmsnorm"
    ratio = [a / b for a, b in zip(expected("bhyt", 4, 20), expected("pre_rmsnorm", 4, 20), strict=True)]
    assert drawn(explorer.figure, "bhyt") == pytest.approx(ratio)
    assert drawn(explorer.figure, "pre_rmsnorm") == pytest.approx([1.0] * 5)
    (line,) = [t for t in explorer.figure.data if t.name == "bhyt"]
    # Seeds scale both schemes alike, so the pairs agree and the interval closes.
    low, high = (float(part) for part in line.text[-1].removeprefix("<br>").split(",")[0].split(" to "))
    assert low == high == pytest.approx(ratio[-1], rel=1e-3)
    assert "paired by seed" in explorer.figure.layout.yaxis.title.text


def test_bands_axis_theme_and_published_values_can_be_switched(explorer: NormExplorer):
    pane = explorer.panes[0]
    bands = {t.name: t for t in explorer.figure.data}
    assert bands["bhyt band"].visible and max(bands["bhyt band"].y) == pytest.approx(1.02 * activation("bhyt", 4, 20))
    pane.band.value = False
    assert not bands["bhyt band"].visible
    pane.log.value = False
    assert explorer.figure.layout.yaxis.type == "linear" and explorer.figure.layout.yaxis.tickmode == "auto"
    pane.papers.value = True
    assert sorted(bands["published"].y) == [139, 366, 704]
    light = explorer.figure.layout.template.layout.paper_bgcolor
    explorer.dark.value = True
    assert explorer.figure.layout.template.layout.paper_bgcolor != light
    assert bands["pre_rmsnorm"].line.color != "#000000"


def test_two_views_stand_side_by_side_and_do_not_disturb_each_other(explorer: NormExplorer):
    explorer.compare.click()
    first, second = explorer.panes
    second.step.value = 0
    assert drawn(first.figure, "bhyt") == pytest.approx(expected("bhyt", 4, 20))
    assert drawn(second.figure, "bhyt") == pytest.approx(expected("bhyt", 4, 0))
    explorer.compare.click()
    assert len(explorer.panes) == 1


def test_the_code_it_gives_makes_the_same_figure(explorer: NormExplorer, monkeypatch: pytest.MonkeyPatch):
    pane = explorer.panes[0]
    pane.depth.value, pane.step.value, pane.put.value, pane.band.value = 2, 10, "lns", False
    pane.schemes["pre_rmsnorm"].value = False
    monkeypatch.setattr(normlab, "load_runs", lambda path: table(), raising=False)
    lines = explorer.code().splitlines()
    assert len(lines) == 3
    names: dict[str, object] = {}
    exec("\n".join([*lines[:2], "figure = " + lines[2]]), names)
    made = names["figure"]
    for scheme in SCHEMES[1:]:
        assert drawn(made, scheme) == drawn(explorer.figure, scheme)
    assert made.layout.yaxis.range == explorer.figure.layout.yaxis.range  # type: ignore[attr-defined]


def test_the_view_is_exported_as_numbers(explorer: NormExplorer, tmp_path: Path):
    explorer.folder = tmp_path / "new"
    path = explorer.export("csv")
    assert path is not None
    numbers = pd.read_csv(path)
    assert len(numbers) == 5 * 5 and set(numbers["seeds"]) == {3} and set(numbers["depth"]) == {4}
    assert numbers[numbers["scheme"] == "bhyt"]["value"].tolist() == pytest.approx(expected("bhyt", 4, 20))
    with pytest.raises(NormlabError, match="choose png, svg or csv"):
        explorer.export("gif")


def test_an_image_without_a_browser_is_one_line(explorer: NormExplorer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("normlab.widgets.explorer.image_bytes", lambda *args: None)
    assert explorer.export("png") is None and "Chrome" in explorer.said.value


def test_the_view_is_exported_as_an_image(explorer: NormExplorer, tmp_path: Path, chromium: str):
    explorer.folder = tmp_path
    path = explorer.export("svg")
    assert path is not None and "Pre-LN" in path.read_text()


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (empty(), "no run has been trained yet"),
        (one_run("bhyt")[lambda t: t["site"] == "model"], "No layer was measured"),
    ],
    ids=["empty", "no_layers"],
)
def test_with_nothing_to_show_it_says_so(runs: pd.DataFrame, said: str):
    (figure,) = NormExplorer(runs).children
    assert said in figure.layout.annotations[0].text


def test_it_shows_what_there_is_and_says_what_is_missing():
    runs = pd.concat(
        [one_run("pre_rmsnorm"), one_run("lns", status="diverged"), one_run("dyt", depth=2).assign(value=np.nan)],
        ignore_index=True,
    )
    explorer = NormExplorer(runs)
    assert drawn(explorer.figure, "pre_rmsnorm") and drawn(explorer.figure, "lns") == []
    said = explorer.panes[0].status.value
    assert "LNS: diverged, nothing measured at step 20" in said and "DyT: not trained at depth 4" in said
    explorer.panes[0].step.value = 0
    assert len(drawn(explorer.figure, "lns")) == 5
    explorer.panes[0].depth.value = 2
    assert "LNS" in explorer.figure.layout.annotations[0].text


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
                    pane.put.value = str(random.choice([ABSOLUTE, RELATIVE, "bhyt"]))
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
    for scheme in SCHEMES:
        shown = [float(v) for v in drawn(pane.figure, scheme)]
        assert shown == pytest.approx(lines[scheme].values.tolist() if scheme in lines else [])
