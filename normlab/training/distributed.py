"""The processes and devices that train a run, and the precision that they take.

`accelerator_for(config)`   the processes that train a run together, and their devices
`decided_by_first(...)`     what rank 0 decides, on every rank
`device_of(config)`         the device that a run takes here
`fastest_dtype(device)`     what dtype "auto" becomes; `why_dtype` says why
`settled(config, device)`   a configuration with its dtype "auto" replaced by that
`process_settings(config)`  settings of the process for the time of a run
`shard`, `gathered`         a model split over the ranks (FSDP2); a whole copy of it
`start_ranks(n, command)`   a command of normlab in n processes of this machine

Models are split by `torch.distributed.fsdp.fully_shard` itself, on CPUs and GPUs alike. With accelerate this works on
GPUs only, for blocks that its own configuration names.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from normlab.errors import NormlabError
from normlab.loading import without_bars
from normlab.schemes import get_scheme
from normlab.training import require_training

if TYPE_CHECKING:
    from accelerate import Accelerator

    from normlab.models import NormlabForCausalLM
    from normlab.training.config import TrainConfig

T = TypeVar("T")
# Of glibc's mallopt: trim the heap's top only beyond as much as this, and map nothing that is smaller by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 2**31 - 1), (-3, 2**30)


def accelerator_for(config: TrainConfig) -> Accelerator:
    """The processes that train this run together: one, unless a launcher started more.

    NormlabError: a GPU that is not there, or a number of ranks that does not divide the batch.
    """
    require_training()
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    if config.device == "cuda" and not torch.cuda.is_available():
        raise NormlabError("device is 'cuda', and PyTorch sees no GPU here; leave it at 'auto'")
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if not several:  # accelerate's state is that of the process, and an earlier run may have taken another device
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        # By itself it takes several processes on a CPU for one.
        cpu=config.device == "cpu" or (several and not torch.cuda.is_available()),
        mixed_precision="no",
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=not config.gradient_checkpointing)],
    )
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        raise NormlabError("accelerate is configured to shard the model itself: take that out, and give --fsdp")
    if config.batch_size % (accelerator.num_processes * config.accumulate):
        parts = "" if config.accumulate == 1 else f" x {config.accumulate} parts"
        raise NormlabError(
            f"{accelerator.num_processes} ranks{parts} do not divide batch_size {config.batch_size}, the blocks that "
            "all of them together take a step: change one of the two"
        )
    return accelerator


def on_one_machine(accelerator: Accelerator) -> bool:
    """True if all of a run's processes are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)) >= accelerator.num_processes


def decided_by_first(accelerator: Accelerator, decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank. Every rank has to call this."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([decide() if accelerator.is_main_process else None])[0]


def start_ranks(ranks: int, arguments: list[str]) -> int:
    """Run `normlab` with these arguments in `ranks` processes of this machine.

    They end with this process, and with the first that fails. Each has its own session, so that Ctrl-C reaches
    this process alone. Returns the exit code of the first that fails, else 0. NormlabError: one was killed.
    """
    if ranks < 1:
        raise NormlabError(f"ranks is {ranks}; it must be at least 1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared = os.environ | master | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "normlab", *arguments]
    processes: list[subprocess.Popen] = []
    codes: list[int | None] = [None]
    with _ended_by() as signals:
        try:
            for rank in map(str, range(ranks)):
                environment = shared | {"RANK": rank, "LOCAL_RANK": rank}
                processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            while not signals and None in codes and not any(codes):
                time.sleep(0.05)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    if signals:
        sys.exit(128 + signals[0])
    code = min((code for code in codes if code), default=0)
    if code < 0:
        reason = signal.Signals(-code).name
        raise NormlabError(f"rank {codes.index(code)} was ended by {reason}; the same command resumes the run")
    return code


@contextlib.contextmanager
def _ended_by() -> Iterator[list[int]]:
    """The signals to end that arrive, without those that the user has ignored (nohup)."""
    came: list[int] = []
    wanted = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
    before = {number: signal.getsignal(number) for number in wanted}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def computes_bfloat16(device: torch.device) -> bool:
    """True if the device has instructions for bfloat16 matrix products and torch uses them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    if not (hasattr(torch.cpu, "get_capabilities") and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False  # or PyTorch is too old to tell: float32 is right everywhere
    # On x86, oneDNN also says so of processors on which it emulates; ATEN_CPU_CAPABILITY may hide what there is.
    known = torch.cpu.get_capabilities()
    return known["architecture"] != "x86_64" or (
        torch.backends.cpu.get_cpu_capability() == "AVX512" and (known["avx512_bf16"] or known["amx_bf16"])
    )


def fastest_dtype(device: torch.device) -> str:
    """The dtype that "auto" becomes on the device: "bfloat16" if it computes it in hardware, else "float32"."""
    return "bfloat16" if computes_bfloat16(device) else "float32"


def device_of(config: TrainConfig) -> torch.device:
    """The device that a run of this configuration takes on this machine."""
    found = None if config.device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def settled(config: TrainConfig, device: torch.device) -> TrainConfig:
    """`config` with dtype "auto" replaced by the device's fastest."""
    return dataclasses.replace(config, dtype=fastest_dtype(device)) if config.dtype == "auto" else config


def why_dtype(device: torch.device, taken: str | None = None) -> str:
    """One line for users: the precision that "auto" becomes on the device, and the reason.

    taken: what a run takes, where it was begun on another device.
    """
    if taken not in (None, fastest_dtype(device)):
        return f"training in {taken}, as this run was begun"
    name = {"cuda": "this GPU", "mps": "this GPU"}.get(device.type, "this processor")
    has = "computes bfloat16 in hardware" if computes_bfloat16(device) else "has no bfloat16 instructions"
    return f"training in {fastest_dtype(device)}: {name} {has}"


@contextlib.contextmanager
def process_settings(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Settings of the process while a run trains: threads, memory, no bars of transformers' own between ours.

    Warns if bfloat16 was asked for on a device that emulates it.
    """
    if config.dtype == "bfloat16" and not computes_bfloat16(device):
        warnings.warn('bfloat16 is emulated here, slower than float32; dtype "auto" takes the faster one', stacklevel=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with without_bars(), memory_kept():
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Keep memory that a training step frees in the process, on Linux with glibc. At the end all of it is returned.

    The system would otherwise fill the next step's pages with zeros again.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    keeps = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    if keeps:
        for parameter, value in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            libc.mallopt(parameter, value)
    try:
        yield
    finally:
        if keeps:
            libc.malloc_trim(0)


def shard(model: NormlabForCausalLM, device: torch.device) -> None:
    """Split the parameters over all ranks, in place. They become DTensors; their names stay."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if not get_scheme(model.config.scheme).loops:  # a parameter of several blocks belongs to one group: the model's
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gathered(model: NormlabForCausalLM) -> NormlabForCausalLM:
    """A copy with whole weights. Every rank has to call it."""
    from torch.distributed.checkpoint import state_dict as states

    weights = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
    copy = type(model)(model.config)
    copy.load_state_dict(weights)
    copy.to(device=model.device)  # type: ignore[call-arg]
    return copy.train(model.training)
