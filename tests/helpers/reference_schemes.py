"""Every scheme in float64 from its formula alone: a Llama whose parts a scheme replaces, by name, in tables.

It shares no code with normlab. ``reference(config, state, ids)`` reads a state dict (names as saved) and the published
constants; autograd runs through it.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from reference_model import State, layer_norm, mean_square, rms_norm, rotate
from reference_streams import OUT, PERI_IN, PRE, WHOLE
from torch import Tensor

Norm = Callable[[Tensor, State, str], Tensor]


def unit(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


class Model:
    """One forward pass; methods are the parts that tables below replace."""

    def __init__(self, config, state: State, ids: Tensor) -> None:
        self.config, self.state, self.ids = config, state, ids
        self.eps, self.d, self.depth = config.rms_norm_eps, config.hidden_size, config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.head = self.d // self.heads
        self.scheme = config.scheme
        self.hidden: list[Tensor] = []

    def get(self, name: str) -> Tensor:
        return self.state[name]

    def rms(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.get(f"{name}.weight"), self.eps)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return NORMS.get(self.scheme, Model.rms)(self, x, name)

    def tanh_norm(self, x: Tensor, name: str, ms: Tensor) -> Tensor:
        z = self.get(f"{name}.lam") / self.config.kappa * x / torch.sqrt(ms + 1e-6)
        return self.get(f"{name}.weight") * (z if self.scheme == "bhyt_linear" else torch.tanh(z))

    # -- branches ---------------------------------------------------------------------------------------------------

    def attention(self, x: Tensor, name: str) -> Tensor:
        batch, length, _ = x.shape
        if self.scheme == "fixup":  # a scalar before every matrix
            x = x + self.get(f"{name}.shift")[0]
        kind = QK.get(self.scheme, "none") if self.config.qk_norm is None else self.config.qk_norm

        def project(which: str) -> Tensor:
            return x @ self.get(f"{name}.{which}_proj.weight").T

        query, key, value = project("q"), project("k"), project("v")
        if kind == "rms_width":
            query, key = self.rms(query, f"{name}.q_norm"), self.rms(key, f"{name}.k_norm")
        query, key, value = (t.view(batch, length, -1, self.head).transpose(1, 2) for t in (query, key, value))
        if kind == "rms_head":
            query, key = self.rms(query, f"{name}.q_norm"), self.rms(key, f"{name}.k_norm")
        if self.scheme.startswith("hybridnorm"):
            value = self.rms(value, f"{name}.v_norm")
        query, key = rotate(query), rotate(key)
        root = 1.0 if self.scheme == "complete_p" else 0.5  # q.k / d_head
        factor = torch.full((self.heads, 1), self.head**-root, dtype=torch.float64)
        if kind == "l2":
            query, key, factor = unit(query), unit(key), self.get(f"{name}.qk_scale").view(self.heads, 1)
        if self.scheme == "ngpt":  # s_qk on queries and on the keys that a group of heads reads
            s = (self.get(f"{name}.qk_scale") * self.d**0.5).view(self.heads, 1, self.head)
            query, factor = s * unit(query), torch.full((self.heads, 1), self.head**0.5, dtype=torch.float64)
            key = unit(key)
        group = self.heads // self.config.num_key_value_heads
        if self.config.affine_attention:
            a = (0.1 * x @ self.get(f"{name}.affine_gate.weight").T + 0.5).clamp(0, 1)[..., None]
            m = self.get(f"{name}.affine_mean")
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = []
        for head in range(self.heads):
            keys = key[:, head // group]
            if self.scheme == "ngpt":
                keys = s[head] * keys
            score = query[:, head] @ keys.transpose(1, 2) * factor[head]
            weights = score.masked_fill(~allowed, -math.inf).softmax(-1)
            if self.config.affine_attention:
                own = a[:, :, head]
                weights = (own * weights + (m[head] - own) / allowed.sum(-1, keepdim=True)) * allowed
            mixed.append(weights @ value[:, head // group])
        heads = torch.cat(mixed, dim=-1)
        if self.scheme == "sub_ln":
            heads = self.rms(heads, f"{name}.o_norm")
        if self.scheme == "fixup":
            heads = heads + self.get(f"{name}.shift")[1]
        return heads @ self.get(f"{name}.o_proj.weight").T

    def mlp(self, x: Tensor, name: str) -> Tensor:
        if self.scheme == "fixup":
            x = x + self.get(f"{name}.shift")[0]
        gate, up = x @ self.get(f"{name}.gate_proj.weight").T, x @ self.get(f"{name}.up_proj.weight").T
        if self.scheme == "ngpt":
            s_gate, s_up = (self.get(f"{name}.scale") * self.d**0.5).chunk(2)
            gate, up = s_gate * gate, s_up * up
        if self.scheme == "fixup":  # a scalar before the activation, and one before the matrix after it
            gate = gate + self.get(f"{name}.shift")[1]
        inner = gate * torch.sigmoid(gate) * up
        if self.scheme == "fixup":
            inner = inner + self.get(f"{name}.shift")[2]
        if self.scheme == "sub_ln":
            inner = self.rms(inner, f"{name}.norm")
        return inner @ self.get(f"{name}.down_proj.weight").T

    # -- ends -------------------------------------------------------------------------------------------------------

    def embedded(self) -> Tensor:
        rows = self.get("model.embed_tokens.weight")[self.ids]
        if self.scheme in ("dyt", "derf", "dyisru"):
            return rows * self.get("model.shared_scale")
        if self.scheme == "fixnorm":
            return self.d**0.5 * unit(rows)
        if self.scheme in ("nanochat", "residual_gate"):
            return rows / torch.sqrt(mean_square(rows) + self.eps)
        if self.scheme == "osp_rmsnorm":
            return rows @ self.get("model.embedding_end.projection.weight").T
        return rows

    def headed(self, x: Tensor) -> Tensor:
        rows = self.get("lm_head.weight")
        if self.scheme == "fixnorm":
            rows = unit(rows)
        if self.scheme == "osp_rmsnorm":
            x = x @ self.get("lm_head.projection.weight").T
        if self.scheme == "fixup":
            x = x + self.get("lm_head.shift")
        logits = x @ rows.T
        if self.scheme == "ngpt":
            return logits * self.get("lm_head.scale") * self.d**0.5
        return logits * (256 / self.d) if self.scheme == "complete_p" else logits

    # -- the way through --------------------------------------------------------------------------------------------

    def logits(self) -> Tensor:
        x = WHOLE.get(self.scheme, one_stream)(self, self.embedded())
        final = FINAL.get(self.scheme, "model.norm")
        return self.headed(self.norm(x, final) if final else x)

    def sublayers(self):
        """(layer from 1, part, f without norms, the two norms' names in Pre-LN) in order."""
        for layer in range(1, self.depth + 1):
            name = f"model.layers.{layer - 1}"
            of = "model.layers.0" if self.scheme == "looped" else name
            yield layer, "attn", lambda x, n=of: self.attention(x, f"{n}.self_attn"), name
            yield layer, "mlp", lambda x, n=of: self.mlp(x, f"{n}.mlp"), name


# -- norms -----------------------------------------------------------------------------------------------------------


def layer(m: Model, x: Tensor, name: str) -> Tensor:
    return layer_norm(x, m.get(f"{name}.weight"), m.get(f"{name}.bias"), 1e-5)


def dyt(m: Model, x: Tensor, name: str) -> Tensor:
    return m.get(f"{name}.weight") * torch.tanh(m.get(f"{name}.alpha") * x)


def final_of_bhyt(m: Model, x: Tensor, name: str) -> Tensor:
    return m.tanh_norm(x, name, mean_square(x)) if m.config.lam_last > 0 else m.rms(x, name)


def derf(m: Model, x: Tensor, name: str) -> Tensor:
    z = m.get(f"{name}.alpha") * x + m.get(f"{name}.shift")
    return m.get(f"{name}.weight") * torch.erf(z) + m.get(f"{name}.bias")


def dyisru(m: Model, x: Tensor, name: str) -> Tensor:
    return m.get(f"{name}.weight") * m.d**0.5 * x / torch.sqrt(m.get(f"{name}.square").abs() + x**2)


def scaled(m: Model, x: Tensor, name: str) -> Tensor:
    return m.get(f"{name}.weight") * x / torch.sqrt((x * x).sum(-1, keepdim=True) + m.d * m.eps)


def single_scale(m: Model, x: Tensor, name: str) -> Tensor:
    return m.get(f"{name}.weight") * x / torch.sqrt(mean_square(x) + m.eps)


def seeded(m: Model, x: Tensor, name: str) -> Tensor:
    gate = torch.tanh((x * m.get(f"{name}.beta")).sum(-1, keepdim=True))
    return (gate * m.get(f"{name}.alpha") + m.get(f"{name}.weight")) * x / torch.sqrt(mean_square(x) + m.eps)


def gated(m: Model, x: Tensor, name: str) -> Tensor:
    n = m.rms(x, name)
    low = n @ m.get(f"{name}.down").T
    return n * torch.sigmoid((low * torch.sigmoid(low)) @ m.get(f"{name}.up").T)


def compressed(m: Model, x: Tensor, name: str) -> Tensor:
    """The first d numbers of the RMSNorm of the zero-mean vector that x completes to."""
    whole = torch.cat([x, -x.sum(-1, keepdim=True)], -1)
    return m.get(f"{name}.weight") * (whole / torch.sqrt(mean_square(whole) + m.eps))[..., :-1]


def tapered(m: Model, x: Tensor, name: str) -> Tensor:
    if f"{name}.gate" not in m.state:
        return m.rms(x, name)
    g, c = m.get(f"{name}.gate"), m.get(f"{name}.inverse_rms")
    return g * m.rms(x, name) + (1 - g) * c * m.get(f"{name}.fixed_weight") * x


def running(m: Model, x: Tensor, name: str) -> Tensor:
    return m.get(f"{name}.weight") * x / torch.sqrt(m.get(f"{name}.mean_square") + m.eps) + m.get(f"{name}.bias")


NORMS: dict[str, Norm] = {
    "pre_layernorm": layer,
    "dyt": dyt,
    "bhyt": final_of_bhyt,
    "bhyt_exact": final_of_bhyt,
    "bhyt_linear": final_of_bhyt,
    "derf": derf,
    "dyisru": dyisru,
    "scalenorm": scaled,
    "fixnorm": scaled,
    "osp_rmsnorm": single_scale,
    "seednorm": seeded,
    "gatednorm": gated,
    "pre_crmsnorm": compressed,
    "tapernorm": tapered,
    "powernorm": running,
    "unified_norm": running,
}
QK = {"reordered_norm": "rms_width", "hybridnorm": "rms_head", "hybridnorm_star": "rms_head"}
FINAL = dict.fromkeys(("residual_dual", "ngpt", "skip_init", "fixup", "none"), "") | dict.fromkeys(
    ("siamese_norm", "mhc", "attn_residuals", "hyper_connections", "block_attn_residuals", "nanochat"),
    "model.norm.norm",
)

# -- one stream ------------------------------------------------------------------------------------------------------


def one_stream(m: Model, x: Tensor) -> Tensor:
    for layer, part, f, name in m.sublayers():
        if part == "attn":
            m.hidden.append(x)
        x = JOINS.get(m.scheme, pre)(m, x, f, name, part, layer)
    return x


def pre(m, x, f, name, part, layer):
    return x + f(m.norm(x, f"{name}.{PRE[part]}"))


def lns(m, x, f, name, part, layer):
    return x + f(m.norm(x, f"{name}.{PRE[part]}") / math.sqrt(layer))


def post(m, x, f, name, part, layer):
    return m.norm(x + f(x), f"{name}.{OUT[part]}")


def mix(m, x, f, name, part, layer):
    first = max(1, int(m.config.post_fraction * m.depth))
    return (post if layer <= first else pre)(m, x, f, name, part, layer)


def peri(m, x, f, name, part, layer):
    return x + m.norm(f(m.norm(x, f"{name}.{PERI_IN[part]}")), f"{name}.{OUT[part]}")


def beam(m, x, f, name, part, layer):
    k = 2 * layer + (part == "mlp")
    update = m.norm(f(m.norm(x, f"{name}.{PERI_IN[part]}")), f"{name}.{OUT[part]}")
    return (math.sqrt(k - 1) * x + update) / math.sqrt(k)


def reordered(m, x, f, name, part, layer):
    return x + m.norm(f(x), f"{name}.{OUT[part]}")


def hybrid(m, x, f, name, part, layer):
    return m.norm(x + f(x), f"{name}.{OUT['attn']}") if part == "attn" else x + f(x)


def hybrid_star(m, x, f, name, part, layer):
    return pre(m, x, f, name, part, layer) if layer == 1 else hybrid(m, x, f, name, part, layer)


def deepnorm(m, x, f, name, part, layer):
    return m.norm((2 * m.depth) ** 0.25 * x + f(x), f"{name}.{OUT[part]}")


def keel(m, x, f, name, part, layer):
    update = f(m.norm(x, f"{name}.{PERI_IN[part]}"))
    if (layer, part) == (1, "attn"):
        return x + update
    return m.norm((1 if layer == 1 else 2 * m.depth) * x + update, f"{name}.{OUT[part]}")


def complete_p(m, x, f, name, part, layer):
    return x + f(m.norm(x, f"{name}.{PRE[part]}")) / (m.depth / 2)  # depth over the base model's 2


def layer_scale(m, x, f, name, part, layer):
    return x + m.get(f"{name}.{part}_residual.scale") * f(m.norm(x, f"{name}.{PRE[part]}"))


def none(m, x, f, name, part, layer):
    return x + f(x)


def residual_gate(m, x, f, name, part, layer):
    """Muse Spark's code: temperature 0.3, and 1 - s^2 at least 0.001."""
    s = 1 / (1 + torch.exp(-m.get(f"{name}.{part}_residual.gate") / 0.3))
    y = f(m.norm(x, f"{name}.{PERI_IN[part]}"))
    return torch.sqrt(torch.clamp(1 - s * s, min=1e-3)) * x + s * m.norm(y, f"{name}.{OUT[part]}")


def residual_mix(m, x, f, name, part, layer):
    """One b per block, b = log(1 + e^t)."""
    b = torch.log1p(torch.exp(m.get(f"{name}.residual.logit")))
    return (torch.sqrt(m.depth - b) * x + torch.sqrt(b) * f(m.norm(x, f"{name}.{PRE[part]}"))) / math.sqrt(m.depth)


def layer_scalar(m, x, f, name, part, layer):
    total = peri(m, x, f, name, part, layer)
    return m.get(f"{name}.mlp_residual.scale") * total if part == "mlp" else total


def minimax(m, x, f, name, part, layer):
    r = m.norm(x, f"{name}.{PRE[part]}")
    return (2 * m.depth) ** 0.25 * r + f(r)


def deep_delta(m, x, f, name, part, layer):
    step, step_bias, value, value_bias = (
        m.get(f"{name}.{part}_residual.{which}") for which in ("step", "step_bias", "value", "value_bias")
    )
    r = m.norm(x, f"{name}.{PRE[part]}")
    k = f(r)
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-10)
    beta = 2 * torch.sigmoid((r * step).sum(-1, keepdim=True) + step_bias)
    v = 4 * torch.sigmoid((x * value).sum(-1, keepdim=True) + value_bias)
    return x + beta * k * (v - (k * x).sum(-1, keepdim=True))


def skip_init(m, x, f, name, part, layer):
    return x + m.get(f"{name}.{part}_residual.scale") * f(x)


def gpas(m, x, f, name, part, layer):
    total = pre(m, x, f, name, part, layer)
    a = m.get(f"{name}.residual.gate")  # one per block
    return total - a * torch.sigmoid(a) * total.detach()


def prores(m, x, f, name, part, layer):
    return x + m.get(f"{name}.{part}_residual.alpha") * f(m.norm(x, f"{name}.{PRE[part]}"))


def ngpt(m, x, f, name, part, layer):
    rate = (m.get(f"{name}.{part}_residual.rate") * 0.05 * m.d**0.5).abs()
    return unit(x + rate * (unit(f(x)) - x))


JOINS = {
    "lns": lns,
    "lns_scaled_init": lns,
    "post_rmsnorm": post,
    "mix_ln": mix,
    "peri_ln": peri,
    "beam": beam,
    "none": none,
    "residual_gate": residual_gate,
    "residual_mix": residual_mix,
    "layer_scalar": layer_scalar,
    "minimax": minimax,
    "deep_delta": deep_delta,
    "dssn": peri,
    "reordered_norm": reordered,
    "hybridnorm": hybrid,
    "hybridnorm_star": hybrid_star,
    "deepnorm": deepnorm,
    "keel": keel,
    "complete_p": complete_p,
    "layer_scale": layer_scale,
    "skip_init": skip_init,
    "fixup": skip_init,
    "gpas": gpas,
    "prores": prores,
    "ngpt": ngpt,
}


def reference(config, state: State, ids: Tensor) -> SimpleNamespace:
    """Logits (batch, tokens, vocab) and, where one stream goes through the blocks, ``hidden``: what each reads."""
    model = Model(config, state, ids)
    return SimpleNamespace(logits=model.logits(), hidden=model.hidden)
