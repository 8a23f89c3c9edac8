"""Trained models: load the ones that come with normlab, or a run's; export one for programs without normlab.

A model that comes with normlab is a folder with bfloat16 weights, the tokenizer, its run's manifest, and held-out
blocks of its corpus. No learning rate was chosen on these. `python -m normlab.training.keep` makes the folders.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normlab.errors import NormlabError, first_line, in_one_line
from normlab.files import whole_folder
from normlab.loading import loads_quietly, of_its_files_size, require_fit, without_bars
from normlab.models.config import NormlabConfig
from normlab.models.model import NormlabForCausalLM
from normlab.release import shipped, shipped_models

BLOCKS = "held_out.safetensors"
# The code in an exported folder, which transformers runs with `trust_remote_code=True`.
EXPORTED_CODE = '''"""What transformers runs to load this folder: normlab."""

try:
    from normlab.models import NormlabConfig, NormlabForCausalLM
except ImportError as error:
    raise ImportError(
        "this model is made of normlab's blocks: install the package normlab where you load it "
        "(pip install 'normlab @ git+ADDRESS', or '.' in a checkout)"
    ) from error

__all__ = ["NormlabConfig", "NormlabForCausalLM"]
'''
EXPORTED_FILE = "modeling_normlab.py"
AUTO_MAP = {
    "AutoConfig": "modeling_normlab.NormlabConfig",
    "AutoModelForCausalLM": "modeling_normlab.NormlabForCausalLM",
}


def load_model(name: str | Path, *, any_size: bool = False, **kwargs: Any) -> NormlabForCausalLM:
    """Load a trained model in evaluation mode.

    Args:
        name: a model that comes with normlab (the folders of data/models: "pre_rmsnorm-d8"), or the folder of a run
            that kept its weights.
        any_size: build it even if its configuration makes it far larger than its files.
        kwargs: for `from_pretrained`. `dtype` is float32 by default.

    Raises:
        NormlabError: no such model here, weights that do not fit its configuration, or its release cannot be reached.
    """
    return load_whole(model_folder(name), any_size=any_size, **{"dtype": torch.float32, **kwargs})


def load_whole(folder: Path, any_size: bool = False, **kwargs: Any) -> NormlabForCausalLM:
    """`NormlabForCausalLM.from_pretrained` in evaluation mode.

    Raises:
        NormlabError: not a model of normlab's, or a weight is missing, unexpected or unreadable.
    """
    try:
        config = NormlabConfig.get_config_dict(folder)[0]
        if (kind := config.get("model_type")) != NormlabConfig.model_type:
            raise NormlabError(f"{folder} holds a {kind} model, not one of normlab's: name a run that kept its weights")
        with loads_quietly(), without_bars(), of_its_files_size(folder, config, any_size):
            loaded: Any = NormlabForCausalLM.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
    except NormlabError:
        raise
    except Exception as error:  # from the configuration, safetensors or PyTorch
        raise NormlabError(f"no model could be loaded from {folder}: {in_one_line(error)}") from error
    model, info = loaded
    require_fit(folder, info)
    return model.eval()


def load_held_out(name: str | Path) -> Tensor:
    """Held-out blocks of the corpus that model `name` was trained on: ids ``(blocks, tokens)``, int64.

    NormlabError: it is a folder without such blocks.
    """
    from safetensors.torch import load_file

    if not (file := model_folder(name) / BLOCKS).is_file():
        raise NormlabError(f"{file.parent} has no held-out blocks: name a model that comes with normlab")
    return load_file(file)["blocks"].long()


def find_model(scheme: str, **options: Any) -> Path | None:
    """Find the shallowest model that comes with normlab, of a scheme.

    Args:
        scheme: a key of ``normlab.SCHEMES``.
        options: fields of `NormlabConfig` that it must have.

    Returns:
        Its folder, for `load_model` and `load_held_out`, or None. An installed package does not know the names: None.

    Raises:
        NormlabError: an option that is no field.
    """
    matches = []
    if unknown := sorted(name for name in options if not hasattr(NormlabConfig(), name)):
        raise NormlabError(f"{unknown[0]} is no field of a NormlabConfig")
    for name in shipped_models():
        config = NormlabConfig.from_pretrained(model_folder(name))
        if config.scheme == scheme and all(getattr(config, field) == value for field, value in options.items()):
            matches.append((config.num_hidden_layers, model_folder(name)))
    return min(matches)[1] if matches else None


def model_folder(name: str | Path) -> Path:
    """The folder itself, or the folder of a model that comes with normlab."""
    path = Path(name)
    return path if os.path.isdir(path) else shipped(f"models/{name}")


def export_model(name: str | Path, out: str | Path) -> Path:
    """Write a trained model to a folder that loads wherever normlab is installed.

    Load it by `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)`. The folder holds weights, tokenizer
    and a few lines of code that import normlab.

    Args:
        name: the folder of a run that kept its weights, or a model that comes with normlab.
        out: a new or empty folder.

    Raises:
        NormlabError: no weights, weights that do not fit the configuration, no tokenizer, or `out` is not empty.
    """
    from transformers import AutoTokenizer

    folder, out = model_folder(name), Path(out)
    if not any(folder.glob("model*.safetensors")):
        raise NormlabError(f"{folder} holds no weights: name a run that was trained with keep_weights")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NormlabError(f"{out} is there already: name a new or empty folder")
    model = load_whole(folder, dtype="auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise NormlabError(f"no tokenizer could be loaded from {folder}: {first_line(error)}") from error
    model.config.auto_map = AUTO_MAP
    with whole_folder(out) as staged, without_bars():
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        (staged / EXPORTED_FILE).write_text(EXPORTED_CODE, encoding="utf-8")
    return out
