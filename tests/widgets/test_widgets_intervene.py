"""Intervening: the answer is the changed model's, and the model is bit for bit as before once it was asked."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from normlab import NormlabConfig, NormlabForCausalLM
from normlab.errors import NormlabError
from normlab.probes import skip_sensitivity
from normlab.widgets import Intervene
from normlab.widgets.change import Change, ask, changed

TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(scheme: str, **fields: object) -> NormlabForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    config = NormlabConfig(scheme=scheme, num_hidden_layers=3, max_position_embeddings=12, **sizes, **fields)
    return NormlabForCausalLM(config).eval()


def loss_of(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(model(input_ids=TOKENS, labels=TOKENS).loss)


@pytest.mark.parametrize("scheme", ["pre_rmsnorm", "lns", "post_rmsnorm", "dyt", "bhyt", "bhyt_linear"])
def test_the_model_is_bit_for_bit_as_before(scheme: str):
    model = model_of(scheme).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kappas = [m.kappa for m in model.modules() if hasattr(m, "kappa")]
    change = Change(
        lam=3.0, kappa=0.3, gain=0.7, exact=True, attention=0.5, layers={2: {"block": 0}, 3: {"block": 0.5, "mlp": 0}}
    )
    assert ask(model, TOKENS, change).loss != loss_of(model)
    with pytest.raises(RuntimeError, match="on purpose"), changed(model, change):
        raise RuntimeError("on purpose")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [m.kappa for m in model.modules() if hasattr(m, "kappa")] == kappas and model.training
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_lambda_up_is_kappa_down_and_pushes_tanh_inputs_beyond_their_bound():
    model = model_of("bhyt")
    up, down = ask(model, TOKENS, Change(lam=4.0)), ask(model, TOKENS, Change(kappa=0.25))
    assert up.loss == pytest.approx(down.loss, abs=1e-6)
    # |z| <= lambda sqrt(d)/kappa: at width 32 nothing exceeds lambda until kappa falls below sqrt(32).
    assert ask(model, TOKENS, Change()).profile("saturation", "attn_norm_in").max() == 0.0
    assert down.profile("saturation", "attn_norm_in").min() > 0.0
    bound = down.profile("saturation_bound", "attn_norm_in")
    assert (down.profile("saturation", "attn_norm_in") <= bound).all() and bound.iloc[0] == pytest.approx(
        0.16, rel=0.05
    )


def test_the_exact_statistic_is_that_of_the_exact_scheme():
    carried = model_of("bhyt")
    with torch.no_grad():
        for layer in carried.model.layers:
            layer.c_attn.mul_(1e8)  # at this size the correction itself is too small to tell the two apart
    exact = model_of("bhyt_exact")
    exact.load_state_dict(carried.state_dict(), strict=False)
    assert ask(carried, TOKENS, Change(exact=True)).loss == pytest.approx(loss_of(exact), abs=1e-6)
    assert ask(carried, TOKENS, Change()).loss == pytest.approx(loss_of(carried), abs=1e-6)
    assert abs(loss_of(exact) - loss_of(carried)) > 4e-6


def test_a_layer_keeps_what_all_blocks_have_but_for_its_own_fields():
    change = Change(kappa=0.5, exact=True, layers={2: {"exact": False, "mlp": 0.25}})
    assert (change.at(1).kappa, change.at(1).exact, change.at(1).mlp) == (0.5, True, 1.0)
    assert (change.at(2).kappa, change.at(2).exact, change.at(2).mlp) == (0.5, False, 0.25)
    text = change.to_json()
    assert text == {"kappa": 0.5, "exact": True, "layers": {"2": {"exact": False, "mlp": 0.25}}}
    assert Change(**text) == change


@pytest.mark.parametrize("scheme", ["lns", "peri_ln", "post_rmsnorm", "bhyt"])
def test_a_dimmer_is_linear_in_what_its_branch_adds(scheme: str):
    model = model_of(scheme)
    last = model.model.layers[-1]

    def output(**fields: float) -> torch.Tensor:
        seen = []
        with changed(model, Change(layers={3: fields})), torch.no_grad():
            handle = last.register_forward_hook(lambda _, args, out: seen.append(out))
            model(input_ids=TOKENS)
            handle.remove()
        return seen[0]

    for part in ("block", "mlp"):
        none, half, full = (output(**{part: share}) for share in (0.0, 0.5, 1.0))
        if part == "mlp" and scheme == "post_rmsnorm":  # its sum is normalized after the dimmer
            none, half, full = (x / x.norm(dim=-1, keepdim=True) for x in (none, half, full))
            assert (half - full).norm() > 1e-3
        else:
            tolerance = 0.05 * float((full - none).abs().max())
            assert tolerance > 0 and torch.allclose(half, (none + full) / 2, atol=tolerance, rtol=0)


def test_a_zero_centred_gain_is_multiplied_as_gamma():
    model = model_of("pre_rmsnorm", zero_centred=True)
    norm = model.model.layers[0].input_layernorm
    gamma = norm.gamma().detach().clone()
    with changed(model, Change(gain=3.0)):
        assert torch.allclose(norm.gamma(), 3 * gamma)


@pytest.mark.parametrize(
    "model", [model_of("lns"), GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50)).eval()]
)
def test_skipping_a_block_costs_what_the_probe_says(model: torch.nn.Module):
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    probed = skip_sensitivity(model, [batch], progress=False).set_index("layer")["skip_delta_loss"]
    whole = ask(model, TOKENS, Change()).loss
    for layer in (1, 2, 3):
        cost = ask(model, TOKENS, Change(layers={layer: {"block": 0}})).loss - whole
        assert cost == pytest.approx(probed[layer], abs=1e-5)


def traces(widget: Intervene) -> dict[str, Any]:
    return {trace.name: trace for trace in widget.figure.data}


def test_the_controls_change_what_is_shown():
    widget = Intervene(model_of("bhyt"), TOKENS)

    def size(state: str) -> list[float]:
        return list(traces(widget)[f"{state} size"].y)

    assert size("intervened") == size("as it is")
    widget.gain.value = 4.0
    assert size("intervened")[-1] > 1.1 * size("as it is")[-1]
    widget.skip.value = (1,)
    assert size("intervened")[1] == pytest.approx(size("intervened")[0])
    assert f"{widget.now.loss:.4f}" in widget.message.value
    token = traces(widget)["intervened token"]
    assert sum(token.x) <= 1.0 and len(token.y) == 8
    widget.kappa.value = 0.25
    assert max(traces(widget)["intervened share"].y) > 0.0 == max(traces(widget)["as it is share"].y)
    widget.reset.click()
    assert widget.change == Change() and size("intervened") == size("as it is")


def test_a_model_without_tanh_has_no_lambda_to_move():
    widget = Intervene(model_of("pre_rmsnorm"), TOKENS)
    assert widget.lam.disabled and widget.kappa.disabled and widget.exact.disabled and not widget.gain.disabled
    assert any("no λ or α in these norms" in a.text for a in widget.figure.layout.annotations)


def test_of_a_tanh_norm_without_lambda_the_same_slider_scales_alpha():
    model = model_of("dyt")
    widget = Intervene(model, TOKENS)
    assert widget.lam.description == "α ×" and not widget.lam.disabled and widget.kappa.disabled
    assert Intervene(model_of("bhyt"), TOKENS).lam.description == "λ ×"
    widget.lam.value = 16.0
    assert max(traces(widget)["intervened share"].y) > max(traces(widget)["as it is share"].y)
    assert "|tanh z| > 0.95" in widget.figure.layout.annotations[1].text
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (m for m in layer.modules() if hasattr(m, "alpha")):
                norm.alpha.mul_(16.0)
    assert widget.now.loss == pytest.approx(loss_of(model), abs=1e-6)


def test_a_tanh_norm_that_does_not_tell_its_input_still_has_its_slope_scaled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("normlab.norms.DyT.tanh_input", None)
    widget = Intervene(model_of("dyt"), TOKENS)
    assert any("do not tell" in a.text for a in widget.figure.layout.annotations)
    widget.lam.value = 16.0
    assert widget.now.loss != widget.before.loss


@pytest.mark.parametrize("figure", [lambda w: w.figure, lambda w: w.static()])
def test_both_states_are_told_apart_without_colour(figure: Callable[[Intervene], go.Figure]):
    shown = figure(Intervene(model_of("bhyt"), TOKENS))
    parts = {trace.name: trace for trace in shown.data}
    for part in ("size", "share"):
        assert parts[f"as it is {part}"].line.dash == "dash" and parts[f"intervened {part}"].line.dash == "solid"
    assert parts["as it is token"].marker.pattern.shape == "/" and not parts["intervened token"].marker.pattern.shape
    legend = {trace.name: trace.line.dash for trace in shown.data if trace.showlegend is not False}
    assert legend == {"as it is": "dash", "intervened": "solid", "Chebyshev bound": "dot"}


def test_a_model_that_was_broken_before_any_change_is_said_to_be_so():
    model = model_of("pre_rmsnorm")
    sound = Intervene(model, TOKENS)
    sound.now = replace(sound.now, loss=float("inf"))
    sound.redraw()
    assert "this change breaks the model" in sound.message.value
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    widget = Intervene(model, TOKENS)
    assert "broken before any change" in widget.message.value and "nan" not in widget.message.value
    for trace in widget.figure.data:
        numbers = [*(trace.x or ()), *(trace.y or ())]
        assert all(math.isfinite(v) for v in numbers if isinstance(v, float)), trace.name
    widget.skip.value = (2,)
    assert (
        "broken before any change</b>" not in widget.message.value and f"{widget.now.loss:.4f}" in widget.message.value
    )


def test_words_of_a_tokenizer_are_no_markup():
    names = SimpleNamespace(decode=lambda ids: "<b>" if ids[0] % 2 else "a")
    widget = Intervene(model_of("lns"), TOKENS, names)
    words = next(trace.y for trace in widget.figure.data if trace.name == "as it is token")
    assert any("&lt;b&gt;" in word for word in words) and not any("<" in word for word in words)


def test_moved_from_many_threads_it_ends_on_what_the_controls_say():
    model = model_of("bhyt")
    widget = Intervene(model, TOKENS)
    before = loss_of(model)
    failed: list[BaseException] = []

    def shake(place: int) -> None:
        try:
            for step in range(6):
                widget.lam.value = 2.0 ** ((step * 3 + place) % 5 - 2)
                widget.skip.value = (1 + (step + place) % 3,)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=shake, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failed and loss_of(model) == before
    assert widget.now.loss == pytest.approx(ask(model, TOKENS, widget.change).loss, abs=1e-6)


def test_what_cannot_be_asked_is_one_sentence():
    with pytest.raises(NormlabError, match="needs a tokenizer"):
        Intervene(model_of("lns"), "some text")
    with pytest.raises(NormlabError, match="at least 2 tokens"):
        Intervene(model_of("lns"), torch.zeros(1, 1, dtype=torch.long))
    for fields in ({"lam": 0}, {"block": 1.5}, {"layers": {1: {"skip": 1}}}, {"gain": float("nan")}, {"skip": (1,)}):
        with pytest.raises(NormlabError, match="not a change"):
            Change(**fields)
    with pytest.raises(NormlabError, match="no block 4 to change: the model has blocks 1 to 3"):
        ask(model_of("lns"), TOKENS, Change(layers={4: {}}))
