"""Norms of an existing model removed one by one: each norm then, the table, resumption, the final model."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from model_helpers import assert_near, assert_state, tiny_model, tokens
from training_helpers import WORDS, write_text
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import normlab
from normlab import NormlabError, NormlabForCausalLM
from normlab.cli import main
from normlab.experimental import norm_removal
from normlab.experimental.norm_removal import (
    RemovalConfig,
    as_llama,
    fold_removed,
    load_removable,
    removable_norms,
    remove_norm,
    remove_norms,
)
from normlab.files import locked
from normlab.training.config import CorpusSpec
from normlab.training.measure import mean_token_loss
from normlab.training.text.corpus import Corpus, corpus_of

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": True}
SITES = ["model.layers.0.post_attention_layernorm", "model.layers.0.input_layernorm", "model.norm"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return corpus_of(CorpusSpec(str(text), vocab_size=300, block_length=16), text.parent / "cache")


def saved(corpus: Corpus, folder: Path, stock: bool = False) -> Path:
    """An untrained model with uneven gains, and its tokenizer."""
    torch.manual_seed(0)
    fields = {**SIZES, "vocab_size": corpus.vocab_size, "eos_token_id": corpus.eos_token_id, "bos_token_id": None}
    kind, config = (LlamaForCausalLM, LlamaConfig) if stock else (NormlabForCausalLM, normlab.NormlabConfig)
    model: Any = kind(config(**fields))  # type: ignore[operator]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    corpus.tokenizer().save_pretrained(folder)
    return folder


def removed(text: Path, model: Path, out: Path, **fields: Any) -> pd.DataFrame:
    settings = {"steps": 2, "batch_size": 2, "lr": 3e-3, "block_length": 16, "eval_blocks": 4, **fields}
    config = RemovalConfig(corpus=str(text), **settings)
    return remove_norms(model, out, config, cache_dir=text.parent / "cache", progress=False)


@pytest.mark.parametrize("stock", [False, True])
def test_every_norm_goes_in_turn_and_what_is_left_has_the_last_loss(stock, text, corpus, tmp_path):
    folder = saved(corpus, tmp_path / "trained", stock)
    table = removed(text, folder, tmp_path / "out")
    assert list(table["site"]) == SITES and list(table["step"]) == [1, 2, 3]
    assert list(table["loss_before"][1:]) == list(table["loss_tuned"][:-1])
    assert (table["loss_removed"] != table["loss_before"]).all()
    assert (table["loss_tuned"] != table["loss_removed"]).all()
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "removal.parquet"), table)
    assert not list((tmp_path / "out").glob("norm-*"))
    load = AutoModelForCausalLM.from_pretrained if stock else normlab.load_model
    left = load(tmp_path / "out" / "model")
    assert type(left).__name__ == ("LlamaForCausalLM" if stock else "NormlabForCausalLM")
    blocks = corpus.spread(4)
    assert mean_token_loss(left, blocks, 2) == pytest.approx(table["loss_tuned"].iloc[-1], rel=1e-5)
    x = torch.randn(2, 3, 32)
    for name in SITES:
        norm = left.get_submodule(name)
        assert_near(norm(5 * x), 5 * norm(x), 1e-6, name)
        if name != SITES[-1]:  # whose reader is the embeddings' matrix, too
            assert_near(norm(x), x, 1e-6, name)


def test_a_stopped_removal_goes_on_at_the_norm_it_was_at_and_gives_the_same_bits(text, corpus, tmp_path, monkeypatch):
    folder = saved(corpus, tmp_path / "trained")
    whole = removed(text, folder, tmp_path / "whole")
    fine_tune, calls = norm_removal.fine_tune, []

    def stops_at_the_second(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        fine_tune(*arguments)

    monkeypatch.setattr(norm_removal, "fine_tune", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        removed(text, folder, tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").glob("norm-*")] == ["norm-001"]
    parts = removed(text, folder, tmp_path / "parts")
    assert len(calls) == 2 + 2
    pd.testing.assert_frame_equal(parts, whole, check_exact=True)
    a, b = (normlab.load_model(tmp_path / out / "model") for out in ("whole", "parts"))
    assert_state(b, a.state_dict())
    removed(text, folder, tmp_path / "parts")
    assert len(calls) == 4  # finished: nothing is done again
    with pytest.raises(NormlabError, match="begun with another config"):
        removed(text, folder, tmp_path / "parts", lr=1e-3)


def test_a_removed_norm_divides_by_the_mean_rms_of_all_tokens():
    model = tiny_model("tapernorm", taper_final=True)
    name, ids = "model.layers.1.input_layernorm", [tokens(2, 6), tokens(1, 6, seed=2)]
    norm, read = model.get_submodule(name), []
    handle = norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].double()))
    for batch in ids:
        model(batch)
    handle.remove()
    rms = torch.cat([(x.square().mean(-1) + norm.eps).sqrt().flatten() for x in read]).mean()
    assert remove_norm(model, name, ids) == pytest.approx(rms.item(), rel=1e-6)
    x = torch.randn(3, 32, dtype=torch.float64)
    assert_near(norm(x.float()), norm.weight.double() * x / rms, 1e-6)


@pytest.mark.parametrize(
    ("scheme", "fields"),
    [("pre_rmsnorm", {}), ("lns", {}), ("pre_rmsnorm", {"zero_centred": True, "qk_norm": "rms_head"})],
)
def test_the_model_is_the_same_function_before_any_norm_goes(scheme, fields, tmp_path):
    model, ids = tiny_model(scheme, **fields), tokens()
    model.save_pretrained(tmp_path)
    ready = load_removable(tmp_path)
    assert_near(ready(ids).logits, model(ids).logits, 2e-6)
    with pytest.raises(NormlabError, match="not been removed"):
        fold_removed(ready)
    for name in removable_norms(ready):
        remove_norm(ready, name, [ids])
    expected = ready(ids).logits
    fold_removed(ready)
    assert_near(ready(ids).logits, expected, 2e-5)
    if fields:
        with pytest.raises(NormlabError, match="queries"):
            as_llama(ready)
    else:
        assert_near(as_llama(ready)(ids).logits, expected, 2e-5)


@pytest.mark.parametrize("scheme", ["pre_layernorm", "bhyt", "peri_ln", "post_rmsnorm", "gpas", "dyt", "siamese_norm"])
def test_norms_that_no_gain_can_stand_for_are_refused_in_one_line(scheme, tmp_path):
    tiny_model(scheme).save_pretrained(tmp_path)
    with pytest.raises(NormlabError, match=f"norms of scheme {scheme} cannot be removed") as caught:
        load_removable(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_the_command_prints_the_table_and_refuses_what_it_cannot_do(text, corpus, tmp_path, capsys, refused):
    folder = saved(corpus, tmp_path / "trained")
    fixed = ["--corpus", str(text), "--cache-dir", str(text.parent / "cache"), "--quiet", "--batch-size", "2"]
    evaluation = ["--eval-blocks", "2", "--steps", "0"]

    def command(out, length):
        return ["remove-norms", str(folder), "--out", str(out), *evaluation, *fixed, "--block-length", str(length)]

    assert "the model was made for at most 16" in refused(*command(tmp_path / "out", 32))
    assert main(command(tmp_path / "fits", 16)) == 0
    printed = capsys.readouterr().out
    assert all(site in printed for site in SITES) and "loss_tuned" in printed
    table = pd.read_parquet(tmp_path / "fits" / "removal.parquet")
    assert (table["loss_tuned"] == table["loss_removed"]).all()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text(" ".join(WORDS))
    assert "holds something else (thesis.tex)" in refused(*command(tmp_path / "other", 16))
    with locked(tmp_path / "busy" / "removal.lock", ""):
        assert "another process removes norms in" in refused(*command(tmp_path / "busy", 16))


@torch.no_grad()
def test_the_shipped_table_is_of_the_shipped_model():
    """Its first row has the rms before any norm is removed: here on text of another part, so about the same."""
    (path,) = (Path(__file__).parents[2] / "data" / "removal").glob("*.csv")
    first, model = pd.read_csv(path).iloc[0], normlab.load_model(path.stem)
    taken = []
    model.get_submodule(first["site"]).register_forward_pre_hook(lambda norm, inputs: taken.append(inputs[0].float()))
    model(normlab.load_held_out(path.stem)[:16], use_cache=False)
    assert taken[0].square().mean(-1).sqrt().mean().item() == pytest.approx(first["rms"], rel=0.05)


@pytest.mark.slow
def test_the_shipped_model_learns_to_do_without_its_norms(tmp_path):
    config = RemovalConfig(steps=20, eval_blocks=32, corpus="packages")
    table = remove_norms("pre_rmsnorm-d8", tmp_path / "out", config, progress=False)
    assert len(table) == 17 and table["loss_tuned"].iloc[-1] < table["loss_before"].iloc[0] + 0.6
    left = normlab.load_model(tmp_path / "out" / "model")
    x = torch.randn(1, 2, 128)
    assert all(torch.allclose(norm(3 * x), 3 * norm(x)) for norm in map(left.get_submodule, table["site"]))
