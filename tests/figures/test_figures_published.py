"""Published values: they are what the papers print, each row says where it is from, and bad folders are named."""

import math

import numpy as np
import pandas as pd
import pytest
from figures_helpers import table, text_of

from normlab.analysis.published import COLUMNS, load_published, ratios_to
from normlab.errors import NormlabError
from normlab.figures.growth import growth_before_after
from normlab.figures.published import _shapes, published_ratios
from normlab.schemes import BASELINE, SCHEMES


def value(metric: str, scheme: str, model: str, where: str = "", paper: str = "BHyT") -> float:
    published = load_published()
    published = published[published["paper"] == paper]
    rows = published[(published["metric"] == metric) & (published["scheme"] == scheme) & (published["model"] == model)]
    rows = rows[rows["where"].str.contains(where)]
    assert len(rows) == 1, rows
    return float(rows["value"].iloc[0])


def test_every_row_names_its_source_and_a_known_scheme():
    published = load_published()
    assert list(published.columns) == list(COLUMNS) and len(published) > 100
    assert published[["paper", "where", "method", "metric"]].notna().all(axis=None)
    in_words = published["metric"] == "claim"
    assert published.loc[~in_words, "value"].notna().all()
    assert published.loc[~in_words & published["paper"].ne("marin"), "arxiv"].notna().all(), "marin's are issues"
    assert published.loc[in_words, ["scheme", "note"]].notna().all(axis=None)
    assert set(published["scheme"].dropna()) <= set(SCHEMES)


def test_values_are_those_of_the_papers():
    assert value("eval_loss", "bhyt", "Llama-1B") == 2.802
    assert value("token_l2_mean", "bhyt", "Llama-1B") == 139
    assert value("token_l2_mean", "pre_rmsnorm", "Llama-1B") == 704
    assert value("perplexity", "lns", "Llama-1B", "Table 1", "Curse of Depth") == 15.71
    assert value("perplexity", "post_rmsnorm", "Llama-250M", paper="Curse of Depth") == 1409.79
    # Perplexity is exp(loss): a slip of a digit in either shows here.
    for scheme in ("pre_rmsnorm", "peri_ln", "lns", "dyt", "bhyt"):
        for model in ("Llama-374M", "Llama-1B"):
            loss = value("eval_loss", scheme, model, "Table 1")
            ratio = value("perplexity", scheme, model, "Table 1") / math.exp(loss)
            assert ratio == pytest.approx(1.0, abs=0.01), (scheme, model)


def test_every_row_is_from_the_table_or_figure_that_has_it():
    """The models that a paper's table holds: a row under another table's name is a wrong citation."""
    published = load_published()
    held = {where: set(rows["model"].dropna()) for where, rows in published.groupby(["arxiv", "where"])}
    bhyt, curse = "2601.09719", "2502.05795"
    assert held[bhyt, "Table 1"] == held[bhyt, "Table 2"] == {"Llama-374M", "Llama-1B"}
    assert held[bhyt, "Table 3"] == {"Llama-3B"} and held[bhyt, "Figure 3"] == {"Llama-1B"}
    assert held[curse, "Table 6"] == {"Llama-130M", "Llama-250M"}
    assert {where for arxiv, where in held if arxiv in (bhyt, curse)} == {
        *("Table 1", "Table 2", "Table 3", "Table 6", "Figure 3", "Sections 3 and 4")
    }
    table = published[published["arxiv"].eq(curse) & published["where"].eq("Table 1")]
    assert len(table) == 20 and not table.duplicated(["model", "method"]).any()
    tokens = table.groupby("model")[["depth", "tokens"]].agg(["min", "max"])
    sizes = {"Llama-130M": (12, 2.2e9), "Llama-250M": (24, 3.9e9), "Llama-350M": (24, 6.0e9), "Llama-1B": (24, 8.9e9)}
    for model, (depth, count) in sizes.items():
        assert tokens.loc[model].tolist() == [depth, depth, count, count]
    other = published[published["where"].eq("Table 6")].set_index(["model", "method"])["value"]
    assert len(other) == 14 and other["Llama-130M", "LNS + scaled init"] == 25.80
    assert other["Llama-250M", "SkipInit"] == 22.29 and other["Llama-250M", "LayerScale"] == 23.45
    shared = table.set_index(["model", "method"])["value"]
    both = other.index.intersection(shared.index)
    assert len(both) == 4 and (other[both] == shared[both]).all(), "Pre-LN and LNS are in both"


def test_only_values_read_off_a_plot_carry_a_reading_error():
    published = load_published()
    read = published[published["relative_error"].notna()]
    assert set(read["where"]) == {"Figure 3"} and (read["relative_error"] == 0.1).all()
    assert set(read["layer"]) == {16}


def test_a_folder_without_values_is_named(tmp_path):
    with pytest.raises(NormlabError, match="no CSV file in"):
        load_published(tmp_path)
    with pytest.raises(NormlabError, match="no published values at"):
        load_published(tmp_path / "absent")
    (tmp_path / "a.csv").write_text("paper,value\nx,1\n")
    with pytest.raises(NormlabError, match=r"a\.csv has columns paper, value"):
        load_published(tmp_path)


def test_ratios_of_theirs_are_the_printed_values_divided():
    runs = table(("pre_rmsnorm", "bhyt", "lns"), depths=(4,))
    ratios = ratios_to("pre_rmsnorm", runs, load_published())
    found = ratios.set_index(["quantity", "source", "model", "scheme"])["ratio"]
    assert found["perplexity", "BHyT, Table 1", "Llama-1B", "bhyt"] == pytest.approx(16.470 / 17.753)
    assert found["perplexity", "Curse of Depth, Table 1", "Llama-130M", "lns"] == pytest.approx(25.76 / 26.73)
    assert found["token_l2_mean", "BHyT, Figure 3", "Llama-1B", "bhyt"] == pytest.approx(139 / 704)


def test_ratios_of_ours_are_paired_by_seed_and_perplexities_are_exponentials():
    runs = table(("pre_rmsnorm", "bhyt"), depths=(2, 4))
    found = ratios_to("pre_rmsnorm", runs, load_published()).query("source == 'here'").set_index(["quantity", "model"])
    last = runs[runs["step"] == 20]
    for depth in (2, 4):
        own = last[last["depth"] == depth].set_index(["scheme", "seed"])
        loss = own.query("metric == 'loss' and split == 'eval'")["value"]
        expected = math.exp((loss["bhyt"] - loss["pre_rmsnorm"]).mean())
        assert found.loc[("perplexity", f"depth {depth}"), "ratio"] == pytest.approx(expected)
        size = own.query("metric == 'token_l2_mean' and layer == @depth")["value"]
        expected = math.exp((np.log(size["bhyt"]) - np.log(size["pre_rmsnorm"])).mean())
        row = found.loc[("token_l2_mean", f"depth {depth}")]
        assert row["ratio"] == pytest.approx(expected) and row["seeds"] == 3


def test_a_published_ratio_is_of_one_model_after_its_last_layer():
    def values(paper: str, depth: int, **sizes: float) -> list[dict]:
        about = {"paper": paper, "arxiv": "1", "where": "Figure 1", "model": f"{depth} blocks", "depth": depth}
        about |= {"metric": "token_l2_mean", "note": ""}
        return [
            about | {"method": scheme, "scheme": scheme, "layer": layer, "value": size * layer + 3}
            for scheme, size in sizes.items()
            for layer in range(1, depth + 1)
        ]

    alone, both = values("A", 6, lns=5.0), values("B", 8, pre_rmsnorm=10.0, lns=2.0)
    other = values("C", 4, pre_rmsnorm=10.0, lns=9.0, bhyt=1.0)
    printed = pd.DataFrame([*alone, *both, *other]).assign(relative_error=np.nan)
    figure = growth_before_after(table(("pre_rmsnorm", "lns", "bhyt"), depths=(4,)), published=printed)
    column = [note.text for note in figure.layout.annotations if note.xshift == 272]
    assert sorted(column) == sorted(["published", "1.00", f"{19 / 83:.2f}", f"{7 / 43:.2f}"])
    assert "after its layer 8: B Figure 1, 8 blocks; after layer 4: C Figure 1, 4 blocks." in text_of(figure)
    without = growth_before_after(table(("pre_rmsnorm", "lns"), depths=(4,)), published=pd.DataFrame(alone))
    assert "published" not in text_of(without)


def test_theirs_and_ours_are_in_one_figure_and_what_did_not_train_stands_at_the_edge():
    figure = published_ratios(table(("pre_rmsnorm", "post_rmsnorm", "bhyt"), depths=(4,)), load_published())
    first = [trace for trace in figure.data if trace.xaxis == "x" and trace.meta]
    marks = {(trace.name, trace.marker.symbol) for trace in first}
    assert ("post_rmsnorm", "arrow-right") in marks and ("bhyt", "circle") in marks
    assert {trace.name for trace in figure.data if trace.showlegend is None} >= {
        "ours, depth 4",
        "BHyT, Table 1, Llama-1B",
    }
    assert max(x for trace in first for x in trace.x) <= 3.0
    assert "▶ more than 3 times the base's perplexity: did not train" in text_of(figure)
    without = table(("pre_rmsnorm", "bhyt"), depths=(4,))
    sides = published_ratios(without, load_published()).layout.title.text
    # BHyT's two perplexities and two sizes are below 1 in print; here its sizes are, and its loss is above Pre-LN's.
    assert sides == "Ratios to Pre-LN: where ours differs from 1, 2 of 4 published ones lie on its side"
    single = published_ratios(without.query("seed == 0"), load_published()).layout.title.text
    assert single == "Ratios to Pre-LN: by one seed, 2 of 4 published ones lie on the side of ours"
    assert "▶" not in text_of(published_ratios(without))


def test_published_ratios_are_set_against_those_of_the_deepest_models_alone():
    both = table(("pre_rmsnorm", "bhyt"), depths=(2, 4))
    deep = published_ratios(both[(both["depth"] == 2) | (both["seed"] == 0)], load_published()).layout.title.text
    # One seed of depth 4 has no interval: that of depth 2 does not stand in for it.
    assert deep == "Ratios to Pre-LN: by one seed, 2 of 4 published ones lie on the side of ours"


def test_marks_that_are_near_in_value_stand_one_below_the_other():
    figure = published_ratios(table(("pre_rmsnorm", "lns", "bhyt"), depths=(2, 4)), load_published())
    top, margin = figure.layout.yaxis.range, figure.layout.margin
    pixels = (figure.layout.height - margin.t - margin.b) / (top[0] - top[1])
    for axis in ("x", "x2", "x3"):
        heights = sorted(trace.y[0] for trace in figure.data if trace.xaxis == axis and trace.meta)
        assert min(np.diff(heights)) * pixels >= 12  # a mark is nine high


def test_no_two_sources_have_one_mark():
    shapes = _shapes(ratios_to(BASELINE, table(("pre_rmsnorm", "lns")), load_published()))
    assert len(set(shapes.values())) == len(shapes) > 9


def test_one_scheme_alone_has_nothing_to_be_set_against():
    assert "No run of another scheme" in text_of(published_ratios(table(("pre_rmsnorm",), depths=(4,))))
