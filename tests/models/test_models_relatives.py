"""OLMo 2 and Qwen 3 load as the scheme that they are, with transformers' logits; what differs elsewhere is refused."""

from __future__ import annotations

import pytest
import torch
from model_helpers import LLAMA, assert_near, lively, tokens
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from normlab import NormlabConfig, NormlabForCausalLM
from normlab.errors import NormlabError

FIELDS = {**LLAMA, "head_dim": 8, "tie_word_embeddings": False}
FAMILIES = {
    "reordered_norm": (Olmo2Config, Olmo2ForCausalLM),
    "pre_rmsnorm": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.mark.parametrize("scheme", FAMILIES)
def test_a_relatives_checkpoint_gives_its_own_logits(scheme, tmp_path):
    config_class, model_class = FAMILIES[scheme]
    torch.manual_seed(0)
    theirs = lively(model_class(config_class(**FIELDS))).eval()
    theirs.save_pretrained(tmp_path)
    model = NormlabForCausalLM.from_released(str(tmp_path)).eval()
    assert model.config.scheme == scheme
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    ids = tokens(2, 9)
    with torch.no_grad():
        assert_near(model(ids).logits, theirs(ids).logits, 1e-6)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_a_checkpoint_that_differs_in_another_part_is_refused_by_that_part(tmp_path):
    Gemma3ForCausalLM(Gemma3TextConfig(**FIELDS)).save_pretrained(tmp_path)
    with pytest.raises(NormlabError, match="gemma3_text cannot be loaded.*within a window and turn by a RoPE base"):
        NormlabForCausalLM.from_released(str(tmp_path))
    windows = Qwen3Config(**FIELDS, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(NormlabError, match="qwen3 cannot be loaded: its attention is within a window"):
        NormlabConfig.from_released(windows.to_dict())
