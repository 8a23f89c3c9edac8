"""The cheap parts of the net: each function returns what is recorded, as JSON."""

import contextlib
import csv
import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from torch import Tensor, nn

import normlab
from normlab import norms, runs
from normlab.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]

# --- run ids ---

# For each field of TrainConfig, values off its default.
FIELDS: dict[str, tuple[Any, ...]] = {
    "depth": (1, 4, 64, 1000),
    "width": (32, 256),
    "seed": (1, 1000),
    "lr": (1e-3, 1.6e-2, 0.1),
    "steps": (1, 6000),
    "batch_size": (2, 32),
    "block_length": (16, 1024),
    "heads": (1, 8),
    "kv_heads": (1, 4),
    "intermediate": (64, 512),
    "model": ({"lam_input": 3.0}, {"qk_norm": "rms_head"}, {"lam_input": 10.0, "gamma0": 0.2, "carried": "exact"}),
    "weight_decay": (0.0, 0.01),
    "warmup": (0.0, 0.3),
    "min_lr_ratio": (0.0, 0.5),
    "gain_lr_ratio": (0.1,),
    "stop_at": (10, 300),
    "clip": (0.0, 5.0),
    "beta1": (0.8,),
    "beta2": (0.99, 0.999),
    "corpus": ("packages", "text.txt", "owner/name"),
    "tokenizer": ("gpt2",),
    "vocab_size": (320, 32000),
    "text_column": ("content",),
    "characters": (100_000,),
    "stream": (True,),
    "outlier_channels": (2,),
    "outlier_size": (50.0,),
    "probe_every": (0, 10),
    "probe_blocks": (2,),
    "probe_also": ("block_influence", "update_cosine, attention_entropy,rms"),
    "eval_every": (0, 50),
    "eval_blocks": (16,),
    "held_out": ("validation", "test"),
    "experiment_blocks": (4,),
    "store_all": (True,),
    "log_every": (20,),
    "dtype": ("float32", "bfloat16", "float16"),
    "compile": (True,),
    "checkpoint_every": (0, 50),
    "keep_weights": (False,),
    "threads": (2,),
    "accumulate": (2, 4),
    "gradient_checkpointing": (True,),
    "fsdp": (True,),
    "device": ("cpu",),
}
# Fields of which any values go together.
TOGETHER = sorted(FIELDS.keys() - {"heads", "kv_heads", "log_every", "store_all", "stop_at", "accumulate"})
DRAWN = 80


def run_ids() -> Json:
    """Run ids: of every scheme, of every value in FIELDS alone, and of several fields together."""
    chosen = [{"scheme": name} for name in normlab.SCHEMES]
    chosen += [{name: value} for name, values in FIELDS.items() for value in values]
    for seed in range(DRAWN):
        draw = random.Random(seed)
        chosen.append({name: draw.choice(FIELDS[name]) for name in draw.sample(TOGETHER, 6)})
    return {json.dumps(fields): normlab.TrainConfig(**fields).run_id for fields in chosen}


# --- names and help ---

# What a user imports by name, and what an attribute of it is part of the interface.
MODULES = ("normlab", "normlab.norms", "normlab.models", "normlab.figures", "normlab.widgets", "normlab_kernels")


def public_names() -> Json:
    """Every public name with its signature, a class with its public members; the schemes by name."""
    found: Json = {}
    for name in MODULES:
        module = importlib.import_module(name)
        found[name] = {key: _interface(getattr(module, key)) for key in sorted(module.__all__) if key != "__version__"}
    found["normlab.SCHEMES"] = {name: scheme.title for name, scheme in normlab.SCHEMES.items()}
    return found


def _interface(value: Any) -> Any:
    if inspect.isclass(value):
        members = {
            name: _signature(member) if callable(member) else ""
            for kind in reversed(value.__mro__)
            if kind.__module__.startswith("normlab")
            for name, member in vars(kind).items()
            if not name.startswith("_")
        }
        return {"()": _constructor(value)} | dict(sorted(members.items()))
    return _signature(value) if callable(value) else type(value).__name__


def _constructor(value: type) -> str:
    """Parameters without those of transformers' base class, which its version decides."""
    foreign = {
        name
        for kind in value.__mro__
        if kind.__module__.startswith("transformers") and dataclasses.is_dataclass(kind)
        for name in inspect.signature(kind).parameters
    }
    return _signature(value, foreign)


def _signature(value: Any, without: set[str] | frozenset[str] = frozenset()) -> str:
    """Names, kinds and defaults of the parameters."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of builtins
        return ""
    kept = [
        parameter.replace(annotation=parameter.empty, default=_without_address(parameter.default))
        for name, parameter in signature.parameters.items()
        if name not in without
    ]
    return str(signature.replace(parameters=kept, return_annotation=signature.empty))


def _without_address(default: Any) -> Any:
    return ... if " at 0x" in repr(default) else default


def command_help() -> Json:
    """`normlab --help` and `normlab COMMAND --help` at 100 columns: the flags, and the text."""
    found = {}
    for name in ("", *COMMANDS):
        text = _printed([*([name] if name else []), "--help"])
        words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
        found[f"normlab {name}".strip()] = {
            "flags": sorted({word for word in words if word.startswith("--")} | {"--help"}),
            "text": text.splitlines(),
        }
    return found


def _printed(arguments: list[str]) -> str:
    before, out = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(arguments)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return out.getvalue()


# --- what a run writes ---

# A text that does not change: Apache's licence.
TEXT = ROOT / "LICENSE"
TINY: Json = dict(
    depth=2,
    width=32,
    heads=2,
    batch_size=4,
    block_length=16,
    vocab_size=300,
    probe_blocks=2,
    eval_blocks=8,
    warmup=0.2,
    dtype="float32",
)


def text_in(folder: Path) -> Path:
    """The text as a corpus."""
    return shutil.copy(TEXT, folder / "text.txt")


def written_run() -> Json:
    """Files of a run, keys of its manifest, types of its tables, columns of what loads them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = TINY | {"depth": 1, "steps": 2, "probe_every": 1, "eval_every": 1, "experiment_blocks": 2}
        config = normlab.TrainConfig(scheme="bhyt", corpus=str(text_in(folder)), **fields)
        run = normlab.train(config, folder / "out", cache_dir=folder / "cache", progress=False)
        manifest = run.manifest | {"commit": "of a checkout; None elsewhere"}
        manifest["model"] = {key: manifest["model"][key] for key in _own_model_fields() if key in manifest["model"]}
        tables = {name: parquet.read_schema(run.path / name) for name in (runs.STATS, runs.EXPERIMENTS)}
        loaded = {
            loader.__name__: {str(key): str(kind) for key, kind in loader(folder / "out").dtypes.items()}
            for loader in (normlab.load_runs, normlab.load_experiments, normlab.load_configs)
        }
        return {
            "files": sorted(path.name for path in run.path.iterdir()),
            "manifest": _types(manifest),
            "schema version": runs.SCHEMA_VERSION,
            **{name: {field.name: str(field.type) for field in schema} for name, schema in tables.items()},
            **loaded,
        }


def _own_model_fields() -> list[str]:
    inherited = {name for kind in normlab.NormlabConfig.__mro__[1:] for name in getattr(kind, "__annotations__", {})}
    return sorted(set(inspect.signature(normlab.NormlabConfig).parameters) - inherited)


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _types(entry) for key, entry in sorted(value.items())}
    return type(value).__name__


# --- norms and schemes ---

NORMS = {
    "RMSNorm": lambda d: norms.RMSNorm(d),
    "RMSNorm gain scale": lambda d: norms.RMSNorm(d, gain=0.2, scale=0.5),
    "LayerNorm": lambda d: norms.LayerNorm(d),
    "CRMSNorm": lambda d: norms.CRMSNorm(d),
    "ScaleNorm": lambda d: norms.ScaleNorm(d),
    "ScaleNorm rms": lambda d: norms.ScaleNorm(d, rms=True),
    "SeeDNorm": lambda d: norms.SeeDNorm(d),
    "GatedNorm": lambda d: norms.GatedNorm(d, rank=2),
    "DyT": lambda d: norms.DyT(d),
    "DyT alpha": lambda d: norms.DyT(d, 0.5),
    "Derf": lambda d: norms.Derf(d),
    "DyISRU": lambda d: norms.DyISRU(d),
    "BHyT": lambda d: norms.BHyT(d),
    "BHyT unbounded": lambda d: norms.BHyT(d, bounded=False),
    "BHyT constants": lambda d: norms.BHyT(d, 1.5, 3.0, learnable_lam=False, eps=1e-3, gain=0.5),
    "TaperNorm": lambda d: norms.TaperNorm(d),
    "PowerNorm": lambda d: norms.PowerNorm(d),
    "UnifiedNorm": lambda d: norms.UnifiedNorm(d),
    "NoNorm": lambda d: norms.NoNorm(),
}
SHAPE = (1, 3, 4)


def norm_values() -> Json:
    """Every norm in float64: parameters, output and gradients, before and after steps; with a given mean square."""
    return {name: _norm_values(make(SHAPE[-1]).double().train()) for name, make in NORMS.items()}


def _norm_values(norm: Any) -> Json:
    with torch.no_grad():
        for index, tensor in enumerate(norm.state_dict().values()):
            tensor.copy_(0.75 + fixed(tuple(tensor.shape), 11 + index) / 4)
    x = fixed(SHAPE, 0).requires_grad_()
    found: Json = {"tensors": {key: list(value.shape) for key, value in norm.state_dict().items()}}
    found["at step 0"] = _value_and_gradients(norm, norm(x), x)
    for step in range(1, 6):
        norm.at_step(step, 8)
        norm(x + step).sum().backward()
    found["after 5 of 8 steps"] = _value_and_gradients(norm, norm(x), x)
    if norm.takes_mean_square:
        given = fixed((*SHAPE[:-1], 1), 5).abs() + 0.5
        found["given a mean square"] = _value_and_gradients(norm, norm(x, mean_square=given), x)
        found["mean square"] = norm(x, return_mean_square=True)[1].flatten().tolist()
    s, y = norm.add(x, fixed(SHAPE, 3))
    return found | {"add": [*s.flatten().tolist(), *y.flatten().tolist()]}


def _value_and_gradients(norm: nn.Module, y: Tensor, x: Tensor) -> dict[str, list[float]]:
    leaves = {"x": x} | {name: p for name, p in norm.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((y * fixed(SHAPE, 7)).sum(), list(leaves.values()), allow_unused=True)
    named = {f"d {name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return {name: value.flatten().tolist() for name, value in ({"y": y} | named).items()}


def fixed(shape: tuple[int, ...], start: int) -> Tensor:
    """Numbers in [-3, 3] that float32 holds exactly, from no random generator."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return ((count * 37 + start * 17) % 97 - 48).div(16).reshape(shape)


def schemes() -> Json:
    """Every scheme at a tiny size: the state dict, the trained and decayed tensors, loss and gradients."""
    return {name: _scheme(name) for name in normlab.SCHEMES}


def _scheme(name: str) -> Json:
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0)
    model = normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme=name, **sizes, **heads)).train()
    start = digest(model)
    with torch.no_grad():  # off the start, where many gains are 1 and many gradients 0
        for tensor in model.state_dict().values():
            tensor.mul_(1 + torch.rand_like(tensor) / 4).add_(torch.rand_like(tensor) / 50)
    ids = torch.randint(1, 61, (2, 9))
    loss = model(ids, labels=ids).loss
    loss.backward()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    decayed = set(model.decay_parameter_names())
    return {
        "tensors": {key: _tensor(value, key in trained, key in decayed) for key, value in model.state_dict().items()},
        "loss": [loss.item()],
        "gradients": [0.0 if p.grad is None else p.grad.double().norm().item() for p in trained.values()],
        "bits": [start, digest(model, gradients=True)],
    }


def _tensor(value: Tensor, trained: bool, decayed: bool) -> str:
    shape = "x".join(map(str, value.shape)) or "scalar"
    kind = "" if value.dtype == torch.float32 else f" {value.dtype}".replace("torch.", "")
    return shape + kind + ("" if trained else " buffer") + (" decayed" if decayed else "")


def digest(model: nn.Module, gradients: bool = False) -> str:
    """A hash of the names and bits of a model's tensors in their order, or of its parameters' gradients."""
    found = hashlib.sha256()
    named = {k: p.grad for k, p in model.named_parameters()} if gradients else model.state_dict()
    for name, tensor in named.items():
        found.update(name.encode() + (b"" if tensor is None else tensor.contiguous().numpy().tobytes()))
    return found.hexdigest()[:16]


# --- architectures ---


def architectures() -> Json:
    """The models that the audit measures in full: class and task -> True if recording changed no bit of the output."""
    with (ROOT / "data" / "bench" / "architectures.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "measured"]
    return {f"{row['class']}, {row['task']}": row["identical"] for row in rows}
