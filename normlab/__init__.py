"""normlab: what normalization does to a deep transformer, layer by layer.

SCHEMES                              the normalization schemes, as data
NormlabConfig, NormlabForCausalLM    models that differ in their scheme only
swap_norms                           another scheme for an existing Llama, Mistral or Qwen model
load_model, load_held_out            a trained model that comes with normlab, and text that it has not seen
find_model                           its folder, by scheme and options
shipped                              the folder of what comes with normlab: runs, models
record, sites, LayerStats            measure the layers of any model; LayerStatsCallback: in any transformers Trainer
skip_sensitivity, angular_distance, jacobian_identity, logit_lens_kl, skip_future_effect: experiments on its layers
TrainConfig, train, sweep            train models and measure them on the way
load_runs, load_configs              runs on disk -> one tidy table; what each run was told to do, a row a run
read_configs                         the same as data, by run: what theory needs to know
load_experiments                     what was measured once, on the trained models
choose, compare, compare_variants    which runs a figure shows; how two schemes differ
load_published                       what papers print
analysis, figures, widgets           table -> table; table -> plotly figure; figure with controls
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from normlab.registration import register_with_transformers

__version__ = "0.1.0"

# Public name -> module that defines it; resolved at first use, so that importing normlab stays cheap.
_PUBLIC = {
    "NormlabError": "normlab.errors",
    "SCHEMES": "normlab.schemes",
    "NormlabConfig": "normlab.models",
    "NormlabForCausalLM": "normlab.models",
    "swap_norms": "normlab.models",
    "load_model": "normlab.models.kept",
    "load_held_out": "normlab.models.kept",
    "find_model": "normlab.models.kept",
    "shipped": "normlab.release",
    "LayerStats": "normlab.probes",
    "record": "normlab.probes",
    "sites": "normlab.probes",
    "skip_sensitivity": "normlab.probes",
    "skip_future_effect": "normlab.probes",
    "angular_distance": "normlab.probes",
    "jacobian_identity": "normlab.probes",
    "logit_lens_kl": "normlab.probes",
    "LayerStatsCallback": "normlab.probes.callback",
    "TrainConfig": "normlab.training.config",
    "train": "normlab.training.run",
    "sweep": "normlab.training.sweep",
    "load_runs": "normlab.runs",
    "load_configs": "normlab.runs",
    "read_configs": "normlab.runs",
    "load_experiments": "normlab.runs",
    "load_published": "normlab.analysis.published",
    "choose": "normlab.analysis.selection",
    "compare": "normlab.analysis.compare",
    "compare_variants": "normlab.analysis.compare",
}
_SUBPACKAGES = ("analysis", "figures", "widgets")
__all__ = [*_PUBLIC, *_SUBPACKAGES, "__version__"]

# The same names for editors and type checkers; a `__getattr__` that they saw would make any name right.
if TYPE_CHECKING:
    from normlab import analysis as analysis
    from normlab import figures as figures
    from normlab import widgets as widgets
    from normlab.analysis.compare import compare as compare
    from normlab.analysis.compare import compare_variants as compare_variants
    from normlab.analysis.published import load_published as load_published
    from normlab.analysis.selection import choose as choose
    from normlab.errors import NormlabError as NormlabError
    from normlab.models import NormlabConfig as NormlabConfig
    from normlab.models import NormlabForCausalLM as NormlabForCausalLM
    from normlab.models import swap_norms as swap_norms
    from normlab.models.kept import find_model as find_model
    from normlab.models.kept import load_held_out as load_held_out
    from normlab.models.kept import load_model as load_model
    from normlab.probes import LayerStats as LayerStats
    from normlab.probes import angular_distance as angular_distance
    from normlab.probes import jacobian_identity as jacobian_identity
    from normlab.probes import logit_lens_kl as logit_lens_kl
    from normlab.probes import record as record
    from normlab.probes import sites as sites
    from normlab.probes import skip_future_effect as skip_future_effect
    from normlab.probes import skip_sensitivity as skip_sensitivity
    from normlab.probes.callback import LayerStatsCallback as LayerStatsCallback
    from normlab.release import shipped as shipped
    from normlab.runs import load_configs as load_configs
    from normlab.runs import load_experiments as load_experiments
    from normlab.runs import load_runs as load_runs
    from normlab.runs import read_configs as read_configs
    from normlab.schemes import SCHEMES as SCHEMES
    from normlab.training.config import TrainConfig as TrainConfig
    from normlab.training.run import train as train
    from normlab.training.sweep import sweep as sweep
else:

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        if name in _SUBPACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module 'normlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# This distribution brings it too; but an uninstall of normlab-kernels, which owns the same files, takes them away.
if getattr(importlib.util.find_spec("normlab_kernels"), "origin", None) is None:
    raise ModuleNotFoundError(
        "normlab's own copy of normlab_kernels is gone (uninstalling normlab-kernels removes it): "
        "install normlab again with pip's --force-reinstall --no-deps",
        name="normlab_kernels",
    )

# model_type="normlab": transformers' AutoModelForCausalLM loads our models once normlab is imported.
register_with_transformers()
