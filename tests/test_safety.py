"""Files of strangers run no code: pickles in checkpoints and weights, Python in a model's folder."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import tiny

import normlab
from normlab import NormlabError, store
from normlab.report.inputs import load
from normlab.training.checkpoint import LISTED, STATE, checkpoints, list_files

pytest_plugins = ["training_fixtures"]
CODE = "open({!r}, 'w').close()\nclass NormlabConfig: ...\nclass NormlabForCausalLM: ...\n"


class Program:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple:
        return open, (str(self.victim), "w")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    normlab.NormlabForCausalLM(normlab.NormlabConfig(**shape)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


READERS = [normlab.load_model, load]


@pytest.mark.parametrize("read", READERS)
def test_weights_that_are_a_program_are_not_run(read, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Program(tmp_path / "victim")}, folder / "pytorch_model.bin")
    with pytest.raises(NormlabError, match="could be loaded") as caught:
        read(str(folder))
    assert "\n" not in str(caught.value) and not (tmp_path / "victim").exists()


@pytest.mark.parametrize("read", READERS)
def test_code_in_a_models_folder_is_not_run(read, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    kinds = {"AutoConfig": "evil.NormlabConfig", "AutoModelForCausalLM": "evil.NormlabForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": kinds}))
    (folder / "evil.py").write_text(CODE.format(str(tmp_path / "victim")))
    try:
        read(str(folder))
    except NormlabError as error:  # without a tokenizer
        assert "tokenizer" in str(error) and "\n" not in str(error)
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_checkpoint_that_is_a_program_is_not_run(fsdp, text, go, stop, tmp_path):
    config, out = tiny(text, fsdp=fsdp), tmp_path / "out"
    stop(config, out, 5)
    (checkpoint,) = checkpoints(out / store.PARTIAL / config.run_id)
    torch.save({"model": Program(tmp_path / "victim")}, checkpoint / STATE)
    (checkpoint / LISTED).unlink()
    list_files(checkpoint)  # whole, as its author would have it
    with pytest.raises(NormlabError, match="checkpoint-5 cannot be resumed .*; delete it and start again"):
        go(config, out)
    assert not (tmp_path / "victim").exists()
    shutil.rmtree(checkpoint)
    assert go(config, out).manifest["measured"]["resumed_from_step"] == 0


def test_the_programs_of_these_tests_would_run(tmp_path):
    torch.save(Program(tmp_path / "victim"), tmp_path / "file")
    loaded: Any = torch.load(tmp_path / "file", weights_only=False)
    loaded.close()
    assert (tmp_path / "victim").exists()


LARGER = {
    "a million blocks": {"num_hidden_layers": 10**6},
    "too many blocks for its file": {"num_hidden_layers": 1999},
    "a vocabulary for its file": {"vocab_size": 2**30},
    "a width for its file": {"hidden_size": 2**20},
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("case", LARGER)
def test_a_model_far_larger_than_its_files_is_not_built(case, read, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | LARGER[case]))
    began = time.process_time()
    with pytest.raises(NormlabError, match=r"any_size=True .--any-size. to build it") as caught:
        read(str(folder))
    assert "\n" not in str(caught.value) and time.process_time() - began < 20


def test_a_model_of_any_size_is_built_if_that_is_asked_for(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2**17}))
    with pytest.raises(NormlabError, match="far larger model than the files hold"):
        normlab.load_model(folder)
    with pytest.raises(NormlabError, match="another shape"):  # built, and its weights are those of a smaller one
        normlab.load_model(folder, any_size=True)
