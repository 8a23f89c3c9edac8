"""The package by itself: it needs torch, and neither Triton nor NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from normlab_kernels import dispatch

pytestmark = pytest.mark.once
SCRIPT = """
import sys, types
import torch

def works():
    import normlab_kernels.cpu as cpu
    import normlab_kernels as nk
    cpu.np = None
    x = torch.randn(3, 8, requires_grad=True)
    weight, lam = torch.ones(8), torch.ones(1)
    y, ms = nk.bhyt(x, weight, lam)
    (y.sum() + ms.sum()).backward()
    assert torch.equal(nk.bhyt(x, weight, lam, kernels="torch")[0], y)
    torch.testing.assert_close(y, torch.tanh(0.1 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)))
    assert nk.row_moments(x).l2.shape == (3,)
    try:
        nk.rms_norm(x, weight, kernels="triton")
    except ValueError as error:
        print(error)

for version in (None, "3.3.1", "3.10.0"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "normlab_kernels"]:
        del sys.modules[name]
    sys.modules["triton"] = None
    if version:
        sys.modules["triton"] = types.ModuleType("triton")
        sys.modules["triton"].__version__ = version
    works()
print(sorted(name for name in ("normlab", "transformers", "pandas") if name in sys.modules))
"""


@pytest.mark.slow
def test_without_triton_and_numpy_or_with_a_triton_that_it_does_not_know_it_works_and_says_so() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    *refusals, imported = run.stdout.splitlines()
    assert len(refusals) == 3 and all("Triton is not installed in a version they know" in said for said in refusals)
    assert imported == "[]"


def test_the_range_of_versions_is_the_one_declared() -> None:
    first, end = (".".join(map(str, version)) for version in dispatch.TRITON_VERSIONS)
    for path in Path(__file__).parents[1], Path(__file__).parents[2]:
        assert f"triton>={first},<{end};" in (path / "pyproject.toml").read_text()
