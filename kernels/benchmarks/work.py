"""The process that measures: it goes through the plan, writes each row when it has it, and notes what fails.

Started by run.py, which starts another one behind the row at which this one died.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

STARTED = time.monotonic()  # before the imports, which take seconds of the time there is

import measure  # noqa: E402
import normlab_kernels  # noqa: E402
import torch  # noqa: E402
from measure import Device, first_line  # noqa: E402
from normlab_kernels import choices  # noqa: E402
from peers import Missing  # noqa: E402
from plan import FUSED, UNFUSED, Planned, plan  # noqa: E402
from sections import MEASURE, linear_fields  # noqa: E402
from tables import Row, Table, is_good, latest, read  # noqa: E402

DONE, FAILED, NO_DEVICE, LOST = 0, 1, 2, 75  # exit statuses; LOST: the device answers nothing any more


def provenance(device: Device, commit: str = "") -> Row:
    """What every row of a table says about how it was made."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    sources = [*sorted(Path(normlab_kernels.__file__).parent.glob("*.py")), Path(measure.__file__)]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    versions = {"torch": torch.__version__, "triton": version, "python": platform.python_version()}
    dtype = str(device.dtype).removeprefix("torch.")
    return {"device": device.label, "dtype": dtype, **versions, "commit": commit or git_commit(), "code": code}


def git_commit() -> str:
    """The commit of the checkout, with "-dirty" behind it where files differ; "unknown" outside of one."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def measure_row(planned: Planned, device: Device) -> Row:
    """The row's columns, or the reason why there are none, as a note."""
    torch.manual_seed(0)
    try:
        columns = MEASURE[planned.section](planned, device)
    except Missing as missing:
        return {"note": f"missing: {missing}"}
    except Exception as error:  # noqa: BLE001 - a failure is a row too, and the rest goes on
        return {"note": first_line(error)}
    finally:
        gc.collect()  # what a row leaves in cycles is not the next one's
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in columns.items()}


def work(
    device: Device, rows: list[Planned], out: Path, minutes: float, *, first: int = 0, again: bool = False,
    commit: str = "",
) -> int:  # fmt: skip
    """Measure the rows of a plan from the `first` on, for at most so many minutes of the device's clock. Rows measured
    well before, on this device and with this code, are left as they are unless `again`. Returns an exit status."""
    out.mkdir(parents=True, exist_ok=True)
    common = provenance(device, commit)
    tables = {s: Table(table_path(out, s, device), common) for s in dict.fromkeys(row.section for row in rows)}
    deadline = device.now() + 60 * minutes
    marker = out / ".measuring.json"
    failed = 0
    for position, planned in enumerate(rows):
        table = tables[planned.section]
        if position < first or (not again and table.has(planned.columns())):
            continue
        if device.now() + planned.seconds > deadline:
            print(
                f"out of time: {len(rows) - position} of {len(rows)} rows are left, from {_named(planned)}", flush=True
            )
            break
        marker.write_text(json.dumps({"position": position, "columns": planned.columns() | common}))
        columns = measure_row(planned, device)
        gc.freeze()  # the next collection looks at the next row's objects only
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        row = planned.columns() | columns | device.settings() | stamp
        table.add(row)
        bad = not is_good(row) and not str(row.get("note", "")).startswith("missing")
        failed += bad
        print(*(f"{k}={v}" for k, v in (planned.columns() | columns).items() if v != ""), flush=True)
        if bad and lost(device):
            return LOST
    gc.unfreeze()
    marker.unlink(missing_ok=True)
    for table in tables.values():
        table.tidy()
    if "linear" in tables:
        print(fusion_line(device, read(tables["linear"].path)), flush=True)
    return FAILED if failed else DONE


def table_path(out: Path, section: str, device: Device) -> Path:
    return out / f"{section}_{device.label}.csv"


def _named(planned: Planned) -> str:
    return " ".join(str(value) for value in planned.columns().values() if value != "")


def lost(device: Device) -> bool:
    """Whether the device is lost to this process: after a bad access every call fails."""
    if device.torch.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device.torch).item()
    except RuntimeError:
        return True
    return False


def fusion_line(device: Device, rows: list[Row]) -> str:
    """The entries of `choices.FUSION_WINS` that the table of the fused product asks for: for each width, whose K is the
    same, the launch that gains most on average, from the fewest rows on from which it always gained enough."""
    times: dict[tuple[str, str, int, int], float] = {}
    for row in latest(rows).values():
        if is_good(row):
            where = (row["function"], row["launch"], int(row["width"]), int(row["rows"]))
            times[where] = float(row["microseconds"])
    best: dict[int, tuple[float, choices.FusionWin]] = {}
    for width, launch in sorted({(where[2], where[1]) for where in times if where[0] == FUSED}):
        found = {tokens: time for (*who, w, tokens), time in times.items() if (*who, w) == (FUSED, launch, width)}
        gains: dict[int, float] = {}
        for tokens in sorted(found, reverse=True):
            unfused = times.get((UNFUSED, "", width, tokens), 0.0)
            if unfused / found[tokens] <= choices.LEAST_GAIN:
                break
            gains[tokens] = unfused / found[tokens]
        mean = sum(gains.values()) / max(1, len(gains))
        if gains and mean > best.get(width, (0.0,))[0]:
            chosen = replace(choices.linear(width), **linear_fields(launch))
            best[width] = mean, choices.FusionWin(device.name, width, width, min(gains), chosen)
    return f"for choices.FUSION_WINS: {tuple(win for _, win in best.values())}"


def worth_compiling(rows: list[Planned]) -> list[Planned]:
    """One row for each program of the claims: the number of rows changes none but torch.compile's, models have the
    norms' kernels, and the widest rows of several processes together would fill the memory."""
    programs: dict[tuple[str | int, ...], Planned] = {}
    for row in rows:
        if row.section not in ("step", "generate") and row.priority < 3:
            tokens = row.rows if row.peer == "compile" or row.section == "decode" else 0
            where = (row.section, row.function, row.peer, row.direction, row.width, row.launch)
            programs.setdefault((*where, tokens), row)
    return list(programs.values())


def compile_part(device: Device, rows: list[Planned], part: int, parts: int) -> int:
    """Make every call of one part of the rows once, so that what is compiled for it is in the caches. Returns how many
    failed: the rows say why when their turn comes."""
    return sum("note" in measure_row(planned, device) for planned in rows[part::parts])


def open_device(name: str) -> Device:
    """The device of that name; a line and the end where there is none."""
    if name == "fake":
        return measure.Fake()
    if name == "cpu":
        return measure.Cpu()
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"no CUDA device: PyTorch {torch.__version__} in {sys.executable} ({built}) sees none", file=sys.stderr)
        raise SystemExit(NO_DEVICE)
    return measure.Cuda()


def main() -> int:
    """Reads what run.py writes to its standard input."""
    order = json.load(sys.stdin)
    if order["device"] == "cpu":
        torch.set_num_threads(order["threads"])
    device = open_device(order["device"])
    if order.get("check"):
        return DONE
    rows = plan(device.kind, tuple(order["sections"]))
    if order.get("part") is not None:
        return compile_part(measure.Compiling(), worth_compiling(rows), order["part"], order["parts"])
    minutes = order["minutes"] - (time.monotonic() - STARTED) / 60
    first, again = order["first"], order["again"]
    return work(device, rows, Path(order["out"]), minutes, first=first, again=again, commit=order["commit"])


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a lost device raises once more when what was made on it is freed
