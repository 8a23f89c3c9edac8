"""Parts of the independent float64 model in `reference_schemes`: norms, rotary embedding, loss."""

import torch
from torch import Tensor

State = dict[str, Tensor]


def as_float64(state: State, *, grad: bool = False) -> State:
    """A copy in float64. With ``grad`` every tensor is a leaf; tied tensors get one leaf each."""
    return {name: tensor.detach().double().clone().requires_grad_(grad) for name, tensor in state.items()}


def mean_square(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True) / x.shape[-1]


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return gamma * x / torch.sqrt(mean_square(x) + eps)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return gamma * centred / torch.sqrt(mean_square(centred) + eps) + beta


def rotate(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary embedding of (batch, heads, tokens, head_dim): coordinate i is paired with i + head_dim/2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def next_token_loss(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, in nats."""
    log_probability = logits[:, :-1].log_softmax(-1)
    return -log_probability.gather(-1, input_ids[:, 1:, None]).mean()
