"""Configurations: what is refused, what names a run, and the way to a dictionary, a command line and a model."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from training_helpers import tiny

from normlab import cli, runs
from normlab.errors import NormlabError
from normlab.study.presets import Part, Preset, Variant
from normlab.training.config import SET_BY, CorpusSpec, TrainConfig, argument

DATA = Path(__file__).parents[2] / "data"
TEXT = Path("text.txt")


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
        ({"block_length": 1}, "block_length is 1; it must be at least 2"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"probe_every": -1}, "probe_every is -1; it must be at least 0"),
        ({"probe_also": "saturation,sharpness"}, "probe_also: unknown metric sharpness; choose from"),
        ({"model": {"lamda": 1}}, "unknown model fields lamda"),
        ({"model": {"max_position_embeddings": 8}}, "max_position_embeddings is 8; it must be at least 16"),
        ({"outlier_channels": 500}, "outlier_channels is 500; width"),
        ({"outlier_channels": 2, "outlier_size": math.nan}, "outlier_size is nan; it must be finite"),
        ({"dtype": "int8"}, "dtype is 'int8'; choose one of auto, float32, bfloat16, float16"),
        ({"held_out": "train"}, "held_out is 'train'; choose one of all, validation, test"),
        ({"batch_size": 4, "accumulate": 3}, "accumulate is 3; it must divide batch_size 4"),
        ({"stop_at": 9}, "stop_at is 9; the schedule has 8 steps"),
        ({"store_all": True, "probe_every": 0}, "give probe_every"),
        ({"store_all": True, "stream": True}, "leave stream off"),
    ],
)
def test_a_bad_field_is_named(fields, message):
    with pytest.raises(NormlabError, match=message):
        tiny(TEXT, **fields)


@pytest.mark.parametrize("name", SET_BY)
def test_a_model_field_that_a_run_sets_is_refused(name):
    with pytest.raises(NormlabError, match=f"model field {name} is set by {SET_BY[name]}: give that instead"):
        tiny(TEXT, model={name: 4})


def test_a_vocabulary_that_the_tokenizer_exceeds_is_refused():
    assert tiny(TEXT, model={"vocab_size": 512}).model_config(300, 0).vocab_size == 512
    with pytest.raises(NormlabError, match="model field vocab_size is 5; the tokenizer has 300 tokens"):
        tiny(TEXT, model={"vocab_size": 5}).model_config(300, 0)


def test_defaults_follow_the_width():
    config = TrainConfig(width=128)
    assert (config.heads, config.kv_heads, config.intermediate) == (4, 2, 352)
    model = config.model_config(vocab_size=512, eos_token_id=0)
    assert model.max_position_embeddings == model.train_seq_len == config.block_length
    assert model.tie_word_embeddings and model.rms_norm_eps == 1e-6


def test_a_configuration_survives_its_dictionary_and_its_command_line():
    model = {"lam_input": 3.0, "carried": "causal"}
    config = tiny(TEXT, model=model, tokenizer="some/where", compile=True, keep_weights=False)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    _, options = cli.parse(["train", *config.to_arguments()])
    assert TrainConfig(**cli.given(options.arguments["config"])) == config
    with pytest.raises(NormlabError, match="unknown training fields colour"):
        TrainConfig.from_dict({"colour": "red"})


def test_a_value_that_begins_like_a_flag_survives_the_command_line():
    config = tiny(Path("-odd name.txt"), tokenizer="--out", outlier_channels=1, outlier_size=-3.0)
    _, options = cli.parse(["train", *config.to_arguments(), *argument("--out", "-runs")])
    assert TrainConfig(**cli.given(options.arguments["config"])) == config and options.arguments["out"] == "-runs"


def test_every_field_is_described_where_it_is_defined():
    fields = dataclasses.fields(TrainConfig)
    assert all(spec.metadata["help"] and f"    {spec.name}: " in (TrainConfig.__doc__ or "") for spec in fields)


def test_a_run_reads_the_corpus_of_its_own_fields():
    spec = CorpusSpec.of(tiny(TEXT, tokenizer="some/where", characters=9, text_column="body"))
    assert spec == CorpusSpec(str(TEXT), "some/where", block_length=16, text_column="body", characters=9)
    assert CorpusSpec.of(tiny(TEXT, vocab_size=7)) == CorpusSpec(str(TEXT), vocab_size=7, block_length=16)
    assert CorpusSpec.of(TrainConfig()) == CorpusSpec()
    assert TrainConfig(text_column="body") == TrainConfig(), "documents of a source by name have no columns"


def test_model_fields_of_preset_command_and_variant_are_laid_over_each_other():
    part = Part({2: 1}, ("bhyt",), variants=(Variant({"model": {"lam_input": 4.0}}), Variant()))
    fields = {"width": 64, "model": {"kappa": 5.0, "lam_input": 1.0, "lam_post": 2.0}}
    bent, plain = Preset("test", (part,), 1e-3, fields).grid(part, {}, model={"lam_input": 3.0, "gamma0": 0.5})
    assert plain.model == {"kappa": 5.0, "lam_input": 3.0, "lam_post": 2.0, "gamma0": 0.5}
    assert bent.model == {**plain.model, "lam_input": 4.0}


# --- names of runs ---


def test_a_name_is_that_of_every_field_that_changes_numbers():
    changes: dict[str, Any] = {"lr": 0.5, "steps": 9, "batch_size": 3, "weight_decay": 0.0, "model": {"kappa": 5.0}}
    changes |= {"gain_lr_ratio": 0.1, "stop_at": 4, "clip": 0.0, "store_all": True}
    names = {tiny(TEXT, **{name: value}).run_id for name, value in changes.items()} | {tiny(TEXT).run_id}
    assert len(names) == len(changes) + 1
    assert tiny(TEXT, checkpoint_every=1, keep_weights=False, threads=5, accumulate=2).run_id == tiny(TEXT).run_id
    assert TrainConfig(dtype="float32").run_id == "bhyt-d16-w128-lr0.003-s0-2dbbe546"
    assert tiny(TEXT, init_std=0.02) == tiny(TEXT) != tiny(TEXT, init_std=0.06)


@pytest.mark.parametrize(
    "one, same",
    [
        ({"probe_also": "tanh_input_max,saturation"}, {"probe_also": "saturation, tanh_input_max,"}),
        ({"probe_also": "saturation"}, {"probe_also": "rms,saturation,saturation"}),
        ({}, {"probe_also": "rms"}),
        ({}, {"outlier_size": 7.0}),
        ({}, {"stop_at": 8}),
        ({"clip": 5.0, "weight_decay": 0.0, "warmup": 0.0}, {"clip": 5, "weight_decay": 0, "warmup": -0.0}),
        ({"init_std": 1.0, "lr": 1.0}, {"init_std": 1, "lr": 1}),
        ({"model": {"kappa": 3.0, "calibration": [1.0, 2.5]}}, {"model": {"kappa": 3, "calibration": (1, 2.5)}}),
        ({}, {"model": {"lam_input": 2, "tie_word_embeddings": True, "max_position_embeddings": 16}}),
        ({"probe_every": 0}, {"probe_every": 0, "probe_blocks": 4, "probe_also": "saturation"}),
        ({"tokenizer": "some/where"}, {"tokenizer": "some/where", "vocab_size": 500}),
    ],
)
def test_what_trains_and_measures_the_same_is_one_run(one, same):
    first, second = tiny(TEXT, **one), tiny(TEXT, **same)
    assert first == second and first.run_id == second.run_id
    assert first.run_id != tiny(TEXT, outlier_channels=1, outlier_size=7.0).run_id


@pytest.mark.parametrize("model", [{"tie_word_embeddings": False}, {"vocab_size": 32000}, {"attention_bias": 0}])
def test_a_model_field_that_differs_from_what_a_run_has_by_itself_stays(model):
    """These are the defaults of a model's configuration alone, or a type that it refuses."""
    assert tiny(TEXT, model=model).model == model


def test_shipped_runs_keep_their_ids_and_the_order_of_their_fields():
    folders = runs.find_runs(DATA)
    assert len(folders) > 100
    for folder in folders:
        manifest = runs.read_manifest(folder)
        config, shipped = TrainConfig.from_dict(manifest["config"]), manifest["config"]
        assert config.run_id == manifest["run"], folder
        written = json.loads(json.dumps(config.to_dict()))
        assert [(name, value) for name, value in written.items() if name in shipped] == list(shipped.items()), folder
