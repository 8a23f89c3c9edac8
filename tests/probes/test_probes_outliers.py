"""Massive activations and attention sinks are found where they were planted, by independent formulas."""

import numpy as np
import pytest
import torch
from probe_zoo import tiny_llama

import normlab
from normlab.errors import NormlabError
from normlab.probes import outliers

SINK, LENGTH = 7, 40  # a token, and the tokens of a row


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Row 0 begins with the token; row 1 is padded on the left and has it in its middle."""
    ids = torch.randint(8, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    ids[0, 0] = ids[1, 15] = SINK
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def planted() -> torch.nn.Module:
    """A model whose heads all look for the token: one feature of its embedding is huge, and its keys meet every query.

    The queries' bias and the keys meet in the pair of features that the rotary embedding turns least.
    """
    model = tiny_llama(num_hidden_layers=4, attention_bias=True)
    width = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        model.model.embed_tokens.weight[SINK, 5] = 5000.0
        for block in model.model.layers:
            attention = block.self_attn
            attention.q_proj.bias[width // 2 - 1 :: width] = 5.0
            attention.k_proj.weight[width // 2 - 1 :: width] = 0.0
            attention.k_proj.weight[width // 2 - 1 :: width, 5] = 1.0
    return model


def block_outputs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """The stream before the first block and after each, by plain hooks."""
    seen = []
    layers = model.model.layers
    handles = [layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))]
    handles += [layer.register_forward_hook(lambda module, args, output: seen.append(output)) for layer in layers]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return [x.numpy().copy() for x in seen]


def test_massive_activations_are_those_of_the_definition(batch):
    model = planted()
    model.model.layers[1].register_forward_hook(
        lambda m, a, y: y.index_put((torch.tensor(0), torch.tensor(9)), y[0, 9] + 900.0)
    )
    found = normlab.massive_activations(model, batch, least=50.0, ratio=20.0)
    expected = []
    real = batch["attention_mask"].bool().numpy()
    for layer, h in enumerate(block_outputs(model, batch)):
        middle = np.median(np.abs(h[real]))
        for place in np.argwhere((np.abs(h) > 50) & (np.abs(h) > 20 * middle) & real[..., None]):
            expected.append((layer, *place, h[tuple(place)], np.abs(h[tuple(place)]) / middle))
    columns = ["layer", "row", "position", "feature", "value", "ratio"]
    np.testing.assert_allclose(found.table[columns].to_numpy(dtype=float), np.array(expected, dtype=float), rtol=0.02)
    assert (0, 0, 0, 5) in found.table[columns[:4]].itertuples(index=False, name=None)
    assert found.mask.nonzero().tolist() == [[0, 0], [0, 9], [1, 15]]
    first = found.table.query("position == 9")
    assert set(first["first_layer"]) == {2} and set(first["last_layer"]) == {4}
    assert set(found.table.query("position == 15")["first_layer"]) == {0}


def test_a_token_that_is_not_finite_hides_no_massive_activation_of_others(batch):
    def found(row_1: float) -> list[tuple]:
        model = planted()
        change = (torch.tensor(1), torch.tensor(20))
        model.model.layers[1].register_forward_hook(lambda m, a, y: y.index_put(change, torch.tensor(row_1)))
        table = normlab.massive_activations(model, batch).table
        return list(table[table["row"] == 0].drop(columns="ratio").itertuples(index=False, name=None))

    assert {row[0] for row in found(0.0)} == {0, 1, 2, 3, 4} and found(float("nan")) == found(0.0)


def test_the_thresholds_of_the_paper_are_the_default_and_nothing_is_found_in_a_healthy_model(batch):
    assert normlab.massive_activations(planted(), batch).mask.nonzero().tolist() == [[0, 0], [1, 15]]
    assert normlab.massive_activations(planted().train(), batch).mask.nonzero().tolist() == [[0, 0], [1, 15]]
    healthy = normlab.massive_activations(tiny_llama(), batch)
    assert healthy.table.empty and not healthy.mask.any()
    assert healthy.rule == "|h| above 100 and above 1,000 times the layer's median of |h|"


def test_what_comes_nearest_to_a_rule_is_named_whether_it_is_found_or_not(batch):
    model, real = tiny_llama(), batch["attention_mask"].bool()
    sizes = [np.where(real[..., None], np.abs(h), 0) for h in block_outputs(model, batch)]
    for least, ratio in ((1e-3, 1.0), (1e-3, 1000.0), (100.0, 1e-3)):
        shares = [size / max(least, ratio * np.median(size[real])) for size in sizes]
        layer = int(np.argmax([share.max() for share in shares]))
        nearest = normlab.massive_activations(model, batch, least=least, ratio=ratio).nearest
        place = np.unravel_index(shares[layer].argmax(), shares[layer].shape)
        assert (nearest["layer"], nearest["row"], nearest["position"], nearest["feature"]) == (layer, *place)
        assert abs(nearest["value"]) == pytest.approx(sizes[layer][place])
    none, all_of_it = (normlab.attention_sinks(model, batch, threshold=t, queries=4) for t in (0.9, 0.01))
    assert none.table.empty and none.nearest == all_of_it.nearest and none.rule.startswith("a head's mean attention ab")
    most = all_of_it.table.query(f"layer == {none.nearest['layer']} and position == {none.nearest['position']}")
    assert 0.01 < most["weight"].max() <= none.nearest["weight"] < 0.9
    assert normlab.attention_sinks(model, batch, queries=1000).nearest is None


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_sinks_are_those_of_the_definition(batch, implementation, monkeypatch):
    monkeypatch.setattr("normlab.probes.attention_watch.SCORE_CHUNK", 2000)  # several chunks of queries
    model = planted()
    model.set_attn_implementation(implementation)
    found = normlab.attention_sinks(model, batch)
    assert found.mask.nonzero().tolist() == [[0, 0], [1, 15]]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].bool()
    for row in found.table.itertuples():
        queries = [i for i in range(row.position, LENGTH) if real[row.row, i]]
        mean = weights[row.layer - 1][row.row][:, queries, row.position].mean(1)
        assert row.weight == pytest.approx(float(mean.mean()), rel=1e-4)
        assert row.heads == pytest.approx(float((mean > 0.3).float().mean()))
    assert found.table["layer"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert set(found.table["first_layer"]) == {1} and set(found.table["last_layer"]) == {4}


def test_a_token_that_few_queries_see_is_no_sink(batch):
    """The last token is seen by one query, and a single query may well attend to itself."""
    few = normlab.attention_sinks(tiny_llama(), batch, threshold=0.02, queries=1)
    assert few.mask[:, -1].all()
    assert not normlab.attention_sinks(tiny_llama(), batch, threshold=0.02).mask[:, -15:].any()


@pytest.mark.parametrize("failing", [[2], [1, 2, 3]])
def test_an_error_in_a_blocks_scores_is_said_and_its_layer_is_not_left_out(batch, monkeypatch, failing):
    model, reduce = tiny_llama(), outliers._KeyWatch.reduce

    def fail(watch, chunks):
        if any(watch._block is model.model.layers[layer - 1] for layer in failing):
            raise RuntimeError("out of memory")
        return reduce(watch, chunks)

    monkeypatch.setattr(outliers._KeyWatch, "reduce", fail)
    with pytest.raises(NormlabError, match=f"the attention of block {failing[0]} is not known: out of memory"):
        normlab.attention_sinks(model, batch)


def test_attention_that_cannot_be_seen_is_one_line(batch):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(NormlabError, match="no attention was seen"):
        normlab.attention_sinks(model, batch)


def test_half_precision_hides_the_same_keys(batch):
    model = planted()
    model.set_attn_implementation("eager")
    full = normlab.attention_sinks(model, batch, queries=4).table
    half = normlab.attention_sinks(model.half(), batch, queries=4).table
    assert half[["layer", "row", "position"]].equals(full[["layer", "row", "position"]])


class Masked(torch.nn.Module):
    """A block whose heads give 0.6 to token 20 from each later query.

    A key that is masked gets the score `fill`, or loses as much. So are all keys before `start` from all queries.
    """

    def __init__(self, fill: float, adds: bool, offset: float = 0.0, start: int = 0):
        super().__init__()
        self.fill, self.adds, self.start = fill, adds, start
        self.norm, self.attn = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        others = (torch.arange(LENGTH) - start).clamp(min=1)[:, None]  # that a query sees besides token 20
        self.scores = offset + torch.where(torch.arange(LENGTH) == 20, (1.5 * others).log(), 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.attn(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2)
        masked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) | (torch.arange(LENGTH) < self.start)
        scores = (read @ read.mT) * 0 + self.scores
        scores = scores + self.fill * masked if self.adds else scores.masked_fill(masked, self.fill)
        return x + (scores.softmax(-1) @ read).transpose(1, 2).flatten(2)


FILLS = [(-1e4, False), (-1e4, True), (-1e9, False), (-1e9, True), (torch.finfo().min, True), (-torch.inf, False)]


@pytest.mark.parametrize("offset", [1000.0, -1000.0])
@pytest.mark.parametrize(("fill", "adds"), FILLS)
def test_queries_from_which_a_mask_of_any_size_hides_a_key_do_not_count(fill, adds, offset):
    model = torch.nn.Sequential(Masked(fill, adds, offset), Masked(fill, adds, offset)).eval()
    found = normlab.attention_sinks(model, {"input": torch.randn(1, LENGTH, 8)})
    assert found.table["position"].tolist() == [20, 20] and found.table["heads"].tolist() == [1, 1]
    assert found.table["weight"].tolist() == pytest.approx([0.6, 0.6], rel=1e-4)


@pytest.mark.parametrize(("fill", "adds"), FILLS[:4])
def test_a_query_all_of_whose_keys_are_masked_sees_none(fill, adds):
    """Its softmax is uniform, and nothing says here that it is padding."""
    model = torch.nn.Sequential(Masked(fill, adds, start=10), Masked(fill, adds, start=10)).eval()
    found = normlab.attention_sinks(model, {"input": torch.randn(1, LENGTH, 8)}, threshold=0.0, queries=1)
    assert found.table["position"].tolist() == 2 * list(range(10, LENGTH))
    assert found.table.query("position == 20")["weight"].tolist() == pytest.approx([0.6, 0.6], rel=1e-4)
