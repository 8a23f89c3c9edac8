"""Published values: they are what the papers print, each row says where it is from, and bad folders are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from normlab.analysis.published import COLUMNS, load_published
from normlab.errors import NormlabError
from normlab.schemes import SCHEMES


def value(metric: str, scheme: str, model: str, where: str = "") -> float:
    published = load_published()
    rows = published[(published["metric"] == metric) & (published["scheme"] == scheme) & (published["model"] == model)]
    rows = rows[rows["where"].str.contains(where)]
    assert len(rows) == 1, rows
    return float(rows["value"].iloc[0])


def test_every_row_names_its_source_and_a_known_scheme():
    published = load_published()
    assert list(published.columns) == list(COLUMNS) and len(published) > 100
    assert published[["paper", "arxiv", "where", "method", "metric", "value"]].notna().all(axis=None)
    assert set(published["scheme"].dropna()) <= set(SCHEMES)


def test_values_are_those_of_the_papers():
    assert value("eval_loss", "bhyt", "Llama-1B") == 2.802
    assert value("token_l2_mean", "bhyt", "Llama-1B") == 139
    assert value("token_l2_mean", "pre_rmsnorm", "Llama-1B") == 704
    assert value("perplexity", "lns", "Llama-1B", "reported") == 15.71
    assert value("perplexity", "post_rmsnorm", "Llama-250M") == 1409.79
    # Perplexity is exp(loss): a slip of a digit in either shows here.
    import math

    for scheme in ("pre_rmsnorm", "peri_ln", "lns", "dyt", "bhyt"):
        for model in ("Llama-374M", "Llama-1B"):
            ratio = value("perplexity", scheme, model, "Table 1") / math.exp(
                value("eval_loss", scheme, model, "Table 1")
            )
            assert ratio == pytest.approx(1.0, abs=0.01), (scheme, model)


def test_only_values_read_off_a_plot_carry_a_reading_error():
    published = load_published()
    read = published[published["relative_error"].notna()]
    assert set(read["where"]) == {"Figure 3"} and (read["relative_error"] == 0.1).all()
    assert set(read["layer"]) == {16}


def test_a_folder_without_values_is_named(tmp_path: Path):
    with pytest.raises(NormlabError, match="no CSV file in"):
        load_published(tmp_path)
    with pytest.raises(NormlabError, match="no published values at"):
        load_published(tmp_path / "absent")
    (tmp_path / "a.csv").write_text("paper,value\nx,1\n")
    with pytest.raises(NormlabError, match=r"a\.csv has columns paper, value"):
        load_published(tmp_path)
