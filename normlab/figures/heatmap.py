"""One figure for all that a recording found: every metric and site against layer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.probes.metrics import metric_row, site_label, site_order


def layer_heatmap(table: pd.DataFrame, metric: str | None = None, mask: str = "all") -> go.Figure:
    """A row a metric and site, a column a layer; each row has a colour scale of its own, from its smallest value (dark)
    to its largest, logarithmic where the metric's axis is; the value itself is one hover away. A row of equal
    values is between the two.

    Args:
        table: columns `site layer metric mask value`.
        metric: only this one. mask: of the tokens.

    Raises `NormlabError` when the table has no such rows.
    """
    rows = table[(table["mask"] == mask) & table["layer"].notna()]
    rows = rows if metric is None else rows[rows["metric"] == metric]
    if rows.empty:
        raise NormlabError(f"the table has no rows for metric {metric!r} with mask {mask!r}")
    grid = rows.pivot_table(index=["metric", "site"], columns="layer", values="value", sort=False)
    grid = grid.reindex(sorted(grid.columns), axis=1)
    order = list(dict.fromkeys(rows["metric"]))
    places = sorted(grid.index, key=lambda place: (order.index(place[0]), site_order(place[1])))
    grid = grid.loc[places]
    values = grid.to_numpy(dtype=float)
    shares = np.vstack([_share(line, metric_row(name).log) for line, (name, _) in zip(values, places, strict=True)])
    figure = go.Figure(
        go.Heatmap(
            z=shares,
            x=[int(layer) for layer in grid.columns],
            y=[f"{metric_row(name).label}, {site_label(site)}" for name, site in places],
            customdata=values,
            hovertemplate="%{y}<br>layer %{x}: %{customdata:.4g}<extra></extra>",
            colorscale="Viridis",
            zmin=0,
            zmax=1,
            colorbar={"title": "of the row", "tickvals": [0, 1], "ticktext": ["least", "most"], "outlinewidth": 0},
        )
    )
    figure.update_xaxes(title_text="layer", dtick=1 if grid.shape[1] <= 32 else None, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    title = "All metrics" if metric is None else metric_row(metric).label
    return theme.titled(figure, title, "each row on a scale of its own", 180 + 22 * len(places))


def _share(values: np.ndarray, log: bool) -> np.ndarray:
    """Where each value lies between the smallest and the largest, 0 to 1; NaN for what is not finite."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if log and np.nanmin(finite, initial=np.inf) > 0:
        finite = np.log(finite)
    low, high = np.nanmin(finite, initial=np.inf), np.nanmax(finite, initial=-np.inf)
    return (finite - low) / (high - low) if high > low else np.where(np.isnan(finite), np.nan, 0.5)
