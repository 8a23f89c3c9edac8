"""How a block's stream is read where branches, norms and activations do not stand as in Llama: each cause on a toy."""

from __future__ import annotations

import pytest
import torch
from probe_zoo import values
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes import record, sites

WIDTH, TOKENS = 12, 10
BRANCHES = ["relative_contribution", "update_cosine", "token_l2_mean"]


class Part(nn.Module):
    """A branch of one matrix."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.proj(x)) * self.scale


class Block(nn.Module):
    """Pre-LN with an attention and an MLP; subclasses change `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.RMSNorm(WIDTH), Part(), nn.RMSNorm(WIDTH), Part()


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def measured(kind: type[nn.Module], x: Tensor):
    """The model, the recording's values and its stats."""
    model = Model(kind).eval()
    with record(model, BRANCHES) as rec, torch.no_grad():
        model(x)
    return model.layers[0], values(rec.stats()), rec.stats().manifest["absent"]


def ratio(adds: Tensor, stream: Tensor) -> float:
    return float((adds.double().norm(dim=-1) / stream.double().norm(dim=-1)).mean())


def check(found: dict, **right: float) -> None:
    for site, value in right.items():
        assert found[site, 1, "relative_contribution", "all"] == pytest.approx(value, rel=1e-4), site


X = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))


class Continued(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn_conv = Part(0.5)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attn_conv(self.attn(self.norm1(h)))
        return h + self.mlp(self.norm2(h))


@torch.no_grad()
def test_a_convolution_after_attention_goes_on_with_it():
    """Inkling: what is added is the convolution's output, and it is attention's."""
    block, found, absent = measured(Continued, X)
    adds = block.attn_conv(block.attn(block.norm1(X)))
    check(found, attn=ratio(adds, X), mlp=ratio(block.mlp(block.norm2(X + adds)), X + adds))
    assert set(absent.values()) == {"it changes the stream together with another branch"}
    assert {name.split()[0] for name in absent} == {"mixer"}
    assert not [key for key in found if key[0] == "mixer"]


class StartsWithNorm(Block):
    def forward(self, h: Tensor) -> Tensor:
        h = self.norm1(h)
        h = h + self.attn(h)
        h = self.norm2(h)
        return h + self.mlp(h)


@torch.no_grad()
def test_a_norm_whose_output_is_the_stream_is_that_of_the_branch_after_it():
    """MiniMax, RWKV's first block."""
    block, found, absent = measured(StartsWithNorm, X)
    normed = block.norm1(X)
    middle = normed + block.attn(normed)
    again = block.norm2(middle)
    check(found, attn=ratio(block.attn(normed), normed), mlp=ratio(block.mlp(again), again))
    assert not absent
    size = float(middle.norm(dim=-1).mean())
    assert found["mlp_norm_in", 1, "token_l2_mean", "all"] == pytest.approx(size, rel=1e-5)
    assert found["attn_norm_in", 1, "token_l2_mean", "all"] == pytest.approx(float(X.norm(dim=-1).mean()), rel=1e-5)


class NormedInside(nn.Module):
    """Returns norm(x + f(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.dense, self.LayerNorm = Part(), Part(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(x + self.dense(self.query(x)))


class PostInside(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.norm1
        self.attn = NormedInside()

    def forward(self, h: Tensor) -> Tensor:
        h = self.attn(h)
        return self.norm2(h + self.mlp(h))


@torch.no_grad()
def test_a_branch_that_returns_the_norm_of_its_own_sum_adds_what_the_norm_reads_less_the_stream():
    """ALBERT's attention."""
    block, found, absent = measured(PostInside, X)
    f = block.attn.dense(block.attn.query(X))
    after = block.attn(X)
    check(found, attn=ratio(f, X), mlp=ratio(block.mlp(after), after))
    assert not absent
    assert found["attn_norm_in", 1, "token_l2_mean", "all"] == pytest.approx(float((X + f).norm(dim=-1).mean()), 1e-5)


class Windows(Block):
    """Attention sees the tokens in another order, with padding between."""

    normed_output = False

    def forward(self, h: Tensor) -> Tensor:
        order = torch.arange(TOKENS).flip(0)
        if self.normed_output:  # Swin V2: the norm reads what is back in order
            h = h + self.norm1(self.attn(h[:, order])[:, order])
            return h + self.norm2(self.mlp(h))
        padded = torch.cat([torch.zeros_like(h[:, :2]), self.norm1(h)[:, order]], dim=1)
        h = h + self.attn(padded)[:, 2:][:, order]
        return h + self.mlp(self.norm2(h))


class NormedWindows(Windows):
    normed_output = True


@torch.no_grad()
@pytest.mark.parametrize("kind", [Windows, NormedWindows])
def test_tokens_that_attention_returns_in_another_order_are_found_again(kind):
    """PEGASUS-X, PP-FormulaNet and Swin V2."""
    block, found, absent = measured(kind, X)
    adds = block.norm1(block.attn(X)) if kind is NormedWindows else block.attn(block.norm1(X))
    check(found, attn=ratio(adds, X))
    assert not absent and ("mlp", 1, "relative_contribution", "all") in found


class Faint(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Part(1e-9)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attn(self.norm1(h))
        return h + self.mlp(self.norm2(h))


@torch.no_grad()
def test_a_branch_that_is_lost_in_rounding_is_measured_as_what_it_returns():
    """BLIP at its start."""
    block, found, absent = measured(Faint, X)
    check(found, attn=ratio(block.attn(block.norm1(X)), X))
    assert not absent


class Spread(nn.Linear):
    """One factor a stream."""

    probe_role = "spread"


class Streams(nn.Module):
    """Four streams; a branch's output is spread over them by one factor a token and stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2, self.mlp, self.spread = nn.RMSNorm(WIDTH), Part(), Spread(WIDTH, 4)

    def forward(self, h: Tensor) -> Tensor:
        x = h.mean(2)
        return h + self.spread(x)[..., None] * self.mlp(self.norm2(x))[:, :, None]


@torch.no_grad()
def test_a_branch_that_is_spread_over_several_streams_is_measured_on_each():
    """HunYuan V4's hyper-connections."""
    x = torch.randn(2, TOKENS, 4, WIDTH, generator=torch.Generator().manual_seed(4))
    block, found, absent = measured(Streams, x)
    mean = x.mean(2)
    adds = block.spread(mean)[..., None] * block.mlp(block.norm2(mean))[:, :, None]
    check(found, mlp=ratio(adds, x))
    assert not absent


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.normalization = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalization(self.convolution(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shortcut, self.activation = nn.Identity(), nn.ReLU()
        self.layer = nn.Sequential(Convolution(), Convolution())

    def forward(self, h: Tensor) -> Tensor:
        added = self.layer(h)
        added += self.shortcut(h)
        return self.activation(added)


@torch.no_grad()
def test_an_activation_of_the_sum_ends_a_block_and_its_convolutions_are_no_blocks():
    """ResNet, RegNet: the residual is added in place to the branch's output."""
    x = torch.randn(2, WIDTH, 5, 5, generator=torch.Generator().manual_seed(4))
    block, found, absent = measured(Residual, x)
    assert [b.name for b in sites(Model(Residual)).blocks] == ["layers.0", "layers.1"]
    check(found, mixer=ratio(block.layer(x).movedim(1, -1), x.movedim(1, -1)))
    assert not absent


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.lin2(torch.relu(self.lin1(h)))


def test_a_block_without_a_residual_connection_is_said_to_have_none():
    """XLM keeps the sum outside its parts."""
    _, found, absent = measured(Bare, X)
    assert set(absent.values()) == {"the block has no residual connection: it ends in a projection"}
    assert not [key for key in found if key[2] == "relative_contribution"]


class AddAndNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(x + residual)


class AddsInNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = AddAndNorm()

    def forward(self, h: Tensor) -> Tensor:
        h = self.norm1(self.attn(h), h)
        return h + self.mlp(self.norm2(h))


@torch.no_grad()
def test_a_wrapper_that_adds_before_it_norms_is_no_norm_its_content_is():
    """FNet: the wrapper is handed the branch's output, its norm reads the sum."""
    block, found, _ = measured(AddsInNorm, X)
    total = float((X + block.attn(X)).norm(dim=-1).mean())
    assert found["attn_norm_in", 1, "token_l2_mean", "all"] == pytest.approx(total, rel=1e-5)


class HeadConvolution(Block):
    """Holds a convolution with as many channels as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attn.head_conv = nn.Conv1d(TOKENS, TOKENS, 1)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attn(self.norm1(h))
        return h + self.mlp(self.norm2(h))


@torch.no_grad()
def test_a_convolution_with_as_many_channels_as_tokens_does_not_turn_the_stream():
    """Inkling at 16 tokens: features were read as tokens."""
    block, found, _ = measured(HeadConvolution, X)
    size = float(block(X).norm(dim=-1).mean())
    assert found["block_out", 1, "token_l2_mean", "all"] == pytest.approx(size, rel=1e-5)


def test_a_stack_that_the_loss_does_not_depend_on_is_told_from_a_missing_backward_pass():
    """An encoder whose decoder has no cross-attention."""
    encoder, decoder = Model(Faint), Model(Faint)
    with record(encoder, ["grad_l2_mean"], loss_tokens=1) as rec:
        encoder(X)
        decoder(X).sum().backward()
    with pytest.raises(NormlabError, match="through these blocks.*of a loss that depends on them"):
        rec.stats()
