"""Schemes of the league with twice the logits: do they still lead Pre-LN, once its logits are as large?

normlab league --add data/checks/logits.py:NAME
"""

from dataclasses import replace

from normlab.schemes import SCHEMES, Scheme


def doubled(scheme: str) -> Scheme:
    row = SCHEMES[scheme]
    return replace(
        row,
        name=f"{scheme}_logits",
        title=f"{row.title}, logits times 2",
        unpredicted="one thing differs from a scheme",
        ends=replace(row.ends, logit_factor=lambda config: 2.0),
    )


LNS = doubled("lns")
GATED_NORM = doubled("gatednorm")
BHYT = doubled("bhyt")
