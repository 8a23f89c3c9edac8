"""Values that break normalization layers elsewhere: infinities, NaN, zeros, denormals, fp16 beyond 256; rows that lie
far apart."""

from __future__ import annotations

import pytest
import torch
from kernel_harness import ALL, CASES, DEVICE, NAMES, formula, full_if_slow, make_inputs, results

INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bad", full_if_slow([INFINITY, -INFINITY, NAN], (INFINITY, NAN)))
@pytest.mark.parametrize("name", ALL)
def test_a_bad_row_stays_in_its_row(name: str, bad: float) -> None:
    case = CASES[name]
    arguments = make_inputs(case, 20, 12, torch.float32)
    clean, upstream = results(case.call, arguments, None)
    spoilt = dict(arguments)
    spoilt["x"] = arguments["x"].clone()
    spoilt["x"][7, 3] = bad
    got, _ = results(case.call, spoilt, upstream)
    others = [r for r in range(20) if r != 7]
    for key in ("y", "dx", "dresidual", "dgiven", "ms", "s"):
        if key in clean:
            assert torch.equal(clean[key][others], got[key][others]), key
    expected = formula(case, spoilt)["y"][7]
    torch.testing.assert_close(got["y"][7], expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, output", [(n, o) for n in NAMES for o in ("s", "ms") if o in CASES[n].outputs])
def test_a_bad_row_reaches_no_parameter_that_an_output_does_not_depend_on(name: str, output: str) -> None:
    """As autograd has it for the formula: the sum alone passes its gradient on, the statistic alone its row's."""
    case = CASES[name]
    arguments = make_inputs(case, 9, 12, torch.float32)
    arguments["x"][4, 3] = float("nan")
    grads = []
    for function in (case.call, lambda a: formula(case, a)):
        a = {k: v.clone().requires_grad_() for k, v in arguments.items()}
        out = function(a)[output]
        generator = torch.Generator().manual_seed(5)
        upstream = torch.randn(out.shape, generator=generator).to(out.device)
        grads.append(dict(zip(a, torch.autograd.grad(out, list(a.values()), upstream, allow_unused=True), strict=True)))
    for key in arguments:
        ours, wanted = (found[key] for found in grads)
        assert (ours is None) == (wanted is None), key
        if wanted is not None:
            torch.testing.assert_close(ours, wanted, equal_nan=True, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize(
    "name", ["bhyt", "add_bhyt", "rms_norm", "add_rms_norm", "layer_norm", "crms_norm", "seed_norm", "isru"]
)
def test_fp16_inputs_of_ten_thousand_give_right_answers(name: str) -> None:
    case = CASES[name]
    arguments = make_inputs(case, 6, 96, torch.float16)
    arguments["x"] = (arguments["x"].sign() * 1e4).to(torch.float16)
    if "residual" in arguments:
        arguments["residual"] *= 100
    ours, upstream = results(case.call, arguments, None)
    exact, _ = results(lambda a: formula(case, a), arguments, upstream, torch.float64)
    torch.testing.assert_close(ours["y"].double(), exact["y"], rtol=4e-3, atol=1e-3)
    size = exact["dx"].abs().max()
    assert size > 0
    assert (ours["dx"].double() - exact["dx"]).abs().max() <= max(4e-3 * size, 2.0**-24)


@pytest.mark.parametrize("fill", [0.0, 1e-42])
@pytest.mark.parametrize("name", ALL)
def test_rows_of_zeros_and_denormals_are_finite(name: str, fill: float) -> None:
    case = CASES[name]
    arguments = make_inputs(case, 4, 16, torch.float32)
    arguments["x"] = torch.full_like(arguments["x"], fill)
    if "residual" in arguments:
        arguments["residual"] = torch.full_like(arguments["x"], fill)
    ours, upstream = results(case.call, arguments, None)
    exact, _ = results(lambda a: formula(case, a), arguments, upstream, torch.float64)
    for key, value in ours.items():
        size = exact[key].abs().max().clamp(min=1.0)
        assert (value.double() - exact[key]).abs().max() <= 1e-5 * size, key


@pytest.mark.parametrize("square", [0.0, -2.0])
def test_a_square_of_isru_that_is_no_positive_number(square: float) -> None:
    """At a width that is no power of two: what lies past it is no 0/0."""
    case = CASES["isru"]
    arguments = make_inputs(case, 5, 11, torch.float32) | {"scale": torch.tensor([square], device=DEVICE)}
    ours, upstream = results(case.call, arguments, None)
    exact, _ = results(lambda a: formula(case, a), arguments, upstream, torch.float64)
    for key, value in exact.items():
        torch.testing.assert_close(ours[key].double(), value, rtol=1e-5, atol=1e-5, msg=key)


def test_rows_beyond_two_to_the_thirty_one_elements(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The last of three rows lies past 2^31 elements: an int32 row offset would read, or write, another place."""
    step, width = (1 << 30) + 64, 16
    if DEVICE == "cuda":
        storage = torch.zeros(2 * step + width, dtype=torch.float16, device=DEVICE)
    else:  # a file with holes: 4 GiB of addresses, a few pages of disk
        path = tmp_path / "rows"
        with open(path, "wb") as file:
            file.truncate(2 * (2 * step + width))
        storage = torch.from_file(str(path), shared=True, size=2 * step + width, dtype=torch.float16)
    x = storage.as_strided((3, width), (step, 1))
    x.copy_(torch.arange(3 * width, device=DEVICE).view(3, width))
    case = CASES["rms_norm"]
    weight = torch.ones(width, device=DEVICE, dtype=torch.float16)
    got, upstream = results(case.call, {"x": x, "weight": weight}, None)
    expected, _ = results(case.call, {"x": x.contiguous(), "weight": weight}, upstream)
    for key, value in expected.items():
        assert torch.equal(value, got[key]), key
