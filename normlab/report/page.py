"""The pages of a report: figures in normlab's theme, which read plotly.js from a file beside them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from normlab.figures import theme
from normlab.figures.depth_use import BY_LAYER, BY_PAIR
from normlab.figures.heatmap import layer_heatmap
from normlab.figures.layers import COLORS, layer_figure
from normlab.probes.metrics import METRICS, metric_row, site_label
from normlab.report.measure import Measured

PLOTLY_FILE = "plotly.min.js"
WHOLE_TICKS = 32  # layers up to which each has a tick
STYLE = """body{font:15px/1.55 Inter,'Helvetica Neue',Helvetica,Arial,'Liberation Sans',sans-serif;max-width:62rem;
margin:2rem auto;padding:0 1.2rem;color:#24292f;background:#fff}h1{font-size:26px}h2{font-size:20px;margin-top:2.4rem}
table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .6rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}pre{background:#f6f7f9;padding:.8rem;white-space:pre-wrap;font-size:12px}
details{margin:.6rem 0}summary{cursor:pointer}"""


def write_page(folder: Path, title: str, parts: Sequence[str | go.Figure]) -> Path:
    """`report.html` and, beside it, plotly.js. `parts`: HTML, or figures."""
    texts = [part if isinstance(part, str) else _embedded(part) for part in parts]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f'<style>{STYLE}</style><script src="{PLOTLY_FILE}"></script>'
    )
    (folder / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(f'<!doctype html><html lang="en">{head}{"".join(texts)}</html>', encoding="utf-8")
    return path


def _embedded(figure: go.Figure) -> str:
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return text


def model_parts(measured: Sequence[Measured], about: str) -> list[str | go.Figure]:
    """The page of one model on one text."""
    parts: list[str | go.Figure] = [f"<p>{html.escape(about)}</p>"]
    metrics: dict[str, None] = {}
    for one in measured:
        if one.name:
            parts.append(f"<h2>{html.escape(one.name)}</h2>")
        parts += _stack_parts(one)
        metrics |= dict.fromkeys(one.stats.metrics)
    definitions = "".join(f"<li><b>{name}</b>: {html.escape(METRICS[name].definition)}</li>" for name in metrics)
    return [*parts, f"<h2>Definitions</h2><ul>{definitions}</ul>"]


def _stack_parts(one: Measured) -> list[str | go.Figure]:
    table, tables = one.stats.to_pandas(), one.tables
    parts: list[str | go.Figure] = [f"<pre>{html.escape(chr(10).join(one.stats.manifest['sites']))}</pre>"]
    if one.stats.absent:
        parts.append(f"<p>Do not apply to this model: {html.escape(', '.join(one.stats.absent))}.</p>")
    parts += [f"<p>Left out: {html.escape(reason)}.</p>" for reason in left_out(one)]
    has_scale = table.groupby(["metric", "site"])["layer"].transform("nunique") > 1  # the final norm has one layer
    parts.append(layer_heatmap(table[has_scale] if one.where.depth > 1 else table))
    draw = {"skip_sensitivity": _skip_figure, "logit_lens": _lens_figure, "angular_distance": _angle_figure}
    parts += [figure(tables[name]) for name, figure in draw.items() if name in tables]
    found = set(table["metric"])
    parts += [layer_figure(table, metric) for metric in one.stats.metrics if metric in found]
    massive = one.stats.massive(top=3).query("mask == 'all'").drop(columns="mask")
    shown = massive.to_html(index=False, float_format=lambda x: f"{x:.4g}", border=0)
    parts.append(f"<details><summary>Largest features</summary>{shown}</details>")
    if "spans" in tables:
        lines = "".join(f"<li>{html.escape(span_line(row))}</li>" for row in tables["spans"].itertuples())
        parts.append(
            "<h2>What to cut</h2><p>The span of blocks that costs least to drop, at each length, in nats a token with "
            f"its 95% interval, chosen on other text than it is measured on where there is enough.</p><ul>{lines}</ul>"
        )
    return parts


def left_out(one: Measured) -> list[str]:
    """What was not measured of a stack, with its layers, and why."""
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
    """The page of several recordings, `by` model, text or revision: every metric at its default site, a line each;
    of revisions a heat map as well. `table`: columns `by`, stack, site, layer, metric, mask, value; `missing`: what was
    not measured, in words."""
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
            parts.append(_lines_figure(lines, by, str(metric), site))
            if by == "revision" and len(losses) > 1:
                parts.append(_heat_figure(lines, by, str(metric), site))
    return parts


def _lines_figure(lines: pd.DataFrame, by: str, metric: str, site: str) -> go.Figure:
    row, names = metric_row(metric), list(dict.fromkeys(lines[by]))
    figure = go.Figure()
    for i, name in enumerate(names):
        line = lines[lines[by] == name]
        color = theme.step_color(i, max(1, len(names) - 1)) if by == "revision" else COLORS[i % len(COLORS)]
        figure.add_scatter(
            x=line["layer"].astype(int).tolist(),
            y=line["value"].tolist(),
            name=name,
            mode="lines+markers",
            line={"color": color},
            marker={"size": 5},
            hovertemplate=f"{name}, layer %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    log = row.log and bool((lines["value"] > 0).all())
    figure.update_xaxes(title_text="layer", dtick=1 if lines["layer"].max() <= WHOLE_TICKS else None)
    axis = theme.value_axis(theme.axis_bounds(lines["value"], log), log)
    figure.update_yaxes(title_text=row.axis, exponentformat="power", **axis)
    figure.update_layout(showlegend=True)
    return theme.titled(figure, f"{row.label}, {site_label(site)}", _folded(row.definition), 430)


def _heat_figure(lines: pd.DataFrame, by: str, metric: str, site: str) -> go.Figure:
    row = metric_row(metric)
    grid = lines.pivot_table(index="layer", columns=by, values="value", sort=False).sort_index()
    grid = grid.reindex(columns=list(dict.fromkeys(lines[by])))
    log = row.log and bool((lines["value"] > 0).all())
    shown = grid.map(math.log10) if log else grid
    bar: dict[str, Any] = {"title": "log10" if log else row.unit, "exponentformat": "power", "outlinewidth": 0}
    heat = go.Heatmap(
        z=shown.values.tolist(),
        x=[str(name) for name in grid.columns],
        y=[int(layer) for layer in grid.index],
        customdata=grid.values.tolist(),
        hovertemplate="%{x}, layer %{y}: %{customdata:.4g}<extra></extra>",
        colorscale="Viridis",
        colorbar=bar,
    )
    figure = go.Figure(heat)
    figure.update_xaxes(title_text=by, type="category")
    figure.update_yaxes(title_text="layer", dtick=1 if len(grid) <= WHOLE_TICKS // 2 else None)
    return theme.titled(figure, f"{row.label} over training, {site_label(site)}", "", 300 + 8 * len(grid))


def _folded(text: str) -> str:
    return "<br>".join(wrap(text, 100))


def _titled(figure: go.Figure, title: str, definition: str, y: str, height: int = 430) -> go.Figure:
    last = max(max(trace.x) for trace in figure.data)
    figure.update_xaxes(title_text="layer", dtick=1 if last <= WHOLE_TICKS else None)
    figure.update_yaxes(title_text=y, exponentformat="power")
    return theme.titled(figure, title, _folded(definition), height)


def _skip_figure(table: pd.DataFrame) -> go.Figure:
    figure = go.Figure()
    for color, (part, line) in zip(COLORS, table.groupby("part", sort=False), strict=False):
        bars = {"type": "data", "array": [0 if math.isnan(e) else e for e in (line["high"] - line["skip_delta_loss"])]}
        figure.add_scatter(
            x=line["layer"].tolist(),
            y=line["skip_delta_loss"].tolist(),
            error_y=bars,
            name=str(part),
            mode="lines+markers",
            line={"color": color},
        )
    figure.update_layout(showlegend=True)
    words = "skip_delta_loss: loss with the part skipped minus loss of the whole model; bars: 95% interval"
    return _titled(figure, "Loss added by leaving out a part", words, "nats a token")


def _lens_figure(table: pd.DataFrame) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(
        x=table["layer"].tolist(), y=table["value"].tolist(), mode="lines+markers", line={"color": COLORS[0]}
    )
    words = "logit_lens_kl: KL(prediction from the layer || final prediction)"
    return _titled(figure, BY_LAYER["logit_lens_kl"][0], words, "nats")


def _angle_figure(table: pd.DataFrame) -> go.Figure:
    heat = go.Heatmap(
        z=table.values.tolist(),
        x=[int(layer) for layer in table.columns],
        y=[int(layer) for layer in table.index],
        colorscale="Viridis",
        zmin=0,
        colorbar={"exponentformat": "power", "outlinewidth": 0},
    )
    words = "angular_distance: arccos(cos(h_l, h_m))/pi, mean over tokens; 0 = embeddings"
    figure = go.Figure(heat).update_yaxes(dtick=1 if len(table) <= WHOLE_TICKS else None)
    return _titled(figure, BY_PAIR["angular_distance"][0], words, "layer", 480)
