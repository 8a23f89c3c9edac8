"""sites(): structure found in every architecture, through wrappers, and said plainly where it is not found."""

from collections import Counter

import pytest
import torch
import transformers
from probe_toys import measured
from probe_zoo import DEPTH, MODELS, batch_for, build, ours, run, tiny_llama, token_batch, values
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import (
    angular_distance,
    cheapest_branches,
    jacobian_identity,
    layer_maps,
    logit_lens_kl,
    massive_activations,
    record,
    sites,
    skip_future_effect,
    skip_sensitivity,
    stacks,
    void_tokens,
)
from normlab.schemes import STUDIED

PRE_NORM = {"block_out": 4, "attn_norm_in": 3, "mlp_norm_in": 3, "final_norm_in": 1, "attn": 3, "mlp": 3, "block": 3}
EXPECTED = dict.fromkeys(MODELS, PRE_NORM) | {
    "olmo2": {k: v for k, v in PRE_NORM.items() if k not in ("attn_norm_in", "mlp_norm_in")},  # output norms only
    "bert": {k: v for k, v in PRE_NORM.items() if k != "final_norm_in"},
}


def found_sites(model, batch) -> dict[str, int]:
    found = run(model, batch, ["token_l2_mean", "relative_contribution"])
    return Counter(site for site, _, _, mask in found if mask == "all")


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_has_all_its_sites(name):
    model = build(name)
    found = sites(model)
    assert found.depth == DEPTH
    assert all(block.attention is not None and block.mlp is not None for block in found.blocks)
    assert found_sites(model, batch_for(name)) == EXPECTED[name]


@pytest.mark.parametrize("name", MODELS)
def test_block_outputs_and_updates_are_those_of_the_models_own_hidden_states(name):
    model, batch = build(name), batch_for(name)
    with record(model, ["max_abs", "relative_contribution"]) as rec, torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    found = values(rec.stats())
    real = batch.get("attention_mask", torch.ones(states[0].shape[:2])).bool()
    for layer, state in enumerate(states[:-1]):  # the last one is after the final norm
        assert found["block_out", layer, "max_abs", "all"] == pytest.approx(float(state[real].abs().max()), rel=1e-6)
    h, out = states[0][real], states[1][real]
    if name != "bert":  # attn + mlp (after output norms) is what the block adds; Post-LN normalises the sum
        ratio = float(((out - h).norm(dim=1) / h.norm(dim=1)).mean())
        assert found["block", 1, "relative_contribution", "all"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("scheme", STUDIED)
def test_every_scheme_of_ours_has_both_norm_sites_in_every_block(scheme):
    found = found_sites(ours(scheme, num_hidden_layers=4), batch_for("llama"))
    assert found == dict.fromkeys(PRE_NORM, 4) | {"block_out": 5, "final_norm_in": 1}


def test_post_ln_norms_read_the_residual_sum_and_the_mlps_stream_is_their_output():
    model, batch = build("bert"), batch_for("bert")
    layer = model.bert.encoder.layer[0]
    kept = {}
    layer.attention.output.LayerNorm.register_forward_pre_hook(lambda m, a: kept.__setitem__("sum", a[0]))
    layer.attention.output.LayerNorm.register_forward_hook(lambda m, a, o: kept.__setitem__("stream", o))
    layer.output.dense.register_forward_hook(lambda m, a, o: kept.__setitem__("mlp", o))
    found = run(model, batch, ["max_abs", "relative_contribution"])
    real = batch["attention_mask"].bool()
    assert found["attn_norm_in", 1, "max_abs", "all"] == pytest.approx(float(kept["sum"][real].abs().max()))
    ratio = (kept["mlp"].norm(dim=-1) / kept["stream"].norm(dim=-1))[real].mean()
    assert found["mlp", 1, "relative_contribution", "all"] == pytest.approx(float(ratio), rel=1e-5)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_wrappers_are_looked_through_and_give_the_same_numbers():
    from peft import LoraConfig, get_peft_model

    lora = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj", "v_proj"])).eval()
    plain, *wrapped = (run(model, batch_for("llama"), None) for model in (tiny_llama(), Wrapper(tiny_llama()), lora))
    assert wrapped == [plain, plain]


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"mix_norm": nn.RMSNorm(8), "mix": nn.Linear(8, 8), "ff": nn.Linear(8, 8)})

    def forward(self, x):
        x = x + self.parts["mix"](self.parts["mix_norm"](x))
        return x + self.parts["ff"](x)


class Plain(nn.Module):
    """A model of no known kind: blocks are attributes, so no list tells them."""

    def __init__(self):
        super().__init__()
        self.stage0, self.stage1 = Stage(), Stage()

    def forward(self, x):
        return self.stage1(self.stage0(x))


def test_blocks_can_be_told_by_pattern_or_list_and_their_parts_by_name():
    model = Plain()
    reported = sites(model, "stage*", attention="parts.mix", mlp="parts.ff", norms=["parts.mix_norm"])
    assert [block.name for block in reported.blocks] == ["stage0", "stage1"]
    assert sites(model, [model.stage1]).blocks[0].module is model.stage1
    with record(reported, ["max_abs", "relative_contribution"]) as rec:
        model(torch.randn(2, 5, 8))
    table = rec.stats().to_pandas()
    assert set(table["site"]) == {"block_out", "attn_norm_in", "attn", "mlp", "block"}


def t5():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def test_what_is_not_found_is_said_with_likely_candidates():
    likely = r"no stack of blocks was found in Plain: pass blocks='<pattern>' \(likely: stage0, stage1"
    with pytest.raises(NormlabError, match=likely):
        sites(Plain())
    with pytest.raises(NormlabError, match="no module is named like 'layers"):
        sites(Plain(), "layers.*")
    with pytest.raises(NormlabError, match="has no module 'attn': it has parts"):
        sites(Plain(), "stage*", attention="attn")
    choices = r"several stacks of blocks: choose one with blocks='decoder.block.\*' or blocks='encoder.block"
    with pytest.raises(NormlabError, match=choices):
        sites(t5())
    assert sites(t5(), "decoder.block.*").depth == 2
    assert sites(Plain(), "stage*").missing == ("attention", "norm after the blocks")


def test_the_norms_of_another_stack_are_none_of_this_ones():
    model = t5()
    for name, found in stacks(model).items():
        stack = name.removesuffix(".block")
        assert [found.names[norm] for norm in found.outer_norms] == [f"{stack}.final_layer_norm"]
        assert sites(model, f"{name}.*").outer_norms == found.outer_norms


def test_a_layer_scale_and_a_query_norm_are_no_norm_sites():
    found = sites(build("qwen3")).blocks[0]
    assert len(found.norms) == 2

    class LayerScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))

    from normlab.probes.sites import is_norm

    assert not is_norm(LayerScale()) and not is_norm(nn.Dropout())
    assert is_norm(nn.LayerNorm(8, elementwise_affine=False))


def test_some_blocks_of_a_model_have_the_numbers_that_they_have_in_it_everywhere():
    model, batches, quiet = tiny_llama(num_hidden_layers=5), [batch_for("llama")] * 2, {"progress": False}
    some = sites(model, "model.layers.[23]")
    assert list(some.layers) == [3, 4] and "block 3 model.layers.2" in str(some)
    assert {layer for _, layer, *_ in measured(some, ["token_l2_mean"], **batches[0])[0]} == {2, 3, 4}
    whole = skip_sensitivity(model, batches, parts=["block", "mlp"], layers=[3, 4], **quiet)
    part = skip_sensitivity(some, batches, parts=["block", "mlp"], **quiet)
    assert part["layer"].tolist() == whole["layer"].tolist() == [3, 4, 3, 4]
    assert part["skip_delta_loss"].tolist() == pytest.approx(whole["skip_delta_loss"].tolist(), rel=1e-5)
    with pytest.raises(NormlabError, match="no span of 2 from layer 4: layers are 3 to 4"):
        skip_sensitivity(some, batches, span=2, layers=[4], **quiet)
    assert cheapest_branches(some, batches, **quiet)["layer"].item() in (3, 4)
    assert skip_future_effect(some, batches, **quiet)[["skipped", "layer"]].to_numpy().tolist() == [[3, 4]]
    assert jacobian_identity(some, batches, **quiet)["layer"].tolist() == [3, 4]
    assert logit_lens_kl(some, batches, **quiet)["layer"].tolist() == [2, 3, 4]
    assert void_tokens(some, batches, **quiet)["layer"].tolist() == [3, 4, 3, 4]
    assert set(massive_activations(some, batches[0], least=0, ratio=0).table["layer"]) == {2, 3, 4}
    angles, expected = angular_distance(some, batches, **quiet), angular_distance(model, batches, **quiet)
    assert (angles - expected.loc[2:4, 2:4]).abs().max(axis=None) < 1e-6 and list(angles) == [2, 3, 4]
    maps = layer_maps(some, model, [token_batch(rows=16)], **quiet)
    assert list(maps.index) == [2, 3, 4] and maps.loc[2, 2] < 1e-6 < maps.loc[2, 3]


def test_what_stands_before_the_blocks_and_is_none_does_not_count():
    items = [nn.Embedding(8, 8), *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 8)]
    assert list(sites(nn.ModuleDict({"parts": nn.ModuleList(items)}), "parts.[123]").layers) == [1, 2, 3]
    items[0] = nn.Identity()  # in the place of a block that another stage has
    assert list(sites(nn.ModuleDict({"parts": nn.ModuleList(items)}), "parts.[123]").layers) == [2, 3, 4]
    stages = nn.ModuleDict({"stages": nn.ModuleList([nn.ModuleList(items[1:3]), nn.ModuleList(items[3:4])])})
    assert list(sites(stages, "stages.1.*").layers) == [1]
