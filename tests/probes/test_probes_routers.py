"""Routers of mixtures of experts: entropy and load against the model's own scores; the shared expert is no router."""

import pytest
import torch
import transformers as hf
from probe_zoo import MODELS
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import record, sites, stacks
from normlab.probes.routing import routing_of

ROUTING = ["router_entropy", "expert_load_max"]


def test_router_entropy_and_load_are_those_of_the_models_own_router():
    torch.manual_seed(0)
    model = MODELS["mixtral"]().eval()
    ids, mask = torch.randint(3, 60, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    with record(model, ROUTING) as rec, torch.no_grad():
        logits = model(ids, attention_mask=mask, output_router_logits=True).router_logits
    stats = rec.stats()
    table = stats.to_pandas().set_index(["layer", "metric", "mask"])["value"]
    real = mask.bool().flatten()
    for layer, scores in enumerate(logits, start=1):
        p = scores.double()[real].softmax(-1)
        assert table[layer, "router_entropy", "all"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-5)
        counts = torch.bincount(p.topk(2).indices.flatten(), minlength=4)
        assert table[layer, "expert_load_max", "all"] == pytest.approx(float(counts.max()) * 4 / float(counts.sum()))
        load = stats.expert_load().query("layer == @layer and mask == 'all'")["share"]
        assert load.tolist() == pytest.approx((counts / counts.sum()).tolist())
    assert table[1, "router_entropy", "no_first"] != table[1, "router_entropy", "all"]


def test_the_matrix_that_scores_is_found_beside_shared_experts_and_none_in_a_dense_branch():
    config = hf.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    dense, mixture = sites(hf.DeepseekV3ForCausalLM(config)).blocks
    assert routing_of(dense.mlp) is None
    routing = routing_of(mixture.mlp)
    assert routing is not None and routing.experts == 6 and routing.scores.shape == (6, 32)


def test_experts_in_a_dict_and_a_dispatch_mask_are_read():
    torch.manual_seed(0)
    config = hf.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, num_decoder_layers=2, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=2, expert_capacity=3, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model, ids = hf.SwitchTransformersForConditionalGeneration(config).eval(), torch.randint(3, 60, (2, 12))
    where, routed = stacks(model)["decoder.block"], []
    where.blocks[0].mlp.router.register_forward_hook(lambda module, args, output: routed.append(output))
    with record(where, ROUTING, masks=["all"]) as rec, torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids)
    table = rec.stats().to_pandas().query("layer == 1").set_index("metric")["value"]
    taken, _, logits = routed[0]
    p = logits.double().softmax(-1)
    assert table["router_entropy"] == pytest.approx(float(torch.special.entr(p).sum(-1).mean()), rel=1e-5)
    counts = taken.flatten(0, 1).sum(0)
    assert counts.sum() < 24  # some are beyond an expert's capacity
    assert table["expert_load_max"] == pytest.approx(float(counts.max() * 4 / counts.sum()))


def test_a_convolution_or_a_scale_a_channel_is_no_stack_of_experts():
    """SwiftFormer scales channels by a (channels, 1, 1) parameter and by a (channels, 1) one."""
    branch = nn.Sequential(nn.Linear(8, 6), nn.Conv1d(6, 6, 3), nn.Linear(6, 8))
    assert routing_of(branch) is None
    branch.scale, branch.weights = nn.Parameter(torch.ones(6, 1, 1)), nn.Parameter(torch.ones(6, 1))
    assert routing_of(branch) is None


def test_a_dense_model_has_no_rows_of_routers():
    model = MODELS["llama"]().eval()
    with record(model, [*ROUTING, "rms"]) as rec, torch.no_grad():
        model(torch.randint(3, 60, (1, 8)))
    assert rec.stats().absent == tuple(ROUTING)
    with pytest.raises(NormlabError, match="ask for expert_load_max on a mixture"):
        rec.stats().expert_load()
    assert routing_of(nn.Linear(4, 4)) is None


class Router(nn.Module):
    """A router that is no nn.Linear, and whose scores may be more than W x + b."""

    def __init__(self, how):
        super().__init__()
        self.how, self.weight, self.bias = how, nn.Parameter(torch.randn(4, 16)), nn.Parameter(3 * torch.randn(4))

    def scored(self, x, weight=None):
        weight = self.weight if weight is None else weight
        self.scores = nn.functional.linear(x.reshape(-1, 16), weight, self.bias)
        return self.scores

    def forward(self, x):
        weight, x = self.weight, x.reshape(-1, 16)
        if "cosine" in self.how:
            x, weight = nn.functional.normalize(x), nn.functional.normalize(weight)
        if self.how == "jitter":
            x = x * torch.linspace(0.5, 1.5, 16)
        best = self.scored(x, weight).topk(2)
        outputs = {
            "softmax": self.scores.softmax(-1),
            "sigmoid": self.scores.sigmoid(),
            "choice": best.values,
            "choice of a softmax": self.scores.softmax(-1).gather(1, best.indices),
            "choice that adds up to 1": best.values.softmax(-1),
            "cosine choice": best.values.softmax(-1),
            "indices": None,
        }
        if self.how == "in a mask":
            return self.scores, self.scores >= best.values[:, 1:]
        return outputs.get(self.how, self.scores), best.indices


class Mixture(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.router, self.experts = Router(how), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        _, chosen = self.router(x)
        chosen = chosen if chosen.dtype is torch.bool else nn.functional.one_hot(chosen, 4).sum(1)
        picked = chosen.view(*x.shape[:-1], 4)
        return sum(picked[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class MixtureBlock(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(16), Mixture(how)

    def forward(self, x):
        return x + self.moe(self.norm(x))


LEFT_OUT = {
    **dict.fromkeys(["cosine", "cosine choice", "jitter"], "not its weight times what it reads"),
    "indices": "the router returns no scores",
}
READ = ["scores", "softmax", "sigmoid", "choice", "choice of a softmax", "choice that adds up to 1"]


@pytest.mark.parametrize("how", [*READ, *LEFT_OUT])
def test_a_routers_own_bias_counts_and_scores_that_are_made_in_another_way_are_left_out(how):
    torch.manual_seed(0)
    model = nn.Sequential(MixtureBlock(how), MixtureBlock(how))
    with record(model, ["router_entropy", "rms"], masks=["all"]) as rec, torch.no_grad():
        model(torch.randn(2, 10, 16))
    table = rec.stats().to_pandas().query("metric == 'router_entropy'")["value"]
    if how in LEFT_OUT:
        assert table.empty and LEFT_OUT[how] in rec.absent["router_entropy 1"]
        return
    p = model[0].moe.router.scores.double().softmax(-1)
    assert table.iloc[0] == pytest.approx(float(torch.special.entr(p).sum(-1).mean()), rel=1e-5)


@pytest.mark.parametrize("tokens", [4, 6, 8])
def test_the_load_of_experts_that_choose_their_tokens_is_left_out(tokens):
    """They return indices of tokens, whose number a choice of experts by each token may have too."""
    torch.manual_seed(0)
    model = nn.Sequential(MixtureBlock("scores"), MixtureBlock("scores"))
    for block in model:
        router = block.moe.router
        router.forward = lambda x, router=router: (router.scored(x), router.scores.topk(tokens, 0).indices)
        block.moe.forward = lambda x, moe=block.moe: moe.router(x)[0].view(*x.shape[:-1], 4).repeat(1, 1, 4)
    with record(model, [*ROUTING, "rms"], masks=["all"]) as rec, torch.no_grad():
        model(torch.randn(2, 8, 16))
    stats = rec.stats()
    assert stats.absent == ("expert_load_max",) and "that each token takes" in rec.absent["expert_load_max 1"]


@pytest.mark.parametrize("how", ["scores", "in a mask"])
def test_experts_that_are_taken_unseen_have_no_load_and_a_reason(how):
    model = nn.Sequential(MixtureBlock(how), MixtureBlock(how))
    with record(model, ["expert_load_max", "rms"], masks=["all"]) as rec, torch.no_grad():
        model(torch.randn(2, 10, 16))
    layers = {1, 2} if how == "scores" else set()
    assert set(rec.stats().to_pandas().query("metric == 'expert_load_max'")["layer"]) == layers
    assert rec.absent.keys() == {f"expert_load_max {layer}" for layer in {1, 2} - layers}
