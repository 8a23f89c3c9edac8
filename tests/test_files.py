"""Files and folders that are written whole: a block that is killed, or fails, leaves what was there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from figures_helpers import table

from normlab import cli
from normlab.analysis import published
from normlab.files import STAGED, whole_file, whole_files, whole_folder
from normlab.notebook.exporters import share_plotly
from normlab.widgets.plot import write_page


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_files_take_their_names_together_and_pages_come_last(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("old")
    (tmp_path / "other").write_text("stays")
    with pytest.raises(KeyboardInterrupt), whole_files(tmp_path) as staged:
        (staged / "a.csv").write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "a.csv").read_text() == "old" and names(tmp_path) == {"a.csv", "other"}
    (tmp_path / STAGED).mkdir()  # as a kill leaves it
    (tmp_path / STAGED / "half.csv").touch()
    moved: list[str] = []
    monkeypatch.setattr("normlab.files.sync", lambda path: moved.append(path.name))
    with whole_files(tmp_path) as staged:
        for name in ("a.csv", "a.html", "b.csv", "in/c.csv"):
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_text("new")
        assert (tmp_path / "a.csv").read_text() == "old"
    assert moved == ["a.csv", "b.csv", "c.csv", "a.html"]
    assert names(tmp_path) == {"a.csv", "a.html", "b.csv", "in/c.csv", "other"}
    assert (tmp_path / "a.csv").read_text() == "new" and not (tmp_path / STAGED).exists()


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "in" / "a.csv"
    for content in ("first", "second"):
        with whole_file(path) as staged:
            staged.write_text(content)
            assert not path.exists() if content == "first" else path.read_text() == "first"
        with pytest.raises(KeyboardInterrupt), whole_file(path) as staged:
            staged.write_text("half")
            raise KeyboardInterrupt
        assert path.read_text() == content and names(tmp_path) == {"in/a.csv"}


def test_a_folder_appears_once_it_is_whole(tmp_path):
    folder = tmp_path / "model"
    for content in ("first", "second"):
        with pytest.raises(KeyboardInterrupt), whole_folder(folder) as staged:
            (staged / "half").touch()
            raise KeyboardInterrupt
        assert names(tmp_path) == ({"model/first"} if content == "second" else set())
        with whole_folder(folder) as staged:
            (staged / content).touch()
    assert [path.name for path in folder.iterdir()] == ["second"] and list(tmp_path.iterdir()) == [folder]


def test_figures_that_are_killed_leave_none(tmp_path, monkeypatch):
    def two_of_many(*_: object) -> object:
        from normlab.figures import loss_curves

        yield "one", loss_curves(table())
        raise KeyboardInterrupt

    monkeypatch.setattr("normlab.runs.load_schemes", lambda _: table())
    monkeypatch.setattr("normlab.runs.load_experiments", lambda _: table())
    monkeypatch.setattr("normlab.figures.draw_all", two_of_many)
    monkeypatch.setattr(published, "load_published", lambda: None)
    assert cli.main(["figures", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"]) == 130
    assert names(tmp_path) == set()


def _page(folder: Path) -> None:
    write_page(folder / "page.html", [], {"a": 1}, kind="x", title="x", about="x", plotly="")


def _shared(folder: Path) -> None:
    from plotly.offline import get_plotlyjs

    (folder / "page.html").write_text(f"<script>{get_plotlyjs()}</script>")
    share_plotly(folder / "page.html")


@pytest.mark.parametrize("write", [_page, _shared])
def test_a_page_that_is_killed_is_as_it_was(write: Callable[[Path], None], tmp_path, monkeypatch):
    write(tmp_path)
    before = (tmp_path / "page.html").read_text()
    with monkeypatch.context() as patch:
        patch.setattr("normlab.files.os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _page(tmp_path)
    assert (tmp_path / "page.html").read_text() == before
