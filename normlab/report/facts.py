"""What is notable in a report, in words.

stack_facts     of one stack: growth, the largest step, what is cheap to leave out, tokens unlike all others
growth, step    the first two of them, of any table
left_out        what was not measured, and why; left_out_of_all of several stacks; shared_and_own parts them
span            blocks that follow each other
by_reason       the same, one line per reason
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from normlab.probes.outliers import FoundTokens
from normlab.report.measure import Measured, Pairs

FOUND = {"massive_activations": "Massive activations", "attention_sinks": "Attention sinks"}  # by table
NAMED, PLACES = 3, 3  # tokens that a sentence names, and positions of each
SAME = 0.05  # a stream that changes by less keeps its size
# What tells the block with the largest step: metric at site block, and how a sentence says it.
STEPS = {
    "relative_contribution": "takes the largest step: what it adds is {} times the stream",
    "block_influence": "turns the stream most: by 1 - cosine = {}",
}


def stack_facts(one: Measured) -> list[str]:
    """Sentences on one stack; what was not measured has none."""
    table = one.values
    facts = [growth(table), step(table), _cheapest(one)]
    facts += [_tokens(one, name) + _learned(one.found[name]) for name in FOUND if name in one.found]
    return [fact for fact in facts if fact]


def growth(table: pd.DataFrame) -> str:
    """How the root mean square of the residual stream changes from the first block to the last.

    Or from which block on it is not finite. Empty if it was not measured at all blocks.
    """
    rows = _by_block(table, "rms", "block_out")
    if rows is None:
        return ""
    if where := _not_finite(rows):
        return f"The residual stream is not finite {where}."
    first, last = rows.iloc[0], rows.iloc[-1]
    ratio = last["value"] / first["value"]
    verb = f"grows {number(ratio)}-fold" if ratio > 1 else f"shrinks to {number(ratio)} of its size"
    return (
        f"The residual stream {verb if abs(ratio - 1) > SAME else 'keeps its size'}: its root mean square is "
        f"{number(first['value'])} after block {first['layer']:.0f}, {number(last['value'])} after block "
        f"{last['layer']:.0f}."
    )


def step(table: pd.DataFrame) -> str:
    """The block that changes the stream most: by what it adds, or by its turn where one does not add.

    Or that it cannot be told, as a step is not finite. Empty if steps were not measured at all blocks.
    """
    for metric, words in STEPS.items():
        rows = _by_block(table, metric, "block")
        if rows is not None:
            if where := _not_finite(rows):
                return f"The largest step cannot be told: steps are not finite {where}."
            most = rows.loc[rows["value"].idxmax()]
            median = number(rows["value"].median())
            return f"Block {most['layer']:.0f} {words.format(number(most['value']))} ({median} in the median block)."
    return ""


def number(value: float) -> str:
    """Three digits; in full what is 1,000 to 999,999 when rounded."""
    return f"{value:,.0f}" if 1e3 <= round(abs(value), 0) < 1e6 else f"{value:.3g}"


def _by_block(table: pd.DataFrame, metric: str, site: str) -> pd.DataFrame | None:
    """Values by block, over all tokens; None if one is missing or alone. Layer 0 is what enters the first block."""
    depth = table["layer"].max()
    rows = table[(table["metric"] == metric) & (table["site"] == site) & (table["mask"] == "all")]
    rows = rows[rows["layer"].gt(0)].sort_values("layer")
    return rows if len(rows) == depth > 1 else None


def _not_finite(rows: pd.DataFrame) -> str:
    """At which blocks values are not finite; empty if all are."""
    bad = ~rows["value"].abs().lt(float("inf"))
    layers = [str(layer) for layer in rows["layer"][bad]]
    if not layers:
        return ""
    if bad[bad.idxmax() :].all():
        return f"from block {layers[0]} on"
    return f"at block{'s' * (len(layers) > 1)} {_listed(layers)}"


def _cheapest(one: Measured) -> str:
    """The blocks to leave out: by their cost, or without a loss by their turn."""
    if "spans" in one.tables:
        rows = [one.tables["spans"].iloc[index] for index in sorted({0, len(one.tables["spans"]) - 1})]
        costs = [f"{span(row['first'], row['last'])}, for {row['skip_delta_loss']:+.3g} nats a token" for row in rows]
        return f"Cheapest to leave out: {'; '.join(costs)}{one.said_of_pieces('spans')}."
    if "angular_distance" not in one.tables or one.where.depth < 2:
        return ""
    angles = one.tables["angular_distance"]
    turns = pd.Series({layer: float(angles.loc[layer - 1, layer]) for layer in one.where.layers})
    if turns.isna().any():
        return ""
    least = turns.idxmin()
    return (
        f"Block {least} turns the stream least, by {number(turns[least])} of a half turn"
        f"{one.said_of_pieces('angular_distance')}: the first to try to leave out. "
        "What that costs takes a loss to tell."
    )


def span(first: int, last: int) -> str:
    """A span of blocks in words."""
    return f"block {first}" if first == last else f"blocks {first}-{last}"


def _tokens(one: Measured, name: str) -> str:
    """The tokens that were found, the strongest first, or what came nearest."""
    title, found = FOUND[name], one.found[name]
    if not found.table.empty:
        size = found.table["value" if "value" in found.table else "weight"].abs()
        rows = found.table.loc[size.sort_values(ascending=False, kind="stable").index].to_dict("records")
        count = len(found.table[["row", "position"]].drop_duplicates())
        tokens = f"{count} token{'s' * (count > 1)} of the first batch"
        most = f"{_amount(rows[0], 'of the attention averaged over heads')} in layer {rows[0]['layer']}"
        return f"{title}: {tokens}, {_placed(rows)}; at most {most}."
    if found.nearest is None:
        return f"{title}: no token could be judged."
    nearest = found.nearest
    amount = _amount(nearest, "of one head's attention")
    where = f"{_placed([nearest])} in layer {nearest['layer']}"
    return f"{title}: none ({found.rule}); the nearest is {amount}, {where}."


def _learned(found: FoundTokens) -> str:
    """What a learned sink takes, where there is one."""
    if found.learned is None:
        return ""
    most = found.learned.loc[found.learned["weight"].idxmax()]
    return f" The learned sink takes at most {number(most['weight'])} of the attention, in layer {most['layer']:.0f}."


def _amount(row: Mapping[str, Any], of_attention: str) -> str:
    if "value" in row:
        return f"|h| = {number(abs(row['value']))}, {number(row['ratio'])} times the median"
    return f"{number(row['weight'])} {of_attention}"


def _placed(rows: Iterable[Mapping[str, Any]]) -> str:
    """Tokens with their positions, as they come."""
    places: dict[str, dict[int, None]] = {}
    for row in rows:
        places.setdefault(row["token"], {})[row["position"]] = None
    named = [
        f"“{token}” at position {', '.join(map(str, list(positions)[:PLACES]))}{' ...' * (len(positions) > PLACES)}"
        for token, positions in list(places.items())[:NAMED]
    ]
    return ", ".join(named) + (f" and {len(places) - NAMED} more" if len(places) > NAMED else "")


def left_out(one: Measured) -> Pairs:
    """What of a stack was not measured, and the reason: metrics, sites with their layers, tokens, experiments."""
    layers: dict[tuple[str, str], list[str]] = {}
    for place, why in one.stats.manifest["absent"].items():
        site, _, layer = place.rpartition(" ")
        layers.setdefault((site, why), []).append(layer)
    whose = [(f"{site} of layer {_listed(n)}", why) for (site, why), n in layers.items() if site != "tokens"]
    tokens = [(f"tokens {', '.join(n)}", why) for (site, why), n in layers.items() if site == "tokens"]
    known = {site for site, _ in layers}
    metrics = [(metric, "do not apply") for metric in one.stats.absent if metric not in known]
    return [*one.left_out.items(), *whose, *tokens, *metrics]


def shared_and_own(missing: Mapping[str, Pairs]) -> tuple[Pairs, dict[str, Pairs]]:
    """What is missing everywhere, and of each what is missing there besides."""
    shared = [pair for pair in next(iter(missing.values())) if all(pair in pairs for pairs in missing.values())]
    return shared, {name: [pair for pair in pairs if pair not in shared] for name, pairs in missing.items()}


def left_out_of_all(stacks: Sequence[Measured]) -> Pairs:
    """What was not measured of a model, with the stack's name where it is not so of all stacks."""
    shared, own = shared_and_own({one.name: left_out(one) for one in stacks})
    return shared + [(f"{name} {what}", why) for name, pairs in own.items() for what, why in pairs]


def _listed(layers: list[str]) -> str:
    """Layers with commas; one range if they are several in a row."""
    if len(layers) > 2 and all(map(str.isdigit, layers)) and int(layers[-1]) - int(layers[0]) == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(layers)


def by_reason(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """One line per reason, with all that it holds for."""
    names: dict[str, dict[str, None]] = {}
    for what, why in pairs:
        names.setdefault(why, {})[what] = None
    return [f"{', '.join(whats)}: {why}" for why, whats in names.items()]
