"""TransformerLens: a bridge for every scheme, and direct logit attribution through the final norm.

to_bridge(model)                 the model as a TransformerLens `TransformerBridge`, for caching, patching and steering
direct_logit_attribution(...)    contribution of the embeddings, each attention and each MLP to a logit
component_effects(...)           measured effect of a small change of each of them

TransformerLens knows Llama's norms and would measure ours as RMSNorms. Here each norm is wrapped by a component that
runs the norm and shows what it computes. The hooks are `hook_in`, `hook_out` and, where there is such a divisor,
`hook_scale` = sqrt(ms + eps). At a site with a carried statistic that is the carried one; DyT has none. There is no
`hook_normalized`. The norm uses an edited `hook_scale`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from normlab.errors import MissingPackage, NormlabError
from normlab.models.block import is_llama_but_for_norms
from normlab.norms import Norm
from normlab.norms.base import mean_square as exact_mean_square

try:
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.hook_points import HookPoint
    from transformer_lens.model_bridge.generalized_components import BlockBridge
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.model_bridge.supported_architectures.llama import LlamaArchitectureAdapter
except ImportError as error:  # pragma: no cover - said in one line instead of a traceback
    raise MissingPackage("the bridge needs TransformerLens: pip install 'normlab[lens]'") from error

if TYPE_CHECKING:
    import pandas

ARCHITECTURE = "NormlabForCausalLM"
METHODS = ("frozen", "jacobian", "linear")
# Place of a norm in the block -> its name in TransformerLens.
NAMES = {
    "attn_in": "ln1",
    "attn_out": "ln1_post",
    "attn_sum": "ln2",
    "mlp_in": "ln2",
    "mlp_out": "ln2_post",
    "mlp_sum": "ln2_sum",
}


class NormBridge(GeneralizedComponent):
    """One of our norms between hooks that show what it reads, divides by and returns."""

    def set_original_component(self, original_component: torch.nn.Module) -> None:
        super().set_original_component(original_component)
        if isinstance(original_component, Norm) and original_component.takes_mean_square:
            self.hook_scale = HookPoint()

    def forward(self, x: Tensor, mean_square: Tensor | None = None, return_mean_square: bool = False) -> Any:
        """Call the norm. An edit of `hook_scale`, in place too, changes the statistic that it uses."""
        norm: Any = self.original_component
        x = self.hook_in(x)
        options: dict[str, Any] = {} if mean_square is None else {"mean_square": mean_square}
        if norm.takes_mean_square:
            if self.hook_scale.has_hooks(dir="both"):
                used = exact_mean_square(x) if mean_square is None else mean_square
                scale = (used + norm.eps).sqrt()
                shown = scale.clone()  # which a hook may write to
                hooked = self.hook_scale(shown)
                is_edited = hooked is not shown or not torch.equal(hooked, scale)
                if is_edited or self.hook_scale.has_hooks(dir="bwd"):
                    options["mean_square"] = hooked.square() - norm.eps
            if return_mean_square:
                y, ms = norm(x, return_mean_square=True, **options)
                return self.hook_out(y), ms
        return self.hook_out(norm(x, **options))


class _Block(BlockBridge):
    """TransformerLens's block, as another type because a Post-LN block has no norm before its MLP.

    TransformerLens's usual hook names stand for the hooks of this block's layout.
    """

    def set_original_component(self, original_component: torch.nn.Module) -> None:
        super().set_original_component(original_component)
        layout: Any = original_component.layout
        self.hook_aliases = dict(self.hook_aliases) | {
            "hook_resid_mid": "ln2.hook_out" if layout.attn_sum else "ln2.hook_in",  # Post-LN: what the MLP adds to
            "hook_attn_out": "ln1_post.hook_out" if layout.attn_out else "attn.hook_out",
            "hook_mlp_out": "ln2_post.hook_out" if layout.mlp_out else "mlp.hook_out",
        }


class NormlabArchitectureAdapter(LlamaArchitectureAdapter):
    """Llama's parts, with the norms of our blocks.

    TransformerLens finds it by the entry point `transformer_lens.architectures` of an installed normlab.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.supports_fold_ln = False  # there is a tanh between gamma and the divisor
        self.supports_center_writing_weights = False  # neither RMS nor tanh ignores a shift

    def prepare_model(self, hf_model: Any) -> None:
        """Wrap the norms of the model's blocks, some of which a block may lack (Mix-LN)."""
        if not is_llama_but_for_norms(hf_model.config):
            scheme = hf_model.config.scheme
            raise NormlabError(
                f"scheme {scheme} changes more than a block's norms: TransformerLens's parts of Llama do not fit it"
            )
        hf_model.set_attn_implementation("eager")
        mapping: Any = self.component_mapping
        parts = {name: component for name, component in mapping["blocks"].submodules.items() if name in ("attn", "mlp")}
        norms = {
            NAMES[place]: NormBridge(name=attribute, config=self.cfg, optional=True)
            for block in hf_model.model.layers
            for place, attribute in block.layout.places()
        }
        mapping["blocks"] = _Block(name="model.layers", submodules=norms | parts)
        mapping["ln_final"] = NormBridge(name="model.norm", config=self.cfg)


def to_bridge(model: Any, tokenizer: Any = None) -> Any:
    """A TransformerLens bridge around a NormlabForCausalLM, for any scheme.

    The model is wrapped in place and switched to `attn_implementation="eager"`. TransformerLens computes attention by
    itself, step by step. It may round otherwise: some models' logits differ in the last bit. All else is the model's
    own. Use the bridge from here on. Probes work on it. Folding norms into weights is switched off.

    Args:
        model: NormlabForCausalLM; not another architecture.
        tokenizer: needed for text input.

    Raises:
        NormlabError: TransformerLens is not installed, or `model` is another architecture.
    """
    if type(model).__name__ != ARCHITECTURE:
        raise NormlabError(
            f"to_bridge takes a {ARCHITECTURE}, not {type(model).__name__}: for others use TransformerLens itself"
        )
    ArchitectureAdapterFactory.discover_entry_points()
    ArchitectureAdapterFactory.register_adapter(ARCHITECTURE, NormlabArchitectureAdapter)  # also where not installed
    return build_bridge_from_module(model, ARCHITECTURE, hf_config=model.config, tokenizer=tokenizer)


@torch.no_grad()
def direct_logit_attribution(
    bridge: Any, tokens: Tensor, answers: Tensor, *, against: Tensor | None = None, method: str = "frozen"
) -> pandas.DataFrame:
    """Contribution of each component to the logits of `answers` at the last position, through the final norm.

    The last block's output is a sum: x = embeddings + every attention + every MLP (after their output norms). The logit
    is ``w . norm(x)``, and norm is not linear. So a component's share depends on what is held fixed.

    "frozen" holds fixed what depends on all of x: the divisor of an RMS norm or LayerNorm. In a tanh norm it is each
    feature's secant ``y_j/x_j = gamma_j tanh(z_j)/x_j``. The shares sum to the logit exactly. It answers which
    components make up the logit.

    "jacobian" takes ``dlogit/dx . component``. This is exact to first order for a small change of the component, with
    divisor and tanh slope. The shares do not sum to the logit; a scale-invariant norm's sum to zero. The rest is the
    row `remainder`. It answers which component's small change would move the logit.

    "linear" holds a tanh norm's divisor fixed and takes z for tanh(z), as in an RMSNorm. These are shares of a logit
    that the model does not have, for comparison only.

    The first two differ where a tanh is saturated. A feature can then make up a logit (secant > 0) that no component
    can move (slope ~ 0).

    Args:
        bridge: from `to_bridge`.
        tokens: ``(batch, length)``, without padding.
        answers: ``(batch,)`` token ids.
        against: ``(batch,)`` token ids whose logits are subtracted. Softmax ignores a constant, so only differences
            matter.
        method: "frozen", "jacobian" or "linear".

    Returns:
        One row per component: `component layer contribution`, the mean over the batch. The components are `embed`,
        `attn` and `mlp` by layer, `bias` (the norm's output at x = 0) and `remainder`. `.attrs["logit"]` is the mean
        logit or difference, and `.attrs["name"]` says which.

    Raises:
        NormlabError: unknown method, "linear" for a norm without tanh, shapes that do not fit, or a Post-LN scheme,
            where the stream is not a sum.
    """
    import pandas

    if method not in METHODS:
        raise NormlabError(f"unknown method {method!r}: choose {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    end = _last_position(bridge, tokens, answers, against)
    norm, x = end.norm, end.x
    if method == "frozen":
        shares = (norm.shares(x, end.parts) * end.direction).sum(-1)
    elif method == "linear":
        if not hasattr(norm, "tanh_input"):
            raise NormlabError("the final norm has no tanh to ignore: frozen shares are those of a linear norm")
        unit = norm.gamma() * norm.tanh_input(x) / x  # x is never exactly zero in a stream of floats
        shares = (unit * end.parts * end.direction).sum(-1)
    else:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((norm(leaf) * end.direction).sum(), leaf)
        shares = (end.parts * slope).sum(-1)
    rows = [(*place, float(share.mean())) for place, share in zip(end.places, shares, strict=True)]
    constant = norm.constant() if method == "frozen" else None
    bias = 0.0 if constant is None else float((constant * end.direction).sum(-1).mean())
    rows += [
        ("bias", len(bridge.blocks), bias),
        ("remainder", len(bridge.blocks), float((end.logit - shares.sum(0)).mean()) - bias),
    ]
    table = pandas.DataFrame(rows, columns=["component", "layer", "contribution"])
    table.attrs |= {"logit": float(end.logit.mean()), "name": "logit" if against is None else "logit difference"}
    return table


@torch.no_grad()
def component_effects(
    bridge: Any, tokens: Tensor, answers: Tensor, *, against: Tensor | None = None, change: float = 0.01
) -> pandas.DataFrame:
    """Measure what a small change of each component does to the logits of `answers`.

    The component is made larger and smaller by the share `change` at the final norm's input.

    Args:
        bridge, tokens, answers, against: as for `direct_logit_attribution`.

    Returns:
        One row per component: `component layer effect`. The effect is the change of the logit per relative change of
        the component, the mean over the batch.
    """
    import pandas

    end = _last_position(bridge, tokens, answers, against)

    def logit(x: Tensor) -> float:
        return float((end.norm(x) * end.direction).sum(-1).mean())

    effects = [(logit(end.x + change * part) - logit(end.x - change * part)) / (2 * change) for part in end.parts]
    rows = [(*place, effect) for place, effect in zip(end.places, effects, strict=True)]
    return pandas.DataFrame(rows, columns=["component", "layer", "effect"])


class _End(NamedTuple):
    """The last position."""

    places: list[tuple[str, int]]  # of the components
    parts: Tensor  # what each wrote, (components, batch, d)
    x: Tensor  # their sum, (batch, d)
    norm: Any  # the final norm
    direction: Tensor  # that the logit reads, (batch, d)
    logit: Tensor  # or the difference, (batch,)


def _last_position(bridge: Any, tokens: Tensor, answers: Tensor, against: Tensor | None) -> _End:
    if tokens.ndim != 2 or answers.shape != tokens.shape[:1]:
        raise NormlabError(
            f"tokens are {tuple(tokens.shape)} and answers {tuple(answers.shape)}: give (batch, length) and (batch,)"
        )
    if any(hasattr(block, "ln2_sum") for block in bridge.blocks):
        raise NormlabError("a Post-LN block normalises the residual sum: its final stream is no sum of components")
    hooks = {("embed", 0): bridge.blocks[0].hook_in}
    for layer, block in enumerate(bridge.blocks, start=1):
        hooks |= {("attn", layer): block.hook_attn_out, ("mlp", layer): block.hook_mlp_out}
    stream = bridge.ln_final.hook_in
    wanted = {hook.name for hook in (*hooks.values(), stream)}
    logits, cache = bridge.run_with_cache(tokens, names_filter=lambda name: name in wanted)
    parts = torch.stack([cache[hook.name][:, -1] for hook in hooks.values()]).float()
    matrix, last = bridge.unembed.original_component.weight, logits[:, -1].float()
    direction, logit = matrix[answers].float(), last.gather(1, answers[:, None])[:, 0]
    if against is not None:
        direction, logit = direction - matrix[against].float(), logit - last.gather(1, against[:, None])[:, 0]
    x, norm = cache[stream.name][:, -1].float(), bridge.ln_final.original_component
    return _End(list(hooks), parts, x, norm, direction, logit)
