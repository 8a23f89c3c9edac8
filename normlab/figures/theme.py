"""One template in two themes, and the colour and dash of each scheme."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from normlab.analysis.selection import title_of
from normlab.analysis.verdicts import DIFFERENT, EQUIVALENT, UNDECIDED
from normlab.errors import NormlabError
from normlab.schemes import SCHEMES

# plotly's options of every figure's toolbar. Its button for sharing would upload the figure.
CONFIG = {"displaylogo": False, "showSendToCloud": False}
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"
# plotly sets a title of several lines higher than one of a single line, above the edge of the page.
LINES_PAD = 28
TITLE_LINE = 24  # pixels of one more line of a title
LETTERS = 90  # of a title's line, and a word more: what a notebook shows on a small screen
_WORD = 12  # letters by which lines of a title may differ
_SMALL_LETTERS, _SMALL_LINE = 175, 17  # of a line under the title: letters at most, and pixels of one more
_TOP = 96  # pixels above the axes, where a figure asks for no other room
# Legible on white and on near-black: for reference lines and step 0.
NEUTRAL = "#8a8f98"
# Training step, early to late. Blue to orange is safe for colour-blind readers, and no stop fades into either
# background.
STEPS = ((0.0, "#5b8def"), (0.5, "#a55cc7"), (1.0, "#e8590c"))
# Of a heat map: dark is much, legible on both pages.
SEQUENTIAL = ((0.0, "#f3f6fb"), (0.5, "#5b8def"), (1.0, "#3b1f6b"))
# How a difference of two schemes is marked for its verdict (`normlab.analysis.verdicts`), and the same in words.
VERDICT_MARKS = {DIFFERENT: "circle", EQUIVALENT: "square", UNDECIDED: "circle-open"}
VERDICT_KEY = "● different, ■ equivalent, ○ undecided"
# Scheme colours too dark for a dark page, or too near to one that becomes brighter there, and what they become.
_ON_DARK = {
    "#000000": "#f4f4f5",
    "#0072b2": "#3b9ddd",
    "#009e73": "#3ddc97",
    "#56b4e9": "#5a6ff0",
    "#8c564b": "#a89060",
}
# What schemes that choose none are drawn with. To every kind of colour vision, no two of these colours
# come near each other (tests/figures/test_figures_looks.py); every dash differs from the next in ink or in period.
COLORS = ("#000000", "#009e73", "#e69f00", "#cc79a7", "#0072b2", "#56b4e9", "#d55e00")
DASHES = ("dashdot", "24px,4px", "2px,9px", "dot", "dash", "solid", "15px,15px", "6px,18px")
_INKS = {
    "light": {"text": "#1f2933", "soft": "#52606d", "grid": "#e8eaed", "axis": "#9aa5b1", "paper": "#ffffff"},
    "dark": {"text": "#e6e8eb", "soft": "#a9b1bb", "grid": "#2c3138", "axis": "#5d6670", "paper": "#14171b"},
}


@dataclass(frozen=True)
class Style:
    """The look of one scheme in every figure."""

    name: str
    title: str
    color: str
    dash: str
    is_control: bool


def style_of(scheme: str, theme: str = "light") -> Style:
    """Style of a scheme on that page; one that is not registered (a table from elsewhere) is grey, under its name."""
    row = SCHEMES.get(scheme)
    if row is None:
        return Style(scheme, scheme, NEUTRAL, "dashdot", False)
    color, dash = (row.color, row.dash) if row.color else _free_looks(tuple(SCHEMES))[scheme]
    return Style(row.name, title_of(scheme), ink(color, theme), dash, row.is_control)


def name_of(scheme: str) -> str:
    """A scheme's title in bold, in its colour, for a tick or a panel's title."""
    style = style_of(scheme)
    return f"<b style='color:{style.color}'>{style.title}</b>"


@functools.cache
def _free_looks(names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Colour and dash of each scheme that chooses none, in the registry's order, from those that nobody has.

    A scheme added to the registry may find none left: then they begin again.
    """
    taken = {(SCHEMES[name].color, SCHEMES[name].dash) for name in names}
    free = [(color, dash) for dash in DASHES for color in COLORS if (color, dash) not in taken]
    waiting = [name for name in names if not SCHEMES[name].color]
    return dict(zip(waiting, itertools.cycle(free), strict=False))


@functools.cache
def template(theme: str = "light") -> go.layout.Template:
    """The one plotly template, for a light or a dark page."""
    if theme not in _INKS:
        raise NormlabError(f"unknown theme {theme!r}: choose light or dark")
    ink = _INKS[theme]
    axis = dict(
        gridcolor=ink["grid"],
        linecolor=ink["axis"],
        tickcolor=ink["axis"],
        tickfont=dict(color=ink["soft"], size=12),
        title=dict(font=dict(color=ink["soft"], size=13), standoff=8),
        showline=True,
        ticks="outside",
        ticklen=4,
        zeroline=False,
        automargin=True,
        minor=dict(ticks=""),
    )
    layout = go.Layout(
        font=dict(family=FONT, color=ink["text"], size=13),
        title=dict(
            x=0.0,
            xref="container",
            xanchor="left",
            y=1.0,
            yref="container",
            yanchor="top",
            pad=dict(t=16, l=16),
            font=dict(size=19),
        ),
        paper_bgcolor=ink["paper"],
        plot_bgcolor=ink["paper"],
        xaxis=axis,
        yaxis=axis,
        hoverlabel=dict(font=dict(family=FONT, size=12), align="left", namelength=-1),
        legend=dict(font=dict(size=12), bgcolor="rgba(0,0,0,0)"),
        margin=dict(l=70, r=30, t=_TOP, b=60),
        colorway=[NEUTRAL],
    )
    return go.layout.Template(layout=layout)


@functools.cache
def plain_template(theme: str) -> dict[str, Any]:
    """The template as plain data, which takes as long to make as a figure."""
    sheet: dict[str, Any] = template(theme).to_plotly_json()
    return sheet


def themed(figure: go.Figure, theme: str) -> go.Figure:
    """A copy of the figure for a light or a dark page; lines too dark for a dark page become bright."""
    sheet = template(theme)
    text = figure.to_json()
    for light, dark in on_dark().items():
        text = text.replace(light, dark) if theme == "dark" else text.replace(dark, light)
    copy: go.Figure = pio.from_json(text)
    return copy.update_layout(template=sheet)


def titled(figure: go.Figure, title: str, subtitle: str, height: int) -> go.Figure:
    """Put on the title, the line under it that says what was measured on what, the template and the height (pixels).

    What is too long for a line takes several, a title's of about one length, and the figure grows by them.
    """
    said = [part for line in subtitle.split("<br>") for part in wrap(line, _SMALL_LETTERS) or [""]]
    lines = math.ceil(len(title) / LETTERS)
    is_long = lines > 1 and "<" not in title
    text = "<br>".join(wrap(title, len(title) // lines + _WORD)) if is_long else title
    more = TITLE_LINE * text.count("<br>") if is_long else 0
    more += _SMALL_LINE * (len(said) - 1 - subtitle.count("<br>"))
    heading = dict(text=text, subtitle=dict(text="<br>".join(said), font=dict(size=13, color=NEUTRAL)))
    if "<br>" in text:
        heading["pad"] = dict(t=LINES_PAD)
    layout = figure.layout  # set part by part: `update_layout` takes twice as long
    layout.template, layout.title, layout.height = template(), heading, height + more
    layout.margin.t = (layout.margin.t or _TOP) + more
    return figure


def in_one(title: str, *lines: str) -> str:
    """A title with small lines under it as one text: a widget that is resized moves a separate subtitle into it."""
    small = f"<span style='font-size:12px;color:{NEUTRAL}'>{'<br>'.join(lines)}</span>"
    return f"{title}<br>{small}"


def head_of(text: str) -> str:
    """The title that `in_one` put above small lines. Pages' scripts find it in the same way."""
    return text.partition("<br><span")[0]


def message_figure(text: str, title: str = "") -> go.Figure:
    """A figure that says in words why there is nothing to draw."""
    figure = go.Figure()
    figure.add_annotation(
        text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font=dict(size=15, color=NEUTRAL)
    )
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    return titled(figure, title, "", 320)


def step_color(step: float, last: float) -> str:
    """Colour of a training step between 0 and the last one."""
    share = 0.0 if last <= 0 else min(max(step / last, 0.0), 1.0)
    (x0, low), (x1, high) = next((a, b) for a, b in zip(STEPS, STEPS[1:], strict=False) if share <= b[0])
    mix = (share - x0) / (x1 - x0)
    channels = (round((1 - mix) * int(low[i : i + 2], 16) + mix * int(high[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def on_dark() -> dict[str, str]:
    """The replacements of colours too dark for a dark page, in each form in which a figure may have them."""
    return _ON_DARK | {_channels(light): _channels(dark) for light, dark in _ON_DARK.items()}


def ink(color: str, theme: str) -> str:
    """A scheme's colour as it is on that page."""
    return _ON_DARK.get(color, color) if theme == "dark" else color


def faded(color: str, opacity: float) -> str:
    """`#rrggbb` as an rgba() with that opacity."""
    return f"{_channels(color)}{opacity})"


def _channels(color: str) -> str:
    return f"rgba({int(color[1:3], 16)}, {int(color[3:5], 16)}, {int(color[5:7], 16)}, "
