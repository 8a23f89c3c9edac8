"""One function a section: a planned row and a device in, the row's columns out. Whole models are in `models.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import host
import normlab_kernels as nk
import peers
import plan
import torch
from measure import Device, Row, takes_kernels
from models import generate_row, ratios, step_row
from normlab_kernels import choices, linear
from normlab_kernels.spec import Act, RowSpec, Stat

Tensor = torch.Tensor
WRONG = 0.03  # of the largest element: bf16 rounds to 0.4%, and the decode kernel restated here errs as much again


class Wrong(Exception):
    """A call whose result is not the formula's: its time means nothing."""


def outputs(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def largest_error(got: Any, expected: Any) -> float:
    """The largest difference in units of the largest element, over all outputs.

    Raises:
        Wrong: it is more than rounding explains.
    """
    pairs = zip(outputs(got), outputs(expected), strict=True)
    errors = [((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-9)).item() for a, b in pairs]
    if not all(error <= WRONG for error in errors):  # so put, NaN is too large
        raise Wrong(f"the results differ by {', '.join(f'{e:.2g}' for e in errors)} of their largest elements")
    return max(errors)


def _forward(call: peers.Call, arguments: dict[str, Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call(arguments)

    return run


def _backward(call: peers.Call, arguments: dict[str, Tensor]) -> Callable[[], object]:
    """The backward pass alone: the graph is kept, the upstream gradients are random."""
    outs = outputs(call(arguments))
    upstream = [torch.randn_like(tensor) for tensor in outs]
    leaves = list(arguments.values())
    return lambda: torch.autograd.grad(outs, leaves, upstream, retain_graph=True, allow_unused=True)


def _both(call: peers.Call, arguments: dict[str, Tensor]) -> Callable[[], object]:
    upstream = [torch.randn_like(tensor) for tensor in outputs(call(arguments))]
    leaves = list(arguments.values())
    return lambda: torch.autograd.grad(outputs(call(arguments)), leaves, upstream, allow_unused=True)


def _with_gradient(call: peers.Call, arguments: dict[str, Tensor]) -> Callable[[], object]:
    return lambda: call(arguments)


PASSES = {"forward": _forward, "forward with gradient": _with_gradient, "backward": _backward, "both": _both}


def _floor(planned: plan.Planned, device: Device) -> int:
    """Bytes that the pass must read and write."""
    function = peers.FUNCTIONS[planned.function]
    units = {"forward": function.forward_rows, "backward": function.backward_rows}
    moved = units.get(planned.direction, sum(units.values()))
    return moved * planned.rows * planned.width * device.dtype.itemsize


def _rates(columns: Row, floor: int, device: Device) -> Row:
    """A measured row with its floor and its share of the yardstick's rate."""
    copy = device.copy_microseconds(floor)
    rates: Row = {"floor_bytes": floor, "copy_microseconds": copy, "copy_gigabytes_per_second": floor / copy / 1e3}
    if "microseconds" in columns:
        time = columns["microseconds"]
        rates |= {"gigabytes_per_second": floor / time / 1e3, "share_of_copy": copy / time}
    return columns | rates


def norm_row(planned: plan.Planned, device: Device) -> Row:
    """A norm, one pass, by one peer, beside a copy of as many bytes."""
    return _rates(decode_row(planned, device), _floor(planned, device), device)


def decode_row(planned: plan.Planned, device: Device) -> Row:
    """A norm, one pass, by one peer. In decoding launches count, not bytes, so it is not compared with a copy."""
    call = peers.build(planned.peer, planned.function, device.backend)
    rows, width = device.sizes(planned.rows, planned.width)

    def arguments() -> dict[str, Tensor]:
        return peers.arguments(planned.function, rows, width, device.dtype, device.torch)

    columns: Row = {}
    if planned.direction == "forward":
        a = arguments()
        with torch.no_grad():
            columns["error"] = largest_error(call(a), peers.formula(planned.function)(a))
    return columns | device.time(lambda: PASSES[planned.direction](call, arguments()), _floor(planned, device))


def host_row(planned: plan.Planned, device: Device) -> Row:
    """What a call keeps the host, the kernels' launches left out (see `host.py`); a peer's, turn by turn with ours."""
    with host.no_launches():
        calls = [peers.build(peer, planned.function) for peer in (planned.against or planned.peer, planned.peer)]
        rows, width = device.sizes(planned.rows, planned.width)
        arguments = peers.arguments(planned.function, rows, width, torch.bfloat16, torch.device("cpu"))
        columns = ratios(*host.microseconds(*(PASSES[planned.direction](call, arguments) for call in calls)))
        return columns if planned.against else {"microseconds": columns["microseconds"]}


def compiled_row(planned: plan.Planned, device: Device) -> Row:
    """Our function, turn by turn with the formula under torch.compile: the median of the ratios of neighbours."""
    baseline = peers.compiled_formula(planned.function, device.backend)
    ours = peers.OURS[planned.function]
    call = peers.compiled(ours, device.backend) if planned.peer.endswith("compiled") else ours
    rows, width = device.sizes(planned.rows, planned.width)
    arguments = peers.arguments(planned.function, rows, width, device.dtype, device.torch)
    turns = [PASSES[planned.direction](either, arguments) for either in (baseline, call)]
    return ratios(*device.interleaved(*turns, 25 * device.steps))


def launch_row(planned: plan.Planned, device: Device) -> Row:
    """The kernel of a norm, launched as it is chosen or with fields of it changed; no autograd around it."""
    if not takes_kernels(device):
        raise peers.Missing("the Triton kernels do not run on this device")
    from normlab_kernels import ops

    spec = peers.FUNCTIONS[planned.function].spec
    assert spec is not None
    rows, width = device.sizes(planned.rows, planned.width)
    changed: dict[str, Any] = plan.launch_fields(planned.launch)
    changed |= {"whole": bool(changed["whole"])} if "whole" in changed else {}
    chosen_forward = choices.forward(width, spec.reduces)
    chosen_backward = choices.backward(
        width, spec.has_row_statistic, "direction" in peers.FUNCTIONS[planned.function].inputs
    )

    def make(changed: dict[str, Any]) -> Callable[[], object]:
        made = peers.arguments(planned.function, rows, width, device.dtype, device.torch)
        a = {name: tensor.detach() for name, tensor in made.items()}
        x, residual, weight = a["x"], a.get("residual"), a["weight"]
        parameters = [weight, *(a.get(name) for name in ("bias", "scale", "shift", "direction"))]
        given = a.get("given")
        forward_arguments = (x, residual, *parameters, given, spec)
        if planned.direction == "forward":
            launch = replace(chosen_forward, **changed)
            return lambda: ops.launch_forward(*forward_arguments, chosen=launch)
        _, total, mean, ms = ops.launch_forward(*forward_arguments)
        kept = x if total is None else total
        grad = torch.randn_like(x)
        grad_sum = None if residual is None else torch.randn_like(x)
        wants = [tensor is not None for tensor in (*parameters, given)]
        saved = (kept, *parameters, mean, given if ms is None else ms)
        launch = replace(chosen_backward, **changed)
        return lambda: ops.launch_backward(grad, grad_sum, None, *saved, spec, wants, chosen=launch)

    columns: Row = {}
    if planned.launch:  # the chosen launch is what tests check, and what another is checked against
        results = []
        for fields in (changed, {}):
            torch.manual_seed(0)
            results.append(tuple(tensor for tensor in make(fields)() if tensor is not None))  # type: ignore[attr-defined]
        columns["error"] = largest_error(*results)
    floor = _floor(planned, device)
    return _rates(columns | device.time(lambda: make(changed), floor), floor, device)


def linear_fields(launch: str) -> dict[str, Any]:
    """The fields of `choices.LinearLaunch` that a launch changes."""
    fields = plan.launch_fields(launch)
    return {name: bool(value) if name in ("flatten", "from_residual") else value for name, value in fields.items()}


def linear_row(planned: plan.Planned, device: Device) -> Row:
    """h = residual + a W^T and a norm of h, in one kernel, or in two, or without the norm."""
    rows, width = device.sizes(planned.rows, planned.width)
    changed = linear_fields(planned.launch)

    def operands() -> tuple[Tensor, ...]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device.torch, dtype=device.dtype)

        weight, lam = torch.ones(width, device=device.torch, dtype=device.dtype), normal(1).fill_(1.0)
        ms = torch.ones(rows, 1, device=device.torch)
        return normal(rows, width), normal(width, width) / width**0.5, normal(rows, width), weight, lam, ms

    def call(a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, lam: Tensor, ms: Tensor) -> object:
        name = planned.function
        if name == plan.FUSED and changed:
            from normlab_kernels import linear_ops

            launch = replace(choices.linear(width), **changed)
            spec = RowSpec(Stat.GIVEN, Act.TANH, 1e-6, 10.0)
            return linear_ops.launch_linear(a, proj, residual, weight, None, lam, ms, spec, launch)
        if name in (plan.FUSED, plan.UNFUSED):
            return nk.linear_add_bhyt(a, proj, residual, weight, lam, ms, fused=name == plan.FUSED)
        if name == "linear_add_dyt":
            return nk.linear_add_dyt(a, proj, residual, weight, None, lam, fused=True)
        h = torch.addmm(residual, a, proj.t())
        if name == "addmm + rms_norm":
            return h, nk.rms_norm(h, weight)
        if name == "addmm + F.rms_norm":
            return h, torch.nn.functional.rms_norm(h, weight.shape, weight, 1e-6)
        return h

    def make() -> Callable[[], object]:
        mine = operands()

        def run() -> object:
            with torch.no_grad():
                return call(*mine)

        return run

    mine = operands()
    columns: Row = {}
    if planned.function.startswith("linear_add"):
        if reason := linear.cannot_fuse(*mine[:4]):
            raise peers.Missing(reason)
        if planned.function == plan.FUSED:
            with torch.no_grad():
                unfused = nk.linear_add_bhyt(*mine, fused=False)
                columns["error"] = largest_error(call(*mine), unfused)
    # The output side: the product's operands are read more than once, from the cache.
    columns |= device.time(make, 4 * planned.rows * planned.width * device.dtype.itemsize)
    if "microseconds" in columns:
        columns["teraflops"] = 2 * planned.rows * planned.width**2 / columns["microseconds"] / 1e6
    return columns


MEASURE: dict[str, Callable[[plan.Planned, Device], Row]] = {
    "rows": norm_row,
    "launch": launch_row,
    "linear": linear_row,
    "decode": decode_row,
    "host": host_row,
    "compiled": compiled_row,
    "step": step_row,
    "generate": generate_row,
}
