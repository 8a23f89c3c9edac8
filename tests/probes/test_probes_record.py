"""record(): its numbers against brute force in float64, however the batches are cut."""

import pytest
import torch
from probe_zoo import DEPTH, near, tiny_llama, token_batch, values

from normlab.errors import NormlabError
from normlab.probes import METRICS, LayerStats, record

METRIC_NAMES = list(METRICS)[:7]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return token_batch(4)


def rows(batch, start, stop):
    return {name: value[start:stop] for name, value in batch.items()}


def keep_activations(model, kept: dict[tuple[str, int], torch.Tensor]) -> list:
    """Hooks that store every measured tensor under (site, layer)."""
    handles = []
    for i, layer in enumerate(model.model.layers, start=1):
        for module, site in ((layer.input_layernorm, "attn_norm_in"), (layer.post_attention_layernorm, "mlp_norm_in")):
            handles.append(module.register_forward_pre_hook(lambda m, a, s=(site, i): kept.__setitem__(s, a[0])))
        handles.append(layer.register_forward_pre_hook(lambda m, a, s=("block_in", i): kept.__setitem__(s, a[0])))
        handles.append(layer.register_forward_hook(lambda m, a, o, s=("block_out", i): kept.__setitem__(s, o)))
    final = ("final_norm_in", DEPTH)
    return [*handles, model.model.norm.register_forward_pre_hook(lambda m, a: kept.__setitem__(final, a[0]))]


def brute_force(model, batch) -> dict[tuple[str, int, str, str], float]:
    """Every metric in float64 from stored activations and gradients of the summed loss."""
    kept: dict[tuple[str, int], torch.Tensor] = {}
    handles = keep_activations(model, kept)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    for handle in handles:
        handle.remove()
    kept["block_out", 0] = kept["block_in", 1]
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).double(), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    gradients = torch.autograd.grad(total, list(kept.values()))
    stored = kept | {(f"{site}_grad", layer): g for (site, layer), g in zip(kept, gradients, strict=True)}
    real = batch["attention_mask"].bool()
    masks = {"all": real, "no_first": real & ~((real.cumsum(1) == 1) & real)}
    found = {}
    for (site, layer), tensor in stored.items():
        for mask, counted in masks.items() if site not in ("block_in", "block_out_grad") else ():
            x = tensor.detach()[counted].double()
            if site.endswith("_grad"):
                right = {"grad_l2_mean": x.norm(dim=1).mean(), "grad_l2_total": x.norm()}
            else:
                centred = x - x.mean(1, keepdim=True)
                right = {
                    "token_l2_mean": x.norm(dim=1).mean(), "feature_var_mean": x.var(1, unbiased=False).mean(),
                    "rms": x.square().mean().sqrt(), "max_abs": x.abs().max(),
                    "kurtosis": (centred.pow(4).mean(1) / centred.pow(2).mean(1) ** 2).mean(),
                }  # fmt: skip
            found |= {(site, layer, metric, mask): float(value) for metric, value in right.items()}
    return found


def recorded(model, batches) -> LayerStats:
    with record(model, METRIC_NAMES) as rec:
        for batch in batches:
            rec.backward(model(**batch).loss)
    return rec.stats()


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 4], [0, 1, 2, 3, 4]], ids=str)
def test_every_metric_equals_brute_force_in_float64_however_the_batch_is_cut(model, batch, cuts):
    batches = [rows(batch, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    expected = brute_force(model, batch)
    found = values(recorded(model, batches))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key


def test_training_backward_and_rec_backward_give_the_same_table_and_the_latter_allocates_no_parameter_gradient(
    model, batch
):
    quiet = recorded(model, [batch])
    assert all(parameter.grad is None for parameter in model.parameters())
    with record(model, METRIC_NAMES) as rec:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    assert values(rec.stats()) == near(values(quiet), 8)


def test_unknown_metric_and_unknown_mask_name_the_known_ones(model):
    with pytest.raises(NormlabError, match="unknown metric 'l2': choose from token_l2_mean"):
        record(model, ["l2"])
    with pytest.raises(NormlabError, match="choose from all, no_first"):
        record(model, masks=["first"])


def test_recordings_of_other_masks_or_depths_do_not_merge(model, batch):
    def stats(of, masks):
        with record(of, ["rms"], masks=masks) as recorder:
            of(**batch)
        return recorder.stats()

    whole = stats(model, ["all", "no_first"])
    for other, what in (
        (stats(model, ["all"]), "masks"),
        (stats(tiny_llama(num_hidden_layers=2), ["all", "no_first"]), "depth"),
    ):
        with pytest.raises(NormlabError, match=f"cannot merge recordings of different {what}"):
            whole.merge(other)


def test_two_recordings_of_compiled_models_may_end_in_any_order(model, batch):
    stance = torch._dynamo.eval_frame._stance.stance
    first, second = (record(torch.compile(tiny_llama(), backend="eager"), ["rms"]) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == stance


def test_a_model_whose_forward_was_compiled_is_recorded(batch):
    model, plain = tiny_llama(), tiny_llama()
    model.forward = torch.compile(model.forward, backend="eager")
    tables = []
    for one in (plain, model):
        with record(one, ["rms"]) as recorder:
            one(input_ids=batch["input_ids"])
        tables.append(values(recorder.stats()))
    assert tables[1] == near(tables[0])
