"""One function per section: a planned row and a device in, the row's columns out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import host
import normlab_kernels as nk
import peers
import torch
from measure import Device, Missing, Row, first_line, ratios
from normlab_kernels import choices, dispatch, linear, spec
from plan import FUSED, UNFUSED, Planned, launch_fields

Tensor = torch.Tensor
WRONG = 0.03  # of the largest element: bf16 rounds to 0.4%, and the decode kernel restated here errs as much again
VOCABULARY = 4096
# Whole models: depth, width, tokens of a step, tokens of a prompt.
ON_GPU = {"depth": 16, "width": 2048, "length": 2048, "batch": 4, "prompt": 128}
ON_CPU = {"depth": 1, "width": 64, "length": 8, "batch": 2, "prompt": 4}


class Wrong(Exception):
    """A call whose result is not the formula's: its time means nothing."""


def outputs(out: Any) -> list[Tensor]:
    """The tensors that a call returns."""
    return list(out) if isinstance(out, tuple) else [out]


def largest_error(got: Any, expected: Any) -> float:
    """The largest difference in units of the largest element, over all outputs.

    Raises:
        Wrong: it is more than rounding explains.
    """
    pairs = zip(outputs(got), outputs(expected), strict=True)
    errors = [((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-9)).item() for a, b in pairs]
    if not all(error <= WRONG for error in errors):  # written this way so that NaN is rejected
        raise Wrong(f"the results differ by {', '.join(f'{e:.2g}' for e in errors)} of their largest elements")
    return max(errors)


def one_pass(direction: str, call: peers.Call, arguments: dict[str, Tensor]) -> Callable[[], object]:
    """A call of one pass. The backward pass alone keeps its graph; upstream gradients are random."""
    leaves = list(arguments.values())

    def forward() -> object:
        with torch.no_grad():
            return call(arguments)

    if direction == "forward":
        return forward
    if direction == "forward with gradient":
        return lambda: call(arguments)
    outs = outputs(call(arguments))
    upstream = [torch.randn_like(tensor) for tensor in outs]
    if direction == "backward":
        return lambda: torch.autograd.grad(outs, leaves, upstream, retain_graph=True, allow_unused=True)
    return lambda: torch.autograd.grad(outputs(call(arguments)), leaves, upstream, allow_unused=True)


def floor_bytes(planned: Planned, device: Device) -> int:
    """Bytes that the pass must read and write."""
    function = peers.FUNCTIONS[planned.function]
    units = {"forward": function.forward_rows, "backward": function.backward_rows}
    moved = units.get(planned.direction, sum(units.values()))
    return moved * planned.rows * planned.width * device.dtype.itemsize


def beside_copy(columns: Row, floor: int, device: Device) -> Row:
    """A measured row with its floor and its share of the copy's rate."""
    copy = device.copy_microseconds(floor)
    rates: Row = {"floor_bytes": floor, "copy_microseconds": copy, "copy_gigabytes_per_second": floor / copy / 1e3}
    if "microseconds" in columns:
        time = columns["microseconds"]
        rates |= {"gigabytes_per_second": floor / time / 1e3, "share_of_copy": copy / time}
    return columns | rates


def norm_row(planned: Planned, device: Device) -> Row:
    """A norm, one pass, by one peer, and a copy of as many bytes."""
    return beside_copy(decode_row(planned, device), floor_bytes(planned, device), device)


def decode_row(planned: Planned, device: Device) -> Row:
    """A norm, one pass, by one peer. In decoding launches count, not bytes, so there is no copy."""
    call = peers.build(planned.peer, planned.function, device.backend)
    rows, width = device.sizes(planned.rows, planned.width)

    def arguments() -> dict[str, Tensor]:
        return peers.arguments(planned.function, rows, width, device.dtype, device.torch)

    columns: Row = {}
    if planned.direction == "forward":
        given = arguments()
        with torch.no_grad():
            columns["error"] = largest_error(call(given), peers.formula(planned.function)(given))
    touched = floor_bytes(planned, device)
    return columns | device.time(lambda: one_pass(planned.direction, call, arguments()), touched)


def host_row(planned: Planned, device: Device) -> Row:
    """The host's time of a call, launches left out (`host.py`); a peer's in turns with ours."""
    with host.no_launches():
        calls = [peers.build(peer, planned.function) for peer in (planned.against or planned.peer, planned.peer)]
        rows, width = device.sizes(planned.rows, planned.width)
        arguments = peers.arguments(planned.function, rows, width, torch.bfloat16, torch.device("cpu"))
        columns = ratios(*host.microseconds(*(one_pass(planned.direction, call, arguments) for call in calls)))
        return columns if planned.against else {"microseconds": columns["microseconds"]}


def compiled_row(planned: Planned, device: Device) -> Row:
    """Our function in turns with the formula under torch.compile."""
    baseline = peers.compiled_formula(planned.function, device.backend)
    ours = peers.OURS[planned.function]
    call = peers.compiled(ours, device.backend) if planned.peer.endswith("compiled") else ours
    rows, width = device.sizes(planned.rows, planned.width)
    arguments = peers.arguments(planned.function, rows, width, device.dtype, device.torch)
    turns = [one_pass(planned.direction, either, arguments) for either in (baseline, call)]
    return ratios(*device.interleaved(*turns, 25 * device.steps))


def launch_row(planned: Planned, device: Device) -> Row:
    """The kernel of a norm, launched as chosen or with fields of the launch changed; without autograd."""
    if not dispatch.takes_kernels(torch.empty(0, dtype=device.dtype, device=device.torch)):
        raise Missing("the Triton kernels do not run on this device")
    from normlab_kernels import ops

    function = peers.FUNCTIONS[planned.function]
    assert function.spec is not None
    rows, width = device.sizes(planned.rows, planned.width)
    forward = choices.forward(width, function.spec.reduces)
    backward = choices.backward(width, function.spec.has_row_statistic, "direction" in function.inputs)

    def make(fields: dict[str, Any]) -> Callable[[], object]:
        made = peers.arguments(planned.function, rows, width, device.dtype, device.torch)
        a = {name: tensor.detach() for name, tensor in made.items()}
        x, residual, weight, given = a["x"], a.get("residual"), a["weight"], a.get("given")
        parameters = [weight, *(a.get(name) for name in ("bias", "scale", "shift", "direction"))]
        operands = (x, residual, *parameters, given, function.spec)
        if planned.direction == "forward":
            return lambda: ops.launch_forward(*operands, chosen=replace(forward, **fields))
        _, total, mean, ms = ops.launch_forward(*operands)
        grad = torch.randn_like(x)
        grad_sum = None if residual is None else torch.randn_like(x)
        wants = [tensor is not None for tensor in (*parameters, given)]
        saved = (x if total is None else total, *parameters, mean, given if ms is None else ms)
        chosen = replace(backward, **fields)
        return lambda: ops.launch_backward(grad, grad_sum, None, *saved, function.spec, wants, chosen=chosen)

    fields: dict[str, Any] = launch_fields(planned.launch)
    fields |= {"whole": bool(fields["whole"])} if "whole" in fields else {}
    columns: Row = {}
    if planned.launch:  # tests check the chosen launch; another is checked against it
        results = []
        for changed in (fields, {}):
            torch.manual_seed(0)
            results.append(tuple(tensor for tensor in make(changed)() if tensor is not None))  # type: ignore[attr-defined]
        columns["error"] = largest_error(*results)
    floor = floor_bytes(planned, device)
    return beside_copy(columns | device.time(lambda: make(fields), floor), floor, device)


def linear_fields(launch: str) -> dict[str, Any]:
    """The fields of `choices.LinearLaunch` that a launch changes."""
    fields = launch_fields(launch)
    return {name: bool(value) if name in ("flatten", "from_residual") else value for name, value in fields.items()}


def linear_row(planned: Planned, device: Device) -> Row:
    """h = residual + a W^T and a norm of h, in one kernel, or in two, or without the norm."""
    rows, width = device.sizes(planned.rows, planned.width)
    changed, name = linear_fields(planned.launch), planned.function

    def operands() -> tuple[Tensor, ...]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device.torch, dtype=device.dtype)

        weight, lam = torch.ones(width, device=device.torch, dtype=device.dtype), normal(1).fill_(1.0)
        ms = torch.ones(rows, 1, device=device.torch)
        return normal(rows, width), normal(width, width) / width**0.5, normal(rows, width), weight, lam, ms

    def call(a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, lam: Tensor, ms: Tensor) -> object:
        if name == FUSED and changed:
            from normlab_kernels import linear_ops

            bhyt = spec.RowSpec(spec.Stat.GIVEN, spec.Act.TANH, 1e-6, 10.0)
            launch = replace(choices.linear(width), **changed)
            return linear_ops.launch_linear(a, proj, residual, weight, None, lam, ms, bhyt, launch)
        if name in (FUSED, UNFUSED):
            return nk.linear_add_bhyt(a, proj, residual, weight, lam, ms, fused=name == FUSED)
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
        return torch.no_grad()(lambda: call(*mine))

    columns: Row = {}
    if name.startswith("linear_add"):
        mine = operands()
        if reason := linear.cannot_fuse(*mine[:4]):
            raise Missing(reason)
        if name == FUSED:
            with torch.no_grad():
                columns["error"] = largest_error(call(*mine), nk.linear_add_bhyt(*mine, fused=False))
    # The output side: the product's operands are read more than once, from the cache.
    columns |= device.time(make, 4 * planned.rows * planned.width * device.dtype.itemsize)
    if "microseconds" in columns:
        columns["teraflops"] = 2 * planned.rows * planned.width**2 / columns["microseconds"] / 1e6
    return columns


def build_model(scheme: str, peer: str, device: Device) -> Any:
    """A model of the benchmark's shape, with a peer's RMSNorm in every norm where one is named. Needs normlab.

    Raises:
        Missing: the peer is not installed.
    """
    call = None if peer in ("normlab", "eager") else peers.build(peer, "rms_norm")
    import normlab

    size = ON_GPU if device.torch.type == "cuda" else ON_CPU
    torch.manual_seed(0)
    config = normlab.NormlabConfig(
        scheme=scheme,
        hidden_size=size["width"],
        intermediate_size=size["width"] * 8 // 3 // 64 * 64,
        num_hidden_layers=size["depth"],
        num_attention_heads=size["width"] // 64,
        num_key_value_heads=size["width"] // 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=size["length"],
    )
    with device.torch:
        model = normlab.NormlabForCausalLM(config, kernels="auto" if peer == "normlab" else "torch")
    for norm in model.modules() if call is not None else ():
        if isinstance(norm, normlab.norms.RMSNorm):
            norm.kernels = "torch"
            norm.forward = lambda x, norm=norm: call({"x": x, "weight": norm.weight})
    return model.to(device.torch, device.dtype)


def training_step(model: Any, device: Device) -> Callable[[], object]:
    """Forward, backward, AdamW."""
    size = ON_GPU if device.torch.type == "cuda" else ON_CPU
    tokens = torch.randint(VOCABULARY, (size["batch"], size["length"]), device=device.torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.torch.type == "cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def token_step(model: Any, batch: int, device: Device) -> Callable[[], object]:
    """One more token for each of some sequences, through the cache, always from the same prompt."""
    from transformers import DynamicCache

    model.eval()
    prompt = (ON_GPU if device.torch.type == "cuda" else ON_CPU)["prompt"]
    tokens = torch.randint(VOCABULARY, (batch, prompt), device=device.torch)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(tokens, None, None, cache)  # by position: its name depends on transformers

    def step() -> Tensor:
        with torch.no_grad():
            logits = model(tokens[:, :1], None, None, cache).logits
        cache.crop(-1)
        return logits

    return step


def two_models(planned: Planned, device: Device) -> list[Any]:
    """The baseline's model and the row's."""
    return [build_model(*who, device) for who in (planned.against.split(), (planned.function, planned.peer))]


def step_row(planned: Planned, device: Device) -> Row:
    """A whole training step, in turns with the baseline's, so that a machine that slows down slows both."""
    steps = [training_step(model, device) for model in two_models(planned, device)]
    return ratios(*device.interleaved(*steps, device.steps))


def generate_row(planned: Planned, device: Device) -> Row:
    """A token of generation, in turns with the baseline's: as launched, and replayed from a graph where there are any.

    Time and ratio are then the replay's, which pays nothing for launches.
    """
    steps = [token_step(model, planned.rows, device) for model in two_models(planned, device)]
    columns = ratios(*device.interleaved(*steps, device.steps))
    try:
        graphs = [device.graphed(step) for step in steps]
    except RuntimeError as error:  # a model may wait for the host
        return columns | {"note": f"no CUDA graph, as launched: {first_line(error)}"}
    if graphs[0] is None or graphs[1] is None:
        return columns
    replayed = ratios(*device.interleaved(graphs[0], graphs[1], 5 * device.steps))
    return {"eager_microseconds": columns["microseconds"], **replayed}


MEASURE: dict[str, Callable[[Planned, Device], Row]] = {
    "rows": norm_row,
    "launch": launch_row,
    "linear": linear_row,
    "decode": decode_row,
    "host": host_row,
    "compiled": compiled_row,
    "step": step_row,
    "generate": generate_row,
}
