"""Built and installed distributions: normlab's wheel and sdist, the kernels alone, both in one place; mypy's view."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import normlab

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels"


def done(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command that must succeed."""
    run = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def build(source: Path, target: str, folder: Path) -> Path:
    before = set(folder.iterdir())
    done(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source)
    (built,) = set(folder.iterdir()) - before
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """normlab's wheel, built from its unpacked sdist as pip does: what the sdist lacks, the wheel lacks."""
    folder = tmp_path_factory.mktemp("normlab")
    (folder / "dist").mkdir()
    with tarfile.open(build(ROOT, "sdist", folder / "dist")) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    return build(source, "wheel", folder / "dist")


@pytest.fixture(scope="module")
def kernels_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(KERNELS, "wheel", tmp_path_factory.mktemp("kernels"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files(folder: Path, prefix: str) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in found}


def requirements(project: Path) -> dict[str, list[str]]:
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


@pytest.mark.slow
def test_one_wheel_holds_both_packages_with_types_licence_and_published_values(wheel):
    packages = files(ROOT / "normlab", "normlab") | files(KERNELS / "normlab_kernels", "normlab_kernels")
    assert {"normlab/py.typed", "normlab_kernels/py.typed"} <= set(packages)
    published = files(ROOT / "data" / "paper", "normlab/paper_values")
    assert published
    found = contents(wheel)
    installed = {name: data for name, data in found.items() if ".dist-info/" not in name}
    assert installed == packages | published
    (licence,) = (data for name, data in found.items() if name.endswith(".dist-info/licenses/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_kernels_alone_are_the_same_package_with_the_same_requirements(wheel, kernels_wheel):
    alone = contents(kernels_wheel)
    package = {name: data for name, data in alone.items() if ".dist-info/" not in name}
    assert package == {name: data for name, data in contents(wheel).items() if name.startswith("normlab_kernels/")}
    ours, theirs = requirements(ROOT), requirements(KERNELS)
    assert set(theirs[""]) <= set(ours[""])
    assert theirs["gpu"] == ours["gpu"]


def test_one_editable_install_finds_both_packages(tmp_path):
    code = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    found = contents(tmp_path / done(sys.executable, "-c", code, cwd=ROOT).strip())
    (paths,) = (data.decode() for name, data in found.items() if name.endswith(".pth"))
    assert [Path(line) for line in paths.splitlines()] == [ROOT, KERNELS]
    assert not [name for name in found if name.endswith(".py")]


def test_mypy_sees_a_wrong_attribute_in_a_users_script(tmp_path):
    # Each package's face alone, which is where the names stand: following every import takes half a minute.
    options = "[mypy]\nfollow_imports = skip\n[mypy-normlab,normlab_kernels]\nfollow_imports = normal\n"
    (tmp_path / "mypy.ini").write_text(options)
    script = "import normlab\nimport normlab_kernels\nnormlab.record, normlab.figures, normlab_kernels.bhyt\n"
    (tmp_path / "right.py").write_text(script)
    (tmp_path / "wrong.py").write_text(script + "normlab.recrod\nnormlab_kernels.byht\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", "right.py", "wrong.py"]
    checked = subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, checked.stdout + checked.stderr
    assert errors[0].startswith("wrong.py:4") and '"recrod"' in errors[0]
    assert errors[1].startswith("wrong.py:5") and '"byht"' in errors[1]


class Environment:
    """A virtual environment outside the checkout; torch and the rest are borrowed from this Python's packages."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.folder = folder
        self.bin = folder / "bin"
        (packages,) = folder.glob("lib/python*/site-packages")
        self.borrowed = packages / "zz_borrowed.pth"

    def pip(self, *arguments: str | Path) -> None:
        """pip, which must not see what is borrowed: an editable normlab may be among it."""
        self.borrowed.unlink(missing_ok=True)
        python = self.bin / "python"
        done(sys.executable, "-m", "pip", "--python", python, *arguments, cwd=self.folder, PIP_NO_INDEX="1")
        self.borrowed.write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--force-reinstall", wheel)

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "--yes", name)

    def python(self, code: str) -> str:
        """The last line that Python says."""
        python = [str(self.bin / "python"), "-c", code]
        run = subprocess.run(python, cwd=self.folder, capture_output=True, text=True)
        return (run.stdout + run.stderr).strip().splitlines()[-1]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


KERNELS_WORK = "import normlab_kernels; print('works', normlab_kernels.__file__)"
NORMLAB_WORKS = "import normlab; normlab.NormlabForCausalLM; print('works', normlab.__file__)"


@pytest.mark.slow
def test_uninstalling_the_kernels_beside_normlab_says_how_to_get_them_back(environment, wheel, kernels_wheel):
    for first, second in ((wheel, kernels_wheel), (kernels_wheel, wheel)):
        environment.install(first)
        environment.install(second)
        assert environment.python(NORMLAB_WORKS).startswith(f"works {environment.folder}")
        assert environment.python(KERNELS_WORK).startswith(f"works {environment.folder}")
        environment.uninstall("normlab-kernels")
        message = environment.python("import normlab")
        assert message.startswith("ModuleNotFoundError: normlab's own copy of normlab_kernels is gone")
        assert "--force-reinstall --no-deps" in message
        environment.install(wheel)
        assert environment.python(NORMLAB_WORKS).startswith(f"works {environment.folder}")
        environment.uninstall("normlab")
    environment.install(kernels_wheel)
    assert environment.python(KERNELS_WORK).startswith(f"works {environment.folder}")


@pytest.mark.slow
def test_a_newcomer_trains_measures_and_looks_with_the_installed_wheel(environment, wheel):
    environment.install(wheel)
    path = os.pathsep.join([str(environment.bin), os.environ["PATH"]])
    message = done(ROOT / ".ci" / "try-installed", cwd=environment.folder, PATH=path)
    assert message.startswith(f"{normlab.__version__}\n")
    assert "explorer page: " in message and int(message.splitlines()[-1].split()[1]) > 2  # outputs of a notebook
