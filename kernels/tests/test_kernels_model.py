"""Whole models of every scheme: the kernels and PyTorch's path give the same logits and gradients.

Additions are fused into the norms, decoding takes the prompt's kernels, and the whole compiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_harness import DEVICE
from normlab_kernels import dispatch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="pip install normlab-kernels[gpu]")
from normlab_kernels import ops  # noqa: E402

normlab = pytest.importorskip("normlab", reason="the models are normlab's: pip install -e .")
STUDIED = pytest.importorskip("normlab.schemes").STUDIED  # whose norms have kernels
every_scheme = pytest.mark.parametrize("scheme", sorted(STUDIED))
# One of each kind of norm and of layout; the others when asked for.
SOME = ("bhyt", "dyt", "mix_ln", "post_rmsnorm")
some_schemes = pytest.mark.parametrize(
    "scheme", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in sorted(STUDIED)]
)
pytestmark = pytest.mark.kernels


def tiny(scheme: str, kernels: str, **fields: Any) -> Any:
    """A model with outlying residuals and no norm parameter at its start, always the same."""
    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        scheme=scheme,
        vocab_size=32,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    model = normlab.NormlabForCausalLM(normlab.NormlabConfig(**{**options, **fields}), kernels=kernels).to(DEVICE)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 30
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(0.7 + 0.6 * torch.rand(parameter.shape, generator=draw).to(DEVICE))
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw).to(DEVICE))
    model.refresh_carried()
    return model


def ids() -> torch.Tensor:
    return torch.arange(12, device=DEVICE).view(2, 6) % 32


def outcome(model: Any, run: Callable[..., Any] | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and parameter gradients."""
    out = (model if run is None else run)(input_ids=ids(), labels=ids(), use_cache=False)
    named = dict(model.named_parameters())
    return out.logits.detach(), dict(zip(named, torch.autograd.grad(out.loss, list(named.values())), strict=True))


def assert_same(
    got: tuple[torch.Tensor, dict[str, torch.Tensor]], expected: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert (got[1][name] - value).abs().max() <= 1e-4 * value.abs().max() + 1e-6, name


class Launches:
    """Calls of the kernels by the models: one (has a residual, statistic, activation) per call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.norms: list[tuple[bool, int, int]] = []
        launch = dispatch._triton_path

        def counted(x: Any, residual: Any, *others: Any) -> Any:
            spec = others[-1]
            self.norms.append((residual is not None, spec.stat, spec.act))
            return launch(x, residual, *others)

        monkeypatch.setattr(dispatch, "_triton_path", counted)


@every_scheme
def test_kernels_and_torch_agree_on_logits_and_gradients(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    got = outcome(tiny(scheme, "triton"))
    assert launches.norms
    launches.norms.clear()
    expected = outcome(tiny(scheme, "torch"))
    assert not launches.norms
    assert_same(got, expected)


@pytest.mark.parametrize("scheme", ["scalenorm", pytest.param("osp_rmsnorm", marks=pytest.mark.slow)])
def test_one_gain_for_all_channels_takes_the_kernel_of_a_gain_each(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    got = outcome(tiny(scheme, "triton"))
    assert [residual for residual, *_ in launches.norms] == [False, True] * 2 + [False]
    assert_same(got, outcome(tiny(scheme, "torch")))


@pytest.mark.parametrize("scheme", ["pre_crmsnorm", "seednorm", "dyisru"])
def test_norms_of_the_field_take_their_kernels(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)

    def of(kernels: str) -> Any:
        model = tiny(scheme, kernels, num_hidden_layers=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("beta"):  # starts at 0
                    parameter.copy_(torch.linspace(-0.3, 0.4, len(parameter)))
        return outcome(model)

    got = of("triton")
    assert [residual for residual, *_ in launches.norms] == [False, True, False]
    assert_same(got, of("torch"))
    assert len(launches.norms) == 3


def test_a_learned_correction_and_a_fixed_factor_reach_the_kernel() -> None:
    fields = {"correction": "residual_aware", "calibration": [0.5, 2.0]}
    assert_same(outcome(tiny("bhyt", "triton", **fields)), outcome(tiny("bhyt", "torch", **fields)))


@every_scheme
def test_every_addition_before_a_norm_in_a_block_is_the_norms_own(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks: the sum before each MLP's norm, and in Post-LN both sums; no norm of a block runs unfused there."""
    launches, model = Launches(monkeypatch), tiny(scheme, "triton")
    with torch.no_grad():
        model(ids())
    layouts = [layer.layout for layer in model.model.layers]
    fused = sum(bool(x.attn_sum) + bool(x.mlp_sum) + bool(x.mlp_in) for x in layouts)
    norms = 1 + sum(len(layout.places()) for layout in layouts)
    assert [residual for residual, *_ in launches.norms].count(True) == fused
    assert len(launches.norms) == norms


@pytest.mark.parametrize("scheme", ["pre_layernorm", "bhyt"])
@pytest.mark.parametrize("how", ["class", "mixin", "object"])
def test_a_norm_with_a_forward_of_its_own_is_not_passed_by(
    how: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addition before it is a step of its own then. BHyT's second norm gets the first one's mean square."""
    row = normlab.SCHEMES[scheme]

    class Halved:
        def forward(self, x: torch.Tensor, **carried: Any) -> Any:
            return super().forward(x / 2, **carried)  # type: ignore[misc]

    def norm(site: Any) -> Any:
        made = row.norm(site)
        kind = type(made)
        if how == "object":  # as a library does that moves weights
            forward = made.forward
            made.forward = lambda x, **carried: forward(x / 2, **carried)
        elif how == "mixin":
            made.__class__ = type("Mixed", (Halved, kind), {})
        else:
            made.__class__ = type("Own", (kind,), {"forward": lambda self, x, **c: kind.forward(self, x / 2, **c)})
        return made

    monkeypatch.setitem(normlab.SCHEMES, scheme, dataclasses.replace(row, norm=norm))
    launches = Launches(monkeypatch)
    got = outcome(tiny(scheme, "triton", num_hidden_layers=1))
    assert len(launches.norms) == 3 and not any(residual for residual, *_ in launches.norms)
    assert_same(got, outcome(tiny(scheme, "torch", num_hidden_layers=1)))


@pytest.mark.parametrize("scheme", ["pre_rmsnorm_fixed", "residual_gate"])
def test_a_fixed_gain_leaves_a_model_in_half_precision(scheme: str) -> None:
    """The gain is a buffer, which stays in float32."""
    logits = [tiny(scheme, kernels).to(torch.bfloat16)(ids()).logits for kernels in ("triton", "torch")]
    assert logits[0].dtype == torch.bfloat16
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.02)


@some_schemes
def test_a_watched_norm_runs_by_itself_and_the_bits_are_the_same(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(scheme, "triton")
    expected = outcome(model)
    launches = Launches(monkeypatch)
    seen = []
    for layer in model.model.layers:
        for _, name in layer.layout.places():
            getattr(layer, name).register_forward_hook(lambda *_: seen.append(1))
    got = outcome(model)
    assert len(seen) == len(launches.norms) - 1  # the final norm
    assert not any(residual for residual, *_ in launches.norms)
    assert torch.equal(got[0], expected[0])
    for name, value in expected[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-5, atol=1e-7, msg=name)


def decoded(model: Any) -> torch.Tensor:
    """Logits of every token, the last four one at a time through the cache."""
    out = model(ids()[:, :2], use_cache=True)
    pieces = [out.logits]
    for position in range(2, 6):
        out = model(ids()[:, position : position + 1], past_key_values=out.past_key_values, use_cache=True)
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)


@some_schemes
def test_decoding_one_token_takes_the_kernels_of_the_prompt(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same launches for one token as for many, and the same logits; the rows' bits are pinned in
    test_kernels_rows.py."""
    launches, model = Launches(monkeypatch), tiny(scheme, "triton").eval()
    with torch.no_grad():
        full = model(ids(), use_cache=False).logits
        prompt = list(launches.norms)
        launches.norms.clear()
        stepped = decoded(model)
    assert launches.norms == prompt * 5
    torch.testing.assert_close(stepped, full, rtol=1e-5, atol=1e-5)


class Arithmetic(TorchDispatchMode):
    """The arithmetic that makes one number, or one of each token."""

    names = ("add", "sub", "mul", "div", "pow", "square", "rsqrt", "mean")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in self.names and result.is_floating_point() and (result.dim() == 0 or result.shape[-1] == 1):
            self.seen.append(name)
        return result


@pytest.mark.parametrize("carried", ["uniform", "causal"])
def test_a_decoded_tokens_carried_correction_is_the_kernels(carried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The correction is made once and given to the kernel. No block adds, squares or multiplies per token for it. Where
    it depends on the position, there is one quotient."""
    model, received = tiny("bhyt", "triton", carried=carried).eval(), []
    launch_forward = ops.launch_forward

    def counted(*arguments: Any, correction: torch.Tensor | None = None, **options: Any) -> Any:
        received.append(correction is not None)
        return launch_forward(*arguments, correction=correction, **options)

    monkeypatch.setattr(ops, "launch_forward", counted)
    with torch.no_grad():
        cache = model(ids()[:, :5], use_cache=True).past_key_values
        received.clear()
        with Arithmetic() as small:
            model(ids()[:, 5:], past_key_values=cache, use_cache=True)
    assert received == [False, True] * 2 + [False]
    assert small.seen == (["div"] * 2 if carried == "causal" else [])


@pytest.mark.parametrize(
    ("scheme", "backend", "layers"),
    [
        ("bhyt", "aot_eager", 1),
        pytest.param("mix_ln", "aot_eager", 2, marks=pytest.mark.slow),
        pytest.param("bhyt", "inductor", 1, marks=pytest.mark.slow),
        pytest.param("dyt", "inductor", 1, marks=pytest.mark.slow),
    ],
)
def test_the_whole_model_compiles_as_one_graph_with_the_kernels_in_it(
    scheme: str, backend: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    model = tiny(scheme, "triton", num_hidden_layers=layers)
    expected = outcome(model)
    calls = []
    launched = ops.launch

    def counted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        calls.append(kernel)
        launched(kernel, *arguments, **constants)

    monkeypatch.setattr(ops, "launch", counted)
    got = outcome(model, torch.compile(model, fullgraph=True, backend=backend))
    assert calls.count(ops.norm_forward_kernel) == calls.count(ops.norm_backward_kernel) > 0
    assert_same(got, expected)
