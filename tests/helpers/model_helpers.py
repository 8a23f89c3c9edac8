"""Helpers of the model tests.

CASES               every scheme of the shipped runs, and BHyT's options, as (scheme, extra config fields)
every_registered    the same and all other schemes: one a family, the others under the slow marker
tiny_model          a small model with every default moved: norms, weights, lambda, c, kappa, eps
lively              the same for a model that exists
constant_of         a block's c from its formula
cached, stepwise    logits of tokens behind those in a cache; of all tokens, a few at a time
faulty_bhyt              a BHyT forward with another way to take its statistic
assert_fault_is_caught   a check passes on our code and fails once a known fault is patched in
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, LlamaModel

from normlab import SCHEMES, NormlabConfig, NormlabForCausalLM
from normlab.schemes import STUDIED

# Nothing at its default: a formula that drops a factor of 1 or mistakes one eps for another shows.
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "train_seq_len": 24,
    "rms_norm_eps": 3e-5,
    "initializer_range": 0.02,
    "lam_input": 2.3,
    "lam_post": 1.7,
    "kappa": 3.0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# The same for stock Llama.
LLAMA = {name: value for name, value in TINY.items() if name not in {"lam_input", "lam_post", "kappa", "train_seq_len"}}

VARIANTS = [
    ("bhyt", {"carried": "causal"}),
    ("bhyt", {"carried": "exact"}),
    ("bhyt", {"lam_last": 1.4}),
    ("bhyt", {"learnable_lam": False}),
    ("bhyt", {"correction": "beta"}),
    ("bhyt", {"correction": "eta", "calibration": [0.5, 1.5, 2.0]}),
    ("bhyt", {"correction": "residual_aware", "carried": "causal"}),
    ("bhyt_linear", {"carried": "causal", "lam_last": 1.4}),
    ("bhyt_exact", {"lam_last": 1.4}),
    ("rmsnorm_gain", {"lam_last": 1.4}),
    ("mix_ln", {"post_fraction": 0.7}),
    ("dyt", {"tie_word_embeddings": True}),
]
CASES = [pytest.param(name, {}, id=name) for name in STUDIED] + [
    pytest.param(name, extra, id="-".join([name, *(str(value) for value in extra.values())]))
    for name, extra in VARIANTS
]
every_scheme = pytest.mark.parametrize("scheme", list(STUDIED))
every_case = pytest.mark.parametrize(("scheme", "extra"), CASES)
FIELD = [name for name in SCHEMES if name not in STUDIED]
ONE_A_FAMILY = {row.family: name for name, row in reversed(SCHEMES.items()) if name in FIELD}.values()
every_registered = pytest.mark.parametrize(
    ("scheme", "extra"),
    CASES + [pytest.param(name, {}, id=name, marks=() if name in ONE_A_FAMILY else pytest.mark.slow) for name in FIELD],
)
carrying_case = pytest.mark.parametrize(
    ("scheme", "extra"),
    [
        pytest.param(name, {"carried": carried}, id=f"{name}-{carried}")
        for name in ("bhyt", "bhyt_linear")
        for carried in ("uniform", "causal")
    ],
)


@torch.no_grad()
def lively(model: NormlabForCausalLM, seed: int = 0) -> NormlabForCausalLM:
    """Move every tensor off its start: matrices perturbed, norm parameters drawn, c a number no formula gives."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=draw))

    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("c_attn"):
            uniform(tensor, 0.02, 0.12)  # a correction about as large as the mean square it corrects
        elif ".var_" in name:  # of BHyT's learned corrections
            uniform(tensor, 0.2, 0.8)
        elif name.endswith((".lam", ".alpha")):
            uniform(tensor, 0.6, 3.1)
        elif name.endswith(("square", "squares")):  # what stands under a root: smaller is steep
            uniform(tensor, 8.0, 20.0)
        elif name.endswith("shared_scale"):
            uniform(tensor, 2.0, 4.0)
        elif tensor.dim() == 1 and name.endswith("weight"):
            uniform(tensor, 0.4, 1.8)
        elif tensor.dim() == 1:
            uniform(tensor, -0.4, 0.4)
        else:
            tensor.add_(torch.randn(tensor.shape, generator=draw), alpha=0.15)
    return model


def tiny_config(scheme: str, **fields: Any) -> NormlabConfig:
    return NormlabConfig(scheme=scheme, **{**TINY, **fields})


def tiny_model(scheme: str, *, seed: int = 0, **fields: Any) -> NormlabForCausalLM:
    """An evaluating model of 3 blocks and width 32, nothing at its default."""
    torch.default_generator.manual_seed(seed)
    return lively(NormlabForCausalLM(tiny_config(scheme, **fields)), seed).eval()


def fresh_model(scheme: str, *, seed: int = 0, **fields: Any) -> NormlabForCausalLM:
    """The same, as a training run starts: nothing drawn but the initial weights."""
    torch.default_generator.manual_seed(seed)
    return NormlabForCausalLM(tiny_config(scheme, **fields)).eval()


def tokens(rows: int = 2, length: int = 10, *, seed: int = 1, vocab: int = 61) -> torch.Tensor:
    """Random token ids, never the padding id 0."""
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_bits(left: torch.Tensor, right: torch.Tensor, note: str = "") -> None:
    """Equal in type and every bit."""
    assert left.dtype == right.dtype, f"{note}: {left.dtype} is not {right.dtype}"
    assert torch.equal(left, right), f"{note}: differ by up to {(left.double() - right.double()).abs().max()}"


def assert_state(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """The model's tensors are these, in this order, bit for bit."""
    assert list(model.state_dict()) == list(expected)
    for name, tensor in model.state_dict().items():
        assert_bits(tensor, expected[name], name)


def assert_near(left: torch.Tensor, right: torch.Tensor, relative: float, note: str = "") -> None:
    """The largest difference is at most ``relative`` of the largest value of ``right``."""
    left, right = left.detach().double(), right.detach().double()
    assert left.shape == right.shape, f"{note}: {tuple(left.shape)} is not {tuple(right.shape)}"
    gap, size = (left - right).abs().max().item(), right.abs().max().item()
    assert gap <= relative * size, f"{note}: {gap:.3g} apart, values up to {size:.3g}"


def constants(model: torch.nn.Module) -> torch.Tensor:
    """c of every block."""
    return torch.stack([layer.c_attn for layer in model.model.layers])


def constant_of(layer: torch.nn.Module, train_seq_len: int, heads: int, kv_heads: int) -> torch.Tensor:
    """c = ||W_V W_O||_F^2 / (T d), head by head in float64."""
    value, out = layer.self_attn.v_proj.weight.double(), layer.self_attn.o_proj.weight.double()
    width = value.shape[1]
    head_dim = value.shape[0] // kv_heads
    product = torch.zeros(width, width, dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        head_rows = slice(head * head_dim, (head + 1) * head_dim)
        product += out[:, head_rows] @ value[shared * head_dim : (shared + 1) * head_dim]
    return product.square().sum() / (train_seq_len * width)


# transformers 5.24 calls it cache, older ones past_key_values.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def cached(model: torch.nn.Module, ids: torch.Tensor, cache: Cache, **options: Any) -> torch.Tensor:
    """Logits of tokens that follow those in the cache, and are added to it."""
    return model(ids, use_cache=True, **{CACHE: cache}, **options).logits


@torch.no_grad()
def stepwise(model, ids: torch.Tensor, prompt: int, chunk: int = 1, cache=None, mask=None) -> torch.Tensor:
    """Logits of every token: the prompt at once, the rest through the cache ``chunk`` tokens at a time."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces, start = [], 0
    for stop in [prompt, *range(prompt + chunk, ids.shape[1] + 1, chunk)]:
        seen = {} if mask is None else {"attention_mask": mask[:, :stop]}
        pieces.append(cached(model, ids[:, start:stop], cache, **seen))
        start = stop
    return torch.cat(pieces, dim=1)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of every parameter that requires one, by name; ``model``'s own .grad untouched."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def optimizer_of(model: NormlabForCausalLM, lr: float) -> torch.optim.Optimizer:
    """AdamW with the model's own decay rule and rates, as a training run makes it."""
    decayed = set(model.decay_parameter_names())
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) == decays], "weight_decay": wd}
        for decays, wd in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, eps=1e-8)
    model.apply_rates(optimizer)
    return optimizer


def assert_fault_is_caught(check: Callable[[], None], patch: Callable[[pytest.MonkeyPatch], None]) -> None:
    """``check`` passes; with the fault that ``patch`` installs it fails. A check that cannot fail proves nothing."""
    check()
    with pytest.MonkeyPatch.context() as faulty:
        patch(faulty)
        with pytest.raises(AssertionError):
            check()
    check()


def faulty_bhyt(compute_ms, round_rstd=lambda rstd: rstd):
    """A BHyT forward with another way to take the mean square or to hold its inverse root."""

    def forward(self, x, mean_square=None, return_mean_square=False):
        ms = compute_ms(x) if mean_square is None else mean_square
        z = (self.lam / self.kappa) * (x * round_rstd(torch.rsqrt(ms + self.eps)))
        y = self.weight * (torch.tanh(z) if self.bounded else z).to(x.dtype)
        return (y, ms) if return_mean_square else y

    return forward
