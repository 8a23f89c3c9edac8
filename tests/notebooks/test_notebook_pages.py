"""A folder of notebooks becomes a folder of pages; one that fails keeps no other from its page."""

import os
from pathlib import Path

import nbformat
from notebook_helpers import write_runs

from normlab import packed
from normlab.notebook import pages
from normlab.notebook.pages import main
from normlab.runs import MANIFEST


def notebook(path: Path, source: str) -> None:
    cells = [
        nbformat.v4.new_markdown_cell(f"# {path.stem}\n\n**Claim.** None."),
        nbformat.v4.new_code_cell("RUNS = 'as it is shipped'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(source),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def test_a_folder_of_notebooks_becomes_pages(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pages, "shipped_models", lambda: ())  # their page has its own tests
    monkeypatch.setenv("COLAB_NOTEBOOK_ID", "1")  # there plotly would choose what no page can draw
    notebooks, out, runs = tmp_path / "notebooks", tmp_path / "pages", write_runs(tmp_path / "runs", depths=(2,))
    notebooks.mkdir()
    show = "import os, time, plotly.io; left = globals().get('left', 'nothing'); "
    show += "print(RUNS, os.getcwd(), plotly.io.renderers.default, left, time.time_ns(), sep='|')"
    notebook(notebooks / "a.ipynb", show)
    notebook(notebooks / "b.ipynb", "raise ValueError('no such layer')")
    notebook(notebooks / "c.ipynb", show)
    notebook(notebooks / "d.ipynb", "import os; os._exit(1)")
    out.mkdir()
    (out / "d.html").write_text("of an earlier day")  # goes
    arguments = [str(notebooks), "--runs", str(runs), "--out", str(out), "--jobs", "1"]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "b.ipynb: ValueError: no such layer" in said and "d.ipynb: Kernel died" in said
    assert sorted(path.name for path in out.glob("*.*")) == [
        *("a.html", "c.html", "explorer.html", "index.html", "plotly.min.js")
    ]
    index = (out / "index.html").read_text(encoding="utf-8")
    assert 'href="a.html"' in index and 'href="explorer.html"' in index and "b.html" not in index

    def printed(name: str) -> list[str]:
        cells = nbformat.read(out / "executed" / f"{name}.ipynb", as_version=4).cells
        return cells[-1].outputs[0]["text"].strip().split("|")

    kept = printed("c")
    assert printed("a")[:4] == kept[:4] == [str(runs), str(notebooks), "plotly_mimetype", "nothing"]
    for name in ("a", "b", "d"):
        (notebooks / f"{name}.ipynb").unlink()
    monkeypatch.setattr(pages, "explorer_page", lambda *_, **__: out / "explorer.html")  # it is there
    monkeypatch.setattr(pages, "share_plotly", lambda _: None)
    assert main([*arguments, "--keep"]) == 0
    assert (out / "c.html").exists() and printed("c") == kept
    assert main([str(tmp_path / "none"), "--runs", str(runs), "--out", str(out)]) == 2


def test_a_page_is_kept_only_for_the_runs_that_it_was_made_of(tmp_path, monkeypatch):
    executed: list[str] = []
    for name in ("explorer_page", "share_plotly", "write_index"):
        monkeypatch.setattr(pages, name, lambda *args, **options: None)
    monkeypatch.setattr(pages, "shipped_models", lambda: ())
    monkeypatch.setattr(pages.Kernel, "execute", lambda self, cells, folder: executed.append(cells.cells[2].source))
    notebooks, out = tmp_path / "notebooks", tmp_path / "pages"
    first, second = (write_runs(tmp_path / name, depths=(2,), seeds=(0,)) for name in ("first", "second"))
    notebooks.mkdir()
    notebook(notebooks / "a.ipynb", "1 + 1")

    def made_of(runs: Path, *flags: str) -> list[str]:
        executed.clear()
        assert main([str(notebooks), "--runs", str(runs), "--out", str(out), "--jobs", "1", *flags]) == 0
        return [name for name in (str(first), str(second)) for cell in executed if f'"{name}"' in cell]

    assert made_of(first) == [str(first)] and made_of(first, "--keep") == []
    assert made_of(second, "--keep") == [str(second)] and made_of(second, "--keep") == []
    notebook(notebooks / "a.ipynb", "1 + 2")
    assert made_of(second, "--keep") == [str(second)]
    run = next(second.iterdir())
    later = (out / "executed" / "a.ipynb").stat().st_mtime + 10
    os.utime(run / MANIFEST, (later, later))  # a run that was trained further
    assert made_of(second, "--keep") == [str(second)]


def test_what_is_no_run_does_not_make_a_page_old_and_packed_runs_do(tmp_path):
    runs = write_runs(tmp_path / "runs", depths=(2,), seeds=(0,))
    source, done = tmp_path / "a.ipynb", runs / "executed" / "a.ipynb"
    done.parent.mkdir()
    notebook(source, "1 + 1")
    cells = nbformat.read(source, as_version=4)
    cells.metadata["papermill"] = {"parameters": {"RUNS": str(runs)}}
    nbformat.write(cells, done)
    (runs / "executed" / "b.ipynb").write_text("of another notebook, executed later")
    (runs / "gone").symlink_to(tmp_path / "missing")
    assert pages._is_current(done, source, runs)
    packed.pack(runs)
    os.utime(done)
    assert pages._is_current(done, source, runs)
    later = done.stat().st_mtime + 10
    os.utime(runs / packed.FILE, (later, later))
    assert not pages._is_current(done, source, runs)
