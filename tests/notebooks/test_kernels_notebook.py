"""The kernels' notebook runs, counts its floors right, and says plainly what was not timed."""

import json

import pandas as pd
import pytest
from notebook_helpers import NOTEBOOKS, figures_in, once_and_twice, printed, row_of, rows_in, widgets_in

BENCH = NOTEBOOKS.parent / "data" / "bench"
# A reader's move of the widget's controls, and what its plot shows then.
MOVE = """import json

steer.call.value, steer.shape.value, steer.part.value = "add_rms_norm", "1024 x 512", "forward"
chain = {trace.name: [list(trace.x), list(trace.y)] for trace in steer.figure.data}
steer.call.value = "layer_norm"
print("MOVED", json.dumps([chain, {trace.name: [list(trace.x), list(trace.y)] for trace in steer.figure.data}]))"""


@once_and_twice
def test_the_kernels_notebook_shows_floors_registers_and_times(tmp_path, executed):
    notebook = executed("05_kernels", tmp_path, then=MOVE, BENCH=str(BENCH))
    registers, times, shares, bars = figures_in(notebook)[:4]
    assert {trace["name"] for trace in registers["data"]} >= {"bhyt", "rms_norm", "layer_norm", "add_bhyt"}
    for figure in (times, shares):
        assert {trace["name"] for trace in figure["data"]} >= {"normlab", "eager", "compile", "torch"}
    assert "u = 134 MB" in printed(notebook)
    assert row_of(notebook, "no kernel spills registers")[-1] == "holds"
    for how in ("decoded token by token", "9 norms folded"):
        assert float(row_of(notebook, how)[1]) < 1e-5
    assert row_of(notebook, "unfolded again")[1:] == ["0e+00", "True"]
    assert row_of(notebook, "cpu_1_thread", "1024 x 128", "0.46")[3:] == ["1.37", "1.29", "1.13"]
    gpu_tables = [path for path in BENCH.glob("rows_*.csv") if "cpu" not in path.name]
    untested = [row for row in rows_in(notebook) if row[-1] == "not tested"]
    assert bool(gpu_tables) != (len(untested) == 1) and all(row[2] == "a GPU" for row in untested)
    assert bool(gpu_tables) != ("Nothing was timed" in str(figures_in(notebook)[4]["layout"]))

    (widget,) = widgets_in(notebook)
    assert "KernelTimes(" in widget
    assert {trace["name"] for trace in bars["data"]} == {"bytes", "time", "floor"}
    (moved,) = [line.removeprefix("MOVED ") for line in printed(notebook).splitlines() if line.startswith("MOVED ")]
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
