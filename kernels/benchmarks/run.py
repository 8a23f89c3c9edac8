"""Measure the kernels against every installed peer, on a GPU or a CPU, in the order of importance; then test them.

    PYTHONPATH=kernels:. python3 kernels/benchmarks/run.py --out data/bench              # a GPU, `make gpu` does it
    python kernels/benchmarks/run.py --device cpu --sections rows --out data/bench
    python kernels/benchmarks/run.py --device fake --out build/dry-run                   # no device, times made up

Sections: rows (each norm, forward, backward and both), launch (its kernels with other launches than those chosen),
linear (projection + add + norm, fused or not), decode (each norm for 1 to 64 rows), host (what a call keeps the host,
launches left out; needs no GPU, and on one the other sections say it), compiled (two norms on a CPU, as they are and
under torch.compile, turn by turn with the compiled formula), step (a whole training step by scheme) and
generate (a token of generation by scheme); the last two need normlab. plan.py says which rows, and in
which order. Each section has a table, <section>_<device>.csv, which keeps what earlier runs measured: the same command
goes on where it was stopped. plot.py draws them.

The measuring is done by a process of its own (work.py). If it dies or hangs, its row is noted and another goes on
behind it. Exit status: 0; 1 if a row or a test failed; 2 if there is no device. Peers that are not installed are noted,
which is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from plan import SECTIONS
from tables import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ROW_SECONDS = 180.0  # after which a row is thought to hang
GRACE_SECONDS = 20.0  # what a row that was begun in time may take beyond it
MOST_DEATHS = 25
FAILED, NO_DEVICE, LOST = 1, 2, 75  # of work.py, which this file does not import: it needs torch
OPTIONAL = ("liger_kernel", "quack", "transformers", "pandas", "plotly", "pytest", "xdist")


def say(text: str) -> None:
    print(text, flush=True)


def environment() -> dict[str, str]:
    """One cache for all that is compiled, in the checkout, and its own packages where they are not installed."""
    cache = ROOT / "build" / "compiled"
    paths = [str(ROOT / "kernels"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    places = {"TRITON_CACHE_DIR": str(cache / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    return {**places, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start(order: dict[str, Any], command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment())
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode())
    process.stdin.close()
    return process


def compile_ahead(order: dict[str, Any], command: list[str], processes: int, seconds: float) -> None:
    """What the rows will run is compiled by several processes at once, for at most so long; what is left then is
    compiled when its row comes. Nothing to do where nothing is compiled."""
    begin = time.monotonic()
    workers = [start(order | {"part": part, "parts": processes}, command) for part in range(processes)]
    for worker in workers:
        try:
            worker.wait(max(0.1, begin + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    say(f"compiled ahead: {processes} processes, {time.monotonic() - begin:.0f} s")


def supervise(order: dict[str, Any], command: list[str], row_seconds: float = ROW_SECONDS) -> int:
    """Start the measuring process until it has been through its rows: behind the row at which it died, or hung."""
    end = time.monotonic() + 60 * order["minutes"]
    marker = Path(order["out"]) / ".measuring.json"
    failed = 0
    for _ in range(MOST_DEATHS):
        marker.unlink(missing_ok=True)
        process = start(order | {"minutes": (end - time.monotonic()) / 60}, command)
        note = wait(process, marker, end + GRACE_SECONDS, row_seconds)
        if note is None:
            return max(failed, process.returncode) if process.returncode != LOST else FAILED
        failed = FAILED
        if not marker.exists():
            say(f"the measuring process ended before its first row: {note}")
            return FAILED
        reached = json.loads(marker.read_text())
        if process.returncode != LOST:  # that one has noted its row itself
            columns = reached["columns"]
            path = Path(order["out"]) / f"{columns['section']}_{columns['device']}.csv"
            Table(path, columns).add({"note": note})
        say(f"{note}; on behind row {reached['position'] + 1}")
        if time.monotonic() > end:
            return FAILED
        order = order | {"first": reached["position"] + 1}
    say(f"the measuring process died {MOST_DEATHS} times")
    return FAILED


def wait(process: subprocess.Popen[bytes], marker: Path, end: float, row_seconds: float) -> str | None:
    """Until the process ends: None if as it should, or else how it ended."""
    while process.poll() is None:
        time.sleep(0.2)
        late = time.monotonic() > end
        age = time.time() - marker.stat().st_mtime if marker.exists() else 0.0
        if late or age > row_seconds:
            process.kill()
            process.wait()
            return f"stopped: its row did not end in {age:.0f} s"
    code = process.returncode
    if code in (0, FAILED, NO_DEVICE):
        return None
    return "the device was lost" if code == LOST else f"the measuring process ended with status {code}"


def run_tests(out: Path, seconds: float) -> int:
    """The tests of the compiled kernels, in parallel where pytest-xdist is there; what they say is kept in a file."""
    if importlib.util.find_spec("pytest") is None:
        say("the tests need pytest, which is missing")
        return FAILED
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    command += ["-q", "-ra", "-m", "gpu and not slow", "--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    path = out / "tests_gpu.txt"
    with path.open("w") as file:
        try:
            done = subprocess.run(
                [*command, str(ROOT / "kernels" / "tests")], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                env=environment(), timeout=max(1.0, seconds),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            say(f"the tests did not end in {seconds:.0f} s; what they said: {path}")
            return FAILED
    say(path.read_text()[-3000:])
    return FAILED if done.returncode else 0


def draw(out: Path) -> None:
    if missing := [name for name in ("pandas", "plotly") if importlib.util.find_spec(name) is None]:
        say(f"no plots: {' and '.join(missing)} missing")
        return
    subprocess.run([sys.executable, str(HERE / "plot.py"), str(out)], env=environment())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu", "fake"], default="cuda", help="fake: a dry run")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=SECTIONS, help="or none")
    parser.add_argument("--minutes", type=float, default=60.0, help="to measure and test for, at most")
    parser.add_argument("--again", action="store_true", help="also what this code measured well before on this device")
    parser.add_argument("--tests", action="store_true", help="then the tests of the compiled kernels")
    parser.add_argument("--commit", default="", help="where this is not a git checkout")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    begin = time.monotonic()
    chosen = parse(arguments)
    required = ("torch", "triton") if chosen.device == "cuda" else ("torch",)
    if needed := [name for name in required if importlib.util.find_spec(name) is None]:
        say(f"{' and '.join(needed)} missing in {sys.executable}: point to a Python that has it, PYTHON=...")
        return NO_DEVICE
    if missing := [name for name in OPTIONAL if importlib.util.find_spec(name) is None]:
        say(f"missing, and left out with a note where it is needed: {', '.join(missing)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    order = {
        "device": chosen.device, "threads": chosen.threads, "sections": chosen.sections, "minutes": chosen.minutes,
        "again": chosen.again, "commit": chosen.commit, "out": str(chosen.out), "first": 0,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "work.py")]
    if chosen.device == "cuda" and (status := start(order | {"check": True}, command).wait()):  # is there a device?
        return status
    processes = min(8, os.cpu_count() or 1) if chosen.device == "cuda" else 0
    compile_ahead(order, command, processes, min(90.0, 12 * chosen.minutes))

    def left() -> float:
        return 60 * chosen.minutes - (time.monotonic() - begin)

    status = supervise(order | {"minutes": left() / 60}, command)
    if chosen.tests and left() < 30:
        say("no time is left for the tests; they alone: --sections --tests")
    elif chosen.tests:
        status = max(status, run_tests(chosen.out, left()))
    draw(chosen.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
