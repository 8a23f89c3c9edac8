"""probe_report and `normlab probe`: a saved model and a text in, tables and an HTML file out; bad input in one line."""

from __future__ import annotations

import pandas
import pytest
from probe_zoo import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from normlab.errors import NormlabError
from normlab.report import probe_report

TEXT = "the cat sat on the mat and the dog lay by the door while rain fell on the old grey roof of the house " * 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    pytest.importorskip("plotly")
    folder = tmp_path_factory.mktemp("model")
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *sorted(set(TEXT.split()))])}
    words["<unk>"] = len(words)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    tiny_llama().save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def test_a_saved_model_and_a_text_give_tables_and_one_self_contained_page(saved, tmp_path):
    summary = probe_report(str(saved), saved / "text.txt", out=tmp_path / "out", length=32, rows=8, progress=False)
    assert "3 blocks" in summary and str(tmp_path / "out" / "report.html") in summary
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    assert list(table.columns) == ["site", "layer", "metric", "mask", "value"]
    assert {"token_l2_mean", "grad_l2_mean", "attention_entropy", "update_effective_rank"} <= set(table["metric"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "skip_delta_loss" in page and "Do not apply to this model: saturation" in page and "<script src=" not in page
    skipped = pandas.read_csv(tmp_path / "out" / "skip_sensitivity.csv")
    assert set(skipped["part"]) == {"block", "attention", "mlp"}


def test_the_command_prints_the_summary(saved, tmp_path, capsys, monkeypatch):
    from normlab.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["probe", str(saved), "--text", str(saved / "text.txt")]) == 0
    assert "report:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a file"),
        (b"", "is empty"),
        (b"\x00\x01", "is binary"),
        (b"\xff\xfe\xfa", "is not UTF-8"),
        (b"two words", "only 2 tokens"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_in_one_line(saved, tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NormlabError, match=message) as refusal:
        probe_report(str(saved), path, out=tmp_path / "out", progress=False)
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


def test_a_model_or_tokenizer_that_cannot_be_loaded_is_named(saved, tmp_path):
    with pytest.raises(NormlabError, match="no model could be loaded from .*nowhere"):
        probe_report(str(tmp_path / "nowhere"), saved / "text.txt")
    tiny_llama().save_pretrained(tmp_path / "bare")
    with pytest.raises(NormlabError, match="no tokenizer could be loaded"):
        probe_report(str(tmp_path / "bare"), saved / "text.txt", out=tmp_path / "out")
    with pytest.raises(NormlabError, match="pass tokenizer="):
        probe_report(tiny_llama(), saved / "text.txt")
