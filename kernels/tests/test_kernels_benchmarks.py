"""The benchmark runs every section to its end, at sizes next to nothing, and its tables can be drawn."""

from __future__ import annotations

import contextlib
import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_harness import DEVICE, KERNELS

pytest.importorskip("normlab", reason="two sections need normlab's models: pip install -e .")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import measure  # noqa: E402
import models  # noqa: E402
import peers  # noqa: E402
import run  # noqa: E402

ROWS_SHAPES, LINEAR_SHAPES = run.rows_shapes, run.linear_shapes  # before the fixture below makes them tiny
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the benchmark itself is run")


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "rows_shapes", lambda device: iter([(8, 32), (4, 48)]))
    monkeypatch.setattr(run, "linear_shapes", lambda device: iter([(8, 16)]))
    monkeypatch.setattr(run, "worth_compiling", lambda *shape: False)
    monkeypatch.setattr(run, "copy_bandwidth", lambda clock: 10.0)
    monkeypatch.setattr(run, "settle", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    size = {"depth": 1, "width": 64, "length": 4, "batch": 1, "prompt": 2}
    monkeypatch.setattr(models, "shape", lambda device: size)


def tables(tmp_path: Path, *sections: str, minutes: str = "5") -> dict[str, list[dict[str, str]]]:
    options = ["--device", "cpu", "--seconds", "0", "--minutes", minutes, "--out", str(tmp_path)]
    run.main([*options, "--sections", *sections])
    found = {}
    for section in sections:
        (path,) = tmp_path.glob(f"{section}_cpu_*.csv")
        with path.open(newline="") as file:
            found[section] = list(csv.DictReader(file))
    return found


def assert_timed(rows: list[dict[str, str]]) -> None:
    assert rows
    for row in rows:
        assert not row["note"], row
        assert float(row["microseconds"]) > 0, row


@pytest.mark.skipif(KERNELS, reason="thousands of calls, too slow in the interpreter")
def test_every_section_runs_to_its_end_and_can_be_drawn(tmp_path: Path) -> None:
    import normlab

    found = tables(tmp_path, *run.SECTIONS)
    for rows in found.values():
        assert_timed(rows)
    rows = found["rows"]
    assert {row["function"] for row in rows} == set(peers.FUNCTIONS)
    assert {(row["function"], row["pass"]) for row in rows if row["peer"] == "normlab"} == {
        (name, direction) for name in peers.FUNCTIONS for direction in ("forward", "backward", "both")
    }
    for row in rows:
        units = {"forward": 0, "backward": 1, "both": 2}[row["pass"]]
        function = peers.FUNCTIONS[row["function"]]
        expected = (function.forward_rows, function.backward_rows, function.forward_rows + function.backward_rows)
        assert int(row["floor_bytes"]) == expected[units] * int(row["rows"]) * int(row["width"]) * 4
    assert {row["function"] for row in found["step"]} == set(normlab.SCHEMES)
    assert {row["peer"] for row in found["step"]} >= {"normlab", "eager", "torch"}
    assert {row["rows"] for row in found["generate"]} == {"1", "8", "64"}

    pytest.importorskip("plotly")
    import plot

    plot.main([str(tmp_path)])
    assert {path.name.split("_")[0] for path in tmp_path.glob("*.html")} == set(run.SECTIONS)


@pytest.mark.kernels
def test_the_kernels_run_under_the_clock_too_and_the_fused_product_is_weighed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tables(tmp_path, "linear")["linear"]
    assert_timed(rows)
    assert {run.FUSED, run.UNFUSED} <= {row["function"] for row in rows}
    assert "for ladder.FUSION_WINS: 'cpu': (" in capsys.readouterr().out


def test_a_section_out_of_time_says_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tables(tmp_path, *run.SECTIONS, minutes="1e-9")
    said = capsys.readouterr().out
    for section, rows in found.items():
        assert rows == []
        assert f"{section}: stopped before " in said


def test_the_clock_of_a_gpu_takes_the_median_of_events_and_the_peak_above_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for the device: what is timed, and in which order."""
    order: list[str] = []
    spans = iter([9.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 4.0, 5.0, 6.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, end: Event) -> float:
            return next(spans)

    class Flush:
        def zero_(self) -> None:
            order.append("flush")

    held = iter([5_000_000])
    for name, value in {
        "Event": Event,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: next(held),
        "max_memory_allocated": lambda: 7_500_000,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: order.append("replay")),
        "graph": lambda graph: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    clock = measure.Clock(torch.device("cpu"), 0.0)
    clock.device, clock.flush = torch.device("cuda"), Flush()  # type: ignore[assignment]
    assert clock.microseconds(lambda: order.append("call")) == 3000.0
    assert order == ["call"] * 3 + ["flush", "event", "call", "event"] * 10
    assert clock.peak_megabytes(lambda: None) == 2.5
    order.clear()
    measure.graph_of(lambda: order.append("call"), 3)()
    assert order == ["call", "call", "call", "replay"]


def test_an_error_of_our_own_ends_the_benchmark_and_a_peers_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        raise KeyError("x")

    monkeypatch.setattr(peers, "FUNCTIONS", {"rms_norm": peers.FUNCTIONS["rms_norm"]})
    monkeypatch.setattr(run, "rows_shapes", lambda device: iter([(2, 4)]))
    monkeypatch.setattr(peers, "_liger", lambda name: broken)
    notes = [row["note"] for row in tables(tmp_path, "rows")["rows"] if row["peer"] == "liger"]
    assert notes == ["KeyError: 'x'"]
    monkeypatch.setitem(peers.OURS, "rms_norm", broken)
    with pytest.raises(KeyError):
        tables(tmp_path, "rows")


def test_any_number_of_formulas_can_be_compiled_one_after_another() -> None:
    """PyTorch refuses the ninth version of one piece of code, and the formulas are one."""
    for name in peers.FUNCTIONS:
        arguments = peers.arguments(name, 2, 4, torch.float32, torch.device("cpu"))
        expected = peers.formula(name)(arguments)
        call = peers.compiled_formula(name, backend="eager")
        torch.testing.assert_close(call(arguments), expected)
        torch.testing.assert_close(run._no_grad(call, arguments), expected)


def test_the_sections_fit_into_eight_minutes() -> None:
    assert sum(run.MINUTES.values()) <= 7.0  # the rest is for starting, and for the call that is running at the end
    assert set(run.MINUTES) == set(run.SECTIONS)


def test_the_shapes_on_a_gpu_span_the_claim() -> None:
    shapes = set(ROWS_SHAPES(torch.device("cuda")))
    assert {rows for rows, _ in shapes} == {4096, 8192, 16_384, 32_768}
    assert {width for _, width in shapes} == {1024, 2048, 4096, 8192, 16_384, 32_768}
    assert {width for _, width in LINEAR_SHAPES(torch.device("cuda"))} == {1024, 2048, 4096, 8192}
