"""The schemes of the shipped runs, in the order in which figures show them."""

from __future__ import annotations

import math

from normlab.norms import LayerNorm
from normlab.schemes import builders as b
from normlab.schemes.scheme import PERI, POST, Ends, Scheme

_BHYT = "Bounded Hyperbolic Tangent (2601.09719)"
_CARRIED = ("uniform", "causal", "exact")

# fmt: off
ROWS = (
    Scheme("pre_rmsnorm", "Pre-LN", "x + f(N(x)), N RMSNorm", "RMSNorm (1910.07467)",
           norm=b.rms, family="norm", color="#000000", released_as=("rms", "qwen3"),
           tags="short main contender"),
    Scheme("pre_layernorm", "Pre-LN (LayerNorm)", "x + f(N(x)), N LayerNorm", "LayerNorm (1607.06450)",
           norm=b.of(LayerNorm, eps=1e-5), family="norm", color="#000000", dash="dot"),
    Scheme("pre_rmsnorm_scaled_init", "Pre-LN, scaled init", "x + f(N(x)), output matrices from std/sqrt(2L)",
           "GPT-2; compared in The Curse of Depth (2502.05795)",
           norm=b.rms, family="depth", color="#56b4e9", init=b.writing_over_depth),
    Scheme("lns", "LNS", "x + f(N(x)/sqrt(l))", "The Curse of Depth (2502.05795)",
           norm=b.over_root_layer("scale"), family="depth", color="#009e73",
           tags="short timed main contender"),
    Scheme("lns_gain", "LNS, trained gain", "x + f(N(x)), gain from 1/sqrt(l)",
           "LNS as GPAS (2506.22049) and ProRes (2603.05369) have it: a gain that starts at 1/sqrt(l)",
           norm=b.over_root_layer("gain"), family="depth", color="#009e73", dash="dash",
           tags="contender"),
    Scheme("peri_ln", "Peri-LN", "x + N'(f(N(x)))",
           "Peri-LN (2502.02732); the placement of Sandwich-LN (CogView, 2105.13290) and Gemma 2",
           norm=b.rms, family="placement", color="#e69f00", tags="timed main contender", layout=PERI),
    Scheme("post_rmsnorm", "Post-LN", "N(x + f(x))", "Attention Is All You Need (1706.03762)",
           norm=b.rms, family="placement", color="#8c564b", tags="contender warmed_up",
           layout=POST),
    Scheme("mix_ln", "Mix-LN", "N(x + f(x)) in the first quarter, then x + f(N(x))", "Mix-LN (2412.13795)",
           norm=b.rms, family="placement", color="#8c564b", dash="dash", tags="contender", first_layout=POST,
           first_blocks=b.post_blocks),
    Scheme("dyt", "DyT", "x + f(g tanh(a x)), embeddings times sqrt(d)",
           "Transformers without Normalization (2503.10622)",
           norm=b.dyt, family="norm", color="#cc79a7", tags="timed main contender",
           ends=Ends(embedding_scale=math.sqrt),
           decayed=frozenset({"alpha", "weight", "shared_scale"})),
    Scheme("bhyt", "BHyT", "x + f(g tanh(lambda/kappa x/rms)), the MLP's rms carried over", _BHYT,
           norm=b.bhyt(bounded=True), family="norm", color="#0072b2", carried=_CARRIED,
           released_as=("bhytline", "bhyt"),
           tags="short bound timed main contender"),
    Scheme("bhyt_exact", "BHyT*", "x + f(g tanh(lambda/kappa x/rms))", _BHYT,
           norm=b.bhyt(bounded=True), family="norm", color="#0072b2", dash="dot", carried=("exact",),
           released_as=("bhytstar",), tags="exact_bound timed contender"),
    Scheme("bhyt_linear", "BHyT without tanh", "x + f(g lambda/kappa x/rms), the MLP's rms carried over",
           "control: " + _BHYT,
           norm=b.bhyt(bounded=False), family="norm", color="#56b4e9", dash="dash", carried=_CARRIED, is_control=True,
           tags="bound exact_bound contender"),
    Scheme("rmsnorm_gain", "Pre-LN, gain λ/κ", "x + f(N(x)), gain from lambda/kappa", "control: " + _BHYT,
           norm=b.rms_gain, family="norm", color="#d55e00", dash="dash", is_control=True,
           tags="short main contender"),
)
# fmt: on
