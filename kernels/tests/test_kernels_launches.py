"""Every launch that the benchmark times, and the kernel that it is compared with, gives the right result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from kernel_harness import DEVICE, full_if_slow
from normlab_kernels import choices

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import measure  # noqa: E402
import plan  # noqa: E402
import run  # noqa: E402

LAUNCHED = ["bhyt", "add_bhyt", "layer_norm", "dyt", "derf", "seed_norm", "row_moments", "bhyt_carried"]
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the benchmark itself is run")


@pytest.mark.kernels
@pytest.mark.parametrize("launch", plan.LINEAR_LAUNCHES)
def test_every_launch_of_the_fused_product_gives_its_result(launch: str) -> None:
    planned = plan.Planned("linear", plan.FUSED, "", "forward", 16_384, 2048, 0, launch)
    row = run.measure_row(planned, measure.Fake())
    assert "note" not in row and row["error"] < 1e-5, row


@pytest.mark.kernels
@pytest.mark.parametrize("function", full_if_slow(LAUNCHED, ("dyt", "seed_norm", "row_moments")))
def test_other_launches_of_a_norms_kernel_give_its_result(function: str) -> None:
    """Each once: the width that the stand-in for a GPU runs is the same for all. Nothing there knows of stages and of
    warps, but `choices.Launch`."""
    launches = {row.launch: row for row in plan.plan("cuda", ("launch",)) if row.function == function and row.launch}
    for planned in launches.values():
        assert choices.changed(choices.backward(4096, True), planned.launch)
        fields = {field.partition("=")[0] for field in planned.launch.split()}
        if "whole" not in fields and fields - {"stages", "warps"}:
            row = run.measure_row(planned, measure.Fake())
            assert "note" not in row and row["error"] < 1e-5, row


@pytest.mark.once
def test_two_tiles_ahead_are_fetched_where_a_row_has_at_most_16_kilobytes() -> None:
    """At 8,192 columns in 16 bits that was measured to be 1.3 to 1.6 times as fast; twice the bytes do not fit."""
    stages = [choices.backward(width, True, itemsize=size).stages for width, size in ((8192, 2), (4096, 4), (8192, 4))]
    assert stages == [3, 3, 2]


@pytest.mark.kernels
def test_the_released_decode_kernel_is_its_formula_with_a_statistic_of_16_bits() -> None:
    import released

    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 96, dtype=torch.float16).unbind(0)
    weight, lam = torch.rand(96, dtype=torch.float16), torch.full((1,), 8.0, dtype=torch.float16)
    for other in (None, residual):
        got, expected = (f(x, other, weight, lam) for f in (released.released_bhyt, released.released_reference))
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-3, atol=2e-3)
