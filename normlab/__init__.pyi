# The public names: `__init__.py` imports from here at first use, and type checkers read it.

# table -> table; table -> plotly figure; figures with controls
from . import analysis as analysis
from . import figures as figures
from . import widgets as widgets

# which runs a figure shows; how two schemes differ; values that papers print
from .analysis.compare import compare as compare
from .analysis.compare import compare_variants as compare_variants
from .analysis.published import load_published as load_published
from .analysis.selection import choose as choose

# where two models part
from .differences import diff as diff
from .errors import NormlabError as NormlabError

# models that differ in their scheme only; another scheme for an existing model
from .models import NormlabConfig as NormlabConfig
from .models import NormlabForCausalLM as NormlabForCausalLM
from .models import swap_norms as swap_norms

# what a saved checkpoint's files show
from .models.check import check as check

# trained models that come with normlab, and text that they have not seen
from .models.pretrained import find_model as find_model
from .models.pretrained import load_held_out as load_held_out
from .models.pretrained import load_model as load_model

# measurements on the layers of any model, and experiments on them
from .probes import LayerStats as LayerStats
from .probes import angular_distance as angular_distance
from .probes import attention_sinks as attention_sinks
from .probes import jacobian_identity as jacobian_identity
from .probes import logit_lens_kl as logit_lens_kl
from .probes import massive_activations as massive_activations
from .probes import record as record
from .probes import sites as sites
from .probes import skip_future_effect as skip_future_effect
from .probes import skip_sensitivity as skip_sensitivity
from .probes.callback import LayerStatsCallback as LayerStatsCallback
from .probes.observe import observe as observe
from .release import shipped as shipped

# runs on disk -> tables; each run's configuration, as a table and as data
from .runs import load_configs as load_configs
from .runs import load_experiments as load_experiments
from .runs import load_runs as load_runs
from .runs import read_configs as read_configs
from .schemes import SCHEMES as SCHEMES

# train models and measure them on the way
from .training.config import TrainConfig as TrainConfig
from .training.run import train as train
from .training.sweep import sweep as sweep

__version__: str
