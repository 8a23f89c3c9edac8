"""PowerNorm and Unified Normalization in training: steps written out in float64, and what a pass may not change."""

import copy
import math

import pytest
import torch
from model_helpers import assert_bits, assert_near, assert_state, fresh_model, tokens
from torch import Tensor

from normlab.norms import PowerNorm, TaperNorm, UnifiedNorm

EPS, STEPS, WIDTH = 1e-5, 40, 6
KINDS = {"power": PowerNorm, "unified": UnifiedNorm}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs whose features' sizes differ and drift, and gradients of the output."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.1, 0.3, 1.0, 1.0, 3.0, 9.0], dtype=torch.float64)

    def drawn() -> Tensor:
        return torch.randn(2, 5, WIDTH, generator=draw, dtype=torch.float64)

    return [(drawn() * sizes * (1 + step / STEPS), 0.3 * drawn() + 0.2) for step in range(STEPS)]


def power(gamma: Tensor, beta: Tensor):
    """(y, dL/dx) of each step by algorithm 2 of PowerNorm, in turn, then s."""
    s, nu, found = None, torch.zeros(WIDTH, dtype=torch.float64), []
    for step, (x, up) in enumerate(batches()):
        own = (x**2).mean((0, 1))
        divisor = ((own if step < 0.1 * STEPS else s) + EPS).sqrt()
        z, g = x / divisor, gamma * up
        found.append((gamma * z + beta, (g - nu * z) / divisor))
        nu = nu * (1 - 0.1 * (z**2).mean((0, 1))) + 0.1 * (g * z).mean((0, 1))
        rate = max(0.1, 1 / (step + 1))
        s = own if s is None else (1 - rate) * s + rate * own
    return found, s


def unified(gamma: Tensor, beta: Tensor):
    """The same by Unified Normalization's forward and backward pass, four batches wide."""
    seen, gradients, s, psi, found = [], [], None, torch.zeros(WIDTH, dtype=torch.float64), []
    for step, (x, up) in enumerate(batches()):
        seen.append((x**2).mean((0, 1)))
        warming = step < 0.1 * STEPS
        used = seen[-1] if warming else torch.stack(seen[-4:]).log().mean(0).exp()
        divisor = (used + EPS).sqrt()
        z, g = x / divisor, gamma * up
        gradients.append((g * z).mean((0, 1)))
        latest = gradients[-1] if warming else torch.stack(gradients[-4:]).mean(0)
        psi = 0.9 * psi + 0.1 * latest
        found.append((gamma * z + beta, (g - psi * z) / divisor))
        rate = max(0.1, 1 / (step + 1))
        s = used if s is None else (1 - rate) * s + rate * used
    return found, s


@pytest.mark.parametrize(("kind", "reference"), [("power", power), ("unified", unified)])
@pytest.mark.parametrize("parts", [1, 2])
def test_forward_backward_and_statistics_follow_the_formulas_step_by_step(kind, reference, parts):
    """Two parts are an accumulated batch. Past the warm-up only PowerNorm's passes are the same then.

    In Unified Normalization a part's statistics are not the batch's.
    """
    norm = KINDS[kind](WIDTH, EPS).train()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
    expected, s = reference(norm.weight.detach().double(), norm.bias.detach().double())
    norm.at_step(0, STEPS)
    for step, ((x, up), (y, gradient)) in enumerate(zip(batches(), expected, strict=True), 1):
        outputs, inputs = [], []
        for own, up_ in zip(x.float().chunk(parts), up.float().chunk(parts), strict=True):
            inputs.append(own.requires_grad_())
            outputs.append(norm(own))
            outputs[-1].backward(up_)
        if parts == 1:
            assert_near(outputs[0], y, 2e-5, f"output of step {step}")
            assert_near(inputs[0].grad, gradient, 1e-4, f"gradient of step {step}")
        norm.at_step(step, STEPS)
    if parts == 1 or kind == "power":
        assert_near(norm.mean_square, s, 1e-5)
    x = torch.randn(3, WIDTH)
    y = norm.weight * x / (norm.mean_square + EPS).sqrt() + norm.bias
    assert_near(norm.eval()(x), y, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_changes_no_statistic_and_evaluation_notes_nothing(kind):
    norm, (x, up) = KINDS[kind](WIDTH).train(), batches()[0]
    before = copy.deepcopy(norm.state_dict())
    first = norm(x.float().requires_grad_())
    first.backward(up.float())
    assert_bits(norm(x.float()), first)
    assert_state(norm, before)
    noted = dict(norm.noted)
    norm.eval()(x.float())
    assert noted == norm.noted
    norm.at_step(1, 10)
    assert norm.mean_square.ne(before["mean_square"]).all() and not norm.noted


@pytest.mark.parametrize("scheme", ["powernorm", "unified_norm"])
def test_a_trained_model_is_causal_and_a_resumed_one_goes_on_alike(scheme, tmp_path):
    ids = tokens(2, 12)

    def steps(model, numbers):
        model.set_schedules(numbers[0] - 1, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in numbers:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.after_step(step, 20)

    model = fresh_model(scheme).train()
    steps(model, range(1, 6))
    model.save_pretrained(tmp_path)
    resumed = type(model).from_pretrained(tmp_path).train()
    for each in (model, resumed):
        steps(each, range(6, 9))
    assert_state(resumed, model.state_dict())
    model.eval()
    assert_near(model(ids[:, :5]).logits, model(ids).logits[:, :5], 1e-5)
    assert math.isfinite(model(ids, labels=ids).loss.item())


def _rank(rank: int, kind: str, address: str, results) -> None:
    torch.distributed.init_process_group("gloo", f"file://{address}", rank=rank, world_size=2)
    norm, (x, up) = KINDS[kind](WIDTH).train(), batches()[3]
    norm(x[rank : rank + 1].float().requires_grad_()).backward(up[rank : rank + 1].float())
    norm.at_step(1, 10)
    results[rank] = {name: tensor.tolist() for name, tensor in norm.state_dict().items()}
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_the_statistics_of_a_step(kind, tmp_path):
    results = torch.multiprocessing.Manager().dict()
    torch.multiprocessing.spawn(_rank, (kind, str(tmp_path / "store"), results), nprocs=2)
    assert results[0] == results[1]
    own = (batches()[3][0].float() ** 2).mean((0, 1))
    assert_near(torch.tensor(results[0]["mean_square"]), own, 1e-5)


@pytest.mark.parametrize("scheme", ["unified_norm", "derf"])
def test_shares_of_an_output_are_those_without_its_constant_part(scheme):
    norm = copy.deepcopy(fresh_model(scheme).model.norm).double().eval()
    with torch.no_grad():
        norm.bias.normal_()
        if scheme == "derf":
            norm.shift.fill_(0.5)
        x = torch.randn(4, norm.hidden_size, dtype=torch.float64)
        parts = torch.stack([0.25 * x, 0.75 * x])
        assert_near(norm.shares(x, parts).sum(0), norm(x) - norm.constant(), 1e-9, scheme)


def test_in_half_precision_running_statistics_stay_in_float32():
    norm = fresh_model("tapernorm").to(torch.bfloat16).model.layers[0].input_layernorm
    assert norm.weight.dtype == torch.bfloat16 and norm.seen.dtype == norm.inverse_rms.dtype == torch.float32
    norm.train()
    for step in range(1, 4):
        norm(torch.randn(2, 3, norm.hidden_size, dtype=torch.bfloat16) * step)
        norm.at_step(step, 1000)
    assert norm.seen.dtype == torch.float32 and norm.seen[2] == 3
    for kind in (PowerNorm, UnifiedNorm):
        norm = kind(WIDTH)
        norm.mean_square.fill_(1e5)  # more than float16 holds
        y = norm.eval().half()(torch.full((2, WIDTH), 300.0, dtype=torch.float16))
        assert y.dtype == torch.float16 and y[0, 0].item() == pytest.approx(300 / 1e5**0.5, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_overflowed_leaves_the_gradients_statistics_and_no_other(kind):
    """As in the first steps under a loss scale. The forward pass saw its batch all the same."""
    norms = [KINDS[kind](WIDTH).train() for _ in range(2)]
    for step, (x, up) in enumerate(batches()[:6], 1):
        for norm, factor in zip(norms, (torch.inf if step < 4 else 1.0, 0.0 if step < 4 else 1.0), strict=True):
            norm(x.float().requires_grad_()).backward(up.float() * factor)
            before = norm.gradient.clone()
            norm.at_step(step, STEPS)
            if step < 4:
                assert_bits(norm.gradient, before)
    assert_bits(norms[0].mean_square, norms[1].mean_square)
    assert norms[0].gradient.isfinite().all() and norms[0].gradient.ne(0).all()


@pytest.mark.parametrize("kind", [*KINDS.values(), TaperNorm])
def test_a_batch_that_is_not_finite_leaves_the_statistics(kind):
    norm, (x, up) = kind(WIDTH).train(), batches()[0]
    norm(x.float()).backward(up.float())
    norm.at_step(1, STEPS)
    before = copy.deepcopy(norm.state_dict())
    norm((x / 0).float()).backward(up.float())
    norm.at_step(2, STEPS)
    assert_state(norm, before)


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_first_batch_that_is_not_finite_leaves_no_start_in_the_running_means(kind):
    """Of the batches that were kept, the first is the whole of s, and the next is half of it."""
    norms, (first, second) = [kind(WIDTH).train() for _ in range(2)], [batch[0].float() for batch in batches()[:2]]
    for norm, seen in zip(norms, ([first, second], [first / 0, first / 0, first, second]), strict=True):
        norm.at_step(0, 6)
        for step, x in enumerate(seen, 1):
            norm(x)
            norm.at_step(step, 6)
    assert_near(norms[1].mean_square, norms[0].mean_square, 1e-6)
    assert norms[0].warming is (kind is UnifiedNorm) is norms[1].warming, "its window still has rows without a batch"


def test_an_empty_batch_leaves_the_statistics():
    norm = PowerNorm(WIDTH)
    assert norm(torch.zeros(0, 3, WIDTH)).shape == (0, 3, WIDTH)
    norm.at_step(1, 10)
    assert norm.mean_square.eq(1).all()
