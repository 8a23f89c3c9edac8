"""Evidence that says little: one token, equal tokens, a width of two, zero branches, gates at zero. What is measured
is right, and what cannot be told is named in the manifest's `absent`."""

import math

import pytest
import torch
from probe_toys import Stack, measured
from torch import Tensor, nn

from normlab.probes import block_trace, record, stream_sums

METRICS = ["relative_contribution", "token_l2_mean"]
RATIO, SIZE = "relative_contribution", "token_l2_mean"

DOES_NOT_ADD_UP = (
    "the block's output is not its input + attn + mlp "
    "(if other modules add to it, name them: sites(model, attention=..., mlp=...))"
)


class Part(nn.Module):
    """A branch of two matrices; the last one is zero when asked."""

    def __init__(self, width: int, zero: bool):
        super().__init__()
        self.proj, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        if zero:
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.proj(x)))


class Block(nn.Module):
    """`how` says how a branch joins the stream; `zero` names the branches whose output is zero, or "gate"."""

    def __init__(self, width: int, how: str, zero: str):
        super().__init__()
        self.how = how
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Part(width, "attn" in zero), Part(width, "mlp" in zero)
        self.gain = nn.Parameter(torch.zeros(width) if zero == "gate" else torch.rand(width) + 0.5)

    def step(self, h: Tensor, norm: nn.Module, part: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(the stream that is added to, what is added, what the norm reads, the sum)."""
        if self.how == "post":
            return h, part(h), h + part(h), norm(h + part(h))
        carry = {"carried": 0.8, "doubled": 2.0}.get(self.how, 1.0)
        factor = {"carried": 0.5, "feature": self.gain, "gate": self.gain[0]}.get(self.how, 1.0)
        adds = norm(part(h)) if self.how == "peri" else part(norm(h)) * factor
        return carry * h, adds, part(h) if self.how == "peri" else h, carry * h + adds

    def steps(self, h: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        if self.how == "parallel":
            attn, mlp = self.attn(self.norm1(h)), self.mlp(self.norm2(h))
            return [(h, attn, h, h + attn), (h + attn, mlp, h, h + attn + mlp)]
        first = self.step(h, self.norm1, self.attn)
        return [first, self.step(first[-1], self.norm2, self.mlp)]

    def forward(self, h: Tensor) -> Tensor:
        if self.how == "bent":
            h = torch.tanh(h) + self.attn(self.norm1(h))
            return torch.tanh(h) + self.mlp(self.norm2(h))
        return self.steps(h)[-1][-1]


def model_of(width: int, how: str, zero: str = "") -> Stack:
    return Stack(lambda: Block(width, how, zero)).eval()


def tokens(kind: str, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shapes = {"many": (2, 10, False), "one": (1, 1, False), "two": (1, 2, False), "equal": (2, 8, True)}
    rows, length, equal = shapes[kind]
    x = torch.randn(rows, 1 if equal else length, width, generator=generator)
    return (x[:1].expand(rows, length, width) if equal else x).clone()


@torch.no_grad()
def complaints(model: Stack, x: Tensor) -> list[str]:
    """List what is wrong in the first block, or missing without a reason."""
    found, absent = measured(model, METRICS, x)
    wrong = []
    for kind, (stream, adds, read, _) in zip(("attn", "mlp"), model.layers[0].steps(x), strict=True):
        right = {(kind, RATIO): float((adds.norm(dim=-1) / stream.norm(dim=-1)).mean())}
        if model.layers[0].how != "peri":  # a norm of a branch's output is at no site
            right[f"{kind}_norm_in", SIZE] = float(read.norm(dim=-1).mean())
        for (site, metric), value in right.items():
            got = found.get((site, 1, metric, "all"))
            if got is None and f"{site} 1" not in absent:
                wrong.append(f"{site} is absent without a word")
            elif got is not None and abs(got - value) > 1e-3 * value + 5e-6:
                wrong.append(f"{site}: {got:.4g}, not {value:.4g}")
    return wrong


CASES = ((2, "one"), (3, "equal"), (16, "one"), (16, "equal"))
HOWS = ("plain", "feature", "gate", "carried", "doubled", "post", "peri", "parallel")


PAIRS = [(how, zero) for how in HOWS for zero in ("attn", "mlp", "attn mlp")] + [("feature", "gate"), ("gate", "gate")]


@pytest.mark.parametrize(("how", "zero"), [*PAIRS, *((how, "") for how in HOWS)])
def test_little_evidence_gives_no_wrong_reading(how, zero):
    reported = {case: complaints(model_of(case[0], how, zero), tokens(case[1], case[0])) for case in CASES}
    assert not any(reported.values()), {case: words for case, words in reported.items() if words}


@pytest.mark.parametrize(("how", "zero"), PAIRS)
def test_zero_branches_and_gates_at_zero_are_measured_as_adding_nothing(how, zero):
    """As at initialisation: zeroed output projections, ReZero, LayerScale."""
    found, absent = measured(model_of(16, how, zero), METRICS, tokens("many", 16))
    assert not absent
    for kind in ("attn", "mlp"):
        assert (found[kind, 1, RATIO, "all"] < 5e-6) == (kind in zero or zero == "gate"), kind


@pytest.mark.parametrize("how", ["plain", "post", "peri", "parallel"])
def test_plain_sums_are_told_from_a_single_token(how):
    found, absent = measured(model_of(16, how), METRICS, tokens("one", 16))
    assert not absent
    assert {("attn", 1, RATIO, "all"), ("mlp", 1, RATIO, "all")} <= set(found)


def test_where_a_block_does_not_add_up_the_lost_norm_sites_are_named():
    found, absent = measured(model_of(16, "bent"), METRICS, tokens("many", 16))
    assert ("attn_norm_in", 1, SIZE, "all") in found and ("mlp_norm_in", 1, SIZE, "all") not in found
    assert absent["mlp_norm_in 1"] == absent["mlp 1"] == DOES_NOT_ADD_UP


@pytest.mark.parametrize(
    ("how", "zero", "x", "reason"),
    [
        ("feature", "", tokens("two", 16), "not its input + attn + mlp, as far as 2 different tokens tell"),
        ("plain", "", torch.zeros(1, 4, 16), "the stream is zero"),
        ("plain", "", torch.full((1, 4, 16), float("nan")), "the stream is not finite"),
    ],
)
def test_the_reason_says_what_the_evidence_lacks(how, zero, x, reason):
    _, absent = measured(model_of(16, how, zero), METRICS, x)
    assert all(absent[site].endswith(reason) for site in ("attn 1", "mlp 1", "mlp_norm_in 1"))


@pytest.mark.parametrize(("gain", "lost"), [(1e-6, None), (1e-7, "attn + mlp add"), (1e-8, "attn + mlp add")])
def test_gates_below_the_streams_rounding_are_said(gain, lost):
    """The norms' sites are told for longer than what is added."""
    model = model_of(16, "gate")
    for layer in model.layers:
        nn.init.constant_(layer.gain, gain)
    found, absent = measured(model, METRICS, tokens("many", 16))
    assert absent.get("attn 1") == (lost and f"what {lost} is lost in the rounding of the stream")
    assert ("mlp_norm_in 1" in absent) == (gain == 1e-8) and (("attn", 1, RATIO, "all") in found) == (gain == 1e-6)


def test_what_was_absent_in_either_recording_is_absent_in_their_merge():
    recordings = []
    for how in ("plain", "bent"):
        with record(model_of(16, how), METRICS) as rec, torch.no_grad():
            rec.sites.model(tokens("many", 16))
        recordings.append(rec.stats())
    whole, part = recordings
    assert whole.merge(part).manifest["absent"] == part.manifest["absent"] != {}


def test_a_block_that_does_not_add_up_is_given_up_after_a_few_calls(monkeypatch):
    searched = []
    monkeypatch.setattr(block_trace, "find_reading", lambda *given: searched.append(given))
    with record(model_of(16, "bent"), METRICS) as rec, torch.no_grad():
        for kind in ("one", *["many"] * 5):  # a single token proves nothing
            rec.sites.model(tokens(kind, 16))
    assert len(searched) == 1 + block_trace.TRIES
    assert rec.stats().manifest["absent"]["attn 1"] == DOES_NOT_ADD_UP


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "factors", "carry"),
    [
        (0.02, (0.22,), 1.0),  # Granite: rounding is a tenth to a half of what is added
        (0.02, (1.0,), 1.0),
        (0.02, (1.0, 1.0), 1.0),  # Phi, Falcon, GPT-J
        (0.03, (0.22, 0.5), 1.0),
        (0.05, (0.5,), 1.5),  # DeepNorm
        (0.3, (0.0, 1.0), 1.0),
    ],
)
def test_factors_are_told_from_sums_that_half_precision_has_rounded(dtype, size, factors, carry):
    generator = torch.Generator().manual_seed(2)
    before = torch.randn(32, 32, generator=generator).to(dtype)
    outputs = [(size * torch.randn(32, 32, generator=generator)).to(dtype) for _ in factors]
    after = sum((factor * o for factor, o in zip(factors, outputs, strict=True)), carry * before)
    found = stream_sums.explain(before.double(), after.double(), [o.double() for o in outputs], torch.finfo(dtype).eps)
    assert found is not None and found.form == ("added" if carry == 1 else "scaled")
    assert dict(zip(found.parts, found.factors, strict=True)) == pytest.approx(
        {i: factor for i, factor in enumerate(factors) if factor}, rel=0.02
    )


@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_a_factor_that_half_precision_hides_is_unknown_and_its_norm_is_not(factor):
    """No element of the stream is small, so that what is added is below half a step of each."""
    model = model_of(16, "gate").bfloat16()
    nn.init.constant_(model.layers[0].gain, factor)
    nn.init.normal_(model.layers[0].attn.out.weight, std=1e-4)
    found, absent = measured(model, METRICS, tokens("many", 16).sign().bfloat16() * 1.25)
    reason = "what attn add is lost in the rounding of the stream"
    assert absent == {"block 1": reason, "attn 1": reason} and ("mlp", 1, RATIO, "all") in found
    assert ("attn_norm_in", 1, SIZE, "all") in found and ("mlp_norm_in", 1, SIZE, "all") in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", [0.0, 1e-17, -1e-12])
def test_a_share_that_is_the_noise_of_its_fit_is_no_share(monkeypatch, noise, dtype):
    """An exact fit is the luck of the processor."""
    before, o = torch.randn(2, 20, 12, dtype=dtype, generator=torch.Generator().manual_seed(0)).double()
    fitted = torch.tensor([1.0, noise], dtype=torch.float64)
    monkeypatch.setattr(stream_sums._Sum, "fit", lambda self: (fitted[-len(self.terms) :], torch.zeros(before.numel())))
    assert stream_sums.explain(before, before, [o], torch.finfo(dtype).eps) is None


def test_a_layer_that_is_not_finite_has_no_rank_and_stops_no_one():
    model, x = model_of(12, "pre"), torch.randn(2, 10, 12)
    x[0, 3, 5] = torch.nan
    found, _ = measured(model, ["update_effective_rank"], x)
    assert len(found) == 1 and all(math.isnan(value) for value in found.values())
