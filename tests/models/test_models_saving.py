"""Saving, loading, casting and copying: what comes back is what was saved, c included, bit for bit."""

import copy
import json
import pickle

import pytest
import torch
from model_helpers import (
    assert_bits,
    assert_near,
    assert_state,
    carrying_case,
    constants,
    every_case,
    every_registered,
    every_scheme,
    fresh_model,
    lively,
    tiny_config,
    tiny_model,
    tokens,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from normlab import SCHEMES, NormlabConfig, NormlabError, NormlabForCausalLM
from normlab.models.embeddings_head import changes_head
from normlab.models.pretrained import find_model, load_held_out
from normlab.norms import Norm, RMSNorm
from normlab.residuals import Residual
from normlab.schemes import Scheme


@every_registered
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_comes_back_bit_for_bit_and_so_does_its_backbone(scheme, extra, dtype, tmp_path):
    model, ids = tiny_model(scheme, **extra).to(dtype), tokens()
    # A cast rounds stock Llama's rotary frequencies, which are not saved; a model loaded in bf16 has them in float32.
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert type(loaded) is NormlabForCausalLM and not any(report.values()), report
    assert_state(loaded, model.state_dict())
    expected = model(ids).logits
    assert_bits(loaded.eval()(ids).logits, expected)
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in model.named_parameters()}
    if dtype == torch.float32:
        backbone = AutoModel.from_pretrained(tmp_path)
        assert_bits(model.lm_head(backbone(ids).last_hidden_state), expected)


@every_case
def test_the_configuration_survives_its_json(scheme, extra, tmp_path):
    config = tiny_config(scheme, **extra)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is NormlabConfig
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["scheme"] == scheme and fields["model_type"] == "normlab" and fields["train_seq_len"] == 24
    assert not [name for name in fields if "kernel" in name], "how to compute is not part of what the model is"


def test_defaults_are_written_out_so_that_a_later_default_cannot_change_a_saved_model(tmp_path):
    NormlabConfig(scheme="bhyt", max_position_embeddings=48).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    expected = {"lam_input": 2.0, "lam_post": 1.0, "lam_last": 0.0, "kappa": 10.0, "carried": "uniform"}
    expected |= {"learnable_lam": True, "train_seq_len": 48, "post_fraction": 0.25}
    assert {name: fields.get(name) for name in expected} == expected


@carrying_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c_is_restored_in_float32_whatever_the_weights_are_loaded_as(scheme, extra, dtype, tmp_path):
    model = tiny_model(scheme, **extra)
    model.save_pretrained(tmp_path)
    loaded = NormlabForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype and loaded.model.layers[0].input_layernorm.lam.dtype == dtype
    assert_bits(constants(loaded), constants(model))


@carrying_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_saved_without_c_load_with_c_computed_from_them(scheme, extra, dtype, tmp_path):
    model = tiny_model(scheme, **extra)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.endswith("c_attn")}
    save_file(kept, path, metadata={"format": "pt"})
    loaded, report = NormlabForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    expected = torch.stack([layer.attention_variance_constant() for layer in loaded.model.layers])
    assert_bits(constants(loaded), expected)
    assert not torch.equal(constants(loaded), constants(model)), "the odd c came from somewhere"


@carrying_case
@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.bfloat16().float(),
        lambda model: model.to("cpu", torch.bfloat16).to(torch.float16),
        lambda model: model.double(),
        lambda model: torch.nn.Sequential(model).bfloat16()[0],
    ],
    ids=["bf16", "fp16", "bf16_and_back", "twice", "double", "inside_another_module"],
)
def test_casting_keeps_every_bit_of_c(scheme, extra, cast):
    model = tiny_model(scheme, **extra)
    before = constants(model).clone()
    assert not torch.equal(before, before.bfloat16().float()), "a c that bf16 can hold would show nothing"
    assert_bits(constants(cast(model)), before)


@every_case
def test_a_deep_copy_is_equal_and_separate(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens()
    clone = copy.deepcopy(model)
    assert_state(clone, model.state_dict())
    expected = model(ids).logits
    assert_bits(clone(ids).logits, expected)
    with torch.no_grad():
        for tensor in clone.state_dict().values():
            tensor.mul_(1.5)
    clone.refresh_carried()
    clone.load_state_dict({name: t for name, t in clone.state_dict().items() if not name.endswith("c_attn")})
    assert_bits(model(ids).logits, expected)
    assert not torch.equal(clone(ids).logits, expected)


def test_saving_does_not_recompute_c_and_refreshing_then_saving_does(tmp_path):
    model = tiny_model("bhyt")
    odd = constants(model).clone()
    model.save_pretrained(tmp_path / "odd")
    model.refresh_carried()
    model.save_pretrained(tmp_path / "fresh")
    assert_bits(constants(NormlabForCausalLM.from_pretrained(tmp_path / "odd")), odd)
    assert_bits(constants(NormlabForCausalLM.from_pretrained(tmp_path / "fresh")), constants(model))
    assert not torch.equal(odd, constants(model))


@every_scheme
def test_the_choice_of_kernels_reaches_every_norm_and_is_not_saved(scheme, tmp_path):
    model = fresh_model(scheme)
    model.save_pretrained(tmp_path)
    loaded = NormlabForCausalLM.from_pretrained(tmp_path, kernels="torch")
    chosen = [module.kernels for module in loaded.modules() if isinstance(module, Norm)]
    assert chosen and set(chosen) == {"torch"}
    assert "kernels" not in (tmp_path / "config.json").read_text()
    with pytest.raises(NormlabError, match="choose one of auto, triton, torch"):
        NormlabForCausalLM(model.config, kernels="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_triton_kernels_that_cannot_run_are_refused_in_one_line():
    model = NormlabForCausalLM(tiny_config(scheme="pre_rmsnorm"), kernels="triton")
    with pytest.raises(ValueError, match="the kernels cannot run") as caught:
        model(tokens())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", [name for name, row in SCHEMES.items() if changes_head(tiny_config(name))])
@pytest.mark.parametrize(("rows", "tied"), [(50, False), (70, False), (70, True)])
def test_a_resized_head_keeps_what_it_does_besides_its_matrix(scheme, rows, tied, tmp_path):
    model, ids = tiny_model(scheme, tie_word_embeddings=tied), tokens(vocab=50)
    with torch.no_grad():
        before = model(ids).logits[..., :50]
    model.resize_token_embeddings(rows, mean_resizing=False)
    after = model(ids).logits
    assert after.shape[-1] == rows == model.lm_head.out_features
    assert_near(after[..., :50], before, 1e-6)  # a product of another shape may add in another order
    model.save_pretrained(tmp_path)
    assert_bits(NormlabForCausalLM.from_pretrained(tmp_path)(ids).logits, after)


def test_statistics_are_loaded_in_float32_whatever_the_weights_are_loaded_as(tmp_path):
    for scheme in ("tapernorm", "powernorm", "unified_norm"):
        saved = tiny_model(scheme)
        saved.save_pretrained(tmp_path / scheme)
        loaded = NormlabForCausalLM.from_pretrained(tmp_path / scheme, dtype=torch.bfloat16)
        assert loaded.lm_head.weight.dtype == torch.bfloat16
        norms = [model.model.layers[0].input_layernorm for model in (saved, loaded)]
        kept, read = (dict(norm.named_buffers()) for norm in norms)
        assert len(kept) > 1
        for name, statistic in kept.items():
            assert_bits(read[name], statistic, f"{scheme} {name}")


def test_a_weight_that_a_checkpoint_lacks_has_its_start():
    head = tiny_model("fixup").lm_head
    head.shift.data.fill_(float("nan"))
    fresh_model("fixup")._init_weights(head)
    assert head.shift == 0


class Ramp(Norm):
    """An RMSNorm with tensors that only its own code can start: a fixed ramp, a gate, a parameter of PyTorch's."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.add_parameter("weight", hidden_size, 1.0)
        self.bias = nn.Parameter(torch.linspace(0.1, 0.2, hidden_size))
        self.register_buffer("ramp", torch.linspace(0.5, 1.5, hidden_size), persistent=False)
        self.gate = nn.Linear(hidden_size, hidden_size)
        self.inner = RMSNorm(hidden_size)
        nn.init.constant_(self.gate.bias, 4.0)
        nn.init.constant_(self.inner.weight, 3.0)

    def forward(self, x):
        return self.gamma() * self.inner(x) * self.ramp * self.gate(x).sigmoid() + self.bias


class Sloped(Norm):
    """An RMSNorm with a fixed ramp alone."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.add_parameter("weight", hidden_size, 1.0)
        self.register_buffer("ramp", torch.linspace(0.5, 1.5, hidden_size), persistent=False)

    def forward(self, x):
        return self.gamma() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.ramp


class Holding(Norm):
    """A gain of its own. All else is in modules inside it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.add_parameter("weight", hidden_size, 1.0)
        self.gate, self.sloped = nn.Linear(hidden_size, hidden_size), Sloped(hidden_size)

    def forward(self, x):
        return self.gamma() * self.sloped(x) * self.gate(x).sigmoid()


class Wrapping(Norm):
    """Without a tensor of its own."""

    gains = ()

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.inner = nn.LayerNorm(hidden_size)

    def forward(self, x):
        return self.inner(x)


class Fading(Residual):
    """x + 0.9^l f."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(0.9**layer), persistent=False)

    def join(self, state, branch, norm, read):
        return norm(state + self.factor * branch)


def test_what_only_a_norms_or_rules_class_knows_starts_as_the_class_has_it_and_is_there_after_loading(
    tmp_path, monkeypatch
):
    def norm(site):
        return Sloped(site.width) if site.place == "final" else Ramp(site.width)

    row = Scheme("own", "own", "own", "own", norm, "norm", residual=lambda sublayer: Fading(sublayer.layer))
    monkeypatch.setitem(SCHEMES, "own", row)

    def assert_starts(model):
        assert_bits(model.model.norm.ramp, torch.linspace(0.5, 1.5, 32))
        for norm in (module for module in model.modules() if isinstance(module, Ramp)):
            assert_bits(norm.ramp, torch.linspace(0.5, 1.5, 32))
            assert_bits(norm.bias, torch.linspace(0.1, 0.2, 32))
            assert (norm.gate.bias == 4).all() and (norm.inner.weight == 3).all()
            assert 0.5 < norm.gate.weight.abs().max() * 32**0.5 <= 1  # nn.Linear's own, within 1/sqrt(d)
        factors = [block.attn_residual.factor.item() for block in model.model.layers]
        assert factors == pytest.approx([0.9, 0.9**2, 0.9**3])

    model = fresh_model("own")
    assert_starts(model)
    assert_bits(model.lm_head.weight, fresh_model("pre_rmsnorm").lm_head.weight)
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "own")
    torch.empty(64, 32).fill_(7.0)  # what is freed is what a load finds in new memory
    loaded = NormlabForCausalLM.from_pretrained(tmp_path / "own")
    assert_starts(loaded)
    assert_bits(loaded(tokens()).logits, expected)
    fresh_model("pre_rmsnorm").save_pretrained(tmp_path / "plain")
    assert_starts(NormlabForCausalLM.from_pretrained(tmp_path / "plain", config=model.config))


@pytest.fixture
def holding(monkeypatch):
    """The name of a scheme whose norms are modules around others."""

    def norm(site):
        return Wrapping(site.width) if site.place == "final" else Holding(site.width)

    monkeypatch.setitem(SCHEMES, "holding", Scheme("holding", "own", "own", "own", norm, "norm"))
    return "holding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_inside_a_norm_have_their_start_also_where_a_checkpoint_has_all_of_the_norms_own(
    dtype, holding, tmp_path
):
    fresh_model("pre_rmsnorm").save_pretrained(tmp_path)
    torch.empty(64, 32).fill_(torch.nan)  # what is freed is what a load finds in new memory
    loaded = NormlabForCausalLM.from_pretrained(tmp_path, config=tiny_config(holding), dtype=dtype)
    assert (loaded.model.norm.inner.weight == 1).all() and (loaded.model.norm.inner.bias == 0).all()
    gates = []
    for norm in (module for module in loaded.modules() if isinstance(module, Holding)):
        assert_bits(norm.sloped.ramp, torch.linspace(0.5, 1.5, 32).to(dtype))
        assert (norm.sloped.weight == 1).all() and norm.gate.weight.abs().max() * 32**0.5 <= 1.01
        gates.append(norm.gate.weight)
    assert len({gate.sum().item() for gate in gates}) == 6
    assert loaded(tokens()).logits.isfinite().all()


def test_a_loaded_model_keeps_every_trained_number_of_modules_inside_its_norms_and_can_be_pickled(holding, tmp_path):
    model = lively(fresh_model(holding)).eval()
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    loaded = NormlabForCausalLM.from_pretrained(tmp_path)
    assert_bits(pickle.loads(pickle.dumps(loaded))(tokens()).logits, expected)
    with torch.device("meta"):
        empty = NormlabForCausalLM(model.config)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_state(pickle.loads(pickle.dumps(empty)), model.state_dict())


def test_a_model_that_is_partly_on_disk_has_what_no_checkpoint_has(holding, tmp_path):
    model = fresh_model(holding)
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "saved")
    torch.empty(32).fill_(torch.nan)
    parts = ["lm_head", "model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.0", "model.layers.2"]
    places = {"model.layers.1": "disk", **dict.fromkeys(parts, "cpu")}
    loaded = NormlabForCausalLM.from_pretrained(tmp_path / "saved", device_map=places, offload_folder=tmp_path / "disk")
    assert loaded.model.layers[1].input_layernorm.weight.is_meta
    assert_bits(loaded(tokens()).logits, expected)


def test_blocks_and_fields_that_are_not_there_are_named(tmp_path):
    with pytest.raises(NormlabError, match="lam_lastt is no field of a NormlabConfig"):
        find_model("bhyt", lam_lastt=1)
    with pytest.raises(NormlabError, match="has no held-out blocks"):
        load_held_out(tmp_path)
