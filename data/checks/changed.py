"""Schemes of the league with one thing changed: what a scheme's loss there owes to its ends, its start or the recipe.

normlab league --add data/checks/changed.py:NAME
"""

import math
from dataclasses import replace

from normlab.schemes import SCHEMES, Scheme
from normlab.schemes import builders as b
from normlab.schemes.scheme import Ends


def changed(scheme: str, suffix: str, what: str, **fields: object) -> Scheme:
    row = SCHEMES[scheme]
    name, title = f"{scheme}_{suffix}", f"{row.title}, {what}"
    return replace(row, name=name, title=title, unpredicted="one thing differs from a scheme", **fields)


# The leaders' embeddings enter a stream of size 1 instead of 0.02, or their logits have a larger scale.
LARGE_EMBEDDINGS = changed("pre_rmsnorm", "large", "embeddings times sqrt(d)", ends=Ends(embedding_scale=math.sqrt))
LARGE_LOGITS = changed("pre_rmsnorm", "logits", "logits times 2", ends=Ends(logit_factor=lambda config: 2.0))
# Nothing normalizes what ResiDual's head reads.
NORMALIZED_END = changed("residual_dual", "normalized", "a final norm", norm=b.rms)
# As MiniMax-01's report has it. Every matrix of the league starts from 0.02 unless its scheme says otherwise.
MINIMAX_XAVIER = changed(
    "minimax", "xavier", "Xavier times (8L)^(-1/4)", init=b.xavier(lambda depth: (8 * depth) ** -0.25)
)
POST_LN_XAVIER = changed("post_rmsnorm", "xavier", "Xavier", init=b.xavier(lambda depth: 1.0))
