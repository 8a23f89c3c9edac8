"""What a gain does, tried on norms of any library: zero-centred or not, a factor of the output or not."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from normlab.norms import BHyT, LayerNorm, NoNorm, RMSNorm, TaperNorm
from normlab.norms.gain import gain_centre, gain_names, is_plain_gain


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


class Named(nn.Module):
    """A norm with names of its own: y = (centre + gain) tanh(slope x/rms) + bias."""

    def __init__(self, *names: str, centre: float = 0.0, value: float = 1.0):
        super().__init__()
        self.names, self.centre = names, centre
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((8,), value)))

    def forward(self, x):
        gain, bias, slope = (getattr(self, name) for name in self.names)
        return (self.centre + gain) * torch.tanh(slope * x / x.square().mean(-1, keepdim=True).sqrt()) + bias


class Product(nn.Module):
    """Two vectors multiply its output."""

    def __init__(self):
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.scale * self.gain * x


@pytest.mark.parametrize(
    ("norm", "names"),
    [
        (RMSNorm(8), ("weight",)),
        (TaperNorm(8), ("weight", "fixed_weight")),
        (NoNorm(8), ()),
        (nn.LayerNorm(8), ("weight",)),
        (nn.LayerNorm(8, elementwise_affine=False), ()),
        (Named("g", "beta", "a"), ("g",)),
        (Named("a", "g", "scale"), ("a",)),
        (nn.Sequential(nn.LayerNorm(8)), ("0.weight",)),
        (Product(), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_gains_of_a_norm_are_found_whatever_they_are_called(norm, names):
    assert gain_names(norm) == names


@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_a_bias_of_any_name_does_not_hide_the_centre_of_a_gain(centre):
    norm = Named("scale", "offset", "a", centre=centre, value=0.5)
    assert gain_names(norm) == ("scale",) and gain_centre(norm, "scale") == centre
