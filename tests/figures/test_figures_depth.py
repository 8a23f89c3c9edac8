"""Losses against depth and their differences; which schemes train at a great depth, in which order, and why."""

import math

import numpy as np
import pandas as pd
import pytest
from figures_helpers import UNIGRAM, activation, lines, one_run, table, text_of

from normlab.analysis.selection import choose
from normlab.figures import depth_scaling, trains_at_depth
from normlab.schemes import SCHEMES


def test_depth_scaling_shows_losses_and_differences_by_pairs_with_intervals():
    figure = depth_scaling(table())
    (loss,) = lines(figure, scheme="bhyt", panel="loss")
    assert list(loss.x) == [2, 4] and loss.y[0] == pytest.approx(4.5)
    # Seeds at 4.2, 4.5 and 4.8: standard error 0.3 / sqrt(3), times 4.303.
    half = 4.303 * 0.3 / math.sqrt(3)
    assert f"95% interval {4.5 - half:.3f} to {4.5 + half:.3f}" in loss.text[0]
    shallow, deep = lines(figure, scheme="bhyt", panel="difference")
    assert shallow.x[0] == pytest.approx(0.2) and shallow.error_x.array[0] == pytest.approx(0.0, abs=1e-6)
    assert (shallow.meta["depth"], deep.meta["depth"]) == (2, 4) and shallow.xaxis != deep.xaxis
    assert not lines(figure, scheme="pre_rmsnorm", panel="difference")


def test_the_title_counts_the_schemes_that_gain_from_depth():
    runs = table(schemes=("pre_rmsnorm", "lns"))
    deep = runs["depth"].eq(4) & runs["scheme"].eq("lns") & runs["metric"].eq("loss")
    runs.loc[deep, "value"] -= 0.5
    assert "lower at 4 blocks than at 2 under 1 of 2 schemes" in depth_scaling(runs).layout.title.text
    assert depth_scaling(runs[runs["depth"] == 2]).layout.title.text == "Held-out loss against depth"


def test_a_scheme_that_diverged_is_not_among_those_that_the_title_counts():
    runs = table(schemes=("pre_rmsnorm", "lns", "bhyt"), statuses={("bhyt", 4): "diverged"})
    deep = runs["depth"].eq(4) & runs["scheme"].eq("lns") & runs["metric"].eq("loss")
    runs.loc[deep, "value"] -= 0.5
    title = depth_scaling(runs).layout.title.text
    assert title.replace("<br>", " ").endswith("lower at 4 blocks than at 2 under 1 of 2 schemes")


def test_depths_of_other_lengths_or_texts_are_not_drawn_together():
    runs = table(schemes=("pre_rmsnorm", "lns"))
    batches = runs.assign(tokens=runs["tokens"] * runs["depth"])
    assert "depths 2, 4 were trained for 4,000 to 8,000 tokens" in text_of(depth_scaling(batches))
    other = runs["metric"].eq("unigram_entropy") & runs["depth"].eq(2)
    texts = runs.assign(value=runs["value"].mask(other, 4.95))
    assert "depths 2, 4 were measured on 2 texts" in text_of(depth_scaling(texts))
    assert "were trained" not in text_of(depth_scaling(batches[batches["depth"] == 2]))


def test_a_difference_is_drawn_only_where_both_schemes_learned():
    figure = depth_scaling(table(statuses={("lns", 4): "not_learned"}))
    assert [gap.meta["depth"] for gap in lines(figure, scheme="lns", panel="difference")] == [2]


def test_a_difference_is_marked_for_its_verdict():
    def marks(runs: pd.DataFrame) -> set[str]:
        return {gap.marker.symbol for gap in lines(depth_scaling(runs), scheme="bhyt", panel="difference")}

    assert marks(table()) == {"circle"}, "seeds agree: different"
    assert marks(table(seeds=(0,))) == {"circle-open"}, "one seed: undecided"
    same = table()
    losses = same[same["metric"].eq("loss") & same["scheme"].eq("pre_rmsnorm")]
    same.loc[same["metric"].eq("loss") & same["scheme"].eq("bhyt"), "value"] = losses["value"].to_numpy()
    assert marks(same) == {"square"}
    assert "Holm over 8: ● different, ■ equivalent, ○ undecided" in text_of(depth_scaling(table()))


def test_why_there_is_no_interval_is_what_the_seeds_are():
    def said(*seeds: tuple[int, ...]) -> str:
        runs = [table((name,), (4,), own) for name, own in zip(("pre_rmsnorm", "lns"), seeds, strict=True)]
        return text_of(depth_scaling(pd.concat(runs, ignore_index=True)))

    assert "paired by seed, one seed: no intervals" in said((0,), (0,))
    assert "paired by seed, one seed in common: no intervals" in said((0, 1), (1, 2))
    assert "paired by seed, no seed in common that learned" in said((0, 1), (2, 3))
    assert "paired by seed, no other scheme" in text_of(depth_scaling(table(("lns",), (4,))))
    assert "paired by seed, 95% intervals, Holm over 1" in said((0, 1), (0, 1))


def test_a_marks_symbol_is_of_the_seeds_that_it_is_the_mean_of():
    def drawn(*statuses: str) -> tuple[str, str, str]:
        runs = [one_run("lns", seed=seed, status=status) for seed, status in enumerate(statuses)]
        line, cross = lines(depth_scaling(pd.concat(runs)), scheme="lns", panel="loss")
        return line.marker.symbol[0], line.text[0], cross.text[0]

    symbol, said, beside = drawn("diverged", "not_learned", "not_learned")
    assert symbol == "circle-open" and said.startswith("2 seed(s), 95% interval")
    assert said.endswith("1 of 3 seeds diverged, 2 of 3 seeds not learned") and "1 of 3 seeds diverged" in beside
    assert drawn("diverged", "finished")[0] == "circle"


def test_lines_that_reach_the_deepest_depth_have_a_label_and_all_schemes_a_row():
    runs = table(depths=(2, 4, 8))
    figure = depth_scaling(runs[(runs["scheme"] != "bhyt") | (runs["depth"] == 2)])
    labels = [note.text for note in figure.layout.annotations if note.xref == "x domain"]
    assert "LNS" in labels and "BHyT" not in labels
    (beside,) = [trace for trace in figure.data if trace.mode == "text"]  # its last dot
    assert list(beside.text) == ["  BHyT"] and list(beside.x) == [2]
    assert [text.split(">")[1].split("<")[0] for text in figure.layout.yaxis2.ticktext][:2] == ["LNS", "BHyT"]


def mixed() -> pd.DataFrame:
    statuses = {("bhyt", 4): "diverged", ("pre_rmsnorm", 4): "not_learned", ("lns", 4): "not_learned"}
    runs = table(statuses=statuses, seeds=(0,))
    own = (runs["scheme"] == "lns") & (runs["metric"] == "loss") & (runs["depth"] == 4)
    return runs.assign(value=runs["value"].mask(own, 5.0))  # above the trigram, below the unigram


def test_a_scheme_trains_stalls_or_diverges_by_the_unigram_entropy():
    figure = trains_at_depth(mixed())
    found = {t.meta["outcome"]: t.meta["schemes"] for t in figure.data if t.meta and "outcome" in t.meta}
    assert found["diverges"] == ["bhyt"] and found["stalls"] == ["pre_rmsnorm"]
    assert found["trains"] == ["bhyt_linear", "rmsnorm_gain", "lns"]  # best first: 4.3, 4.4, 5.0
    (dots,) = [t for t in figure.data if t.meta and t.meta.get("outcome") == "trains"]
    assert list(dots.x) == pytest.approx([4.3, 4.4, 5.0])
    assert {shape.x0 for shape in figure.layout.shapes} == {UNIGRAM - 0.05}
    assert "● 3 train, ○ 1 stall, × 1 diverge" in text_of(figure) and "depth 4" in text_of(figure)
    assert not figure.layout.showlegend


def test_where_a_cross_stands_and_in_what_unit_a_panel_is_are_said():
    figure = trains_at_depth(mixed())
    (cross,) = [t for t in figure.data if t.meta and t.meta.get("outcome") == "diverges"]
    assert list(cross.x) == pytest.approx([UNIGRAM + 0.25]) and cross.marker.symbol == "x"
    words = text_of(figure)
    assert "× and losses further up are drawn 0.25 above it" in words
    assert "Held-out loss<br>nats a token" in words and "gradient norm of the batch (nats)" in words
    (_, stream) = (t for t in figure.data if t.type == "heatmap")
    values = [10**tick for tick in stream.colorbar.tickvals]  # whose numbers have that unit, not their logarithms
    assert len(values) > 1 and [float(text) for text in stream.colorbar.ticktext] == pytest.approx(values)


def test_a_mark_says_its_loss_when_hovered_not_where_it_stands():
    runs = mixed()
    far = runs["scheme"].eq("pre_rmsnorm") & runs["metric"].eq("loss") & runs["depth"].eq(4)
    runs["value"] = runs["value"].mask(far, 9.06)
    two = [one_run("lns", seed=seed, status=status) for seed, status in ((1, "finished"), (2, "diverged"))]
    words = {}
    for table_of_runs in (runs, pd.concat(two, ignore_index=True)):
        dots = [t for t in trains_at_depth(table_of_runs).data if t.meta and "outcome" in t.meta]
        assert all("%{x" not in trace.hovertemplate and "%{text}" in trace.hovertemplate for trace in dots)
        words |= {title: text for trace in dots for title, text in zip(trace.y, trace.text or (), strict=True)}
    assert words[SCHEMES["pre_rmsnorm"].title] == "9.060 nats" and words[SCHEMES["bhyt"].title] == "diverged"
    assert words[SCHEMES["lns"].title] == "diverged, 4.400 nats over the other seeds"


def test_profiles_run_from_the_first_layer_to_the_last_in_the_rows_order():
    figure = trains_at_depth(mixed())
    gradient, stream = (t for t in figure.data if t.type == "heatmap")
    names = [SCHEMES[name].title for name in ("bhyt_linear", "rmsnorm_gain", "lns", "pre_rmsnorm", "bhyt")]
    assert list(stream.y) == names and list(gradient.y) == names
    row = np.asarray(stream.z)[names.index(SCHEMES["lns"].title)]
    assert row[0] == pytest.approx(math.log10(activation("lns", 0, 20)))
    assert row[-1] == pytest.approx(math.log10(activation("lns", 4, 20)))
    row = np.asarray(gradient.z)[names.index(SCHEMES["lns"].title)]
    assert row[-1] == pytest.approx(math.log10(activation("lns", 4, 0)))  # before training
    assert trains_at_depth(choose(mixed(), depth=2)).data[-1].z is not None
    other = one_run("lns").query("metric != 'unigram_entropy'")
    assert not trains_at_depth(other).data


def test_a_diverged_scheme_has_no_stream_after_training():
    gradient, stream = (t for t in trains_at_depth(mixed()).data if t.type == "heatmap")
    place = list(stream.y).index(SCHEMES["bhyt"].title)
    assert np.isnan(np.asarray(stream.z, dtype=float)[place]).all(), "not that of step 0"
    assert np.isfinite(np.asarray(gradient.z, dtype=float)[place]).all(), "before training it has one"
    one_left = pd.concat([one_run("lns"), one_run("lns", seed=1, status="diverged")], ignore_index=True)
    stream = trains_at_depth(one_left).data[-1]
    assert stream.z[0][-1] == pytest.approx(math.log10(activation("lns", 4, 20)))
