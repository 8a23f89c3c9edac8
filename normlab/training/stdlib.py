"""The default corpus: a fixed list of the Python standard library's packages and modules, and pydoc's help topics.

It is on every machine with no network. Its text differs between Python builds, so a run's manifest holds its content
hash.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "asyncio collections concurrent ctypes curses dbm email ensurepip html http idlelib importlib json logging "
    "multiprocessing re sqlite3 tkinter tomllib turtledemo unittest urllib venv wsgiref xml xmlrpc zoneinfo"
).split()
MODULES = (
    "_collections_abc _markupbase _osx_support _py_abc _pydecimal _pyio _strptime _threading_local _weakrefset "
    "abc argparse ast base64 bdb bisect bz2 cProfile calendar cmd code codecs codeop colorsys compileall "
    "configparser contextlib copy copyreg csv dataclasses datetime difflib dis doctest enum filecmp fileinput "
    "fnmatch fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac "
    "imaplib inspect io ipaddress linecache locale lzma mailbox mimetypes modulefinder netrc ntpath nturl2path "
    "numbers opcode operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib "
    "posixpath pprint profile pstats pty py_compile pyclbr pydoc queue quopri random reprlib rlcompleter runpy "
    "sched secrets selectors shelve shlex shutil signal site smtplib socket socketserver ssl stat statistics "
    "string stringprep subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading timeit token "
    "tokenize trace traceback tracemalloc tty turtle types typing uuid warnings wave weakref webbrowser zipapp "
    "zipfile zipimport"
).split()
LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "_bundled"}


def stdlib_documents() -> Iterator[dict[str, str]]:
    """Documents {"key": path or topic, "text": ...}, sorted by key. A module that this Python does not have is left
    out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = [p for name in MODULES if (p := root / f"{name}.py").is_file()]
    for name in PACKAGES + ["pathlib", "zipfile", "sysconfig"]:  # the last three are packages in newer Pythons only
        found = (root / name).rglob("*.py") if (root / name).is_dir() else ()
        files += [p for p in found if not LEFT_OUT.intersection(p.relative_to(root).parts)]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield {"key": path.relative_to(root).as_posix(), "text": text}
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield {"key": f"pydoc_data/{name}", "text": topics[name]}
