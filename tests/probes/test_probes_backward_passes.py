"""Several backward passes through one forward call: the gradient that counts is the sum of what they add to `.grad`."""

import gc
from collections import defaultdict

import pytest
import torch
from probe_toys import WIDTH, PreLN
from probe_zoo import near, values
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import normlab
from normlab.errors import NormlabError
from normlab.probes.forward_call import GRADIENTS

METRICS = ["grad_l2_mean", "grad_l2_total"]
MASK = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])
BATCHES = [
    {"input_ids": torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(i)), "attention_mask": MASK}
    for i in range(2)
]
REFUSED = "two backward passes .* sum the losses and differentiate once"


class Text(nn.Module):
    """Tokens, two blocks and logits."""

    def __init__(self, is_checkpointed: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.layers, self.is_checkpointed = nn.ModuleList([PreLN(), PreLN()]), is_checkpointed

    def forward(self, input_ids, attention_mask=None):
        h = self.middle = self.embed(input_ids)
        for block in self.layers:
            self.middle, h = h, checkpoint(block, h, use_reentrant=True) if self.is_checkpointed else block(h)
        return self.head(h)

    def losses(self, batch):
        """Two losses, whose gradients differ in direction."""
        logits = self(**batch)
        return logits.square().sum(), logits.logsumexp(-1).sum()


def own_gradients():
    """Norms of the gradients of both losses' sum, over all batches, without the recorder."""
    model, found = Text(), defaultdict(list)
    reads = {}
    for layer, block in enumerate(model.layers, 1):
        for site, module in (("block_in", block), ("attn_norm_in", block.norm1), ("mlp_norm_in", block.norm2)):
            module.register_forward_pre_hook(
                lambda m, args, key=(f"{site}_grad", layer): reads.__setitem__(key, args[0])
            )
    for batch in BATCHES:
        a, b = model.losses(batch)
        first = MASK.cumsum(1) == 1
        for key, gradient in zip(reads, grad(a + b, list(reads.values())), strict=True):
            for mask, kept in (("all", MASK == 1), ("no_first", (MASK == 1) & ~first)):
                found[(*key, mask)] += [gradient.double().norm(dim=-1)[kept]]
    return {
        (site, layer, metric, mask): float(size(torch.cat(norms)))
        for (site, layer, mask), norms in found.items()
        for metric, size in zip(METRICS, (torch.mean, torch.linalg.vector_norm), strict=True)
    }


def recorded(way, **options):
    model = Text(**options)
    with normlab.record(model, METRICS, loss_tokens=1) as rec:
        for batch in BATCHES:
            way(model, *model.losses(batch))
    return rec


SUMMED = {
    "one pass": lambda model, a, b: (a + b).backward(),
    "a pass for each loss": lambda model, a, b: (a.backward(retain_graph=True), b.backward()),
    "three passes": lambda model, a, b: (
        (a / 2).backward(retain_graph=True), (a / 2).backward(retain_graph=True), b.backward()
    ),
    "the graph retained to the end": lambda model, a, b: (a.backward(retain_graph=True), b.backward(retain_graph=True)),
    "inputs= all": lambda model, a, b: (
        a.backward(inputs=list(model.parameters()), retain_graph=True), b.backward(inputs=list(model.parameters()))
    ),
    "a look before": lambda model, a, b: (
        grad(a, list(model.parameters()), retain_graph=True), (a + b).backward()
    ),
    "looks at some layers": lambda model, a, b: (
        grad(a, model.layers[1].mlp.proj.weight, retain_graph=True),
        grad(b, model.layers[0].mlp.proj.weight, create_graph=True),
        (a + b).backward(),
    ),
    "a look between": lambda model, a, b: (
        a.backward(retain_graph=True), grad(b, model.embed.weight, retain_graph=True), b.backward()
    ),
    "a look after": lambda model, a, b: ((a + b).backward(retain_graph=True), grad(a, model.embed.weight)),
    "a look alone": lambda model, a, b: grad(a + b, list(model.parameters()), retain_graph=True),
}  # fmt: skip


@pytest.mark.parametrize("way", SUMMED)
def test_norms_are_of_the_sum_of_the_passes_that_add_to_grad(way):
    rec = recorded(SUMMED[way])
    assert values(rec.stats()) == near(own_gradients()) and not rec.absent


def test_an_observer_sums_the_passes_of_each_micro_batch():
    model = Text()
    with normlab.observe(model, every=1, metrics=METRICS, loss_tokens=1, accumulate=2) as observer:
        for batch in BATCHES:
            a, b = model.losses(batch)
            (a / 2).backward(retain_graph=True)
            (b / 2).backward()
        observer.step(a, 0)
    table = observer.to_pandas().dropna(subset="layer").query("metric in @METRICS")
    keys = zip(table["site"], table["layer"], table["metric"], table["mask"], strict=True)
    assert dict(zip(keys, table["value"], strict=True)) == near(own_gradients())


def test_calls_that_wait_for_their_second_pass_are_each_summed():
    model = Text()
    with normlab.record(model, METRICS, loss_tokens=1) as rec:
        waiting = []
        for batch in BATCHES:  # as a pipeline runs them
            a, b = model.losses(batch)
            a.backward(retain_graph=True)
            waiting.append(b)
        for b in waiting:
            b.backward()
    assert values(rec.stats()) == near(own_gradients()) and not rec.absent


def test_a_pass_that_begins_inside_is_added_where_it_goes():
    def way(model, a, b):
        a.backward(retain_graph=True)
        model.middle.sum().backward(retain_graph=True)  # what block 2 reads
        b.backward()

    found, expected = values(recorded(way).stats()), own_gradients()
    above = {key: value for key, value in expected.items() if key[:2] == ("mlp_norm_in_grad", 2)}
    assert {key: found[key] for key in above} == near(above)
    assert all(found[key] != pytest.approx(expected[key], rel=1e-3) for key in expected.keys() - above.keys())


REFUSED_WAYS = {
    "looks alone": lambda model, a, b: (grad(a, model.embed.weight, retain_graph=True), grad(b, model.embed.weight)),
    "inputs= in parts": lambda model, a, b: (
        (a + b).backward(inputs=[model.embed.weight], retain_graph=True),
        (a + b).backward(inputs=[model.embed.weight, *model.layers.parameters()]),
    ),
    "a part and the whole": lambda model, a, b: (
        a.backward(inputs=[model.embed.weight], retain_graph=True), b.backward()
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED_WAYS)
def test_passes_whose_sum_is_not_the_step_are_left_out_with_the_reason(way):
    with pytest.raises(NormlabError, match=REFUSED):
        recorded(REFUSED_WAYS[way]).stats()


def test_a_place_that_was_read_between_its_passes_is_left_out_and_later_calls_count():
    model = Text()
    with normlab.record(model, METRICS, loss_tokens=1) as rec:
        a, b = model.losses(BATCHES[0])
        a.backward(retain_graph=True)
        rec.stats()
        b.backward()
        assert not values(rec.stats())
        model.losses(BATCHES[1])[0].backward()
    rows = rec.stats().to_pandas(errors=True).query("mask == 'all'")
    assert set(rows["tokens"]) == {int(MASK.sum())} and GRADIENTS in rec.absent


def test_what_a_reentrant_checkpoint_repeats_twice_is_left_out():
    with pytest.raises(NormlabError, match=REFUSED):
        recorded(SUMMED["a pass for each loss"], is_checkpointed=True).stats()


def vectors():
    """How many tensors of the stream's shape Python holds."""
    gc.collect()
    return sum(type(x) is torch.Tensor and x.shape == (2, 7, WIDTH) for x in gc.get_objects())


@pytest.mark.usefixtures("own_garbage")
@pytest.mark.parametrize("is_retained", [False, True])
def test_gradients_are_kept_only_as_long_as_a_retained_graph_lives(is_retained):
    model, before = Text(), vectors()
    with normlab.record(model, METRICS, loss_tokens=1) as rec:
        a, b = model.losses(BATCHES[0])
        held = vectors()
        a.backward(retain_graph=is_retained)
        # Of each block two: what it reads, and what its MLP's norm reads. Else `middle` alone.
        assert vectors() == (held + 2 * len(model.layers) if is_retained else before + 1)
    del a, b, model.middle
    assert vectors() == before and values(rec.stats())


def test_frozen_tokens_in_reentrant_checkpoints_cost_an_observer_the_gradients_alone():
    model = Text(is_checkpointed=True)
    model.embed.requires_grad_(False)
    with normlab.observe(model, every=1, metrics=["rms", *METRICS], loss_tokens=1) as observer:
        loss = sum(model.losses(BATCHES[0]))
        loss.backward()
        with pytest.warns(UserWarning, match="gradients of a forward pass are left out: nothing that the blocks read"):
            observer.step(loss, 0)
    assert model.head.weight.grad is not None and "rms" in set(observer.to_pandas()["metric"])


class Apart(Text):
    """What a checkpoint returns is no block's output, so only the input's address tells which pass is repeated."""

    def forward(self, h):
        for block in self.layers.children():
            h = checkpoint(block, h, use_reentrant=True) * 2 if self.is_checkpointed else block(h) * 2
        return h


@pytest.mark.parametrize("begin", [0, 4])
def test_of_two_passes_with_one_input_a_checkpoint_repeats_the_one_that_was_not_repeated_or_neither_counts(begin):
    found = []
    for is_checkpointed in (False, True):
        model, x = Apart(is_checkpointed), torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        if begin:  # as in a stage of a pipeline
            model.layers = torch.nn.ModuleDict({str(i): block for i, block in enumerate(model.layers, begin)})
        with normlab.record(model, METRICS, loss_tokens=1) as rec:
            first = model(x)
            first.square().sum().backward(retain_graph=True)
            model(x).logsumexp(-1).sum().backward()
        found.append(values(rec.stats()))
    assert found[1] == near({place: value for place, value in found[0].items() if place in found[1]})
    lost = {place for place in found[0] if place not in found[1]}
    assert {place[:2] for place in lost} == {("attn_norm_in_grad", begin + 1), ("mlp_norm_in_grad", begin + 1)}
    assert "a checkpoint repeats it" in rec.stats().manifest["absent"][f"gradients in layers.{begin}"]
