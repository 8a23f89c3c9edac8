"""The page that runs trained models: a reader changes their normalization, and every layer answers."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from normlab.analysis.selection import in_order
from normlab.errors import NormlabError
from normlab.figures.theme import ink, style_of
from normlab.files import whole_files
from normlab.models.block import FinalNorm, NormlabDecoderLayer
from normlab.models.pretrained import BLOCKS, load_held_out, load_model, model_folder
from normlab.norms import BHyT, Derf, DyT, LayerNorm, RMSNorm
from normlab.probes import sites
from normlab.release import shipped_models
from normlab.runs import MANIFEST, read_manifest, rounded_rate
from normlab.schemes import BASELINE, DEFAULT
from normlab.widgets.change import SLOPES, slope_of
from normlab.widgets.plot import write_page

SCRIPTS = ("model.js", "tokenizer.js", "chart.js", "live.js")
STATIC = Path(__file__).parent / "static"
KERNEL = list((STATIC / "matmul.wasm").read_bytes())

# y = scale gamma f(slope (x - mean) / sqrt(ms + eps) + shift) + bias: what each norm has of it.
NORMS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    RMSNorm: lambda norm: {"divide": "rms", "eps": norm.eps, "scale": norm.scale},
    LayerNorm: lambda norm: {"divide": "std", "eps": norm.eps, "bias": "bias"},
    BHyT: lambda norm: {
        "divide": "rms",
        "eps": norm.eps,
        "slope": "lam",
        "kappa": norm.kappa,
        "f": "tanh" if norm.bounded else "none",
    },
    DyT: lambda norm: {"slope": "alpha", "f": "tanh"},
    Derf: lambda norm: {"slope": "alpha", "shift": "shift", "bias": "bias", "f": "erf"},
}
_TENSORS = ("slope", "shift", "bias")  # fields that name a tensor of the norm
_MATRICES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
MULTIPLE = 8  # of the kernel's columns
_SAMPLE = 'def add(first, second):\n    """Return the sum of two numbers."""\n    return first + second\n'
_LENGTH = 64  # tokens that the page reads of a passage
LONGEST = 1024  # tokens that it reads of a reader's text: it reserves room for attention's scores, the square of that
_CORPUS = "706651ba22eeaa569b6c02ab7e79d5e15baa4d9788560d460ac92b3b01fadfb7"  # content hash of the shipped models' text
PASSAGES = {  # of its held-out blocks: the block, and the token at which a line begins
    "a docstring": (75, 32),
    "a loop": (70, 5),
    "prose": (0, 2),
    "a function": (3, 10),
    "examples": (85, 3),
    "imports": (41, 42),
}


def model_spec(model: Any, longest: int = 0) -> dict[str, Any]:
    """The model as data for `static/model.js`: sizes, names of tensors, each norm.

    longest: tokens of the longest text that it is given, where that is more than a reader may write.

    Raises:
        NormlabError: a part that the page does not compute, such as one with hooks.
    """
    config: Any = model.config
    names = {module: name for name, module in model.named_modules()}
    base: Any = getattr(model, "model", None)
    blocks: Any = getattr(base, "layers", ())
    plain = all(
        type(block) is NormlabDecoderLayer and type(block.self_attn) is LlamaAttention and type(block.mlp) is LlamaMLP
        for block in blocks
    )
    if not blocks or not plain or base.embedding_end is not None or isinstance(base.norm, FinalNorm):
        _refuse(model, "a block, an embedding or an attention of another kind")
    if any(map(_has_hooks, model.modules())):
        _refuse(model, "hooks")
    if any("forward" in vars(module) for module in model.modules()):
        _refuse(model, "a part with a forward of its own")
    if any(block.carried and (block.correction != "none" or block.calibration != 1.0) for block in blocks):
        _refuse(model, "a learned correction of its carried statistic")
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if type(model.lm_head) is not nn.Linear or any(layer.bias is not None for layer in linears):
        _refuse(model, "biases, or a head that is no matrix")
    if len({layer.weight for layer in linears}) < len(linears):
        _refuse(model, "blocks that share their matrices")
    if config.hidden_act != "silu":
        _refuse(model, f"the activation {config.hidden_act}")
    if getattr(config, "norms_folded", False) or config.rope_parameters["rope_type"] != "default":
        _refuse(model, "folded norms or scaled rotary positions")
    attention = blocks[0].self_attn
    sizes = {"width": config.hidden_size, "head_dim": attention.head_dim, "inner": config.intermediate_size}
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % MULTIPLE]:
        _refuse(model, f"{odd[0]}, no multiple of {MULTIPLE}")
    tied = config.tie_word_embeddings
    embed = f"{names[base.embed_tokens]}.weight"
    spec = {
        **sizes,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "vocab": config.vocab_size,
        "length": max(longest, min(config.max_position_embeddings, LONGEST)),
        "theta": config.rope_parameters["rope_theta"],
        "scaling": attention.scaling,
        "embed": embed,
        "head": embed if tied else f"{names[model.lm_head]}.weight",
        "embedding_scale": None if base.shared_scale is None else f"{names[base]}.shared_scale",
        "blocks": [_block_spec(block, names, model) for block in blocks],
        "final": _norm_spec(base.norm, names, model),
    }
    there = model.state_dict()
    if missing := [name for name in _tensors(spec) if name not in there]:  # it is computed, or an adapter holds it
        _refuse(model, f"no tensor {missing[0]}")
    return spec


def _has_hooks(module: nn.Module) -> bool:
    """True if a forward pass runs hooks, but for those that transformers leaves to collect outputs when asked."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


def _tensors(spec: Mapping[str, Any]) -> Iterator[str]:
    """The names of all tensors that the page reads."""
    yield from filter(None, (spec["embed"], spec["head"], spec["embedding_scale"]))
    norms = [spec["final"]]
    for block in spec["blocks"]:
        yield from (f"{block['prefix']}{part}.{name}.weight" for part, names in _MATRICES.items() for name in names)
        yield from [block["c"]] if block["carried"] else []
        norms += block["norms"].values()
    yield from (norm[field] for norm in norms for field in (*_TENSORS, "weight") if field in norm)


def _block_spec(block: NormlabDecoderLayer, names: Mapping[nn.Module, str], model: nn.Module) -> dict[str, Any]:
    norms = {place: _norm_spec(getattr(block, name), names, model) for place, name in block.layout.places()}
    return {
        "prefix": f"{names[block]}.",
        "norms": norms,
        "carried": block.carried,
        "c": f"{names[block]}.c_attn",
        "length": block.train_seq_len,
    }


def _norm_spec(norm: Any, names: Mapping[nn.Module, str], model: nn.Module) -> dict[str, Any]:
    if type(norm) not in NORMS:
        _refuse(model, f"the norm {type(norm).__name__}")
    spec = {"scale": 1.0, "f": "none", **NORMS[type(norm)](norm), "centre": norm.centre, "weight": "weight"}
    tensors = {field: f"{names[norm]}.{spec[field]}" for field in (*_TENSORS, "weight") if field in spec}
    return spec | tensors


def _refuse(model: Any, part: str) -> None:
    name = getattr(model.config, "scheme", None) or type(model).__name__
    raise NormlabError(f"the page does not compute {name}: it has {part}")


def weights_of(model: Any) -> bytes:
    """A safetensors file: a folder's, or a model's present weights.

    The page reads bfloat16 and float32: what is of another type becomes float32. A file without such is as it is.
    """
    from safetensors.torch import load, save

    kept = (torch.bfloat16, torch.float32)
    if isinstance(model, str | Path):
        raw = (Path(model) / "model.safetensors").read_bytes()
        state = load(raw)
        if all(tensor.dtype in kept for tensor in state.values()):
            return raw
    else:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
    return save({name: tensor if tensor.dtype in kept else tensor.float() for name, tensor in state.items()})


def live_page(models: Sequence[str | Path], folder: str | Path) -> Path:
    """Write the page that runs trained models (`normlab page`): `index.html`, and a file of weights per model.

    The page needs no server and no network. It loads a model's weights when the reader chooses it. It opens on two
    models of equal depth, width and learning rate, if there are two.

    Args:
        models: names of models that come with normlab, or folders of runs that kept their weights.
        folder: made where it is missing.

    Returns:
        The path of `index.html`.

    Raises:
        NormlabError: no model, one that cannot be loaded, one with a part that the page does not compute, or models
            with different tokenizers.
    """
    if not models:
        raise NormlabError(f"no model for the page: name one, such as {', '.join(shipped_models())}")
    folder, sources = Path(folder), [model_folder(name) for name in models]
    tokenizers = {(source / "tokenizer.json").read_text(encoding="utf-8") for source in sources}
    if len(tokenizers) > 1:
        raise NormlabError("the models have different tokenizers: write a page for each")
    loaded = {source.name: load_model(source) for source in sources}
    if len(loaded) < len(sources):
        raise NormlabError("two of the folders have one name, which the page needs for each model: rename one")
    (tokenizer,) = tokenizers
    runs = [read_manifest(source) if (source / MANIFEST).is_file() else {} for source in sources]
    described = labelled(
        [
            describe(model, name)
            | {"spec": model_spec(model), "rate": _rate(run), "held_out": run.get("eval_loss")}
            for (name, model), run in zip(loaded.items(), runs, strict=True)
        ]
    )
    page = {
        "models": described,
        "pairs": pairs_of(described),
        "passages": _passages(sources[0], runs[0], tokenizer),
        "tokenizer": page_tokenizer(tokenizer),
        "kernel": KERNEL,
        "tour": {source.name for source in sources} <= set(shipped_models()),
    }
    about = "Small language models run in this page. Move a slider, and every layer is computed again."
    title = "Change a trained model's normalization"
    scripts = [*SCRIPTS, "live_page.js"]
    with whole_files(folder) as staged:
        path = write_page(staged / "index.html", scripts, page, kind="live", title=title, about=about, plotly="")
        for source in sources:
            raw, name = weights_of(source), source.name
            packed = b64encode(gzip.compress(raw[::2] + raw[1::2], 6, mtime=0)).decode()  # by planes of bytes: 11% less
            script = f"WEIGHTS[{json.dumps(name)}] = {json.dumps(packed)};\n"
            (staged / f"{name}.js").write_text(script, encoding="utf-8")
    return folder / path.name


def _rate(run: Mapping[str, Any]) -> float | None:
    """The learning rate in a run's manifest, as `normlab.load_runs` has it; None where there is none."""
    rate = run.get("config", {}).get("lr")
    return None if rate is None else rounded_rate(rate)


def labelled(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with the shortest name that tells it apart, as `short` and, with its learning rate, as `label`: the scheme;
    with the number of blocks; or with its folder."""

    def label(model: Mapping[str, Any], form: str) -> str:
        rate = "" if model["rate"] is None else f", rate {model['rate']:g}"
        return form.format(**model) + rate

    named = []
    for model in models:
        for form in ("{short}", "{short} ({depth} blocks)", "{title}"):
            if sum(label(other, form) == label(model, form) for other in models) == 1:
                break
        named.append(model | {"short": form.format(**model), "label": label(model, form)})
    return named


def pairs_of(models: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Pairs of models of equal depth, width and learning rate: the baseline, or else BHyT, with each other. Those of
    the commonest depth come first."""
    depths = Counter(model["depth"] for model in models)
    ranks = {scheme: rank for rank, scheme in enumerate(in_order(model["scheme"] for model in models))}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for model in sorted(models, key=lambda model: (ranks[model["scheme"]], -depths[model["depth"]])):
        if model["rate"] is not None:
            groups.setdefault((model["depth"], model["spec"]["width"], model["rate"]), []).append(model)
    pairs = []
    for group in groups.values():
        first = next((model for name in (BASELINE, DEFAULT) for model in group if model["scheme"] == name), group[0])
        for other in (model for model in group if model is not first):
            label = f"{first['short']} and {other['label']}"
            pairs.append({"label": label, "model": first["name"], "against": other["name"]})
    return pairs


def _passages(source: Path, run: Mapping[str, Any], tokenizer: str) -> list[dict[str, Any]]:
    """Held-out text of the model's corpus, with names if it is known; for a run, which keeps none, a function."""
    if (source / BLOCKS).is_file():
        blocks = load_held_out(source)
        if run.get("corpus", {}).get("content_hash") != _CORPUS:
            return [{"tokens": block, "name": None} for block in blocks[: len(PASSAGES), :_LENGTH].tolist()]
        return [
            {"tokens": blocks[place, start : start + _LENGTH].tolist(), "name": name}
            for name, (place, start) in PASSAGES.items()
        ]
    from tokenizers import Tokenizer

    return [{"tokens": Tokenizer.from_str(tokenizer).encode(_SAMPLE).ids, "name": "a function"}]


def describe(model: Any, name: str) -> dict[str, Any]:
    """A model's title, colours and changeable parts, for the page and for a model in the kernel."""
    blocks = sites(model).blocks
    norms = [norm for block in blocks for norm in block.norms]
    slopes = {slope for norm in norms if (slope := slope_of(norm))}
    has = {
        "slope": bool(slopes),
        "kappa": any(isinstance(getattr(norm, "kappa", None), float) for norm in norms),
        "carried": any(getattr(block.module, "carried", None) for block in blocks),
    }
    scheme = getattr(model.config, "scheme", None)
    style = style_of(scheme or name)
    title = f"{style.title} ({name})" if scheme else name
    return {
        "name": name,
        "scheme": scheme or name,
        "short": style.title,
        "title": title,
        "label": title,
        "colors": {theme: ink(style.color, theme) for theme in ("light", "dark")},
        "depth": len(blocks),
        "length": getattr(model.config, "max_position_embeddings", None) or 1024,
        "traits": [trait for trait, there in has.items() if there],
        "slope": "/".join(SLOPES[slope] for slope in sorted(slopes)),
        "spec": None,
    }


def page_tokenizer(text: str) -> dict[str, Any] | None:
    """A byte-level BPE from the text of a tokenizer.json: vocabulary, merges, and the ids that it puts `before` and
    `after` every text; None for another kind."""
    from tokenizers import Tokenizer

    content = json.loads(text)
    model, splits = content["model"], content.get("pre_tokenizer") or {}
    plain = splits.get("type") == "ByteLevel" and not splits.get("add_prefix_space") and not content.get("normalizer")
    if model.get("type") != "BPE" or not plain:
        return None
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    tokenizer = Tokenizer.from_str(json.dumps(content | {"truncation": None, "padding": None}))
    encoded = tokenizer.encode(next((piece for piece in model["vocab"] if piece.isascii()), ""))
    inside = [place for place, row in enumerate(encoded.sequence_ids) if row is not None]  # of the text itself
    if not inside:
        return None
    around = {"before": encoded.ids[: inside[0]], "after": encoded.ids[inside[-1] + 1 :]}
    return {"vocab": model["vocab"], "merges": merges, "added": added} | around
