"""Who writes a logit: shares of the embeddings, each attention and each MLP, by two methods side by side."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from normlab.figures import theme as look

HEIGHT = 440
METHODS = {
    "frozen": ("#0072b2", "share of the logit, norm held fixed; the shares add up to it"),
    "jacobian": ("#d55e00", "effect of a small change of the component, to first order"),
}


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


def _name(row: object) -> str:
    component, layer = row.component, row.layer  # type: ignore[attr-defined]
    return f"{component} {layer}" if component in ("attn", "mlp") else str(component)
