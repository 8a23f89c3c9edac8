"""The benchmark goes through its plan on a stand-in for a GPU, whatever fails on the way, and loses no row."""

from __future__ import annotations

import csv
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_harness import DEVICE

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fused_product  # noqa: E402
import measure  # noqa: E402
import peers  # noqa: E402
import plan  # noqa: E402
import run  # noqa: E402
import sections  # noqa: E402
import tables  # noqa: E402

# What our kernels compute for it is tested in test_kernels_launches.py.
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the benchmark itself is run"),
    pytest.mark.once,
]
SOME = ("rms_norm", "add_bhyt", "dyt", "row_moments", plan.FUSED, plan.UNFUSED)


def rows_of(*wanted: str, kind: str = "cuda") -> list[plan.Planned]:
    """The rows of a plan's sections at the first of its shapes."""
    rows = plan.plan(kind, wanted)
    first = {section: next(row for row in rows if row.section == section) for section in wanted}
    return [row for row in rows if (row.rows, row.width) == (first[row.section].rows, first[row.section].width)]


def read(out: Path, section: str) -> dict[tuple[str, ...], tables.Row]:
    (path,) = out.glob(f"{section}_*.csv")
    return tables.Table(path).rows


def explode(*_: object) -> object:
    raise KeyError("x")


def test_every_row_of_the_plan_is_measured_or_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One peer is missing, one raises when built, and so does one function of our own when called."""
    monkeypatch.setitem(sys.modules, "quack", None)
    monkeypatch.setitem(peers.BUILDERS, "liger", explode)
    monkeypatch.setitem(peers.OURS, "dyt", explode)
    rows = [row for row in rows_of("rows", "linear", "decode") if row.peer != "compile" and row.function in SOME]
    rows += rows_of("step")[:2]
    assert run.measure_all(measure.Fake(), rows, tmp_path, 1e6) == run.FAILED
    assert "for linear_choices.FUSION_WINS: ()" in capsys.readouterr().out
    for section in ("rows", "linear", "decode", "step"):
        kept = read(tmp_path, section)
        assert len(kept) == len([row for row in rows if row.section == section])
        for row in kept.values():
            if row["peer"] == "quack":
                assert row["note"].startswith("missing: quack cannot be imported"), row
            elif row["function"].startswith("linear_add") or row["peer"] == plan.TORCH_QUACK:
                assert row["note"].startswith("missing: "), row
            elif row["peer"] == "liger" or (row["function"], row["peer"]) == ("dyt", "normlab"):
                assert row["note"] == "KeyError: 'x'" and not row["microseconds"], row
            else:
                assert tables.is_good(row) and float(row["microseconds"]) > 0, row
            assert all(row[name] for name in ("device", "torch", "triton", "python", "commit", "code", "time")), row
            if section == "rows" and row["microseconds"]:
                moved = peers.rows_moved(row["function"], row["pass"])
                assert int(row["floor_bytes"]) == moved * int(row["rows"]) * int(row["width"]) * 4


def test_a_run_ends_in_time_resumes_and_leaves_out_the_row_at_which_a_process_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("decode")
    died: list[str] = []

    def die(a: object) -> None:
        died.append("here")
        raise SystemExit  # as a killed process, it writes nothing more

    monkeypatch.setitem(peers.OURS, "add_rms_norm", die)
    with pytest.raises(SystemExit):
        run.measure_all(measure.Fake(), rows, tmp_path, 1e6, commit="c")
    begun = [row for row in read(tmp_path, "decode").values() if row["note"] == tables.BEGUN]
    assert [row["function"] for row in begun] == ["add_rms_norm"]
    before = read(tmp_path, "decode")
    run.measure_all(measure.Fake(), rows, tmp_path, rows[0].seconds / 2, commit="c")
    assert "out of time: " in capsys.readouterr().out and read(tmp_path, "decode") == before
    assert run.measure_all(measure.Fake(), rows, tmp_path, 1e6, commit="c") == run.FAILED
    after = read(tmp_path, "decode")
    assert "left out, as the process died at it" in capsys.readouterr().out
    assert len(died) == 1 and len(after) == len(rows)
    kept = [key for key, row in before.items() if tables.is_good(row) or row["note"] == tables.BEGUN]
    assert len(kept) > 1 and all(after[key] == before[key] for key in kept)
    monkeypatch.undo()
    run.measure_all(measure.Fake(), rows, tmp_path, 1e6, again=True, commit="c")
    assert all(tables.is_good(row) for row in read(tmp_path, "decode").values() if row["peer"] == "normlab")


def test_a_row_that_kills_the_process_with_other_software_is_left_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = (row for row in rows_of("decode") if (row.function, row.peer) == ("bhyt", "normlab"))
    died: list[str] = []

    def die(a: object) -> None:
        died.append("here")
        raise SystemExit

    assert run.measure_all(measure.Fake(), [row], tmp_path, 1e6) == run.DONE
    monkeypatch.setitem(peers.OURS, "bhyt", die)
    monkeypatch.setattr(torch, "__version__", "99.0")
    with pytest.raises(SystemExit):
        run.measure_all(measure.Fake(), [row], tmp_path, 1e6)
    assert run.measure_all(measure.Fake(), [row], tmp_path, 1e6) == run.FAILED and len(died) == 1


def test_an_interrupted_row_is_measured_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in rows_of("decode") if row.peer == "normlab"]
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(peers.OURS, "bhyt", lambda a: os.kill(os.getpid(), signal.SIGTERM))
        patch.setattr(run, "plan", lambda *_: rows)
        run.main(["--device", "fake", "--out", str(tmp_path)])
    signal.signal(signal.SIGTERM, handler)
    assert all(tables.is_good(row) for row in read(tmp_path, "decode").values())
    assert run.measure_all(measure.Fake(), rows, tmp_path, 1e6) == run.DONE
    assert len(read(tmp_path, "decode")) == len(rows)


def test_a_good_row_is_replaced_by_a_newer_good_one_only_and_no_line_is_ever_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows_x.csv"
    common = dict.fromkeys(tables.MADE_WITH, "1")
    table = tables.Table(path, common)
    table.add({"function": "a", "microseconds": 1.0})
    table.add({"function": "b", "note": "failed"})
    for microseconds, note in ((2.0, ""), ("", "failed"), (3.0, "no CUDA graph")):
        table.add({"function": "a", "microseconds": microseconds, "note": note})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
        table.add({"function": "c", "microseconds": 9.0})  # the process dies while it writes
    again = tables.Table(path, common)
    first, second = again.rows.values()
    assert (first["function"], first["microseconds"], first["note"]) == ("a", "2.0", "")
    assert (second["function"], second["note"]) == ("b", "failed")
    assert again.earlier({"function": "a"}) == first and again.earlier({"function": "b"})["note"] == "failed"
    for name in tables.MADE_WITH:  # what fails with other software is not that software's earlier time
        other = tables.Table(path, common | {name: "2"})
        assert not other.earlier({"function": "a"})
        other.add({"function": "a", "note": "failed"})
        assert tables.Table(path, common | {name: "2"}).earlier({"function": "a"})["note"] == "failed"
        other.add({"function": "a", "microseconds": 2.0} | common)


def test_a_result_that_is_not_the_formulas_is_a_failure_not_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in rows_of("rows") if (row.function, row.direction) == ("rms_norm", "forward"))
    ours = peers.OURS["rms_norm"]
    for factor, words in ((1.1, "Wrong: the results differ by 0.1"), (float("nan"), "Wrong")):
        monkeypatch.setitem(peers.OURS, "rms_norm", lambda a, factor=factor: ours(a) * factor)
        assert run.measure_row(row, measure.Fake())["note"].startswith(words)


@pytest.mark.parametrize("section", [section for section in plan.SECTIONS if section not in ("host", "compiled")])
def test_on_a_gpu_without_a_triton_that_they_know_our_kernels_are_missing(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain formula would run instead, and its time would stand as ours."""
    device = measure.Fake()
    device.torch = torch.device("cuda")
    monkeypatch.setattr(peers.dispatch, "TRITON", False)
    row = next(row for row in plan.plan("cuda", (section,)) if row.peer in ("normlab", ""))
    assert run.measure_row(row, device)["note"].startswith("missing: the kernels need Triton 3.4 to before 3.")


def test_the_cpus_rows_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tiny(measure.Device):
        backend, steps, seconds = "eager", 2, 0.0

        def sizes(self, *planned: int) -> tuple[int, ...]:
            return tuple(min(8, size) for size in planned)

    rows = [row for row in rows_of("rows", "compiled", kind="cpu") if row.function in SOME]
    rows += rows_of("generate", kind="cpu")[:2]
    run.measure_all(Tiny(), rows, tmp_path, 1e6)
    for section in ("rows", "compiled", "generate"):
        for row in read(tmp_path, section).values():
            assert tables.is_good(row) or row["note"].startswith("missing"), row


def test_a_generation_that_no_graph_takes_keeps_what_was_measured_as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    device = measure.Fake()
    monkeypatch.setattr(sections, "two_models", lambda planned, device: (None, None))
    monkeypatch.setattr(sections, "token_step", lambda model, batch, device: lambda: torch.zeros(9).sum())
    monkeypatch.setattr(device, "graphed", lambda call: torch.zeros(2) @ torch.zeros(3))
    row = run.measure_row(plan.plan("cuda", ("generate",))[0], device)
    assert row["ratio"] > 0 and row["note"].startswith("no CUDA graph, as launched: RuntimeError")


def test_a_generated_token_reads_nothing_that_is_freed_after_it() -> None:
    """A graph of it reads the same addresses at every replay, and memory is returned to the driver in between."""
    pytest.importorskip("normlab", reason="whole models are normlab's")
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    read: list[StorageWeakRef] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.cat.default and args[1:] == (-2,):  # keys or values, and the token's
                read.append(StorageWeakRef(args[0][0].untyped_storage()))
            return function(*args, **(kwargs or {}))

    device = measure.Fake()
    step = sections.token_step(sections.build_model("pre_rmsnorm", "normlab", device), 2, device)
    first = step()
    with Reads():
        torch.testing.assert_close(step(), first)
    assert len(read) == 2 * device.model["depth"] and not any(storage.expired() for storage in read)


def test_a_ratio_is_the_median_of_neighbours_with_its_interval() -> None:
    drift = [100.0 * 1.05**i for i in range(40)]  # of the machine, far more than the difference
    columns = measure.ratios(drift, [1.016 * time for time in drift])
    assert columns["steps"] == 40 and columns["ratio"] == pytest.approx(1.016)
    columns = measure.ratios([1.0] * 40, [float(i) for i in range(40)])
    assert (columns["ratio_low"], columns["ratio_high"]) == (13.0, 26.0)  # the textbook's: ranks 14 and 27 of 40
    assert measure.Device.steps >= 40


def test_the_clock_of_a_gpu_replays_graphs_over_buffers_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the device and for triton.testing: what is captured, and what is timed."""
    testing = pytest.importorskip("triton.testing")
    order: list[str] = []

    class Capture:
        def __init__(self, graph: object, stream: object) -> None:
            assert stream == "ours"

        def __enter__(self) -> None:
            order.append("capture")

        def __exit__(self, *_: object) -> None:
            order.append("captured")

    def do_bench(call: Callable[[], object], rep: int, quantiles: object = None, return_mode: str = "") -> object:
        call()
        return [0.9, 1.0, 1.1] if quantiles else 0.01

    for name, value in {
        "synchronize": lambda: None, "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 5_000_000,
        "max_memory_allocated": lambda: 7_500_000, "graph": Capture,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: order.append("replay")),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(testing, "do_bench", do_bench)
    clock = measure.Cuda.__new__(measure.Cuda)
    clock.properties, clock.stream = SimpleNamespace(L2_cache_size=50 << 20), "ours"
    made = iter("abcdef")

    def make() -> Callable[[], object]:
        name = next(made)
        return lambda: order.append(name)

    columns = clock.time(make, 30 << 20)  # 50 MB of cache, 30 a call: five sets, 120 MB between two uses of one
    start, end = order.index("capture"), order.index("captured")
    assert order[start + 1 : end] == list("abcde") * 20 and order[end + 1 :] == ["replay"]
    assert columns["microseconds"] == pytest.approx(1e3 / 100) and columns["spread"] == pytest.approx(0.2)
    assert columns["eager_microseconds"] == 10.0 and columns["peak_megabytes"] == 2.5


def test_the_fusion_line_asks_for_the_fewest_rows_from_which_a_launch_always_gains() -> None:
    def row(function: str, rows: int, microseconds: float, launch: str = "") -> tables.Row:
        return {"function": function, "launch": launch, "width": 64, "rows": rows, "microseconds": microseconds}

    timed = [row(plan.UNFUSED, rows, 100.0) for rows in (256, 512, 4096)]
    timed += [row(plan.FUSED, 256, 99.9), row(plan.FUSED, 512, 99.0), row(plan.FUSED, 4096, 99.9)]
    assert fused_product.fusion_line(measure.Fake(), timed) == "for linear_choices.FUSION_WINS: ()"
    timed += [row(plan.FUSED, 512, 95.0, "flatten=1"), row(plan.FUSED, 4096, 80.0, "flatten=1")]
    said = fused_product.fusion_line(measure.Fake(), timed)
    assert "rows=512" in said and "flatten=True" in said and said.count("FusionWin(") == 1


def test_the_fused_product_is_taken_where_the_shipped_table_says() -> None:
    table = tables.Table(Path(__file__).parents[2] / "data" / "bench" / "linear_nvidia_h200.csv")
    said = fused_product.fusion_line(SimpleNamespace(name="NVIDIA H200"), table.rows.values())
    assert said == f"for linear_choices.FUSION_WINS: {fused_product.linear_choices.FUSION_WINS}"


def test_any_number_of_formulas_can_be_compiled_one_after_another() -> None:
    """PyTorch refuses the ninth version of one piece of code, and the formulas are one."""
    for name in plan.PEERS["compile"]:
        arguments = peers.arguments(name, 2, 4, torch.float32, torch.device("cpu"))
        call = peers.compiled_formula(name, backend="eager")
        torch.testing.assert_close(call(arguments), peers.formula(name)(arguments))


def test_the_plan_covers_the_claims_and_every_function_and_scheme() -> None:
    rows = plan.plan("cuda")
    assert len(rows) == len({tables.key_of(row.columns()) for row in rows})
    norms = [row for row in rows if row.section == "rows"]
    assert {row.width for row in norms} == {1024, 2048, 4096, 8192, 16_384, 32_768}
    assert {row.function for row in norms} == {*peers.FUNCTIONS, "row_moments"} == set(peers.OURS)
    hosts = [{row.peer for row in plan.plan(kind, ("host",))} for kind in ("cuda", "cpu")]
    assert hosts == [set(), {"normlab", "liger"}]  # on a CPU PyTorch would compute; a GPU's rows have the host's time
    assert rows == sorted(rows, key=lambda row: (row.priority, plan.SECTIONS.index(row.section)))
    sections = [list(dict.fromkeys(row.section for row in rows if row.priority == which)) for which in (0, 1)]
    assert sections == [["rows", "launch", "decode"], ["rows", "launch", "linear", "step", "generate"]]
    schemes = pytest.importorskip("normlab.schemes", reason="whole models are normlab's")
    assert {row.function for row in plan.plan("cuda", ("step",))} == set(schemes.STUDIED)


def test_what_is_open_comes_first() -> None:
    first = [row for row in plan.plan("cuda") if row.priority == 0]
    calls = {(row.section, row.function, row.direction, row.width) for row in first if row.peer == "normlab"}
    for (function, direction), by_width in plan.SLOW_LAUNCHES.items():
        assert {(section, function, direction, width) for section in ("rows", "launch") for width in by_width} <= calls
    peers_of = {row.peer for row in first if (row.section, row.function) == ("rows", "rms_norm")}
    assert peers_of == {"normlab", "torch", plan.TORCH_QUACK}
    assert any((row.function, row.peer, row.direction) == ("bhyt_carried", "compile", "forward") for row in first)
    decoded = {(row.function, row.peer): row.rows for row in first if row.section == "decode"}
    assert {("bhyt", "normlab"), ("bhyt", "released")} <= decoded.keys()
    assert {row.rows for row in first if row.section == "decode"} == {1, 4, 16}


def test_a_launch_with_two_names_is_timed_once() -> None:
    launches = {
        (row.function, row.width, row.launch) for row in plan.plan("cuda", ("launch",)) if row.direction == "backward"
    }
    assert ("bhyt", 8192, "") in launches and ("bhyt", 8192, "resident_warps=8") not in launches  # 16 warps a program
    assert ("bhyt", 2048, "resident_warps=8") in launches
    assert ("dyt", 2048, "block=1024 rows=2") not in launches  # the one that is chosen


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_pytorchs_rms_norm_runs_in_quacks_kernels_only_where_that_is_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for QuACK's, registered as PyTorch does: from 2.13 on it takes them by itself."""
    pytest.importorskip("torch.backends.python_native")
    from torch._native import registry

    for name in ("_graphs", "_dsl_name_to_lib_graph", "_op_symbol_to_lib_graph", "_dispatch_key_to_lib_graph"):
        monkeypatch.setattr(registry, name, {})
    row = next(row for row in rows_of("rows") if row.peer == plan.TORCH_QUACK)
    assert run.measure_row(row, measure.Fake())["note"].startswith("missing: PyTorch 2.")

    def quack(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(x, 7.0), x.new_ones(len(x), 1)

    monkeypatch.setattr(peers, "RMS_NORM", peers.RMS_NORM[:1])  # a CPU has no kernel of the other
    registry.register_op_override("cutedsl", "aten", *peers.RMS_NORM, "CPU", cond=lambda *_: True, impl=quack)
    registry._register_all_overrides()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert run.measure_row(row, measure.Fake())["note"].endswith("has QuACK's kernels for Hopper and Blackwell")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    arguments = peers.arguments("rms_norm", 2, 4, torch.float32, torch.device("cpu"))
    try:
        for on in (True, False, True, False):
            peers.vendored_quack(on)
            assert bool((peers.build("torch", "rms_norm")(arguments) == 7.0).all()) == on
    finally:
        peers.vendored_quack(False)


def test_a_row_is_of_other_code_when_what_it_is_timed_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"#" * (path in changed))
    before = {section: run.code_of(section) for section in ("rows", "step")}
    for name in ("fused_product", "host", "measure", "peers", "released", "sections"):
        changed[:] = [run.HERE / f"{name}.py"]
        assert all(run.code_of(section) != code for section, code in before.items()), name
    for name in ("run", "plan", "tables"):
        changed[:] = [run.HERE / f"{name}.py"]
        assert all(run.code_of(section) == code for section, code in before.items()), name
    changed[:] = [run.ROOT / "normlab" / "models" / "block.py"]
    if changed[0].exists():
        assert run.code_of("rows") == before["rows"] and run.code_of("step") != before["step"]


def test_tests_that_do_not_end_leave_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survived, tests = tmp_path / "survived", tmp_path / "pytest"
    tests.write_text(f"#!/bin/sh\n(sleep 1; touch {survived}) &\nwait\n")
    tests.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tests))
    assert run.run_tests(tmp_path, 0.3) == run.FAILED
    time.sleep(1.2)
    assert not survived.exists()


def test_without_a_gpu_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device", "cuda", "--out", str(tmp_path)]) == 2 and not list(tmp_path.iterdir())
    said = capsys.readouterr().err
    assert said.startswith("no CUDA device: PyTorch ") and said.count("\n") == 1


def test_no_made_up_table_is_among_those_that_are_kept() -> None:
    kept = list((Path(__file__).parents[2] / "data" / "bench").glob("*_*.csv"))
    assert kept and not [path.name for path in kept if "fake" in path.name]
    with next(path for path in kept if path.name.startswith("rows_cpu")).open(newline="") as file:
        assert {row["device"] for row in csv.DictReader(file)} == {"cpu_1_thread"}
