"""Needs of a run before it starts: parameters, FLOPs and memory, compared with models that are built and run."""

import dataclasses
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest
import torch
from test_training_ranks import environments
from torch.utils.flop_counter import FlopCounterMode

from normlab import NormlabError, NormlabForCausalLM, cli
from normlab.schemes import BASELINE
from normlab.training import estimate
from normlab.training.config import TrainConfig
from normlab.training.estimate import Held, needs
from normlab.training.paper_models import SIZES, get_size

SMALL = TrainConfig(
    scheme="bhyt",
    depth=4,
    width=256,
    intermediate=704,
    batch_size=8,
    block_length=256,
    vocab_size=8192,
    steps=10,
    dtype="float32",
)

WIDE = dict(depth=8, width=512, intermediate=1408, batch_size=4, vocab_size=2048)


@pytest.mark.parametrize("name, printed", [("bhyt-1b", 1_235_814_400), ("bhyt-3b", 3_212_749_824)])
def test_the_llama_shapes_have_llamas_parameters(name, printed):
    config = dataclasses.replace(SIZES[name].config, scheme=BASELINE)
    assert estimate.count_parameters(config.model_config(0, 0)) == printed


@pytest.mark.parametrize("name, millions", [("curse-130m", 134), ("curse-250m", 247), ("curse-350m", 368)])
def test_the_curses_shapes_have_about_the_parameters_they_are_named_for(name, millions):
    assert estimate.count_parameters(SIZES[name].config.model_config(0, 0)) // 10**6 == millions


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_of_a_step(tied):
    """Eager attention, whose products are counted, computes the masked half too."""
    config = dataclasses.replace(SMALL, batch_size=1, block_length=64, model={"tie_word_embeddings": tied})
    model = NormlabForCausalLM(config.model_config(8192, 0))
    model.set_attn_implementation("eager")
    ids = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    masked_half = 6 * 4 * 64 * 256 * 64
    parameters = sum(p.numel() for p in model.parameters())
    expected = estimate.flops_a_step(model.config, parameters, config) + masked_half
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.005)


def test_what_autograd_keeps_grows_by_the_same_amount_a_block():
    config = SMALL.model_config(8192, 0)
    one, two, four = (
        estimate._saved_bytes(estimate._at_depth(config, depth), 1, 64, "bfloat16") for depth in (1, 2, 4)
    )
    assert four - two == 2 * (two - one) > 0
    fixed, a_block = estimate._kept(config, 64, "bfloat16")
    three = estimate._saved_bytes(config, 3, 64, "bfloat16")
    assert three + 3 * 8 * 64 * 8192 == pytest.approx(fixed + 3 * a_block, rel=1e-6) and fixed > 0


MEASURE = """
import gc, os, torch
from normlab import NormlabForCausalLM
from normlab.training.config import TrainConfig
from normlab.training.distributed import shard
from normlab.training.loop import autocast
torch.set_num_threads(1)
ranks = int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    torch.distributed.init_process_group("gloo")

def steps(config, parts=1):
    model = NormlabForCausalLM(config.model_config(config.vocab_size, 0))
    if ranks > 1:
        shard(model, torch.device("cpu"))
        gc.collect()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(config.batch_size // (ranks * parts), config.block_length, dtype=torch.long)
    for step in range(2):
        for part in range(parts):
            with autocast(config.dtype, ids.device):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

config, parts = TrainConfig(**{config!r}), {parts}
steps(TrainConfig(depth=1, width=32, batch_size=2 * ranks, block_length=8, vocab_size=64, dtype=config.dtype))
gc.collect()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
steps(config, parts)
print(status("VmHWM") - before)
"""


MEASURED = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="measures the peak as Linux counts it"
)


def measured_peaks(config: TrainConfig, parts: int, ranks: int = 1) -> list[int]:
    """The peak of every rank."""
    code = MEASURE.replace("{config!r}", repr(config.to_dict())).replace("{parts}", str(parts))
    # Large pieces straight from the system, as a GPU's allocator has them: what is freed does not stay in the heap.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    started = []
    for launched in environments(ranks) if ranks > 1 else [{}]:
        command = [sys.executable, "-c", code]
        pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env=environment | launched, **pipes))
    answers = [process.communicate() for process in started]
    assert not any(process.returncode for process in started), answers
    return [int(output) for output, _ in answers]


@pytest.mark.slow
@MEASURED
@pytest.mark.parametrize(
    "fields, parts",
    [
        ({}, 1),
        pytest.param({"dtype": "bfloat16"}, 1, marks=pytest.mark.slow),  # minutes where it is emulated
        pytest.param({"scheme": BASELINE, "dtype": "bfloat16"}, 2, marks=pytest.mark.slow),
        pytest.param({"scheme": "lns", "depth": 8}, 1, marks=pytest.mark.slow),
    ],
)
def test_memory_is_the_measured_peak_within_a_tenth(fields, parts):
    config = dataclasses.replace(SMALL, **fields)
    one_part = needs(config)
    assert one_part.config.accumulate == 1
    expected = one_part.memory
    if parts > 1:
        fixed, a_block = estimate._kept(config.model_config(8192, 0), 256, config.dtype)
        expected = 16 * one_part.parameters + fixed + a_block * 8 / parts
    assert measured_peaks(config, parts) == pytest.approx([expected], rel=0.1)


@MEASURED
@pytest.mark.slow
@pytest.mark.parametrize(
    "fields, parts",
    [
        ({}, 1),
        ({"dtype": "bfloat16"}, 1),
        ({"dtype": "bfloat16"}, 2),
        (WIDE, 1),
        (WIDE, 2),
        (WIDE | {"block_length": 32}, 1),  # gradients are more than what autograd keeps
    ],
)
def test_memory_of_a_split_model_is_the_measured_peak_within_a_tenth(fields, parts):
    config = dataclasses.replace(SMALL, fsdp=True, **fields)
    planned = needs(config, 2)
    assert planned.config.accumulate == 1
    fixed, a_block = estimate._kept(config.model_config(config.vocab_size, 0), config.block_length, config.dtype)
    kept = fixed + a_block * config.batch_size / (2 * parts)
    expected = planned.memory if parts == 1 else estimate._peak(planned.held, kept, 2, parts)
    assert measured_peaks(config, parts, ranks=2) == pytest.approx([expected] * 2, rel=0.1)


def test_a_split_model_needs_its_share_and_what_is_gathered():
    whole, split = needs(SMALL, 2), needs(dataclasses.replace(SMALL, fsdp=True), 2)
    assert (split.parameters, split.disk) == (whole.parameters, whole.disk) and split.memory < whole.memory
    assert " --fsdp " in split.command() and "gathered" in split.in_words() and "gathered" not in whole.in_words()
    outside = 8192 * 256 + 256  # embeddings and the last norm, with its gains of tanh
    block = (whole.parameters - outside) // 4
    assert split.held.gathered == pytest.approx(outside + 3 * block, rel=1e-5)
    assert estimate.held_when_split(SMALL.model_config(8192, 0), 4).kept == pytest.approx(
        whole.parameters / 4, rel=1e-4
    )
    alone = needs(dataclasses.replace(SMALL, fsdp=True))
    assert alone.held == Held(alone.parameters), "one process has nothing to split"


def test_a_step_is_computed_in_as_few_parts_as_fit_the_memory():
    whole = needs(SMALL)
    enough, less = (needs(SMALL, memory_gib=whole.memory / 2**30 * share) for share in (1.01, 0.7))
    assert enough == whole and less.config.accumulate > 1 and less.fits and less.memory < whole.memory
    assert not needs(SMALL, memory_gib=0.01).fits
    several = needs(SMALL, 2)
    assert several.seconds == whole.seconds / 2
    fixed, a_block = estimate._kept(SMALL.model_config(8192, 0), 256, "float32")
    assert several.memory == 16 * whole.parameters + fixed + 4 * a_block


@pytest.mark.parametrize(
    "name, flags",
    [
        ("bhyt-1b", []),
        ("curse-130m", ["--fsdp"]),
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in SIZES if name != "bhyt-1b"),
    ],
)
def test_the_command_of_a_plan_is_its_configuration(name, flags, capsys):
    assert cli.main(["plan", name, "--gpus", "4", *flags]) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("torchrun")]
    launcher, _, arguments = command.partition(" -m normlab ")
    assert launcher == "torchrun --nproc-per-node 4"
    _, options = cli.parse(shlex.split(arguments))
    config = TrainConfig(**cli.given(options.arguments["config"]))
    assert dataclasses.replace(config, accumulate=1) == dataclasses.replace(SIZES[name].config, fsdp=bool(flags))
    assert config.batch_size % (4 * config.accumulate) == 0


def test_what_cannot_be_planned_is_one_line():
    with pytest.raises(NormlabError, match="unknown size 'bhyt-7b'; known are curse-130m"):
        get_size("bhyt-7b")
    with pytest.raises(NormlabError, match="3 GPUs do not divide batch_size 8: change one of the two"):
        needs(SMALL, 3)
    with pytest.raises(NormlabError, match="mfu 40"):
        needs(SMALL, mfu=40)
