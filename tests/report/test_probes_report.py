"""probe_report and `normlab probe`: models and texts or images in, tables and a page out; bad input in one line."""

import copy
import gc
import json
import math
import re
import shutil
import weakref
from types import SimpleNamespace

import pandas
import pytest
import torch
import transformers as hf
from hub_helpers import served
from probe_zoo import tiny_llama
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from normlab.errors import NormlabError
from normlab.figures.report import layer_figure
from normlab.figures.theme import style_of
from normlab.probes import layer_maps
from normlab.report import probe_report, short_names
from normlab.report.facts import growth, left_out_of_all, number, step
from normlab.report.inputs import batches, load, token_text
from normlab.report.measure import Measured, Recorded, _text, experiment, measure
from normlab.report.page import cut_lines, series_page

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


ENCODER = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SHAPE = {"length": 16, "rows": 4, "progress": False}


def measured(loaded, folder):
    """The first stack of a model, recorded on the text of a folder."""
    return measure(loaded, batches(loaded, folder / "text.txt", 16, 4))[0]


@pytest.fixture(scope="module")
def probed(saved, tmp_path_factory):
    """The folder of a report on the saved model, and the summary."""
    folder = tmp_path_factory.mktemp("report")
    return folder, probe_report(str(saved), saved / "text.txt", out=folder, length=32, rows=8, progress=False)


def test_a_saved_model_and_a_text_give_tables_and_a_page_that_fetches_nothing(probed):
    folder, summary = probed
    assert "3 blocks" in summary and str(folder / "report.html") in summary
    table = pandas.read_parquet(folder / "table.parquet")
    assert list(table.columns) == ["site", "layer", "metric", "mask", "value"]
    assert {"token_l2_mean", "grad_l2_mean", "attention_entropy", "update_effective_rank"} <= set(table["metric"])
    page = (folder / "report.html").read_text()
    assert page.count("Plotly.newPlot(") == page.count('"showSendToCloud": false') > 0  # no button that uploads
    assert "skip_delta_loss" in page and "tanh_input_max, " in page
    assert "<summary>Left out, and why</summary><p>sink_share, " in page
    assert len(page) < 1_000_000 and page.count("<script src=") == page.count('<script src="plotly.min.js">') == 1
    assert (folder / "plotly.min.js").stat().st_size > 1_000_000 and "simple_white" not in page
    skipped = pandas.read_csv(folder / "skip_sensitivity.csv")
    assert set(skipped["part"]) == {"block", "attention", "mlp"}
    assert pandas.read_csv(folder / "massive_activations.csv").empty
    assert re.search("Massive activations: none [(].*1,000 .*[)]; the nearest is .* “[a-z]+” at position [0-9]+", page)


def test_the_page_opens_with_facts_then_links_then_folded_figures_without_a_path_or_a_sentence_twice(saved, probed):
    folder, _ = probed
    page = (folder / "report.html").read_text()
    opening, _, rest = page.partition("<h2>Contents</h2>")
    facts = re.findall("<li>(.*?)</li>", opening)
    assert [fact.split()[0] for fact in facts] == ["The", "Block", "Cheapest", "Massive", "Attention"]
    assert facts[4].startswith("Attention sinks: ")
    parts = re.findall('<details id="(.*?)"(.*?)><summary>(.*?)</summary>', rest)
    assert re.findall('<a href="#(.*?)">(.*?)</a>', rest) == [(name, title) for name, _, title in parts]
    assert [is_open for _, is_open, _ in parts] == [" open"] * 2 + [""] * (len(parts) - 2)
    assert str(saved.parent) not in page and f"of {saved.name}/" not in page
    said = [sentence for text in re.findall("<(?:li|p)>([^<]+)<", page) for sentence in text.split(". ")]
    assert len(said) == len(set(said)) > 20
    branches = pandas.read_csv(folder / "branches.csv")
    assert json.loads((folder / "llm-drop-1.json").read_text()) == {
        name: json.loads(branches[name][0]) for name in ("drop_attn_list", "drop_mlp_list")
    }
    span = pandas.read_csv(folder / "spans.csv").iloc[0]
    assert facts[2].startswith(f"Cheapest to leave out: block {span['first']}, for {span['skip_delta_loss']:+.3g} nats")
    table = pandas.read_csv(folder / "table.csv").query("site == 'block_out' and mask == 'all'")
    first, last = table[table["metric"] == "rms"].set_index("layer")["value"].loc[[1, 3]]
    assert f"{last / first:.3g}-fold" in facts[0] or f"to {last / first:.3g} of" in facts[0] or "keeps" in facts[0]


def test_a_section_says_how_many_pieces_it_is_of_where_these_are_not_all(saved, probed, tmp_path):
    folder, _ = probed
    page = (folder / "report.html").read_text()
    assert "8 pieces of 32 tokens of text.txt; loss" in page
    for said in ("bars: 95% interval", "0 = embeddings", r"final prediction\)", "of its norm"):
        assert re.search(f"{said}, on the first 4 pieces</p>", page), said
    assert "The first 4 pieces" not in page and page.count("on the first 4 pieces") == 4
    assert re.search("where there is enough[.]</p>", page) and "beside those before it; bars: 95% interval</p>" in page
    assert page.count("In the first batch of 4 pieces: ") + page.count("None in the first batch of 4 pieces: ") == 2
    loaded = load(str(saved))
    (first, second) = batches(loaded, saved / "text.txt", 32, 8)
    with torch.no_grad():
        of_four, of_rest = (float(loaded.model(**batch).loss) for batch in (first, second))
    assert pandas.read_csv(folder / "skip_sensitivity.csv")["loss"].iloc[0] == pytest.approx(of_four, rel=1e-4)
    assert of_four != pytest.approx(of_rest, rel=1e-3)
    probe_report(str(saved), saved / "text.txt", out=tmp_path, length=16, rows=16, progress=False)
    page = (tmp_path / "report.html").read_text()
    assert re.search("<li>Cheapest to leave out: .* nats a token, on the first 8 pieces[.]</li>", page)
    assert page.count("on the first 8 pieces") == 3 and page.count("on the first 4 pieces") == 4


def test_a_text_goes_where_offloaded_weights_are_run(saved):
    accelerate, loaded = pytest.importorskip("accelerate"), load(str(saved))
    there = measured(loaded, saved).loss
    accelerate.cpu_offload(loaded.model, execution_device=torch.device("cpu"))
    assert measured(loaded, saved).loss == there


@pytest.mark.parametrize("kind", ["BertModel", "DistilBertModel", "BertForSequenceClassification"])
def test_a_model_without_a_language_model_head_is_measured_without_a_loss(tmp_path, kind):
    of_distilbert = dict(dim=32, hidden_dim=48, n_heads=4, n_layers=2)
    config = getattr(hf, kind).config_class(**ENCODER, **of_distilbert if kind == "DistilBertModel" else {})
    folder = save(getattr(hf, kind)(config), tmp_path / "encoder")
    summary = probe_report(str(folder), folder / "text.txt", out=tmp_path / "out", **{**SHAPE, "length": 32})
    page = (tmp_path / "out" / "report.html").read_text()
    for said in (summary, page):
        assert said.count("without a loss: the model has no language-model head") == 1
    assert "skip_sensitivity, logit_lens, spans, branches: these need a loss" in page
    assert "turns the stream least" in page and pandas.read_csv(tmp_path / "out" / "void_tokens.csv").shape[0] == 4
    assert {"token_l2_mean", "attention_entropy"} <= set(pandas.read_csv(tmp_path / "out" / "table.csv")["metric"])
    assert pandas.read_csv(tmp_path / "out" / "angular_distance.csv").shape == (3, 4)
    for name in ("massive_activations", "attention_sinks"):
        assert "token" in pandas.read_csv(tmp_path / "out" / f"{name}.csv")
    assert not (tmp_path / "out" / "skip_sensitivity.csv").exists()
    given = load(getattr(hf, kind)(config), load(str(folder)).reader)
    assert given.task == "encoder" and "labels" not in batches(given, folder / "text.txt", 16, 4)[0]


def without(folder, copy, part):
    """A copy of a saved model whose files lack all weights with that part in their names."""
    shutil.copytree(folder, copy)
    kept = {name: x for name, x in load_file(copy / "model.safetensors").items() if part not in name}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_head_that_the_files_lack_is_named_and_nothing_is_measured_by_it(saved, tmp_path):
    folder = without(saved, tmp_path / "headless", "lm_head")
    summary = probe_report(str(folder), saved / "text.txt", out=tmp_path / "out", **SHAPE)
    page = (tmp_path / "out" / "report.html").read_text()
    why = "without a loss: the head is random, as the files lack lm_head.weight"
    assert why in summary and why in page
    assert "grad_l2_mean" not in set(pandas.read_csv(tmp_path / "out" / "table.csv")["metric"])
    assert "logit_lens, spans, branches: these need a loss" in page
    assert not (tmp_path / "out" / "logit_lens.csv").exists()
    encoder = save(hf.BertModel(hf.BertConfig(**ENCODER)), tmp_path / "encoder")
    assert load(str(without(encoder, tmp_path / "poolerless", "pooler"))).remark == (
        "random weights that no layer reads, as the files lack pooler.dense.bias and 1 more"
    )
    for part in ("layer.1.output.dense.weight", "word_embeddings"):
        with pytest.raises(NormlabError, match=f"the weights lack .*{part}"):
            load(str(without(encoder, tmp_path / part, part)))


def test_a_loss_above_a_guess_is_said(saved):
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    model.lm_head.weight.data *= 100
    loaded = load(model, hf.AutoTokenizer.from_pretrained(saved))
    one = measured(loaded, saved)
    words = f"above a guess (ln {model.config.vocab_size} = {math.log(model.config.vocab_size):.4f}): a random head"
    assert words in one.loss_line(loaded)
    one.loss = math.log(model.config.vocab_size) - 1e-3
    assert one.loss_line(loaded) == f"loss {one.loss:.4f} nats a label"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_of_routers_is_no_part_of_the_labels_loss(saved, tmp_path, dtype):
    shape = dict(ENCODER, num_key_value_heads=2, num_local_experts=2, router_aux_loss_coef=0.5)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**shape)).to(dtype)
    loaded = load(model, hf.AutoTokenizer.from_pretrained(saved))
    wanted = measured(loaded, saved)
    model.config.output_router_logits = True
    one = measured(loaded, saved)
    assert one.loss == wanted.loss and model.config.output_router_logits
    assert one.values["value"].to_numpy() == pytest.approx(wanted.values["value"].to_numpy(), nan_ok=True)
    if dtype == torch.float32:
        experiment(one, loaded, batches(loaded, saved / "text.txt", 16, 1), progress=False)
        assert not set(one.left_out) & {"skip_sensitivity", "logit_lens"}
    with pytest.raises(NormlabError, match="does not run"):
        measure(loaded, [{"input_ids": torch.full((2, 16), 10_000)}])
    assert model.config.output_router_logits


def test_a_mergekit_file_names_the_models_files_or_asks_for_them(saved):
    reader = hf.AutoTokenizer.from_pretrained(saved)
    one = Measured("", None, None, None, 0, {"spans": pandas.DataFrame([dict(length=1, keep=[[0, 1], [2, 3]])])})
    for model in (str(saved), hf.AutoModelForCausalLM.from_pretrained(saved)):
        (text,) = one.configurations(load(model, reader)).values()
        assert text.startswith("slices:") and text.count(f"- model: {json.dumps(str(saved))}\n") == 2
    (text,) = one.configurations(load(tiny_llama(), reader)).values()
    assert text.startswith("# The model was given without its files: fill in their path")
    assert text.count('- model: "PATH OF THE SAVED LlamaForCausalLM"') == 2


def test_massive_activations_and_sinks_are_named_by_their_tokens(saved, tmp_path):
    model, reader = hf.AutoModelForCausalLM.from_pretrained(saved), hf.AutoTokenizer.from_pretrained(saved)
    model.model.embed_tokens.weight.data[reader.mask_token_id, 5] = 5000.0
    (tmp_path / "text.txt").write_text("the cat <mask> sat on the mat and " * 20)
    probe_report(model, tmp_path / "text.txt", tokenizer=reader, out=tmp_path, **{**SHAPE, "length": 32, "rows": 1})
    page, table = (tmp_path / "report.html").read_text(), pandas.read_csv(tmp_path / "massive_activations.csv")
    assert set(table["token"]) == {"<mask>"} and list(table["position"].unique()) == [2, 10, 18, 26]
    assert "Massive activations: 4 tokens of the first batch, “&lt;mask&gt;” at position 2, 10, 18 ...; " in page
    assert "<td>&lt;mask&gt;</td>" in page and "<mask>" not in page
    assert "In the first batch: |h| above 100 and above 1,000 times the layer&#x27;s median of |h|" in page


def test_the_texts_of_tokens_in_a_row_are_the_text():
    """Llama 2's decoder drops the space before the first word, BERT's writes one before each; GPT-2's keeps bytes."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces = ["<unk>", "▁the", "the", "▁cat", "s", "▁", "▁▁", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>"]
    words = ["[UNK]", "the", "cat", "##s", "."]
    letters = ["Ġthe", "the", "Ġcat", "s", "â", "Ċ"]

    def texts(decoder, vocabulary):
        known = {piece: token for token, piece in enumerate(vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(known, unk_token=vocabulary[0]))
        tokenizer.decoder = decoder
        reader = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=vocabulary[0])
        return reader, {piece: token_text(reader, token) for piece, token in known.items()}

    reader, of_llama = texts(decoders.Sequence(steps), pieces)
    row = ["▁the", "▁cat", "s", "<0x0A>", "the", "▁", "▁▁", "s"]
    joined = "".join(of_llama[piece] for piece in row)
    assert joined == " the cats\nthe   s" and joined[1:] == reader.decode([pieces.index(piece) for piece in row])
    assert of_llama["<unk>"] == "<unk>" and of_llama["<0xE2>"] == "\ufffd"
    # One that is named alone has only the space that tells it from another token.
    assert [_text(reader, torch.tensor(token)) for token in range(4)] == ["<unk>", " the", "the", " cat"]
    reader, of_bert = texts(decoders.WordPiece(), words)
    assert of_bert == {"[UNK]": " [UNK]", "the": " the", "cat": " cat", "##s": "s", ".": "."}
    assert [_text(reader, torch.tensor(token)) for token in range(5)] == words
    _, of_gpt2 = texts(decoders.ByteLevel(), letters)
    assert of_gpt2 == {"Ġthe": " the", "the": "the", "Ġcat": " cat", "s": "s", "â": "\ufffd", "Ċ": "\n"}


def test_a_learned_sink_is_named_as_one(saved, tmp_path):
    shape = dict(ENCODER, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**shape, pad_token_id=0, attn_implementation="eager"))
    for layer, most in zip(model.model.layers, (0.0, 20.0), strict=True):
        layer.self_attn.sinks.data.fill_(most)
    reader = hf.AutoTokenizer.from_pretrained(saved)
    probe_report(model, saved / "text.txt", tokenizer=reader, out=tmp_path, **{**SHAPE, "length": 32, "rows": 1})
    page = (tmp_path / "report.html").read_text()
    assert "Attention sinks: none (" in page
    assert "The learned sink takes at most 1 of the attention, in layer 2." in page
    table = pandas.read_csv(tmp_path / "table.csv").query("metric == 'sink_share' and mask == 'all'").set_index("layer")
    assert 0 < table.loc[1, "value"] < 0.5 and table.loc[2, "value"] == pytest.approx(1, abs=1e-6)


def test_lines_of_our_models_have_the_colour_of_their_scheme():
    rows = [
        {"model": name, "site": "block_out", "layer": layer, "metric": "rms", "mask": "all", "value": 1.0 + layer}
        for name in ("other", "ours", "twin", "bhyt")
        for layer in (1, 2)
    ]
    schemes = {"ours": "pre_rmsnorm", "twin": "pre_rmsnorm", "bhyt": "bhyt"}
    other, ours, twin, bhyt = layer_figure(pandas.DataFrame(rows), "rms", by="model", schemes=schemes).data
    assert (ours.line.color, ours.line.dash) == (style_of("pre_rmsnorm").color, style_of("pre_rmsnorm").dash)
    assert bhyt.line.color == style_of("bhyt").color and twin.line.color == ours.line.color
    assert twin.line.dash != ours.line.dash and other.line.color not in (ours.line.color, bhyt.line.color)


def test_directories_are_called_by_as_much_of_their_names_as_tells_them_apart(tmp_path):
    folders = [tmp_path / "a" / "model", tmp_path / "b" / "model"]
    for folder in folders:
        folder.mkdir(parents=True)
    assert list(short_names(map(str, folders)).values()) == ["a/model", "b/model"]
    assert list(short_names([str(folders[0]), "someone/model"]).values()) == ["model", "someone/model"]


def test_encoder_and_decoder_are_both_in_the_table_and_on_the_page(tmp_path):
    shape = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    folder = save(hf.T5ForConditionalGeneration(hf.T5Config(**shape)), tmp_path / "t5")
    summary = probe_report(str(folder), folder / "text.txt", out=tmp_path / "out", **SHAPE)
    table = pandas.read_parquet(tmp_path / "out" / "table.parquet")
    assert set(table["stack"]) == {"encoder.block", "decoder.block"}
    crossed = table[table["site"].eq("cross") & table["metric"].eq("relative_contribution")]
    assert set(crossed["stack"]) == {"decoder.block"} and set(table["metric"]) > {"grad_l2_mean"}
    assert "<h2>decoder.block</h2>" in (tmp_path / "out" / "report.html").read_text()
    for stack in ("encoder.block", "decoder.block"):
        assert f"\n{stack}: 2 blocks\n" in f"\n{summary}" and f"\n{stack}: cheapest 1 to drop: " in summary


def test_an_encoder_decoder_without_a_head_is_measured_without_a_loss_on_what_the_whole_model_reads(saved):
    shape = dict(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=0, decoder_start_token_id=2)
    whole, reader = hf.BartForConditionalGeneration(hf.BartConfig(**shape, **heads)), load(str(saved)).reader
    body = load(whole.model, reader)
    one = measured(body, saved)
    assert one.loss is None and body.no_loss == "the model has no language-model head"
    shared = ["site", "layer", "metric", "mask"]
    both = measured(load(whole, reader), saved).values.merge(one.values, on=shared).query("metric == 'rms'")
    assert len(both) > 4 and list(both["value_x"]) == pytest.approx(list(both["value_y"]))
    m2m = hf.M2M100ForConditionalGeneration(hf.M2M100Config(**shape, **heads))  # it has no method that shifts
    assert measured(load(m2m, reader), saved).loss > 0
    whole.config.decoder_start_token_id = None
    with pytest.raises(NormlabError, match="set config.decoder_start_token_id"):
        batches(body, saved / "text.txt", 16, 4)


def test_in_inference_mode_the_same_is_measured_and_weights_made_there_are_refused(saved):
    wanted = measured(load(str(saved)), saved)
    with torch.inference_mode():
        assert measured(load(str(saved)), saved).values.equals(wanted.values)
        built = load(tiny_llama(), hf.AutoTokenizer.from_pretrained(saved))
        with pytest.raises(NormlabError, match="built in torch.inference_mode"):
            measured(built, saved)


def of_blocks(**values):
    """A table of values by block; None where there is none. The stack is as deep as the longest."""
    sites = {"rms": "block_out", "relative_contribution": "block", "block_influence": "block"}
    rows = [(sites[metric], layer, metric, "all", x) for metric in values for layer, x in enumerate(values[metric], 1)]
    table = pandas.DataFrame(rows, columns=["site", "layer", "metric", "mask", "value"])
    return table[table["value"].notna()].replace({"value": {-1.0: math.nan}})


def test_no_block_is_called_the_largest_where_one_is_not_finite_or_missing():
    stream = of_blocks(rms=[1.0, 2.0, math.inf, -1.0], relative_contribution=[3.0, 1.0, math.inf, -1.0])
    assert growth(stream) == "The residual stream is not finite from block 3 on."
    assert step(stream) == "The largest step cannot be told: steps are not finite from block 3 on."
    assert step(of_blocks(relative_contribution=[-1.0, 3.0, 2.0])).endswith("steps are not finite at block 1.")
    missing = of_blocks(rms=[1.0, 2.0, None], relative_contribution=[3.0, None, 2.0], block_influence=[0.1, 0.3, 0.2])
    assert growth(missing) == ""
    assert step(missing) == "Block 2 turns the stream most: by 1 - cosine = 0.3 (0.2 in the median block)."
    whole = of_blocks(rms=[1.0, 2.0, 4.0], relative_contribution=[3.0, 1.0, 2.0])
    assert growth(whole).startswith("The residual stream grows 4-fold") and step(whole).startswith("Block 1 takes")


def test_numbers_have_three_digits_and_thousands_are_in_full():
    shown = {999.4: "999", 999.7: "1,000", -1234.5: "-1,234", 999_999.4: "999,999", 999_999.6: "1e+06", 1e6: "1e+06"}
    assert {value: number(value) for value in shown} == shown and number(math.inf) == "inf"


def test_sentences_of_a_series_begin_with_their_stack_where_there_are_several():
    one = of_blocks(rms=[1.0, 4.0], relative_contribution=[3.0, 1.0]).assign(stack="")
    two = pandas.concat([one.assign(stack=stack) for stack in ("encoder", "decoder")])
    recorded = [Recorded("one", "one", one, "a", []), Recorded("two", "two", two, "b", [])]
    opening, _ = series_page(recorded, "model", "")
    alone, both = re.findall("<li>(.*?)</li>", opening)
    assert alone.startswith("<b>one</b>: a. The residual stream grows 4-fold: ") and "coder" not in alone
    for stack in ("encoder", "decoder"):
        assert f". {stack}: The residual stream grows" in both and f". {stack}: Block 1 takes the largest" in both


def test_what_is_left_out_of_some_stacks_is_named_by_them():
    def stack(name, absent):
        return SimpleNamespace(name=name, left_out={}, stats=SimpleNamespace(manifest={"absent": absent}, absent=["x"]))

    encoder, decoder = stack("encoder", {}), stack("decoder", {"attn 3": "why"})
    assert left_out_of_all([encoder, decoder]) == [("x", "do not apply"), ("decoder attn of layer 3", "why")]
    assert left_out_of_all([decoder]) == [("attn of layer 3", "why"), ("x", "do not apply")]


def test_what_one_sequence_says_of_a_span_has_no_interval():
    row = dict(
        length=2, first=3, last=4, start=2, stop=4, keep=[[0, 2], [4, 6]], skip_delta_loss=0.25, low=0.2, high=0.3
    )
    (words,) = cut_lines(SimpleNamespace(tables={"spans": pandas.DataFrame([row])}))
    assert "blocks 3-4, loss +0.2500 [+0.2000, +0.3000]; layers[2:4] in transformers" in words
    alone = pandas.DataFrame([row | dict(low=float("nan"), high=float("nan"))])
    (words,) = cut_lines(SimpleNamespace(tables={"spans": alone}))
    assert "loss +0.2500, of one sequence: no interval; layers[2:4]" in words and "nan" not in words


def test_two_models_of_one_tokenizer_have_their_layers_mapped_and_others_the_reason(saved, tmp_path):
    deeper = save(tiny_llama(num_hidden_layers=5), tmp_path / "deeper")
    given = dict(length=32, rows=8, progress=False)
    probe_report([str(deeper), str(saved)], saved / "text.txt", out=tmp_path / "out", **given)
    table = pandas.read_csv(tmp_path / "out" / "layer_maps.csv", index_col=0)
    assert table.shape == (4, 6) and table.index.name == str(saved)  # rows are the shallower model's layers
    data = batches(load(str(saved)), saved / "text.txt", 32, 8)
    expected = layer_maps(load(str(saved)).model, load(str(deeper)).model, data, progress=False)
    assert table.to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-6)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Which layer predicts which" in page and f"layer of {deeper.name}" in page
    probe_report([str(deeper), str(saved)], saved / "text.txt", out=tmp_path / "short", **SHAPE)
    page = (tmp_path / "short" / "report.html").read_text()
    assert "layer_maps: maps from 32 features are fitted on 64 tokens or more, and there are 32" in page
    assert not (tmp_path / "short" / "layer_maps.csv").exists()


def test_a_masked_model_predicts_hidden_tokens(tmp_path):
    folder = save(hf.BertForMaskedLM(hf.BertConfig(**ENCODER)), tmp_path / "bert")
    summary = probe_report(str(folder), folder / "text.txt", out=tmp_path / "out", **SHAPE)
    assert "nats a label" in summary and "cheapest 1 to drop" in summary
    (batch,) = batches(load(str(folder)), folder / "text.txt", 16, 4)
    hidden = batch["labels"] != -100
    assert bool(hidden.any(1).all()) and set(batch["input_ids"][hidden].tolist()) == {3}


class OtherName(hf.BertForMaskedLM):
    """A class whose name is in none of transformers' mappings."""


def test_the_task_is_found_where_a_models_name_does_not_tell_it(saved):
    peft = pytest.importorskip("peft")
    reader = hf.AutoTokenizer.from_pretrained(saved)
    bert = hf.BertForMaskedLM(hf.BertConfig(**ENCODER))
    with_lora = peft.get_peft_model(copy.deepcopy(bert), peft.LoraConfig(target_modules=["query"]))
    for other in (OtherName(bert.config), torch.compile(bert, backend="eager"), with_lora):
        loaded = load(other, reader)
        assert loaded.task == "masked" and -100 in batches(loaded, saved / "text.txt", 16, 4)[0]["labels"]
    body = type("Body", (hf.LlamaModel,), {})(tiny_llama().config)
    assert load(body, reader).task == "encoder"
    body.lm_head = torch.nn.Linear(32, 64)
    assert load(body, reader).task == "causal"


@pytest.mark.parametrize(
    ("kind", "task"),
    [("BertForMaskedLM", "masked"), ("BertLMHeadModel", "causal"), ("LlamaForCausalLM", "causal")],
)
def test_a_directory_without_architectures_is_loaded_by_its_type(tmp_path, kind, task):
    config = getattr(hf, kind).config_class(**ENCODER)
    config.is_decoder = kind == "BertLMHeadModel"
    model = getattr(hf, kind)(config).eval()
    folder = save(model, tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    del fields["architectures"]
    (folder / "config.json").write_text(json.dumps(fields))
    loaded = load(str(folder), device="cpu")
    assert loaded.task == task and not loaded.no_loss
    assert measured(loaded, folder).loss == pytest.approx(measured(load(model, loaded.reader), folder).loss, rel=1e-5)


def test_rows_are_as_long_as_the_models_table_of_positions_at_most(saved):
    roberta = hf.RobertaForMaskedLM(hf.RobertaConfig(**ENCODER, max_position_embeddings=20, pad_token_id=1))
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
    page = (tmp_path / "report.html").read_text()
    assert re.search("Left out, and why</summary><p>skip_sensitivity, .*: KeyError: &#x27;mine&#x27;", page)
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
    assert "3 images of" in page and "without a loss: images have no labels" in page
    assert "<p>skip_sensitivity, logit_lens, " in page and "attention_sinks: not for images" in page


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


@pytest.mark.usefixtures("own_garbage")
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
    assert re.search(r"<b>LlamaForCausalLM \(2\)</b>: .*attn of layer 3, .*: a hook changes what the block", page)
    assert page.count("attn of layer 3") == page.count("a hook changes what the block returns") == 1


def test_models_of_unlike_contexts_and_texts_say_what_each_read(saved, tmp_path):
    reader, text = load(str(saved)).reader, saved / "text.txt"
    models = [tiny_llama(max_position_embeddings=8, num_hidden_layers=1), tiny_llama(num_hidden_layers=1)]
    summary = probe_report(models, text, tokenizer=reader, out=tmp_path / "models", **SHAPE)
    page = (tmp_path / "models" / "report.html").read_text()
    assert "<p>2 models on text.txt.</p>" in page
    for name, length in (("LlamaForCausalLM", 8), (r"LlamaForCausalLM \(2\)", 16)):
        said = f"4 pieces of {length} tokens of text.txt; loss [0-9]"
        assert re.search(f"<b>{name}</b>: {said}", page) and re.search(f"(?m)^{name}: {said}", summary)
    (tmp_path / "short.txt").write_text(" ".join(TEXT.split()[:20]))
    given = {"tokenizer": reader, "out": tmp_path / "texts", **SHAPE}
    probe_report(models[1], [text, tmp_path / "short.txt"], **given)
    page = (tmp_path / "texts" / "report.html").read_text()
    assert "<p>One model on 2 texts.</p>" in page
    assert "<b>short.txt</b>: 1 piece of 16 tokens of short.txt; loss" in page


def test_what_to_cut_of_one_block_says_how_many_pieces_it_is_of(saved, tmp_path):
    reader, text = load(str(saved)).reader, saved / "text.txt"
    probe_report(tiny_llama(num_hidden_layers=1), text, tokenizer=reader, out=tmp_path, length=16, rows=16)
    page = (tmp_path / "report.html").read_text()
    assert "In nats a token with the 95% interval, on the first 8 pieces, chosen on other text" in page


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
    loaded = load(str(folder))
    # The task tells over how many labels a loss in half precision is a mean.
    assert loaded.task == load(loaded.model, loaded.reader).task == "causal"


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
