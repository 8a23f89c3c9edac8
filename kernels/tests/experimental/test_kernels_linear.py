"""Projection + residual + norm in one kernel, against float64 and against the two-kernel path."""

from __future__ import annotations

from types import SimpleNamespace

import normlab_kernels as nk
import pytest
import torch
from kernel_harness import DEVICE, DTYPES, INTERPRETING, assert_close, results
from normlab_kernels import dispatch
from normlab_kernels.experimental import linear_choices
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import Act, RowSpec, Stat
from torch._subclasses.fake_tensor import FakeTensorMode

Tensor = torch.Tensor
FUSED = [pytest.param(True, marks=pytest.mark.kernels), False]
EXACT = torch.float32 if DEVICE == "cpu" else torch.float16  # what the fused kernel takes: compiled, no fp32
TOLERANCE = 1e-5 if DEVICE == "cpu" else 1e-2
NAMES = ["bhyt", "bhyt unbounded", "dyt"]


def arguments_of(name: str, rows: int, width: int, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    a = {"a": normal(rows, inner), "proj": normal(width, inner) / inner**0.5, "residual": normal(rows, width)}
    a["weight"] = 1 + 0.3 * normal(width)
    if name != "dyt":
        a["scale"] = torch.full((1,), 8.0, device=DEVICE, dtype=dtype)
        a["given"] = 0.5 + torch.rand(rows, 1, generator=generator).to(DEVICE)
    else:
        a["bias"] = normal(width)
        a["scale"] = torch.full((1,), 0.7, device=DEVICE, dtype=dtype)
    return a


def call(name: str, fused: bool | None, a: dict[str, Tensor]) -> dict[str, Tensor]:
    if fused and DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the fused kernel is refused before compute capability 9.0")
    if name != "dyt":
        operands = (a["a"], a["proj"], a["residual"], a["weight"], a["scale"], a["given"])
        h, y = nk.linear_add_bhyt(*operands, fused=fused, bounded=name == "bhyt")
    else:
        h, y = nk.linear_add_dyt(a["a"], a["proj"], a["residual"], a["weight"], a["bias"], a["scale"], fused=fused)
    return {"h": h, "y": y}


def formula(name: str, a: dict[str, Tensor]) -> dict[str, Tensor]:
    act = Act.IDENTITY if name == "bhyt unbounded" else Act.TANH
    spec = RowSpec(Stat.NONE, act) if name == "dyt" else RowSpec(Stat.GIVEN, act, 1e-6, 10.0)
    h = a["residual"] + a["a"] @ a["proj"].t()
    return {"h": h, "y": row_norm_reference(h, a["weight"], a.get("bias"), a["scale"], None, a.get("given"), spec)[0]}


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_every_gradient_agree_with_float64(name: str, dtype: str, fused: bool) -> None:
    if fused and dtype == "fp32" and DEVICE == "cuda":
        pytest.skip("refused when compiled")
    arguments = arguments_of(name, 70, 96, 80, DTYPES[dtype])
    ours, upstream = results(lambda a: call(name, fused, a), arguments, None)
    torchs, _ = results(lambda a: formula(name, a), arguments, upstream)
    exact, _ = results(lambda a: formula(name, a), arguments, upstream, torch.float64)
    assert_close(ours, torchs, exact, f"{name} {dtype}")


@pytest.mark.kernels
@pytest.mark.parametrize(
    "changes", [{}, {"from_residual": True}, {"flatten": True}, {"from_residual": True, "flatten": True}]
)
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_of_the_epilogue_and_ragged_edges(slices: int, changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = linear_choices.LinearLaunch(64, 64, 32, slices=slices, warps=4, stages=1, group=2, programs=2, **changes)
    monkeypatch.setattr(linear_choices, "INTERPRETER_LINEAR", launch)
    monkeypatch.setattr(linear_choices, "linear", lambda width: launch)
    for rows, width, inner in ((1, 8, 8), (70, 72, 40), (130, 136, 32)):
        arguments = arguments_of("bhyt", rows, width, inner, EXACT)
        expected = formula("bhyt", {k: v.double() for k, v in arguments.items()})
        got = call("bhyt", True, arguments)
        for key, value in expected.items():
            torch.testing.assert_close(got[key].double(), value, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{key} {rows}")


@pytest.mark.kernels
def test_a_row_of_the_fused_product_does_not_depend_on_how_many_rows_there_are() -> None:
    many = arguments_of("bhyt", 70, 72, 80, EXACT)
    together = call("bhyt", True, many)
    for row in (0, 69):
        here = slice(row, row + 1)
        alone = call("bhyt", True, {k: v[here] if k in ("a", "residual", "given") else v for k, v in many.items()})
        for key, value in alone.items():
            assert torch.equal(value, together[key][here]), key


@pytest.mark.kernels
def test_opcheck_passes() -> None:
    from normlab_kernels.experimental import linear_ops

    a = {k: v.requires_grad_() for k, v in arguments_of("bhyt", 9, 16, 8, EXACT).items()}
    tensors = (a["a"], a["proj"], a["residual"], a["weight"], None, a["scale"], a["given"])
    torch.library.opcheck(linear_ops.linear_add_norm, (*tensors, int(Stat.GIVEN), int(Act.TANH), 1e-6, 10.0))


@pytest.mark.parametrize("fused", FUSED)
def test_compiles_without_a_graph_break(fused: bool) -> None:
    torch.compiler.reset()
    arguments = arguments_of("bhyt", 9, 16, 8, EXACT)
    expected, upstream = results(lambda a: call("bhyt", fused, a), arguments, None)
    compiled = torch.compile(lambda a: call("bhyt", fused, a), fullgraph=True, backend="aot_eager")
    got, _ = results(compiled, arguments, upstream)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=key)


@pytest.mark.kernels
def test_one_gradient_alone_reaches_the_operands() -> None:
    arguments = arguments_of("bhyt", 5, 16, 8, EXACT)
    for key in ("h", "y"):
        a = {k: v.requires_grad_() for k, v in arguments.items()}
        got = torch.autograd.grad(call("bhyt", True, a)[key].square().sum(), [a["a"], a["proj"], a["residual"]])
        wanted = torch.autograd.grad(formula("bhyt", a)[key].square().sum(), [a["a"], a["proj"], a["residual"]])
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)


def test_the_table_of_measurements_decides_and_a_device_that_was_not_measured_takes_two_kernels() -> None:
    assert linear_choices.fusion_win("NVIDIA H200", 16_384, 2048, 2048)
    assert not any(linear_choices.fusion_win(name, 16_384, 2048, 2048) for name in ("NVIDIA A100", "cpu"))
    arguments = arguments_of("bhyt", 5, 16, 8, torch.float32)
    for key, value in call("bhyt", None, arguments).items():
        assert torch.equal(value, call("bhyt", False, arguments)[key])


def test_a_win_holds_for_its_device_and_shape_and_from_its_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of decoding does not take the kernel that won in a prompt."""
    few, many = (linear_choices.FusionWin("A", 16, 8, rows, linear_choices.linear(rows)) for rows in (512, 4096))
    monkeypatch.setattr(linear_choices, "FUSION_WINS", (few, many))
    for (device, rows, width, inner), win in {
        ("A", 1, 16, 8): None, ("A", 512, 16, 8): few, ("A", 4095, 16, 8): few, ("A", 8192, 16, 8): many,
        ("A", 8192, 8, 16): None, ("A", 8192, 16, 16): None, ("B", 8192, 16, 8): None,
    }.items():  # fmt: skip
        assert linear_choices.fusion_win(device, rows, width, inner) is win


def test_the_compiled_kernel_refuses_float32_with_its_reason_and_a_call_that_does_not_insist_takes_two_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tiles do not fit. The interpreter has no such limit. Made-up tensors say they are on a GPU."""
    monkeypatch.setattr(dispatch, "TRITON", True)
    wins = (linear_choices.FusionWin("NVIDIA H200", 16, 8, 5, linear_choices.HOPPER_LINEAR),)
    monkeypatch.setattr(linear_choices, "FUSION_WINS", wins)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, name="NVIDIA H200")
    )
    with FakeTensorMode():
        for interpreting in (False, True):
            monkeypatch.setattr(dispatch, "INTERPRETING", interpreting)
            for dtype, refused in ((torch.float32, not interpreting), (torch.bfloat16, False)):
                shapes = ((5, 8), (16, 8), (5, 16), (16,), (1,))
                a, proj, residual, weight, lam = (torch.empty(*s, device="cuda", dtype=dtype) for s in shapes)
                ms = torch.empty(5, 1, device="cuda")
                assert nk.prefers_fused(a, proj, residual, weight) is not refused
                if refused:
                    with pytest.raises(ValueError, match="262 to 393 KB of shared memory in float32"):
                        nk.linear_add_bhyt(a, proj, residual, weight, lam, ms, fused=True)


@pytest.mark.kernels
@pytest.mark.parametrize("key", ["a", "proj", "residual"])
def test_an_operand_off_the_sixteen_byte_grid_takes_two_kernels(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_choices, "fusion_win", lambda *_: True)
    arguments = arguments_of("bhyt", 5, 16, 8, EXACT)
    room = torch.empty(arguments[key].numel() + 1, device=DEVICE, dtype=EXACT)
    arguments[key] = room[1:].view(arguments[key].shape).copy_(arguments[key])
    expected = call("bhyt", False, arguments)  # of these operands: cuBLAS rounds otherwise where they are off the grid
    for name, value in call("bhyt", None, arguments).items():
        assert torch.equal(value, expected[name])
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        call("bhyt", True, arguments)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_stream_in_fp32_stays_in_fp32_where_the_product_is_in_16_bits(autocast: bool) -> None:
    """With the bits of a linear layer, an addition and the norm."""
    a = arguments_of("bhyt", 5, 16, 8, torch.float32)
    if not autocast:
        a |= {key: a[key].bfloat16() for key in ("a", "proj")}
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        got, upstream = results(lambda a: call("bhyt", None, a), a, None)

        def steps(a: dict[str, Tensor]) -> dict[str, Tensor]:
            h = a["residual"] + torch.nn.functional.linear(a["a"], a["proj"])
            return {"h": h, "y": nk.bhyt_carried(h, a["weight"], a["scale"], a["given"])}

        expected, _ = results(steps, a, upstream)
    assert got["h"].dtype == got["y"].dtype == torch.float32
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6, msg=key)


def test_operands_that_do_not_fit_are_refused() -> None:
    a = arguments_of("bhyt", 5, 16, 8, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        call("bhyt", False, a | {"residual": a["residual"][:, :8]})
    with pytest.raises(ValueError, match="cannot run here"):
        call("bhyt", True, a | {"residual": a["residual"].double()} if INTERPRETING or DEVICE == "cuda" else a)
