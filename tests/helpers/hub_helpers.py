"""A hub on this machine: the part of the Hugging Face hub's interface that loading a model at a revision uses."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest

COMMIT = "{:040x}"


def _handler(revisions: dict[str, Path], asked: list[str]) -> type[http.server.BaseHTTPRequestHandler]:
    """Serves `/<owner>/<name>/resolve/<revision or commit>/<file>`, as the hub does: the file, its hash and commit."""
    commits = {name: COMMIT.format(i + 1) for i, name in enumerate(revisions)}
    folders = revisions | {commits[name]: folder for name, folder in revisions.items()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            _, _, rest = self.path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            file = folders[revision] / name if revision in folders else None
            if file is None or not file.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "RevisionNotFound" if rest and file is None else "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commits.get(revision, revision))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def served(revisions: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """While it is open, the hub is this server, with the folders of `revisions` in any repository; gives the paths that
    were asked for."""
    asked: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(revisions, asked)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(cache),
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        yield asked
        server.shutdown()
