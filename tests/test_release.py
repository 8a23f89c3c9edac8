"""Models and runs that come with normlab: kept from runs, found in a checkout, fetched by an installed package."""

import http.server
import json
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path

import pytest
import torch

import normlab
from normlab import NormlabError, runs, shipped, store
from normlab.models import pretrained
from normlab.release import _fetched, shipped_models
from normlab.training.config import TrainConfig
from normlab.training.keep import keep, name_of
from normlab.training.measure import mean_token_loss

pytest_plugins = ("training_fixtures",)


@pytest.fixture(scope="module")
def folder(done: runs.Run, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    [folder] = keep(done.path, tmp_path_factory.mktemp("models"), cache)
    return folder


def test_a_kept_model_is_the_trained_one_rounded(done, folder):
    trained, model = pretrained.load_model(done.path), normlab.load_model(folder)
    assert folder.name == "bhyt-d2" and not model.training
    for (name, weight), loaded in zip(trained.named_parameters(), model.parameters(), strict=True):
        assert loaded.dtype == torch.float32 and torch.equal(weight.to(torch.bfloat16).float(), loaded), name


def test_a_kept_model_is_whole_or_as_it_was(done, cache, tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("normlab.training.keep.mean_token_loss", killed)
    (tmp_path / "bhyt-d2").mkdir()
    (tmp_path / "bhyt-d2" / "model.safetensors").write_text("the one before")
    with pytest.raises(KeyboardInterrupt):
        keep(done.path, tmp_path, cache)
    assert [path.name for path in tmp_path.rglob("*")] == ["bhyt-d2", "model.safetensors"]


def test_a_kept_model_says_its_loss_on_the_blocks_that_lie_beside_it(done, folder):
    blocks = normlab.load_held_out(folder)
    reported = json.loads((folder / runs.MANIFEST).read_text())
    loss = mean_token_loss(normlab.load_model(folder), blocks.numpy(), 4)
    assert loss == pytest.approx(reported["kept"]["eval_loss"], abs=1e-5)
    assert loss == pytest.approx(done.eval_loss, abs=0.02), "bfloat16 weights, the blocks of the run's evaluation"


def test_models_that_come_with_normlab_are_named_for_what_they_are_and_have_learned():
    names = shipped_models()
    assert {"pre_rmsnorm-d8", "lns-d8", "bhyt-d8", "rmsnorm_gain-d8", "dyt-d8"} <= set(names)
    for name in names:
        manifest = json.loads((shipped(f"models/{name}") / runs.MANIFEST).read_text())
        assert name_of(TrainConfig.from_dict(manifest["config"])) == name
        assert manifest["kept"]["eval_loss"] < manifest["trigram_loss"]


def test_a_run_of_another_text_is_not_kept(done, cache, tmp_path):
    manifest = json.loads((done.path / runs.MANIFEST).read_text())
    copy = tmp_path / "runs" / done.name
    copy.mkdir(parents=True)
    for file in done.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    store.write_json(copy / runs.MANIFEST, {**manifest, "corpus": {**manifest["corpus"], "content_hash": "another"}})
    with pytest.raises(NormlabError, match="trained on another text"):
        keep(copy, tmp_path / "models", cache)


def test_runs_that_would_have_one_name_are_not_kept(done, tmp_path):
    for seed in range(2):
        copy = tmp_path / f"seed{seed}"
        shutil.copytree(done.path, copy)
        store.write_json(copy / runs.MANIFEST, {**done.manifest, "run": f"seed{seed}"})
    with pytest.raises(NormlabError, match="2 of these runs would be"):
        keep(tmp_path, tmp_path / "models")


def test_a_run_that_is_damaged_or_there_twice_keeps_no_other_from_being_kept(done, cache, tmp_path):
    for name in ("a", "b", "damaged"):
        shutil.copytree(done.path, tmp_path / "runs" / name / done.name)
    (tmp_path / "runs" / "a" / done.name / runs.WEIGHTS).unlink()
    (tmp_path / "runs" / "damaged" / done.name / runs.MANIFEST).write_text("{")
    with pytest.warns(UserWarning, match="left out: .*manifest.json cannot be read"):
        assert [path.name for path in keep(tmp_path / "runs", tmp_path / "models", cache)] == ["bhyt-d2"]
    shutil.copytree(done.path, tmp_path / "runs" / "c" / done.name)
    with pytest.warns(UserWarning, match=f"left out: .*c.{done.name}, as .* is the same run"):
        assert [path.name for path in keep(tmp_path / "runs", tmp_path / "models", cache)] == ["bhyt-d2"]


def test_runs_without_weights_are_named(tmp_path, done):
    copy = tmp_path / done.name
    copy.mkdir()
    (copy / runs.MANIFEST).write_bytes((done.path / runs.MANIFEST).read_bytes())
    with pytest.raises(NormlabError, match="no run in .* kept its weights"):
        keep(copy, tmp_path / "models")


@pytest.fixture
def release(folder: Path, tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A server that has one release, and the paths it was asked for."""
    asked: list[str] = []
    place = tmp_path / "server" / "releases" / "download" / "v9.9"
    place.mkdir(parents=True)
    with tarfile.open(place / "bhyt-d2.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname=".")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, directory=tmp_path / "server", **kwargs)  # type: ignore[arg-type]

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """An installed package: no data/ next to the code, an address in the metadata or none, an empty cache."""
    monkeypatch.setattr("normlab.release.DATA", tmp_path / "site-packages" / "data")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache" / name))

    def address(url: str | None) -> None:
        about = Message()
        about["Version"] = "9.9"
        if url:
            about["Project-URL"] = "Documentation, http://127.0.0.1/docs"
            about["Project-URL"] = f"Repository, {url}"
        monkeypatch.setattr("normlab.release.metadata", lambda name: about)

    return address


def test_an_installed_package_fetches_a_model_once(release, installed, folder):
    url, asked = release
    installed(url)
    model = normlab.load_model("bhyt-d2")
    for ours, theirs in zip(model.parameters(), normlab.load_model(folder).parameters(), strict=True):
        assert torch.equal(ours, theirs)
    normlab.load_model("bhyt-d2")
    assert asked.count("/releases/download/v9.9/bhyt-d2.tar.gz") == 1


def test_what_a_release_lacks_is_one_line(release, installed):
    installed(release[0])
    with pytest.raises(NormlabError, match=r"v9\.9/lns-d8\.tar\.gz cannot be fetched"):
        normlab.load_model("lns-d8")


def test_a_package_without_an_address_says_what_to_do(installed):
    installed(None)
    with pytest.raises(NormlabError, match="names no repository to fetch from; pass the path"):
        normlab.load_model("lns-d8")


def test_a_checkout_names_the_models_that_it_has(monkeypatch, tmp_path):
    (tmp_path / "models" / "lns-d8").mkdir(parents=True)
    monkeypatch.setattr("normlab.release.DATA", tmp_path)
    assert shipped("models/lns-d8") == tmp_path / "models" / "lns-d8"
    with pytest.raises(NormlabError, match="nothing at data/models/unknown in this checkout; there is lns-d8"):
        normlab.load_model("unknown")


def test_an_archive_never_unpacks_out_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../../../victim.txt"))
    with pytest.raises(NormlabError, match="cannot be fetched .*would be extracted to"):
        _fetched((tmp_path / "model.tar.gz").as_uri())
    assert not list(tmp_path.rglob("victim.txt"))
