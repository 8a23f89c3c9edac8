"""What bounds BHyT: how much reaches into its tanh, whether its carried statistic holds, and what its gain does."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.theory import chebyshev_bound
from normlab.figures import theme
from normlab.schemes import tagged

BOUNDED = tagged("bound")[0]
_DASHES = ("solid", "dot", "dash", "dashdot")
_ABOVE = dict(orientation="h", x=1, xanchor="right", y=1.02, yanchor="bottom")


def saturation(shares: pd.DataFrame, width: int) -> go.Figure:
    """Share of tanh inputs beyond lambda against kappa, a line a condition, below Chebyshev's bound 1/kappa^2.

    Args:
        shares: columns `condition kappa share`; shares of zero are off the logarithmic axis, and the subtitle says so.
        width: of the model; beyond kappa = sqrt(width) no input can exceed lambda.
    """
    title = "Saturation against κ: the share of tanh inputs beyond λ"
    if shares.empty:
        return theme.message_figure("No share was measured.", title)
    kappas = sorted(shares["kappa"].unique())
    bound = [chebyshev_bound(kappa) for kappa in kappas]
    figure = go.Figure(
        go.Scatter(x=kappas, y=bound, name="Chebyshev bound 1/κ²", line=dict(color=theme.NEUTRAL, width=2))
    )
    color = theme.style_of(BOUNDED).color
    for dash, (condition, rows) in zip(_DASHES, shares.groupby("condition", sort=False), strict=False):
        figure.add_scatter(
            x=rows["kappa"].tolist(),
            y=rows["share"].where(rows["share"] > 0).tolist(),
            name=str(condition),
            mode="markers+lines",
            line=dict(color=color, dash=dash),
            hovertemplate=f"{condition}<br>κ %{{x:g}}: %{{y:.3~g}}<extra></extra>",
        )
    figure.add_vline(x=width**0.5, line=dict(color=theme.NEUTRAL, dash="dot"))
    bounds = theme.axis_bounds([*bound, *shares["share"]], True, 0.05)
    figure.update_yaxes(title_text="share beyond λ", **theme.value_axis(bounds, True)).update_xaxes(title_text="κ")
    figure.update_layout(legend=_ABOVE, margin=dict(l=80, r=30, t=110, b=58))
    zeros = " · shares of zero are not drawn" if shares["share"].eq(0).any() else ""
    return theme.titled(figure, title, f"dotted: κ = √{width}, beyond which no input exceeds λ{zeros}", 460)


def carried_ratio(stages: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Exact over carried mean square at the MLP's norm by layer, a line a stage of training. At 1 they agree.

    Args:
        stages: by its name, columns `layer value` (`carried_var_ratio`).
    """
    figure, color = go.Figure(), theme.style_of(BOUNDED).color
    for dash, (stage, rows) in zip(_DASHES[::-1][-len(stages) :], stages.items(), strict=True):
        figure.add_scatter(
            x=rows["layer"].astype(int).tolist(),
            y=rows["value"].tolist(),
            name=stage,
            mode="lines+markers",
            line=dict(color=color, dash=dash),
            hovertemplate=f"{stage}<br>layer %{{x}}: %{{y:.3f}}<extra></extra>",
        )
    figure.add_hline(y=1, line=dict(color=theme.NEUTRAL, dash="dot"))
    bounds = theme.axis_bounds([1.0, *(value for rows in stages.values() for value in rows["value"])], True, 0.1)
    figure.update_xaxes(title_text="layer", dtick=1)
    figure.update_yaxes(title_text="exact / carried", **theme.value_axis(bounds, True))
    figure.update_layout(legend=_ABOVE, margin=dict(l=72, r=30, t=110, b=58))
    return theme.titled(figure, "The carried statistic at the MLP's norm", "dotted: exact and carried agree", 420)


def loss_over_gain(configs: pd.DataFrame) -> go.Figure:
    """Held-out loss of BHyT over its gain g = lambda/kappa and the gamma it starts with, means over seeds.

    Args:
        configs: table of `normlab.load_configs` with a column `g`; of BHyT's runs at the smallest width, without
            planted outliers.
    """
    title = "Held-out loss over λ/κ and γ₀"
    plain = configs[configs["scheme"].eq(BOUNDED) & configs["outlier_channels"].eq(0)]
    plain = plain[plain["width"].eq(plain["width"].min())]
    if plain.empty:
        return theme.message_figure("No run of BHyT.", title)
    mean = plain.groupby(["g", "gamma0"])["eval_loss"].agg(["mean", "count"]).reset_index()
    own, grey = float(mean["g"].min() * mean["gamma0"].max()), dict(color=theme.NEUTRAL, dash="dash")
    along = [float(mean["g"].min()) / 1.4, float(mean["g"].max()) * 1.4]
    figure = go.Figure(
        go.Scatter(x=along, y=[own / g for g in along], mode="lines", line=grey, hoverinfo="skip", name="g · γ₀")
    )
    figure.add_scatter(
        x=mean["g"].tolist(),
        y=mean["gamma0"].tolist(),
        mode="markers+text",
        name="held-out loss",
        text=[f"{loss:.3f}" for loss in mean["mean"]],
        textposition="top right",
        marker=dict(
            size=18, color=mean["mean"].tolist(), colorscale="Viridis", colorbar=dict(title="nats", thickness=10)
        ),
        customdata=mean["count"].tolist(),
        hovertemplate="g %{x:g}, γ₀ %{y:g}: %{text} nats, %{customdata} seed(s)<extra></extra>",
    )
    for update, values, name in (
        (figure.update_xaxes, mean["g"], "g = λ/κ at the attention norm"),
        (figure.update_yaxes, mean["gamma0"], "γ₀"),
    ):
        axis = theme.value_axis(theme.axis_bounds(values, True, 0.15), True)
        ticks = sorted(values.unique())
        update(title_text=name, **axis | dict(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks]))
    figure.update_layout(showlegend=False, margin=dict(l=72, r=30, t=96, b=58))
    subtitle = f"dashed: g · γ₀ = {own:g}, BHyT's own small-signal map · {int(configs['steps'].max())} steps"
    return theme.titled(figure, title, subtitle, 460)
