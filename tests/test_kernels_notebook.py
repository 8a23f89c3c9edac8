"""The kernels' notebook runs, counts its floors right, and says plainly what was not timed."""

from __future__ import annotations

from pathlib import Path

from notebook_helpers import NOTEBOOKS, execute, figures_in, printed

BENCH = NOTEBOOKS.parent / "data" / "bench"


def test_the_kernels_notebook_shows_floors_registers_and_times(tmp_path: Path):
    notebook = execute("05_kernels", tmp_path, BENCH=str(BENCH))
    registers, times = figures_in(notebook)[:2]
    assert {trace["name"] for trace in registers["data"]} >= {"bhyt", "rms_norm", "layer_norm", "add_bhyt"}
    assert {trace["name"] for trace in times["data"]} >= {"normlab", "eager", "compile", "torch"}
    said = printed(notebook)
    assert "u = 134 MB" in said and "spilled: 0" in said
    assert "9 norms folded" in said and "unfolded: every bit is back" in said
    for line in said.splitlines():
        if "decoded token by token" in line or "norms folded" in line:
            assert float(line.split(": ")[1].split()[0]) < 1e-5
    gpu_tables = [path for path in BENCH.glob("rows_*.csv") if "cpu" not in path.name]
    assert bool(gpu_tables) != ("Nothing has been timed on a GPU yet" in said)
