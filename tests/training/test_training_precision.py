"""Training steps in bfloat16 and compiled; what is measured stays in float32."""

import dataclasses
import functools
import math
import os
import platform
import shutil
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from training_helpers import tiny
from transformers import StaticCache

from normlab import runs
from normlab.models import NormlabForCausalLM
from normlab.study.presets import PRESETS
from normlab.training import distributed
from normlab.training.attention import CAUSAL_HALF_CPU, CausalAttention, use_fast_attention
from normlab.training.config import TrainConfig
from normlab.training.loop import MeanLoss, Training, autocast


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[torch.dtype]]:
    """The dtypes that MLPs return, by "training" and "measuring"."""
    found: dict[str, set[torch.dtype]] = {"training": set(), "measuring": set()}
    build_model = NormlabForCausalLM.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        build_model(self, *args, **kwargs)
        for block in self.model.layers:
            block.mlp.register_forward_hook(
                lambda module, _, out: found["training" if module.training else "measuring"].add(out.dtype)
            )

    monkeypatch.setattr(NormlabForCausalLM, "__init__", watched)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_run_in_half_precision_and_what_is_measured_in_float32(dtype, text, go, tmp_path, seen):
    run = go(tiny(text, dtype=str(dtype).removeprefix("torch.")), tmp_path)
    assert seen == {"training": {dtype}, "measuring": {torch.float32}}
    weights = run.load_model().state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.slow
def test_bfloat16_ends_near_float32_and_not_on_its_bits(text, go, tmp_path):
    full, half = (go(tiny(text, dtype=dtype, steps=30, lr=1e-2), tmp_path) for dtype in ("float32", "bfloat16"))
    assert full.name != half.name
    assert half.eval_loss != full.eval_loss and half.eval_loss == pytest.approx(full.eval_loss, abs=0.05)


def test_a_float16_step_that_overflows_is_left_out_and_halves_the_scale_and_a_resumed_run_knows_it(
    text, go, stop, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**24))
    config = tiny(text, dtype="float16", steps=12, lr=1e-2)
    run = go(config, tmp_path / "whole")
    steps = run.table().query("split == 'train'").pivot(index="step", columns="metric", values="value").iloc[:12]
    skipped = steps["skipped_step"].astype(bool)
    assert skipped.iloc[0] and 1 < skipped.sum() < 8
    expected = 2.0 ** (24 - skipped.cumsum())
    assert steps["loss_scale"].tolist() == expected.tolist()
    assert not steps["grad_norm"][skipped].map(math.isfinite).any()
    assert steps["grad_norm"][~skipped].between(0, 10).all()
    assert steps["learning_rate"][: skipped.sum() + 1].nunique() == 1, "the schedule waits for the first step"
    assert run.eval_loss < run.table().query("split == 'eval'")["value"].iloc[0]
    stop(config, tmp_path / "cut", 2)
    resumed = go(config, tmp_path / "cut")
    assert resumed.manifest["measured"]["resumed_from_step"] == 2
    assert (resumed.path / runs.STATS).read_bytes() == (run.path / runs.STATS).read_bytes()
    assert (resumed.path / runs.WEIGHTS).read_bytes() == (run.path / runs.WEIGHTS).read_bytes()


def test_attention_in_float32_is_attention(text):
    torch.manual_seed(0)
    model = NormlabForCausalLM(tiny(text, scheme="pre_rmsnorm").model_config(300, 0)).eval()
    ids = torch.randint(300, (2, 16))
    expected = model(ids).logits
    use_fast_attention(model, "bfloat16", torch.device("cpu"))
    assert model.config._attn_implementation == CAUSAL_HALF_CPU
    assert torch.equal(model(ids).logits, expected)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids, attention_mask=mask).logits[:, 5:], padded[:, 5:])


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-6), (torch.bfloat16, 0.01)], ids=str)
def test_a_compiled_steps_attention_has_the_values_and_gradients_of_attention(dtype, within):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8), (2, 4, 16, 8))
    query, key, value, out = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    found, expected = [], []
    for results, kind, attend in (
        (found, dtype, lambda *parts: CausalAttention.apply(*parts, 0.3)),
        (expected, torch.float64, functools.partial(sdpa, is_causal=True, enable_gqa=True, scale=0.3)),
    ):
        parts = [part.to(kind).requires_grad_() for part in (query, key, value)]
        mixed = attend(*parts)
        results += [mixed, *torch.autograd.grad(mixed, parts, out.to(kind))]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype and (ours.double() - theirs).norm() < within * theirs.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_step_has_no_mask_one_rotary_table_and_no_logits(dtype, text):
    model = NormlabForCausalLM(tiny(text, scheme="pre_rmsnorm", depth=2).model_config(300, 0)).train()
    use_fast_attention(model, dtype, torch.device("cpu"))
    nodes: list[torch.fx.Node] = []

    def noting(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(graph.graph.nodes)
        return graph

    ids, labels = torch.randint(300, (2, 16)), torch.tensor(2.0 * 15)
    model.config.use_cache = False  # as in a training
    torch._dynamo.reset()
    with autocast(dtype, torch.device("cpu")):
        loss = torch.compile(MeanLoss(model), fullgraph=True, backend=noting)(ids, labels)
    torch._dynamo.reset()
    (returned,) = (node.args[0] for node in nodes if node.op == "output")
    assert len(returned) == 1, "the loss and no logits"
    assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-6 if dtype == "float32" else 1e-2)
    called = [str(node.target) for node in nodes]
    assert sum("rotary_table" in name for name in called) == 1 and "cos" not in called
    assert not any(node.kwargs.get("attn_mask") is not None for node in nodes)


@torch.no_grad()
def test_a_model_that_has_trained_decodes_from_a_static_cache_compiled(text):
    torch.manual_seed(0)
    model = NormlabForCausalLM(tiny(text, scheme="pre_rmsnorm", depth=1).model_config(300, 0)).eval()
    use_fast_attention(model, "float32", torch.device("cpu"))
    ids, kept = torch.randint(300, (2, 6)), StaticCache(config=model.config, max_cache_len=8)
    expected = model(ids, use_cache=False).logits[:, -1]
    model(ids[:, :5], past_key_values=kept)
    last = torch.compile(model, backend="eager")(ids[:, 5:], past_key_values=kept).logits[:, -1]
    assert torch.allclose(last, expected, atol=1e-5), "keys that are not written yet were seen"


@pytest.mark.parametrize(("device", "left_on_cpu"), [("auto", False), ("cpu", True)])
def test_a_run_takes_the_device_of_its_configuration_whatever_ran_before(device, left_on_cpu, text, monkeypatch):
    """accelerate's state is that of the process, and stays as the first run of it made it."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    distributed.accelerator_for(tiny(text, device="auto" if device == "cpu" else "cpu"))
    assert distributed.accelerator_for(tiny(text, device=device)).state._cpu is left_on_cpu


@pytest.mark.slow
def test_a_compiled_run_measures_the_model_itself_and_resumes_on_its_bits(text, go, stop, tmp_path):
    small = tiny(text, scheme="pre_rmsnorm", depth=1, dtype="bfloat16", checkpoint_every=4, log_every=2)
    config = dataclasses.replace(small, compile=True)
    whole = go(config, tmp_path / "whole")
    stop(config, tmp_path / "cut", 6)
    resumed = go(config, tmp_path / "cut")
    assert resumed.manifest["measured"]["resumed_from_step"] == 6
    assert (resumed.path / runs.STATS).read_bytes() == (whole.path / runs.STATS).read_bytes()
    eager = go(small, tmp_path / "eager")
    assert whole.eval_loss == pytest.approx(eager.eval_loss, abs=1e-3)
    sites = whole.table().query("split == 'probe' and step == 8")["site"].unique()
    assert set(sites) == set(eager.table().query("split == 'probe' and step == 8")["site"].unique())


def test_a_logged_loss_is_the_mean_since_the_last_one(text, go, tmp_path):
    each, third = (go(tiny(text, log_every=n, checkpoint_every=0, steps=9), tmp_path / str(n)) for n in (1, 3))
    losses = [
        run.table().query("metric == 'loss' and split == 'train'").set_index("step")["value"] for run in (each, third)
    ]
    assert list(losses[1].index) == [3, 6, 9]
    for step, value in losses[1].items():
        assert value == pytest.approx(losses[0].loc[step - 2 : step].mean(), rel=1e-6)


def test_where_compiling_fails_training_continues_uncompiled_and_says_so_in_one_line(text, go, tmp_path):
    config = tiny(text, scheme="pre_rmsnorm", depth=1, steps=2, keep_weights=False)
    no_compiler = inductor.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    with no_compiler, pytest.warns(UserWarning, match="^training continues uncompiled, .*no-such-compiler") as said:
        run = go(dataclasses.replace(config, compile=True), tmp_path / "compiled")
    assert len([w for w in said if "uncompiled" in str(w.message)]) == 1
    plain = go(config, tmp_path / "plain")
    assert run.manifest["measured"]["compiled"] is False and plain.manifest["measured"]["compiled"] is False
    assert (run.path / runs.STATS).read_bytes() == (plain.path / runs.STATS).read_bytes()
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2, "others may compile again"


def test_a_compiled_step_does_not_depend_on_what_its_process_compiled_before(text, corpus, monkeypatch):
    """Nor on the batch of that, nor on how many graphs PyTorch keeps of a piece of code."""
    has_symbols: list[bool] = []

    def noting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        has_symbols.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=noting))
    with dynamo.patch(recompile_limit=1):
        for batch_size in (2, 4):
            config = tiny(text, scheme="pre_rmsnorm", depth=1, compile=True, batch_size=batch_size)
            training = Training(config, corpus, distributed.accelerator_for(config))
            next(training.steps())
            assert training.compiled
    assert has_symbols == [False, False]


def test_a_manifest_says_if_some_steps_ran_uncompiled_and_a_users_stance_stays(text, go, stop, tmp_path, monkeypatch):
    small = dict(steps=2, checkpoint_every=0, probe_every=0, eval_every=0, keep_weights=False)
    config = tiny(text, scheme="pre_rmsnorm", depth=1, compile=True, **small)
    with torch.compiler.set_stance("force_eager"):
        stop(config, tmp_path, 1)
        assert torch.compile(torch.compiler.is_compiling, backend="eager")() is False
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    assert go(config, tmp_path).manifest["measured"]["compiled"] is False, "the first step was not"


SETTLED = """
import torch
from normlab.training.config import TrainConfig
from normlab.training.distributed import settled

print(settled(TrainConfig(), torch.device("cpu")).dtype)
"""


@pytest.mark.slow
def test_presets_are_in_float32_where_bfloat16_is_emulated_and_in_bfloat16_where_it_is_not():
    """A process whose instructions are hidden takes the slow path for real."""
    hidden = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", SETTLED], env=hidden, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["float32"]
    cpu = torch.device("cpu")
    expected = "bfloat16" if distributed.computes_bfloat16(cpu) else "float32"
    assert distributed.settled(TrainConfig(), cpu).dtype == expected
    of_one = {name for name, preset in PRESETS.items() if preset.fields.get("dtype", "auto") == "bfloat16"}
    assert of_one == {"initial_weights", "grid", "league", "gpu"}, "the others take what is fastest"


def test_bfloat16_asked_for_where_it_is_emulated_is_warned_of(text, monkeypatch):
    monkeypatch.setattr(distributed, "computes_bfloat16", lambda device: False)
    cpu = torch.device("cpu")
    emulated = pytest.warns(UserWarning, match="^bfloat16 is emulated here, slower than float32")
    with emulated, distributed.process_settings(tiny(text, dtype="bfloat16"), cpu):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distributed.process_settings(tiny(text), cpu):
            pass


def test_a_run_begun_or_finished_in_one_precision_keeps_it_where_another_is_faster(
    text, go, stop, tmp_path, monkeypatch
):
    config = tiny(text, dtype="auto")
    monkeypatch.setattr(distributed, "computes_bfloat16", lambda device: True)
    stop(config, tmp_path / "a", 4)
    monkeypatch.setattr(distributed, "computes_bfloat16", lambda device: False)
    resumed = go(config, tmp_path / "a")
    assert resumed.manifest["measured"]["resumed_from_step"] == 4
    assert resumed.manifest["config"]["dtype"] == "bfloat16" and "--dtype bfloat16" in resumed.manifest["command"]
    whole = go(dataclasses.replace(config, dtype="bfloat16"), tmp_path / "whole")
    assert resumed.name == whole.name
    assert (resumed.path / runs.STATS).read_bytes() == (whole.path / runs.STATS).read_bytes()
    assert go(config, tmp_path / "a").path == resumed.path, "finished: not trained again"
    assert go(config, tmp_path / "here").manifest["config"]["dtype"] == "float32"


def test_a_run_that_starts_again_in_another_precision_says_so_and_leaves_what_it_had(
    text, go, stop, tmp_path, monkeypatch
):
    config = tiny(text, dtype="auto", depth=1, steps=4)
    monkeypatch.setattr(distributed, "computes_bfloat16", lambda device: True)
    stop(config, tmp_path, 2)
    with monkeypatch.context() as other:
        other.setattr(distributed, "computes_bfloat16", lambda device: False)
        other.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        with pytest.warns(UserWarning) as said:
            stop(config, tmp_path, 3)
        (line,) = [str(warning.message) for warning in said if "begun" in str(warning.message)]
        assert "checkpoint-2 was begun with another cpu_capability, in bfloat16: the run starts again" in line
        assert line.endswith("from step 0, in float32; its numbers may be others")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*begun with")
            resumed = go(config, tmp_path)
        assert resumed.manifest["measured"]["resumed_from_step"] == 3
        assert resumed.manifest["config"]["dtype"] == "float32"
    shutil.rmtree(resumed.path)
    back = go(config, tmp_path)
    assert back.manifest["measured"]["resumed_from_step"] == 2 and back.manifest["config"]["dtype"] == "bfloat16"


FAULTS = """
import resource, torch
from normlab.training.distributed import memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(20, 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

torch.set_num_threads(1)
given_back = faults()
before = resident()
with memory_kept():
    for _ in range(4):  # until blocks lie where the next ones fit
        faults()
    kept, held = faults(), resident() - before
print(given_back, kept, held, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's allocator")
def test_what_a_step_frees_stays_until_the_run_ends():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=True)
    given_back, kept, held, left = map(int, done.stdout.split())
    pages = 20 * 2**22 // os.sysconf("SC_PAGESIZE")
    assert given_back > 4 * pages and kept < pages / 20
    assert held > 0.9 * pages and left < 0.1 * pages
