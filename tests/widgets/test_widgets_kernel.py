"""A real kernel that handles a page's messages in another thread while a cell runs, as JupyterLab has it: sliders moved
fast neither raise nor leave a figure that shows something else than its controls say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel
from training_helpers import TINY, write_text

SETUP = """
import json, threading, time, torch
import normlab
from normlab.widgets import TrainTheatre

torch.set_num_threads(1)
theatre = TrainTheatre(["pre_rmsnorm", "bhyt"], {out!r}, {recipe!r}, cache_dir={out!r} + "-cache")
theatre.start()
widgets = dict(metric=theatre.metric, theatre=theatre.plot)
handled_by = []
theatre.metric.observe(lambda _: handled_by.append(threading.current_thread().name), names="value")
print(json.dumps({{name: widget.model_id for name, widget in widgets.items()}}))
"""
# A cell that works for a while, with the figures too.
BUSY = """
handled_by.clear()
for turn in range(25):
    theatre.redraw()
    torch.randn(300, 300) @ torch.randn(300, 300)
    time.sleep(0.02)
print("worked beside", len([name for name in handled_by if name != threading.main_thread().name]))
"""
CHECK = """
theatre.wait(60, step=20)
theatre.pause()
while any(run.state == "training" for run in theatre.runs.values()):
    time.sleep(0.05)
theatre.redraw()
site = "block_in_grad" if theatre.metric.value.startswith("grad") else "block_out"
points = {name: run.points("probe", site, theatre.metric.value) for name, run in theatre.runs.items()}
latest = min(own[-1][0] for own in points.values())  # one run may be ahead; both measure at the same steps
for name, run in theatre.runs.items():
    last = [value for step, _, value in points[name] if step == latest]
    assert [list(trace.y) for trace in theatre.figure.data if trace.name == f"{name} last"] == [last]
# What the page has is what was drawn.
sent = [(trace["name"], trace.get("y")) for trace in theatre.plot.figure["data"] if trace["name"] != "labels"]
drawn = [(trace.name, trace.to_plotly_json().get("y")) for trace in theatre.figure.data if trace.name != "labels"]
assert sent == drawn and not theatre.plot._cross_validation_lock
print("metric", theatre.metric.value)
theatre.close()
"""


class Page:
    """The kernel's other end: runs cells, and sends what a page's widgets send, which the kernel may handle in another
    thread. As a page does, it sends a widget's next state when the last one has been handled, and only the newest."""

    def __init__(self, client: Any) -> None:
        self.client = client
        client.control_channel.send(client.session.msg("create_subshell_request", {}))
        self.subshell = client.get_control_msg(timeout=60)["content"]["subshell_id"]
        self.heard: list[dict[str, Any]] = []
        self.in_flight: dict[str, str] = {}  # message -> comm
        self.waiting: dict[str, dict[str, Any]] = {}

    def move(self, comm: str, state: dict[str, Any]) -> None:
        self.waiting[comm] = self.waiting.get(comm, {}) | state
        self.send()

    def send(self) -> None:
        for comm in set(self.waiting) - set(self.in_flight.values()):
            data = {"method": "update", "state": self.waiting.pop(comm), "buffer_paths": []}
            message = self.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
            message["header"]["subshell_id"] = self.subshell
            self.in_flight[message["header"]["msg_id"]] = comm
            self.client.shell_channel.send(message)

    def hear(self, seconds: float) -> bool:
        """Take in one message of the kernel, if one comes."""
        try:
            message = self.client.get_iopub_msg(timeout=seconds)
        except Empty:
            return False
        self.heard.append(message)
        if message["content"].get("execution_state") == "idle":
            self.in_flight.pop(message["parent_header"].get("msg_id"), None)
            self.send()
        return True

    def settle(self, seconds: float = 60.0) -> None:
        """Until everything that was moved has been handled."""
        deadline = time.monotonic() + seconds
        while self.in_flight or self.waiting:
            assert time.monotonic() < deadline
            self.hear(0.1)

    def begin(self, source: str) -> str:
        return self.client.execute(source, allow_stdin=False)

    def finish(self, cell: str, seconds: float = 120.0) -> str:
        """Wait until the cell is done; what it printed."""
        deadline = time.monotonic() + seconds
        while not self.done(cell):
            assert time.monotonic() < deadline
            self.hear(0.1)
        return "".join(m["content"]["text"] for m in self.about(cell) if m["msg_type"] == "stream")

    def about(self, cell: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["parent_header"].get("msg_id") == cell]

    def done(self, cell: str) -> bool:
        return any(message["content"].get("execution_state") == "idle" for message in self.about(cell))

    def complaints(self) -> list[Any]:
        """Errors of cells and of callbacks, and whatever was written to the error stream."""
        errors = [m["content"] for m in self.heard if m["msg_type"] == "error"]
        return errors + [m["content"]["text"] for m in self.heard if m["content"].get("name") == "stderr"]


@pytest.fixture
def page() -> Iterator[Page]:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=120)
    try:
        yield Page(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_sliders_moved_fast_while_a_cell_runs_corrupt_nothing(page: Page, tmp_path: Path):
    recipe = TINY | {"corpus": str(write_text(tmp_path / "text.txt")), "steps": 100_000, "eval_every": 50}
    setup = page.finish(page.begin(SETUP.format(out=str(tmp_path / "out"), recipe=recipe)))
    comms = json.loads(setup.splitlines()[-1])
    # A kernel may handle a widget's first message, and only that, in the thread of the cell that made it.
    page.move(comms["metric"], {"index": 1})
    page.settle()
    cell = page.begin(BUSY)
    turn = 0
    while not page.done(cell):
        turn += 1
        page.move(comms["metric"], {"index": turn % 7})
        # What a page sends when the reader changes its theme.
        page.move(comms["theatre"], {"dark_page": bool(turn % 2)})
        page.hear(0.02)
    worked = page.finish(cell)
    assert "worked beside" in worked, page.complaints()
    assert int(worked.split("worked beside")[1]) > 5  # or nothing was tried here
    page.move(comms["metric"], {"index": 4})
    page.settle()
    printed_text = page.finish(page.begin(CHECK))
    assert page.complaints() == []
    assert "metric kurtosis" in printed_text
