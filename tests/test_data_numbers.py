"""The numbers that data/README.md quotes are those of the shipped files."""

from __future__ import annotations

import json
import re

import pandas as pd
from quoted_numbers import FINDINGS, NUMBER, README, ROOT

import normlab
from normlab import runs as runs_folder

ALL_BUT_RANK, LENS = "all forward metrics but effective rank", "TransformerLens run_with_cache"


def test_which_text_the_pilot_chose():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    ahead = {}
    manifests = [normlab.runs.read_run(path).manifest for path in normlab.runs.find_runs(ROOT / "data" / "pilot")]
    for corpus in ("stdlib", "english"):
        own = {m["config"]["depth"]: m for m in manifests if m["config"]["corpus"] == corpus}
        (found,) = re.findall(rf"\| `{corpus}` \| {NUMBER} \| {NUMBER} \| {NUMBER} \| {NUMBER} \|", text)
        values = [own[4]["eval_loss"], own[16]["eval_loss"], own[4]["trigram_loss"], own[4]["bigram_loss"]]
        assert list(map(float, found)) == [round(value, 3) for value in values]
        assert own[4]["trigram_loss"] == own[16]["trigram_loss"]
        ahead[corpus] = [own[depth]["trigram_loss"] - own[depth]["eval_loss"] for depth in (4, 16)]
    assert all(round(gap, 2) in (0.12, 0.13) for gap in ahead["stdlib"]) and max(ahead["english"]) < 0


def test_the_hours_that_the_sweep_took():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    paths = [path for folder in ("runs", "other_rates") for path in (ROOT / "data" / folder).rglob("manifest.json")]
    manifests = [json.loads(path.read_bytes()) for path in paths]
    hours = sum(manifest["measured"]["wall_s"] for manifest in manifests) / 3600
    fastest: dict[tuple[int, ...], float] = {}  # of those that were not interrupted
    shapes = [tuple(m["config"][name] for name in ("depth", "steps", "experiment_blocks")) for m in manifests]
    for shape, manifest in zip(shapes, manifests, strict=True):
        if not manifest["measured"]["resumed_from_step"]:
            fastest[shape] = min(manifest["measured"]["wall_s"], fastest.get(shape, float("inf")))
    quiet = sum(fastest[shape] for shape in shapes) / 3600
    alone = "Each counted at the fastest of its depth and length, as it would be with nothing else on the machine,"
    assert f"{alone} they took {quiet:.1f} core-hours." in text and quiet < 36
    interrupted = sum(bool(manifest["measured"]["resumed_from_step"]) for manifest in manifests)
    assert f"({interrupted} runs were interrupted, of which the clock knows the last part alone)" in text
    searched, finals, low = (
        sum(where in path.parts for path in paths) for where in (runs_folder.SEARCH, runs_folder.FINALS, "other_rates")
    )
    counted = f"({searched} of the search, {finals} finals, {low} in `other_rates/`)"
    assert f"So far {len(manifests)} runs {counted} took at least {hours:.1f} hours of a core" in text
    assert len({manifest["commit"] for manifest in manifests}) == 1


def test_who_trains_at_which_depth():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    manifests = [json.loads(path.read_bytes()) for path in (ROOT / "data" / "depth").glob("*/manifest.json")]
    hours = sum(manifest["measured"]["wall_s"] for manifest in manifests) / 3600
    assert f"{len(manifests)} runs took {hours:.1f} hours of a core" in text
    (entropy,) = {manifest["corpus"]["unigram_entropy"] for manifest in manifests}
    (bigram,) = {manifest["bigram_loss"] for manifest in manifests}
    assert f"the unigram entropy, {entropy:.3f}" in text and f"a bigram model ({bigram:.3f})" in text
    found: dict[int, list[str]] = {16: [], 256: [], 1000: []}
    for manifest in manifests:
        trains = manifest["eval_loss"] is not None and manifest["eval_loss"] < entropy - 0.05
        outcome = "diverge" if manifest["status"] == "diverged" else "train" if trains else "stall"
        found[manifest["config"]["depth"]].append(outcome)
        assert not trains or manifest["eval_loss"] > bigram + 0.1
    for depth, all_of_them in found.items():
        train, stall, diverge = (all_of_them.count(word) for word in ("train", "stall", "diverge"))
        assert f"at {depth:,} blocks {train} train, {stall} stall and {diverge} diverge" in text
    assert f"{len(found[1000])} of them at 1,000" in text and len(found[16]) == len(found[256])
    assert len({manifest["commit"] for manifest in manifests}) == 1
    limit = [m for m in manifests if m["config"]["depth"] == 1000]
    best = min(limit, key=lambda m: m["eval_loss"] or 9)
    assert best["config"]["scheme"] == "lns" and f"LNS comes closest there ({best['eval_loss']:.3f})" in text
    assert len(limit) == 12 and not found[1000].count("train") and "At 1,000 none of twelve does." in FINDINGS
    slow = {"post_rmsnorm", "deepnorm", "keel"}
    alone = sum(m["measured"]["wall_s"] for m in limit if m["config"]["scheme"] in slow) / 3600
    assert round(alone) == 2 and "took two of them alone" in text
    counts = len(found[16]), found[16].count("train"), found[256].count("train")
    for page, words in (
        (README, "of {} schemes {} train at 16 blocks"),
        (FINDINGS, "Of {} schemes, {} train at 16 blocks"),
    ):
        assert (words + " and {} at 256").format(*counts) in page
    assert "width 32, 150 steps, one seed, one learning rate for all, and none reaches a bigram model" in FINDINGS
    deep = {
        m["config"]["scheme"]
        for m in manifests
        if m["config"]["depth"] == 256 and (m["eval_loss"] or 9) < entropy - 0.05
    }
    assert deep == {"skip_init", "layer_scale", "fixnorm", "prores", "bhyt", "bhyt_linear", "lns"}


def test_what_bfloat16_and_the_compiler_gain():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    table = pd.read_csv(ROOT / "data" / "bench" / "training_cpu.csv").set_index(["what", "base"])
    ratio = table.loc[("bfloat16 compiled step", "float32 step"), "ratio"]
    share = table.loc[("bfloat16 compiled step", "bfloat16 matrix product"), "peak_share"]
    sentence = f"bfloat16 and compiled takes {ratio:.2f} of a float32 step and reaches {share:.2f} of the core's peak"
    assert sentence in text
    base = "bfloat16 compiled step"
    more = [table.loc[(f"{base}, {what}", base), "ratio"] for what in ("batch 16", "batch 32", "two threads")]
    rows = "its step takes {:.2f} times as long with 16 rows as with 8, {:.2f} with 32, and {:.2f} on two threads"
    assert rows.format(*more) in text and more[0] > 1 and more[2] > 1 / 1.9


def test_what_a_second_ray_worker_gains():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    one, two = pd.read_csv(ROOT / "data" / "bench" / "ray_workers.csv").to_dict("records")
    sentence = (
        f"{two['ratio']:.2f} times as many by the clock, {100 * two['not_training']:.0f}% of the two workers' time"
    )
    assert sentence in text and (one["workers"], two["workers"], two["runs"], two["cores"]) == (1, 2, 6, 2)
    slower = one["run_s"] / two["run_s"]
    assert f"were each {100 * (slower - 1):.0f}% slower, without which it is {two['ratio'] / slower:.2f}" in text


def test_what_recording_costs_and_what_a_slider_waits():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    table = pd.read_csv(ROOT / "data" / "bench" / "probes_cpu.csv").set_index(["pass", "case"])
    passes = table.loc["forward and backward", "cpu_ratio"]
    names = ("the same again", *(f"normlab, {what}" for what in ("default metrics and gradients", ALL_BUT_RANK)))
    again, default, most = (f"{passes[name]:.2f}" for name in names)
    assert f"a second bare one took {again}, recording the default metrics and gradients {default}," in text
    assert f"all forward metrics but the effective rank {most};" in text
    own, lens = (table.loc[("forward", name), "extra_peak_mib"] for name in ("normlab, default metrics", LENS))
    assert f"memory {own:.0f} MiB, of TransformerLens's whole cache {lens:,.0f} " in text
    moves = pd.read_csv(ROOT / "data" / "bench" / "latency.csv").query("control == 'all'").set_index("surface")
    lab, plain, page = (f"{moves.loc[name, 'median_ms']:.0f}" for name in ("JupyterLab", "FigureWidget", "page"))
    sentence = f"{lab} ms in JupyterLab, {plain} with plotly's own FigureWidget beside it, {page} in the page"
    assert sentence in text and set(moves["moves"]) == {200}


def test_precision_moves_the_loss_less_than_a_seed():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    found_text = re.search(
        rf"ends at {NUMBER}\. Its twin in float32, not compiled, ends at {NUMBER}; .* at {NUMBER}:", text
    )
    paths = [*normlab.runs.find_runs(ROOT / "data" / "precision"), *normlab.runs.find_runs(ROOT / "data" / "pilot")]
    found = {}
    for manifest in (normlab.runs.read_run(path).manifest for path in paths):
        config = manifest["config"]
        if config["depth"] == 4 and config["corpus"] == "stdlib":
            found[config["dtype"], config["seed"]] = manifest["eval_loss"]
    half, full, seed = found["bfloat16", 0], found["float32", 0], found["bfloat16", 1]
    assert found_text is not None and [float(text) for text in found_text.groups()] == [
        round(x, 3) for x in (half, full, seed)
    ]
    assert abs(half - full) < abs(half - seed)


def test_what_a_model_loses_with_its_norms():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    table = pd.read_csv(ROOT / "data" / "removal" / "pre_rmsnorm-d8.csv")
    (numbers,) = re.findall(rf"held-out loss {NUMBER} to {NUMBER} nats a token", text)
    assert list(map(float, numbers)) == [round(table["loss_before"].iloc[0], 3), round(table["loss_tuned"].iloc[-1], 3)]
    dear = table.assign(cost=table["loss_removed"] - table["loss_before"]).nlargest(2, "cost")
    assert sorted(dear["step"]) == [1, 17] and len(table) == 17 and (dear["cost"].round(1) == 0.1).all()


def test_no_short_run_beats_a_bigram_of_its_text():
    pilot = [normlab.runs.read_run(path).manifest for path in normlab.runs.find_runs(ROOT / "data" / "pilot")]
    bigram = {m["corpus"]["content_hash"]: m["bigram_loss"] for m in pilot}
    short = [normlab.runs.read_run(path) for path in (ROOT / "data" / "gain_or_bound").iterdir()]
    assert {run.manifest["config"]["steps"] for run in short} == {300}
    assert all(not run.eval_loss <= bigram[run.manifest["corpus"]["content_hash"]] for run in short)
