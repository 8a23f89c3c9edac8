"""Whole models under the clock: a training step by scheme, and one token of generation. Needs normlab.

A model takes turns with the baseline, Pre-LN RMSNorm by this package, step by step, so that a machine that warms up or
slows down does so for both; what counts is the median of the steps' ratios and its interval. The baseline is compared
with itself, and with the plain formula or a peer's RMSNorm in place of ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import peers
import plan
import torch
from measure import Device, Row, first_line, median_interval

VOCABULARY = 4096
# Depth, width, tokens of a step, tokens of a prompt.
ON_GPU = {"depth": 16, "width": 2048, "length": 2048, "batch": 4, "prompt": 128}
ON_CPU = {"depth": 1, "width": 64, "length": 8, "batch": 2, "prompt": 4}


def shape(device: Device) -> dict[str, int]:
    return ON_GPU if device.torch.type == "cuda" else ON_CPU


def build(scheme: str, peer: str, device: Device) -> Any:
    """A model of the benchmark's shape, drawn on the device, where that takes no time.

    Raises:
        Missing: the peer is not installed.
    """
    call = None if peer in ("normlab", "eager") else peers.build(peer, "rms_norm")
    import normlab

    size = shape(device)
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
    if call is not None:
        use_peer(model, call)
    return model.to(device.torch, device.dtype)


def use_peer(model: Any, call: peers.Call) -> None:
    """Let a peer's RMSNorm compute every norm of the model; additions stay PyTorch's."""
    from normlab.norms import RMSNorm

    for norm in [module for module in model.modules() if isinstance(module, RMSNorm)]:
        norm.kernels = "torch"
        norm.forward = lambda x, norm=norm: call({"x": x, "weight": norm.weight})


def training_step(model: Any, device: Device) -> Callable[[], object]:
    """Forward, backward, AdamW."""
    size = shape(device)
    tokens = torch.randint(VOCABULARY, (size["batch"], size["length"]), device=device.torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.torch.type == "cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def token_step(model: Any, batch: int, device: Device) -> Callable[[], object]:
    """One more token for each of some sequences, through the cache, again and again from the same prompt."""
    model.eval()
    tokens = torch.randint(VOCABULARY, (batch, shape(device)["prompt"]), device=device.torch)
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values

    def step() -> torch.Tensor:
        with torch.no_grad():
            logits = model(tokens[:, :1], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def ratios(baseline: list[float], compared: list[float]) -> Row:
    """Median of the time and of the ratio to the baseline's step beside it, with the ratio's 95% interval."""
    each = [b / a for a, b in zip(baseline, compared, strict=True)]
    low, high = median_interval(each)
    return {
        "microseconds": statistics.median(compared),
        "ratio": statistics.median(each),
        "ratio_low": low,
        "ratio_high": high,
        "steps": len(each),
    }


def _pair(planned: plan.Planned, device: Device) -> tuple[Any, Any]:
    scheme, peer = planned.against.split()
    return build(scheme, peer, device), build(planned.function, planned.peer, device)


def step_row(planned: plan.Planned, device: Device) -> Row:
    """A whole training step, turn by turn with the baseline's."""
    baseline, compared = (training_step(model, device) for model in _pair(planned, device))
    return ratios(*device.interleaved(baseline, compared, device.steps))


def generate_row(planned: plan.Planned, device: Device) -> Row:
    """A token of generation, turn by turn with the baseline's: as launched, and replayed from a graph, where the device
    has one; `microseconds` and the ratio are the replay's then, which pays nothing for launches."""
    baseline, compared = (token_step(model, planned.rows, device) for model in _pair(planned, device))
    columns = ratios(*device.interleaved(baseline, compared, device.steps))
    try:
        graphs = [device.graphed(step) for step in (baseline, compared)]
    except RuntimeError as error:  # a model may wait for the host
        return columns | {"note": f"no CUDA graph, as launched: {first_line(error)}"}
    if graphs[0] is None or graphs[1] is None:
        return columns
    replayed = ratios(*device.interleaved(graphs[0], graphs[1], 5 * device.steps))
    return {"eager_microseconds": columns["microseconds"], **replayed}
