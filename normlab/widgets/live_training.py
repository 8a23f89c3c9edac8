"""TrainTheatre: schemes train side by side, and their loss and layers are seen to grow."""

from __future__ import annotations

import html
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from normlab.errors import NormlabError
from normlab.figures import theme as look
from normlab.figures.training import Progress, training_progress
from normlab.probes.metrics import metric_row
from normlab.training.config import PROBE_METRICS, TrainConfig
from normlab.training.live import LIVE, READY, BackgroundRun, Point
from normlab.widgets.plot import PlotWidget

_REST = 0.3  # seconds between two drawings: a page keeps up, and training is not slowed
_CHECKPOINTS = 50  # steps that a killed kernel costs at most


class TrainTheatre(PlotWidget):
    """Schemes train side by side in the background, each in a process; the kernel stays free.

    Left: training and held-out loss by step. Right: the layer profiles at the latest step that all have measured,
    dotted before training.
    Stop acts after the step in progress. The results are runs like those of `normlab.train`, in directory `out`. A
    stopped one resumes from its checkpoint, also in another session.

    Args:
        schemes: which to train, usually two; each takes a core.
        out: directory of runs.
        recipe: fields of `TrainConfig` for all of them, such as depth, width and steps.
        cache_dir: for prepared corpora.

    Raises:
        NormlabError: no scheme, one twice, or a recipe that `TrainConfig` refuses.
    """

    def __init__(
        self,
        schemes: Sequence[str],
        out: str | Path = "runs",
        recipe: Mapping[str, Any] | None = None,
        *,
        cache_dir: str | Path | None = None,
    ) -> None:
        if not schemes or len(set(schemes)) != len(schemes):
            raise NormlabError(f"schemes are {list(schemes)}: name one or more, each once")
        fields = {"checkpoint_every": _CHECKPOINTS} | dict(recipe or {})
        self._closed = threading.Event()
        self._drawing_thread: threading.Thread | None = None
        self.runs = {name: BackgroundRun(_config(name, fields), out, cache_dir=cache_dir) for name in schemes}
        self._depth = next(iter(self.runs.values())).config.depth
        super().__init__(self._drawing, self._make_controls(), describe=self._sentences)
        self.metric.observe(self.redraw, names="value")

    def _make_controls(self) -> widgets.Widget:
        def button(text: str, icon: str, act: Callable[[], None]) -> widgets.Button:
            made = widgets.Button(description=text, icon=icon, layout=widgets.Layout(width="auto"))
            made.on_click(lambda _: act())
            return made

        self.go = button("start", "play", self.start)
        self.end = button("stop", "stop", self.stop)
        options = [(f"{metric_row(name).label} ({name})", name) for name in PROBE_METRICS]
        self.metric = widgets.Dropdown(options=options, description="layers:")
        row = [self.go, self.end, self.metric]
        return widgets.HBox(row, layout=widgets.Layout(flex_flow="row wrap"))

    # --- commands ---

    def start(self) -> None:
        """Begin, or resume after a stop. Finished runs stay as they are."""
        if self._closed.is_set():
            raise NormlabError("this theatre is closed: make another, and its runs resume from their checkpoints")
        with self.lock:
            for run in self.runs.values():
                run.start()
        if self._drawing_thread is None:
            self._drawing_thread = threading.Thread(target=self._draw_changes, daemon=True)
            self._drawing_thread.start()
        self.redraw()

    def stop(self) -> None:
        """Checkpoint all runs and end their processes; `start` resumes."""
        with self.lock:
            for run in self.runs.values():
                run.stop()

    def close(self) -> None:
        """End the processes, each at a checkpoint, and the widget."""
        if not hasattr(self, "plot"):  # what was asked for was refused, and there is nothing to end
            return
        self._closed.set()
        self.stop()
        with self.lock:
            for run in self.runs.values():
                run.close()
        if self._drawing_thread is not None and self._drawing_thread is not threading.current_thread():
            self._drawing_thread.join(timeout=5)
        self.plot.close()
        super().close()

    def wait(self, timeout: float | None = None, *, step: int | None = None) -> bool:
        """Block until every run ended or was stopped, or has done `step` steps; False when `timeout` seconds went by
        first. What is shown is up to date then."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not all(run.state not in (READY, *LIVE) or run.step >= (step or math.inf) for run in self.runs.values()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_REST / 3)
            self.redraw()
        return True

    # --- what it shows ---

    def _draw_changes(self) -> None:
        """Draw while something trains."""
        while not self._closed.wait(_REST):
            if any(run.live for run in self.runs.values()):
                self.redraw()

    def _drawing(self, theme: str) -> go.Figure:
        metric = self.metric.value
        site = metric_row(metric).default_site
        profiles = {name: run.points("probe", site, metric) for name, run in self.runs.items()}
        # The latest step at which all runs that have begun were measured.
        measured = [{step for step, _, _ in profile} for profile in profiles.values() if profile]
        step = max(set.intersection(*measured), default=0) if measured else 0
        progress = {name: _progress_of(run, profiles[name], step) for name, run in self.runs.items()}
        return look.themed(training_progress(progress, metric, site, self._depth), theme)

    def _sentences(self) -> str:
        return "<br>".join(_sentence(name, run, self.theme) for name, run in self.runs.items())

    def redraw(self, _: object = None) -> None:
        """Show the runs as they are now."""
        with self.lock:
            runs = self.runs.values()
            for run in runs:
                run.look()
            super().redraw()
            self.go.disabled = not any(run.run is None and not run.live for run in runs)
            self.go.description = "start" if {run.state for run in runs} == {READY} else "continue"
            self.end.disabled = not any(run.live for run in runs)


def _config(scheme: str, fields: Mapping[str, Any]) -> TrainConfig:
    try:
        return TrainConfig(**{**fields, "scheme": scheme})
    except TypeError as error:
        raise NormlabError(f"the recipe is none of TrainConfig: {error}") from None


def _progress_of(run: BackgroundRun, profile: Sequence[Point], step: int) -> Progress:
    start = min((at for at, _, _ in profile), default=0)
    first, last = ([(layer or 0, value) for at, layer, value in profile if at == when] for when in (start, step))
    return Progress(_losses(run, "train"), _losses(run, "eval"), first, last, step, run.levels)


def _losses(run: BackgroundRun, split: str) -> list[tuple[int, float]]:
    return [(step, loss) for step, _, loss in run.points(split, "model", "loss")]


def _sentence(name: str, run: BackgroundRun, theme: str) -> str:
    parts = [run.state.replace("_", " ") + (f": {run.reason}" if run.reason else "")]
    parts.append(f"step {run.step:,} of {run.config.steps:,}")
    for label, split in (("training loss", "train"), ("held out", "eval")):
        parts += [f"{label} {loss:.3f}" for _, loss in _losses(run, split)[-1:]]
    style = look.style_of(name)
    bar = f"<progress max={run.config.steps} value={run.step}></progress>"
    title = f"<b style='color:{look.ink(style.color, theme)}'>{html.escape(style.title)}</b>"
    return f"{title} {bar} {html.escape(', '.join(parts))}"
