"""Causes of silently wrong readings, one small model each: what the probes check while they record."""

import pytest
import torch
from probe_toys import WIDTH, Part, PreLN, Stack, X, assert_contributions, contribution, measured, rms, size
from probe_zoo import values
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import METRICS, record, sites, statistics
from normlab.probes.sites import stacks

TOKENS = 6
BRANCHES = ["relative_contribution"]


class Adding(Part):
    """Returns the stream with itself added, as Bloom's branches do."""

    def forward(self, x, residual):
        return residual + super().forward(x)


class Block(PreLN):
    """`how` says what is done with a branch's output."""

    def __init__(self, how="plain"):
        self.part = Adding if how == "contained" else Part
        super().__init__()
        self.how, self.gain = how, nn.Parameter(torch.rand(WIDTH) + 0.5)

    def add(self, h, norm, part):
        if self.how == "contained":
            return part(norm(h), h)
        if self.how == "lost":
            return torch.tanh(h) + part(norm(h))
        if self.how == "carried":
            return 0.8 * h + 0.5 * part(norm(h))
        factor = {"scaled": 0.22, "by feature": self.gain}.get(self.how, 1.0)
        return h + factor * part(norm(h))


def stacked(how="plain", times=1):
    return Stack(lambda: Block(how), lambda: Block(how), times=times)


def updates(model, x, carry=1.0):
    """The updates of attention, the MLP and the first block, and the stream that each is added to."""
    block = model.layers[0]
    middle, out = block.middle(x), block(x)
    steps = {"attn": (x, middle, carry), "mlp": (middle, out, carry), "block": (x, out, carry**2)}
    return {site: (after - scale * before, before) for site, (before, after, scale) in steps.items()}


@pytest.mark.parametrize("how", ["plain", "contained", "scaled", "by feature"])
def test_what_a_branch_adds_is_told_by_the_blocks_sum(how):
    """Bloom returns the residual too, Granite scales a branch afterwards, BEiT has a gain per feature."""
    model = stacked(how)
    found, _ = measured(model, BRANCHES, X)
    assert_contributions(found, **updates(model, X))


def test_where_the_stream_is_scaled_a_branch_is_set_against_the_scaled_stream():
    model = stacked("carried")
    found, _ = measured(model, BRANCHES, X)
    pairs, scales = updates(model, X, carry=0.8), {"attn": 0.8, "mlp": 0.8, "block": 0.64}
    assert_contributions(found, **{site: (adds, scales[site] * stream) for site, (adds, stream) in pairs.items()})


class Normed(PreLN):
    """DeepNorm: a norm of the sum with the scaled stream. MiniMax: a norm makes the stream, which is scaled then."""

    def __init__(self, makes=False):
        super().__init__()
        self.makes = makes

    def add(self, h, norm, part):
        if self.makes:
            h = norm(h)
        return 2.5 * h + part(h) if self.makes else norm(2.5 * h + part(h))


@pytest.mark.parametrize("makes", [False, True])
def test_a_block_and_its_branches_are_set_against_one_stream_where_a_norm_is_between(makes):
    model = Stack(lambda: Normed(makes), lambda: Normed(makes))
    found, absent = measured(model, BRANCHES, 3 * X)
    block, h = model.layers[0], 3 * X
    middle = block.middle(h)
    first, second = (block.norm1(h), block.norm2(middle)) if makes else (h, middle)
    attn, mlp = block.attn(first), block.mlp(second)
    assert_contributions(found, attn=(attn, 2.5 * first), mlp=(mlp, 2.5 * second), block=(attn + mlp, 2.5 * first))
    assert not absent


@pytest.mark.parametrize("metrics", [BRANCHES, ["block_influence"]])
def test_the_size_of_what_a_block_reads_is_computed_once(monkeypatch, metrics):
    streams, own = [], statistics.block_statistics
    monkeypatch.setattr(statistics, "block_statistics", lambda *args: streams.append(args[3]) or own(*args))
    measured(Stack(PreLN, PreLN), metrics, X)
    assert streams == [None, None]


def test_a_block_that_does_not_add_up_has_no_branch_rows_and_the_manifest_says_why():
    found, absent = measured(stacked("lost"), [*BRANCHES, "rms"], X)
    assert not [key for key in found if key[2] == "relative_contribution"]
    assert "not its input + attn + mlp" in absent["attn 1"]
    assert ("block_out", 2, "rms", "all") in found


def test_a_block_that_runs_again_is_further_depth_not_more_tokens():
    model, h = stacked(times=3), X.clone().requires_grad_()
    with record(model, ["rms", "grad_l2_total"], loss_tokens=1) as rec:
        model(h).square().sum().backward()
    found, at = values(rec.stats()), []
    for i in range(6):
        at.append(h)
        h.retain_grad()
        h = model.layers[i % 2](h)
    at[0].grad = None
    h.square().sum().backward()
    assert rec.stats().manifest["layers"] == 6
    for i, state in enumerate(at, start=1):
        assert found["block_out", i - 1, "rms", "all"] == rms(state)
        assert found["block_in_grad", i, "grad_l2_total", "all"] == pytest.approx(float(state.grad.norm()), rel=1e-5)


class ResidualScaling(nn.Module):
    """Holds a vector and no matrix, yet is no norm: the residual sum itself (Zaya)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, branch, residual):
        return branch * self.weight + residual


class Fusion(ResidualScaling):
    """The same under a name that says nothing."""


@pytest.mark.parametrize("adds", [ResidualScaling, Fusion])
def test_a_residual_sum_in_a_module_of_its_own_is_no_output_norm(adds):
    model = stacked()
    for block in model.layers:
        block.sum1, block.sum2 = adds(), adds()
        block.add = lambda h, norm, part, b=block: (b.sum1 if part is b.attn else b.sum2)(part(norm(h)), h)
    found, _ = measured(model, BRANCHES, X)
    for site, pair in updates(model, X).items():
        value = found.get((site, 1, "relative_contribution", "all"))
        assert value is None or value == contribution(*pair), site
    assert adds is Fusion or ("attn", 1, "relative_contribution", "all") in found


class Headed(nn.Module):
    """A language model whose loss is shifted, unshifted, summed or none of these, whatever its class is called."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.body = loss, stacked()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, input_ids, labels=None, attention_mask=None, num_items_in_batch=None):
        logits = self.head(self.body(self.embed(input_ids)))
        z, y = (logits[:, :-1], labels[:, 1:]) if self.loss != "same" else (logits, labels)
        if self.loss == "unpadded":
            y = y.masked_fill(attention_mask[:, 1:] == 0, -100)
        total = nn.functional.cross_entropy(z.reshape(-1, 11), y.reshape(-1), reduction="sum")
        count = (y != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = total if self.loss == "sum" else total / count + (0.1 if self.loss == "other" else 0.0)
        return {"loss": loss, "logits": logits}


def headed_batch():
    ids = torch.randint(0, 11, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, -2:] = 0
    labels[1, 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize(("loss", "tokens"), [("next", 10), ("same", 11), ("sum", 1), ("unpadded", 8), ("items", 100)])
def test_the_labels_a_loss_averages_over_are_read_off_the_loss(loss, tokens):
    """One class, five losses: no name tells them apart."""
    model, batch = Headed(loss), headed_batch()
    if loss == "items":
        batch["num_items_in_batch"] = 100
    with record(model, ["grad_l2_total"]) as rec:
        rec.backward(model(**batch)["loss"])
    assert rec.stats().manifest["loss_tokens"] == tokens


def test_a_loss_that_is_no_mean_of_the_logits_cross_entropy_is_refused():
    why = "do not tell over how many labels it is a mean: pass loss_tokens="
    with pytest.raises(NormlabError, match=why), record(Headed("other"), ["grad_l2_total"]) as rec:
        rec.sites.model(**headed_batch())


class Reader(PreLN):
    """Self-attention, cross-attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm3, self.cross_attn = nn.RMSNorm(WIDTH), Part()

    def forward(self, h, memory):
        h = self.middle(h)
        h = h + self.cross_attn(self.norm3(h)) * memory.mean().sigmoid()
        return self.add(h, self.norm2, self.mlp)


class Seq2Seq(nn.Module):
    """An encoder and a decoder that reads it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.embed = stacked(), nn.Embedding(11, WIDTH)
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList([Reader(), Reader()])})

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None):
        memory, h = self.encoder(self.embed(input_ids)), self.embed(decoder_input_ids)
        for block in self.decoder["layers"]:
            h = block(h, memory)
        return h


def test_the_encoders_mask_is_not_the_decoders_and_cross_attention_has_its_own_sites():
    model, metrics = Seq2Seq(), ["rms", *BRANCHES]
    ids, mask = torch.randint(0, 11, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, 2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :4]}
    with pytest.raises(NormlabError, match="several stacks"):
        sites(model)
    encoder, decoder = (
        measured(stacks(model)[name], metrics, **batch)[0] for name in ("encoder.layers", "decoder.layers")
    )
    assert decoder["block_out", 0, "rms", "all"] == rms(model.embed(ids[:, :4]))
    assert {"attn", "cross", "mlp", "cross_norm_in", "mlp_norm_in", "attn_norm_in"} <= {key[0] for key in decoder}
    assert encoder["block_out", 0, "rms", "all"] == rms(model.embed(ids)[mask.bool()])


class Masked(nn.Module):
    """Takes a mask, and hands its blocks none."""

    def __init__(self):
        super().__init__()
        self.inner = stacked()

    def forward(self, x, attention_mask=None):
        return self.inner(x)


class Padding(nn.Module):
    """A model that makes another mask for its blocks, as Longformer does for its windows."""

    def __init__(self):
        super().__init__()
        self.inner = Masked()

    def forward(self, x, attention_mask=None):
        return self.inner(x, attention_mask=torch.zeros(1, 1, 1, 9))


def test_a_mask_is_the_callers_never_one_that_an_inner_module_is_handed():
    mask = torch.ones(X.shape[:2])
    mask[0, 3:] = 0
    assert measured(Padding(), ["rms"], X, attention_mask=mask)[0]["block_out", 0, "rms", "all"] == rms(X[mask.bool()])
    assert measured(Padding(), ["rms"], X)[0]["block_out", 0, "rms", "all"] == rms(X)


def test_a_mask_wider_than_the_tokens_is_no_cached_past_without_a_cache():
    mask = torch.ones(2, X.shape[1] + 2)
    mask[0, 0] = 0
    with pytest.raises(NormlabError, match="leave out the mask"):
        measured(Masked(), ["rms"], X, attention_mask=mask)


class Turned(nn.Module):
    """(length, batch, width) inside, as XLNet is."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(11, WIDTH), stacked()

    def forward(self, input_ids, attention_mask=None):
        return self.inner(self.embed(input_ids).transpose(0, 1))


def test_sequence_first_activations_are_masked_by_row():
    model, ids, mask = Turned(), torch.randint(0, 11, (2, TOKENS)), torch.ones(2, TOKENS)
    mask[1, 4:] = 0
    found, _ = measured(model, ["rms"], input_ids=ids, attention_mask=mask)
    real = model.embed(ids)
    assert found["block_out", 0, "rms", "all"] == rms(real[mask.bool()])
    assert found["block_out", 0, "rms", "no_first"] == rms(real[:, 1:][mask[:, 1:].bool()])


class Convolved(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.conv(self.norm(x))


class Halving(nn.Module):
    """A stage: blocks, then half the positions and twice the features."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList([Convolved(width), Convolved(width)])
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.down(x)


def test_stages_are_flattened_into_blocks_with_their_own_widths_and_token_counts():
    model = Stack(lambda: Halving(4), lambda: Halving(8)).eval()
    x = torch.randn(2, 4, 8, 8)
    assert [block.name for block in sites(model).blocks] == [f"layers.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]
    found, _ = measured(model, list(METRICS)[:5] + BRANCHES, x)
    first, third = model.layers[0].blocks[0](x), model.layers[1].blocks[0](model.layers[0](x))
    for layer, state in ((1, first), (3, third)):
        assert found["block_out", layer, "token_l2_mean", "all"] == size(state.movedim(1, -1))
    pair = ((first - x).movedim(1, -1), x.movedim(1, -1))
    assert found["mixer", 1, "relative_contribution", "all"] == contribution(*pair)


def test_a_model_that_runs_but_not_its_blocks_is_said_not_an_empty_table():
    with pytest.raises(NormlabError, match="the model ran, but no block like 'layers.0' did"):
        measured(stacked(times=0), ["rms"], X)
