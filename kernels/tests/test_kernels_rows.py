"""Every function, forward and backward, against float64 at the shapes where kernels go wrong."""

from __future__ import annotations

import sys

import kernel_harness
import pytest
import torch
from kernel_harness import ALL, CASES, DTYPES, INTERPRETING, KERNELS, check, formula, full_if_slow, make_inputs, results
from normlab_kernels import choices
from normlab_kernels.dispatch import row_norm
from normlab_kernels.spec import Act, RowSpec, Stat

NAMES, QUICK = kernel_harness.NAMES, kernel_harness.QUICK
BOUNDED = [name for name in NAMES if "unbounded" not in name]  # the slowest tests leave out what is one branch less
# In the interpreter: each statistic, with the addition and without.
FEW = ("add_bhyt", "add_layer_norm", "bhyt_carried", "derf", "add_dyt", "rms_norm")
FIELD = ("crms_norm", "seed_norm", "isru")


@pytest.mark.parametrize(
    "name, dtype",
    full_if_slow(
        [(name, dtype) for name in NAMES for dtype in sorted(DTYPES)],
        (*((name, "fp32") for name in QUICK), *((name, dtype) for name in FEW for dtype in DTYPES)),
    ),
)
def test_many_short_rows_agree_with_float64(name: str, dtype: str) -> None:
    """In 16 bits with all rows everywhere: over fewer, PyTorch's error, to which ours is held, may be small by luck."""
    full = kernel_harness.FULL
    for width in (1, 3, 127) if full or dtype == "fp32" else (127,):
        check(name, 199 if full or dtype != "fp32" else 67 if width == 127 else 19, width, DTYPES[dtype])


@pytest.mark.parametrize("name", full_if_slow(NAMES, FEW))
def test_wide_rows_agree_with_float64(name: str) -> None:
    check(name, 5 if kernel_harness.FULL else 2, 4096, torch.float32)
    check(name, 4 if kernel_harness.FULL else 2, 8192, torch.float16)


@pytest.mark.parametrize("name", full_if_slow(BOUNDED, FEW[:4]))
def test_rows_wider_than_a_program_agree_with_float64(name: str) -> None:
    width = 65_536 if kernel_harness.FULL else 33_000
    assert width > choices.MAX_FORWARD_WIDTH
    check(name, 2, width, torch.float32)


@pytest.mark.parametrize("name", full_if_slow(BOUNDED, FEW + FIELD))
def test_split_rows_agree_with_float64_at_odd_widths_and_many_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "MAX_FORWARD_WIDTH", 16)
    monkeypatch.setattr(choices, "MAX_BACKWARD_WIDTH", 16)
    monkeypatch.setattr(choices, "TILE_WIDTH", 32)
    monkeypatch.setattr(choices, "reduction", lambda width: choices.Launch(32, 1, 4))
    for dtype in DTYPES.values() if kernel_harness.FULL or name in FEW[:2] else [torch.float32]:
        check(name, 37 if kernel_harness.FULL else 19, 77, dtype)


@pytest.mark.parametrize("stat", [Stat.NONE, Stat.RMS, Stat.LAYER, Stat.GIVEN, Stat.COMPRESSED, Stat.OWN])
def test_combinations_that_no_function_has_agree_with_float64(stat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows, then rows that are split over programs."""
    needed = ("x", "weight", *(["given"] if stat == Stat.GIVEN else []), *(["scale"] if stat == Stat.OWN else []))
    spec = RowSpec(stat, Act.TANH, 1e-5, 2.0)
    for split in (False, True) if KERNELS else (False,):
        if split:
            monkeypatch.setattr(choices, "MAX_FORWARD_WIDTH", 16)
            monkeypatch.setattr(choices, "MAX_BACKWARD_WIDTH", 16)
            monkeypatch.setattr(choices, "TILE_WIDTH", 16)
        further = ((), ("shift", "bias"), ("scale", "shift"), ("bias", "direction", "shift"))
        for more in further[2:] if split else further:
            inputs = (*needed, *(name for name in more if name not in needed))
            if KERNELS and "direction" in inputs and stat != Stat.RMS:
                continue  # refused

            def call(a: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
                return {"y": row_norm(**a, spec=spec)[0]}  # type: ignore[arg-type]

            monkeypatch.setitem(CASES, "combination", kernel_harness.Case(call, inputs, spec, False, ("y",)))
            check("combination", 3, 20, torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETING, reason="the tests above have their full shapes already")
@pytest.mark.parametrize("name", NAMES)
def test_the_full_shapes_in_the_interpreter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_harness, "FULL", True)
    here = sys.modules[__name__]
    for dtype in DTYPES:
        here.test_many_short_rows_agree_with_float64(name, dtype)
        here.test_a_row_does_not_depend_on_how_many_rows_there_are(name, dtype)
    here.test_wide_rows_agree_with_float64(name)
    here.test_rows_wider_than_a_program_agree_with_float64(name)
    here.test_split_rows_agree_with_float64_at_odd_widths_and_many_rows(name, monkeypatch)


@pytest.mark.parametrize("name", ALL)
def test_one_row_and_no_rows(name: str) -> None:
    check(name, 1, 127, torch.float32)
    check(name, 0, 127, torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_a_large_mean_does_not_swallow_the_variance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    arguments = make_inputs(case, 3, 300, torch.float32)
    arguments["x"] += 100.0
    ours = [case.call(arguments)["y"]]
    monkeypatch.setattr(choices, "MAX_FORWARD_WIDTH", 16)
    monkeypatch.setattr(choices, "reduction", lambda width: choices.Launch(64, 1, 4))
    ours.append(case.call(arguments)["y"])
    exact = formula(case, {k: v.double() for k, v in arguments.items()})["y"]
    for y in ours:
        torch.testing.assert_close(y.double(), exact, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ALL)
def test_same_input_same_bits(name: str) -> None:
    case = CASES[name]
    arguments = make_inputs(case, 50, 33, torch.float32)
    first, upstream = results(case.call, arguments, None)
    second, _ = results(case.call, arguments, upstream)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.mark.parametrize(
    "name, dtype",
    full_if_slow(
        [(name, dtype) for name in NAMES for dtype in ("fp32", "bf16")],
        (*((name, "fp32") for name in QUICK), *((name, "bf16") for name in FEW)),
    ),
)
def test_a_row_does_not_depend_on_how_many_rows_there_are(name: str, dtype: str) -> None:
    """Decoding needs this: one token alone has the bits that it has in its prompt, in whole rows and in split ones."""
    case = CASES[name]
    shapes = ((19, 33, (0, 18)), (3, 2100, (0, 2)))
    few = shapes[:1] if dtype == "bf16" else ((2, 2100, (1,)),)
    for rows, width, chosen in shapes if kernel_harness.FULL else few:
        many = make_inputs(case, rows, width, DTYPES[dtype])
        together, upstream = results(case.call, many, None)
        for row in chosen:
            here = slice(row, row + 1)
            one = {k: v[here] if k in ("x", "residual", "given") else v for k, v in many.items()}
            alone, _ = results(case.call, one, {k: v[here] for k, v in upstream.items()})
            for key in ("y", "s", "ms", "dx", "dresidual", "dgiven"):
                if key in alone:
                    assert torch.equal(alone[key], together[key][here]), f"{key}, row {row} of {rows} x {width}"


@pytest.mark.parametrize("name", ALL)
def test_strided_inputs_and_gradients(name: str) -> None:
    case = CASES[name]
    packed = make_inputs(case, 2 * 11, 21, torch.float32)
    expected, upstream = results(case.call, packed, None)

    def strided(tensor: torch.Tensor, column_step: int) -> torch.Tensor:
        rows, width = tensor.shape
        room = torch.full((rows, 2 * width + 3), float("nan"), device=tensor.device)
        view = room[:, : column_step * width : column_step]
        view.copy_(tensor)
        return view

    for step in (1, 2):
        loose = {k: strided(v, step) if k in ("x", "residual") else v for k, v in packed.items()}
        loose_upstream = {k: strided(v, step) if v.shape[-1] > 1 else v for k, v in upstream.items()}
        got, _ = results(case.call, loose, loose_upstream)
        for key, value in expected.items():
            assert torch.equal(value, got[key]), key


def test_gradients_and_statistics_that_are_expanded_views() -> None:
    for name in ("bhyt", "bhyt_carried"):
        case = CASES[name]
        arguments = make_inputs(case, 7, 20, torch.float32)
        if "given" in arguments:
            arguments["given"] = arguments["given"][:1].expand(7, 1)
        out = case.call(arguments)
        spread = {k: torch.full((1, 1), 0.7, device=v.device).expand(v.shape) for k, v in out.items()}
        expanded, _ = results(case.call, arguments, spread)
        dense_arguments = {k: v.contiguous() for k, v in arguments.items()}
        dense, _ = results(case.call, dense_arguments, {k: v.contiguous() for k, v in spread.items()})
        for key, value in dense.items():
            assert torch.equal(value, expanded[key]), key


@pytest.mark.parametrize("name", ALL)
def test_any_leading_shape(name: str) -> None:
    case = CASES[name]
    flat = make_inputs(case, 6, 10, torch.float32)
    shaped = {k: v.view(2, 3, -1) if k in ("x", "residual", "given") else v for k, v in flat.items()}
    for key, value in case.call(flat).items():
        assert torch.equal(value.view(2, 3, -1), case.call(shaped)[key]), key


@pytest.mark.parametrize(
    "name", ["bhyt", "rms_norm", "dyt", *(pytest.param(name, marks=pytest.mark.kernels) for name in FIELD)]
)
def test_nothing_of_the_size_of_x_is_kept_but_x(name: str) -> None:
    case = CASES[name]
    arguments = {k: v.requires_grad_() for k, v in make_inputs(case, 40, 30, torch.float32).items()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = case.call(arguments)
    assert [size for size in kept.values() if size >= 40 * 30] == [40 * 30]
    assert out["y"].requires_grad
