"""Figures draw what the table says: lines, controls, marks of failed runs, and words where there is nothing."""

import inspect

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from figures_helpers import MEAN_OF_SEEDS, UNIGRAM, activation, empty, lines, one_run, table, text_of, two_rates

from normlab.analysis import claims
from normlab.analysis.compare import compare
from normlab.analysis.published import load_published
from normlab.analysis.selection import choose
from normlab.errors import NormlabError
from normlab.figures import (
    FIGURES,
    METRICS,
    depth_scaling,
    growth_before_after,
    layer_growth,
    loss_by_rate,
    loss_curves,
    profile,
    quantity_by_rate,
    themed,
    trains_at_depth,
)
from normlab.figures.draw import EndLabel, label_ends, spread
from normlab.figures.theme import template
from normlab.schemes import SCHEMES

PUBLISHED = load_published()
# One of those that share a function.
OF_RUNS = sorted({inspect.unwrap(row.draw): row.name for row in FIGURES.values() if row.reads == "runs"}.values())


def test_growth_shows_every_layer_of_every_scheme_from_step_zero():
    figure = layer_growth(table(depths=(4,)))
    assert {t.meta["scheme"] for t in lines(figure)} == {"pre_rmsnorm", "lns", "bhyt", "bhyt_linear", "rmsnorm_gain"}
    (start,), (end,) = lines(figure, scheme="bhyt", step=0), lines(figure, scheme="bhyt", step=20)
    assert list(end.x) == [0, 1, 2, 3, 4]
    assert list(end.y) == pytest.approx([activation("bhyt", layer, 20) * MEAN_OF_SEEDS for layer in range(5)])
    assert start.line.dash == "dash" and end.line.dash == "solid" and start.line.color != end.line.color
    assert METRICS["token_l2_mean"].definition in end.hovertemplate


def test_a_linear_axis_fits_its_panel_and_a_log_axis_is_one_for_all():
    figure, logs = (layer_growth(table(depths=(4,)), log=log) for log in (False, True))
    axes, shared = ([one.layout[f"yaxis{n}"] for n in ("", 2, 3, 4, 5)] for one in (figure, logs))
    assert {axis.type for axis in axes} == {"linear"} and {axis.type for axis in shared} == {"log"}
    assert len({axis.range for axis in axes}) == 5 and len({axis.range for axis in shared}) == 1


def test_growth_shows_the_deepest_depth_of_a_table_and_the_depth_of_a_selection():
    assert max(lines(layer_growth(table()))[0].x) == 4
    assert max(lines(layer_growth(choose(table(), depth=2)))[0].x) == 2


def test_published_values_are_drawn_at_their_layer_with_their_reading_error():
    figure = layer_growth(table(), published=PUBLISHED)
    published = lines(figure, published=True)
    assert len(published) == 3  # pre_rmsnorm, lns, bhyt
    bhyt = next(t for t in published if t.y[0] == 139)
    assert list(bhyt.x) == [16] and bhyt.error_y.array[0] == pytest.approx(13.9)
    assert "Figure 3" in text_of(figure)
    assert not lines(layer_growth(table()), published=True)


def test_many_steps_are_thinned_but_first_and_last_stay():
    runs = one_run("lns", steps=list(range(0, 500, 10)))
    steps = [t.meta["step"] for t in lines(layer_growth(runs), scheme="lns")]
    assert len(steps) <= 9 and steps[0] == 0 and steps[-1] == 490


def test_loss_curves_show_both_splits_and_the_unigram_entropy():
    figure = loss_curves(table())
    (held,) = [t for t in lines(figure, scheme="lns", split="eval") if "seed" not in t.meta]
    assert held.y[-1] == pytest.approx(4.4) and lines(figure, scheme="lns", split="train")
    assert len([t for t in lines(figure, scheme="lns", split="eval") if "seed" in t.meta]) == 3
    assert f"{UNIGRAM:.2f}" in text_of(figure)
    assert {shape.y0 for shape in figure.layout.shapes} == {UNIGRAM}
    assert any("LNS 4.400" in a.text for a in figure.layout.annotations)


def test_a_loss_says_of_how_many_seeds_it_is_the_mean_at_its_step():
    seeds = [one_run("lns", seed=seed, status="diverged" if seed == 2 else "finished") for seed in range(3)]
    figure = loss_curves(pd.concat(seeds))
    for split in ("train", "eval"):
        (line,) = [t for t in lines(figure, scheme="lns", split=split) if "seed" not in t.meta]
        assert list(line.customdata) == [3, 2, 2] and "mean of %{customdata} seed(s)" in line.hovertemplate


@pytest.mark.parametrize("draw", [loss_curves, depth_scaling])
def test_no_dotted_line_is_named_where_none_is_drawn(draw):
    runs = one_run("lns", steps=(0, 10))
    assert "dotted: held-out unigram entropy" in text_of(draw(runs))
    unknown = draw(runs[runs["metric"] != "unigram_entropy"]).layout.title.subtitle.text
    assert "dotted: " not in unknown and not unknown.endswith("<br>")
    assert "dotted: held-out bigram loss" in text_of(draw(runs.replace({"metric": {"unigram_entropy": "bigram_loss"}})))


def with_counted(runs: pd.DataFrame, **levels: float) -> pd.DataFrame:
    """The table, with runs that know those losses."""
    known = runs[runs["metric"] == "unigram_entropy"]
    return pd.concat([runs, *(known.assign(metric=name, value=value) for name, value in levels.items())])


@pytest.mark.parametrize("draw", [loss_curves, depth_scaling])
def test_loss_figures_draw_and_name_what_counting_achieves(draw):
    figure = draw(with_counted(table(), bigram_loss=5.25, trigram_loss=4.5))
    levels = [shape.y0 for shape in figure.layout.shapes if shape.y0]
    assert sorted(set(levels)) == [4.5, 5.25, UNIGRAM]
    words = text_of(figure)
    assert "dotted: held-out unigram entropy 6.00, bigram loss 5.25, trigram loss 4.50" in words
    labels = [a.text for a in figure.layout.annotations]
    assert "trigram loss 4.50" in labels
    # the panel that is enlarged reaches down to the lowest of them, not up to the highest
    low, high = (figure.layout.yaxis2 if draw is loss_curves else figure.layout.yaxis).range
    assert low < 4.5 < high < UNIGRAM and "unigram entropy 6.00" not in labels


def test_failed_runs_are_marked_wherever_they_appear():
    runs = table(statuses={("lns", 4): "diverged", ("pre_rmsnorm", 4): "not_learned"})
    for figure in (layer_growth(runs), loss_curves(runs), growth_before_after(runs)):
        words = text_of(figure) + " ".join(figure.layout.yaxis.ticktext or ())
        assert "diverged" in words and "not learned" in words
    scaling = depth_scaling(runs)
    (cross,) = lines(scaling, scheme="lns", diverged=True)
    assert list(cross.x) == [4] and cross.marker.symbol == "x"
    (line,) = lines(scaling, scheme="pre_rmsnorm", panel="loss")
    assert line.marker.symbol == ("circle", "circle-open")


def test_runs_that_all_diverged_are_not_called_unmeasured():
    runs = table(statuses=dict.fromkeys([(name, 4) for name in SCHEMES], "diverged"), depths=(4,))
    assert "All of these runs diverged, so token_l2_mean has no value" in text_of(growth_before_after(runs))
    assert "All runs of 4 blocks diverged, so growth has no value" in text_of(quantity_by_rate(runs))
    bare = runs[runs["metric"].ne("token_l2_mean")].assign(status="finished")
    assert "was not measured" in text_of(growth_before_after(bare)) + text_of(quantity_by_rate(bare))


def test_before_and_after_shows_both_ends_with_controls_and_ratios():
    figure = growth_before_after(choose(table(), schemes=["pre_rmsnorm", "bhyt"]), published=PUBLISHED)
    assert {t.meta["scheme"] for t in figure.data} == {"pre_rmsnorm", "bhyt", "bhyt_linear", "rmsnorm_gain"}
    (bhyt,) = lines(figure, scheme="bhyt")
    assert list(bhyt.x) == pytest.approx(
        [MEAN_OF_SEEDS * activation("bhyt", 4, 0), MEAN_OF_SEEDS * activation("bhyt", 4, 20)]
    )
    words = [a.text for a in figure.layout.annotations]
    assert "0.28" in words and any(w.startswith("0.169 [") for w in words) and "0.20" in words
    four = growth_before_after(choose(table(seeds=range(4)), schemes=["pre_rmsnorm", "bhyt"])).layout.title.text
    said = "L2 norm of a token after the last layer: 3 of 3 schemes clearly differ from Pre-LN when trained"
    assert four.replace("<br>", " ") == said
    title = figure.layout.title.text.replace("<br>", " ")
    assert "clearly" not in text_of(figure) and title.endswith("of Pre-LN's when trained"), "three seeds"
    one = growth_before_after(choose(table().query("seed == 0"), schemes=["pre_rmsnorm", "bhyt"])).layout.title.text
    assert "(BHyT) to " in one and one.replace("<br>", " ").endswith("of Pre-LN's when trained")
    assert any("layer 16: BHyT Figure 3, Llama-1B, read off the plot ±10%" in w for w in words)
    unpublished = table(("rmsnorm_gain", "bhyt_linear"))
    for other in (growth_before_after(table()), growth_before_after(unpublished, published=PUBLISHED)):
        assert "published" not in text_of(other) and "±10%" not in text_of(other)


def test_runs_that_were_not_measured_before_training_are_said_to_lack_that_only():
    runs = table(depths=(4,), seeds=range(4))
    late = runs[runs["layer"].isna() | runs["step"].gt(0)]
    figure = growth_before_after(late)
    assert figure.layout.title.text == "L2 norm of a token after the last layer" and "step 0," not in text_of(figure)
    gradient, stream = (trace for trace in trains_at_depth(late).data if trace.type == "heatmap")
    assert np.isnan(np.asarray(gradient.z, float)).all() and np.isfinite(np.asarray(stream.z, float)).all()
    assert "Gradient before training: not measured<br>" in text_of(trains_at_depth(late))
    assert "not measured" not in text_of(trains_at_depth(runs))


def test_before_and_after_prints_the_interval_of_the_comparison_of_all_schemes():
    runs = table(depths=(4,))
    last = runs["metric"].eq("token_l2_mean") & runs["site"].eq("block_out") & runs["step"].eq(20)
    for scheme, seed, factor in (
        ("lns", 0, 1.1),
        ("lns", 1, 0.9),
        ("bhyt", 2, 1.05),
        ("bhyt_linear", 0, 0.9),
        ("rmsnorm_gain", 1, 0.95),
    ):
        runs.loc[last & runs["scheme"].eq(scheme) & runs["seed"].eq(seed), "value"] *= factor
    figure = growth_before_after(choose(runs, schemes=["pre_rmsnorm", "bhyt"]))
    found = compare(runs, "bhyt", "pre_rmsnorm", "token_l2_mean", depth=4).iloc[0]
    low, high = (f"{found[end]:.3g}" for end in ("low", "high"))
    assert any(f"[{low}, {high}]" in note.text for note in figure.layout.annotations)


@pytest.mark.parametrize("name", OF_RUNS)
def test_every_figure_is_drawn_in_both_themes_and_says_what_it_measures(name):
    at_another_rate = [one_run(scheme, lr=2e-3) for scheme in ("pre_rmsnorm", "lns", "bhyt")]
    figure = FIGURES[name](pd.concat([table(), *at_another_rate]), published=PUBLISHED)
    assert len(figure.data) > 4 and figure.layout.title.text
    dark = themed(figure, "dark")
    assert dark.layout.paper_bgcolor is None
    assert dark.layout.template.layout.paper_bgcolor != template().layout.paper_bgcolor
    assert "#000000" in figure.to_json() and "#000000" not in dark.to_json()
    assert themed(dark, "light").to_json().count("#000000") == figure.to_json().count("#000000")


@pytest.mark.parametrize("name", OF_RUNS)
@pytest.mark.parametrize(
    "runs",
    [
        empty(),
        one_run("bhyt"),
        one_run("bhyt", status="diverged"),
        one_run("bhyt").assign(value=np.nan),
        one_run("bhyt").assign(value=0.0),
        one_run("bhyt", steps=[0]),
        one_run("bhyt", depth=1),
        one_run("bhyt")[lambda t: t["site"] == "model"],
        one_run("bhyt")[lambda t: t["site"] != "model"],
        one_run("not_registered"),
        pd.concat([one_run("bhyt"), one_run("lns", status="diverged"), one_run("dyt", status="not_learned")]),
    ],
    ids="empty one diverged nan zero untrained shallow no_layers no_losses unregistered mixed".split(),
)
def test_whatever_the_table_lacks_there_is_a_figure(name, runs):
    figure = FIGURES[name](runs, published=PUBLISHED[PUBLISHED["method"].isin(["Pre-LN", "BHyT"])])
    figure.to_json()
    assert figure.data or text_of(figure).strip()
    if runs.empty:
        assert "no run has been trained yet" in text_of(figure)


def test_something_that_is_no_table_of_runs_is_refused():
    with pytest.raises(NormlabError, match="normlab.load_runs"):
        layer_growth(pd.DataFrame({"a": [1]}))
    with pytest.raises(NormlabError, match="light or dark"):
        themed(loss_curves(table()), "sepia")


def test_a_quantity_is_drawn_at_every_rate_of_every_scheme():
    failed = [one_run("dyt", lr=3e-3, status="not_learned"), one_run("peri_ln", status="diverged")]
    runs = pd.concat([two_rates(), *failed])
    figure = quantity_by_rate(runs, "token_l2_mean")
    line, dots = lines(figure, scheme="bhyt")
    size = activation("bhyt", 4, 20) * MEAN_OF_SEEDS
    assert list(line.x) == [1e-3, 3e-3] and list(line.y) == pytest.approx([size, 2 * size])
    assert list(dots.x) == [1e-3] * 3 + [3e-3] * 3 and set(dots.marker.symbol) == {"circle"}
    grown, (alone, ring) = quantity_by_rate(runs), lines(figure, scheme="dyt")
    assert list(alone.x) == [3e-3] and list(ring.marker.symbol) == ["circle-open"]
    assert not lines(figure, scheme="peri_ln"), "a diverged run has no value"
    (growth, _) = lines(grown, scheme="lns")
    assert list(growth.y) == pytest.approx([activation("lns", 4, 20) / activation("lns", 1, 20)] * 2)
    nothing = text_of(quantity_by_rate(runs, "attention_entropy"))
    assert "attention_entropy was not measured in the runs of 4 blocks" in nothing


def test_a_figure_grows_by_the_schemes_of_its_legend():
    few, many = (
        quantity_by_rate(pd.concat([one_run(name) for name in list(SCHEMES)[:count]], ignore_index=True))
        for count in (3, 30)
    )
    room = many.layout.height - many.layout.margin.t - many.layout.margin.b
    assert few.layout.height == 480 and room / 30 >= 20 and many.layout.legend.tracegroupgap == 0


def test_the_title_says_that_the_schemes_that_it_counts_have_four_seeds():
    runs = pd.concat([table(("pre_rmsnorm", "lns"), (4,), (0, 1, 2, 3)), one_run("bhyt"), one_run("dyt")])
    title = growth_before_after(runs).layout.title.text.replace("<br>", " ")
    assert title.endswith(": 1 of 1 with four seeds clearly differs from Pre-LN when trained")


def test_a_line_of_growth_by_rate_goes_through_geometric_means():
    runs, first = two_rates(), activation("lns", 4, 20) / activation("lns", 1, 20)
    times = runs["seed"].map({0: 1.0, 1: 10.0, 2: 100.0}).where(runs["layer"].eq(4).fillna(False), 1.0)
    line, dots = lines(quantity_by_rate(runs.assign(value=runs["value"] * times)), scheme="lns")
    assert sorted(dots.y[:3]) == pytest.approx([first, 10 * first, 100 * first])
    assert list(line.y) == pytest.approx([10 * first] * 2), "no arithmetic mean, which is 37"


def test_a_scheme_has_one_look_in_all_figures():
    looks: dict[str, set[tuple[str, str]]] = {}
    for figure in (loss_curves(table()), depth_scaling(table())):
        for trace in figure.data:
            if trace.meta and "seed" not in trace.meta and trace.meta.get("panel") != "difference" and trace.line.color:
                looks.setdefault(trace.meta["scheme"], set()).add((trace.line.color, trace.line.dash))
    assert looks == {name: {(SCHEMES[name].color, SCHEMES[name].dash)} for name in looks} and len(looks) == 5


def test_labels_right_of_a_panel_stand_in_one_column():
    def shifts(*ends: float) -> set[tuple[object, object]]:
        figure = go.Figure()
        label_ends(figure, [EndLabel(end, "a", "#000000") for end in ends], (0.0, 10.0), 300, False)
        return {(note.ax, note.xshift) for note in figure.layout.annotations}

    assert shifts(1.0, 1.1, 1.2, 9.0) == {(22, None)} and shifts(1.0, 5.0, 9.0) == {(None, 6)}


def test_labels_keep_their_distance_and_stay_inside():
    places = spread([1.0, 1.01, 1.02, 5.0, 9.99], gap=0.5, low=0.0, high=10.0)
    ordered = sorted(places)
    assert min(b - a for a, b in zip(ordered, ordered[1:], strict=False)) >= 0.5 - 1e-9
    assert places == ordered and places[3] == 5.0 and ordered[0] >= 0.0 and ordered[-1] <= 10.0
    assert spread([0.0, 0.1], gap=1.0, low=0.0) == [0.0, 1.0]


def test_a_selection_of_several_depths_is_not_averaged_over_them():
    both = choose(table(), depth=None)
    assert len(both.depths) > 1
    for draw in (layer_growth, growth_before_after, loss_curves):
        assert "keep one" in draw(both).layout.annotations[0].text


def test_schemes_without_a_common_seed_are_drawn_without_a_ratio():
    apart = pd.concat([one_run("pre_rmsnorm", seed=0), one_run("lns", seed=1)], ignore_index=True)
    assert len(growth_before_after(apart).data) >= 2


def test_the_window_of_a_curve_is_in_steps_whatever_was_logged():
    def training(every: int) -> tuple[go.Figure, int]:
        steps = range(0, 601, every)
        runs = one_run("lns", steps=steps)
        is_loss = runs["metric"].eq("loss") & runs["split"].eq("train")
        return loss_curves(runs.assign(value=runs["value"].mask(is_loss, runs["step"] / 100))), len(steps)

    for every in (1, 10):
        figure, count = training(every)
        (line,) = lines(figure, scheme="lns", split="train")
        assert len(line.y) == count and "mean of the last 20 steps" in text_of(figure)
        assert line.y[-1] == pytest.approx(np.arange(600, 580, -every).mean() / 100)


def test_the_window_of_a_curve_does_not_shrink_with_the_shortest_gap_between_logs():
    def training(last: int, **other: str) -> pd.DataFrame:
        steps = [*range(0, last, 10), last]
        runs = one_run("lns", steps=steps, **other)
        is_loss = runs["metric"].eq("loss") & runs["split"].eq("train")
        return runs.assign(value=runs["value"].mask(is_loss, runs["step"] / 100))

    stopped = training(303, status="diverged").assign(seed=1, run="stopped")
    for runs in (training(601), pd.concat([training(600), stopped], ignore_index=True)):
        figure = loss_curves(runs)
        (line,) = lines(figure, scheme="lns", split="train")
        assert "mean of the last 20 steps" in text_of(figure)
        assert dict(zip(line.x, line.y, strict=True))[500] == pytest.approx((4.9 + 5.0) / 2)


def test_a_diverged_run_is_in_nothing_that_is_said_of_the_end_of_training():
    seeds = [one_run("lns", seed=seed) for seed in (0, 1)]
    lost = [one_run(scheme, seed=2, status="diverged") for scheme in ("lns", "dyt")]
    high = [part.assign(value=part["value"].mask(part["site"].eq("block_out"), 7.0 * part["layer"])) for part in lost]
    runs = pd.concat([*seeds, *high, one_run("pre_rmsnorm")], ignore_index=True)
    curves = loss_curves(runs)
    labels = [note.text for note in curves.layout.annotations]
    assert "LNS 4.250 (1 of 3 seeds diverged)" in labels and "DyT (diverged)" in labels
    assert curves.layout.title.text.endswith(": held-out loss ends at 4.000 (Pre-LN) to 4.250 (LNS)")
    stopped = runs[runs["status"].ne("diverged") | runs["step"].lt(20)]
    for one in (layer_growth(runs), layer_growth(stopped)):
        assert "DyT" not in one.layout.title.text and "(LNS) to" in one.layout.title.text
        panels = [note.text for note in one.layout.annotations if "diverged" in note.text]
        assert len(panels) == 2 and [("last layer" in text) for text in panels] == [True, False]
    size = [activation("lns", 4, step) * (1.00 * 1.01) ** 0.5 for step in (0, 20)]
    assert any(f"last layer {size[0]:.3g} → {size[1]:.3g}" in a.text for a in layer_growth(runs).layout.annotations)


def test_a_profile_relative_to_layer_one_says_so_on_its_axis_in_its_title_and_when_hovered():
    for reference, shown in (
        (None, "relative to layer 1"),
        ("pre_rmsnorm", "relative to layer 1, ratio to Pre-LN, paired by seed"),
    ):
        figure = profile(table(depths=(4,)), "token_l2_mean", relative=True, reference=reference)
        assert figure.layout.yaxis.title.text == shown and "by layer, relative to layer 1" in figure.layout.title.text
        (lns,) = lines(figure, scheme="lns")
        assert f"<i>token_l2_mean: {shown}; " in lns.hovertemplate
    plain = profile(table(depths=(4,)), "token_l2_mean", reference="pre_rmsnorm")
    assert plain.layout.yaxis.title.text == "ratio to Pre-LN, paired by seed" and "relative" not in plain.to_json()


def test_a_profile_says_which_schemes_it_has_no_line_of():
    short = one_run("lns", steps=(0, 10))
    lost = [one_run("dyt", status="diverged"), one_run("beam", status="diverged")]
    runs = pd.concat([one_run("pre_rmsnorm"), short, *lost, one_run("peri_ln", depth=2)], ignore_index=True)
    figure = profile(runs)
    said = figure.layout.title.text.replace("<br>", " ")
    assert "LNS: nothing measured at step 20" in said and "Peri-LN: not trained at depth 4" in said
    assert "DyT; Beam: diverged, nothing measured at step 20" in said
    assert {trace.name for trace in figure.data} == {"pre_rmsnorm", "labels"}
    start = profile(runs, step=0, depth=4, schemes=["pre_rmsnorm", "lns"])
    assert "LNS:" not in start.layout.title.text
    assert figure.layout.height > start.layout.height, "each line of the title has room"
    assert figure.layout.margin.t - start.layout.margin.t == figure.layout.height - start.layout.height


def test_a_size_of_zero_has_no_ratio_but_was_measured():
    runs = pd.concat([one_run("pre_rmsnorm"), one_run("bhyt"), one_run("lns"), one_run("dyt", seed=1)])
    own = runs["scheme"].eq("lns") & runs["metric"].eq("token_l2_mean") & runs["step"].eq(0)
    runs["value"] = runs["value"].mask(own, 0.0)
    said = profile(runs, step=0, reference="pre_rmsnorm").layout.title.text.replace("<br>", " ")
    assert "LNS: 0 at step 0, of which there is no ratio" in said
    assert "DyT: nothing to compare with Pre-LN at step 0" in said and "nothing measured" not in said
    alone = profile(runs, step=0, relative=True).layout.title.text.replace("<br>", " ")
    assert "LNS: nothing relative to layer 1 at step 0" in alone


def test_a_finished_run_without_a_loss_has_not_diverged():
    finished = [one_run("lns", lr=lr) for lr in (1e-3, 2e-3, 3e-3)]
    runs = pd.concat([*finished, one_run("lns", lr=4e-3, status="diverged")])
    lost = runs["lr"].eq(2e-3) & runs["metric"].eq("loss") & runs["split"].eq("eval")
    figure = loss_by_rate(runs[~lost])
    (triangle,) = [trace for trace in figure.data if trace.marker.symbol == "triangle-up"]
    assert list(triangle.x) == [4e-3] and "diverged" in triangle.hovertemplate
    assert "without 1 run that logged no held-out loss" in text_of(figure)
    assert "logged no" not in text_of(loss_by_rate(runs))


def test_runs_of_unequal_length_do_not_stand_side_by_side_at_their_rates():
    pilot, whole = one_run("lns", lr=3e-3, steps=(0, 5, 10)), one_run("lns")
    stopped = one_run("bhyt", lr=3e-3, steps=(0, 5, 10), status="diverged")
    for draw in (loss_by_rate, quantity_by_rate):
        said = text_of(draw(pd.concat([whole, pilot]))).replace("<br>", " ")
        assert "The runs of depth 4 were trained for 10 to 20 steps: keep those of one length." in said
        larger = one_run("lns", lr=3e-3).assign(tokens=lambda rows: 2 * rows["tokens"])
        said = text_of(draw(pd.concat([whole, larger]))).replace("<br>", " ")
        assert "were trained for 2,000 to 4,000 tokens" in said
        assert draw(pd.concat([whole, one_run("lns", lr=3e-3), stopped])).data, "a diverged run stopped early"


def test_figures_by_rate_say_what_runs_were_trained_unlike_in():
    warmups = ((1e-3, 0.1), (3e-3, 0.5))
    rates = [one_run("lns", lr=lr).assign(recipe=f"warmup={warmup} clip=5") for lr, warmup in warmups]
    for draw in (loss_by_rate, quantity_by_rate):
        assert "trained differently: warmup 0.1 and 0.5 (LNS)" in text_of(draw(pd.concat(rates)))
        assert "unlike" not in text_of(draw(pd.concat(rates).assign(recipe="warmup=0.1")))


def test_figures_by_rate_say_that_runs_are_of_two_texts():
    rates = [one_run("lns"), one_run("lns", lr=3e-3)]
    rates[1]["value"] = rates[1]["value"].mask(rates[1]["metric"] == "unigram_entropy", 4.95)
    for draw in (loss_by_rate, quantity_by_rate):
        said = text_of(draw(pd.concat(rates))).replace("<br>", " ")
        assert "The runs of depth 4 were measured on 2 texts or in other tokens (unigram_entropy 4.950, 6.000)" in said


def test_a_quantity_by_rate_counts_the_runs_that_diverged():
    runs = [one_run("lns", seed=seed, status="diverged" if seed else "finished") for seed in range(3)]
    said = text_of(quantity_by_rate(pd.concat([*runs, one_run("lns", lr=3e-3)])))
    assert "1 seed " in said and "without 2 runs that diverged" in said
    assert "diverged" not in text_of(quantity_by_rate(two_rates()))


def test_a_figure_by_rate_names_the_width_that_it_picks():
    runs = pd.concat([one_run("lns", lr=lr, seed=seed) for lr in (1e-3, 3e-3) for seed in (0, 1)])
    wide = runs[runs["seed"] == 0].assign(width=32, run=lambda rows: rows["run"] + "-wide")
    assert "width" not in text_of(loss_by_rate(runs))
    assert "4 blocks, 0.0M tokens · width 16" in text_of(loss_by_rate(pd.concat([runs, wide])))


def in_widths(runs: dict[tuple[str, int], dict[int, int]]) -> pd.DataFrame:
    """By scheme and depth how many seeds of a width, each at two rates."""
    made = [
        one_run(scheme, depth, seed, lr).assign(width=width, run=lambda own, width=width: f"{width}-" + own["run"])
        for (scheme, depth), widths in runs.items()
        for width, seeds in widths.items()
        for seed in range(seeds)
        for lr in (1e-3, 3e-3)
    ]
    return pd.concat(made, ignore_index=True)


def test_a_figure_by_rate_shows_the_width_and_depth_that_other_figures_show():
    wide_at_8 = in_widths({("lns", 2): {16: 3}, ("lns", 4): {16: 3}, ("lns", 8): {16: 1, 32: 4}})
    assert choose(wide_at_8, 8).runs["width"].unique().tolist() == [16]
    assert "8 blocks, 0.0M tokens · width 16" in text_of(loss_by_rate(wide_at_8, 8))
    both = {("lns", 4): {16: 2}, ("pre_rmsnorm", 4): {16: 2}}
    apart = in_widths(both | {("pre_rmsnorm", 8): {16: 1}, ("lns", 8): {32: 1}})
    assert choose(apart).depths == [4]
    for draw in (loss_by_rate, quantity_by_rate):
        assert "4 blocks" in text_of(draw(apart)) and lines(draw(apart), scheme="lns")
    assert "8 blocks, 0.0M tokens · width 32" in text_of(
        loss_by_rate(in_widths({("lns", 4): {16: 2}, ("lns", 8): {32: 1}}), 8)
    )

def test_runs_of_two_texts_are_not_drawn_or_averaged_together():
    other = one_run("lns")
    other["value"] = other["value"].mask(other["metric"] == "unigram_entropy", 4.95)
    mixed = pd.concat([one_run("bhyt"), other, one_run("lns", depth=2)], ignore_index=True)
    for figure in (loss_curves, layer_growth, depth_scaling):
        (said,) = figure(mixed).layout.annotations
        assert "The runs of depth 4 were measured on 2 texts" in said.text.replace("<br>", " ")
    with pytest.raises(NormlabError, match="on 2 texts or in other tokens .unigram_entropy 4.950, .*keep those"):
        claims.losses(mixed)
    assert loss_curves(mixed[mixed["depth"] == 2]).data
