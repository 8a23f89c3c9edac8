"""The net: what must stay as it is, bit for bit, while the library is rewritten inside."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import net_curves
import net_parts
from net_compare import interpreter, machine


class Part(NamedTuple):
    """record: what is so now. environment: what its last bits depend on. tolerance: of its numbers in another one."""

    record: Callable[[], net_parts.Json]
    environment: Callable[[], dict[str, str]] = dict
    tolerance: float = 0.0


EPS = 2.0**-23  # of float32: norms take their statistics in it, whatever the input
PARTS = {
    "run_ids": Part(net_parts.run_ids),
    "help": Part(net_parts.command_help, interpreter),
    "public_names": Part(net_parts.public_names),
    "written_run": Part(net_parts.written_run),
    "architectures": Part(net_parts.architectures),
    "norms": Part(net_parts.norm_values, machine, 8 * EPS),
    "schemes": Part(net_parts.schemes, machine, 64 * EPS),
}
# Tolerances are three times and more what the AVX512, AVX2 and SSE kernels of one processor differ by: at most 0.5 EPS
# (norms), 12 EPS (schemes), 6 EPS (float32 curves), and 0.31 of the rounding of bfloat16, 2^-8.
CURVE_TOLERANCES = {"float32": 64 * EPS, "bfloat16": 2.0**-8}
CURVES = {
    curve.name: Part(partial(net_curves.trained, curve), machine, CURVE_TOLERANCES[curve.dtype])
    for curve in net_curves.CURVES
}
