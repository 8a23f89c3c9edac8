"""Who writes a logit: shares of the embeddings, each attention and each MLP, by two methods side by side; how well
shares predict what a small change does; one stream measured by two tools."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.notebook_tables.attribution import components
from normlab.figures import theme as look
from normlab.probes.metrics import metric_row

HEIGHT = 440
METHODS = {
    "frozen": ("#0072b2", "share of the logit, norm held fixed; the shares add up to it"),
    "jacobian": ("#d55e00", "effect of a small change of the component, to first order"),
}
# The third way, for comparison only, and what each is drawn with where shares are dots.
_LINEAR = ("#8a8f98", "tanh taken for its argument")
_SYMBOLS = {"frozen": "square-open", "jacobian": "circle", "linear": "x-thin-open"}


def logit_attribution(tables: Mapping[str, pd.DataFrame], theme: str = "light") -> go.Figure:
    """Bars by component, a colour a method; a dotted line parts attention and MLP of a block from the next.

    Args:
        tables: by method ("frozen", "jacobian"), what `normlab.models.lens.direct_logit_attribution` returns;
            `.attrs["name"]` may say what was attributed if it is not a logit but a difference of two.
        theme: "light" or "dark".
    """
    title = "Who writes the logit"
    if not tables:
        return look.message_figure("Nothing was attributed: pass tables of direct_logit_attribution.", title)
    figure = go.Figure()
    sums = []
    for method, table in tables.items():
        color, meaning = METHODS[method]
        rows = table[~table["component"].isin(["bias", "remainder"]) | (table["contribution"].abs() > 1e-3)]
        figure.add_bar(
            name=method,
            x=[_name(row) for row in rows.itertuples()],
            y=look.finite(rows["contribution"]),
            marker=dict(color=look.ink(color, theme)),
            hovertemplate=f"<b>{method}</b><br>%{{x}}: %{{y:+.3f}}<br><i>{meaning}</i><extra></extra>",
        )
        shares = table.loc[table["component"] != "remainder", "contribution"].sum()
        sums.append(f"{method} shares add up to {round(shares, 3) + 0.0:.3f}")
    figure.update_xaxes(title_text="component", type="category")
    figure.update_yaxes(title_text="share of the logit (nats)", zeroline=True, zerolinecolor=look.NEUTRAL)
    legend = dict(orientation="h", x=1, xanchor="right", y=1.02, yanchor="bottom")
    figure.update_layout(barmode="group", bargap=0.3, legend=legend, margin=dict(l=72, r=24, t=96, b=64))
    first = next(iter(tables.values())).attrs
    small = " · ".join([f"{first.get('name', 'logit')} {first['logit']:.3f}", *sums])
    look.titled(figure, look.in_one(title, small), "", HEIGHT)
    return figure.update_layout(template=look.template(theme), autosize=True)


def shares_and_effects(tables: Mapping[str, pd.DataFrame], effects: pd.DataFrame, theme: str = "light") -> go.Figure:
    """Each component's share against what a small change of it was measured to do: on the dotted line they agree.

    Args:
        tables: by method ("frozen", "jacobian", "linear"), what `normlab.models.lens.direct_logit_attribution` returns.
        effects: what `normlab.models.lens.component_effects` returns.
        theme: "light" or "dark".
    """
    title = "What a small change of a component does, and what was attributed to it"
    if not tables:
        return look.message_figure("Nothing was attributed: pass tables of direct_logit_attribution.", title)
    measured = components(effects)
    figure = go.Figure()
    low, high = look.axis_bounds(measured["effect"], log=False, pad=0.1) or (0.0, 1.0)
    agree = dict(color=look.NEUTRAL, dash="dot", width=1.4)
    figure.add_scatter(x=[low, high], y=[low, high], name="as measured", mode="lines", line=agree, hoverinfo="skip")
    for method, table in tables.items():
        color, meaning = METHODS.get(method, _LINEAR)
        color = look.ink(color, theme)
        own = components(table).merge(measured[["name", "effect"]], on="name")
        figure.add_scatter(
            x=look.finite(own["effect"]),
            y=look.finite(own["contribution"]),
            name=method,
            text=own["name"].tolist(),
            mode="markers",
            marker=dict(color=color, size=10, symbol=_SYMBOLS[method], line=dict(width=2, color=color)),
            hovertemplate=f"<b>%{{text}}</b><br>measured %{{x:.4f}}, {method} %{{y:.4f}}<br><i>{meaning}</i>"
            "<extra></extra>",
        )
    figure.update_xaxes(title_text="measured: nats per relative change of the component")
    figure.update_yaxes(title_text="attributed (nats)")
    figure.update_layout(legend=dict(orientation="h", x=1, xanchor="right", y=1.02, yanchor="bottom"))
    name = next(iter(tables.values())).attrs.get("name", "logit")
    about = f"a dot a component · on the dotted line, its share of the {name} is its measured effect"
    return look.titled(figure, title, about, 500).update_layout(template=look.template(theme))


def by_tool(table: pd.DataFrame, metric: str, theme: str = "light") -> go.Figure:
    """A metric by layer as several tools measured it: the first a line, the others rings on it where they agree.

    Args:
        table: columns `tool layer value`, the tools in the order in which they are drawn.
        metric: a name of `METRICS`, for the axis.
        theme: "light" or "dark".
    """
    row = metric_row(metric)
    title = f"{row.label[0].upper()}{row.label[1:]} by layer"
    if table.empty:
        return look.message_figure("No tool measured anything.", title)
    figure = go.Figure()
    colors = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
    tools = list(dict.fromkeys(table["tool"]))
    for place, tool in enumerate(tools):
        own, color = table[table["tool"] == tool].sort_values("layer"), look.ink(colors[place % len(colors)], theme)
        drawn = dict(mode="lines", line=dict(color=color, width=2.2))
        if place:
            ring = dict(color=color, size=11 + 4 * place, symbol="circle-open", line=dict(width=2))
            drawn = dict(mode="markers", marker=ring)
        figure.add_scatter(
            x=own["layer"].astype(int).tolist(),
            y=look.finite(own["value"]),
            name=str(tool),
            hovertemplate=f"<b>{tool}</b>, layer %{{x}}: %{{y:.4~g}}<extra></extra>",
            **drawn,
        )
    layers = table["layer"].astype(int)
    figure.update_xaxes(title_text="layer (0 = embeddings)", dtick=max(1, round(int(layers.max()) / 12)))
    bounds = look.axis_bounds(table["value"], row.log)
    figure.update_yaxes(title_text=row.axis, **look.value_axis(bounds, row.log))
    figure.update_layout(legend=dict(orientation="h", x=1, xanchor="right", y=1.02, yanchor="bottom"))
    about = "one stream, measured by " + " and by ".join(map(str, tools))
    return look.titled(figure, title, about, 420).update_layout(template=look.template(theme))


def _name(row: object) -> str:
    component, layer = row.component, row.layer  # type: ignore[attr-defined]
    return f"{component} {layer}" if component in ("attn", "mlp") else str(component)
