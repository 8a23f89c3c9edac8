"""What a gain does, tried on norms of any library: zero-centred or not, a factor of the output or not."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from normlab.norms import BHyT, LayerNorm, RMSNorm
from normlab.norms.gain import gain_centre, is_plain_gain


class Slope(nn.Module):
    """Its output is 0 where its slope is, whatever the gain."""

    def __init__(self):
        super().__init__()
        self.weight, self.alpha = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.weight * torch.tanh(self.alpha * x)


class Fixed(nn.RMSNorm):
    """Its gain is no parameter."""

    def __init__(self):
        super().__init__(8)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)


@pytest.mark.parametrize(
    ("norm", "centre", "is_plain"),
    [
        (RMSNorm(8), 0.0, True),
        (LayerNorm(8), 0.0, True),
        (BHyT(8), 0.0, True),
        (nn.LayerNorm(8), 0.0, True),
        (GemmaRMSNorm(8), 1.0, False),
        (Slope(), 0.0, True),
        (Fixed(), 0.0, True),
        (nn.LayerNorm(8).half(), 0.0, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_centre_of_a_gain_and_whether_it_is_a_factor_of_the_output(norm, centre, is_plain):
    seen = []
    norm.register_forward_hook(lambda *call: seen.append(call))
    assert (gain_centre(norm), is_plain_gain(norm)) == (centre, is_plain)
    assert not seen
