"""Who trains at which depth, and what the schemes' papers say of theirs."""

from __future__ import annotations

import pandas as pd
import pytest
from figures_helpers import UNIGRAM, table

from normlab.analysis import limit
from normlab.analysis.published import load_published
from normlab.schemes import SCHEMES


def test_a_row_a_scheme_and_a_column_a_depth_say_who_trains():
    statuses = {("bhyt", 4): "diverged", ("pre_rmsnorm", 4): "not_learned"}
    runs = table(statuses=statuses, seeds=(0,))
    found = limit.by_depth(runs, load_published())
    deep = found["4 blocks"]
    assert deep[SCHEMES["bhyt"].title] == "diverges"
    assert deep[SCHEMES["pre_rmsnorm"].title].endswith(", stalls")
    assert deep[SCHEMES["bhyt_linear"].title] == "4.300, trains"
    assert list(found.index) == [SCHEMES[name].title for name in SCHEMES if name in set(runs["scheme"])]


def test_the_margin_is_below_the_unigram_entropy():
    about = pd.DataFrame(
        {"scheme": ["lns", "bhyt"], "status": "not_learned", "unigram_entropy": UNIGRAM}
        | {"eval_loss": [UNIGRAM - limit.MARGIN - 1e-6, UNIGRAM - limit.MARGIN + 1e-6]}
    )
    assert limit.outcomes(about)["outcome"].to_dict() == {"lns": limit.TRAINS, "bhyt": limit.STALLS}


def test_of_several_models_of_a_paper_the_deepest_stands_beside_its_scheme():
    rows = {"paper": "P", "arxiv": "0000.00000", "scheme": "lns", "metric": limit.DEEPEST, "value": [12.0, 1000.0]}
    published = pd.DataFrame(rows | {"note": ["shallow", "deep"]})
    found = limit.by_depth(table(seeds=(0,)), published).loc[SCHEMES["lns"].title]
    assert found["its paper's deepest"] == "1,000" and found["what the paper says"] == "deep"
    assert limit.by_depth(table(seeds=(0,)), published)["paper"].tolist().count("") == len(set(table()["scheme"])) - 1


def test_claims_on_depth_name_their_place_and_what_was_trained():
    claims = load_published().query("metric == @limit.DEEPEST")
    assert claims["scheme"].is_unique and claims[["where", "model", "note"]].notna().all(axis=None)
    assert (claims["value"] == claims["depth"]).all() and claims["value"].ge(2).all()
    assert claims.set_index("scheme")["value"]["deepnorm"] == pytest.approx(1000)
