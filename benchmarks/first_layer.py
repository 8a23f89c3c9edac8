"""Seed faults into copies of small models and see whether `normlab.diff` finds the block, the site and the cause.

    python benchmarks/first_layer.py --out data/bench/first_layer.csv            200 faults over all architectures
    python benchmarks/first_layer.py --equal --out data/bench/first_layer_equal.csv     pairs that are equal

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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from benchmarks import architecture_zoo as zoo
from benchmarks.timing import written
from normlab.differences import diff
from normlab.differences.capture import Roles, roles_of

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
        _on_output(linear, lambda y, x, order=order: y[..., order])
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


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).eval()


def _sdpa(model: nn.Module) -> nn.Module:
    model.set_attn_implementation("sdpa")
    return model


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
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", help="comma-separated; default: all causal language models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    names = options.classes.split(",") if options.classes else list(zoo.class_names("causal"))
    rows = equal_pairs(names) if options.equal else faults(names, options.count, options.seed)
    columns = (
        "class pair equal verdict"
        if options.equal
        else ("class fault layer block_right site_right cause_right seconds verdict causes")
    )
    fields = columns.split()
    kept = written(rows, options.out, fields)
    for name in fields[2:3] if options.equal else fields[3:6]:
        print(f"{name}: {sum(bool(row.get(name)) for row in kept)} of {len(kept)}")


if __name__ == "__main__":
    main()
