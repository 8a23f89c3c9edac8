"""Pages of a report, and the file plotly.min.js that pages of normlab share.

Section          one folded part of a page: a figure, or HTML
write_page       an opening, contents and sections as one page
write_plotly     plotly.js next to pages that read it
dark_script      figures in dark colours, where the reader's system is dark
model_page       the page of one model on one text
series_page      the page of several recordings
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from normlab.analysis.verdicts import bracketed
from normlab.figures.report import (
    angles,
    branch_costs,
    layer_figure,
    layer_heatmap,
    layer_map,
    lens,
    recorded_map,
    skip_costs,
    void_shares,
)
from normlab.figures.theme import CONFIG, on_dark, plain_template
from normlab.probes.metrics import metric_row
from normlab.report.facts import FOUND, by_reason, growth, left_out, shared_and_own, span, stack_facts, step
from normlab.report.measure import Measured, Pairs, Recorded

PLOTLY_FILE = "plotly.min.js"
STYLE = """:root{color-scheme:light dark;--text:#24292f;--soft:#52606d;--line:#dfe2e6;--card:#f6f7f9;--page:#fff;
--link:#0b5cad}
@media (prefers-color-scheme:dark){:root{--text:#e6e8eb;--soft:#a9b1bb;--line:#39414a;--card:#1c2127;--page:#14171b;
--link:#6cb6ee}}
body{font:15px/1.55 Inter,'Helvetica Neue',Helvetica,Arial,'Liberation Sans',sans-serif;max-width:62rem;
margin:2rem auto;padding:0 1.2rem;color:var(--text);background:var(--page)}h1{font-size:26px;overflow-wrap:anywhere}
h2{font-size:20px;margin-top:2.4rem}table{border-collapse:collapse;font-size:13px}
td,th{padding:.15rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
pre{background:var(--card);padding:.8rem;white-space:pre-wrap;font-size:12px}
a{color:var(--link)}li{margin:.25rem 0;overflow-wrap:anywhere}
nav ul{columns:19rem;padding-left:1.2rem;font-size:14px;margin-top:0}
nav li{margin:0}nav p{margin:.6rem 0 0}
details{margin:.3rem 0;border-top:1px solid var(--line);padding-top:.3rem}summary{cursor:pointer;font-weight:600}
details p{margin:.3rem 0;font-size:13px;color:var(--soft)}.scroll{overflow-x:auto}.wide>div{min-width:40rem}
.scroll::-webkit-scrollbar{height:8px}.scroll::-webkit-scrollbar-thumb{background:#9aa5b1;border-radius:4px}
.scroll::-webkit-scrollbar-track{background:var(--line);border-radius:4px}"""
# A figure has no size while it is folded. After a change of width plotly leaves a legend on the axes until it draws
# anew. A link of the contents unfolds what it leads to.
SCRIPT = """for(const part of document.querySelectorAll("details"))part.addEventListener("toggle",()=>{
if(part.open)part.querySelectorAll(".plotly-graph-div").forEach(figure=>Plotly.Plots.resize(figure))});
let rest;addEventListener("resize",()=>{clearTimeout(rest);rest=setTimeout(()=>
document.querySelectorAll("details[open] .plotly-graph-div").forEach(figure=>Plotly.redraw(figure)),300)});
const unfold=hash=>{const part=hash&&document.getElementById(hash.slice(1));if(part)part.open=true};
document.querySelectorAll("nav a").forEach(link=>link.addEventListener("click",()=>unfold(link.hash)));
unfold(location.hash);"""
LINES_HEIGHT = 290  # pixels of a figure of lines on a page
TOP = 34  # pixels above its axes: for a legend
WIDE = 9  # letters of the names beside a heat map, from which a narrow page scrolls it
SHOWN_ROWS = 50
FIRST = ("rms",)  # metrics before the experiments


@dataclass(frozen=True)
class Section:
    """A folded part of a page: `body` is HTML above the figure. Sections of one `group` have it for a heading."""

    title: str
    body: str = ""
    figure: go.Figure | None = None
    group: str = ""


def drawn(figure: go.Figure, group: str = "", on: str = "") -> Section:
    """A figure as a section. What was its title and subtitle is then the page's, and it is flat.

    on: the end of the subtitle: which part of the text was read.
    """
    title, words = figure.layout.title.text, figure.layout.title.subtitle.text or ""
    is_lines = all(trace.type == "scatter" for trace in figure.data)
    height = LINES_HEIGHT if is_lines else figure.layout.height - figure.layout.margin.t + TOP
    legend = dict(orientation="h", x=0, xanchor="left", y=1, yanchor="bottom")
    layout = figure.layout
    layout.title, layout.height, layout.margin.t = None, height, TOP
    layout.legend.update(legend)
    return Section(_plain(title), f"<p>{html.escape(_plain(words) + on)}</p>" if words else "", figure, group)


def _plain(text: str) -> str:
    return text.replace("<br>", " ")


def dark_script() -> str:
    """JavaScript that lets plotly draw figures as `normlab.figures.themed` does, where the reader's system is dark."""
    looks = json.dumps({"colors": on_dark(), "template": plain_template("dark")})
    return f"""if(matchMedia("(prefers-color-scheme: dark)").matches){{const newPlot=Plotly.newPlot,looks={looks};
Plotly.newPlot=(place,data,layout,config)=>{{let text=JSON.stringify({{data,layout}});
for(const [light,dark] of Object.entries(looks.colors))text=text.replaceAll(light,dark);
const drawn=JSON.parse(text);return newPlot(place,drawn.data,{{...drawn.layout,template:looks.template}},config)}}}}"""


def write_plotly(folder: Path) -> None:
    """Write plotly.js into a folder of pages that read it."""
    (folder / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")


def write_page(folder: Path, title: str, opening: str, sections: Sequence[Section], unfolded: int = 2) -> Path:
    """Write `report.html` with its plotly.js: the opening (HTML), links to the sections, and these.

    unfolded: the first so many sections are open.
    """
    write_plotly(folder)
    options: dict[str, Any] = dict(full_html=False, include_plotlyjs=False, config=CONFIG | {"responsive": True})
    links, parts = "", ""
    for number, section in enumerate(sections, 1):
        if number == 1 or section.group != sections[number - 2].group:
            group = html.escape(section.group)
            links += f"{'</ul>' * (number > 1)}{f'<p>{group}</p>' * bool(group)}<ul>"
            parts += f"<h2>{group}</h2>" * bool(group)
        heading, body = html.escape(section.title), section.body
        links += f'<li><a href="#part-{number}">{heading}</a></li>'
        if section.figure is not None:
            names = max((len(str(name)) for trace in section.figure.data for name in _names(trace)), default=0)
            wide = " wide" * (names > WIDE)
            body += f'<div class="scroll{wide}">{section.figure.to_html(**options)}</div>'
        is_open = " open" * (number <= unfolded)
        parts += f'<details id="part-{number}"{is_open}><summary>{heading}</summary>{body}</details>'
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f'<style>{STYLE}</style><script src="{PLOTLY_FILE}"></script>'
        f"<script>{dark_script()}</script>"
    )
    contents = f"<nav><h2>Contents</h2>{links}</ul></nav>" * (len(sections) > unfolded)
    body = f"<h1>{html.escape(title)}</h1>{opening}{contents}{parts}<script>{SCRIPT}</script>"
    path = folder / "report.html"
    path.write_text(f'<!doctype html><html lang="en">{head}{body}</html>', encoding="utf-8")
    return path


def _names(trace: Any) -> Sequence[Any]:
    """The names along a heat map's rows, which take room beside it."""
    return [name for name in trace.y if isinstance(name, str)] if trace.type == "heatmap" else ()


def model_page(measured: Sequence[Measured], about: str, scheme: str | None = None) -> tuple[str, list[Section]]:
    """The opening and the sections of one model on one text.

    Args:
        measured: its stacks.
        about: a sentence on the data and the loss.
        scheme: of a model of ours, which has its colour.
    """
    shared, own = shared_and_own({one.name: left_out(one) for one in measured})
    opening = f"<p>{html.escape(about)}</p>"
    for one in measured:
        heading = f"<h2>{html.escape(one.name)}</h2>" if one.name else ""
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in stack_facts(one))
        opening += f"{heading}<ul>{facts}</ul>{_missing(own[one.name] if len(own) > 1 else shared)}"
    opening += _missing(shared) if len(own) > 1 else ""
    return opening, [section for one in measured for section in _sections(one, scheme)]


def _missing(pairs: Pairs) -> str:
    """What was left out, below a line that opens it."""
    words = html.escape(f"{'; '.join(by_reason(pairs))}.")
    return f"<details><summary>Left out, and why</summary><p>{words}</p></details>" if pairs else ""


def _sections(one: Measured, scheme: str | None) -> Iterator[Section]:
    """The figures and tables of a stack; each figure says the definition of its metric."""
    table, tables, group = one.values, one.tables, one.name

    def colored(names: Sequence[str]) -> Mapping[str, str]:
        return {} if scheme is None else {names[0]: scheme}

    found = table[table["mask"] == "all"]

    def tested(name: str, figure: go.Figure) -> Section:
        return drawn(figure, group, one.said_of_pieces(name))

    def by_layer(metrics: Sequence[str]) -> Iterator[Section]:
        for metric in metrics:
            rows = found[found["metric"] == metric]
            if len(rows):
                yield drawn(layer_figure(rows, metric, schemes=colored([*rows["site"]])), group)

    yield from by_layer(FIRST)
    if "skip_sensitivity" in tables:
        costs = tables["skip_sensitivity"]
        yield tested("skip_sensitivity", skip_costs(costs, colored([*costs["part"]])))
    if cuts := cut_lines(one):
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in cuts)
        pieces = one.said_of_pieces("spans") or one.said_of_pieces("branches")  # one block has no span
        words = (
            "The span of blocks that costs least to drop, at each length; attention and MLP branches that cost least "
            "together, each new one beside those before it. In nats a token with the 95% interval"
            f"{pieces}, chosen on other text than it is measured on where there is enough."
        )
        yield Section("What to cut", f"<p>{words}</p><ul>{lines}</ul>", group=group)
    if "branches" in tables:
        yield tested("branches", branch_costs(tables["branches"], schemes=colored(["cheapest"])))
    if "angular_distance" in tables:
        yield tested("angular_distance", angles(tables["angular_distance"]))
    if "void_tokens" in tables:
        yield tested("void_tokens", void_shares(tables["void_tokens"], schemes=colored(["void"])))
    if "logit_lens" in tables:
        yield tested("logit_lens", lens(tables["logit_lens"], colored(["KL"])))
    for name, title in FOUND.items():
        if name in one.found:
            yield Section(title, _token_table(one, name), group=group)
    has_scale = table.groupby(["metric", "site"])["layer"].transform("nunique") > 1  # the final norm has one layer
    yield drawn(layer_heatmap(table[has_scale] if one.where.depth > 1 else table), group)
    yield from by_layer([metric for metric in one.stats.metrics if metric not in FIRST])
    massive = one.stats.massive(top=3).query("mask == 'all'").drop(columns="mask")
    yield Section("Largest features", _table(massive), group=group)
    yield Section("Places", f"<pre>{html.escape(chr(10).join(one.stats.manifest['sites']))}</pre>", group=group)


def _table(table: pd.DataFrame) -> str:
    shown = table.head(SHOWN_ROWS).to_html(index=False, float_format=lambda x: f"{x:.4g}", border=0)
    more = f"<p>The first {SHOWN_ROWS} of {len(table)} rows.</p>" if len(table) > SHOWN_ROWS else ""
    return f'<div class="scroll">{shown}</div>{more}'


def _token_table(one: Measured, name: str) -> str:
    """What was found by which rule; where nothing was, what came nearest."""
    found, of = one.found[name], f" of {one.pieces[name]} pieces" if name in one.pieces else ""
    words, table = f"In the first batch{of}: {found.rule}.", found.table
    if table.empty and found.nearest is not None:
        words, table = f"None in the first batch{of}: {found.rule}; the nearest:", pd.DataFrame([found.nearest])
    return f"<p>{html.escape(words)}</p>{_table(table)}"


def cut_lines(one: Measured) -> list[str]:
    """What is cheapest to drop: spans as transformers and mergekit name them, branches as LLM-Drop does."""
    lines = []
    for row in one.tables["spans"].itertuples() if "spans" in one.tables else ():
        kept = " and ".join(str(part) for part in row.keep)
        place = f"layers[{row.start}:{row.stop}] in transformers, mergekit keeps {kept}"
        lines.append(f"cheapest {row.length} to drop: {span(row.first, row.last)}, {_cost(row)}; {place}")
    for row in one.tables["branches"].itertuples() if "branches" in one.tables else ():
        named = f"{row.part} {row.layer}" if row.dropped == 1 else f"{row.part} {row.layer} and those before it"
        lists = f"drop_attn_list {row.drop_attn_list}, drop_mlp_list {row.drop_mlp_list}"
        lines.append(f"cheapest {_branches(row.dropped)} to drop: {named}, {_cost(row)}; {lists} in LLM-Drop")
    return lines


def _branches(count: int) -> str:
    return "branch" if count == 1 else f"{count} branches"


def _cost(row: Any) -> str:
    sure = bracketed(row.low, row.high, "{:+.4f}".format) or ", of one sequence: no interval"
    return f"loss {row.skip_delta_loss:+.4f}{sure}"


def map_section(table: pd.DataFrame) -> Section:
    """How well one model's layers predict the other's; the table's axes are named by the models."""
    return drawn(layer_map(table, table.index.name, table.columns.name))


def series_page(recorded: Sequence[Recorded], by: str, about: str) -> tuple[str, list[Section]]:
    """The page of several recordings: a figure per metric at its default site, and heat maps of revisions.

    Args:
        by: "model", "text" or "revision".
        about: a sentence on the data.
    """
    shared, own = shared_and_own({one.label: one.missing for one in recorded})
    items = ""
    for one in recorded:
        stacks = {str(stack): part for stack, part in one.table.groupby("stack", sort=False)}
        said = [(stack, fact(part)) for fact in (growth, step) for stack, part in stacks.items()]
        facts = [f"{stack}: {words}" if len(stacks) > 1 else words for stack, words in said if words]
        words = html.escape(" ".join([f"{one.loss}.", *facts]))
        items += f"<li><b>{html.escape(one.label)}</b>: {words}{_missing(own[one.label])}</li>"
    opening = f"<p>{html.escape(about)}</p><ul>{items}</ul>{_missing(shared)}"
    sections: list[Section] = []
    schemes = {one.label: one.scheme for one in recorded if one.scheme is not None}
    table = pd.concat([one.table.assign(**{by: one.label}) for one in recorded], ignore_index=True)
    counted = table[table["mask"] == "all"]
    for stack, ours in counted.groupby("stack", sort=False):
        for metric, lines in ours.groupby("metric", sort=False):
            found = set(lines["site"])
            site = next(s for s in (metric_row(str(metric)).default_site, *sorted(found)) if s in found)
            lines = lines[lines["site"] == site].sort_values("layer")
            sections.append(drawn(layer_figure(lines, str(metric), by=by, schemes=schemes), str(stack)))
            if by == "revision" and len(recorded) > 1:
                sections.append(drawn(recorded_map(lines, by, str(metric), site), str(stack)))
    return opening, sections
