"""`normlab diff`: two saved models, or a model and arrays, from the command line."""

import shutil

import pandas
import pytest
from test_probes_report import TEXT, save, tiny_llama, without

from normlab.cli import main
from normlab.differences import write_arrays


@pytest.fixture(scope="module")
def ported(tmp_path_factory):
    """A saved model and a port whose third norm adds 1 to its gain."""
    pytest.importorskip("plotly")
    folder = tmp_path_factory.mktemp("models")
    model = tiny_llama()
    save(model, folder / "original")
    text = folder / "text.txt"
    text.write_text(TEXT * 8)
    model.model.layers[1].post_attention_layernorm.weight.data += 1
    save(model, folder / "port")
    return folder, text, model


def test_diff_names_the_block_and_writes_a_page_and_a_table(ported, tmp_path, capsys):
    folder, text, _ = ported
    command = ["diff", str(folder / "original"), str(folder / "port"), "--text", str(text), "--length", "16"]
    assert main([*command, "--out", str(tmp_path / "page"), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("parts at block 2, MLP norm (differs by ")
    page = (tmp_path / "page" / "report.html").read_text()
    assert "parts at block 2, MLP norm" in page and "plotly" in page
    table = pandas.read_csv(tmp_path / "page" / "difference.csv")
    assert table[table.parts].iloc[0][["site", "layer"]].tolist() == ["mlp_norm_out", 2]
    added = pandas.read_csv(tmp_path / "page" / "added.csv")
    assert added[added.parts]["layer"].tolist() == [2] and "Block 2 adds most error" in page


def test_models_in_folders_of_one_name_are_told_apart(ported, tmp_path):
    folder, text, _ = ported
    models = [tmp_path / name / "final" for name in ("one", "two")]
    for model, name in zip(models, ("original", "port"), strict=True):
        shutil.copytree(folder / name, model)
    options = ["--text", str(text), "--length", "16", "--out", str(tmp_path / "page"), "--quiet"]
    assert main(["diff", *map(str, models), *options]) == 0
    assert "<h1>one/final and two/final</h1>" in (tmp_path / "page" / "report.html").read_text()


def test_diff_of_a_model_with_itself_and_bad_input_are_one_line(ported, tmp_path, capsys, refused):
    folder, text, _ = ported
    original = str(folder / "original")
    assert main(["diff", original, original, "--text", str(text), "--length", "16", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("equal: ")
    for arguments in (
        [original, str(tmp_path / "none.npz"), "--text", str(text)],
        [original, original, "--text", str(tmp_path / "none.txt")],
        [original, str(tmp_path / "b.npz"), "--text", str(text), "--gradients"],
        [original, original, "--text", str(text), "--dtype", "whole"],
        [original, str(without(folder / "original", tmp_path / "headless", "lm_head")), "--text", str(text)],
    ):
        refused("diff", *arguments, "--quiet")


def test_arrays_of_the_same_text_are_compared(ported, tmp_path, capsys):
    from normlab.report.inputs import batches, load

    folder, text, model = ported
    loaded = load(str(folder / "original"))
    ids = batches(loaded, text, 16, 4)[0]["input_ids"]
    write_arrays(model.eval(), {"input_ids": ids}, tmp_path / "port.safetensors")
    options = ["--text", str(text), "--length", "16", "--rows", "4", "--quiet"]
    assert main(["diff", str(folder / "original"), str(tmp_path / "port.safetensors"), *options]) == 0
    assert capsys.readouterr().out.startswith("parts at block 2, MLP norm")
