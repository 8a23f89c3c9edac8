"""Models to keep: trained weights of a sweep, rounded to bfloat16, with what is needed to measure them again.

    python -m normlab.training.keep RUNS OUT [--cache-dir DIR]

Every run below RUNS that kept its weights becomes a folder OUT/<scheme>-d<depth>. Fields of its model come between the
two, as in bhyt-lam_last10-d8. The folder holds weights, configuration, tokenizer, the held-out blocks of the run's
evaluation, and its manifest. `kept` in the manifest is the loss on these blocks after rounding.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

from normlab import runs, store
from normlab.errors import NormlabError, fail
from normlab.files import whole_folder
from normlab.models import NormlabForCausalLM
from normlab.models.pretrained import BLOCKS
from normlab.training.config import TrainConfig
from normlab.training.measure import mean_token_loss
from normlab.training.text.corpus import corpus_of


def keep(root: str | Path, out: str | Path, cache_dir: str | Path | None = None) -> list[Path]:
    """Write every run below `root` that kept its weights to `out`, and return their folders.

    A run that cannot be read, or is there twice, is named in a warning and left out.

    Raises:
        NormlabError: no run has weights; two of them would have one name; or this machine's corpus is not the one that
            a run was trained on.
    """
    kept = [folder for folder in runs.find_runs(root) if (folder / runs.WEIGHTS).is_file()]
    if not kept:
        raise NormlabError(f"no run in {root} kept its weights; train again with --keep-weights, in another directory")
    found = runs.read_runs(kept)
    configs = [TrainConfig.from_dict(run.config) for run in found]
    name, count = Counter(map(name_of, configs)).most_common(1)[0]
    if count > 1:
        raise NormlabError(f"{count} of these runs would be {name}, which seed, rate and width do not tell apart")
    return [_keep(run, config, Path(out), cache_dir) for run, config in zip(found, configs, strict=True)]


def name_of(config: TrainConfig) -> str:
    """A name such as bhyt-lam_last10-d8: scheme, fields of the model, depth."""
    own = [f"{name}{value:g}" if isinstance(value, float) else f"{name}{value}" for name, value in config.model.items()]
    return "-".join([config.scheme, *own, f"d{config.depth}"])


def _keep(run: runs.Run, config: TrainConfig, out: Path, cache_dir: str | Path | None) -> Path:
    folder = store.inside(out, name_of(config))
    corpus = corpus_of(config, cache_dir, progress=True)
    if corpus.content_hash != run.manifest["corpus"]["content_hash"]:
        raise NormlabError(f"{run.name} was trained on another text than this machine's {config.corpus}")
    with whole_folder(folder) as staged:
        NormlabForCausalLM.from_pretrained(run.path, dtype=torch.bfloat16).save_pretrained(staged)
        tokenizer = corpus.tokenizer()
        tokenizer.save_pretrained(staged)
        # Without blanks and line breaks, which are more than half of the file that transformers saves.
        tokenizer.backend_tokenizer.save(str(staged / "tokenizer.json"), pretty=False)
        blocks = corpus.measured_on(config).eval
        save_file({"blocks": torch.from_numpy(blocks).to(torch.int32)}, staged / BLOCKS)
        rounded = NormlabForCausalLM.from_pretrained(staged, dtype=torch.float32)
        kept = {"dtype": "bfloat16", "eval_loss": mean_token_loss(rounded, blocks, config.batch_size)}
        store.write_json(staged / store.MANIFEST, {**run.manifest, "kept": kept})
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m normlab.training.keep", description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache-dir", type=Path)
    args = parser.parse_args()
    try:
        print(*keep(args.runs, args.out, args.cache_dir), sep="\n")
    except NormlabError as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
