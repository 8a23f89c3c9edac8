"""The table of costs: one row per scheme, with what it adds to Llama."""

import pandas as pd
import pytest
import torch
from transformers.initialization import no_init_weights

from normlab import SCHEMES, NormlabConfig, NormlabForCausalLM, cli
from normlab.models.costs import table
from normlab.schemes import Scheme


@pytest.fixture(scope="module")
def small() -> pd.DataFrame:
    """The costs of every scheme in two blocks, 64 wide, with a vocabulary of 100."""
    return table(64, LAYERS, vocabulary=100).set_index("name")


def test_one_row_per_scheme_with_the_costs_of_its_formula(small):
    assert list(small.index) == list(SCHEMES)
    assert list(small.columns) == ["family", "formula", "paper", "parameters", "bytes", "operations"]
    # Pre-LN: 5 norms of one gain; each reads and writes the stream, each of 4 sums reads two and writes one.
    assert small.loc["pre_rmsnorm", "parameters"] == 5 * 64
    assert small.loc["pre_rmsnorm", "bytes"] == (5 * 2 + 4 * 3) * 64 * 2
    assert small.loc["pre_rmsnorm", "operations"] == (5 * 4 + 4) * 64
    assert (small[["bytes", "operations"]] > 0).all().all()


RMS, LAYERS, SUBLAYERS = 4, 2, 4  # operations per channel: square, sum, division, gain
OPERATIONS = {
    "bhyt": LAYERS * (RMS + 1) + LAYERS * (RMS + 1 - 2) + RMS + SUBLAYERS,  # a tanh more; square and sum less
    # per sublayer: 4d numbers times 24 columns, their rms, read 4, mix 16, write 4; then four streams' sum
    "mhc": RMS * (SUBLAYERS + 1) + SUBLAYERS * (2 * 4 * 24 + 3 * 4 + 2 * (4 + 16 + 4)) + 3,
    # per sublayer: four streams times 6 columns, their LayerNorm without gain and bias, and the same mixing
    "hyper_connections": RMS * (SUBLAYERS + 1) + SUBLAYERS * (2 * 4 * 6 + 5 * 4 + 2 * (4 + 16 + 4)) + 3,
}


def test_operations_follow_from_the_formula(small):
    assert {scheme: small.loc[scheme, "operations"] / 64 for scheme in OPERATIONS} == OPERATIONS


def test_the_parameters_are_those_beyond_llamas(small):
    """A model's trained numbers minus those of the same Llama, whose norms are of Pre-LN's size."""
    found = small["parameters"]
    assert found["looped"] == 5 * 64 - (64 * (64 + 32 + 32) + 64 * 64 + 3 * 160 * 64), "matrices of one block"
    assert found["none"] == 0 and found["pre_rmsnorm"] == 5 * 64 and found["osp_rmsnorm"] == 2 * 64**2 + 5
    for scheme in SCHEMES:
        config = NormlabConfig(
            scheme=scheme,
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=160,
        )
        llama = 2 * 100 * 64 + LAYERS * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 160 * 64)
        with torch.device("meta"), no_init_weights():
            model = NormlabForCausalLM(config)
        model.tie_weights()
        assert sum(p.numel() for p in model.parameters()) - llama == found[scheme], scheme


def test_the_cost_of_a_norm_that_is_not_normlabs_is_missing(monkeypatch):
    norm = lambda site: torch.nn.LayerNorm(site.width)  # noqa: E731
    monkeypatch.setitem(SCHEMES, "pytorchs", Scheme("pytorchs", "own", "own", "own", norm, "norm"))
    rows = {name: SCHEMES[name] for name in ("pre_rmsnorm", "pytorchs")}
    monkeypatch.setattr("normlab.models.costs.SCHEMES", rows)
    found = table(64, LAYERS, vocabulary=100).set_index("name")
    assert found["parameters"].to_dict() == {"pre_rmsnorm": 5 * 64, "pytorchs": 5 * 2 * 64}
    assert found["operations"].to_list() == [(5 * 4 + 4) * 64, pd.NA]
    assert found.loc["pytorchs", ["bytes", "operations"]].isna().all()


def test_norms_inside_the_branches_cost_too(small):
    """Two heads of queries and one of keys and values, 32 wide; an MLP of 160."""
    rms, heads, inner = 4, 64, 160
    sums, block = 4 * 64, rms * 64
    # q, k, v and the sum of attention in each block, then the final norm
    hybrid = 2 * rms * (heads + 32 + 32) + 3 * block + sums
    assert small.loc["hybridnorm", "operations"] == hybrid
    assert small.loc["sub_ln", "operations"] == small.loc["pre_rmsnorm", "operations"] + 2 * rms * (heads + inner)


def test_the_command_prints_every_scheme(capsys):
    assert cli.main(["schemes"]) == 0
    assert set(SCHEMES) <= set(capsys.readouterr().out.split())


def test_bytes_of_unit_vectors_and_scales(small):
    """nGPT has no norms. Queries and keys are brought to unit length; they, the MLP and logits have scales."""
    sums, heads, scaled = 4 * 3 * 64, 2 * (64 + 32), 2 * (64 + 2 * 160)
    numbers = sums + 2 * (heads + scaled) + 2 * 100
    assert small.loc["ngpt", "bytes"] == 2 * numbers
