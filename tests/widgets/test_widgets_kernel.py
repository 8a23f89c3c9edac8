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
from normlab.widgets import Intervene, TrainTheatre
from normlab.widgets.change import ask

torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=50, max_position_embeddings=12)
model = normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme="bhyt", num_hidden_layers=3, **sizes)).eval()
before = {{name: tensor.clone() for name, tensor in model.state_dict().items()}}
tokens = torch.randint(0, 50, (2, 12))
intervene = Intervene(model, tokens)
theatre = TrainTheatre(["pre_rmsnorm", "bhyt"], {out!r}, {recipe!r}, cache_dir={out!r} + "-cache")
theatre.start()
widgets = dict(lam=intervene.lam, gain=intervene.gain, skip=intervene.skip, metric=theatre.metric,
               intervene=intervene.plot, theatre=theatre.plot)
handled_by = []
for slider in (intervene.lam, intervene.gain):
    slider.observe(lambda _: handled_by.append(threading.current_thread().name), names="value")
print(json.dumps({{name: widget.model_id for name, widget in widgets.items()}}))
"""
# A cell that works for a while, with the figures too.
BUSY = """
handled_by.clear()
for turn in range(25):
    intervene.redraw()
    intervene.kappa.value = 2.0 ** (turn % 5 - 2)
    theatre.redraw()
    torch.randn(300, 300) @ torch.randn(300, 300)
    time.sleep(0.02)
print("worked beside", len([name for name in handled_by if name != threading.main_thread().name]))
"""
CHECK = """
shown = {trace.name: list(trace.y) for trace in intervene.figure.data}
answer = ask(model, tokens, intervene.change)
expected = answer.profile("token_l2_mean", "block_out").tolist()
pairs = zip(shown["intervened size"], expected, strict=True)
assert all(abs(a - b) < 1e-5 * abs(b) for a, b in pairs), (shown, expected)
assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
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
for widget in (intervene, theatre):  # what the page has is what was drawn
    sent = [(trace["name"], trace.get("y")) for trace in widget.plot.figure["data"] if trace["name"] != "labels"]
    drawn = [(trace.name, trace.to_plotly_json().get("y")) for trace in widget.figure.data if trace.name != "labels"]
    assert sent == drawn and not widget.plot._cross_validation_lock
print("change", intervene.change, "metric", theatre.metric.value)
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
    for name in ("lam", "gain", "skip", "metric"):
        page.move(comms[name], {"value": 4.0} if name in ("lam", "gain") else {"index": [0] if name == "skip" else 1})
    page.settle()
    cell = page.begin(BUSY)
    turn = 0
    while not page.done(cell):
        turn += 1
        page.move(comms["lam"], {"value": 2.0 ** (turn % 7 - 3)})
        page.move(comms["gain"], {"value": 2.0 ** (turn % 3 - 1)})
        page.move(comms["skip"], {"index": [turn % 3]})
        page.move(comms["metric"], {"index": turn % 7})
        # What a page sends when the reader changes its theme.
        for figure in ("intervene", "theatre"):
            page.move(comms[figure], {"dark_page": bool(turn % 2)})
        page.hear(0.02)
    worked = page.finish(cell)
    assert "worked beside" in worked, page.complaints()
    assert int(worked.split("worked beside")[1]) > 5  # or nothing was tried here
    page.move(comms["lam"], {"value": 3.0})
    page.move(comms["gain"], {"value": 5.0})
    page.move(comms["metric"], {"index": 4})
    page.settle()
    printed_text = page.finish(page.begin(CHECK))
    assert page.complaints() == []
    assert "lam=3.0" in printed_text and "gain=5.0" in printed_text and "metric kurtosis" in printed_text
