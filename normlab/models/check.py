"""Look for faults in a saved checkpoint without running it: `check(path)`.

Tensors are read a piece at a time, never a whole file. config.json beside them says how the family stores its gains and
which weights it ties: a model of it is built without values.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError, first_line
from normlab.loading import loads_quietly, of_its_files_size
from normlab.models.pretrained import model_folder
from normlab.norms import Norm

PIECE = 2**22  # numbers read at once
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
GAIN = re.compile(r"(norm\w*|ln_?\w*)\.weight$", re.IGNORECASE)
MATRIX = re.compile(r"(\.weight|_proj)$")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
EMBEDDING = re.compile(rf"embed|wte|wpe|{HEAD.pattern}", re.IGNORECASE)
# Matrices that may hold zeros: RoBERTa's token types, a LoRA at its start.
MAY_BE_ZERO = re.compile(r"token_type|lora_B")
FULL_PRECISION = re.compile(r"router|gate\.weight$|A_log$")  # matrices that some families keep in float32
VOCABULARY_PADDING = 128  # rows beyond a tokenizer's, at the end of an embedding
ABOVE, BELOW = 0.99, 0.2  # shares of all gains that are above 1, and below 0, beyond which they are off by 1
ALIKE, ONE = 0.25, (0.75, 1.25)  # spread of the medians of other blocks; what is about 1


class _Part(NamedTuple):
    """A tensor in a file: what cuts pieces from it, its shape and dtype as the header says them."""

    cut: Any
    shape: tuple[int, ...]
    dtype: str

    def pieces(self) -> Iterator[Tensor]:
        """The tensor in pieces along its first dimension."""
        if not self.shape:
            yield self.cut[...].reshape(1)
            return
        rows = max(1, PIECE // max(1, prod(self.shape[1:])))
        for start in range(0, self.shape[0], rows):
            yield self.cut[start : start + rows]


@dataclass
class _Family:
    """What config.json says: of each gain the norm's class and whether it adds 1; names that are buffers; tied weights;
    the row of padding."""

    gains: dict[str, tuple[str, bool]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    tied: tuple[str, str] | None = None
    padding: int | None = None
    is_quantized: bool = False


def check(path: str | Path) -> list[str]:
    """Return a line for each fault that a checkpoint's files show; none if they show no fault.

        gains        where the family's norm multiplies by w, all are above 1 (stored as 1 + w?) or a fifth are below 0
                     (as w - 1?). The same of 1 + w where its norm adds the 1. Or one is 1 away from other blocks'. A
                     gain of one number is not judged, nor by its size one of normlab's norms that starts above 1.
        rows         of a matrix that are zero, or hold one number. Padding's row of an embedding may be zero.
        values       that are not finite
        ties         a head that differs from the embeddings that config.json ties it to
        dtypes       matrices in several, or vectors of one name in several blocks. A quantized model may have several,
                     and a model's buffers may have their own.

    Args:
        path: a .safetensors file, a folder of one or of its shards, or a model that comes with normlab.

    Raises:
        NormlabError: no such file, a shard that is missing, a file that cannot be read, or a config.json that makes the
            model far larger than the files.
    """
    from safetensors import safe_open

    files = _files(Path(path) if Path(path).exists() else model_folder(path))
    with ExitStack() as stack:
        parts: dict[str, _Part] = {}
        for file in files:
            try:  # the header is compared with the file's size, and nothing else is read
                opened: Any = stack.enter_context(safe_open(file, framework="pt"))
                cuts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
            except Exception as error:  # safetensors raises several kinds
                raise NormlabError(f"{file} cannot be read as safetensors: {first_line(error)}") from error
            found = {name: _Part(cut, tuple(cut.get_shape()), cut.get_dtype()) for name, cut in cuts.items()}
            parts |= {name: part for name, part in found.items() if part.dtype in FLOATS}
        family = _family(files[0].parent, [*parts])
        lines = [line for name, part in parts.items() for line in _values_and_rows(name, part, family.padding)]
        is_gain = {name for name, part in parts.items() if name in family.gains or GAIN.search(name)}
        vectors = {name for name in is_gain if len(parts[name].shape) == 1 and parts[name].shape != (1,)}
        gains = {name: parts[name].cut[:PIECE].double() for name in vectors}
        lines += _gains(dict(sorted(gains.items())), family)
        if family.tied is not None and not _equal(*(parts[name] for name in family.tied)):
            lines.append(f"{family.tied[0]} differs from {family.tied[1]}, and config.json ties them")
        kept = {name: part for name, part in parts.items() if name not in family.buffers}
        return lines if family.is_quantized else lines + _dtypes(kept)


def _files(path: Path) -> list[Path]:
    """The file, or the files of one model in a folder."""
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    whole = [file for file in found if file.name == "model.safetensors"] or found
    if len(whole) == 1 and not SHARD.fullmatch(whole[0].stem):
        return whole
    shards = {match[0]: match for file in whole if (match := SHARD.fullmatch(file.stem))}
    sets = {(match[1], match[3]) for match in shards.values()}
    if len(sets) != 1:
        which = "several models" if whole else "no .safetensors file"
        raise NormlabError(f"{path} holds {which}: name a file, or a folder of one model")
    ((stem, count),) = sets
    for number in range(1, int(count) + 1):
        if f"{stem}-{number:05}-of-{count}" not in shards:
            raise NormlabError(f"{path}: shard {number} of {int(count)} is missing")
    return [file for file in whole if file.stem in shards]


def _family(folder: Path, names: list[str]) -> _Family:
    """What the folder's config.json says of these names; nothing where transformers does not know it."""
    import transformers

    if not (folder / "config.json").is_file():
        return _Family()
    try:
        written, _ = transformers.PretrainedConfig.get_config_dict(folder)
        with loads_quietly(), of_its_files_size(folder, written), torch.device("meta"):
            config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            build: Any = getattr(transformers, (config.architectures or [""])[0], None)
            if not (isinstance(build, type) and issubclass(build, transformers.PreTrainedModel)):
                build = partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=False)
            model = build(config)
    except NormlabError:
        raise
    except Exception:  # a class of its own, or a configuration that none can be built from
        return _Family()
    prefix = f"{model.base_model_prefix}."
    stored = {f"{prefix}{name}": name for name in names} | {name: name for name in names}
    text = config.get_text_config()
    result = _Family(padding=getattr(text, "pad_token_id", None), is_quantized="quantization_config" in written)
    result.buffers = {stored[name] for name, _ in model.named_buffers() if name in stored}
    adds: dict[type, bool | None] = {}
    modules = {module: name for name, module in model.named_modules()}
    for module, name in modules.items():
        weight, kind = getattr(module, "weight", None), type(module)
        is_norm = "norm" in kind.__name__.lower() or GAIN.search(f"{name}.weight")
        if f"{name}.weight" in stored and is_norm and isinstance(weight, Tensor) and weight.ndim == 1:
            if kind not in adds or isinstance(module, Norm):
                adds[kind] = _adds_one(module)
            if (one := adds[kind]) is not None:
                result.gains[stored[f"{name}.weight"]] = kind.__name__, one
    ends = model.get_output_embeddings(), model.get_input_embeddings()
    head, embeddings = (stored.get(f"{modules.get(end)}.weight", "") for end in ends)
    head = head or next(filter(HEAD.search, names), "")
    if getattr(text, "tie_word_embeddings", False) and head and embeddings and head != embeddings:
        result.tied = head, embeddings
    return result


def _adds_one(norm: nn.Module) -> bool | None:
    """True if a norm multiplies by 1 + w: its output depends on its input where w is zero. None if not known.

    A norm of normlab's says it. None if its gain starts above 1, where the size shows nothing.
    """
    if isinstance(norm, Norm):
        return None if norm.starts.get("weight", 1.0) > 1 else norm.centre == 1.0
    with suppress(Exception), torch.no_grad():
        tried = copy.deepcopy(norm).to_empty(device="cpu")
        for tensor in chain(tried.parameters(), tried.buffers()):
            tensor.fill_(1)
        weight: Any = tried.weight
        x = torch.arange(1.0, 1.0 + len(weight.zero_()))
        one, other = tried(torch.stack([x, x.flip(0)])[None])[0]
        return not torch.equal(one, other)  # a bias is the same for both
    return None


def _values_and_rows(name: str, part: _Part, padding: int | None) -> list[str]:
    """Values that are not finite, and rows that are zero or constant."""
    shape = part.shape
    has_rows = len(shape) > 1 and shape[-1] > 1 and MATRIX.search(name) and not GAIN.search(name)
    strange, count = 0, 0
    rows: dict[str, list[int]] = {"zero": [], "constant": []}
    for piece in part.pieces():
        strange += int((~piece.float().isfinite()).sum())
        if has_rows:
            low, high = piece.float().flatten(0, -2).aminmax(dim=1)
            is_flat = (low == high) & low.isfinite()
            for word, chosen in (("zero", is_flat & (low == 0)), ("constant", is_flat & (low != 0))):
                rows[word] += (count + chosen.nonzero()[:, 0]).tolist()
            count += len(low)
    if EMBEDDING.search(name):
        rows["zero"] = _beside_padding(rows["zero"], count, padding)
    found = [f"{name}: {strange} of {prod(shape)} values are not finite"] if strange else []
    for word, which in rows.items():
        if which and not MAY_BE_ZERO.search(name):
            are = f"{len(which)} of {count} rows are" if which[1:] else f"1 of {count} rows is"
            found.append(f"{name}: {are} {word}, the first is row {which[0]}")
    return found


def _beside_padding(zero: list[int], count: int, padding: int | None) -> list[int]:
    """The zero rows of an embedding without that of padding, any one if it is not known, and some at its end."""
    end = count
    while zero and zero[-1] == end - 1 and count - end < VOCABULARY_PADDING:
        end = zero.pop()
    return zero[1:] if padding is None else [row for row in zero if row != padding]


def _gains(gains: dict[str, Tensor], family: _Family) -> list[str]:
    """Gains off by 1: those of a kind of norm together, or one beside the other blocks'."""
    found = []
    for adds in (False, True):
        names = [name for name in gains if name in family.gains and family.gains[name][1] is adds]
        if not names:
            continue
        factors = torch.cat([gains[name] for name in names]) + int(adds)
        above, below = (float(share.double().mean()) for share in (factors > 1, factors < 0))
        norms = " and ".join(sorted({family.gains[name][0] for name in names}))
        middle = float(factors.median()) - adds
        usual = f"{norms} multiplies by {'1 + w' if adds else 'w'}, the median of w is {middle:.3g}"
        if above > ABOVE:
            why = "is the 1 in the file too?" if adds else "is it 1 + w, or was a 1 added twice?"
            found.append(f"gains: {above:.0%} of the factors are above 1: {usual}: {why}")
        elif below > BELOW:
            why = "was the 1 taken off twice?" if adds else "is it w - 1?"
            found.append(f"gains: {below:.0%} of the factors are below 0: {usual}: {why}")
    if found:
        return found
    roles: dict[str, dict[str, float]] = {}
    for name, gain in gains.items():
        roles.setdefault(_role(name), {})[name] = float(gain.median())
    for medians in roles.values():
        for name, median in medians.items():
            others = [value for other, value in medians.items() if other != name]
            if len(others) > 1 and max(others) - min(others) < ALIKE and ONE[0] < abs(median - others[0]) < ONE[1]:
                found.append(f"{name}: its median is {median:.3g}, in the other blocks {others[0]:.3g}: w or 1 + w?")
    return found


def _equal(a: _Part, b: _Part) -> bool:
    pairs = zip(a.pieces(), b.pieces(), strict=False)
    return a.shape == b.shape and all(torch.equal(x.float(), y.float()) for x, y in pairs)


def _dtypes(parts: dict[str, _Part]) -> list[str]:
    """Matrices in another dtype than most, and vectors that have several in the blocks."""
    kept = {name: part for name, part in parts.items() if not FULL_PRECISION.search(name)}
    counts = Counter(part.dtype for part in kept.values() if len(part.shape) > 1)
    usual = counts.most_common(1)[0][0] if counts else ""
    kinds: dict[str, set[str]] = {}
    for name, part in kept.items():
        kinds.setdefault(_role(name), set()).add(part.dtype)
    other = [n for n, p in kept.items() if p.dtype != usual and (len(p.shape) > 1 or len(kinds[_role(n)]) > 1)]
    more = f" and {len(other) - 1} more" if other[1:] else ""
    return [f"dtypes: {other[0]}{more} in {kept[other[0]].dtype}, most matrices in {usual}"] if other else []


def _role(name: str) -> str:
    """The name of a tensor, the same in all blocks."""
    return re.sub(r"\d+", "*", name)
