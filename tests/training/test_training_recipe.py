"""The recipe of one pass: another rate for gains, a schedule stopped early, and what `store_all` stores."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional
from training_helpers import WORDS, tiny

from normlab import runs
from normlab.training.config import TrainConfig
from normlab.training.distributed import accelerator_for
from normlab.training.loop import Training, block_order
from normlab.training.measure import Measurements, copied_tokens
from normlab.training.text import source
from normlab.training.text.corpus import Corpus, corpus_of

# --- rates ---


def _after_one_step(config: TrainConfig, corpus: Corpus) -> dict[str, torch.Tensor]:
    """The change of each parameter in one step."""
    training = Training(config, corpus, accelerator_for(config))
    model = training.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    next(training.steps())
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scheme", ["bhyt_exact", "dyt", "layer_scale"])
def test_the_rate_of_gains_moves_gains_alone_and_by_its_share(scheme, text, corpus):
    fields: dict[str, Any] = dict(scheme=scheme, steps=1, weight_decay=0.0, lr=1e-2)
    fields["model"] = {"qk_norm": "rms_head"}
    alike, slower = (_after_one_step(tiny(text, gain_lr_ratio=ratio, **fields), corpus) for ratio in (1, 0.1))
    gains = {name for name, moved in alike.items() if moved.dim() < 2}
    assert {"model.norm.weight", "model.layers.0.self_attn.q_norm.weight"} <= gains < set(alike)
    for name, moved in alike.items():
        # sums of a start near 1 and a small step are rounded
        assert torch.allclose(slower[name], moved * (0.1 if name in gains else 1.0), atol=3e-7, rtol=1e-3), name
        assert moved.abs().max() > 0 or scheme == "layer_scale"


def test_the_logged_rate_is_the_configurations_even_where_the_first_parameters_are_gains(text, corpus):
    configs = [tiny(text, scheme="dyt", steps=2, gain_lr_ratio=ratio) for ratio in (1.0, 0.1)]
    alike, slower = (
        [step.learning_rate for step in Training(config, corpus, accelerator_for(config)).steps()] for config in configs
    )
    assert alike == slower and alike[-1] == pytest.approx(configs[0].lr * configs[0].min_lr_ratio)


@pytest.mark.parametrize(("share", "steps", "peak"), [(0.07, 100, 7), (0.1, 30, 3), (0.071, 100, 8)])
def test_warm_up_is_the_share_of_the_steps_rounded_up_but_not_for_a_rounding(share, steps, peak, text, corpus):
    config = tiny(text, warmup=share, steps=steps)
    training = Training(config, corpus, accelerator_for(config))
    rates = []
    for _ in range(peak + 1):
        rates.append(training.schedule.get_last_lr()[0])
        training.optimizer.step()
        training.schedule.step()
    assert rates.index(max(rates)) + 1 == peak and max(rates) == pytest.approx(config.lr)


def test_gradients_are_not_clipped_where_clip_is_zero(text, corpus):
    configs = [tiny(text, clip=clip, steps=2) for clip in (0.0, 1e6)]
    free, wide = (Training(config, corpus, accelerator_for(config)) for config in configs)
    assert [step.grad_norm for step in free.steps()] == [step.grad_norm for step in wide.steps()]
    assert all(map(torch.equal, free.model.parameters(), wide.model.parameters()))


def test_a_run_that_stops_early_is_the_beginning_of_the_whole_one(text, go, tmp_path):
    whole = go(tiny(text, scheme="prores", steps=8, eval_every=1), tmp_path)
    part = go(tiny(text, scheme="prores", steps=8, eval_every=1, stop_at=5), tmp_path)
    assert (part.manifest["steps"], part.manifest["tokens"]) == (5, 5 * 32)
    columns = ["step", "split", "metric", "value"]
    first, last = (run.table().query("site == 'model' and split != 'probe'")[columns] for run in (part, whole))
    names = ["loss", "grad_norm", "learning_rate"]
    pd.testing.assert_frame_equal(
        first[first.metric.isin(names)].reset_index(drop=True),
        last[last.metric.isin(names) & (last.step <= 5)].reset_index(drop=True),
    )
    assert set(part.table().query("split == 'probe'").step) == {0, 4, 5}


# --- what is stored ---


@pytest.fixture(scope="module")
def by_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small source that is split by file, as `packages` is."""
    import random

    choose = random.Random(3)
    files = [f"pack/part{i % 7}/file{i}.py" for i in range(120)]
    found = [{"key": key, "text": " ".join(choose.choices(WORDS, k=choose.randint(20, 60)))} for key in files]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(source.SOURCES, "packages", lambda: iter(found))
        yield {document["key"]: document["text"] for document in found}


@pytest.fixture(scope="module")
def stored(by_file: dict[str, str], go: Callable, tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    config = tiny(Path("packages"), scheme="pre_rmsnorm", store_all=True, held_out="test", eval_blocks=500, stop_at=6)
    return go(config, tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module")
def held_out(stored: runs.Run, cache: Path) -> Corpus:
    return corpus_of(TrainConfig.from_dict(stored.manifest["config"]), cache)


def _losses(model: Any, blocks: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.from_numpy(blocks)).logits.double()
    chosen = functional.log_softmax(logits[:, :-1], -1).gather(-1, torch.from_numpy(blocks)[:, 1:, None])
    return -chosen[..., 0].numpy()


def _value(run: runs.Run, metric: str) -> float:
    found = run.table().query(f"metric == '{metric}' and step == 6").value
    return found.item()


def test_no_held_out_file_is_in_two_parts_and_every_block_is_of_one(held_out, by_file):
    parts = {key: source.part_of("packages", key) for key in by_file}
    assert set(parts.values()) == {"train", "validation", "test"}
    halves = [held_out.files_of(held_out.rows(held_out=half)) for half in ("validation", "test")]
    names = [{held_out.files[place][0] for place in np.unique(half)} for half in halves if half is not None]
    assert [{parts[name] for name in half} for half in names] == [{"validation"}, {"test"}]
    assert len(halves[0]) + len(halves[1]) == len(held_out.held_out) == len(held_out.spread(10**6))  # type: ignore
    tokenizer = held_out.tokenizer()
    places = held_out.files_of(held_out.rows())
    assert places is not None
    for place in np.unique(places):
        ids = held_out.held_out[places == place]
        text = by_file[held_out.files[place][0]]
        assert text.startswith(tokenizer.decode(ids, skip_special_tokens=True))


def test_losses_by_file_make_up_the_held_out_loss(stored, held_out):
    table = stored.table().query("split == 'eval' and site != 'model'")
    losses, tokens = (table[table.metric == name].set_index("site").value for name in ("file_loss", "file_tokens"))
    assert (losses * tokens).sum() / tokens.sum() == pytest.approx(stored.eval_loss, abs=1e-5)
    blocks, files = held_out.spread(500, "test"), held_out.files_of(held_out.rows(500, "test"))
    assert files is not None and len(losses) == len(np.unique(files))
    found = _losses(stored.load_model(), blocks)
    for place in np.unique(files):
        expected = found[files[:, 1:] == place]
        name = held_out.files[place][0]
        assert (losses[name], tokens[name]) == (pytest.approx(expected.mean(), abs=1e-5), expected.size)


def test_the_loss_on_seen_blocks_is_of_blocks_that_the_run_was_trained_on(stored, held_out):
    order = list(
        islice(block_order(len(held_out.train), 0), 6 * 2)
    )  # twelve blocks were seen, fewer than are asked for
    expected = _losses(stored.load_model(), held_out.train[order].astype(np.int64)).mean()
    assert _value(stored, "seen_loss") == pytest.approx(expected, abs=1e-5)


def test_the_copying_probe_scores_the_second_copy(stored, held_out):
    ids = copied_tokens(held_out.vocab_size, held_out.eos_token_id, 16)
    assert ids.shape == (32, 16) and np.array_equal(ids[:, :8], ids[:, 8:]) and held_out.eos_token_id not in ids
    expected = _losses(stored.load_model(), ids)[:, 8:].mean()  # labels are tokens 9 to 15
    assert _value(stored, "copy_loss") == pytest.approx(expected, abs=1e-5)


def test_sizes_of_gains_and_matrices_are_those_of_the_weights(stored):
    table = stored.table().query("step == 6").set_index(["metric", "site", "layer"]).value
    weights = dict(stored.load_model().named_parameters())
    query, gain = (weights[f"model.layers.1.{name}.weight"] for name in ("self_attn.q_proj", "input_layernorm"))
    assert table["parameter_rms", "self_attn.q_proj.weight", 2] == pytest.approx(query.square().mean().sqrt().item())
    assert table["parameter_mean", "input_layernorm.weight", 2] == pytest.approx(gain.mean().item())
    assert len(table["parameter_rms"]) == len(weights)
    assert len(table["parameter_mean"]) == sum(weight.dim() < 2 for weight in weights.values())


def test_a_block_whose_queries_are_zero_has_uniform_attention(stored, held_out):
    measurements = Measurements(TrainConfig.from_dict(stored.manifest["config"]), held_out)
    model: Any = stored.load_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
        model.model.layers[1].self_attn.q_proj.weight.mul_(1e3)
    measurements.at(model, 0)
    found = {row.layer: row.value for row in measurements.log.rows if row.metric == "uniform_attention"}
    assert found == {1: 1.0, 2: 0.0}


def test_what_is_stored_changes_nothing_about_training(stored, go, tmp_path):
    config = TrainConfig.from_dict(stored.manifest["config"] | {"store_all": False, "probe_also": ""})
    without = go(config, tmp_path)
    losses, others = (run.table().query("metric == 'loss'").value.to_numpy() for run in (stored, without))
    assert np.array_equal(losses, others)


@pytest.mark.parametrize("eval_every", [0, 1])
def test_a_run_whose_last_step_leaves_no_finite_loss_on_either_half_has_diverged(eval_every, by_file, go, tmp_path):
    fields = dict(store_all=True, held_out="test", stop_at=1, probe_every=1, eval_every=eval_every, clip=0.0)
    run = go(tiny(Path("packages"), scheme="pre_rmsnorm", lr=1e38, **fields), tmp_path)
    assert run.status == "diverged" and run.manifest["eval_loss"] is None and "validation_loss" not in run.manifest
    assert np.isnan(run.table().query("metric == 'validation_loss'").value).all()


def test_every_metric_that_is_stored_stands_in_the_table_of_metrics(stored):
    from normlab.probes.metrics import ALL_METRICS

    assert set(stored.table().metric) - {"tokens_per_s"} <= set(ALL_METRICS)
    assert math.isfinite(stored.table().value.sum())
