"""`normlab compare A B`: the paired differences in words, and one line with exit code 2 for what cannot be compared."""

import shutil
from pathlib import Path

import pytest
from notebook_helpers import write_runs
from training_helpers import write_run

import normlab
from normlab import packed
from normlab.analysis.compare import compare
from normlab.cli import main
from normlab.runs import load_schemes
from normlab.training.config import TrainConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("compare") / "runs", schemes=("pre_rmsnorm", "lns", "bhyt"))


def test_it_prints_what_compare_finds(folder, capsys):
    assert main(["compare", "lns", "pre_rmsnorm", "--runs", str(folder)]) == 0
    out, err = capsys.readouterr()
    found = compare(normlab.load_runs(folder), "lns", "pre_rmsnorm")
    assert err == "" and out.startswith("loss: lns minus pre_rmsnorm, paired by seed\ndepth 2, 4 · width 16")
    for row, line in zip(found.itertuples(), out.splitlines()[3:], strict=True):
        assert line.split()[0] == str(row.depth) and f"{row.estimate:+.4f}" in line
        assert f"[{row.low:+.4f}, {row.high:+.4f}]  different: lns is higher" in line


def test_it_takes_every_choice_of_the_explorer(folder, capsys):
    flags = ["--metric", "grad_l2_mean", "--depth", "4", "--layer", "2", "--step", "10", "--level", "0.9"]
    assert main(["compare", "bhyt", "pre_rmsnorm", "--runs", str(folder), *flags]) == 0
    (line,) = capsys.readouterr().out.splitlines()[3:]
    choice = dict(site="block_in_grad", depth=4, layer=2, step=10, level=0.9)
    found = compare(normlab.load_runs(folder), "bhyt", "pre_rmsnorm", "grad_l2_mean", **choice).iloc[0]
    assert f"{found['estimate']:.4g}  [{found['low']:.4g}, {found['high']:.4g}]  different: bhyt is lower" in line


def test_without_runs_here_those_that_come_with_normlab_are_compared(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("normlab.study.league.shipped", lambda name: folder)
    assert main(["compare", "lns", "pre_rmsnorm"]) == 0
    out, err = capsys.readouterr()
    assert out.count("different: lns is higher") == 2 and str(folder) in err
    write_runs(tmp_path / "runs", schemes=("lns", "bhyt"))
    assert main(["compare", "lns", "bhyt"]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_is_not_compared_with_another_of_its_name(folder, tmp_path, capsys):
    run = sorted(folder.iterdir())[0]
    copy = shutil.copytree(run, tmp_path / run.name)
    assert main(["compare", str(run), str(copy)]) == 2
    assert capsys.readouterr().err.count("are runs of one configuration") == 1


def test_one_seed_and_two_runs_say_that_there_is_no_interval(tmp_path, folder, capsys):
    alone = write_runs(tmp_path / "alone", schemes=("lns", "bhyt"), seeds=(0,))
    assert main(["compare", "lns", "bhyt", "--runs", str(alone)]) == 0
    assert capsys.readouterr().out.count("one seed: no interval") == 2
    first, second = sorted(folder.glob("*-4-1-0.001"))[:2]
    assert main(["compare", str(first), str(second)]) == 0
    by_path = capsys.readouterr().out
    assert by_path.count("one seed: no interval") == 1 and first.name in by_path
    assert main(["compare", str(first), str(second), "--runs", str(alone)]) == 2
    assert "--runs would change nothing: " in capsys.readouterr().err
    assert main(["compare", first.name, second.name, "--runs", str(folder)]) == 0
    assert capsys.readouterr().out == by_path
    packed.add(folder, tmp_path / "packed")
    assert main(["compare", *(str(tmp_path / "packed" / run.name) for run in (first, second))]) == 0
    assert capsys.readouterr().out == by_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("lns", "B requires an argument"),
        ("lns dyt", "no run of 'dyt' in the table, which has: pre_rmsnorm, lns, bhyt"),
        ("lns bhyt --metric size", "no metric 'size' in the table, which has: feature_var_mean"),
        ("lns bhyt --metric token_l2_mean --layer 9", "no layer 9 of token_l2_mean in the table, which has: 0, 1, 2"),
        ("lns bhyt --metric token_l2_mean --site elsewhere", "no site 'elsewhere'"),
        ("lns bhyt --step 5", "no step 5 of loss in the table, which has: 0, 10, 20"),
        ("lns bhyt --depth 3", "No run of depth 3 in the table, which has depth 2, 4"),
        ("lns bhyt --width 7", "No run of width 7"),
        ("lns bhyt --level 95", "between 0 and 1"),
        ("lns bhyt --layer two", "'two'"),
        ("lns-4-0-0.001 lns-4-1-0.001", "have seed 0 and 1: no pair"),
    ],
)
def test_what_cannot_be_compared_is_one_line(arguments, words, folder, refused):
    assert words in refused("compare", *arguments.split(), "--runs", folder)


def test_a_scheme_is_its_own_model_and_not_one_that_changes_it(tmp_path, capsys):
    def write(folder, scheme, **model):
        config = TrainConfig(scheme=scheme, depth=2, dtype="float32", model=model)
        return write_run(config, tmp_path / folder, corpus={"unigram_entropy": 6.5}).name

    plain = [write("runs", scheme) for scheme in ("bhyt", "lns")]
    write("runs", "bhyt", kappa=2.0)
    with pytest.warns(UserWarning, match=r"left out: runs of bhyt that change its model \(kappa\), 1 of 2$"):
        assert sorted(load_schemes(tmp_path / "runs")["run"].unique()) == sorted(plain)
    assert main(["compare", "bhyt", "lns", "--runs", str(tmp_path / "runs"), "--split", "train"]) == 0
    out, err = capsys.readouterr()
    assert "nothing" not in out and err.count("left out: runs of bhyt") == 1
    changed = [write("changed", "bhyt", kappa=2.0), write("changed", "lns")]
    assert sorted(load_schemes(tmp_path / "changed")["run"].unique()) == sorted(changed)
    write("changed", "bhyt", kappa=3.0)
    assert main(["figures", str(tmp_path / "changed"), "--out", str(tmp_path / "figures")]) == 2
    assert "runs of bhyt are of several models, which differ in kappa" in capsys.readouterr().err
