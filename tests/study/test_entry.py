"""A scheme of anyone's under the league's budget: what a file may hold, and that it is trained as the others are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from training_helpers import TINY

from normlab import SCHEMES, NormlabError, cli, runs, store
from normlab.study import entry as league
from normlab.study.presets import get_preset
from normlab.training.config import TrainConfig
from normlab.training.grids import LeagueSearch, Part, Preset
from normlab.training.workers import Outcome, Pool

MY_NORM = '''import torch

from normlab.norms import Norm


class MeanAbsNorm(Norm):
    """y = gamma * x / (mean|x| + eps)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size)
        self.eps = eps
        self.add_parameter("weight", hidden_size, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.float().abs().mean(-1, keepdim=True)
        return self.weight * (x / (size + self.eps)).to(x.dtype)
'''


ROW = """
from normlab.schemes import Scheme
from normlab.schemes.scheme import PERI
ROW = Scheme("mine", "Mine", "f", "me", lambda site: MeanAbsNorm(site.width), "norm", layout=PERI)
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A norm of one's own, in 17 lines. What it adds to the registry goes again."""
    path, known = tmp_path / "my_norm.py", dict(SCHEMES)
    path.write_text(MY_NORM)
    yield path
    SCHEMES.clear()
    SCHEMES.update(known)


def here(pool: Pool, train_one: Callable, configs: Sequence[TrainConfig], arguments: tuple) -> Iterator[Outcome]:
    """In place of processes: this one, at once."""
    assert pool.prepare is not None
    pool.prepare()
    for config in configs:
        yield config, runs.read_run(train_one(config, *arguments))


def test_a_class_in_a_file_is_a_scheme_with_this_norm_everywhere(file):
    row = league.scheme_of(f"{file}:MeanAbsNorm")
    assert row.name.startswith("mean_abs_norm_") and row.title == "MeanAbsNorm" and SCHEMES[row.name] is row
    assert league.scheme_of(f"{file}:MeanAbsNorm") is row
    file.write_text(MY_NORM + "\n# edited\n")
    assert league.scheme_of(f"{file}:MeanAbsNorm").name != row.name
    assert league.scheme_of("lns") is SCHEMES["lns"]


def test_a_scheme_in_a_file_may_say_more_than_a_norm(file):
    file.write_text(MY_NORM + ROW)
    found = league.scheme_of(f"{file}:ROW")
    assert found.name.startswith("mine_") and found.layout.attn_out is not None and SCHEMES[found.name] is found
    for of_tokens in ("mean((-1, -2),", "mean((0, -1),"):
        file.write_text(MY_NORM.replace("mean(-1,", of_tokens) + ROW)
        with pytest.raises(NormlabError, match="ROW mixes tokens"):
            league.scheme_of(f"{file}:ROW")
    file.write_text(MY_NORM + ROW.replace("site.width", "site.length"))
    with pytest.raises(NormlabError, match="ROW makes no model: AttributeError"):
        league.scheme_of(f"{file}:ROW")
    assert [name for name in SCHEMES if name.startswith("mine_")] == [found.name]


def test_a_file_may_have_dataclasses(file):
    config = "from __future__ import annotations\nfrom dataclasses import dataclass\n" + MY_NORM
    file.write_text(config + "\n@dataclass\nclass Options:\n    eps: float = 1e-6\n")
    assert league.scheme_of(f"{file}:MeanAbsNorm").title == "MeanAbsNorm"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (MY_NORM, "Other", "has no norm 'Other'"),
        ("import nothing_of_that_name", "N", "does not run: ModuleNotFoundError: No"),
        (MY_NORM.replace("keepdim=True", "keepdim=False"), "MeanAbsNorm", "fails on a"),
        (MY_NORM.replace("self.weight *", "float('nan') *"), "MeanAbsNorm", "not finite"),
        (MY_NORM.replace("mean(-1,", "mean((-1, -2),"), "MeanAbsNorm", "mixes tokens"),
        (MY_NORM.replace("mean(-1,", "mean((0, -1),"), "MeanAbsNorm", "mixes tokens"),
        (MY_NORM.replace(".to(x.dtype)", ".float()"), "MeanAbsNorm", "in torch.float32 of a .* tensor in bfloat16"),
        (MY_NORM.replace("(Norm)", "(torch.nn.Module)"), "MeanAbsNorm", "has no norm"),
    ],
)
def test_a_file_that_cannot_be_trained_is_one_line(file, source, name, message):
    file.write_text(source)
    with pytest.raises(NormlabError, match=message):
        league.scheme_of(f"{file}:{name}")
    with pytest.raises(NormlabError, match="is no file"):
        league.scheme_of("absent.py:Norm")
    for what in (str(file), "my_norm:MeanAbsNorm"):
        with pytest.raises(NormlabError, match="write FILE.py:NAME"):
            league.scheme_of(what)


def test_it_is_searched_and_trained_as_the_others_are(file, text, cache, tmp_path, monkeypatch, capsys):
    fields = {name: value for name, value in TINY.items() if name != "depth"} | {"corpus": str(text), "steps": 4}
    preset = Preset(
        "league", (Part({2: 2}, ("pre_rmsnorm",), best=1),), LeagueSearch((0.002, 0.008), (2,), {"seed": 9}), fields
    )
    monkeypatch.setattr(Pool, "finish", here)
    monkeypatch.setattr("normlab.study.presets.get_preset", lambda name: preset)
    options = ["--out", str(tmp_path / "out"), "--cache-dir", str(cache), "--quiet"]
    assert cli.main(["league", "--add", f"{file}:MeanAbsNorm", *options]) == 0
    assert "MeanAbsNorm" in capsys.readouterr().out
    finals, search = (runs.find_runs(place) for place in (tmp_path / "out", tmp_path / "out" / store.SEARCH))
    (name,) = {runs.read_manifest(path)["config"]["scheme"] for path in finals}
    assert name == league.scheme_of(f"{file}:MeanAbsNorm").name and (len(finals), len(search)) == (2, 3)
    there = [tmp_path / "out", tmp_path / "absent"]
    league.require_comparable(preset, there, cache)
    (tmp_path / "other.txt").write_text(text.read_text() + "more\n")
    for more, message in (
        ({"width": 64}, f"has width {fields['width']}, new runs would have 64: name another folder"),
        ({"corpus": str(tmp_path / "other.txt")}, "was trained on another text than there is here"),
    ):
        with pytest.raises(NormlabError, match=message):
            league.require_comparable(replace(preset, fields=fields | more), there, cache)
    capsys.readouterr()
    assert cli.main(["league", str(tmp_path / "out")]) == 0
    assert "MeanAbsNorm" in capsys.readouterr().out


def test_the_small_size_differs_in_size_alone():
    preset = get_preset("league")
    small = league.tiny(preset)
    assert small.parts[0].depths == {2: 3} and small.fields["steps"] == 40
    assert small.fields.keys() >= preset.fields.keys() and small.rate.rates == preset.rate.rates  # type: ignore[union-attr]
    for name in ("gain_lr_ratio", "clip", "held_out", "store_all"):
        assert small.fields[name] == preset.fields[name]


@pytest.mark.slow
def test_the_command_trains_a_file_in_processes_and_puts_it_beside_pre_ln(file, tmp_path, capsys):
    command = ["league", "--add", f"{file}:MeanAbsNorm", "--add", "pre_rmsnorm", "--tiny"]
    table = tmp_path / "league.csv"
    assert cli.main([*command, "--out", str(tmp_path / "out"), "--csv", str(table), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "MeanAbsNorm" in printed.splitlines()[1] + printed.splitlines()[2] and table.is_file()
