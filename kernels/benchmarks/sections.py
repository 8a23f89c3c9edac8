"""One function per section: a planned row and a device in, the row's columns out."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any
from unittest.mock import patch

import host
import peers
import torch
from measure import Call, Device, Missing, Row, first_line, in_turns, ratios
from normlab_kernels import choices, dispatch
from plan import Planned

Tensor = torch.Tensor
WRONG = 0.03  # of the largest element: bf16 rounds to 0.4%, and the decode kernel restated here errs as much again
VOCABULARY = 4096


class Wrong(Exception):
    """A call whose result is not the formula's: its time means nothing."""


def outputs(out: Any) -> list[Tensor]:
    """The tensors that a call returns."""
    return [tensor for tensor in out if tensor is not None] if isinstance(out, tuple) else [out]


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


def seeded(make: Callable[[], Call]) -> Any:
    """The result of a call on arguments that are always the same."""
    torch.manual_seed(0)
    return make()()


def one_pass(direction: str, call: peers.Call, arguments: dict[str, Tensor]) -> Call:
    """A call of one pass. The backward pass alone keeps its graph; upstream gradients are random."""
    if direction == "forward":
        return torch.no_grad()(lambda: call(arguments))
    if direction == "forward with gradient":
        return lambda: call(arguments)
    leaves, outs = list(arguments.values()), outputs(call(arguments))
    upstream = [torch.randn_like(tensor) for tensor in outs]
    if direction == "backward":
        return lambda: torch.autograd.grad(outs, leaves, upstream, retain_graph=True, allow_unused=True)
    return lambda: torch.autograd.grad(outputs(call(arguments)), leaves, upstream, allow_unused=True)


def check_kernels(planned: Planned, device: Device) -> None:
    """Without them this package would run the plain formula on a GPU, whose time is not ours.

    Raises:
        Missing: the row is of the Triton kernels, which cannot run.
    """
    on_gpu = device.torch.type == "cuda"
    if (planned.section == "launch" or (on_gpu and planned.is_ours)) and not (
        dispatch.TRITON and (on_gpu or dispatch.INTERPRETING)
    ):
        known = " to before ".join(".".join(map(str, version)) for version in dispatch.TRITON_VERSIONS)
        raise Missing(f"the kernels need Triton {known}, and a GPU")


def norm_row(planned: Planned, device: Device) -> Row:
    """A norm, one pass, by one peer, and a copy of as many bytes.

    In decoding launches count, not bytes, so there is no copy. A kernel that is not launched as chosen is checked
    against the one that is: tests check that.
    """
    call = peers.build(planned.peer, planned.function, device.backend)
    rows, width = device.sizes(planned.rows, planned.width)

    def make(call: peers.Call = call) -> Call:
        arguments = peers.arguments(planned.function, rows, width, device.dtype, device.torch)
        return one_pass(planned.direction, call, arguments)

    launches: Any = nullcontext()
    if planned.launch:
        chooser = "moments" if planned.function == "row_moments" else planned.direction
        chosen = getattr(choices, chooser)
        launches = patch.object(choices, chooser, lambda *where: choices.changed(chosen(*where), planned.launch))
    columns: Row = {}
    floor = peers.rows_moved(planned.function, planned.direction) * planned.rows * planned.width * device.dtype.itemsize
    expected = None
    if planned.launch or planned.direction == "forward":
        expected = seeded(make) if planned.launch else seeded(lambda: make(peers.formula(planned.function)))
    with launches:
        if expected is not None:
            columns["error"] = largest_error(seeded(make), expected)
            expected = None
        columns |= device.time(make, floor)
    if planned.section == "decode":
        return columns
    copy = device.copy_microseconds(floor)
    columns |= {"floor_bytes": floor, "copy_microseconds": copy, "copy_gigabytes_per_second": floor / copy / 1e3}
    if "microseconds" in columns:
        columns["gigabytes_per_second"] = floor / columns["microseconds"] / 1e3
        columns["share_of_copy"] = copy / columns["microseconds"]
    return columns


def host_row(planned: Planned, device: Device) -> Row:
    """The host's time of a call, launches left out (`host.py`); a peer's in turns with ours."""
    with host.no_launches():
        calls = [peers.build(peer, planned.function) for peer in (planned.against or planned.peer, planned.peer)]
        rows, width = device.sizes(planned.rows, planned.width)
        arguments = peers.arguments(planned.function, rows, width, torch.bfloat16, torch.device("cpu"))
        a, b = (one_pass(planned.direction, call, arguments) for call in calls)
        columns = ratios(*in_turns(a, b, 400, time.thread_time))
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


def build_model(scheme: str, peer: str, device: Device) -> Any:
    """A model of the benchmark's shape, with a peer's RMSNorm in every norm where one is named. Needs normlab.

    Raises:
        Missing: the peer is not installed.
    """
    call = None if peer in ("normlab", "eager") else peers.build(peer, "rms_norm")
    import normlab

    width = device.model["width"]
    torch.manual_seed(0)
    config = normlab.NormlabConfig(
        scheme=scheme,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=device.model["depth"],
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=device.model["length"],
    )
    with device.torch:
        model = normlab.NormlabForCausalLM(config, kernels="auto" if peer == "normlab" else "torch")
    for norm in model.modules() if call is not None else ():
        if isinstance(norm, normlab.norms.RMSNorm):
            norm.kernels = "torch"
            norm.forward = lambda x, norm=norm: call({"x": x, "weight": norm.weight})
    return model.to(device.torch, device.dtype)


def training_step(model: Any, device: Device) -> Call:
    """Forward, backward, AdamW."""
    tokens = torch.randint(VOCABULARY, (device.model["batch"], device.model["length"]), device=device.torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.torch.type == "cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def token_step(model: Any, batch: int, device: Device) -> Call:
    """One more token for each of some sequences, through the cache, always from the same prompt.

    A step extends a copy of the cache, which shares the prompt's tensors. They live as long as the step. A graph of it
    reads them at each replay.
    """
    from transformers import DynamicCache

    model.eval()
    tokens = torch.randint(VOCABULARY, (batch, device.model["prompt"]), device=device.torch)
    with torch.no_grad():
        prompt = DynamicCache(config=model.config)
        model(tokens, None, None, prompt)  # by position: its name depends on transformers

    def step() -> Tensor:
        cache = copy(prompt)
        cache.layers = [copy(layer) for layer in prompt.layers]
        with torch.no_grad():
            return model(tokens[:, :1], None, None, cache).logits

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
    "launch": norm_row,
    "decode": norm_row,
    "host": host_row,
    "compiled": compiled_row,
    "step": step_row,
    "generate": generate_row,
}
