"""LayerStatsCallback in a stock Trainer: summed-loss gradients under accumulation, training untouched, logged where the
Trainer logs."""

import math
from types import SimpleNamespace

import pandas
import pytest
import torch
from probe_runs import train
from probe_zoo import build, near, tiny_llama, values
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from normlab.errors import NormlabError
from normlab.probes import record
from normlab.probes.callback import LayerStatsCallback, UpdateRatio
from normlab.probes.observe import LossSpikes

METRICS = ["token_l2_mean", "grad_l2_mean", "grad_l2_total"]


def by_place(table: pandas.DataFrame) -> dict:
    return table.set_index(["site", "layer", "metric", "mask"])["value"].to_dict()


def test_the_table_of_a_measured_step_is_that_of_its_whole_batch_before_the_step(tmp_path):
    callback = LayerStatsCallback(every=2, metrics=METRICS)
    seen: list[dict] = []

    model = tiny_llama()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    handle = model.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    train(model, tmp_path, [callback])
    handle.remove()
    table = callback.to_pandas()
    assert list(table.columns) == ["step", "site", "layer", "metric", "mask", "value"] and set(table["step"]) == {0, 2}
    model.load_state_dict(start)
    with record(model, METRICS) as rec:
        for kwargs in seen[:2]:
            rec.backward(model(input_ids=kwargs["input_ids"], labels=kwargs["labels"]).loss)
    assert by_place(table[(table["step"] == 0) & table["metric"].isin(METRICS)]) == near(values(rec.stats()))


def test_padding_is_what_the_caller_says_it_is(tmp_path):
    def labelled(call):
        return call.arguments["labels"] >= 0

    model, seen = tiny_llama(), []
    callback = LayerStatsCallback(every=1, metrics=["rms"], mask=labelled, update_ratio=False)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    handle = model.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    train(model, tmp_path, [callback], max_steps=1, gradient_accumulation_steps=1, per_device_train_batch_size=8)
    handle.remove()
    model.load_state_dict(start)
    (batch,) = seen
    assert (batch["labels"] < 0).any()
    with record(model, ["rms"]) as whole, record(model, ["rms"], mask=labelled) as masked, torch.no_grad():
        model(**batch)
    found = by_place(callback.to_pandas().query("metric == 'rms'"))
    assert found == near(values(masked.stats())) and found != near(values(whole.stats()))


def test_a_model_that_ignores_num_items_in_batch_is_corrected_for_accumulation(tmp_path):
    """A model without loss kwargs: the Trainer divides its mean loss by the accumulation steps."""

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("gpt2")
            for module in self.inner.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            self.loss_function, self.loss_type = self.inner.loss_function, "ForCausalLM"

        def forward(self, input_ids, labels):
            return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}

    found = []
    for steps, size in ((1, 4), (2, 2)):
        callback = LayerStatsCallback(every=1, metrics=METRICS, update_ratio=False)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        train(Plain(), tmp_path, [callback], max_steps=1, **sizes)
        found.append(by_place(callback.to_pandas().query("metric in @METRICS")))
    assert found[0] == near(found[1], 800)


class OwnLoss(Trainer):
    """Its loss is not divided by the accumulation steps, as the model takes the number of items."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


@pytest.mark.parametrize("trainer", [Trainer, OwnLoss])
def test_gradients_are_of_the_summed_loss_whatever_the_trainer_divides_it_by(trainer, tmp_path):
    found = []
    for steps, size in ((1, 4), (2, 2), (4, 1)):
        callback = LayerStatsCallback(every=1, metrics=METRICS, update_ratio=False)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        train(tiny_llama(), tmp_path, [callback], trainer=trainer, max_steps=1, **sizes)
        found.append(by_place(callback.to_pandas().query("metric in @METRICS")))
    assert found[1] == near(found[0], 800) and found[2] == near(found[0], 800)


def test_training_is_bit_for_bit_the_same_with_the_callback(tmp_path):
    weights = []
    for callbacks in ([], [LayerStatsCallback(every=1)]):
        model = tiny_llama(attention_dropout=0.1)
        train(model, tmp_path, callbacks)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_second_training_drops_the_first_ones_readings_and_a_resumed_one_keeps_those_before_it(tmp_path):
    callback = LayerStatsCallback(every=1, update_ratio=False)
    train(tiny_llama(), tmp_path, [callback], save_steps=2, save_strategy="steps")
    train(tiny_llama(), tmp_path, [callback], max_steps=1)
    assert set(callback.to_pandas()["step"]) == set(callback.explain().history["step"]) == {0}
    callback._readings.add_rows(3, ["model"], "loss_spike", [9.0])
    train(tiny_llama(), tmp_path, [callback], resume=tmp_path / "checkpoint-2")
    table = callback.to_pandas()
    assert table["step"].drop_duplicates().tolist() == [0, 2] and "loss_spike" not in set(table["metric"])


class Crash(TrainerCallback):
    """Ends the process's training after its first checkpoint."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise RuntimeError("out of power")


def test_a_training_that_resumes_in_another_process_keeps_the_steps_before_in_the_file(tmp_path):
    path, saved = tmp_path / "layers.parquet", {"save_steps": 2, "save_strategy": "steps"}
    whole = LayerStatsCallback(every=1, metrics=["rms"], path=path)
    model = tiny_llama()
    with pytest.raises(RuntimeError, match="out of power"):
        train(model, tmp_path, [whole, Crash()], **saved)
    readings = whole.to_pandas(), whole.explain().history
    whole.on_train_begin(None, SimpleNamespace(global_step=2), None)  # of the next training in this process
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    other = LayerStatsCallback(every=1, metrics=["rms"], path=path, last=tmp_path / "last.csv")
    train(tiny_llama(), tmp_path, [other], resume=tmp_path / "checkpoint-2")
    resumed = pandas.read_parquet(path)
    pandas.testing.assert_frame_equal(resumed, other.to_pandas())
    pandas.testing.assert_frame_equal(resumed.query("step < 2"), readings[0].query("step < 2"))
    assert resumed["step"].drop_duplicates().tolist() == [0, 1, 2]
    steps, others = (of.query("step < 2").reset_index(drop=True) for of in (other.explain().history, readings[1]))
    pandas.testing.assert_frame_equal(steps, others)
    assert set(pandas.read_csv(tmp_path / "last.csv")["step"]) == {0, 1, 2}


@pytest.mark.parametrize("content", ["text", "other columns"])
def test_a_file_that_is_no_table_of_a_resumed_training_is_told_before_it(content, tmp_path):
    path = tmp_path / "layers.parquet"
    if content == "text":
        path.write_text("step,site\n")
    else:
        pandas.DataFrame({"step": [0], "loss": [2.0]}).to_parquet(path)
    before, callback = path.read_bytes(), LayerStatsCallback(path=path)
    with pytest.raises(NormlabError, match="path is .*layers.parquet, which is no table of the training that resumes"):
        callback.on_train_begin(None, SimpleNamespace(global_step=2), None)
    assert path.read_bytes() == before
    callback.on_train_begin(None, SimpleNamespace(global_step=0), None)  # it is written anew


def test_what_is_absent_is_told_once_and_kept(tmp_path):
    model = tiny_llama()
    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(lambda layer, given: (2 * given[0], *given[1:]))
    callback = LayerStatsCallback(every=1, metrics=["rms"], update_ratio=False)
    with pytest.warns(UserWarning, match="stream after block 1: ") as told:
        train(model, tmp_path, [callback])
    assert sum("stream after" in str(one.message) for one in told) == 1
    assert {"stream after block 1", "stream after block 2"} <= callback.absent.keys()
    train(tiny_llama(), tmp_path, [callback], max_steps=1)
    assert callback.absent == {}


def test_update_ratio_is_the_step_over_the_weights():
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    weight = model.model.layers[0].mlp.up_proj.weight
    expected = float(0.1 * weight.grad.norm() / weight.detach().norm())
    ratio = UpdateRatio(model)
    optimizer.step()
    measured = ratio.measure()
    assert measured["model.layers.0.mlp.up_proj.weight"] == pytest.approx(expected, rel=1e-4)
    assert "model.norm.weight" not in measured


def test_update_ratio_of_a_matrix_that_was_zero_is_none_and_complex_ones_count_both_parts():
    model = torch.nn.Module()
    model.zero = torch.nn.Parameter(torch.zeros(2, 2))
    model.complex = torch.nn.Parameter(torch.full((2, 2), 3 + 4j))
    ratio = UpdateRatio(model)
    with torch.no_grad():
        model.zero += 1
        model.complex += 0.5j
    measured = ratio.measure()
    assert math.isnan(measured["zero"]) and measured["complex"] == pytest.approx(0.1)


def test_update_ratios_are_in_the_table_by_matrix(tmp_path):
    callback = LayerStatsCallback(every=1, path=tmp_path / "layers.parquet")
    train(tiny_llama(), tmp_path, [callback])
    rows = callback.to_pandas().query("metric == 'update_ratio'")
    assert set(rows["step"]) == {0, 1, 2} and (rows["value"] >= 0).all()
    assert "model.layers.0.mlp.up_proj.weight" in set(rows["site"])
    assert pandas.read_parquet(tmp_path / "layers.parquet").shape == callback.to_pandas().shape


@pytest.mark.parametrize("through", ["the tensor", "its data"])
def test_update_ratios_are_left_out_and_told_once_where_the_backward_pass_takes_the_steps(through, tmp_path):
    model = tiny_llama()

    def take_step(p):
        with torch.no_grad():
            (p.data if through == "its data" else p).add_(p.grad, alpha=-1e-2)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(take_step)
    optimizer = LayerWiseDummyOptimizer()
    optimizers = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    callback = LayerStatsCallback(every=1, metrics=["rms"])
    with pytest.warns(UserWarning, match="step 0: update ratios are left out: the weights change before") as told:
        train(model, tmp_path, [callback], optimizers=optimizers, max_grad_norm=0)
    assert sum("update ratios" in str(one.message) for one in told) == 1
    assert "update_ratio" not in set(callback.to_pandas()["metric"]) and "update_ratio" in callback.absent


def test_a_spike_is_a_loss_far_above_the_recent_ones():
    spikes = LossSpikes(window=50, least=10)
    calm = [2.0 + 0.01 * math.sin(i) for i in range(40)]
    assert max(spikes.score(loss) for loss in calm) < spikes.threshold
    assert min(spikes.score(2.5), spikes.score(math.nan)) > spikes.threshold > spikes.score(2.0)


def test_bad_arguments_are_refused():
    with pytest.raises(NormlabError, match="every is 0"):
        LayerStatsCallback(every=0)
    with pytest.raises(NormlabError, match="unknown metric"):
        LayerStatsCallback(metrics=["loss"])
    for name in ("path", "last"):
        with pytest.raises(NormlabError, match="make the folder absent first"):
            LayerStatsCallback(**{name: "absent/layers.parquet"})
