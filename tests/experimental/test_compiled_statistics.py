"""Statistics accumulated inside a compiled step: the values of `record`, one graph, and a model left as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from probe_ranks import whole_batch
from probe_runs import run_on_two_ranks, train
from probe_zoo import build, near, ours, tiny_llama, token_batch, values
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from normlab.errors import NormlabError
from normlab.experimental.compiled_statistics import IN_GRAPH, CompiledRecorder, CompiledStatsCallback
from normlab.probes import METRICS, LayerStats, record, sites
from normlab.probes.callback import LayerStatsCallback
from normlab.probes.metrics import resolve_metrics

KEYS = ["step", "site", "layer", "metric", "mask"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    counters.clear()
    yield
    torch.compiler.reset()


def recorder_of(model: torch.nn.Module, metrics=IN_GRAPH, **options) -> CompiledRecorder:
    recorder = CompiledRecorder(sites(model), resolve_metrics(metrics), **options)
    recorder.start()
    return recorder


def step(model: torch.nn.Module, call: Callable, batch: dict, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Loss, logits and gradients of one step."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = call(**batch)
    output.loss.backward()
    return [output.loss.detach(), output.logits.detach(), *(p.grad.clone() for p in model.parameters())]


def recorded(model: torch.nn.Module, batches: list[dict], dtype: torch.dtype | None = None) -> dict:
    with record(model, IN_GRAPH) as rec:
        for batch in batches:
            step(model, model, batch, dtype)
    return values(rec.stats())


MODELS = {"llama": lambda: tiny_llama(num_hidden_layers=1), "ours": lambda: ours("bhyt", num_hidden_layers=1)}


def check_a_compiled_step(name: str, backend: str, roundings: float, dtype: torch.dtype | None = None) -> None:
    model, batches = MODELS[name]().train(), [token_batch(), token_batch(generator=torch.Generator().manual_seed(5))]
    without = torch.compile(model, backend=backend, fullgraph=True) if backend == "inductor" else model
    plain = step(model, without, batches[0], dtype)
    expected, names = recorded(model, batches, dtype), list(model.state_dict())
    recorder = recorder_of(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    counters.clear()
    measured = step(model, compiled, batches[0], dtype)
    step(model, compiled, batches[1], dtype)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    exact = backend == "inductor" or name == "llama"  # our norms take another path, and round otherwise, uncompiled
    for a, b in zip(plain, measured, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    stats = recorder.stats()
    assert values(stats) == near(expected, roundings, dtype)
    assert list(model.state_dict()) == names and stats.manifest["forward_passes"] == 2
    recorder.stop()


@pytest.mark.parametrize("name", ["llama", pytest.param("ours", marks=pytest.mark.slow)])
def test_a_compiled_step_is_one_graph_that_gives_the_values_of_record_and_changes_nothing(name):
    check_a_compiled_step(name, "aot_eager", 8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_inductor_gives_the_values_of_record_to_rounding(name, dtype):
    """Under autocast eager code rounds every product to bfloat16 (2^-8), and compiled code keeps some in float32."""
    check_a_compiled_step(name, "inductor", 80 if dtype is None else 6, dtype)


def assert_once(stats: LayerStats, expected: dict) -> None:
    """The expected values, of every token once."""
    assert values(stats) == near(expected)
    real = float(token_batch()["attention_mask"].sum())
    assert set(stats.moments.query("mask == 'all'")["count"]) == {real}


@pytest.mark.slow
def test_a_recomputed_block_is_counted_once_in_a_compiled_step():
    model = tiny_llama(num_hidden_layers=2, use_cache=False).train()
    expected = recorded(model, [token_batch()])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recorder = recorder_of(model)
    step(model, torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True), token_batch())
    assert_once(recorder.stats(), expected)
    recorder.stop()


# Hooks that are not traced do the same, so what follows needs no compiler.


@pytest.mark.parametrize("scheme", ["post_rmsnorm", "peri_ln", "mhc"])
def test_every_layout_gives_the_values_of_record(scheme):
    model = ours(scheme).train()
    expected, recorder = recorded(model, [token_batch()]), recorder_of(model)
    step(model, model, token_batch())
    assert values(recorder.stats()) == near(expected, 8)


def test_a_recomputed_block_is_counted_once():
    model = tiny_llama(use_cache=False).train()
    expected = recorded(model, [token_batch()])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recorder = recorder_of(model)
    step(model, model, token_batch())
    assert_once(recorder.stats(), expected)


def test_only_training_calls_between_start_and_stop_are_counted():
    model = tiny_llama().train()
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    recorder = recorder_of(model)
    with pytest.raises(NormlabError, match="being taken already"):
        recorder.start()
    with torch.no_grad():
        model.eval()(**token_batch())
    with pytest.raises(NormlabError, match="no training step was counted"):
        recorder.stats()
    step(model.train(), model, token_batch())
    once = values(recorder.stats())
    step(model, model, token_batch())
    assert values(recorder.stats()) == once  # each reading begins anew
    recorder.stop()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch._dynamo.config.skip_nnmodule_hook_guards == before
    step(model, model, token_batch())
    with pytest.raises(NormlabError, match="no training step was counted"):
        recorder.stats()


def test_trying_a_model_out_leaves_its_modes_and_the_random_state_as_they_are():
    model = tiny_llama(attention_dropout=0.1).train()
    model.model.layers[1].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    recorder_of(model).stop()
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_blocks_compiled_one_by_one_give_the_values_of_record():
    model = tiny_llama(num_hidden_layers=2).train()
    expected, recorder = recorded(model, [token_batch()]), recorder_of(model)
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    step(model, model, token_batch())
    assert_once(recorder.stats(), expected)
    recorder.stop()


@pytest.mark.slow
def test_code_compiled_before_is_not_taken_for_code_with_statistics():
    model, other = (tiny_llama(num_hidden_layers=1).train() for _ in range(2))
    without = torch.compile(other, backend="eager")
    step(other, without, token_batch())
    recorder = recorder_of(model, ["rms"])
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        step(model, compiled, token_batch())
        step(other, without, token_batch())
    assert recorder.stats().manifest["forward_passes"] == 2
    recorder.stop()


def test_a_loss_that_cannot_be_told_must_be_given():
    class Doubled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_llama()

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids, labels):
            logits = self.inner(input_ids).logits
            return {"loss": 2 * cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    model, batch = Doubled().train(), {"input_ids": torch.arange(3, 15).view(2, 6), "labels": torch.ones(2, 6).long()}
    with pytest.raises(NormlabError, match="pass loss_tokens"):
        recorder_of(model)
    found = {}
    choices = {"number": 6.0, "function": lambda inputs: (inputs.arguments["labels"] != -100).sum() / 2}
    for name, given in choices.items():
        recorder = recorder_of(model, ["grad_l2_mean"], loss_tokens=given)
        model(**batch)["loss"].backward()
        found[name] = values(recorder.stats())
        recorder.stop()
    with record(model, ["grad_l2_mean"], loss_tokens=6) as rec:
        model(**batch)["loss"].backward()
    assert found["number"] == found["function"] == near(values(rec.stats()), 8)


def test_a_model_that_takes_no_tokens_is_refused():
    with pytest.raises(NormlabError, match="need a transformers model of tokens"):
        recorder_of(build("vit"))


# -- in a Trainer ----------------------------------------------------------------------------------------------------


def test_metrics_that_a_graph_cannot_accumulate_are_refused():
    for name in set(METRICS) - set(IN_GRAPH):
        with pytest.raises(NormlabError, match=f"{name} cannot be accumulated in a compiled step: .*choose from"):
            CompiledStatsCallback(metrics=[name])


def tables(tmp_path, every: int, steps: int, compiled: bool, **options) -> dict:
    kind = CompiledStatsCallback if compiled else LayerStatsCallback
    callback = kind(every=every, metrics=IN_GRAPH)
    train(tiny_llama(num_hidden_layers=1), tmp_path, [callback], max_steps=steps, **options)
    return callback.to_pandas().set_index(KEYS)["value"].dropna().to_dict()


def test_the_callback_measures_every_step_of_a_trainer_with_accumulation(tmp_path):
    expected = tables(tmp_path, 1, 3, compiled=False)
    assert tables(tmp_path, 1, 3, compiled=True) == near(expected)


def test_a_reading_is_of_all_steps_since_the_last_one(tmp_path):
    each, pairs = tables(tmp_path, 1, 3, compiled=True), tables(tmp_path, 2, 3, compiled=True)
    assert {key[0] for key in pairs} == {1, 2}  # after two steps, and what is left at the end
    place = ("block_out", 1, "max_abs", "all")
    assert pairs[1, *place] == max(each[0, *place], each[1, *place]) and pairs[2, *place] == each[2, *place]


def test_a_resumed_trainer_goes_on_measuring_and_its_checkpoint_holds_no_statistics(tmp_path):
    whole = tables(tmp_path / "whole", 1, 4, compiled=True)
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(tiny_llama(num_hidden_layers=1), tmp_path / "cut", [CompiledStatsCallback()], **saving)
    callback = CompiledStatsCallback(every=1, metrics=IN_GRAPH)
    model = tiny_llama(num_hidden_layers=1)
    names = list(model.state_dict())
    train(model, tmp_path / "cut", [callback], max_steps=4, resume=str(tmp_path / "cut" / "checkpoint-2"))
    found = callback.to_pandas().set_index(KEYS)["value"].dropna().to_dict()
    assert found == near({key: value for key, value in whole.items() if key[0] >= 2})
    assert list(model.state_dict()) == names


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_compiled_trainer_breaks_no_graph_and_measures_what_an_uncompiled_one_does(tmp_path, bf16):
    expected = tables(tmp_path, 1, 2, compiled=False, bf16=bf16)
    counters.clear()
    compiler = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    found = tables(tmp_path, 1, 2, compiled=True, bf16=bf16, **compiler)
    assert not counters["graph_break"]
    assert found == near(expected, *((1, torch.bfloat16) if bf16 else ()))


@pytest.mark.slow  # two ranks that compile; rank 0's accumulators would be broadcast if they were buffers
@pytest.mark.parametrize("sharding", [(), ("fsdp",)], ids=["ddp", "fsdp"])
def test_two_ranks_merge_to_the_table_of_one_process(tmp_path, sharding):
    merged = LayerStats.load(run_on_two_ranks(tmp_path / "merged.parquet", "aot_eager", *sharding))
    model = tiny_llama()
    assert values(merged) == near(recorded(model, [whole_batch()]))
    assert merged.manifest["forward_passes"] == 2
