"""Inputs of a report: a model with its tokenizer or image processor, and batches of texts or images.

load          a saved or hub model by its own task: causal, masked or sequence-to-sequence language model, images, or
              an encoder of text without a language-model head (embeddings, rerankers, classifiers)
batches       the batches it is run on
check_input   refuse a text that no model can be run on
check_size    refuse rows that hold nothing
token_text    a token's text, with the space before it

A model of images and text is measured on text alone, as a causal language model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normlab.errors import NormlabError, first_line, in_one_line
from normlab.loading import hub_or_cache, loads_quietly, of_its_files_size, require_fit
from normlab.probes.passes import device_of, unwrapped
from normlab.schemes import SCHEMES

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MASKED_SHARE = 0.15  # of the tokens of a masked language model's batch, as BERT was trained
FEWEST_TOKENS = 16
ROWS_A_BATCH = 4
# Task -> transformers' class that loads its models, and its mapping of their classes.
TASKS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "image-text": ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    "encoder": ("AutoModel", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"),
}
NO_LOSS = {"image": "images have no labels", "encoder": "the model has no language-model head"}
Batches = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer or image processor, its task (causal, masked, seq2seq, image, encoder) and its name.

    `no_loss` says why its predictions are not judged; empty if they are. `remark` names random weights beside the
    layers. `path` is the directory or hub name of its files; empty if it is not known.
    """

    model: nn.Module
    reader: Any
    task: str
    name: str
    no_loss: str = ""
    remark: str = ""
    path: str = ""

    @property
    def scheme(self) -> str | None:
        """The scheme of a model of ours."""
        scheme = getattr(getattr(self.model, "config", None), "scheme", None)
        return scheme if scheme in SCHEMES else None


@torch.inference_mode(False)  # whose tensors have no gradients
def load(
    model: str | nn.Module,
    reader: Any = None,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    any_size: bool = False,
) -> Loaded:
    """A model and its tokenizer or image processor, in evaluation mode.

    Args:
        model: directory or hub name, or a model (then give `reader`).
        revision: of a hub model; of a directory, the folder in it of that name.
        device: "cpu", "cuda:1" ..., or "auto" to spread it over all devices (needs accelerate). Default: a GPU when
            there is one.
        dtype: "bfloat16" ...; default: as saved.
        any_size: build it even if its configuration makes it far larger than its files.

    Raises:
        NormlabError: nothing of that name can be loaded; weights that do not fit the configuration; an unknown dtype
            or device.
    """
    if isinstance(model, nn.Module):
        if reader is None:
            raise NormlabError("a model without a name has no tokenizer: pass tokenizer=")
        inner = _of_transformers(model)
        classes = [kind.__name__ for kind in type(inner).__mro__]
        task = _task(classes, getattr(inner, "config", None))
        if task == "encoder" and _class_of(classes[0]) is None and _has_head(inner):  # its own, on transformers' body
            task = "causal"
        task = _measured_as(task)
        no_loss = NO_LOSS.get("encoder" if task == "seq2seq" and not _predicts(inner) else task, "")
        saved = "" if inner is not unwrapped(model) else getattr(getattr(inner, "config", None), "_name_or_path", "")
        return Loaded(model.eval(), reader, task, type(model).__name__, no_loss, path=saved or "")
    try:
        import transformers
    except ImportError as error:
        raise NormlabError("loading a model by name needs transformers: pip install transformers") from error
    with contextlib.suppress(NormlabError):  # a transformers that is too old for our models loads others
        import normlab.models  # noqa: F401  registers them
    source, options = _source(model, revision)
    options["trust_remote_code"] = False
    what = "model"
    wanted = "auto" if dtype is None else float_type(dtype)
    try:
        with hub_or_cache(source):
            written, _ = transformers.PretrainedConfig.get_config_dict(source, **options)
            with loads_quietly(), of_its_files_size(source, written, any_size):
                config = transformers.AutoConfig.from_pretrained(source, **options)
                architectures = getattr(config, "architectures", None) or []
                task = _task(architectures, config)
                auto = getattr(transformers, TASKS[task][0])
                own = _class_of(architectures[0]) if architectures and task == "encoder" else None
                auto = own if own is not None and own.config_class is type(config) else auto
                how: dict[str, Any] = {"dtype": wanted, "output_loading_info": True, "ignore_mismatched_sizes": True}
                how |= {"device_map": "auto"} if device == "auto" else {}
                loaded: Any
                loaded, info = auto.from_pretrained(source, **how, **options)
            random = _beside_the_body(loaded, info["missing_keys"])
            require_fit(source, info | {"missing_keys": set(info["missing_keys"]) - set(random)}, _of_a_block)
            if task == "encoder":
                loaded = loaded.base_model  # no layer reads a classifier's head, and some run on padded rows alone
            if reader is None:
                what = "image processor" if task == "image" else "tokenizer"
                kind = transformers.AutoImageProcessor if task == "image" else transformers.AutoTokenizer
                reader = kind.from_pretrained(source, **options)
    except NormlabError:
        raise
    except Exception as error:  # a configuration that a class cannot be built from may raise any
        reason = first_line(error) if isinstance(error, OSError | ValueError | ImportError) else in_one_line(error)
        raise NormlabError(f"no {what} could be loaded from {source}: {reason}") from error
    if device != "auto":
        try:
            loaded = loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except (RuntimeError, AssertionError) as error:
            raise NormlabError(f"device {device!r} cannot be used: {first_line(error)}") from error
    name = model if revision is None else f"{model}@{revision}"
    task = _measured_as(task)
    no_loss, remark = NO_LOSS.get(task, ""), ""
    lacking = f", as the files lack {random[0]}{f' and {len(random) - 1} more' * bool(random[1:])}" if random else ""
    if not no_loss and any("pooler" not in key for key in random):
        no_loss = f"the head is random{lacking}"
    elif random:
        remark = f"random weights that no layer reads{lacking}"
    return Loaded(loaded.eval(), reader, task, name, no_loss, remark, name)


def _source(model: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    if revision is None:
        return model, {}
    folder = Path(model) / revision
    if folder.is_dir():
        return str(folder), {}
    if Path(model).is_dir():
        there = sorted(item.name for item in Path(model).iterdir() if item.is_dir())[:8]
        raise NormlabError(f"{model} holds no folder {revision!r}: it has {', '.join(there) or 'none'}")
    return model, {"revision": revision}


def _of_a_block(name: str) -> bool:
    """True if a weight belongs to a numbered block.

    Other weights may be left out: BERT's files hold a pooler and a second head that a masked language model lacks.
    """
    return any(part.isdigit() for part in name.split("."))


def _beside_the_body(model: Any, missing: Collection[str]) -> list[str]:
    """Of the weights that the files lack, those that no layer reads: of a head or a pooler, in order of name."""
    if not missing:
        return []
    names = {module: name for name, module in model.named_modules()}
    body, head = names[model.base_model], names.get(model.get_output_embeddings())
    heads = (f"{head}.",) if head else ()
    return sorted(
        key
        for key in missing
        if "pooler" in key.split(".") or (body and not key.startswith(f"{body}.")) or key.startswith(heads)
    )


def float_type(name: str) -> torch.dtype:
    """The type of that name. NormlabError for a name that is none."""
    found = getattr(torch, name, None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise NormlabError(f"{name!r} is no float type: choose float32, bfloat16 or float16")
    return found


def _of_transformers(model: nn.Module) -> nn.Module:
    """The model in what torch.compile, DDP or PEFT put around it."""
    inner: Any = unwrapped(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _task(classes: Sequence[str], config: Any) -> str:
    """The task, by transformers' own mappings of classes to tasks. Its other classes of text are encoders.

    A class that is not transformers' is taken for a language model.

    Args:
        classes: the names of a model's class and of those that it inherits from, nearest first. Without one, the
            mappings are asked for the configuration's type.
        config: the model's configuration; None without one.
    """
    from transformers.models.auto import modeling_auto

    mappings = {task: getattr(modeling_auto, mapping) for task, (_, mapping) in TASKS.items()}
    of_class = ([task for task, mapping in mappings.items() if name in mapping.values()] for name in classes)
    of_type = [task for task, mapping in mappings.items() if getattr(config, "model_type", None) in mapping]
    tasks = next(filter(None, of_class), []) if classes else of_type
    if getattr(config, "is_encoder_decoder", False) and (not tasks or "seq2seq" in tasks):
        return "seq2seq"
    if "masked" in tasks and not getattr(config, "is_decoder", False):  # before causal, as BERT's type is both
        return "masked"
    if tasks:
        return tasks[0]
    return "encoder" if any(map(_class_of, classes)) else "causal"


def _measured_as(task: str) -> str:
    """The task of the texts that a model is measured on."""
    return "causal" if task == "image-text" else task


def _predicts(model: nn.Module) -> bool:
    """True if an encoder-decoder has a head: a model of another's code has, if it makes its decoder's inputs."""
    return hasattr(model, "prepare_decoder_input_ids_from_labels") or _has_head(model)


def _has_head(model: nn.Module) -> bool:
    return getattr(model, "get_output_embeddings", lambda: None)() is not None


def _class_of(name: str) -> Any:
    """transformers' class of that name; None if there is none, or if it is a base of models of all tasks."""
    import transformers

    found = None if name.endswith("PreTrainedModel") else getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def check_size(length: int, rows: int) -> None:
    """Raise NormlabError for fewer than 2 tokens a row, or no row."""
    if length < 2 or rows < 1:
        raise NormlabError(f"length is {length}, rows {rows}: give at least 2 tokens a row, and at least 1 row")


def check_input(path: Path) -> None:
    """Raise NormlabError for a text that no model can be run on, before one is loaded."""
    if not path.is_dir() and path.suffix.lower() not in IMAGES:
        _read(path)


@torch.inference_mode(False)
def batches(loaded: Loaded, path: Path, length: int, rows: int) -> Batches:
    """At most `rows` pieces of `length` tokens of a text file, or `rows` images of a folder, on the model's device.

    Labels are the text itself. Those of a masked model are the hidden tokens. For a sequence-to-sequence model the
    first half of a row is the source and the second half the labels. There are none where `loaded.no_loss` says why.

    Raises:
        NormlabError: the file is missing, empty, binary or too short; the folder has no image, or one that cannot be
            read.
    """
    parts = _images(loaded, path, rows) if loaded.task == "image" else _texts(loaded, path, length, rows)
    device = device_of(loaded.model)
    return [{name: x.to(device) for name, x in batch.items()} for batch in parts]


def _texts(loaded: Loaded, path: Path, length: int, rows: int) -> Batches:
    if path.is_dir():
        raise NormlabError(f"{path} is a folder, and {loaded.name} reads text: give a text file")
    content = _read(path)
    length = min(length, _context(loaded.model) or length)
    ids = loaded.reader(content[: 20 * length * rows], verbose=False)["input_ids"][: length * rows]
    if len(ids) < FEWEST_TOKENS:
        raise NormlabError(f"the text has only {len(ids)} tokens: give at least {FEWEST_TOKENS}")
    length = min(length, len(ids))
    whole = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [_labelled(loaded, piece) for piece in whole.split(ROWS_A_BATCH)]


def _context(model: nn.Module) -> int | None:
    """The tokens of the longest row that a model takes; None if its configuration sets no limit."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(config, "max_position_embeddings", None) or 0
    for name, table in model.named_modules():
        # RoBERTa and its kin count positions from the one after that of padding.
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            longest = min(longest, table.num_embeddings - table.padding_idx - 1)
    return longest if longest > 0 else None


def _labelled(loaded: Loaded, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    if loaded.task == "seq2seq":
        middle = ids.shape[1] // 2
        labels = ids[:, middle:].contiguous()
        batch = {"input_ids": ids[:, :middle], "decoder_input_ids": _shifted(loaded, labels)}
        return batch if loaded.no_loss else batch | {"labels": labels}
    if loaded.no_loss:
        return {"input_ids": ids}
    if loaded.task == "masked":
        token = loaded.reader.mask_token_id
        if token is None:
            raise NormlabError(f"{loaded.name} is a masked language model, but its tokenizer has no mask token")
        hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < MASKED_SHARE
        hidden[:, 0] = True  # no row without a label
        return {"input_ids": ids.masked_fill(hidden, token), "labels": ids.masked_fill(~hidden, -100)}
    return {"input_ids": ids, "labels": ids}


def _shifted(loaded: Loaded, labels: torch.Tensor) -> torch.Tensor:
    """What a decoder reads to predict the labels: those one place to the right, after the token that starts them."""
    model: Any = _of_transformers(loaded.model)
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels=labels)
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is None:
        raise NormlabError(f"what {loaded.name}'s decoder reads first is not known: set config.decoder_start_token_id")
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)


def _images(loaded: Loaded, path: Path, rows: int) -> Batches:
    try:
        from PIL import Image
    except ImportError as error:
        raise NormlabError("reading images needs Pillow: pip install pillow") from error
    found = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGES) if path.is_dir() else [path]
    if not found or not found[0].is_file() or found[0].suffix.lower() not in IMAGES:
        raise NormlabError(f"{loaded.name} reads images: give a folder of them ({', '.join(IMAGES)}), not {path}")
    pixels = []
    for file in found[:rows]:
        try:
            with Image.open(file) as image:
                pixels.append(loaded.reader(image.convert("RGB"), return_tensors="pt")["pixel_values"])
        except Exception as error:  # Pillow's formats and image processors raise several kinds
            raise NormlabError(f"{file} cannot be read as an image: {in_one_line(error)}") from error
    return [{"pixel_values": piece} for piece in torch.cat(pixels).split(ROWS_A_BATCH)]


def token_text(tokenizer: Any, token: int) -> str:
    """A token's text as it stands after another: with its space, which Llama 2's tokenizer drops at a text's start."""
    alone, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return twice.removeprefix(alone) or alone if twice.startswith(alone) else alone


def _read(path: Path) -> str:
    if not path.is_file():
        raise NormlabError(f"{path} is not a file: give a text file")
    raw = path.read_bytes()
    if b"\0" in raw:
        raise NormlabError(f"{path} is binary: give a text file")
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NormlabError(f"{path} is not UTF-8 text: convert it first") from error
    if not content.strip():
        raise NormlabError(f"{path} is empty: give a text file")
    return content
