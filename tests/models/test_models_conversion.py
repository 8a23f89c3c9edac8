"""swap_norms on models that others made; released checkpoints, of ours and of Llama's relatives."""

import copy
import json

import pytest
import torch
from model_helpers import LLAMA, assert_near, lively, tiny_model, tokens
from reference_model import as_float64
from reference_schemes import reference
from transformers import (
    BitNetConfig,
    BitNetForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from normlab.errors import NormlabError
from normlab.models import NormlabConfig, NormlabForCausalLM, refresh_carried, set_schedules, swap_norms
from normlab.norms import RMSNorm
from normlab.schemes import SCHEMES, STUDIED

FAMILIES = [
    (LlamaConfig, LlamaForCausalLM),
    (Qwen2Config, Qwen2ForCausalLM),
    (Qwen3Config, Qwen3ForCausalLM),
    (MistralConfig, MistralForCausalLM),
]
IDS = tokens(2, 12)


def foreign(config_class, model_class):
    """A model whose every parameter, gains included, is away from its default."""
    torch.manual_seed(0)
    return lively(model_class(config_class(**LLAMA))).eval()


@pytest.mark.parametrize(("config_class", "model_class"), FAMILIES, ids=lambda item: item.__name__)
def test_swapping_rmsnorm_for_rmsnorm_changes_no_bit(config_class, model_class):
    model = foreign(config_class, model_class)
    before = model(IDS).logits
    assert torch.equal(swap_norms(model, "pre_rmsnorm")(IDS).logits, before)


@pytest.mark.parametrize(("config_class", "model_class"), FAMILIES, ids=lambda item: item.__name__)
def test_swapped_bhyt_trains_everywhere_and_equals_our_model_if_llama(config_class, model_class):
    model = swap_norms(foreign(config_class, model_class), "bhyt", train_seq_len=32, lam_input=3.0)
    constants = [layer.c_attn.item() for layer in model.model.layers]
    assert all(c > 0 for c in constants)
    if model_class is LlamaForCausalLM:
        ours = NormlabForCausalLM(NormlabConfig(scheme="bhyt", train_seq_len=32, lam_input=3.0, **LLAMA))
        ours.load_state_dict(model.state_dict())
        assert torch.equal(ours(IDS).logits, model(IDS).logits)
    model(IDS, labels=IDS).loss.backward()
    assert all(layer.input_layernorm.lam.grad.abs() > 0 for layer in model.model.layers)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(2.0)
    refresh_carried(model)
    assert model.model.layers[0].c_attn.item() == pytest.approx(4 * constants[0], rel=1e-5)
    assert model.model.layers[1].c_attn.item() == constants[1]


@pytest.mark.parametrize("scheme", [name for name in STUDIED if SCHEMES[name].changes_blocks_only])
def test_a_swapped_model_generates_the_same_with_and_without_cache(scheme):
    model = swap_norms(foreign(LlamaConfig, LlamaForCausalLM), scheme)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))


def test_a_model_of_another_shape_is_refused_in_one_line_and_left_as_it_was():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)).eval()
    before = model(IDS % 32).logits
    with pytest.raises(NormlabError, match="GPT2LMHeadModel has no Llama-shaped blocks") as error:
        swap_norms(model, "bhyt")
    assert "\n" not in str(error.value)
    assert torch.equal(model(IDS % 32).logits, before)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: GemmaForCausalLM(GemmaConfig(**LLAMA)), "GemmaRMSNorm is not a norm and a gain"),
        (lambda: GraniteForCausalLM(GraniteConfig(**LLAMA, residual_multiplier=0.5)), "multiplies its branches"),
        (lambda: DogeForCausalLM(DogeConfig(**LLAMA)), "multiplies its branches"),
        (lambda: MiniMaxForCausalLM(MiniMaxConfig(**LLAMA)), "is not y = x . self_attn"),
        (lambda: GptOssForCausalLM(GptOssConfig(**LLAMA, num_local_experts=4)), "is not y = x . self_attn"),
        (lambda: Starcoder2ForCausalLM(Starcoder2Config(**LLAMA)), "LayerNorm is not a norm and a gain"),
        (lambda: OlmoForCausalLM(OlmoConfig(**LLAMA)), "OlmoLayerNorm is not a norm and a gain"),
    ],
    ids=[
        "1 + w",
        "a multiplier",
        "trained multipliers",
        "a normalized stream",
        "an MLP of a pair",
        "a bias",
        "no gain",
    ],
)
def test_what_swapping_would_lose_is_refused_and_the_model_left_as_it_was(build, match):
    torch.manual_seed(0)
    model = lively(build()).eval()
    before = model(IDS).logits
    with pytest.raises(NormlabError, match=match):
        swap_norms(model, "pre_rmsnorm")
    assert torch.equal(model(IDS).logits, before)


def test_a_new_norm_has_the_old_gain_times_its_start_at_the_same_place():
    """The control of BHyT is one: its gain starts at lambda / kappa. Norms of outputs and sums keep their own start."""
    old = foreign(LlamaConfig, LlamaForCausalLM).model.layers[1]
    gains = {"attn_in": old.input_layernorm.weight, "mlp_in": old.post_attention_layernorm.weight}
    for scheme, factor in (
        ("pre_rmsnorm", 1.0),
        ("rmsnorm_gain", 0.2),
        ("lns_gain", 2**-0.5),
        ("dssn", 1.0),
    ):
        block = swap_norms(foreign(LlamaConfig, LlamaForCausalLM), scheme).model.layers[1]
        for place, name in block.layout.places():
            gain = getattr(block, name).weight
            start = torch.full_like(gain, LLAMA["num_hidden_layers"] ** -0.5)
            factor = 0.1 if scheme == "rmsnorm_gain" and place == "mlp_in" else factor
            assert torch.allclose(gain, gains[place] * factor if place in gains else start), (scheme, place)
    block = swap_norms(foreign(LlamaConfig, LlamaForCausalLM), "post_rmsnorm").model.layers[1]
    assert torch.equal(getattr(block, block.layout.attn_sum).weight, gains["mlp_in"])


@pytest.mark.parametrize("first", ["bhyt", "lns", "lns_gain", "rmsnorm_gain", "pre_layernorm"])
def test_a_second_swap_gives_what_one_would(first):
    model = foreign(LlamaConfig, LlamaForCausalLM)
    before, hidden = model(IDS).logits, LLAMA["num_hidden_layers"] + 1
    swap_norms(swap_norms(model, first), "pre_rmsnorm")
    assert_near(model(IDS).logits, before, 1e-5)
    assert len(model(IDS, output_hidden_states=True).hidden_states) == hidden
    assert isinstance(copy.deepcopy(model).model.layers[0], LlamaDecoderLayer)
    once = swap_norms(foreign(LlamaConfig, LlamaForCausalLM), "deepnorm")
    assert_near(swap_norms(model, "deepnorm")(IDS).logits, once(IDS).logits, 1e-5)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: swap_norms(foreign(LlamaConfig, LlamaForCausalLM), "post_rmsnorm"), "earlier swap_norms put there"),
        (lambda: swap_norms(foreign(LlamaConfig, LlamaForCausalLM), "deepnorm"), "earlier swap_norms put there"),
        (lambda: tiny_model("pre_rmsnorm"), r"scheme, pre_rmsnorm, .* NormlabConfig\(scheme=\"minimax\", ...\), then"),
        (lambda: tiny_model("looped"), "is built for its scheme, looped"),
    ],
    ids=["swapped to other places", "swapped to a residual rule", "ours", "ours, looped"],
)
def test_a_second_swap_that_would_lose_something_and_one_of_our_models_are_refused(build, match):
    model = build()
    before = model(IDS).logits
    with pytest.raises(NormlabError, match=match) as caught:
        swap_norms(model, "minimax")
    assert "\n" not in str(caught.value)
    assert torch.equal(model(IDS).logits, before)


def test_a_swap_that_fails_at_a_later_block_leaves_the_model_as_it_was():
    model = foreign(LlamaConfig, LlamaForCausalLM)
    model.model.layers[2].self_attn.o_proj = EightBitLinear(model.model.layers[2].self_attn.o_proj)
    before = model(IDS).logits
    with pytest.raises(NormlabError, match="EightBitLinear keeps it in torch.int8"):
        swap_norms(model, "bhyt")
    assert torch.equal(model(IDS).logits, before)


def test_a_swapped_model_still_has_hidden_states_and_is_copied_and_saved(tmp_path):
    called = foreign(LlamaConfig, LlamaForCausalLM)
    called(IDS, output_hidden_states=True)
    models = [swap_norms(model, "bhyt") for model in (called, foreign(LlamaConfig, LlamaForCausalLM))]
    torch.save(models[1], tmp_path / "model.pt")
    models += [copy.deepcopy(models[1]), torch.load(tmp_path / "model.pt", weights_only=False)]
    states = [model(IDS, output_hidden_states=True).hidden_states for model in models]
    assert [len(each) for each in states] == [LLAMA["num_hidden_layers"] + 1] * 4
    assert all(map(torch.equal, each, states[0]) for each in states) and isinstance(
        models[0].model.layers[0], LlamaDecoderLayer
    )


def test_padding_on_the_left_changes_no_logit_of_a_swapped_model_that_counts_positions():
    model = swap_norms(foreign(LlamaConfig, LlamaForCausalLM), "bhyt", carried="causal")
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], dim=1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(IDS)], dim=1)
    found = model(padded, attention_mask=mask).logits[:, 3:]
    assert_near(found, model(IDS).logits.double(), 1e-5, "padded")


@pytest.mark.parametrize(
    ("config_class", "model_class", "fields", "last"),
    [
        (MistralConfig, MistralForCausalLM, {}, [4, 4, 4]),
        (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "max_window_layers": 1}, [12, 4, 4]),
        (Qwen2Config, Qwen2ForCausalLM, {}, [12, 12, 12]),
        (LlamaConfig, LlamaForCausalLM, {}, [12, 12, 12]),  # which ignores the field
    ],
)
def test_a_swapped_models_correction_is_over_the_tokens_that_a_token_attends_to(
    config_class, model_class, fields, last
):
    config = config_class(**LLAMA, sliding_window=4, **fields, attn_implementation="eager")
    model = swap_norms(model_class(config).eval(), "bhyt", carried="causal", train_seq_len=24)
    attentions = model(IDS, output_attentions=True).attentions
    for layer, weights, most in zip(model.model.layers, attentions, last, strict=True):
        attended = (weights[0, 0] > 0).sum(-1)
        assert attended.tolist() == [min(t + 1, most) for t in range(12)]
        uniform = layer.c_attn * layer.input_layernorm.slope**2
        found = layer.carried_correction(torch.arange(12)[None])[0, :, 0]
        assert_near(found, uniform * 24 / attended, 1e-6)


JOINING = [name for name, row in SCHEMES.items() if row.changes_blocks_only and row.residual is not None]


@pytest.mark.parametrize("scheme", JOINING)
def test_a_swapped_models_residual_rules_have_its_precision(scheme):
    model = swap_norms(foreign(LlamaConfig, LlamaForCausalLM).to(torch.bfloat16), scheme)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    model(IDS, labels=IDS).loss.backward()


def test_a_swapped_models_schedules_can_be_told_the_step():
    model = foreign(LlamaConfig, LlamaForCausalLM)
    before = model(IDS).logits
    swap_norms(model, "prores", residual_warmup=10)
    assert (model(IDS).logits - before).abs().max() > 1e-2
    set_schedules(model, 15, 100)
    assert [layer.mlp_residual.alpha.item() for layer in model.model.layers] == pytest.approx([1.0, 0.75, 0.5])
    set_schedules(model, 30, 100)
    assert torch.allclose(model(IDS).logits, before, atol=1e-5)


@pytest.mark.parametrize("fields", [{"qk_norm": "l2"}, {"qk_norm": "rms_head"}, {"affine_attention": True}])
def test_what_would_change_the_attention_is_refused_and_the_model_left_as_it_was(fields):
    model = foreign(LlamaConfig, LlamaForCausalLM)
    before = model(IDS).logits
    with pytest.raises(NormlabError, match="swap_norms keeps the model's attention"):
        swap_norms(model, "pre_layernorm", **fields)
    assert torch.equal(model(IDS).logits, before)


def test_a_release_of_lns_or_mix_ln_has_the_logits_of_the_papers_formulas(tmp_path):
    """Their weights have Llama's names. Only the second norm of Mix-LN's Post-LN blocks has another."""
    for scheme in ("lns", "mix_ln"):
        weights = tiny_model(scheme)
        weights.save_pretrained(tmp_path / scheme)
        (tmp_path / scheme / "config.json").write_text(json.dumps(LlamaConfig(**LLAMA).to_dict()))
        model = NormlabForCausalLM.from_released(str(tmp_path / scheme), scheme=scheme).eval()
        expected = reference(model.config, as_float64(weights.state_dict()), tokens()).logits
        assert_near(model(tokens()).logits, expected, 2e-5, scheme)


def test_a_scheme_that_scales_embeddings_cannot_be_swapped_in():
    with pytest.raises(NormlabError, match="scales the embeddings"):
        swap_norms(foreign(LlamaConfig, LlamaForCausalLM), "dyt")


RELEASED = [("bhytline", "bhyt"), ("bhyt", "bhyt"), ("bhytstar", "bhyt_exact"), ("rms", "pre_rmsnorm")]


@pytest.mark.parametrize(("norm_type", "scheme"), RELEASED)
def test_a_released_checkpoint_loads_with_its_own_lambda_kappa_and_length(tmp_path, norm_type, scheme):
    torch.manual_seed(1)
    values = {"lam_input": 3.0, "lam_post": 1.5, "lam_last": 0.5, "kappa": 8, "train_seq_len": 48}
    model = NormlabForCausalLM(NormlabConfig(scheme=scheme, **values, **LLAMA)).eval()
    model.save_pretrained(tmp_path)
    names = {"input_layer_lam": 3.0, "post_layer_lam": 1.5, "last_layer_lam": 0.5, "bhyt_kappa": 8, "seq_len": 48}
    released = {**LlamaConfig(**LLAMA).to_dict(), "norm_type": norm_type, **names}
    (tmp_path / "config.json").write_text(json.dumps(released))
    loaded = NormlabForCausalLM.from_released(str(tmp_path))
    assert {name: getattr(loaded.config, name) for name in values} == values
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_release_that_does_not_say_its_scheme_must_be_told():
    released = LlamaConfig(**LLAMA).to_dict()
    with pytest.raises(NormlabError, match="pass scheme="):
        NormlabConfig.from_released(released)
    assert NormlabConfig.from_released(released, scheme="lns").scheme == "lns"


# OLMo 2 and Qwen 3 load as the scheme that they are, with transformers' logits; what differs elsewhere is refused.
FIELDS = {**LLAMA, "head_dim": 8, "tie_word_embeddings": False}
RELATIVES = {
    "reordered_norm": (Olmo2Config, Olmo2ForCausalLM),
    "pre_rmsnorm": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.mark.parametrize("scheme", RELATIVES)
def test_a_relatives_checkpoint_gives_its_own_logits(scheme, tmp_path):
    config_class, model_class = RELATIVES[scheme]
    torch.manual_seed(0)
    theirs = lively(model_class(config_class(**FIELDS))).eval()
    theirs.save_pretrained(tmp_path)
    model = NormlabForCausalLM.from_released(str(tmp_path)).eval()
    assert model.config.scheme == scheme
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    ids = tokens(2, 9)
    with torch.no_grad():
        assert_near(model(ids).logits, theirs(ids).logits, 1e-6)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_a_checkpoint_that_differs_in_another_part_is_refused_by_that_part(tmp_path):
    Gemma3ForCausalLM(Gemma3TextConfig(**FIELDS)).save_pretrained(tmp_path)
    with pytest.raises(NormlabError, match="gemma3_text cannot be loaded.*within a window and turn by a RoPE base"):
        NormlabForCausalLM.from_released(str(tmp_path))
    windows = Qwen3Config(**FIELDS, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(NormlabError, match="qwen3 cannot be loaded: its attention is within a window"):
        NormlabConfig.from_released(windows.to_dict())


def test_gradient_checkpointing_stays_on():
    model = foreign(LlamaConfig, LlamaForCausalLM)
    model.gradient_checkpointing_enable()
    blocks = swap_norms(model, "bhyt").model.layers
    assert all(block.gradient_checkpointing for block in blocks)
    model.train()(IDS, labels=IDS).loss.backward()
    assert all(block.mlp.gate_proj.weight.grad.any() for block in blocks)


def test_bhyt_is_refused_where_attention_has_no_values_matrix():
    config = DeepseekV3Config(
        **LLAMA,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    with pytest.raises(NormlabError, match="scheme bhyt needs v_proj and o_proj of the attention: DeepseekV3"):
        swap_norms(DeepseekV3ForCausalLM(config), "bhyt")


class EightBitLinear(torch.nn.Module):
    """y = x (codes times scale)^T, as libraries of 8-bit weights have it."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight, self.bias = torch.nn.Parameter(codes, requires_grad=False), None
        self.register_buffer("scale", scale)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def in_eight_bits(part, *names):
    model = foreign(LlamaConfig, LlamaForCausalLM)
    for block in model.model.layers:
        for name in names:
            setattr(getattr(block, part), name, EightBitLinear(getattr(getattr(block, part), name)))
    return model


@pytest.mark.parametrize("name", ["v_proj", "o_proj"])
def test_c_of_codes_is_refused_and_the_model_left_as_it_was(name):
    model = in_eight_bits("self_attn", name)
    before = model(IDS).logits
    with pytest.raises(NormlabError, match='EightBitLinear keeps it in torch.int8: use carried="exact"'):
        swap_norms(model, "bhyt")
    assert torch.equal(model(IDS).logits, before)
    assert swap_norms(model, "bhyt", carried="exact")(IDS).logits.isfinite().all()


def test_a_quantized_mlp_leaves_new_norms_the_precision_of_the_old_ones():
    model = in_eight_bits("mlp", "gate_proj", "up_proj", "down_proj")
    swapped = swap_norms(model, "peri_ln")
    assert {norm.weight.dtype for norm in swapped.modules() if isinstance(norm, RMSNorm)} == {torch.float32}
    assert swapped(IDS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("config_class", "model_class"), [(BitNetConfig, BitNetForCausalLM), (DiffLlamaConfig, DiffLlamaForCausalLM)]
)
def test_a_statistic_is_not_carried_past_attention_that_is_not_linear_in_its_values(config_class, model_class):
    model = foreign(config_class, model_class)
    model.model.layers[1].self_attn.q_proj.train()
    modes, before = [module.training for module in model.modules()], model(IDS).logits
    with pytest.raises(NormlabError, match=f'attention of {model_class.__name__} is more than .* Use carried="exact"'):
        swap_norms(model, "bhyt")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model(IDS).logits, before)
    assert swap_norms(model, "bhyt", carried="exact")(IDS).logits.isfinite().all()


def test_dropout_does_not_hide_that_attention_is_linear_in_its_values():
    torch.manual_seed(0)
    model = lively(LlamaForCausalLM(LlamaConfig(**LLAMA, attention_dropout=0.5))).train()
    assert swap_norms(model, "bhyt").training


def test_a_statistic_is_carried_in_float64_too():
    expected = swap_norms(foreign(LlamaConfig, LlamaForCausalLM), "bhyt").model.layers[1].c_attn
    swapped = swap_norms(foreign(LlamaConfig, LlamaForCausalLM).double(), "bhyt")
    assert swapped.model.layers[1].c_attn == expected and swapped(IDS).logits.dtype == torch.float64


@pytest.mark.parametrize("kind", ["IA3", "LoRA with a bias"])
def test_a_statistic_is_carried_past_adapters_that_change_the_values_bias(kind):
    import peft  # slow to import

    adapters = {
        "IA3": peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[], init_ia3_weights=False),
        "LoRA with a bias": peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False, lora_bias=True),
    }
    model = foreign(Qwen2Config, Qwen2ForCausalLM)
    peft.inject_adapter_in_model(adapters[kind], model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            parameter.data.normal_()
    merged = copy.deepcopy(model)
    for block in merged.model.layers:
        block.self_attn.v_proj.merge()
        block.self_attn.v_proj = block.self_attn.v_proj.get_base_layer()
    assert not torch.equal(merged(IDS).logits, foreign(Qwen2Config, Qwen2ForCausalLM)(IDS).logits)
    expected = [block.c_attn.item() for block in swap_norms(merged, "bhyt").model.layers]
    found = [block.c_attn.item() for block in swap_norms(model, "bhyt").model.layers]
    assert found == pytest.approx(expected, rel=1e-5)
