"""Measure any transformer, layer by layer.

sites               where: blocks, attention, MLP and norms of any model, found by structure; stacks: of all its stacks
record              what happens there while the model runs, streamed into a LayerStats table
LayerStats          the table: pandas, Parquet, merge, plot
METRICS             every metric's definition
skip_sensitivity    what the loss loses when a block, attention or MLP is skipped; skip_future_effect: what later blocks
                    do then
cheapest_spans      what to cut: the span of blocks that costs least, at each length
angular_distance    angles between all pairs of layers; jacobian_identity: how near a block is to the identity map
logit_lens_kl       what the head would predict from each layer
"""

from normlab.probes.geometry import angular_distance, jacobian_identity, logit_lens_kl
from normlab.probes.metrics import FORWARD_METRICS, METRICS, Metric
from normlab.probes.recorder import Recorder
from normlab.probes.recording import record
from normlab.probes.sites import Block, Sites, sites, stacks
from normlab.probes.skipping import skip_future_effect, skip_sensitivity
from normlab.probes.spans import cheapest_spans, mergekit_config
from normlab.probes.stats import LayerStats

__all__ = [
    "FORWARD_METRICS",
    "METRICS",
    "Block",
    "LayerStats",
    "Metric",
    "Recorder",
    "Sites",
    "angular_distance",
    "cheapest_spans",
    "jacobian_identity",
    "logit_lens_kl",
    "mergekit_config",
    "record",
    "sites",
    "skip_future_effect",
    "skip_sensitivity",
    "stacks",
]
