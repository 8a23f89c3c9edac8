"""Traps of gradient measurement: hooks, checkpoints, frozen models, the loss's normaliser; one test each."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from probe_zoo import batch_for, build, near, tiny_llama, token_batch, trained_step, values
from torch import nn
from torch.utils.checkpoint import checkpoint

from normlab.errors import NormlabError
from normlab.probes import METRICS, checkpoints, record
from normlab.probes.gradients import BESIDE, NOT_RETURNED, TIMES_ZERO
from normlab.probes.record import NO_GRADIENT, NO_START
from normlab.probes.returned_loss import AVERAGINGS, labels_averaged

GRADIENTS = ["grad_l2_mean", "grad_l2_total"]
EVERYTHING = list(METRICS)


@pytest.fixture(scope="module")
def batch():
    return batch_for("llama")


class Block(nn.Module):
    """Is called by keyword, may write in place into what a module returned, and returns a tuple."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.in_place = in_place
        self.norm, self.attn, self.mlp = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states):
        update = self.attn(self.norm(hidden_states))
        out = hidden_states + update
        if self.in_place:
            return (out.mul_(2).add_(self.mlp(hidden_states)).relu_(),)
        return (torch.relu(out * 2 + self.mlp(hidden_states)),)


class Blocks(nn.Module):
    """Two blocks, whose hooks run twice where `reentrant` is given: they are checkpointed from outside."""

    def __init__(self, in_place: bool, reentrant: bool | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.reentrant = nn.ModuleList(Block(in_place) for _ in range(2)), reentrant

    def forward(self, x):
        for layer in self.layers:
            again = self.reentrant
            (x,) = layer(hidden_states=x) if again is None else checkpoint(layer, x, use_reentrant=again)
        return x


def of_blocks(*how):
    model, x = Blocks(*how), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with record(model, ["token_l2_mean", *GRADIENTS], loss_tokens=1) as rec:
        model(x).square().sum().backward()
    return values(rec.stats())


def test_in_place_successors_keyword_inputs_and_tuple_returns_are_measured_right():
    found = of_blocks(True)
    assert len(found) == 3 + 2 + 2 * 2 + 2 * 2 and found == near(of_blocks(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_blocks_counts_once_too(reentrant):
    assert of_blocks(False, reentrant) == near(of_blocks(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_every_token_once(batch, reentrant):
    model = tiny_llama().train()
    plain = trained_step(model, batch, EVERYTHING)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert trained_step(model, batch, EVERYTHING) == near(plain)


@pytest.mark.parametrize("tells", ["hooks", "frames"])
def test_a_checkpoint_on_a_frozen_input_trains_as_without_the_recording(tells, monkeypatch):
    if tells == "frames":
        monkeypatch.setattr(checkpoints, "_TOP_HOOKS", None)
    x, trained, tables = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)), [], []
    for reentrant, is_recorded in ((False, False), (False, True), (None, True)):
        model = Blocks(False, reentrant)
        with record(model, ["token_l2_mean", *GRADIENTS], loss_tokens=1) if is_recorded else nullcontext() as rec:
            model(x).square().sum().backward()
        trained.append([p.grad for p in model.parameters()])
        tables.append(rec and values(rec.stats()))
    assert all(torch.equal(a, b) for a, b in zip(*trained[:2], strict=True))
    lost = {("block_in_grad", 1), ("attn_norm_in_grad", 1)}
    assert tables[1] == near({place: value for place, value in tables[2].items() if place[:2] not in lost})
    with record(Blocks(False, False), GRADIENTS, loss_tokens=1) as rec:
        loss = rec.sites.model(x).square().sum()
        with pytest.raises(NormlabError, match="needs no gradient: call loss.backward"):
            rec.backward(loss)
        loss.backward()
    absent = rec.stats().manifest["absent"]
    assert lost == {(site, int(layer)) for site, layer in map(str.split, absent) if site.endswith("_grad")}
    assert absent["block_in_grad 1"] == NO_START and absent["attn_norm_in_grad 1"] == NO_GRADIENT


@pytest.mark.parametrize("tells", ["hooks", "frames"])
def test_saved_tensors_on_the_cpu_are_no_checkpoint(tells, monkeypatch):
    if tells == "frames":
        monkeypatch.setattr(checkpoints, "_TOP_HOOKS", None)
    x, tables = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)), []
    for saves in (nullcontext, torch.autograd.graph.save_on_cpu):
        with record(Blocks(False), GRADIENTS, loss_tokens=1) as rec, saves():
            rec.sites.model(x).square().sum().backward()
        tables.append(values(rec.stats()))
        assert rec.absent.keys() == {"mask no_first"}
    assert tables[1] == near(tables[0]) and ("block_in_grad", 1) in {place[:2] for place in tables[1]}


class HalfTrained(nn.Module):
    """The first block runs without gradients."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Accumulating(False) for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            x = self.layers[0](x)
        return self.layers[1](x)


def test_where_no_gradient_came_has_the_reason():
    with record(HalfTrained(), GRADIENTS, loss_tokens=1, masks=["all"]) as rec:
        rec.sites.model(torch.ones(2, 5, 8)).square().sum().backward()
    assert {place[:2] for place in values(rec.stats())} == {("mlp_norm_in_grad", 2)}
    lost = {f"{site}_grad {layer}" for site in ("block_in", "attn_norm_in") for layer in (1, 2)}
    lost.add("mlp_norm_in_grad 1")
    assert rec.stats().manifest["absent"] == dict.fromkeys(lost, NO_GRADIENT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradient_metrics_without_gradients_are_refused_not_zero(batch, mode):
    model = tiny_llama()
    with pytest.raises(NormlabError, match="leave no_grad/inference_mode"), record(model, GRADIENTS), mode():
        model(**batch)


def test_gradient_metrics_without_a_backward_are_refused(batch):
    model = tiny_llama()
    with record(model, GRADIENTS) as rec:
        model(**batch)
    with pytest.raises(NormlabError, match="no backward pass ran"):
        rec.stats()
    with pytest.raises(NormlabError, match="nothing was recorded"):
        record(model).stats()


def test_a_frozen_model_is_measured_and_gets_no_parameter_gradient(batch):
    model = tiny_llama()
    expected = trained_step(model, batch, EVERYTHING)
    model.requires_grad_(False)
    for backward in ("loss", "rec"):
        with record(model, EVERYTHING) as rec:
            loss = model(**batch).loss
            loss.backward() if backward == "loss" else rec.backward(loss)
        assert values(rec.stats()) == near(expected, 8)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_users_own_input_embeddings_keep_their_requires_grad_flag():
    model = tiny_llama().requires_grad_(False)
    embeddings = torch.randn(1, 6, 32)
    with record(model, GRADIENTS, loss_tokens=1) as rec:
        rec.backward(model(inputs_embeds=embeddings).logits.sum())
    assert not embeddings.requires_grad and len(rec.stats().to_pandas()) > 0


def test_a_frozen_model_may_write_into_its_first_block_input_in_place():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(8, 8)})])
            self.layers[0].forward = lambda x: x.add_(1).mul(2)

        def forward(self, x):
            return self.layers[0](x)

    model = Writes().requires_grad_(False)
    with record(model, GRADIENTS, loss_tokens=1) as rec:
        model(torch.zeros(1, 3, 8)).sum().backward()
    assert values(rec.stats())["block_in_grad", 1, "grad_l2_mean", "all"] == pytest.approx(2 * 8**0.5)


def test_gradients_are_of_the_summed_loss_and_the_normaliser_is_recorded(batch):
    model = tiny_llama()
    from_mean = trained_step(model, batch, GRADIENTS)
    labels = int((batch["labels"][:, 1:] != -100).sum())
    with record(model, GRADIENTS, loss_tokens=1) as rec:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), reduction="sum"
        ).backward()
    assert values(rec.stats()) == near(from_mean)
    with record(model, GRADIENTS) as rec:  # as transformers' Trainer accumulates
        model(**batch, num_items_in_batch=torch.tensor(4 * labels)).loss.backward()
    assert values(rec.stats()) == near(from_mean)
    assert rec.stats().manifest["loss_tokens"] == 4 * labels


def test_without_countable_labels_the_caller_is_asked_for_loss_tokens(batch):
    model = tiny_llama()
    with pytest.raises(NormlabError, match="pass loss_tokens="), record(model, GRADIENTS):
        model(batch["input_ids"])


class Weighing(nn.Module):
    """Returns a multiple of the model's loss, with the logits or alone."""

    def __init__(self, model, factor, is_alone=False):
        super().__init__()
        self.model, self.factor, self.is_alone = model, factor, is_alone

    def forward(self, **batch):
        out = self.model(**batch)
        loss = self.factor * out.loss
        return loss if self.is_alone else {"loss": loss, "logits": out.logits}


def test_the_outermost_loss_is_the_one_that_is_compared(batch):
    model = tiny_llama()
    from_mean = trained_step(model, batch, GRADIENTS)
    labels = int((batch["labels"][:, 1:] != -100).sum())
    for wrapped, divisor in ((Weighing(model, 1.0, is_alone=True), labels), (Weighing(model, float(labels)), 1)):
        with record(wrapped, GRADIENTS) as rec:
            out = wrapped(**batch)
            rec.backward(out if wrapped.is_alone else out["loss"])
        assert values(rec.stats()) == near(from_mean) and rec.stats().manifest["loss_tokens"] == divisor
    for is_alone, words in ((False, "do not tell over how many labels"), (True, "returns no logits with its loss")):
        wrapped = Weighing(model, 0.1, is_alone)
        with pytest.raises(NormlabError, match=words), record(wrapped, GRADIENTS):
            wrapped(**batch)


def divided_in_place(loss):
    loss /= 4
    loss.backward()


MULTIPLIED = {
    "divided": lambda loss, gain: (loss / 4).backward(),
    "divided in place": lambda loss, gain: divided_in_place(loss),
    "a share of the labels": lambda loss, gain: (loss * 5 / 12).backward(),
    "ascended": lambda loss, gain: (-loss).backward(),
    "scaled": lambda loss, gain: torch.amp.GradScaler("cpu", init_scale=1024.0).scale(loss).backward(),
    "from a gradient": lambda loss, gain: loss.backward(torch.tensor(0.25)),
    "in two passes": lambda loss, gain: ((0.3 * loss).backward(retain_graph=True), (0.6 * loss).backward()),
    "a look before": lambda loss, gain: (torch.autograd.grad(3 * loss, gain, retain_graph=True), (loss / 4).backward()),
    "beside a term of the weights": lambda loss, gain: (loss / 4 + gain.square().sum()).backward(),
}


@pytest.mark.parametrize("way", MULTIPLIED)
def test_what_the_returned_loss_is_multiplied_by_is_undone(batch, way):
    model = tiny_llama()
    plain = trained_step(model, batch, GRADIENTS)
    with record(model, GRADIENTS) as rec:
        MULTIPLIED[way](model(**batch).loss, model.model.norm.weight)
    assert values(rec.stats()) == near(plain, 100) and not rec.absent


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("read", ["head", "logits"])
def test_a_look_that_ends_above_the_blocks_is_no_term_beside_the_loss(batch, read, times):
    model = tiny_llama()
    plain = trained_step(model, batch, GRADIENTS)
    with record(model, GRADIENTS) as rec:
        out = model(**batch)
        look = out.logits.logsumexp(-1).square().mean()
        for last in range(times)[::-1]:
            torch.autograd.grad(look, model.lm_head.weight if read == "head" else out.logits, retain_graph=True)
            (out.loss / 4).backward(retain_graph=bool(last))
    assert values(rec.stats()) == near(plain, 100) and not rec.absent


def test_a_loss_times_zero_has_no_gradients_and_the_reason(batch):
    model = tiny_llama()
    plain = trained_step(model, batch, GRADIENTS)
    with record(model, GRADIENTS) as rec:
        for factor in (1, 0):
            (factor * model(**batch).loss).backward()
    assert values(rec.stats()) == near(plain, 100) and rec.absent == {"gradients": TIMES_ZERO}


def test_an_outer_loss_of_the_same_value_or_of_none_is_the_one_that_arrives(batch):
    class Again(Weighing):
        def forward(self, **batch):
            out = self.model(**batch)
            return {"loss": self.model.loss_function(out.logits, batch["labels"], self.factor), "logits": out.logits}

    model = tiny_llama()
    plain = trained_step(model, batch, GRADIENTS)
    wrapped = Again(model, model.config.vocab_size)
    with record(wrapped, GRADIENTS) as rec:
        wrapped(**batch)["loss"].backward()
    assert values(rec.stats()) == near(plain, 100)
    alone = Weighing(model, 1.0, is_alone=True)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    for measured in (model, alone):
        with record(measured, GRADIENTS) as rec:
            out = measured(**batch)
            (out.loss if measured is model else out).backward()
        assert len(values(rec.stats())) == len(plain)


def test_no_loss_outlives_the_call_of_several_texts(batch):
    class Two(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, query_ids, document_ids):
            losses = [self.model(input_ids=ids, labels=ids).loss for ids in (query_ids, document_ids)]
            kept.extend(map(weakref.ref, losses))
            return sum(losses)

    kept: list[Any] = []
    model, ids = Two(tiny_llama()), batch["input_ids"]
    with record(model, GRADIENTS, loss_tokens=1) as rec:
        model(query_ids=ids, document_ids=ids + 1).backward()
    del rec
    gc.collect()
    assert len(kept) == 2 and not any(loss() is not None for loss in kept)


def test_gradients_of_another_loss_than_the_returned_one_are_left_out_with_the_reason(batch):
    model = tiny_llama()
    with record(model, ["rms", *GRADIENTS]) as rec:
        model(**batch).logits.logsumexp(-1).mean().backward()
    stats = rec.stats()
    assert {name for _, _, name, _ in values(stats)} == {"rms"}
    assert stats.manifest["absent"] == {"gradients": NOT_RETURNED}


def distilled(out):
    """The divergence from a sharper model's predictions."""
    wanted = (out.logits.detach() * torch.linspace(1, 3, out.logits.shape[-1])).softmax(-1)
    return nn.functional.kl_div(out.logits.log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean")


BESIDE_IT = {
    "distillation": lambda out: (0.5 * out.loss + 0.5 * distilled(out)).backward(),
    "a tenth": lambda out: (0.9 * out.loss + 0.1 * distilled(out)).backward(),
    "a z-loss": lambda out: (out.loss + 1e-2 * out.logits.logsumexp(-1).square().mean()).backward(),
    "a pass of its own": lambda out: (distilled(out).backward(retain_graph=True), out.loss.backward()),
    "the loss again": lambda out: (
        out.loss + nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), out.logits.argmax(-1)[:, 1:].flatten())
    ).backward(),
}


class Float64(nn.Module):
    """Returns a copy of the logits of which the loss is not made."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        out = self.model(**batch)
        out.logits = out.logits.double()
        return out


class Fused(torch.autograd.Function):
    """A cross-entropy that keeps its gradient in bfloat16."""

    @staticmethod
    def forward(ctx, logits, labels):
        counted = labels != -100
        wanted = nn.functional.one_hot(labels.clamp(min=0), logits.shape[-1])
        ctx.save_for_backward(((logits.softmax(-1) - wanted) * counted[:, None] / counted.sum()).bfloat16())
        return nn.functional.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].float() * gradient, None


class FusedLoss(nn.Module):
    """Returns the loss of `Fused`."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, labels, **batch):
        logits = self.model(**batch).logits
        return {"loss": Fused.apply(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("way", BESIDE_IT)
def test_gradients_of_the_returned_loss_and_a_term_of_its_logits_are_left_out(batch, way, is_copied):
    model = tiny_llama()
    model = Float64(model) if is_copied else model
    with record(model, ["rms", *GRADIENTS]) as rec:
        BESIDE_IT[way](model(**batch))
    stats = rec.stats()
    assert {name for _, _, name, _ in values(stats)} == {"rms"} and stats.manifest["absent"] == {"gradients": BESIDE}


@pytest.mark.parametrize("logits", ["as they are", "large", "small"])
@pytest.mark.parametrize(
    "how", ["float32", "bfloat16", "autocast", "frozen", "checkpointed", "a copy is returned", "fused"]
)
def test_the_returned_loss_alone_is_not_taken_for_one_with_a_term_beside_it(batch, how, logits):
    model = tiny_llama().train()
    with torch.no_grad():
        model.lm_head.weight.mul_({"as they are": 1, "large": 20, "small": 0.05}[logits])
    if how == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = model.bfloat16() if how == "bfloat16" else model.requires_grad_(how != "frozen")
    model = {"a copy is returned": Float64, "fused": FusedLoss}.get(how, lambda model: model)(model)
    with record(model, GRADIENTS, loss_tokens=None) as rec:
        for part in (batch, {name: value[:1] for name, value in batch.items()}):
            rec.sites.model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                out = model(**part)
            (out["loss"] / 4 + 0.0 * out["logits"].sum()).backward()
    assert "gradients" not in rec.stats().manifest["absent"]


def test_a_masked_language_models_labels_are_not_shifted():
    model, batch = build("bert"), token_batch()
    with record(model, GRADIENTS) as rec:
        rec.backward(model(**batch).loss)
    assert rec.stats().manifest["loss_tokens"] == int((batch["labels"] != -100).sum())


LABELS = torch.randint(0, 9, (2, 8), generator=torch.Generator().manual_seed(1))
LOGITS = torch.randn(2, 8, 9, generator=torch.Generator().manual_seed(2))


def mean_loss(logits, shifted=True, smoothing=0.0):
    begin = int(shifted)
    scores, labels = logits[:, : 8 - begin].flatten(0, 1), LABELS[:, begin:].flatten()
    return nn.functional.cross_entropy(scores, labels, label_smoothing=smoothing)


@pytest.mark.parametrize(
    ("logits", "loss", "labels"),
    [
        (LOGITS, mean_loss(LOGITS), 14),
        (LOGITS, mean_loss(LOGITS, shifted=False), 16),
        (LOGITS, mean_loss(LOGITS, shifted=False) * 1.0005, None),
        (LOGITS, mean_loss(LOGITS).bfloat16(), 14),
        (LOGITS, mean_loss(LOGITS).bfloat16().float(), 14),
        (LOGITS.double(), mean_loss(LOGITS.double()), 14),
        (100 * LOGITS, mean_loss(100 * LOGITS), 14),
    ],
)
def test_a_loss_is_a_mean_of_labels_within_its_own_rounding_only(logits, loss, labels):
    """A loss with another term, or smoothed labels, is near some reading now and then."""
    averaged = labels_averaged(loss, logits, LABELS)
    assert (averaged and averaged[0]) == labels


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        (mean_loss(LOGITS), mean_loss(LOGITS), 14),
        (mean_loss(LOGITS, smoothing=0.1), mean_loss(LOGITS, shifted=False), None),
        (mean_loss(LOGITS), mean_loss(LOGITS, shifted=False), None),
        (mean_loss(LOGITS).new_tensor(torch.nan), mean_loss(LOGITS), 14),
    ],
)
def test_a_loss_averages_its_labels_in_one_way_in_all_calls(first, second, labels):
    settled = set(AVERAGINGS)
    labels_averaged(first, LOGITS, LABELS, settled=settled)
    averaged = labels_averaged(second, LOGITS, LABELS, settled=settled)
    assert (averaged and averaged[0]) == labels


def test_the_result_of_two_forwards_before_one_backward_holds_both(batch):
    model = tiny_llama()
    halves = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(2)]
    with record(model, GRADIENTS) as rec:
        for half in halves:
            rec.backward(model(**half).loss)
    one_by_one = values(rec.stats())
    with record(model, GRADIENTS) as rec:
        sum(model(**half).loss for half in halves).backward()
    assert values(rec.stats()) == near(one_by_one)


class Upcasting(nn.RMSNorm):
    """Keeps a copy in float32, so its input may be written over."""

    def forward(self, x):
        return super().forward(x.to(torch.float64)).to(x.dtype)


class Accumulating(nn.Module):
    """A block of Llama's shape that adds in place, or not."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.in_place = in_place
        self.norm1, self.attn = Upcasting(8, dtype=torch.float64), nn.Linear(8, 8)
        self.norm2, self.mlp = Upcasting(8, dtype=torch.float64), nn.Linear(8, 8)

    def forward(self, x):
        for norm, part in ((self.norm1, self.attn), (self.norm2, self.mlp)):
            update = part(norm(x))
            x = x.add_(update) if self.in_place else x + update
        return x


def test_a_stream_that_is_written_in_place_has_its_own_gradient_at_every_layer():
    tables = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8), nn.Sequential(*(Accumulating(in_place) for _ in range(3))))
        with record(model, GRADIENTS, loss_tokens=1) as recorder:
            model(torch.arange(10).view(2, 5)).square().sum().backward()
        tables.append(values(recorder.stats()))
    sizes = [tables[0]["block_in_grad", layer, "grad_l2_total", "all"] for layer in (1, 2, 3)]
    assert len(set(sizes)) == 3
    assert tables[1] == near(tables[0])


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("by_recorder", [False, True])
def test_a_gradient_that_passes_by_a_view_written_in_place_is_left_out(is_view, by_recorder):
    class Embedding(nn.Embedding):
        def forward(self, tokens):
            x = super().forward(tokens)
            return x.view(x.shape) if is_view else x

    tables, absent = [], []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Embedding(16, 8), nn.Sequential(*(Accumulating(in_place) for _ in range(2))))
        with record(model, ["rms", *GRADIENTS], loss_tokens=1) as recorder:
            loss = model(torch.arange(10).view(2, 5)).square().sum()
            recorder.backward(loss) if by_recorder else loss.backward()
        tables.append(values(recorder.stats()))
        absent.append(recorder.stats().manifest["absent"])
    right, found = ({place: x for place, x in table.items() if "grad" in place[2]} for table in tables)
    sites = ("block_in_grad", "attn_norm_in_grad", "mlp_norm_in_grad")
    assert {place[:2] for place in right} == {(site, layer) for site in sites for layer in (1, 2)} and absent[0] == {}
    assert found == ({} if is_view else near(right))
    assert absent[1].keys() == {f"{site} {layer}" for site in sites for layer in (1, 2) if is_view}


# What a block's norms read: the stream, or the same values in another tensor.
COPIES = {
    "cast": lambda x: x.double(),
    "copy": lambda x: x.clone(),
    "rows": lambda x: x.view(-1, 8),
    "rows of a cast": lambda x: x.double().reshape(-1, 8).permute(0, -1),
    "cast of rows": lambda x: x.flatten(0, 1).double()[None],
    "turned twice": lambda x: x.permute(1, 2, 0).mT.transpose(0, -2).contiguous(),
}
# Copies that autograd's nodes do not tell from a change.
OTHERS = {
    "product": lambda x: x * torch.ones(2, 5, 1),
    "clamped": lambda x: x.clamp(-100, 100),
    "parts": lambda x: torch.cat(x.chunk(2)),
}


class Copying(nn.Module):
    def __init__(self, copy):
        super().__init__()
        self.copy = copy
        self.norm1, self.attn = nn.RMSNorm(8, dtype=torch.float64), nn.Linear(8, 8)
        self.norm2, self.mlp = nn.RMSNorm(8, dtype=torch.float64), nn.Linear(8, 8)

    def forward(self, x):
        for norm, part in ((self.norm1, self.attn), (self.norm2, self.mlp)):
            norm.to(self.copy(x).dtype)
            x = x + part(norm(self.copy(x)).to(x.dtype).view(x.shape))
        return x


class CopyingModel(nn.Module):
    def __init__(self, copy, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(Copying(copy) for _ in range(2))
        self.norm, self.copy, self.reentrant = nn.RMSNorm(8, dtype=torch.float64), copy, reentrant

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm.to(self.copy(x).dtype)(self.copy(x))


HOW = ["by the recorder", "frozen", "checkpointed", "checkpointed, reentrant"]
CASES = [*((name, "backward") for name in COPIES), *((name, how) for name in ("cast", "rows") for how in HOW)]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_the_gradient_at_a_norm_is_the_streams_where_it_reads_a_copy(name, how):
    tables = []
    for copy in (lambda x: x, COPIES[name]):
        model = CopyingModel(copy, {"checkpointed": False, "checkpointed, reentrant": True}.get(how))
        if how == "frozen":
            model.requires_grad_(False)
        with record(model, ["token_l2_mean", *GRADIENTS], loss_tokens=1) as rec:
            loss = model(torch.arange(10).view(2, 5)).sin().sum()
            loss.backward() if "checkpointed" in how or how == "backward" else rec.backward(loss)
        tables.append(values(rec.stats()))
        assert rec.stats().manifest["absent"] == {}
    right, found = tables
    assert {(site, layer) for site, layer, *_ in right if site.endswith("norm_in_grad")} == {
        *((f"{part}_norm_in_grad", layer) for part in ("attn", "mlp") for layer in (1, 2)),
        ("final_norm_in_grad", 2),
    }
    assert found == near(right)


@pytest.mark.parametrize("name", OTHERS)
def test_a_gradient_that_passes_by_a_copy_of_the_norms_own_is_left_out(name):
    tables = []
    for copy in (lambda x: x, OTHERS[name]):
        with record(CopyingModel(copy, None), ["token_l2_mean", *GRADIENTS], loss_tokens=1) as rec:
            rec.backward(rec.sites.model(torch.arange(10).view(2, 5)).sin().sum())
        tables.append(values(rec.stats()))
    right, found = tables
    lost = {f"{part}_norm_in_grad {layer}" for part in ("attn", "mlp") for layer in (1, 2)}
    assert rec.stats().manifest["absent"].keys() == lost
    assert found == near({place: x for place, x in right.items() if f"{place[0]} {place[1]}" not in lost})
