"""Depth use against formulas of NumPy and scikit-like loops: void tokens, linear maps, branches left out together."""

import copy
import itertools

import numpy as np
import pytest
import torch
from probe_zoo import batch_for, tiny_llama, token_batch

from normlab.errors import NormlabError
from normlab.probes import cheapest_branches, cheapest_spans, layer_maps, sites, skip_sensitivity, void_tokens

QUIET = {"progress": False}


def hidden_states(model, batch) -> np.ndarray:
    """(layers + 1, batch, length, width) of a stock Llama, in float64: what its blocks read and returned."""
    seen = []
    blocks = model.model.layers
    handles = [blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
    handles += [block.register_forward_hook(lambda _, args, out: seen.append(out)) for block in blocks]
    with torch.no_grad():
        model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([x if torch.is_tensor(x) else x[0] for x in seen]).double().numpy()


# -- void tokens -----------------------------------------------------------------------------------------------------


def test_void_tokens_are_those_of_the_papers_rule_and_of_a_small_change():
    model, batch = tiny_llama(num_hidden_layers=5), token_batch(4, 12)
    states, counted = hidden_states(model, batch), batch["attention_mask"].bool().numpy()
    norms, changes = np.linalg.norm(states, axis=-1), np.linalg.norm(np.diff(states, axis=0), axis=-1)
    grown = np.diff(norms, axis=0)
    expected = {}
    for layer in range(1, 6):
        span = np.ptp(grown[: layer - 1], axis=0) if layer > 1 else 0
        expected["void", layer] = (grown[layer - 1] < 0.5 * span)[counted].mean()
        expected["small", layer] = (changes[layer - 1] < 0.9 * norms[layer - 1])[counted].mean()
    table = void_tokens(model, [batch], alpha=0.5, small=0.9, **QUIET).set_index(["rule", "layer"])["value"]
    assert table.to_dict() == pytest.approx(expected, abs=1e-6)
    assert 0 < table["void"].mean() < 1 and 0 < table["small"].mean() < 1  # neither rule is idle here


def test_a_block_that_does_nothing_is_small_for_every_token_and_padding_does_not_count():
    model = tiny_llama(num_hidden_layers=3)
    for linear in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        torch.nn.init.zeros_(linear.weight)
    batch = token_batch(3, 10)
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 4), value=7),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 4), value=0),
    }
    table = void_tokens(model, [padded], **QUIET)
    assert table.query("rule == 'small'")["value"].tolist() == [0, 1, 0]
    alone = void_tokens(model, [{name: batch[name] for name in padded}], **QUIET)
    assert table["value"].tolist() == pytest.approx(alone["value"].tolist())
    with pytest.raises(NormlabError, match=r"alpha is -1: give a number from 0 on"):
        void_tokens(model, [batch], alpha=-1, **QUIET)


def test_norms_that_hold_the_length_leave_no_void_tokens():
    """LayerNorms of gain 1 hold each token's length, and which growth is above another is rounding there."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.LayerNorm(32), stack).eval()
    table = void_tokens(model, [{"input": torch.randint(64, (3, 12))}], **QUIET).set_index(["rule", "layer"])["value"]
    assert table["void"].tolist() == [0, 0, 0, 0]


def test_what_a_model_does_to_the_stream_between_blocks_is_no_work_of_a_block():
    model, batch = tiny_llama(num_hidden_layers=4), token_batch(3, 10)
    for block in model.model.layers:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight.data *= 0.01
        block.register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))
    model.model.layers[2].register_forward_hook(lambda _, args, out: 0.5 * out)  # of what it has read
    table = void_tokens(model, [batch], **QUIET).set_index(["rule", "layer"])["value"]
    assert table["small"].tolist() == [1, 1, 0, 1] and table["void", 3] == 1


# -- linear maps -----------------------------------------------------------------------------------------------------


def test_a_map_leaves_what_numpys_least_squares_leaves_on_other_sequences():
    shallow, deep = tiny_llama(num_hidden_layers=2), tiny_llama(num_hidden_layers=3)
    batches = [token_batch(6, 24, torch.Generator().manual_seed(i)) for i in range(2)]
    table = layer_maps(shallow, deep, batches, **QUIET)
    assert table.shape == (3, 4)
    counted = np.concatenate([batch["attention_mask"].bool().numpy() for batch in batches])
    x, y = (np.concatenate([hidden_states(m, batch) for batch in batches], axis=1) for m in (shallow, deep))
    fit, test = counted.copy(), counted.copy()
    fit[1::2], test[::2] = False, False
    for i, j in itertools.product(range(3), range(4)):
        design = np.column_stack([x[i][fit], np.ones(fit.sum())])
        weights, *_ = np.linalg.lstsq(design, y[j][fit], rcond=None)
        left = y[j][test] - np.column_stack([x[i][test], np.ones(test.sum())]) @ weights
        whole = y[j][test] - y[j][fit].mean(0)
        assert table.loc[i, j] == pytest.approx((left**2).sum() / (whole**2).sum(), rel=1e-4, abs=1e-9)
    assert (table.attrs["half_width_95"].to_numpy()[1:, 1:] > 0).all()


def test_a_deeper_model_of_the_same_blocks_lies_on_its_diagonal():
    shallow, deep = tiny_llama(num_hidden_layers=2), tiny_llama(num_hidden_layers=4)
    deep.load_state_dict(shallow.state_dict(), strict=False)
    idle = (deep.model.layers[1], deep.model.layers[3])  # deep = a block, nothing, a block, nothing
    deep.model.layers[2].load_state_dict(shallow.model.layers[1].state_dict())
    for block in idle:
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
    table = layer_maps(shallow, deep, [token_batch(12, 24)], **QUIET)
    same = {(0, 0), (1, 1), (1, 2), (2, 3), (2, 4)}
    for place in itertools.product(range(3), range(5)):
        assert (table.loc[place] < 1e-9) == (place in same)


def test_maps_need_tokens_to_fit_two_sequences_and_one_tokenizer():
    model = tiny_llama()
    with pytest.raises(NormlabError, match=r"maps from \d+ features are fitted on \d+ tokens or more, and there are"):
        layer_maps(model, model, [token_batch(2, 4)], **QUIET)
    with pytest.raises(NormlabError, match="there is one sequence"):
        layer_maps(model, model, [token_batch(1, 9)], **QUIET)


# -- branches left out together --------------------------------------------------------------------------------------


def test_branches_are_left_out_greedily_and_the_loss_is_that_of_the_model_without_them():
    model = tiny_llama(num_hidden_layers=3)
    batches = [batch_for("llama"), {name: value.flip(0) for name, value in batch_for("llama").items()}]
    table = cheapest_branches(model, batches, most=4, candidates=6, **QUIET)

    def loss_without(branches: set, batch: dict) -> float:
        cut = copy.deepcopy(model)
        for part, layer in branches:
            block = cut.model.layers[layer - 1]
            torch.nn.init.zeros_((block.self_attn.o_proj if part == "attention" else block.mlp.down_proj).weight)
        with torch.no_grad():
            return float(cut(**batch, use_cache=False).loss)

    all_branches = set(itertools.product(("attention", "mlp"), (1, 2, 3)))
    left_out: set = set()
    for row in table.itertuples():
        best = min(all_branches - left_out, key=lambda one: loss_without(left_out | {one}, batches[0]))
        left_out.add(best)
        assert (row.part, row.layer) == best
        expected = loss_without(left_out, batches[1]) - loss_without(set(), batches[1])
        assert row.skip_delta_loss == pytest.approx(expected, abs=2e-6)
        assert {("attention", i + 1) for i in row.drop_attn_list} | {("mlp", i + 1) for i in row.drop_mlp_list} == (
            left_out
        )
    assert table["dropped"].tolist() == [1, 2, 3, 4] and table["low"].le(table["high"]).all()
    with pytest.raises(NormlabError, match="1 to 5 of 6 branches can be left out, not 6"):
        cheapest_branches(model, batches, most=6, **QUIET)


def test_one_branch_alone_costs_what_skip_sensitivity_says():
    model, batch = tiny_llama(num_hidden_layers=4), batch_for("llama")
    row = cheapest_branches(model, [batch], most=1, **QUIET).iloc[0]
    alone = skip_sensitivity(model, [batch], parts=["attention", "mlp"], **QUIET).set_index(["part", "layer"])
    assert row["skip_delta_loss"] == pytest.approx(alone["skip_delta_loss"].min(), abs=1e-9)
    assert (row["part"], row["layer"]) == alone["skip_delta_loss"].idxmin()


# -- what cannot be told --------------------------------------------------------------------------------------------


def test_a_state_that_is_not_finite_gives_no_share_and_no_map():
    model = tiny_llama(num_hidden_layers=3)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    batch = token_batch(4, 24)
    table = void_tokens(model, [batch], **QUIET).set_index(["rule", "layer"])["value"]
    assert table.isna().groupby("layer").all().to_dict() == {1: False, 2: True, 3: True}
    with pytest.raises(NormlabError, match="a state is not finite: no map can be fitted"):
        layer_maps(model, model, [batch], **QUIET)


def test_sequences_without_tokens_are_no_observations_of_an_error():
    model = tiny_llama(num_hidden_layers=2)
    batch = token_batch(6, 40)
    batch["attention_mask"][:] = 1
    batch["attention_mask"][[1, 3]] = 0
    table = layer_maps(model, model, [batch], **QUIET)  # of the tested sequences 1, 3 and 5 one has tokens
    assert table.attrs["standard_error"].isna().all(axis=None) and table.notna().all(axis=None)


def test_branches_carry_the_numbers_of_the_whole_model_and_shared_ones_are_not_left_out():
    model, batch = tiny_llama(num_hidden_layers=4), batch_for("llama")
    last = sites(model, blocks=model.model.layers[2:])
    table = cheapest_branches(last, [batch], most=3, **QUIET)
    assert set(table["layer"]) <= {3, 4}
    assert set(table["drop_attn_list"].iloc[-1]) | set(table["drop_mlp_list"].iloc[-1]) <= {2, 3}
    with pytest.raises(NormlabError, match="spans are of all blocks of a model: these are 2 of it, 3 to 4"):
        cheapest_spans(last, [batch], **QUIET)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    skipped = skip_sensitivity(model, [batch], parts=["mlp"], **QUIET)
    assert skipped["layer"].tolist() == [2, 4]  # leaving out that of block 1 would leave out block 3's too
    for name, value in (("candidates", 0), ("most", 2.0)):
        with pytest.raises(NormlabError, match=f"{name} is {value}: give a whole number from 1 on"):
            cheapest_branches(model, [batch], **{name: value}, **QUIET)
