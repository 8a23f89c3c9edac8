"""The environment of every test: one thread (or `--threads`), no network, fixed seeds, the user's home untouched.

The environment is set before torch and transformers are imported and is inherited by the processes that tests start.
"""

import gc
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CACHE = Path(__file__).resolve().parents[1] / "build" / "test-cache"

os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a process that a test starts says where it crashed
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "WANDB_MODE": "disabled",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "XDG_CACHE_HOME": str(CACHE),
        "HF_HOME": str(CACHE / "huggingface"),
    }
)

# It compiles 38 grammars at import, of addresses that jsonschema would check; nbformat's schema has none.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
# transformers takes our folder for Hugging Face's package, and reads what every distribution holds to find its version.
sys.modules["kernels"] = None  # type: ignore[assignment]

# What a test makes is looked through seldom. A test that needs a circle to be gone collects it itself.
gc.set_threshold(50_000, 20, 20)

import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="threads of PyTorch in every process of the tests")


def pytest_configure(config: pytest.Config) -> None:
    threads = str(config.getoption("threads"))
    os.environ.update({"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads})
    # A shell starts background jobs with Ctrl-C ignored, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Import what tests need when they are collected: xdist's first process collects none, and starts without torch."""
    prepare(collector.config.getoption("threads"))


@cache
def prepare(threads: int) -> None:
    import torch
    from hypothesis import settings

    torch.set_num_threads(threads)
    # Inductor finds kernels in its cache that were compiled for other instructions, and they return NaN.
    capability = torch.backends.cpu.get_cpu_capability().lower()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / f"inductor-{capability}"))
    # The same examples every time, and no verdict that depends on how busy the machine is.
    settings.register_profile("reproducible", derandomize=True, deadline=None, database=None, max_examples=50)
    settings.load_profile("reproducible")
    if not (torch.cuda.is_available() or torch.xpu.is_available() or torch.mtia.is_available()):
        # `torch.manual_seed` draws up a stack trace for each kind of device, should one turn up later.
        for kind in (torch.cuda.random, torch.xpu.random, torch.mtia):
            kind._lazy_call = lambda *args, **kwargs: None  # type: ignore[attr-defined]


_connect = socket.socket.connect


def _connect_locally(self: socket.socket, address: object) -> None:
    local = self.family == socket.AF_UNIX or (
        isinstance(address, tuple) and str(address[0]) in {"127.0.0.1", "::1", "localhost"}
    )
    if not local:
        raise OSError(f"a test tried to reach {address}: tests use no network")
    _connect(self, address)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to anything but this machine fail at once, with the address in the message."""
    monkeypatch.setattr(socket.socket, "connect", _connect_locally)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers in every test, whichever ran before it; a changed default dtype does not leak."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture
def own_garbage() -> None:
    """`gc.collect` and `gc.get_objects` see what this test makes, and nothing that was there before."""
    gc.freeze()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused: exit code 2, nothing printed, and one line on standard error, returned."""
    from normlab import cli

    def refused(*arguments: object) -> str:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("normlab: error: ") and err.count("\n") == 1, out + err
        return err

    return refused


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium or Chrome; the test is skipped where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium here: install chromium for the browser tests")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """One browser for the pages of a module's tests (`browser_helpers.page_in`)."""
    from browser_helpers import browser_of

    with browser_of(chromium) as browser:
        yield browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for the browser carries the marker, so that `-m 'not browser'` is complete."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


def pytest_collection_finish() -> None:
    """The collector leaves alone what imports brought, for good: to go through all of it again and again takes a
    seventh of the tests' time, and at the end a second or two of each process.

    Nor does accelerate collect after every training of a Trainer, a third of a second each time.
    """
    gc.freeze()
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]


def pytest_sessionfinish() -> None:
    """What the tests made is left alone too, when pytest collects five times and Python once."""
    gc.freeze()
