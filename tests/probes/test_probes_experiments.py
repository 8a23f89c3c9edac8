"""Skipping, angles, Jacobians and the logit lens against direct computation; errors that cover."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from probe_zoo import DEPTH, MODELS, WIDTH, batch_for, build, tiny_llama, token_batch
from torch import nn
from torch.nn import functional

from normlab.errors import NormlabError
from normlab.probes import (
    angular_distance,
    jacobian_identity,
    logit_lens_kl,
    record,
    skip_future_effect,
    skip_sensitivity,
)
from normlab.probes.passes import hooked
from normlab.probes.runner import mean_and_error, token_kl
from normlab.probes.sites import sites, stacks

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def batches():
    return [token_batch(3), token_batch(2, 9, torch.Generator().manual_seed(5))]


def summed_loss(model, batches) -> float:
    total = count = 0.0
    for batch in batches:
        with torch.no_grad():
            labels = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch, use_cache=False).loss) * labels
            count += labels
    return total / count


def test_skipping_a_block_equals_deleting_it_in_stock_llama(model, batches):
    table = skip_sensitivity(model, batches, **QUIET).set_index("layer")
    base = summed_loss(model, batches)
    assert table["loss"][1] == pytest.approx(base, abs=1e-6)
    for layer in range(1, DEPTH + 1):
        cut = copy.deepcopy(model)
        cut.model.layers = nn.ModuleList(block for i, block in enumerate(cut.model.layers, start=1) if i != layer)
        cut.config.num_hidden_layers = DEPTH - 1
        assert table["skip_delta_loss"][layer] == pytest.approx(summed_loss(cut, batches) - base, abs=1e-6)


def test_skipping_a_span_equals_deleting_its_blocks(model, batches):
    table = skip_sensitivity(model, batches, span=2, **QUIET)
    assert list(table["layer"]) == [1, 2]
    cut = copy.deepcopy(model)
    cut.model.layers = cut.model.layers[2:]
    cut.config.num_hidden_layers = 1
    assert table["skip_delta_loss"][0] == pytest.approx(
        summed_loss(cut, batches) - summed_loss(model, batches), abs=1e-6
    )
    with pytest.raises(NormlabError, match="nothing to skip: 3 blocks, span 4"):
        skip_sensitivity(model, batches, span=4, **QUIET)


@pytest.mark.parametrize("name", ["llama", "gemma3", "neox"])
def test_skipping_attention_or_mlp_equals_zeroing_what_it_adds(name):
    model, batch = build(name), batch_for("llama")
    table = skip_sensitivity(model, [batch], parts=["attention", "mlp"], **QUIET).set_index(["part", "layer"])
    layers = model.gpt_neox.layers if name == "neox" else model.model.layers
    paths = ("attention.dense", "mlp.dense_4h_to_h") if name == "neox" else ("self_attn.o_proj", "mlp.down_proj")
    for part, path in zip(("attention", "mlp"), paths, strict=True):
        linear = layers[1].get_submodule(path)
        saved = copy.deepcopy(linear.state_dict())
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)  # an RMS output norm of zero is zero
        assert table["skip_delta_loss"][part, 2] == pytest.approx(
            summed_loss(model, [batch]) - table["loss"][part, 2], abs=2e-6
        )
        linear.load_state_dict(saved)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("vit",)])
def test_every_language_model_can_be_skipped_and_is_left_as_it_was(name):
    model, batch = build(name).train(), batch_for(name)
    before = copy.deepcopy(model.state_dict())
    table = skip_sensitivity(model, [batch], parts=["block", "attention", "mlp"], **QUIET)
    assert len(table) == 3 * DEPTH and table["skip_delta_loss"].abs().min() > 0 and (table["output_kl"] > 0).all()
    assert model.training and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


class Merging(nn.Linear):
    """Adds one matrix to its weight for evaluation and takes it away for training, as loralib's layers do."""

    merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += -1 if mode else 1
            self.merged = not mode
        return super().train(mode)


def test_modes_are_set_as_modules_set_them_and_come_back_one_by_one():
    model = tiny_llama().train()
    layers = [block.self_attn for block in model.model.layers]
    for layer in layers:
        layer.q_proj = Merging(WIDTH, WIDTH, bias=False)
    layers[0].eval()
    modes = [module.training for module in model.modules()]
    angular_distance(model, [{"input_ids": torch.arange(3, 9)[None]}], **QUIET)
    assert [module.training for module in model.modules()] == modes
    assert [layer.q_proj.merged for layer in layers] == [True, False, False]


def test_output_kl_is_that_of_the_whole_models_prediction_from_the_skipped_ones(model):
    batch = token_batch(2)
    found = skip_sensitivity(model, [batch], **QUIET)["output_kl"][0]
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        whole = model(**inputs).logits.double()
        with hooked((model.model.layers[0], lambda m, a, k, o: a[0])):
            skipped = model(**inputs).logits.double()
    counted = nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
    kl = (whole.softmax(-1) * (whole.log_softmax(-1) - skipped.log_softmax(-1))).sum(-1)[counted].mean()
    assert found == pytest.approx(float(kl), rel=1e-5)


def test_tokens_of_probability_zero_add_nothing_to_the_divergence_and_those_that_the_other_excludes_all():
    """Heads that mask a part of their vocabulary have logits of -inf."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 3, 8, generator=generator), torch.randn(2, 3, 8, generator=generator)
    expected = token_kl(p[..., 2:], q[..., 2:])
    p[..., :2] = q[..., :2] = -torch.inf
    assert torch.allclose(token_kl(p, q), expected, atol=1e-6)
    q[..., :2] = 0
    assert token_kl(p, q).isfinite().all() and token_kl(q, p).isposinf().all()


def test_unknown_parts_and_empty_batches_are_refused_in_one_line(model):
    with pytest.raises(NormlabError, match="unknown part 'head': choose from block, attention, mlp"):
        skip_sensitivity(model, [token_batch()], parts=["head"])
    with pytest.raises(NormlabError, match="there is no batch to run"):
        skip_sensitivity(model, [], **QUIET)
    with pytest.raises(NormlabError, match="a batch must be a dict"):
        skip_sensitivity(model, [torch.ones(1, 4)], **QUIET)
    with pytest.raises(NormlabError, match="without logits"):
        skip_sensitivity(model.model, [{"input_ids": torch.ones(1, 4, dtype=torch.long)}], **QUIET)


def test_row_means_intervals_cover_about_95_percent():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        counts = torch.randint(5, 20, (60,), generator=generator)
        row_effect = torch.randn(60, generator=generator)  # tokens of one row move together
        mean, error = mean_and_error(((1.0 + row_effect) * counts)[None], counts)
        covered += abs(float(mean) - 1) < 1.96 * float(error)
    assert 0.91 < covered / 400 < 0.98


def inputs_and_outputs(model, batch, skip: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The input and output of every block, with block `skip` made the identity."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    blocks = model.model.layers
    hooks = [block.register_forward_hook(lambda m, a, o: kept.append((a[0], o))) for block in blocks]
    if skip is not None:
        hooks.append(blocks[skip - 1].register_forward_hook(lambda m, a, o: a[0]))
    with torch.no_grad():
        model(batch["input_ids"], attention_mask=batch["attention_mask"])
    for hook in hooks:
        hook.remove()
    return kept


def test_skip_future_effect_equals_the_relative_change_of_later_updates(model):
    batch = token_batch(2)
    table = skip_future_effect(model, [batch], **QUIET).set_index(["skipped", "layer"])["value"]
    real = batch["attention_mask"].bool()
    updates = [[(o - x).double()[real] for x, o in inputs_and_outputs(model, batch, skip)] for skip in (None, 1)]
    for layer in (2, 3):
        whole, changed = (of_all[layer - 1] for of_all in updates)
        expected = ((changed - whole).norm(dim=1) / whole.norm(dim=1)).mean()
        assert table[1, layer] == pytest.approx(float(expected), rel=1e-5)
    assert set(table.index) == {(1, 2), (1, 3), (2, 3)}


def test_a_block_that_adds_nothing_has_no_relative_change_and_skipping_it_changes_none():
    model = tiny_llama()
    idle = model.model.layers[1]
    with torch.no_grad():
        idle.self_attn.o_proj.weight.zero_(), idle.mlp.down_proj.weight.zero_()
    table = skip_future_effect(model, [token_batch()], **QUIET).set_index(["skipped", "layer"])
    assert table["value"].isna().to_dict() == {(s, t): t == 2 for s, t in table.index}
    assert (table["value"][2] == 0).all()


@pytest.mark.parametrize("tokens", ["all", "no_first", "last"])
def test_angular_distance_equals_arccos_in_float64(model, batches, tokens):
    table = angular_distance(model, batches, tokens=tokens, **QUIET)
    states: list[list[torch.Tensor]] = [[] for _ in range(DEPTH + 1)]
    for batch in batches:
        kept = inputs_and_outputs(model, batch)
        real = batch["attention_mask"].bool()
        order = real.cumsum(1)
        chosen = {"all": real, "no_first": real & (order > 1), "last": real & (order == real.sum(1, keepdim=True))}
        for i, h in enumerate([kept[0][0], *(o for _, o in kept)]):
            states[i].append(h[chosen[tokens]].double())
    for i in range(DEPTH + 1):
        for j in range(DEPTH + 1):
            a, b = torch.cat(states[i]), torch.cat(states[j])
            cosine = ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).clamp(-1, 1)
            assert table[i][j] == pytest.approx(float(cosine.arccos().mean() / math.pi), rel=1e-5, abs=1e-7)
    assert (table.attrs["standard_error"].values >= 0).all()


@pytest.mark.parametrize("distance", [0.0, 1e-12, 1e-7, 1e-4, 1e-3, 2e-3, 0.1, 1.0, 2.0])
def test_angles_keep_their_digits_however_near_the_vectors_are(distance):
    from normlab.probes.geometry import _all_angles

    a, b = torch.linalg.qr(torch.randn(64, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0].T
    angle = torch.tensor(distance * math.pi / 2, dtype=torch.float64)
    other = angle.cos() * a + angle.sin() * b
    found = _all_angles(torch.stack([a, 3 * other])[:, None], torch.tensor([0]), torch.tensor([1]))
    assert float(found) == pytest.approx(distance / 2, rel=1e-9 if distance > 1e-7 else 1e-3, abs=1e-16)


def test_a_stream_that_goes_on_in_float32_is_not_rounded_for_its_angles():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = MambaForCausalLM(MambaConfig(**sizes)).bfloat16().eval()
    batch, states = {"input_ids": torch.randint(3, 64, (2, 5))}, []
    with hooked(*((block, lambda m, a, k, o: states.append(o.flatten(0, 1))) for block in model.backbone.layers)):
        table = angular_distance(model, [batch], **QUIET)
    assert states[0].dtype == torch.float32
    a, b = (state.double() / state.double().norm(dim=1, keepdim=True) for state in states)
    expected = 2 / math.pi * torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1)).mean()
    assert table[1][2] == pytest.approx(float(expected), rel=1e-5)


def test_jacobian_identity_interval_holds_the_exact_value(model):
    batch = {"input_ids": torch.randint(3, 64, (1, 5))}
    table = jacobian_identity(model, [batch] * 8, probes=8, **QUIET)
    kept = []
    with hooked(*((block, lambda m, a, k, o: kept.append((m, a, k))) for block in model.model.layers)), torch.no_grad():
        model(**batch, use_cache=False)
    for (block, args, kwargs), row in zip(kept, table.itertuples(), strict=True):
        size = args[0].numel()
        jacobian = torch.autograd.functional.jacobian(lambda x: block(x, **kwargs), args[0]).reshape(size, size)  # noqa: B023
        exact = float((jacobian - torch.eye(size)).norm() / math.sqrt(size))
        assert row.standard_error < 0.05 * exact
        assert abs(row.value - exact) < 3.5 * row.standard_error
    assert all(p.grad is None for p in model.parameters()) and not any(m._forward_hooks for m in model.modules())


def test_jacobian_identity_is_zero_for_identity_blocks_and_refuses_inference_mode(model):
    empty = copy.deepcopy(model)
    for block in empty.model.layers:
        nn.init.zeros_(block.self_attn.o_proj.weight)
        nn.init.zeros_(block.mlp.down_proj.weight)
    assert jacobian_identity(empty, [token_batch()], **QUIET)["value"].max() < 1e-6
    with torch.inference_mode(), pytest.raises(NormlabError, match="leave inference_mode"):
        jacobian_identity(model, [token_batch()], **QUIET)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("vit", "bert")])
def test_logit_lens_runs_whatever_the_model_does_after_its_blocks(name):
    """Equal to norm and head by hand, soft-capping included, and zero at the last layer."""
    model, batch = build(name), batch_for("llama")
    if name == "gemma3":
        model.config.final_logit_softcapping = 3.0
    table = logit_lens_kl(model, [batch], **QUIET)["value"]
    with torch.no_grad():
        out = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    norms = {"neox": "gpt_neox.final_layer_norm", "gpt2": "transformer.ln_f", "opt": "model.decoder.final_layer_norm"}
    norm = norms.get(name, "model.norm")
    with torch.no_grad():
        logits = model.get_output_embeddings()(model.get_submodule(norm)(out.hidden_states[1])).double()
    if name == "gemma3":
        logits = 3.0 * torch.tanh(logits / 3.0)
    real = batch["attention_mask"].bool()
    kl = (logits.softmax(-1) * (logits.log_softmax(-1) - out.logits.double().log_softmax(-1))).sum(-1)[real].mean()
    assert table[1] == pytest.approx(float(kl), rel=1e-4)
    assert table[DEPTH] == pytest.approx(0, abs=1e-6)
    assert not any("forward" in vars(module) for module in model.modules())


def test_skipping_a_branch_removes_its_output_norms_bias_too():
    """Zero into an output norm with a bias is the bias, not zero: the norm's output is what must vanish."""
    model, batch = build("gemma3"), batch_for("llama")
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.LayerNorm(WIDTH)
        nn.init.normal_(layer.post_attention_layernorm.bias)
    found = skip_sensitivity(model, [batch], parts=["attention"], **QUIET).set_index("layer")["skip_delta_loss"][2]
    base = summed_loss(model, [batch])
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda m, a, o: torch.zeros_like(o))
    assert found == pytest.approx(summed_loss(model, [batch]) - base, abs=2e-6)


def test_angular_distance_of_many_layers_holds_one_copy_of_the_kept_tokens(monkeypatch):
    """Beyond the forward pass: (kept tokens x width x layers) numbers and the result, in one pass over the data."""
    from normlab.probes import geometry

    model = tiny_llama(num_hidden_layers=24)
    passes, held = [], []
    model.register_forward_hook(lambda m, a, o: passes.append(1))
    measure = geometry._all_angles

    def counting(states, *pairs):
        held.append(states.shape)
        return measure(states, *pairs)

    monkeypatch.setattr(geometry, "_all_angles", counting)
    monkeypatch.setattr(geometry, "CHUNK", 2 * 25 * WIDTH)
    batch = token_batch()
    table = angular_distance(model, [batch], tokens="last", **QUIET)
    assert table.shape == (25, 25) and len(passes) == 1
    assert held == [(25, 2, WIDTH), (25, 1, WIDTH)]  # the kept tokens only, a few at a time


def test_a_block_that_runs_again_is_refused():
    albert = hf.AlbertForMaskedLM(
        hf.AlbertConfig(
            vocab_size=64,
            embedding_size=16,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
        )
    )
    batch = {"input_ids": token_batch()["input_ids"]}
    for experiment in (angular_distance, jacobian_identity, logit_lens_kl):
        with pytest.raises(NormlabError, match="block 1 runs more than once in a pass, as in ALBERT"):
            experiment(albert.eval(), [batch], **QUIET)


@pytest.fixture(scope="module")
def t5():
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=64,
        d_model=32,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        d_kv=8,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config).eval()


def test_an_encoders_mask_is_not_its_decoders(t5):
    batch = token_batch()
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"decoder_input_ids": batch["input_ids"]}
    decoder = stacks(t5)["decoder.block"]
    found = angular_distance(decoder, [batch], **QUIET)
    everything = angular_distance(
        decoder, [batch | {"decoder_attention_mask": torch.ones_like(batch["input_ids"])}], **QUIET
    )
    assert found.to_numpy() == pytest.approx(everything.to_numpy(), abs=1e-6)
    encoder = angular_distance(stacks(t5)["encoder.block"], [batch], **QUIET)
    hidden = [
        h.double()
        for h in t5.encoder(batch["input_ids"], batch["attention_mask"], output_hidden_states=True).hidden_states
    ]
    cosine = functional.cosine_similarity(hidden[0], hidden[1], dim=-1)[batch["attention_mask"].bool()]
    assert encoder.loc[0, 1] == pytest.approx(float((cosine.arccos() / math.pi).mean()), abs=1e-6)


def test_the_usual_batch_of_an_encoder_and_decoder_is_measured(t5):
    batch = token_batch()
    table = skip_sensitivity(stacks(t5)["decoder.block"], [batch], **QUIET)
    assert table["loss"][0] == pytest.approx(float(t5(**batch).loss), abs=1e-5)


def test_the_vectors_of_a_decoders_tokens_may_be_given(t5):
    batch = token_batch()
    vectors = t5.shared(t5.prepare_decoder_input_ids_from_labels(labels=batch["labels"])).detach()
    found, expected = (
        skip_sensitivity(stacks(t5)["decoder.block"], [given], layers=[1], **QUIET)["loss"].item()
        for given in (batch | {"decoder_inputs_embeds": vectors}, batch)
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_wrapper_that_takes_no_labels_gets_the_decoders_tokens_made_of_them(t5):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = t5

        def forward(self, input_ids, decoder_input_ids=None):
            return self.inner(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits

    batch = {name: x for name, x in token_batch().items() if name != "attention_mask"}
    skipped = skip_sensitivity(stacks(Wrapper())["inner.decoder.block"], [batch], layers=[1], **QUIET)
    whole = skip_sensitivity(stacks(t5)["decoder.block"], [batch], layers=[1], **QUIET)
    assert skipped["skip_delta_loss"].item() == pytest.approx(whole["skip_delta_loss"].item(), rel=1e-5)


@pytest.mark.parametrize("stack", ["model.encoder.layers.*", "model.decoder.layers.*"])
def test_the_decoders_tokens_that_a_model_makes_of_labels_itself_are_found(stack):
    torch.manual_seed(0)
    config = hf.M2M100Config(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, decoder_start_token_id=3,
        max_position_embeddings=32, init_std=0.2,
    )  # fmt: skip
    model, batch = hf.M2M100ForConditionalGeneration(config).eval(), token_batch()
    start = torch.full_like(batch["labels"][:, :1], 3)
    shifted = torch.cat([start, batch["labels"][:, :-1]], dim=1)
    told = batch | {"decoder_input_ids": shifted.masked_fill(shifted == -100, 0)}
    tables, heads = [], []
    for one in (batch, told):
        ran: list = []
        with hooked((model.lm_head, lambda *_, ran=ran: ran.append(1))):
            tables.append(skip_sensitivity(sites(model, stack), [one], **QUIET))
        heads.append(len(ran))
    assert tables[0]["loss"][0] == pytest.approx(float(model(**batch).loss), abs=1e-5)
    assert tables[0].equals(tables[1]) and heads[0] == heads[1]


def test_the_decoders_mask_that_a_model_makes_of_labels_is_taken_with_the_tokens():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "pad_token_id": 0}
    config = hf.Pix2StructConfig(
        text_config={"vocab_size": 64, "num_layers": 2, **sizes},
        vision_config={"patch_embed_hidden_size": 27, "num_hidden_layers": 2, "num_attention_heads": 4, **sizes},
        initializer_factor=8.0, decoder_start_token_id=3, pad_token_id=0,
    )  # fmt: skip
    model = hf.Pix2StructForConditionalGeneration(config).eval()
    labels = token_batch()["labels"].clone()
    labels[:, 1:3] = -100
    batch = {"flattened_patches": torch.rand(len(labels), 9, 29), "labels": labels}
    unmasked = batch | {"decoder_attention_mask": torch.ones(labels.shape)}
    found, own = [], []
    for one in (batch, unmasked):
        found.append(skip_sensitivity(sites(model, "decoder.layer.*"), [one], **QUIET)["loss"][0])
        own.append(float(model(**one).loss))
    assert found == pytest.approx(own, abs=1e-5) and abs(own[0] - own[1]) > 1e-3


def test_decoder_tokens_that_no_module_is_handed_are_asked_for(t5):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.decoder = t5.config, t5.decoder

        def forward(self, input_ids, decoder_input_ids=None, labels=None):
            ids = decoder_input_ids if labels is None else nn.functional.pad(labels, (1, -1)).clamp(min=0)
            return self.decoder(inputs_embeds=t5.shared(ids), encoder_hidden_states=t5.shared(input_ids))

    batch = token_batch()
    with pytest.raises(NormlabError, match=r"not seen: give decoder_input_ids$"):
        skip_sensitivity(sites(Hidden(), "decoder.block.*"), [{n: batch[n] for n in ("input_ids", "labels")}], **QUIET)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_mask_that_is_not_by_token_is_refused_where_the_tokens_are_the_labels(name):
    ids, model = token_batch()["input_ids"], build(name)
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril().expand(len(ids), 1, -1, -1)
    mask = seen if name == "llama" else {"full_attention": seen, "sliding_attention": seen}
    batch = {"input_ids": ids, "attention_mask": mask}
    with pytest.raises(NormlabError, match=r"so padding cannot be told: give a \(batch, length\) mask, or none"):
        skip_sensitivity(model, [batch], layers=[1], **QUIET)
    assert len(skip_sensitivity(model, [batch | {"labels": ids}], layers=[1], **QUIET)) == 1


def test_what_padding_predicts_does_not_count(model):
    batch = {name: tensor for name, tensor in token_batch().items() if name != "labels"}
    other = batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    first, second = (skip_sensitivity(model, [one], **QUIET) for one in (batch, other))
    assert first["tokens"][0] == int(batch["attention_mask"].sum()) - 3  # the first token of each row
    assert second["loss"][0] == pytest.approx(first["loss"][0], abs=1e-6)


@pytest.mark.parametrize("mask", ["keep", lambda call: call.arguments["keep"]], ids=["by name", "by a function"])
def test_padding_under_a_name_of_its_own_is_not_predicted(model, mask):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, keep):
            return self.inner(input_ids)

    batch = token_batch()
    batch = {"input_ids": batch["input_ids"], "keep": batch["attention_mask"]}
    table = skip_sensitivity(sites(Named(), mask=mask), [batch], layers=[1], **QUIET)
    labels = batch["input_ids"].masked_fill(batch["keep"] == 0, -100)
    labels[:, 1:][batch["keep"][:, :-1] == 0] = -100
    assert table["tokens"][0] == int((labels[:, 1:] != -100).sum())
    assert table["loss"][0] == pytest.approx(float(model(batch["input_ids"], labels=labels).loss), abs=1e-6)


def test_labels_may_be_short_integers_or_required_and_others_than_100_below_zero_are_refused(model):
    class Required(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, labels):
            return self.inner(input_ids, labels=labels)

    batch = {"input_ids": token_batch()["input_ids"]}
    short = {"input_ids": batch["input_ids"].int()}
    both = {**batch, "labels": batch["input_ids"].int()}
    whole = skip_sensitivity(model, [batch], layers=[1], **QUIET)
    for given, one in ((model, short), (model, both), (Required(), both)):
        assert skip_sensitivity(given, [one], layers=[1], **QUIET)["loss"][0] == pytest.approx(whole["loss"][0])
    with pytest.raises(NormlabError, match="labels hold -1: give -100 where nothing is predicted"):
        skip_sensitivity(model, [{**batch, "labels": torch.full_like(batch["input_ids"], -1)}], **QUIET)


def test_models_without_logits_have_angles_and_classifiers_no_losses_by_token(model):
    batch = batch_for("llama")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert angular_distance(model.model, [inputs], **QUIET).equals(angular_distance(model, [inputs], **QUIET))
    for experiment in (skip_sensitivity, logit_lens_kl):
        with pytest.raises(NormlabError, match="one prediction per token"):
            experiment(build("vit"), [batch_for("vit")], **QUIET)
    with pytest.raises(NormlabError, match="no span of 1 from layer 0: layers are 1 to 3"):
        skip_sensitivity(model, [batch], layers=[0, 1], **QUIET)


def test_a_batch_without_labels_does_not_say_that_labels_are_not_shifted(model):
    some, none = token_batch(3), token_batch(2, 9, torch.Generator().manual_seed(5))
    none["labels"] = torch.full_like(none["labels"], -100)
    first, last = (skip_sensitivity(model, batches, **QUIET) for batches in ([some, none], [none, some]))
    assert first["loss"].tolist() == pytest.approx(last["loss"].tolist())
    assert first["tokens"].tolist() == last["tokens"].tolist()


def test_a_block_that_runs_several_times_is_not_skipped():
    sizes = {"embedding_size": 16, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    albert = hf.AlbertForMaskedLM(hf.AlbertConfig(vocab_size=50, num_hidden_layers=3, **sizes)).eval()
    with pytest.raises(NormlabError, match="block 1 runs more than once"):
        skip_sensitivity(albert, [{"input_ids": torch.arange(8)[None]}], **QUIET)


def first_only(labels: torch.Tensor) -> torch.Tensor:
    """The labels at each row's first position alone."""
    return labels.where(torch.arange(labels.shape[1]) == 0, -100)


@pytest.fixture(scope="module")
def unshifted() -> dict[str, tuple[Any, dict[str, torch.Tensor], list[torch.Tensor]]]:
    """Models whose labels are of the same token: (stack or model, inputs, labels, among them at the first alone)."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).eval()
    ids = torch.randint(1, 60, (4, 10))
    bert, mlm = build("bert"), torch.where(torch.rand(4, 10) < 0.3, ids, -100)
    mlm[:, 1] = ids[:, 1]
    texts = [ids[:, :3].clone(), ids[:, 3:4].clone(), first_only(ids[:, 4:8])]
    return {
        "t5": (stacks(t5)["decoder.block"], {"input_ids": ids}, texts),
        "bert": (sites(bert), {"input_ids": ids}, [mlm, first_only(ids)]),
    }


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_labels_at_the_first_position_alone_count_where_labels_are_not_shifted(unshifted, name, order):
    where, inputs, labels = unshifted[name]
    losses = []
    for one in labels:
        with torch.no_grad():
            logits = where.model(**inputs, labels=one).logits
        losses.append(functional.cross_entropy(logits[one != -100], one[one != -100], reduction="none"))
        alone = skip_sensitivity(where, [inputs | {"labels": one}], layers=[1], **QUIET)
        assert alone["loss"][0] == pytest.approx(float(losses[-1].mean()), rel=1e-5)
    found = skip_sensitivity(where, [inputs | {"labels": one} for one in labels[::order]], layers=[1], **QUIET)
    assert found["tokens"][0] == sum(map(len, losses))
    assert found["loss"][0] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


class SumOfLosses(nn.Module):
    """A causal model whose loss is a sum: 0 without a label."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.model(input_ids, attention_mask=attention_mask)
        if labels is not None:
            out.loss = functional.cross_entropy(out.logits[:, :-1].mT, labels[:, 1:], reduction="sum")
        return out


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("wrap", [lambda model: model, SumOfLosses])
def test_labels_at_the_first_position_alone_are_none_where_labels_are_shifted(model, wrap, order):
    """A mean over none is NaN, a sum 0: neither is the loss of the same token."""
    some = token_batch(3)
    none = some | {"labels": first_only(some["labels"])}
    pair = [some, none][::order]
    alone, both = (skip_sensitivity(wrap(model), given, layers=[1], **QUIET) for given in ([some], pair))
    assert both["loss"][0] == pytest.approx(alone["loss"][0]) and both["tokens"][0] == alone["tokens"][0]
    with pytest.raises(NormlabError, match="there is nothing to measure on"):
        skip_sensitivity(wrap(model), [none], layers=[1], **QUIET)


class FromSeveralLayers(nn.Module):
    """A causal model whose head reads the last block's output, and `share` of what `source` makes of all outputs."""

    def __init__(self, model: nn.Module, share: float, source: Callable[[list[torch.Tensor]], torch.Tensor]):
        super().__init__()
        self.embedding, self.layers = model.model.embed_tokens, model.model.layers
        self.norm, self.head = model.model.norm, model.lm_head
        self.rotary, self.share, self.source = model.model.rotary_emb, share, source

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = [self.embedding(input_ids)]
        rotary = self.rotary(states[0], torch.arange(input_ids.shape[1])[None])
        for layer in self.layers:
            states.append(layer(states[-1], position_embeddings=rotary))
        return self.head(self.norm(states[-1] + self.share * self.source(states)))


READS = {  # what the head reads besides: whether it is of earlier blocks
    "backout": (lambda states: -states[1], True),
    "average over depth": (lambda states: sum(states), True),
    "the tokens": (lambda states: states[0], False),
    "the last": (lambda states: states[-1], False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reads", READS)
def test_a_head_that_reads_earlier_blocks_too_has_no_lens(model, reads, dtype):
    source, is_refused = READS[reads]
    several, ids = FromSeveralLayers(copy.deepcopy(model), 0.5, source).to(dtype), token_batch()["input_ids"]
    if is_refused:
        with pytest.raises(NormlabError, match="reads what earlier blocks returned too"):
            logit_lens_kl(several, [{"input_ids": ids}], **QUIET)
        return
    values = logit_lens_kl(several, [{"input_ids": ids}], **QUIET)["value"]
    assert abs(values[DEPTH]) < 1e-6 < values[0]


class ResidualApart(nn.Module):
    """A block that passes on the residual and what it adds apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        return self.mlp(self.norm(residual)), residual


class AddsInFloat32(nn.Module):
    """A model whose head adds them in float32, and so reads more digits than the stream has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(64, WIDTH), nn.ModuleList(ResidualApart() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, residual = self.embedding(input_ids), None
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(self.norm.float()(x.float() + residual.float()).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_earlier_block(dtype):
    torch.manual_seed(0)
    model = AddsInFloat32().to(dtype).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
    values = logit_lens_kl(model, [{"input_ids": torch.arange(64).view(4, 16)}], **QUIET)["value"]
    assert values[4] < 1e-3 * values[0] and (values[4] > 1e-5) == (dtype == torch.bfloat16)


class NamedAsInNanoGPT(FromSeveralLayers):
    """The same model with tokens and labels under names of its own. It returns (logits, loss)."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor] | None = None):
        super().__init__(model, 0.0, lambda states: states[0])
        self.loss = loss or partial(functional.cross_entropy, ignore_index=-1)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, self.loss(logits.flatten(0, 1), targets.flatten().long())


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """What nanoGPT takes for these labels: -1 where there is none."""
    return functional.pad(labels[:, 1:], (0, 1), value=-1).clamp(min=-1)


@pytest.fixture(scope="module")
def known(model):
    """The model of `NamedAsInNanoGPT` under known names, which returns logits alone."""
    return FromSeveralLayers(model, 0.0, lambda states: states[0])


@pytest.mark.parametrize("experiment", [skip_sensitivity, logit_lens_kl])
@pytest.mark.parametrize("change", [lambda x: x, torch.Tensor.int, torch.flatten])
def test_tokens_and_labels_under_names_of_their_own_are_found(model, known, experiment, change):
    own, batch = NamedAsInNanoGPT(model), token_batch()
    ids, labels = batch["input_ids"], batch["labels"]
    found = experiment(own, [{"idx": ids, "targets": change(next_tokens(labels))}], **QUIET)
    assert found.equals(experiment(known, [{"input_ids": ids, "labels": labels}], **QUIET))
    with pytest.raises(NormlabError, match="predicts only the last token without labels needs them in the batch"):
        experiment(own, [{"idx": ids}], **QUIET)


def test_a_batch_that_fits_both_does_not_make_the_tokens_labels(model, known):
    """Whose targets are all next tokens; a later batch leaves out some."""
    own, batch = NamedAsInNanoGPT(model), token_batch()
    ids, some = batch["input_ids"], batch["labels"]
    found = skip_sensitivity(own, [{"idx": ids, "targets": next_tokens(one)} for one in (ids, some)], **QUIET)
    assert found.equals(skip_sensitivity(known, [{"input_ids": ids, "labels": one} for one in (ids, some)], **QUIET))


LOSSES = {
    "smoothed": partial(functional.cross_entropy, ignore_index=-1, label_smoothing=0.1),
    "with z-loss": lambda x, y: functional.cross_entropy(x, y, ignore_index=-1) + x.logsumexp(-1).square().mean(),
    "in bfloat16": lambda x, y: functional.cross_entropy(x, y, ignore_index=-1).bfloat16(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_labels_that_the_loss_does_not_show_are_refused(model, loss):
    own, batch = NamedAsInNanoGPT(model, LOSSES[loss]), token_batch()
    given = {"idx": batch["input_ids"], "targets": next_tokens(batch["labels"])}
    with pytest.raises(NormlabError, match="whether targets are labels the returned loss does not tell"):
        skip_sensitivity(own, [given], **QUIET)
    with pytest.raises(NormlabError, match="pass loss_tokens="), record(own, ["grad_l2_total"]):
        own(**given)


def test_what_an_embedding_is_asked_for_besides_the_tokens_is_not_them(model):
    """Positions, where the tokens are cast first."""

    class Placed(FromSeveralLayers):
        def forward(self, idx, pos):
            self.places(pos)
            return super().forward(idx + 0)

    own, ids = Placed(model, 0.0, lambda states: states[0]), token_batch()["input_ids"]
    own.places = nn.Embedding(16, 4)
    with pytest.raises(NormlabError, match="neither labels nor input_ids"):
        skip_sensitivity(own, [{"idx": ids, "pos": torch.arange(ids.shape[1]).expand_as(ids).clone()}], **QUIET)


@pytest.mark.parametrize("output", [lambda x: (x, x), lambda x: (x, x, x.mean()), lambda x: (x, (x,)), lambda x: [x]])
def test_of_other_tuples_nothing_is_taken_for_logits(model, output):
    class Returns(FromSeveralLayers):
        def forward(self, input_ids):
            return output(super().forward(input_ids))

    own = Returns(model, 0.0, lambda states: states[0])
    with pytest.raises(NormlabError, match="without logits: give a model with a language-model head"):
        skip_sensitivity(own, [{"input_ids": token_batch()["input_ids"]}], **QUIET)


def test_labels_that_are_the_next_tokens_already_are_not_shifted_again(known):
    """Of a model that returns logits alone, as torchtitan's: its labels are compared with the tokens."""
    batch = token_batch()
    ids, labels = batch["input_ids"], batch["labels"]
    following = next_tokens(labels).masked_fill(next_tokens(labels) < 0, -100)
    found = skip_sensitivity(known, [{"input_ids": ids, "labels": following}], **QUIET)
    assert found.equals(skip_sensitivity(known, [{"input_ids": ids, "labels": labels}], **QUIET))
    with pytest.raises(NormlabError, match="labels are neither the tokens nor the next ones"):
        skip_sensitivity(known, [{"input_ids": ids, "labels": labels.flip(1)}], **QUIET)


def test_labels_under_a_name_of_their_own_are_what_the_returned_loss_averages_over(model):
    own, ids = NamedAsInNanoGPT(model), token_batch()["input_ids"]
    with record(own, ["grad_l2_total"]) as rec:
        own(ids, next_tokens(ids))[1].backward()
    assert rec.stats().manifest["loss_tokens"] == ids[:, 1:].numel()
    forward = own.forward
    own.forward = lambda idx, targets: {"loss": forward(idx, targets)[1]}
    with pytest.raises(NormlabError, match="the model returns no logits with its loss"), record(own, ["grad_l2_total"]):
        own(ids, next_tokens(ids))
