"""Figures of settings: conditions under headings, and the subtitle says which values a logarithmic axis leaves out."""

import pandas as pd
import pytest
from figures_helpers import text_of

from normlab.figures import saturation, variant_differences
from normlab.study import gain_or_bound as gain


def test_shares_of_zero_are_said_not_to_be_drawn():
    shares = pd.DataFrame({"condition": "trained", "kappa": [1.0, 2.0, 4.0], "share": [0.3, 0.1, 0.01]})
    assert "not drawn" not in text_of(saturation(shares, 64))
    figure = saturation(shares.assign(share=[0.3, 0.1, 0.0]), 64)
    assert "shares of zero are not drawn" in text_of(figure)
    (line,) = [trace for trace in figure.data if trace.name == "trained"]
    assert [y is None for y in line.y] == [False, False, True]


def grid(g: float, gamma0: float, outliers: int, width: int) -> list[dict[str, object]]:
    """Both schemes under one condition; the bounded one's stream is g times as small."""
    setting = {"lam_input": 10 * g, "gamma0": gamma0, "outlier_channels": outliers, "width": width, "steps": 2}
    return [
        setting | {"scheme": scheme, "seed": seed, "depth": 1, "lr": 0.1, "eval_loss": 5.0 + 0.01 * seed, "size": size}
        for scheme, size in (("bhyt", 1.0), ("bhyt_linear", g * 5))
        for seed in (0, 1, 2)
    ]


@pytest.fixture(scope="module")
def sweep() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = [*grid(0.2, 1.0, 0, 16), *grid(1.0, 0.2, 0, 16), *grid(1.0, 1.0, 0, 16), *grid(0.2, 1.0, 2, 16)]
    rows += grid(0.2, 1.0, 0, 32)
    configs = pd.DataFrame(rows, index=[f"run{number}" for number in range(len(rows))])
    long = []
    for name, row in configs.iterrows():
        about = {"run": name, "status": "finished", "step": 2, "tokens": 2, "mask": "all"}
        about |= {key: row[key] for key in ("scheme", "depth", "width", "seed", "lr")}
        noise = 1 + 0.01 * row["seed"] * (row["scheme"] == "bhyt")
        for site, metric, split, layer, value in (
            ("block_out", "token_l2_mean", "probe", 1, row["size"] * noise),
            ("attn_norm_in", "tanh_input_max", "probe", 1, row["lam_input"]),
            ("attn_norm_in", "saturation_95", "probe", 1, 0.0),
            ("model", "loss", "eval", None, row["eval_loss"]),
        ):
            long.append(about | {"site": site, "metric": metric, "split": split, "layer": layer, "value": value})
    return pd.DataFrame(long), gain.with_gain(configs, kappa=10.0)


def test_conditions_are_named_grouped_and_judged_together(sweep):
    size = gain.conditions(*sweep, "bhyt", "bhyt_linear", "token_l2_mean")
    assert size["group"].tolist() == [gain.GROUPS[0], gain.GROUPS[0], gain.GROUPS[1], gain.GROUPS[2], gain.GROUPS[3]]
    assert size["condition"].tolist()[0] == "g = 0.2, γ₀ = 1" and size["condition"].tolist()[-1].endswith(", width 32")
    assert size["verdict"].tolist()[1] == "different" and size["estimate"][1] == pytest.approx(0.2, rel=0.02)
    figure = variant_differences(size)
    heads = [note.text for note in figure.layout.annotations if note.text.startswith("<b>")]
    assert heads == [f"<b>{group}</b>" for group in gain.GROUPS] and len(figure.data) == len(size)
    told = (size["verdict"] == "different").sum()
    assert figure.layout.title.text.endswith(f"L2 norm of a token: {told} of 5 ratios clearly differ from 1") and told
    loss = gain.conditions(*sweep, "bhyt", "bhyt_linear")
    assert "0 of 5 differences clearly differ from 0" in variant_differences(loss).layout.title.text
    table = gain.verdicts([loss, size])
    assert table.shape == (5, 6) and table.iloc[1, 5].startswith("different")


def test_along_the_gain_are_the_runs_that_start_alike(sweep):
    values = gain.along_gain(*sweep, ["bhyt"])
    assert sorted(values["setting"].unique()) == [0.2, 1.0] and set(values["panel"]) == set(gain.PANELS)
    assert (values["panel"].value_counts() == 6).all()  # three seeds at each of the two
    z = values[values["panel"] == "largest |z|"].set_index("setting")["value"]
    assert set(z[1.0]) == {10.0}
    assert set(values[values["panel"] == "share of |tanh z| > 0.95"]["value"]) == {gain.LEAST}


def test_a_run_that_sets_kappa_keeps_its_own():
    configs = pd.DataFrame({"lam_input": [2.0, 2.0], "kappa": [None, 4.0]})
    assert gain.with_gain(configs, kappa=10.0)["g"].tolist() == [0.2, 0.5]


def test_every_condition_has_a_line_however_many_there_are():
    rows = [(f"condition {n}", kappa, 0.1 / kappa) for n in range(6) for kappa in (1.0, 2.0)]
    figure = saturation(pd.DataFrame(rows, columns=["condition", "kappa", "share"]), 64)
    assert sum(str(trace.name).startswith("condition") for trace in figure.data) == 6
