"""Variants of a run: lambda against gamma0, planted outliers, further metrics; and what they are compared by."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from figures_helpers import one_run
from training_helpers import tiny

import normlab
from normlab.analysis.compare import compare_variants
from normlab.errors import NormlabError
from normlab.figures import variant_differences


@pytest.fixture(scope="module")
def outliers(text: Path, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> normlab.runs.Run:
    config = dataclasses.replace(
        tiny(text),
        scheme="bhyt",
        model={"lam_input": 10.0, "lam_post": 5.0, "gamma0": 0.2, "carried": "exact"},
        outlier_channels=2,
        outlier_size=3.0,
        probe_also="tanh_input_max, saturation_95",
    )
    return go(config, tmp_path_factory.mktemp("outliers"))


@pytest.mark.parametrize("scheme, start", [("bhyt", 0.5), ("bhyt_linear", 0.5), ("rmsnorm_gain", 0.5 * 3 / 10)])
def test_gamma0_is_where_the_gain_starts_at_sites_with_lambda_only(scheme, start):
    small = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=32)
    model = normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme=scheme, lam_input=3.0, gamma0=0.5, **small))
    for layer in model.model.layers:
        assert layer.input_layernorm.weight.tolist() == pytest.approx([start] * 16)
    assert model.model.norm.weight.tolist() == [1.0] * 16


def test_gamma0_must_be_positive():
    with pytest.raises(NormlabError, match="gamma0 0.0 must be positive"):
        normlab.NormlabConfig(scheme="bhyt", gamma0=0.0)


def test_planted_outliers_are_in_the_embeddings_before_training_and_reach_the_tanh(outliers):
    table = normlab.load_runs(outliers.path)
    start = table[(table["step"] == 0) & (table["mask"] == "all")]
    embeddings = start[(start["site"] == "block_out") & (start["layer"] == 0)].set_index("metric")["value"]
    assert embeddings["max_abs"] == 3.0
    peaks = start[(start["metric"] == "tanh_input_max") & (start["site"] == "attn_norm_in")].set_index("layer")["value"]
    width = outliers.manifest["config"]["width"]
    # Two equal coordinates that outweigh all others hold sqrt(d/2) of rms each, times g = lambda/kappa = 1.
    assert peaks[1] == pytest.approx((width / 2) ** 0.5, rel=0.01)
    assert "saturation_95" in set(table["metric"])


def test_configurations_are_a_table_with_a_row_a_run(outliers, done):
    configs = normlab.load_configs(outliers.path)
    row = configs.loc[outliers.name]
    assert (row["lam_input"], row["gamma0"], row["outlier_channels"], row["carried"]) == (10.0, 0.2, 2, "exact")
    assert row["eval_loss"] == outliers.eval_loss and row["status"] == outliers.status
    assert "gamma0" not in normlab.load_configs(done.path)


@pytest.fixture
def variants() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two conditions x two schemes x three seeds; runs of the second condition have other names."""
    tables, rows = [], {}
    for bend in (0.2, 1.0):
        for scheme in ("bhyt", "bhyt_linear"):
            for seed in range(3):
                run = one_run(scheme, seed=seed)
                run["run"] += f"-{bend}"
                at_loss = run["metric"].eq("loss")
                run.loc[at_loss, "value"] -= (bend == 1.0) * (scheme == "bhyt") * (1.0 + 0.01 * seed)
                tables.append(run)
                rows[run["run"].iloc[0]] = {"scheme": scheme, "seed": seed, "bend": bend}
    return pd.concat(tables, ignore_index=True), pd.DataFrame.from_dict(rows, orient="index")


def test_each_condition_is_compared_by_itself(variants):
    found = compare_variants(*variants, "bhyt", "bhyt_linear", ["bend"]).set_index("bend")
    assert found["seeds"].tolist() == [3, 3]
    assert found.loc[0.2, "estimate"] == pytest.approx(-0.1)
    assert found.loc[1.0, "estimate"] == pytest.approx(-0.1 - 1.01)
    assert found.loc[1.0, "high"] < 0 and found.loc[1.0, "verdict"] == "different"


def test_a_condition_with_one_of_the_two_schemes_is_left_out_and_none_is_an_error(variants):
    runs, configs = variants
    kept = configs[~((configs["bend"] == 1.0) & (configs["scheme"] == "bhyt_linear"))]
    assert compare_variants(runs, kept, "bhyt", "bhyt_linear", ["bend"])["bend"].tolist() == [0.2]
    with pytest.raises(NormlabError, match="no configuration under which both"):
        compare_variants(runs, configs, "bhyt", "lns", ["bend"])
    with pytest.raises(NormlabError, match="no run sets sharpness"):
        compare_variants(runs, configs, "bhyt", "bhyt_linear", ["sharpness"])


def test_the_figure_of_differences_shows_the_intervals_and_tells_them_apart(variants):
    found = compare_variants(*variants, "bhyt", "bhyt_linear", ["bend"])
    found.loc[0, ["low", "high", "verdict"]] = [-0.3, 0.1, "undecided"]
    figure = variant_differences(found.assign(condition=["little", "much"], group=["", "bent"]))
    little, much = figure.data
    assert (little.marker.symbol, much.marker.symbol) == ("circle-open", "circle")
    assert little.x[0] + little.error_x.array[0] == pytest.approx(0.1)
    assert little.x[0] - little.error_x.arrayminus[0] == pytest.approx(-0.3)
    words = [note.text for note in figure.layout.annotations]
    assert "-0.100 [-0.300, +0.100], 3 seeds" in words and "<b>bent</b>" in words
    assert list(figure.layout.yaxis.ticktext) == ["little", "much"]
    assert "No variant" in str(variant_differences(found[:0]))
