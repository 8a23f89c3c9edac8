"""Which norm is which, decided by what runs when: no module names involved.

Inside one block, in order of execution:

    a norm before attention                               -> `attn_norm_in`   (Pre-LN; a second one is a parallel MLP's:
    `mlp_norm_in`) a norm whose input is attention's output itself       -> `attn_out_norm_in` (Peri-LN, OLMo-2, Gemma:
    an output norm) another norm between attention and the MLP            -> `mlp_norm_in`, or, when attention had no
    norm before it, the
                                                             norm of attention's residual sum: `attn_norm_in` (Post-LN)
    a norm whose input is the MLP's output itself         -> `mlp_out_norm_in`
    another norm after the MLP                            -> `mlp_norm_in` (Post-LN)

So `attn_norm_in` and `mlp_norm_in` are always the residual-stream tensor that a branch's norm reads: x before the
branch in Pre-LN, x + f(x) after it in Post-LN. In a block where no attention is found, norms are `norm_1_in`,
`norm_2_in`, ... as they run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.sites import Block


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    """True when both are the same values in memory (a view counts). Both must be alive: freed memory is soon used
    again."""
    if a is None or b is None:
        return False
    return a is b or (a.device == b.device and a.numel() == b.numel() and a.data_ptr() == b.data_ptr())


def read_by(block: nn.Module, state: Tensor) -> Tensor:
    """What a block reads of the state that it is given: all of it, or, of several streams, what its ``enter`` says."""
    enter = getattr(block, "enter", None)
    if enter is None:
        return state
    with torch.no_grad():
        return enter(state)


class BlockFlow:
    """What has run so far in one block during one forward pass. Holds a few of its activations, until the block ends.

    `attention_add` and `mlp_add` are what the branches add to the residual stream: their output, or its output norm's.
    `mlp_stream` is what the MLP's update is added to, when a Post-LN norm has replaced h + attn.
    """

    def __init__(self, block: Block, entered: Tensor, keeps_branches: bool):
        self.block = block
        self.entered = entered
        self.entered_version = None if entered.is_inference() else entered._version
        self.keeps_branches = keeps_branches
        self.attention_out: Tensor | None = None
        self.mlp_out: Tensor | None = None
        self.attention_add: Tensor | None = None
        self.mlp_add: Tensor | None = None
        self.mlp_stream: Tensor | None = None
        self.attention_has_norm = False
        self.seen_norms = 0

    def branch_done(self, branch: str, output: Tensor) -> None:
        """Attention or MLP has run (the first call counts: a shared module may run again)."""
        if getattr(self, f"{branch}_out") is None:
            setattr(self, f"{branch}_out", output)
            if self.keeps_branches:  # a copy: many models add the residual to it in place
                setattr(self, f"{branch}_add", output.detach().clone())

    def check_entered(self) -> None:
        """Raises `NormlabError` when the block has written into its own input, so that update and input cannot be told
        apart."""
        if self.entered_version is not None and self.entered._version != self.entered_version:
            raise NormlabError(
                f"block {self.block.name} writes into its own input in place: relative_contribution, update_cosine, "
                "block_influence and update_effective_rank cannot be taken there; leave them out of `metrics`"
            )

    def norm_done(self, site: str, output: Tensor) -> None:
        """A norm at `site` has run."""
        if site == "attn_out_norm_in":
            self.attention_add = output
        elif site == "mlp_out_norm_in":
            self.mlp_add = output
        elif site == "attn_norm_in" and self.attention_out is not None:
            self.mlp_stream = output

    def norm_site(self, x: Tensor) -> str:
        """The site of a norm that is about to read `x`."""
        self.seen_norms += 1
        if self.block.attention is None:
            return f"norm_{self.seen_norms}_in"
        if self.mlp_out is not None and self.attention_out is not None:
            return "mlp_out_norm_in" if same_tensor(x, self.mlp_out) else "mlp_norm_in"
        if self.attention_out is None:
            if self.attention_has_norm:
                return "mlp_norm_in"
            self.attention_has_norm = True
            return "attn_norm_in"
        if same_tensor(x, self.attention_out):
            return "attn_out_norm_in"
        return "mlp_norm_in" if self.attention_has_norm else "attn_norm_in"
