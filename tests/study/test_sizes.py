"""Claims at two sizes: where both say the same, where the outcome turns, and where one of them cannot say."""

import pandas as pd
from figures_helpers import table

from normlab.analysis import claims
from normlab.analysis.claims import Claim
from normlab.study import sizes

ASKED = [
    Claim("smaller", "lns", "pre_rmsnorm", "token_l2_mean", "below"),
    Claim("larger", "lns", "pre_rmsnorm", "token_l2_mean", "above"),
    Claim("absent", "dyt", "pre_rmsnorm", "loss", "below"),
]


def test_a_claim_turns_where_one_size_says_so_and_the_other_the_opposite():
    small, large = table(("pre_rmsnorm", "lns"), (4,), range(4)), table(("pre_rmsnorm", "lns"), (8,), (0,))
    of_lns = large["scheme"].eq("lns") & large["metric"].eq("token_l2_mean")
    turned = large.assign(value=large["value"].mask(of_lns, 100 * large["value"]))
    same, other = (sizes.beside(claims.tested(small, ASKED), claims.tested(runs, ASKED)) for runs in (large, turned))
    assert same.index.name == "claim" and list(same) == ["4 blocks", "8 blocks", "sizes"]
    assert same["sizes"].tolist() == ["agree", "agree", ""] and other["sizes"].tolist() == ["turn", "turn", ""]
    seeds, single = same.loc["smaller", ["4 blocks", "8 blocks"]]
    assert seeds.startswith("×") and seeds.endswith("at rate 0.001: holds")
    assert single.endswith("at rate 0.001: as claimed, one seed") and same.loc["absent", "4 blocks"] == "not run"
    without = " On 1 one of them is level or cannot decide."
    assert sizes.agreement(same) == "Of 3 claims the sizes agree on 2." + without
    assert sizes.agreement(other).endswith("on 0. 2 turn: “smaller”; “larger”." + without)


def test_what_is_undecided_at_one_size_is_not_compared():
    said = pd.DataFrame({"rates": "0.001", "ours": "+0.01", "seeds": 4, "says": ["undecided"]}, index=["near"])
    sure = said.assign(says="holds").rename_axis("at 8 blocks")
    assert sizes.beside(said.rename_axis("at 4 blocks"), sure)["sizes"].tolist() == [""]
