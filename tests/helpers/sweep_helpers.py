"""A sweep without training: workers that write runs at once, and a small preset."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training_helpers import TINY, write_run

from normlab import runs
from normlab.training import sweep as sweep_module
from normlab.training.config import TrainConfig
from normlab.training.grids import Part, Preset
from normlab.training.rates import Rates
from normlab.training.sweep import sweep


class InProcess:
    """In place of the workers: writes runs at once and remembers the order.

    `losses`: final held-out loss by learning rate, or a function of the configuration. `failing`: which runs raise.
    """

    def __init__(
        self,
        losses: dict[float, float | None] | Callable[[TrainConfig], float | None] | None = None,
        failing: Callable[[TrainConfig], bool] = lambda config: False,
    ) -> None:
        table = losses or {}
        self.loss = table if callable(table) else lambda config: table.get(config.lr, 2.0)
        self.failing = failing
        self.started: list[TrainConfig] = []

    def __call__(self, configs: Sequence[TrainConfig], out: Path, workers: Any, cache_dir: Any) -> Iterator[tuple]:
        for config in configs:
            self.started.append(config)
            if self.failing(config):
                yield config, RuntimeError("it broke\nin many lines")
            else:
                yield config, runs.read_run(write_run(config, out, self.loss(config)))


def quiet_sweep(what: Any, tmp_path: Path, **options: Any) -> sweep_module.SweepResult:
    return sweep(what, tmp_path / "out", cache_dir=tmp_path / "cache", progress=False, **options)


def small_preset(text: Path, **fields: Any) -> Preset:
    shared = {name: value for name, value in TINY.items() if name != "depth"} | {"corpus": str(text)}
    defaults = dict(
        parts=(Part({1: 2, 2: 2, 4: 1}, ("lns", "bhyt")),),
        rate=Rates((0.1, 0.2, 0.4), (2,)),
    )
    return Preset("test", **{**defaults, "fields": shared, **fields})
