"""TrainConfig: everything that decides a run's numbers, and a little that does not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normlab.errors import NormlabError
from normlab.schemes import DEFAULT, get_scheme
from normlab.training.corpus import DEFAULT_CHARACTERS, DEFAULT_CORPUS, HELD_OUT

# Fields that leave the numbers as they are: not part of a run's identity. Threads change sums in the last digits only;
# they are recorded, and a run continues only under the number of threads that it began with.
NOT_IDENTITY = ("threads", "keep_weights", "checkpoint_every")
HEAD_SIZE = 32
AT_LEAST_ONE = "depth width steps batch_size probe_blocks eval_blocks log_every threads characters".split()
NOT_NEGATIVE = "probe_every eval_every checkpoint_every weight_decay seed outlier_channels experiment_blocks".split()
CHOICES = {"dtype": ("float32", "bfloat16"), "held_out": HELD_OUT}
PROBE_METRICS = ("token_l2_mean", "feature_var_mean", "rms", "max_abs", "kurtosis", "grad_l2_mean", "grad_l2_total")


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    scheme, depth, width: the model. heads: default width/32. kv_heads: default half of that. intermediate: default 8/3
    width, rounded to a multiple of 32. model: further NormlabConfig fields by name (lam_input, kappa, carried, ...).
    seed: data order and initial weights. lr: peak learning rate. steps, batch_size (blocks), block_length (tokens).
    weight_decay, warmup (share of the steps), min_lr_ratio (end of the cosine), clip (gradient norm), beta1, beta2:
    AdamW's recipe.
    corpus, tokenizer, vocab_size, text_column, characters: see `normlab.training.corpus.load_corpus`.
    outlier_channels, outlier_size: so many columns of the embeddings start at that value for every token, as massive
    activations do in large models.
    probe_every, probe_blocks, probe_also: layer statistics on a fixed held-out batch at step 0, every so many steps,
    and after the last (0: never); further metrics of `normlab.probes`, comma-separated.
    eval_every, eval_blocks: held-out loss, likewise.
    held_out: which held-out blocks the run is measured on: "all", or "validation" or "test", the two halves of them,
    so that what is chosen by one is reported on the other.
    experiment_blocks: held-out blocks on which skipping, angles, Jacobians and the logit lens are measured after the
    last step (`normlab.training.experiments`; 0: never).
    log_every: steps that one row of the training loss averages over.
    dtype: "float32", or "bfloat16": matrix products of training steps in bfloat16 (autocast), weights and everything
    that is measured in float32. compile: training steps by torch.compile.
    checkpoint_every: steps between checkpoints, 0: none. keep_weights: keep the trained model. threads: CPU threads.
    Raises NormlabError for values out of range.
    """

    scheme: str = DEFAULT
    depth: int = 16
    width: int = 128
    seed: int = 0
    lr: float = 3e-3
    steps: int = 300
    batch_size: int = 8
    block_length: int = 128
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.1
    warmup: float = 0.1
    min_lr_ratio: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    corpus: str = DEFAULT_CORPUS
    tokenizer: str | None = None
    vocab_size: int = 4096
    text_column: str = "text"
    characters: int = DEFAULT_CHARACTERS
    outlier_channels: int = 0
    outlier_size: float = 1.0
    probe_every: int = 50
    probe_blocks: int = 8
    probe_also: str = ""
    eval_every: int = 100
    eval_blocks: int = 128
    held_out: str = "all"
    experiment_blocks: int = 0
    log_every: int = 1
    dtype: str = "float32"
    compile: bool = False
    checkpoint_every: int = 100
    keep_weights: bool = True
    threads: int = 1

    def __post_init__(self) -> None:
        get_scheme(self.scheme)
        for name in AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in NOT_NEGATIVE:
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative")
        for name, values in CHOICES.items():
            _require(
                getattr(self, name) in values, f"{name} is {getattr(self, name)!r}; choose one of {', '.join(values)}"
            )
        for name in ("lr", "clip"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("warmup", "min_lr_ratio", "beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        _require(
            self.checkpoint_every % self.log_every == 0,
            f"checkpoint_every is {self.checkpoint_every}, no multiple of log_every {self.log_every}: "
            "a resumed run would average its loss over other steps",
        )
        _require(self.block_length >= 2, f"block_length is {self.block_length}; it must be at least 2")
        if self.heads is None:
            _require(
                self.width % HEAD_SIZE == 0,
                f"width {self.width} is no multiple of {HEAD_SIZE}, the default head size; give the heads",
            )
        heads = self.heads or self.width // HEAD_SIZE
        _require(heads >= 1 and self.width % heads == 0, f"{heads} heads do not divide width {self.width}")
        kv_heads = self.kv_heads or max(1, heads // 2)
        _require(kv_heads >= 1 and heads % kv_heads == 0, f"{kv_heads} key-value heads do not divide {heads} heads")
        _require(
            (self.width // heads) % 2 == 0, f"head size {self.width // heads} is odd; rotary positions need an even one"
        )
        intermediate = self.intermediate or max(32, round(self.width * 8 / 3 / 32) * 32)
        for name, value in {
            "heads": heads,
            "kv_heads": kv_heads,
            "intermediate": intermediate,
            "model": dict(self.model),
        }.items():
            object.__setattr__(self, name, value)
        _require(
            self.outlier_channels <= self.width,
            f"outlier_channels is {self.outlier_channels}; width {self.width} has no more than {self.width}",
        )
        _require(math.isfinite(self.outlier_size), f"outlier_size is {self.outlier_size}; it must be finite")
        # What measures and trains the same is written the same: it is one run, with one id.
        if not self.outlier_channels:
            object.__setattr__(self, "outlier_size", 1.0)
        object.__setattr__(self, "probe_also", ",".join(self._further_metrics()))
        unknown = set(self.model) - _model_fields()
        _require(not unknown, f"unknown model fields {', '.join(sorted(unknown))}")

    @property
    def run_id(self) -> str:
        """A name that tells runs apart at a glance, and a hash of every field that the numbers depend on and that
        differs from its
        default: a field that a later version adds leaves the names of today's runs as they are."""
        defaults = {spec.name: spec.default for spec in dataclasses.fields(self)}
        chosen = {name: value for name, value in self.identity().items() if value != defaults[name]}
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.scheme}-d{self.depth}-w{self.width}-lr{self.lr:g}-s{self.seed}-{digest}"

    def probe_metrics(self) -> list[str]:
        """Metrics that the run records by layer: PROBE_METRICS and those of `probe_also`."""
        return [*PROBE_METRICS, *self._further_metrics()]

    def _further_metrics(self) -> list[str]:
        """Those of `probe_also` that are not recorded anyway, each once, by name."""
        from normlab.probes import METRICS

        also = [name.strip() for name in self.probe_also.split(",") if name.strip()]
        unknown = [name for name in also if name not in METRICS]
        _require(not unknown, f"probe_also: unknown metric {', '.join(unknown)}; choose from {', '.join(METRICS)}")
        return sorted(set(also) - set(PROBE_METRICS))

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_length

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_dict().items() if name not in NOT_IDENTITY}

    def to_arguments(self) -> list[str]:
        """Command-line arguments of `normlab train` that give this configuration: every field that differs from its
        default."""
        # The last three have a default that depends on the width.
        always = ("depth", "width", "seed", "lr", "steps", "heads", "kv_heads", "intermediate")
        arguments = ["--scheme", self.scheme]
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.name == "scheme" or value in (None, {}) or (value == spec.default and spec.name not in always):
                continue
            flag = "--" + spec.name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(flag if value else "--no-" + spec.name.replace("_", "-"))
            elif isinstance(value, dict):
                arguments += [item for key, entry in value.items() for item in (flag, f"{key}={json.dumps(entry)}")]
            else:
                arguments += [flag, str(value)]
        return arguments

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; NormlabError for fields that this version does not know."""
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        _require(not unknown, f"unknown training fields {', '.join(sorted(unknown))}")
        return cls(**values)

    def model_config(self, vocab_size: int, eos_token_id: int) -> Any:
        """The `NormlabConfig`: tied embeddings, eps 1e-6, context and T equal to the block length."""
        from normlab.models import NormlabConfig

        fields = {
            "scheme": self.scheme,
            "vocab_size": vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.block_length,
            "train_seq_len": self.block_length,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "bos_token_id": eos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": None,
        }
        return NormlabConfig(**{**fields, **self.model})


def require_same(manifest: Mapping[str, Any], config: TrainConfig, corpus: Mapping[str, Any]) -> None:
    """NormlabError naming the first difference between a finished run and what is asked for: `config` on a corpus of
    that identity."""
    there = TrainConfig.from_dict(manifest["config"]).identity() | manifest["corpus"]
    for name, value in (config.identity() | dict(corpus)).items():
        _require(
            there[name] == value,
            f"run {manifest['run']} has {name} {there[name]!r}, here it is {value!r}: numbers could not be compared; "
            "use another output directory or delete the run",
        )


def _model_fields() -> set[str]:
    from normlab.models import NormlabConfig

    return {f.name for f in dataclasses.fields(NormlabConfig)}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise NormlabError(message)
