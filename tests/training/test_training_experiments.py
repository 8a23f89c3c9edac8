"""Measurements made once, after training: each against the probe that defines it, and deletion by hand."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from training_helpers import tiny

import normlab
from normlab import NormlabError, runs
from normlab.models import NormlabForCausalLM, without_blocks
from normlab.training.experiments import COLUMNS, experiments
from normlab.training.text.corpus import Corpus


@pytest.fixture(scope="module")
def trained(text: Path, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    config = tiny(text, depth=8, scheme="lns", steps=4, experiment_blocks=4, held_out="test")
    return go(config, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def found(trained: runs.Run) -> pd.DataFrame:
    return normlab.load_experiments(trained.path)


@pytest.fixture(scope="module")
def batch(corpus: Corpus) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.from_numpy(corpus.spread(4, "test"))}


# The length of the training, and what counting achieves on the text.
HOW_LONG = ("steps", "tokens", "unigram_entropy", "bigram_loss", "trigram_loss")


def rows(found: pd.DataFrame, metric: str, part: str) -> pd.Series:
    return found[(found["metric"] == metric) & (found["part"] == part)].set_index("layer")["value"]


def test_a_run_keeps_what_its_trained_model_was_measured_to_do(trained, found, batch):
    assert list(found.columns) == [*runs.RUN_COLUMNS, *COLUMNS, *HOW_LONG]
    assert found[list(HOW_LONG)].drop_duplicates().to_dict("records") == [
        {name: trained.manifest["corpus"].get(name, trained.manifest.get(name)) for name in HOW_LONG}
    ]
    assert set(found["scheme"]) == {"lns"} and set(found["run"]) == {trained.name}
    model = trained.load_model()
    for part in ("block", "attention", "mlp"):
        table = normlab.skip_sensitivity(model, [batch], parts=(part,), progress=False).set_index("layer")
        assert np.allclose(rows(found, "skip_delta_loss", part), table["skip_delta_loss"], atol=1e-6)
        assert np.allclose(rows(found, "skip_output_kl", part), table["output_kl"], atol=1e-6)
    spans = normlab.skip_sensitivity(model, [batch], span=2, progress=False).set_index("layer")
    assert np.allclose(rows(found, "skip_delta_loss", "span"), spans["skip_delta_loss"], atol=1e-6)
    assert set(found[found["part"] == "span"]["other"]) == {2}
    kl = normlab.logit_lens_kl(model, [batch], progress=False).set_index("layer")["value"]
    assert np.allclose(rows(found, "logit_lens_kl", "block"), kl, atol=1e-6)
    jacobian = normlab.jacobian_identity(model, [batch], progress=False).set_index("layer")["value"]
    assert np.allclose(rows(found, "jacobian_identity", "block"), jacobian, rtol=1e-4)
    angles = found[found["metric"] == "angular_distance"].set_index(["layer", "other"])["value"]
    table = normlab.angular_distance(model, [batch], progress=False)
    assert len(angles) == 9 * 8 / 2
    assert all(value == pytest.approx(table.loc[pair], abs=1e-6) for pair, value in angles.items())
    future = found[found["metric"] == "skip_future_effect"].set_index(["other", "layer"])["value"]
    table = normlab.skip_future_effect(model, [batch], progress=False).set_index(["skipped", "layer"])["value"]
    assert np.allclose(future.sort_index(), table.sort_index(), rtol=1e-4)


def test_deleting_renumbers_the_other_blocks(trained, found, batch):
    model = trained.load_model().eval()
    config = dataclasses.replace(model.config, num_hidden_layers=7)
    shorter = NormlabForCausalLM(config).eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    for new, old in enumerate(layer for layer in range(8) if layer != 2):
        prefix = f"model.layers.{old}."
        state |= {
            f"model.layers.{new}.{name.removeprefix(prefix)}": tensor
            for name, tensor in model.state_dict().items()
            if name.startswith(prefix)
        }
    shorter.load_state_dict(state)
    with torch.no_grad():
        added = shorter(**batch, labels=batch["input_ids"]).loss - model(**batch, labels=batch["input_ids"]).loss
    deleted, skipped = (rows(found, "skip_delta_loss", part) for part in ("deleted", "block"))
    assert deleted[3] == pytest.approx(added.item(), abs=1e-5)
    assert abs(deleted[3] - skipped[3]) > 1e-6, "LNS's factors follow the new numbers"
    assert deleted[8] == pytest.approx(skipped[8], abs=1e-6), "nobody moves up"


@pytest.mark.parametrize("scheme", ["pre_rmsnorm", "peri_ln", "mix_ln", "bhyt", "dyt"])
def test_where_norms_do_not_know_their_layer_deleting_is_skipping(scheme, text, corpus):
    torch.manual_seed(0)
    model = NormlabForCausalLM(tiny(text, scheme=scheme, depth=3).model_config(300, 0))
    found = experiments(model, corpus.spread(2))
    assert np.allclose(rows(found, "skip_delta_loss", "deleted"), rows(found, "skip_delta_loss", "block"), atol=1e-6)


def test_the_model_is_whole_again_after_deleting(trained, batch):
    model = trained.load_model().eval()
    with torch.no_grad():
        before = model(**batch).logits
        with pytest.raises(RuntimeError), without_blocks(model, [1, 4]):
            assert len(model.model.layers) == 6 and model(**batch).logits.shape == before.shape
            raise RuntimeError
        assert torch.equal(model(**batch).logits, before)
    for layers, words in (
        ([9], "no block 9 to delete: the model has blocks 1 to 8"),
        (range(1, 9), "keep at least one"),
    ):
        with pytest.raises(NormlabError, match=words), without_blocks(model, list(layers)):
            pass


def test_the_carried_statistic_is_kept_by_layer_and_position(text, go, tmp_path):
    go(tiny(text, scheme="bhyt", experiment_blocks=2, steps=2), tmp_path)
    found = normlab.load_experiments(tmp_path)
    ratio = found[found["metric"] == "carried_var_ratio"]
    assert set(ratio["layer"]) == {1, 2} and list(ratio[ratio["layer"] == 1]["other"]) == list(range(16))
    assert (ratio["value"] > 0).all()


def test_runs_that_were_not_measured_so_are_said_to_be_so(done):
    with pytest.raises(NormlabError, match="train with experiment_blocks"):
        normlab.load_experiments(done.path)


def test_the_two_halves_of_the_held_out_blocks_share_none_and_are_all(corpus):
    count = len(corpus.held_out)
    halves = [corpus.spread(count, half) for half in ("validation", "test")]
    assert sum(map(len, halves)) == count == len(corpus.spread(count))
    assert np.array_equal(halves[0], corpus.held_out[::2]) and np.array_equal(halves[1], corpus.held_out[1::2])
    assert np.array_equal(corpus.spread(3, "test"), halves[1][[0, round((len(halves[1]) - 1) / 2), -1]])


def test_a_run_is_measured_on_the_half_that_it_names(text, corpus, go, tmp_path):
    losses = {half: go(tiny(text, held_out=half, steps=2), tmp_path).eval_loss for half in ("validation", "test")}
    model = runs.read_run(runs.find_runs(tmp_path)[0]).load_model()
    assert losses["validation"] != losses["test"]
    from normlab.training.measure import mean_token_loss

    for half, loss in losses.items():
        assert mean_token_loss(model, corpus.spread(4, half), 2) == pytest.approx(loss, abs=1e-6)
