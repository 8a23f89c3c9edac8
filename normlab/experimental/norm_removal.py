"""`normlab remove-norms`: make an existing model's norms fixed gains one by one, and fine-tune after each.

remove_norms(model, out)    the whole procedure, and its table of losses; resumes after the last finished norm
RemovalConfig               its settings
load_removable(folder)      a trained Pre-LN model whose RMSNorms can each become a fixed gain
removable_norms(model)      their names, in the order of removal
remove_norm(model, name)    one of them becomes x gamma / r, with r its mean rms on given text
fold_removed(model)         multiply what is left of all of them into the matrices
as_llama(model)             the result as a stock Llama

While it runs, `out` holds `norm-NNN`, the model after the last finished norm, with its table. At the end it holds
`removal.parquet`, the table, and `model`, folded. Each norm has a new optimizer and order of the text, so a stopped run
repeats the same bits on a CPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler, set_seed
from transformers.utils import logging

from normlab import store
from normlab.errors import NormlabError, first_line
from normlab.files import locked
from normlab.loading import hub_or_cache
from normlab.models import NormlabConfig, NormlabForCausalLM, fold_norms
from normlab.models.attention_mlp import changes_attention
from normlab.models.pretrained import load_whole, model_folder
from normlab.norms import RMSNorm, TaperNorm
from normlab.release import shipped_models
from normlab.schemes import BASELINE, REMOVABLE, get_scheme
from normlab.training.config import (
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    THREADS,
    CorpusSpec,
    at_least,
    check,
    setting,
    shared,
)
from normlab.training.loop import block_order, parameter_groups
from normlab.training.measure import mean_token_loss
from normlab.training.text.corpus import Corpus, corpus_of

if TYPE_CHECKING:
    import pandas

COLUMNS = ("step", "site", "rms", "loss_before", "loss_removed", "loss_tuned")
BEGUN, TABLE, MODEL = "begun.json", "removal.parquet", "model"
CALIBRATION_BLOCKS = 64
HUGE_EPS = 1e12  # sqrt(mean(x^2) + 1e12) is 1e6 for any x


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


# -- one norm at a time ----------------------------------------------------------------------------------------------


def load_removable(name: str | Path) -> NormlabForCausalLM:
    """Load a model in float32 with each RMSNorm, the final one too, as a ``TaperNorm``. The function is the same.

    Args:
        name: folder or hub name of a Llama or of what `NormlabForCausalLM.from_released` loads. Or the folder of a run
            that kept its weights, or a model that comes with normlab.

    Raises:
        NormlabError: norms other than RMSNorms before the branches and the head, or branches that do not simply add.
    """
    folder: Any = model_folder(name) if Path(name).is_dir() or str(name) in shipped_models() else name
    try:
        with hub_or_cache(folder):
            fields, _ = NormlabConfig.get_config_dict(folder)
    except OSError as error:
        raise NormlabError(f"no model could be loaded from {folder}: {first_line(error)}") from error
    if fields.get("model_type") == NormlabConfig.model_type:
        source = load_whole(folder, dtype=torch.float32)
    else:
        plain = fields.get("model_type") == LlamaConfig.model_type and "norm_type" not in fields
        source = NormlabForCausalLM.from_released(folder, BASELINE if plain else None, dtype=torch.float32)
    row, sites = get_scheme(source.config.scheme), removable_norms(source)
    other = [site for site in sites if type(source.get_submodule(site)) is not RMSNorm]
    places = 1 + sum(len(layer.layout.places()) for layer in source.model.layers)
    if other or row.residual is not None or not row.changes_blocks_only or len(sites) != places:
        raise NormlabError(
            f"norms of scheme {row.name} cannot be removed: only an RMSNorm before a branch or the head becomes a "
            "fixed gain"
        )
    config = NormlabConfig.from_dict({**source.config.to_dict(), "scheme": REMOVABLE, "taper_final": True})
    model = NormlabForCausalLM(config)
    model.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for site in sites:
            norm, taper = cast(RMSNorm, source.get_submodule(site)), cast(TaperNorm, model.get_submodule(site))
            taper.weight.copy_(norm.gamma() * norm.scale - taper.centre)
    return model.eval()


def removable_norms(model: NormlabForCausalLM) -> list[str]:
    """Names of all norms of a model of `load_removable`, in the order of removal (Heimersheim, 2409.13710).

    Norms before the MLPs come first, from the first block to the last. Then come those before attention, and the final
    norm.
    """
    layouts = [layer.layout for layer in model.model.layers]
    places = [(place, i) for place in ("mlp_in", "attn_in") for i in range(len(layouts)) if getattr(layouts[i], place)]
    return [*(f"model.layers.{i}.{getattr(layouts[i], place)}" for place, i in places), "model.norm"]


@torch.no_grad()
def remove_norm(model: NormlabForCausalLM, name: str, batches: list[Tensor]) -> float:
    """Make norm `name` compute ``x * gamma / r``.

    2409.13710 freezes the average standard deviation likewise. It treats the first token apart for a while; this does
    not.

    Returns:
        r, the mean of ``sqrt(mean(x^2) + eps)`` over all tokens of the batches.
    """
    norm = cast(TaperNorm, model.get_submodule(name))
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(
        lambda _, inputs: seen.append((inputs[0].float().square().mean(-1) + norm.eps).sqrt().flatten())
    )
    try:
        for ids in batches:
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        handle.remove()
    rms = torch.cat(seen).mean()
    norm.fix(1 / rms)
    return rms.item()


@torch.no_grad()
def fold_removed(model: NormlabForCausalLM) -> None:
    """Multiply each removed norm's gamma/r into the matrices that read it (`fold_norms`).

    The norm is then x itself. It keeps its gain if the matrix has another use, as a tied head has.
    """
    for module in model.modules():
        if isinstance(module, TaperNorm):
            if module.gate != 0:
                raise NormlabError("fold_removed: a norm has not been removed; its gain alone could be folded")
            module.fixed_weight.copy_(module.fixed_gain() - module.centre)
            module.inverse_rms.fill_(1.0)
    fold_norms(model.eval(), partial=True)


@torch.no_grad()
def as_llama(model: NormlabForCausalLM) -> LlamaForCausalLM:
    """Return a model without norms as a stock Llama.

    Its norms stay as modules. They divide by ``sqrt(mean(x^2) + 1e12) = 1e6`` and multiply by 1e6 times the gain, as
    published norm-free GPT-2s do. Not for float16, where x/1e6 is 0.

    Raises:
        NormlabError: attention that is not Llama's. Norms of queries and keys would read the same eps.
    """
    config = model.config
    if changes_attention(config):
        raise NormlabError("as_llama: a stock Llama has no norms of queries and keys, and no affine attention")
    fields = {name: value for name, value in config.to_dict().items() if name in LlamaConfig().to_dict()}
    fields |= {"model_type": LlamaConfig.model_type, "rms_norm_eps": HUGE_EPS}
    llama = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    missing = llama.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing, missing
    for name in removable_norms(model):
        taper, stock = cast(TaperNorm, model.get_submodule(name)), cast(Any, llama.get_submodule(name))
        stock.weight.copy_(taper.fixed_gain() * HUGE_EPS**0.5)
    return llama.eval()


# -- all of them, with fine-tuning ------------------------------------------------------------------------------------


def remove_norms(
    model: str | Path,
    out: str | Path,
    config: RemovalConfig | None = None,
    *,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> pandas.DataFrame:
    """Remove every norm of a trained Pre-LN model, fine-tune after each, and write the result to `out`/model.

    Args:
        model: a Llama's folder or hub name, a run that kept its weights, or a model that comes with normlab. Its
            tokenizer is used.
        out: a new folder, or one that the same call has begun.

    Returns:
        One row per norm, as in `out`/removal.parquet: ``step`` from 1, ``site``, its ``rms``, and the held-out loss in
        nats per token: ``loss_before``, ``loss_removed`` and ``loss_tuned`` (after fine-tuning).

    Raises:
        NormlabError: a model whose norms cannot become fixed gains (`load_removable`), other files in `out`, or a loss
            that is not finite after fine-tuning. What was finished before stays.
    """
    import pandas

    config, out = config or RemovalConfig(), Path(out)
    try:
        source = str(model_folder(model))
    except NormlabError:
        source = str(model)  # a hub name
    if out.exists() and not out.is_dir():
        raise NormlabError(f"output {out} is a file; name a directory")
    other = [path.name for path in out.iterdir() if not path.name.endswith(".lock")] if out.is_dir() else []
    if other and BEGUN not in other:
        raise NormlabError(f"output directory {out} holds something else ({min(other)}); name an empty or new one")
    spec = {name: getattr(config, name) for name in ("corpus", "text_column", "characters", "block_length")}
    corpus = corpus_of(CorpusSpec(tokenizer=source, **spec), cache_dir, progress)
    out.mkdir(parents=True, exist_ok=True)
    busy = f"another process removes norms in {out}; wait for it or stop it"
    with store.full_disk_named(out), locked(out / "removal.lock", busy):
        _begin(out, {"model": source, "config": dataclasses.asdict(config), "corpus": corpus.identity()})
        if not (out / TABLE).is_file():
            threads = torch.get_num_threads()
            torch.set_num_threads(config.threads)
            logging.disable_progress_bar()
            try:
                _remove_all(source, out, config, corpus, progress)
            finally:
                torch.set_num_threads(threads)
                logging.enable_progress_bar()
    return pandas.read_parquet(out / TABLE)


def _begin(out: Path, inputs: dict[str, Any]) -> None:
    if not (out / BEGUN).is_file():
        store.write_json(out / BEGUN, inputs)
    begun = json.loads((out / BEGUN).read_text())
    for part in inputs:
        if begun[part] != inputs[part]:
            raise NormlabError(f"{out} was begun with another {part}: name another folder, or repeat that command")


def _remove_all(source: str, out: Path, config: RemovalConfig, corpus: Corpus, progress: bool) -> None:
    import pandas
    from tqdm import tqdm

    staged, latest = out / "staging", max(out.glob("norm-*"), default=None)
    shutil.rmtree(staged, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    if latest is None:
        model = load_removable(source)
    else:
        model = NormlabForCausalLM.from_pretrained(latest, dtype=torch.float32)
        rows = pandas.read_parquet(latest / TABLE).to_dict("records")
    _check_tokens(model, corpus, config)
    # blocks of the training text, evenly spaced
    spaced = np.linspace(0, len(corpus.train) - 1, min(CALIBRATION_BLOCKS, len(corpus.train))).round().astype(int)
    calibration = list(torch.from_numpy(corpus.train[spaced].astype(np.int64)).split(config.batch_size))
    held_out = corpus.spread(config.eval_blocks)
    sites = removable_norms(model)
    bar = tqdm(sites, "norms removed", initial=len(rows), disable=not progress)
    for number, site in enumerate(sites[len(rows) :], len(rows) + 1):
        before = rows[-1]["loss_tuned"] if rows else mean_token_loss(model, held_out, config.batch_size)
        rms = remove_norm(model, site, calibration)
        removed = tuned = mean_token_loss(model, held_out, config.batch_size)
        if config.steps:
            fine_tune(model, corpus.train, config, config.seed + number)
            tuned = mean_token_loss(model, held_out, config.batch_size)
        if not math.isfinite(tuned):
            raise NormlabError(
                f"without {site} the loss is {tuned} after fine-tuning: try a smaller --lr, in another folder"
            )
        rows.append(dict(zip(COLUMNS, (number, site, rms, before, removed, tuned), strict=True)))
        model.save_pretrained(staged)
        store.write_stats(staged / TABLE, pandas.DataFrame(rows))
        store.publish(staged, out / f"norm-{number:03d}")
        for old in sorted(out.glob("norm-*"))[:-1]:
            shutil.rmtree(old)
        bar.update()
        bar.set_postfix_str(f"loss {tuned:.3f}")
    bar.close()
    fold_removed(model)
    was_llama = NormlabConfig.get_config_dict(source)[0].get("model_type") == LlamaConfig.model_type
    (as_llama(model) if was_llama else model).save_pretrained(staged)
    corpus.tokenizer().save_pretrained(staged)
    store.publish(staged, out / MODEL)
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


def fine_tune(model: NormlabForCausalLM, blocks: np.ndarray, config: RemovalConfig, seed: int) -> None:
    """Train a model in place on rows of token ids, in the order of `seed`, and leave it in evaluation mode."""
    set_seed(seed)
    groups = parameter_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
    schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=math.ceil(config.steps / 10))
    order = block_order(len(blocks), seed)
    model.train()
    for _ in range(config.steps):
        rows = list(itertools.islice(order, config.batch_size))
        ids = torch.from_numpy(blocks[rows].astype(np.int64)).to(model.device)
        labels = torch.tensor(float(ids[:, 1:].numel()), device=model.device)
        model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
    model.eval()
