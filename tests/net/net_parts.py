"""The cheap parts of the net: each function returns what is recorded, as JSON."""

import contextlib
import csv
import dataclasses
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
TEXT = ROOT / "docs" / "measure.md"
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
WIDTH = 4


def norm_tensors() -> Json:
    """Every norm's tensors by name, with their shapes."""
    return {name: _tensors(make(WIDTH)) for name, make in NORMS.items()}


def scheme_tensors() -> Json:
    """Every scheme's tensors by name at a tiny size: shape and type, and whether they are trained and decayed."""
    return {name: _scheme(name) for name in normlab.SCHEMES}


def _scheme(name: str) -> Json:
    sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0)
    model = normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme=name, **sizes, **heads))
    return _tensors(model, set(model.decay_parameter_names()))


def _tensors(module: nn.Module, decayed: set[str] | frozenset[str] = frozenset()) -> Json:
    own = {key for key, p in module.named_parameters() if p.requires_grad}
    shared = {key for key, p in module.named_parameters(remove_duplicate=False) if p.requires_grad} - own
    roles = dict.fromkeys(own, "") | dict.fromkeys(shared, " shared") | dict.fromkeys(decayed, " decayed")
    return {key: _tensor(value) + roles.get(key, " buffer") for key, value in module.state_dict().items()}


def _tensor(value: Tensor) -> str:
    shape = "x".join(map(str, value.shape)) or "scalar"
    return shape + ("" if value.dtype == torch.float32 else f" {value.dtype}".replace("torch.", ""))


# --- architectures ---


def architectures() -> Json:
    """The models that the audit measures in full: class and task -> True if recording changed no bit of the output."""
    with (ROOT / "data" / "bench" / "architectures.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "measured"]
    return {f"{row['class']}, {row['task']}": row["identical"] for row in rows}
