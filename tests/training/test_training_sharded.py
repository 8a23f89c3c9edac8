"""A model split over the ranks (FSDP2): the same curve and tables as one process, resumed on any number of ranks."""

import dataclasses
import functools
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from test_training_ranks import _train_rank, assert_same, finish, kill_a_rank
from training_helpers import tiny
from transformers import Trainer, TrainingArguments

from normlab import LayerStatsCallback, NormlabForCausalLM, runs, store
from normlab.training.config import TrainConfig
from normlab.training.distributed import accelerator_for
from normlab.training.loop import fresh_model
from normlab.training.text.corpus import corpus_of


@pytest.fixture(scope="module")
def config(text: Path) -> TrainConfig:
    fields = dict(steps=50, lr=1e-3, batch_size=4, probe_every=25, eval_every=25, checkpoint_every=5)
    return tiny(text, fsdp=True, probe_also="carried_var_ratio", **fields)


@pytest.fixture(scope="module")
def alone(config: TrainConfig, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """The same run of one process, which has nothing to split."""
    return go(config, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_a_split_model_goes_on_with_another_number_of_ranks(compiled, config, alone, stop, cache, tmp_path):
    config = dataclasses.replace(config, compile=compiled)
    finish(config, tmp_path, cache, stop_at=12)
    stop(config, tmp_path, 31)
    (checkpoint,) = (tmp_path / store.PARTIAL / config.run_id).glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-31" and not list(checkpoint.rglob("*.safetensors"))
    finish(config, tmp_path, cache)
    run = runs.read_run(tmp_path / config.run_id)
    assert run.manifest["measured"]["resumed_from_step"] == 31
    if compiled:
        losses = [each.table().query("metric == 'loss'")["value"].to_numpy() for each in (run, alone)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    else:
        assert_same(run, alone)
    assert list(tmp_path.iterdir()) == [run.path]


@pytest.mark.slow
def test_a_model_whose_blocks_share_parameters_is_split_as_one(config, go, cache, tmp_path):
    config = dataclasses.replace(config, scheme="looped", probe_also="", steps=20, probe_every=10, eval_every=10)
    finish(config, tmp_path, cache)
    assert_same(runs.read_run(tmp_path / config.run_id), go(config, tmp_path / "alone"))


class _Trainer(Trainer):
    """Anyone's, of a model that is split already."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)


def _watch_rank(environment: dict[str, str], config: TrainConfig, out: Path, cache: Path, _: int) -> None:
    """Train with the callback that anyone's Trainer takes; write its table, and the bytes of weights and of the
    optimizer's moments that are here."""
    os.environ.update(environment)
    corpus, accelerator = corpus_of(config, cache), accelerator_for(config)
    model = fresh_model(config, corpus, accelerator)
    callback = LayerStatsCallback(every=2, metrics=["token_l2_mean", "feature_var_mean", "grad_l2_mean"])
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size // accelerator.num_processes,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    blocks = [{"input_ids": ids, "labels": ids} for ids in torch.from_numpy(corpus.train.astype("int64"))]
    trainer = _Trainer(model, arguments, train_dataset=blocks, callbacks=[callback])
    trainer.train()
    name = environment.get("RANK", "alone")
    callback.to_pandas().to_parquet(out / f"{name}.parquet")
    if environment:
        weights = sum(p.to_local().nbytes for p in model.parameters())
        states = trainer.optimizer.optimizer.state.values()
        moments = sum(state[moment].to_local().nbytes for state in states for moment in ("exp_avg", "exp_avg_sq"))
        (out / f"bytes-{name}").write_text(f"{weights} {moments}")


@pytest.fixture(scope="module")
def watched(config: TrainConfig, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process and of two ranks."""
    config = dataclasses.replace(config, steps=4, probe_every=0, eval_every=0, checkpoint_every=0)
    out = tmp_path_factory.mktemp("watched")
    _watch_rank({}, config, out, cache, -1)
    finish(config, out, cache, target=_watch_rank)
    return out


def test_the_callback_merges_the_ranks_of_a_split_model_into_one_table(watched):
    expected, *found = (pd.read_parquet(watched / f"{name}.parquet") for name in ("alone", "0", "1"))
    keys = ["step", "site", "layer", "metric", "mask"]
    assert {"update_ratio", "grad_l2_mean"} <= set(expected["metric"])
    for table in found:
        assert table[keys].equals(expected[keys])
        assert table["value"].to_numpy() == pytest.approx(expected["value"].to_numpy(), rel=1e-3, abs=1e-6)


def test_a_rank_keeps_the_weights_and_moments_of_its_share(watched, config, cache):
    corpus = corpus_of(config, cache)
    shapes = [p.shape for p in NormlabForCausalLM(config.model_config(corpus.vocab_size, 0)).parameters()]
    total = sum(map(math.prod, shapes))
    kept = sum(math.ceil(shape[0] / 2) * math.prod(shape[1:]) for shape in shapes)
    first, second = (list(map(int, (watched / f"bytes-{rank}").read_text().split())) for rank in range(2))
    assert first == [4 * kept, 8 * kept], "the weights, and AdamW's two moments, in float32 by rows"
    assert [a + b for a, b in zip(first, second, strict=True)] == [4 * total, 8 * total]
    assert second == pytest.approx(first, rel=0.1)


def _train_compiled_rank(
    environment: dict[str, str], config: TrainConfig, out: Path, cache: Path, stop_at: int
) -> None:
    """Train by captured graphs without inductor, which takes long; write how many there were."""
    from torch._dynamo.utils import counters

    torch.compile = functools.partial(torch.compile, backend="eager")
    _train_rank(environment, config, out, cache, stop_at)
    (out.parent / f"graphs-{environment['RANK']}").write_text(str(counters["stats"]["unique_graphs"]))


@pytest.mark.slow
def test_the_compiled_steps_of_a_split_model_are_those_of_one_process(config, go, cache, tmp_path):
    eager = dataclasses.replace(config, depth=9, steps=3, probe_every=0, eval_every=0, checkpoint_every=0)
    alone = go(eager, tmp_path / "runs")
    compiled = dataclasses.replace(eager, compile=True)
    finish(compiled, tmp_path / "runs", cache, target=_train_compiled_rank)
    run = runs.read_run(tmp_path / "runs" / compiled.run_id)
    losses = [each.table().query("metric == 'loss'")["value"].to_numpy() for each in (run, alone)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=1e-5)
    # Blocks share a graph: PyTorch leaves code alone that it has compiled eight times.
    assert all(1 < int((tmp_path / f"graphs-{rank}").read_text()) < eager.depth for rank in range(2))


@pytest.mark.slow
def test_two_ranks_with_a_part_each_train_and_measure_at_the_end_as_one_process(config, go, cache, tmp_path):
    config = dataclasses.replace(config, experiment_blocks=2)
    alone = go(config, tmp_path / "alone")
    finish(config, tmp_path / "ranks", cache)
    run = runs.read_run(tmp_path / "ranks" / config.run_id)
    assert_same(run, alone)
    found, expected = (pd.read_parquet(each.path / runs.EXPERIMENTS) for each in (run, alone))
    keys = ["metric", "part", "layer", "other"]
    assert found[keys].equals(expected[keys])
    assert found["value"].to_numpy() == pytest.approx(expected["value"].to_numpy(), rel=1e-2, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 20])
def test_killed_ranks_leave_the_curve_of_a_split_model_as_it_was(count, config, alone, go, cache, tmp_path):
    choose = random.Random(count)
    for attempt in range(count):
        out = tmp_path / str(attempt)
        kill_a_rank(config, out, cache, 5 * choose.randint(1, 7), wait=choose.uniform(0, 0.3))
        run = go(config, out)
        assert run.manifest["measured"]["resumed_from_step"] > 0
        assert_same(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"scheme": "ngpt"},
        {"scheme": "attn_residuals"},
        {"gradient_checkpointing": True, "accumulate": 2},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"compile": True},
        {"compile": True, "dtype": "bfloat16"},
    ],
    ids=lambda fields: ",".join(map(str, fields.values())),
)
def test_what_acts_on_weights_and_saves_memory_works_on_a_split_model(fields, config, go, cache, tmp_path):
    config = dataclasses.replace(config, steps=6, probe_every=3, eval_every=3, checkpoint_every=3, **fields)
    alone = go(config, tmp_path / "alone")
    finish(config, tmp_path / "ranks", cache)
    run = runs.read_run(tmp_path / "ranks" / config.run_id)
    losses = [each.table().query("metric == 'loss'")["value"].to_numpy() for each in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-3 if "dtype" in fields else 1e-5)
