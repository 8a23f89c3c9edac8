"""The last layer before and after training, a row a scheme: how much of a difference was there at step 0 (N1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.compare import last_values
from normlab.analysis.selection import NothingToShow, Selection, choose, in_order, mean_of
from normlab.analysis.verdicts import differences
from normlab.figures import theme
from normlab.figures.growth import footnote, published_source, short
from normlab.figures.registry import register
from normlab.probes.metrics import MASKS, Metric, metric_row, site_label

_ROW = 34  # pixels a scheme
# Text columns right of the plot, in pixels from its edge.
_COLUMNS = {"before": 16, "after": 112, "published": 272}


@register("growth_before_after", "N1", "last layer before and after training, with both controls", overlays=True)
def growth_before_after(
    runs: pd.DataFrame,
    metric: str = "token_l2_mean",
    *,
    site: str = "block_out",
    depth: int | str | None = "deepest",
    width: int | None = None,
    schemes: Sequence[str] | None = None,
    mask: str = "all",
    reference: str | None = None,
    published: pd.DataFrame | None = None,
) -> go.Figure:
    """The last layer's value at step 0 (ring) and after training (disc), and its ratio to a reference scheme.

    A scheme that ends low because it began low is seen at a glance: both ends of its line are low. Ratios are paired by
    seed; the 95% interval (`normlab.analysis.verdicts`) is in brackets. Control schemes are always among the rows.

    Args:
        reference: scheme that ratios refer to; default the first of the registry that the table has.
        published: table of `normlab.load_published`: its ratios at the same metric are listed beside ours, and a
            footnote says of which model and how they were read.
    """
    row = metric_row(metric)
    title = f"{row.label[0].upper()}{row.label[1:]} after the last layer: before and after training"
    try:
        chosen = choose(runs, depth, width, schemes, same_rate=True)
    except NothingToShow as why:
        return theme.message_figure(str(why), title)
    start = last_values(chosen, metric, site=site, mask=mask, step=0)
    end = last_values(chosen, metric, site=site, mask=mask)
    table = _ends(start, end, metric)
    if table["end"].notna().sum() == 0:
        return theme.message_figure(
            f"{metric} was not measured at: {site_label(site)}, {MASKS.get(mask, mask)}.", title
        )
    everyone = _everyone(runs, chosen)
    pools = [last_values(everyone, metric, site=site, mask=mask, step=step) for step in (0, None)]
    base = reference or in_order(runs["scheme"].unique())[0]
    theirs = _published_rows(published, row, base, chosen.schemes)
    printed = theirs.set_index("scheme")["value"].astype(np.float64)
    table = table.sort_values("end", na_position="last")
    figure = go.Figure()
    _add_rows(figure, table, row)
    if base in chosen.schemes:
        _add_ratios(
            figure, list(table.index), {"before": (start, pools[0]), "after": (end, pools[1])}, base, row, printed
        )
    names = [_tick(chosen, name) for name in table.index]
    figure.update_yaxes(
        tickvals=list(range(len(table))),
        ticktext=names,
        range=[len(table) - 0.4, -1.1],
        showgrid=False,
        ticks="",
        tickfont=dict(size=13),
    )
    bounds = theme.axis_bounds([*table["start"], *table["end"]], row.log)
    figure.update_xaxes(title_text=row.axis, **theme.value_axis(bounds, row.log))
    figure.update_layout(
        showlegend=False, margin=dict(l=150, r=400 if len(printed) else 275, t=100, b=82 if len(printed) else 62)
    )
    if len(printed):
        layers = ", ".join(str(layer) for layer in sorted(theirs["layer"].unique()))
        footnote(figure, f"published: ratio in another model after its layer {layers}: {published_source(theirs)}.")
    subtitle = f"{site_label(site)}, {MASKS.get(mask, mask)} · {chosen.describe()} · ○ step 0, ● after training"
    return theme.titled(figure, title, subtitle, 180 + 20 * bool(len(printed)) + _ROW * (len(table) + 1))


def _everyone(runs: pd.DataFrame, chosen: Selection) -> Selection:
    """All schemes at the figure's depth and width, which say how far seeds move them, as `normlab.compare` asks; those
    shown, where the others' rates made for another choice of runs."""
    around = choose(runs, chosen.depths[0], int(chosen.runs["width"].iloc[0]), same_rate=True)
    return around if chosen.runs.index.isin(around.runs.index).all() else chosen


def _ends(start: pd.DataFrame, end: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Indexed by scheme: mean (geometric for sizes) over seeds at both ends, and the range of seeds at the end."""

    def mean(values: pd.Series) -> float:
        return mean_of(values.dropna(), metric)

    grouped = end.groupby("scheme", observed=True)["value"]
    table = grouped.agg(end=mean, low="min", high="max", seeds="count")
    table["start"] = start.groupby("scheme", observed=True)["value"].agg(mean)
    return table


def _tick(chosen: Selection, name: str) -> str:
    style, remark = theme.style_of(name), chosen.remark(name)
    small = ", ".join(word for word in ("control" if style.is_control else "", remark) if word)
    return f"<b style='color:{style.color}'>{style.title}</b>" + (
        f"<br><span style='font-size:10px'>{small}</span>" if small else ""
    )


def _add_rows(figure: go.Figure, table: pd.DataFrame, row: Metric) -> None:
    for place, (name, ends) in enumerate(table.iterrows()):
        style = theme.style_of(str(name))
        x = [_number(ends["start"]), _number(ends["end"])]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=[place, place],
                mode="lines+markers",
                name=str(name),
                meta=dict(scheme=str(name)),
                line=dict(color=theme.faded(style.color, 0.45), width=3),
                marker=dict(
                    color=style.color,
                    opacity=1,
                    size=[11, 12],
                    symbol=["circle-open", "circle"],
                    line=dict(width=2, color=style.color),
                ),
                customdata=[
                    ["step 0"],
                    [f"after training; seeds {ends['low']:.4g} to {ends['high']:.4g} ({int(ends['seeds'])})"],
                ],
                hovertemplate=f"<b>{style.title}</b><br>%{{x:.4~g}}, %{{customdata[0]}}"
                f"<br><i>{row.name}: {row.definition}</i><extra></extra>",
            )
        )


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _add_ratios(
    figure: go.Figure,
    names: list[str],
    ends: dict[str, tuple[pd.DataFrame, pd.DataFrame]],
    base: str,
    row: Metric,
    printed: pd.Series,
) -> None:
    """Columns of text right of the rows: ratio or difference to the reference at step 0, after training (each with the
    runs that its variance is pooled over), published."""
    heads = {"before": "step 0", "after": "trained"} | ({"published": "published"} if len(printed) else {})
    word = "ratio to" if row.is_ratio else "difference from"
    _text(figure, -0.95, _COLUMNS["before"], f"<b>{word} {theme.style_of(base).title}</b>", theme.NEUTRAL)
    for key, head in heads.items():
        _text(figure, -0.55, _COLUMNS[key], head, theme.NEUTRAL)
    for place, name in enumerate(names):
        cells = {key: _ratio(*values, name, base, row.name) for key, values in ends.items()}
        if name in printed.index:
            cells["published"] = f"{printed[name] / printed[base]:.2f}"
        for key, text in cells.items():
            _text(
                figure,
                place,
                _COLUMNS[key],
                text.split(" ")[0] if key == "before" else text,
                theme.style_of(name).color,
            )


def _ratio(values: pd.DataFrame, pool: pd.DataFrame, name: str, base: str, metric: str) -> str:
    if name == base:
        return "1" if metric_row(metric).is_ratio else "0"
    found = differences(values, name, base, metric, pool=pool).iloc[0]
    if not math.isfinite(found["estimate"]):
        return "–"
    interval = "" if math.isnan(found["low"]) else f" [{short(found['low'])}, {short(found['high'])}]"
    return short(found["estimate"]) + interval


def _published_rows(published: pd.DataFrame | None, row: Metric, base: str, schemes: Sequence[str]) -> pd.DataFrame:
    """A row a scheme, from the paper's figure that reads this metric at a layer; none where it has no ratio to the
    base."""
    if published is None:
        return pd.DataFrame(columns=["scheme", "value"])
    keep = (published["metric"] == row.name) & published["scheme"].isin(schemes) & published["layer"].notna()
    rows = published[keep].drop_duplicates("scheme")
    return rows if row.is_ratio and base in set(rows["scheme"]) else rows.iloc[:0]


def _text(figure: go.Figure, place: float, shift: int, text: str, color: str) -> None:
    figure.add_annotation(
        x=1,
        xref="paper",
        xanchor="left",
        xshift=shift,
        y=place,
        yref="y",
        showarrow=False,
        align="left",
        text=text,
        font=dict(size=12, color=color),
    )
