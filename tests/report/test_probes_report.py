"""probe_report and `normlab probe`: models and texts or images in, tables and a page out; bad input in one line."""

import gc
import json
import shutil
import weakref
from types import SimpleNamespace

import pandas
import pytest
import torch
import transformers as hf
from hub_helpers import served
from probe_zoo import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from normlab.errors import NormlabError
from normlab.report import probe_report
from normlab.report.inputs import batches, load
from normlab.report.measure import measure
from normlab.report.page import span_line

TEXT = "the cat sat on the mat and the dog lay by the door while rain fell on the old grey roof of the house " * 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    pytest.importorskip("plotly")
    return save(tiny_llama(), tmp_path_factory.mktemp("model"))


def save(model, folder):
    """A model with a tokenizer of the text's words, and the text."""
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<mask>", *sorted(set(TEXT.split()))])}
    words["<unk>"] = len(words)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "mask_token": "<mask>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


SHAPE = {"length": 16, "rows": 4, "progress": False}


def test_a_saved_model_and_a_text_give_tables_and_a_page_that_fetches_nothing(saved, tmp_path):
    summary = probe_report(str(saved), saved / "text.txt", out=tmp_path / "out", length=32, rows=8, progress=False)
    assert "3 blocks" in summary and str(tmp_path / "out" / "report.html") in summary
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    assert list(table.columns) == ["site", "layer", "metric", "mask", "value"]
    assert {"token_l2_mean", "grad_l2_mean", "attention_entropy", "update_effective_rank"} <= set(table["metric"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("Plotly.newPlot(") == page.count('"showSendToCloud": false') > 0  # no button that uploads
    assert "skip_delta_loss" in page and "Do not apply to this model: saturation" in page
    assert len(page) < 1_000_000 and page.count("<script src=") == page.count('<script src="plotly.min.js">') == 1
    assert (tmp_path / "out" / "plotly.min.js").stat().st_size > 1_000_000 and "simple_white" not in page
    skipped = pandas.read_csv(tmp_path / "out" / "skip_sensitivity.csv")
    assert set(skipped["part"]) == {"block", "attention", "mlp"}
    assert pandas.read_csv(tmp_path / "out" / "massive_activations.csv").empty
    sinks = pandas.read_csv(tmp_path / "out" / "attention_sinks.csv")[["row", "position"]].drop_duplicates()
    assert "Massive activations: none in the first batch" in page
    assert f"Attention sinks: {len(sinks) or 'none'} {'tokens of' if len(sinks) else 'in'} the first batch" in page


def test_encoder_and_decoder_are_both_in_the_table_and_on_the_page(tmp_path):
    shape = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    folder = save(hf.T5ForConditionalGeneration(hf.T5Config(**shape)), tmp_path / "t5")
    probe_report(str(folder), folder / "text.txt", out=tmp_path / "out", **SHAPE)
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    assert set(table["stack"]) == {"encoder.block", "decoder.block"}
    crossed = table[table["site"].eq("cross") & table["metric"].eq("relative_contribution")]
    assert set(crossed["stack"]) == {"decoder.block"} and set(table["metric"]) > {"grad_l2_mean"}
    assert "<h2>decoder.block</h2>" in (tmp_path / "out" / "report.html").read_text()


def test_what_one_sequence_says_of_a_span_has_no_interval():
    row = dict(
        length=2, first=3, last=4, start=2, stop=4, keep=[[0, 2], [4, 6]], skip_delta_loss=0.25, low=0.2, high=0.3
    )
    words = span_line(SimpleNamespace(**row))
    assert "blocks 3-4, loss +0.2500 [+0.2000, +0.3000]; layers[2:4] in transformers" in words
    words = span_line(SimpleNamespace(**row | dict(low=float("nan"), high=float("nan"))))
    assert "loss +0.2500, of one sequence: no interval; layers[2:4]" in words and "nan" not in words


def test_a_masked_model_predicts_hidden_tokens(tmp_path):
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    folder = save(hf.BertForMaskedLM(hf.BertConfig(**shape)), tmp_path / "bert")
    summary = probe_report(str(folder), folder / "text.txt", out=tmp_path / "out", **SHAPE)
    assert "nats a label" in summary and "cheapest 1 to drop" in summary
    (batch,) = batches(load(str(folder)), folder / "text.txt", 16, 4)
    hidden = batch["labels"] != -100
    assert bool(hidden.any(1).all()) and set(batch["input_ids"][hidden].tolist()) == {3}


def test_rows_are_as_long_as_the_models_table_of_positions_at_most(saved):
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    roberta = hf.RobertaForMaskedLM(hf.RobertaConfig(**shape, max_position_embeddings=20, pad_token_id=1))
    xlnet = hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48))
    tokenizer = hf.AutoTokenizer.from_pretrained(saved)
    # RoBERTa's first position is 2, and XLNet's configuration says -1: no limit.
    for model, longest in ((roberta, 18), (xlnet, 32)):
        batch, *_ = batches(load(model, tokenizer), saved / "text.txt", 32, 4)
        assert batch["input_ids"].shape[1] == longest and model(**batch).loss.isfinite()


def test_an_experiment_that_fails_in_the_models_code_is_left_out_by_name(saved, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(saved)

    def hook(layer, args, kwargs):
        if not torch.is_grad_enabled():  # as experiments run it
            raise KeyError("mine")

    model.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)
    probe_report(model, saved / "text.txt", tokenizer=hf.AutoTokenizer.from_pretrained(saved), out=tmp_path, **SHAPE)
    assert "skip_sensitivity: KeyError: &#x27;mine&#x27;" in (tmp_path / "report.html").read_text()
    assert "token_l2_mean" in set(pandas.read_parquet(tmp_path / "table.parquet")["metric"])


def test_a_model_of_images_is_measured_on_a_folder_of_them(tmp_path):
    image = pytest.importorskip("PIL.Image")
    config = hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)
    hf.SwinForImageClassification(config).save_pretrained(tmp_path / "swin")
    hf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "swin")
    with pytest.raises(NormlabError, match="reads images: give a folder"):
        probe_report(str(tmp_path / "swin"), tmp_path, out=tmp_path / "out", **SHAPE)
    for i in range(3):
        image.new("RGB", (40, 30), (80 * i, 10, 200)).save(tmp_path / f"{i}.png")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:40])
    with pytest.raises(NormlabError, match=r"0\.png cannot be read as an image: "):
        probe_report(str(tmp_path / "swin"), tmp_path / "cut", out=tmp_path / "out", **SHAPE)
    probe_report(str(tmp_path / "swin"), tmp_path, out=tmp_path / "out", **SHAPE)
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    assert "token_l2_mean" in set(table["metric"]) and "grad_l2_mean" not in set(table["metric"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "3 images of" in page and "not for" in page


def test_revisions_are_layers_over_training_in_their_order(saved, tmp_path):
    for seed, name in enumerate(("step9", "step10")):
        torch.manual_seed(seed)
        save(tiny_llama(), tmp_path / name)
    found = {"out": tmp_path / "out", "revisions": ["step9", "step10"], **SHAPE}
    summary = probe_report(str(tmp_path), saved / "text.txt", **found)
    assert summary.startswith("step9: loss")
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    assert list(dict.fromkeys(table["revision"])) == ["step9", "step10"] and "stack" not in table
    assert "over training" in (tmp_path / "out" / "report.html").read_text()
    alone = load(str(tmp_path), revision="step10")
    (one,) = measure(alone, batches(alone, saved / "text.txt", 16, 4))
    theirs = table[table["revision"].eq("step10")]["value"].to_numpy()
    assert theirs == pytest.approx(one.stats.to_pandas()["value"].to_numpy(), nan_ok=True)
    with pytest.raises(NormlabError, match="holds no folder 'step11': it has"):
        probe_report(str(tmp_path), saved / "text.txt", **{**found, "revisions": ["step11"]})


def test_revisions_of_a_hub_model_are_fetched_by_their_names(saved, tmp_path, monkeypatch):
    torch.manual_seed(1)
    revisions = {"step1": saved, "step2": save(tiny_llama(initializer_range=0.4), tmp_path / "second")}
    found = {"out": tmp_path / "out", **SHAPE}
    with served(revisions, tmp_path / "cache", monkeypatch) as asked:
        probe_report("someone/tiny", saved / "text.txt", revisions=list(revisions), **found)
        with pytest.raises(NormlabError, match="no model could be loaded from someone/tiny"):
            probe_report("someone/tiny", saved / "text.txt", revisions=["step3"], **found)
    assert {f"/someone/tiny/resolve/{name}/config.json" for name in ("step1", "step2", "step3")} <= set(asked)
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    for name, folder in revisions.items():
        loaded = load(str(folder))
        (one,) = measure(loaded, batches(loaded, saved / "text.txt", 16, 4))
        theirs = table[table["revision"].eq(name)]["value"].to_numpy()
        assert theirs == pytest.approx(one.stats.to_pandas()["value"].to_numpy(), nan_ok=True), name


def test_two_models_and_two_texts_stand_side_by_side_and_only_one_thing_is_compared(saved, tmp_path):
    torch.manual_seed(1)
    other = save(tiny_llama(), tmp_path / "other")
    text = saved / "text.txt"
    probe_report([str(saved), str(other)], text, out=tmp_path / "pair", **SHAPE)
    table = pandas.read_csv(tmp_path / "pair" / "table.csv")
    assert set(table["model"]) == {str(saved), str(other)}
    (tmp_path / "second.txt").write_text(" ".join(reversed(TEXT.split())))
    probe_report(str(saved), [text, tmp_path / "second.txt"], out=tmp_path / "texts", **SHAPE)
    table = pandas.read_csv(tmp_path / "texts" / "table.csv")
    assert list(dict.fromkeys(table["text"])) == ["text.txt", "second.txt"]
    with pytest.raises(NormlabError, match="several models and texts cannot be compared at once"):
        probe_report([str(saved), str(other)], [text, text])


def test_one_model_is_in_memory_at_a_time(saved, tmp_path, monkeypatch):
    alive: list[weakref.ref] = []
    counts: list[int] = []

    def counted(*arguments, **options):
        gc.collect()
        counts.append(sum(ref() is not None for ref in alive))
        loaded = load(*arguments, **options)
        alive.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr("normlab.report.load", counted)
    probe_report([str(saved)] * 3, saved / "text.txt", out=tmp_path / "out", **SHAPE)
    assert counts == [0, 0, 0]


def test_two_models_of_one_name_are_two_lines_and_what_was_left_out_of_each_is_said(saved, tmp_path):
    reader = load(str(saved)).reader
    models = [tiny_llama(), tiny_llama()]
    models[1].model.layers[2].mlp.register_forward_hook(lambda module, args, output: torch.tanh(output))
    models[1].model.layers[2].register_forward_hook(lambda module, args, output: torch.tanh(output))
    given = {"tokenizer": reader, "out": tmp_path / "out", **SHAPE}
    probe_report(models, saved / "text.txt", **given)
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    assert list(dict.fromkeys(table["model"])) == ["LlamaForCausalLM", "LlamaForCausalLM (2)"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Left out: LlamaForCausalLM (2), attn of layer 3: the block&#x27;s output is not its input" in page
    assert "Left out: LlamaForCausalLM, " not in page


def test_a_model_of_images_and_text_is_measured_on_text(tmp_path):
    text = hf.LlamaConfig(
        **{name: getattr(tiny_llama().config, name) for name in ("vocab_size", "hidden_size")},
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=24,
    )
    vision = hf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    folder = save(hf.LlavaForConditionalGeneration(config), tmp_path / "llava")
    summary = probe_report(str(folder), folder / "text.txt", out=tmp_path / "out", **{**SHAPE, "length": 32})
    assert "2 blocks" in summary and "nats a label" in summary
    page = (tmp_path / "out" / "report.html").read_text()
    assert "pieces of 24 tokens" in page and "<h1>llava, layer by layer</h1>" in page


def test_device_and_dtype_that_do_not_exist_are_refused_in_one_line(saved):
    with pytest.raises(NormlabError, match="'float12' is no float type"):
        probe_report(str(saved), saved / "text.txt", dtype="float12")
    with pytest.raises(NormlabError, match="device 'nowhere' cannot be used"):
        probe_report(str(saved), saved / "text.txt", device="nowhere")


def test_the_command_prints_the_summary(saved, tmp_path, capsys, monkeypatch):
    from normlab.cli import main

    monkeypatch.chdir(tmp_path)
    flags = ["--device", "cpu", "--dtype", "bfloat16", "--quiet"]
    assert main(["probe", str(saved), "--text", str(saved / "text.txt"), *flags]) == 0
    assert "report:" in capsys.readouterr().out
    assert "dtype: bfloat16" in (tmp_path / f"probe-{saved.name}" / "mergekit-drop-1.yaml").read_text()


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
    config = hf.AutoConfig.from_pretrained(shutil.copytree(saved, tmp_path / "broken"))
    config.num_key_value_heads = 0  # no class can be built from this: transformers divides by it
    config.save_pretrained(tmp_path / "broken")
    with pytest.raises(NormlabError, match=r"no model could be loaded from .*broken: ZeroDivisionError: "):
        probe_report(str(tmp_path / "broken"), saved / "text.txt")
    tiny_llama().save_pretrained(tmp_path / "bare")
    with pytest.raises(NormlabError, match="no tokenizer could be loaded"):
        probe_report(str(tmp_path / "bare"), saved / "text.txt", out=tmp_path / "out")
    loaded = load(str(saved))
    wrong = [{"input_ids": torch.full((2, 16), 10_000)}]  # no such row of the embeddings
    with pytest.raises(NormlabError, match=r"LlamaForCausalLM does not run on input_ids \(2, 16\): IndexError: "):
        measure(loaded, wrong)
    with pytest.raises(NormlabError, match="pass tokenizer="):
        probe_report(tiny_llama(), saved / "text.txt")


def test_weights_that_do_not_fit_the_configuration_are_refused(saved, tmp_path):
    """Otherwise a random model is measured. The other ways are in tests/models/test_models_exported.py."""
    folder = shutil.copytree(saved, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(NormlabError, match="the weights lack") as refused:
        load(str(folder))
    assert "\n" not in str(refused.value)


def test_weights_of_a_head_that_the_task_does_not_have_are_left_out(tmp_path):
    shape = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = hf.BertConfig(**shape)
    folder = save(hf.BertForPreTraining(config), tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": ["BertForMaskedLM"]}))
    assert load(str(folder)).task == "masked"


def test_the_loss_is_per_label_and_the_models_mode_stays(saved, tmp_path):
    model, tokenizer = tiny_llama().train(), hf.AutoTokenizer.from_pretrained(saved)
    loaded = load(saved)
    data = batches(loaded, saved / "text.txt", 16, 5)
    assert [len(batch["input_ids"]) for batch in data] == [4, 1]
    with torch.no_grad():
        losses = [float(loaded.model(**batch).loss) for batch in data]
    assert measure(loaded, data)[0].loss == pytest.approx((4 * losses[0] + losses[1]) / 5, rel=1e-5)
    probe_report(
        model, saved / "text.txt", tokenizer=tokenizer, out=tmp_path / "out", length=16, rows=2, progress=False
    )
    assert model.training
    with pytest.raises(NormlabError, match="is a file: name a folder"):
        probe_report(saved, saved / "text.txt", out=saved / "text.txt", progress=False)
