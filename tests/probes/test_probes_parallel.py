"""Pipelines, DTensors, split heads and fake tensors: what is there is measured, and the rest has a reason."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its default arguments hold what they find
from probe_toys import PreLN, Stack, X, size
from probe_zoo import near, tiny_llama, token_batch, values
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import normlab
from normlab.errors import NormlabError
from normlab.probes import attention_sinks, call_tokens, record

METRICS = ["token_l2_mean", "max_abs", "grad_l2_mean", "attention_entropy", "massive_activation_ratio"]


def fake_group(ranks):
    """A group of which this is the only process: what the others would send does not arrive."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    yield init_device_mesh("cpu", (ranks,))
    dist.destroy_process_group()


@pytest.fixture
def one_rank():
    yield from fake_group(1)


@pytest.fixture
def two_ranks():
    yield from fake_group(2)


# -- calls that are no passes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [True, False])
def test_a_pipelines_dry_run_is_not_measured(trains, one_rank):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def loss(out, target):
        return (out - target).square().sum()

    def recorded(run):
        metrics = [name for name in METRICS if trains or "grad" not in name]
        with record(Stack(PreLN, PreLN), metrics, masks=["all"], loss_tokens=1) as rec, torch.set_grad_enabled(trains):
            run(rec.sites.model)
        return rec

    def in_parts(model):
        for part in X.split(1):
            out = model(part)
            if trains:
                loss(out, torch.ones(())).backward()

    def in_a_pipeline(model):
        stage = PipelineStage(model, 0, 1, X.device)
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss if trains else None)
        schedule.step(X, target=torch.ones(2, 1, 1)) if trains else schedule.eval(X)

    plain, piped = recorded(in_parts), recorded(in_a_pipeline)
    assert values(piped.stats()) == near(values(plain.stats()))
    assert piped.stats().manifest["forward_passes"] == 2 and piped.absent == plain.absent


def exported(model, x):
    torch.export.export(model, (x,), strict=False)


def estimated(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))


@pytest.mark.parametrize(
    ("run", "metrics"), [(exported, METRICS), (estimated, METRICS), (estimated, ["token_l2_mean"])]
)
def test_a_call_of_fake_tensors_is_left_out_and_takes_no_step_with_it(run, metrics):
    tables = []
    for fakes in ((), (0, 1)):
        model = Stack(PreLN, PreLN)
        with normlab.observe(model, every=1, metrics=metrics, loss_tokens=1) as observer, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(2):
                model(X).sum().backward()
                if step in fakes:
                    run(model, X)
                observer.step(1.0, step)
        tables.append(observer.to_pandas().set_index(["step", "site", "layer", "metric", "mask"])["value"].to_dict())
    assert tables[0] == tables[1] and {step for step, *_ in tables[1]} == {0, 1}
    assert "calls of fake tensors" in observer.absent
    with record(model, metrics) as rec:
        run(model, X)
    assert not rec.known and rec.latest is None


# -- DTensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_a_stream_of_dtensors_is_refused_in_a_line(placement, one_rank):
    model = Stack(PreLN, PreLN)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(DTensor.from_local(weight.data, one_rank, [Replicate()])))
    x = DTensor.from_local(X, one_rank, [placement])
    with pytest.raises(NormlabError, match="pass DTensors on.*use_local_output=True"), record(model, ["rms"]):
        model(x)
    with normlab.observe(model, every=1, metrics=["rms"]) as observer:
        model(x)
        with pytest.raises(NormlabError, match="^nothing could be measured: the blocks pass DTensors on"):
            observer.step(1.0, 0)


@pytest.mark.parametrize("kind", ["_merge", "_merge_array"])
def test_an_error_in_the_merging_of_a_pass_is_a_reason_and_ends_no_training(kind, monkeypatch):
    from normlab.probes.accumulate import Accumulator

    def fail(*_):
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(Accumulator, kind, fail)
    model = Stack(PreLN, PreLN)
    with normlab.observe(model, every=1, metrics=METRICS[:-2] + METRICS[-1:], loss_tokens=1) as observer:
        model(X).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            observer.step(1.0, 0)
    assert observer.absent["block_out 1"] == "ZeroDivisionError: of ours"
    assert not any("padding" in why for why in observer.absent.values())
    assert ("max_abs" in set(observer.to_pandas()["metric"])) == (kind == "_merge_array")


# -- heads and tokens that ranks share ---------------------------------------------------------------------------------


def split_heads(model, mesh):
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {f"self_attn.{name}_proj": columns() for name in "qkv"} | {"self_attn.o_proj": rows()}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)


def sharded_whole(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sharded_finely(model, mesh):
    for block in model.model.layers:
        fully_shard(block.self_attn.q_proj, mesh=mesh)
        fully_shard(block.self_attn, mesh=mesh)


@pytest.mark.parametrize(("shard", "is_split"), [(split_heads, True), (sharded_whole, False), (sharded_finely, False)])
def test_attention_is_left_out_where_a_rank_has_a_part_of_the_heads(shard, is_split, two_ranks):
    model = tiny_llama(num_hidden_layers=2)
    shard(model, two_ranks)
    with record(model, ["rms", "attention_entropy", "attention_logit_max"]) as rec, torch.no_grad():
        model(**token_batch())
    stats = rec.stats()
    lost = {place for place, why in stats.manifest["absent"].items() if "splits its heads over ranks" in why}
    assert lost == ({"attention 1", "attention 2"} if is_split else set())
    assert ("attention_entropy" in set(stats.to_pandas()["metric"])) is not is_split
    if is_split:
        with pytest.raises(NormlabError, match="block 1 is not known: tensor parallelism splits its heads"):
            attention_sinks(model, token_batch(), queries=1)


class Cut(nn.Module):
    """Blocks that hold the first tokens of each row alone, as ranks of sequence parallelism hold a part."""

    def __init__(self, held):
        super().__init__()
        self.embed, self.body, self.held = nn.Embedding(32, X.shape[-1]), Stack(PreLN, PreLN), held

    def forward(self, tokens, past_key_values=None):
        return self.body(self.embed(tokens)[:, : self.held])


TOKENS = torch.randint(0, 32, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("held", "ranks", "more", "is_told"),
    [
        (4, 2, {}, True),
        (8, 2, {}, False),
        (4, 2, {"past_key_values": ()}, False),
        (4, 1, {}, False),  # what a model does by itself: "all" has all that its blocks hold
        (7, 2, {}, False),
        (2, 2, {}, False),
    ],
)
def test_blocks_that_hold_a_part_of_each_row_are_told(held, ranks, more, is_told, monkeypatch):
    monkeypatch.setattr(call_tokens, "_ranks", lambda: ranks)
    model = Cut(held)
    with normlab.observe(model, every=1, metrics=["rms"]) as observer, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(tokens=TOKENS, **more)
        observer.step(1.0, 0)
    words = "step 0: part of each row: the blocks hold 4 positions for a row's 8 tokens"
    assert sum(str(one.message).startswith(words) for one in told) == is_told
    assert ("part of each row" in observer.absent) is is_told


class Positioned(Cut):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens)


@pytest.mark.parametrize("gives", [True, False])
def test_positions_say_which_part_of_a_context_has_the_first_token(gives):
    """As ranks of context parallelism hold the parts, which each one calls with its own tokens."""
    with record(Positioned(8), ["token_l2_mean"]) as rec, torch.no_grad():
        for part, places in zip(TOKENS.split(4, 1), torch.arange(8).split(4), strict=True):
            rec.sites.model(part, **({"position_ids": places[None]} if gives else {}))
        body, h = rec.sites.model.body.layers, rec.sites.model.embed(TOKENS)
        h = body[1](body[0](h))
    counted = h[:, 1:] if gives else h.view(3, 2, 4, -1)[:, :, 1:]
    assert values(rec.stats())["block_out", 2, "token_l2_mean", "no_first"] == size(counted)


# -- what is asked of which ranks --------------------------------------------------------------------------------------


def test_the_callback_merges_over_the_ranks_of_its_group(two_ranks):
    model, state = tiny_llama(num_hidden_layers=2), SimpleNamespace(global_step=0, is_world_process_zero=False)
    arguments, own = SimpleNamespace(report_to=[], output_dir="."), dist.new_group([0])
    callback = normlab.LayerStatsCallback(1, ["grad_l2_total"], group=own, update_ratio=False)
    callback.on_train_begin(arguments, state, None)
    callback.on_step_begin(arguments, state, None, model=model)
    model(**token_batch()).loss.backward()
    callback.on_pre_optimizer_step(arguments, state, None, model=model)
    state.global_step = 1
    callback.on_step_end(arguments, state, None, model=model)
    assert "grad_l2_total" in set(callback.to_pandas()["metric"])


def test_weights_that_a_call_is_given_are_not_taken_for_the_models_own():
    model = Stack(PreLN, PreLN)
    weights = {name: 2 * weight.detach() for name, weight in model.named_parameters()}
    with normlab.observe(model, every=1, metrics=["rms"]) as observer:
        torch.func.functional_call(model, {name: weight.detach() for name, weight in model.named_parameters()}, (X,))
        observer.step(1.0, 0)
    assert "weights" not in observer.absent and "parameter_rms" in set(observer.to_pandas()["metric"])
    with normlab.observe(model, every=1, metrics=["rms"]) as observer:
        torch.func.functional_call(model, weights, (X,))
        with pytest.warns(UserWarning, match="weights are left out: the model runs on others than its own"):
            observer.step(1.0, 0)
        model(X)
        observer.step(1.0, 1)
    assert "torch.func.functional_call" in observer.absent["weights"]
    table = observer.to_pandas()
    assert {*table[table["metric"] == "parameter_rms"]["step"]} == {1} and {*table["step"]} == {0, 1}
