"""Modules that run several times: norms and branches shared in a block and between blocks, checkpoints that repeat a
block for one of several forward passes."""

import pytest
import torch
from probe_toys import WIDTH, Part, PreLN, Stack, X, contribution, size
from probe_zoo import near, values
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from normlab.probes import record

SIZE, GRADIENT = ["token_l2_mean"], ["grad_l2_mean", "grad_l2_total"]
BATCHES = [torch.randn(2, 6 + i, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def shared(*names: str) -> Stack:
    """Three blocks that share these parts; "one norm" is one norm for all places."""
    model = Stack(PreLN, PreLN, PreLN)
    first = model.layers[0]
    with torch.no_grad():
        for block in model.layers:
            block.attn.scale = 9.0  # so that the sites of a block differ
    for block in model.layers:
        for name in names:
            if name == "one norm":
                block.norm1 = block.norm2 = first.norm1
            elif name == "norm2 is norm1":
                block.norm2 = block.norm1
            else:
                setattr(block, name, getattr(first, name))
    return model


def stream(model: Stack, x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that the norms read, in order, and the output."""
    found = []
    for block in model.layers:
        middle = block.middle(x)
        found += [x, middle]
        x = block(x)
    return [*found, x]


@pytest.mark.parametrize("metrics", [SIZE, [*SIZE, "relative_contribution"]])
@pytest.mark.parametrize(
    "names",
    [("norm2 is norm1",), ("one norm",), ("norm1",), ("norm2",), ("norm1", "attn"), ("norm2", "mlp"), ("attn", "mlp")],
)
def test_shared_parts_are_read_where_they_run_and_once(names, metrics):
    model = shared(*names)
    with record(model, metrics, masks=["all"]) as rec, torch.no_grad():
        for x in BATCHES:
            model(x)
    table = rec.stats().to_pandas(errors=True)
    assert set(table["tokens"]) == {sum(x.shape[0] * x.shape[1] for x in BATCHES)} and not rec.absent
    found, streams = values(rec.stats()), [stream(model, x) for x in BATCHES]
    for place in range(6):
        site, layer = ("mlp_norm_in" if place % 2 else "attn_norm_in"), place // 2 + 1
        reads = torch.cat([parts[place].flatten(0, 1) for parts in streams])
        assert found[site, layer, "token_l2_mean", "all"] == size(reads), (site, layer)
        if len(metrics) > 1:
            adds = torch.cat([(parts[place + 1] - parts[place]).flatten(0, 1) for parts in streams])
            key = ("mlp" if place % 2 else "attn", layer, "relative_contribution", "all")
            assert found[key] == contribution(adds, reads), key


def test_a_norm_that_the_blocks_share_with_the_models_end_is_the_final_norm_there():
    model = shared("one norm")
    model.norm = model.layers[0].norm1
    model.forward = lambda x: model.norm(Stack.forward(model, x))
    with record(model, SIZE, masks=["all"]) as rec, torch.no_grad():
        model(X)
    found = values(rec.stats())
    assert found["final_norm_in", 3, "token_l2_mean", "all"] == size(stream(model, X)[-1])
    assert found["attn_norm_in", 2, "token_l2_mean", "all"] == size(stream(model, X)[2]) and not rec.absent


class Chosen(Stack):
    """Three blocks, of which each call runs some, and a final norm."""

    def __init__(self):
        super().__init__(PreLN, PreLN, PreLN)
        self.norm, self.read = nn.RMSNorm(WIDTH), []

    def forward(self, x, order):
        for place in order:
            x = self.layers[place - 1](x)
        self.read.append(x)
        x.retain_grad()
        return self.norm(x)


@pytest.mark.parametrize(
    ("orders", "layers"),
    [([[1, 3], [1, 2], [2], [1, 2, 3]], [3] * 4), ([[1, 2], [1, 2, 1, 2], [1, 2, 3, 1]], [3, 4, 4])],
    ids=["skipped", "run again"],
)
def test_the_final_norm_is_at_the_last_layer_where_blocks_are_skipped_and_counts_on_where_they_repeat(orders, layers):
    model = Chosen()
    with record(model, ["token_l2_mean", "grad_l2_total"], masks=["all"], loss_tokens=1) as rec:
        for order, x in zip(orders, torch.randn(4, 2, 10, WIDTH), strict=False):
            model(x.requires_grad_(), order).square().sum().backward()
    found = values(rec.stats())
    assert {layer for site, layer, *_ in found if site == "final_norm_in"} == set(layers) and not rec.absent
    for layer in set(layers):
        reads = [x for x, place in zip(model.read, layers, strict=True) if place == layer]
        assert found["final_norm_in", layer, "token_l2_mean", "all"] == size(torch.cat(reads))
        total = pytest.approx(float(torch.cat([x.grad for x in reads]).norm()), rel=1e-5)
        assert found["final_norm_in_grad", layer, "grad_l2_total", "all"] == total
    assert rec.norm_sites[model.norm] == ("final_norm_in", layers[-1])


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Inside(PreLN):
    """Checkpoints its own forward, so that its hooks stay outside, or its MLP with the norm."""

    def __init__(self, how=""):
        super().__init__()
        self.how = how

    def forward(self, h):
        if self.how == "inside":
            return checkpoint(super().forward, h, use_reentrant=True)
        if self.how == "part":
            return checkpoint(lambda m: self.add(m, self.norm2, self.mlp), self.middle(h), use_reentrant=True)
        return super().forward(h)


class Checkpointed(nn.Module):
    """A stack whose blocks are checkpointed in one of several ways, and a head."""

    def __init__(self, how: str, share: bool = False, depth: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed = how, nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Inside(how) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)
        for block in self.layers if share else ():
            block.norm2 = block.norm1

    def forward(self, x):
        h = self.embed(x)
        if self.how == "segments":
            h = checkpoint_sequential(self.layers, 2, h, use_reentrant=True)
        else:
            for block in self.layers:
                h = checkpoint(block, h, use_reentrant=True) if self.how == "outside" else block(h)
        return self.head(h)


def losses(model, batches):
    """One loss a batch; their factors differ, as the labels of batches do."""
    return [(model(x).square().sum() / (i + 1)) for i, x in enumerate(batches)]


def gradients(how, backward, share=False, batches=BATCHES[:2], depth=4):
    model = Checkpointed(how, share, depth)
    with record(model, GRADIENT, loss_tokens=lambda call: float(call.arguments["x"].shape[1])) as rec:
        backward(model, batches)
    return values(rec.stats()), rec.absent


def together(model, batches):
    sum(losses(model, batches)).backward()


def in_turn(model, batches):
    """As a pipeline that runs one backward pass for one forward pass."""
    waiting = losses(model, batches[:2])
    for x in batches[2:]:
        waiting.pop(0).backward()
        waiting += losses(model, [x])
    for loss in waiting:
        loss.backward()


def backwards_in_reverse(model, batches):
    for loss in reversed(losses(model, batches)):
        loss.backward()


@pytest.mark.parametrize("backward", [together, in_turn, backwards_in_reverse])
def test_a_checkpoint_is_repeated_for_the_forward_pass_whose_gradient_it_makes(backward):
    for batches in (BATCHES, [X, X + 1, X - 1]):  # of other sizes and of equal ones
        expected, _ = gradients("", backward, batches=batches)
        for how in ("outside", "inside", "part", "segments"):
            found, absent = gradients(how, backward, batches=batches)
            assert found == near(expected) and not any("checkpoint" in why for why in absent.values()), how


@pytest.mark.parametrize(("share", "depth"), [(True, 4), (False, 1), (True, 1)])
@pytest.mark.parametrize("how", ["outside", "inside", "part"])
def test_checkpoints_of_shared_norms_and_of_a_single_block(how, share, depth):
    expected, _ = gradients("", together, share, depth=depth)
    found, _ = gradients(how, together, share, depth=depth)
    assert found == near(expected)


def test_a_forward_pass_that_never_gets_a_backward_pass_takes_no_gradients():
    def backward(model, batches):
        first = losses(model, batches[:1])
        del first
        kept = losses(model, batches[:1])
        losses(model, batches[1:])[0].backward()
        del kept

    expected, _ = gradients("", backward)
    assert gradients("outside", backward)[0] == near(expected)


def test_parts_are_shared_by_name():
    assert isinstance(shared("attn").layers[2].attn, Part)
