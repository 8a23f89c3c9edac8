"""The numbers of data/README.md and docs/compare.md, made from the shipped files.

texts   every text by the name that marks it in the page
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from findings import ROOT, manifests, outcome, plain
from tables import table

from normlab.analysis.selection import in_order, title_of
from normlab.store import FINALS, SEARCH


def texts() -> dict[str, str]:
    parts = (
        pilot, precision, hours, removal, deepest, packages, bench, differences, beyond, ports, instabilities, observer,
    )  # fmt: skip
    return {name: text for part in parts for name, text in part().items()}


def pilot() -> dict[str, str]:
    rows: dict[str, list[str]] = {}
    for manifest in sorted(manifests("pilot"), key=lambda m: (m["config"]["corpus"] != "stdlib", m["config"]["depth"])):
        row = rows.setdefault(manifest["config"]["corpus"], [])
        row += [plain(manifest["eval_loss"], 3)]
        if manifest["config"]["depth"] == 16:
            row += [plain(manifest[name], 3) for name in ("trigram_loss", "bigram_loss")]
    lines = [(f"`{corpus}`", *row) for corpus, row in rows.items()]
    return {"table_of_pilot": table(("text", "4 blocks", "16 blocks", "trigram", "bigram"), lines)}


def precision() -> dict[str, str]:
    loss = {
        (m["config"]["dtype"], m["config"]["seed"]): m["eval_loss"]
        for m in (*manifests("precision"), *manifests("pilot"))
        if m["config"]["depth"] == 4 and m["config"]["corpus"] == "stdlib"
    }
    return {
        "loss_bfloat16": plain(loss["bfloat16", 0], 3),
        "loss_float32": plain(loss["float32", 0], 3),
        "loss_other_seed": plain(loss["bfloat16", 1], 3),
        **league_precision(),
    }


def league_precision() -> dict[str, str]:
    """Runs of the league's search that were trained in both precisions, and how many runs have which."""
    search = {(m["config"]["scheme"], m["config"]["lr"]): m["eval_loss"] for m in manifests(f"league/{SEARCH}")}
    lines, gaps = [], []
    for manifest in manifests("precision/league"):
        scheme, rate = manifest["config"]["scheme"], manifest["config"]["lr"]
        gaps.append(abs(manifest["eval_loss"] - search[scheme, rate]))
        losses = (plain(loss, 3) for loss in (search[scheme, rate], manifest["eval_loss"]))
        lines.append((title_of(scheme), f"{rate:g}", *losses))
    every = (*manifests("league"), *manifests(f"league/{SEARCH}"))
    return {
        "table_of_league_precision": table(("scheme", "rate", "float32", "bfloat16"), lines),
        "league_precision_gap": plain(max(gaps), 3),
        "league_bfloat16": f"{sum(m['config']['dtype'] == 'bfloat16' for m in every)}",
        "league_bfloat16_schemes": ", ".join(title_of(name) for name in in_order(_wholly(every, "bfloat16"))),
    }


def _wholly(manifests: Iterable[dict], dtype: str) -> set[str]:
    """The schemes all of whose runs were trained in one precision."""
    used: dict[str, set[str]] = {}
    for manifest in manifests:
        used.setdefault(manifest["config"]["scheme"], set()).add(manifest["config"]["dtype"])
    return {scheme for scheme, dtypes in used.items() if dtypes == {dtype}}


def hours() -> dict[str, str]:
    """Hours by the clock of the sweep `trained`, and at the fastest run of each depth and length."""
    folders = {"runs": "reported", f"runs/{SEARCH}": "search", f"runs/{FINALS}": "finals", "other_rates": "other rates"}
    rows = [
        (what, *(m["config"][name] for name in ("depth", "steps", "experiment_blocks")), m["measured"])
        for folder, what in folders.items()
        for m in manifests(folder)
    ]
    runs = pd.DataFrame(rows, columns=["what", "depth", "steps", "blocks", "measured"])
    runs["wall_s"] = [measured["wall_s"] for measured in runs["measured"]]
    runs["whole"] = [not measured["resumed_from_step"] for measured in runs["measured"]]
    shape = ["depth", "steps", "blocks"]
    fastest = runs[runs["whole"]].groupby(shape)["wall_s"].min()
    quiet = fastest.loc[list(runs[shape].itertuples(index=False, name=None))].sum()
    counts = runs["what"].value_counts()
    return {
        "runs": f"{len(runs)}",
        "runs_searched": f"{counts['search']}",
        "runs_finals": f"{counts['finals']}",
        "runs_other_rates": f"{counts['other rates']}",
        "runs_hours": plain(runs["wall_s"].sum() / 3600, 0),
        "runs_quiet_hours": plain(quiet / 3600, 0),
        "runs_interrupted": f"{(~runs['whole']).sum()}",
    }


def removal() -> dict[str, str]:
    steps = pd.read_csv(ROOT / "data" / "removal" / "pre_rmsnorm-d8.csv")
    cost = steps["loss_removed"] - steps["loss_before"]
    return {
        "removal_norms": f"{len(steps)}",
        "removal_before": plain(steps["loss_before"].iloc[0]),
        "removal_after": plain(steps["loss_tuned"].iloc[-1]),
        "removal_costliest": plain(cost.max()),
    }


def deepest() -> dict[str, str]:
    runs = manifests("depth")
    shallow = [m for m in runs if m["config"]["depth"] == 16]
    limit = [m for m in runs if m["config"]["depth"] == 1000]
    best = min(limit, key=lambda m: m["eval_loss"] or float("inf"))
    return {
        "depth_runs": f"{len(runs)}",
        "depth_hours": plain(sum(m["measured"]["wall_s"] for m in runs) / 3600, 1),
        "depth_schemes": f"{len(shallow)}",
        "depth_limit": f"{len(limit)}",
        "depth_unigram": plain(runs[0]["corpus"]["unigram_entropy"]),
        "depth_bigram": plain(runs[0]["bigram_loss"]),
        "depth_best_scheme": f"`{best['config']['scheme']}`",
        "depth_best": plain(best["eval_loss"]),
        "depth_trains": ", ".join(
            f"{sum(outcome(m) == 'trains' for m in runs if m['config']['depth'] == depth)} at {depth:,}"
            for depth in (16, 256, 1000)
        ),
    }


def packages() -> dict[str, str]:
    """The corpus `packages`, as a run that read it describes it."""
    manifest = manifests("gains")[0]
    corpus = manifest["corpus"]
    return {
        "packages_tokens": f"{corpus['train_tokens'] / 1e6:.1f}M",
        "packages_steps": f"{corpus['train_blocks'] // manifest['config']['batch_size']:,}",
        "packages_held_out": f"{corpus['held_out_blocks']:,}",
        "packages_unigram": plain(corpus["unigram_entropy"]),
        "packages_bigram": plain(manifest["bigram_loss"]),
        "packages_trigram": plain(manifest["trigram_loss"]),
    }


def bench() -> dict[str, str]:
    steps = pd.read_csv(ROOT / "data" / "bench" / "training_cpu.csv").set_index(["what", "base"])
    workers = pd.read_csv(ROOT / "data" / "bench" / "ray_workers.csv").set_index("workers")
    costs = pd.read_csv(ROOT / "data" / "bench" / "probes_cpu.csv")
    probes = costs.query("depth == 12").set_index(["pass", "case"])
    moves = pd.read_csv(ROOT / "data" / "bench" / "latency.csv").query("control == 'all'").set_index("surface")
    default, lens = "normlab, default metrics", "TransformerLens run_with_cache, everything"
    return {
        "bfloat16_step": plain(steps.loc[("bfloat16 compiled step", "float32 step"), "ratio"]),
        "two_ray_workers": plain(workers.loc[2, "ratio"]),
        **{f"costs_{name.replace(' ', '_')}": _costs_beside(rows) for name, rows in costs.groupby("pass")},
        "record_cpu": plain(probes.loc[("forward and backward", f"{default} and gradients"), "cpu_ratio"]),
        "bare_cpu": plain(probes.loc[("forward and backward", "the same again"), "cpu_ratio"]),
        "record_memory": plain(probes.loc[("forward", default), "extra_peak_mib"], 0),
        "lens_memory": f"{probes.loc[('forward', lens), 'extra_peak_mib']:,.0f}",
        "slider_lab": plain(moves.loc["explorer, JupyterLab", "median_ms"], 0),
        "slider_page": plain(moves.loc["explorer, page", "median_ms"], 0),
        "fader_lab": plain(moves.loc["model, JupyterLab", "median_ms"], 0),
        "fader_page": plain(moves.loc["model, page", "median_ms"], 0),
    }


def _costs_beside(rows: pd.DataFrame) -> str:
    """Time over a bare pass and extra memory of every case that each depth has."""
    rows = rows[rows["cpu_ratio"].notna() & (rows["case"] != "bare")]
    depths = sorted(rows["depth"].unique())
    found = rows.set_index(["case", "depth"])

    def cell(case: str, depth: int) -> str:
        if (case, depth) not in found.index:
            return ""
        row = found.loc[(case, depth)]
        return f"{row['cpu_ratio']:.2f}, {max(0, row['extra_peak_mib']):,.0f} MiB"

    lines = [(case, *(cell(case, depth) for depth in depths)) for case in dict.fromkeys(rows["case"])]
    return table(("", *(f"{depth} blocks" for depth in depths)), lines)


def differences() -> dict[str, str]:
    """Counts of seeded faults that `diff` is right about, and of equal pairs that part."""
    faults, pairs = (
        pd.read_csv(ROOT / "data" / "bench" / f"{name}.csv") for name in ("first_layer", "first_layer_equal")
    )
    ran = pairs["equal"].dropna().astype(str)
    return {
        "faults": f"{len(faults)}",
        "faults_classes": f"{faults['class'].nunique()}",
        "faults_kinds": f"{faults['fault'].nunique()}",
        "faults_placed": f"{(faults['block_right'] & faults['site_right']).sum()}",
        "faults_caused": f"{faults['cause_right'].sum()}",
        "equal_pairs": f"{len(ran)}",
        "equal_parted": f"{(ran != 'True').sum()}",
        "equal_not_run": f"{len(pairs) - len(ran)}",
    }


def beyond() -> dict[str, str]:
    """Counts of pairs of faults that `diff` is right about, and of checkpoints that `check` is."""
    two, made = (pd.read_csv(ROOT / "data" / "bench" / f"{name}.csv") for name in ("two_faults", "check"))
    ran, clean = two.dropna(subset="small").astype({"both_right": bool}), made[made["fault"].isna()]
    spoiled = made[made["fault"].notna()]
    return {
        "two_faults": f"{len(ran)}",
        "two_faults_right": f"{ran['both_right'].sum()}",
        "checked_clean": f"{len(clean)}",
        "checked_alarms": f"{(~clean['right']).sum() or 'none'}",
        "checked_faults": f"{len(spoiled)}",
        "checked_found": f"{spoiled['right'].sum()}",
        "checked_families": f"{made['family'].nunique()}",
    }


def ports() -> dict[str, str]:
    """Counts of ports that `diff` is right about: without a fault, and with faults chosen before and after the search
    for causes was widened."""
    rows = pd.read_csv(ROOT / "data" / "bench" / "ports.csv")
    equal = rows[rows["fault"].isna()]
    found = {"ports_equal": f"{equal['right'].sum()} of {len(equal)}"}
    for name, held_out in (("early", False), ("late", True)):
        own = rows[rows["held_out"].eq(held_out)].astype({"site_right": bool, "cause_right": bool, "named": bool})
        found |= {
            f"ports_{name}": f"{len(own)}",
            f"ports_{name}_placed": f"{(own['right'] & own['site_right']).sum()}",
            f"ports_{name}_caused": f"{own['cause_right'].sum()}",
            f"ports_{name}_wrong": f"{(own['named'] & ~own['cause_right']).sum() or 'none'}",
        }
    return found


def instabilities() -> dict[str, str]:
    """Counts of the layers that `explain` names, of the half "test". The other half chose the rule, and which kinds of
    fault are slow: those that its losses showed 20 steps after they began or later."""
    runs = pd.read_csv(ROOT / "data" / "bench" / "instabilities.csv")
    runs["lead"] = runs["loss_step"] - runs["named_step"]
    runs["right"] = runs["layer"] == runs["block"]
    runs["after"] = runs["loss_step"] - runs["begins"]
    faults = runs[(runs["kind"] != "quiet") & (runs["half"] == "test")]
    of_block, of_model = faults[faults["block"].notna()], faults[faults["block"].isna()]
    soonest = runs[runs["half"] == "development"].groupby("kind")["after"].min()
    slow, named = of_block[of_block["kind"].map(soonest) >= 20], of_block[of_block["named_step"].notna()]
    rows = []
    for kind, part in faults.groupby("kind", sort=False):
        right = "-" if part["block"].isna().all() else f"{part['right'].sum()} of {part['named_step'].count()}"
        after, lead = ([plain(x, 0) for x in part[name].dropna()] for name in ("after", "lead"))
        rows.append((f"`{kind}`", ", ".join(after) or "not", ", ".join(lead) or "not", right))
    quiet = runs[runs["kind"] == "quiet"].groupby("half")[["steps", "alarms"]].sum()
    return {
        "unstable_runs": f"{len(faults)}",
        "unstable_seeds": f"{faults['seed'].min()} to {faults['seed'].max()}",
        "unstable_kinds": f"{slow['kind'].nunique()}",
        "unstable_share": f"{100 * (slow['right'] & (slow['lead'] >= 20)).mean():.0f}%",
        "unstable_slow": f"{len(slow)}",
        "unstable_in_time": f"{(slow['right'] & (slow['lead'] >= 20)).sum()}",
        "unstable_of_block": f"{len(of_block)}",
        "unstable_named": f"{len(named)}",
        "unstable_right": f"{named['right'].sum()}",
        "unstable_of_model": f"{len(of_model)}",
        "unstable_early": f"{(of_model['lead'] >= 20).sum()}",
        "quiet_steps": f"{quiet.loc['test', 'steps']:,}",
        "quiet_alarms": plain(quiet.loc["test", "alarms"], 0),
        "table_of_instabilities": table(
            ("fault", "the loss shows it after", "named before that by", "right layer, of those named"), rows
        ),
    }


def observer() -> dict[str, str]:
    """A fiftieth of what measuring every step adds to a step."""
    times = pd.read_csv(ROOT / "data" / "bench" / "observer_cpu.csv").set_index("case")
    return {
        "observer_share": f"{100 * (times.loc['observed every step', 'cpu_ratio'] - 1) / 50:.1f}%",
        "observer_once": plain(times.loc["observed once", "cpu_ratio"]),
        "observer_again": plain(times.loc["the same again", "cpu_ratio"]),
    }
