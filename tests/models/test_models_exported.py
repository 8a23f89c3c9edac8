"""An exported run is loaded by programs that do not know normlab: transformers' Auto classes, and lm-eval."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from training_helpers import write_text

import normlab
from normlab import NormlabError, runs
from normlab.cli import main
from normlab.models import NormlabForCausalLM
from normlab.models.pretrained import export_model
from normlab.training.measure import mean_token_loss

pytest_plugins = ["training_fixtures"]


@pytest.fixture(scope="module")
def exported(done: runs.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(done.path, tmp_path_factory.mktemp("exported") / "model")


def test_an_export_that_is_killed_leaves_nothing_that_refuses_the_next(done, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))  # the last file
        with pytest.raises(KeyboardInterrupt):
            export_model(done.path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert (export_model(done.path, tmp_path / "model") / "modeling_normlab.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_a_program_that_never_imports_normlab_loads_an_exported_run(done, exported):
    """The error names what to install if normlab is missing."""
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
sys.modules["normlab"] = None
try:
    AutoModelForCausalLM.from_pretrained({str(exported)!r}, trust_remote_code=True)
except ImportError as error:
    print(error)
del sys.modules["normlab"]
model = AutoModelForCausalLM.from_pretrained({str(exported)!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({str(exported)!r}, trust_remote_code=True)
ids = tokenizer("the residual", return_tensors="pt").input_ids
print(type(model).__name__, model.dtype, model(ids).logits.double().sum().item())
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    refused, loaded = process.stdout.splitlines()
    assert refused.startswith("this model is made of normlab's blocks: install the package normlab")
    name, dtype, total = loaded.split()
    assert (name, dtype) == ("NormlabForCausalLM", "torch.float32")
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(done.path)("the residual", return_tensors="pt").input_ids
    assert float(total) == done.load_model()(ids).logits.double().sum().item()


def test_what_was_loaded_is_saved_and_loaded_again(exported, tmp_path):
    NormlabForCausalLM.from_pretrained(exported).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in config, "it names a file that only `normlab export` writes"
    assert NormlabForCausalLM.from_pretrained(tmp_path).config.scheme == "bhyt"


def test_lm_eval_measures_our_own_loss(exported, tmp_path):
    """Its rolling likelihood of documents that fill one context each, begun with the end-of-text token."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    words = tokenizer(write_text(tmp_path / "text.txt").read_text()).input_ids
    pieces = [words[start : start + 15] for start in range(0, 1500, 15)]
    texts = [text for piece in pieces if tokenizer(text := tokenizer.decode(piece)).input_ids == piece][:24]
    assert len(texts) == 24
    (tmp_path / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    task = {
        "task": "local_text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "local_text.yaml").write_text(yaml.safe_dump(task))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "trust_remote_code": True, "device": "cpu", "batch_size": 8},
        tasks=["local_text"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    bits = found["results"]["local_text"]["bits_per_byte,none"]
    theirs = bits * math.log(2) * sum(len(text.encode()) for text in texts) / (15 * len(texts))
    blocks = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids] for text in texts]).numpy()
    ours = mean_token_loss(NormlabForCausalLM.from_pretrained(exported), blocks, 8)
    assert 1.0 < ours < 6.0 and abs(theirs - ours) < 1e-4


def test_what_cannot_be_exported_is_one_line(done, tmp_path, capsys, refused):
    out = tmp_path / "out"
    assert main(["export", str(done.path), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert f"{out} is there already" in refused("export", done.path, out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NormlabError, match="holds no weights: name a run that was trained with keep_weights"):
        export_model(tmp_path / "empty", tmp_path / "other")


def _edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: _edit_config(folder, model_type="zzz"), "holds a zzz model, not one of normlab's"),
        (lambda folder: _edit_config(folder, num_hidden_layers=3), "the weights lack .*layers.2.* more"),
        (
            lambda folder: _edit_config(folder, num_hidden_layers=1),
            "the configuration has no place for .*layers.1.* more",
        ),
        (lambda folder: _edit_config(folder, intermediate_size=32), "gives another shape to .*mlp.* more"),
        (lambda folder: (folder / "config.json").write_text("{"), "no model could be loaded from"),
        (lambda folder: (folder / runs.WEIGHTS).write_bytes(b"\x10" * 9), "no model could be loaded from"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer could be loaded from"),
    ],
)
def test_a_model_that_does_not_fit_its_configuration_is_neither_exported_nor_loaded(spoil, message, done, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(done.path, folder)
    spoil(folder)
    with pytest.raises(NormlabError, match=message) as refused:
        export_model(folder, tmp_path / "out")
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
    if "tokenizer" not in message:
        for load in (normlab.load_model, lambda path: runs.Run(path, {}).load_model()):
            with pytest.raises(NormlabError, match=message):
                load(folder)
