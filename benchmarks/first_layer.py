"""Seed faults into copies of small models and see whether `normlab.diff` finds the block, the site and the cause.

    python benchmarks/first_layer.py --out data/bench/first_layer.csv            200 faults over all architectures
    python benchmarks/first_layer.py --equal --out data/bench/first_layer_equal.csv     pairs that are equal
    python benchmarks/first_layer.py --two --count 40 --out data/bench/two_faults.csv   a small and a large fault each
    python benchmarks/first_layer.py --check --out data/bench/check.csv          60 checkpoints, for `normlab check`

One row per case. A fault is put into the code (hooks), the weights or the call, never where `diff` could read its name.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import math
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks import architecture_zoo as zoo
from benchmarks.timing import written
from normlab.differences import diff
from normlab.differences.capture import Roles, roles_of
from normlab.models.check import check

ONE = "class fault layer block_right site_right cause_right seconds verdict causes"
TWO = "class small large first_right most_right both_right seconds verdict"
BRANCH = {"attn": r"attn_out|mixer_out|attn_post_norm_(in|out)", "mlp": r"mlp_out|mlp_post_norm_(in|out)"}
# The next site, where a branch is no site of its own.
AFTER = r"|mlp_norm_in|block_out|attn_norm_in|mlp_norm_out|mlp_in"


class Model(NamedTuple):
    """A model under test: the copy to spoil, its roles, a block and the names below it."""

    b: nn.Module
    roles: Roles
    layer: int
    batch: dict[str, Any]

    @property
    def block(self) -> nn.Module:
        return self.b.get_submodule(self.roles.blocks[self.layer - 1])

    def linear(self, pattern: str) -> nn.Linear | None:
        found = [m for n, m in self.block.named_modules() if isinstance(m, nn.Linear) and re.search(pattern, n)]
        return found[0] if found else None

    def every_linear(self, pattern: str) -> list[nn.Linear]:
        """Those of all blocks."""
        blocks = map(self.b.get_submodule, self.roles.blocks)
        named = [pair for block in blocks for pair in block.named_modules()]
        return [m for n, m in named if isinstance(m, nn.Linear) and re.search(pattern, n)]

    def branch(self, kind: str) -> nn.Module | None:
        return self._of_block(self.roles.branches, kind)

    def norm(self, kind: str) -> nn.Module | None:
        return self._of_block(self.roles.norms, kind)

    def _of_block(self, kinds: dict[str, str], kind: str) -> nn.Module | None:
        start = self.roles.blocks[self.layer - 1] + "."
        names = [n for n, k in kinds.items() if k == kind and n.startswith(start)]
        return self.b.get_submodule(names[0]) if names else None

    @property
    def config(self) -> Any:
        return self.b.config.get_text_config()


class Expected(NamedTuple):
    """Blocks and sites at which a fault may show first, and the words that name it."""

    layers: tuple[int, ...]
    sites: str
    cause: str


Fault = Callable[[Model], Expected | None]
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


def _on_output(module: nn.Module, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point())
        if isinstance(output, tuple):
            return (change(output[0], x), *output[1:])
        return change(output, x)

    module.register_forward_hook(hook, with_kwargs=True)


def _norm_of(m: Model) -> tuple[nn.Module, str] | None:
    for kind in ("attn", "mlp"):
        norm = m.norm(kind)
        if norm is not None and getattr(norm, "weight", None) is not None and norm.weight.ndim == 1:
            return norm, kind
    return None


@fault
def eps(m: Model) -> Expected | None:
    chosen = _norm_of(m)
    if chosen is None or "rms" not in type(chosen[0]).__name__.lower():
        return None
    norm, kind = chosen

    def change(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ms = x.double().square().mean(-1, keepdim=True)
        return y * ((ms + 1e-6) / (ms + 1e-4)).sqrt().to(y.dtype)

    _on_output(norm, change)
    return Expected((m.layer,), f"{kind}_norm_out", "eps")


@fault
def one_plus_w(m: Model) -> Expected | None:
    chosen = _norm_of(m)
    if chosen is None or getattr(chosen[0], "bias", None) is not None:
        return None
    norm, kind = chosen
    before = norm.weight.detach().double().clone()
    source = inspect.getsource(type(norm))
    plus = "1.0 + self.weight" in source or "1 + self.weight" in source
    gain = before + 1 if plus else before
    _on_output(norm, lambda y, x: y * ((gain + (-1 if plus else 1)) / gain).to(y.dtype))
    return Expected((m.layer,), f"{kind}_norm_out", r"1 \+ w")


@fault
def no_norm(m: Model) -> Expected | None:
    chosen = _norm_of(m)
    if chosen is None:
        return None
    _on_output(chosen[0], lambda y, x: x.to(y.dtype))
    return Expected((m.layer,), f"{chosen[1]}_norm_out", r"no norm|left out|wrong hidden state")


@fault
def centred(m: Model) -> Expected | None:
    chosen = _norm_of(m)
    if chosen is None or "rms" not in type(chosen[0]).__name__.lower():
        return None
    norm, kind = chosen
    forward = norm.forward
    norm.forward = lambda x, *rest: forward(x - x.mean(-1, keepdim=True), *rest)
    return Expected((m.layer,), f"{kind}_norm_out", "mean|LayerNorm")


@fault
def rotary_base(m: Model) -> Expected | None:
    buffers = [(n, x) for n, x in m.b.named_buffers() if n.endswith("inv_freq")]
    if not buffers or len(buffers[0][1]) < 2:
        return None
    for name, x in buffers:
        owner, _, leaf = name.rpartition(".")
        if "original" not in leaf and x.ndim == 1:
            setattr(m.b.get_submodule(owner), leaf, x**1.25)
    return Expected((1, 2), BRANCH["attn"] + AFTER, "rotary")


@fault
def rotary_layout(m: Model) -> Expected | None:
    if not any(n.endswith("inv_freq") for n, _ in m.b.named_buffers()):
        return None
    head = _head(m)
    turned = [linear for linear in m.every_linear(r"(q|k)_proj$") if linear.out_features % head == 0]
    for linear in turned:
        pairs = torch.arange(head).reshape(-1, 2).T.flatten()
        order = (pairs[None] + head * torch.arange(linear.out_features // head)[:, None]).flatten()
        _on_output(linear, lambda y, x, order=order: y[..., order])  # type: ignore[misc]
    return Expected((1, 2), BRANCH["attn"] + AFTER, "layout") if turned else None


def _head(m: Model) -> int:
    return getattr(m.config, "head_dim", None) or m.config.hidden_size // m.config.num_attention_heads


@fault
def transposed(m: Model) -> Expected | None:
    linear = m.linear(r"(q|o|out)_proj$|query$|dense$")
    if linear is None or linear.in_features != linear.out_features:
        return None
    linear.weight.data = linear.weight.data.T.clone()
    return Expected((m.layer,), BRANCH["attn"] + AFTER, "transposed")


@fault
def permuted_heads(m: Model) -> Expected | None:
    linear, head = m.linear(r"q_proj$|query$"), _head(m)
    if linear is None or linear.out_features < 2 * head:
        return None
    linear.weight.data = linear.weight.data.roll(head, 0)
    return Expected((m.layer,), BRANCH["attn"] + AFTER, "heads permuted|permuted")


@fault
def key_value_repeat(m: Model) -> Expected | None:
    heads, groups = m.config.num_attention_heads, getattr(m.config, "num_key_value_heads", None)
    head = _head(m)
    if not groups or groups in (1, heads):
        return None
    order = torch.arange(heads).reshape(heads // groups, groups).T.flatten()
    columns = (order[:, None] * head + torch.arange(head)).flatten()
    done = False
    for name in m.roles.blocks:
        inner = dict(m.b.get_submodule(name).named_modules())
        q = next((x for n, x in inner.items() if n.endswith("q_proj")), None)
        o = next((x for n, x in inner.items() if n.endswith("o_proj")), None)
        if q is None or o is None or not hasattr(q, "out_features"):
            continue
        if q.out_features != len(columns) or o.in_features != len(columns):
            return None
        back = columns.argsort()
        _on_output(q, lambda y, x: y[..., columns])
        o.register_forward_pre_hook(lambda module, args, back=back: (args[0][..., back],))
        done = True
    return Expected((1, 2), BRANCH["attn"] + AFTER, "repeated") if done else None


@fault
def computed_in_bfloat16(m: Model) -> Expected | None:
    kind = random.choice(("attn", "mlp"))
    module = m.branch(kind)
    if module is None:
        return None
    _on_output(module, lambda y, x: y.to(torch.bfloat16).to(y.dtype))
    return Expected((m.layer,), BRANCH[kind] + AFTER, "cast")


@fault
def weight_in_bfloat16(m: Model) -> Expected | None:
    linear = m.linear(r".")
    if linear is None:
        return None
    linear.weight.data = linear.weight.data.to(torch.bfloat16).to(linear.weight.dtype)
    return Expected((m.layer,), ".*", "cast")


@fault
def missing_bias(m: Model) -> Expected | None:
    biases = [x for n, x in m.block.named_parameters() if n.endswith("bias") and x.abs().max() > 0.01]
    if not biases:
        return None
    random.choice(biases).data.zero_()
    return Expected((m.layer,), ".*", "missing bias|bias")


@fault
def scaled_embedding(m: Model) -> Expected | None:
    embedding = m.b.get_input_embeddings()
    scale = math.sqrt(m.config.hidden_size)
    embedding.register_forward_hook(lambda module, args, output: output * scale)
    return Expected((0, 1), r"embeddings|.*_in", r"scaled|times|sqrt")


@fault
def no_causal_mask(m: Model) -> Expected | None:
    done = []
    for name in m.roles.blocks:
        module = next((x for n, x in m.b.get_submodule(name).named_modules() if re.search(r"attn|attention$", n)), None)
        if module is None:
            return None

        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            mask = kwargs.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.ndim == 4:
                done.append(1)
                kwargs["attention_mask"] = torch.zeros_like(mask)
            return args, kwargs

        module.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        m.b(**m.batch)
    return Expected((1, 2), BRANCH["attn"] + AFTER, "mask") if done else None


@fault
def ignored_padding(m: Model) -> Expected | None:
    if "attention_mask" not in m.batch:
        return None
    with torch.no_grad():
        masked = m.b(**m.batch).logits
        plain = m.b(**{name: value for name, value in m.batch.items() if name != "attention_mask"}).logits
    if (masked - plain)[m.batch["attention_mask"].bool()].abs().max() < 1e-4:
        return None

    def without(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}

    m.b.register_forward_pre_hook(without, with_kwargs=True)
    return Expected((0, 1, 2), ".*", "mask|padding|position")


@fault
def positions_off_by_one(m: Model) -> Expected | None:
    pattern = r"wpe$|embed_positions$|position_embeddings$"
    embedding = next((x for n, x in m.b.named_modules() if re.search(pattern, n)), None)
    if not isinstance(embedding, nn.Embedding):
        return None
    embedding.weight.data = embedding.weight.data.roll(-1, 0)
    return Expected((0, 1), r"embeddings|.*_in", "position|permuted")


@fault
def swapped_gate_and_up(m: Model) -> Expected | None:
    gate, up = m.linear(r"gate_proj$"), m.linear(r"up_proj$")
    if gate is None or up is None or gate.weight.shape != up.weight.shape:
        return None
    gate.weight.data, up.weight.data = up.weight.data, gate.weight.data
    return Expected((m.layer,), BRANCH["mlp"] + AFTER, "swapped")


@fault
def other_blocks_weights(m: Model) -> Expected | None:
    if m.layer >= len(m.roles.blocks):
        return None
    other = m.b.get_submodule(m.roles.blocks[m.layer])
    if other.state_dict().keys() != m.block.state_dict().keys():
        return None
    m.block.load_state_dict(other.state_dict())
    return Expected((m.layer,), ".*", "weights of A's block|another gain|other values")


@fault
def scaled_weight(m: Model) -> Expected | None:
    linear = m.linear(r"(o|v|down|out)_proj$|dense$|fc2$|c_proj$")
    if linear is None:
        return None
    linear.weight.data = linear.weight.data * 1.5
    return Expected((m.layer,), ".*", "scaled")


@fault
def branch_scaled(m: Model) -> Expected | None:
    module = m.branch("mlp")
    if module is None:
        return None
    _on_output(module, lambda y, x: y * 0.5)
    return Expected((m.layer,), BRANCH["mlp"] + "|block_out", "scaled|times")


@fault
def residual_left_out(m: Model) -> Expected | None:
    if m.norm("attn") is None or any(n.endswith("output.LayerNorm") for n, _ in m.block.named_modules()):
        return None  # a norm follows the sum

    def change(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y - x if y.shape == x.shape else y

    _on_output(m.block, change)
    return Expected((m.layer,), "block_out", "residual")


@fault
def no_final_norm(m: Model) -> Expected | None:
    if not m.roles.final_norms:
        return None
    norm = m.b.get_submodule(m.roles.final_norms[-1])
    if re.search("embed", m.roles.final_norms[-1], re.IGNORECASE):
        return None
    _on_output(norm, lambda y, x: x)
    return Expected((len(m.roles.blocks) + 1,), "final_norm_out", "no norm|left out|wrong hidden state")


@fault
def tied_weights(m: Model) -> Expected | None:
    head, embedding = m.b.get_output_embeddings(), m.b.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return None
    head.weight.data = embedding.weight.data.clone()
    return Expected((len(m.roles.blocks) + 1,), "logits", "tied")


@fault
def softmax_scale(m: Model) -> Expected | None:
    head, queries = _head(m), m.every_linear("q_proj$")
    for linear in queries:
        _on_output(linear, lambda y, x: y / math.sqrt(head))
    return Expected((1, 2), BRANCH["attn"] + AFTER, "softmax") if queries else None


@fault
def activation(m: Model) -> Expected | None:
    for name in m.roles.blocks:
        inner = m.b.get_submodule(name)
        named = [n for n, _ in inner.named_modules() if re.search(r"(^|\.)(act|act_fn|activation\w*)$", n)]
        if not named:
            return None
        for n in named:
            owner, _, leaf = n.rpartition(".")
            is_relu = "relu" in str(inner.get_submodule(n)).lower()
            setattr(inner.get_submodule(owner), leaf, nn.SiLU() if is_relu else nn.ReLU())
    return Expected((1, 2), BRANCH["mlp"] + AFTER, "activation")


# Faults of one block that can be given a size: the factor or share of noise that a matrix of a branch gets.
SIZED: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "scaled": lambda x, size: x * (1 + size),
    "noise": lambda x, size: x + size * x.std() * torch.randn_like(x),
    "mixed rows": lambda x, size: x + size * x.roll(1, 0),
}
SMALL, LARGE = 0.02, 0.5


def two_faults(names: list[str], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """One row per pair of a small and a large fault in two blocks: what `diff` says parts first and adds most."""
    random.seed(seed)
    made = 0
    for name, a, batch in models(random.sample(names, len(names))):
        if made == count:
            return
        try:
            roles = roles_of(a, batch)
            layers = random.sample(range(1, len(roles.blocks) + 1), 2)
            b, kinds = copy.deepcopy(a), random.choices([*SIZED], k=2)
            torch.manual_seed(made)
            with torch.no_grad():
                changes = []
                for layer, kind, size in zip(layers, kinds, (SMALL, LARGE), strict=True):
                    linear = Model(b, roles, layer, batch).linear(r"(o|out|down)_proj$|dense$|fc2$|dense_4h_to_h$")
                    if linear is not None:
                        alone = copy.deepcopy(a)
                        linear.weight.copy_(SIZED[kind](linear.weight, size))
                        own = Model(alone, roles, layer, batch).linear(r"(o|out|down)_proj$|dense$|fc2$|dense_4h_to_h$")
                        own.weight.copy_(linear.weight)
                        changes.append(_changes(a, alone, batch))
            if changes != [True, True]:
                continue
            started = time.perf_counter()
            result = diff(a, b, batch)
        except Exception as error:
            yield {"class": name, "verdict": f"{type(error).__name__}: {error}"[:200]}
            continue
        made += 1
        adding = result.added[result.added["parts"].astype(bool)]
        most = None if adding.empty else int(adding.loc[adding["difference"].idxmax(), "layer"])
        yield {
            "class": name,
            "small": f"{kinds[0]} in block {layers[0]}",
            "large": f"{kinds[1]} in block {layers[1]}",
            "first_right": result.first is not None and result.first.layer == min(layers),
            "most_right": most == layers[1],
            "both_right": result.first is not None and (result.first.layer, most) == (min(layers), layers[1]),
            "seconds": round(time.perf_counter() - started, 2),
            "verdict": result.verdict,
        }


def models(names: list[str]) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Small models with random weights, norms and biases off their start, and a batch padded on the left."""
    for name in names:
        try:
            model, batch = zoo.prepare(name, zoo.config_class_of("causal", name), "causal")
        except Exception:
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim <= 1 and parameter.is_floating_point():
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif parameter.is_floating_point():
                    parameter.mul_(3.0)  # branches that count beside the stream
        batch = {n: v for n, v in batch.items() if n in ("input_ids", "attention_mask", "use_cache")}
        if "attention_mask" in batch:
            batch["attention_mask"] = batch["attention_mask"].flip(1)
            batch["input_ids"] = batch["input_ids"].flip(1)
        yield name, model, batch


def faults(names: list[str], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """One row per seeded fault: where it is, what `diff` says, whether block, site and cause are right."""
    random.seed(seed)
    per_model = math.ceil(count / max(len(names), 1)) + 1
    done = dict.fromkeys(FAULTS, 0)
    total = 0
    for name, a, batch in models(random.sample(names, len(names))):
        used = 0
        for kind in sorted(FAULTS, key=lambda kind: (done[kind], random.random())):
            if used >= per_model or total >= count:
                break
            b = copy.deepcopy(a)
            try:
                roles, expected = roles_of(a, batch), None
                layer = random.randint(1, len(roles.blocks))
                with torch.no_grad(), contextlib.suppress(AttributeError):  # a configuration without heads
                    expected = FAULTS[kind](Model(b, roles, layer, batch))
                if expected is None or not _changes(a, b, batch):
                    continue
                started = time.perf_counter()
                result = diff(a, b, batch)
            except Exception as error:
                verdict = f"{type(error).__name__}: {error}"[:200]
                yield {"class": name, "fault": kind, "layer": layer, "verdict": verdict}
                continue
            used, total = used + 1, total + 1
            done[kind] += 1
            first = result.first
            yield {
                "class": name,
                "fault": kind,
                "layer": layer,
                "block_right": first is not None and first.layer in expected.layers,
                "site_right": first is not None and re.fullmatch(expected.sites, first.name) is not None,
                "cause_right": any(re.search(expected.cause, cause) for cause in result.causes),
                "seconds": round(time.perf_counter() - started, 2),
                "verdict": result.verdict,
                "causes": " | ".join(result.causes),
            }


def _changes(a: nn.Module, b: nn.Module, batch: dict[str, Any]) -> bool:
    """True where a fault changes the logits: a key's bias does not, nor a scale before a norm."""
    with torch.no_grad():
        x, y = (model(**batch).logits.double() for model in (a, b))
    counted = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
    return not float((x - y)[counted].abs().max()) < 1e-6 * float(x[counted].abs().max())


def equal_pairs(names: list[str]) -> Iterator[dict[str, Any]]:
    """One row per pair that is equal: another dtype, another attention, saved and loaded, compiled by name only."""
    for name, a, batch in models(names):
        for kind, make in EQUAL.items():
            try:
                b = make(copy.deepcopy(a))
                result = diff(a, b, batch)
            except Exception as error:
                yield {"class": name, "pair": kind, "verdict": f"{type(error).__name__}: {error}"[:200]}
                continue
            yield {"class": name, "pair": kind, "equal": result.equal, "verdict": result.verdict}


def _saved_and_loaded(model: Any) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).eval()


def _sdpa(model: nn.Module) -> nn.Module:
    model.set_attn_implementation("sdpa")
    return model


# --- checkpoints ---

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "Llama": (transformers.LlamaConfig, {}),
    "Qwen3": (transformers.Qwen3Config, {"head_dim": 8}),
    "Gemma": (transformers.GemmaConfig, {"head_dim": 8}),
    "Gemma3": (transformers.Gemma3TextConfig, {"head_dim": 8, "sliding_window": 8}),
    "Mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
    "Olmo2": (transformers.Olmo2Config, {}),
    "OPT": (transformers.OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "GPTNeoX": (transformers.GPTNeoXConfig, {}),
    "GPT2": (transformers.GPT2Config, {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}),
    "Qwen3Next": (transformers.Qwen3NextConfig, {"head_dim": 8, "num_experts": 4, "linear_num_value_heads": 4,
                                                 "linear_num_key_heads": 2, "moe_intermediate_size": 16,
                                                 "shared_expert_intermediate_size": 16}),
}  # fmt: skip
Weights = dict[str, torch.Tensor]


def _gains_of(weights: Weights) -> list[str]:
    return [n for n in weights if re.search(r"(norm\w*|ln_\w+)\.weight$", n) and weights[n].ndim == 1]


def _matrix(weights: Weights) -> str:
    return random.choice([n for n, x in weights.items() if x.ndim == 2 and not re.search("embed|wte|wpe|head", n)])


def _all_gains(weights: Weights, by: float) -> None:
    for name in _gains_of(weights):
        weights[name] += by


def _one_gain(weights: Weights) -> None:
    name = random.choice([n for n in _gains_of(weights) if re.search(r"\d", n)])
    weights[name] += random.choice((1, -1))


def _row(weights: Weights, value: float) -> None:
    weights[_matrix(weights)][random.randrange(8)] = value


def _strange(weights: Weights) -> None:
    x = weights[random.choice([*weights])].flatten()
    x[random.randrange(len(x))] = random.choice((math.nan, math.inf))


def _one_dtype(weights: Weights) -> None:
    name = random.choice((_matrix(weights), random.choice(_gains_of(weights))))
    weights[name] = weights[name].to(torch.float16)


# A fault, and the words with which `check` names it.
CHECKPOINT_FAULTS: dict[str, tuple[Callable[[Weights], None], str]] = {
    "all gains + 1": (partial(_all_gains, by=1), "^gains: .* above 1"),
    "all gains - 1": (partial(_all_gains, by=-1), "^gains: .* below 0"),
    "one gain off by 1": (_one_gain, "its median is"),
    "a zero row": (partial(_row, value=0.0), "rows is zero"),
    "a constant row": (partial(_row, value=0.3), "rows is constant"),
    "a value that is not finite": (_strange, "not finite"),
    "one tensor in another dtype": (_one_dtype, "^dtypes: "),
    "an untied copy": (lambda weights: None, "config.json ties them"),
}


def checkpoints(seed: int) -> Iterator[dict[str, Any]]:
    """One row per checkpoint, 20 without a fault and 40 with one: what `check` says.

    Gains lie around 1, and in some models grow from 0.4 to 1.6.
    """
    random.seed(seed)
    kinds = [*[None] * 20, *(kind for kind in CHECKPOINT_FAULTS for _ in range(5))]
    for number, kind in enumerate(kinds):
        family = [*FAMILIES][number % len(FAMILIES)]
        make, fields = FAMILIES[family]
        ties = kind == "an untied copy" or random.random() < 0.3
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(make(**{**SHAPE, **fields}, tie_word_embeddings=ties))
        dtype = random.choice((torch.float32, torch.bfloat16))
        with tempfile.TemporaryDirectory() as folder:
            model.to(dtype).save_pretrained(folder, max_shard_size=random.choice(("5GB", "20KB")))
            files = sorted(Path(folder).glob("*.safetensors"))
            weights = {name: x for file in files for name, x in load_file(file).items()}
            spread, drift = random.choice((0.02, 0.2)), random.choice((0.0, 0.0, 0.6))
            gains = _gains_of(weights)
            for i, name in enumerate(gains):
                middle = drift * (2 * i / len(gains) - 1)
                weights[name] += (middle + spread * torch.randn(weights[name].shape)).to(dtype)
            spoil, words = CHECKPOINT_FAULTS[kind] if kind else (lambda weights: None, "^$")
            spoil(weights)
            if kind == "an untied copy":
                embeddings = next(n for n in weights if re.search("embed_tokens|embed_in|wte", n))
                weights["embed_out.weight" if family == "GPTNeoX" else "lm_head.weight"] = weights[embeddings] * 1.01
            names = sorted(weights, key=lambda name: (random.random() < 0.5, name))
            for i, file in enumerate(files):
                save_file({n: weights[n].contiguous() for n in names[i :: len(files)]}, file, {"format": "pt"})
            lines = check(folder)
        right = not lines if kind is None else len(lines) == 1 and re.search(words, lines[0]) is not None
        sort = {"family": family, "fault": kind or "", "dtype": str(dtype).removeprefix("torch."), "files": len(files)}
        yield sort | {"right": right, "lines": " | ".join(lines)}


EQUAL: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.to(torch.float16),
    "sdpa": _sdpa,
    "saved and loaded": _saved_and_loaded,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--equal", action="store_true", help="equal pairs in place of faults")
    parser.add_argument("--two", action="store_true", help="a small and a large fault in each model")
    parser.add_argument("--check", action="store_true", help="checkpoints in place of models")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", help="comma-separated; default: all causal language models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    names = options.classes.split(",") if options.classes else list(zoo.class_names("causal"))
    rows, columns, judged = {
        "equal": (equal_pairs(names), "class pair equal verdict", "equal"),
        "two": (two_faults(names, options.count, options.seed), TWO, "first_right most_right both_right"),
        "check": (checkpoints(options.seed), "family fault dtype files right lines", "right"),
        "faults": (faults(names, options.count, options.seed), ONE, "block_right site_right cause_right"),
    }[next((name for name in ("equal", "two", "check") if getattr(options, name)), "faults")]
    kept = written(rows, options.out, columns.split())
    for name in judged.split():
        print(f"{name}: {sum(bool(row.get(name)) for row in kept)} of {len(kept)}")


if __name__ == "__main__":
    main()
