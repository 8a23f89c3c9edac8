"""JupyterLab in a browser: a server over a folder of notebooks, and what a reader does with one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """A JupyterLab server over `folder`; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [
        "--ip=127.0.0.1",
        f"--ServerApp.root_dir={folder}",
        "--IdentityProvider.token=",
        "--ServerApp.disable_check_xsrf=True",
    ]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = (folder / "server.log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=1).close()
                break
            except OSError:
                if server.poll() is not None:
                    raise RuntimeError((folder / "server.log").read_text()) from None
                time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)
        log.close()


@contextmanager
def page_of(chromium: str, width: int = 1280, height: int = 900) -> Iterator[tuple[Any, list[str]]]:
    """A browser page, and the list of errors that its console and scripts report."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": width, "height": height})
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page, errors
        browser.close()


def run_all(page: Any, address: str, notebook: str, timeout: float = 120) -> None:
    """Open the notebook and run all its cells; returns when the explorer's plot is there."""
    page.goto(f"{address}/lab/tree/{notebook}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=timeout * 1000)
    page.wait_for_function("() => document.querySelector('.jp-NotebookPanel-toolbar')", timeout=timeout * 1000)
    page.wait_for_timeout(1500)
    dialog = page.locator(".jp-Dialog .jp-mod-accept")
    if dialog.count():  # which kernel? the one it offers
        dialog.first.click()
        page.wait_for_selector(".jp-Dialog", state="detached")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator("#jp-mainmenu-run").get_by_text("Run All Cells", exact=True).click()
    page.wait_for_selector(".widget-vbox .js-plotly-plot", timeout=timeout * 1000)


PLOT = "document.querySelector('.widget-vbox .js-plotly-plot')"


def line(page: Any, scheme: str) -> list[float]:
    """The y values that the explorer's first plot shows for a scheme."""
    read = f"name => Array.from({PLOT}.data.find(trace => trace.name === name).y || [])"
    return [float(value) for value in page.evaluate(read, scheme)]
