"""Kinds of blocks, layers and models that structure must tell: residuals apart, norms that add, packed weights, copies
of norms, blocks in dicts, stages of pipelines."""

from functools import partial

import pytest
import torch
from probe_toys import WIDTH, Part, PreLN, Stack, X, contribution, size
from probe_zoo import near, tiny_llama, values
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import record, sites
from normlab.probes.sites import kind_of

BRANCHES = ["token_l2_mean", "relative_contribution"]


def table(where, x=X, metrics=BRANCHES, calls=1):
    with record(where, metrics, masks=["all"]) as rec, torch.no_grad():
        for _ in range(calls):
            rec.sites.model(x)
    return values(rec.stats()), rec.absent


# -- the residual beside the branch ------------------------------------------------------------------------------------


class AddingNorm(nn.RMSNorm):
    """Adds the residual first and returns the sum too, in place or not (vLLM, flash-linear-attention)."""

    in_place = False

    def forward(self, x, residual=None):
        if residual is None:
            return super().forward(x), x
        total = residual.add_(x) if self.in_place else x + residual
        return super().forward(total), total


class AddingNormInPlace(AddingNorm):
    in_place = True


class Apart(nn.Module):
    """Returns its last branch and the residual (mamba_ssm, flash_attn): the stream is their sum."""

    def __init__(self, norm=nn.RMSNorm):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(WIDTH), Part(3.0), norm(WIDTH), Part()

    def forward(self, x, residual=None):
        if isinstance(self.norm1, AddingNorm):
            x, residual = self.norm1(x, residual)
            x, residual = self.norm2(self.attn(x), residual)
            return self.mlp(x), residual
        residual = x if residual is None else x + residual
        residual = residual + self.attn(self.norm1(residual))
        return self.mlp(self.norm2(residual)), residual


class ApartStack(Stack):
    def __init__(self, *kinds, final=nn.RMSNorm):
        super().__init__(*kinds)
        self.norm = final(WIDTH)

    def forward(self, x):
        residual, self.stream = None, []
        x = x.clone()
        for block in self.layers:
            total = (x if residual is None else x + residual).clone()
            middle = total + block.attn(nn.RMSNorm.forward(block.norm1, total))
            self.stream += [total, middle]
            x, residual = block(x, residual)
        self.stream.append(x + residual)
        return self.norm(x, residual)[0] if isinstance(self.norm, AddingNorm) else self.norm(x + residual)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("norm", [nn.RMSNorm, AddingNorm, AddingNormInPlace])
def test_where_the_residual_is_apart_the_stream_is_the_sum(norm, calls):
    model = ApartStack(*(lambda: Apart(norm),) * 3, final=norm)
    found, absent = table(model, calls=calls)
    stream = model.stream
    for place, x in enumerate(stream):
        layer, is_middle = place // 2, place % 2
        if not is_middle:
            assert found["block_out", layer, "token_l2_mean", "all"] == size(x), layer
        if place < 6:
            site = "mlp_norm_in" if is_middle else "attn_norm_in"
            assert found[site, layer + 1, "token_l2_mean", "all"] == size(x), (site, layer)
            kind = "mlp" if is_middle else "attn"
            if norm is not AddingNormInPlace:  # which writes into the block's input
                assert found[kind, layer + 1, "relative_contribution", "all"] == contribution(stream[place + 1] - x, x)
    assert found["final_norm_in", 3, "token_l2_mean", "all"] == size(stream[6])
    assert set(absent.values()) <= {"the block writes into its own input in place"}


class Fused(nn.Module):
    """Adds the residual in its second norm alone."""

    def __init__(self, returns_sum=True):
        super().__init__()
        self.returns_sum = returns_sum
        self.norm1, self.attn, self.norm2, self.mlp = nn.RMSNorm(WIDTH), Part(3.0), AddingNorm(WIDTH), Part()

    def forward(self, x):
        adds = self.attn(self.norm1(x))
        normed, total = self.norm2(adds, x)
        self.middle = total
        return total + self.mlp(normed)


class OneOutput(AddingNorm):
    def forward(self, x, residual=None):
        return super().forward(x, residual)[0]


class Hidden(Fused):
    """Its second norm adds the residual, and no one sees the sum."""

    def __init__(self):
        super().__init__()
        self.norm2 = OneOutput(WIDTH)

    def forward(self, x):
        adds = self.attn(self.norm1(x))
        return adds + x + self.mlp(self.norm2(adds, x))


def test_a_norm_that_adds_the_residual_reads_the_sum_and_its_gradient_is_there():
    model = Stack(Fused, Fused)
    found, absent = table(model, calls=2)
    middle = model.layers[0](X) is not None and model.layers[0].middle
    assert found["mlp_norm_in", 1, "token_l2_mean", "all"] == size(middle)
    assert found["attn", 1, "relative_contribution", "all"] == contribution(middle - X, X) and not absent
    x = X.clone().requires_grad_()
    with record(model, ["grad_l2_total"], loss_tokens=1, masks=["all"]) as rec:
        out = model(x)
        kept = model.layers[1].middle
        kept.retain_grad()
        out.square().sum().backward()
    found = values(rec.stats())["mlp_norm_in_grad", 2, "grad_l2_total", "all"]
    assert found == pytest.approx(float(kept.grad.norm()), rel=1e-5)


def test_a_norm_that_has_run_and_has_no_site_is_named():
    found, absent = table(Stack(Hidden, Hidden))
    assert ("mlp_norm_in", 1, "token_l2_mean", "all") not in found
    assert absent["norm2 1"] == "it reads neither the stream nor what a branch returned"
    assert ("attn", 1, "relative_contribution", "all") in found


class Reversed(Stack):
    """Returns two tensors of one shape, of which the next block reads the first."""

    def forward(self, x):
        for block in self.layers:
            x, _ = block(x)
        return x


class WithCopy(PreLN):
    def forward(self, h, other=None):
        return super().forward(h), torch.ones_like(h)


def test_a_second_tensor_that_is_no_residual_changes_nothing():
    found, absent = table(Reversed(WithCopy, WithCopy))
    assert found == near(table(Stack(PreLN, PreLN))[0]) and not absent


# -- copies of norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["modules_to_save", "ln_tuning"])
def test_norms_that_peft_trains_are_read_where_they_run(way):
    peft = pytest.importorskip("peft")
    names = ["input_layernorm", "post_attention_layernorm", "norm"]
    if way == "ln_tuning":
        config = peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=names)
    else:
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=names)
    model, ids = peft.get_peft_model(tiny_llama(), config).eval(), torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "norm" in name:
                weight.mul_(2)
    expected, _ = table(tiny_llama(), ids, ["token_l2_mean"])
    found, absent = table(model, ids, ["token_l2_mean", "grad_l2_mean"][:1])
    assert found.keys() == expected.keys() and not absent
    first = {key: value for key, value in found.items() if key[:2] in (("attn_norm_in", 1), ("block_out", 0))}
    assert first == near({key: expected[key] for key in first})


# -- packed weights ----------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A matrix in a buffer; `kind` as GPTQ, with a bias that is a parameter, and as frozen weights."""

    def __init__(self, linear, kind):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1) / 127
        dtype = torch.float32 if kind == "frozen" else torch.int32
        self.register_buffer("qweight", (linear.weight.detach() / scale[:, None]).round().to(dtype))
        self.register_buffer("scales", scale)
        self.bias = nn.Parameter(torch.zeros(len(scale))) if kind == "bias" else None

    def forward(self, x):
        return nn.functional.linear(x, self.qweight.float() * self.scales[:, None], self.bias)


@pytest.mark.parametrize("kind", ["gptq", "bias", "frozen", "dynamic"])
def test_layers_that_hold_their_matrix_in_buffers_are_branches(kind):
    model, ids = tiny_llama(), torch.randint(3, 60, (2, 9))
    if kind == "dynamic":
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    else:
        for block in model.model.layers:
            for part in (block.self_attn, block.mlp):
                for name, child in list(part.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(part, name, Packed(child, kind))
    found, absent = table(model, ids)
    named, _ = table(sites(model, "model.layers.*", attention="self_attn", mlp="mlp"), ids)
    assert found == named and not absent and ("mlp", 3, "relative_contribution", "all") in found
    assert sites(model).blocks[0].norms == sites(tiny_llama()).blocks[0].norms or len(sites(model).blocks[0].norms) == 2


def test_a_table_of_positions_is_no_matrix():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cos_cached", torch.randn(9, 4))

    class WithTable(PreLN):
        def __init__(self):
            super().__init__()
            self.rotary = Table()

    assert {branch.kind for branch in sites(Stack(WithTable, WithTable)).blocks[0].branches} == {"attn", "mlp"}

class Modulated(PreLN):
    """A block of DiT: norms whose outputs are scaled and shifted, and gates, by what is conditioned on."""

    def __init__(self):
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, h):
        gates = self.adaLN_modulation(torch.linspace(-1, 1, WIDTH)[None])[:, None].chunk(6, dim=-1)
        for norm, part, (scale, shift, gate) in ((self.norm1, self.attn, gates[:3]), (self.norm2, self.mlp, gates[3:])):
            h = h + gate * part(norm(h) * (1 + scale) + shift)
        return h


def test_a_modulation_of_the_norms_is_no_branch():
    found, absent = table(Stack(Modulated))
    assert absent == {} and {site for site, *_, metric, _ in found if metric == "relative_contribution"} == {
        "attn", "mlp", "block",
    }  # fmt: skip


class OfOneBranch(nn.Module):
    """A block of Nemotron-H: one branch, whose attribute does not say of which kind it is."""

    def __init__(self, mixer):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, h):
        return h + self.mixer(self.norm(h))


def test_a_branch_that_is_but_called_a_mixer_is_of_the_kind_that_its_class_says():
    classes = [type(name, (nn.Linear,), {}) for name in ("TinyAttention", "TinyMoE", "TinyMamba2Mixer", "Unknown")]
    found, absent = table(Stack(*(partial(OfOneBranch, branch(WIDTH, WIDTH)) for branch in classes)))
    kinds = {layer: site for site, layer, metric, _ in found if metric == "relative_contribution" and site != "block"}
    assert kinds == {1: "attn", 2: "mlp", 3: "mixer", 4: "mixer"} and absent == {}


def test_a_token_mixer_made_of_an_mlp_is_a_mixer():
    mlp, attention = (type(name, (nn.Linear,), {})(WIDTH, WIDTH) for name in ("Mlp", "Attention"))
    for name in ("token_mixer", "time_mixer", "seq_mixer.0"):
        assert kind_of(name, mlp) == kind_of(name, attention) == "mixer"
    assert [kind_of("layers.mixer", one) for one in (mlp, attention)] == ["mlp", "attn"]


# -- dicts and stages --------------------------------------------------------------------------------------------------


class Titan(nn.Module):
    """Blocks in a dict, of which a pipeline's stage holds some."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleDict(blocks)

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return x


def stages(*parts):
    blocks = Stack(*(PreLN,) * sum(len(part) for part in parts)).layers
    with torch.no_grad():
        for i, block in enumerate(blocks):
            block.attn.scale = 1.0 + i
    whole = Titan({str(i): block for i, block in enumerate(blocks)})
    return whole, [Titan({str(i): blocks[i] for i in part}) for part in parts]


def first_layer(model, blocks=None):
    with record(model if blocks is None else sites(model, blocks), ["token_l2_mean"]) as rec, torch.no_grad():
        model(torch.arange(10).view(2, 5))
    return rec.stats().to_pandas()["layer"].min()


def test_layers_count_from_1_where_the_first_blocks_name_has_a_number_for_another_reason():
    blocks = Stack(*(PreLN,) * 3).layers
    from_1 = Titan({str(i): block for i, block in enumerate(blocks, start=1)})
    assert first_layer(nn.Sequential(nn.Embedding(10, WIDTH), from_1)) == 0
    flat = nn.Sequential(nn.Embedding(10, WIDTH), nn.Dropout(0.0), *blocks)
    assert first_layer(flat, [*blocks]) == 0
    assert first_layer(flat, [*blocks[1:]]) == 1  # after the first
    assert first_layer(nn.Sequential(nn.Embedding(10, WIDTH), from_1), [*blocks[1:]]) == 1


@pytest.mark.parametrize("parts", [((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0,), (1,), (2,), (3,)), ((2, 3), (0, 1))])
def test_the_stages_of_a_pipeline_merge_into_the_recording_of_the_whole(parts):
    whole, held = stages(*parts)
    metrics = ["token_l2_mean", "relative_contribution", "massive_activation_ratio"]
    with record(whole, metrics) as rec, torch.no_grad():
        whole(X)
    recorded, x = {}, X
    for i, stage in sorted(enumerate(held), key=lambda pair: parts[pair[0]]):
        with record(stage, metrics) as part, torch.no_grad():
            x = stage(x)
        recorded[i] = part.stats()
    merged = recorded[0]
    for i in range(1, len(held)):
        merged = merged.merge(recorded[i])
    sort = lambda stats: stats.to_pandas(errors=True).sort_values(["site", "layer", "metric", "mask"])  # noqa: E731
    assert values(merged) == near(values(rec.stats()))
    assert sort(merged)["tokens"].tolist() == pytest.approx(sort(rec.stats())["tokens"].tolist(), nan_ok=True)
    assert merged.manifest["depth"] == 4 and set(merged.manifest["blocks"]) == {"1", "2", "3", "4"}


def test_recordings_of_other_blocks_under_the_same_layers_do_not_merge():
    with record(Stack(PreLN, PreLN), ["rms"]) as a, record(stages((0, 1))[0], ["rms"]) as b, torch.no_grad():
        a.sites.model(X)
        b.sites.model(X)
    a, b = a.stats(), b.stats()
    a.manifest["blocks"] = {"1": "other.0", "2": "other.1"}
    with pytest.raises(NormlabError, match="different blocks"):
        a.merge(b)


def test_a_dict_of_blocks_is_a_stack_and_other_dicts_are_hinted_at():
    whole, _ = stages((0, 1, 2))
    assert [(block.layer, block.name) for block in sites(whole).blocks] == [(i + 1, f"layers.{i}") for i in range(3)]
    named = Titan({f"block_{i}": block for i, block in enumerate(Stack(PreLN, PreLN).layers)})
    with pytest.raises(NormlabError, match=r"likely: layers\.\*"):
        sites(named)
    assert sites(named, "layers.*").depth == 2
