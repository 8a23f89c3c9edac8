"""Every scheme looks different from all others, to every kind of colour vision, on a light and on a dark page."""

import dataclasses
import itertools

import numpy as np
import pytest

from normlab import SCHEMES
from normlab.figures import theme
from normlab.figures.draw import axis_bounds, value_axis

# What dichromats see of linear RGB: Machado, Oliveira & Fernandes (2009), severity 1.
VISION = {
    "usual": np.eye(3),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
FAR = 14.0  # of CIELAB; 2.3 is just noticeable


def lab(color: str, seen: np.ndarray) -> np.ndarray:
    """CIELAB coordinates (D65) of "#rrggbb" to one kind of vision."""
    channel = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(seen @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(a: str, b: str) -> float:
    """The distance of two colours, to the kind of vision that tells them apart least."""
    return min(float(np.linalg.norm(lab(a, seen) - lab(b, seen))) for seen in VISION.values())


@pytest.mark.parametrize("page", ["light", "dark"])
def test_any_schemes_are_told_apart_by_dash_or_by_a_colour_that_everybody_sees(page):
    """Each pair differs, so any set of eight does."""
    looks = {name: theme.style_of(name) for name in SCHEMES}
    alike = [
        (a, b, round(distance(theme.ink(looks[a].color, page), theme.ink(looks[b].color, page)), 1))
        for a, b in itertools.combinations(SCHEMES, 2)
        if looks[a].dash == looks[b].dash
        and distance(theme.ink(looks[a].color, page), theme.ink(looks[b].color, page)) < FAR
    ]
    assert alike == []


def test_the_colours_of_new_schemes_are_further_apart_than_that():
    assert min(distance(a, b) for a, b in itertools.combinations(theme.COLORS, 2)) > 16


def test_red_and_green_are_near_to_those_who_do_not_see_red():
    assert distance("#c00000", "#4d6a00") < FAR < distance("#0072b2", "#e69f00")


def test_dashes_differ_in_ink_or_period():
    """Drawn at two pixels, plotly's names: share of the line that is inked, and the length after which it repeats."""
    named = {"dot": (2, 2), "dash": (6, 6), "dashdot": (6, 2, 2, 2), "solid": (1,)}
    found = {}
    for dash in theme.DASHES:
        parts = named.get(dash) or tuple(int(part.removesuffix("px")) for part in dash.split(","))
        found[dash] = (sum(parts[::2]) / sum(parts), sum(parts))
    for a, b in itertools.combinations(found, 2):
        (ink, period), (other_ink, other_period) = found[a], found[b]
        assert abs(ink - other_ink) > 0.15 or not 0.5 < period / other_period < 2, (a, b)


def test_schemes_beyond_the_looks_begin_again_and_the_others_keep_theirs(monkeypatch):
    before = {name: theme.style_of(name) for name in SCHEMES}
    row = dataclasses.replace(SCHEMES["pre_rmsnorm"], color="")
    for number in range(60):
        monkeypatch.setitem(SCHEMES, f"new{number}", row)
    assert theme.style_of("new59").color in theme.COLORS
    assert {name: theme.style_of(name) for name in before} == before


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.98, 1.2, ["1", "1.05", "1.1", "1.15", "1.2"]),
        (1.0, 1.7, ["1", "1.2", "1.4", "1.6"]),
        (1e-4, 1.3e-4, ["1e-4", "1.1e-4", "1.2e-4", "1.3e-4"]),
        (1.0, 12.0, ["1", "2", "5", "10"]),
        (1e-5, 1e-1, ["1e-5", "1e-4", "0.001", "0.01", "0.1"]),
    ],
)
def test_a_log_axis_has_readable_ticks_however_narrow_it_is(low, high, ticks):
    assert value_axis(axis_bounds([low, high], True), True)["ticktext"] == ticks
