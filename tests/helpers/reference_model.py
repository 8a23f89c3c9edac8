"""A Llama with any of the schemes, written out in float64 from the papers' formulas.

It shares no code with normlab. Attention, rotary embedding and every block are spelled out, so an error in the library
cannot hide behind the same error here. Parameters come as a state dict; autograd runs through it.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

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


def bhyt(x: Tensor, gamma: Tensor, lam: Tensor, kappa: float, ms: Tensor, bounded: bool = True) -> Tensor:
    z = lam / kappa * x / torch.sqrt(ms + 1e-6)
    return gamma * (torch.tanh(z) if bounded else z)


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary embedding of (batch, heads, tokens, head_dim): coordinate i is paired with i + head_dim/2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[:, None, :, None].double() * frequency
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def attention(x: Tensor, state: State, name: str, config, positions: Tensor, allowed: Tensor) -> Tensor:
    batch, length, _ = x.shape
    head_dim = config.hidden_size // config.num_attention_heads

    def heads(which: str) -> Tensor:
        projected = x @ state[f"{name}.{which}_proj.weight"].T
        return projected.view(batch, length, -1, head_dim).transpose(1, 2)

    query, key, value = rotate(heads("q"), positions), rotate(heads("k"), positions), heads("v")
    group = config.num_attention_heads // config.num_key_value_heads
    mixed = []
    for head in range(config.num_attention_heads):
        score = query[:, head] @ key[:, head // group].transpose(1, 2) / math.sqrt(head_dim)
        mixed.append(score.masked_fill(~allowed, -math.inf).softmax(-1) @ value[:, head // group])
    return torch.cat(mixed, dim=-1) @ state[f"{name}.o_proj.weight"].T


def mlp(x: Tensor, state: State, name: str) -> Tensor:
    gate, up = x @ state[f"{name}.gate_proj.weight"].T, x @ state[f"{name}.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ state[f"{name}.down_proj.weight"].T


def correction(state: State, name: str, config, positions: Tensor) -> Tensor:
    """c lambda_in^2/kappa^2, the estimated growth of the mean square between the two sites; constants to autograd."""
    lam = state[f"{name}.input_layernorm.lam"].detach()
    grown = state[f"{name}.c_attn"].detach() * lam**2 / config.kappa**2
    if config.carried == "causal":
        return grown * config.train_seq_len / (positions[..., None].double() + 1)
    return grown


def estimate(ms: Tensor, grown: Tensor, layer: int, state: State, config) -> Tensor:
    """The carried statistic, with what a block learns of it and its fixed factor."""
    learned = {
        name: state.get(f"model.layers.{layer - 1}.var_{name}") for name in ("beta", "eta", "cross_beta", "alpha")
    }
    if config.correction == "beta":
        ms = ms + learned["beta"] * grown
    elif config.correction == "eta":
        ms = ms * (1 + learned["eta"])
    elif config.correction == "residual_aware":
        ms = ms * (1 + learned["cross_beta"]) + learned["alpha"] * grown
    else:
        ms = ms + grown
    return ms * (config.calibration[layer - 1] if config.calibration else 1.0)


def block(x: Tensor, layer: int, state: State, config, positions: Tensor, allowed: Tensor) -> Tensor:
    """Block ``layer`` = 1..L of ``config.scheme``."""
    name, scheme, eps = f"model.layers.{layer - 1}", config.scheme, config.rms_norm_eps

    def attn(h):
        return attention(h, state, f"{name}.self_attn", config, positions, allowed)

    def ffn(h):
        return mlp(h, state, f"{name}.mlp")

    def gamma(site):
        return state[f"{name}.{site}.weight"]

    def rms(h, site):
        return rms_norm(h, gamma(site), eps)

    post_layers = {"post_rmsnorm": config.num_hidden_layers}.get(scheme, 0)
    if scheme == "mix_ln":
        post_layers = max(1, int(config.post_fraction * config.num_hidden_layers))
    if layer <= post_layers:
        x = rms(x + attn(x), "post_attention_layernorm")
        return rms(x + ffn(x), "post_feedforward_layernorm")
    if scheme in ("pre_rmsnorm", "pre_rmsnorm_scaled_init", "rmsnorm_gain", "lns_gain", "mix_ln"):
        x = x + attn(rms(x, "input_layernorm"))
        return x + ffn(rms(x, "post_attention_layernorm"))
    if scheme == "lns":
        x = x + attn(rms(x, "input_layernorm") / math.sqrt(layer))
        return x + ffn(rms(x, "post_attention_layernorm") / math.sqrt(layer))
    if scheme == "peri_ln":
        x = x + rms(attn(rms(x, "input_layernorm")), "post_attention_layernorm")
        return x + rms(ffn(rms(x, "pre_feedforward_layernorm")), "post_feedforward_layernorm")
    if scheme == "pre_layernorm":
        x = x + attn(layer_norm(x, gamma("input_layernorm"), state[f"{name}.input_layernorm.bias"], 1e-5))
        site = "post_attention_layernorm"
        return x + ffn(layer_norm(x, gamma(site), state[f"{name}.{site}.bias"], 1e-5))
    if scheme == "dyt":
        for site, branch in (("input_layernorm", attn), ("post_attention_layernorm", ffn)):
            x = x + branch(gamma(site) * torch.tanh(state[f"{name}.{site}.alpha"] * x))
        return x

    bounded = scheme != "bhyt_linear"
    lam_in, lam_post = state[f"{name}.input_layernorm.lam"], state[f"{name}.post_attention_layernorm.lam"]
    ms = mean_square(x)
    x = x + attn(bhyt(x, gamma("input_layernorm"), lam_in, config.kappa, ms, bounded))
    if config.carried == "exact":
        ms = mean_square(x)
    else:
        ms = estimate(ms, correction(state, name, config, positions), layer, state, config)
    return x + ffn(bhyt(x, gamma("post_attention_layernorm"), lam_post, config.kappa, ms, bounded))


def final_norm(x: Tensor, state: State, config) -> Tensor:
    gamma = state["model.norm.weight"]
    if config.scheme == "dyt":
        return gamma * torch.tanh(state["model.norm.alpha"] * x)
    if config.scheme == "pre_layernorm":
        return layer_norm(x, gamma, state["model.norm.bias"], 1e-5)
    if config.scheme.startswith("bhyt") and config.lam_last > 0:
        bounded = config.scheme != "bhyt_linear"
        return bhyt(x, gamma, state["model.norm.lam"], config.kappa, mean_square(x), bounded)
    return rms_norm(x, gamma, config.rms_norm_eps)


def reference(
    config, state: State, input_ids: Tensor, *, positions: Tensor | None = None, allowed: Tensor | None = None
) -> SimpleNamespace:
    """Logits (batch, tokens, vocab) and ``hidden``: the embeddings and each block's output."""
    batch, length = input_ids.shape
    if positions is None:
        positions = torch.arange(length).expand(batch, length)
    if allowed is None:
        allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, length, length)
    x = state["model.embed_tokens.weight"][input_ids]
    if config.scheme == "dyt":
        x = x * state["model.shared_scale"]
    hidden = [x]
    for layer in range(1, config.num_hidden_layers + 1):
        x = block(x, layer, state, config, positions, allowed)
        hidden.append(x)
    return SimpleNamespace(logits=final_norm(x, state, config) @ state["lm_head.weight"].T, hidden=hidden)


def next_token_loss(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, in nats."""
    log_probability = logits[:, :-1].log_softmax(-1)
    return -log_probability.gather(-1, input_ids[:, 1:, None]).mean()
