"""The table of costs: one row per scheme, with the parameters of a model's norms and rules."""

import torch
from model_helpers import tiny_config

from normlab import SCHEMES, NormlabForCausalLM, cli
from normlab.models.costs import table
from normlab.norms import Norm
from normlab.residuals import Residual


def test_one_row_per_scheme_with_the_costs_of_its_formula():
    found = table(1024, 16).set_index("name")
    assert list(found.index) == list(SCHEMES)
    assert list(found.columns) == ["family", "formula", "paper", "parameters", "bytes", "operations"]
    # Pre-LN: 33 norms of one gain; each reads and writes the stream, each of 32 sums reads two and writes one.
    assert found.loc["pre_rmsnorm", "parameters"] == 33 * 1024
    assert found.loc["pre_rmsnorm", "bytes"] == (33 * 2 + 32 * 3) * 1024 * 2
    assert found.loc["pre_rmsnorm", "operations"] == (33 * 4 + 32) * 1024
    assert (found[["bytes", "operations"]] > 0).all().all()


RMS, LAYERS, SUBLAYERS = 4, 2, 4  # operations per channel: square, sum, division, gain
OPERATIONS = {
    "bhyt": LAYERS * (RMS + 1) + LAYERS * (RMS + 1 - 2) + RMS + SUBLAYERS,  # a tanh more; square and sum less
    # per sublayer: 4d numbers times 24 columns, their rms, read 4, mix 16, write 4; then four streams' sum
    "mhc": RMS * (SUBLAYERS + 1) + SUBLAYERS * (2 * 4 * 24 + 3 * 4 + 2 * (4 + 16 + 4)) + 3,
}


def test_operations_follow_from_the_formula():
    operations = table(64, LAYERS).set_index("name")["operations"]
    assert {scheme: operations[scheme] / 64 for scheme in OPERATIONS} == OPERATIONS


def test_the_parameters_are_those_of_a_models_norms_and_rules():
    expected = table(32, 3).set_index("name")["parameters"]
    for scheme in SCHEMES:
        with torch.device("meta"):
            model = NormlabForCausalLM(tiny_config(scheme, head_dim=8))
        blocks = model.model.layers
        branches = {part for block in blocks for part in (*block.self_attn.modules(), *block.mlp.modules())}
        parts = [m for m in model.modules() if isinstance(m, Norm | Residual) and m not in branches]
        counted = {parameter: parameter.numel() for part in parts for parameter in part.parameters(recurse=False)}
        assert sum(counted.values()) == expected[scheme], scheme


def test_the_command_prints_every_scheme(capsys):
    assert cli.main(["schemes"]) == 0
    assert set(SCHEMES) <= set(capsys.readouterr().out.split())
