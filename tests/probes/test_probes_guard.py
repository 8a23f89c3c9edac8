"""A recording ends no program of its user's: what cannot be measured is left out, and `absent` says why."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from probe_toys import WIDTH, PreLN, Stack, X, rms, size
from probe_zoo import batch_for, tiny_llama, values
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from normlab import observe
from normlab.errors import NormlabError
from normlab.probes import (
    angular_distance,
    jacobian_identity,
    massive_activations,
    quantization_costs,
    record,
    skip_sensitivity,
)

SIZE = ["token_l2_mean"]


class Head(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, *kinds):
        super().__init__()
        self.embed, self.body = nn.Embedding(32, WIDTH), Stack(*(kinds or (PreLN, PreLN)))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, input_ids, more=None):
        return self.head(self.body(self.embed(input_ids)))


def ids(rows=2, length=7):
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(1))


PLACES = ["norm_starts", "branch_done", "finish", "activation", "block_end", "add", "gradient"]


@pytest.mark.parametrize("where", PLACES)
def test_an_error_of_ours_ends_neither_pass_and_is_named(where, monkeypatch):
    from normlab.probes import accumulate, block_trace
    from normlab.probes.call_inputs import CallInputs

    owners = {"activation": accumulate.Measurer, "block_end": accumulate.Measurer, "gradient": accumulate.Measurer}
    owner = CallInputs if where == "add" else owners.get(where, block_trace.BlockTrace)

    def fail(*_, **__):
        raise ZeroDivisionError("of ours")

    model, x = Head(), ids()
    plain = model(x)
    monkeypatch.setattr(owner, where, fail)
    with record(model, ["rms", "relative_contribution", "grad_l2_mean"], loss_tokens=1) as rec:
        out = model(x)
        out.sum().backward()
    assert torch.equal(out, plain)
    if where == "add":
        with pytest.raises(NormlabError, match="of ours"):
            rec.stats()
    else:
        assert len(rec.stats().to_pandas())
    assert any("ZeroDivisionError: of ours" in why for why in rec.absent.values())


def test_an_error_in_a_gradients_reduction_does_not_end_the_backward_pass(monkeypatch):
    from normlab.probes import gradients

    model = Head()
    with record(model, ["rms", "grad_l2_mean"], loss_tokens=1) as rec:
        loss = model(ids()).sum()
        monkeypatch.setattr(gradients, "features_last", lambda *_: 1 / 0)
        loss.backward()
    assert model.head.weight.grad is not None
    assert set(rec.stats().to_pandas()["metric"]) == {"rms"} and "ZeroDivisionError" in rec.absent["gradients"]


def loss_of(model, x):
    def loss(weights, row):
        return functional_call(model, weights, (row[None],)).square().mean()

    return loss, dict(model.named_parameters()), x


TRANSFORMS = {
    "grad": lambda loss, p, x: grad(loss)(p, x[0]),
    "vmap of grad": lambda loss, p, x: vmap(grad(loss), (None, 0))(p, x),
    "jvp": lambda loss, p, x: jvp(lambda w: loss(w, x[0]), (p,), (p,))[1],
}


@pytest.mark.parametrize("metrics", [["rms"], ["rms", "grad_l2_mean"]])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_run_as_without_and_are_left_out(name, metrics):
    given = loss_of(Head(), ids())
    expected = TRANSFORMS[name](*given)
    with record(given_model := Head(), metrics, loss_tokens=1) as rec:
        found = TRANSFORMS[name](*loss_of(given_model, ids()))
        given_model(ids()).sum().backward()
    flat = [torch.stack([x.norm() for x in (v.values() if isinstance(v, dict) else [v])]) for v in (expected, found)]
    assert flat[0].shape == flat[1].shape
    assert rec.stats().manifest["forward_passes"] == 1 and "calls inside torch.func" in rec.absent


def test_packed_rows_of_pytorchs_encoder_are_refused_in_a_line_and_the_model_runs():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    model, padding = nn.TransformerEncoder(layer, 2).eval(), torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 6:] = True
    with torch.no_grad():
        plain = model(X, src_key_padding_mask=padding)
        with record(model, SIZE) as rec:
            assert torch.equal(model(X, src_key_padding_mask=padding), plain)
    with pytest.raises(NormlabError, match="nested tensor.*set_fastpath_enabled"):
        rec.stats()


@pytest.mark.parametrize("shape", [(0, 7), (2, 0)])
def test_a_call_without_tokens_adds_nothing(shape):
    model, nil = Head(), torch.zeros(shape, dtype=torch.long)
    metrics = ["token_l2_mean", "relative_contribution", "update_effective_rank", "massive_activation_ratio"]
    with record(model, metrics) as alone, torch.no_grad():
        model(ids())
    with record(model, metrics) as rec, torch.no_grad():
        model(nil)
        model(ids())
        model(nil)
    assert values(rec.stats()) == values(alone.stats()) and "calls without tokens" in rec.absent
    with pytest.raises(NormlabError, match="hold nothing to measure"), torch.no_grad():
        with record(model, metrics) as rec:
            model(nil)
        rec.stats()


def test_an_empty_micro_batch_does_not_end_a_training_step():
    model = Head()
    with observe(model, every=1, loss_tokens=1) as observer:
        for step in range(2):
            for x in (ids(), torch.zeros(0, 7, dtype=torch.long)):
                model(x).sum().backward()
            observer.step(1.0, step)
    assert set(observer.to_pandas()["step"]) == {0, 1}


# -- calls that had begun ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["embed", "body.layers.0", "body.layers.0.attn", "body.layers.1"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_call_counts_only_if_it_was_seen_to_begin(place, in_thread):
    """The recording is opened, or closed, while the model is in the middle of a pass."""
    model, x, made = Head(), ids(), []

    def switch(*_):
        if not made:
            made.append(record(model, SIZE).__enter__())

    handle = model.get_submodule(place).register_forward_hook(switch)
    run = lambda: model(x)  # noqa: E731
    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    handle.remove()
    model(x)
    made[0].__exit__(None, None, None)
    stats = made[0].stats()
    assert stats.manifest["forward_passes"] == 1 and len(stats.to_pandas()) == 2 * (3 + 4)
    assert set(stats.to_pandas(errors=True).query("mask == 'all'")["tokens"]) == {14}


def test_recordings_opened_and_closed_while_another_thread_runs_hold_whole_calls_only():
    model, x, stop = Head(), ids(), threading.Event()
    failed: list[BaseException] = []

    def run():
        try:
            while not stop.is_set():
                with torch.no_grad():
                    model(x)
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=run)
    thread.start()
    shapes = set()
    try:
        for _ in range(60):
            with record(model, SIZE) as rec:
                for _ in range(3):
                    stop.wait(0.0005)
            try:
                table = rec.stats().to_pandas()
            except NormlabError:
                continue
            shapes.add(len(table))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failed and shapes <= {2 * (3 + 4)}


# -- hooks that change what passes by ----------------------------------------------------------------------------------


@pytest.mark.parametrize("added", ["before", "inside"])
def test_what_users_hooks_make_of_the_stream_is_measured_whenever_they_were_added(added):
    model, vector, reads = Head(), torch.full((WIDTH,), 5.0), []
    blocks = model.body.layers

    def add_hooks():
        handles = [blocks[0].register_forward_hook(lambda m, a, out: out + vector)]
        handles.append(blocks[1].register_forward_pre_hook(lambda m, a: (a[0] * 2,)))
        handles.append(blocks[1].attn.register_forward_hook(lambda m, a, out: torch.zeros_like(out)))
        handles.append(blocks[1].norm1.register_forward_pre_hook(lambda m, a: reads.append(a[0])))
        return handles

    handles = add_hooks() if added == "before" else []
    with record(model, ["token_l2_mean", "rms", "relative_contribution"], masks=["all"]) as rec, torch.no_grad():
        handles += [] if handles else add_hooks()
        model(ids())
    found = values(rec.stats())
    assert found["block_out", 1, "token_l2_mean", "all"] == size(reads[0] / 2)
    assert found["attn_norm_in", 2, "rms", "all"] == rms(reads[0])
    assert found["attn", 2, "relative_contribution", "all"] == 0
    assert "another tensor than the one returned" in rec.absent["stream after block 1"]
    for handle in handles:
        handle.remove()


CHANGES = {"half": lambda x: 0.5 * x, "steered": lambda x: x + 5.0, "zero": lambda x: 0.0 * x}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_inside_a_block_whose_output_a_hook_changes_the_norms_are_measured_and_what_adds_up(name, in_place):
    model, change, reads, adds = Head(), CHANGES[name], [], []
    block = model.body.layers[1]
    block.register_forward_hook(lambda m, a, out: out.copy_(change(out)) if in_place else change(out))
    block.register_forward_pre_hook(lambda m, a: reads.append(a[0].clone()))
    for part in (block.attn, block.mlp):
        part.register_forward_hook(lambda m, a, out: adds.append(out.clone()))
    block.norm2.register_forward_pre_hook(lambda m, a: reads.append(a[0].clone()))
    with record(model, ["rms", "relative_contribution"], masks=["all"]) as rec, torch.no_grad():
        for _ in range(4):  # more often than a block that does not add up is tried
            model(ids())
    found, absent = values(rec.stats()), rec.stats().manifest["absent"]
    assert found["attn_norm_in", 2, "rms", "all"] == rms(reads[0])
    assert found["mlp_norm_in", 2, "rms", "all"] == rms(reads[1])
    if name == "half":  # of the stream times a half
        shares = [add.norm(dim=-1) / read.norm(dim=-1) for add, read in zip(adds[:2], reads[:2], strict=True)]
        contributions = [found[kind, 2, "relative_contribution", "all"] for kind in ("attn", "mlp")]
        assert contributions == pytest.approx([float(share.mean()) for share in shares], rel=1e-4) and absent == {}
    else:
        assert absent == dict.fromkeys(("attn 2", "mlp 2"), "a hook changes what the block returns")


class Boxed(PreLN):
    """Returns an object, of which a hook takes the stream."""

    def forward(self, h):
        return SimpleNamespace(stream=super().forward(h))


def test_a_block_whose_output_a_hook_unpacks_is_measured_without_a_word():
    model = Head(PreLN, Boxed)
    with record(model, ["relative_contribution"], masks=["all"]) as rec, torch.no_grad():
        model.body.layers[1].register_forward_hook(lambda m, a, out: out.stream)
        model(ids())
    plain = Head()
    plain.load_state_dict(model.state_dict())
    with record(plain, ["relative_contribution"], masks=["all"]) as whole, torch.no_grad():
        plain(ids())
    assert values(rec.stats()) == values(whole.stats()) and rec.stats().manifest["absent"] == {}


class Between(Stack):
    """Changes the stream between two blocks, in place or not."""

    def forward(self, x):
        x = self.layers[0](x)
        x = x.mul_(3) if self.times == 2 else x * 3 if self.times == 1 else x.clone().to(torch.float64).float()
        return self.layers[1](x)


@pytest.mark.parametrize(("how", "is_changed"), [(1, True), (2, True), (3, False)])
def test_a_stream_that_is_changed_between_blocks_is_said(how, is_changed):
    with record(Between(PreLN, PreLN, times=how), ["rms"]) as rec, torch.no_grad():
        rec.sites.model(X)
    rec.stats()
    assert ("stream after block 1" in rec.absent) == is_changed


@pytest.mark.parametrize("experiment", [skip_sensitivity, angular_distance, jacobian_identity, quantization_costs])
def test_the_passes_of_an_experiment_are_not_recorded(experiment):
    model, found = Head(), []
    for runs in (False, True):
        with record(model, SIZE) as recorder:
            model(ids())
            if runs:
                experiment(model, [{"input_ids": ids()}], progress=False)
                massive_activations(model, {"input_ids": ids(), "more": None})
        found.append(recorder.stats())
    assert found[1].manifest["forward_passes"] == 1
    assert found[1].to_pandas().equals(found[0].to_pandas())


@pytest.mark.usefixtures("own_garbage")
def test_a_recorders_marks_and_calls_are_gone_with_the_graph():
    import gc
    import weakref

    model = tiny_llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with record(model, ["grad_l2_mean"]) as rec:
        model(**batch_for("llama")).loss.backward()
    rec.stats()
    gone = weakref.ref(rec.latest)
    del rec
    gc.collect()
    assert gone() is None
