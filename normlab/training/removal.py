"""`normlab remove-norms`: an existing model's norms made fixed gains one by one, with fine-tuning after each.

`remove_norms(model, out)`   the table of losses; goes on from the last finished norm
`RemovalConfig`              how it is fine-tuned

In `out` stand, while it goes on, `norm-NNN`, the model after the last finished norm with its table; in the end
`removal.parquet`, the table, and `model`, folded: a stock Llama if it was one, else a model of normlab's. Each norm has
an optimizer and an order of the text of its own, so that a run that was stopped repeats, bit for bit on a CPU, what it
would have done.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from normlab import store
from normlab.errors import NormlabError
from normlab.models import NormlabConfig, NormlabForCausalLM
from normlab.models.pretrained import model_folder
from normlab.models.removal import as_llama, fold_removed, load_removable, removable_norms, remove_norm
from normlab.training.fields import NOT_NEGATIVE, POSITIVE, SEED, THREADS, at_least, check, described, setting, shared
from normlab.training.measure import mean_token_loss
from normlab.training.text.corpus import Corpus, CorpusSpec, load_corpus

if TYPE_CHECKING:
    import pandas

COLUMNS = ("step", "site", "rms", "loss_before", "loss_removed", "loss_tuned")
BEGUN, TABLE, MODEL = "begun.json", "removal.parquet", "model"
CALIBRATION_BLOCKS = 64


@dataclass(frozen=True)
class RemovalConfig:
    """Fine-tuning after each norm. NormlabError for values out of range."""

    steps: int = setting(100, "optimizer steps after each norm", NOT_NEGATIVE)
    lr: float = setting(1e-4, "learning rate, constant after a tenth of the steps", POSITIVE)
    batch_size: int = setting(8, "blocks a step", at_least(1))
    seed: int = setting(0, "order of the text", SEED)
    weight_decay: float = setting(0.0, "AdamW's, for matrices", NOT_NEGATIVE)
    corpus: str = shared(CorpusSpec, "corpus")
    text_column: str = shared(CorpusSpec, "text_column")
    characters: int = shared(CorpusSpec, "characters")
    block_length: int = shared(CorpusSpec, "block_length")
    eval_blocks: int = setting(128, "held-out blocks for the losses", at_least(1))
    threads: int = setting(1, "CPU threads", THREADS)

    def __post_init__(self) -> None:
        check(self)


RemovalConfig.__doc__ = f"{RemovalConfig.__doc__}\n\n{described(RemovalConfig)}\n"


def remove_norms(
    model: str | Path,
    out: str | Path,
    config: RemovalConfig | None = None,
    *,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> pandas.DataFrame:
    """Remove every norm of a trained Pre-LN model, fine-tuning after each, and write what is left to `out`/model.

    Args:
        model: a Llama's folder or hub name, a run that kept its weights, a model that comes with normlab; with its
            tokenizer.
        out: a new folder, or one that the same call has begun.

    Returns:
        A row a norm, as in `out`/removal.parquet: ``step`` from 1, ``site``, the ``rms`` it divides by from then on,
        and the held-out loss in nats a token: ``loss_before``, ``loss_removed`` (at once), ``loss_tuned`` (after
        fine-tuning).

    Raises:
        NormlabError: a model whose norms cannot become fixed gains (`load_removable`), another folder's content in
            `out`, or a loss that is not finite after fine-tuning: what was finished before stays.
    """
    config = config or RemovalConfig()
    source, out = _folder(model), Path(out)
    _check_output(out)
    spec = {name: getattr(config, name) for name in ("corpus", "text_column", "characters", "block_length")}
    corpus = load_corpus(tokenizer=source, cache_dir=cache_dir, progress=progress, **spec)
    out.mkdir(parents=True, exist_ok=True)
    with store.full_disk_named(out), store.exclusive(out / "removal.lock"):
        _begin(out, {"model": source, "config": dataclasses.asdict(config), "corpus": corpus.identity()})
        if not (out / TABLE).is_file():
            before = torch.get_num_threads()
            torch.set_num_threads(config.threads)
            logging.disable_progress_bar()
            try:
                _remove_all(source, out, config, corpus, progress)
            finally:
                torch.set_num_threads(before)
                logging.enable_progress_bar()
    return _table(out / TABLE)


def _folder(name: str | Path) -> str:
    """As transformers takes it: a folder, of a model that comes with normlab too, or a hub name."""
    try:
        return str(model_folder(name))
    except NormlabError:
        return str(name)


def _table(path: Path) -> pandas.DataFrame:
    import pandas

    return pandas.read_parquet(path)


def _check_output(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise NormlabError(f"output {out} is a file; name a directory")
    other = [path.name for path in out.iterdir() if not path.name.endswith(".lock")] if out.is_dir() else []
    if other and BEGUN not in other:
        raise NormlabError(f"output directory {out} holds something else ({min(other)}); name an empty or new one")


def _begin(out: Path, asked: dict[str, Any]) -> None:
    begun = out / BEGUN
    if begun.is_file():
        there = json.loads(begun.read_text())
        for part in asked:
            if there[part] != asked[part]:
                raise NormlabError(f"{out} was begun with another {part}: name another folder, or repeat that command")
    else:
        store.write_json(begun, asked)


def _remove_all(source: str, out: Path, config: RemovalConfig, corpus: Corpus, progress: bool) -> None:
    import pandas
    from tqdm import tqdm

    from normlab.training.fine_tune import fine_tune  # transformers' Trainer takes half a second to import

    shutil.rmtree(out / "staging", ignore_errors=True)
    latest = max(out.glob("norm-*"), default=None)
    rows: list[dict[str, Any]] = []
    if latest is None:
        model = load_removable(source)
    else:
        model = NormlabForCausalLM.from_pretrained(latest, dtype=torch.float32)
        rows = _table(latest / TABLE).to_dict("records")
    _check_tokens(model, corpus, config)
    held_out = corpus.spread(config.eval_blocks)
    sites = removable_norms(model)
    bar = tqdm(sites, "norms removed", initial=len(rows), disable=not progress)
    for number, site in enumerate(sites[len(rows) :], len(rows) + 1):
        before = rows[-1]["loss_tuned"] if rows else mean_token_loss(model, held_out, config.batch_size)
        rms = remove_norm(model, site, _calibration(corpus, config))
        removed = mean_token_loss(model, held_out, config.batch_size)
        if config.steps:
            seed = config.seed + number
            fine_tune(model, corpus.train, config.steps, config.batch_size, config.lr, config.weight_decay, seed)
        tuned = mean_token_loss(model, held_out, config.batch_size) if config.steps else removed
        if not math.isfinite(tuned):
            raise NormlabError(
                f"without {site} the loss is {tuned} after fine-tuning: try a smaller --lr, in another folder"
            )
        rows.append(dict(zip(COLUMNS, (number, site, rms, before, removed, tuned), strict=True)))
        staged = out / "staging"
        model.save_pretrained(staged)
        store.write_stats(staged / TABLE, pandas.DataFrame(rows))
        store.publish(staged, out / f"norm-{number:03d}")
        for old in sorted(out.glob("norm-*"))[:-1]:
            shutil.rmtree(old)
        bar.update()
        bar.set_postfix_str(f"loss {tuned:.3f}")
    bar.close()
    _finish(model, source, out, corpus)
    store.write_stats(out / f".{TABLE}", pandas.DataFrame(rows))
    (out / f".{TABLE}").replace(out / TABLE)
    for old in out.glob("norm-*"):
        shutil.rmtree(old)


def _check_tokens(model: Any, corpus: Corpus, config: RemovalConfig) -> None:
    if corpus.vocab_size > model.config.vocab_size:
        raise NormlabError(f"the tokenizer has {corpus.vocab_size} tokens, the model {model.config.vocab_size}")
    if config.block_length > model.config.max_position_embeddings:
        longest = model.config.max_position_embeddings
        raise NormlabError(f"block_length is {config.block_length}; the model was made for at most {longest}")


def _calibration(corpus: Corpus, config: RemovalConfig) -> list[Tensor]:
    """Blocks of the text that is trained on, evenly spaced."""
    count = min(CALIBRATION_BLOCKS, len(corpus.train))
    rows = np.linspace(0, len(corpus.train) - 1, count).round().astype(int)
    blocks = torch.from_numpy(corpus.train[rows].astype(np.int64))
    return list(blocks.split(config.batch_size))


def _finish(model: NormlabForCausalLM, source: str, out: Path, corpus: Corpus) -> None:
    fields, _ = NormlabConfig.get_config_dict(source)
    fold_removed(model)
    final: Any = as_llama(model) if fields.get("model_type") == "llama" else model
    staged = out / "staging"
    final.save_pretrained(staged)
    corpus.tokenizer().save_pretrained(staged)
    store.publish(staged, out / MODEL)
