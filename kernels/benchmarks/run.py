"""Test the compiled kernels, then measure them against every installed peer, in the order of importance.

    PYTHONPATH=kernels:. python3 kernels/benchmarks/run.py --out build/bench             # a GPU, `make gpu` does it
    python kernels/benchmarks/run.py --device cpu --sections rows --out build/bench
    python kernels/benchmarks/run.py --device fake --out build/dry-run                   # no device: times mean nothing

rows       each norm, forward, backward and both
launch     its kernels with other launches than those chosen
linear     projection + add + norm, fused or not
decode     each norm for 1 to 64 rows
host       the host's time of a call, on a machine without a GPU; a GPU's rows have theirs
compiled   two norms on a CPU against the compiled formula
step       a whole training step by scheme; needs normlab
generate   a token of generation by scheme; needs normlab

plan.py has the rows in their order.

Each section has a table, <section>_<device>.csv, which keeps what earlier runs measured: run the command again to
resume, after an interrupt too. A result is checked before it is timed. What fails is a row with a note, and the rest is
measured. A row at which the process died is left out by later runs, but with --again.
Exit status: 0; 1 if a row or a test failed, or a row was left out; 2 if there is no device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "compiled"
os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE / "triton"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
sys.path[1:1] = [str(ROOT / "kernels"), str(ROOT)]
BEGAN = time.monotonic()  # before the imports, which take seconds of the time there is

try:
    import torch
except ImportError:
    sys.exit(f"torch is missing in {sys.executable}: point to a Python that has it, PYTHON=...")

import normlab_kernels  # noqa: E402
import peers  # noqa: E402
from fused_product import fusion_line, linear_row  # noqa: E402
from measure import Cuda, Device, Fake, Missing, Row, first_line  # noqa: E402
from plan import SECTIONS, TORCH_QUACK, Planned, plan  # noqa: E402
from sections import MEASURE, check_kernels  # noqa: E402
from tables import BEGUN, Table, is_good  # noqa: E402

DEVICES = {"cuda": Cuda, "cpu": Device, "fake": Fake}
DONE, FAILED, NO_DEVICE = 0, 1, 2
UNTIMED = ("run", "plan", "tables")  # modules here that choose what is measured, and keep it
MODEL = ("models", "norms", "residuals", "schemes")  # parts of normlab
OPTIONAL = ("triton", "liger_kernel", "quack", "transformers", "pytest", "xdist")


def provenance(device: Device, commit: str = "") -> Row:
    """Columns that say how a table was made. The commit is git's, with "-dirty" where files differ, or unknown."""
    version = "none"
    if importlib.util.find_spec("triton") is not None:
        import triton

        version = triton.__version__
    git = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    with contextlib.suppress(OSError):
        commit = commit or subprocess.run(git, capture_output=True, text=True, cwd=HERE).stdout.strip()
    versions = {"torch": torch.__version__, "triton": version, "python": platform.python_version()}
    dtype = str(device.dtype).removeprefix("torch.")
    return {"device": device.label, "dtype": dtype, **versions, "commit": commit or "unknown"}


def code_of(section: str) -> str:
    """The sources that a section's times depend on: the kernels, what measures here, and normlab for whole models."""
    folders = [Path(normlab_kernels.__file__).parent, HERE]
    if section in ("step", "generate"):
        folders += [ROOT / "normlab" / part for part in MODEL]
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    timed = (path.read_bytes() for path in sources if path.parent != HERE or path.stem not in UNTIMED)
    return hashlib.sha256(b"".join(timed)).hexdigest()[:12]


def measure_row(planned: Planned, device: Device) -> Row:
    """The row's columns, or the reason why there are none, as a note."""
    torch.manual_seed(0)
    try:
        check_kernels(planned, device)
        peers.vendored_quack(planned.peer == TORCH_QUACK)
        measure = linear_row if planned.section == "linear" else MEASURE[planned.section]
        columns = measure(planned, device)
    except Missing as missing:
        return {"note": f"missing: {missing}"}
    except Exception as error:  # noqa: BLE001 - a failure is a row too, and the rest is measured
        return {"note": first_line(error)}
    finally:
        gc.collect()  # what a row leaves in cycles is not the next one's
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in columns.items()}


def measure_all(
    device: Device, rows: list[Planned], out: Path, seconds: float, again: bool = False, commit: str = ""
) -> int:
    """Measure the rows of a plan for at most so many seconds; return an exit status.

    Rows measured well before, on this device and with this code, are left as they are unless `again`.
    """
    deadline, common = time.monotonic() + seconds, provenance(device, commit)
    sections = dict.fromkeys(row.section for row in rows)
    paths = {section: out / f"{section}_{device.label}.csv" for section in sections}
    tables = {section: Table(path, common | {"code": code_of(section)}) for section, path in paths.items()}
    status, unmeasured = DONE, list[Planned]()
    for planned in rows:
        table, row = tables[planned.section], planned.columns() | {"peer_version": peers.version(planned.peer)}
        earlier = {} if again else table.earlier(row)
        if is_good(earlier):
            continue
        if earlier.get("note") == BEGUN:
            print(f"left out, as the process died at it: {planned}; --again tries it", flush=True)
            status = FAILED
            continue
        if time.monotonic() + planned.seconds > deadline:
            unmeasured.append(planned)  # a later one may take less
            continue
        with table.begun(row):
            columns = measure_row(planned, device)
        gc.freeze()  # the next collection looks at the next row's objects only
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        table.add(row | columns | device.settings() | stamp)
        print(*(f"{k}={v}" for k, v in (row | columns).items() if v != ""), flush=True)
        if not is_good(columns) and not columns.get("note", "").startswith("missing"):
            status = FAILED
            try:
                torch.zeros(1, device=device.torch).item()
            except RuntimeError:  # every call fails, as after a bad access
                table.add(row | {"note": BEGUN})
                print("the device is lost to this process: run the command again to resume", flush=True)
                return FAILED
    gc.unfreeze()
    if unmeasured:
        print(f"out of time: {len(unmeasured)} of {len(rows)} rows are left, from {unmeasured[0]}", flush=True)
    if "linear" in tables:
        print(fusion_line(device, tables["linear"].rows.values()), flush=True)
    return status


def run_tests(out: Path, seconds: float) -> int:
    """Run the tests of the compiled kernels, in parallel where pytest-xdist is installed; keep their output."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    command += ["-q", "-ra", "-m", "gpu and not slow", "--continue-on-collection-errors", str(ROOT / "kernels/tests")]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[1:3])}
    path = out / "tests_gpu.txt"
    with path.open("w") as file:
        where = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": environment}
        tests = subprocess.Popen(command, **where, process_group=0)
        try:
            failed = tests.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"the tests did not end in {seconds:.0f} s; their output: {path}")
            return FAILED
        finally:  # parallel ones would go on, on the device that is measured next
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
    print(path.read_text()[-3000:])
    return FAILED if failed else DONE


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="fake: a dry run")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=SECTIONS, help="or none")
    parser.add_argument("--minutes", type=float, default=60.0, help="to measure and test for, at most")
    parser.add_argument("--again", action="store_true", help="also what this code measured well before on this device")
    parser.add_argument(
        "--tests", action="store_true", help="first the tests of the compiled kernels, for at most half the time"
    )
    parser.add_argument("--commit", default="", help="where this is not a git checkout")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    elif options.device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"no CUDA device: PyTorch {torch.__version__} in {sys.executable} ({built}) sees none", file=sys.stderr)
        return NO_DEVICE
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interrupt too
    device = DEVICES[options.device]()
    if missing := [name for name in OPTIONAL if importlib.util.find_spec(name) is None]:
        print(f"missing, and left out with a note where it is needed: {', '.join(missing)}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    seconds, status = 60 * options.minutes, DONE
    rows = plan(device.kind, tuple(options.sections))
    if options.tests:
        status = run_tests(options.out, seconds / 2 if rows else seconds)
    left = BEGAN + seconds - time.monotonic()
    return max(status, measure_all(device, rows, options.out, left, options.again, options.commit))


if __name__ == "__main__":
    sys.exit(main())
