"""Faults of the authors' norms, each patched into ours: the check passes on ours and fails on the fault."""

import pytest
import torch
from model_helpers import assert_fault_is_caught, assert_near, faulty_bhyt
from torch import nn

from normlab.norms import BHyT

# 4. Squares taken in fp16 overflow and the output is 0.


@pytest.mark.parametrize("magnitude", [400.0, 1e4, 6e4])
def test_fault_4_squares_in_half_precision(magnitude):
    def check():
        norm = BHyT(64, 2.3, 3.0).half()
        x = (magnitude * torch.tanh(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))).half()
        y, ms = norm(x, return_mean_square=True)
        assert torch.isfinite(ms).all(), "the mean square overflows"
        x64 = x.double()
        expected = torch.tanh(norm.lam.double() / 3.0 * x64 / x64.square().mean(-1, keepdim=True).sqrt())
        assert_near(y, expected, 2e-3)

    def patch(monkeypatch):
        monkeypatch.setattr(BHyT, "forward", faulty_bhyt(lambda x: x.square().mean(-1, keepdim=True)))

    assert_fault_is_caught(check, patch)


# 5. The inverse root rounded to bf16.


def test_fault_5a_inverse_root_rounded_to_bf16():
    def check():
        norm = BHyT(64, 2.3, 3.0)  # float32 parameters and bf16 input: any error beyond the output's rounding is ours
        x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        x64 = x.double()
        expected = torch.tanh(2.3 / 3.0 * x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt())
        assert ((norm(x).double() - expected).abs() <= 2**-8 * 1.01 * expected.abs()).all()

    def patch(monkeypatch):
        exact = lambda x: x.float().square().mean(-1, keepdim=True)  # noqa: E731
        monkeypatch.setattr(BHyT, "forward", faulty_bhyt(exact, lambda rstd: rstd.bfloat16()))

    assert_fault_is_caught(check, patch)


# 7. The tanh output kept for monitoring.


def saved_bytes(norm: nn.Module, x: torch.Tensor) -> int:
    """Memory that autograd keeps between forward and backward, beyond the input and the parameters."""
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *norm.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in given:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = norm(x)
    assert output.requires_grad
    return sum(saved.values())


def test_fault_7_autograd_keeps_no_copy_for_monitoring():
    """The backward pass recomputes from x and one number a token: no tensor of the activations' size is kept."""
    x = torch.randn(4, 50, 64, requires_grad=True)

    def check():
        assert saved_bytes(BHyT(64), x) < x.numel() * x.element_size() / 2

    def patch(monkeypatch):
        run = BHyT.forward

        def forward(self, x, *args, **kwargs):
            y = run(self, x, *args, **kwargs)
            return y + 0 * y.tanh()

        monkeypatch.setattr(BHyT, "forward", forward)

    assert_fault_is_caught(check, patch)
