"""Experiments that begin behind a kept state give what whole passes give, in any model, and compute nothing twice."""

import types
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pandas
import pytest
import torch
import transformers as hf
from probe_zoo import DEPTH, batch_for, build, ours
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from two_devices import TwoDevices, move

import normlab
from normlab.errors import NormlabError
from normlab.probes import (
    cheapest_spans,
    jacobian_identity,
    sites,
    skip_future_effect,
    skip_sensitivity,
    stacks,
    void_tokens,
)
from normlab.probes.kept_pass import KeptPass
from normlab.probes.layout import find_output, with_output

QUIET = {"progress": False}
IDS = {"input_ids": torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))}
Pair = namedtuple("Pair", "cache hidden")


@dataclass(frozen=True)
class Returned:
    hidden: torch.Tensor
    cache: object = None


class Mean(nn.Linear):
    """Stands for attention: the mean over the tokens so far."""

    def forward(self, x):
        return super().forward(x).cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]


class Block(nn.Module):
    """A Pre-LN block. `wrap` makes its output of the stream."""

    def __init__(self, wrap=lambda x: x, width=16):
        super().__init__()
        self.wrap = wrap
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Mean(width, width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return self.wrap(x + self.mlp(self.norm2(x)))


class Toy(nn.Module):
    """Blocks between an embedding and a head; `unwrap` takes the stream out of what a block returned."""

    def __init__(self, block=Block, depth=3, unwrap=lambda output: output, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(64, width), nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head, self.unwrap = nn.LayerNorm(width), nn.Linear(width, 64), unwrap

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.layers:
            x = self.unwrap(block(x))
        return self.head(self.norm(x))


CONTAINERS = {
    "second of a tuple": (lambda x: (None, x), lambda o: o[1]),
    "namedtuple": (lambda x: Pair(None, x), lambda o: o.hidden),
    "list": (lambda x: [x, 1], lambda o: o[0]),
    "dict": (lambda x: {"h": x}, lambda o: o["h"]),
    "OrderedDict": (lambda x: OrderedDict(ids=torch.arange(3), h=x), lambda o: o["h"]),
    "read-only mapping": (lambda x: types.MappingProxyType({"h": x}), lambda o: o["h"]),
    "dataclass": (Returned, lambda o: o.hidden),
    "ModelOutput": (lambda x: BaseModelOutput(last_hidden_state=x), lambda o: o.last_hidden_state),
}


def all_experiments(model):
    """The values of every experiment that replaces a block's output."""
    return [
        *skip_sensitivity(model, [IDS], **QUIET)["skip_delta_loss"],
        *skip_sensitivity(model, [IDS], span=2, **QUIET)["skip_delta_loss"],
        *skip_sensitivity(model, [IDS], parts=["attention", "mlp"], **QUIET)["output_kl"],
        *skip_future_effect(model, [IDS], **QUIET)["value"],
        *normlab.logit_lens_kl(model, [IDS], **QUIET)["value"],
        *normlab.angular_distance(model, [IDS], **QUIET).to_numpy().ravel(),
        *jacobian_identity(model, [IDS], **QUIET)["value"],
    ]


@pytest.fixture(scope="module")
def plain():
    return all_experiments(Toy())


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_block_may_return_its_stream_in_any_container(name, plain):
    wrap, unwrap = CONTAINERS[name]
    output, new = wrap(torch.ones(1, 2, 3)), torch.zeros(1, 2, 3)
    again = with_output(output, new)
    assert type(again) is type(output) and find_output(again) is new and unwrap(again) is new
    assert unwrap(output) is not new
    assert all_experiments(Toy(lambda: Block(wrap), unwrap=unwrap)) == plain


class Apart(Block):
    """Returns what its MLP adds and the residual, as fused add-norms want them."""

    in_place = False

    def forward(self, x, residual=None):
        if residual is None:
            residual = x
        else:
            residual = residual.add_(x) if self.in_place else x + residual
        residual = residual + self.attn(self.norm1(residual))
        return self.mlp(self.norm2(residual)), residual


class ApartInPlace(Apart):
    in_place = True


class ApartWide(Apart):
    """Keeps the residual in another precision than the branch."""

    def forward(self, x, residual=None):
        residual = x.double() if residual is None else x + residual
        residual = residual + self.attn(self.norm1(residual.float()))
        return self.mlp(self.norm2(residual.float())), residual


class ApartModel(Toy):
    def forward(self, input_ids):
        x, residual = self.embed(input_ids), None
        for block in self.layers:
            x, residual = block(x, residual)
        return self.head(self.norm((x + residual).to(x.dtype)))


@pytest.mark.parametrize("block", [Apart, ApartInPlace, ApartWide])
def test_where_the_residual_is_apart_experiments_are_of_the_sum(block, plain):
    model = ApartModel(block)
    assert all_experiments(model) == pytest.approx(plain, rel=1e-4, abs=2e-6)
    found = normlab.massive_activations(model, IDS, least=0, ratio=3).table["value"].tolist()
    plainly = normlab.massive_activations(Toy(), IDS, least=0, ratio=3).table["value"].tolist()
    assert found == pytest.approx(plainly, rel=1e-5)


class Update(Block):
    """What a block adds, for a model that adds it to the stream itself."""

    def forward(self, x):
        adds = self.attn(self.norm1(x))
        return adds + self.mlp(self.norm2(x + adds))


class AddingModel(Toy):
    add = staticmethod(lambda x, adds: adds + x)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.layers:
            x = self.add(x, block(x))
        return self.head(self.norm(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_where_the_model_adds_the_residual_experiments_are_of_the_sum(in_place):
    model = AddingModel(Update)
    if in_place:
        model.add = torch.Tensor.add_
    values = [
        [
            *skip_sensitivity(model, [IDS], **QUIET)["skip_delta_loss"],
            *normlab.logit_lens_kl(model, [IDS], **QUIET)["value"],
            *normlab.angular_distance(model, [IDS], **QUIET).to_numpy().ravel(),
            *normlab.massive_activations(model, IDS, least=0, ratio=3).table["value"],
            *void_tokens(model, [IDS], **QUIET)["value"],
        ]
        for model in (model, Toy())
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4, abs=2e-6)
    jacobians = [jacobian_identity(one, [IDS], **QUIET)["value"].tolist() for one in (model, Toy())]
    assert jacobians[0] == pytest.approx(jacobians[1], rel=0.1)  # estimates from other random vectors


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ends_in_a_norm", [True, False])
def test_where_the_model_adds_the_residual_the_sum_is_recorded(in_place, ends_in_a_norm):
    tables = []
    for model in (AddingModel(Update), Toy()):
        if in_place and isinstance(model, AddingModel):
            model.add = torch.Tensor.add_
        if not ends_in_a_norm:
            model.norm = nn.Identity()
        with normlab.record(model, ["token_l2_mean", "block_influence"]) as rec, torch.no_grad():
            model(**IDS)
        found = rec.stats().to_pandas().query("metric == 'token_l2_mean' and site in ['block_out', 'final_norm_in']")
        tables.append(found.set_index(["site", "layer", "mask"])["value"].to_dict())
        if isinstance(model, AddingModel):
            absent = rec.stats().manifest["absent"]
            assert not rec.stats().to_pandas()["metric"].eq("block_influence").any()
            assert {place for place in absent if place.startswith("block ")} == {f"block {i + 1}" for i in range(DEPTH)}
    right = {place: x for place, x in tables[1].items() if ends_in_a_norm or place[1] < DEPTH}
    assert tables[0] == pytest.approx(right, rel=1e-5)


def test_a_token_that_is_not_finite_does_not_hide_that_the_model_adds_the_residual():
    model, batch = AddingModel(Update), {"input_ids": IDS["input_ids"].clone()}
    batch["input_ids"][0, -1], batch["labels"] = 1, batch["input_ids"].clone()
    batch["labels"][0] = -100
    with torch.no_grad():
        model.embed.weight[1] = torch.inf
        whole = model(batch["input_ids"])
        for i, delta in enumerate(skip_sensitivity(model, [batch], **QUIET)["skip_delta_loss"]):
            hook = model.layers[i].register_forward_hook(lambda m, args, output: 0 * output)
            skipped = model(batch["input_ids"])
            hook.remove()
            losses = [nn.functional.cross_entropy(x[1, :-1], batch["input_ids"][1, 1:]) for x in (skipped, whole)]
            assert delta == pytest.approx(float(losses[0] - losses[1]), abs=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_of_one_block_the_final_norm_tells_that_the_model_adds_the_residual(in_place):
    model = AddingModel(Update, depth=1)
    if in_place:
        model.add = torch.Tensor.add_
    values = [
        [
            *skip_sensitivity(model, [IDS], **QUIET)["skip_delta_loss"],
            *normlab.logit_lens_kl(model, [IDS], **QUIET)["value"],
            *normlab.angular_distance(model, [IDS], **QUIET).to_numpy().ravel(),
            *normlab.massive_activations(model, IDS, least=0, ratio=3).table["value"],
            *void_tokens(model, [IDS], small=0.4, **QUIET)["value"],
        ]
        for model in (model, Toy(depth=1))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4, abs=2e-6)
    jacobians = [jacobian_identity(one, [IDS], **QUIET)["value"].tolist() for one in (model, Toy(depth=1))]
    assert jacobians[0] == pytest.approx(jacobians[1], rel=0.1)  # estimates from other random vectors


def test_of_one_block_any_module_after_it_tells_else_its_sum_or_it_is_refused():
    adding, plain = AddingModel(Update), Toy()
    whole = normlab.angular_distance(plain, [IDS], **QUIET)
    for model, layer in ((plain, 2), (adding, 2), (adding, 3)):
        one = normlab.angular_distance(sites(model, f"layers.{layer - 1}"), [IDS], **QUIET)
        assert one.loc[layer - 1, layer] == pytest.approx(whole.loc[layer - 1, layer], rel=1e-5)
    for model in (Toy(depth=1), AddingModel(Update, depth=1)):  # the head tells
        model.norm = nn.Identity()
        assert normlab.angular_distance(model, [IDS], **QUIET).loc[0, 1] == pytest.approx(whole.loc[0, 1], rel=1e-5)
    refused = AddingModel(Update, depth=1)
    refused.add = lambda x, adds: x + 0.5 * adds
    summed = Toy(depth=1)
    summed.norm, summed.unwrap = nn.Identity(), lambda x: 0.5 * x
    assert normlab.angular_distance(summed, [IDS], **QUIET).loc[0, 1] == pytest.approx(whole.loc[0, 1], rel=1e-5)
    for experiment in (skip_sensitivity, normlab.angular_distance):
        with pytest.raises(NormlabError, match="where the residual is added cannot be told"):
            experiment(refused, [IDS], **QUIET)


@pytest.mark.parametrize("way", [nn.Dropout, nn.LayerNorm, partial(nn.Linear, 16)], ids=["dropout", "norm", "linear"])
def test_a_module_between_one_block_and_the_sum_does_not_tell_that_the_block_adds_its_residual(way):
    model = AddingModel(Update, depth=1)
    model.way, model.add = way(0.1 if way is nn.Dropout else 16), lambda x, adds: x + model.way(adds)
    if way is nn.Dropout:
        values = [skip_sensitivity(one, [IDS], **QUIET)["skip_delta_loss"][0] for one in (model, Toy(depth=1))]
        assert values[0] == pytest.approx(values[1], rel=1e-4)
        model.add = lambda x, adds: x + 0.5 * model.way(adds)
    with pytest.raises(NormlabError, match="where the residual is added cannot be told"):
        skip_sensitivity(model, [IDS], **QUIET)


@pytest.mark.parametrize("scheme", ["b2t", "ngpt", "mhc"])
def test_one_block_that_is_not_its_input_plus_its_branches_is_not_refused(scheme):
    for depth, blocks in ((1, None), (2, "model.layers.0"), (2, "model.layers.1")):
        model = ours(scheme, num_hidden_layers=depth)
        one, last = (skip_sensitivity(where, [IDS], **QUIET) for where in (sites(model, blocks), model))
        if depth > 1:
            assert one["skip_delta_loss"][0] == last["skip_delta_loss"][int(blocks[-1])]


def test_a_residual_that_is_added_out_of_sight_is_refused_and_a_stream_that_is_mixed_between_blocks_is_not():
    model = AddingModel(Update)
    model.add = lambda x, adds: x + 0.5 * adds
    for experiment in (skip_sensitivity, normlab.angular_distance):
        with pytest.raises(NormlabError, match="where the residual is added cannot be told"):
            experiment(model, [IDS], **QUIET)
    mixing = AddingModel(Block)
    mixing.add = lambda x, out: 0.9 * out + 0.1
    assert len(skip_sensitivity(mixing, [IDS], **QUIET)) == 3


class Two(Block):
    """Two streams, each of which reads the other."""

    def forward(self, x, y=None):
        y = x if y is None else y
        x = x + self.attn(self.norm1(2 * x + y))
        return x, y + self.mlp(self.norm2(x))


def test_a_stream_in_parts_that_cannot_be_told_is_refused_in_one_line():
    model = ApartModel(Two)
    with torch.no_grad(), normlab.record(model, ["rms"]) as rec:
        model(**IDS)
    assert {"block_out 1", "block_out 2"} <= rec.stats().manifest["absent"].keys()
    for experiment in (
        skip_sensitivity, skip_future_effect, normlab.logit_lens_kl, normlab.angular_distance, jacobian_identity,
        lambda m, b, **_: normlab.massive_activations(m, b[0]),
    ):  # fmt: skip
        with pytest.raises(NormlabError, match="two tensors of the stream's shape"):
            experiment(model, [IDS], **QUIET)


class First(Block):
    """Carries another tensor of the stream's shape from block to block, as RWKV-7 its first values."""

    def forward(self, x, first=None):
        first = self.attn(x) if first is None else first
        return super().forward(x) + first, first


class FirstModel(Toy):
    def forward(self, input_ids):
        x, first = self.embed(input_ids), None
        for block in self.layers:
            x, first = block(x, first)
        return self.head(self.norm(x))


# -- later passes ----------------------------------------------------------------------------------------------------


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_heads": 4, "d_kv": 8, "pad_token_id": 0}
    config = hf.T5Config(num_layers=2, num_decoder_layers=DEPTH, decoder_start_token_id=0, **sizes)
    return hf.T5ForConditionalGeneration(config).eval()


def in_place():
    """Blocks that write into the tensor that they are handed."""

    class InPlace(Block):
        def forward(self, x):
            x += self.attn(self.norm1(x))
            x += self.mlp(self.norm2(x))
            return x

    return Toy(InPlace)


def steered():
    """A hook of the caller changes what block 1 returns."""
    model = Toy()
    model.layers[0].register_forward_hook(lambda module, args, output: output + 1)
    return model


SCHEMES = ["pre_rmsnorm", "lns", "bhyt", "mhc", "keel"]
MODELS = {
    **{scheme: (lambda scheme=scheme: ours(scheme, num_hidden_layers=DEPTH)) for scheme in SCHEMES},
    **{name: (lambda name=name: build(name)) for name in ("llama", "gpt2", "gemma3", "olmo2", "neox")},
    "t5 decoder": lambda: stacks(t5())["decoder.block"],
    "plain": Toy,
    "beside": lambda: FirstModel(First),
    "apart": lambda: ApartModel(ApartInPlace),
    "in place": in_place,
    "steered": steered,
}


REFUSED = {("mhc", "future"), ("mhc", "parts"), ("beside", "parts")}


def counting(where):
    """A list that grows by one whenever a block is computed."""
    ran = []
    for block in where.blocks:
        block.norms[0].register_forward_hook(lambda *_: ran.append(1))
    return ran


SKIPS = {
    "blocks": lambda *given: skip_sensitivity(*given, **QUIET)[["skip_delta_loss", "output_kl"]],
    "spans": lambda *given: skip_sensitivity(*given, span=2, **QUIET)[["skip_delta_loss", "output_kl"]],
    "parts": lambda *given: skip_sensitivity(*given, parts=["attention", "mlp"], **QUIET)["skip_delta_loss"],
    "future": lambda *given: skip_future_effect(*given, **QUIET)["value"],
}


@pytest.mark.parametrize("name", MODELS)
def test_passes_behind_a_kept_state_give_what_whole_passes_give(name, monkeypatch):
    model = MODELS[name]()
    where = sites(model) if isinstance(model, nn.Module) else model
    where.model.double()
    batch = IDS if isinstance(where.model, Toy) else batch_for("llama")
    ran, found, whole = counting(where), {}, {}
    for results in (found, whole):
        for kind, skip in SKIPS.items():
            if (name, kind) not in REFUSED:
                ran.clear()
                results[kind] = (skip(where, [batch]).to_numpy().ravel().tolist(), len(ran))
        monkeypatch.setattr(KeptPass, "_may_begin_late", False)
    for kind, (values, blocks) in whole.items():
        assert found[kind][0] == pytest.approx(values, rel=1e-9, abs=1e-9), kind
        assert found[kind][1] < blocks, kind  # those before the skipped one are not computed


def test_branches_that_are_added_in_place_are_skipped_and_have_no_jacobian():
    found = [SKIPS["parts"](MODELS[name](), [IDS]).tolist() for name in ("plain", "in place")]
    assert found[1] == pytest.approx(found[0]) and len(found[0]) == 2 * DEPTH
    with pytest.raises(NormlabError, match="writes in place over what its gradient needs"):
        jacobian_identity(MODELS["in place"](), [IDS], **QUIET)


def test_an_encoder_runs_once_for_all_skips_in_its_decoder():
    where = stacks(t5())["decoder.block"]
    ran = []
    where.model.encoder.block[0].register_forward_hook(lambda *_: ran.append(1))
    skip_sensitivity(where, [batch_for("llama")], **QUIET)
    assert len(ran) == 3  # as the caller's batch is looked at, whether its labels are shifted, and the whole pass


# -- what blocks share -----------------------------------------------------------------------------------------------


class Sharing(Toy):
    """The last block reads what block 1 wrote into a shared dictionary, as keys and values are shared."""

    class Block(Block):
        def forward(self, x, shared, role):
            if role == "writes":
                shared["values"] = self.attn(x)
            return super().forward(x) + (shared["values"] if role == "reads" else 0)

    def __init__(self, depth=4):
        super().__init__(self.Block, depth)

    def forward(self, input_ids):
        x, shared = self.embed(input_ids), {}
        roles = ["writes", *[""] * (len(self.layers) - 2), "reads"]
        for block, role in zip(self.layers, roles, strict=True):
            x = block(x, shared, role)
        return self.head(self.norm(x))


def gemma4():
    torch.manual_seed(0)
    config = hf.Gemma4TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, global_head_dim=8, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
        pad_token_id=0,
    )  # fmt: skip
    return hf.Gemma4ForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("build_model", "read_by"),
    [(Sharing, ["4", "", "", ""]), (gemma4, ["3", "4", "", ""])],
    ids=["toy", "gemma4"],
)
def test_blocks_that_others_read_beside_the_stream_are_marked_and_never_dropped(build_model, read_by):
    model = build_model()
    table = skip_sensitivity(model, [IDS], **QUIET)
    assert table["read_by"].tolist() == read_by
    losses = []
    for block in model.layers if build_model is Sharing else model.model.layers:
        handle = block.register_forward_hook(lambda module, args, output: args[0])
        with torch.no_grad():
            out = model(**IDS)
        handle.remove()
        logits = out if build_model is Sharing else out.logits
        labels = IDS["input_ids"][:, 1:].flatten()
        losses.append(float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)))
    assert (table["loss"] + table["skip_delta_loss"]).tolist() == pytest.approx(losses, abs=1e-6)
    spans = cheapest_spans(model, [IDS], longest=3, candidates=9, **QUIET).set_index("length")
    for first, last in zip(spans["first"], spans["last"], strict=True):
        assert not any(read_by[i - 1] and int(read_by[i - 1]) > last for i in range(first, last + 1))
    assert list(spans.index) == [1, 2, 3]


def append(kept, i, x):
    kept.append(x)
    return x


def write(kept, i, x):
    kept[i] = x
    return x


def write_out(kept, i, x):
    torch.mul(x, 1, out=kept[i])
    return x


def add_and_return(kept, i, x):
    kept += x
    return x, kept


def write_and_return(kept, i, x):
    kept[i] = x
    return x, [kept]


def return_first(kept, i, x):
    return x, (x.tanh() if kept is None else kept)


def buffer():
    return torch.zeros(4, 2, 9, 16)


# What blocks keep, how they note their output, what each reads of it, and what is handed to the next.
HISTORIES = {
    "list": (list, append, lambda kept, i: torch.stack(kept).mean(0) if i else 0, None),
    "latest of a list": (list, append, lambda kept, i: kept[-1] if i else 0, None),
    "list at two": (list, append, lambda kept, i: kept[0] + kept[-1] if i > 1 else 0, None),
    "buffer": (buffer, write, lambda kept, i: kept[:i].mean(0) if i else 0, None),
    "own row of a buffer": (buffer, write, lambda kept, i: kept[i], None),
    "out=": (buffer, write_out, lambda kept, i: kept[:i].mean(0) if i else 0, None),
    "sum": (lambda: torch.zeros(2, 9, 16), add_and_return, lambda kept, i: kept, lambda output: output[1]),
    "rows, handed on": (buffer, write_and_return, lambda kept, i: kept[i], lambda output: output[1][0]),
    "first value, handed on": (lambda: None, return_first, lambda kept, i: kept if i else 0, lambda output: output[1]),
    "half of it": (lambda: None, return_first, lambda kept, i: kept if i else 0, lambda output: output[1] / 2),
}
READ_BY = {
    **dict.fromkeys(["list", "buffer", "out="], ["2, 3, 4", "3, 4", "4", ""]),
    "latest of a list": ["2", "3", "4", ""],
    "list at two": ["3, 4", "3", "4", ""],
    "sum": ["2", "3", "4", ""],
    **dict.fromkeys(["first value, handed on", "half of it"], ["2, 3, 4", "", "", ""]),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_skips_see_what_earlier_blocks_kept_and_name_who_reads_it(name):
    make, note, look, handed = HISTORIES[name]

    class Reading(Block):
        def forward(self, x, kept, i):
            return note(kept, i, super().forward(x + look(kept, i)))

    class Model(Toy):
        skipped = None

        def forward(self, input_ids):
            x, kept = self.embed(input_ids), self.kept.zero_() if make is buffer else make()
            for i, block in enumerate(self.layers):
                output = block(x, kept, i)
                kept = kept if handed is None else handed(output)
                x = x if i == self.skipped else output[0] if isinstance(output, tuple) else output
            return self.head(self.norm(x))

    model, losses, labels = Model(Reading, depth=4).eval(), [], IDS["input_ids"][:, 1:].flatten()
    model.kept = buffer()
    table = skip_sensitivity(model, [IDS], **QUIET)
    for model.skipped in range(4):
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(**IDS)[:, :-1].flatten(0, 1), labels)))
    assert (table["loss"] + table["skip_delta_loss"]).tolist() == pytest.approx(losses, abs=1e-6)
    assert table.get("read_by", pandas.Series([""] * 4)).tolist() == READ_BY.get(name, [""] * 4)


def test_what_the_first_pass_makes_for_all_later_ones_is_not_shared():
    class Table(Toy):
        class Block(Block):
            def forward(self, x, tables):
                if "positions" not in tables:  # as a rotary embedding's, made by the first block that runs
                    tables["positions"] = torch.arange(x.shape[1]).float()[:, None] * 0.1
                return super().forward(x + tables["positions"])

        def __init__(self):
            super().__init__(self.Block)
            self.tables = {}

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for block in self.layers:
                x = block(x, self.tables)
            return self.head(self.norm(x))

    assert "read_by" not in skip_sensitivity(Table(), [IDS], **QUIET)


# -- branches that hold the residual -----------------------------------------------------------------------------------


SMALL = {"vocab_size": 64, "initializer_range": 0.2}


@pytest.mark.parametrize(
    ("config", "attention", "mlp"),
    [
        (hf.BloomConfig(hidden_size=32, n_layer=3, n_head=4, **SMALL), "self_attention.dense", "mlp.dense_4h_to_h"),
        (hf.MptConfig(d_model=32, n_layers=3, n_heads=4, **SMALL), "attn.out_proj", "ffn.down_proj"),
    ],
    ids=["bloom", "mpt"],
)
def test_skipping_a_branch_that_adds_the_residual_itself_leaves_the_residual(config, attention, mlp):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    table = skip_sensitivity(model, [IDS], parts=["attention", "mlp"], **QUIET).set_index(["part", "layer"])
    assert len(table) == 6
    for part, path in (("attention", attention), ("mlp", mlp)):
        linear = sites(model).blocks[1].module.get_submodule(path)
        with torch.no_grad():
            saved = [parameter.clone() for parameter in linear.parameters()]
            for parameter in linear.parameters():
                parameter.zero_()
            loss = float(model(**IDS, labels=IDS["input_ids"]).loss)
            for parameter, values in zip(linear.parameters(), saved, strict=True):
                parameter.copy_(values)
        row = table.loc[part, 2]
        assert row["loss"] + row["skip_delta_loss"] == pytest.approx(loss, abs=2e-6)


class Beside(Block):
    """Two MLPs side by side, as experts and a shared one."""

    def __init__(self):
        super().__init__()
        self.ffn = nn.Linear(16, 16)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        read = self.norm2(x)
        return x + (self.mlp(read) + self.ffn(read))


class Macaron(Beside):
    """Half an MLP before attention, and one after it."""

    def forward(self, x):
        x = x + 0.5 * self.ffn(self.norm1(x))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("block", [Beside, Macaron])
def test_all_branches_of_a_kind_in_a_block_are_skipped_together(block):
    model = Toy(block, depth=2)
    table = skip_sensitivity(model, [IDS], parts=["mlp"], **QUIET)
    losses = []
    for layer in model.layers:
        zeroed = [m.register_forward_hook(lambda module, args, out: out * 0) for m in (layer.mlp, layer.ffn)]
        logits = model(**IDS)[:, :-1]
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), IDS["input_ids"][:, 1:].flatten()).item())
        for hook in zeroed:
            hook.remove()
    assert (table["loss"] + table["skip_delta_loss"]).tolist() == pytest.approx(losses, abs=1e-6)


# -- the call ----------------------------------------------------------------------------------------------------------


def test_offloaded_weights_are_measured_as_others():
    accelerate = pytest.importorskip("accelerate")
    whole, offloaded = build("llama"), build("llama")
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    for experiment in (skip_sensitivity, skip_future_effect, normlab.logit_lens_kl, jacobian_identity):
        assert experiment(offloaded, [IDS], **QUIET).equals(experiment(whole, [IDS], **QUIET))
    assert normlab.angular_distance(offloaded, [IDS], **QUIET).equals(normlab.angular_distance(whole, [IDS], **QUIET))
    with pytest.raises(NormlabError, match="weights are offloaded"):
        normlab.diff(offloaded, whole, IDS)


def test_without_a_label_or_token_that_counts_there_is_one_line():
    model, ids = build("llama"), IDS["input_ids"]
    nothing = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    for job in (
        lambda: skip_sensitivity(model, [{"input_ids": ids, "labels": torch.full_like(ids, -100)}], **QUIET),
        lambda: skip_sensitivity(model, [{"input_ids": ids[:, :1]}], **QUIET),
        lambda: normlab.logit_lens_kl(model, [nothing], **QUIET),
        lambda: normlab.angular_distance(model, [nothing], **QUIET),
        lambda: jacobian_identity(model, [nothing], **QUIET),
        lambda: skip_future_effect(model, [nothing], **QUIET),
        lambda: normlab.massive_activations(model, nothing),
        lambda: normlab.massive_activations(Toy(), {"input_ids": ids[:0]}),
        lambda: normlab.attention_sinks(model, nothing),
    ):
        with pytest.raises(NormlabError, match="no batch has a label or a token that counts"):
            job()


def test_a_wrapper_hands_on_that_no_cache_is_wanted():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    model = build("llama")
    assert jacobian_identity(Wrapper(model), [IDS], **QUIET).equals(jacobian_identity(model, [IDS], **QUIET))


@pytest.mark.parametrize("how", ["returns something else", "fails"])
def test_a_block_that_cannot_run_a_second_time_has_no_jacobian(how):
    class Cached(Block):
        def forward(self, x):
            self.seen = getattr(self, "seen", 0) + 1
            if how == "fails" and self.seen > 1:
                raise RuntimeError("the mask does not fit the cache")
            return super().forward(x) * self.seen

    with pytest.raises(NormlabError, match=f"{how} when it runs again"):
        jacobian_identity(Toy(Cached), [IDS], **QUIET)


def test_several_streams_are_refused():
    class Streams(Toy):
        def forward(self, input_ids):
            x = self.embed(input_ids).expand(4, -1, -1, -1)
            for block in self.layers:
                x = block(x)
            return self.head(self.norm(x.mean(0)))

    class Wide(Toy):
        """Blocks pass on three streams side by side, and are given one."""

        class Block(Block):
            def forward(self, x):
                return super().forward(x[..., :16]).repeat(1, 1, 3)

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for block in self.layers:
                x = block(x)
            return self.head(self.norm(x.unflatten(-1, (3, 16)).sum(-2)))

    for experiment in (
        skip_future_effect, normlab.logit_lens_kl, normlab.angular_distance, jacobian_identity,
        lambda m, b, **_: normlab.massive_activations(m, b[0]),
    ):  # fmt: skip
        for model in (Streams(), Wide(Wide.Block)):
            with pytest.raises(NormlabError, match="several residual streams"):
                experiment(model, [IDS], **QUIET)


class Attention(nn.Linear):
    """Each token attends to those so far."""

    def forward(self, x):
        x = super().forward(x)[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]


class Attending(Block):
    def __init__(self):
        super().__init__()
        self.attn = Attention(16, 16)


def test_blocks_may_be_on_several_devices(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    found = []
    for is_split in (False, True):
        model = Toy(Attending)
        norm = model.norm.forward
        model.norm.forward = lambda x, norm=norm: norm(x.cpu())
        if is_split:
            move(model.layers[2])
        with TwoDevices() if is_split else nullcontext():
            values = [
                skip_sensitivity(model, [IDS], parts=["block", "attention"], **QUIET)["skip_delta_loss"],
                skip_future_effect(model, [IDS], **QUIET)["value"],
                normlab.logit_lens_kl(model, [IDS], **QUIET)["value"],
                normlab.angular_distance(model, [IDS], **QUIET).to_numpy().ravel(),
                jacobian_identity(model, [IDS], probes=1, **QUIET)["value"],
                void_tokens(model, [IDS], **QUIET)["value"],
                normlab.massive_activations(model, IDS, least=0, ratio=3).table["value"],
                normlab.attention_sinks(model, IDS, threshold=0, queries=1).table["weight"],
            ]
        found.append([*chain.from_iterable(values)])
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-7)
