"""The measurements as data: one `Planned` for each row of the tables, the most important first.

Priority 0 are the claims: this package and PyTorch's norms at 16k rows of 2k to 8k, the fused product, whole models
with RMSNorm and with BHyT. 1 are the other peers there, decoding and the other schemes. 2 is what takes long to
compile. 3 are the other shapes. Within a priority the sections come in the order below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SECTIONS = ("rows", "launch", "linear", "decode", "host", "compiled", "step", "generate")
FUNCTIONS = (
    "rms_norm", "bhyt", "bhyt_carried", "add_rms_norm", "add_bhyt", "layer_norm", "dyt", "derf", "row_moments",
    "add_bhyt_carried", "bhyt_carried unbounded", "add_layer_norm", "add_dyt", "bhyt unbounded",
    "add_bhyt_carried unbounded", "crms_norm", "seed_norm", "isru", "add_crms_norm", "add_seed_norm", "add_isru",
)  # fmt: skip
ONE_PASS = ("row_moments",)  # no gradients
# Who has which function, besides this package and the plain formula, which have all.
PEERS = {
    "torch": ("rms_norm", "layer_norm"),
    "liger": ("rms_norm", "add_rms_norm", "layer_norm", "dyt"),
    "quack": ("rms_norm", "add_rms_norm"),
    "compile": (
        "rms_norm", "bhyt", "bhyt_carried", "add_rms_norm", "add_bhyt", "layer_norm", "dyt", "derf", "crms_norm",
        "seed_norm", "isru",
    ),
    "released": ("bhyt", "add_bhyt"),  # decoding only
}  # fmt: skip
CLAIMED = ((16_384, 2048), (16_384, 4096), (16_384, 8192))
OTHER_SHAPES = tuple(
    (rows, width)
    for rows in (16_384, 4096, 32_768, 8192)
    for width in (2048, 4096, 8192, 1024, 16_384, 32_768)
    if rows * width <= 1 << 29 and (rows, width) not in CLAIMED
)
CPU_SHAPES = ((1024, 128), (1024, 512), (4096, 2048))
# Launches other than those chosen: fields of `choices.Launch` and `choices.LinearLaunch` that are changed.
BACKWARD_LAUNCHES = ("", "stages=1", "stages=3", "resident_warps=8", "resident_warps=32")
BACKWARD_WARPS = {2048: ("warps=2", "warps=8"), 4096: ("warps=4", "warps=16"), 8192: ("warps=8", "warps=32")}
TILE_LAUNCHES = ("", "stages=3", "block=2048", "block=2048 stages=3", "block=2048 warps=8", "block=4096 warps=8")
WIDE_LAUNCHES = (  # one pass over rows that are split otherwise
    ("forward", 32_768, "whole=1 block=32768 warps=32"),
    ("backward", 16_384, "whole=1 block=16384 warps=16"),
    ("backward", 16_384, "whole=1 block=16384 warps=32"),
)
LINEAR_LAUNCHES = (
    "",
    "flatten=1",
    "from_residual=1 stages=3",
    "flatten=1 from_residual=1 stages=3",
    "block_m=128 block_n=128 slices=2 warps=4 stages=3 programs=2",
)
FUSED, UNFUSED = "linear_add_bhyt", "addmm + bhyt_carried"
LINEAR = (UNFUSED, FUSED, "addmm + rms_norm", "addmm + F.rms_norm", "addmm", "linear_add_dyt")
BATCHES = (1, 4, 16, 64)
DECODED = ("rms_norm", "bhyt", "bhyt_carried", "add_rms_norm", "add_bhyt", "add_bhyt_carried")
BASELINE, COMPARED, EXACT = "pre_rmsnorm", "bhyt", "bhyt_exact"
# Seconds that a row may take, so that none is begun that would not end in time: much more than most need.
SECONDS = {"compile": 40.0, "step": 45.0, "generate": 30.0}
OTHER_SECONDS = 8.0


@dataclass(frozen=True)
class Planned:
    """A row to be measured: what makes it another row than all others, and how important it is."""

    section: str
    function: str
    peer: str
    direction: str
    rows: int
    width: int
    priority: int
    launch: str = ""
    against: str = ""

    @property
    def seconds(self) -> float:
        return SECONDS.get(self.peer, SECONDS.get(self.section, OTHER_SECONDS))

    def columns(self) -> dict[str, str | int]:
        """The part of a table's row that is known beforehand."""
        where = {"section": self.section, "function": self.function, "peer": self.peer, "pass": self.direction}
        return {**where, "launch": self.launch, "rows": self.rows, "width": self.width, "against": self.against}


def launch_fields(text: str) -> dict[str, int]:
    """The fields that a launch changes.

    >>> launch_fields("whole=1 block=16384")
    {'whole': 1, 'block': 16384}
    """
    return {name: int(value) for name, value in (field.split("=") for field in text.split())}


def passes(function: str) -> tuple[str, ...]:
    """The passes of a function."""
    return ("forward",) if function in ONE_PASS else ("forward", "backward", "both")


def _norms_on_gpu() -> Iterator[Planned]:
    for rows, width in CLAIMED:
        for function in FUNCTIONS:
            for direction in passes(function):
                for peer in ("normlab", "torch", "liger", "quack", "eager", "compile"):
                    if function in PEERS.get(peer, FUNCTIONS):
                        claim = peer in ("normlab", "torch") and direction != "both" and "unbounded" not in function
                        priority = 2 if peer == "compile" else int(not claim)
                        yield Planned("rows", function, peer, direction, rows, width, priority)
    for rows, width in OTHER_SHAPES:
        for function in FUNCTIONS[:6]:
            for direction in ("forward", "backward"):
                for peer in ("normlab", "torch", "liger", "quack"):
                    if function in PEERS.get(peer, FUNCTIONS):
                        yield Planned("rows", function, peer, direction, rows, width, 3)


def _norms_on_cpu() -> Iterator[Planned]:
    for rows, width in CPU_SHAPES:
        for function in FUNCTIONS:
            for peer in ("normlab", "eager", "compile", "torch"):
                if function not in PEERS.get(peer, FUNCTIONS):
                    continue
                if peer == "compile" and (rows > 1024 or function not in ("rms_norm", "bhyt")):
                    continue  # half a minute each
                for direction in passes(function):
                    yield Planned("rows", function, peer, direction, rows, width, 0)


def _launches() -> Iterator[Planned]:
    for width, warps in BACKWARD_WARPS.items():
        for function in ("bhyt", "rms_norm", "add_bhyt", "layer_norm"):
            for launch in (*BACKWARD_LAUNCHES, *warps):
                yield Planned(
                    "launch", function, "normlab", "backward", 16_384, width, 0 if width < 8192 else 1, launch
                )
    for function in ("dyt", "derf"):
        for launch in TILE_LAUNCHES:
            yield Planned("launch", function, "normlab", "backward", 16_384, 4096, 0, launch)
    for direction, width, launch in WIDE_LAUNCHES:
        for function in ("rms_norm", "bhyt"):
            yield Planned("launch", function, "normlab", direction, 4096, width, 1, "")
            yield Planned("launch", function, "normlab", direction, 4096, width, 1, launch)


def _linear(shapes: tuple[tuple[int, int], ...], first: int) -> Iterator[Planned]:
    for rows, width in shapes:
        priority = first if rows in (16_384, 256) and width in (256, 2048, 4096) else 3
        for function in LINEAR:
            for launch in LINEAR_LAUNCHES if function == FUSED and priority < 3 else ("",):
                yield Planned("linear", function, "", "forward", rows, width, priority, launch)


def _decode(width: int, peers: tuple[str, ...]) -> Iterator[Planned]:
    for batch in BATCHES:
        for function in DECODED:
            for peer in peers:
                if function in PEERS.get(peer, FUNCTIONS):
                    yield Planned("decode", function, peer, "forward", batch, width, 1)


def _host() -> Iterator[Planned]:
    for function in ("rms_norm", "add_rms_norm", "layer_norm", "dyt", "bhyt", "add_bhyt", "bhyt_carried"):
        for direction in ("forward", "forward with gradient", "backward"):
            for peer in ("normlab", "liger"):
                if function in PEERS.get(peer, FUNCTIONS):
                    against = "" if peer == "normlab" else "normlab"
                    yield Planned("host", function, peer, direction, 16, 2048, 1, against=against)


def _compiled() -> Iterator[Planned]:
    """Our function, called as it is and under torch.compile, turn by turn with the compiled formula."""
    for function in ("rms_norm", "bhyt"):
        for peer in ("normlab", "normlab compiled"):
            yield Planned("compiled", function, peer, "both", *CPU_SHAPES[0], 1, against="compile")


def _models() -> Iterator[Planned]:
    """Each takes turns with the baseline; the baseline with itself shows what difference can be told."""
    against = f"{BASELINE} normlab"
    variants = [(COMPARED, "normlab", 0), (BASELINE, "normlab", 0)]
    variants += [(BASELINE, peer, 1) for peer in ("torch", "eager", "liger", "quack")]
    variants += [(EXACT, "normlab", 1), *((scheme, "normlab", 2) for scheme in _other_schemes())]
    for scheme, peer, priority in variants:
        yield Planned("step", scheme, peer, "step", 4 * 2048, 2048, priority, against=against)
    for scheme, peer, priority in variants[: 2 + 4 + 1]:
        for batch in (1, 8, 64):
            yield Planned("generate", scheme, peer, "token", batch, 2048, priority, against=against)


def _other_schemes() -> tuple[str, ...]:
    """normlab's, where it can be imported; where it cannot, the rows of the baseline say why."""
    try:
        from normlab.schemes import STUDIED
    except Exception:  # noqa: BLE001 - whatever its own imports raise on a machine with other versions
        return ()
    return tuple(scheme for scheme in STUDIED if scheme not in (BASELINE, COMPARED, EXACT))


def plan(kind: str, sections: tuple[str, ...] = SECTIONS) -> list[Planned]:
    """The rows for a device of that kind, "cuda" or "cpu", in the order they are measured."""
    if kind == "cpu":
        found = [*_norms_on_cpu(), *_linear(((256, 256),), 0), *_decode(128, ("normlab", "eager", "torch"))]
        found += [*_host(), *_compiled(), *_models()]
    else:
        shapes = tuple((rows, width) for rows in (16_384, 8192) for width in (2048, 4096, 1024, 8192))
        peers = ("normlab", "released", "torch", "liger", "quack", "eager")
        found = [*_norms_on_gpu(), *_launches(), *_linear(shapes, 0), *_decode(4096, peers), *_models()]
    unique = dict.fromkeys(row for row in found if row.section in sections)
    return sorted(unique, key=lambda row: (row.priority, SECTIONS.index(row.section)))
