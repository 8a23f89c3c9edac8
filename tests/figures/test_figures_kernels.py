"""Tables of the kernels, and figures of them: every row drawn where it belongs, in the theme, and words for nothing."""

import pandas as pd
import pytest
from kernels_helpers import CALL, U, times
from normlab_kernels.experimental.linear_choices import FusionWin, LinearLaunch

from normlab.analysis import kernels
from normlab.errors import NormlabError
from normlab.figures import call_times, copy_share, one_call, registers_by_width, themed
from normlab.figures.theme import template


def build(**changes: object) -> dict[str, object]:
    row = {"target": "sm_90", "function": "norm", "direction": "forward", "width": 128, "dtype": "bf16"}
    counts = {"block": 128, "warps": 4, "registers": 40, "spilled_bytes": 0, "shared_bytes": 0}
    return row | counts | changes


def test_the_newest_time_of_a_call_counts_and_one_that_failed_does_not(tmp_path):
    row = CALL | {"function": "norm", "peer": "normlab", "microseconds": 2.0}
    newer = [row | {"microseconds": 3.0}, row | {"function": "other", "microseconds": None}]
    pd.DataFrame([row, *newer]).to_csv(tmp_path / "rows_cpu.csv", index=False)
    (found,) = kernels.read_times(tmp_path).itertuples()
    assert found.microseconds == 3.0 and found.shape == "8 x 16"
    with pytest.raises(NormlabError, match="no rows_"):
        kernels.read_times(tmp_path / "nowhere")


def test_ratios_of_models_are_read_with_their_intervals(tmp_path):
    row = {"device": "GPU", "section": "step", "function": "bhyt", "peer": "normlab", "rows": 8192, "steps": 40}
    row |= {"against": "pre_rmsnorm normlab", "ratio": 1.016, "ratio_low": 1.012, "ratio_high": 1.02}
    pd.DataFrame([row, row | {"ratio": None}]).to_csv(tmp_path / "step_gpu.csv", index=False)
    (found,) = kernels.read_ratios(tmp_path).itertuples()
    assert (found.call, found.tokens, found.ratio, found.low, found.high) == ("bhyt", 8192, 1.016, 1.012, 1.02)
    assert kernels.read_ratios(tmp_path / "nowhere").empty


def test_builds_of_launches_that_were_only_tried_are_left_out(tmp_path):
    rows = [build(registers=40), build(registers=50), build(registers=99, launch="stages=2")]
    pd.DataFrame(rows).to_csv(tmp_path / "aot.csv", index=False)
    assert kernels.read_builds(tmp_path)["registers"].tolist() == [50]
    with pytest.raises(NormlabError, match="no aot.csv"):
        kernels.read_builds(tmp_path / "nowhere")


def test_equal_bytes_in_unequal_times_are_found():
    (pair,) = kernels.same_bytes(times()).itertuples(index=False)
    assert (pair.quickest, pair.slowest, pair.factor) == ("norm", "other", 3.0)
    (judged,) = kernels.traffic(times()).itertuples()
    assert not judged.sets_time and judged.factor == 3.0 and judged.below_floor == 0
    quick = times(microseconds=[1.4, 1.4, 8.0, 2.2], share_of_copy=[0.9, 0.9, 0.1, 0.9])
    assert kernels.traffic(quick)["sets_time"].tolist() == [True]
    alone = quick[quick["function"] == quick["function"].iloc[0]]
    tested = kernels.findings(alone, pd.DataFrame({"spilled_bytes": [0], "target": ["sm_90"]}), ())
    assert tested["verdict"].iloc[0] == "not tested" and "nan" not in tested["found"].iloc[0]
    assert kernels.traffic(times(share_of_copy=1.1))["below_floor"].tolist() == [4]


def test_a_ratio_to_a_peer_that_was_not_timed_is_missing():
    (row,) = kernels.against_peers(times(), "norm", [("norm", "eager"), ("norm", "torch")]).to_dict("records")
    assert row["norm, eager"] == 0.25 and pd.isna(row["norm, torch"])


def test_what_must_move_is_one_call_or_two_kernels():
    table = times()
    assert kernels.moved(table[table["function"] == "norm"]) == {"one call": 5 * U / 1e6}
    joined = kernels.moved(table[table["function"] == "add_norm"])
    assert joined == {"one call": 8 * U / 1e6, "two kernels": 11 * U / 1e6}
    assert kernels.moved(table.iloc[:0]) == {}


def test_findings_hold_do_not_hold_or_were_not_tested():
    builds = pd.DataFrame([build(), build(width=256, spilled_bytes=8)])
    found = kernels.findings(times(), builds, ())
    verdicts = found.set_index(["claim", "on"])["verdict"]
    assert verdicts["the bytes set the time", "a GPU"] == "not tested"
    assert verdicts["the bytes set the time", "cpu"].startswith("does not hold, nor")
    assert verdicts["no kernel spills registers", "compiled for sm_90"] == "does not hold"
    win = FusionWin("H200", 4096, 4096, 8192, LinearLaunch(128, 128, 64, 1, 8, 3))
    won = kernels.findings(times(device="GPU"), builds, [win]).set_index("claim")
    assert won.loc["the fused product beats addmm and a norm", "found"] == "H200: 4096 x 4096 from 8192 rows on"
    assert won.loc["the bytes set the time", "verdict"] == "does not hold"


def test_registers_are_drawn_by_width_for_the_target_that_was_asked_for():
    rows = [build(), build(width=256, registers=60), build(direction="backward"), build(target="sm_80", width=512)]
    figure = registers_by_width(pd.DataFrame(rows), ["norm"], "sm_90")
    forward, backward = figure.data
    assert (list(forward.x), list(forward.y)) == ([128, 256], [40, 60]) and list(backward.x) == [128]
    assert figure.layout.xaxis.type == "log" and list(figure.layout.xaxis.ticktext) == ["128", "256"]
    other = registers_by_width(pd.DataFrame(rows), ["norm"], "gfx942")
    assert "Nothing was compiled" in other.layout.annotations[0].text


def test_times_and_shares_stand_where_the_table_has_them():
    panel = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in call_times(times()).data}
    assert panel == {"normlab": {"norm": 2.0, "other": 6.0, "add_norm": 4.0}, "eager": {"norm": 8.0}}
    shares = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in copy_share(times()).data}
    assert shares["eager"]["norm, 8 x 16"] == pytest.approx(times()["share_of_copy"][2])
    both = pd.concat([times(), times(device="GPU")])
    assert {"norm, 8 x 16, cpu", "norm, 8 x 16, GPU"} <= set(copy_share(both).data[0].y)
    for draw in (call_times, copy_share):
        assert draw(times()).layout.template == template()
        assert "Nothing was timed" in draw(times().iloc[:0]).layout.annotations[0].text


def test_one_call_shows_its_bytes_its_times_and_its_floor():
    rows = times()[times()["function"] == "norm"]
    figure = themed(one_call(rows, kernels.moved(rows), "norm"), "dark")
    size, time, floor = figure.data
    assert list(size.y) == [5 * U / 1e6] and dict(zip(time.x, time.y, strict=True)) == {"normlab": 2.0, "eager": 8.0}
    assert list(floor.y) == pytest.approx([5 * U / 2e3] * 2) and figure.layout.template == template("dark")
    assert one_call(rows.iloc[:0], {}, "norm").layout.title.text == "not timed: norm"
