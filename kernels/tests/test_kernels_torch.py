"""The custom ops inside PyTorch: opcheck, the compiler, checkpointing, autocast, functorch, and second use in one
graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import normlab_kernels as nk
import numpy as np
import pytest
import torch
from kernel_harness import CASES, DEVICE, KERNELS, NAMES, QUICK, formula, full_if_slow, make_inputs, results
from normlab_kernels import cpu
from normlab_kernels.dispatch import row_norm
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import Act, RowSpec, Stat
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

# To PyTorch CRMSNorm and DyISRU are what RMSNorm and DyT are.
ALL = full_if_slow(NAMES, tuple(name for name in QUICK if name not in ("crms_norm", "isru")))
# A compiler sees the same addition in all.
COMPILED = [
    name if name == "add_bhyt" or not name.startswith("add_") else pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
]
FORMULAS = ("layer_norm", "crms_norm", "seed_norm", "isru")  # on a CPU with PyTorch's own derivatives
INPUTS = ("x", "residual", "weight", "bias", "scale", "shift", "direction", "given")


def op_arguments(name: str, requires_grad: bool) -> tuple[object, ...]:
    case = CASES[name]
    a = {k: v.requires_grad_(requires_grad) for k, v in make_inputs(case, 5, 9, torch.float32).items()}
    return (*(a.get(k) for k in INPUTS), *case.spec)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ALL)
def test_opcheck_passes(name: str) -> None:
    from normlab_kernels import ops

    torch.library.opcheck(ops.row_norm, op_arguments(name, requires_grad=True))


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["add_bhyt", "bhyt_carried", "layer_norm", "derf", "seed_norm"])
def test_opcheck_passes_on_the_backward(name: str) -> None:
    from normlab_kernels import ops

    case = CASES[name]
    x, residual, *parameters, given = op_arguments(name, requires_grad=False)[: len(INPUTS)]
    constants = case.spec
    assert isinstance(x, torch.Tensor)
    wants = [tensor is not None for tensor in (*parameters, given)]
    _, total, mean, ms = ops.row_norm(x, residual, *parameters, given, *constants)
    grad = torch.randn_like(x)
    grad_sum = None if residual is None else torch.randn_like(x)
    rows = x if residual is None else total
    arguments = (
        grad,
        grad_sum,
        torch.randn_like(ms) if case.spec.stat == 1 else None,
        rows,
        *parameters,
        mean if case.spec.stat == 2 or "direction" in case.inputs else None,
        given if case.spec.stat == 3 else (None if case.spec.stat == 0 else ms),
        *constants,
        wants,
    )
    for some in (arguments, (*(_no_rows(t, len(x)) for t in arguments[:-5]), *arguments[-5:])):
        torch.library.opcheck(ops.row_norm_backward, some, test_utils=("test_schema", "test_faketensor"))


def _no_rows(value: object, rows: int) -> object:
    """A tensor of rows without its rows."""
    return value[:0] if isinstance(value, torch.Tensor) and len(value) == rows and value.dim() == 2 else value


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_graph_break(name: str) -> None:
    case = CASES[name]
    torch.compiler.reset()
    arguments = make_inputs(case, 6, 20, torch.float32)
    expected, upstream = results(case.call, arguments, None)
    compiled: Callable[..., dict[str, torch.Tensor]] = torch.compile(case.call, fullgraph=True, backend="aot_eager")
    got, _ = results(compiled, arguments, upstream)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.skipif(KERNELS, reason="the kernels are a custom op to the compiler")
@pytest.mark.parametrize("name", ["rms_norm", "add_bhyt", "bhyt_carried", "dyt", "derf"])
def test_on_a_cpu_a_compiler_is_given_the_formula_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loops beat those of an autograd function that it cannot look into."""
    for direction in ("forward", "backward"):
        monkeypatch.setattr(cpu, direction, lambda *_: pytest.fail("not left to the compiler"))
    operations: dict[str, list[str]] = {"ours": [], "formula": []}

    def noting(who: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
            operations[who] += [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
            return graph

        return compiler

    arguments = make_inputs(CASES[name], 6, 20, torch.float32)
    torch.compiler.reset()
    for who, call in (("ours", CASES[name].call), ("formula", lambda a: formula(CASES[name], a))):
        results(torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=noting(who))), arguments, None)
    views = ("view", "reshape", "alias")
    ours, plain = ([op for op in operations[who] if not any(v in op for v in views)] for who in ("ours", "formula"))
    assert sorted(ours) == sorted(plain) and len(plain) > 5


@pytest.mark.kernels
def test_inductor_and_dynamic_rows() -> None:
    case = CASES["add_bhyt"]
    torch.compiler.reset()
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True)
    for rows in (6, 9):
        arguments = make_inputs(case, rows, 20, torch.float32)
        expected, upstream = results(case.call, arguments, None)
        got, _ = results(compiled, arguments, upstream)
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6, msg=key)


def twice(a: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    y, ms = nk.bhyt(a["x"], a["weight"], a["scale"])
    return {"y": nk.bhyt_carried(y + a["x"], a["weight"], a["scale"], 1.5 * ms)}


def test_used_twice_in_one_graph_gradients_add_up() -> None:
    arguments = make_inputs(CASES["bhyt"], 4, 10, torch.float32)
    got, upstream = results(twice, arguments, None)

    def chain(a: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        y, ms = row_norm_reference(a["x"], a["weight"], None, a["scale"], None, None, CASES["bhyt"].spec)
        second = CASES["bhyt_carried"].spec
        assert ms is not None
        return {"y": row_norm_reference(y + a["x"], a["weight"], None, a["scale"], None, 1.5 * ms, second)[0]}

    exact, _ = results(chain, arguments, upstream, torch.float64)
    for key, value in exact.items():
        torch.testing.assert_close(got[key].double(), value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ALL)
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    case = CASES[name]
    arguments = make_inputs(case, 5, 12, torch.float32)
    expected, upstream = results(case.call, arguments, None)
    got, _ = results(lambda a: checkpoint(case.call, a, use_reentrant=False), arguments, upstream)
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


def test_autocast_leaves_the_norm_in_the_dtype_of_its_input() -> None:
    case = CASES["bhyt"]
    arguments = make_inputs(case, 5, 12, torch.float32)
    expected = case.call(arguments)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = case.call(arguments)
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("name", sorted(name for name, case in CASES.items() if case.residual))
def test_a_sixteen_bit_branch_joins_a_stream_in_fp32_with_the_bits_of_two_steps(name: str) -> None:
    """Under autocast the sum and the norm are fp32, and each gradient has its operand's dtype."""
    case = CASES[name]
    arguments = make_inputs(case, 5, 20, torch.float32)
    arguments["x"] = arguments["x"].to(torch.bfloat16)
    got, upstream = results(case.call, arguments, None)
    assert got["s"].dtype == got["y"].dtype == got["dresidual"].dtype == torch.float32
    assert got["dx"].dtype == torch.bfloat16
    assert torch.equal(got["s"], arguments["residual"] + arguments["x"])
    single = CASES[name.removeprefix("add_")]
    of_the_sum = {k: got["s"] if k == "x" else arguments[k] for k in single.inputs}
    alone, _ = results(single.call, of_the_sum, {k: v for k, v in upstream.items() if k != "s"})
    assert torch.equal(got["y"], alone["y"])
    torch.testing.assert_close(got["dresidual"], alone["dx"] + upstream["s"], rtol=1e-6, atol=1e-6)


def test_sixteen_bit_rows_with_a_wider_weight_come_out_in_the_wider_dtype() -> None:
    arguments = make_inputs(CASES["rms_norm"], 5, 12, torch.float32)
    y = nk.rms_norm(arguments["x"].half(), arguments["weight"])
    assert y.dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_vmap_is_refused_with_a_sentence(name: str) -> None:
    arguments = make_inputs(CASES[name], 5, 12, torch.float32)
    batched = {k: 0 if k in ("x", "residual", "given") else None for k in arguments}
    with pytest.raises(ValueError, match="instead of under torch.vmap"):
        torch.vmap(CASES[name].call, in_dims=(batched,))(arguments)


@pytest.mark.parametrize("name", ALL if KERNELS else [n for n in NAMES if not n.endswith(FORMULAS)])
def test_forward_mode_is_refused_with_a_sentence(name: str) -> None:
    """A custom op gives tangents of zero."""
    arguments = make_inputs(CASES[name], 5, 12, torch.float32)
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(CASES[name].call, (arguments,), ({k: torch.ones_like(v) for k, v in arguments.items()},))


@pytest.mark.parametrize("name", ALL if KERNELS else [n for n in NAMES if not n.endswith(FORMULAS)])
def test_a_second_derivative_is_refused_where_the_upstream_gradient_is_a_constant_too(name: str) -> None:
    """The Hessian would lack the norm's part there, as the rest of the model has second derivatives."""
    a = {k: v.requires_grad_() for k, v in make_inputs(CASES[name], 5, 12, torch.float32).items()}
    y = CASES[name].call(a | {"x": torch.nn.functional.gelu(a["x"])})["y"]
    (dx,) = torch.autograd.grad(y, a["x"], torch.ones_like(y), create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dx.square().sum(), a["x"])


@pytest.mark.parametrize("name", ["add_bhyt", "bhyt_carried", "dyt"])
def test_a_graph_of_the_gradient_has_the_gradient_under_a_checkpoint_too(name: str) -> None:
    """A checkpoint unpacks what is saved once."""
    arguments = make_inputs(CASES[name], 5, 12, torch.float32)
    expected, upstream = results(CASES[name].call, arguments, None)
    a = {k: v.clone().requires_grad_() for k, v in arguments.items()}
    out = checkpoint(CASES[name].call, a, use_reentrant=False)
    grads = torch.autograd.grad(list(out.values()), list(a.values()), [upstream[k] for k in out], create_graph=True)
    for key, grad in zip(a, grads, strict=True):
        assert torch.equal(grad, expected[f"d{key}"]) and grad.dtype == expected[f"d{key}"].dtype, key


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap of weights"])
def test_transforms_of_torch_func_are_refused_with_a_sentence(transform: str) -> None:
    x, weight = torch.randn(5, 12, device=DEVICE), torch.ones(12, device=DEVICE)
    with pytest.raises(ValueError, match="refuse transforms of torch.func"):
        if transform == "grad":
            torch.func.grad(lambda x: nk.rms_norm(x, weight).sum())(x)
        elif transform == "vjp":
            torch.func.vjp(lambda x: nk.rms_norm(x, weight), x)
        else:
            torch.vmap(lambda weight: nk.rms_norm(x, weight))(weight.expand(3, 12))


@pytest.mark.parametrize("name", ["bhyt", "dyt", pytest.param("layer_norm", marks=pytest.mark.kernels)])
def test_a_batch_of_upstream_gradients_is_refused_with_a_sentence(name: str) -> None:
    arguments = make_inputs(CASES[name], 3, 4, torch.float32)

    def of(x: torch.Tensor) -> torch.Tensor:
        return CASES[name].call(arguments | {"x": x})["y"]

    with pytest.raises(ValueError, match="one upstream gradient at a time"):
        torch.autograd.functional.jacobian(of, arguments["x"], vectorize=True)
    x = arguments["x"].requires_grad_()
    y = of(x)
    with pytest.raises(ValueError, match="one upstream gradient at a time"):
        torch.vmap(lambda grad: torch.autograd.grad(y, x, grad, retain_graph=True))(torch.ones(2, 3, 4, device=DEVICE))
    assert torch.autograd.functional.jacobian(of, x).shape == (3, 4, 3, 4)


def test_a_wider_bias_leaves_y_in_the_dtype_of_x_and_the_weight() -> None:
    """In the formula that a compiler is given too."""
    x, weight = torch.randn(5, 12, device=DEVICE).bfloat16(), torch.ones(12, device=DEVICE).bfloat16()
    bias, alpha = torch.randn(12, device=DEVICE), torch.ones(1, device=DEVICE)
    torch.compiler.reset()
    compiled = torch.compile(nk.dyt, fullgraph=True, backend="aot_eager")
    assert compiled(x, weight, bias, alpha).dtype == nk.dyt(x, weight, bias, alpha).dtype == torch.bfloat16


@pytest.mark.kernels
def test_a_tensor_on_another_device_is_refused_with_a_sentence() -> None:
    x, weight = torch.randn(5, 12, device=DEVICE), torch.ones(12, device="meta")
    with pytest.raises(ValueError, match=f"on one device, got {DEVICE}.* and meta"):
        nk.rms_norm(x, weight)


def test_rows_in_float32_join_a_stream_in_float64_in_float64() -> None:
    arguments = make_inputs(CASES["add_bhyt"], 5, 12, torch.float32)
    arguments["residual"] = arguments["residual"].double() + 1e-12
    got = CASES["add_bhyt"].call(arguments)
    expected = formula(CASES["add_bhyt"], arguments)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ["bhyt", "add_bhyt", "layer_norm", "derf", "seed_norm"])
@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias", "scale", "shift")])
def test_what_is_frozen_gets_no_gradient_and_changes_none(name: str, frozen: tuple[str, ...]) -> None:
    case = CASES[name]
    arguments = make_inputs(case, 11, 20, torch.float32)
    expected, upstream = results(case.call, arguments, None)
    a = {k: v.clone().requires_grad_(k not in frozen) for k, v in arguments.items()}
    out = case.call(a)
    torch.autograd.backward(list(out.values()), [upstream[k] for k in out])
    for key, value in a.items():
        if key in frozen:
            assert value.grad is None
        else:
            assert torch.equal(value.grad, expected[f"d{key}"]), key


@pytest.mark.kernels
def test_two_launches_make_a_backward_pass_and_one_where_the_parameters_are_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from normlab_kernels import launch, ops

    kernels: list[str] = []

    def counting(kernel: object, *arguments: object, **constants: object) -> None:
        kernels.append(kernel.fn.__name__)  # type: ignore[attr-defined]
        launch.launch(kernel, *arguments, **constants)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "launch", counting)
    for name in ("bhyt", "layer_norm", "derf", "crms_norm", "seed_norm", "isru"):
        for frozen in (False, True):
            a = make_inputs(CASES[name], 5, 12, torch.float32)
            y = CASES[name].call({k: v.requires_grad_(k == "x" or not frozen) for k, v in a.items()})["y"]
            del kernels[:]
            y.backward(torch.ones_like(y))
            assert kernels == ["norm_backward_kernel", "parameter_gradients_kernel"][: 2 - frozen], name


def test_constants_may_be_numbers_of_numpy() -> None:
    a = make_inputs(CASES["bhyt"], 2, 12, torch.float32)

    def gradients(kappa: Any, eps: Any) -> tuple[torch.Tensor, ...]:
        tensors = [tensor.clone().requires_grad_() for tensor in a.values()]
        y, ms = nk.bhyt(*tensors, kappa=kappa, eps=eps)
        return y, ms, *torch.autograd.grad(y.sum() + ms.sum(), tensors)

    got, expected = gradients(np.float64(3.0), np.float32(2.0**-20)), gradients(3.0, 2.0**-20)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bhyt_carried", "derf", "isru"])
def test_a_scalar_may_have_any_dimensions(name: str, dtype: torch.dtype) -> None:
    """As a layer's scale of shape (1, 1, 1) has them: y keeps the shape of x, and a gradient that of its scalar."""
    arguments = {k: v.to(dtype) for k, v in make_inputs(CASES[name], 3, 12, torch.float32).items()}
    expected, upstream = results(CASES[name].call, arguments, None)
    scalars = [k for k in arguments if k in ("scale", "shift")]
    shaped = arguments | {k: arguments[k].view(1, 1, 1) for k in scalars}
    got, _ = results(CASES[name].call, shaped, upstream)
    for key, value in expected.items():
        assert got[key].shape == (shaped[key[1:]].shape if key[1:] in scalars else value.shape), key
        assert torch.equal(got[key].view(value.shape), value), key


@pytest.mark.parametrize("rows", [1, 5])
def test_a_correction_is_added_to_the_carried_statistic(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addition is in the norm's launch where no gradient is wanted: decoding pays for no further kernel."""
    a = make_inputs(CASES["add_bhyt_carried"], 5, 12, torch.float32)
    correction = torch.rand(rows, 1, device=DEVICE)
    operands = (a["x"], a["residual"], a["weight"], a["scale"])
    expected = nk.add_bhyt_carried(*operands, a["given"] + correction)
    with_graph = nk.add_bhyt_carried(*operands, a["given"].clone().requires_grad_(), correction=correction)
    for got in (nk.add_bhyt_carried(*operands, a["given"], correction=correction), with_graph):
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    x, _, *rest = operands
    if KERNELS:  # no addition of PyTorch's
        monkeypatch.setattr(torch.Tensor, "__add__", lambda *_: pytest.fail("an addition of its own"))
    y = nk.bhyt_carried(x, *rest, a["given"], correction=correction)
    monkeypatch.undo()
    assert torch.equal(y, nk.bhyt_carried(x, *rest, a["given"] + correction))
    if rows == 1:
        wide = [tensor.double() for tensor in (x, *rest, a["given"])]
        assert nk.bhyt_carried(*wide, correction=correction[None]).shape == x.shape
    with pytest.raises(ValueError, match="correction must have"):
        nk.bhyt_carried(x, *rest, a["given"], correction=torch.ones(2, device=DEVICE))


def test_bad_arguments_are_named() -> None:
    x, weight, lam = torch.randn(2, 4, device=DEVICE), torch.ones(4, device=DEVICE), torch.ones(1, device=DEVICE)
    for call, message in (
        (lambda: nk.bhyt(x, torch.ones(3, device=DEVICE), lam), "weight must have shape"),
        (lambda: nk.bhyt(x, weight, torch.ones(2, device=DEVICE)), "scale must have one element"),
        (lambda: nk.bhyt_carried(x, weight, lam, torch.ones(2, device=DEVICE)), "mean_square must have shape"),
        (lambda: nk.seed_norm(x, weight, weight, x), "direction must have shape"),
        (lambda: nk.add_rms_norm(x, x[:1], weight), "residual must have the shape of x"),
        (lambda: nk.rms_norm(x.int(), weight), "floating-point"),
        (lambda: nk.rms_norm(x[:, :0], weight[:0]), "with d >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_tensors_that_no_function_of_their_statistic_takes_are_named() -> None:
    x, weight = torch.randn(2, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    one, given = torch.ones(1, device=DEVICE), torch.ones(2, 1, device=DEVICE)
    for stat, tensors, message in (
        (Stat.RMS, {"given": given}, "with no other"),
        (Stat.GIVEN, {}, "given is the mean square"),
        (Stat.RMS, {"correction": one}, "added to the given mean square"),
        (Stat.OWN, {}, "from the scale"),
        (Stat.RMS, {"direction": weight}, "pass a bias"),
        *([(Stat.LAYER, {"direction": weight, "bias": weight}, "Stat.RMS alone")] if KERNELS else []),
    ):
        with pytest.raises(ValueError, match=message):
            row_norm(x, weight, spec=RowSpec(stat, Act.IDENTITY), **tensors)


@pytest.mark.parametrize("name", ["bhyt", "add_rms_norm", "dyt"])
def test_the_torch_choice_rounds_as_llama_does(name: str) -> None:
    calls = {
        "bhyt": lambda a, k: nk.bhyt(a["x"], a["weight"], a["scale"], kernels=k)[0],
        "add_rms_norm": lambda a, k: nk.add_rms_norm(a["x"], a["residual"], a["weight"], kernels=k)[1],
        "dyt": lambda a, k: nk.dyt(a["x"], a["weight"], a["bias"], a["scale"], kernels=k),
    }
    arguments = make_inputs(CASES[name], 64, 50, torch.float16)
    plain, chosen = calls[name](arguments, "torch"), calls[name](arguments, "auto")
    expected = formula(CASES[name], arguments)["y"]
    assert (plain != expected).float().mean() < 0.02  # statistics and tanh may differ in the last bit of fp32
    torch.testing.assert_close(plain, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(chosen, expected, rtol=4e-3, atol=4e-3)


def test_the_choice_of_kernels_is_checked() -> None:
    x, weight = torch.randn(2, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    with pytest.raises(ValueError, match="choose"):
        nk.rms_norm(x, weight, kernels="cuda")
    with pytest.raises(ValueError, match="cannot run"):
        nk.rms_norm(x.double(), weight.double(), kernels="triton")
    if not KERNELS:
        with pytest.raises(ValueError, match="cannot run"):
            nk.rms_norm(x, weight, kernels="triton")


def test_a_launch_goes_to_the_device_of_its_tensors_with_fused_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("normlab_kernels.launch")
    entered = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        entered.append(chosen)
        yield

    launched: list[tuple[int, dict[str, bool]]] = []

    class Kernel:
        fn = None

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda value, **options: launched.append((value, options))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1].index)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        launch.launch(Kernel(), (1,), torch.device("cuda", index), 4)
    assert launched == [(4, {"enable_fp_fusion": True})] * 2  # whatever TRITON_DEFAULT_FP_FUSION and the version say
    assert entered == [torch.device("cuda", index) for index in (0, 1)]


def test_a_kernel_that_one_device_loaded_is_not_launched_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever device is the current one."""
    launch = pytest.importorskip("normlab_kernels.launch")
    current = [0]
    ran: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen.index)
        yield
        current.pop()

    class Kernel:
        fn, arg_names = "a kernel", ()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: Loaded(current[-1])

    class Loaded:
        def __init__(self, where: int) -> None:
            self.where = where

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_: ran.append((self.where, current[-1]))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(launch, "COMPILED", {})
    for index in (1, 2, 1, 2):
        launch.launch(Kernel(), (1,), torch.device("cuda", index), 4)
    assert ran == [(1, 1), (2, 2)]
