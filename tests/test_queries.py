"""Pages say what the shipped tables hold: their marks are queries, and a changed verdict or sign is refused."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from figures_helpers import table
from shipped_runs import shipped_runs

import normlab
from normlab.analysis.outcomes import outcomes
from normlab.analysis.quantities import values_of
from normlab.analysis.selection import Selection, at_rate, choose, has_learned, summarize
from normlab.release import shipped_models
from normlab.schemes import tagged

ROOT = Path(__file__).parents[1]
MODULES = ("tables", "bench", "standings", "forms", "queries", "papers", "generate")
pytestmark = pytest.mark.skipif(not (ROOT / "data").is_dir(), reason="the shipped runs are not in this checkout")
AT = "@ grid depth=8 lr=0.004"
# The schemes of data/grid whose losses the findings list.
NAMED = [*tagged("main"), "beam", "block_attn_residuals"]


@pytest.fixture(scope="module")
def code():
    sys.path.insert(0, str(ROOT / "docs"))
    for name in MODULES:  # the benchmarks have a module `tables` too
        sys.modules.pop(name, None)
    modules = {name: importlib.import_module(name) for name in MODULES}
    modules["queries"]._runs = shipped_runs  # the same table, which other tests have read
    yield modules
    sys.path.remove(str(ROOT / "docs"))
    for name in MODULES:
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def packed():
    """The rows of the runs of 8 blocks at 0.004."""
    runs = shipped_runs("grid")
    return runs[(runs["depth"] == 8) & np.isclose(runs["lr"], 0.004)]


def number(code, query: str) -> str:
    page = code["queries"].fill(f"It is <!-- {query} -->?<!-- / --> here.", "page.md")
    start, _, rest = page.partition("-->")
    assert start == f"It is <!-- {query} " and rest.endswith("<!-- / --> here.")
    return rest.partition("<!--")[0]


def last(rows, scheme, **where):
    rows = rows[rows["scheme"] == scheme]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows.sort_values("step").groupby("seed", observed=True)["value"].last()


def test_a_difference_is_the_mean_over_seeds_of_paired_differences(code, packed):
    where = dict(site="model", metric="loss", split="eval")
    expected = (last(packed, "peri_ln", **where) - last(packed, "pre_rmsnorm", **where)).mean()
    written = f"{expected:+.3f}".replace("-", "−")
    assert number(code, f"loss: peri_ln - pre_rmsnorm {AT} digits=3") == written
    assert number(code, f"loss: peri_ln - pre_rmsnorm {AT} digits=3 abs=1") == written[1:]


def test_a_ratio_and_a_schemes_own_value_are_geometric_means(code, packed):
    def grown(scheme):
        where = dict(site="block_out", metric="token_l2_mean", mask="all")
        ends = [last(packed, scheme, layer=layer, **where) for layer in (8, 1)]
        return np.log(ends[0] / ends[1])

    ratio, own = np.exp((grown("lns") - grown("pre_rmsnorm")).mean()), np.exp(grown("lns").mean())
    assert number(code, f"growth: lns - pre_rmsnorm {AT}") == f"{ratio:.2f}"
    assert number(code, f"growth: lns {AT}") == f"{own:.2f}"


def test_a_table_has_a_cell_per_scheme_and_rate(code, packed):
    lines = [line.strip("| ").split(" | ") for line in code["queries"].answer("table: loss @ gpu depth=24").split("\n")]
    head, rows = lines[0], {line[0]: line for line in lines[2:]}
    pre_ln = rows["Pre-LN"][head.index("0.002") - len(head)]
    assert pre_ln == number(code, "loss: pre_rmsnorm @ gpu depth=24 lr=0.002")
    assert set(rows) == {"Pre-LN", "LNS", "DyT", "BHyT", "Pre-LN, gain λ/κ"}
    several = code["queries"].answer("table: loss token_l2_mean:1 growth @ gpu depth=24")
    assert re.search(r"\| LNS \| 0\.002 \| 2\.52 \| 135 \| 2\.09 \|", several), several


def test_a_difference_has_an_interval_from_four_seeds_on(code):
    runs = code["queries"].picked("gpu", {"depth": 24, "lr": 0.001})
    runs = runs[runs["scheme"].isin(["lns", "pre_rmsnorm"])]
    lns = runs["scheme"].eq("lns").astype(float)
    names, losses = runs["run"].astype(str), runs["metric"].eq("loss")
    seeds = [
        runs.assign(run=names + str(seed), seed=seed, value=runs["value"] + losses * (seed + lns * seed**2) / 1000)
        for seed in range(4)
    ]
    by_rate, by_seed = code["queries"].by_rate, code["queries"].by_seed

    def cell(runs):
        return by_rate(runs, "loss", "pre_rmsnorm", 4).splitlines()[-1].removeprefix("| LNS | ").removesuffix(" |")

    one, three = float(cell(runs)), float(cell(pd.concat(seeds[:3])))  # a number alone
    mean, low, high = map(float, re.fullmatch(r"\*\*(\S+) \[(\S+), (\S+)\]\*\*", cell(pd.concat(seeds))).groups())
    assert three - one == pytest.approx(5 / 3000, abs=1e-4) and mean - one == pytest.approx(3.5 / 1000, abs=1e-4)
    assert low > 0 and mean - low == pytest.approx(3.182 / 2 * np.std([0, 1, 4, 9], ddof=1) / 1000, abs=2e-4)
    shown = by_seed(pd.concat(seeds), "loss", 3).splitlines()[-1].removesuffix(" |").split(" | ")[2:]
    assert np.diff([float(text) for text in shown]) == pytest.approx([0.002, 0.004, 0.006], abs=1.1e-3)
    assert len(by_seed(pd.concat(seeds[:3]), "loss", 3).splitlines()) == 2, "no scheme has four"


def test_an_expression_is_of_a_shipped_file(code):
    faults = pd.read_csv(ROOT / "data" / "bench" / "first_layer.csv")
    assert number(code, "bench/first_layer.csv: len(t)") == str(len(faults))
    assert number(code, "bench/first_layer.csv: t.seconds.mean()") == f"{faults['seconds'].mean():.2f}"


def test_a_verdict_or_a_sign_that_the_runs_do_not_give_and_bad_queries_are_refused(code):
    query = "loss: lns - pre_rmsnorm @ gpu depth=24 lr=0.002"
    assert number(code, f"{query} : below") == number(code, f"{query} : undecided") == number(code, query)
    for bad, words in (
        (f"{query} : above", "the runs say below: write the sentence anew"),
        (f"{query} : different", "the runs say undecided: write the sentence anew"),
        (f"{query} colour=1", "unknown option colour"),
        (f"loss: lns {AT} seed=99", "has no such runs"),
        ("loss: derf @ gpu depth=24", "derf"),
        (f"{query} abs=1 range=1", "not both"),
        ("loss: lns-pre_rmsnorm @ gpu depth=24", "is no query"),
        ("bench/first_layer.csv: t.no_such_column", "no_such_column"),
        ("loss lns @ gpu depth=24", "is no query"),
    ):
        with pytest.raises(ValueError, match="p.md: <!-- .*" + words):
            code["queries"].fill(f"<!-- {bad} -->?<!-- / -->", "p.md")


def test_a_named_mark_is_filled_and_a_bad_one_is_refused(code):
    fill, texts = code["queries"].fill, {"loss": "3.14", "table": "| a |"}
    assert fill("It is <!-- loss -->?<!-- / -->.", "p", texts) == "It is <!-- loss -->3.14<!-- / -->."
    assert fill("<!-- table -->\n?<!-- / -->", "p", texts) == "<!-- table -->\n\n| a |\n\n<!-- / -->"
    for page, message in (("A <!-- los -->?<!-- / -->", "los"), ("A\n<!-- loss -->?<!-- / -->", "begins a line")):
        with pytest.raises(ValueError, match=message):
            fill(page, "p", texts)


def test_a_run_that_diverged_is_a_word_in_a_table(code, monkeypatch):
    runs = code["queries"]._runs("gpu").copy()
    lost = runs["scheme"].eq("lns") & np.isclose(runs["lr"], 0.004)
    runs.loc[lost, "status"] = "diverged"
    monkeypatch.setattr(code["queries"], "_runs", lambda folder: runs)
    for query in ("table: loss @ gpu depth=24", "table: loss - pre_rmsnorm @ gpu depth=24"):
        (line,) = (line for line in code["queries"].answer(query).split("\n") if line.startswith("| LNS |"))
        assert line.endswith("| diverged |") and line.count("|") == 5


@pytest.fixture
def one_lost(code, monkeypatch):
    """Four seeds of two schemes, of which one of LNS diverged, in place of the shipped runs."""
    runs = table(("pre_rmsnorm", "lns"), depths=(4,), seeds=(0, 1, 2, 3))
    lost = runs["scheme"].eq("lns") & runs["seed"].eq(3)
    runs = runs.assign(status=runs["status"].mask(lost, "diverged"), recipe="warmup=0.1")
    for name in ("queries", "papers"):
        monkeypatch.setattr(code[name], "picked", lambda folder, options, b=None: runs)
    return runs


def test_a_number_of_seeds_of_which_one_diverged_is_refused_and_a_cell_says_so(code, one_lost):
    answer = code["queries"].answer
    for asked, line in (
        ("table: loss", "| LNS | 1 of 4 diverged |"),
        ("table: growth", "| LNS | 1 of 4 diverged |"),
        ("table: loss - pre_rmsnorm", "| LNS | 1 of 4 diverged |"),
        ("table: loss - lns", "| Pre-LN | LNS: 1 of 4 diverged |"),
        ("table: loss growth", "| LNS | 0.001 | 1 of 4 diverged | 1 of 4 diverged |"),
        ("seeds: loss", "| LNS | 0.001 | 4.10 | 4.40 | 4.70 | diverged |"),
    ):
        assert answer(f"{asked} @ grid").splitlines()[-1] == line
    for asked in ("loss: lns", "growth: lns", "loss: lns - pre_rmsnorm", "loss: pre_rmsnorm - lns"):
        with pytest.raises(ValueError, match="LNS: 1 of 4 diverged"):
            answer(f"{asked} @ grid")
    assert answer("loss: pre_rmsnorm @ grid") == "4.45"
    claims = code["papers"].CLAIMS["Curse of Depth"]
    assert code["papers"]._rows("Curse of Depth", claims[:1])[0][-3:] == (
        "LNS: 1 of 4 diverged",
        "LNS: 1 of 4 diverged",
        "diverged, diverged",
    )


def test_a_recipe_of_a_schemes_own_is_said_below_the_papers_table(code, one_lost, monkeypatch):
    papers, claims = code["papers"], code["papers"].CLAIMS["Curse of Depth"]
    assert not papers._unlike(claims)
    own = one_lost.assign(recipe=np.where(one_lost["scheme"] == "lns", "warmup=0.3", "warmup=0.1"))
    monkeypatch.setattr(papers, "picked", lambda folder, options: own)
    first, second = papers._unlike(claims).strip().splitlines()
    assert first == "- 8 blocks, trained differently: warmup 0.1 and 0.3 (LNS)." and "24 blocks" in second


def test_the_league_has_in_bold_what_differs_after_holms_correction(code, monkeypatch):
    runs = table(("pre_rmsnorm", "lns", "peri_ln"), depths=(4,), seeds=range(4))
    higher = runs["scheme"].eq("lns") & runs["metric"].eq("loss")
    runs["value"] += higher * (0.1 + 0.01 * runs["seed"])
    monkeypatch.setattr(code["standings"].league, "load", lambda folders: runs)
    lines = code["standings"].texts()["table_of_league"].splitlines()
    lns, peri = (next(line for line in lines if line.startswith(f"| {name} |")) for name in ("LNS", "Peri-LN"))
    assert re.search(r"\| \*\*\+0\.\d\d \[0.*\]\*\* \|", lns), lns
    assert "[" in peri and "**" not in peri


def test_what_pages_say_of_seeds_and_of_bhyts_tanh_holds():
    runs = shipped_runs("grid").query("depth == 8")
    about = summarize(runs)
    seeds = about.groupby(["scheme", "lr"])["seed"].nunique()
    assert seeds["bhyt", 0.004] == seeds["rmsnorm_gain", 0.004] == 1, "README: the 0.12 alone is of four seeds"
    assert seeds["bhyt", 0.008] == seeds["pre_rmsnorm", 0.004] == 4
    poor = about[~has_learned(about)].groupby(["scheme", "lr"])["seed"].nunique()
    assert poor["dyt", 0.008] == 1
    failed = {s: [lr for of, lr in poor.index if of == s] for s in ("mix_ln", "post_rmsnorm", "deepnorm")}
    assert failed == {"mix_ln": [], "post_rmsnorm": [0.008], "deepnorm": [0.008]}, "docs/papers.md"
    ends = runs.query("site == 'block_out' and metric == 'token_l2_mean' and mask == 'all'")
    ends = ends.query("layer == 8 and seed == 0")
    size = ends[ends["step"] == ends["step"].max()].pivot_table(index="lr", columns="scheme", values="value")
    loss = about[about["seed"] == 0].pivot_table(index="lr", columns="scheme", values="eval_loss")
    lost, larger = loss["bhyt_linear"] - loss["bhyt"], size["bhyt_linear"] / size["bhyt"]
    assert (lost.abs().idxmax(), larger.idxmax()) == (0.016, 0.004), "where the tanh matters most"
    assert lost[0.008] == pytest.approx(0, abs=0.005), "at the best rate the tanh changes nothing"


def _ends_of(metric, runs, **where):
    """(scheme, lr, seed) x layer: a metric of all tokens after the last step."""
    rows = runs[(runs["metric"] == metric) & (runs["mask"] == "all")]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    rows = rows[rows["step"] == rows.groupby("run", observed=True)["step"].transform("max")]
    of = ["scheme", "lr", "seed"]
    return rows.pivot_table(index=of, columns="layer", values="value", aggfunc="max", observed=True)


def test_what_the_findings_say_of_the_first_block_of_growth_and_of_bhyts_bound_holds():
    grid, large = shipped_runs("grid"), shipped_runs("gpu")
    sizes = {depth: _ends_of("token_l2_mean", grid, site="block_out", depth=depth) for depth in (8, 16)}
    own = sizes[8].loc[("bhyt", 0.008)]
    assert sorted(own[1] > 1) == [False, False, True, True], "at 0.008 block 1 writes in two of four seeds"
    growth = own[8] / own[1]
    assert [*growth[own[1] < 1].round()] == [33, 33] and [*growth[own[1] > 1].round()] == [3, 3]
    deep = (sizes[16][16] / sizes[16][1]).groupby(["scheme", "lr"]).mean().unstack("scheme")
    assert (deep["lns"] < deep["pre_rmsnorm"]).all(), "over 16 blocks LNS grows less at all rates"
    flat = (sizes[8][8] / sizes[8][1]).xs(0, level="seed").unstack("scheme")
    assert [*(flat["lns"] < flat["pre_rmsnorm"])[[0.002, 0.004, 0.008]]] == [True, True, False], "over 8 at low ones"
    share = {depth: _ends_of("saturation", grid, scheme="bhyt", depth=depth).max().max() for depth in (8, 16)}
    assert max(share.values()) < 1e-4, "with 8 or 16 blocks no input to speak of exceeds lambda"
    beyond = _ends_of("saturation", large, scheme="bhyt", site="mlp_norm_in").loc[("bhyt", 0.004, 0)]
    assert beyond[1] == pytest.approx(0.35, abs=0.005) and beyond.drop(1).max() < 1e-4, "a third in block 1's MLP"
    assert round(_ends_of("carried_var_ratio", large, scheme="bhyt").loc[("bhyt", 0.004, 0), 1]) == 129


def test_what_the_findings_say_without_a_number_holds():
    """The sentences on blocks, on sizes after block 1, on rates and on initial weights."""
    experiments = normlab.load_experiments(ROOT / "data" / "gpu")
    blocks = experiments[(experiments["metric"] == "skip_delta_loss") & (experiments["part"] == "block")]
    cost = blocks[np.isclose(blocks["lr"], 0.001)].pivot_table(index="layer", columns="scheme", values="value")
    assert (cost["lns"] < cost["pre_rmsnorm"]).loc[13:23].all() and cost.loc[1, ["lns", "pre_rmsnorm"]].min() > 4
    early, deep = cost["pre_rmsnorm"].loc[2:12].mean(), cost["pre_rmsnorm"].loc[13:23].mean()
    assert deep == pytest.approx(early, rel=0.1), "Pre-LN's deep blocks cost as much as its early ones"
    for folder, depth in (("gpu", 24), ("grid", 8)):
        sizes = shipped_runs(folder).query("site == 'block_out' and metric == 'token_l2_mean'")
        sizes = sizes[(sizes["mask"] == "all") & sizes["scheme"].isin(["lns", "pre_rmsnorm"]) & (sizes["step"] > 0)]
        sizes = sizes[sizes["depth"] == depth]
        ends = sizes[sizes["step"] == sizes["step"].max()].pivot_table(index="run", columns="layer", values="value")
        assert (ends[1] / ends[depth]).min() > 0.33, "a third or more is there after block 1"
    grid = shipped_runs("grid")
    all_runs = grid[grid["scheme"].isin(NAMED)]
    runs = all_runs[all_runs["depth"] == 8]
    about, about_all, chosen = summarize(runs), summarize(all_runs), choose(runs).runs
    best = chosen.groupby("scheme")["lr"].unique()
    assert [*best["bhyt"], *best["rmsnorm_gain"]] == [0.008, 0.008] and max(best["pre_rmsnorm"]) < 0.008
    contenders = choose(grid[grid["depth"] == 8]).runs.groupby("scheme")["eval_loss"].mean()
    leading = [*contenders.index[contenders < contenders["pre_rmsnorm"]]]
    assert leading == ["block_attn_residuals"], "the one that may beat Pre-LN at best rates"
    few = chosen.groupby("scheme")["seed"].nunique() < 4
    assert [*few.index[few]] == ["beam"]
    fast = summarize(at_rate(runs, 0.008)).groupby("scheme")["eval_loss"].mean()
    assert (fast < fast["pre_rmsnorm"]).sum() == 5, "schemes that beat Pre-LN at 0.008"
    rates = about.query("lr < 0.01").groupby(["scheme", "lr"])["eval_loss"].mean().groupby("scheme")
    moves = rates.max() - rates.min()
    wider = summarize(grid[(grid["depth"] == 8) & (grid["lr"] < 0.01)])
    wider = wider.groupby(["scheme", "lr"])["eval_loss"].mean().groupby("scheme").agg(np.ptp)
    least = wider.nsmallest(3)
    assert sorted(least.index) == ["beam", "mix_ln", "peri_ln"] and least.round(2).eq(0.06).all()
    assert moves["pre_rmsnorm"] == pytest.approx(0.18, abs=0.005)
    assert moves["lns"] == pytest.approx(0.11, abs=0.005)
    assert moves["block_attn_residuals"] == pytest.approx(0.44, abs=0.005)
    assert sorted(about.loc[~has_learned(about), ["scheme", "lr", "seed"]].values.tolist()) == [
        ["dyt", 0.008, 3],
        ["dyt", 0.016, 0],
    ]
    every = summarize(grid)
    uniform = values_of(Selection(grid, every[has_learned(every)]), "uniform_attentions")
    uniform = uniform[uniform["value"] > 0].groupby(["depth", "scheme"])["value"].agg(["min", "max"])
    assert {*uniform.loc[8].index} == {"bhyt", "bhyt_linear", "bhyt_exact", "rmsnorm_gain"}
    assert uniform.loc[8, "max"].max() == 4 and {*uniform.loc[16].index} == {"bhyt", "rmsnorm_gain", "lns"}
    own = uniform.loc[16].loc[["bhyt", "rmsnorm_gain"]]
    assert (own["min"].min(), own["max"].max(), *uniform.loc[16, "lns"]) == (5, 8, 1, 1)
    large = summarize(shipped_runs("gpu"))
    assert not values_of(Selection(shipped_runs("gpu"), large), "uniform_attentions")["value"].any()
    narrow, fit = (normlab.load_configs(ROOT / "data" / name) for name in ("initial_weights", "grid"))
    fit = fit[fit["scheme"].isin(NAMED)]
    narrow = narrow[narrow["init_std"].isna() & (narrow["depth"] == 8)].set_index(["scheme", "lr"])["eval_loss"]
    lost = narrow - fit[(fit["seed"] == 0) & (fit["depth"] == 8)].set_index(["scheme", "lr"])["eval_loss"]
    deeper = fit[np.isclose(fit["lr"], 0.004) & (fit["seed"] == 0)]
    deeper = deeper.pivot(index="depth", columns="scheme", values="eval_loss")
    gain = deeper.loc[8] - deeper.loc[16]
    assert gain["lns"] > 0.02 and gain["pre_rmsnorm"] < 0, "from 8 to 16 blocks LNS gains, Pre-LN does not"
    best = choose(all_runs, depth=None, schemes=["lns", "pre_rmsnorm"]).runs
    best = best[best["scheme"].isin(["lns", "pre_rmsnorm"])].groupby(["depth", "scheme"])["eval_loss"]
    best = best.agg(["mean", "size"])
    assert best.loc[[8, 16], "size"].eq(4).all()
    for depth in (8, 16):
        lead = normlab.compare(all_runs, "lns", "pre_rmsnorm", "loss", depth=depth)["verdict"]
        assert [*lead] == ["undecided"], "at best rates no lead is left, and what there is may be chance"
    gain = best["mean"].loc[8] - best["mean"].loc[16]
    assert gain["lns"] > 0.03 and 0 < gain["pre_rmsnorm"] < 0.005, "LNS gains from depth, Pre-LN hardly does"
    assert not has_learned(about_all).filter(like="dyt-d16").any(), "DyT with 16 blocks"
    for many, depth, apart in ((all_runs, 8, 2), (all_runs, 16, 4), (shipped_runs("gpu"), 24, 4)):
        best = choose(many[many["depth"] == depth]).runs.groupby("scheme")["lr"].first()
        assert best["lns"] / best["pre_rmsnorm"] == pytest.approx(apart), f"best rates with {depth} blocks"
    skipped = normlab.load_experiments(ROOT / "data" / "grid")
    skipped = skipped[(skipped["metric"] == "skip_delta_loss") & (skipped["part"] == "block")]
    costliest = skipped.loc[skipped.groupby("run")["value"].idxmax()].groupby("scheme")
    layers, costs = costliest["layer"].agg(set), costliest["value"].min()
    first = ["pre_rmsnorm", "lns", "peri_ln"]
    assert all(layers[scheme] == {1} for scheme in first) and costs[first].min() > 4, "without it the model is lost"
    assert layers["bhyt"] == layers["rmsnorm_gain"] == {1, 2}, "it may be the second"
    found = {blocks: outcomes(own) for blocks, own in choose(shipped_runs("depth"), depth=None).runs.groupby("depth")}
    trained = {blocks: {*own.index[own["outcome"] == "trains"]} for blocks, own in found.items()}
    schemes = set(grid["scheme"])
    assert trained == {16: schemes - {"dyt", "derf"}, 256: {"lns", "lns_gain"}}
    others = found[256].drop([*trained[256]])
    assert len(others) == 14 and (others["loss"] > others["entropy"]).all(), "at the tokens' entropy or above"
    small = outcomes(choose(shipped_runs("initial_weights"), depth=256, width=32).runs)["outcome"]
    assert (small["bhyt"], small["pre_rmsnorm"]) == ("trains", "stalls")
    kept = pd.read_csv(ROOT / "data" / "bench" / "kept_models.csv")
    assert set(kept["model"]) == set(shipped_models())
    assert kept.loc[kept[kept["depth"] == 8]["both_4"].idxmin(), "scheme"] == "dyt"
    others = lost.dropna().drop("dyt")
    assert set(others.index.get_level_values(0)) == {"pre_rmsnorm", "bhyt", "peri_ln"}
    assert others.round(2).min() == 0.03 and others.round(2).max() == 0.09


@pytest.mark.parametrize(("page", "most"), [("docs/findings.md", 3000), ("data/README.md", 600)])
def test_a_page_is_as_short_as_it_promises(page, most):
    words = re.sub(r"<!--.*?-->", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL).split()
    assert len(words) <= most


def test_a_table_of_two_softwares_says_both(code, monkeypatch):
    rows = code["bench"].times("rows").copy()
    rows.loc[rows.index[-1], ["torch", "triton"]] = "2.99.0", "3.99.0"
    tables = {"rows": rows}
    times = code["bench"].times
    monkeypatch.setattr(code["bench"], "times", lambda section: tables.get(section, times(section)))
    said = code["bench"].texts()["kernel_software"]
    first, second = said.split("; ")
    assert first.startswith("PyTorch 2.1") and second == "PyTorch 2.99.0, Triton 3.99.0"
