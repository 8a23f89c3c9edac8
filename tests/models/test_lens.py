"""The TransformerLens bridge: bit-identical logits, hooks that show what is computed, probes on it, and logit
attribution."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hatchling.build import build_editable
from model_helpers import fresh_model
from probe_zoo import near, tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

import normlab
from normlab.differences.capture import capture, roles_of
from normlab.errors import NormlabError
from normlab.norms import BHyT, RMSNorm
from normlab.probes import record, sites, skip_sensitivity
from normlab.schemes import STUDIED

pytest.importorskip("transformer_lens")
from normlab.models.lens import component_effects, direct_logit_attribution, to_bridge  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = torch.finfo(torch.float32).eps
POST = ("post_rmsnorm", "mix_ln")
ANSWERS = torch.tensor([3, 7])
# A final tanh that is steep for its input.
steep = pytest.mark.parametrize(("scheme", "fields"), [("dyt", {}), ("bhyt", {"lam_last": 30.0})])


def build(scheme: str, **changes) -> normlab.NormlabForCausalLM:
    """A model of 3 blocks whose constants are away from their defaults, which hide errors."""
    fields = {"num_hidden_layers": 3, "initializer_range": 0.3, "kappa": 10.0, "lam_input": 2.0, "lam_post": 1.0}
    model = fresh_model(scheme, **{**fields, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            if name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.refresh_carried()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def ids():
    return torch.randint(0, 61, (2, 10), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=STUDIED)
def bridged(request):
    """A model, and the bridge to its copy."""
    model = build(request.param)
    return model, to_bridge(copy.deepcopy(model))


@torch.no_grad()
def kept(bridge, ids):
    """The values that the hooks saw in a forward pass."""
    return bridge.run_with_cache(ids)[1]


def test_logits_are_bit_identical_plain_cached_and_with_every_hook_on(bridged, ids):
    model, bridge = bridged
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(bridge(ids), expected)
        logits, cache = bridge.run_with_cache(ids)
    assert torch.equal(logits, expected)
    assert not any("hook_normalized" in name for name in cache)


def test_hooks_show_what_the_norms_compute(bridged, ids):
    _, bridge = bridged
    cache = kept(bridge, ids)
    for layer, block in enumerate(bridge.blocks):
        norm = block.ln2.original_component
        x, y = cache[f"blocks.{layer}.ln2.hook_in"], cache[f"blocks.{layer}.ln2.hook_out"]
        scale = f"blocks.{layer}.ln2.hook_scale"
        assert (scale in cache) == isinstance(norm, RMSNorm | BHyT)
        if scale in cache:
            ms = cache[scale].square() - norm.eps
            assert torch.allclose(norm(x, mean_square=ms), y, rtol=1e-4, atol=1e-6)


def test_the_scale_at_a_carried_site_is_the_carried_one(ids):
    bridge = to_bridge(build("bhyt"))
    cache = kept(bridge, ids)
    exact = cache["blocks.1.ln2.hook_in"].square().mean(-1, keepdim=True)
    shown = cache["blocks.1.ln2.hook_scale"].square() - 1e-6
    entering = cache["blocks.1.ln1.hook_scale"].square() - 1e-6
    block = bridge.blocks[1]
    assert torch.allclose(shown, block.original_component.carried_mean_square(entering, None), rtol=1e-4)
    assert not torch.allclose(shown, exact, rtol=0.05)


@pytest.mark.parametrize("scheme", ["pre_rmsnorm", "lns", "bhyt", "bhyt_linear"])
def test_an_edited_scale_takes_effect_and_a_frozen_one_changes_nothing(scheme, ids):
    bridge = to_bridge(build(scheme))
    with torch.no_grad():
        plain, cache = bridge.run_with_cache(ids)
        name = "blocks.2.ln2.hook_scale"
        doubled = bridge.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: value * 2)])
        frozen = bridge.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: cache[name].clone())])
    assert not torch.allclose(doubled, plain, atol=1e-3) and torch.allclose(frozen, plain, atol=1e-4)


@pytest.mark.parametrize("site", ["blocks.0.ln1", "blocks.2.ln2", "ln_final"])
def test_a_scale_that_a_hook_writes_to_is_an_edited_one(site, ids):
    bridge = to_bridge(build("bhyt"))

    def halved(value, hook):
        value.mul_(0.5)
        return value

    def one_token(value, hook):
        value[:, 3] = 5.0

    def written(value, hook):
        value = value.clone()
        value[:, 3] = 5.0
        return value

    def logits(edit):
        return bridge.run_with_hooks(ids, fwd_hooks=[(f"{site}.hook_scale", edit)])

    for in_place, other in ((halved, lambda value, hook: value * 0.5), (one_token, written)):
        expected, plain = logits(other), bridge(ids)
        assert torch.equal(logits(in_place), expected) and not torch.allclose(expected, plain, atol=1e-3)
    embeddings = bridge.embed.original_component.weight
    assert torch.equal(*(torch.autograd.grad(logits(edit).sum(), embeddings)[0] for edit in (written, one_token)))


def test_backward_hooks_on_the_scale_see_its_gradient_and_keep_the_logits(ids):
    bridge = to_bridge(build("bhyt"))
    seen = []
    plain = bridge(ids)
    bridge.ln_final.hook_scale.add_hook(lambda gradient, hook: seen.append(gradient), dir="bwd")
    logits = bridge(ids)
    logits.sum().backward()
    assert torch.allclose(logits, plain, atol=1e-5) and seen[0].abs().max() > 0


def test_probes_on_the_bridge_give_the_models_own_numbers(bridged, ids):
    metrics = [
        "token_l2_mean",
        "grad_l2_mean",
        "relative_contribution",
        "saturation",
        "carried_var_ratio",
        "attention_entropy",
    ]
    tables = []
    for measured in bridged:
        with record(measured, metrics, loss_tokens=1) as rec:
            out = measured(ids)
            logits = out if isinstance(out, torch.Tensor) else out.logits
            rec.backward(
                torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            )
        tables.append(rec.stats().to_pandas().set_index(["site", "layer", "metric", "mask"])["value"].to_dict())
    assert tables[1] == near(tables[0])


def test_experiments_run_on_the_bridge(ids):
    model = build("bhyt")
    batch = {"input_ids": ids}
    expected = skip_sensitivity(copy.deepcopy(model), [batch], parts=["block", "attention"], progress=False)
    found = skip_sensitivity(to_bridge(model), [batch], parts=["block", "attention"], progress=False)
    assert found["skip_delta_loss"].tolist() == pytest.approx(expected["skip_delta_loss"].tolist(), abs=1e-5)
    assert sites(to_bridge(build("dyt"))).depth == 3


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        *((name, {}) for name in STUDIED if name not in POST),
        *((name, {"lam_last": 6.0}) for name in ("pre_rmsnorm", "pre_layernorm", "bhyt")),  # a tanh final norm
    ],
)
def test_frozen_shares_add_up_to_the_logit(scheme, options, ids):
    bridge = to_bridge(build(scheme, **options))
    table = direct_logit_attribution(bridge, ids, ANSWERS)
    with torch.no_grad():
        logit = bridge(ids)[:, -1].gather(1, ANSWERS[:, None]).mean()
    assert table.attrs["logit"] == pytest.approx(float(logit), rel=80 * ROUNDING, abs=80 * ROUNDING)  # a mean of two
    rows = table.set_index("component")["contribution"]
    assert abs(rows["remainder"]) < 1e-4 * max(1.0, table["contribution"].abs().max())
    assert table["contribution"].sum() == pytest.approx(float(logit), rel=1e-4, abs=1e-4)
    assert (rows["bias"] != 0) == (scheme == "pre_layernorm")


@steep
def test_jacobian_shares_are_the_effect_of_a_small_change_where_frozen_ones_are_not(scheme, fields, ids):
    """A steep tanh after large activations: by the secant a component matters, by the slope it moves no logit."""
    bridge = to_bridge(build(scheme, **fields))
    frozen, slope = (
        direct_logit_attribution(bridge, ids, ANSWERS, method=m).set_index(["component", "layer"])["contribution"]
        for m in ("frozen", "jacobian")
    )
    step, added = 1e-3, kept(bridge, ids)[bridge.blocks[1].hook_mlp_out.name]

    def logit(factor):
        edit = lambda value, hook: value + (factor - 1) * added  # noqa: E731
        with torch.no_grad():
            logits = bridge.run_with_hooks(ids, fwd_hooks=[(bridge.ln_final.hook_in.name, edit)])
        return float(logits[:, -1].gather(1, ANSWERS[:, None]).mean())

    effect = (logit(1 + step) - logit(1 - step)) / (2 * step)
    assert slope["mlp", 2] == pytest.approx(effect, rel=2e-2, abs=2e-3)
    assert abs(frozen["mlp", 2] - effect) > 5 * abs(slope["mlp", 2] - effect)


@steep
def test_measured_effects_are_the_jacobian_s_and_those_of_a_tanh_ignored_are_not(scheme, fields, ids):
    bridge = to_bridge(build(scheme, **fields))
    asked = dict(answers=ANSWERS, against=torch.tensor([5, 1]))
    effects = component_effects(bridge, ids, **asked, change=1e-3)["effect"]
    assert len(effects) == 7
    jacobian, linear = (
        direct_logit_attribution(bridge, ids, **asked, method=m)["contribution"][:7] for m in ("jacobian", "linear")
    )
    reach = effects.abs().max()
    assert jacobian.tolist() == pytest.approx(effects.tolist(), abs=0.03 * reach)
    assert (linear - effects).abs().max() > reach


def test_a_linear_share_is_that_of_the_tanh_s_argument(ids):
    """An almost linear tanh has the frozen shares."""
    bridge = to_bridge(build("bhyt", lam_last=1e-3))
    frozen, linear = (
        direct_logit_attribution(bridge, ids, ANSWERS, method=m)["contribution"][:7].tolist()
        for m in ("frozen", "linear")
    )
    assert linear == pytest.approx(frozen, rel=1e-3, abs=80 * ROUNDING * max(map(abs, frozen)))
    with pytest.raises(NormlabError, match="no tanh to ignore"):
        direct_logit_attribution(to_bridge(build("bhyt")), ids, ANSWERS, method="linear")


def test_what_cannot_be_bridged_or_attributed_is_refused(ids):
    with pytest.raises(NormlabError, match="to_bridge takes a NormlabForCausalLM, not LlamaForCausalLM"):
        to_bridge(tiny_llama())
    for scheme in POST:
        with pytest.raises(NormlabError, match="Post-LN"):
            direct_logit_attribution(to_bridge(build(scheme)), ids, ANSWERS)
    bridge = to_bridge(build("bhyt"))
    with pytest.raises(NormlabError, match="unknown method"):
        direct_logit_attribution(bridge, ids, ANSWERS, method="path")
    with pytest.raises(NormlabError, match=r"answers \(3,\)"):
        direct_logit_attribution(bridge, ids, torch.tensor([1, 2, 3]))


@pytest.mark.slow
def test_transformer_lens_finds_the_adapter_by_what_pip_installs(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    wheel = tmp_path / build_editable(str(tmp_path))
    code = """if True:
        import sys, torch, normlab
        torch.manual_seed(0)  # some random models differ in the last bit of a logit
        from transformer_lens.model_bridge.sources import build_bridge_from_module
        shape = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        model = normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme="bhyt", **shape)).eval()
        model.set_attn_implementation("eager")
        ids = torch.randint(0, 61, (2, 10))
        assert "normlab.models.lens" not in sys.modules
        with torch.no_grad():
            expected = model(ids).logits
            bridge = build_bridge_from_module(model, "NormlabForCausalLM", hf_config=model.config)
            print(type(bridge.adapter).__name__, torch.equal(bridge(ids), expected))
    """
    path = os.pathsep.join([str(wheel), *sys.path])
    found = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert found.stdout.split() == [b"NormlabArchitectureAdapter", b"True"], found.stderr.decode()
    assert b"entry point" not in found.stderr


def test_the_names_of_the_page_are_of_one_tensor():
    """Ours and TransformerLens's in docs/beside.md, on a Llama of three blocks with gains off 1."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    page = (ROOT / "docs" / "beside.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w' -]+ \| `(\w+)` \| (?:`\w+`)? ?\| `([\w.]+)` \|", page, flags=re.MULTILINE)
    assert len(rows) == 10
    torch.manual_seed(3)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=64)
    model, ids = LlamaForCausalLM(LlamaConfig(**shape)).eval(), torch.randint(5, 60, (2, 12))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ours = capture(model, {"input_ids": ids}, roles_of(model, {"input_ids": ids})).tensors
    cache = kept(build_bridge_from_module(copy.deepcopy(model), "LlamaForCausalLM", hf_config=model.config), ids)
    for site, name in rows:
        found = {layer: x for (own, layer), x in ours.items() if own == site}
        assert len(found) == (3 if ".i." in name else 1), site
        for layer, x in found.items():
            torch.testing.assert_close(cache[name.replace(".i.", f".{layer - 1}.")], x, rtol=1e-4, atol=1e-5, msg=site)
