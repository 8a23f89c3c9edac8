"""Runs and trained models that come with normlab.

shipped   the folder `data/<name>` of a checkout; an installed package fetches it once from the release
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from normlab.errors import ANSWER_SECONDS, NormlabError, first_line
from normlab.files import first_folder

DATA = Path(__file__).resolve().parents[1] / "data"


def shipped(name: str) -> Path:
    """The folder of `name`: "grid" (a sweep), "models/pre_rmsnorm-d8" (a model).

    A checkout has it below data/. An installed package fetches `<last part of name>.tar.gz` from this version's release
    and keeps it in the user's cache. The project's address is in the package's metadata.

    Raises:
        NormlabError: a checkout that lacks it, a package without an address, or a release that cannot be reached.
    """
    folder = DATA / name
    if os.path.isdir(folder):
        return folder
    if DATA.is_dir():
        raise NormlabError(
            f"nothing at data/{name:.80} in this checkout; there is {', '.join(shipped_models()) or 'no model'}"
        )
    return _fetched(f"{release_url()}/{Path(name).name}.tar.gz")


def shipped_models() -> list[str]:
    """Names of the models below data/models of a checkout; empty in an installed package."""
    return sorted(path.name for path in (DATA / "models").glob("*") if path.is_dir())


def release_url() -> str:
    """The address of the files of this version's release."""
    try:
        package = metadata("normlab")
    except PackageNotFoundError as error:
        raise NormlabError("normlab is neither a checkout nor installed: its release is unknown") from error
    addresses = dict(entry.split(", ", 1) for entry in package.get_all("Project-URL") or [])
    if "Repository" not in addresses:
        raise NormlabError("this package names no repository to fetch from; pass the path of a checkout's data folder")
    return f"{addresses['Repository']}/releases/download/v{package['Version']}"


def _fetched(url: str) -> Path:
    """The folder of an archive: in the cache under its release, whole or not at all."""
    import platformdirs
    from torch.hub import download_url_to_file

    release, archive = url.rsplit("/", 2)[1:]
    folder = Path(platformdirs.user_cache_dir("normlab")) / release / archive.removesuffix(".tar.gz")
    if folder.is_dir():
        return folder
    with first_folder(folder) as staged:
        fetched = staged / archive
        before = socket.getdefaulttimeout()
        try:
            socket.setdefaulttimeout(ANSWER_SECONDS)  # PyTorch's download sets none
            download_url_to_file(url, str(fetched), progress=sys.stderr.isatty())
            shutil.unpack_archive(fetched, staged, filter="data")
            fetched.unlink()
        except Exception as error:
            raise NormlabError(
                f"{url} cannot be fetched ({first_line(error)}); pass the path of a checkout's data folder"
            ) from error
        finally:
            socket.setdefaulttimeout(before)
    return folder
