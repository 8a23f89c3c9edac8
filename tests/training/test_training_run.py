"""One run: where it starts, what it measures, what it leaves alone, and how it ends."""

import math
import random
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import WORDS, tiny

from normlab import runs, store
from normlab.schemes import STUDIED
from normlab.training import run as run_module
from normlab.training.config import TrainConfig
from normlab.training.distributed import accelerator_for
from normlab.training.loop import Training, block_order, optimizer_of, refresh_interval
from normlab.training.measure import Measurements, mean_token_loss
from normlab.training.run import train
from normlab.training.text.corpus import Corpus


def begin(config: TrainConfig, corpus: Corpus) -> Training:
    return Training(config, corpus, accelerator_for(config))


# --- data order and start ---


def test_one_seed_gives_one_data_order_to_every_scheme(text, corpus):
    def first_batches(scheme: str, seed: int) -> torch.Tensor:
        blocks = begin(tiny(text, scheme=scheme, seed=seed), corpus)._blocks()
        torch.manual_seed(len(scheme))  # whatever a scheme's model drew for its weights
        return torch.stack([next(blocks) for _ in range(8)])

    reference = first_batches("pre_rmsnorm", 0)
    assert all(torch.equal(first_batches(scheme, 0), reference) for scheme in STUDIED)
    assert not torch.equal(first_batches("pre_rmsnorm", 1), reference)


def test_every_block_is_read_once_before_any_is_read_again():
    order = list(islice(block_order(10, seed=3), 25))
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert len(set(order[20:])) == 5
    assert order == list(islice(block_order(10, seed=3), 25))


# --- optimizer ---


def test_weight_decay_acts_on_what_the_model_names(text, corpus):
    for scheme in ("dyt", "bhyt", "pre_layernorm"):
        config = tiny(text, scheme=scheme)
        model = begin(config, corpus).model
        optimizer = optimizer_of(model, config)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decayed, exempt = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        assert optimizer.param_groups[1]["weight_decay"] == 0.0
        assert decayed == set(model.decay_parameter_names())
        assert decayed | exempt == set(names.values()) and not decayed & exempt
        # transformers goes by the name and would exempt it
        assert ("model.norm.weight" in decayed) == (scheme == "dyt")


def test_learning_rate_warms_up_and_falls_along_a_cosine_to_its_minimum(text, go, tmp_path):
    config = tiny(text, steps=20, warmup=0.2, lr=1e-2, min_lr_ratio=0.25, probe_every=0, eval_every=0)
    table = go(config, tmp_path).table()
    rates = table[table.metric == "learning_rate"].value.to_numpy()
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    done = (np.arange(4, 20) - 4 + 1) / 16
    assert rates[4:] == pytest.approx(1e-2 * (0.25 + 0.75 * (1 + np.cos(np.pi * done)) / 2))
    assert rates[-1] == pytest.approx(0.0025)


def test_gradients_are_clipped_and_their_norm_is_logged_unclipped(text, corpus):
    training = begin(tiny(text, clip=0.01), corpus)
    norms: list[float] = []

    def watch(*_: Any) -> None:
        norms.append(torch.sqrt(sum(p.grad.square().sum() for p in training.model.parameters())).item())

    training.optimizer.register_step_pre_hook(watch)
    logged = [each.grad_norm for each in training.steps()]
    assert norms == pytest.approx([0.01] * 8, rel=1e-3)
    assert min(logged) > 0.1


# --- measuring ---


def test_measuring_changes_nothing_about_training(text, go, tmp_path):
    often = go(tiny(text, probe_every=1, eval_every=1), tmp_path / "often")
    never = go(tiny(text, probe_every=0, eval_every=0), tmp_path / "never")
    curves = [run.table().query("split == 'train' and metric in ('loss', 'grad_norm')").value for run in (often, never)]
    assert curves[0].tolist() == curves[1].tolist()
    assert (often.path / runs.WEIGHTS).read_bytes() == (never.path / runs.WEIGHTS).read_bytes()


def test_statistics_are_taken_before_training_on_schedule_and_at_the_end(text, go, tmp_path):
    table = go(tiny(text, steps=7, probe_every=3, eval_every=2), tmp_path).table()
    assert table[table.split == "probe"].step.unique().tolist() == [0, 3, 6, 7]
    held_out = table[(table.split == "eval") & (table.metric == "loss")]
    assert held_out.step.tolist() == [0, 2, 4, 6, 7]
    assert table[(table.split == "train") & (table.metric == "loss")].step.tolist() == list(range(1, 8))


def test_probes_cover_the_sites_on_one_batch_for_all_runs(done, text, go, tmp_path):
    table = done.table()
    probes = table[table.split == "probe"]
    for metric in ("token_l2_mean", "feature_var_mean", "rms", "max_abs"):
        sites = set(probes[probes.metric == metric].site)
        assert {"block_out", "attn_norm_in", "mlp_norm_in", "final_norm_in"} <= sites
    assert {"block_in_grad", "attn_norm_in_grad"} <= set(probes[probes.metric == "grad_l2_mean"].site)
    assert sorted(probes[(probes.site == "block_out")].layer.unique()) == [0, 1, 2]
    # the first thing that a block sees is the embedding of the probe batch: equal for schemes that start equal
    other = go(tiny(text, scheme="pre_rmsnorm", steps=1), tmp_path).table()
    start = "step == 0 and site == 'block_out' and layer == 0 and metric == 'rms' and mask == 'all'"
    assert table.query(start).value.tolist() == other.query(start).value.tolist()


def test_probe_gradients_are_of_the_summed_loss(text, corpus):
    config = tiny(text, steps=1, eval_every=0)
    model, measurements = begin(config, corpus).model, Measurements(config, corpus)
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.from_numpy(corpus.spread(config.probe_blocks))
    loss = model(input_ids=ids, labels=ids).loss * ids[:, 1:].numel()
    gradient = torch.autograd.grad(loss, seen[0])[0]
    hook.remove()
    measurements.at(model, 0)
    where = (0, "block_in_grad", 2, "grad_l2_total", "all")
    measured = [row.value for row in measurements.log.rows if (row[0], *row[3:7]) == where]
    assert measured == pytest.approx([gradient.norm().item()], rel=1e-5)


def test_layers_are_measured_where_all_logits_are_alike(text, corpus):
    config = tiny(text, scheme="pre_rmsnorm")
    model, measurements = begin(config, corpus).model, Measurements(config, corpus)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    measurements.layers(model, 0)
    table = measurements.log.frame()
    assert table.query("metric == 'loss'").value.item() == pytest.approx(math.log(corpus.vocab_size))
    gradients = table.query("metric == 'grad_l2_total'").value
    assert len(gradients) and (gradients == 0).all()


def test_held_out_loss_is_the_mean_over_all_tokens(text, corpus):
    model = begin(tiny(text), corpus).model
    blocks = corpus.spread(5)
    ids = torch.from_numpy(blocks)
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert mean_token_loss(model, blocks, batch_size=2) == pytest.approx(expected, rel=1e-6)
    assert model.training


# --- the carried statistic ---


@pytest.mark.parametrize("steps, expected", [(1, 1), (49, 1), (300, 6), (60_000, 1000), (10**6, 1000)])
def test_the_carried_constant_is_refreshed_every_fiftieth_of_the_run_within_bounds(steps, expected):
    assert refresh_interval(steps) == expected


def test_the_carried_constant_is_refreshed_on_schedule_and_after_the_last_step(text, corpus, monkeypatch):
    training = begin(tiny(text, steps=103), corpus)
    refresh, steps = training.model.refresh_carried, []
    monkeypatch.setattr(training.model, "refresh_carried", lambda: (steps.append(training.done), refresh()))
    for layer in training.model.model.layers:
        assert layer.c_attn.item() == layer.attention_variance_constant().item()
    list(training.steps())
    assert steps == [*range(2, 103, 2), 103]
    for layer in training.model.model.layers:
        assert layer.c_attn.item() == layer.attention_variance_constant().item()


# --- how a run ends ---


def test_a_run_whose_loss_is_not_finite_stops_and_is_kept(text, go, tmp_path):
    run = go(tiny(text, scheme="pre_rmsnorm", lr=1e30, steps=50, eval_every=10), tmp_path)
    assert run.outcome == "diverged, no eval loss" and math.isnan(run.eval_loss)
    losses = run.table().query("split == 'train' and metric == 'loss'")
    assert run.manifest["steps"] == losses.step.max() < 50
    assert np.isfinite(losses.value[:-1]).all() and not math.isfinite(losses.value.iloc[-1])
    assert go(tiny(text, scheme="pre_rmsnorm", lr=1e30, steps=50, eval_every=10), tmp_path).path == run.path


def test_a_run_whose_last_step_breaks_its_weights_has_diverged_also_where_nothing_is_measured_after(
    text, go, tmp_path
):
    fields = dict(lr=1e38, clip=0.0, stop_at=1, probe_every=0, eval_every=0, experiment_blocks=2)
    run = go(tiny(text, scheme="pre_rmsnorm", **fields), tmp_path)
    assert run.status == "diverged" and not (run.path / store.EXPERIMENTS).is_file()


def test_the_last_steps_are_logged_whatever_the_interval(text, go, tmp_path):
    never = dict(eval_every=0, probe_every=0, checkpoint_every=0, experiment_blocks=0, log_every=5)
    run = go(tiny(text, steps=8, **never), tmp_path)
    each = go(tiny(text, steps=8, **never | {"log_every": 1}), tmp_path / "each").table()
    shown, all_steps = (t[(t["metric"] == "loss") & (t["split"] == "train")] for t in (run.table(), each))
    assert shown["step"].tolist() == [5, 8]
    assert shown["value"].tolist() == pytest.approx([all_steps["value"][:5].mean(), all_steps["value"][5:].mean()])
    assert go(tiny(text, steps=3, lr=1e6, **never), tmp_path / "diverges").status == "diverged"


@pytest.mark.parametrize("stream", [False, True])
def test_a_cache_that_is_removed_while_training_costs_nothing_and_datasets_writes_to_no_other_place(
    stream, text, tmp_path, monkeypatch
):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("/proc/nowhere"))

    def watch(step: int, rows: list) -> bool:
        if step == 2:
            shutil.rmtree(tmp_path / "cache")
        return True

    config = tiny(text, stream=stream, steps=4)
    run = train(config, tmp_path / "out", cache_dir=tmp_path / "cache", progress=False, watch=watch)
    assert run.load_model().config.num_hidden_layers == 2 and (run.path / "tokenizer.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "cache"}


def test_a_loss_that_stays_above_the_trigram_loss_is_marked(text, go, tmp_path):
    run = go(tiny(text, lr=1e-9, steps=2), tmp_path)
    assert run.status == "not_learned"
    assert run.eval_loss > run.manifest["trigram_loss"]
    assert set(run.table().status) == {"not_learned"}


def test_a_loss_above_the_unigram_entropy_is_not_learned_even_below_a_trigram_of_a_tiny_text(
    text, corpus, go, tmp_path, monkeypatch
):
    worse = replace(corpus, ngram_losses=corpus.ngram_losses + 10.0)
    monkeypatch.setattr(run_module, "corpus_of", lambda *_: worse)
    run = go(tiny(text, lr=1e-9, steps=2), tmp_path)
    assert run.manifest["corpus"]["unigram_entropy"] < run.eval_loss < run.manifest["trigram_loss"]
    assert run.status == "not_learned"


@pytest.mark.slow
def test_a_loss_below_the_unigram_entropy_alone_is_not_learned(text, go, tmp_path):
    run = go(tiny(text, scheme="pre_rmsnorm", lr=1e-2, steps=80, batch_size=8, probe_every=0, eval_every=80), tmp_path)
    assert run.manifest["trigram_loss"] < run.eval_loss < run.manifest["corpus"]["unigram_entropy"]
    assert run.status == "not_learned"


def test_a_loss_below_the_trigram_loss_counts_as_learned(go, tmp_path):
    choose = random.Random(0)
    # Eleven sentences, over and over, of which a trigram model is too sure when it meets a twelfth.
    sentences = [" ".join(choose.choices(WORDS, k=40)) for _ in range(12)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(choose.choice(sentences) for _ in range(300)))
    config = tiny(path, scheme="pre_rmsnorm", depth=1, lr=1e-2, steps=100, batch_size=8, probe_every=0, eval_every=100)
    run = go(config, tmp_path / "out")
    assert run.status == "finished"
    assert run.eval_loss < run.manifest["trigram_loss"] - 0.2


def test_a_manifest_has_the_counted_losses_of_the_blocks_that_its_run_was_scored_on(done, corpus):
    blocks = done.manifest["config"]["eval_blocks"]
    assert blocks < len(corpus.held_out)
    counted = {name: done.manifest[name] for name in runs.COUNT_LOSSES}
    assert counted == corpus.count_losses(corpus.rows(blocks)) != corpus.count_losses(corpus.rows())
    table = done.table().query("split == 'eval' and metric in @counted")
    assert dict(zip(table.metric, table.value, strict=True)) == counted
