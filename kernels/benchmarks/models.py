"""Whole models under the clock: a training step by scheme, and one token of generation. Needs normlab.

Pre-LN RMSNorm is also run with the plain formula and with every installed peer's RMSNorm in place of ours, so that a
scheme is compared with the best way to run the baseline, not with a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import peers
import torch
from measure import Clock, OutOfTime, Row, first_line, graph_of


def shape(device: torch.device) -> dict[str, int]:
    """Depth, width, and tokens of a step: 16 layers of 2,048 on a GPU, next to nothing on a CPU."""
    if device.type == "cpu":
        return {"depth": 2, "width": 64, "length": 32, "batch": 2, "prompt": 8}
    return {"depth": 16, "width": 2048, "length": 2048, "batch": 4, "prompt": 128}


def build(scheme: str, kernels: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of the benchmark's shape, drawn on the device, where that takes no time."""
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
        vocab_size=4096,
        max_position_embeddings=size["length"],
    )
    with device:
        return normlab.NormlabForCausalLM(config, kernels=kernels).to(device, dtype)


def use_peer(model: Any, call: peers.Call) -> None:
    """Let a peer's RMSNorm compute every norm of the model; additions stay PyTorch's."""
    from normlab.norms import RMSNorm

    for norm in [module for module in model.modules() if isinstance(module, RMSNorm)]:
        norm.kernels = "torch"
        norm.forward = lambda x, weight=norm.weight: call({"x": x, "weight": weight})


def variants(everything: bool) -> Iterator[tuple[str, str]]:
    """(scheme, who computes its norms): the baseline in every way, the default scheme, then the other schemes."""
    from normlab import schemes

    yield from ((schemes.BASELINE, who) for who in ("normlab", "eager", "torch", "liger", "quack"))
    yield schemes.DEFAULT, "normlab"
    others = [*schemes.TIMED, *(schemes.SCHEMES if everything else ())]
    for scheme in dict.fromkeys(others):
        if scheme not in (schemes.BASELINE, schemes.DEFAULT):
            yield scheme, "normlab"


def models(
    section: str, everything: bool, clock: Clock, dtype: torch.dtype, deadline: float
) -> Iterator[tuple[Row, Any]]:
    """(the row's beginning, the model) of every variant that can run here."""
    for scheme, who in variants(everything):
        if time.monotonic() > deadline:
            raise OutOfTime(f"{section}: stopped before {scheme}, {who}")
        row = {"section": section, "function": scheme, "peer": who, "width": shape(clock.device)["width"]}
        kernels = "auto" if who == "normlab" else "torch"
        try:
            call = None if who in ("normlab", "eager") else dict(peers.peers("rms_norm", compiled=False))[who]()
            model = build(scheme, kernels, clock.device, dtype)
        except (ImportError, peers.Absent):
            continue
        if call is not None:
            use_peer(model, call)
        yield row, model
        del model  # before the next one is made


def step_section(clock: Clock, dtype: torch.dtype, copy: float, deadline: float) -> Iterator[Row]:
    """A whole training step: forward, backward, AdamW."""
    del copy
    size = shape(clock.device)
    tokens = torch.randint(4096, (size["batch"], size["length"]), device=clock.device)
    for row, model in models("step", True, clock, dtype, deadline):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=clock.device.type == "cuda")

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        row["rows"] = tokens.numel()
        try:
            microseconds = clock.microseconds(step)
            peak = round(clock.peak_megabytes(step), 1)
            yield row | {"pass": "step", "microseconds": round(microseconds, 1), "peak_megabytes": peak}
        except Exception as error:  # noqa: BLE001 - a peer's failure is a result, not the end of the benchmark
            if row["peer"] == "normlab":
                raise
            yield row | {"note": first_line(error)}
        del model, optimizer, step


def token_step(model: Any, batch: int, prompt: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """One more token for each of some sequences, through the cache, again and again from the same prompt."""
    tokens = torch.randint(4096, (batch, prompt), device=device)
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values

    def step() -> torch.Tensor:
        with torch.no_grad():
            logits = model(tokens[:, :1], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def token_rows(model: Any, row: Row, clock: Clock) -> Iterator[Row]:
    """One model's rows. What it makes ends with it: a step that outlived this would keep the model and its cache."""
    for batch in (1, 8, 64):
        row["rows"] = batch
        try:
            step = token_step(model, batch, shape(clock.device)["prompt"], clock.device)
            yield row | {"pass": "eager", "microseconds": round(clock.microseconds(step), 2)}
            if clock.device.type == "cuda":
                yield row | {"pass": "graph", "microseconds": round(clock.microseconds(graph_of(step, 1)), 2)}
        except Exception as error:  # noqa: BLE001 - a graph that cannot be captured is a result too
            yield row | {"note": first_line(error)}


def generate_section(clock: Clock, dtype: torch.dtype, copy: float, deadline: float) -> Iterator[Row]:
    """One token of generation at batch 1, 8 and 64; on CUDA also replayed from a graph, where launches cost nothing."""
    del copy
    for row, model in models("generate", False, clock, dtype, deadline):
        yield from token_rows(model.eval(), row, clock)
        del model
