"""`observe` in other people's loops, and `explain`: which layer left its past first."""

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable

import numpy as np
import pandas
import pytest
import torch
from probe_toys import PreLN, Stack, X
from probe_zoo import build, tiny_llama, token_batch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper, checkpoint_wrapper
from training_helpers import FORKS, observe_for_ever, until

import normlab
from normlab.errors import NormlabError
from normlab.probes.observe import DEPARTS, JUMPS, Readings

KEYS = ["step", "site", "layer", "metric", "mask"]


def test_only_every_so_many_steps_are_measured_and_hooks_are_removed():
    model = tiny_llama()
    with normlab.observe(model, every=3, metrics=["rms"], start=6) as observer:
        for step in range(6, 13):
            observer.step(model(**token_batch()).loss.item(), step)
    assert observer.to_pandas()["step"].unique().tolist() == [6, 9, 12]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("metrics", [["rms"], ["rms", "grad_l2_mean"]])
def test_an_evaluation_between_two_steps_is_not_measured(metrics):
    tables = []
    for evaluates in (False, True):
        model, other = tiny_llama(), {"input_ids": token_batch()["input_ids"].flip(1)}
        with normlab.observe(model, every=1, metrics=metrics) as observer:
            for step in range(3):
                loss = model(**token_batch()).loss
                loss.backward()
                observer.step(loss, step)
                if evaluates:
                    with torch.no_grad():
                        model.eval()(**other)
                    model.train()
        tables.append(observer.to_pandas())
    pandas.testing.assert_frame_equal(*tables)


def reading(step: int, sizes: dict[int, float], metric: str = "rms", site: str = "block_out") -> pandas.DataFrame:
    rows = [(step, site, layer, metric, "all", value) for layer, value in sizes.items()]
    return pandas.DataFrame(rows, columns=[*KEYS, "value"])


def grown(factors: Callable[[int, int], float], count: int = 50, **where: str) -> Readings:
    """Readings of four layers that grow and vary from batch to batch, times a factor of (reading, layer)."""
    noise, readings = np.random.default_rng(0), Readings()
    for step in range(count):
        batch = noise.normal(1, 0.1) * (1 + step / 200)
        sizes = {layer: layer * batch * noise.normal(1, 0.01) * factors(step, layer) for layer in range(1, 5)}
        readings.add(reading(step, sizes, **where))
    return readings


def test_the_layer_that_changes_the_stream_is_named_and_not_those_that_pass_it_on():
    readings = grown(lambda step, layer: 1.0, 20)
    assert readings.explain().verdict.startswith("no site left its past in 20 readings")
    readings.add(reading(20, {1: 1.1, 2: 2.2, 3: 9.9, 4: 13.2}))
    explanation = readings.explain()
    assert explanation.verdict.startswith("layer 3, ") and "at step 20" in explanation.verdict
    assert explanation.table["layer"].tolist() == [3] and explanation.table["z"].abs().item() > JUMPS
    assert explanation.plot("rms").data[0].type == "heatmap"


WEIGHTS = {"metric": "parameter_rms", "site": "mlp.up_proj.weight"}


@pytest.mark.parametrize(
    ("grows", "where"),
    [({2, 3, 4}, {}), ({1, 2}, {"metric": "grad_l2_mean", "site": "block_in_grad"}), ({2}, WEIGHTS)],
)
def test_slow_growth_is_named_by_its_layer_in_either_direction(grows, where):
    explanation = grown(lambda step, layer: 1.2 ** max(0, step - 30) if layer in grows else 1.0, **where).explain()
    assert explanation.verdict.startswith("layer 2, ")
    assert 31 <= explanation.table["step"][0] <= 36 and explanation.table["z"].abs().min() > DEPARTS


@pytest.mark.parametrize("where", [{}, WEIGHTS])
def test_what_all_layers_do_alike_is_no_departure(where):
    def schedule(step: int, layer: int) -> float:  # a warm-up, its end, and one odd batch
        return (1.1 ** min(step, 20)) * (3.0 if step == 40 else 1.0)

    readings = grown(schedule, **where)
    assert set(readings.explain().table["layer"]) <= {1}  # the first place has none before it
    assert readings.explain(41).verdict.startswith("no site left its past")


def test_a_departure_is_found_after_an_earlier_one_has_passed():
    readings = grown(lambda step, layer: 5.0 if step == 20 and layer > 1 else 1.0)
    readings.add(reading(50, {1: 1.1, 2: 2.2, 3: 3.3, 4: 44.0}))
    assert readings.explain(since=40).verdict.startswith("layer 4, ")
    assert readings.explain().verdict.startswith("layer 2, ")


def test_a_reading_is_judged_by_eight_comparisons_before_it_and_each_needs_four_readings():
    for step, first in ((11, ""), (12, "layer 3, ")):
        readings = grown(lambda at, layer, step=step: 9.0 if at == step and layer > 2 else 1.0, step + 1)
        assert readings.explain().verdict.startswith(first or "no site left its past")


def test_what_is_not_defined_at_first_has_not_left_its_past_and_what_breaks_has():
    readings = Readings()
    for step in range(20):
        readings.add(reading(step, {1: math.nan if step == 0 else 0.5, 2: 1.0}, "update_cosine", "attn"))
    assert readings.explain().verdict.startswith("no site left its past")
    readings.add(reading(20, {1: 0.5, 2: math.nan}, "update_cosine", "attn"))
    assert readings.explain().verdict.startswith("layer 2, ")
    broken = Readings()
    broken.add(reading(0, {1: 1.0, 2: math.nan}))
    assert "layer 2, " in broken.explain().verdict and "is not finite" in broken.explain().verdict


def test_a_change_within_a_block_is_named_where_a_place_inside_it_was_not_read():
    readings = grown(lambda step, layer: 1.0, 20)
    readings.add(reading(20, {2: 2.2}, site="mlp_norm_in"))
    readings.add(reading(21, {1: 1.1, 2: 2.2, 3: 9.9, 4: 13.2}))
    assert readings.explain().table[["layer", "site"]].values.tolist() == [[3, "block_out"]]


def test_weights_that_grow_in_one_block_are_named_before_they_harm():
    model, batch = tiny_llama(), token_batch()
    weight = model.model.layers[2].mlp.down_proj.weight
    with torch.no_grad(), normlab.observe(model, every=1, metrics=["rms"]) as observer:
        for step in range(18):
            weight.mul_(1.0 if step < 15 else 1.08)
            model(**batch)
            observer.step(2.0, step)
    (first, *_) = observer.explain().table.itertuples()
    assert (first.step, first.site, first.layer) == (17, "mlp.down_proj.weight", 3)
    assert first.value == pytest.approx(weight.square().mean().sqrt().item())


def test_weights_on_the_meta_device_are_read_where_they_are_kept_or_left_out_with_a_warning():
    accelerate = pytest.importorskip("accelerate")

    def weights(model):
        with torch.no_grad(), normlab.observe(model, every=1, metrics=["rms"]) as observer:
            model(**token_batch())
            observer.step(2.0, 0)
        table = observer.to_pandas()
        return table[table["metric"] == "parameter_rms"]

    whole, offloaded, without = tiny_llama(), tiny_llama(), tiny_llama()
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert weights(offloaded).equals(weights(whole))
    without.model.layers[1].register_parameter("spare", torch.nn.Parameter(torch.empty(4, device="meta")))
    with pytest.warns(UserWarning, match="step 0: weights are left out: model.layers.1.spare is on the meta device"):
        assert weights(without).equals(weights(whole))


class Sizes(torch.nn.Module):
    """A block of parts with numbers in their names: alike and not."""

    def __init__(self):
        super().__init__()
        width, nn = X.shape[-1], torch.nn
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 5), nn.Linear(5, width)) for _ in range(3))
        self.pair = nn.ModuleList([nn.Linear(width, 5), nn.Linear(5, width)])
        self.kinds = nn.ModuleList([nn.LayerNorm(width), nn.RMSNorm(width)])
        self.one = nn.ModuleList([nn.RMSNorm(width)])

    def forward(self, x):
        x = x + self.mlp(x) + self.pair[1](self.pair[0](x)) + sum(expert(x) for expert in self.experts)
        return x + sum(norm(x) for norm in (*self.kinds, *self.one))


def test_only_modules_that_are_alike_share_a_row_of_weights():
    def all_tokens(call):
        return torch.ones(X.shape[:2])

    model = Stack(Sizes, Sizes)
    with torch.no_grad(), normlab.observe(model, every=1, metrics=["rms"], mask=all_tokens) as observer:
        for number, p in enumerate(model.parameters(), 1):
            p.copy_(number * p.sign() + 0.1)
        model(X)
        observer.step(1.0, 0)
    table = observer.to_pandas().query("metric == 'parameter_rms' and layer == 2").set_index("site")["value"]
    sizes = {name: float(p.detach().square().mean().sqrt()) for name, p in model.layers[1].named_parameters()}
    expected = {name: size for name, size in sizes.items() if "experts" not in name}
    for part in ("0.weight", "0.bias", "1.weight", "1.bias"):
        expected[f"experts.*.{part}"] = sum(sizes[f"experts.{expert}.{part}"] for expert in range(3)) / 3
    assert table.to_dict() == pytest.approx(expected, rel=1e-5) and len(expected) == 16


def weights_of(model) -> pandas.DataFrame:
    """`parameter_rms` after a step of training."""
    with normlab.observe(model, every=1, metrics=["rms"], mask=lambda call: torch.ones(X.shape[:2])) as observer:
        model(X).sum().backward()
        observer.step(1.0, 0)
    assert "weights" not in observer.absent
    return observer.to_pandas().query("metric == 'parameter_rms'").reset_index(drop=True)


@pytest.mark.parametrize(("wrap", "part"), [(checkpoint_wrapper, "blocks"), (OffloadWrapper, "experts")])
def test_wrappers_that_rename_parameters_change_no_weight(wrap, part):
    plain, wrapped = Stack(Sizes, Sizes), Stack(Sizes, Sizes)
    wrapped.load_state_dict(plain.state_dict())
    for modules in [wrapped.layers] if part == "blocks" else [block.experts for block in wrapped.layers]:
        for number, module in enumerate(modules):
            modules[number] = wrap(module)
    pandas.testing.assert_frame_equal(weights_of(wrapped), weights_of(plain))


def test_a_weight_that_is_no_number_shows_in_the_mean_of_modules_alike():
    model = Stack(Sizes, Sizes)
    torch.nn.init.constant_(model.layers[1].experts[2][0].bias, math.nan)
    table = weights_of(model)
    undefined = table[table["value"].isna()]
    assert undefined[["site", "layer"]].values.tolist() == [["experts.*.0.bias", 2]]


def test_weights_in_float8_are_read():
    model = Stack(Sizes, Sizes)
    code = torch.full((4,), 2.0).to(torch.float8_e4m3fn)
    model.layers[1].register_parameter("code", torch.nn.Parameter(code, requires_grad=False))
    table = weights_of(model)
    assert table[table["site"] == "code"][["layer", "value"]].values.tolist() == [[2, 2.0]]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="of newer PyTorch")
def test_a_weight_of_which_there_is_no_norm_is_left_out_with_a_warning():
    model = Stack(Sizes, Sizes)
    code = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    model.layers[1].register_parameter("code", torch.nn.Parameter(code, requires_grad=False))
    with torch.no_grad(), normlab.observe(model, every=1, metrics=["rms"]) as observer:
        model(X)
        with pytest.warns(UserWarning, match="step 0: weights are left out: layers.1.code has no norm"):
            observer.step(1.0, 0)
    table = observer.to_pandas().query("metric == 'parameter_rms'")
    assert len(table) == 32 and "code" not in set(table["site"])


class Complex(torch.nn.Module):
    """A block with a complex matrix, of which both parts are trained."""

    def __init__(self):
        super().__init__()
        width = X.shape[-1]
        self.norm = torch.nn.RMSNorm(width)
        self.matrix = torch.nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / 4)

    def forward(self, x):
        return x + (self.norm(x).to(torch.complex64) @ self.matrix @ self.matrix).real


def test_a_complex_number_is_two_numbers():
    model = Stack(Complex, Complex)
    block = model.layers[1]
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    given = {"metrics": ["rms"], "optimizer": adam, "mask": lambda call: torch.ones(2, 10)}
    with normlab.observe(model, every=1, **given) as observer:
        model(X).square().sum().backward()
        before = [p.detach().clone() for p in block.parameters()]
        adam.step()
        observer.step(1.0, 0)
    count = sum(p.numel() * (2 if p.is_complex() else 1) for p in before)
    moved = sum(float((p.detach() - w).abs().square().sum()) for p, w in zip(block.parameters(), before, strict=True))
    size = sum(float(p.detach().abs().square().sum()) for p in block.parameters())
    gradient = (sum(float(p.grad.abs().square().sum()) for p in block.parameters()) / count) ** 0.5
    table = observer.to_pandas().query("layer == 2").set_index(["metric", "site"])["value"]
    expected = {"update_ratio": (moved / size) ** 0.5, "first_moment": gradient, "second_moment": gradient}
    assert {metric: table[metric, "parameters"] for metric in expected} == pytest.approx(expected, rel=1e-4)
    parts = torch.view_as_real(block.matrix.detach())
    assert table["parameter_rms", "matrix"] == pytest.approx(float(parts.square().mean().sqrt()), rel=1e-5)


def test_values_that_are_not_finite_leave_at_once_and_training_goes_on():
    model = tiny_llama()
    with normlab.observe(model, every=1) as observer:
        for step in range(3):
            if step == 2:
                torch.nn.init.constant_(model.model.layers[1].mlp.down_proj.weight, float("nan"))
            loss = model(**token_batch()).loss
            loss.backward()
            observer.step(loss.item(), step)
    assert observer.spike is not None
    assert observer.spike.verdict.startswith("layer 2, block output left") and "not finite" in observer.spike.verdict


def test_memory_is_bounded_and_the_file_stays_when_the_process_is_killed(tmp_path):
    readings = Readings(keep=5, path=tmp_path / "last.csv")
    for step in range(12):
        readings.add(reading(step, {1: 1.0, 2: 2.0}))
    assert pandas.read_csv(tmp_path / "last.csv")["step"].unique().tolist() == [7, 8, 9, 10, 11]
    assert readings.to_pandas()["step"].nunique() == 12
    left = tmp_path / "left.csv"
    process = FORKS.Process(target=observe_for_ever, args=(left,), daemon=True)
    process.start()
    until(lambda: left.exists() or process.exitcode is not None, 120)
    process.kill()
    process.join()
    assert {"block_out"} <= set(pandas.read_csv(left)["site"])


def test_a_spike_of_the_loss_is_explained_at_once():
    model, batch = tiny_llama(), token_batch()
    with normlab.observe(model, every=1, metrics=["rms"]) as observer:
        for step in range(30):
            model(**batch)
            observer.step(2.0 + 0.01 * (step % 2), step)
        assert observer.spike is None
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1000)
        model(**batch)
        observer.step(9.0, 30)
    assert observer.spike is not None and observer.spike.verdict.startswith("layer 2, ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 1.5}, "every is 1.5"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"metrics": ["size"]}, "size"),
    ],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(NormlabError, match=words):
        normlab.observe(tiny_llama(), **options)


def step_of(observer, model, step, **batch):
    loss = model(**(batch or token_batch())).loss
    loss.backward()
    observer.step(loss, step)


def test_a_model_is_copied_and_saved_while_it_is_observed(tmp_path):
    model = tiny_llama()
    with normlab.observe(model, every=1) as observer:
        step_of(observer, model, 0)
        other = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        other(**token_batch()).loss.backward()
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(loaded(**token_batch()).logits, other(**token_batch()).logits)
        step_of(observer, model, 1)
    reference = tiny_llama()
    with normlab.observe(reference, every=1) as alone:
        for step in range(2):
            step_of(alone, reference, step)
    pandas.testing.assert_frame_equal(observer.to_pandas(), alone.to_pandas())


def test_a_step_without_a_backward_is_left_out_with_a_warning_once_one_was_measured():
    model = tiny_llama()
    observer = normlab.observe(model, every=1)
    with pytest.raises(NormlabError, match="no backward pass ran"):
        observer.step(model(**token_batch()).loss, 0)
    with normlab.observe(model, every=1) as observer:
        step_of(observer, model, 0)
        with pytest.warns(UserWarning, match="step 1 was not measured: grad") as told:
            observer.step(model(**token_batch()).loss, 1)
        assert told[0].filename == __file__  # at the line of the loop
        model(input_ids=token_batch()["input_ids"]).logits.sum().backward()  # a loss of the loop's own: left out
        step_of(observer, model, 2)
    assert observer.to_pandas()["step"].unique().tolist() == [0, 2]


def test_an_evaluation_before_the_first_step_is_not_measured():
    tables = []
    for evaluates in (False, True):
        model = tiny_llama()
        with normlab.observe(model, every=1, metrics=["rms"]) as observer:
            if evaluates:
                with torch.no_grad():
                    model(input_ids=token_batch()["input_ids"].flip(1))
            step_of(observer, model, 0)
        tables.append(observer.to_pandas())
    pandas.testing.assert_frame_equal(*tables)


def test_nothing_read_cannot_be_drawn_and_a_file_needs_its_folder(tmp_path):
    with normlab.observe(tiny_llama()) as observer, pytest.raises(NormlabError, match="nothing was read yet"):
        observer.explain().plot()
    with pytest.raises(NormlabError, match="make the folder .*none first"):
        normlab.observe(tiny_llama(), path=tmp_path / "none" / "last.csv")


def test_training_goes_on_where_a_loss_does_not_tell_how_it_averages():
    """A head of zeros: every reading of the labels fits alike. A loop's own loss: there are no labels."""
    head = tiny_llama()
    torch.nn.init.zeros_(head.lm_head.weight)
    ids = token_batch()["input_ids"]
    for model, inputs, why in (
        (head, token_batch(), "do not tell"),
        (tiny_llama(), {"input_ids": ids}, "no countable"),
    ):
        with normlab.observe(model, every=1, metrics=["rms", "grad_l2_mean"]) as observer:
            for step in range(2):
                out = model(**inputs)
                loss = out.loss if out.loss is not None else out.logits.square().mean()
                loss.backward()
                if step == 0:
                    with pytest.warns(UserWarning, match=f"step 0: gradients of a forward pass are left out.*{why}"):
                        observer.step(loss, step)
                else:
                    observer.step(loss, step)  # it is said once
        table = observer.to_pandas()
        assert set(table["metric"]) == {"rms", "parameter_rms"} and set(table["step"]) == {0, 1}


def test_a_micro_batch_without_labels_changes_no_gradient():
    """The Trainer divides by `num_items_in_batch`, so its loss is 0."""
    tables = []
    for parts in ([0], [0, 1]):
        model = tiny_llama()
        with normlab.observe(model, every=1, metrics=["grad_l2_total"]) as observer:
            for part in parts:
                batch = token_batch()
                batch["labels"] = torch.full_like(batch["labels"], -100) if part else batch["labels"]
                loss = model(**batch, num_items_in_batch=40).loss
                loss.backward()
            observer.step(loss, 0)
        tables.append(observer.to_pandas().query("metric == 'grad_l2_total'"))
    pandas.testing.assert_frame_equal(*tables)


def test_a_compiled_step_keeps_its_graph_when_the_model_inside_is_observed():
    graphs: list[int] = []

    def backend(graph, inputs):
        graphs[-1] += 1
        return graph.forward

    model = tiny_llama(num_hidden_layers=1)
    compiled = torch.compile(model, backend=backend)
    with normlab.observe(model, every=2, metrics=["rms"]) as observer:
        for step in range(4):
            graphs.append(0)
            observer.step(compiled(**token_batch()).loss.item(), step)
    assert graphs == [0, 1, 0, 0] and set(observer.to_pandas()["step"]) == {0, 2}


# --- what is absent --------------------------------------------------------------------------------------------------


class Padded(torch.nn.Module):
    """Takes padding under a name of its own, and leaves it to the labels."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, pad_mask, labels):
        return self.inner(input_ids, labels=labels)


def padded():
    batch = token_batch()
    return Padded(tiny_llama()), {"pad_mask": batch.pop("attention_mask"), **batch}


def changed_between_blocks():
    model = tiny_llama()
    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(lambda layer, given: (2 * given[0], *given[1:]))
    return model, token_batch()


def without_tokens():
    return Stack(PreLN, PreLN), {"x": X}


@pytest.mark.parametrize(
    ("make", "places", "words"),
    [
        (padded, {"padding by pad_mask"}, "padding by pad_mask: all tokens count.*give mask='pad_mask'"),
        (
            changed_between_blocks,
            {"stream after block 1", "stream after block 2"},
            "stream after block 1: model.layers.1 reads another tensor than the one returned",
        ),
        (without_tokens, {"mask no_first"}, "mask no_first: whether the blocks hold .* cannot be told"),
    ],
)
def test_numbers_that_are_not_what_their_names_say_are_told_once_and_kept(make, places, words):
    model, batch = make()
    with normlab.record(model, ["rms"]) as rec:
        model(**batch)
    expected = rec.stats().manifest["absent"]
    assert places <= expected.keys()
    with normlab.observe(model, every=1, metrics=["rms"]) as observer:
        assert observer.absent == {}
        model(**batch)
        with pytest.warns(UserWarning) as told:
            observer.step(1.0, 0)
        model(**batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            observer.step(1.0, 1)
    assert [re.match(f"step 0: {words}", str(one.message)) is not None for one in told] == [True]
    assert told[0].filename == __file__ and observer.absent == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_ordinary_models_are_trained_without_a_warning(name):
    model, mask = build(name).train(), token_batch()["attention_mask"]
    with warnings.catch_warnings(), normlab.observe(model, every=1) as observer:
        warnings.simplefilter("error")
        step_of(observer, model, 0)
        step_of(observer, model, 1, **{**token_batch(), "attention_mask": torch.ones_like(mask)})
        step_of(observer, model, 2, **{n: x for n, x in token_batch().items() if n != "attention_mask"})
    assert observer.absent == {}


def test_what_is_missing_is_kept_without_a_warning_and_left_out_weights_too():
    model = tiny_llama()
    model.model.layers[1].register_parameter("spare", torch.nn.Parameter(torch.empty(4, device="meta")))
    model.model.layers[2].register_forward_hook(lambda layer, given, out: out * given[0].sigmoid())
    with normlab.record(model, ["update_cosine"]) as rec, torch.no_grad():
        model(**token_batch())
    missing = rec.stats().manifest["absent"]
    with normlab.observe(model, every=1, metrics=["update_cosine"]) as observer, torch.no_grad():
        model(**token_batch())
        with pytest.warns(UserWarning, match="weights are left out") as told:
            observer.step(1.0, 0)
    weights = observer.absent.pop("weights")
    assert len(told) == 1 and "mlp 3" in missing and "meta device" in weights
    assert observer.absent == missing | {"weights": weights}


def test_forward_passes_that_nobody_differentiates_are_told_where_others_are():
    model = tiny_llama()
    with normlab.observe(model, every=1) as observer:
        model(**token_batch())  # a batch that the loop skips
        with pytest.warns(UserWarning, match="step 0: tokens of forward passes without a backward pass: 1 of 2 had"):
            step_of(observer, model, 0)
        model.requires_grad_(False)
        with torch.no_grad():
            model(**token_batch())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step_of(observer, model, 1)
    assert [name for name in observer.absent if name.startswith("tokens")]


def test_readings_that_are_forgotten_take_what_was_absent_with_them():
    readings = Readings()
    for step, place in enumerate(["mlp 1", "mlp 2"]):
        readings.add_absent(step, {"mlp 1": f"at {step}", place: f"at {step}"})
    assert readings.absent == {"mlp 1": "at 0", "mlp 2": "at 1"}
    readings.forget(1)
    assert readings.absent == {"mlp 1": "at 0"}


@pytest.mark.parametrize(("every", "back", "kept"), [(1, 3, [0, 1, 2, 3]), (2, 3, [0, 2]), (1, 5, [0, 1, 2, 3, 4, 5])])
def test_a_training_that_goes_back_drops_the_branch_that_it_leaves(every, back, kept):
    model, batch = tiny_llama(), token_batch()
    with torch.no_grad(), normlab.observe(model, every=every, metrics=["rms"]) as observer:
        for step in range(6):
            model(**batch)
            observer.step(2.0, step)
        observer.readings.add_absent(4, {"weights": "as of step 4"})
        observer.begin(back)
        model.model.layers[0].mlp.down_proj.weight.mul_(2.0)
        model(**batch)
        with pytest.warns(UserWarning, match=f"step {back} follows step 5: readings from step {back} on") as told:
            observer.step(2.0, back)
    table = observer.to_pandas()
    assert table["step"].drop_duplicates().tolist() == kept and not table.duplicated(KEYS).any()
    assert set(observer.explain().history["step"]) == set(kept) and told[0].filename == __file__
    assert observer.absent.keys() == ({"weights"} if back == 5 else set())


# --- Adam's updates --------------------------------------------------------------------------------------------------

ADAMS = {
    "Adam": (torch.optim.Adam, {}),
    "Adam with decay": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW with decay": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "a tensor's rate": (torch.optim.Adam, {"lr": torch.tensor(1e-2), "foreach": False}),
}
if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters:  # from 2.7 on
    ADAMS["decoupled"] = torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}


@pytest.mark.parametrize("kind", ADAMS)
def test_an_update_is_the_step_that_adam_takes(kind):
    """The step itself, of one group of parameters with a rate of its own and one frozen; decoupled decay taken off."""
    make, options = ADAMS[kind]
    model = tiny_llama()
    block = model.model.layers[1]
    block.mlp.up_proj.requires_grad_(False)
    gains = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n and p.requires_grad]
    groups = [{"params": gains, "lr": 1e-1, "betas": (0.5, 0.6)}, {"params": rest}]
    optimizer = make(groups, **{"lr": 1e-2, **options})
    observer = normlab.observe(model, every=1, metrics=["rms"], optimizer=optimizer)
    for step in range(4):
        model(**token_batch()).loss.backward()
        before = {p: p.detach().double() for p in block.parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
        observer.step(1.0, step)
    is_decoupled = isinstance(optimizer, torch.optim.AdamW)  # else it is in the gradient
    apart = options.get("decoupled_weight_decay", is_decoupled)
    kept = {p: 1 - apart * float(g["lr"]) * g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    moved = sum(float((p.detach() - w * kept[p]).square().sum()) for p, w in before.items())
    size = sum(float(p.detach().double().square().sum()) for p in before)
    table = observer.to_pandas().set_index(["metric", "layer", "step"])["value"]
    assert table["update_ratio", 2, 3] == pytest.approx((moved / size) ** 0.5, rel=1e-4)
    assert len(table["update_ratio"]) == 12


def plain(optimizer, scaler):
    return optimizer, optimizer.step


def scaled(optimizer, scaler):
    def step():
        scaler.step(optimizer)
        scaler.update()

    return optimizer, step


def accelerated(optimizer, scaler):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    accelerator.scaler = scaler
    prepared = accelerator.prepare_optimizer(optimizer)
    return prepared, prepared.step


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("order", ["scheduler first", "observer first"])
@pytest.mark.parametrize("loop", [plain, scaled, accelerated])
def test_an_update_is_of_the_rate_with_which_the_step_was_taken(loop, order, rate):
    """A warm-up from 0 and a decay to 0 in two groups, a momentum that changes, and a step that a scaler skips."""
    model = tiny_llama()
    block = model.model.layers[1]
    gains = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": gains, "lr": rate * 10, "eps": 1e-3}, {"params": rest, "lr": rate * 1}]
    adam = torch.optim.Adam(groups, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, [lambda step: step / 4, lambda step: 1 - step / 4])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer, take_step = loop(adam, scaler)

    def schedule(step: int) -> None:
        scheduler.step()
        for group in adam.param_groups:
            group["betas"] = (0.9 - 0.1 * step, 0.999)

    expected = []
    with normlab.observe(model, every=1, metrics=["rms"], optimizer=optimizer) as observer:
        for step in range(5):
            loss = model(**token_batch()).loss
            (loss if loop is plain else scaler.scale(loss)).backward()
            if loop is not plain and step == 2:
                rest[0].grad[0, 0] = math.inf
            before = [p.detach().double() for p in block.parameters()]
            take_step()
            optimizer.zero_grad()
            now = [p.detach().double() for p in block.parameters()]
            moved = sum(float((p - w).square().sum()) for p, w in zip(now, before, strict=True))
            expected.append((moved / sum(float(p.square().sum()) for p in now)) ** 0.5)
            if order == "scheduler first":
                schedule(step)
            observer.step(loss, step)
            if order == "observer first":
                schedule(step)
    found = observer.to_pandas().query("metric == 'update_ratio' and layer == 2")["value"].tolist()
    assert found == pytest.approx(expected, rel=2e-4, abs=0)
    assert min(expected[:2]) > 0 and (expected[2] == 0) == (loop is not plain)


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "between two measured steps"])
def test_the_optimizer_is_left_as_it_was(closes):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    observer = normlab.observe(model, every=2, metrics=["rms"], optimizer=optimizer)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    weights = [*model.model.layers.parameters()]
    assert all(hooks) and all(weight._post_accumulate_grad_hooks for weight in weights)
    model(**token_batch()).loss.backward()
    optimizer.step()
    if closes:
        observer.close()
    else:
        observer.step(1.0, 0)
    assert not any(hooks) and not any(weight._post_accumulate_grad_hooks for weight in weights)


def test_a_parameter_on_which_no_step_was_taken_has_no_update():
    model = tiny_llama()
    block = model.model.layers[0]
    optimizer = torch.optim.Adam(model.parameters())
    observer = normlab.observe(model, every=1, metrics=["rms"], optimizer=optimizer)
    for step in range(2):
        block.mlp.requires_grad_(step == 0)
        model(**token_batch()).loss.backward()
        before = [p.detach().clone() for p in block.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        observer.step(1.0, step)
    moved = sum((p.detach() - w).square().sum() for p, w in zip(block.parameters(), before, strict=True))
    size = sum(p.detach().square().sum() for p in block.parameters())
    table = observer.to_pandas().set_index(["metric", "layer", "step"])["value"]
    assert table["update_ratio", 1, 1] == pytest.approx(float((moved / size).sqrt()), rel=1e-4)


def updates_of(prepare, steps: int = 4, of: int = 2) -> tuple[list, list, dict]:
    """`update_ratio` of a block, what it moved in each step, and `absent`; `prepare(step, model, adam)` before each."""
    model = tiny_llama()
    block = model.model.layers[of - 1]
    adam = torch.optim.Adam([{"params": [*layer.parameters()]} for layer in model.model.layers], lr=1e-2)
    expected = []
    with normlab.observe(model, every=1, metrics=["rms"], optimizer=adam) as observer:
        for step in range(steps):
            prepare(step, model, adam)
            model(**token_batch()).loss.backward()
            before = [p.detach().clone() for p in block.parameters()]
            adam.step()
            model.zero_grad()
            observer.step(1.0, step)
            moved = sum((p.detach() - w).square().sum() for p, w in zip(block.parameters(), before, strict=True))
            expected.append(float((moved / sum(p.detach().square().sum() for p in block.parameters())).sqrt()))
    rows = observer.to_pandas().query("metric == 'update_ratio' and layer == @of")
    return rows["value"].tolist(), expected, observer.absent


@pytest.mark.parametrize("how", ["cleared", "rolled back"])
def test_an_update_is_the_step_also_where_the_state_was_another_before_it(how):
    kept = []

    def prepare(step, model, adam):
        if step == 1:
            kept.append(copy.deepcopy(adam.state_dict()))
        elif step == 3 and how == "cleared":
            adam.state.clear()
        elif step == 3:
            adam.load_state_dict(kept[0])

    found, expected, absent = updates_of(prepare)
    assert found == pytest.approx(expected, rel=1e-4) and len(found) == 4 and min(found) > 0 and not absent


@pytest.mark.parametrize("of", [1, 2])
def test_a_group_that_leaves_the_optimizer_leaves_its_block_out_alone(of):
    def prepare(step, model, adam):
        if step == 2:
            adam.param_groups.pop(0)

    with pytest.warns(UserWarning, match="updates are left out: the optimizer has 0 of the .* numbers of block 1 that"):
        found, expected, absent = updates_of(prepare, of=of)
    expected = expected[: 2 if of == 1 else 4]
    assert found == pytest.approx(expected, rel=1e-4) and "in none of its groups" in absent["updates"]


@pytest.mark.parametrize("order", ["its step first", "the other's first"])
def test_updates_of_a_block_that_two_optimizers_train_are_left_out_and_told_once(order):
    model = tiny_llama()
    layers = model.model.layers
    gains, matrices = ([p for p in layers.parameters() if (p.ndim == 2) is wide] for wide in (False, True))
    adam, other = torch.optim.AdamW([*gains, *model.lm_head.parameters()]), torch.optim.SGD(matrices, lr=1e-2)
    with normlab.observe(model, every=1, metrics=["rms"], optimizer=adam) as observer:
        for step in range(3):
            layers.requires_grad_(step < 2)
            for gain in gains:
                gain.requires_grad_(True)
            model(**token_batch()).loss.backward()
            for one in (adam, other) if order == "its step first" else (other, adam):
                one.step()
                one.zero_grad()
            if step == 0:
                with pytest.warns(UserWarning) as told:
                    observer.step(1.0, step)
            else:
                observer.step(1.0, step)
    (warning,) = told
    held, others = (sum(p.numel() for p in part if p in {*layers[0].parameters()}) for part in (gains, matrices))
    words = f"the optimizer has {held:,} of the {held + others:,} numbers of block 1 that are trained"
    assert f"step 0: updates are left out: {words}" in str(warning.message) and words in observer.absent["updates"]
    rows = observer.to_pandas().query("metric in ['update_ratio', 'first_moment', 'second_moment']")
    assert set(rows["step"]) == {2} and len(rows) == 9  # of the matrices being frozen


def test_moments_are_those_of_the_gradients():
    """With one gradient at every step the corrected moments are it, and its size."""
    model = tiny_llama()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    observer = normlab.observe(model, every=1, metrics=["rms"], optimizer=optimizer)
    for step in range(3):
        model(**token_batch()).loss.backward()
        optimizer.step()
        sizes = [p.grad.square().sum() for p in model.model.layers[0].parameters()]
        count = sum(p.numel() for p in model.model.layers[0].parameters())
        optimizer.zero_grad()
        observer.step(1.0, step)
    table = observer.to_pandas().set_index(["metric", "layer", "step"])["value"]
    size = float((sum(sizes) / count).sqrt())
    for metric, value in (("first_moment", size), ("second_moment", size), ("update_ratio", 0)):
        assert table[metric, 1, 2] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda model: torch.optim.SGD(model.parameters()), "SGD is neither Adam nor AdamW"),
        (lambda model: torch.optim.NAdam(model.parameters()), "NAdam is neither Adam nor AdamW"),
        (lambda model: torch.optim.Adam(model.parameters()), "the optimizer has taken no step"),
    ],
)
def test_an_optimizer_without_moments_is_a_reason_told_once(make, reason):
    model = tiny_llama()
    with normlab.observe(model, every=1, metrics=["rms"], optimizer=make(model)) as observer:
        model(**token_batch())
        with pytest.warns(UserWarning, match=f"step 0: updates are left out: {reason}"):
            observer.step(1.0, 0)
        model(**token_batch())
        observer.step(1.0, 1)
    assert set(observer.to_pandas()["metric"]) == {"rms", "parameter_rms"}


@pytest.mark.parametrize("leaves", [True, False], ids=["a site left", "none left"])
def test_updates_are_named_besides_and_do_not_decide(leaves):
    sizes = grown(lambda step, layer: 3.0 if leaves and layer == 3 and step >= 40 else 1.0)
    both = Readings()
    for step, table in sizes.to_pandas().groupby("step"):
        moved = {layer: 1e-3 * (1 + 0.01 * ((7 * step + layer) % 5)) for layer in range(1, 5)}
        moved[2] *= 5.0 if step >= 30 else 1.0
        both.add(pandas.concat([table, reading(step, moved, "update_ratio", "parameters")]))
    alone, explanation = sizes.explain(), both.explain()
    clause = "; of Adam's updates those of layer 2 did first, at step 30 (update_ratio: +"
    assert explanation.verdict.startswith(alone.verdict + clause)
    assert ("left its past first" in alone.verdict) is leaves
    columns = ["metric", "layer"]
    named = [*alone.table[columns].itertuples(index=False, name=None), ("update_ratio", 2)]
    assert [*explanation.table[columns].itertuples(index=False, name=None)] == named
