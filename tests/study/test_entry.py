"""A scheme of anyone's under the league's recipe: what a file may hold, and that it is trained as the others are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from figures_helpers import table
from training_helpers import TINY

from normlab import SCHEMES, NormlabError, cli, runs
from normlab.analysis.claims import losses
from normlab.analysis.published import load_published
from normlab.analysis.selection import title_of
from normlab.figures import theme, trains_at_depth
from normlab.study import entry as league
from normlab.study import league as standings
from normlab.study.presets import get_preset
from normlab.training.config import TrainConfig
from normlab.training.estimate import Plan
from normlab.training.grids import Part, Preset, Variant, planned
from normlab.training.run import train
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


def test_norms_of_one_class_name_are_told_apart_in_tables_and_figures(file):
    first = league.scheme_of(f"{file}:MeanAbsNorm")
    assert title_of(first.name) == "MeanAbsNorm"
    file.write_text(MY_NORM.replace("1e-6", "1e-3"))
    names = [first.name, league.scheme_of(f"{file}:MeanAbsNorm").name]
    titles = [title_of(name) for name in names]
    assert titles == [f"MeanAbsNorm ({name})" for name in names] == [theme.style_of(name).title for name in names]
    runs = table((*names, "lns"), (4,), (0,))
    end = runs["metric"].eq("loss") & runs["split"].eq("eval") & runs["scheme"].eq(names[1])
    runs["value"] = runs["value"].mask(end, 4.5)
    assert losses(runs)[4].to_dict() == {"LNS": "4.100", titles[0]: "5.000", titles[1]: "4.500"}
    assert set(trains_at_depth(runs).data[0].y) == {"LNS", *titles}
    shown = standings.shown(standings.standings(runs, load_published(), standings.step_times()))
    assert set(shown["scheme"]) == {"LNS", *titles}


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


def test_a_scheme_that_could_not_be_measured_once_it_is_trained_is_refused(file):
    """PyTorch's norm can be. One of another shape in each block cannot be moved to another place."""
    pytorchs = ROW.replace("MeanAbsNorm(site.width)", "torch.nn.RMSNorm(site.width)")
    file.write_text(MY_NORM + pytorchs)
    assert league.scheme_of(f"{file}:ROW").name.startswith("mine_")
    own = "        self.add_parameter('steps', layer, 1.0)\n"
    by_layer = MY_NORM.replace("eps: float = 1e-6", "layer: int, eps: float = 1e-6").replace("1.0)\n", f"1.0)\n{own}")
    file.write_text(by_layer + ROW.replace("site.width", "site.width, site.layer"))
    with pytest.raises(NormlabError, match="ROW makes a model that cannot be measured once it is trained: Runtime"):
        league.scheme_of(f"{file}:ROW")


BLENDED = MY_NORM.replace('"weight", hidden_size, 1.0)', '"weight", hidden_size, 1.0)\n        MORE')
BLENDED = BLENDED.replace("MORE", 'self.add_parameter("blend", hidden_size, 0.0)')
BLENDED = BLENDED.replace(".to(x.dtype)\n", ".to(x.dtype) + self.blend * x.mean(-2, keepdim=True)\n")
IN_TRAINING = MY_NORM.replace("mean(-1, keepdim=True)", "mean((0, 1) if self.training and x.dim() == 3 else -1, True)")


@pytest.mark.parametrize("name", ["MeanAbsNorm", "ROW"])
@pytest.mark.parametrize("source", [BLENDED, IN_TRAINING], ids=["from 0", "in training"])
def test_a_norm_that_comes_to_mix_tokens_is_refused(name, source, file):
    file.write_text(source + ROW)
    with pytest.raises(NormlabError, match=f"{name} mixes tokens"):
        league.scheme_of(f"{file}:{name}")


RUNNING = """
from normlab.norms import PowerNorm
class Mine(PowerNorm):
    pass
"""
DROPS = MY_NORM.replace("return self.weight * (", "return self.weight * torch.nn.functional.dropout(")
DROPS = DROPS.replace("+ self.eps))", "+ self.eps), 0.5, self.training)")


@pytest.mark.parametrize(("name", "source"), [("Mine", RUNNING), ("MeanAbsNorm", DROPS)])
def test_running_statistics_and_draws_in_training_are_no_mixing(name, source, file):
    file.write_text(source)
    assert league.scheme_of(f"{file}:{name}").title == name


def with_parameter(start: str, output: str) -> str:
    """The norm with a parameter p more and this output of (its output before) y, x and p."""
    made = MY_NORM.replace('"weight", hidden_size, 1.0)', f'"weight", hidden_size, 1.0)\n        {start}')
    return made.replace("return self.weight", "y = self.weight") + f"        p = self.p\n        return {output}\n"


RATIO = "(x / (size + self.eps)).to(x.dtype)"
SHAPED = "self.p = torch.nn.Parameter(torch.full((1, 1, hidden_size), 1e-3))"
ONE, NONE = (f'self.add_parameter("p", 1, {start})' for start in (1.0, 0.0))


@pytest.mark.parametrize(
    "source",
    [
        MY_NORM.replace(RATIO, "(h := x.bfloat16(), h * h.square().mean(-1, keepdim=True).rsqrt())[1].to(x.dtype)"),
        MY_NORM.replace(RATIO, RATIO + " / x.shape[1]"),
        with_parameter(SHAPED, "y * p.sqrt()"),
        with_parameter(ONE, "p * y + (1 - p**2).sqrt() * x"),
        with_parameter(ONE, "y if p <= 1 else [][0]"),
    ],
    ids=["in bfloat16", "reads the length", "a (1, 1, d) under a root", "may not grow", "fails if it grows"],
)
def test_a_norm_that_treats_each_token_alone_is_not_refused(source, file):
    file.write_text(source)
    assert league.scheme_of(f"{file}:MeanAbsNorm").title == "MeanAbsNorm"


def taking_in(share: float) -> str:
    """Over a statistic of earlier passes and, in training, this share of the pass."""
    start = 'self.register_buffer("p", torch.ones(1))'
    return with_parameter(start, f"(x / (p.lerp_(x.square().mean(), {share}) if self.training else p)).to(x.dtype)")


@pytest.mark.parametrize(
    "source",
    [
        with_parameter(NONE, "y + torch.sigmoid(p - 12) * y.roll(-1, 1)"),
        with_parameter(NONE, "y + torch.relu(-p) * y.roll(-1, 1)"),
        with_parameter(ONE, "y + (1 - p**2).sqrt() * y.roll(-1, 1)"),
        taking_in(0.1),
        taking_in(0.01),
        with_parameter(NONE, "y + x.reshape(-1, 2, x.shape[-1]).flip(1).reshape(x.shape)"),
    ],
    ids=["sigmoid(-12)", "if it shrinks", "if it may not grow", "a tenth", "a hundredth", "in twos"],
)
def test_a_weak_mixing_is_refused(source, file):
    file.write_text(source)
    with pytest.raises(NormlabError, match="mixes tokens"):
        league.scheme_of(f"{file}:MeanAbsNorm")


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


@pytest.fixture
def preset(text: Path, monkeypatch: pytest.MonkeyPatch) -> Preset:
    """The league's in two steps, trained in this process."""
    fields = {name: value for name, value in TINY.items() if name != "depth"} | {"corpus": str(text), "steps": 2}
    rates = tuple(Variant({"lr": rate}) for rate in (0.002, 0.004))
    made = Preset("league", (Part({2: 1}, ("pre_rmsnorm",), rates),), 0.004, fields)
    monkeypatch.setattr(Pool, "finish", here)
    monkeypatch.setattr(league, "get_preset", lambda name: made)
    return made


def test_schemes_are_trained_at_each_rate_and_stand_in_the_table(file, preset, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(league, "hours", lambda *_, **__: 1.25)
    grid, out = tmp_path / "grid", tmp_path / "out"
    options = ["--cache-dir", str(cache), "--quiet"]
    assert cli.main(["league", str(grid), "--quiet"]) == 2 and "is no folder of runs" in capsys.readouterr().err
    for config in planned_configs(preset):
        train(config, grid, cache_dir=cache, progress=False)
    command = ["league", str(grid), "--add", f"{file}:MeanAbsNorm", "--add", "lns", "--out", str(out), *options]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"training {file}:MeanAbsNorm, lns in {out}: about 1.2 hours here; a stopped command")
    assert all(title in printed for title in ("MeanAbsNorm ", "LNS ", "Pre-LN "))
    trained = [runs.read_manifest(path)["config"] for path in runs.find_runs(out)]
    names = {league.scheme_of(f"{file}:MeanAbsNorm").name, "lns"}
    assert {(c["scheme"], c["lr"]) for c in trained} == {(name, lr) for name in names for lr in (0.002, 0.004)}
    assert cli.main(["league", str(grid), str(out), "--csv", str(tmp_path / "t.csv"), "--quiet"]) == 0
    assert set(pd.read_csv(tmp_path / "t.csv")["scheme"]) == {*names, "pre_rmsnorm"}


def planned_configs(preset: Preset) -> list[TrainConfig]:
    return [preset.config("pre_rmsnorm", 2, 0, variant.fields["lr"], {}) for variant in preset.parts[0].variants]


def test_runs_of_another_recipe_or_text_are_refused_before_training(preset, text, cache, tmp_path):
    config = planned_configs(preset)[0]
    train(config, tmp_path, cache_dir=cache, progress=False)
    league.require_comparable(preset, [tmp_path, tmp_path / "absent"], cache)
    deeper = replace(preset, parts=(replace(preset.parts[0], depths={3: 1}),))
    league.require_comparable(replace(deeper, fields=preset.fields | {"width": 64}), [tmp_path], cache)
    (tmp_path / "other.txt").write_text(text.read_text() + "more\n")
    for more, message in (
        ({"width": 64}, f"has width {config.width}, new runs would have 64: name another folder"),
        ({"init_std": 0.1}, "has init_std None, new runs would have 0.1: name another folder"),
        ({"corpus": str(tmp_path / "other.txt")}, "has corpus "),
    ):
        with pytest.raises(NormlabError, match=message):
            league.require_comparable(replace(preset, fields=preset.fields | more), [tmp_path], cache)


def test_a_new_row_has_the_grids_runs_but_for_the_scheme():
    mine = planned(league.preset_of(["keel"]))
    grid = {config.run_id for config in planned(get_preset("grid")) if config.depth == 8}
    assert [(config.scheme, config.lr) for config in mine] == [("keel", rate) for rate in (2e-3, 4e-3, 8e-3)]
    assert {replace(config, scheme="lns").run_id for config in mine} <= grid


def test_a_processor_without_bfloat16_is_told_how_long_float32_takes(preset, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(league, "computes_bfloat16", lambda device: False)
    monkeypatch.setattr(league, "hours", lambda preset, *_, **__: asked.append(preset.fields["dtype"]) or 2.46)
    mine = league.preset_of(["lns"], dtype="bfloat16")
    with pytest.raises(NormlabError, match="in float32 this takes about 2.5 hours .* add --dtype float32"):
        league.require_precision(mine, "out")
    assert asked == ["float32"]
    league.require_precision(league.preset_of(["lns"], dtype="float32"), "out")
    flags = (["--out", "mine"], ["--workers", "7"], ["--threads", "3"], ["--cache-dir", "here"])
    for flag in (["--dtype", "float32"], ["--tiny"], *flags):
        assert cli.main(["league", *flag]) == 2
        assert f"{flag[0]} would change nothing without --add" in capsys.readouterr().err


def test_hours_are_of_the_runs_that_are_left_at_once_as_many_as_there_are_workers(monkeypatch):
    table = pd.DataFrame({"hours": [2.0, 2.0, 2.0, 2.0], "done": [True, False, False, False]})
    monkeypatch.setattr(league, "plan", lambda *_, time, workers, threads: Plan(table, workers, threads))
    for workers, threads, expected in ((2, 1, 4.0), (1, 2, 3.0), (3, 1, 2.0)):
        assert league.hours(None, "out", workers=workers, threads=threads) == expected
    table["done"] = True
    assert league.hours(None, "out", workers=1, threads=1) == 0


def test_the_small_size_differs_in_size_alone():
    preset = get_preset("league")
    small = league.tiny(preset)
    assert small.parts[0].depths == {2: 1} and (small.fields["steps"], small.fields["dtype"]) == (40, "float32")
    assert small.fields.keys() >= preset.fields.keys() and small.parts[0].variants == preset.parts[0].variants
    for name in ("init_std", "clip", "held_out", "store_all"):
        assert small.fields[name] == preset.fields[name]


@pytest.mark.slow
def test_the_command_trains_a_file_in_processes_and_puts_it_beside_pre_ln(file, tmp_path, capsys):
    command = ["league", "--add", f"{file}:MeanAbsNorm", "--add", "pre_rmsnorm", "--tiny"]
    table = tmp_path / "league.csv"
    assert cli.main([*command, "--out", str(tmp_path / "out"), "--csv", str(table), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "MeanAbsNorm" in printed.splitlines()[1] + printed.splitlines()[2] and table.is_file()
