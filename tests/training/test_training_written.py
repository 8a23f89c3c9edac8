"""One run on disk: what it writes, when it is trained again, and what it refuses."""

import contextlib
import errno
import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import tiny, write_text

import normlab
from normlab import NormlabError, packed, runs, store
from normlab.training import manifest
from normlab.training import run as run_module
from normlab.training.checkpoint import list_files
from normlab.training.config import TrainConfig
from normlab.training.manifest import commit, environment
from normlab.training.run import train_from_manifest
from normlab.training.sweep import sweep

# --- what is written ---


def test_a_manifest_tells_everything_that_the_numbers_depend_on(done, corpus):
    manifest = json.loads((done.path / runs.MANIFEST).read_text())
    assert TrainConfig.from_dict(manifest["config"]).run_id == done.path.name == manifest["run"]
    assert manifest["corpus"] == corpus.identity()
    assert manifest["epochs"] == manifest["tokens"] / corpus.train.size
    about = manifest["environment"]
    assert {"python", "torch", "transformers", "tokenizers", "normlab", "system", "device"} <= set(about)
    assert about["normlab"] == normlab.__version__
    assert manifest["model"]["scheme"] == "bhyt" and manifest["model"]["lam_input"] == 2.0
    assert manifest["parameters"] == sum(p.numel() for p in done.load_model().parameters())
    assert set(manifest["measured"]) == {"wall_s", "tokens_per_s", "compiled", "resumed_from_step"}


def test_a_manifest_names_the_commit_of_a_checkout_and_nothing_elsewhere(done, tmp_path):
    found = done.manifest["commit"]
    assert found is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", found)
    package = tmp_path / "normlab"
    package.mkdir()
    (package / "__init__.py").touch()
    assert commit(package) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b@c"]
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    clean = commit(package)
    assert clean is not None and re.fullmatch("[0-9a-f]{40}", clean)
    (package / "__init__.py").write_text("changed")
    assert commit(package) == f"{clean}-dirty"


def test_the_same_manifest_gives_the_same_numbers(done, cache, tmp_path):
    again = train_from_manifest(done.path / runs.MANIFEST, tmp_path, cache_dir=cache, progress=False)
    assert again.path != done.path
    assert (again.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()
    assert (again.path / runs.WEIGHTS).read_bytes() == (done.path / runs.WEIGHTS).read_bytes()


def test_a_manifest_names_the_device_that_the_run_takes(monkeypatch):
    assert environment("cpu")["device"] == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert environment()["device"] == "mps" and environment("cpu")["device"] == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    assert environment()["device"] == "NVIDIA X"


def test_a_kept_model_loads_with_its_tokenizer(done):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(done.path)
    stored = load_file(done.path / runs.WEIGHTS)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in stored.items())
    assert len(AutoTokenizer.from_pretrained(done.path)) == model.config.vocab_size


def test_weights_are_left_out_on_request(text, go, tmp_path):
    run = go(tiny(text, keep_weights=False), tmp_path)
    assert {path.name for path in run.path.iterdir()} == {runs.MANIFEST, runs.STATS}
    assert list(tmp_path.iterdir()) == [run.path]
    with pytest.raises(NormlabError, match="kept no weights; train it again with keep_weights, in another directory"):
        run.load_model()


# --- starting again ---


def test_a_finished_run_is_not_trained_again(done, text, go, tmp_path, monkeypatch):
    shutil.copytree(done.path, tmp_path / done.name)
    monkeypatch.setattr(run_module, "_run", lambda *_: pytest.fail("trained again"))
    config = replace(tiny(text), threads=2, keep_weights=False, checkpoint_every=0)
    assert go(config, tmp_path).path == tmp_path / done.name


def test_weights_that_a_finished_run_lacks_are_one_warning_and_none_in_a_sweep(text, go, cache, tmp_path):
    config = tiny(text, steps=2)
    run = go(replace(config, keep_weights=False), tmp_path / "runs")
    for is_packed in (False, True):
        with pytest.warns(UserWarning, match=f"run {run.path} is finished and has no weights here; .*") as said:
            assert go(config, tmp_path / "runs").manifest == run.manifest
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = sweep([config], tmp_path / "runs", cache_dir=cache, workers=1, threads=1, progress=False)
            assert go(replace(config, keep_weights=False), tmp_path / "runs").manifest == run.manifest
        assert [each.name for each in result.runs] == [run.name] and not result.failures
        if not is_packed:
            packed.pack(tmp_path / "runs")


def test_a_run_that_another_process_finishes_before_the_lock_is_taken_is_not_trained_again(
    done, text, go, tmp_path, monkeypatch
):
    def late(path: Path, busy: str) -> contextlib.AbstractContextManager:
        shutil.copytree(done.path, tmp_path / done.name)
        return contextlib.nullcontext()

    monkeypatch.setattr(store, "locked", late)
    monkeypatch.setattr(run_module, "_run", lambda *_: pytest.fail("trained again"))
    assert go(tiny(text), tmp_path).manifest == done.manifest


def test_a_finished_run_on_other_text_is_an_error_that_names_the_difference(go, tmp_path):
    text = write_text(tmp_path / "text.txt")
    run = go(tiny(text), tmp_path / "out")
    write_text(text, paragraphs=200)
    with pytest.raises(NormlabError, match="has content_hash '.*', here it is '.*': .*delete the run"):
        go(tiny(text), tmp_path / "out")
    with pytest.raises(NormlabError, match="content_hash"):
        train_from_manifest(run.path, tmp_path / "again", cache_dir=tmp_path, progress=False)


def test_a_streamed_run_on_text_that_changed_after_its_head_is_another_run(go, stop, tmp_path):
    text = write_text(tmp_path / "text.txt")
    config = tiny(text, stream=True, characters=20_000, steps=4, probe_every=0, eval_every=0)
    run = go(config, tmp_path / "out")
    stop(config, tmp_path / "begun", 2)
    text.write_text(f"{text.read_text()}\n\nand more")
    with pytest.raises(NormlabError, match="has source_key '.*', here it is '.*': .*delete the run"):
        go(config, tmp_path / "out")
    with pytest.raises(NormlabError, match="has source_key"):
        train_from_manifest(run.path, tmp_path / "again", cache_dir=tmp_path, progress=False)
    with pytest.warns(UserWarning, match="was begun with another source_key, set aside: the run starts again"):
        again = go(config, tmp_path / "begun")
    assert again.manifest["corpus"]["content_hash"] == run.manifest["corpus"]["content_hash"]
    with pytest.warns(UserWarning, match="left out: .* has its name but another text"):
        normlab.load_runs([run.path, again.path])


def test_a_corrected_end_of_text_token_makes_another_run(text, corpus, go, stop, tmp_path):
    tokenizer = corpus.tokenizer()
    tokenizer.add_tokens([tokenizer.convert_ids_to_tokens(5)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = tiny(text, tokenizer=str(tmp_path / "tokenizer"), steps=4, probe_every=0, eval_every=0)
    run = go(config, tmp_path / "out")
    stop(config, tmp_path / "begun", 2)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    other = rf"has eos_token_id {corpus.eos_token_id}, here it is 5: .*delete the run"
    with pytest.raises(NormlabError, match=other):
        go(config, tmp_path / "out")
    of_earlier = {name: value for name, value in run.manifest["corpus"].items() if name != "eos_token_id"}
    store.write_json(run.path / runs.MANIFEST, {**run.manifest, "corpus": of_earlier})
    with pytest.raises(NormlabError, match=other):
        go(config, tmp_path / "out")
    with pytest.warns(UserWarning, match="was begun with another eos_token_id, set aside: the run starts again"):
        assert go(config, tmp_path / "begun").manifest["corpus"]["eos_token_id"] == 5


def test_a_streamed_run_of_an_earlier_version_passes_with_a_warning(text, go, stop, tmp_path):
    config = tiny(text, stream=True, steps=4, probe_every=0, eval_every=0)
    stop(config, tmp_path, 2)
    begun = _begun_of(config, tmp_path, 2)
    del begun["corpus"]["source_key"]
    _rewrite(config, tmp_path, 2, begun)
    with pytest.warns(UserWarning, match="checkpoint-2 does not say its source_key: it may have begun on another text"):
        run = go(config, tmp_path)
    assert run.manifest["measured"]["resumed_from_step"] == 2
    corpus = {name: value for name, value in run.manifest["corpus"].items() if name != "source_key"}
    store.write_json(run.path / runs.MANIFEST, {**run.manifest, "corpus": corpus})
    with pytest.warns(UserWarning, match="does not say its source_key: it may be of another text"):
        assert go(config, tmp_path).name == run.name


def _break_off(monkeypatch: pytest.MonkeyPatch, go: Callable, config: TrainConfig, out: Path, error: Exception) -> None:
    """Raise at the second checkpoint; the first one stays."""
    original, calls = store.write_stats, []

    def breaking(path: Path, frame: Any) -> None:
        original(path, frame)
        calls.append(path)
        if len(calls) == 2:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_stats", breaking)
        with pytest.raises(type(error) if not isinstance(error, OSError | RuntimeError) else NormlabError):
            go(config, out)


def test_checkpoints_of_another_thread_count_are_not_continued(text, go, tmp_path, monkeypatch):
    config = tiny(text, probe_every=0, eval_every=0)
    _break_off(monkeypatch, go, config, tmp_path, KeyboardInterrupt())  # type: ignore[arg-type]
    assert list((tmp_path / store.PARTIAL / config.run_id).glob("checkpoint-*"))
    assert go(replace(config, threads=2), tmp_path).manifest["measured"]["resumed_from_step"] == 0


def test_a_resumed_run_has_the_seconds_of_all_its_processes_and_names_their_commits(
    done, text, go, stop, tmp_path, monkeypatch
):
    config = tiny(text)

    def at(commit: str | None) -> None:
        monkeypatch.setattr(manifest, "commit", lambda: commit)

    at("a" * 40)
    stop(config, tmp_path, 2)
    begun = _begun_of(config, tmp_path, 2)
    assert 0 < begun["measured"]["wall_s"] < 1000
    _rewrite(config, tmp_path, 2, {**begun, "measured": {"wall_s": 5000.0}})
    at("b" * 40)
    with pytest.warns(UserWarning, match=f"checkpoint-2 was written at commit {'a' * 40}, .* goes on at {'b' * 40}"):
        stop(config, tmp_path, 4)
    assert _begun_of(config, tmp_path, 4)["earlier_commits"] == ["a" * 40]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = go(config, tmp_path)
    assert run.manifest["commit"] == "b" * 40 and run.manifest["earlier_commits"] == ["a" * 40]
    assert 5000 < run.manifest["measured"]["wall_s"] < 6000
    assert (run.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()
    assert "earlier_commits" not in done.manifest


def test_a_checkpoint_that_does_not_know_its_seconds_is_resumed(text, go, stop, tmp_path):
    config = tiny(text)
    stop(config, tmp_path, 2)
    begun = _begun_of(config, tmp_path, 2)
    del begun["measured"]
    _rewrite(config, tmp_path, 2, begun)
    run = go(config, tmp_path)
    assert run.manifest["measured"]["resumed_from_step"] == 2 and "earlier_commits" not in run.manifest


def test_a_resumed_run_that_began_without_git_names_that_commit_unknown(text, go, stop, tmp_path, monkeypatch):
    config = tiny(text, steps=4)
    monkeypatch.setattr(manifest, "commit", lambda: None)
    stop(config, tmp_path, 2)
    monkeypatch.setattr(manifest, "commit", lambda: "b" * 40)
    with pytest.warns(UserWarning, match=f"was written at commit unknown, and the run goes on at {'b' * 40}: "):
        assert go(config, tmp_path).manifest["earlier_commits"] == ["unknown"]


def test_a_checkpoint_of_another_processor_is_set_aside_without_a_promise_of_the_same_numbers(
    text, go, stop, tmp_path, monkeypatch
):
    config = tiny(text, steps=4)
    stop(config, tmp_path, 2)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    with pytest.warns(UserWarning, match="begun with another cpu_capability, .*; its numbers may be others$"):
        run = go(config, tmp_path)
    assert run.manifest["measured"]["resumed_from_step"] == 0


def _begun_of(config: TrainConfig, out: Path, step: int) -> dict[str, Any]:
    return json.loads((out / store.PARTIAL / config.run_id / f"checkpoint-{step}" / "begun.json").read_text())


def _rewrite(config: TrainConfig, out: Path, step: int, begun: dict[str, Any]) -> None:
    checkpoint = out / store.PARTIAL / config.run_id / f"checkpoint-{step}"
    store.write_json(checkpoint / "begun.json", begun)
    (checkpoint / "files.json").unlink()
    list_files(checkpoint)


def test_a_full_disk_is_one_line_leaves_nothing_half_written_and_the_run_goes_on_later(
    done, text, go, tmp_path, monkeypatch
):
    config = tiny(text)
    errors = (
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5952 vs 5844"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    )
    for place, error in enumerate(errors):
        out = tmp_path / str(place)
        _break_off(monkeypatch, go, config, out, error)
        assert not (out / config.run_id).exists()
        left = (out / store.PARTIAL / config.run_id).iterdir()
        assert {path.name for path in left} == {"checkpoint-3", store.ROWS}, error
    run = go(config, out)
    assert run.manifest["measured"]["resumed_from_step"] == 3
    assert (run.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()


# --- output directories ---


def test_an_output_directory_that_holds_something_else_is_refused(text, go, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NormlabError, match="holds something else .notes.txt."):
        go(tiny(text), tmp_path)
    with pytest.raises(NormlabError, match="is a file"):
        go(tiny(text), tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_of_runs_may_hold_other_files(done, text, go, tmp_path):
    shutil.copytree(done.path.parent, tmp_path / "runs")
    (tmp_path / "runs" / "README.md").write_text("how these were made")
    assert go(tiny(text), tmp_path / "runs").name == done.name


def test_a_run_that_another_process_trains_is_refused(text, go, tmp_path):
    config = tiny(text)
    with (
        store.to_train(tmp_path, config.run_id),
        pytest.raises(NormlabError, match=f"another process is training {config.scheme}"),
    ):
        go(config, tmp_path)
