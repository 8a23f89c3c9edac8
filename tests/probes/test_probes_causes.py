"""Causes of silently wrong readings, one small model each: what the probes check while they record."""

from __future__ import annotations

import pytest
import torch
from probe_zoo import run, values
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import METRICS, record, sites
from normlab.probes.sites import stacks

WIDTH, TOKENS = 8, 6
BRANCHES = ["relative_contribution"]


class Part(nn.Module):
    """A branch: its matrix, and a class name that says nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.weight(x)


class Adding(Part):
    """Returns the stream with itself added, as Bloom's branches do."""

    def forward(self, x, residual):
        return residual + self.weight(x)


class Block(nn.Module):
    """Pre-LN; `how` says what is done with a branch's output."""

    def __init__(self, how="plain"):
        super().__init__()
        self.how = how
        part = Adding if how == "contained" else Part
        self.norm1, self.attn, self.norm2, self.mlp = nn.RMSNorm(WIDTH), part(), nn.RMSNorm(WIDTH), part()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def add(self, h, norm, part):
        if self.how == "contained":
            return part(norm(h), h)
        factor = {"plain": 1.0, "scaled": 0.22, "by feature": self.gain}.get(self.how, 1.0)
        if self.how == "lost":
            return torch.tanh(h) + part(norm(h))
        if self.how == "carried":
            return 0.8 * h + 0.5 * part(norm(h))
        return h + factor * part(norm(h))

    def forward(self, h):
        return self.add(self.add(h, self.norm1, self.attn), self.norm2, self.mlp)


class Model(nn.Module):
    """A stack of blocks, each run `times` times."""

    def __init__(self, blocks, times=1):
        super().__init__()
        self.layers, self.times = nn.ModuleList(blocks), times

    def forward(self, x):
        for _ in range(self.times):
            for block in self.layers:
                x = block(x)
        return x


def stacked(how):
    torch.manual_seed(0)
    return Model([Block(how), Block(how)])


def states(model, x):
    """h_0, the stream after attention and h_1, in float64."""
    block = model.layers[0]
    middle = block.add(x, block.norm1, block.attn)
    return x.double(), middle.double(), block(x).double()


@pytest.mark.parametrize("how", ["plain", "contained", "scaled", "by feature"])
def test_what_a_branch_adds_is_told_by_the_blocks_sum(how):
    """Bloom returns the residual too, Granite scales a branch afterwards, BEiT has a gain a feature."""
    model, x = stacked(how), torch.randn(2, TOKENS, WIDTH)
    found = run(model, {"x": x}, BRANCHES)
    with torch.no_grad():
        h, middle, out = states(model, x)
    for site, before, after in (("attn", h, middle), ("mlp", middle, out), ("block", h, out)):
        right = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean()
        assert found[site, 1, "relative_contribution", "all"] == pytest.approx(float(right), rel=1e-4), site


def test_where_the_stream_is_scaled_a_branch_is_set_against_the_scaled_stream():
    model, x = stacked("carried"), torch.randn(2, TOKENS, WIDTH)
    found = run(model, {"x": x}, BRANCHES)
    with torch.no_grad():
        h, middle, out = states(model, x)
    pairs = {"attn": (0.8 * h, middle), "mlp": (0.8 * middle, out), "block": (0.64 * h, out)}
    for site, (before, after) in pairs.items():
        right = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean()
        assert found[site, 1, "relative_contribution", "all"] == pytest.approx(float(right), rel=1e-4), site


def test_a_block_that_does_not_add_up_has_no_branch_rows_and_the_manifest_says_why():
    model = stacked("lost")
    with record(model, [*BRANCHES, "rms"]) as rec, torch.no_grad():
        model(torch.randn(2, TOKENS, WIDTH))
    stats = rec.stats()
    assert not [key for key in values(stats) if key[2] == "relative_contribution"]
    assert "not its input + attn + mlp" in stats.manifest["absent"]["attn 1"]
    assert ("block_out", 2, "rms", "all") in values(stats)


def test_a_block_that_runs_again_is_further_depth_not_more_tokens():
    torch.manual_seed(0)
    model = Model([Block(), Block()], times=3)
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    with record(model, ["rms", "grad_l2_total"], loss_tokens=1) as rec:
        model(x).square().sum().backward()
    found, h, at = values(rec.stats()), x, []
    for i in range(6):
        at.append(h)
        h.retain_grad()
        h = model.layers[i % 2](h)
    x.grad = None
    h.square().sum().backward()
    assert rec.stats().manifest["layers"] == 6
    for i, state in enumerate(at, start=1):
        assert found["block_out", i - 1, "rms", "all"] == pytest.approx(float(state.square().mean().sqrt()), rel=1e-5)
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
    torch.manual_seed(0)
    model, x = stacked("plain"), torch.randn(2, TOKENS, WIDTH)
    for block in model.layers:
        block.sum1, block.sum2 = adds(), adds()
        block.add = lambda h, norm, part, b=block: (b.sum1 if part is b.attn else b.sum2)(part(norm(h)), h)
    found = run(model, {"x": x}, BRANCHES)
    with torch.no_grad():
        h, middle, out = states(model, x)
    for site, before, after in (("attn", h, middle), ("mlp", middle, out), ("block", h, out)):
        right = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())
        got = found.get((site, 1, "relative_contribution", "all"))
        assert got is None or got == pytest.approx(right, rel=1e-4), site
    assert adds is Fusion or ("attn", 1, "relative_contribution", "all") in found


class Headed(nn.Module):
    """A language model whose loss is shifted, unshifted, summed or none of these, whatever its class is called."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.body = loss, Model([Block(), Block()])
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
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 11, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels = ids.clone()
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
    model = Headed("other")
    with (
        pytest.raises(NormlabError, match="no mean over the labels.*pass loss_tokens="),
        record(model, ["grad_l2_total"]),
    ):
        model(**headed_batch())


class Seq2Seq(nn.Module):
    """An encoder and a decoder that reads it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, WIDTH)
        self.encoder, self.decoder = (
            Model([Block(), Block()]),
            nn.ModuleDict({"layers": nn.ModuleList([Reader(), Reader()])}),
        )

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None):
        memory, h = self.encoder(self.embed(input_ids)), self.embed(decoder_input_ids)
        for block in self.decoder["layers"]:
            h = block(h, memory)
        return h


class Reader(nn.Module):
    """Self-attention, cross-attention and an MLP, Pre-LN."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.self_attn, self.cross_attn, self.mlp = Part(), Part(), Part()

    def forward(self, h, memory):
        h = h + self.self_attn(self.norm1(h))
        h = h + self.cross_attn(self.norm2(h)) * memory.mean().sigmoid()
        return h + self.mlp(self.norm3(h))


def test_the_encoders_mask_is_not_the_decoders_and_cross_attention_has_its_own_sites():
    model, metrics = Seq2Seq(), ["rms", *BRANCHES]
    ids, mask = torch.randint(0, 11, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, 2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :4]}
    with pytest.raises(NormlabError, match="several stacks"):
        sites(model)
    found = {name: run_stack(model, where, batch, metrics) for name, where in stacks(model).items()}
    decoder = found["decoder.layers"]
    state = model.embed(ids[:, :4])
    assert decoder["block_out", 0, "rms", "all"] == pytest.approx(float(state.square().mean().sqrt()), rel=1e-5)
    assert {"attn", "cross", "mlp", "cross_norm_in", "mlp_norm_in", "attn_norm_in"} <= {key[0] for key in decoder}
    real = model.embed(ids)[mask.bool()]
    assert found["encoder.layers"]["block_out", 0, "rms", "all"] == pytest.approx(
        float(real.square().mean().sqrt()), rel=1e-5
    )


def run_stack(model, where, batch, metrics):
    with record(where, metrics) as rec, torch.no_grad():
        model(**batch)
    return values(rec.stats())


class Padding(nn.Module):
    """Makes a mask of its own for its blocks, as Longformer does for its windows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, attention_mask=None):
        return self.inner(x, attention_mask=torch.zeros(1, 1, 1, 9))


class Masked(Model):
    def forward(self, x, attention_mask=None):
        return super().forward(x)


def test_a_mask_is_the_callers_never_one_that_an_inner_module_is_handed():
    torch.manual_seed(0)
    model, x = Padding(Masked([Block(), Block()])), torch.randn(2, TOKENS, WIDTH)
    mask = torch.ones(2, TOKENS)
    mask[0, 3:] = 0
    found = run(model, {"x": x, "attention_mask": mask}, ["rms"])
    assert found["block_out", 0, "rms", "all"] == pytest.approx(float(x[mask.bool()].square().mean().sqrt()), rel=1e-5)
    assert run(model, {"x": x}, ["rms"])["block_out", 0, "rms", "all"] == pytest.approx(
        float(x.square().mean().sqrt()), rel=1e-5
    )


def test_a_mask_wider_than_the_tokens_is_no_cached_past_without_a_cache():
    model = Masked([Block(), Block()])
    mask = torch.ones(2, TOKENS + 2)
    mask[0, 0] = 0
    with pytest.raises(NormlabError, match="leave out the mask"), record(model, ["rms"]) as rec, torch.no_grad():
        model(torch.randn(2, TOKENS, WIDTH), attention_mask=mask)
        rec.stats()


class Turned(Model):
    """(length, batch, width) inside, as XLNet is."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.embed = nn.Embedding(11, WIDTH)

    def forward(self, input_ids, attention_mask=None):
        return super().forward(self.embed(input_ids).transpose(0, 1))


def test_sequence_first_activations_are_masked_by_row():
    model = Turned([Block(), Block()])
    ids, mask = torch.randint(0, 11, (2, TOKENS)), torch.ones(2, TOKENS)
    mask[1, 4:] = 0
    found = run(model, {"input_ids": ids, "attention_mask": mask}, ["rms"])
    real = model.embed(ids)
    assert found["block_out", 0, "rms", "all"] == pytest.approx(
        float(real[mask.bool()].square().mean().sqrt()), rel=1e-5
    )
    first = real[:, 1:][mask[:, 1:].bool()]
    assert found["block_out", 0, "rms", "no_first"] == pytest.approx(float(first.square().mean().sqrt()), rel=1e-5)


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


class Convolved(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.conv(self.norm(x))


def test_stages_are_flattened_into_blocks_with_their_own_widths_and_token_counts():
    torch.manual_seed(0)
    model = Model([Halving(4), Halving(8)]).eval()
    x = torch.randn(2, 4, 8, 8)
    assert [block.name for block in sites(model).blocks] == [f"layers.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]
    found = run(model, {"x": x}, list(METRICS)[:5] + BRANCHES)
    with torch.no_grad():
        states = [x, model.layers[0].blocks[0](x), model.layers[0](x)]
    rms = lambda t: float(t.movedim(1, -1).norm(dim=-1).mean())  # noqa: E731
    assert found["block_out", 1, "token_l2_mean", "all"] == pytest.approx(rms(states[1]), rel=1e-5)
    with torch.no_grad():
        third = model.layers[1].blocks[0](states[2])
    assert found["block_out", 3, "token_l2_mean", "all"] == pytest.approx(rms(third), rel=1e-5)
    ratio = ((states[1] - x).norm(dim=1) / x.norm(dim=1)).mean()
    assert found["mixer", 1, "relative_contribution", "all"] == pytest.approx(float(ratio), rel=1e-4)


def test_a_model_that_runs_but_not_its_blocks_is_said_not_an_empty_table():
    model = Model([Block(), Block()], times=0)
    with record(model) as rec, torch.no_grad():
        model(torch.randn(1, 3, WIDTH))
    with pytest.raises(NormlabError, match="the model ran, but no block like 'layers.0' did"):
        rec.stats()
