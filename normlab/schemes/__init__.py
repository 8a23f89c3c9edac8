"""A scheme is data: which norm, where in the block, how branches join the stream, and its starting values.

scheme      the kinds of data: Layout, NormSite, Sublayer, Branches, Ends, Rate, Scheme
core        the rows of the shipped runs
literature  all other rows
builders    functions that rows name: norms, residual rules, initialisation, rates
start       a norm or residual rule in its place: its random draws, zero-centred gains

``SCHEMES`` holds all rows by name. `tagged` lists the schemes with a tag. Other files take names from here, and compare
none.
"""

from __future__ import annotations

from normlab.errors import NormlabError
from normlab.schemes import core, literature
from normlab.schemes.builders import CORRECTIONS, KAPPA_POWERS, correction_factors, is_bounded
from normlab.schemes.scheme import (
    PARTS,
    QK_NORMS,
    Branches,
    Ends,
    Layout,
    NormSite,
    Rate,
    Scheme,
    Sublayer,
    part_of,
)
from normlab.schemes.start import centred

SCHEMES: dict[str, Scheme] = {row.name: row for row in (*core.ROWS, *literature.ROWS)}
STUDIED = tuple(row.name for row in core.ROWS)  # of the shipped runs
BASELINE = "pre_rmsnorm"  # what the others are compared with: stock Llama
DEFAULT = "bhyt"  # of `normlab train`
LNS, DYT = "lns", "dyt"  # with BHyT the three that the project is about
PERI_LN = "peri_ln"  # the baseline with norms on both sides of a branch
GAIN_CONTROL = "rmsnorm_gain"  # BHyT's gain and nothing else of it
REMOVABLE = "tapernorm"  # its norms can each become a fixed gain

# Meaning of each tag.
TAGS = {
    "short": "sweep of minutes",
    "bound": "the same parameters, with the tanh and without",
    "exact_bound": "with the tanh and without, on the exact statistic",
    "contender": "the grid of runs under one recipe",
    "main": "that grid's seeds and depths",
    "warmed_up": "its paper asks for a long warm-up",
    "timed": "its training step is timed against the baseline's",
}


def get_scheme(name: str) -> Scheme:
    """The scheme of that name. NormlabError names the known ones otherwise."""
    if name not in SCHEMES:
        raise NormlabError(f"unknown scheme {name!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def tagged(tag: str) -> tuple[str, ...]:
    """Names of the schemes with a tag, in the registry's order. NormlabError names the known tags otherwise."""
    if tag not in TAGS:
        raise NormlabError(f"unknown tag {tag!r}: choose one of {', '.join(TAGS)}")
    return tuple(name for name, row in SCHEMES.items() if tag in row.tags.split())


__all__ = [
    "BASELINE",
    "CORRECTIONS",
    "DEFAULT",
    "DYT",
    "GAIN_CONTROL",
    "KAPPA_POWERS",
    "LNS",
    "PARTS",
    "PERI_LN",
    "QK_NORMS",
    "REMOVABLE",
    "SCHEMES",
    "STUDIED",
    "TAGS",
    "Branches",
    "Ends",
    "Layout",
    "NormSite",
    "Rate",
    "Scheme",
    "Sublayer",
    "centred",
    "correction_factors",
    "get_scheme",
    "is_bounded",
    "part_of",
    "tagged",
]
