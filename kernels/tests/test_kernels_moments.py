"""row_moments against the definitions in float64."""

from __future__ import annotations

import normlab_kernels as nk
import pytest
import torch
from kernel_harness import DEVICE, DTYPES, INTERPRETING
from normlab_kernels import choices
from normlab_kernels.moments import row_moments_reference


def check(x: torch.Tensor) -> None:
    got, exact = nk.row_moments(x), row_moments_reference(x.double())
    naive = row_moments_reference(x)
    for name in got._fields:
        ours, reference = getattr(got, name).double(), getattr(exact, name)
        assert getattr(got, name).dtype == torch.float32
        limit = 2 * (getattr(naive, name).double() - reference).abs() + 1e-5 * reference.abs() + 1e-6
        assert ((ours - reference).abs() <= limit).all(), f"{name} {tuple(x.shape)}"


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_moments_agree_with_the_definitions(dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((199, 1), (50, 3), (7, 127), (3, 4096), (2, 9000), (2, 3, 64)):
        check((torch.randn(*shape, generator=generator) ** 3 + 0.5).to(DEVICE, DTYPES[dtype]))


def test_a_large_mean_does_not_swallow_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "moments", lambda width: choices.Launch(64, 4, 4))
    x = (torch.randn(5, 500, generator=torch.Generator().manual_seed(2)) + 100).to(DEVICE)
    got, exact = nk.row_moments(x), row_moments_reference(x.double())
    torch.testing.assert_close(got.m2.double(), exact.m2, rtol=1e-4, atol=0)
    torch.testing.assert_close(got.m4.double(), exact.m4, rtol=1e-4, atol=0)


def test_blocks_are_merged_as_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 333, generator=torch.Generator().manual_seed(4)).to(DEVICE) ** 2
    whole = nk.row_moments(x)
    monkeypatch.setattr(choices, "moments", lambda width: choices.Launch(32, 2, 4))
    for name, value in zip(whole._fields, nk.row_moments(x), strict=True):
        torch.testing.assert_close(value, getattr(whole, name), rtol=2e-5, atol=1e-4, msg=name)


def test_a_bad_row_stays_in_its_row_and_shows() -> None:
    x = torch.randn(9, 20, device=DEVICE)
    clean = nk.row_moments(x)
    x[4, 7] = float("nan")
    spoilt = nk.row_moments(x)
    others = [row for row in range(9) if row != 4]
    for before, after in zip(clean, spoilt, strict=True):
        assert torch.equal(before[others], after[others])
        assert after[4].isnan()


def test_strided_input_no_rows_and_no_gradient() -> None:
    x = torch.randn(8, 12, device=DEVICE, requires_grad=True)
    for one, other in zip(nk.row_moments(x.t()), nk.row_moments(x.t().contiguous()), strict=True):
        torch.testing.assert_close(one, other)
        assert not one.requires_grad
    assert nk.row_moments(torch.empty(0, 5, device=DEVICE)).l2.shape == (0,)


@pytest.mark.kernels
def test_moments_compile_without_a_graph_break() -> None:
    torch.compiler.reset()
    compiled = torch.compile(nk.row_moments, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 20, device=DEVICE)
    for one, other in zip(compiled(x), nk.row_moments(x), strict=True):
        assert one.shape == (2, 3)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.kernels
def test_opcheck_passes() -> None:
    from normlab_kernels import moments_kernel

    for rows in (5, 0):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(moments_kernel.row_moments, (torch.randn(rows, 9, device=DEVICE),), test_utils=checks)


def test_what_is_no_row_is_refused() -> None:
    for x in (torch.ones(3, dtype=torch.int64), torch.ones(3, 0), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="row_moments needs"):
            nk.row_moments(x)


def test_fp16_rows_of_ten_thousand_do_not_overflow() -> None:
    x = torch.full((3, 64), 1e4, dtype=torch.float16, device=DEVICE)
    x[:, ::2] *= -1
    got = nk.row_moments(x)
    torch.testing.assert_close(got.l2, torch.full((3,), 8e4, device=DEVICE), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.m4, torch.full((3,), 64e16, device=DEVICE), rtol=1e-6, atol=0)
    assert INTERPRETING or got.max_abs.tolist() == [1e4] * 3


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-5, 1e25, 3e37])
def test_the_norm_overflows_and_vanishes_only_where_no_number_is_left(
    size: float, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        monkeypatch.setattr(choices, "moments", lambda width: choices.Launch(16, 2, 4))
    x = (torch.randn(5, 50, generator=torch.Generator().manual_seed(6)).sign() * size).to(DEVICE)
    exact = x.double().square().sum(-1).sqrt()
    torch.testing.assert_close(nk.row_moments(x).l2.double(), exact, rtol=1e-5, atol=2e-45)
