"""The papers' questions, asked of tables whose answers are known: against scipy and by hand."""

import numpy as np
import pandas as pd
import pytest
from figures_helpers import MEAN_OF_SEEDS, activation, one_run, table
from scipy import stats

from normlab.analysis import claims
from normlab.analysis.selection import choose, deepest, fully_tried
from normlab.errors import NormlabError
from normlab.probes.metrics import metric_row

SCHEMES = ("pre_rmsnorm", "lns", "bhyt")


def with_losses(losses: dict[tuple[str, int, int], float], trigram: float | None = None) -> pd.DataFrame:
    """A table of runs whose final held-out losses are these, by scheme, depth and seed."""
    depths, seeds = (sorted({key[place] for key in losses}) for place in (1, 2))
    runs = table(SCHEMES, depths, seeds)
    last = (runs["metric"] == "loss") & (runs["split"] == "eval") & (runs["step"] == runs["step"].max())
    keys = zip(runs["scheme"], runs["depth"], runs["seed"], strict=True)
    runs["value"] = runs["value"].mask(last, pd.Series([losses[key] for key in keys], index=runs.index))
    if trigram is not None:
        rows = runs[runs["metric"] == "unigram_entropy"].assign(metric="trigram_loss", value=trigram)
        runs = pd.concat([runs, rows], ignore_index=True)
    return runs


@pytest.fixture(scope="module")
def losses() -> dict[tuple[str, int, int], float]:
    """Depth pays for LNS, costs for BHyT, and does nothing that matters for Pre-LN."""
    noise = np.random.default_rng(0).normal(0, 0.003, (3, 2, 3))
    better = {"pre_rmsnorm": 0.0, "lns": 0.1, "bhyt": -0.08}
    return {
        (scheme, depth, seed): 3.9 + noise[s, d, seed] - (better[scheme] if depth == 16 else 0.0)
        for s, scheme in enumerate(SCHEMES)
        for d, depth in enumerate((4, 16))
        for seed in range(3)
    }


def test_what_depth_buys_is_each_schemes_own_mean_with_its_own_interval(losses):
    found = claims.depth_gain(with_losses(losses)).set_index("a")
    gains = np.array([[losses[s, 4, k] - losses[s, 16, k] for k in range(3)] for s in SCHEMES])
    floor = sorted(gains.var(axis=1, ddof=1))[0]  # a quarter of three variances is none
    for scheme, own in zip(SCHEMES, gains, strict=True):
        row = found.loc[scheme]
        half = stats.t.ppf(0.975, 2) * np.sqrt(max(own.var(ddof=1), floor) / 3)
        assert (row["estimate"], row["low"], row["high"]) == pytest.approx(
            (own.mean(), own.mean() - half, own.mean() + half)
        )
        assert row["df"] == 2 and row["seeds"] == 3 and (row["shallow"], row["depth"]) == (4, 16)
    assert list(found.loc[list(SCHEMES), "verdict"]) == ["equivalent", "different", "different"]
    words = claims.shown(found.reset_index()).set_index("scheme")["verdict"]
    assert words["LNS"] == "above 0" and words["BHyT"] == "below 0"


def test_what_depth_buys_is_not_asked_of_runs_of_two_lengths():
    runs = pd.concat([one_run("lns", 4, seed) for seed in range(3)] + [one_run("lns", 8, 0, steps=(0, 20, 60))])
    with pytest.raises(NormlabError, match="lns was trained for 20 steps at depth 4 and for 60 steps at depth 8"):
        claims.depth_gain(runs)
    batches = table(("lns",), depths=(4, 8)).assign(tokens=lambda rows: rows["tokens"] * rows["depth"])
    with pytest.raises(NormlabError, match="for 8,000 tokens at depth 4 and for 16,000 tokens at depth 8"):
        claims.depth_gain(batches)
    with pytest.raises(NormlabError, match="of depths 4, 8 were trained for 8,000 to 16,000 tokens: keep those of one"):
        claims.losses(batches)
    diverged = table(("lns",), depths=(4, 8), seeds=(0,), statuses={("lns", 8): "diverged"})
    stopped = diverged[diverged["depth"].eq(4) | diverged["step"].le(10)]
    assert claims.losses(stopped)[8].tolist() == ["(diverged)"] and len(claims.depth_gain(stopped)) == 1


def test_a_depth_with_one_seed_is_compared_where_only_one_depth_has_several(losses):
    runs = with_losses(losses)
    found = claims.depth_gain(runs[(runs["depth"] == 4) | (runs["seed"] == 0)]).set_index("a")
    assert found.loc["lns", "estimate"] == pytest.approx(losses["lns", 4, 0] - losses["lns", 16, 0])
    assert set(found["seeds"]) == {1} and set(found["verdict"]) == {"undecided"}


def test_each_scheme_is_compared_at_its_own_deepest_depth_with_several_seeds(losses):
    runs = with_losses(losses | {(s, 8, k): 3.7 + 0.01 * k for s in SCHEMES for k in range(3)})
    there = (runs["depth"] == 4) | ((runs["depth"] == 8) & (runs["seed"] == 0))
    there |= (runs["depth"] == 16) & ((runs["scheme"] == "lns") & (runs["seed"] < 2) | (runs["scheme"] == "bhyt"))
    found = claims.depth_gain(runs[there]).set_index("a")
    assert found[["shallow", "depth", "seeds"]].loc[list(SCHEMES)].to_numpy().tolist() == [
        [4, 8, 1], [4, 16, 2], [4, 16, 3]
    ]  # fmt: skip
    gains = [losses["lns", 4, k] - losses["lns", 16, k] for k in range(2)]
    assert found.loc["lns", "estimate"] == pytest.approx(np.mean(gains)) and found.loc["lns", "df"] == 1
    assert set(claims.depth_gain(runs[there], 4, 8)["seeds"]) == {1}


def test_growth_is_the_geometric_mean_of_the_last_layer_over_the_first(losses):
    runs = table(SCHEMES, depths=(4, 8))
    found = claims.growth(runs).set_index(["a", "depth"])
    at = (
        runs[runs["metric"].eq("token_l2_mean") & runs["step"].eq(20)]
        .set_index(["scheme", "depth", "seed", "layer"])
        .sort_index()
    )
    for (scheme, depth), row in found.iterrows():
        value = at["value"].loc[scheme, depth]
        ratios = np.array([value.loc[seed, depth] / value.loc[seed, 1] for seed in range(3)])
        grown = [np.log(value.loc[seed] / value.loc[seed, 1]) for seed in range(3)]
        halves = np.array([np.interp((depth + 1) / 2, rise.index, rise) for rise in grown])
        assert row["estimate"] == pytest.approx(np.exp(np.log(ratios).mean()))
        assert row["first_half"] == pytest.approx((halves / np.log(ratios)).mean())
        steps = [[value.loc[seed, n + 1] - value.loc[seed, n] for n in range(depth)] for seed in range(3)]
        last = [value.loc[seed, depth] for seed in range(3)]
        assert row["one_block"] == pytest.approx(np.mean(np.max(steps, axis=1) / last))


def test_below_the_trigram_is_counted_and_a_diverged_run_is_not(losses):
    some = {key: value - (0.2 if key[0] == "lns" and key[2] else 0.0) for key, value in losses.items()}
    found = claims.learned(with_losses(some, trigram=3.75)).set_index(["scheme", "depth"])
    assert found.loc[("lns", 4), "below_trigram"] == 2 and found.loc[("pre_rmsnorm", 4), "below_trigram"] == 0
    assert found["seeds"].eq(3).all() and found["trigram_loss"].eq(3.75).all()
    assert claims.learned(with_losses(losses))["below_trigram"].eq(0).all(), "a run that does not know it is not below"


def skipping(cost: dict[str, list[float]]) -> pd.DataFrame:
    """skip_delta_loss by block, plus 0.01 a seed at the last block but one."""
    rows = [
        (scheme, len(blocks), seed, "skip_delta_loss", "block", layer, value + 0.01 * seed * (layer == len(blocks) - 1))
        for scheme, blocks in cost.items()
        for seed in range(3)
        for layer, value in enumerate(blocks, 1)
    ]
    return pd.DataFrame(rows, columns=["scheme", "depth", "seed", "metric", "part", "layer", "value"])


def test_depth_use_is_the_mean_cost_of_deep_blocks_and_their_share_without_the_first_and_the_last():
    costs = {"pre_rmsnorm": [9.0, 3.8, 0.1, 0.4, 0.1, 9.0], "bhyt": [9.0, 0.2, 0.3, 0.3, 0.4, 9.0]}
    found = claims.depth_use(skipping(costs), 6)
    row = found.set_index("a").loc["bhyt"]
    assert row["estimate"] == pytest.approx((0.3 + 0.4 + 0.01) / 2)  # seeds 0 to 2 add 0.01 in the mean
    assert row["share"] == pytest.approx(np.mean([(0.7 + 0.01 * k) / (1.2 + 0.01 * k) for k in range(3)]))
    second_counts_most = found.set_index("a").loc["pre_rmsnorm"]
    rest = [(0.5 + 0.01 * k) / (0.6 + 0.01 * k) for k in range(3)]
    assert second_counts_most["share"] < 0.13 and second_counts_most["share_rest"] == pytest.approx(np.mean(rest))
    with pytest.raises(NormlabError, match="no run of depth 8"):
        claims.depth_use(skipping({"bhyt": [0.2, 0.3]}), 8)
    with pytest.raises(NormlabError, match="a deep block needs a model of 3 blocks or more: these have 2"):
        claims.depth_use(skipping({"bhyt": [0.2, 0.3]}), 2)
    two_rates = [skipping({"bhyt": [0.2, 0.3, 0.4]}).assign(lr=lr, run=f"run-{lr}") for lr in (0.002, 0.004)]
    with pytest.raises(NormlabError, match="keep the rows of one learning rate"):
        claims.depth_use(pd.concat(two_rates), 3)
    deeper = skipping({"bhyt": [0.2] * 6})
    both = pd.concat([deeper, *(skipping({name: [0.2, 0.3, 0.4, 0.5]}) for name in ("bhyt", "lns"))])
    assert set(claims.depth_use(both)["depth"]) == {4} and set(claims.depth_use(deeper)["depth"]) == {6}
    lns = claims.depth_use(both, 4).set_index("a").loc["lns"]  # of several tables, whose indices repeat
    assert lns["share"] > 0.5 and lns["share_rest"] == 0

    apart = skipping({"lns": [0.2, 0.3, 0.1, 9], "bhyt": [0.1, 0.2, 0.4, 9], "dyt": [0.1, 0.2, 0.2, 9]})
    noise = {("lns", 0): 0.03, ("bhyt", 1): 0.02, ("dyt", 2): 0.01}
    apart["value"] += [noise.get((row.scheme, row.seed), 0.0) * (row.layer == 3) for row in apart.itertuples()]
    gap = claims.depth_use(apart, 4, reference="lns").set_index("a").loc["bhyt"]
    deep = apart[apart["layer"] == 3].pivot_table(index="seed", columns="scheme", values="value", observed=True)
    spreads = [(deep[a] - deep[b]).var() for a, b in (("bhyt", "lns"), ("bhyt", "dyt"), ("lns", "dyt"))]
    half = stats.t.ppf(0.975, 2) * np.sqrt(max(spreads[0], sorted(spreads)[0]) / 3)
    assert (gap["estimate"], gap["high"]) == pytest.approx(
        [deep.mean()["bhyt"] - deep.mean()["lns"], gap["estimate"] + half]
    )
    assert list(claims.shown(claims.depth_use(apart, 4, reference="lns"))["against"]) == ["LNS"] * 2


def test_depth_use_is_not_of_runs_of_several_widths_lengths_or_recipes():
    alike = skipping({"lns": [0.1, 0.3, 0.1], "bhyt": [0.1, 0.2, 0.4]}).assign(width=16, recipe="steps=20 batch_size=8")
    is_lns = alike["scheme"] == "lns"

    def changed(**fields: object) -> pd.DataFrame:
        return alike.assign(**{name: alike[name].mask(is_lns, value) for name, value in fields.items()})

    for reference in (None, "bhyt"):
        assert claims.depth_use(alike, 3, reference=reference).attrs["about"] == ""
        with pytest.raises(NormlabError, match="widths 16, 32: keep those of one"):
            claims.depth_use(changed(width=32), 3, reference=reference)
        with pytest.raises(NormlabError, match="depth 3 were trained for 20 to 60 steps: keep those of one length"):
            claims.depth_use(changed(recipe="steps=60 batch_size=8"), 3, reference=reference)
        with pytest.raises(NormlabError, match="were trained for 640 to 1,280 tokens"):
            both = changed(recipe="steps=20 batch_size=8 block_length=8")
            both["recipe"] = both["recipe"].where(is_lns, "steps=20 batch_size=8 block_length=4")
            claims.depth_use(both, 3, reference=reference)
        said = claims.depth_use(changed(recipe="steps=20 batch_size=8 warmup=0.3"), 3, reference=reference)
        assert said.attrs["about"] == "", "what one lacks is not compared"
    warm = alike.assign(recipe=alike["recipe"] + " warmup=" + is_lns.map({True: "0.3", False: "0.1"}))
    assert claims.depth_use(warm, 3).attrs["about"] == "trained differently: warmup 0.1 and 0.3 (LNS)"
    seeds = alike.assign(recipe=alike["recipe"] + " warmup=" + alike["seed"].map({0: "0.1", 1: "0.1", 2: "0.5"}))
    with pytest.raises(NormlabError, match=r"Seeds of bhyt at depth 3 .* differently \(warmup 0.1 and 0.5\): keep"):
        claims.depth_use(seeds, 3)
    with pytest.raises(NormlabError, match="^no run has skip_delta_loss of block$"):
        claims.depth_use(alike[:0])


def test_depth_use_is_not_of_seeds_at_several_rates_nor_of_runs_that_were_stopped_or_read_another_text():
    alike = skipping({"lns": [0.1, 0.3, 0.1], "bhyt": [0.1, 0.2, 0.4]}).assign(lr=0.004, recipe="steps=20 batch_size=8")
    alike = alike.assign(steps=20.0, tokens=160.0, unigram_entropy=6.0, bigram_loss=4.6, trigram_loss=float("nan"))
    is_lns = alike["scheme"] == "lns"
    assert len(claims.depth_use(alike, 3)) == 2
    for field, value, message in (
        ("steps", 10.0, "were trained for 10 to 20 steps: keep those of one length"),
        ("tokens", 80.0, "were trained for 80 to 160 tokens: keep those of one length"),
        ("bigram_loss", 4.7, r"measured on 2 texts or in other tokens \(bigram_loss 4.600, 4.700\): keep those of one"),
    ):
        for some in (is_lns, alike["seed"] == 0):
            with pytest.raises(NormlabError, match=message):
                claims.depth_use(alike.assign(**{field: alike[field].mask(some, value)}), 3)
    rates = alike.assign(lr=alike["lr"].mask(alike["seed"] == 2, 0.002))
    with pytest.raises(NormlabError, match="Seeds of bhyt at depth 3 were trained at learning rates 0.002 and 0.004"):
        claims.depth_use(rates, 3, reference="bhyt")
    own = alike.assign(lr=alike["lr"].mask(is_lns, 0.002))
    assert len(claims.depth_use(own, 3)) == 2, "a rate per scheme"


def test_the_deepest_depth_at_which_schemes_can_be_compared():
    runs = pd.concat(
        [
            skipping(dict.fromkeys(["lns", "bhyt", "dyt", "peri_ln"][:many], [0.1] * depth))
            for depth, many in ((2, 4), (4, 3), (8, 2))
        ]
    )
    assert deepest(runs) == 4 and deepest(runs[runs["depth"] < 4]) == 2
    more = [runs[runs["depth"] == 2].assign(scheme=lambda own, i=i: own["scheme"] + str(i)) for i in range(2)]
    assert deepest(pd.concat([runs[runs["depth"] > 2], *more])) == 2, "three of eight schemes are a sweep just begun"
    assert deepest(runs[runs["scheme"] == "lns"]) == 8
    shallow = pd.concat([runs[runs["depth"] == 2].assign(seed=seed) for seed in range(7)])
    assert deepest(pd.concat([runs, shallow])) == 2, "three seeds of seven"
    assert deepest(pd.concat([runs, shallow.query("seed < 6")])) == 4
    repeated = shallow[shallow["scheme"] == "lns"]
    assert deepest(pd.concat([runs, repeated])) == 4, "a scheme that was repeated moves no depth"


def test_figures_and_claims_take_the_same_depth():
    runs = pd.concat([table(depths=(2,)), table(SCHEMES, depths=(4,))])
    assert deepest(runs) == 4 == choose(runs).depths[0], "three schemes of five"
    begun = pd.concat([runs, table(depths=(8,), seeds=(0,))])
    assert deepest(begun) == 4 == choose(begun).depths[0], "one seed of three"
    wide = table(SCHEMES, depths=(8,)).assign(width=32, run=lambda rows: rows["run"] + "-wide")
    lower = claims.Claim("LNS is smaller", "lns", "pre_rmsnorm", "token_l2_mean", "below")
    assert choose(pd.concat([runs, wide])).depths == [4], "at the width of most runs"
    assert claims.tested(pd.concat([runs, wide]), [lower]).index.name == "at 4 blocks"
    assert "after 4 blocks" in claims.apart(pd.concat([runs, wide]))


def test_one_seed_gives_an_estimate_and_no_interval():
    found = claims.depth_use(skipping({"bhyt": [0.1, 0.2, 0.3]}).query("seed == 0"), 3)
    assert found["low"].isna().all()
    assert claims.shown(found)["95% interval"].tolist() == ["none"]
    assert claims.shown(found)["verdict"].str.startswith("undecided").all()


def test_questions_that_the_runs_cannot_answer_say_so():
    with pytest.raises(NormlabError, match="no scheme was run at depths 2 and 2"):
        claims.depth_gain(table(SCHEMES, depths=(2,)), 2, 2)
    assert claims.depth_gain(table(SCHEMES, depths=(2,))).empty
    assert "nothing to compare" in claims.shown(claims.depth_gain(table(SCHEMES, depths=(2,))))["verdict"][0]


def test_the_extremes_are_the_geometric_means_of_the_last_layer():
    found = claims.extremes(table(SCHEMES, depths=(2, 4)))
    assert found[["depth", "when"]].to_numpy().tolist() == [
        [2, "before training"], [2, "after training"], [4, "before training"], [4, "after training"]
    ]  # fmt: skip
    last = {name: activation(name, 4, 20) * MEAN_OF_SEEDS for name in SCHEMES}
    row = found.iloc[3]
    assert row["largest"] == f"Pre-LN {last['pre_rmsnorm']:.3g}" and row["smallest"] == f"BHyT {last['bhyt']:.3g}"
    assert row["factor"] == pytest.approx(last["pre_rmsnorm"] / last["bhyt"], abs=0.01)
    assert claims.extremes(table(("lns",))).empty, "one scheme is neither"
    assert claims.apart(table(("lns",))) == ""
    deep = found[found["depth"] == 4]
    runs = table(SCHEMES, depths=(2, 4))
    said = claims.apart(runs)
    assert "stream after 4 blocks" in said and said.endswith("Learning rate: 0.001.")
    written = "{0.factor:.1f} times the smallest ({0.largest}, {0.smallest}".format
    assert all(written(row) in said for row in deep.itertuples())
    assert claims.apart(table(SCHEMES[:2], depths=(4,), statuses={("lns", 4): "diverged"})) == ""
    poor = claims.apart(table(SCHEMES, depths=(4,), statuses={("pre_rmsnorm", 4): "not_learned"}))
    assert "Pre-LN" not in poor.split("Left out")[0] and poor.endswith("as not every seed has learned: Pre-LN.")
    alike = table(SCHEMES[:2], depths=(4,))
    alike.loc[alike["metric"] == "token_l2_mean", "value"] = 2.0
    assert "is 1.0 times the smallest (LNS 2, Pre-LN 2;" in claims.apart(alike), "two schemes, though they tie"
    runs.loc[runs["scheme"] == "lns", "lr"] *= 2
    assert "0.002 (LNS), so the ratio after training is not the effect of normalization alone" in claims.apart(runs)


def test_claims_hold_do_not_hold_or_cannot_be_decided(losses):
    losses = losses | {(scheme, depth, 3): losses[scheme, depth, 0] for scheme in SCHEMES for depth in (4, 16)}
    runs = with_losses(losses)
    lower = claims.Claim("LNS is lower", "lns", "pre_rmsnorm", "loss", "below")
    asked = [
        lower,
        lower._replace(says="LNS is higher", direction="above"),
        lower._replace(says="LNS is alike", direction="alike"),
        claims.Claim("Pre-LN grows", "pre_rmsnorm", None, "growth", "above"),
        claims.Claim("Pre-LN's control", "rmsnorm_gain", "pre_rmsnorm", "loss", "below"),
        claims.Claim("no such layer", "lns", "pre_rmsnorm", "deep_cost", "below"),
    ]
    table = claims.tested(runs, asked, depth=16)
    says = table["says"].to_dict()
    assert [says[claim.says] for claim in asked[:5]] == ["holds", *["does not hold"] * 2, "holds", "not run"]
    assert "does not say where its runs are" in says["no such layer"]
    gap = np.mean([losses["lns", 16, k] - losses["pre_rmsnorm", 16, k] for k in range(4)])
    assert table.loc["LNS is lower", "ours"].startswith(f"{gap:+.3f} [") and table.index.name == "at 16 blocks"
    grown = np.exp(np.log(activation("pre_rmsnorm", 16, 20) / activation("pre_rmsnorm", 1, 20)))
    assert table.loc["Pre-LN grows", "ours"].startswith(f"×{grown:.2f} [")
    said = claims.sentence(table)
    assert said.startswith("“LNS is lower”: holds (")
    assert said.endswith("Of 6 claims 2 hold and 2 do not; 2 cannot be decided here.")
    alike = claims.tested(runs, [lower._replace(direction="alike")], depth=4)
    assert alike["says"].tolist() == ["holds"], "noise of 0.003 nats"


def test_one_seed_says_whether_it_is_as_claimed_and_decides_nothing():
    lower = claims.Claim("LNS is smaller", "lns", "pre_rmsnorm", "token_l2_mean", "below")
    asked = [lower, lower._replace(says="LNS is larger", direction="above")]
    runs = table(SCHEMES, seeds=(0,))
    found = claims.tested(runs, asked)
    assert found["says"].tolist() == ["as claimed, one seed", "not as claimed, one seed"]
    assert set(found["seeds"]) == {1} and not found["ours"].str.contains("[", regex=False).any()
    said = claims.sentence(claims.tested(runs, [*asked, lower._replace(says="DyT", b="dyt")]))
    assert said.endswith("Of 3 claims 1 is as claimed and 1 is not, by one seed; 1 cannot be decided here.")
    not_run = claims.tested(runs, [lower._replace(b="dyt")])
    assert not_run["says"].tolist() == ["not run"]
    assert claims.sentence(not_run).endswith("Of 1 claim none can be decided here.")
    assert claims.sentence(claims.tested(runs, asked[1:])).endswith("Of 1 claim 1 is not as claimed, by one seed.")


def test_one_seed_within_the_margin_is_level_which_is_what_alike_claims():
    """0.02 nats, and 10% of a size: as the table of docs/papers.md says of the same numbers."""
    runs = table(SCHEMES[:2], (4,), (0,))
    end = runs["scheme"].eq("lns") & runs["split"].eq("eval") & runs["metric"].eq("loss")
    lower = claims.Claim("lower", "lns", "pre_rmsnorm", "loss", "below")
    asked = [lower, *(lower._replace(says=word, direction=word) for word in ("above", "alike"))]
    of = "as claimed, one seed"
    for gap, says in ((0.019, ["level, one seed"] * 2 + [of]), (0.021, [f"not {of}", of, f"not {of}"])):
        level = runs["value"][runs["scheme"].eq("pre_rmsnorm") & runs["split"].eq("eval") & runs["metric"].eq("loss")]
        found = claims.tested(runs.assign(value=runs["value"].mask(end, level.iloc[-1] + gap)), asked)
        assert found["says"].tolist() == says
    smaller = lower._replace(quantity="token_l2_mean")
    size = runs["metric"].eq("token_l2_mean") & runs["scheme"].eq("lns")
    ratio = activation("lns", 4, 20) / activation("pre_rmsnorm", 4, 20)
    for near, says in ((0.92, "level"), (0.90, "as claimed")):
        made = runs.assign(value=runs["value"].where(~size, runs["value"] * near / ratio))
        assert claims.tested(made, [smaller])["says"].tolist() == [f"{says}, one seed"]
    entropy = metric_row("attention_entropy")  # no loss, no size
    runs = runs[runs["metric"] == "token_l2_mean"].assign(metric=entropy.name, site=entropy.default_site)
    alike = lower._replace(quantity=entropy.name, direction="alike")
    assert claims.tested(runs, [alike])["says"].tolist() == ["one seed: no margin"]


def test_a_sentence_counts_every_outcome_in_one_way():
    says = ["holds", "does not hold", *["as claimed, one seed"] * 2, "not as claimed, one seed", "level, one seed"]
    made = pd.DataFrame({"says": [*says, "undecided"], "ours": "", "rates": "", "seeds": [4, 4, 1, 1, 1, 1, 4]})
    made = made.rename_axis("at 8 blocks")

    def said(of: pd.DataFrame) -> str:
        return claims.sentence(of).partition(" claims ")[2]

    counted = "2 are as claimed, 1 is not and 1 is level, by one seed; 1 cannot be decided here."
    assert said(made) == f"1 holds and 1 does not; {counted}"
    assert said(made[1:]) == f"1 does not hold; {counted}"
    assert said(made[4:6]) == "1 is not as claimed and 1 is level, by one seed."
    of_few = said(made[2:5].assign(seeds=[1, 2, 3]))
    assert of_few == "2 are as claimed and 1 is not, by 1 to 3 seeds of the 4 it takes."


def test_fewer_seeds_than_a_claim_needs_say_whether_it_is_as_claimed_and_how_many_there_are():
    smaller = claims.Claim("LNS is smaller", "lns", "pre_rmsnorm", "token_l2_mean", "below")
    asked = [smaller, smaller._replace(says="larger", direction="above"), smaller._replace(says="x", direction="alike")]
    for seeds in (2, 3):
        found = claims.tested(table(SCHEMES[:2], (4,), range(seeds)), asked)
        of = f"{seeds} seeds (a claim needs 4)"
        assert found["says"].tolist() == [f"as claimed, {of}", *[f"not as claimed, {of}"] * 2]
        assert not found["ours"].str.contains("[", regex=False).any()
        said = f"Of 3 claims 1 is as claimed and 2 are not, by {seeds} seeds of the 4 it takes."
        assert claims.sentence(found).endswith(said)
    assert claims.tested(table(SCHEMES[:2], (4,), range(4)), asked[:1])["says"].tolist() == ["holds"]


def test_claims_of_fewer_seeds_take_no_part_in_the_correction_for_many():
    runs = table(SCHEMES, (4,), range(4))
    lower = claims.Claim("LNS is lower", "lns", "pre_rmsnorm", "loss", "below")
    of_lns = runs["scheme"].eq("lns") & runs["metric"].eq("loss")
    runs.loc[of_lns, "value"] -= 0.01 * runs.loc[of_lns, "seed"]  # not by the same amount in each
    few = [lower._replace(says=f"DyT {number}", a="dyt") for number in range(20)]
    alone = claims.tested(runs, [lower])
    beside = claims.tested(runs[(runs["scheme"] != "dyt") | (runs["seed"] < 3)], [lower, *few])
    assert beside.loc[lower.says].to_dict() == alone.loc[lower.says].to_dict()


def test_what_has_no_effect_at_all_is_level_either_way():
    runs = table(SCHEMES[:1], (1,), (0,))  # after one block, the last one is the first
    grown = claims.Claim("Pre-LN grows", "pre_rmsnorm", None, "growth", "above")
    found = claims.tested(runs, [grown, grown._replace(says="shrinks", direction="below")])
    assert found["ours"].tolist() == ["×1.00"] * 2 and found["says"].tolist() == ["level, one seed"] * 2


def test_a_sentence_on_claims_says_what_the_schemes_were_trained_differently_in():
    runs = table(SCHEMES, depths=(4,)).assign(recipe="steps=20 warmup=0.1")
    runs.loc[runs["scheme"] != "pre_rmsnorm", "recipe"] = "steps=20 warmup=0.3"
    smaller = claims.Claim("LNS is smaller", "lns", "pre_rmsnorm", "token_l2_mean", "below")
    found = claims.tested(runs, [smaller, smaller._replace(says="DyT", a="dyt")])
    assert found.attrs["about"] == "trained differently: warmup 0.1 and 0.3 (LNS)"
    assert claims.sentence(found).endswith(" Trained differently: warmup 0.1 and 0.3 (LNS).")
    assert claims.tested(runs, [smaller._replace(a="bhyt", b="lns")]).attrs["about"] == ""


def test_why_there_is_no_number_is_what_happened():
    lower = claims.Claim("LNS is lower", "lns", "pre_rmsnorm", "loss", "below")
    runs = table(SCHEMES, depths=(4,), statuses={("lns", 4): "diverged"})
    assert claims.tested(runs, [lower])["says"].tolist() == ["a run diverged"]
    apart = pd.concat([table(("lns",), (4,), (0,)), table(("pre_rmsnorm",), (4,), (1,))], ignore_index=True)
    assert claims.tested(apart, [lower])["says"].tolist() == ["no seed in common"]
    bare = table(SCHEMES, depths=(4,)).query("metric != 'token_l2_mean' or layer != 1")
    grown = claims.Claim("Pre-LN grows", "pre_rmsnorm", None, "growth", "above")
    assert claims.tested(bare, [grown])["says"].tolist() == ["not measured"]
    beside = pd.concat([bare, one_run("pre_rmsnorm", lr=1e-2, status="diverged")], ignore_index=True)
    assert claims.tested(beside, [grown])["says"].tolist() == ["not measured"], "at a rate that is not compared"
    other = [one_run(name, lr=2e-2) for name in ("lns", "pre_rmsnorm")]
    seeds = [one_run("lns", seed=seed) for seed in (2, 3)] + [one_run("pre_rmsnorm", seed=seed) for seed in (0, 1)]
    seeds = pd.concat([*other, *seeds], ignore_index=True)
    assert claims.tested(seeds, [lower])["says"].tolist() == ["no seed in common"], "they have one at another rate"
    deep = lower._replace(quantity="deep_cost")
    (said,) = claims.tested(table(SCHEMES, depths=(2,)), [deep])["says"]
    assert said == "deep_cost needs a model of 3 blocks or more: these have at most 2"
    runs = table(SCHEMES, depths=(4,), seeds=range(4))
    runs.loc[runs["scheme"] == "lns", "width"] = 32
    wide = grown._replace(says="LNS grows", a="lns")
    found = claims.tested(runs, [wide, lower, grown])
    assert found["says"].tolist() == ["not run at width 16", "not run at width 16", "holds"]
    assert claims.sentence(found).startswith("“Pre-LN grows”: holds")


def test_a_scheme_that_was_tried_at_fewer_rates_is_left_out_and_not_called_not_run():
    grid = [one_run("pre_rmsnorm", lr=lr) for lr in (1e-3, 2e-3, 4e-3)]
    runs = fully_tried(pd.concat([*grid, one_run("lns", lr=2e-3), one_run("lns", 8, lr=2e-3)], ignore_index=True))
    lower = claims.Claim("LNS is lower", "lns", "pre_rmsnorm", "loss", "below")
    grown = claims.Claim("Pre-LN grows", "pre_rmsnorm", None, "growth", "above")
    found = claims.tested(runs, [lower, lower._replace(says="DyT", a="dyt"), grown], depth=4)
    reason = "left out: LNS was tried at 1 learning rate, Pre-LN at 3"
    assert found["says"].tolist() == [reason, "not run", "as claimed, one seed"]
    assert claims.sentence(found).startswith("“Pre-LN grows”: as claimed")
    assert claims.tested(runs, [lower], depth=8)["says"].tolist() == ["not run"], "Pre-LN, at that depth"


def test_losses_stand_by_scheme_and_depth_with_what_must_be_known_of_them():
    runs = table(SCHEMES, depths=(2, 4), statuses={("lns", 4): "not_learned"})
    shown = claims.losses(runs)
    assert list(shown.columns) == [2, 4] and list(shown.index) == ["Pre-LN", "LNS", "BHyT"]
    assert shown.loc["BHyT", 4] == "4.500" and shown.loc["LNS", 4] == "7.000 (not learned)"
    runs.loc[runs["scheme"] == "lns", "lr"] *= 2
    shown = claims.losses(runs[(runs["scheme"] != "bhyt") | (runs["depth"] == 2)])
    assert shown.loc["BHyT", 4] == "" and "learning rate" in shown.loc["LNS", 4]
