"""Ports of real architectures, written by hand with other names, each with one fault in its code; what `diff` says.

    python benchmarks/ports.py --out data/bench/ports.csv

The faults are of kinds that `benchmarks/first_layer.py` does not seed, or lie in code that it cannot reach. A port
without a fault must be equal. One row per case.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from benchmarks.timing import written
from normlab.differences import diff

COLUMNS = "model fault held_out right site_right cause_right named seconds verdict causes".split()
LAYERS, LENGTH = 4, 24
SHAPE = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    "Mistral": {"sliding_window": 7},
    "Qwen2": {"head_dim": None},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 1.5},
    "Olmo2": {"head_dim": None},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPTNeoX": {"head_dim": None, "num_key_value_heads": None},
    "GPT2": {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None, "n_positions": 32},
}  # fmt: skip


class Fault(NamedTuple):
    """A fault in a port's code, the block and sites at which it shows first, and words that name it.

    held_out: True for one written when the search for causes was done.
    """

    name: str
    of: str
    layer: int
    sites: str
    cause: str
    held_out: bool = False


FAULTS = [
    Fault("theta of one layer", "Qwen3", 3, "attn_out", "rotary"),
    Fault("no llama3 scaling of the rotary frequencies", "Llama", 1, "attn_out", "rotary"),
    Fault("rotary embedding of the keys alone", "Mistral", 1, "attn_out", "rotary"),
    Fault("rotary embedding of all features", "GPTNeoX", 1, "attn_out", "rotary"),
    Fault("window one too long", "Mistral", 1, "attn_out", "window"),
    Fault("window in the wrong half of the layers", "Gemma2", 1, "attn_out", "window"),
    Fault("no query scaling of its own", "Gemma2", 1, "attn_(out|post_norm_in)", "softmax"),
    Fault("no soft cap of the scores", "Gemma2", 1, "attn_(out|post_norm_in)", "cap"),
    Fault("no soft cap of the logits", "Gemma2", LAYERS + 1, "logits", "cap"),
    Fault("embeddings scaled by a rounded root", "Gemma2", 0, "embeddings", "scaled"),
    Fault("key and value heads interleaved", "Qwen2", 1, "attn_out", "repeated"),
    Fault("no norm of queries", "Qwen3", 1, "attn_out", "norm"),
    Fault("norm of queries after the rotary embedding", "Qwen3", 1, "attn_out", "norm"),
    Fault("norm of queries head by head", "Olmo2", 1, "attn_out", "norm"),
    Fault("norm before the branch in place of after", "Olmo2", 1, "attn_(in|out)|attn_post.*", "norm"),
    Fault("gate and up swapped", "Llama", 1, "mlp_out", "swapped"),
    Fault("top-k weights not normalized", "Mixtral", 1, "mlp_out", "expert|router"),
    Fault("second expert weighted as the first", "Mixtral", 1, "mlp_out", "expert|router"),
    Fault("exact GELU", "GPT2", 1, "mlp_out", "activation"),
    Fault("norm without the mean", "GPT2", 1, "attn_norm_out", "mean"),
    Fault("no scale of the scores", "GPT2", 1, "attn_out", "softmax"),
    Fault("residual after the norm", "Mistral", 1, "mlp_norm_in", "residual|sum"),
    Fault("one residual after the other", "GPTNeoX", 1, "mlp_norm_in|mlp_norm_out", "attention enters"),
    Fault("value bias left out", "Qwen2", 1, "attn_out", "bias"),
    # Written after the causes had been widened for those above, and not looked at until then.
    Fault("heads joined in reverse", "Llama", 1, "attn_out", "head|permuted", True),
    Fault("no token sees itself", "Mistral", 1, "attn_out", "mask", True),
    Fault("eps outside the root", "Qwen2", 1, "attn_norm_out", "eps", True),
    Fault("positions from 1", "GPT2", 0, "embeddings", "position", True),
    Fault("query, key and value read in one piece each", "GPTNeoX", 1, "attn_out", "order|permuted|layout", True),
    Fault("no norm after the MLP", "Gemma2", 1, "mlp_post_norm_out|block_out", "norm", True),
    Fault("one expert in place of two", "Mixtral", 1, "mlp_out", "expert|router", True),
    Fault("scores scaled by the hidden size", "Qwen3", 1, "attn_out", "softmax", True),
    Fault("GELU in the last layer", "Olmo2", LAYERS, "mlp_out", "activation", True),
    Fault("head tied to the embeddings", "Llama", LAYERS + 1, "logits", "tied|embeddings", True),
]  # fmt: skip


def rotated(x: Tensor, inverse: Tensor) -> Tensor:
    """Rotary embedding of the first 2 x len(inverse) features of (batch, heads, length, features)."""
    angles = torch.outer(torch.arange(x.shape[2]).to(inverse), inverse)
    cos, sin = (torch.cat([f(angles), f(angles)], -1).to(x.dtype) for f in (torch.cos, torch.sin))
    turned, kept = x[..., : 2 * len(inverse)], x[..., 2 * len(inverse) :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, kept], -1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Norm(nn.Module):
    def __init__(self, source: nn.Module, config: Any, fault: str) -> None:
        super().__init__()
        plus_one = "Gemma" in type(source).__name__
        self.gain = nn.Parameter(source.weight.detach().clone() + (1.0 if plus_one else 0.0))
        bias = getattr(source, "bias", None)
        self.shift = None if bias is None else nn.Parameter(bias.detach().clone())
        self.eps = next(v for n in ("eps", "variance_epsilon") if (v := getattr(source, n, None)) is not None)
        self.centred = bias is not None and fault != "norm without the mean"
        self.outside = fault == "eps outside the root"

    def forward(self, x: Tensor) -> Tensor:
        if self.outside:
            return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.gain
        y = normed(x - x.mean(-1, keepdim=True) if self.centred else x, self.gain, self.eps)
        return y if self.shift is None else y + self.shift


class Attention(nn.Module):
    def __init__(self, source: nn.Module, a: nn.Module, layer: int, fault: str) -> None:
        super().__init__()
        c = a.config
        self.fault, self.layer, self.heads = fault, layer, c.num_attention_heads
        self.groups = getattr(c, "num_key_value_heads", None) or self.heads
        self.width = getattr(c, "head_dim", None) or c.hidden_size // self.heads
        self.wq, self.wk, self.wv, self.wo = _projections(source, self.heads, self.width, fault)
        if fault == "value bias left out":
            self.wv.bias = None
        for name in ("q_norm", "k_norm"):
            norm = getattr(source, name, None)
            self.add_module(name, None if norm is None else Norm(norm, c, fault))
        self.per_head = "Qwen3" in type(a).__name__
        self.scale = (getattr(c, "query_pre_attn_scalar", None) or self.width) ** -0.5
        if fault == "no query scaling of its own":
            self.scale = self.width**-0.5
        if fault == "no scale of the scores":
            self.scale = 1.0
        if fault == "scores scaled by the hidden size":
            self.scale = c.hidden_size**-0.5
        self.cap = None if fault.startswith("no soft cap of the scores") else getattr(c, "attn_logit_softcapping", None)
        self.window = getattr(c, "sliding_window", None)
        types = getattr(c, "layer_types", None)
        if self.window and types:
            local = types[layer] == "sliding_attention"
            self.window = self.window if local != (fault == "window in the wrong half of the layers") else None
        if self.window and fault == "window one too long":
            self.window += 1
        rotary = next((m for n, m in a.named_modules() if n.endswith("rotary_emb")), None)
        self.inverse = None if rotary is None else rotary.inv_freq.detach().clone().double()
        if fault == "theta of one layer" and layer == 2:
            self.inverse = 5e5 ** (-torch.arange(0, self.width, 2).double() / self.width)
        if fault.startswith(("no llama3", "rotary embedding of all")):
            self.inverse = 1e4 ** (-torch.arange(0, self.width, 2).double() / self.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.q_norm is not None and not self.per_head:
            k = self.k_norm(k)
            if self.fault == "norm of queries head by head":
                heads = q.unflatten(-1, (self.heads, -1))
                q = (normed(heads, torch.ones(()).to(x), self.q_norm.eps)).flatten(-2) * self.q_norm.gain
            else:
                q = self.q_norm(q)
        q, k, v = (y.view(batch, length, -1, self.width).transpose(1, 2) for y in (q, k, v))
        late = self.fault == "norm of queries after the rotary embedding"
        if self.q_norm is not None and self.per_head:
            q, k = q if late or self.fault == "no norm of queries" else self.q_norm(q), self.k_norm(k)
        if self.inverse is not None:
            q = q if self.fault == "rotary embedding of the keys alone" else rotated(q, self.inverse.to(x))
            k = rotated(k, self.inverse.to(x))
        q = self.q_norm(q) if late else q
        repeats = self.heads // self.groups
        if self.fault == "key and value heads interleaved":
            k, v = k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1)
        else:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = q @ k.mT * self.scale
        scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) if self.window is None else (distance < 0) | (distance >= self.window)
        if self.fault == "no token sees itself":
            hidden = hidden | ((distance == 0) & (torch.arange(length) > 0))
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        mixed = mixed.flip(1) if self.fault == "heads joined in reverse" else mixed
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


def _projections(source: nn.Module, heads: int, width: int, fault: str) -> list[nn.Linear]:
    """Query, key, value and output as four matrices."""
    children = dict(source.named_children())
    if "q_proj" in children:
        return [_linear(m.weight, m.bias) for m in (source.q_proj, source.k_proj, source.v_proj, source.o_proj)]
    if "c_attn" in children:  # (in, out), queries first
        weights, biases = source.c_attn.weight.T.chunk(3), source.c_attn.bias.chunk(3)
        return [*map(_linear, weights, biases), _linear(source.c_proj.weight.T, source.c_proj.bias)]
    fused = source.query_key_value  # head by head
    shape = (3, heads, width) if fault.startswith("query, key and value read") else (heads, 3, width)
    weights = fused.weight.view(*shape, -1).unbind(shape.index(3))
    biases = fused.bias.view(*shape).unbind(shape.index(3))
    parts = [_linear(w.flatten(0, 1), b.flatten()) for w, b in zip(weights, biases, strict=True)]
    return [*parts, _linear(source.dense.weight, source.dense.bias)]


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    result.weight.data = weight.detach().clone()
    if bias is not None:
        result.bias.data = bias.detach().clone()
    return result


class FeedForward(nn.Module):
    def __init__(self, source: nn.Module, config: Any, layer: int, fault: str) -> None:
        super().__init__()
        self.fault, self.top = fault, getattr(config, "num_experts_per_tok", 1)
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        self.act = transformers.activations.ACT2FN[name or config.activation_function]
        if fault == "exact GELU" or (fault == "GELU in the last layer" and layer == LAYERS - 1):
            self.act = nn.GELU()
        if fault == "one expert in place of two":
            self.top = 1
        linears = {n: m for n, m in source.named_children() if hasattr(m, "weight") and m.weight.ndim == 2}
        self.router = None
        if hasattr(source, "experts"):
            self.router = nn.Parameter(source.gate.weight.detach().clone())
            gates = source.experts.gate_up_proj.chunk(2, 1)
            triples = zip(*gates, source.experts.down_proj, strict=True)
            self.experts = nn.ModuleList(nn.ModuleList(map(_linear, triple)) for triple in triples)
        elif "gate_proj" in linears:
            triple = [_linear(linears[n].weight) for n in ("gate_proj", "up_proj", "down_proj")]
            self.experts = nn.ModuleList([nn.ModuleList(triple)])
        else:
            into, out = linears.values() if "c_fc" not in linears else (linears["c_fc"], linears["c_proj"])
            turned = "c_fc" in linears
            pair = [_linear(m.weight.T if turned else m.weight, m.bias) for m in (into, out)]
            self.experts = nn.ModuleList([nn.ModuleList(pair)])

    def expert(self, parts: nn.ModuleList, x: Tensor) -> Tensor:
        if len(parts) == 2:
            return parts[1](self.act(parts[0](x)))
        gate, up, down = parts
        gate, up = (up, gate) if self.fault == "gate and up swapped" else (gate, up)
        return down(self.act(gate(x)) * up(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.router is None:
            return self.expert(self.experts[0], x)
        weights, chosen = (x @ self.router.T).softmax(-1).topk(self.top, -1)
        if self.fault != "top-k weights not normalized":
            weights = weights / weights.sum(-1, keepdim=True)
        if self.fault == "second expert weighted as the first":
            weights = weights[..., :1].expand_as(weights)
        outputs = torch.stack([self.expert(parts, x) for parts in self.experts], -2)
        picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return (picked * weights[..., None]).sum(-2)


class Block(nn.Module):
    """A block that normalizes before its branches, after them, or both; GPT-NeoX's are parallel."""

    def __init__(self, source: nn.Module, a: nn.Module, layer: int, fault: str) -> None:
        super().__init__()
        children = dict(source.named_children())
        attention = next(m for n, m in children.items() if n in ("self_attn", "attention", "attn"))
        self.attention = Attention(attention, a, layer, fault)
        self.feed_forward = FeedForward(children["mlp"], a.config, layer, fault)
        norms = [Norm(m, a.config, fault) for n, m in children.items() if "norm" in n or n.startswith("ln_")]
        self.fault, self.parallel = fault, getattr(a.config, "use_parallel_residual", False)
        self.after = "Olmo2" in type(a).__name__
        before, after = (norms[::2], norms[1::2]) if len(norms) == 4 else ([], norms) if self.after else (norms, [])
        self.before, self.behind = nn.ModuleList(before), nn.ModuleList(after)

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel and self.fault != "one residual after the other":
            return x + self.attention(self.before[0](x)) + self.feed_forward(self.before[1](x))
        for i, branch in enumerate((self.attention, self.feed_forward)):
            if self.fault.startswith("norm before the branch") and i == 0:
                x = x + branch(self.behind[i](x))
                continue
            y = branch(self.before[i](x) if len(self.before) else x)
            if self.fault == "residual after the norm" and i == 0:
                x = self.before[i](x)
            skips = self.fault == "no norm after the MLP" and i == 1
            x = x + (self.behind[i](y) if len(self.behind) and not skips else y)
        return x


class Port(nn.Module):
    """The whole model. Tokens (batch, length) to logits."""

    def __init__(self, a: Any, fault: str = "") -> None:
        super().__init__()
        inner, c = getattr(a, a.base_model_prefix), a.config
        embeddings = a.get_input_embeddings()
        self.tokens = nn.Embedding.from_pretrained(embeddings.weight.detach().clone(), freeze=False)
        self.positions = None
        if hasattr(inner, "wpe"):
            self.positions = nn.Embedding.from_pretrained(inner.wpe.weight.detach().clone(), freeze=False)
        self.scale = float(getattr(embeddings, "embed_scale", torch.ones(())))
        if fault == "embeddings scaled by a rounded root":
            self.scale = float(torch.tensor(self.scale).to(torch.bfloat16))
        self.start = int(fault == "positions from 1")
        stack = inner.layers if hasattr(inner, "layers") else inner.h
        self.blocks = nn.ModuleList(Block(block, a, i, fault) for i, block in enumerate(stack))
        last = [m for n, m in inner.named_children() if n in ("norm", "final_layer_norm", "ln_f")]
        self.norm_f = Norm(last[0], c, "")
        tied = fault == "head tied to the embeddings"
        self.output = _linear((embeddings if tied else a.get_output_embeddings()).weight)
        self.cap = None if fault == "no soft cap of the logits" else getattr(c, "final_logit_softcapping", None)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens) * self.scale
        if self.positions is not None:
            h = h + self.positions(torch.arange(tokens.shape[1]) + self.start)
        for block in self.blocks:
            h = block(h)
        logits = self.output(self.norm_f(h))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def reference(name: str) -> Any:
    """A small model of transformers with random weights, gains and biases off their start."""
    torch.manual_seed(0)
    fields = {n: v for n, v in (SHAPE | CONFIGS[name]).items() if v is not None}
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.mul_(5)
    return model.eval()


def cases(chosen: str = "") -> Iterator[dict[str, Any]]:
    """One row per port: without a fault, and with each fault of the model."""
    draw = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(3, SHAPE["vocab_size"], (2, LENGTH), generator=draw)}
    for name in CONFIGS:
        a = reference(name)
        for fault in (None, *(fault for fault in FAULTS if fault.of == name)):
            said = "" if fault is None else fault.name
            if not re.search(chosen, f"{name}: {said}"):
                continue
            started = time.perf_counter()
            result = diff(a, Port(a, said).eval(), batch)
            row = {"model": name, "fault": said, "seconds": round(time.perf_counter() - started, 2)}
            first = result.first
            if fault is None:
                row |= {"right": result.equal}
            else:
                row |= {
                    "held_out": fault.held_out,
                    "right": first is not None and first.layer == fault.layer,
                    "site_right": first is not None and bool(re.fullmatch(fault.sites, first.name)),
                    "cause_right": any(re.search(fault.cause, cause) for cause in result.causes[:1]),
                    "named": bool(result.causes),
                }
            yield row | {"verdict": result.verdict, "causes": " | ".join(result.causes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="regular expression over 'MODEL: FAULT'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = written(cases(options.only), options.out, COLUMNS)
    faults = [row for row in rows if row["fault"]]
    print(f"equal ports: {sum(row['right'] for row in rows if not row['fault'])} of {len(rows) - len(faults)}")
    for held_out in (False, True):
        kept = [row for row in faults if row["held_out"] == held_out]
        counts = {name: sum(row[name] for row in kept) for name in ("right", "site_right", "cause_right", "named")}
        print("held out" if held_out else "others", len(kept), counts)


if __name__ == "__main__":
    main()
