"""One figure for one recording: a metric against layer."""

from __future__ import annotations

from textwrap import wrap

import pandas as pd
import plotly.graph_objects as go

from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.probes.metrics import METRICS

COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito, colour-blind safe
LOG_DECADES = 1.5  # a logarithmic axis from this many decades on


def layer_figure(table: pd.DataFrame, metric: str, mask: str = "all") -> go.Figure:
    """`metric` against layer, one labelled line a site. `table`: columns site, layer, metric, mask, value.

    Raises `NormlabError` when the table has no such rows.
    """
    rows = table[(table["metric"] == metric) & (table["mask"] == mask)]
    if rows.empty:
        raise NormlabError(f"the table has no rows for metric {metric!r} with mask {mask!r}")
    figure = go.Figure()
    for i, (site, line) in enumerate(rows.groupby("site", sort=False)):
        line = line.sort_values("layer")
        figure.add_scatter(
            x=line["layer"].astype(int).tolist(), y=line["value"].tolist(), name=str(site), mode="lines+markers",
            line={"color": COLORS[i % len(COLORS)]}, hovertemplate=f"{site}, layer %{{x}}: %{{y:.4g}}<extra></extra>",
        )  # fmt: skip
    values = rows["value"]
    wide = bool((values > 0).all()) and values.max() > values.min() * 10**LOG_DECADES
    figure.update_xaxes(title_text="layer (0 = embeddings)", dtick=1 if rows["layer"].max() <= 32 else None)
    bounds = theme.axis_bounds(values, wide)
    axis = METRICS[metric].axis
    figure.update_yaxes(title_text=axis, exponentformat="power", **theme.value_axis(bounds, wide))
    figure.update_layout(showlegend=True)
    subtitle = "<br>".join(wrap(f"{metric}: {METRICS[metric].definition}", 90))
    label = METRICS[metric].label
    return theme.titled(figure, f"{label[0].upper()}{label[1:]} by layer", subtitle, 450)
