"""Every trap that others fell into, one test each."""

import threading

import pytest
import torch
from model_helpers import cached
from probe_zoo import DEPTH, batch_for, near, run, tiny_llama, trained_step, values
from torch import nn
from transformers import DynamicCache

from normlab.errors import NormlabError
from normlab.probes import METRICS, record, sites

GRADIENTS = ["grad_l2_mean", "grad_l2_total"]
EVERYTHING = list(METRICS)


@pytest.fixture(scope="module")
def batch():
    return batch_for("llama")


def hook_dictionaries(model):
    names = [n for n in vars(nn.Module()) if n.endswith("_hooks") or "hooks_" in n]
    return [(name, list(getattr(module, name) or ())) for module in model.modules() for name in names]


@pytest.mark.parametrize("contexts", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_contexts_some_left_by_exception_leave_the_hook_dictionaries_as_they_were(batch, contexts):
    model = tiny_llama(num_hidden_layers=2)
    seen = []
    model.model.layers[1].register_forward_hook(lambda m, a, o: seen.append(1))
    before = hook_dictionaries(model)
    small = {name: value[:1, :4] for name, value in batch.items()}
    small["attention_mask"] = torch.ones_like(small["attention_mask"])
    for i in range(contexts):
        try:
            with record(model, EVERYTHING) as outer, record(model):
                if i % 10 == 0:
                    model(**small)
                if i % 3 == 0:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert not outer._handles
    assert hook_dictionaries(model) == before
    assert len(seen) == contexts // 10  # the user's own hook ran every time
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_forward_that_raises_leaves_no_trace_and_does_not_count(batch):
    model = tiny_llama()
    clean = trained_step(model, batch, EVERYTHING)
    with record(model, EVERYTHING) as rec:
        broken = model.model.layers[2].mlp.register_forward_pre_hook(lambda m, a: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(**batch)
        assert torch.overrides._len_torch_function_stack() == 0
        broken.remove()
        model(**batch).loss.backward()
    assert values(rec.stats()) == clean


def test_an_interrupt_inside_a_watched_block_does_not_leave_the_attention_watch_on(batch):
    model = tiny_llama()

    def interrupt(*_):
        raise KeyboardInterrupt

    model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), record(model, ["attention_entropy"]):
        model(**batch)
    assert torch.overrides._len_torch_function_stack() == 0


def test_outputs_and_gradients_are_bit_identical_while_everything_is_recorded(batch):
    model = tiny_llama().train()
    plain = model(**batch)
    plain.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with record(model, EVERYTHING):
        measured = model(**batch)
        measured.loss.backward()
    assert torch.equal(measured.logits, plain.logits)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def in_threads(count, work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_nested_and_concurrent_recordings_do_not_disturb_each_other(batch):
    model = tiny_llama()
    alone = trained_step(model, batch, EVERYTHING)
    with record(model, EVERYTHING) as outer, record(model, EVERYTHING) as inner:
        model(**batch).loss.backward()
    assert values(outer.stats()) == alone == values(inner.stats())
    models = [tiny_llama() for _ in range(3)]
    found: list[dict] = [{}] * 3

    def work(i):
        found[i] = trained_step(models[i], batch, EVERYTHING)

    in_threads(3, work)
    assert all(one == near(alone) for one in found)


def test_two_threads_through_one_model_count_every_token_once(batch):
    model = tiny_llama()
    with record(model, ["token_l2_mean"]) as rec, torch.no_grad():
        model(**batch)
    once = rec.stats()
    with record(model, ["token_l2_mean"]) as rec:

        def work():
            with torch.no_grad():
                for _ in range(5):
                    model(**batch)

        in_threads(2, lambda i: work())
    assert values(rec.stats()) == near(values(once), 8)
    assert rec.stats().to_pandas(errors=True)["tokens"].iloc[0] == 10 * once.to_pandas(errors=True)["tokens"].iloc[0]


def test_a_recording_begun_in_inference_mode_goes_on_outside_and_the_other_way_round(batch):
    model = tiny_llama()
    forward = [name for name, metric in METRICS.items() if metric.kind != "gradient"]
    with record(model, forward) as rec:
        with torch.inference_mode():
            model(**batch)
            model(**batch)  # merges the first one, inside
        inside = values(rec.stats())
        model(**batch)
        with torch.inference_mode():
            model(**batch)
    assert values(rec.stats()) == near(inside, 8)


def test_padding_may_hold_nan_and_does_not_count(batch):
    model = tiny_llama()
    clean = trained_step(model, batch, ["token_l2_mean", "rms", "max_abs", "feature_var_mean", "kurtosis"])
    embeddings = model.model.embed_tokens(batch["input_ids"]).detach()
    embeddings[batch["attention_mask"] == 0] = torch.nan
    found = run(model, {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"]}, None)
    layer_0 = {key: value for key, value in clean.items() if key[:2] == ("block_out", 0)}
    assert {key: found[key] for key in layer_0} == near(layer_0, 8)


def test_left_and_right_padding_give_the_same_numbers():
    model = tiny_llama()
    ids = torch.randint(3, 64, (2, 8))
    found = []
    for right in (True, False):
        padding = torch.zeros(2, 3, dtype=torch.long)
        pieces = (lambda x: (x, padding)) if right else (lambda x: (padding, x))  # noqa: B023
        whole, mask = torch.cat(pieces(ids), 1), torch.cat(pieces(torch.ones_like(ids)), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with record(model, EVERYTHING) as rec:
            labels = whole.masked_fill(mask == 0, -100)
            rec.backward(model(whole, attention_mask=mask, position_ids=positions, labels=labels).loss)
        found.append(values(rec.stats()))
    gradient = {k for k in found[0] if k[0].endswith("_grad")}  # left padding has one more label: the first token's
    same = found[0].keys() - gradient
    assert {k: found[0][k] for k in same} == near({k: found[1][k] for k in same}, 160)


def test_cached_decoding_counts_the_first_token_of_a_row_once():
    model = tiny_llama()
    ids, cache = torch.randint(3, 64, (2, 7)), DynamicCache(config=model.config)
    with record(model, ["token_l2_mean", "rms"]) as whole, torch.no_grad():
        model(ids)
    with record(model, ["token_l2_mean", "rms"]) as pieces, torch.no_grad():
        cached(model, ids[:, :4], cache, attention_mask=torch.ones(2, 4))
        cached(model, ids[:, 4:], cache, attention_mask=torch.ones(2, 7))
    assert values(pieces.stats()) == near(values(whole.stats()))


def test_autocast_does_not_round_the_statistics(batch):
    """Under autocast a matrix product of the statistics themselves would silently run in bfloat16."""
    model = tiny_llama()
    kept = {}
    model.model.layers[0].register_forward_pre_hook(lambda m, a: kept.__setitem__("h", a[0].detach().clone()))
    with record(model, EVERYTHING) as rec, torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch).loss.backward()
    h = kept["h"][batch["attention_mask"].bool()].double()
    found = values(rec.stats())["block_out", 0, "token_l2_mean", "all"]
    assert found == pytest.approx(float(h.norm(dim=1).mean()), rel=1e-6)


def test_autocast_does_not_round_recomputed_attention_scores():
    from normlab.probes.attention_watch import AttentionWatch

    query, key = (torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    found = []
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), AttentionWatch() as watch:
            nn.functional.scaled_dot_product_attention(query, key, key)
        found.append(watch.calls[0].scores)
    assert torch.equal(*found)


def test_half_precision_activations_are_squared_in_float32():
    from normlab.probes.statistics import token_statistics

    x = torch.full((3, 64), 300.0, dtype=torch.float16)  # 300^2 overflows fp16
    assert torch.allclose(token_statistics(x, ["l2"]), torch.full((1, 3), 2400.0))


def test_variance_far_from_zero_does_not_cancel():
    """E[x^2] - E[x]^2 in float32 gives -8 or 0 here where 1 is right."""
    from normlab.probes.statistics import token_statistics

    x = 4096 + torch.tensor([1.0, -1.0]).repeat(4, 256)
    assert torch.allclose(token_statistics(x, ["var"]), torch.ones(1, 4), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_features_that_are_equal_to_rounding_have_no_kurtosis(dtype):
    """The mean of 768 equal numbers is not quite that number."""
    from normlab.probes.statistics import token_statistics

    x = torch.stack([torch.full((768,), value, dtype=dtype) for value in (0.1, 0.7, -3.3, 0.0)])
    spread = torch.full((1, 768), 0.1, dtype=dtype)
    spread[0, 0] = 0.1001 if dtype != torch.bfloat16 else 0.11
    found = token_statistics(torch.cat([x, spread]), ["kurtosis"])[0]
    assert found[:4].isnan().all() and found[4] == pytest.approx(766, rel=0.01)


def test_one_token_has_no_standard_error():
    model = tiny_llama()
    with record(model, ["token_l2_mean"]) as rec, torch.no_grad():
        model(torch.tensor([[3, 4]]))
    table = rec.stats().to_pandas(errors=True)
    assert set(table.loc[table["mask"] == "no_first", "tokens"]) == {1}
    assert table["standard_error"].isna().equals(table["tokens"] == 1)


def test_a_compiled_model_is_measured_although_hooks_come_after_the_first_compiled_call(batch):
    def compiled_in_place(model):
        model.compile(backend="eager")
        return model

    expected = trained_step(tiny_llama(num_hidden_layers=1), batch, EVERYTHING)
    for compiled in (lambda model: torch.compile(model, backend="eager"), compiled_in_place):
        model = compiled(tiny_llama(num_hidden_layers=1))
        model(**batch)
        assert trained_step(model, batch, EVERYTHING) == near(expected, 8)


def test_blocks_called_without_the_model_are_measured():
    model = tiny_llama()
    h = torch.randn(2, 5, 32)
    rotary = model.model.rotary_emb(h, torch.arange(5)[None])
    with record(model) as rec, torch.no_grad():
        x = h
        for layer in model.model.layers:
            x = layer(x, position_embeddings=rotary)
    found = values(rec.stats())
    assert found["block_out", 0, "max_abs", "all"] == pytest.approx(float(h.abs().max()))
    assert found["block_out", DEPTH, "max_abs", "all"] == pytest.approx(float(x.abs().max()))


def test_a_recording_cannot_run_twice_at_once():
    with record(sites(tiny_llama())) as rec, pytest.raises(NormlabError, match="already running"), rec:
        pass
