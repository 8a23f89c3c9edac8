"""`record()` takes a row's statistics from `row_moments` where kernels run, and gets what its own reduction gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_harness import DEVICE, DTYPES
from normlab_kernels import dispatch, moments

pytest.importorskip("normlab", reason="the probes are normlab's: pip install -e .")
pytest.importorskip("triton", reason="pip install normlab-kernels[gpu]")
from normlab_kernels import moments_kernel  # noqa: E402
from test_kernels_model import ids, tiny  # noqa: E402

from normlab import record  # noqa: E402
from normlab.probes import statistics  # noqa: E402

pytestmark = pytest.mark.kernels
NAMES = ("l2", "var", "kurtosis", "max_abs")
METRICS = ["token_l2_mean", "feature_var_mean", "kurtosis", "max_abs", "rms"]


def counted_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    launches: list[int] = []
    launch = moments_kernel.launch
    monkeypatch.setattr(moments_kernel, "launch", lambda rows: launches.append(len(rows)) or launch(rows))
    return launches


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, moments.dispatch):
        monkeypatch.setattr(module, "takes_kernels", lambda x: False)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_kernel_and_the_chunked_reduction_give_the_same_statistics(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(3)
    x = (torch.randn(3, 7, 130, generator=draw) ** 3 + 0.3).to(DEVICE, DTYPES[dtype])
    x[0, 0, 5] = 2000.0  # a massive activation
    x[1, 2] = 0.25  # features all equal: no kurtosis
    launches = counted_launches(monkeypatch)
    got = statistics.token_statistics(x, NAMES)
    assert launches == [21]
    without_kernels(monkeypatch)
    expected = statistics.token_statistics(x, NAMES)
    assert launches == [21]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
    assert got[2, 9].isnan() and got.isnan().sum() == 1


def test_fourth_powers_out_of_range_give_no_kurtosis_rather_than_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    x = x * torch.tensor([1e-10, 1.0, 1e10], device=DEVICE)[:, None]
    got = statistics.token_statistics(x, NAMES)
    assert got[2].isnan().tolist() == [True, False, True]
    without_kernels(monkeypatch)
    expected = statistics.token_statistics(x, NAMES)
    for index in (0, 1, 3):
        torch.testing.assert_close(got[index], expected[index], rtol=1e-5, atol=0)


def test_a_recording_accumulates_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mask = tiny("bhyt", "triton"), torch.ones_like(ids())
    mask[0, :2] = 0
    launches = counted_launches(monkeypatch)

    def recorded() -> tuple[torch.Tensor, Any]:
        with record(model, metrics=METRICS) as rec, torch.no_grad():
            logits = model(ids(), attention_mask=mask).logits
            model(ids()[:, :4])
        return logits, rec.stats().moments.set_index(["site", "layer", "mask", "statistic"])

    with torch.no_grad():
        alone = model(ids(), attention_mask=mask).logits
    logits, got = recorded()
    assert torch.equal(logits, alone)
    assert len(launches) > 2 * 4
    launched = len(launches)
    monkeypatch.setattr(statistics, "nk", SimpleNamespace(chooses_kernels=lambda x, kernels: False))  # not the model's
    _, expected = recorded()
    assert len(launches) == launched
    assert got.index.equals(expected.index)
    assert got[["count", "width"]].equals(expected[["count", "width"]])
    for name in ("mean", "m2", "peak"):
        assert got[name].tolist() == pytest.approx(expected[name].tolist(), rel=2e-5, abs=1e-6), name
