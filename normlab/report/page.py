"""Pages of a report, and the file plotly.min.js that pages of normlab share.

write_page       HTML parts and figures as one page
write_plotly     plotly.js next to pages that read it
model_parts      the page of one model on one text
series_parts     the page of several recordings
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from normlab.figures.report import (
    angles,
    layer_figure,
    layer_heatmap,
    lens,
    recorded_map,
    skip_costs,
)
from normlab.figures.theme import CONFIG
from normlab.probes.metrics import metric_row
from normlab.report.measure import Measured

FOUND = {"massive_activations": "Massive activations", "attention_sinks": "Attention sinks"}  # by table
PLOTLY_FILE = "plotly.min.js"
STYLE = """body{font:15px/1.55 Inter,'Helvetica Neue',Helvetica,Arial,'Liberation Sans',sans-serif;max-width:62rem;
margin:2rem auto;padding:0 1.2rem;color:#24292f;background:#fff}h1{font-size:26px}h2{font-size:20px;margin-top:2.4rem}
table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .6rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}pre{background:#f6f7f9;padding:.8rem;white-space:pre-wrap;font-size:12px}
details{margin:.6rem 0}summary{cursor:pointer}"""


def write_plotly(folder: Path) -> None:
    """Write plotly.js into a folder of pages that read it."""
    (folder / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")


def write_page(folder: Path, title: str, parts: Sequence[str | go.Figure]) -> Path:
    """Write `report.html` with its plotly.js. `parts`: HTML, or figures."""
    write_plotly(folder)
    options: dict[str, Any] = dict(full_html=False, include_plotlyjs=False, config=CONFIG)
    texts = [part if isinstance(part, str) else part.to_html(**options) for part in parts]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f'<style>{STYLE}</style><script src="{PLOTLY_FILE}"></script>'
    )
    body = f"<h1>{html.escape(title)}</h1>{''.join(texts)}"
    path = folder / "report.html"
    path.write_text(f'<!doctype html><html lang="en">{head}{body}</html>', encoding="utf-8")
    return path


def model_parts(measured: Sequence[Measured], about: str) -> list[str | go.Figure]:
    """The page of one model on one text; each figure says the definition of its metric."""
    parts: list[str | go.Figure] = [f"<p>{html.escape(about)}</p>"]
    for one in measured:
        parts += [f"<h2>{html.escape(one.name)}</h2>"] if one.name else []
        parts += _stack_parts(one)
    return parts


def _stack_parts(one: Measured) -> list[str | go.Figure]:
    table, tables = one.stats.to_pandas(), one.tables
    parts: list[str | go.Figure] = [f"<pre>{html.escape(chr(10).join(one.stats.manifest['sites']))}</pre>"]
    if one.stats.absent:
        parts.append(f"<p>Do not apply to this model: {html.escape(', '.join(one.stats.absent))}.</p>")
    parts += [f"<p>Left out: {html.escape(reason)}.</p>" for reason in left_out(one)]
    has_scale = table.groupby(["metric", "site"])["layer"].transform("nunique") > 1  # the final norm has one layer
    parts.append(layer_heatmap(table[has_scale] if one.where.depth > 1 else table))
    draw = {"skip_sensitivity": skip_costs, "logit_lens": lens, "angular_distance": angles}
    parts += [figure(tables[name]) for name, figure in draw.items() if name in tables]
    found = set(table["metric"])
    parts += [layer_figure(table, metric) for metric in one.stats.metrics if metric in found]
    massive = one.stats.massive(top=3).query("mask == 'all'").drop(columns="mask")
    shown = massive.to_html(index=False, float_format=lambda x: f"{x:.4g}", border=0)
    parts.append(f"<details><summary>Largest features</summary>{shown}</details>")
    parts += [_token_part(words, tables[name]) for name, words in FOUND.items() if name in tables]
    if "spans" in tables:
        lines = "".join(f"<li>{html.escape(span_line(row))}</li>" for row in tables["spans"].itertuples())
        parts.append(
            "<h2>What to cut</h2><p>The span of blocks that costs least to drop, at each length, in nats a token with "
            f"its 95% interval, chosen on other text than it is measured on where there is enough.</p><ul>{lines}</ul>"
        )
    return parts


def _token_part(words: str, table: pd.DataFrame) -> str:
    """The tokens unlike all others, in a sentence and a table of at most 50 rows."""
    places = sorted(set(table["position"]))
    named = ", ".join(map(str, places[:10])) + (" ..." if len(places) > 10 else "")
    tokens = len(table[["row", "position"]].drop_duplicates())
    found = f"{tokens} tokens of the first batch, at position {named}" if tokens else "none in the first batch"
    shown = table.head(50).to_html(index=False, float_format=lambda x: f"{x:.4g}", border=0) if tokens else ""
    return f"<details><summary>{words}: {found}</summary>{shown}</details>"


def left_out(one: Measured) -> list[str]:
    """Sites of a stack that were not measured, with their layers and the reason."""
    layers: dict[tuple[str, str], list[str]] = {}
    for place, why in one.stats.manifest["absent"].items():
        site, _, layer = place.rpartition(" ")
        layers.setdefault((site, why), []).append(layer)
    whose = [f"{site} of layer {', '.join(n)}: {why}" for (site, why), n in layers.items() if site != "tokens"]
    tokens = [f"tokens {', '.join(n)}: {why}" for (site, why), n in layers.items() if site == "tokens"]
    return [*whose, *tokens, *one.left_out]


def span_line(row: Any) -> str:
    """One length of the table of spans, in the conventions of transformers and of mergekit."""
    kept = " and ".join(str(part) for part in row.keep)
    blocks = f"block {row.first}" if row.length == 1 else f"blocks {row.first}-{row.last}"
    sure = ", of one sequence: no interval" if math.isnan(row.low) else f" [{row.low:+.4f}, {row.high:+.4f}]"
    return (
        f"cheapest {row.length} to drop: {blocks}, loss {row.skip_delta_loss:+.4f}{sure}; "
        f"layers[{row.start}:{row.stop}] in transformers, mergekit keeps {kept}"
    )


def series_parts(
    table: pd.DataFrame, by: str, losses: dict[str, float | None], missing: Sequence[str], about: str
) -> list[str | go.Figure]:
    """The page of several recordings: a figure per metric at its default site, and heat maps of revisions.

    Args:
        table: columns `by`, stack, site, layer, metric, mask, value.
        by: "model", "text" or "revision".
        losses: nats per label, by recording.
        missing: sentences on what was not measured.
        about: a sentence on the data.
    """
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{'-' if loss is None else f'{loss:.4f}'}</td></tr>"
        for name, loss in losses.items()
    )
    parts: list[str | go.Figure] = [
        f"<p>{html.escape(about)}</p><table><tr><th>{by}</th><th>loss (nats a label)</th></tr>{rows}</table>"
    ]
    parts += [f"<p>Left out: {html.escape(words)}.</p>" for words in missing]
    counted = table[table["mask"] == "all"]
    for stack, ours in counted.groupby("stack", sort=False):
        if stack:
            parts.append(f"<h2>{html.escape(str(stack))}</h2>")
        for metric, lines in ours.groupby("metric", sort=False):
            found = set(lines["site"])
            site = next(s for s in (metric_row(str(metric)).default_site, *sorted(found)) if s in found)
            lines = lines[lines["site"] == site].sort_values("layer")
            parts.append(layer_figure(lines, str(metric), by=by))
            if by == "revision" and len(losses) > 1:
                parts.append(recorded_map(lines, by, str(metric), site))
    return parts
