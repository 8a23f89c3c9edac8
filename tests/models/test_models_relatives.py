"""Weights of OLMo 2 and Qwen 3 load under their own names into the scheme that they are, with transformers' logits."""

from __future__ import annotations

import pytest
import torch
from model_helpers import LLAMA, assert_near, lively, tokens
from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from normlab import NormlabConfig, NormlabForCausalLM

FAMILIES = {
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"scheme": "reordered_norm"}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"scheme": "pre_rmsnorm", "qk_norm": "rms_head"}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_relatives_weights_give_its_own_logits(family):
    config_class, model_class, ours = FAMILIES[family]
    fields = {**LLAMA, "head_dim": 8, "tie_word_embeddings": False}
    torch.manual_seed(0)
    theirs = lively(model_class(config_class(**fields))).eval()
    model = NormlabForCausalLM(NormlabConfig(**fields, **ours)).eval()
    model.load_state_dict(theirs.state_dict(), strict=True)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert_near(model(ids).logits, theirs(ids).logits, 1e-6)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)
