"""Whole models of every scheme: the kernels and PyTorch's path give the same logits and gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_harness import DEVICE
from normlab_kernels import dispatch

normlab = pytest.importorskip("normlab", reason="the models are normlab's: pip install -e .")


def outcome(scheme: str, kernels: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and parameter gradients of a tiny model with outlying residuals, always the same."""
    torch.manual_seed(0)
    config = normlab.NormlabConfig(
        scheme=scheme,
        vocab_size=32,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
    )
    model = normlab.NormlabForCausalLM(config, kernels=kernels).to(DEVICE)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 30
    tokens = torch.arange(12, device=DEVICE).view(2, 6) % 32
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out.logits.detach(), {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", sorted(normlab.SCHEMES))
def test_kernels_and_torch_agree_on_logits_and_gradients(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = dispatch._triton_path
    monkeypatch.setattr(dispatch, "_triton_path", lambda *args: launched.append(1) or launch(*args))
    logits, gradients = outcome(scheme, "triton")
    assert launched
    launched.clear()
    expected_logits, expected = outcome(scheme, "torch")
    assert not launched
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        size = value.abs().max()
        assert (gradients[name] - value).abs().max() <= 1e-4 * size + 1e-6, name
