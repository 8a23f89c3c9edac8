"""The theatre trains real runs in the background, shows what they measure, and takes its processes with it."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_helpers import FORKS, TINY, ForkedCommand, until

import normlab
from normlab.errors import NormlabError
from normlab.figures.training import MOST_POINTS, Progress, thinned, training_progress
from normlab.training import live
from normlab.widgets import TrainTheatre

pytest_plugins = ["training_fixtures"]
SCHEMES = ["pre_rmsnorm", "bhyt"]


@pytest.fixture(scope="module")
def forks() -> None:
    """The server that has imported everything is up."""
    first = FORKS.Process(target=time.sleep, args=(0,))
    first.start()
    first.join()


@pytest.fixture
def theatre(
    forks: None, text: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TrainTheatre]]:
    monkeypatch.setattr(live, "Popen", ForkedCommand)
    opened = []

    def theatre(**recipe: Any) -> TrainTheatre:
        recipe = TINY | {"corpus": str(text), "probe_every": 10, "eval_every": 10} | recipe
        opened.append(TrainTheatre(SCHEMES, tmp_path / "out", recipe, cache_dir=cache))
        return opened[-1]

    yield theatre
    for each in opened:
        each.close()


def trace(widget: TrainTheatre, name: str) -> Any:
    return next(trace for trace in widget.figure.data if trace.name == name)


def states(widget: TrainTheatre) -> set[str]:
    return {run.state for run in widget.runs.values()}


def test_curves_and_layers_grow_and_every_button_does_what_it_says(theatre):
    widget = theatre(steps=400, checkpoint_every=0)
    assert (widget.go.description, widget.end.disabled) == ("start", True)
    assert all(normlab.SCHEMES[name].title in widget.message.value for name in SCHEMES)
    started = time.perf_counter()
    widget.go.click()
    assert time.perf_counter() - started < 2  # the kernel is free again at once
    assert not widget.end.disabled
    assert widget.wait(60, step=12)
    # It draws by itself, from another thread.
    until(lambda: len(trace(widget, "bhyt train").y) > 0 and 10 in trace(widget, "bhyt held out").x)
    assert list(trace(widget, "bhyt last").x) == [0, 1, 2]
    assert trace(widget, "bhyt last").y != trace(widget, "bhyt first").y
    widget.end.click()
    assert widget.wait(60) and states(widget) == {"stopped"}
    assert not widget.go.disabled and widget.go.description == "continue" and widget.end.disabled
    for name, run in widget.runs.items():
        kept = run.out.glob(f".partial/{run.config.run_id}/checkpoint-*")
        assert [checkpoint.name for checkpoint in kept] == [f"checkpoint-{run.step}"]
        assert list(trace(widget, f"{name} train").x) == list(range(1, run.step + 1))


def test_what_it_shows_in_the_end_are_runs_like_any_other(theatre, tmp_path):
    widget = theatre(steps=20)
    widget.start()
    assert widget.wait(90)
    table = normlab.load_runs(tmp_path / "out")
    assert set(table["scheme"]) == set(SCHEMES) and set(table["step"]) == set(range(21))
    for scheme in SCHEMES:
        own = table[(table["scheme"] == scheme) & (table["mask"] == "all")]
        losses = own[(own["metric"] == "loss") & (own["split"] == "train")]
        assert list(trace(widget, f"{scheme} train").y) == losses["value"].tolist()
        for metric, site in (("token_l2_mean", "block_out"), ("grad_l2_total", "block_in_grad")):
            widget.metric.value = metric
            last = own[(own["metric"] == metric) & (own["site"] == site) & (own["step"] == 20)]
            assert list(trace(widget, f"{scheme} last").y) == last["value"].tolist()
    assert widget.go.disabled and widget.message.value.count("<progress max=20 value=20>") == 2
    assert "step 20" in widget.static().layout.annotations[1].text


def test_one_that_is_ahead_is_shown_at_the_step_that_both_have_measured(theatre):
    widget = theatre(steps=100_000, probe_every=5, eval_every=0)
    widget.start()
    assert widget.wait(60, step=6)
    widget.runs["bhyt"].stop()
    assert widget.runs["bhyt"].wait(60)
    behind = widget.runs["bhyt"].step // 5 * 5
    assert widget.runs["pre_rmsnorm"].wait(60, step=behind + 30)
    widget.redraw()
    for name, run in widget.runs.items():
        then = [value for step, _, value in run.points("probe", "block_out", "token_l2_mean") if step == behind]
        assert list(trace(widget, f"{name} last").y) == then
    assert f"step {behind};" in widget.figure.layout.annotations[1].text


def test_closing_it_ends_its_processes(theatre):
    widget = theatre(steps=100_000, eval_every=0)
    widget.start()
    assert widget.wait(60, step=1)
    workers = [psutil.Process(run.pid) for run in widget.runs.values()]
    widget.close()
    until(lambda: not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers), 20)
    assert widget.comm is None and states(widget) == {"stopped"}
    assert widget._drawing_thread is not None and not widget._drawing_thread.is_alive()
    with pytest.raises(NormlabError, match="is closed: make another"):
        widget.start()


@pytest.mark.slow
def test_controls_moved_from_many_threads_while_it_trains_end_as_they_stand(theatre):
    widget = theatre(steps=60)
    metrics = [value for _, value in widget.metric.options]
    failed: list[BaseException] = []
    widget.start()

    def shake(place: int) -> None:
        try:
            for turn in range(20):
                widget.metric.value = metrics[(turn * 3 + place) % len(metrics)]
                (widget.redraw, widget.start, widget.redraw)[(turn + place) % 3]()
                time.sleep(0.005)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=shake, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    widget.start()
    assert not failed and widget.wait(90) and states(widget) <= {"finished", "not_learned"}
    metric = widget.metric.value
    site = "block_in_grad" if metric.startswith("grad") else "block_out"
    for name, run in widget.runs.items():
        last = [(layer, value) for step, layer, value in run.points("probe", site, metric) if step == 60]
        shown = trace(widget, f"{name} last")
        assert list(zip(shown.x, shown.y, strict=True)) == last


@pytest.mark.usefixtures("own_garbage")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_what_it_cannot_train_is_one_sentence(tmp_path):
    refused = (["bhyt", "bhyt"], {}, "each once"), (SCHEMES, {"layers": 3}, "'layers'"), (SCHEMES, {"depth": 0}, "is 0")
    for schemes, recipe, match in refused:
        with pytest.raises(NormlabError, match=match):
            TrainTheatre(schemes, tmp_path, recipe)
    gc.collect()  # nor is there another word when what was refused is thrown away


def test_a_long_curve_is_thinned_by_means_and_gaps_stay_gaps():
    pairs = [(step, float(step % 2)) for step in range(1, 10_001)]
    few = thinned(pairs)
    assert len(few) <= MOST_POINTS and few[-1][0] == 10_000 and {value for _, value in few[:-1]} <= {0.48, 0.5, 0.52}
    parts = {"first": [(0, 1.0)], "last": [(0, 1.0), (1, 0.0)], "levels": {"unigram_entropy": 4.0}}
    progress = Progress(train=[(1, 5.0), (2, float("nan"))], **parts)
    figure = training_progress({"bhyt": progress}, "token_l2_mean", "block_out", depth=2)
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines["bhyt train"].y) == [5.0, None] and list(lines["unigram entropy"].y) == [4.0, 4.0]
    assert figure.layout.xaxis.range == (0, 20)
    assert figure.layout.yaxis2.type == "linear"
    assert figure.layout.yaxis.range[0] < 4.0 < figure.layout.yaxis.range[1]


def test_the_names_of_lines_and_of_levels_do_not_cover_each_other():
    progress = Progress(held_out=[(0, 6.0), (120, 4.01)], levels={"unigram_entropy": 4.0, "bigram_loss": 3.0})
    figure = training_progress({"bhyt": progress}, "token_l2_mean", "block_out", depth=2)
    (labels,) = [trace for trace in figure.data if trace.name == "labels"]
    places = dict(zip((text.strip() for text in labels.text), labels.y, strict=True))
    assert set(places) == {"BHyT", "unigram", "bigram"} and places["BHyT"] > places["unigram"] > places["bigram"]
    low, high = figure.layout.yaxis.range
    panel = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    assert (places["BHyT"] - places["unigram"]) / (high - low) * panel >= 14.9
