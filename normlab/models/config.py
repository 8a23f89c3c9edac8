"""NormlabConfig: Llama's fields and the scheme's."""
# Annotations are not postponed here: `strict` reads the types.

import dataclasses
import difflib
import math
from typing import Any, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import LlamaConfig
from transformers.activations import ACT2FN

from normlab.errors import NormlabError, in_one_line, require_packages
from normlab.schemes import BASELINE, CORRECTIONS, KAPPA_POWERS, QK_NORMS, SCHEMES, get_scheme, is_bounded

# Field of a released BHyT configuration -> ours.
RELEASED_FIELDS = {
    "input_layer_lam": "lam_input",
    "post_layer_lam": "lam_post",
    "last_layer_lam": "lam_last",
    "bhyt_kappa": "kappa",
    "seq_len": "train_seq_len",
}
RELEASED_SCHEDULES = {"decay": "inverse_sqrt", "grow": "sqrt", "mild_grow": "fourth_root"}
RELEASED_OPTIONS = (
    "bhyt_kappa_schedule",
    "var_approx_method",
    "var_approx_calibration",
    "var_approx_exact_layers",
    "var_approx_exact_layer_list",
    "bhyt_layer_range",
)
# What a `model_type` sets in addition to its scheme.
FAMILIES = {"qwen3": {"qk_norm": "rms_head"}}

TRANSFORMERS = "transformers>=5.4"  # the first whose configurations are dataclasses, and whose weights start as ours do
require_packages("a model of normlab's own", [TRANSFORMERS], TRANSFORMERS)

ConfigClass = TypeVar("ConfigClass", bound=type)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise NormlabError(message)


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _with_our_errors(config_class: ConfigClass) -> ConfigClass:
    """Make NormlabError of the error that `strict` raises when a field is set to a value of another type."""
    assign: Any = config_class.__setattr__

    def assign_or_explain(config: Any, name: str, value: Any) -> None:
        try:
            assign(config, name, value)
        except StrictDataclassFieldValidationError as error:
            expected = config_class.__dataclass_fields__[name].type  # type: ignore[attr-defined]
            words = expected.__name__ if isinstance(expected, type) else str(expected)
            raise NormlabError(f"{name} is {value!r:.80}: give a value of type {words}") from error

    config_class.__setattr__ = assign_or_explain  # type: ignore[method-assign, assignment]
    return config_class


@_with_our_errors
@strict
class NormlabConfig(LlamaConfig):
    """A Llama configuration plus a normalization scheme.

        field             default      meaning
        scheme            pre_rmsnorm  a key of ``normlab.SCHEMES``
        lam_input         2.0          lambda at the attention norm
        lam_post          1.0          lambda at the MLP norm
        lam_last          0.0          lambda at the final norm; 0: plain RMSNorm
        kappa             10.0         BHyT's divisor; only lambda/kappa enters the map
        gamma0            1.0          start of gamma where lambda acts
        learnable_lam     True         train lambda; else it is a buffer
        carried           None         statistic at BHyT's MLP site, see below; None: the scheme's default
        exact_layers      None         blocks (from 1) whose MLP site reduces again whatever ``carried`` says
        bounded_layers    None         first and last block (from 1) with BHyT, the others with RMSNorm; None: all
        kappa_schedule    constant     kappa in block l: "constant", "inverse_sqrt" (kappa/sqrt(l)), "sqrt"
                                       (kappa sqrt(l)), "fourth_root" (kappa l^(1/4))
        correction        none         learned correction of the carried statistic, see below
        calibration       None         fixed factor on ms' for every block; None: 1
        train_seq_len     None         T of the carried statistic; None: ``max_position_embeddings``
        post_fraction     0.25         share of first blocks that are Post-LN in Mix-LN, rounded down, at least one
        alpha0            None         start of DyT's and Derf's alpha at every site; None: as in the paper
        qk_norm           None         norm of queries and keys, see `normlab.schemes.Branches`; None: the scheme's
        affine_attention  False        attention weights scaled and shifted per query (2602.23057), in any scheme
        zero_centred      False        every norm's gain is 1 + its parameter, and weight decay acts on the parameter
        taper_final       False        TaperNorm at the final norm too
        residual_warmup   1000         T0 of ProRes: steps until the first layer's branches are fully on
        streams           4            residual streams of hyper-connections

    ``carried`` is "uniform" (the paper's correction over T tokens at every position), "causal" (over the tokens that a
    position attends to) or "exact" (reduced again).

    With r = c (lambda_in/kappa)^2 the carried statistic is ms' = ms + r. ``correction`` makes it ms + b r ("beta"),
    ms (1 + e) ("eta") or ms (1 + x) + a r ("residual_aware"). The starts are b = a = 1 and e = x = 0.

    With gamma0 * lambda/kappa fixed, small inputs see the same map, and lambda/kappa sets how much the tanh bends. The
    three also set the starting gain of the control ``rmsnorm_gain``. Fields of other schemes are kept unused. So is
    ``rms_norm_eps`` where a norm has an eps of its own: BHyT's is 1e-6 and LayerNorm's 1e-5 in every model. Weights
    loaded with another ``train_seq_len`` keep their c; call ``refresh_carried()`` to recompute it.

    One seed starts the matrices of all schemes alike. With ``attention_bias`` or ``mlp_bias`` they start where those of
    a Llama with biases do, elsewhere than without.

    Raises:
        NormlabError: a value of another type or out of range, or an unknown scheme. The line names the field.
    """

    model_type = "normlab"

    scheme: str = BASELINE
    lam_input: float | int = 2.0
    lam_post: float | int = 1.0
    lam_last: float | int = 0.0
    kappa: float | int = 10.0
    gamma0: float | int = 1.0
    learnable_lam: bool = True
    carried: str | None = None
    exact_layers: list[int] | tuple[int, ...] | None = None
    bounded_layers: list[int] | tuple[int, ...] | None = None
    kappa_schedule: str = "constant"
    correction: str = "none"
    calibration: list[float | int] | tuple[float | int, ...] | None = None
    train_seq_len: int | None = None
    post_fraction: float | int = 0.25
    alpha0: float | int | None = None
    qk_norm: str | None = None
    affine_attention: bool = False
    zero_centred: bool = False
    taper_final: bool = False
    residual_warmup: int = 1000
    streams: int = 4

    def __post_init__(self, **kwargs):
        for name in kwargs.keys() - _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.75)
            _require(not close, f"unknown field {name}: do you mean {''.join(close)}?")
        scheme = get_scheme(self.scheme)
        self._check_shape()
        self._check_numbers()
        if self.carried is None and scheme.carried:
            self.carried = scheme.carried[0]
        _require(
            not scheme.carried or self.carried in scheme.carried,
            f"carried is {self.carried!r:.80}: scheme {self.scheme} takes {', '.join(scheme.carried)}",
        )
        self._check_blocks()
        if self.qk_norm is None:
            self.qk_norm = scheme.branches.qk_norm
        for name, choices in (("kappa_schedule", KAPPA_POWERS), ("correction", CORRECTIONS), ("qk_norm", QK_NORMS)):
            value = getattr(self, name)
            _require(value in choices, f"{name} is {value!r:.80}: choose one of {', '.join(choices)}")
        if self.train_seq_len is None:
            self.train_seq_len = self.max_position_embeddings
        kwargs.pop("auto_map", None)  # an exported folder's; a folder saved from here has no code in it
        try:
            super().__post_init__(**kwargs)
        except (AttributeError, TypeError, ValueError) as error:  # of fields that transformers does not check
            raise NormlabError(f"transformers does not take this configuration: {in_one_line(error):.200}") from error

    def _check_shape(self) -> None:
        """Check what Llama would only find when it is built, or run."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"):
            size = getattr(self, name)
            _require(1 <= size < 2**31, f"{name} is {size:.6g}: give at least 1 and less than 2^31")
        _require(
            self.pad_token_id is None or abs(self.pad_token_id) < self.vocab_size,
            f"pad_token_id is {self.pad_token_id}: give one of the {self.vocab_size} tokens",
        )
        _require(
            heads >= 1 and self.hidden_size % heads == 0,
            f"{heads} attention heads do not divide hidden_size {self.hidden_size}: change one of the two",
        )
        _require(
            kv_heads >= 1 and heads % kv_heads == 0,
            f"{kv_heads} key/value heads do not divide {heads} attention heads: change one of the two",
        )
        head_dim = self.head_dim or self.hidden_size // heads
        _require(
            head_dim % 2 == 0,
            f"heads of width {head_dim} cannot be rotated: choose hidden_size and num_attention_heads for an even one",
        )
        _require(self.hidden_act in ACT2FN, f"hidden_act is {self.hidden_act!r:.80}: choose one of {', '.join(ACT2FN)}")
        self.attention_dropout = self.attention_dropout or 0.0
        _require(
            0 <= self.attention_dropout < 1,
            f"attention_dropout is {self.attention_dropout}: give a share of at least 0 and below 1",
        )

    def _check_numbers(self) -> None:
        for name in ("lam_input", "lam_post", "kappa", "gamma0"):
            value = getattr(self, name)
            _require(_is_positive(value), f"{name} {value} must be positive and finite")
        _require(self.alpha0 is None or _is_positive(self.alpha0), f"alpha0 {self.alpha0} must be positive and finite")
        _require(0 <= self.lam_last < math.inf, f"lam_last {self.lam_last} must be positive, or 0, and finite")
        _require(0 <= self.post_fraction <= 1, f"post_fraction is {self.post_fraction}: give a share between 0 and 1")
        for name in ("streams", "residual_warmup", "train_seq_len"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} is {value}: give at least 1")

    def _check_blocks(self) -> None:
        """Validate the per-block fields."""
        _require(
            self.calibration is None
            or (len(self.calibration) == self.num_hidden_layers and all(_is_positive(f) for f in self.calibration)),
            f"calibration is {self.calibration}: give a positive factor for each of {self.num_hidden_layers} blocks",
        )
        layers = [*(self.exact_layers or []), *(self.bounded_layers or [])]
        _require(
            all(1 <= layer <= self.num_hidden_layers for layer in layers)
            and (self.bounded_layers is None or len(self.bounded_layers) == 2)
            and list(self.bounded_layers or []) == sorted(self.bounded_layers or []),
            f"exact_layers {self.exact_layers} and bounded_layers {self.bounded_layers}: "
            f"give blocks of 1 to {self.num_hidden_layers}, and a first and a last one",
        )

    def carries_at(self, layer: int) -> bool:
        """True if block ``layer``, from 1, carries its attention site's mean square to its MLP site."""
        carries = bool(get_scheme(self.scheme).carried) and self.carried != "exact"
        return carries and layer not in (self.exact_layers or []) and is_bounded(self, layer)

    @classmethod
    def from_released(cls, released: dict, scheme: str | None = None) -> "NormlabConfig":
        """Map the configuration of a released checkpoint, a plain dict, to ours.

        Args:
            released: the BHyT release's configuration (2601.09719), or that of an OLMo 2 or a Qwen 3.
            scheme: used when the configuration has no ``norm_type`` (the LNS and Mix-LN releases choose it elsewhere).

        Raises:
            NormlabError: nothing names a scheme, or the model has a part that ours does not have.
        """
        _require(isinstance(released, dict), f"released is {released!r:.80}: give a configuration as a dict")
        if differs := _differs(released):
            raise NormlabError(f"{released.get('norm_type') or released.get('model_type')} cannot be loaded: {differs}")
        by_release = {kind: name for name, row in SCHEMES.items() for kind in row.released_as}
        norm_type, model_type = str(released.get("norm_type")), str(released.get("model_type"))
        scheme = scheme or by_release.get(norm_type) or by_release.get(model_type)
        if scheme is None:
            raise NormlabError(
                f"norm_type is {norm_type} and model_type {model_type}, neither one of {', '.join(by_release)}: "
                f"pass scheme=... ({', '.join(SCHEMES)})"
            )
        skipped = {"norm_type", "model_type", "architectures", "auto_map", *RELEASED_FIELDS, *RELEASED_OPTIONS}
        fields = {name: value for name, value in released.items() if name not in skipped}
        fields |= {
            ours: released[theirs] for theirs, ours in RELEASED_FIELDS.items() if released.get(theirs) is not None
        }
        fields |= _released_options(released)
        return cls(**{**fields, **FAMILIES.get(model_type, {}), "scheme": scheme})


def _released_options(released: dict) -> dict:
    """BHyT's options in our fields. The release counts blocks from 0."""
    options: dict = {}
    if schedule := released.get("bhyt_kappa_schedule"):
        options["kappa_schedule"] = RELEASED_SCHEDULES.get(schedule, schedule)
    if (method := released.get("var_approx_method")) not in (None, "baseline"):
        options["correction"] = method
    if factors := released.get("var_approx_calibration"):
        options["calibration"] = [*factors, *[1.0] * (released["num_hidden_layers"] - len(factors))]
    listed = str(released.get("var_approx_exact_layer_list") or "").split(",")
    exact = {*range(released.get("var_approx_exact_layers") or 0), *(int(text) for text in listed if text.strip())}
    if exact:
        options["exact_layers"] = sorted(block + 1 for block in exact)
    if blocks := released.get("bhyt_layer_range"):
        options["bounded_layers"] = [block + 1 for block in blocks]
    return options


def _differs(released: dict) -> str | None:
    """A part of a released model that no scheme changes and ours lacks. None if there is none."""
    if released.get("use_gamma_var"):
        return "its correction holds mean(gamma^2), ours does not"
    if released.get("bhyt_layer_range") and released.get("fallback_norm_type", "rms") != "rms":
        return f"blocks outside its range have the norm {released['fallback_norm_type']!r}, ours have RMSNorm"
    if str(released.get("model_type")).startswith("gemma3"):
        return (
            "five in six of Gemma 3's blocks attend within a window and turn by a RoPE base of their own; "
            "here all blocks attend to all that came before, by one base"
        )
    windows = released.get("use_sliding_window") or "sliding_attention" in (released.get("layer_types") or ())
    return "its attention is within a window; here it is to all that came before" if windows else None


_FIELDS = {field.name for field in dataclasses.fields(NormlabConfig)}
