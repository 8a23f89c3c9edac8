"""Draw the tables of run.py: achieved bandwidth against the bytes a call must move, and times of everything else.

python kernels/benchmarks/plot.py data/bench        # writes an .html beside each table; needs plotly
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas
import plotly.express as px
import plotly.graph_objects as go
from plan import SECTIONS


def roofline(table: pandas.DataFrame) -> go.Figure:
    """GB/s against floor bytes, a column a pass, a row a function, a line a peer; the dashed line is the copy
    bandwidth."""
    table = table[table.microseconds.notna()].sort_values("floor_bytes")
    copy = table.copy_gigabytes_per_second.median()
    figure = px.line(
        table,
        x="floor_bytes",
        y="gigabytes_per_second",
        color="peer",
        facet_col="pass",
        facet_row="function",
        markers=True,
        log_x=True,
        hover_data=["rows", "width", "microseconds", "share_of_copy"],
        category_orders={"pass": ["forward", "backward", "both"]},
        labels={"floor_bytes": "bytes that must move", "gigabytes_per_second": "GB/s"},
        height=230 * table["function"].nunique() + 120,
        title=f"Row norms on {table.device.iloc[0]}, {table.dtype.iloc[0]}: bytes of the floor over time; dashed: "
        f"copy, {copy:.0f} GB/s (median)",
    )
    panels = dict.fromkeys((trace.xaxis, trace.yaxis) for trace in figure.data)
    line = dict(type="line", x0=0, x1=1, y0=copy, y1=copy, line_dash="dash")
    return figure.update_layout(shapes=[line | dict(xref=f"{x} domain", yref=y) for x, y in panels])  # all at once


def times(table: pandas.DataFrame) -> go.Figure:
    """Microseconds of each function and peer, a column a shape."""
    table = table[table.microseconds.notna()].copy()
    for column in ("peer", "launch"):
        suffix = table.get(column, pandas.Series(pandas.NA, table.index))
        table["function"] += suffix.map(lambda text: f" {text}" if isinstance(text, str) else "")
    table["shape"] = table["rows"].astype(str) + " x " + table.width.astype(str)
    table["pass"] = table["pass"].fillna("whole")
    return px.scatter(
        table,
        x="microseconds",
        y="function",
        color="pass",
        facet_col="shape",
        facet_col_wrap=4,
        log_x=True,
        labels={"microseconds": "us", "function": ""},
        height=26 * table["function"].nunique() * -(-table["shape"].nunique() // 4) + 200,
        title=f"{table.section.iloc[0]} on {table.device.iloc[0]}, {table.dtype.iloc[0]}",
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    for section in SECTIONS:
        for path in sorted(folder.glob(f"{section}_*.csv")):
            table = pandas.read_csv(path, dtype={"pass": "string", "peer": "string"})
            if not table.microseconds.notna().any():
                continue
            figure = roofline(table) if section == "rows" else times(table)
            figure.write_html(path.with_suffix(".html"), include_plotlyjs="cdn")
            print(f"wrote {path.with_suffix('.html')}")


if __name__ == "__main__":
    main()
