"""README.md, docs/findings.md and data/README.md say what the shipped tables hold, in numbers and in words."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

import normlab
from normlab.analysis import claims
from normlab.analysis.selection import summarize

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MODULES = (
    "equal_rates",
    "tables",
    "findings",
    "questions",
    "standings",
    "papers",
    "pictures",
    "data_numbers",
    "forms",
    "names",
    "generate",
)


@pytest.fixture(scope="module")
def code() -> Iterator[dict[str, ModuleType]]:
    """The scripts of `make findings`."""
    sys.path.insert(0, str(DOCS))
    for name in MODULES:  # the benchmarks have a module `tables` too
        sys.modules.pop(name, None)
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(DOCS))
    for name in MODULES:
        sys.modules.pop(name)


def test_a_mark_is_filled_and_a_bad_one_is_refused(code):
    filled = code["generate"].filled
    texts = {"loss": "3.14", "table": "| a |"}
    assert filled("It is <!-- loss -->?<!-- / -->.", texts, "p") == "It is <!-- loss -->3.14<!-- / -->."
    assert filled("<!-- table -->\n?<!-- / -->", texts, "p") == "<!-- table -->\n\n| a |\n\n<!-- / -->"
    for page, message in (("A <!-- los -->?<!-- / -->", "los"), ("A\n<!-- loss -->?<!-- / -->", "begins a line")):
        with pytest.raises(ValueError, match=message):
            filled(page, texts, "p")


def test_the_words_of_the_findings_hold(code):
    """The verdicts that the sentences state; the numbers are generated."""
    findings = code["findings"]
    runs, pair = findings.runs(), findings.pair
    gains = claims.depth_gain(runs, 4, 16).set_index("a")
    assert gains.loc["pre_rmsnorm", "low"] > 0
    blocks = findings.lns_minus_pre_ln()
    assert blocks.loc["early", "low"] > 0 and (blocks.loc[["late", "change"], "high"] < 0).all()
    rest = blocks.drop(["early", "late", "change"])
    assert (rest["low"] < 0).all() and (rest["high"] > 0).all() and set(blocks["verdict"]) == {"undecided"}
    sizes, losses = (findings.against_pre_ln(metric, 16) for metric in ("token_l2_mean", "loss"))
    assert sizes.loc["bhyt", "high"] < 1 and losses.loc["bhyt", "low"] > 0
    assert set(sizes["verdict"]) == {"undecided"} and set(losses.drop("lns")["verdict"]) == {"different"}
    fit = findings.fit_values(16)
    assert pair(fit, "lns", "pre_rmsnorm", "gap")["high"] < 0
    for name in ("training", "held_out"):
        assert pair(fit, "lns", "pre_rmsnorm", name)["verdict"] == "undecided"
    for metric in ("loss", "token_l2_mean"):
        assert normlab.compare(runs, "bhyt", "bhyt_linear", metric, depth=4)["verdict"].item() == "undecided"
    equal = pair(findings.rate_of_pre_ln("loss"), "lns", "pre_rmsnorm")
    assert equal["low"] < 0 < equal["high"]
    loss, gap = findings.league_minus("loss"), findings.league_minus("gap")
    assert loss.loc["lns", "high"] < 0 and loss.loc["lns", "verdict"] == "undecided"
    assert loss.loc["bhyt", "low"] < 0 < loss.loc["bhyt", "high"]
    assert gap.loc["lns", "low"] < 0 < gap.loc["lns", "high"]
    loss, size = (findings.bhyt_of_four(metric) for metric in ("loss", "token_l2_mean"))
    assert loss["seeds"] == size["seeds"] == 4 and size["high"] < 1 and size["verdict"] == "different"
    assert loss["low"] < 0 < loss["high"]
    sizes = findings.league_minus("token_l2_mean")
    assert sizes.loc["bhyt", "estimate"] < 1 < sizes.loc["lns", "estimate"]
    assert set(sizes.loc[["bhyt", "lns"], "verdict"]) == {"different"}
    assert findings.league_table().set_index("scheme").loc["bhyt", "growth_low"] > 1
    at_one_rate = findings.at_one_rate("token_l2_mean")
    assert (at_one_rate.loc["lns"].dropna() < 1).all() and at_one_rate.loc["peri_ln"].min() < 1
    assert at_one_rate.loc["peri_ln"].max() > 1
    about = summarize(pd.concat([findings.league().search, findings.runs("between")], ignore_index=True))
    shown = about["scheme"].isin(["pre_rmsnorm", "lns", "peri_ln", "bhyt", "bhyt_exact", "rmsnorm_gain"])
    assert (about["eval_loss"] > about["trigram_loss"])[shown].all(), "none of these has learned"
    both = at_one_rate.loc[["bhyt", "rmsnorm_gain"]].dropna(axis="columns").round(2)
    assert len(both.columns) > 1 and (both.loc["bhyt"] <= both.loc["rmsnorm_gain"]).all()
    small = pair(findings.rate_of_pre_ln("token_l2_mean"), "bhyt", "pre_rmsnorm")
    assert small["verdict"] == "different" and gains.loc["pre_rmsnorm", "verdict"] == "different"
    assert pair(fit, "lns", "pre_rmsnorm", "gap")["verdict"] == "different"
    assert losses.loc["lns_gain", "high"] < 0


def test_what_is_said_of_the_runs_on_a_gpu_holds(code):
    found = code["findings"].gpu_runs()
    lns, pre_ln = found.loc["lns"], found.loc["pre_rmsnorm"]
    assert list(lns["loss"] > pre_ln["loss"]) == [True, False, False] and (lns["deep"] < pre_ln["deep"]).all()
    assert (lns["early"] > lns["deep"]).all() and lns.loc[0.002, "last"] < pre_ln.loc[0.002, "last"]
    assert found.loc[("bhyt", 0.004), "last"] > found.loc[("rmsnorm_gain", 0.004), "last"]


def test_what_is_said_of_models_that_have_not_learned_holds(code):
    def configs(folder: str, learned: bool) -> list[dict]:
        found = code["findings"].manifests(folder)
        return [m["config"] for m in found if (m["eval_loss"] < m["trigram_loss"]) == learned]

    (other,) = configs("tanh", learned=False)
    assert (other["scheme"], other["model"]["lam_input"] / 10) == ("bhyt_exact", 5)
    assert {config["model"]["qk_norm"] for config in configs("gains", learned=True)} == {"rms_head"}


def test_what_is_said_of_mixed_streams_holds(code):
    """mHC's matrix hardly leaves its start, that of hyper-connections moves further; the streams stay alike."""
    rows = code["findings"].runs("mixing").query("mask == 'all' and metric != 'loss'")
    medians = rows.groupby(["scheme", "metric", "step"], observed=True)["value"].median().unstack()
    moved = (medians[2000] - medians[0]).unstack("metric")["mixing_from_identity"]
    assert abs(moved["mhc"]) < 0.02 and moved["hyper_connections"] > 0.1
    assert (medians.xs("stream_cosine", level="metric")[2000] > 0.95).all()
    farthest = rows.query("metric == 'mixing_from_identity' and scheme == 'hyper_connections'")
    assert farthest.loc[farthest["value"].idxmax(), "layer"] == 1
    assert all(m["eval_loss"] > m["trigram_loss"] for m in code["findings"].manifests("mixing"))


def test_what_the_league_says_of_single_changes(code):
    """Single seeds: differences above what a seed moves, and below where the page says that one seed tells nothing."""
    manifests, apart = code["findings"].manifests, code["standings"].seeds_apart().max()
    there = {(m["config"]["scheme"], m["config"]["lr"]): m["eval_loss"] for m in manifests("league/search")}
    short, long = ([m for m in manifests("checks") if m["config"]["steps"] == steps] for steps in (2000, 6000))
    changed = {m["config"]["scheme"].rpartition("_")[0]: m["eval_loss"] for m in short}
    assert changed["pre_rmsnorm_logits"] < there["pre_rmsnorm", 0.002] - apart
    assert abs(changed["residual_dual_normalized"] - changed["pre_rmsnorm_large"]) < apart
    assert there["residual_dual", 0.002] < changed["residual_dual_normalized"] - apart
    for name in ("lns", "gatednorm", "bhyt"):
        assert abs(changed[f"{name}_logits"] - changed["pre_rmsnorm_logits"]) < apart
    other = {m["config"]["scheme"]: m for m in manifests("between")}
    for name in ("post_rmsnorm", "minimax"):
        assert other[name]["eval_loss"] < other[name]["bigram_loss"] - apart
        assert all(loss > other[name]["bigram_loss"] for (scheme, _), loss in there.items() if scheme == name)
    assert other["post_rmsnorm"]["eval_loss"] > there["pre_rmsnorm", 0.002]
    assert there["gatednorm", 0.008] == pytest.approx(there["pre_rmsnorm", 0.002] - 0.2, abs=0.02)
    (ngpt,) = (m["eval_loss"] for m in short if m["config"]["scheme"] == "ngpt")
    assert ngpt < there["ngpt", 0.002] - 1
    assert {m["config"]["scheme"].rpartition("_")[0] for m in long} == {"pre_rmsnorm_logits"}
    losses = pd.DataFrame([(m["config"]["scheme"], m["config"]["seed"], m["eval_loss"]) for m in manifests("league")])
    several = losses.groupby(0)[2].agg(["mean", "size"]).query("size > 1")["mean"]
    lower = several.index[several < sum(m["eval_loss"] for m in long) / len(long)]
    assert set(lower) <= {"block_attn_residuals"}, "as much as the best of several final runs but one"


def test_what_the_sections_say_of_single_runs(code):
    findings = code["findings"]
    about = findings.chosen()
    assert (about["eval_loss"] < about["trigram_loss"]).all(), "each has learned"
    cost = findings.by_layer("skip_delta_loss")
    assert (cost.max(axis=1) > cost.sum(axis=1) / 2).all() and set(cost.idxmax(axis=1)) == {1, 2}
    sizes = findings.runs().query("run in @about.index and depth == 16 and metric == 'token_l2_mean'")
    sizes = sizes.query("site == 'block_out' and mask == 'all' and step == step.max()")
    sizes = sizes.pivot_table(index=["scheme", "seed"], columns="layer", values="value", observed=True)
    largest = sizes.diff(axis=1).idxmax(axis=1).groupby("scheme").agg(set)
    assert largest["pre_rmsnorm"] == largest["lns"] == {1} and largest["rmsnorm_gain"] == {2}
    assert largest["bhyt"] == largest["bhyt_exact"] == {1, 2}
    for folder in ("runs", "runs/search", "runs/finals", "other_rates"):
        losses = findings.runs(folder).query("metric == 'loss' and split == 'eval'").sort_values("step")
        by_run = losses.groupby("run", observed=True)["value"]
        assert (by_run.last() == by_run.min()).all(), "each ends at its lowest held-out loss"
    bigram = {m["corpus"]["content_hash"]: m["bigram_loss"] for m in findings.manifests("pilot")}
    short = findings.manifests("gain_or_bound")
    assert all(not m["eval_loss"] <= bigram[m["corpus"]["content_hash"]] for m in short)
    trained = findings.manifests("runs") + findings.manifests("runs/search") + findings.manifests("other_rates")
    assert len({m["commit"] for m in trained}) == 1
    wide = [m for m in findings.manifests("depth") if m["config"]["depth"] == 256]
    assert all(not m["eval_loss"] or m["eval_loss"] > m["bigram_loss"] for m in findings.manifests("depth")) and wide


def test_questions_are_answered_in_the_words_that_were_fixed(code):
    """A question without runs has no answer, and one without four seeds says so."""
    questions = code["questions"]
    assert questions.answer("B") == "undecided: not every unchanged model has a uniform attention"
    assert "LNS" in questions.answer("D").split("; ")
    for name in ("A1", "A2", "A3", "A4", "C"):
        rows = questions.decided(name)
        if rows["seeds"].max() >= 4:
            continue
        incomplete = r"incomplete: [0-3] of (4 seeds|3 gains)"
        expected = (
            rf"{incomplete}( at rate [\d.]+; {incomplete} at rate [\d.]+)*"
            if rows["says"].any()
            else (questions.NOT_BEGUN if rows.empty else questions.NOT_THERE)
        )
        assert re.fullmatch(expected, questions.answer(name)), name


def test_what_is_said_of_equal_rates_holds(code):
    """LNS against Pre-LN at 16 blocks: the stream is smaller, and deep blocks do less at equal rates."""
    questions, equal = code["questions"], code["equal_rates"]
    found = equal.compared()
    assert found["seeds"].min() >= 4
    loss = found.loc["loss"]
    assert loss.loc[0.004, "low"] < 0 < loss.loc[0.004, "high"] and loss.loc[0.008, "estimate"] < -0.2
    assert loss.loc[0.001, "low"] > 0 and loss.loc[0.001, "verdict"] == "different"
    sizes = ["first", "size", "variance"]
    different = found["verdict"].eq("different").unstack("place")
    assert set(different.index[different["best"]]) == set(sizes) and different.loc[sizes].all(axis=None)
    assert different[0.004].drop(["loss", "growth", "spread"]).all() and different.loc["skip", 0.008]
    assert different.loc[["growth", "spread"]].sum().to_dict() == {0.001: 2, 0.004: 0, 0.008: 0, "best": 0}
    assert (found.loc[sizes, "high"] < 1).all() and different.loc["skip", 0.001]
    assert found.loc[("spread", 0.001), "low"] > 1
    assert (found.loc[["skip", "angle", "jacobian"], "high"] < 0).all() and (found.loc["early", "estimate"] > 0).all()
    assert (
        loss.loc[0.008, "verdict"] == "different"
        and found.loc[("size", 0.004), "estimate"] > 0.9 * found.loc[("first", 0.004), "estimate"]
    ), "most of it is there after block 1"
    lines = [line.strip("| ").split(" | ") for line in equal.texts()["table_of_rates_and_streams"].splitlines()[2:]]
    for pre_ln in (True, False):  # each column at the rates 0.001, 0.004 and 0.008
        early, grown, _, at_end, losses = zip(
            *(map(float, cells) for scheme, _, *cells in lines if (scheme == "Pre-LN") == pre_ln), strict=True
        )
        assert early[0] < early[1] < early[2] and grown[0] > max(grown[1:]) and losses[0] > losses[1]
        assert at_end[0] > 1.3 * max(at_end[1:]) if pre_ln else max(at_end) < 1.05 * min(at_end)
    growth = questions.decided("A3").set_index("lr")
    assert (growth["low"] > 1).all() and growth.loc[0.001, "says"] == "not paper-like"
    held_out, seen = (row for _, row in questions.decided("A1").iterrows())
    assert held_out["verdict"] == seen["verdict"] == "different" and seen["high"] < 0
    answers = questions.decided("A2").set_index(["quantity", "lr"])
    assert set(answers.loc["skip cost, mean of blocks 9-15", "verdict"]) == {"different"}
    early, jacobian = (answers.loc[name] for name in ("skip cost, sum of blocks 2-8", "Jacobian, mean of blocks 9-15"))
    assert (early["estimate"] > 0).all() and early["verdict"].tolist() == ["undecided", "different", "undecided"]
    assert (jacobian["high"] < 0).all() and set(jacobian["verdict"]) == {"different"}
    about = summarize(code["findings"].runs("depth_and_rate"))
    pairs = about[about["scheme"].isin(["lns", "pre_rmsnorm"])]
    assert (pairs.groupby(["depth", "lr", "seed"])["dtype"].nunique() == 1).all(), "a pair has one precision"
    freed = about[about["scheme"] == "lns_gain"]
    assert len(freed) == 4 and set(freed["dtype"]) == {"bfloat16"}
    assert equal.trained_gain()["verdict"].to_dict() == {"loss": "undecided", "size": "different", "skip": "undecided"}
    assert questions.control()["verdict"].to_dict() == {"loss": "undecided", "token_l2_mean": "different"}


def test_block_1_is_where_the_streams_part(code):
    """At the lower rates equal before its MLP, apart after it, and not by the size of its matrices."""
    equal = code["equal_rates"]
    over = equal.over_pre_ln
    for rate in (equal.LOWEST, equal.LOW):
        assert 0.95 < over("mlp_norm_in", "token_l2_mean", rate)["estimate"] < 1.1
    assert (
        over("mlp_norm_in", "token_l2_mean", equal.HIGH)["high"] < over("block_out", "token_l2_mean", equal.HIGH)["low"]
    )
    assert 0.9 < over("attn_norm_in", "token_l2_mean", equal.HIGH)["estimate"] < 1.1
    early, last = (over("block_out", "token_l2_mean", equal.LOW, step) for step in (1000, None))
    assert early["high"] < 0.5 and abs(early["estimate"] / last["estimate"] - 1) < 0.1
    assert over("block_out", "token_l2_mean", equal.LOWEST, 1000)["low"] > 0.5
    matrices = [over(f"mlp.{name}_proj.weight", "parameter_rms", equal.LOW)["estimate"] for name in equal.MATRICES]
    assert 2 * last["estimate"] < min(matrices) < max(matrices) < 1


def test_the_gap_at_equal_rates_is_as_the_page_says(code):
    verdicts = code["equal_rates"].unseen_gap()["verdict"].to_dict()
    assert verdicts == {0.001: "undecided", 0.004: "equivalent", 0.008: "different", "best": "equivalent"}


def test_what_is_said_of_depth_at_equal_rates_holds(code):
    """A4: LNS gains more at the lower rate, and not in the mean of both."""
    gains, (planned,) = code["equal_rates"].deepened(), code["questions"].decided("A4").itertuples()
    assert gains["seeds"].min() >= 4 and planned.verdict == "undecided"
    more = gains.xs("LNS minus Pre-LN", level="what")
    assert more["verdict"].to_dict() == {0.004: "different", 0.008: "undecided", "best": "undecided"}
    assert more["estimate"].min() > 0 and gains.loc[(0.004, "pre_rmsnorm"), "verdict"] == "different"
    of_pre_ln = gains.xs("pre_rmsnorm", level="what")
    widths = of_pre_ln["high"] - of_pre_ln["low"]
    assert widths[0.008] > 4 * widths[0.004], "it scatters"


def test_the_rates_that_the_first_screen_names_are_those_of_the_runs(code):
    in_league = code["findings"].league_table().set_index("scheme")["rate"]
    assert in_league["bhyt"] == 0.016 and in_league["pre_rmsnorm"] == 0.002
    older = code["findings"].chosen().query("depth == 16").groupby("scheme")["lr"].agg(set)
    assert older["pre_rmsnorm"] == {0.004} and older["lns"] == {0.008}
    assert all(older[name] == {0.016} for name in code["findings"].SMALL_GAIN)
    full = summarize(pd.concat([code["findings"].runs(name) for name in ("runs", "runs/finals", "other_rates")]))
    rates = full[(full["depth"] == 16) & (full["tokens"] == full["tokens"].max())].groupby("scheme")["lr"].nunique()
    assert set(rates.index[rates > 1]) == {"bhyt"}


def test_what_is_said_of_uniform_attention_holds(code):
    findings = code["findings"]
    at_own, at_low = (findings._uniform(findings.runs(name), 4).set_index("scheme") for name in ("runs", "other_rates"))
    assert at_own.loc["bhyt", ["lr", "models"]].tolist() == [0.016, 0]
    assert at_low.loc["bhyt", ["lr", "models", "seeds"]].tolist() == [0.004, 3, 3]
    gains = findings._gains_of_eight().query("dead")["lambda"]
    assert len(gains) == 4 and (gains.nsmallest(3) < 0.25).all() and gains.max() > 1


def test_what_is_said_of_the_tanh_holds(code):
    rows = code["questions"].decided("C")
    assert rows["seeds"].min() >= 4 and set(rows.loc[rows["g"] == 0.2, "verdict"]) == {"undecided"}
    losses, streams = (part.set_index("g") for _, part in rows.groupby("quantity", sort=False))
    for gain in (1.0, 5.0):
        assert set(rows.loc[rows["g"] == gain, "verdict"]) == {"different"}
        assert losses.loc[gain, "low"] > 0 and streams.loc[gain, "high"] < 1
    assert losses["estimate"].is_monotonic_increasing and streams["estimate"].is_monotonic_decreasing
    assert 0.4 < streams.loc[1.0, "estimate"] < 0.6, "it halves the stream"


def test_rates_and_quantities_with_different_answers_are_named(code, monkeypatch):
    questions = code["questions"]
    rows = pd.DataFrame({"lr": [0.004, 0.008, 0.004], "says": ["woken", "not shown", ""]})
    monkeypatch.setattr(questions, "decided", lambda name: rows)
    assert questions.answer("A2") == "woken at rate 0.004; not shown at rate 0.008"
    monkeypatch.setattr(questions, "decided", lambda name: rows.assign(says=["woken", "woken", ""]))
    assert questions.answer("A2") == "woken"
    gains = pd.DataFrame({"quantity": ["loss", "norm"], "g": [0.2, 0.2], "says": ["undecided", "matters"]})
    monkeypatch.setattr(questions, "decided", lambda name: gains)
    assert questions.answer("C") == "undecided (loss); matters (norm)"


def test_the_hours_of_the_league_are_those_of_its_runs(code):
    """The search, the final runs and the rate between are counted once each, on two pages."""
    manifests, is_planned = code["findings"].manifests, code["questions"]._is_planned
    beyond = [m for m in manifests("league") if not is_planned(m, "league")] + manifests("between")
    measured = [m["measured"]["wall_s"] for m in beyond]
    cells = [
        [cell.strip() for cell in line.split("|")] for line in code["questions"].texts()["table_of_hours"].splitlines()
    ]
    spent = {row[1]: (int(row[3]), float(row[6])) for row in cells[2:]}
    runs, hours = (sum(spent[part][at] for part in ("D, search", "D, final runs")) for at in (0, 1))
    there = code["standings"].texts()
    assert int(there["league_runs"]) == runs + len(measured)
    assert float(there["league_hours"]) == pytest.approx(hours + sum(measured) / 3600, abs=0.2)


def test_losses_of_single_seeds_are_of_the_same_seed(code):
    """The row of the papers' page that rests on one seed of a scheme and several of the other."""
    losses = code["findings"].chosen().query("depth == 4 and seed == 0").set_index("scheme")["eval_loss"]
    ours, *_ = code["papers"]._ours("bhyt", base="peri_ln")
    assert ours.startswith(f"{code['findings'].signed(losses['bhyt'] - losses['peri_ln'])} (4 blocks, one seed)")


def test_an_interval_that_holds_no_effect_contradicts_no_paper(code):
    papers = code["papers"]
    row = pd.Series({"kind": "difference", "estimate": 0.004})
    for verdict, found in (
        ("equivalent", papers.UNDECIDED),
        ("undecided", papers.UNDECIDED),
        ("different", papers.AGREES),
    ):
        assert papers._verdict(pd.concat([row, pd.Series({"verdict": verdict})]), lower=False) == found


def test_every_picture_of_a_page_is_drawn_and_shown(code):
    pictures = code["pictures"]
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *DOCS.glob("*.md")))
    files = {path.stem for path in (ROOT / "data" / "figures").glob("*.png")}
    assert files == set(pictures.PICTURES) and all(f"figures/{name}.png" in pages for name in files)
    figure = pictures.of_papers()
    marks = [trace for trace in figure.data if trace.marker.symbol == "circle"]
    rows = code["papers"].with_numbers()
    assert sorted(trace.x[0] for trace in marks) == sorted(row.ours["estimate"] for _, row, _ in rows)
    words = [verdict.strip("*") for _, _, verdict in rows]
    assert f"contradict {words.count('contradicts')};" in figure.layout.title.text.replace("<br>", " ")
