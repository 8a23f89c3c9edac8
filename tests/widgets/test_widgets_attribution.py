"""The attribution widget shows both methods' shares, follows the final tanh's slope, and leaves the model alone."""

import pytest
import torch
from widget_helpers import model_of

from normlab.figures import logit_attribution

pytest.importorskip("transformer_lens")
from normlab.models.lens import direct_logit_attribution, to_bridge  # noqa: E402
from normlab.widgets import LogitAttribution  # noqa: E402

TOKENS = torch.randint(0, 61, (2, 10), generator=torch.Generator().manual_seed(1))
ANSWERS, RIVALS = torch.tensor([3, 7]), torch.tensor([5, 1])
NAMES = ["embed", "attn 1", "mlp 1", "attn 2", "mlp 2", "attn 3", "mlp 3"]


def bridge_of(scheme: str, **fields: object):
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 61, "max_position_embeddings": 16}
    return to_bridge(model_of(scheme, initializer_range=0.3, **sizes, **fields))


def bars(widget: LogitAttribution) -> dict[str, dict[str, float]]:
    return {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in widget.figure.data}


def test_it_shows_the_shares_of_both_methods_of_a_difference_of_logits():
    bridge = bridge_of("bhyt", lam_last=10.0)
    widget = LogitAttribution(bridge, TOKENS, ANSWERS, against=RIVALS)
    shown = bars(widget)
    with torch.no_grad():
        last = bridge(TOKENS)[:, -1]
    logit = float((last.gather(1, ANSWERS[:, None]) - last.gather(1, RIVALS[:, None])).mean())
    assert list(shown["frozen"]) == NAMES and sum(shown["frozen"].values()) == pytest.approx(logit, abs=1e-4)
    for method in ("frozen", "jacobian"):
        one, other = (direct_logit_attribution(bridge, TOKENS, ids, method=method) for ids in (ANSWERS, RIVALS))
        shares = (one["contribution"] - other["contribution"]).tolist()
        # The widget takes the difference before the sum over 32 features: a rounding of float32 for each of them.
        rounding = 32 * 2**-23 * float(max(one["contribution"].abs().max(), other["contribution"].abs().max()))
        assert [shown[method][name] for name in NAMES] == pytest.approx(shares[: len(NAMES)], abs=rounding)
    assert f"logit difference {logit:.3f}" in widget.figure.layout.title.text
    assert widget.static().layout.title.text == widget.figure.layout.title.text


@pytest.mark.parametrize(("scheme", "slope"), [("bhyt", "lam"), ("dyt", "alpha")])
def test_a_flat_tanh_is_linear_and_a_steep_one_saturated(scheme, slope):
    bridge = bridge_of(scheme, **({"lam_last": 10.0} if scheme == "bhyt" else {}))
    norm = bridge.ln_final.original_component
    before = getattr(norm, slope).detach().clone()
    widget = LogitAttribution(bridge, TOKENS, ANSWERS)
    start = bars(widget)
    widget.steepness.value = 1 / 16  # the least
    flat = bars(widget)
    assert torch.equal(getattr(norm, slope), before)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        x, head = cache["ln_final.hook_in"][:, -1], bridge.unembed.original_component.weight[ANSWERS]
        linear = float((norm.weight * norm.tanh_input(x) / 16 * head).sum(-1).mean())
    assert sum(flat["frozen"].values()) == pytest.approx(linear, rel=0.05)
    if scheme == "dyt":  # no divisor: both methods go the same way as the tanh becomes linear
        near, far = (
            max(abs(shares["jacobian"][name] - shares["frozen"][name]) for name in NAMES)
            / max(abs(shares["frozen"][name]) for name in NAMES)
            for shares in (flat, start)
        )
        assert near < 0.2 < far
    widget.steepness.value = 64.0
    assert float(widget.message.value.split("%")[0]) > 90
    widget.steepness.value = 1.0
    assert bars(widget) == start


def test_a_final_erf_is_measured_by_its_own_argument():
    bridge = bridge_of("derf")
    norm = bridge.ln_final.original_component
    with torch.no_grad():
        norm.shift.fill_(0.5)
        _, cache = bridge.run_with_cache(TOKENS)
        z = torch.erf(8 * norm.alpha * cache["ln_final.hook_in"][:, -1] + norm.shift)
    widget = LogitAttribution(bridge, TOKENS, ANSWERS)
    widget.steepness.value = 8.0
    share = float((z.abs() > 0.95).float().mean())
    assert widget.message.value.startswith(f"{share:.1%} of") and "|erf z| > 0.95" in widget.message.value


@pytest.mark.parametrize(("scheme", "said"), [("bhyt_linear", "no feature"), ("seednorm", "no feature")])
def test_a_final_norm_that_bounds_nothing_is_not_called_saturated(scheme, said):
    bridge = bridge_of(scheme, **({"lam_last": 10.0} if scheme == "bhyt_linear" else {}))
    widget = LogitAttribution(bridge, TOKENS, ANSWERS)
    assert "saturated" not in widget.message.value and said in widget.message.value


def test_it_asks_once_for_what_it_shows(monkeypatch):
    asked = []
    ask = LogitAttribution.ask
    monkeypatch.setattr(LogitAttribution, "ask", lambda self: asked.append(self.steepness.value) or ask(self))
    widget = LogitAttribution(bridge_of("dyt"), TOKENS, ANSWERS)
    widget.steepness.value = 2.0
    widget.plot.dark_page = True  # other colours, the same answer
    assert asked == [1.0, 2.0]


@pytest.mark.parametrize("scheme", ["pre_rmsnorm", "seednorm"])
def test_a_final_norm_whose_features_pass_no_tanh_has_no_slope_to_move(scheme):
    widget = LogitAttribution(bridge_of(scheme), TOKENS, ANSWERS)
    assert widget.steepness.disabled and "no feature passes a tanh" in widget.message.value
    assert sum(bars(widget)["frozen"].values()) == pytest.approx(widget.tables["frozen"].attrs["logit"], abs=1e-4)


def test_the_figure_says_when_there_is_nothing():
    assert "direct_logit_attribution" in logit_attribution({}).layout.annotations[0].text
