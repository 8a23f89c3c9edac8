"""The league's budget for one more scheme: a row of the registry, or anyone's own norm.

scheme_of            a scheme by its name, or one made from a class in a file
require_comparable   refuses what one table could not hold with the runs that are there
enter                searches its learning rate and trains its final runs, as the preset `league` does for every scheme
tiny                 the same preset in a minute, to see that a scheme trains at all
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from normlab.errors import NormlabError, in_one_line
from normlab.norms import Norm
from normlab.runs import find_runs, read_manifest
from normlab.schemes import BASELINE, SCHEMES, Scheme, get_scheme
from normlab.store import SEARCH, child
from normlab.study.own_file import executed
from normlab.study.presets import get_preset
from normlab.training.grids import LeagueSearch, Preset
from normlab.training.sweep import SweepResult, sweep
from normlab.training.text.corpus import corpus_of
from normlab.training.workers import Pool, share_cores


def scheme_of(what: str) -> Scheme:
    """The scheme of that name, or of `FILE.py:NAME`, which is put into the registry.

    NAME is a subclass of `normlab.norms.Norm` that is built from the width alone, or a `Scheme`. A class makes a Pre-LN
    scheme with this norm at every place. The scheme's name ends in a hash of the file: an edited file is another
    scheme, with other runs.

    Raises:
        NormlabError: an unknown scheme, or a file or a name that is not there. A file that does not run. A norm that
            does not keep shape and type, whose output or gradient is not finite, or that mixes tokens. A scheme whose
            model does so.
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
        if row.name not in SCHEMES:
            _try_model(row, what)
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
    return SCHEMES.setdefault(row.name, row)


def _try(kind: type[Norm], what: str) -> None:
    """Refuse a norm that could not be trained in any model, or whose model could see the text that it predicts."""
    for width, dtype in ((32, torch.float32), (128, torch.float32), (32, torch.bfloat16)):
        x = torch.linspace(-2, 2, 2 * 3 * width).cos().reshape(2, 3, width).to(dtype).requires_grad_()
        given = f"a (2, 3, {width}) tensor in {str(dtype).removeprefix('torch.')}"
        try:
            norm = kind(width).to(dtype).eval()
            y = norm(x)
            y.sum().backward()
            alone = norm(x[:1, :2])
        except Exception as error:
            raise NormlabError(f"{what} fails on {given}: {in_one_line(error)}") from error
        if y.shape != x.shape or y.dtype != dtype:
            raise NormlabError(f"{what} makes {tuple(y.shape)} in {y.dtype} of {given}: keep shape and type")
        if not (y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()):
            raise NormlabError(f"{what} makes numbers or gradients of {given} that are not finite")
        if not torch.allclose(alone, y[:1, :2], rtol=1e-2, atol=1e-4):
            raise NormlabError(f"{what} mixes tokens, so a model would see the text that it predicts: norm each alone")


def _try_model(row: Scheme, what: str) -> None:
    """Refuse a scheme whose model fails, or could see the text that it predicts."""
    from normlab.models import NormlabConfig, NormlabForCausalLM  # here, because it loads transformers

    sizes: dict[str, Any] = dict(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.arange(48).reshape(2, 24) % 32
    SCHEMES[row.name] = row
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = NormlabForCausalLM(NormlabConfig(scheme=row.name, **sizes)).eval()
            for parameter in model.parameters():  # a branch that starts at zero would show nothing
                parameter.add_(0.1 * torch.randn_like(parameter))
            logits, alone = model(ids).logits[:1, :12], model(ids[:1, :12]).logits
    except Exception as error:
        raise NormlabError(f"{what} makes no model: {in_one_line(error)}") from error
    finally:
        del SCHEMES[row.name]
    if not logits.isfinite().all():
        raise NormlabError(f"{what} makes logits that are not finite")
    if not torch.allclose(logits, alone, rtol=1e-2, atol=1e-3):
        raise NormlabError(f"{what} mixes tokens, so a model would see the text that it predicts: treat each alone")


def require_comparable(
    preset: Preset, folders: Iterable[str | Path], cache_dir: str | Path | None = None, progress: bool = False
) -> None:
    """Refuse a preset whose runs would differ from those at or below the folders in depth, width or text.

    Raises:
        NormlabError: they would, so that one table could not hold both. Or the preset's text cannot be read.
    """
    (part,) = preset.parts
    config = preset.config(BASELINE, next(iter(part.depths)), 0, 1e-3, {})
    there = [run for folder in folders for place in (folder, child(folder, SEARCH)) for run in _manifests(place)]
    text = corpus_of(config, cache_dir, progress).content_hash if there else ""
    for path, manifest in there:
        for name in ("depth", "width"):
            if manifest["config"][name] != (new := getattr(config, name)):
                raise NormlabError(
                    f"{path} has {name} {manifest['config'][name]}, new runs would have {new}: name another folder"
                )
        if manifest["corpus"]["content_hash"] != text:
            raise NormlabError(
                f"{path} was trained on another text than there is here: pip install 'normlab[packages]', or name "
                "another folder"
            )


def _manifests(folder: str | Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The runs of a folder that can be read; none if nothing is there yet."""
    with contextlib.suppress(NormlabError):
        for path in find_runs(folder):
            with contextlib.suppress(NormlabError):
                yield path, read_manifest(path)


def enter(
    what: str,
    out: str | Path,
    preset: Preset | None = None,
    *,
    workers: int | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train one scheme under the league's budget, below directory `out`. Finished runs are skipped.

    Args:
        what: as for `scheme_of`.
        preset: by default `league`.
        workers, threads: as for `sweep`.
    """
    scheme = scheme_of(what)
    count, each = share_cores(workers, threads)
    assert isinstance(count, int)
    mine = (get_preset("league") if preset is None else preset).only([scheme.name], None)
    # The registry that a process imports may lack the scheme.
    pool = Pool(count, prepare=functools.partial(scheme_of, what))
    return sweep(mine, out, workers=pool, threads=each, cache_dir=cache_dir, progress=progress)


def tiny(preset: Preset) -> Preset:
    """The preset at 2 blocks and 40 steps of a small text. Its numbers mean nothing."""
    assert isinstance(preset.rate, LeagueSearch)
    small = {"corpus": "stdlib", "characters": 1_500_000, "vocab_size": 320, "width": 32, "block_length": 32}
    small |= {"steps": 40, "eval_every": 20, "probe_every": 20, "log_every": 20, "checkpoint_every": 0}
    small |= {"eval_blocks": 16, "probe_blocks": 4, "experiment_blocks": 4, "compile": False}
    (part,) = preset.parts
    choosing = dict(preset.rate.fields) | {"steps": 20, "eval_every": 20, "probe_every": 20}
    return replace(
        preset,
        parts=(replace(part, depths={2: 3}, kept=()),),
        rate=replace(preset.rate, depths=(2,), fields=choosing),
        fields={**preset.fields, **small},
    )
