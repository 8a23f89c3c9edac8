"""JupyterLab in a browser without a screen, for measuring the widgets and for testing them.

find_browser    path of a Chromium or Chrome
browser_of      a browser
page_in         a page in it, and the errors of its console
page_of         the same in a browser of its own
serve           a server of web pages
jupyter_lab     a server over a folder of notebooks
open_notebook   open one of them, and wait for its kernel
wait_until_idle wait for its kernel
run_cells       run all of its cells, until a widget's plot is there
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STARTING = 60  # seconds that a server may take to answer
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def find_browser() -> str | None:
    """Path of a Chromium or Chrome on the PATH, or None."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


@contextmanager
def browser_of(chromium: str) -> Iterator[Any]:
    """A browser for pages of `page_in`. It takes a second of processor time to start. No asyncio runs beside it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def page_in(browser: Any, width: int = 1280, height: int = 900, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """A page of that many pixels, and the list of errors that its console and scripts report."""
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page, errors
    page.close()


@contextmanager
def page_of(chromium: str, width: int = 1280, height: int = 900, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """`page_in` a browser of its own."""
    with browser_of(chromium) as browser, page_in(browser, width, height, **options) as shown:
        yield shown


@contextmanager
def serve(command: Sequence[str], folder: Path, path: str) -> Iterator[str]:
    """Start a server with `command` in `folder`, on a free port; yield its address once it answers at `path`.

    Its output goes to `server.log` in that folder.

    Raises:
        RuntimeError: it ended, or did not answer within a minute; with its output.
    """
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    with log.open("w") as written:
        started = [*command, f"--port={port}"]
        server = subprocess.Popen(started, stdout=written, stderr=subprocess.STDOUT, cwd=folder)
        try:
            deadline = time.monotonic() + _STARTING
            while not _answers(f"{address}{path}"):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text())
                time.sleep(0.25)
            yield address
        finally:
            server.terminate()
            server.wait(timeout=20)


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=1).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """A JupyterLab server over `folder`, reachable from this machine only; yields its address."""
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--ServerApp.root_dir={folder}", "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += [f"--LabApp.user_settings_dir={_settings(folder / '.settings')}"]
    with serve(command, folder, "/api/status") as address:
        yield address


def _settings(folder: Path) -> Path:
    """JupyterLab's settings: no question about its news, and no cell taken out of the page while it is out of sight."""
    for name, values in {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }.items():
        file = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_notebook(page: Any, address: str, notebook: str, timeout: float = 120) -> None:
    """Open a notebook of the server; returns when its kernel is up and idle."""
    page.goto(f"{address}/lab/tree/{notebook}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=timeout * 1000)
    wait_until_idle(page, timeout)


def wait_until_idle(page: Any, timeout: float = 120) -> None:
    """Until the open notebook's kernel is up and has nothing to do."""
    # The status bar, not the notebook's indicator, which says idle before there is a kernel.
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=timeout * 1000)


def run_cells(page: Any, timeout: float = 120) -> None:
    """Run all cells of the open notebook; returns when the first widget's plot is there."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator("#jp-mainmenu-run").get_by_text("Run All Cells", exact=True).click()
    page.wait_for_selector(
        ".widget-vbox .js-plotly-plot .main-svg, .explorer .main-svg, .live svg",
        state="attached",
        timeout=timeout * 1000,
    )
