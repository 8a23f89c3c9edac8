"""Readings of a block's stream where branches, norms and activations do not lie as in Llama: each cause on a toy."""

import pytest
import torch
from probe_toys import WIDTH, Part, PreLN, Stack, X, assert_contributions, measured, size
from probe_zoo import values
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes import record, sites

TOKENS = X.shape[1]
BRANCHES = ["relative_contribution", "update_cosine", "token_l2_mean"]


def read(kind: type[nn.Module], x: Tensor = X):
    """The first of two blocks, the recording's values and what is absent."""
    model = Stack(kind, kind).eval()
    return model.layers[0], *measured(model, BRANCHES, x)


class Continued(PreLN):
    def __init__(self) -> None:
        super().__init__()
        self.attn_conv = Part(0.5)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.attn_conv(self.attn(self.norm1(h)))


def test_a_convolution_after_attention_goes_on_with_it():
    """Inkling: what is added is the convolution's output, and it is attention's."""
    block, found, absent = read(Continued)
    middle = block.middle(X)
    assert_contributions(found, attn=(middle - X, X), mlp=(block(X) - middle, middle))
    assert set(absent.values()) == {"it changes the stream together with another branch"}
    assert {name.split()[0] for name in absent} == {"mixer"}
    assert not [key for key in found if key[0] == "mixer"]


class StartsWithNorm(PreLN):
    def forward(self, h: Tensor) -> Tensor:
        h = self.norm1(h)
        h = self.norm2(h + self.attn(h))
        return h + self.mlp(h)


def test_a_norm_whose_output_is_the_stream_is_that_of_the_branch_after_it():
    """MiniMax, RWKV's first block."""
    block, found, absent = read(StartsWithNorm)
    normed = block.norm1(X)
    middle = normed + block.attn(normed)
    again = block.norm2(middle)
    assert_contributions(found, attn=(block.attn(normed), normed), mlp=(block.mlp(again), again))
    assert not absent
    assert found["mlp_norm_in", 1, "token_l2_mean", "all"] == size(middle)
    assert found["attn_norm_in", 1, "token_l2_mean", "all"] == size(X)


class NormedInside(nn.Module):
    """Returns norm(x + f(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.dense, self.LayerNorm = Part(), Part(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(x + self.dense(self.query(x)))


class PostInside(PreLN):
    def __init__(self) -> None:
        super().__init__()
        del self.norm1
        self.attn = NormedInside()

    def forward(self, h: Tensor) -> Tensor:
        h = self.attn(h)
        return self.norm2(h + self.mlp(h))


def test_a_branch_that_returns_the_norm_of_its_own_sum_adds_what_the_norm_reads_less_the_stream():
    """ALBERT's attention."""
    block, found, absent = read(PostInside)
    f, after = block.attn.dense(block.attn.query(X)), block.attn(X)
    assert_contributions(found, attn=(f, X), mlp=(block.mlp(after), after))
    assert not absent
    assert found["attn_norm_in", 1, "token_l2_mean", "all"] == size(X + f)


class Windows(PreLN):
    """Attention sees the tokens in another order, with padding between."""

    def middle(self, h: Tensor) -> Tensor:
        order = torch.arange(TOKENS).flip(0)
        padded = torch.cat([torch.zeros_like(h[:, :2]), self.norm1(h)[:, order]], dim=1)
        return h + self.attn(padded)[:, 2:][:, order]


class NormedWindows(PreLN):
    """Swin V2: the norm reads what is back in order."""

    def forward(self, h: Tensor) -> Tensor:
        order = torch.arange(TOKENS).flip(0)
        h = h + self.norm1(self.attn(h[:, order])[:, order])
        return h + self.norm2(self.mlp(h))


@pytest.mark.parametrize("kind", [Windows, NormedWindows])
def test_tokens_that_attention_returns_in_another_order_are_found_again(kind):
    """PEGASUS-X, PP-FormulaNet and Swin V2."""
    block, found, absent = read(kind)
    adds = block.norm1(block.attn(X)) if kind is NormedWindows else block.attn(block.norm1(X))
    assert_contributions(found, attn=(adds, X))
    assert not absent and ("mlp", 1, "relative_contribution", "all") in found


class Faint(PreLN):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Part(1e-9)


def test_a_branch_that_is_lost_in_rounding_is_measured_as_what_it_returns():
    """BLIP at its start."""
    block, found, absent = read(Faint)
    assert_contributions(found, attn=(block.attn(block.norm1(X)), X))
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


def test_a_branch_that_is_spread_over_several_streams_is_measured_on_each():
    """HunYuan V4's hyper-connections. The norm reads a mean of the streams, which is none of them."""
    x = torch.randn(2, TOKENS, 4, WIDTH, generator=torch.Generator().manual_seed(4))
    block, found, absent = read(Streams, x)
    assert_contributions(found, mlp=(block(x) - x, x))
    assert set(absent) == {"norm2 1", "norm2 2"}


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


def test_an_activation_of_the_sum_ends_a_block_and_its_convolutions_are_no_blocks():
    """ResNet, RegNet: the residual is added in place to the branch's output."""
    x = torch.randn(2, WIDTH, 5, 5, generator=torch.Generator().manual_seed(4))
    block, found, absent = read(Residual, x)
    assert [b.name for b in sites(Stack(Residual, Residual)).blocks] == ["layers.0", "layers.1"]
    assert_contributions(found, mixer=(block.layer(x).movedim(1, -1), x.movedim(1, -1)))
    assert not absent


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.lin2(torch.relu(self.lin1(h)))


def test_a_block_without_a_residual_connection_is_said_to_have_none():
    """XLM keeps the sum outside its parts."""
    _, found, absent = read(Bare)
    assert set(absent.values()) == {"the block has no residual connection: it ends in a projection"}
    assert not [key for key in found if key[2] == "relative_contribution"]


class AddAndNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(x + residual)


class AddsInNorm(PreLN):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = AddAndNorm()

    def middle(self, h: Tensor) -> Tensor:
        return self.norm1(self.attn(h), h)


def test_a_wrapper_that_adds_before_it_norms_is_no_norm_its_content_is():
    """FNet: the wrapper is handed the branch's output, its norm reads the sum."""
    block, found, _ = read(AddsInNorm)
    assert found["attn_norm_in", 1, "token_l2_mean", "all"] == size(X + block.attn(X))


class HeadConvolution(PreLN):
    """Holds a convolution with as many channels as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attn.head_conv = nn.Conv1d(TOKENS, TOKENS, 1)


def test_a_convolution_with_as_many_channels_as_tokens_does_not_turn_the_stream():
    """Inkling at 16 tokens: features were read as tokens."""
    block, found, _ = read(HeadConvolution)
    assert found["block_out", 1, "token_l2_mean", "all"] == size(block(X))


def test_a_stack_that_the_loss_does_not_depend_on_is_told_from_a_missing_backward_pass():
    """An encoder whose decoder has no cross-attention."""
    encoder, decoder = Stack(PreLN), Stack(PreLN)
    with record(encoder, ["grad_l2_mean"], loss_tokens=1) as rec:
        encoder(X)
        decoder(X).sum().backward()
    with pytest.raises(NormlabError, match="through these blocks.*of a loss that depends on them"):
        rec.stats()


class Shift(nn.Module):
    """A mean of each token and the one before it, by feature, as RWKV's. It holds a vector, as norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.linspace(0.2, 0.8, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h.lerp(nn.functional.pad(h, (0, 0, 1, -1)), self.share)


class Shifted(PreLN):
    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def middle(self, h: Tensor) -> Tensor:
        return h + self.attn(self.norm1(self.shift(h)))


def test_the_norm_after_a_token_shift_is_the_branchs():
    block, found, absent = read(Shifted)
    assert found["attn_norm_in", 1, "token_l2_mean", "all"] == size(block.shift(X))
    assert found["mlp_norm_in", 1, "token_l2_mean", "all"] == size(block.middle(X)) and absent == {}


class OneNorm(PreLN):
    """One norm for both branches; attention may be dropped."""

    is_dropped = False

    def forward(self, h: Tensor) -> Tensor:
        self.reads = {"attn": h}
        self.reads["mlp"] = h = h if self.is_dropped else h + self.attn(self.norm1(h))
        return h + self.mlp(self.norm1(h))


@pytest.mark.parametrize(
    ("drops", "told"),
    [((False, True, True), {"attn": [0], "mlp": [0, 1, 2]}), ((True, False, False), {"attn": [2], "mlp": [0, 2]})],
)
def test_a_norm_of_two_branches_is_that_of_the_branch_that_runs(drops, told):
    model, reads = Stack(OneNorm, OneNorm).eval(), []
    with record(model, ["token_l2_mean"], masks=["all"]) as recorder, torch.no_grad():
        for number, is_dropped in enumerate(drops, start=1):
            model.layers[1].is_dropped = is_dropped
            model(number * X)
            reads.append(model.layers[1].reads)
    stats = recorder.stats()
    found = values(stats)
    for kind, calls in told.items():
        right = torch.stack([reads[call][kind] for call in calls])
        assert found[f"{kind}_norm_in", 2, "token_l2_mean", "all"] == size(right), kind
    said = [name for name in stats.manifest["absent"] if name.startswith("mlp_norm_in")]
    assert said == (["mlp_norm_in 2"] if drops[0] else [])


def test_what_enters_a_stack_whose_first_block_is_dropped_is_no_output_of_that():
    model = Stack(PreLN, PreLN, PreLN)
    with record(model, ["token_l2_mean"], masks=["all"]) as recorder, torch.no_grad():
        right = model.layers[0](X)
        model(X)
        layers, model.layers = model.layers, model.layers[1:]
        model(3 * X)
        model.layers = layers
    found = values(recorder.stats())
    assert found["block_out", 1, "token_l2_mean", "all"] == size(right)
    assert found["block_out", 0, "token_l2_mean", "all"] == size(2 * X)
