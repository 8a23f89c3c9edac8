"""TransformerLens: a bridge for every scheme, and direct logit attribution that treats the final norm correctly.

to_bridge(model)                 the model as a TransformerLens `TransformerBridge`, for caching, patching and steering
direct_logit_attribution(...)    what the embeddings, each attention and each MLP add to a logit
component_effects(...)           what a small change of each of them does to it, measured

TransformerLens knows Llama's norms and would measure ours as if they were RMSNorm. Here each norm is wrapped by a
component that runs the norm itself
and shows only what it computes: `hook_in`, `hook_out`, and `hook_scale` = sqrt(ms + eps) where there is such a divisor
(the carried one at a site that carries it; none in DyT). There is no `hook_normalized`. An edited `hook_scale` is used
by the norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from normlab.errors import NormlabError
from normlab.models.block import is_llama_but_for_norms
from normlab.norms import Norm
from normlab.norms.base import mean_square as exact_mean_square
from normlab.schemes import get_scheme

try:
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.hook_points import HookPoint
    from transformer_lens.model_bridge.generalized_components import BlockBridge
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.model_bridge.supported_architectures.llama import LlamaArchitectureAdapter
except ImportError as error:  # pragma: no cover - said in one line instead of a traceback
    raise NormlabError("the bridge needs TransformerLens: pip install 'normlab[lens]'") from error

if TYPE_CHECKING:
    import pandas

ARCHITECTURE = "NormlabForCausalLM"
METHODS = ("frozen", "jacobian", "linear")
# Place of a norm in the block -> its name in TransformerLens. A norm of the residual sum (Post-LN) takes ln2's and its
# own name.
NAMES = {
    "attn_in": "ln1",
    "attn_out": "ln1_post",
    "attn_sum": "ln2",
    "mlp_in": "ln2",
    "mlp_out": "ln2_post",
    "mlp_sum": "ln2_sum",
}


class NormBridge(GeneralizedComponent):
    """Runs one of our norms as it is, between hooks that show what it reads, divides by and returns."""

    def set_original_component(self, original_component: torch.nn.Module) -> None:
        super().set_original_component(original_component)
        if isinstance(original_component, Norm) and original_component.takes_mean_square:
            self.hook_scale = HookPoint()

    def forward(self, x: Tensor, mean_square: Tensor | None = None, return_mean_square: bool = False) -> Any:
        """As the norm's own call; an edit of `hook_scale` takes effect as the statistic that the norm uses."""
        norm: Any = self.original_component
        x = self.hook_in(x)
        options: dict[str, Any] = {} if mean_square is None else {"mean_square": mean_square}
        if norm.takes_mean_square:
            if self.hook_scale.has_hooks(dir="both"):
                used = exact_mean_square(x) if mean_square is None else mean_square
                scale = (used + norm.eps).sqrt()
                hooked = self.hook_scale(scale)
                if hooked is not scale or self.hook_scale.has_hooks(dir="bwd"):
                    options["mean_square"] = hooked.square() - norm.eps
            if return_mean_square:
                y, ms = norm(x, return_mean_square=True, **options)
                return self.hook_out(y), ms
        return self.hook_out(norm(x, **options))


class _Block(BlockBridge):
    """TransformerLens's block; a type of its own because a Post-LN block has no norm before its MLP."""


class NormlabArchitectureAdapter(LlamaArchitectureAdapter):
    """Llama's parts, with the norms of our blocks (set by `to_bridge`, which knows the model's scheme)."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.supports_fold_ln = False  # a tanh stands between gamma and the divisor's fold
        self.supports_center_writing_weights = False  # neither RMS nor tanh ignores a shift

    def use_norms(self, attributes: dict[str, str]) -> None:
        """Wrap the norms of a block: TransformerLens's name -> attribute in our block. They may be absent in some
        blocks (Mix-LN)."""
        mapping: Any = self.component_mapping
        parts = {name: component for name, component in mapping["blocks"].submodules.items() if name in ("attn", "mlp")}
        norms = {
            name: NormBridge(name=attribute, config=self.cfg, optional=True) for name, attribute in attributes.items()
        }
        mapping["blocks"] = _Block(name="model.layers", submodules=norms | parts)
        mapping["ln_final"] = NormBridge(name="model.norm", config=self.cfg)


def to_bridge(model: Any, tokenizer: Any = None) -> Any:
    """A TransformerLens bridge around a NormlabForCausalLM, for any scheme.

    The bridge computes attention step by step, so its logits are bit-identical to the model's own under
    `attn_implementation="eager"` (which the model is switched to). It wraps the model in place: use the bridge from
    here on. Probes work on it. Folding norms into weights is switched off.

    Args:
        model: NormlabForCausalLM; not another architecture.
        tokenizer: lets the bridge take text.

    Raises:
        NormlabError: TransformerLens is not installed, or `model` is another architecture.
    """
    if type(model).__name__ != ARCHITECTURE:
        raise NormlabError(
            f"to_bridge takes a {ARCHITECTURE}, not {type(model).__name__}: for others use TransformerLens itself"
        )
    config = model.config
    scheme = get_scheme(config.scheme)
    if not is_llama_but_for_norms(config):
        raise NormlabError(
            f"scheme {scheme.name} changes more than a block's norms: TransformerLens's parts of Llama are not its own"
        )
    depth = config.num_hidden_layers
    layouts = [scheme.layout_at(layer, config) for layer in range(1, depth + 1)]
    attributes = {NAMES[place]: attribute for layout in layouts for place, attribute in layout.places()}

    def use_norms(adapter: Any) -> None:
        adapter.use_norms(attributes)

    ArchitectureAdapterFactory.register_adapter(ARCHITECTURE, NormlabArchitectureAdapter)
    model.set_attn_implementation("eager")
    bridge = build_bridge_from_module(
        model,
        ARCHITECTURE,
        hf_config=config,
        tokenizer=tokenizer,
        post_adapter_hook=use_norms,
    )
    for block, layout in zip(bridge.blocks, layouts, strict=True):
        _name_hooks(block, layout)
    return bridge


def _name_hooks(block: Any, layout: Any) -> None:
    """Point TransformerLens's usual hook names at what they mean in this layout."""
    mid = "ln2.hook_out" if layout.attn_sum else "ln2.hook_in"  # Post-LN: the MLP adds to the normalised sum
    attention = "ln1_post.hook_out" if layout.attn_out else "attn.hook_out"
    mlp = "ln2_post.hook_out" if layout.mlp_out else "mlp.hook_out"
    block.hook_aliases = dict(block.hook_aliases) | {
        "hook_resid_mid": mid,
        "hook_attn_out": attention,
        "hook_mlp_out": mlp,
    }
    block._register_aliases()


@torch.no_grad()
def direct_logit_attribution(
    bridge: Any, tokens: Tensor, answers: Tensor, *, against: Tensor | None = None, method: str = "frozen"
) -> pandas.DataFrame:
    """What each component writes towards the logits of `answers` at the last position, through the final norm.

    The last block's output is a sum, x = embeddings + every attention + every MLP (after their output norms, where
    there are any). The logit is w . norm(x), and norm is not linear, so a component's share depends on what is held
    fixed:

    - "frozen": everything that depends on the whole of x: the divisor of an RMS norm or LayerNorm and, in a tanh norm,
      each feature's secant y_j/x_j = gamma_j tanh(z_j)/x_j. The shares add up to the logit exactly. It answers: who is
      the logit made of?
    - "jacobian": shares are dlogit/dx . component, exact to first order for a small change of the component, divisor
      and tanh slope included. They do not add up to the logit (a scale-invariant norm's add up to zero); what is
      missing is the row `remainder`. It answers: whose small change would move the logit?
    - "linear": a tanh norm's divisor is held fixed and tanh(z) taken for z, as if it were an RMSNorm. The shares are
      those of a logit that the model does not have: for comparison only.

    Where a tanh is saturated the first two differ: a feature can make up a logit (secant > 0) that no component can
    still move (slope ~ 0).

    Args:
        bridge: from `to_bridge`.
        tokens: (batch, length), without padding.
        answers: (batch,) token ids.
        against: (batch,) token ids whose logits are subtracted: softmax ignores a constant, so only differences mean
            something.
        method: "frozen", "jacobian" or "linear".

    Returns:
        One row a component: `component layer contribution` (mean over the batch): `embed`, `attn` and `mlp` by layer,
        `bias` (a LayerNorm's), and `remainder`; `.attrs["logit"]` is the mean logit or difference, `.attrs["name"]`
        which of the two.

    Raises:
        NormlabError: unknown method, "linear" of a norm without tanh, shapes that do not fit, or a Post-LN scheme,
            where the stream is no sum.
    """
    import pandas

    if method not in METHODS:
        raise NormlabError(f"unknown method {method!r}: choose {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    if against is not None:
        table, other = (direct_logit_attribution(bridge, tokens, ids, method=method) for ids in (answers, against))
        table["contribution"] -= other["contribution"]
        table.attrs |= {"logit": table.attrs["logit"] - other.attrs["logit"], "name": "logit difference"}
        return table
    end = _last_position(bridge, tokens, answers)
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
    beta = getattr(norm, "bias", None) if method == "frozen" else None
    bias = 0.0 if beta is None else float((beta * end.direction).sum(-1).mean())
    rows += [
        ("bias", len(bridge.blocks), bias),
        ("remainder", len(bridge.blocks), float((end.logit - shares.sum(0)).mean()) - bias),
    ]
    table = pandas.DataFrame(rows, columns=["component", "layer", "contribution"])
    table.attrs |= {"logit": float(end.logit.mean()), "name": "logit"}
    return table


@torch.no_grad()
def component_effects(
    bridge: Any, tokens: Tensor, answers: Tensor, *, against: Tensor | None = None, change: float = 0.01
) -> pandas.DataFrame:
    """What a small change of each component does to the logits of `answers`, measured: the component is made larger and
    smaller by the share `change` at the final norm's input.

    Args:
        bridge, tokens, answers, against: as for `direct_logit_attribution`.

    Returns:
        One row a component: `component layer effect`, the change of the logit (mean over the batch) per relative change
        of the component.
    """
    import pandas

    if against is not None:
        table, other = (component_effects(bridge, tokens, ids, change=change) for ids in (answers, against))
        return table.assign(effect=table["effect"] - other["effect"])
    end = _last_position(bridge, tokens, answers)

    def logit(x: Tensor) -> float:
        return float((end.norm(x) * end.direction).sum(-1).mean())

    effects = [(logit(end.x + change * part) - logit(end.x - change * part)) / (2 * change) for part in end.parts]
    rows = [(*place, effect) for place, effect in zip(end.places, effects, strict=True)]
    return pandas.DataFrame(rows, columns=["component", "layer", "effect"])


class _End(NamedTuple):
    """The last position: names of the components, what each wrote (components, batch, d), their sum x (batch, d), the
    final norm, the direction that is read (batch, d), and the logit (batch,)."""

    places: list[tuple[str, int]]
    parts: Tensor
    x: Tensor
    norm: Any
    direction: Tensor
    logit: Tensor


def _last_position(bridge: Any, tokens: Tensor, answers: Tensor) -> _End:
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
    direction = bridge.unembed.original_component.weight[answers].float()
    logit = logits[:, -1].gather(1, answers[:, None])[:, 0].float()
    x, norm = cache[stream.name][:, -1].float(), bridge.ln_final.original_component
    return _End(list(hooks), parts, x, norm, direction, logit)
