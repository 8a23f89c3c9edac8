"""Mixing and likeness of streams, against the formulas on the model's own matrices."""

import itertools

import pytest
import torch
from model_helpers import fresh_model, tiny_model, tokens

from normlab.probes import record

STREAMS = ["mixing_from_identity", "mixing_from_uniform", "stream_cosine"]


def recorded(model, ids):
    with record(model, STREAMS) as rec, torch.no_grad():
        logits = model(ids).logits
    return logits, rec.stats().to_pandas().query("mask == 'all'").set_index(["site", "layer", "metric"])["value"]


@pytest.mark.parametrize("scheme", ["mhc", "hyper_connections"])
def test_mixing_and_likeness_are_those_of_the_matrices_that_the_model_uses(scheme):
    model, ids, seen = tiny_model(scheme), tokens(2, 5), {}
    for layer, block in enumerate(model.model.layers, start=1):
        for part in ("attn", "mlp"):
            getattr(block, f"{part}_residual").register_forward_hook(
                lambda _, args, output, place=(part, layer): seen.update(
                    {place: (args[0].double(), output[1].double())}
                )
            )
    logits, found = recorded(model, ids)
    assert torch.equal(model(ids).logits, logits)
    assert len(found) == 3 * 3 * 2
    for (part, layer), (state, mix) in seen.items():
        streams = state.unflatten(-1, (4, 32))
        pairs = [
            torch.cosine_similarity(streams[..., i, :], streams[..., j, :], -1)
            for i, j in itertools.permutations(range(4), 2)
        ]
        expected = {
            "mixing_from_identity": ((mix - torch.eye(4)) ** 2).sum((-2, -1)).sqrt().mean() / 3**0.5,
            "mixing_from_uniform": ((mix - 0.25) ** 2).sum((-2, -1)).sqrt().mean() / 3**0.5,
            "stream_cosine": torch.stack(pairs).mean(),
        }
        for metric, value in expected.items():
            assert found[part, layer, metric] == pytest.approx(value.item(), rel=1e-4), (part, layer, metric)


def test_hyper_connections_start_at_the_identity_with_streams_that_are_one():
    _, found = recorded(fresh_model("hyper_connections"), tokens(1, 4))
    for metric, value in zip(STREAMS, (0.0, 1.0, 1.0), strict=True):
        assert found.xs(metric, level="metric").tolist() == pytest.approx([value] * 6, abs=1e-5)


@pytest.mark.parametrize(("scheme", "fields"), [("pre_rmsnorm", {}), ("siamese_norm", {}), ("mhc", {"streams": 1})])
def test_a_model_without_streams_that_mix_has_no_rows_of_them(scheme, fields):
    model, ids = tiny_model(scheme, **fields), tokens()
    with record(model, [*STREAMS, "token_l2_mean"]) as rec, torch.no_grad():
        model(ids)
    assert set(rec.stats().to_pandas()["metric"]) == {"token_l2_mean"}
    assert not any("stream" in reason and "mix" in reason for reason in rec.absent.values())
