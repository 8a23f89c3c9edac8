"""Numerators and denominators of `normlab bench` and of the benchmark of Ray workers."""

import functools
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_helpers import tiny, write_text

from benchmarks import clusters, timing
from benchmarks import training as bench
from normlab.models import NormlabForCausalLM
from normlab.training.config import TrainConfig
from normlab.training.distributed import accelerator_for
from normlab.training.loop import Training
from normlab.training.text.corpus import corpus_of


def test_operations_of_a_step_are_those_that_pytorch_counts():
    config = tiny(Path("no.txt"), depth=3)
    model = NormlabForCausalLM(config.model_config(300, 0))
    ids = torch.randint(300, (config.batch_size, config.block_length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    attention = 12 * config.depth * config.width * config.block_length * config.tokens_per_step  # not counted on a CPU
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == bench.step_flops(model, config) - attention


def test_ratios_are_of_interleaved_rounds():
    order: list[str] = []

    def side(name: str, seconds: float) -> Any:
        return lambda: order.append(name) or seconds

    times = timing.interleaved({"a": side("a", 3.0), "b": side("b", 2.0)}, 3)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"] and times == {"a": [3.0] * 3, "b": [2.0] * 3}
    assert timing.ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0]) == (2.0, 1.0, 9.0)


def test_the_bare_loop_trains_exactly_as_the_trainer_does(tmp_path):
    """Else the bench would compare the speed of two different things."""
    config = tiny(
        write_text(tmp_path / "text.txt"), probe_every=0, eval_every=0, checkpoint_every=0, min_lr_ratio=0.999999
    )
    corpus = corpus_of(config, tmp_path / "cache")
    bare = bench.BareLoop(config, corpus)
    bare.run(config.steps)
    training = Training(config, corpus, accelerator_for(config))
    list(training.steps())
    for (name, left), right in zip(bare.model.named_parameters(), training.model.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-4), name


@pytest.mark.slow
def test_compiled_loops_of_several_batches_run_the_trainers_step_each_in_a_graph_of_its_shape(tmp_path, monkeypatch):
    config = tiny(write_text(tmp_path / "text.txt"), scheme="pre_rmsnorm", depth=1, compile=True)
    graphs: list[tuple[str, ...]] = []

    def noting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert not any(isinstance(each, torch.SymInt) for each in inputs)
        graphs.append(tuple(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=noting))
    corpus = corpus_of(config, tmp_path / "cache")
    for loop in [bench.BareLoop(replace(config, batch_size=size), corpus) for size in (2, 4)]:
        loop.run(1)
    next(Training(config, corpus, accelerator_for(config)).steps())
    assert len(graphs) == 3 and len(set(graphs)) == 1


def test_a_table_names_the_processor_and_its_kind_where_it_has_no_name(tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon: 8 GHz\n\nmodel name\t: other\n")
    assert timing.processor(listed) == "Xeon: 8 GHz"
    listed.write_text("processor\t: 0\nCPU architecture: 8\n")
    assert timing.processor(listed) == timing.processor(tmp_path / "none") == platform.machine()


def test_precisions_are_compared_with_each_other_and_with_the_peak_in_the_same_rounds(monkeypatch):
    """Steps that take 1 s, 2 s ... and twice that in the second round, as on a machine that slows down."""
    order: list[str] = []

    def took(name: str, seconds: float) -> float:
        order.append(name)
        return seconds * (2 if len(order) > 2 * 6 else 1)

    class Loop:
        def __init__(self, config: TrainConfig, corpus: Any) -> None:
            self.config, self.model = config, torch.nn.Linear(1, 1)
            self.name = f"{config.dtype} compiled" if config.compile else config.dtype

        def run(self, steps: int) -> float:
            return took(self.name, 1.0 + list(bench.PRECISIONS).index(self.name))

    monkeypatch.setattr(bench, "BareLoop", Loop)
    monkeypatch.setattr(bench, "peak_seconds", lambda flops, dtype: took(dtype, 0.5))
    table = pd.DataFrame(bench.precisions(TrainConfig(depth=4), None, 2, lambda: None))
    names = [*bench.PRECISIONS, "float32", "bfloat16"]
    assert order == names + names + names[::-1]
    ratios = dict(zip(zip(table["what"], table["base"], strict=True), table["ratio"], strict=True))
    assert ratios == {
        ("bfloat16 step", "float32 step"): 3.0,
        ("bfloat16 compiled step", "float32 compiled step"): 2.0,
        ("float32 compiled step", "float32 step"): 2.0,
        ("bfloat16 compiled step", "bfloat16 step"): 4 / 3,
        ("bfloat16 compiled step", "float32 step"): 4.0,
        ("float32 step", "float32 matrix product"): 2.0,
        ("float32 compiled step", "float32 matrix product"): 4.0,
        ("bfloat16 step", "bfloat16 matrix product"): 6.0,
        ("bfloat16 compiled step", "bfloat16 matrix product"): 8.0,
    }
    assert table["peak_share"].dropna().tolist() == [1 / 2, 1 / 4, 1 / 6, 1 / 8]


def test_larger_batches_and_two_threads_are_compared_for_as_many_tokens(monkeypatch):
    """Steps whose time goes with the square root of their tokens, and halves on two threads."""

    class Loop:
        def __init__(self, config: TrainConfig, corpus: Any) -> None:
            self.config = config

        def run(self, steps: int) -> float:
            assert torch.get_num_threads() == self.config.threads
            assert (self.config.dtype, self.config.compile) == ("bfloat16", True)
            return self.config.batch_size**0.5 / self.config.threads

    monkeypatch.setattr(bench, "BareLoop", Loop)
    table = pd.DataFrame(bench.larger(TrainConfig(depth=4, batch_size=8), None, 2, lambda: None)).set_index("what")
    assert table["ratio"].tolist() == pytest.approx([0.5**0.5, 0.5, 0.5]) and list(table["threads"]) == [1, 1, 2]
    assert list(table.index) == [f"bfloat16 compiled step, {name}" for name in ("batch 16", "batch 32", "two threads")]


@pytest.mark.slow
def test_the_bench_sets_each_precision_against_the_others_and_the_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PEAK_SIZE", 256)
    table = bench.bench(1, schemes=(), depth=1, precision_depth=1, width=32, cache_dir=tmp_path, progress=False)
    steps = table[~table["base"].str.endswith("product")].iloc[1:]
    assert list(zip(steps["what"], steps["base"], strict=True)) == [
        *((f"{what} step", f"{base} step") for what, base in bench.COMPARED),
        *((f"{bench.FASTEST} step, {name}", f"{bench.FASTEST} step") for name in bench.LARGER),
    ]
    table = table[table["base"].str.endswith("product")].set_index("what")
    shares = table["peak_share"]
    assert list(shares.index) == [f"{name} step" for name in bench.PRECISIONS]
    assert (shares == 1 / table.loc[shares.index, "ratio"]).all() and (table["tokens_per_s"] > 0).all()
    step = table.loc["float32 step"]
    assert step["tokens_per_s"] * step["seconds"] == pytest.approx(8 * 128)


@pytest.mark.slow
def test_the_same_runs_are_timed_on_one_worker_and_on_two(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # a busy machine starts a node slowly
    names: list[list[str]] = []
    sweep = clusters.sweep

    def watched(configs, *args, **options):
        result = sweep(configs, *args, **options)
        names.append([run.name for run in result.runs])
        return result

    monkeypatch.setattr(clusters, "sweep", watched)
    fields = dict(corpus=str(write_text(tmp_path / "text.txt")), block_length=16, vocab_size=300, batch_size=2)
    table = clusters.bench(2, str(tmp_path / "cache"), depth=1, width=32, steps=3, **fields)
    assert names[0] == names[1] and len(set(names[0])) == 2
    assert table["workers"].tolist() == [1, 2] and table["runs"].tolist() == [2, 2]
    assert table["runs_a_minute"].tolist() == pytest.approx((120 / table["wall_s"]).tolist())
    assert table["ratio"].tolist() == pytest.approx([1.0, table["wall_s"][0] / table["wall_s"][1]])
    trained = 2 * table["run_s"]  # of two runs the median is the mean
    assert table["not_training"].tolist() == pytest.approx(
        (1 - trained / (table["workers"] * table["wall_s"])).tolist()
    )
    assert table["not_training"].between(0, 1).all()
