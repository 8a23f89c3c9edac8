"""One run: what it measures, what it leaves alone, what it writes, and how it ends."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import tiny, write_text

import normlab
from normlab import NormlabError, runs
from normlab.schemes import SCHEMES
from normlab.training import trainer as trainer_module
from normlab.training.callbacks import mean_token_loss, refresh_interval
from normlab.training.config import TrainConfig
from normlab.training.corpus import Corpus, corpus_of
from normlab.training.trainer import SeededOrder, build_trainer, train, train_from_manifest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(text: Path, cache: Path) -> Corpus:
    return corpus_of(tiny(text), cache)


@pytest.fixture(scope="module")
def go(cache: Path) -> Callable[..., runs.Run]:
    def go(config: TrainConfig, out: Path, **options: Any) -> runs.Run:
        return train(config, out, cache_dir=cache, progress=False, **options)

    return go


@pytest.fixture(scope="module")
def done(text: Path, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """One finished run that several tests look at and none changes."""
    return go(tiny(text), tmp_path_factory.mktemp("done"))


# --- data order and start ---


def test_one_seed_gives_one_data_order_to_every_scheme(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    def first_batches(scheme: str, seed: int) -> torch.Tensor:
        loader = build_trainer(tiny(text, scheme=scheme, seed=seed), corpus, tmp_path, False)[0].get_train_dataloader()
        return torch.stack([batch["input_ids"] for batch in loader])

    reference = first_batches("pre_rmsnorm", 0)
    assert len(reference) == tiny(text).steps
    assert all(torch.equal(first_batches(scheme, 0), reference) for scheme in SCHEMES)
    assert not torch.equal(first_batches("pre_rmsnorm", 1), reference)


def test_every_block_is_read_once_before_any_is_read_again() -> None:
    order = list(SeededOrder(10, 25, seed=3))
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert len(order) == 25 and len(set(order[20:])) == 5
    assert order == list(SeededOrder(10, 25, seed=3))


def test_tensors_that_schemes_share_start_equal(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    def start(scheme: str) -> dict[str, torch.Tensor]:
        return build_trainer(tiny(text, scheme=scheme), corpus, tmp_path, False)[0].model.state_dict()

    reference = start("pre_rmsnorm")
    for scheme in ("bhyt", "lns", "dyt", "peri_ln", "post_rmsnorm"):
        matrices = {name: value for name, value in start(scheme).items() if value.ndim == 2}
        assert matrices and all(torch.equal(value, reference[name]) for name, value in matrices.items())


# --- optimizer ---


def test_weight_decay_acts_on_what_the_model_names(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    for scheme in ("dyt", "bhyt", "pre_layernorm"):
        trainer = build_trainer(tiny(text, scheme=scheme), corpus, tmp_path, False)[0]
        trainer.create_optimizer()
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        decayed, exempt = ({names[id(p)] for p in group["params"]} for group in trainer.optimizer.param_groups)
        assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.1
        assert trainer.optimizer.param_groups[1]["weight_decay"] == 0.0
        assert decayed == set(trainer.model.decay_parameter_names())
        assert decayed | exempt == set(names.values()) and not decayed & exempt
    # transformers' own rule goes by the name, and would exempt DyT's norms
    dyt = build_trainer(tiny(text, scheme="dyt"), corpus, tmp_path, False)[0]
    named = set(super(type(dyt), dyt).get_decay_parameter_names(dyt.model))
    assert "model.norm.weight" not in named and "model.norm.weight" in dyt.get_decay_parameter_names(dyt.model)


def test_learning_rate_warms_up_and_falls_along_a_cosine_to_its_minimum(
    text: Path, go: Callable, tmp_path: Path
) -> None:
    config = tiny(text, steps=20, warmup=0.2, lr=1e-2, min_lr_ratio=0.25, probe_every=0, eval_every=0)
    table = go(config, tmp_path).table()
    rates = table[table.metric == "learning_rate"].value.to_numpy()
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    done = (np.arange(4, 20) - 4 + 1) / 16
    assert rates[4:] == pytest.approx(1e-2 * (0.25 + 0.75 * (1 + np.cos(np.pi * done)) / 2))
    assert rates[-1] == pytest.approx(0.0025)


def test_gradients_are_clipped_and_their_norm_is_logged_unclipped(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    norms = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            norms.append(torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item())

    config = tiny(text, clip=0.01, probe_every=0, eval_every=0, checkpoint_every=0)
    trainer, log, *_ = build_trainer(config, corpus, tmp_path, False)
    trainer.add_callback(Watch())
    trainer.train()
    assert norms == pytest.approx([0.01] * config.steps, rel=1e-3)
    assert min(row[-1] for row in log.rows if row[5] == "grad_norm") > 0.1


# --- measuring ---


def test_measuring_changes_nothing_about_training(text: Path, go: Callable, tmp_path: Path) -> None:
    often = go(tiny(text, probe_every=1, eval_every=1), tmp_path / "often")
    never = go(tiny(text, probe_every=0, eval_every=0), tmp_path / "never")
    curves = [run.table().query("split == 'train' and metric in ('loss', 'grad_norm')").value for run in (often, never)]
    assert curves[0].tolist() == curves[1].tolist()
    assert (often.path / runs.WEIGHTS).read_bytes() == (never.path / runs.WEIGHTS).read_bytes()


def test_statistics_are_taken_before_training_on_schedule_and_at_the_end(
    text: Path, go: Callable, tmp_path: Path
) -> None:
    table = go(tiny(text, steps=7, probe_every=3, eval_every=2), tmp_path).table()
    assert table[table.split == "probe"].step.unique().tolist() == [0, 3, 6, 7]
    held_out = table[(table.split == "eval") & (table.metric == "loss")]
    assert held_out.step.tolist() == [0, 2, 4, 6, 7]
    assert table[(table.split == "train") & (table.metric == "loss")].step.tolist() == list(range(1, 8))


def test_probes_cover_the_sites_on_one_batch_for_all_runs(
    done: runs.Run, text: Path, go: Callable, tmp_path: Path
) -> None:
    table = done.table()
    probes = table[table.split == "probe"]
    for metric in ("token_l2_mean", "feature_var_mean", "rms", "max_abs"):
        assert {"block_out", "attn_norm_in", "mlp_norm_in", "final_norm_in"} <= set(
            probes[probes.metric == metric].site
        )
    assert {"block_in_grad", "attn_norm_in_grad"} <= set(probes[probes.metric == "grad_l2_mean"].site)
    assert sorted(probes[(probes.site == "block_out")].layer.unique()) == [0, 1, 2]
    # the first thing that a block sees is the embedding of the probe batch: equal for schemes that start equal
    other = go(tiny(text, scheme="pre_rmsnorm", steps=1), tmp_path).table()
    start = (
        "split == 'probe' and step == 0 and site == 'block_out' and layer == 0 and metric == 'rms' and mask == 'all'"
    )
    assert table.query(start).value.tolist() == other.query(start).value.tolist()


def test_probe_gradients_are_of_the_summed_loss(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    config = tiny(text, steps=1, eval_every=0)
    trainer, log, *_ = build_trainer(config, corpus, tmp_path, False)
    model = trainer.model
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.from_numpy(corpus.spread(config.probe_blocks))
    loss = model(input_ids=ids, labels=ids).loss * ids[:, 1:].numel()
    gradient = torch.autograd.grad(loss, seen[0])[0]
    hook.remove()
    trainer.train()
    measured = [row[-1] for row in log.rows if (row[0], *row[3:7]) == (0, "block_in_grad", 2, "grad_l2_total", "all")]
    assert measured == pytest.approx([gradient.norm().item()], rel=1e-5)


def test_held_out_loss_is_the_mean_over_all_tokens(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    model = build_trainer(tiny(text), corpus, tmp_path, False)[0].model
    blocks = corpus.spread(5)
    ids = torch.from_numpy(blocks)
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert mean_token_loss(model, blocks, batch_size=2) == pytest.approx(expected, rel=1e-6)
    assert model.training


# --- the carried statistic ---


@pytest.mark.parametrize("steps, expected", [(1, 1), (49, 1), (300, 6), (60_000, 1000), (10**6, 1000)])
def test_the_carried_constant_is_refreshed_every_fiftieth_of_the_run_within_bounds(steps: int, expected: int) -> None:
    assert refresh_interval(steps) == expected


def test_the_carried_constant_is_refreshed_on_schedule_and_after_the_last_step(
    text: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text, steps=103, probe_every=0, eval_every=0, checkpoint_every=0)
    trainer = build_trainer(config, corpus, tmp_path, False)[0]
    refresh, steps = trainer.model.refresh_carried, []
    monkeypatch.setattr(trainer.model, "refresh_carried", lambda: (steps.append(trainer.state.global_step), refresh()))
    trainer.train()
    assert steps == [*range(0, 103, 2), 103]
    for layer in trainer.model.model.layers:
        assert layer.c_attn.item() == layer.attention_variance_constant().item()


# --- how a run ends ---


def test_a_run_whose_loss_is_not_finite_stops_and_is_kept(text: Path, go: Callable, tmp_path: Path) -> None:
    run = go(tiny(text, scheme="pre_rmsnorm", lr=1e30, steps=50, eval_every=10), tmp_path)
    assert run.status == "diverged" and math.isnan(run.eval_loss)
    losses = run.table().query("split == 'train' and metric == 'loss'")
    assert run.manifest["steps"] == losses.step.max() < 50
    assert np.isfinite(losses.value[:-1]).all() and not math.isfinite(losses.value.iloc[-1])
    assert go(tiny(text, scheme="pre_rmsnorm", lr=1e30, steps=50, eval_every=10), tmp_path).path == run.path


def test_a_loss_that_stays_above_the_unigram_entropy_is_marked(text: Path, go: Callable, tmp_path: Path) -> None:
    run = go(tiny(text, lr=1e-9, steps=2), tmp_path)
    assert run.status == "not_learned"
    assert run.eval_loss > run.manifest["corpus"]["unigram_entropy"]
    assert set(run.table().status) == {"not_learned"}


def test_a_loss_below_the_unigram_entropy_counts_as_learned(text: Path, go: Callable, tmp_path: Path) -> None:
    run = go(tiny(text, scheme="pre_rmsnorm", lr=1e-2, steps=80, batch_size=8, probe_every=0, eval_every=80), tmp_path)
    assert run.status == "finished"
    assert run.eval_loss < run.manifest["corpus"]["unigram_entropy"]


# --- what is written ---


def test_a_manifest_tells_everything_that_the_numbers_depend_on(done: runs.Run, corpus: Corpus) -> None:
    manifest = json.loads((done.path / runs.MANIFEST).read_text())
    assert TrainConfig.from_dict(manifest["config"]).run_id == done.path.name == manifest["run"]
    assert manifest["corpus"] == corpus.identity()
    assert {"python", "torch", "transformers", "tokenizers", "normlab", "system", "device"} <= set(
        manifest["environment"]
    )
    assert manifest["environment"]["normlab"] == normlab.__version__
    assert manifest["model"]["scheme"] == "bhyt" and manifest["model"]["lam_input"] == 2.0
    assert manifest["parameters"] == sum(p.numel() for p in done.load_model().parameters())
    assert set(manifest["measured"]) == {"wall_s", "tokens_per_s", "resumed_from_step"}


def test_the_command_in_a_manifest_gives_its_configuration(text: Path) -> None:
    from normlab.cli import _model_fields, build_parser

    config = tiny(text, keep_weights=False, model={"lam_input": 3.0, "carried": "causal"}, tokenizer="some/where")
    options = vars(build_parser().parse_args(["train", *config.to_arguments()]))
    given = {name: options[name] for name in config.to_dict() if options[name] is not None}
    assert TrainConfig(**{**given, "model": _model_fields(given["model"])}) == config


def test_the_same_manifest_gives_the_same_numbers(done: runs.Run, cache: Path, tmp_path: Path) -> None:
    again = train_from_manifest(done.path / runs.MANIFEST, tmp_path, cache_dir=cache, progress=False)
    assert again.path != done.path
    assert (again.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()
    assert (again.path / runs.WEIGHTS).read_bytes() == (done.path / runs.WEIGHTS).read_bytes()


def test_a_kept_model_loads_with_its_tokenizer(done: runs.Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(done.path)
    stored = load_file(done.path / runs.WEIGHTS)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in stored.items())
    assert len(AutoTokenizer.from_pretrained(done.path)) == model.config.vocab_size


def test_weights_are_left_out_on_request(text: Path, go: Callable, tmp_path: Path) -> None:
    run = go(tiny(text, keep_weights=False), tmp_path)
    assert {path.name for path in run.path.iterdir()} == {runs.MANIFEST, runs.STATS}
    with pytest.raises(NormlabError, match="kept no weights"):
        run.load_model()


def test_nothing_but_the_run_is_left(text: Path, go: Callable, tmp_path: Path) -> None:
    run = go(tiny(text), tmp_path)
    assert list(tmp_path.iterdir()) == [run.path]


# --- starting again ---


def test_a_finished_run_is_not_trained_again(
    text: Path, go: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = go(tiny(text), tmp_path)
    monkeypatch.setattr(trainer_module, "_run", lambda *_: pytest.fail("trained again"))
    assert go(replace(tiny(text), threads=2, keep_weights=False, checkpoint_every=0), tmp_path).path == run.path


def test_a_finished_run_on_other_text_is_an_error_that_names_the_difference(go: Callable, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    run = go(tiny(text), tmp_path / "out")
    write_text(text, paragraphs=200)
    with pytest.raises(NormlabError, match="has content_hash '.*', here it is '.*': .*delete the run"):
        go(tiny(text), tmp_path / "out")
    with pytest.raises(NormlabError, match="content_hash"):
        train_from_manifest(run.path, tmp_path / "again", cache_dir=tmp_path, progress=False)


def test_a_name_stands_for_every_field_that_changes_numbers(text: Path) -> None:
    config = tiny(text)
    changes: dict[str, Any] = {"lr": 0.5, "steps": 9, "batch_size": 3, "weight_decay": 0.0, "model": {"kappa": 5.0}}
    names = {replace(config, **{name: value}).run_id for name, value in changes.items()} | {config.run_id}
    assert len(names) == len(changes) + 1
    assert replace(config, threads=5, keep_weights=False, checkpoint_every=1).run_id == config.run_id


def _break_off(monkeypatch: pytest.MonkeyPatch, go: Callable, config: TrainConfig, out: Path, error: Exception) -> None:
    """Raise at the second checkpoint; the first one stays."""
    original, calls = runs.write_stats, []

    def breaking(path: Path, frame: Any) -> None:
        original(path, frame)
        calls.append(path)
        if len(calls) == 2:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_stats", breaking)
        with pytest.raises(type(error) if not isinstance(error, OSError | RuntimeError) else NormlabError):
            go(config, out)


def test_checkpoints_of_another_thread_count_are_not_continued(
    text: Path, go: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text)
    _break_off(monkeypatch, go, config, tmp_path, KeyboardInterrupt())  # type: ignore[arg-type]
    assert list((tmp_path / runs.PARTIAL / config.run_id).glob("checkpoint-*"))
    assert go(replace(config, threads=2), tmp_path).manifest["measured"]["resumed_from_step"] == 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5952 vs 5844"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_line_leaves_nothing_half_written_and_the_run_goes_on_later(
    error: Exception, done: runs.Run, text: Path, go: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text)
    _break_off(monkeypatch, go, config, tmp_path, error)
    work = tmp_path / runs.PARTIAL / config.run_id
    assert not (tmp_path / config.run_id).exists()
    assert {path.name for path in work.iterdir()} == {"partial.json", "checkpoint-3"}
    run = go(config, tmp_path)
    assert run.manifest["measured"]["resumed_from_step"] == 3
    assert (run.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()


def test_optimizer_and_random_states_are_read_as_plain_data(
    text: Path, go: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_off(monkeypatch, go, tiny(text), tmp_path, KeyboardInterrupt())  # type: ignore[arg-type]
    load, safe = torch.load, []
    monkeypatch.setattr(
        torch, "load", lambda *args, **kwargs: (safe.append(kwargs.get("weights_only")), load(*args, **kwargs))[1]
    )
    go(tiny(text), tmp_path)
    assert len(safe) >= 3 and all(safe)


# --- output directories ---


def test_an_output_directory_that_holds_something_else_is_refused(text: Path, go: Callable, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NormlabError, match="holds something else .notes.txt."):
        go(tiny(text), tmp_path)
    with pytest.raises(NormlabError, match="is a file"):
        go(tiny(text), tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_of_runs_may_hold_other_files(done: runs.Run, text: Path, go: Callable, tmp_path: Path) -> None:
    shutil.copytree(done.path.parent, tmp_path / "runs")
    (tmp_path / "runs" / "README.md").write_text("how these were made")
    assert go(tiny(text), tmp_path / "runs").name == done.name


def test_a_run_that_another_process_trains_is_refused(text: Path, go: Callable, tmp_path: Path) -> None:
    config = tiny(text)
    with (
        runs.exclusive(tmp_path / runs.PARTIAL / f"{config.run_id}.lock"),
        pytest.raises(NormlabError, match=f"another process is training {config.scheme}"),
    ):
        go(config, tmp_path)


def test_several_processes_for_one_run_are_refused(
    text: Path, go: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NormlabError, match="one process"):
        go(tiny(text), tmp_path)


# --- configuration ---


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"scheme": "nonorm"}, "unknown scheme 'nonorm'"),
        ({"depth": 0}, "depth is 0"),
        ({"heads": 3}, "3 heads do not divide width 32"),
        ({"heads": 4, "kv_heads": 3}, "3 key-value heads do not divide 4 heads"),
        ({"heads": 32}, "head size 1 is odd"),
        ({"width": 40, "heads": None}, "width 40 is no multiple of 32"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"steps": 0}, "steps is 0"),
        ({"block_length": 1}, "block_length is 1"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"probe_every": -1}, "probe_every is -1"),
        ({"model": {"lamda": 1}}, "unknown model fields lamda"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], message: str, text: Path) -> None:
    with pytest.raises(NormlabError, match=message):
        tiny(text, **fields)


def test_defaults_follow_the_width() -> None:
    config = TrainConfig(width=128)
    assert (config.heads, config.kv_heads, config.intermediate) == (4, 2, 352)
    model = config.model_config(vocab_size=512, eos_token_id=0)
    assert model.max_position_embeddings == model.train_seq_len == config.block_length
    assert model.tie_word_embeddings and model.rms_norm_eps == 1e-6


def test_a_configuration_survives_its_dictionary(text: Path) -> None:
    config = tiny(text, model={"kappa": 5.0})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(NormlabError, match="unknown training fields colour"):
        TrainConfig.from_dict({"colour": "red"})
