"""Measure any transformer, layer by layer.

sites, stacks                          find blocks, attention, MLP and norms of any model by structure
record                                 measure them while the model runs; streamed into a LayerStats table
LayerStats                             the table: pandas, Parquet, merge, plot
METRICS                                every metric's definition
skip_sensitivity, skip_future_effect   skip a block, attention or MLP: what the loss loses, what later blocks do
cheapest_spans, mergekit_config        find the span of blocks that costs least to drop
cheapest_branches                      find attention and MLP branches that cost least to drop together
void_tokens, layer_maps                tokens that a block hardly changes; layers predicted from another model's
quantization_costs                     what the loss loses where blocks compute with 8 or 4 bits
angular_distance, jacobian_identity    angles between all pairs of layers; distance of a block from the identity map
massive_activations, attention_sinks   tokens unlike all others: where, in which blocks, as a table and a mask
logit_lens_kl                          compare what the head would predict from each layer with the model's prediction
"""

from normlab.probes.call_inputs import CallInputs
from normlab.probes.depth_use import layer_maps, void_tokens
from normlab.probes.geometry import angular_distance, jacobian_identity, logit_lens_kl
from normlab.probes.layer_stats import LayerStats
from normlab.probes.metrics import FORWARD_METRICS, METRICS, Metric
from normlab.probes.outliers import attention_sinks, massive_activations
from normlab.probes.quantization import quantization_costs
from normlab.probes.record import Recorder, record
from normlab.probes.sites import Block, Sites, sites, stacks
from normlab.probes.skipping import skip_future_effect, skip_sensitivity
from normlab.probes.spans import cheapest_branches, cheapest_spans, mergekit_config

__all__ = [
    "FORWARD_METRICS",
    "METRICS",
    "Block",
    "CallInputs",
    "LayerStats",
    "Metric",
    "Recorder",
    "Sites",
    "angular_distance",
    "attention_sinks",
    "cheapest_branches",
    "cheapest_spans",
    "jacobian_identity",
    "layer_maps",
    "logit_lens_kl",
    "massive_activations",
    "mergekit_config",
    "quantization_costs",
    "record",
    "sites",
    "skip_future_effect",
    "skip_sensitivity",
    "stacks",
    "void_tokens",
]
