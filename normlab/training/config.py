"""TrainConfig: everything that decides a run's numbers, and a few settings that do not.

`setting(default, help, rule)`   a field, described once: flags, their help and docstrings are made from it
`shared(cls, name)`              the same field in another dataclass
`check(configuration)`           NormlabError for a value of another type, or that its rule refuses
`described(cls)`                 the fields as text, for a docstring
`flag_of(name)`                  the command-line flag of a field
`argument(flag, value)`          a flag and its value, as a command line takes them
`CorpusSpec`                     which text, cut how
`TrainConfig`                    a whole run
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from normlab.errors import NormlabError, first_fault
from normlab.probes import METRICS
from normlab.runs import LATER_FIELDS
from normlab.schemes import DEFAULT, get_scheme
from normlab.store import child, is_run
from normlab.training.text.source import DEFAULT_CORPUS, PARTS, SOURCES

if TYPE_CHECKING:
    from normlab.models import NormlabConfig

HEAD_SIZE = 32
AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16", "float16")
# Standard deviation of the initial weights, as models around 1,024 wide are published with it.
INIT_STD = 0.02
# Model fields that a run sets, and the fields that decide them. No option contradicts what a table shows.
SET_BY = {
    "scheme": "scheme",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "intermediate",
    "initializer_range": "init_std",
    "train_seq_len": "block_length",
    "bos_token_id": "tokenizer",
    "eos_token_id": "tokenizer",
    "pad_token_id": "tokenizer",
}
PROBE_METRICS = ("token_l2_mean", "feature_var_mean", "rms", "max_abs", "kurtosis", "grad_l2_mean", "grad_l2_total")

# --- fields ---

# Rules are metadata of a type, as pydantic reads them.
POSITIVE = Field(gt=0)
SHARE = Field(ge=0, lt=1)
NOT_NEGATIVE = Field(ge=0)
SEED = Field(ge=0, lt=2**32)  # what NumPy's generators take
TEXT = Field(min_length=1)  # a length is that of UTF-8: what cannot be written there is refused
THREADS = Field(ge=1, le=1024)  # PyTorch crashes for numbers that no machine has


def at_least(least: int, most: int = 2**40) -> Any:
    return Field(ge=least, le=most)


def one_of(*values: str) -> Any:
    """A type, used instead of the field's own."""
    return Literal[values]


def setting(default: Any, help: str, rule: Any = None, *, identity: bool = True) -> Any:
    """A dataclass field. default: a value, or the type of an empty one. identity: True if numbers depend on it."""
    metadata = {"help": help, "rule": rule, "identity": identity}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def shared(cls: Any, name: str) -> Any:
    """Field `name` of dataclass `cls`, for another one that has it too."""
    original = cls.__dataclass_fields__[name]
    return dataclasses.field(default=original.default, metadata=original.metadata)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise NormlabError(message)


def check(configuration: Any) -> None:
    """NormlabError naming the first field whose value has another type than its annotation, or breaks its rule.

    Types are strict: 2.5, "2" and True are no whole numbers. Floats are finite.
    """
    kind: Any = type(configuration)
    try:
        _schema(kind).model_validate(vars(configuration))
    except ValidationError as error:
        raise NormlabError(first_fault(error)) from None


@functools.cache
def _types(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


@functools.cache
def _schema(cls: Any) -> type[BaseModel]:
    types = _types(cls)
    known: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        rule = spec.metadata["rule"]
        is_type = rule is None or hasattr(rule, "__args__")
        known[spec.name] = (rule or types[spec.name] if is_type else Annotated[types[spec.name], rule], ...)
    return create_model(cls.__name__, __config__=ConfigDict(strict=True, allow_inf_nan=False), **known)


def described(cls: Any) -> str:
    """The fields as the arguments of a docstring."""
    lines = (f"{spec.name}: {spec.metadata['help']}." for spec in dataclasses.fields(cls))
    inner, more = " " * 8, " " * 12
    return "    Args:\n" + "\n".join(
        textwrap.fill(line, 116, initial_indent=inner, subsequent_indent=more) for line in lines
    )


def as_floats(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, with a float for a whole number where the type of its name takes one, and a list for a tuple.

    Equal values are written alike then, so that run ids are equal too.
    """
    return {name: _as_float(value, types.get(name)) for name, value in values.items()}


def _as_float(value: Any, kind: Any) -> Any:
    kinds = (kind, *get_args(kind))
    if type(value) in (int, float) and float in kinds:
        return value + 0.0  # no -0.0 either
    if isinstance(value, list | tuple):
        item = next((get_args(each)[0] for each in kinds if get_origin(each) in (list, tuple)), None)
        return [_as_float(entry, item) for entry in value]
    return value


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def argument(flag: str, value: str) -> list[str]:
    """A flag and its value. They are one word where the value would be read as another flag."""
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


# --- configurations ---


@dataclass(frozen=True)
class CorpusSpec:
    """The text of a run, and how it is cut. A `TrainConfig` has the same fields.

    NormlabError for a value out of range.
    """

    corpus: str = setting(
        DEFAULT_CORPUS,
        "stdlib; packages; a .txt (empty lines part documents), .jsonl, .jsonl.gz or .parquet file, or a "
        "folder of them; addresses of such files (http:, https:), comma-separated; a hub data set (name or "
        "name:configuration)",
        TEXT,
    )
    tokenizer: str | None = setting(None, "directory or hub name of a tokenizer; default: train a byte-level BPE", TEXT)
    vocab_size: int = setting(4096, "of the tokenizer to train", at_least(1, 2**20))
    block_length: int = setting(128, "tokens per sequence; also the context length and BHyT's T", at_least(2))
    text_column: str = setting("text", "column that holds the text", TEXT)
    characters: int = setting(100_000_000, "read at most so much of the corpus", at_least(1))

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, config: Any) -> CorpusSpec:
        """The fields that anything else has in common with it."""
        return cls(**{spec.name: getattr(config, spec.name) for spec in dataclasses.fields(cls)})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. NormlabError for values out of range.

    Equal runs are equal configurations: open values are filled in, and values without effect are set to their defaults.
    But a field of `model` that differs from NormlabConfig's default names another run, even if the scheme does not read
    it.
    """

    scheme: str = setting(DEFAULT, "normalization scheme, a key of normlab.SCHEMES")
    depth: int = setting(16, "number of transformer blocks", at_least(1, 10_000))
    width: int = setting(128, "hidden size", at_least(1, 2**20))
    seed: int = setting(0, "data order and initial weights", SEED)
    lr: float = setting(3e-3, "peak learning rate", POSITIVE)
    steps: int = setting(300, "optimizer steps", at_least(1))
    batch_size: int = setting(8, "sequences per step", at_least(1, 2**20))
    block_length: int = shared(CorpusSpec, "block_length")
    heads: int | None = setting(None, "attention heads; default width/32", at_least(1))
    kv_heads: int | None = setting(None, "key-value heads; default half of the heads", at_least(1))
    intermediate: int | None = setting(None, "MLP width; default 8/3 of the width, rounded to 32", at_least(1, 2**20))
    init_std: float | None = setting(
        None,
        "standard deviation of initial matrices and embeddings, but for matrices that start by a rule of the scheme's; "
        "default 0.02, for widths of about 1,024",
        POSITIVE,
    )
    model: Mapping[str, Any] = setting(dict, "a further NormlabConfig field, such as lam_input=3.0; may be repeated")
    weight_decay: float = setting(0.1, "AdamW's, for what the scheme decays", NOT_NEGATIVE)
    warmup: float = setting(0.1, "share of the steps in which the learning rate rises", SHARE)
    min_lr_ratio: float = setting(0.1, "where the cosine ends, as a share of lr", SHARE)
    gain_lr_ratio: float = setting(
        1.0, "learning rate of gains, lambda, alpha and residual scales, as a share of lr", POSITIVE
    )
    stop_at: int | None = setting(None, "step to stop at, before the schedule of all steps ends", at_least(1))
    clip: float = setting(1.0, "largest gradient norm; 0: any", NOT_NEGATIVE)
    beta1: float = setting(0.9, "AdamW's first moment", SHARE)
    beta2: float = setting(0.95, "AdamW's second moment", SHARE)
    corpus: str = shared(CorpusSpec, "corpus")
    tokenizer: str | None = shared(CorpusSpec, "tokenizer")
    vocab_size: int = shared(CorpusSpec, "vocab_size")
    text_column: str = shared(CorpusSpec, "text_column")
    characters: int = shared(CorpusSpec, "characters")
    stream: bool = setting(
        False, "read the text while training, all of it; --characters of it make the tokenizer and the held-out text"
    )
    outlier_channels: int = setting(0, "columns of the embeddings that start large, for every token", NOT_NEGATIVE)
    outlier_size: float = setting(1.0, "what they start at")
    probe_every: int = setting(50, "steps between layer statistics, first before training; 0: none", NOT_NEGATIVE)
    probe_blocks: int = setting(8, "held-out sequences that layer statistics are taken on", at_least(1))
    probe_also: str = setting("", "further metrics of normlab.probes to record, comma-separated")
    eval_every: int = setting(100, "steps between held-out losses; 0: none", NOT_NEGATIVE)
    eval_blocks: int = setting(128, "held-out sequences for the held-out loss", at_least(1))
    # One half is for choosing, the other for reporting.
    held_out: str = setting("all", "held-out text to measure on: all, validation or test", one_of("all", *PARTS))
    experiment_blocks: int = setting(
        0, "held-out sequences for normlab.training.experiments, after the last step; 0: none", NOT_NEGATIVE
    )
    store_all: bool = setting(
        False,
        "store more than losses and layers: loss by held-out file, on sequences trained on and on copied tokens, "
        "uniform attentions, sizes of gains and matrices",
    )
    log_every: int = setting(1, "steps that a logged training loss averages over, the last of fewer", at_least(1))
    dtype: str = setting(
        AUTO,
        "of a training step's matrix products (autocast); auto: bfloat16 where the device computes it in hardware, "
        "else float32",
        one_of(*DTYPES),
    )
    compile: bool = setting(False, "training steps by torch.compile, where it works")
    checkpoint_every: int = setting(100, "steps between checkpoints; 0: none", NOT_NEGATIVE, identity=False)
    keep_weights: bool = setting(True, "keep the trained model", identity=False)
    # Threads change sums in the last digits only: a run continues only under the number that it began with.
    threads: int = setting(1, "CPU threads", THREADS, identity=False)
    # These too change no more than the rounding of sums.
    accumulate: int = setting(1, "parts in which a step's sequences are computed", at_least(1), identity=False)
    gradient_checkpointing: bool = setting(False, "compute activations again in the backward pass", identity=False)
    fsdp: bool = setting(False, "split weights, gradients and optimizer over the ranks (FSDP2)", identity=False)
    device: str = setting("auto", "auto: a GPU where there is one", one_of("auto", "cpu", "cuda"), identity=False)

    def __post_init__(self) -> None:
        check(self)
        for name, value in as_floats(vars(self), _types(TrainConfig)).items():
            object.__setattr__(self, name, value)  # a frozen dataclass has no other way
        get_scheme(self.scheme)
        require(
            self.heads is not None or self.width % HEAD_SIZE == 0,
            f"width {self.width} is no multiple of {HEAD_SIZE}, the default head size; give the heads",
        )
        for name, value in self._filled_in().items():
            object.__setattr__(self, name, value)
        heads, kv_heads = self.heads or 0, self.kv_heads or 0
        # NormlabConfig would say so too, but only when training begins, and of Llama's fields.
        require(self.width % heads == 0, f"{heads} heads do not divide width {self.width}")
        require(heads % kv_heads == 0, f"{kv_heads} key-value heads do not divide {heads} heads")
        size = self.width // heads
        require(size % 2 == 0, f"head size {size} is odd; rotary positions need an even one")
        require(
            self.batch_size % self.accumulate == 0,
            f"accumulate is {self.accumulate}; it must divide batch_size {self.batch_size}",
        )
        require(
            self.outlier_channels <= self.width,
            f"outlier_channels is {self.outlier_channels}; width {self.width} has no more than {self.width}",
        )
        require(
            self.last_step <= self.steps, f"stop_at is {self.stop_at}; the schedule has {self.steps} steps, no more"
        )
        require(not (self.store_all and self.stream), "store_all needs blocks that can be read again: leave stream off")
        require(self.probe_every > 0 or not self.store_all, "store_all comes with layer statistics: give probe_every")
        if self.model:
            from normlab.models import NormlabConfig  # here, because it loads transformers

            unknown = set(self.model) - {spec.name for spec in dataclasses.fields(NormlabConfig)}
            require(not unknown, f"unknown model fields {', '.join(sorted(unknown))}")
            for name in sorted(SET_BY.keys() & self.model.keys()):
                require(False, f"model field {name} is set by {SET_BY[name]}: give that instead")
            context = self.model.get("max_position_embeddings", self.block_length)
            require(
                isinstance(context, int) and context >= self.block_length,
                f"model field max_position_embeddings is {context!r}; it must be at least {self.block_length}, a block",
            )
            object.__setattr__(self, "model", self._model_changes())

    def _filled_in(self) -> dict[str, Any]:
        heads = self.heads or self.width // HEAD_SIZE
        also = {name.strip() for name in self.probe_also.split(",")} - {"", *PROBE_METRICS}
        also |= {"attention_entropy"} if self.store_all else set()
        unknown = sorted(also - METRICS.keys())
        require(not unknown, f"probe_also: unknown metric {', '.join(unknown)}; choose from {', '.join(METRICS)}")
        return {
            "heads": heads,
            "kv_heads": self.kv_heads or max(1, heads // 2),
            "intermediate": self.intermediate or max(32, round(self.width * 8 / 3 / 32) * 32),
            "init_std": None if self.init_std == INIT_STD else self.init_std,
            "model": dict(self.model),
            "vocab_size": _default("vocab_size") if self.tokenizer else self.vocab_size,
            "text_column": _default("text_column") if self.corpus in SOURCES else self.text_column,
            "outlier_size": self.outlier_size if self.outlier_channels else 1.0,
            "probe_blocks": self.probe_blocks if self.probe_every else _default("probe_blocks"),
            "probe_also": ",".join(sorted(also)) if self.probe_every else "",
            "stop_at": None if self.stop_at == self.steps else self.stop_at,
        }

    def _model_changes(self) -> dict[str, Any]:
        """The fields of `model` that differ from the model's without them. The tokenizer's size is not known yet."""
        from normlab.models import NormlabConfig

        specs = dataclasses.fields(NormlabConfig)
        fields = as_floats(self.model, {spec.name: spec.type for spec in specs})
        plain = {spec.name: spec.default for spec in specs if spec.name != "vocab_size"} | self._model_fields()
        return {
            name: value
            for name, value in fields.items()
            if (type(value), value) != (type(plain.get(name)), plain.get(name)) or name not in plain
        }

    @property
    def run_id(self) -> str:
        """A readable name, and a hash of every field that numbers depend on and that differs from its default.

        A field that a later version adds leaves the names of today's runs unchanged: what `LATER_FIELDS` says of it is
        no part of the hash.
        """
        defaults = {spec.name: spec.default for spec in dataclasses.fields(self)} | LATER_FIELDS
        chosen = {name: value for name, value in self.identity().items() if value != defaults[name]}
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.scheme}-d{self.depth}-w{self.width}-lr{self.lr:g}-s{self.seed}-{digest}"

    def candidates(self) -> list[TrainConfig]:
        """The configurations that dtype "auto" may become. For any other dtype, only this configuration."""
        dtypes = ("bfloat16", "float32") if self.dtype == AUTO else (self.dtype,)
        return [dataclasses.replace(self, dtype=dtype) for dtype in dtypes]

    def finished_in(self, root: str | Path) -> str | Path | None:
        """The finished run of this configuration below `root`, in any precision that dtype "auto" may become."""
        paths = (child(root, candidate.run_id) for candidate in self.candidates())
        return next(filter(is_run, paths), None)

    def probe_metrics(self) -> list[str]:
        """Metrics that the run records by layer: PROBE_METRICS and those of `probe_also`."""
        return [*PROBE_METRICS, *filter(None, self.probe_also.split(","))]

    @property
    def last_step(self) -> int:
        """Steps that are trained: all of the schedule, or up to `stop_at`."""
        return self.stop_at or self.steps

    @property
    def has_choice_loss(self) -> bool:
        """True if the run measures a loss that rates can be chosen by (`normlab.runs.Run.choice_loss`)."""
        return self.eval_every > 0 or (self.store_all and self.held_out == "test")

    def is_due(self, step: int, every: int) -> bool:
        """True every `every` steps, at step 0 and after the last; never if `every` is 0."""
        return every > 0 and (step % every == 0 or step == self.last_step)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_length

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """The fields that numbers depend on."""
        return {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.metadata["identity"]}

    def to_arguments(self) -> list[str]:
        """Arguments of `normlab train` for this configuration: every field that differs from its default."""
        # The last three have a default that depends on the width.
        always = ("depth", "width", "seed", "lr", "steps", "heads", "kv_heads", "intermediate")
        arguments = ["--scheme", self.scheme]
        for spec in dataclasses.fields(self):
            value, flag = getattr(self, spec.name), flag_of(spec.name)
            if spec.name == "scheme" or value in (None, {}) or (value == spec.default and spec.name not in always):
                continue
            if isinstance(value, bool):
                arguments.append(flag if value else flag_of(f"no_{spec.name}"))
            elif isinstance(value, dict):
                arguments += [item for key, entry in value.items() for item in (flag, f"{key}={json.dumps(entry)}")]
            else:
                arguments += argument(flag, str(value))
        return arguments

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; NormlabError for fields that this version does not know."""
        unknown = set(values) - {spec.name for spec in dataclasses.fields(cls)}
        require(not unknown, f"unknown training fields {', '.join(sorted(unknown))}")
        return cls(**LATER_FIELDS | dict(values))

    def model_config(self, vocab_size: int, eos_token_id: int) -> NormlabConfig:
        """The model's configuration: tied embeddings, eps 1e-6, context and T equal to the block length.

        Fields of `model` replace these. NormlabError for a vocabulary smaller than `vocab_size`, the tokenizer's.
        """
        from normlab.models import NormlabConfig

        rows = self.model.get("vocab_size", vocab_size)
        require(
            isinstance(rows, int) and rows >= vocab_size,
            f"model field vocab_size is {rows!r}; the tokenizer has {vocab_size} tokens: give at least as many",
        )

        of_tokenizer = {"vocab_size": vocab_size, "bos_token_id": eos_token_id, "eos_token_id": eos_token_id}
        return NormlabConfig(**{**self._model_fields(), **of_tokenizer, **self.model})

    def _model_fields(self) -> dict[str, Any]:
        """The model's fields that a run sets, without those of the tokenizer."""
        own = {name: getattr(self, field) for name, field in SET_BY.items() if field != "tokenizer"}
        return own | {
            "initializer_range": INIT_STD if self.init_std is None else self.init_std,
            "max_position_embeddings": self.block_length,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "pad_token_id": None,
        }


def _default(name: str) -> Any:
    return TrainConfig.__dataclass_fields__[name].default


TrainConfig.__doc__ = f"{TrainConfig.__doc__}\n{described(TrainConfig)}\n"
