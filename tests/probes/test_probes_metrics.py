"""Metrics of branches, attention, tanh norms and spectra against brute force in float64; how batches are cut does not
matter."""

import math

import pytest
import torch
from probe_toys import Stack, assert_contributions, measured
from probe_zoo import DEPTH, WIDTH, batch_for, build, ours, run, tiny_llama, token_batch, values
from torch import nn

from normlab.probes import attention_sinks, record


def keep(model, modules: dict) -> dict[str, torch.Tensor]:
    """Inputs ("name_in") and outputs of modules, filled at the next forward, in float64."""
    kept = {}
    for name, module in modules.items():
        module.register_forward_pre_hook(
            lambda m, a, n=name: kept.__setitem__(f"{n}_in", a[0].detach().clone()) if a else None
        )

        def after(m, a, o, n=name):
            kept[n] = (o if isinstance(o, torch.Tensor) else o[0]).detach().clone()

        module.register_forward_hook(after)
    return kept


def cosine(a, b):
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


@pytest.mark.parametrize(
    ("name", "layers", "attn", "mlp"),
    [
        ("llama", "model.layers", "self_attn", "mlp"),
        ("gemma3", "model.layers", "post_attention_layernorm", "post_feedforward_layernorm"),
        ("neox", "gpt_neox.layers", "attention", "mlp"),
        ("opt", "model.decoder.layers", "self_attn", "fc2"),
    ],
)
def test_branch_metrics_equal_brute_force(name, layers, attn, mlp):
    model, batch = build(name), batch_for("llama")
    layer = model.get_submodule(layers)[1]
    kept = keep(model, {"block": layer, "attn": layer.get_submodule(attn), "mlp": layer.get_submodule(mlp)})
    found = run(model, batch, ["relative_contribution", "update_cosine", "block_influence", "update_effective_rank"])
    real = batch["attention_mask"].bool().flatten()
    h, out, attn, mlp = (kept[k].reshape(-1, WIDTH)[real].double() for k in ("block_in", "block", "attn", "mlp"))
    expected = {
        ("attn", "relative_contribution"): (attn.norm(dim=1) / h.norm(dim=1)).mean(),
        ("mlp", "relative_contribution"): (mlp.norm(dim=1) / (h + attn).norm(dim=1)).mean(),
        ("block", "relative_contribution"): ((attn + mlp).norm(dim=1) / h.norm(dim=1)).mean(),
        ("attn", "update_cosine"): cosine(attn, h).mean(),
        ("mlp", "update_cosine"): cosine(mlp, h + attn).mean(),
        ("block", "update_cosine"): cosine(out, h).mean(),
        ("block", "block_influence"): 1 - cosine(out, h).mean(),
    }
    singular = torch.linalg.svdvals(out - h)
    expected["block", "update_effective_rank"] = torch.special.entr(singular / singular.sum()).sum().exp()
    for (site, metric), value in expected.items():
        assert found[site, 2, metric, "all"] == pytest.approx(float(value), rel=1e-5, abs=1e-7), (site, metric)


def test_block_influence_keeps_its_digits_where_a_block_is_nearly_the_identity():
    from normlab.probes.statistics import block_statistics

    torch.manual_seed(0)
    x = torch.randn(50, 512)
    y = x + 1e-4 * torch.randn(50, 512)
    exact = 1 - cosine(x.double(), y.double())
    assert torch.allclose(block_statistics(x, y, None, None)[2].double(), exact, rtol=2e-3)
    assert not torch.allclose((1 - cosine(x, y)).double(), exact, rtol=0.5)  # 0 or 6e-8 in float32


class InPlaceSum(nn.Module):
    """Adds the residual to attention's own output in place, as several published models do."""

    def __init__(self, spoil: bool = False):
        super().__init__()
        self.attn, self.mlp, self.spoil = nn.Linear(8, 8), nn.Linear(8, 8), spoil

    def forward(self, x):
        if self.spoil:
            x.add_(1)
        mid = self.attn(x)
        mid += x
        out = self.mlp(mid)
        out += mid
        return out


def test_branches_are_measured_before_a_residual_is_added_to_them_in_place():
    model, x = Stack(InPlaceSum), torch.randn(1, 6, 8)
    found, _ = measured(model, ["relative_contribution"], x)
    block = model.layers[0]
    assert_contributions(found, attn=(block.attn(x), x))
    block.spoil = True
    found, absent = measured(model, ["block_influence", "rms"], x)
    assert {metric for _, _, metric, _ in found} == {"rms"}
    assert absent["block 1"] == "the block writes into its own input in place"


def explicit_scores(model, kept, batch):
    """Pre-softmax scores of the second layer in float64, computed from its weights."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    attention = model.model.layers[1].self_attn
    x = kept["norm"].double()
    cos, sin = (t.double() for t in model.model.rotary_emb(kept["norm"], torch.arange(x.shape[1])[None]))
    heads = lambda linear: (x @ linear.weight.double().T).view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2)  # noqa: E731
    query, key = apply_rotary_pos_emb(heads(attention.q_proj), heads(attention.k_proj), cos, sin)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * attention.scaling
    hidden = torch.ones(x.shape[1], x.shape[1]).tril() == 0
    hidden = hidden | (batch["attention_mask"] == 0)[:, None, None, :]
    return scores.masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [True, False])
def test_attention_metrics_equal_explicit_scores(implementation, padded):
    model, batch = tiny_llama(attn_implementation=implementation), batch_for("llama")
    if not padded:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    kept = keep(model, {"norm": model.model.layers[1].input_layernorm})
    given = batch if padded else {"input_ids": batch["input_ids"]}
    found = run(model, given, ["attention_logit_max", "attention_entropy"])
    scores = explicit_scores(model, kept, batch)
    real = batch["attention_mask"].bool()
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean(1)[real].mean()
    largest = float(scores.amax((1, 3))[real].max())
    assert found["attn", 2, "attention_logit_max", "all"] == pytest.approx(largest, rel=1e-5)
    assert found["attn", 2, "attention_entropy", "all"] == pytest.approx(float(entropy), rel=1e-5)
    assert sum(key[0] == "attn" and key[3] == "all" for key in found) == 2 * DEPTH


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_affine_attention_is_measured_by_its_softmax_alone(implementation):
    model, batch = ours("pre_rmsnorm", affine_attention=True), {"input_ids": token_batch()["input_ids"]}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    found = run(model, batch, ["attention_entropy"])
    for layer, p in enumerate(weights, 1):
        entropy = float(torch.special.entr(p).sum(-1).mean())
        assert found["attn", layer, "attention_entropy", "all"] == pytest.approx(entropy, rel=1e-4)
    nearest, queries = attention_sinks(model, batch, queries=1).nearest, weights[0].shape[-1]
    shares = [p.sum(2) / (queries - torch.arange(queries)) for p in weights]
    assert nearest["weight"] == pytest.approx(float(torch.stack(shares).max()), rel=1e-4)


def test_attention_scores_in_chunks_equal_those_in_one_piece(monkeypatch):
    from normlab.probes import attention_watch

    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 1, 9, 9) > 0.3
    mask |= torch.eye(9, dtype=torch.bool)
    reduce = attention_watch.AttentionWatch().reduce
    whole = [reduce(attention_watch.score_chunks(query, key, key, m, is_causal=m is None)) for m in (None, mask)]
    monkeypatch.setattr(attention_watch, "SCORE_CHUNK", 100)
    for m, expected in zip((None, mask), whole, strict=True):
        found = reduce(attention_watch.score_chunks(query, key, key, m, is_causal=m is None))
        # A score near 0 is a sum of products near 1, and what is left depends on their order.
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("carried", ["uniform", "causal", "exact"])
def test_tanh_metrics_equal_brute_force_and_stay_under_their_bounds(carried):
    model, batch = ours("bhyt", carried=carried, lam_input=9.0, lam_post=5.0), batch_for("llama")
    layer = model.model.layers[0]
    given_statistic = {}
    layer.post_attention_layernorm.register_forward_pre_hook(
        lambda m, a, k: given_statistic.update(k), with_kwargs=True
    )
    kept = keep(model, {"attn": layer.input_layernorm, "mlp": layer.post_attention_layernorm})
    names = ["saturation", "saturation_bound", "saturation_95", "tanh_input_max", "tanh_input_max_bound"]
    found = run(model, batch, [*names, "carried_var_ratio"])
    real = batch["attention_mask"].bool()
    for site, norm, key in (
        ("attn_norm_in", layer.input_layernorm, "attn_in"),
        ("mlp_norm_in", layer.post_attention_layernorm, "mlp_in"),
    ):
        x = kept[key][real].double()
        exact = x.square().mean(1, keepdim=True)
        used = exact if carried == "exact" or key == "attn_in" else given_statistic["mean_square"][real].double()
        z = float(norm.lam) / norm.kappa * x / (used + norm.eps).sqrt()
        expected = {
            "saturation": (z.abs() > float(norm.lam)).double().mean(),
            "saturation_bound": (exact / used).mean() / norm.kappa**2,
            "saturation_95": (z.tanh().abs() > 0.95).double().mean(),
            "tanh_input_max": z.abs().max(),
            "tanh_input_max_bound": float(norm.lam) / norm.kappa * math.sqrt(WIDTH) * (exact / used).max().sqrt(),
        }
        for metric, value in expected.items():
            assert found[site, 1, metric, "all"] == pytest.approx(float(value), rel=1e-5), (site, metric)
        assert found[site, 1, "tanh_input_max", "all"] <= found[site, 1, "tanh_input_max_bound", "all"]
        if carried != "exact" and key == "mlp_in":
            assert found[site, 1, "carried_var_ratio", "all"] == pytest.approx(float((exact / used).mean()), rel=1e-5)
    assert ("mlp_norm_in", 1, "carried_var_ratio", "all") in found or carried == "exact"
    assert ("attn_norm_in", 1, "carried_var_ratio", "all") not in found


def test_dyt_has_flatness_but_no_lambda_and_rmsnorm_has_neither_and_says_so():
    names = ["saturation", "saturation_95", "rms"]
    batch = batch_for("llama")
    assert {key[2] for key in run(ours("dyt"), batch, names)} == {"saturation_95", "rms"}
    model = ours("pre_rmsnorm")
    with record(model, names) as rec, torch.no_grad():
        model(**batch)
    assert rec.stats().absent == ("saturation", "saturation_95")


def test_massive_activations_are_found_with_and_without_the_first_token():
    model = tiny_llama()
    x = torch.randn(2, 8, WIDTH)
    x[:, 0, 5] = 4000.0  # at the first token only
    x[:, :, 9] = 60.0
    with record(model, ["massive_activation_ratio"]) as rec, torch.no_grad():
        model(inputs_embeds=x)
    top = rec.stats().massive(top=2).query("layer == 0").set_index(["mask", "rank"])
    assert list(top.loc["all"]["feature"]) == [5, 9] and top.loc["all", 1]["max_abs"] == 4000
    assert top.loc["no_first", 1]["feature"] == 9
    ratio = values(rec.stats())["block_out", 0, "massive_activation_ratio", "all"]
    assert ratio == pytest.approx(4000 / float(x.abs().amax((0, 1)).median()), rel=1e-6)


def test_the_carried_ratio_by_position_shows_what_uniform_attention_leaves_out():
    """At position 0 attention copies one value, T times what the uniform estimate expects; padding does not count."""
    model, batch = ours("bhyt"), token_batch()
    seen = {}

    def look(module, args, kwargs):
        seen.update(kwargs, x=args[0])

    model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(look, with_kwargs=True)
    with record(model, ["carried_var_ratio"]) as rec, torch.no_grad():
        model(**batch)
    stats = rec.stats()
    table = stats.carried_by_position().query("layer == 1").set_index(["mask", "position"])
    ratio = seen["x"].double().square().mean(-1) / seen["mean_square"][..., 0]
    first = torch.tensor([0, 3, 0])  # row 1 is padded on the left
    expected = ratio[torch.arange(3), first].mean()
    assert table.loc["all", 0]["value"] == pytest.approx(float(expected), rel=1e-5)
    assert table.loc["all", 0]["tokens"] == 3
    assert ("no_first", 0) not in table.index and table.loc["no_first", 1]["tokens"] == 3
    total = (table.loc["all"]["value"] * table.loc["all"]["tokens"]).sum() / table.loc["all"]["tokens"].sum()
    assert total == pytest.approx(values(stats)["mlp_norm_in", 1, "carried_var_ratio", "all"], rel=1e-5)
    longer = {name: value[:, :6] for name, value in batch.items()}
    with record(model, ["carried_var_ratio"]) as rec, torch.no_grad():
        model(**longer)
    merged = rec.stats().merge(stats).carried_by_position().query("layer == 1").set_index(["mask", "position"])
    assert merged["tokens"]["all", 0] == 6 and merged["tokens"]["all", 8] == table["tokens"]["all", 8]
