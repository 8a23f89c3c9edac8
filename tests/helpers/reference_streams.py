"""Schemes of several streams, and of blocks that look back, in float64 from their formulas.

Each goes from the embeddings to what the final norm reads. ``m`` is a `reference_schemes.Model`.
"""

import math

import torch
from reference_model import mean_square, rms_norm
from torch import Tensor

PRE = {"attn": "input_layernorm", "mlp": "post_attention_layernorm"}
PERI_IN = {"attn": "input_layernorm", "mlp": "pre_feedforward_layernorm"}
OUT = {"attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}


def bhyt(m, x: Tensor) -> Tensor:
    """The MLP's norm takes what the attention's norm measured, corrected, or measures again where that is exact."""
    for layer, part, f, name in m.sublayers():
        if part == "attn":
            m.hidden.append(x)
            entering = ms = mean_square(x)
        else:
            ms = mean_square(x) if m.config.carried == "exact" else carried(m, entering, layer, name)
        x = x + f(m.tanh_norm(x, f"{name}.{PRE[part]}", ms))
    return x


def carried(m, ms: Tensor, layer: int, name: str) -> Tensor:
    """The statistic carried to the MLP's norm: the estimated growth, what a block learns of it, its fixed factor.

    The growth is c lambda_in^2 / kappa^2, and a constant to autograd.
    """
    config = m.config
    grown = m.get(f"{name}.c_attn").detach() * m.get(f"{name}.input_layernorm.lam").detach() ** 2 / config.kappa**2
    if config.carried == "causal":
        grown = grown * config.train_seq_len / (torch.arange(ms.shape[1], dtype=torch.float64)[:, None] + 1)
    learned = {which: m.state.get(f"{name}.var_{which}") for which in ("beta", "eta", "cross_beta", "alpha")}
    if config.correction == "beta":
        ms = ms + learned["beta"] * grown
    elif config.correction == "eta":
        ms = ms * (1 + learned["eta"])
    elif config.correction == "residual_aware":
        ms = ms * (1 + learned["cross_beta"]) + learned["alpha"] * grown
    else:
        ms = ms + grown
    return ms * (config.calibration[layer - 1] if config.calibration else 1.0)


def b2t(m, x: Tensor) -> Tensor:
    entered = x
    for _, part, f, name in m.sublayers():
        if part == "attn":
            entered, x = x, m.norm(x + f(x), f"{name}.{OUT[part]}")
        else:
            x = m.norm(x + f(x) + entered, f"{name}.{OUT[part]}")
    return x


def residual_dual(m, x: Tensor) -> Tensor:
    total = x
    for _, part, f, name in m.sublayers():
        update = f(x)
        x, total = m.norm(x + update, f"{name}.{OUT[part]}"), total + update
    return x + rms_norm(total, m.get("model.norm.leave.gain"), m.eps)


def siamese(m, x: Tensor) -> Tensor:
    y = x
    for layer, part, f, name in m.sublayers():
        rule = f"{name}.{part}_residual"
        x = rms_norm(x, m.get(f"{rule}.gain_x"), m.eps)
        z = f(m.norm(x + rms_norm(y, m.get(f"{rule}.gain_y"), m.eps), f"{name}.{PRE[part]}"))
        x, y = x + z / (2 * layer) ** 0.5, y + z
    end = "model.norm.leave"
    return rms_norm(x, m.get(f"{end}.gain_x"), m.eps) + rms_norm(y, m.get(f"{end}.gain_y"), m.eps)


def mhc(m, x: Tensor) -> Tensor:
    n = m.config.streams
    streams = [x for _ in range(n)]
    for _, part, f, name in m.sublayers():
        rule = f"{name}.{part}_residual"
        v = torch.cat(streams, -1)
        v = v / torch.sqrt(mean_square(v) + m.eps)
        matrix, bias, factor = (m.get(f"{rule}.{which}") for which in ("matrix", "bias", "factor"))
        product = v @ matrix.T
        read = torch.sigmoid(factor[0] * product[..., :n] + bias[:n])
        write = 2 * torch.sigmoid(factor[1] * product[..., n : 2 * n] + bias[n : 2 * n])
        mix = torch.exp(factor[2] * product[..., 2 * n :] + bias[2 * n :]).unflatten(-1, (n, n))
        for _ in range(20):
            mix = mix / mix.sum(-2, keepdim=True)
            mix = mix / mix.sum(-1, keepdim=True)
        z = f(m.norm(sum(read[..., i, None] * streams[i] for i in range(n)), f"{name}.{PRE[part]}"))
        streams = [sum(mix[..., i, j, None] * streams[j] for j in range(n)) + write[..., i, None] * z for i in range(n)]
    return sum(streams)


def hyper_connections(m, x: Tensor) -> Tensor:
    """Algorithm 2 of 2409.19606: column 0 of alpha is read, the others mix; rows are the streams that give."""
    n = m.config.streams
    h = torch.stack([x] * n, -2)
    for _, part, f, name in m.sublayers():
        rule = f"{name}.{part}_residual"
        mean = h.mean(-1, keepdim=True)
        v = (h - mean) / torch.sqrt(((h - mean) ** 2).mean(-1, keepdim=True) + m.eps)
        u, factor = m.get(f"{rule}.matrix"), m.get(f"{rule}.factor")
        static = torch.cat([m.get(f"{rule}.static_read")[:, None], m.get(f"{rule}.static_mix")], 1)
        alpha = static + factor[0] * torch.tanh(v @ torch.cat([u[:1], u[2:]]).T)
        beta = m.get(f"{rule}.static_write") + factor[1] * torch.tanh(v @ u[1])
        mixed = alpha.transpose(-1, -2) @ h
        y = f(m.norm(mixed[..., 0, :], f"{name}.{PRE[part]}"))
        h = mixed[..., 1:, :] + beta[..., None] * y[..., None, :]
    return h.sum(-2)


def nanochat(m, x: Tensor) -> Tensor:
    first = x
    for _, part, f, name in m.sublayers():
        if part == "attn":
            rule = f"{name}.attn_residual"
            x = m.get(f"{rule}.keep") * x + m.get(f"{rule}.embedding") * first
        x = x + f(m.norm(x, f"{name}.{PRE[part]}"))
    return x


def block_attn_residuals(m, x: Tensor) -> Tensor:
    """The paper's pseudocode: whole blocks and the sum of the present one, which starts anew at a boundary."""
    size, blocks, partial = math.ceil(m.depth / 8), [], x

    def read(query: Tensor | None) -> Tensor:
        values = torch.stack([*blocks, partial])
        if query is None:
            return values[0]
        scores = (values / torch.sqrt(mean_square(values) + m.eps) * query).sum(-1)
        return (scores.softmax(0)[..., None] * values).sum(0)

    for layer, part, f, name in m.sublayers():
        h = read(m.state.get(f"{name}.{part}_residual.query"))
        if part == "attn" and (layer - 1) % size == 0:
            blocks, partial = [*blocks, partial], torch.zeros_like(partial)
        partial = partial + f(m.norm(h, f"{name}.{PRE[part]}"))
    return read(m.get("model.norm.leave.query"))


def attn_residuals(m, x: Tensor) -> Tensor:
    written = [x]

    def mean(query: Tensor | None) -> Tensor:
        if query is None:  # a softmax over one
            return written[0]
        scores = torch.stack([(query * v).sum(-1) / torch.sqrt(mean_square(v) + m.eps)[..., 0] for v in written])
        return (scores.softmax(0)[..., None] * torch.stack(written)).sum(0)

    for _, part, f, name in m.sublayers():
        written.append(f(m.norm(mean(m.state.get(f"{name}.{part}_residual.query")), f"{name}.{PRE[part]}")))
    return mean(m.get("model.norm.leave.query"))


WHOLE = {
    "bhyt": bhyt,
    "bhyt_exact": bhyt,
    "bhyt_linear": bhyt,
    "b2t": b2t,
    "residual_dual": residual_dual,
    "siamese_norm": siamese,
    "mhc": mhc,
    "attn_residuals": attn_residuals,
    "hyper_connections": hyper_connections,
    "nanochat": nanochat,
    "block_attn_residuals": block_attn_residuals,
}
