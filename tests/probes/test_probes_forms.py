"""Forms of a model (wrapped, padded, offloaded, turned): as the plain one, or a line that says why not.

`python -m benchmarks.forms_audit data/bench/forms.csv` writes the table over many classes.
"""

from pathlib import Path

import pandas
import pytest
import torch
import transformers as hf
from accelerate import cpu_offload
from probe_zoo import build, token_batch
from torch import nn

from benchmarks import forms_audit
from normlab.errors import NormlabError
from normlab.probes import angular_distance, attention_sinks, massive_activations, record, skip_sensitivity, stacks
from normlab.probes.kept_pass import KeptPass
from normlab.probes.passes import Stream

TABLE = Path(__file__).parents[2] / "data" / "bench" / "forms.csv"
QUIET = {"progress": False}


@pytest.mark.skipif(not TABLE.is_file(), reason="the audit is not in this checkout")
def test_no_function_is_silently_wrong_on_any_form_and_every_refusal_says_why():
    table = pandas.read_csv(TABLE, keep_default_na=False, dtype=str)
    assert list(table.columns) == forms_audit.COLUMNS and table["class"].nunique() >= 40
    assert (table.groupby("class")["form"].nunique() == len(forms_audit.FORMS)).all()
    for function in forms_audit.FUNCTIONS:
        verdict, _, why = zip(*table[function.name].str.partition(": ").to_numpy(), strict=True)
        assert set(verdict) <= {"right", "refused", "absent", "unchecked", "no such"}, function.name
        assert all(len(line) > 8 for name, line in zip(verdict, why, strict=True) if name != "right")


def test_the_audit_sees_a_fault(monkeypatch):
    faulty = lambda stream, module, args, kwargs, output: args[0] * 1.01  # noqa: E731
    monkeypatch.setattr(Stream, "pass_on", faulty)
    (row,) = forms_audit.audited("causal", "LlamaForCausalLM", forms_audit.FORMS[2:3])
    verdicts = {name: row[name].split(":")[0] for name in ("skip block", "future effect", "skip mlp", "sinks")}
    assert verdicts == {"skip block": "WRONG", "future effect": "WRONG", "skip mlp": "right", "sinks": "right"}


# -- names of their own ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_heads": 4, "d_kv": 8, "pad_token_id": 0}
    config = hf.T5Config(num_layers=2, num_decoder_layers=2, decoder_start_token_id=0, **sizes)
    return hf.T5ForConditionalGeneration(config).eval()


def renamed(batch):
    return {forms_audit.OwnNames.names.get(name, name): x for name, x in batch.items() if name != "labels"}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_experiments_know_padding_and_shifted_labels_under_a_wrappers_own_names(name):
    model, batch = build(name), token_batch()
    wrapped, own = forms_audit.OwnNames(model), renamed(batch)
    for function, given in ((angular_distance, own), (skip_sensitivity, own | {"labels": batch["labels"]})):
        plain, found = (
            function(m, [b], **QUIET).select_dtypes("number").to_numpy() for m, b in ((model, batch), (wrapped, given))
        )
        assert found == pytest.approx(plain, rel=1e-6)
    if name == "llama":  # without labels, the next token
        plain, found = (
            skip_sensitivity(m, [b], **QUIET)["loss"][0]
            for m, b in ((model, {k: v for k, v in batch.items() if k != "labels"}), (wrapped, own))
        )
        assert found == plain


@pytest.mark.parametrize("wrap", [forms_audit.SameNames, forms_audit.OwnNames])
def test_an_encoders_padding_is_not_its_decoders_in_a_wrapper(t5, wrap):
    batch = token_batch()
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"decoder_input_ids": batch["input_ids"]}
    wrapped = wrap(t5)
    own = renamed(batch) if wrap is forms_audit.OwnNames else batch
    tables = []
    for model, given in ((t5, batch), (wrapped, own)):
        with record(forms_audit.stack_of(model), ["rms"]) as rec, torch.no_grad():
            model(**given)
        tables.append(rec.stats().to_pandas())
    pandas.testing.assert_frame_equal(*tables)
    found = [angular_distance(forms_audit.stack_of(m), [b], **QUIET) for m, b in ((t5, batch), (wrapped, own))]
    assert found[1].to_numpy() == pytest.approx(found[0].to_numpy(), abs=1e-9)


def test_the_usual_batch_of_a_wrapped_encoder_and_decoder_is_measured(t5):
    batch = token_batch()
    table = skip_sensitivity(forms_audit.stack_of(forms_audit.SameNames(t5)), [batch], **QUIET)
    assert table["loss"][0] == pytest.approx(float(t5(**batch).loss), abs=1e-5)


# -- other forms -------------------------------------------------------------------------------------------------------


def test_attention_of_an_encoder_is_not_taken_for_its_decoders_first_block(t5):
    ids = token_batch()["input_ids"]
    batches = [{"input_ids": read, "decoder_input_ids": ids} for read in (ids, ids.flip(1))]
    found = [attention_sinks(stacks(t5)["decoder.block"], batch, threshold=0.0, queries=1).table for batch in batches]
    first, second = (table[table["layer"] == 1] for table in found)
    assert len(first) and first["weight"].tolist() == second["weight"].tolist()


def test_blocks_that_hold_the_length_first_are_refused_where_rows_matter():
    torch.manual_seed(0)
    model = hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48)).eval()
    for ids in (torch.randint(5, 60, (2, 12)), torch.randint(5, 60, (8, 8))):
        with pytest.raises(NormlabError, match=r"the blocks hold \(length, batch, width\)"):
            massive_activations(model, {"input_ids": ids})


def test_router_scores_of_offloaded_weights_are_left_out_with_the_reason():
    model, ids = build("mixtral"), token_batch()["input_ids"]
    cpu_offload(model, execution_device=torch.device("cpu"))
    with record(model, ["router_entropy", "expert_load_max"]) as rec, torch.no_grad():
        model(ids)
    stats = rec.stats()
    assert set(stats.to_pandas()["metric"]) == {"expert_load_max"}
    assert "offloaded" in stats.manifest["absent"]["router_entropy 1"]


def test_moving_what_is_there_already_reads_nothing():
    class Moving(nn.Module):
        """Notes a tensor of its own, and moves those of earlier blocks, as accelerate does."""

        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x, noted):
            for one in noted:
                one.to(x.device)
            noted.append(self.linear(self.norm(x)))
            return x + self.linear(self.norm(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Moving() for _ in range(3))

        def forward(self, x):
            noted = []
            for layer in self.layers:
                x = layer(x, noted)
            return x

    model = Model()
    kept = KeptPass(Stream(stacks(model)["layers"]))
    kept.keep(lambda: model(torch.randn(2, 5, 8)))
    assert kept.read_by == {}
