"""Bad calls from Python: each raises NormlabError with one line that names what is wrong, before anything is done."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_zoo import tiny_llama

import normlab
from normlab import NormlabError
from normlab.experimental.norm_removal import RemovalConfig
from normlab.training.config import CorpusSpec, TrainConfig

IDS = torch.zeros(1, 8, dtype=torch.long)
FIELDS: list[tuple[Any, str, Any, str]] = [
    (TrainConfig, "depth", 2.5, "integer"),
    (TrainConfig, "depth", "2", "integer"),
    (TrainConfig, "depth", True, "integer"),
    (TrainConfig, "depth", None, "integer"),
    (TrainConfig, "seed", "abc", "integer"),
    (TrainConfig, "seed", 2**32, "below 4294967296"),
    (TrainConfig, "compile", "no", "boolean"),
    (TrainConfig, "keep_weights", "false", "boolean"),
    (TrainConfig, "model", [1], "dictionary"),
    (TrainConfig, "lr", math.inf, "finite"),
    (TrainConfig, "weight_decay", math.nan, "finite"),
    (TrainConfig, "threads", 100_000_000, "at most 1024"),
    (TrainConfig, "scheme", ["bhyt"], "string"),
    (TrainConfig, "corpus", "notes-\udcff.txt", "unicode"),
    (CorpusSpec, "characters", 1e6, "integer"),
    (RemovalConfig, "lr", "1e-4", "number"),
]


@pytest.mark.parametrize("kind, name, value, words", FIELDS, ids=lambda one: ascii(one)[:24])
def test_a_field_of_another_type_or_out_of_range_is_named(kind, name, value, words):
    with pytest.raises(NormlabError, match=rf"^{name} is .*{words}") as caught:
        kind(**{name: value})
    assert "\n" not in str(caught.value)


CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unknown field of a swap": (
        lambda _: normlab.swap_norms(tiny_llama(), "bhyt", zzz_unknown=3),
        "zzz_unknown changes",
    ),
    "depth of a swap": (
        lambda _: normlab.swap_norms(tiny_llama(), "bhyt", num_hidden_layers=7),
        "num_hidden_layers changes",
    ),
    "a size that no tensor has": (lambda _: normlab.NormlabConfig(intermediate_size=10**30), "intermediate_size is 1e"),
    "padding beyond the tokens": (lambda _: normlab.NormlabConfig(pad_token_id=2**63), "pad_token_id is 9223"),
    "a dtype of a model that is none": (lambda _: normlab.NormlabConfig(dtype="1e9"), "does not take this .*1e9"),
    "labels that are no names": (lambda _: normlab.NormlabConfig(id2label="x"), "does not take this configuration"),
    "a long wrong value": (lambda _: normlab.NormlabConfig(hidden_act="x" * 5000), r"hidden_act is 'x{79}: choose"),
    "runs of a name with a zero": (lambda _: normlab.load_runs("\0"), "does not exist"),
    "runs of a name too long": (lambda _: normlab.load_runs("x" * 5000), "x{200} does not exist"),
    "a model compared with a number": (lambda _: normlab.diff(tiny_llama(), 3, {"input_ids": IDS}), "3 is not"),
    "span of nothing": (lambda _: normlab.skip_sensitivity(tiny_llama(), [{"input_ids": IDS}], span=0), "span is 0"),
    "no batches": (lambda _: normlab.skip_sensitivity(tiny_llama(), None), "batches is None"),
    "a batch without names": (lambda _: normlab.diff(tiny_llama(), tiny_llama(), IDS), "batch must be a dict"),
    "a figure of a path": (lambda _: normlab.figures.loss_curves("data/runs"), "is not a table"),
    "statistics between steps": (lambda _: normlab.LayerStatsCallback(every=1.5), "every is 1.5"),
    "record of nothing": (lambda _: normlab.record(None), "None: give a torch module"),
    "sites of a word": (lambda _: normlab.sites("model"), "'model': give a torch module"),
    "no released configuration": (lambda _: normlab.NormlabConfig.from_released(None), "released is None"),
    "released configuration in a list": (lambda _: normlab.NormlabConfig.from_released([1]), r"released is \[1\]"),
    "sweep of numbers": (lambda out: normlab.sweep([1, 2], out / "runs"), "1 cannot be trained"),
    "swap of nothing": (lambda _: normlab.swap_norms(None, "bhyt"), "NoneType has no Llama-shaped blocks"),
    "sweep of nothing": (lambda out: normlab.sweep([], out / "runs"), "there is nothing to train"),
    "training of a dictionary": (lambda out: normlab.train({}, out / "runs"), "{} is no TrainConfig"),
    "activation that is not there": (lambda _: normlab.NormlabConfig(hidden_act="nope"), "hidden_act is 'nope'"),
    "dropout of all": (lambda _: normlab.NormlabConfig(attention_dropout=1.0), "attention_dropout is 1.0"),
    "no configurations": (normlab.load_configs, "no runs in"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call_is_one_line(case, tmp_path):
    call, words = CALLS[case]
    with pytest.raises(NormlabError, match=words) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
