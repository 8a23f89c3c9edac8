"""Shares of the copy rate: means over shapes of the newest times, and each drawn where it belongs."""

import pandas as pd
import pytest

from normlab.analysis import kernels
from normlab.errors import NormlabError
from normlab.figures import copy_share
from normlab.figures.theme import template

CALL = {"device": "cpu", "function": "norm", "peer": "normlab", "pass": "both", "rows": 8, "width": 16, "dtype": "f"}


@pytest.fixture
def shares(tmp_path) -> pd.DataFrame:
    rows = [
        CALL | {"microseconds": 9.0, "share_of_copy": 0.1},
        CALL | {"microseconds": 2.0, "share_of_copy": 0.2},  # the same call, newer
        CALL | {"microseconds": 2.0, "share_of_copy": 0.8, "width": 32},
        CALL | {"microseconds": 2.0, "share_of_copy": 0.9, "pass": "forward"},
        CALL | {"microseconds": None, "share_of_copy": 0.9, "function": "failed"},
        CALL | {"microseconds": 4.0, "share_of_copy": 0.1, "peer": "eager"},
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "rows_cpu.csv", index=False)
    gpu = CALL | {"device": "gpu", "microseconds": 1.0, "share_of_copy": 0.9, "function": "add_norm"}
    pd.DataFrame([gpu]).to_csv(tmp_path / "rows_gpu.csv", index=False)
    return kernels.copy_shares(tmp_path)


def test_a_share_is_the_mean_over_the_shapes_of_the_newest_times(shares, tmp_path):
    own = shares.set_index(["device", "function", "peer"])
    assert own.loc[("cpu", "norm", "normlab")].tolist() == pytest.approx([0.4, 0.2, 0.8])
    assert len(own) == 3 and own.loc[("gpu", "add_norm", "normlab"), "share"] == 0.9
    said = kernels.nearest_to_copy(shares)
    assert "cpu at 40% (norm) to 40% (norm)" in said and "gpu at 90% (add_norm)" in said
    with pytest.raises(NormlabError, match="no rows_"):
        kernels.copy_shares(tmp_path / "nowhere")


def test_shares_stand_where_the_table_has_them(shares):
    figure = copy_share(shares)
    panels = {(trace.name, trace.yaxis): trace for trace in figure.data}
    assert set(panels) == {("normlab", "y"), ("eager", "y"), ("normlab", "y2")}
    mean = panels["normlab", "y"]
    assert list(mean.x) == pytest.approx([0.4]) and list(mean.customdata) == ["norm"]
    assert (mean.error_x.array[0], mean.error_x.arrayminus[0]) == pytest.approx((0.4, 0.2))
    assert [trace.name for trace in figure.data if trace.showlegend] == ["normlab", "eager"]
    assert figure.layout.template == template()
    assert "Nothing was timed" in copy_share(shares.iloc[:0]).layout.annotations[0].text


def test_ratios_of_models_are_ours_with_their_intervals(tmp_path):
    row = {"device": "GPU", "section": "step", "function": "bhyt", "peer": "normlab", "rows": 8192}
    row |= {"ratio": 1.016, "ratio_low": 1.012, "ratio_high": 1.02}
    rows = [row, row | {"ratio": None}, row | {"peer": "eager"}]
    pd.DataFrame(rows).to_csv(tmp_path / "step_gpu.csv", index=False)
    (found,) = kernels.model_ratios(tmp_path).itertuples()
    assert (found.what, found.model, found.tokens) == ("step", "bhyt", 8192)
    assert (found.ratio, found.low, found.high) == (1.016, 1.012, 1.02)
    assert kernels.model_ratios(tmp_path / "nowhere").empty
