"""A run whose checkpoints were damaged resumes from the newest whole one, and ends as one that nobody disturbed."""

import errno
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from training_helpers import tiny

from normlab import NormlabError, runs, store
from normlab.training import keep
from normlab.training.checkpoint import check_files, checkpoints, list_files
from normlab.training.config import TrainConfig

FILES = ("state.pt", "stats.parquet", "begun.json", "files.json")
DAMAGES = ("truncated", "empty", "garbage", "missing", "swapped")
CASES = [(file, damage) for file in FILES for damage in DAMAGES]
TRAINED = {("state.pt", "missing"), ("state.pt", "swapped"), ("files.json", "garbage")}


def damage(path: Path, kind: str, other: Path) -> None:
    """other: the checkpoint of another run."""
    if kind == "missing":
        path.unlink()
    elif kind == "swapped":
        shutil.copy(other / path.name, path)
    else:
        content = path.read_bytes()
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "garbage": b"\x80{]" * 99}[kind])


def stop_at(steps: Iterable[int], stop: Callable, config: TrainConfig, out: Path) -> Path:
    """Train to each of these steps in turn; the directory of checkpoints, all of them kept."""
    work = out / store.PARTIAL / config.run_id
    for last in steps:
        stop(config, out, last)
        shutil.copytree(work, out / "kept", dirs_exist_ok=True)
    shutil.rmtree(work)
    (out / "kept").rename(work)
    return work


@pytest.fixture(scope="module")
def begun(text: Path, stop: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint-2 and checkpoint-5 of one run."""
    return stop_at((2, 5), stop, tiny(text), tmp_path_factory.mktemp("begun"))


@pytest.fixture(scope="module")
def other(text: Path, stop: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint-4 of a run that differs in its data and its learning rate."""
    config = tiny(text, seed=1, lr=1e-3, batch_size=1)
    return stop_at((4,), stop, config, tmp_path_factory.mktemp("other")) / "checkpoint-4"


def resume(go: Callable, text: Path, begun: Path, out: Path, broken: list[Path]) -> tuple[runs.Run, list[str]]:
    """The finished run and what was said on the way; `broken` are set aside before it is finished."""
    aside: list[str] = []

    def watch(step: int, rows: list) -> bool:
        aside[:] = sorted(path.name for path in (out / store.PARTIAL / begun.name).glob("damaged-*"))
        return True

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = go(tiny(text), out, watch=watch)
    assert aside == sorted(f"damaged-{path.name}" for path in broken)
    return run, [str(warning.message) for warning in caught if "damaged checkpoint" in str(warning.message)]


@pytest.mark.parametrize(
    "file, kind", [case if case in TRAINED else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_set_aside_and_the_numbers_stay(
    file, kind, both, begun, other, text, go, done, tmp_path
):
    """both: the older one likewise."""
    work = tmp_path / store.PARTIAL / begun.name
    shutil.copytree(begun, work)
    newest, older = work / "checkpoint-5", work / "checkpoint-2"
    assert {path.name for path in newest.iterdir()} == set(FILES)
    same = kind == "swapped" and (other / file).read_bytes() == (newest / file).read_bytes()
    broken = [] if same else [newest, older] if both else [newest]
    for checkpoint in broken:
        damage(checkpoint / file, kind, other)
    run, said = resume(go, text, begun, tmp_path, broken)
    then = "starts again from step 0" if both else "resumes from checkpoint-2"
    named = "" if (file, kind) == ("files.json", "swapped") else file  # that list names other files
    assert len(said) == len(broken) and all(named in line and then in line and "\n" not in line for line in said)
    assert run.manifest["measured"]["resumed_from_step"] == {0: 5, 1: 2, 2: 0}[len(broken)]
    assert (run.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()
    assert (run.path / runs.WEIGHTS).read_bytes() == (done.path / runs.WEIGHTS).read_bytes()


def test_a_checkpoint_stays_until_the_next_one_was_read_back(text, go, tmp_path, monkeypatch):
    publish = store.publish

    def flips_a_byte(staged: Path, final: Path) -> None:
        publish(staged, final)
        if final.name == "checkpoint-6":
            damage(final / "state.pt", "garbage", final)

    monkeypatch.setattr(store, "publish", flips_a_byte)
    with pytest.raises(NormlabError, match="state.pt is not the file that was written"):
        go(tiny(text), tmp_path)
    work = tmp_path / store.PARTIAL / tiny(text).run_id
    assert {path.name for path in checkpoints(work)} == {"checkpoint-3", "checkpoint-6"}
    check_files(work / "checkpoint-3")


def test_a_checkpoint_of_an_earlier_version_is_passed_over_in_one_line(begun, text, go, done, tmp_path):
    checkpoint = tmp_path / store.PARTIAL / begun.name / "checkpoint-5"
    shutil.copytree(begun / "checkpoint-5", checkpoint)
    (checkpoint / "state.pt").rename(checkpoint / "optimizer.pt")
    (checkpoint / "files.json").unlink()
    list_files(checkpoint)
    with pytest.warns(UserWarning, match="was written by an earlier version .*: the run starts again from step 0"):
        run = go(tiny(text), tmp_path)
    assert (run.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()


def test_a_checkpoint_that_was_begun_otherwise_is_set_aside_with_its_reason(begun, text, go, done, tmp_path):
    work = tmp_path / store.PARTIAL / begun.name
    shutil.copytree(begun, work)
    config = tiny(text, gradient_checkpointing=True, keep_weights=True)
    assert config.run_id == begun.name
    kept: list[str] = []

    def watch(step: int, rows: list) -> bool:
        kept[:] = sorted(path.name for path in work.glob("other-*"))
        return True

    with pytest.warns(UserWarning, match="begun with another gradient_checkpointing, set aside: .* from step 0"):
        run = go(config, tmp_path, watch=watch)
    assert kept == ["other-checkpoint-2", "other-checkpoint-5"] and run.manifest["measured"]["resumed_from_step"] == 0


def test_settings_that_change_no_number_do_not_keep_a_run_from_its_checkpoint(begun, text, go, tmp_path):
    shutil.copytree(begun, tmp_path / store.PARTIAL / begun.name)
    run = go(tiny(text, keep_weights=not tiny(text).keep_weights, checkpoint_every=5), tmp_path)
    assert run.manifest["measured"]["resumed_from_step"] == 5


# --- at an address ---


def test_a_run_whose_upload_broke_off_is_not_there_and_is_uploaded_again(done, tmp_path, monkeypatch):
    place = store.Remote(f"file://{tmp_path}/bucket")
    put = type(place.files).put_file

    def cut(self: Any, here: str, name: str, **options: Any) -> None:
        if name.endswith(runs.WEIGHTS):
            raise OSError("the line is dead")
        put(self, here, name, **options)

    monkeypatch.setattr(place, "copy", done.path.parent)
    with monkeypatch.context() as patch:
        patch.setattr(type(place.files), "put_file", cut)
        with pytest.raises(NormlabError, match=f"does not allow writing {done.name}/{runs.WEIGHTS}: .*dead"):
            place.upload(done.name)
    assert not place.has(f"{done.name}/{store.MANIFEST}")
    place.upload(done.name)
    assert {path.name for path in (tmp_path / "bucket" / done.name).iterdir()} == {
        path.name for path in done.path.iterdir()
    }


@pytest.mark.parametrize("name", ["../../victim.txt", "run/../../../victim.txt", "run/..\\..\\victim.txt"])
@pytest.mark.parametrize("read", [runs.find_runs, runs.read_run, lambda address: store.Remote(address).fetch("run")])
def test_names_at_an_address_never_lead_out_of_their_folder(name, read, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "inside" / "cache"))
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "store", {})
    monkeypatch.setattr(type(memory), "pseudo_dirs", [""])
    for key in ("/place/manifest.json", "/place/run/manifest.json", f"/place/{name}", f"/place/run/{name}"):
        memory.store[key] = type(memory.open("/x", "wb"))(memory, key, b"{}")
    with pytest.raises(NormlabError, match="is no name of a file below"):
        read("memory://place")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/x", "a/../../x", "..\\x", "C:x", "C:\\x", "\\\\host\\x", "a\0b"])
def test_a_name_that_would_lie_elsewhere_is_refused(name, tmp_path):
    with pytest.raises(NormlabError, match="is no name of a file below"):
        store.inside(tmp_path, name)
    assert store.inside(tmp_path, "a/b..c/.d") == tmp_path / "a" / "b..c" / ".d"


def test_a_kept_models_folder_lies_where_it_was_asked_for(done, text, tmp_path, monkeypatch):
    victim = tmp_path / "victim-d2"
    victim.mkdir()
    config = tiny(text, model={"kappa_schedule": "/../../victim"})
    manifest = {"run": "x", "config": config.to_dict(), "corpus": {}}
    monkeypatch.setattr(runs, "read_run", lambda path: runs.Run(path, manifest))
    with pytest.raises(NormlabError, match="is no name of a file below"):
        keep.keep(done.path, tmp_path / "out" / "models")
    assert victim.is_dir()


# --- finished runs and disks ---


def test_a_finished_run_with_a_damaged_table_is_found(done, text, go, tmp_path):
    shutil.copytree(done.path, tmp_path / done.name)
    table = tmp_path / done.name / runs.STATS
    damage(table, "truncated", table)
    with pytest.raises(NormlabError, match="stats.parquet cannot be read .*; delete the run and train it again"):
        go(tiny(text), tmp_path)
    table.unlink()
    with pytest.raises(NormlabError, match="stats.parquet cannot be read .it is missing.; delete the run"):
        go(tiny(text), tmp_path)


def test_a_finished_run_on_a_read_only_place_is_returned(done, text, go, monkeypatch):
    def read_only(path: Path, busy: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store, "locked", read_only)
    assert go(tiny(text), done.path.parent).path == done.path


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, "File too large"),
        RuntimeError("Error while serializing: I/O error: File too large (os error 27)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5952 vs 5844"),
    ],
)
def test_a_limit_on_file_sizes_is_one_line(error, tmp_path):
    with (
        pytest.raises(NormlabError, match="^cannot write to .*ulimit -f.* start again"),
        store.full_disk_named(tmp_path),
    ):
        raise error
