"""What the page of findings says of learning rates, of warm-up and of shorter runs is what the shipped runs say."""

from __future__ import annotations

import pandas as pd
import pytest
from quoted_numbers import FINDINGS, PLAIN, README, ROOT, SMALL_GAIN, quoted

import normlab
from normlab.analysis import claims, rates
from normlab.analysis.compare import compare
from normlab.analysis.selection import choose, title_of


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / "runs")


def test_what_the_finals_say_of_the_searchs_rates(runs: pd.DataFrame):
    found = rates.finals(*(normlab.load_runs(ROOT / "data" / "runs" / name) for name in ("search", "finals")))
    losses = found.set_index(["depth", "scheme", "lr"]).loc[4]
    for scheme, low, high, pattern in (
        (
            "BHyT*",
            0.004,
            0.016,
            r"BHyT\*'s loss at 0\.004 is NUMBER and at 0\.016 NUMBER, after 6\.1M NUMBER and NUMBER",
        ),
        ("Pre-LN", 0.004, 0.008, r"Pre-LN's at 0\.004 and 0\.008 are NUMBER and NUMBER, after 6\.1M NUMBER and NUMBER"),
        ("LNS", 0.004, 0.008, r"LNS's are NUMBER and NUMBER, after 6\.1M NUMBER and NUMBER"),
    ):
        expected = [losses.loc[(scheme, lr), column] for column in losses for lr in (low, high)]
        assert [float(text) for text in quoted(pattern)] == [round(value, 2) for value in expected]
    best = found.loc[found.groupby(["scheme", "depth"])["loss_full"].idxmin()].set_index(["scheme", "depth"])["lr"]
    sixteen = found[(found["depth"] == 16) & (found["scheme"] == "BHyT")].set_index("lr")
    pattern = r"depth 16 BHyT's losses at 0\.016 and 0\.032 are NUMBER and NUMBER, after 6\.1M NUMBER and NUMBER"
    assert quoted(pattern) == [
        f"{value:.2f}" for column in sixteen[["loss_short", "loss_full"]] for value in sixteen[column]
    ]
    reported = runs.groupby(["scheme", "depth"], observed=True)["lr"].unique()
    assert sixteen["loss_full"].idxmin() == 0.016 and list(reported["bhyt", 16]) == [0.016]
    for scheme in (*SMALL_GAIN, *PLAIN):
        assert all(list(reported[scheme, depth]) == [best[title_of(scheme), 4]] for depth in (4, 8)), scheme


def test_what_the_search_says_of_rates_and_tokens(runs: pd.DataFrame):
    paths = normlab.runs.find_runs(ROOT / "data" / "runs" / "search")
    manifests = [normlab.runs.read_run(path).manifest for path in paths]
    found = {
        (m["config"]["scheme"], m["config"]["lr"]): m["eval_loss"] for m in manifests if m["config"]["depth"] == 16
    }
    for sentence, difference in (
        (r"the same 0\.004 it is NUMBER ahead", found["pre_rmsnorm", 0.004] - found["lns", 0.004]),
        ("at its own best, 0.008, by NUMBER", found["pre_rmsnorm", 0.004] - found["lns", 0.008]),
        ("at 0.008 is NUMBER worse than at 0.004", found["pre_rmsnorm", 0.008] - found["pre_rmsnorm", 0.004]),
    ):
        assert quoted(sentence) == [f"{difference:.2f}"]
    for scheme, rate in (("pre_rmsnorm", 0.004), ("lns", 0.008)):
        assert min((loss, lr) for (name, lr), loss in found.items() if name == scheme)[1] == rate
    finals = rates.finals(*(normlab.load_runs(ROOT / "data" / "runs" / name) for name in ("search", "finals")))
    plain = finals[(finals["scheme"] == "Pre-LN") & (finals["depth"] == 4)].set_index("lr")
    shrunk = [plain.loc[0.008, column] - plain.loc[0.004, column] for column in ("loss_short", "loss_full")]
    assert quoted("such a gap shrank from NUMBER to NUMBER at full length") == [f"{gap:.2f}" for gap in shrunk]
    fewer = claims.by_tokens(rates.settled(normlab.load_runs(ROOT / "data" / "runs" / "search")), runs)
    gains = fewer.set_index(["scheme", "tokens"])["gain"]
    worse, better, small = quoted(
        "16 layers are NUMBER nats worse than 4 for Pre-LN, and NUMBER better for LNS and NUMBER for BHyT"
    )
    least = fewer["tokens"].min()
    assert f"({least / 1e6:.1f}M; the" in FINDINGS and round(fewer["tokens"].max() / least) == 3
    assert (float(worse), float(better)) == (round(-gains["Pre-LN", least], 2), round(gains["LNS", least], 2))
    assert float(small) == round(gains["BHyT", least], 2)
    assert gains["Pre-LN", least] <= 0 and "a third of the tokens Pre-LN had gained nothing" in README


def test_what_the_search_found(runs: pd.DataFrame):
    search = rates.settled(normlab.load_runs(ROOT / "data" / "runs" / "search"))
    found = choose(search, depth=None).runs.set_index(["scheme", "depth"])
    assert f"rate; {search['tokens'].max() / 1e6:.1f}M tokens" in FINDINGS
    for scheme in found.index.get_level_values("scheme").unique():
        rows = [found.loc[scheme, depth] if (scheme, depth) in found.index else None for depth in (4, 16)]
        cells = ["" if row is None else f"{row['eval_loss']:.2f} ({row['lr']:g})" for row in rows]
        assert f"| {title_of(scheme)} | {' | '.join(cells)} |".replace("  ", " ") in FINDINGS, scheme
    assert len(found.xs(4, level="depth")) == 11 and len(found.xs(16, level="depth")) == 6
    small = list(SMALL_GAIN)
    sixteen = found["eval_loss"].xs(16, level="depth")
    assert sixteen[small].max() < sixteen["pre_rmsnorm"]
    behind = [compare(runs, scheme, "pre_rmsnorm", "loss", depth=16)["estimate"].item() for scheme in small]
    assert min(behind) > 0 and "are ahead of Pre-LN at 16 layers; after 6.1M they are behind." in FINDINGS


def test_what_a_longer_warm_up_does_for_post_ln(runs: pd.DataFrame):
    paths = normlab.runs.find_runs(ROOT / "data" / "runs" / "search")
    manifests = [normlab.runs.read_run(path).manifest for path in paths]
    shallow = [(m["config"], m["eval_loss"]) for m in manifests if m["config"]["depth"] == 4]
    own = {(c["warmup"], c["lr"]): loss for c, loss in shallow if c["scheme"] == "post_rmsnorm"}
    short = quoted(
        r"is warm-up \(NUMBER, NUMBER and NUMBER; the frequencies of tokens alone give NUMBER\), and NUMBER at"
    )
    (entropy,) = {m["corpus"]["unigram_entropy"] for m in manifests}
    first = [own[0.1, 0.002], own[0.1, 0.004], own[0.1, 0.008], entropy, own[0.1, 0.001]]
    assert short == [f"{value:.2f}" for value in first] and min(first[:3]) > entropy - 0.05
    longer = quoted("three tenths its losses there are NUMBER, NUMBER and NUMBER: after")
    assert longer == [f"{own[0.3, lr]:.2f}" for lr in (0.002, 0.004, 0.008)]
    whole = runs[(runs["depth"] == 4) & (runs["seed"] == 0)]
    ends = choose(whole, depth=4).runs.set_index("scheme")["eval_loss"]
    pattern = "it ends at NUMBER .one seed., and Pre-LN by the same seed at NUMBER; Peri-LN ends at NUMBER and "
    others = ("peri_ln", "mix_ln")
    assert quoted(pattern + "Mix-LN at NUMBER") == [
        f"{ends[scheme]:.2f}" for scheme in ("post_rmsnorm", "pre_rmsnorm", *others)
    ]
    manifest = normlab.runs.read_run(next((ROOT / "data" / "runs").glob("post_rmsnorm-d4-*"))).manifest
    assert (manifest["config"]["warmup"], manifest["config"]["lr"]) == (0.3, 0.004) and ends["post_rmsnorm"] > ends[
        "pre_rmsnorm"
    ]
    assert own[0.3, 0.004] < min(loss for c, loss in shallow if c["scheme"] != "post_rmsnorm")


def test_what_a_longer_warm_up_does_for_dyt(runs: pd.DataFrame):
    paths = normlab.runs.find_runs(ROOT / "data" / "runs" / "search")
    configs = [(m["config"], m["eval_loss"]) for m in (normlab.runs.read_run(path).manifest for path in paths)]
    own = {(c["model"].get("alpha0", 1), c["warmup"], c["lr"]): loss for c, loss in configs if c["scheme"] == "dyt"}
    assert min(own, key=lambda tried: own[tried]) == (1, 0.3, 0.002)
    tenth = quoted(
        r"with a tenth of warm-up it comes to NUMBER \(NUMBER if alpha starts at 0\.5 in place of 1, and NUMBER, "
        r"NUMBER and NUMBER at 0\.25, 2 and 4\)"
    )
    assert tenth == [f"{own[alpha, 0.1, 0.002]:.2f}" for alpha in (1, 0.5, 0.25, 2, 4)]
    assert quoted("three tenths to NUMBER; at 0.001") == [f"{own[1, 0.3, 0.002]:.2f}"]
    rest = quoted("at 0.001 and 0.004 to NUMBER and NUMBER, with three tenths to NUMBER and NUMBER")
    assert rest == [f"{own[1, warmup, lr]:.2f}" for warmup in (0.1, 0.3) for lr in (0.001, 0.004)]
    ends = choose(runs, depth=4).runs.set_index("scheme").loc["dyt"]
    manifest = normlab.runs.read_run(next((ROOT / "data" / "runs").glob("dyt-d4-*"))).manifest
    assert (manifest["config"]["warmup"], manifest["config"]["lr"], manifest["config"]["model"]) == (0.3, 0.002, {})
    found = quoted(r"DyT asks for more: .* At full length it ends at NUMBER .one seed., below the trigram's NUMBER\.")
    assert found == [f"{ends['eval_loss']:.2f}", f"{ends['trigram_loss']:.2f}"]
    assert ends["eval_loss"] < ends["trigram_loss"]
