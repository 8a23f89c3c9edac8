"""Execute all notebooks and write their pages: called by `make reproduce` and `make site`.

    python -m normlab.notebook.pages notebooks --runs build/runs --out build

Imports take longer than most notebooks and than any page. So one process writes all pages, and notebooks are executed
one after another in a few kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbclient.util import run_sync
from nbformat import NotebookNode
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tqdm import tqdm

import normlab
from normlab import packed
from normlab.errors import MissingPackage, NormlabError
from normlab.files import whole_file
from normlab.notebook.exporters import EXPLORER_FILE, MODEL_FILE, NotebookPage, share_plotly
from normlab.notebook.landing import write_index
from normlab.release import shipped_models
from normlab.runs import MANIFEST, find_runs
from normlab.widgets.explorer import explorer_page
from normlab.widgets.live import live_page


class Kernel:
    """A kernel that executes one notebook after another, which share its imports.

    No name of a notebook is left for the next. A kernel that died is replaced.

    Args:
        environment: of the kernel, beside this process's.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = os.environ | environment
        self._manager: Any = None  # of nbclient's first client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            run_sync(self._manager.shutdown_kernel)(now=True)

    def execute(self, notebook: NotebookNode, folder: str | Path) -> None:
        """Execute the cells in a folder. A cell that says which package is missing is the last.

        Raises:
            CellExecutionError, DeadKernelError: of nbclient.
        """
        notebook.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\nimport os\nos.chdir({str(folder)!r})\ndel os"))
        client = NotebookClient(notebook, km=self._manager, extra_arguments=["--log-level=ERROR"])
        try:
            client.execute(env=self._environment, cleanup_kc=False)
        except DeadKernelError:
            client.km = None
            raise
        except CellExecutionError as error:
            if error.ename != MissingPackage.__name__:
                raise
            del notebook.cells[1 + next(number for number, cell in enumerate(notebook.cells) if _failed(cell)) :]
        finally:
            self._manager = client.km
            del notebook.cells[0]


def _failed(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", ()))


def _is_current(done: Path, notebook: Path, runs: Path) -> bool:
    """True if a notebook was executed on these runs, and neither it nor a run has changed since, or come."""
    if not done.exists():
        return False
    files = {file for run in find_runs(runs) for file in (run / MANIFEST, run.parent / packed.FILE)}
    changed = max(path.stat().st_mtime for path in (notebook, *files) if path.exists())
    given = nbformat.read(done, as_version=4).metadata.get("papermill", {}).get("parameters", {})
    return given.get("RUNS") == str(runs) and done.stat().st_mtime > changed


def write_pages(
    notebooks: str | Path,
    runs: str | Path,
    out: str | Path,
    *,
    executed: str | Path,
    shipped: str | Path | None = None,
    jobs: int = 2,
    keep: bool = False,
) -> dict[Path, str]:
    """Execute every notebook of a folder on `runs` and write its page, the explorer's page and the index.

    Args:
        notebooks: folder of the notebooks; their cells run in it.
        runs: folder of runs that they read.
        out: folder of the pages.
        executed: folder of the executed notebooks.
        shipped: runs that come with normlab, on which the index has a sentence too.
        jobs: notebooks at a time, with one CPU thread each if there are several.
        keep: execute only notebooks that changed since they were last executed, or whose runs are others or changed.

    Returns:
        The errors of notebooks that failed, by notebook. The others have their pages, and the index links to them.

    Raises:
        NormlabError: there is no notebook, or none has a page.
    """
    runs, out, executed = Path(runs).resolve(), Path(out), Path(executed)
    found = sorted(Path(notebooks).glob("*.ipynb"))
    if not found:
        raise NormlabError(f"no notebook in {notebooks}")
    for folder in (out, executed):
        folder.mkdir(parents=True, exist_ok=True)
    table, configs = normlab.load_runs(runs, variants=False), normlab.read_configs(runs)
    # Pages draw figures from their JSON, wherever the pages are made.
    environment = {"PLOTLY_RENDERER": "plotly_mimetype"} | ({"OMP_NUM_THREADS": "1"} if jobs > 1 else {})
    kernels: SimpleQueue[Kernel] = SimpleQueue()

    def execute(notebook: Path) -> Path:
        done = executed / notebook.name
        if not (keep and _is_current(done, notebook, runs)):
            cells = parameterize_notebook(load_notebook_node(str(notebook)), {"RUNS": str(runs)})
            kernel = kernels.get()
            try:
                kernel.execute(cells, notebook.parent.resolve())
            finally:
                kernels.put(kernel)
            with whole_file(done) as staged:
                nbformat.write(cells, staged)
        return done

    shown: list[Path] = []
    failed: dict[Path, str] = {}
    with ExitStack() as running, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            kernels.put(running.enter_context(Kernel(**environment)))
        tasks: dict[Future[Path], Path] = {pool.submit(execute, notebook): notebook for notebook in found}
        share_plotly(explorer_page(table, out / EXPLORER_FILE, configs=configs, source=str(runs)))
        if models := shipped_models():
            live_page(models, (out / MODEL_FILE).parent)
        for task in tqdm(as_completed(tasks), total=len(tasks), desc="notebooks", unit="notebook"):
            notebook = tasks[task]
            written = out / f"{notebook.stem}.html"
            written.unlink(missing_ok=True)  # an older page must not pass for this one
            try:
                page, _ = NotebookPage().from_filename(str(task.result()))
                with whole_file(written) as staged:
                    staged.write_text(page, encoding="utf-8")
                shown.append(task.result())
            except CellExecutionError as error:
                failed[notebook] = f"{error.ename}: {error.evalue}"
            except DeadKernelError as error:
                failed[notebook] = str(error)
    write_index(out, sorted(shown), runs, shipped)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m normlab.notebook.pages", description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", help="folder of the notebooks")
    parser.add_argument("--runs", required=True, help="folder of runs that they read")
    parser.add_argument("--shipped", help="runs that come with normlab, for a sentence of the index")
    parser.add_argument("--out", required=True, help="folder of the pages")
    parser.add_argument("--executed", help="folder of the executed notebooks, default OUT/executed")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time (default: 2)")
    parser.add_argument("--keep", action="store_true", help="execute only notebooks that changed since, or their runs")
    options = parser.parse_args(argv)
    executed = options.executed or Path(options.out) / "executed"
    try:
        failed = write_pages(
            options.notebooks,
            options.runs,
            options.out,
            executed=executed,
            shipped=options.shipped,
            jobs=options.jobs,
            keep=options.keep,
        )
    except NormlabError as error:
        print(error, file=sys.stderr)
        return 2
    for notebook, why in failed.items():
        print(f"{notebook}: {why}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
