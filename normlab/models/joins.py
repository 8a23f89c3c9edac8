"""The block of the schemes whose branches do not simply add to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.models.block import NormlabDecoderLayer
from normlab.models.branches import changes_attention, changes_mlp
from normlab.models.ends import changes_embeddings, changes_head
from normlab.residuals import Residual
from normlab.schemes import Sublayer, centred, get_scheme


class JoiningDecoderLayer(NormlabDecoderLayer):
    """One block: state = join(state, out(f(in(enter(state)))), sum) for attention, then for the MLP.

    ``attn_residual`` and ``mlp_residual`` are the scheme's rules (`normlab.residuals`). What comes in and goes out is
    the whole state, one tensor; of several streams, ``enter`` shows what the block reads. What probes call a branch's
    contribution is its output before the rule weighs it.
    """

    def __init__(
        self, config: Any, layer_idx: int, attention: nn.Module | None = None, mlp: nn.Module | None = None
    ) -> None:
        super().__init__(config, layer_idx, attention, mlp)
        rule = get_scheme(config.scheme).residual
        if rule is None or self.carried:
            raise NormlabError(f"scheme {config.scheme} joins its branches by plain addition: use NormlabDecoderLayer")
        self.attn_residual = centred(rule(Sublayer("attn", layer_idx + 1, config)), config)
        self.mlp_residual = centred(rule(Sublayer("mlp", layer_idx + 1, config)), config)
        for part in ("attn", "mlp"):  # of two norms of the stream, probes' usual site is the branch's
            own, outer = self.norm_at(f"{part}_in"), self.norm_at(f"{part}_sum")
            if own is not None and outer is not None:
                outer.probe_site = f"{part}_sum_norm_in"

    def enter(self, state: Tensor) -> Tensor:
        """What the block's first branch reads of the state that a block before it, or the embeddings, gave."""
        return self.attn_residual.enter(self.attn_residual.open(state))

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:  # type: ignore[override]
        state = self.attn_residual.open(hidden_states)
        state = self._sublayer(
            "attn", self.attn_residual, state, lambda x: self.self_attn(hidden_states=x, **arguments)[0]
        )
        return self._sublayer("mlp", self.mlp_residual, state, self.mlp)

    def _sublayer(self, part: str, rule: Residual, state: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        x = self._normalize(f"{part}_in", rule.enter(state))
        x = self._normalize(f"{part}_out", branch(x))
        return rule.join(state, x, lambda total: self._normalize(f"{part}_sum", total))


class FinalNorm(nn.Module):
    """norm(leave(state)): one stream of several, then the final norm."""

    probe_role = "residual"  # the norm is the one inside

    def __init__(self, leave: Residual, norm: nn.Module) -> None:
        super().__init__()
        self.leave = leave
        self.norm = norm

    def forward(self, state: Tensor) -> Tensor:
        return self.norm(self.leave(state))


def decoder_layer(
    config: Any, layer_idx: int, attention: nn.Module | None = None, mlp: nn.Module | None = None
) -> NormlabDecoderLayer:
    """The scheme's block."""
    joins = get_scheme(config.scheme).residual is not None
    return (JoiningDecoderLayer if joins else NormlabDecoderLayer)(config, layer_idx, attention, mlp)


def is_llama_but_for_norms(config: Any) -> bool:
    """Whether the model is Llama's parts, joined by plain addition, with norms and embedding scale of its own."""
    scheme = get_scheme(config.scheme)
    inside = changes_attention(config) or changes_mlp(config)
    return scheme.residual is None and not (inside or changes_embeddings(config) or changes_head(config))
