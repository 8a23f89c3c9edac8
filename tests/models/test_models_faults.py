"""The faults of the authors' code, each patched into ours: the check passes on ours and fails on the fault.

The faults are patched into the formula (a norm's forward, the block's correction). So these tests hold for every
backend. Faults 4, 5 and 7 inside a norm are in test_norms_faults.py.
"""

import weakref

import pytest
import torch
from model_helpers import (
    assert_bits,
    assert_fault_is_caught,
    assert_near,
    assert_state,
    cached,
    constant_of,
    constants,
    every_scheme,
    faulty_bhyt,
    fresh_model,
    tiny_config,
    tiny_model,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from normlab import NormlabError, NormlabForCausalLM
from normlab.models import NormlabDecoderLayer
from normlab.norms import BHyT, DyT, RMSNorm

# 1. c computed before the weights are drawn.


def test_fault_1_c_from_weights_that_are_not_the_initial_ones():
    def check():
        for layer in fresh_model("bhyt").model.layers:
            assert_near(layer.c_attn, constant_of(layer, 24, 4, 2), 1e-5)

    def patch(monkeypatch):
        build = NormlabDecoderLayer.__init__

        def early(self, *args, **kwargs):
            build(self, *args, **kwargs)
            self.c_attn.copy_(self.attention_variance_constant())
            self.c_attn._is_hf_initialized = True  # what is initialized already is left as it is

        monkeypatch.setattr(NormlabDecoderLayer, "__init__", early)

    assert_fault_is_caught(check, patch)


# 2. c not saved; after loading, the first batch's length becomes T.


def test_fault_2_c_of_the_first_batch_after_loading(tmp_path):
    def check():
        model = tiny_model("bhyt")
        model.refresh_carried()
        model.save_pretrained(tmp_path)
        loaded = NormlabForCausalLM.from_pretrained(tmp_path)
        expected = model(tokens(1, 30)).logits
        loaded(tokens(1, 3))  # a short batch first
        assert_bits(constants(loaded), constants(model))
        assert_bits(loaded(tokens(1, 30)).logits, expected)

    def patch(monkeypatch):
        run, save = NormlabDecoderLayer.forward, NormlabForCausalLM.save_pretrained

        def save_without_c(self, folder, **kwargs):
            state = {name: tensor for name, tensor in self.state_dict().items() if not name.endswith("c_attn")}
            save(self, folder, state_dict=state, **kwargs)

        def forward(self, hidden_states, *args, **kwargs):
            if not hasattr(self, "seen_length"):
                self.seen_length = self.train_seq_len = hidden_states.shape[1]
                self.c_attn.copy_(self.attention_variance_constant())
            return run(self, hidden_states, *args, **kwargs)

        monkeypatch.setattr(NormlabForCausalLM, "save_pretrained", save_without_c)
        monkeypatch.setattr(NormlabDecoderLayer, "forward", forward)

    assert_fault_is_caught(check, patch)


# 3. learnable_lam=False trains lambda all the same; lambda_last is ignored for the exact variant.


@pytest.mark.parametrize("scheme", ["bhyt", "bhyt_exact", "bhyt_linear"])
def test_fault_3a_a_lambda_that_should_not_learn(scheme):
    def check():
        model, ids = tiny_model(scheme, learnable_lam=False, lam_last=1.4).train(), tokens()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(".lam")}
        assert len(before) == 2 * 3 + 1
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        for name, tensor in before.items():
            assert_bits(model.state_dict()[name], tensor, name)

    def patch(monkeypatch):
        build = BHyT.__init__
        monkeypatch.setattr(
            BHyT, "__init__", lambda self, *args, **kwargs: build(self, *args, **{**kwargs, "learnable_lam": True})
        )

    assert_fault_is_caught(check, patch)


@pytest.mark.parametrize("scheme", ["bhyt", "bhyt_exact", "bhyt_linear"])
def test_fault_3b_lambda_of_the_final_norm_ignored(scheme):
    def check():
        model = tiny_model(scheme, lam_last=1.4)
        seen = {}
        model.model.norm.register_forward_hook(lambda norm, args, output: seen.update(x=args[0].double(), y=output))
        model(tokens())
        x, norm = seen["x"], model.model.norm
        lam = norm.lam.double() if hasattr(norm, "lam") else 1.4
        z = lam / 3.0 * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert_near(seen["y"], norm.weight.double() * (z if scheme == "bhyt_linear" else z.tanh()), 1e-5)

    def patch(monkeypatch):
        from normlab.schemes import NormSite

        lam = NormSite.lam.fget
        monkeypatch.setattr(NormSite, "lam", property(lambda site: 0.0 if site.place == "final" else lam(site)))

    assert_fault_is_caught(check, patch)


# 5. Statistics in bf16 when decoding.


@pytest.mark.parametrize("scheme", ["bhyt", "bhyt_exact", "bhyt_linear"])
def test_fault_5b_prefill_and_decode_take_different_statistics(scheme):
    """A norm is a function of one token: it gives the same bits for the token alone as for the token in its row."""

    def check():
        model, ids = tiny_model(scheme).bfloat16(), tokens(2, 12)
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
                for position in range(12):
                    assert_bits(norm(x[:, position : position + 1]), norm(x)[:, position : position + 1])
        assert torch.isfinite(model(ids).logits).all()

    def patch(monkeypatch):
        def by_length(x):
            wide = x if x.shape[1] == 1 else x.float()
            return wide.square().mean(-1, keepdim=True)

        monkeypatch.setattr(BHyT, "forward", faulty_bhyt(by_length))

    assert_fault_is_caught(check, patch)


# 6. Decode caches that go stale when lambda or c changes.


@pytest.mark.parametrize("changed", ["lam_input", "lam_post", "c_attn", "weight"])
@pytest.mark.parametrize("carried", ["uniform", "causal"])
def test_fault_6_a_constant_remembered_from_before_it_changed(carried, changed):
    """Decode, change a parameter, decode on: the block after the change uses the new value everywhere."""

    def check():
        model, ids = tiny_model("bhyt", carried=carried, num_hidden_layers=1), tokens(1, 8)
        cache, old_cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
        with torch.no_grad():
            cached(model, ids[:, :6], cache)
            cached(model, ids[:, 6:7], cache)
            layer = model.model.layers[0]
            {
                "lam_input": layer.input_layernorm.lam,
                "lam_post": layer.post_attention_layernorm.lam,
                "c_attn": layer.c_attn,
                "weight": layer.post_attention_layernorm.weight,
            }[changed].mul_(1.7)
            stepped = cached(model, ids[:, 7:], cache)
            # Keys and values of the first tokens were made under the old value: compare a model that never knew it.
            cached(tiny_model("bhyt", carried=carried, num_hidden_layers=1), ids[:, :7], old_cache)
            new = tiny_model("bhyt", carried=carried, num_hidden_layers=1)
            new.load_state_dict(model.state_dict())
            assert_near(stepped, cached(new, ids[:, 7:], old_cache), 1e-5)

    def patch(monkeypatch):
        mlp_norm = BHyT.forward

        def remembered(self, mean_square, position_ids):
            if not hasattr(self, "remembered"):
                self.remembered = (self.c_attn.clone(), self.input_layernorm.lam.detach().clone())
            c, lam = self.remembered
            growth = c * (lam / 3.0).square()
            if self.carried == "causal":
                growth = growth * self.train_seq_len / (position_ids[..., None] + 1)
            return mean_square + growth

        def stale_norm(self, x, *args, **kwargs):
            if not hasattr(self, "stale"):
                self.stale = (self.lam.detach().clone(), self.weight.detach().clone())
            current = (self.lam.detach().clone(), self.weight.detach().clone())
            with torch.no_grad():
                self.lam.copy_(self.stale[0])
                self.weight.copy_(self.stale[1])
                result = mlp_norm(self, x, *args, **kwargs)
                self.lam.copy_(current[0])
                self.weight.copy_(current[1])
            return result

        monkeypatch.setattr(NormlabDecoderLayer, "carried_mean_square", remembered)
        if changed in ("lam_post", "weight"):
            monkeypatch.setattr(BHyT, "forward", stale_norm)

    assert_fault_is_caught(check, patch)


# 7. The tanh output of every norm kept for monitoring.


class LiveActivations(TorchDispatchMode):
    """Remembers, without holding them, the tensors that operations return; ``count`` is how many are still alive."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least = at_least
        self.seen: list[weakref.ref] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.at_least:
                self.seen.append(weakref.ref(tensor))
        return result

    def count(self) -> int:
        alive = [tensor for reference in self.seen if (tensor := reference()) is not None]
        return len({tensor.untyped_storage().data_ptr() for tensor in alive})


def keeping(norm_class):
    run = norm_class.forward

    def forward(self, x, *args, **kwargs):
        result = run(self, x, *args, **kwargs)
        self.last_output = (result[0] if isinstance(result, tuple) else result).detach().clone()
        return result

    return forward


@pytest.mark.parametrize("scheme", ["bhyt", "bhyt_exact", "dyt", "pre_rmsnorm"])
def test_fault_7_no_activation_outlives_the_forward_pass(scheme):
    model, ids = tiny_model(scheme), tokens(4, 50)

    def check():
        with torch.no_grad():
            with LiveActivations(4 * 50 * 32) as activations:
                logits = model(ids, use_cache=False).logits
            assert logits.shape == (4, 50, 61)
            assert len(activations.seen) > 20 and activations.count() == 1, "more than the logits is kept"

    def patch(monkeypatch):
        for norm_class in (BHyT, DyT, RMSNorm):
            monkeypatch.setattr(norm_class, "forward", keeping(norm_class))

    assert_fault_is_caught(check, patch)
    for module in model.modules():
        module.__dict__.pop("last_output", None)


# 8. The correction assumes that every position averages T tokens.


def growth_ratio(model: NormlabForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean square before block 1's MLP norm over the statistic it is given: one number a position."""
    seen = {}

    def remember(norm, args, kwargs):
        seen.update(actual=args[0].float().square().mean(-1), given=kwargs["mean_square"][..., 0])

    hook = model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(remember, with_kwargs=True)
    with torch.no_grad():
        model(ids)
    hook.remove()
    return (seen["actual"] / seen["given"]).mean(0)


def test_fault_8_uniform_correction_misjudges_the_first_positions_and_causal_does_not():
    """Random tokens with attention that averages all it sees (queries at zero): at position t, t + 1 of them."""

    def check():
        torch.manual_seed(0)
        fields = {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 400, "train_seq_len": 32}
        model = NormlabForCausalLM(tiny_config("bhyt", carried="causal", num_hidden_layers=1, lam_input=0.5, **fields))
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.zero_()
            for matrix in (model.model.layers[0].self_attn.v_proj, model.model.layers[0].self_attn.o_proj):
                matrix.weight.mul_(6)
        model.refresh_carried()
        ratio = growth_ratio(model, tokens(64, 32, vocab=400))
        assert (ratio - 1).abs().max() < 0.1, ratio

    def patch(monkeypatch):
        def uniform(self, mean_square, position_ids):
            norm = self.input_layernorm
            return mean_square + self.c_attn * (norm.lam.detach() / norm.kappa).square()

        monkeypatch.setattr(NormlabDecoderLayer, "carried_mean_square", uniform)

    assert_fault_is_caught(check, patch)


@every_scheme
def test_a_forward_pass_leaves_no_trace_on_the_model(scheme):
    """No counters, no lengths, no caches: what the model is does not depend on what it has seen."""
    model, ids = tiny_model(scheme), tokens()

    def attributes():
        return {name: sorted(vars(module)) for name, module in model.named_modules()}

    before, state = attributes(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    model(ids, labels=ids).loss.backward()
    model.eval()
    model(tokens(1, 3), use_cache=True)
    assert attributes() == before
    assert_state(model, state)


def test_fault_6_a_constant_remembered_from_before_a_copy_through_data():
    """As an exponential moving average of the weights writes them, between training and evaluation."""
    model, ids = tiny_model("bhyt"), tokens(1, 8)
    model(ids)
    for parameter in model.train().parameters():
        parameter.data.mul_(1.5)
    new = tiny_model("bhyt")
    new.load_state_dict(model.state_dict())
    assert_bits(model.eval()(ids).logits, new(ids).logits)


def _adapter(kind):
    import peft

    targets = {"target_modules": ["v_proj", "o_proj"]}
    lora = {"r": 2, "init_lora_weights": False, **targets}
    return {
        "LoRA": lambda: peft.LoraConfig(**lora),
        "DoRA": lambda: peft.LoraConfig(use_dora=True, **lora),
        "IA3": lambda: peft.IA3Config(feedforward_modules=[], **targets),
        "OFT": lambda: peft.OFTConfig(r=2, oft_block_size=0, use_cayley_neumann=False, **targets),
    }[kind]()


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "IA3", "OFT"])
def test_c_counts_the_adapters_of_peft(kind):
    """Those that add to a matrix, scale its rows, or turn it."""
    from peft import get_peft_model

    model = tiny_model("bhyt")
    adapted = get_peft_model(model, _adapter(kind))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "oft_R" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "magnitude" in name or "ia3_l" in name:
            parameter.data *= 1.5
    state = {name: tensor.clone() for name, tensor in adapted.state_dict().items() if not name.endswith("c_attn")}
    model.refresh_carried()
    for name, tensor in state.items():
        assert_bits(adapted.state_dict()[name], tensor, name)
    with_adapters = constants(model)
    with adapted.disable_adapter():
        model.refresh_carried()
        without = constants(model)
    merged = adapted.merge_and_unload()
    merged.refresh_carried()
    assert_near(with_adapters, constants(merged), 1e-5)
    assert ((with_adapters - without).abs() > 0.02 * without).all()


def test_c_of_matrices_with_an_adapter_that_cannot_be_merged_is_refused(monkeypatch):
    from peft import LoraConfig, get_peft_model

    model = tiny_model("bhyt")
    get_peft_model(model, LoraConfig(target_modules=["v_proj"]))

    def merge(self, **options):
        raise ValueError("a mixture\nof tokens")

    monkeypatch.setattr(type(model.model.layers[0].self_attn.v_proj), "merge", merge)
    with pytest.raises(NormlabError, match="^an adapter cannot be merged into a matrix of c: a mixture$"):
        model.refresh_carried()


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_a_carried_statistic_takes_the_lambda_of_the_copy_that_ln_tuning_runs():
    import peft

    model = tiny_model("bhyt").eval()
    ids, names = tokens(), ["input_layernorm", "post_attention_layernorm", "norm"]
    other = tiny_model("bhyt").eval()
    for layer in other.model.layers:
        layer.input_layernorm.lam.data += 0.7
    base, moved = model(ids).logits, other(ids).logits
    tuned = peft.get_peft_model(model, peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=names))
    assert_bits(tuned(ids).logits, base)
    for name, parameter in tuned.named_parameters():
        if "input_layernorm.ln_tuning_layers" in name and name.endswith("lam"):
            parameter.data += 0.7
    tuned.eval()  # a write through .data is seen from here on
    assert_bits(tuned(ids).logits, moved)
    with tuned.disable_adapter():
        assert_bits(tuned(ids).logits, base)
    assert_bits(tuned.merge_and_unload()(ids).logits, moved)


@pytest.mark.parametrize("scheme", ["complete_p", "fixnorm", "fixup", "ngpt", "osp_rmsnorm"])
def test_a_head_that_is_more_than_a_matrix_takes_adapters_that_can_be_merged_only(scheme):
    from peft import LoraConfig, get_peft_model

    with pytest.raises(NormlabError, match=f"the head of scheme {scheme} is more than a matrix, .* modules_to_save"):
        get_peft_model(tiny_model(scheme), LoraConfig(target_modules=["lm_head"]))
    ids, expected = tokens(), tiny_model(scheme)(tokens()).logits
    names = set(tiny_model(scheme).state_dict())
    options = {"r": 2, "init_lora_weights": False}
    for wanted in ({"modules_to_save": ["lm_head"]}, {"target_parameters": ["lm_head.weight"]}):
        adapted = get_peft_model(tiny_model(scheme), LoraConfig(target_modules=["k_proj"], **wanted, **options)).eval()
        unmerged = adapted(ids).logits
        merged = adapted.merge_and_unload()
        assert_near(unmerged, merged(ids).logits, 1e-4)
        assert not torch.allclose(unmerged, expected, rtol=1e-4) and set(merged.state_dict()) == names


def test_a_head_that_is_a_matrix_takes_any_adapter():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    adapted = get_peft_model(tiny_model("bhyt"), config).eval()
    unmerged = adapted(tokens()).logits
    assert_near(unmerged, adapted.merge_and_unload()(tokens()).logits, 1e-4)
