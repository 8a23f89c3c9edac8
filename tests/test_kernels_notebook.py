"""The kernels' notebook runs, counts its floors right, and says plainly what was not timed."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from notebook_helpers import NOTEBOOKS, execute, figures_in, printed, widgets_in

BENCH = NOTEBOOKS.parent / "data" / "bench"
NO_GPU = "Nothing in these tables was timed on a GPU"
# A reader's move of the widget's controls, and what its plot shows then.
MOVE = """import json

call.value, shape.value, part.value = "add_rms_norm", "1024 x 512", "forward"
chain = {trace.name: [list(trace.x), list(trace.y)] for trace in bars.figure.data}
call.value = "layer_norm"
print("MOVED", json.dumps([chain, {trace.name: [list(trace.x), list(trace.y)] for trace in bars.figure.data}]))"""


def test_the_kernels_notebook_shows_floors_registers_and_times(tmp_path: Path):
    notebook = execute("05_kernels", tmp_path, then=MOVE, BENCH=str(BENCH))
    registers, times, bars = figures_in(notebook)[:3]
    assert {trace["name"] for trace in registers["data"]} >= {"bhyt", "rms_norm", "layer_norm", "add_bhyt"}
    assert {trace["name"] for trace in times["data"]} >= {"normlab", "eager", "compile", "torch"}
    said = printed(notebook)
    assert "u = 134 MB" in said and "spilled: 0" in said
    assert "9 norms folded" in said and "unfolded: every bit is back" in said
    for line in said.splitlines():
        if "decoded token by token" in line or "norms folded" in line:
            assert float(line.split(": ")[1].split()[0]) < 1e-5
    assert "1.37 times the time of fused RMSNorm here, 1.29 of PyTorch's, 1.13 of eager RMSNorm" in said
    gpu_tables = [path for path in BENCH.glob("rows_*.csv") if "cpu" not in path.name]
    assert bool(gpu_tables) != ("Nothing has been timed on a GPU yet" in said) and bool(gpu_tables) != (NO_GPU in said)

    (widget,) = widgets_in(notebook)
    assert "PlotWidget(" in widget
    assert {trace["name"] for trace in bars["data"]} == {"bytes", "time", "floor"}
    (moved,) = [line.removeprefix("MOVED ") for line in said.splitlines() if line.startswith("MOVED ")]
    chain, alone = json.loads(moved)
    u = 1024 * 512 * 4 / 1e6
    assert chain["bytes"] == [["one call", "two kernels"], pytest.approx([4 * u, 5 * u])]
    assert alone["bytes"] == [["one call"], pytest.approx([2 * u])]
    table = pd.read_csv(BENCH / "rows_cpu_1_thread.csv")
    table = table[(table["pass"] == "forward") & (table["rows"] == 1024) & (table["width"] == 512)]
    for shown, call in ((chain, "add_rms_norm"), (alone, "layer_norm")):
        rows = table[table["function"] == call]
        assert shown["time"] == [list(rows["peer"]), list(rows["microseconds"])] and len(rows) > 1
        floor = rows["floor_bytes"] / rows["copy_gigabytes_per_second"] / 1e3
        assert shown["floor"] == [list(rows["peer"]), pytest.approx(list(floor))]


def test_the_kernels_notebook_tells_a_device_that_traffic_rules_from_one_where_it_does_not(tmp_path: Path):
    """A made-up GPU at nine tenths of the copy rate, beside the CPU as it was measured."""
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "aot.csv").write_bytes((BENCH / "aot.csv").read_bytes())
    table = pd.read_csv(BENCH / "rows_cpu_1_thread.csv")
    table.to_csv(bench / "rows_cpu_1_thread.csv", index=False)
    copy = table["floor_bytes"] / table["copy_gigabytes_per_second"] / 1e3
    table.assign(device="Made-up GPU", microseconds=copy / 0.9, share_of_copy=0.9).to_csv(
        bench / "rows_gpu.csv", index=False
    )
    step = {"device": "Made-up GPU", "section": "step", "function": "bhyt", "peer": "normlab", "rows": 8192}
    step |= {"against": "pre_rmsnorm normlab", "steps": 40, "microseconds": 9.0, "note": None}
    interval = {"ratio": [1.016, None], "ratio_low": [1.012, None], "ratio_high": [1.02, None]}
    pd.DataFrame(step | interval).to_csv(bench / "step_gpu.csv", index=False)
    notebook = execute("05_kernels", tmp_path, BENCH=str(bench))
    said = printed(notebook)
    assert NO_GPU not in said and "Nothing has been timed on a GPU yet" not in said
    took = "bhyt by normlab takes 1.016 (1.012 to 1.020) times as long as pre_rmsnorm normlab, 40 steps"
    assert said.count("Made-up GPU, step, 8192 tokens") == 1 and took in said
    verdicts = [line.strip() for line in said.splitlines() if line.strip().startswith("The traffic ")]
    assert [line.split(" the time here")[0] for line in verdicts] == ["The traffic does NOT set", "The traffic sets"]
    gpu = said[said.rindex("Made-up GPU:") :]
    assert "1.0 times the time for the same bytes" in gpu and "normlab 90% to 90%" in gpu
    ratio = table[(table["pass"] == "both") & (table["peer"] == "normlab") & (table["width"] == 2048)]
    ratio = ratio[ratio["floor_bytes"] == ratio["floor_bytes"].min()]["microseconds"]
    assert f"{ratio.max() / ratio.min():.1f} times the time for the same bytes" in said
