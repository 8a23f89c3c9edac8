"""The measurements as data: one `Planned` for each row of the tables, the most important first.

Priority 0 is what is open: the kernels that are furthest from a copy, with other launches too; BHyT with a carried
statistic beside torch.compile; RMSNorm beside PyTorch's kernels and those that it has from QuACK, with the host's time;
decoding 1 to 16 rows beside the authors' kernel. Priority 1 are the claims: this package and PyTorch's norms at 16k
rows of 2k to 8k, launches there, the fused product, whole models with RMSNorm and with BHyT. Priority 2 are the other
peers there, 3 what takes long to compile and the other schemes, and 4 the other shapes. Within a priority the sections
come in the order below.

By the times of the shipped tables an H200 takes 2.5, 2.5, 4.5, 3.5 and 5 minutes for them; QuACK's kernels and those
that PyTorch has from it compile for 1.5 of these. Where the start and the tests take 4 minutes, a lease of 15 reaches
all of 0 to 2 and a third of 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from normlab_kernels import choices, spec

SECTIONS = ("rows", "launch", "linear", "decode", "host", "compiled", "step", "generate")
FUNCTIONS = (
    "rms_norm", "bhyt", "bhyt_carried", "add_rms_norm", "add_bhyt", "layer_norm", "dyt", "derf", "row_moments",
    "add_bhyt_carried", "bhyt_carried unbounded", "add_layer_norm", "add_dyt", "bhyt unbounded",
    "add_bhyt_carried unbounded", "crms_norm", "seed_norm", "isru", "add_crms_norm", "add_seed_norm", "add_isru",
)  # fmt: skip
BOUNDED = tuple(name for name in FUNCTIONS if "unbounded" not in name)
# Who has which function, besides this package and the plain formula, which have all.
TORCH_QUACK = "torch with QuACK"  # PyTorch's RMSNorm in the kernels that it has from QuACK; "torch" is in its own
PEERS = {
    "torch": ("rms_norm", "layer_norm"),
    TORCH_QUACK: ("rms_norm",),
    "liger": ("rms_norm", "add_rms_norm", "layer_norm", "dyt"),
    "quack": ("rms_norm", "add_rms_norm"),
    "compile": (
        "rms_norm", "bhyt", "bhyt_carried", "add_rms_norm", "add_bhyt", "layer_norm", "dyt", "derf", "crms_norm",
        "seed_norm", "isru",
    ),
    "released": ("bhyt", "add_bhyt"),  # decoding only
}  # fmt: skip
PASSES = ("forward", "backward", "both")
CLAIMED = ((16_384, 2048), (16_384, 4096), (16_384, 8192))
OTHER_SHAPES = [
    (rows, width)
    for rows in (16_384, 4096, 32_768, 8192)
    for width in (2048, 4096, 8192, 1024, 16_384, 32_768)
    if rows * width <= 1 << 29 and (rows, width) not in CLAIMED
]
CPU_SHAPES = ((1024, 128), (1024, 512), (4096, 2048))
# Launches other than those chosen: fields of `choices.Launch` and `linear_choices.LinearLaunch` that are changed.
BACKWARD_LAUNCHES = ("", "stages=1", "stages=2", "resident_warps=8", "resident_warps=32")
BACKWARD_TILES = {
    1024: ("rows=1 warps=4", "rows=2 warps=4"),
    2048: ("rows=1 warps=4", "warps=4"),
    4096: ("warps=4", "warps=16"),
    8192: ("warps=8", "warps=32", "whole=0 block=1024 warps=4"),
    16_384: ("whole=1 block=16384 rows=1 warps=16", "whole=1 block=16384 rows=1 warps=32"),
}
TILE_LAUNCHES = ("", "stages=2", "block=1024 rows=2", "block=2048 rows=1", "block=2048 warps=8", "block=4096 warps=8")
# Where a kernel is furthest from a copy on an H200: SeeDNorm's backward 0.52 to 0.70, moments 0.50 to 0.61, DyT's and
# Derf's backward at 2,048 columns 0.77 to 0.81, LayerNorm's forward at 8,192 0.88, BHyT with a carried statistic 0.93.
_SEED = ("", "warps=4", "warps=16", "rows=2 warps=16", "stages=1", "stages=2", "resident_warps=8", "resident_warps=32")
_MOMENTS = ("", "warps=4", "warps=16", "rows=2 warps=8", "rows=2 warps=16", "rows=4 warps=16")
_NARROW = ("stages=1", "resident_warps=8", "resident_warps=32", "block=512 rows=4", "rows=4 warps=8")
_CARRIED = ("", "block=2048 rows=1", "block=2048 rows=2 warps=8", "block=512 rows=4", "rows=4 warps=8", "warps=8")
SLOW_LAUNCHES = {
    ("seed_norm", "backward"): dict.fromkeys((2048, 4096, 8192), _SEED),
    ("row_moments", "forward"): dict.fromkeys((2048, 4096, 8192), _MOMENTS),
    ("dyt", "backward"): {2048: (*TILE_LAUNCHES, *_NARROW)},
    ("derf", "backward"): {2048: (*TILE_LAUNCHES, *_NARROW)},
    ("layer_norm", "forward"): {8192: ("", "warps=8", "warps=32", "rows=2 warps=32")},
    ("bhyt_carried", "forward"): dict.fromkeys((2048, 4096), _CARRIED),
}
_TWO_PROGRAMS = "block_m=128 block_n=128 slices=2 warps=4 stages=3 programs=2"
LINEAR_LAUNCHES = ("", "flatten=1", "from_residual=1 stages=3", _TWO_PROGRAMS, f"{_TWO_PROGRAMS} from_residual=1")
LINEAR_ROWS = (16_384, 8192, 32_768, 4096)
FUSED, UNFUSED = "linear_add_bhyt", "addmm + bhyt_carried"
LINEAR = (UNFUSED, FUSED, "addmm + rms_norm", "addmm + F.rms_norm", "addmm", "linear_add_dyt")
DECODED = ("rms_norm", "bhyt", "bhyt_carried", "add_rms_norm", "add_bhyt", "add_bhyt_carried")
DECODERS = ("normlab", "released", "torch", TORCH_QUACK, "liger", "quack", "eager")
BASELINE, COMPARED, EXACT = "pre_rmsnorm", "bhyt", "bhyt_exact"
# Seconds that a row may take, so that none is begun that would not end in time: more than the longest on an H200, where
# QuACK's first compiled for 43 seconds.
SECONDS = {"compile": 20.0, "liger": 12.0, "quack": 60.0, TORCH_QUACK: 60.0, "step": 30.0, "generate": 15.0}
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
    priority: int = field(compare=False)
    launch: str = ""
    against: str = ""

    @property
    def seconds(self) -> float:
        return SECONDS.get(self.peer, SECONDS.get(self.section, OTHER_SECONDS))

    @property
    def is_ours(self) -> bool:
        """True if kernels of this repository are timed, here or in what this takes turns with."""
        return self.peer in ("normlab", "released", "") or "normlab" in self.against

    def columns(self) -> dict[str, str | int]:
        """The part of a table's row that is known beforehand."""
        where = {"section": self.section, "function": self.function, "peer": self.peer, "pass": self.direction}
        return {**where, "launch": self.launch, "rows": self.rows, "width": self.width, "against": self.against}


def _all(
    section: str,
    shapes: Iterable[tuple[int, int]],
    functions: Iterable[str],
    directions: Iterable[str] = ("forward",),
    peers: Iterable[str] = ("normlab",),
    launches: Iterable[str] = ("",),
    priority: int = 1,
    against: str = "",
) -> Iterator[Planned]:
    """Every combination that there is: a peer has some functions only, and moments have no gradients."""
    for (rows, width), name, direction, peer, launch in product(shapes, functions, directions, peers, launches):
        if name in PEERS.get(peer, (name,)) and (direction == "forward" or name != "row_moments"):
            yield Planned(section, name, peer, direction, rows, width, priority, launch, against)


def _open() -> Iterator[Planned]:
    """What is furthest from its bound: as launched, otherwise launched, and beside who is faster."""
    for (function, direction), by_width in SLOW_LAUNCHES.items():
        for width, launches in by_width.items():
            one = [(16_384, width)], [function], [direction]
            yield from _all("rows", *one, priority=0)
            yield from _all("launch", *one, launches=launches, priority=0)
    yield from _all("rows", CLAIMED[:2], ["bhyt_carried"], peers=["compile"], priority=0)
    yield from _all("rows", CLAIMED, ["rms_norm"], PASSES[:2], ("normlab", "torch", TORCH_QUACK), priority=0)
    yield from _decode(4096, (1, 4, 16), *DECODERS, priority=0)


def _norms_on_gpu() -> Iterator[Planned]:
    peers = ("normlab", "torch", "liger", "quack")
    yield from _all("rows", CLAIMED, BOUNDED, PASSES[:2], peers[:2], priority=1)
    yield from _all("rows", CLAIMED, FUNCTIONS, PASSES, (*peers, TORCH_QUACK, "eager"), priority=2)
    yield from _all("rows", CLAIMED, FUNCTIONS, PASSES, ("compile",), priority=3)
    yield from _all("rows", OTHER_SHAPES, FUNCTIONS[:6], PASSES[:2], peers, priority=4)


def _norms_on_cpu() -> Iterator[Planned]:
    yield from _all("rows", CPU_SHAPES, FUNCTIONS, PASSES, ("normlab", "eager", "torch"), priority=0)
    half_a_minute_each = CPU_SHAPES[:2], ("rms_norm", "bhyt"), PASSES, ("compile",)
    yield from _all("rows", *half_a_minute_each, priority=0)


def _launches() -> Iterator[Planned]:
    for width, tiles in BACKWARD_TILES.items():
        functions, launches = ("bhyt", "rms_norm", "add_bhyt", "layer_norm"), (*BACKWARD_LAUNCHES, *tiles)
        where, priority = [(16_384, width)], 1 if width in (2048, 4096, 8192) else 2
        yield from _all("launch", where, functions, ["backward"], launches=launches, priority=priority)
    yield from _all("launch", CLAIMED[1:2], ("dyt", "derf"), ["backward"], launches=TILE_LAUNCHES, priority=1)


def _resolved(row: Planned) -> object:
    """What a row times: of one launch there may be several names."""
    if row.section != "launch":
        return row
    if row.function == "row_moments":
        chosen = choices.moments(row.width)
    else:
        norm, inputs = spec.FUNCTIONS[row.function].spec, spec.FUNCTIONS[row.function].inputs
        if row.direction == "forward":
            chosen = choices.forward(row.width, norm.reduces)
        else:
            chosen = choices.backward(row.width, norm.reduces or "given" in inputs, "direction" in inputs)
    launch = choices.changed(chosen, row.launch)
    programs = max(1, launch.resident_warps // launch.warps)  # on a multiprocessor
    return replace(row, launch=""), replace(launch, resident_warps=programs)


def _linear(shapes: Iterable[tuple[int, int]], priority: int) -> Iterator[Planned]:
    for shape, name in product(shapes, LINEAR):
        launches = LINEAR_LAUNCHES if name == FUSED and priority < 4 else ("",)
        yield from _all("linear", [shape], [name], peers=[""], launches=launches, priority=priority)


def _decode(width: int, batches: Iterable[int], *peers: str, priority: int = 2) -> Iterator[Planned]:
    return _all("decode", [(batch, width) for batch in batches], DECODED, peers=peers, priority=priority)


def _host() -> Iterator[Planned]:
    """The time of our call; and of Liger's, in turns with ours. PyTorch's would compute on the CPU."""
    functions = ("rms_norm", "add_rms_norm", "layer_norm", "dyt", "bhyt", "add_bhyt", "bhyt_carried")
    for peer, against in (("normlab", ""), ("liger", "normlab")):
        directions = ("forward", "forward with gradient", "backward")
        yield from _all("host", [(16, 2048)], functions, directions, [peer], against=against)


def _compiled() -> Iterator[Planned]:
    """Our function, called as it is and under torch.compile, turn by turn with the compiled formula."""
    peers = ("normlab", "normlab compiled")
    return _all("compiled", CPU_SHAPES[:1], ("rms_norm", "bhyt"), ["both"], peers, against="compile")


def _models() -> Iterator[Planned]:
    """Each takes turns with the baseline; the baseline with itself shows what difference can be told."""
    against = f"{BASELINE} normlab"
    variants = [(COMPARED, "normlab", 1), (BASELINE, "normlab", 1)]
    variants += [(BASELINE, peer, 2) for peer in ("torch", "eager", "liger", "quack")]
    variants += [(EXACT, "normlab", 2)]
    for scheme, peer, priority in [*variants, *((scheme, "normlab", 3) for scheme in _other_schemes())]:
        yield Planned("step", scheme, peer, "step", 4 * 2048, 2048, priority, against=against)
    for scheme, peer, priority in variants:
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
    """The rows for a device of that kind, "cuda" or "cpu", in the order they are measured; of those that time the same
    the first."""
    if kind == "cpu":
        decode = _decode(128, (1, 4, 16, 64), "normlab", "eager", "torch")
        found = [*_norms_on_cpu(), *_linear([(256, 256)], 1), *decode, *_host(), *_compiled(), *_models()]
    else:
        linear = [*_linear(product(LINEAR_ROWS, (2048, 4096)), 1), *_linear(product((16_384, 8192), (1024, 8192)), 4)]
        found = [*_open(), *_norms_on_gpu(), *_launches(), *linear, *_decode(4096, (64,), *DECODERS), *_models()]
    unique: dict[object, Planned] = {}
    for row in found:
        if row.section in sections:
            unique.setdefault(_resolved(row), row)
    return sorted(unique.values(), key=lambda row: (row.priority, SECTIONS.index(row.section)))
