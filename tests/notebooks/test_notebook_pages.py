"""A folder of notebooks becomes a folder of pages; one that fails keeps no other from its page."""

from pathlib import Path

import nbformat
from notebook_helpers import write_runs

from normlab.notebook import pages
from normlab.notebook.pages import main


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
    arguments = [str(notebooks), "--runs", str(runs), "--out", str(out), "--jobs", "1"]
    assert main(arguments) == 1
    assert "b.ipynb: ValueError: no such layer" in capsys.readouterr().err
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
    (notebooks / "b.ipynb").unlink()
    notebook(notebooks / "a.ipynb", "import os; os._exit(1)")  # its page goes, and no other is left
    assert main([*arguments, "--keep"]) == 1 and not (out / "a.html").exists()
    assert (out / "c.html").exists() and printed("c") == kept
    assert main([str(tmp_path / "none"), "--runs", str(runs), "--out", str(out)]) == 2
