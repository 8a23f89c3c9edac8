"""Intervening: the answer is the changed model's, and the model is bit for bit as before once it was asked."""

import copy
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser_helpers import page_in
from probe_toys import WIDTH, PreLN
from tokenizers import Tokenizer
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)
from widget_helpers import TOKENS, Mounted, model_of

from normlab.errors import NormlabError
from normlab.models.pretrained import model_folder
from normlab.norms import TaperNorm
from normlab.probes import record, sites, skip_sensitivity
from normlab.widgets import Intervene
from normlab.widgets.change import Change, ask, ask_row, changed
from normlab.widgets.live import model_spec


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50)).eval()


def loss_of(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(model(input_ids=TOKENS, labels=TOKENS).loss)


@pytest.mark.parametrize("scheme", ["pre_rmsnorm", "lns", "post_rmsnorm", "dyt", "bhyt", "bhyt_linear"])
def test_the_model_is_bit_for_bit_as_before(scheme):
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
    assert (down.profile("saturation", "attn_norm_in") <= bound).all()
    assert bound.iloc[0] == pytest.approx(0.16, rel=0.05)


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
def test_a_dimmer_is_linear_in_what_its_branch_adds(scheme):
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


@pytest.mark.parametrize("scheme", ["ngpt", "deep_delta"])
@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_where_a_rule_takes_only_a_direction_its_step_is_dimmed(scheme, part):
    model = model_of(scheme, initializer_range=0.2)
    whole, kind = loss_of(model), {"attention": "attn", "mlp": "mlp"}[part]
    for share in (0.5, 0.0):
        for block in model.model.layers:
            rule = block.rule_at(kind)
            rule.join = lambda state, *rest, join=rule.join: state + share * (join(state, *rest) - state)  # noqa: B023
        by_hand = loss_of(model)
        for block in model.model.layers:
            del block.rule_at(kind).join
        assert abs(by_hand - whole) > 1e-4
        assert ask(model, TOKENS, Change(**{part: share})).loss == pytest.approx(by_hand, abs=1e-6)
    ask(model, TOKENS, Change(attention=0.5, mlp=0.5))
    assert loss_of(model) == whole and not any("_sublayer" in vars(block) for block in model.model.layers)


def test_a_zero_centred_gain_is_multiplied_as_gamma():
    model = model_of("pre_rmsnorm", zero_centred=True)
    norm = model.model.layers[0].input_layernorm
    gamma = norm.gamma().detach().clone()
    with changed(model, Change(gain=3.0)):
        assert torch.allclose(norm.gamma(), 3 * gamma)


@pytest.mark.parametrize("model", [model_of("lns"), gpt2()])
def test_skipping_a_block_costs_what_the_probe_says(model):
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    probed = skip_sensitivity(model, [batch], progress=False).set_index("layer")["skip_delta_loss"]
    whole = ask(model, TOKENS, Change()).loss
    for layer in (1, 2, 3):
        cost = ask(model, TOKENS, Change(layers={layer: {"block": 0}})).loss - whole
        assert cost == pytest.approx(probed[layer], abs=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.0])
@pytest.mark.parametrize("scheme", ["dyt", "bhyt"])
def test_inside_a_dimmed_block_the_norms_are_measured(scheme, share):
    model = model_of(scheme)
    with torch.no_grad():
        for norm in (norm for block in sites(model).blocks for norm in block.norms):
            getattr(norm, "lam" if scheme == "bhyt" else "alpha").mul_(9)
    seen, sizes = {}, []
    hooks = [
        block.norm_at("mlp_in").register_forward_pre_hook(
            lambda norm, args, at=place: seen.setdefault(at, args[0].clone())
        )
        for place, block in enumerate(model.model.layers)
    ]
    hooks += [
        module.register_forward_pre_hook(lambda _, args: sizes.append(args[0].norm(dim=-1).mean().item()))
        for module in (*model.model.layers, model.model.norm)
    ]
    change = Change(layers={2: {"block": share}})
    answer = ask_row(model, TOKENS[0].tolist(), change, 3)
    for hook in hooks:
        hook.remove()
    assert answer["sizes"] == pytest.approx(sizes, rel=1e-5)
    assert None not in answer["shares"]["attn"] and None not in answer["shares"]["mlp"]
    if scheme == "dyt":
        inputs = [model.model.layers[place].norm_at("mlp_in").tanh_input(seen[place]) for place in range(3)]
        shares = [float((z.tanh().abs() > 0.95).float().mean()) for z in inputs]
        assert answer["shares"]["mlp"] == pytest.approx(shares, abs=1e-6) and min(shares) > 0
    else:
        assert None not in answer["bounds"]["mlp"]
    with changed(model, change), torch.no_grad(), record(model, ["rms", "relative_contribution"]) as recorder:
        model(input_ids=TOKENS)
    absent = recorder.stats().manifest["absent"]
    if share:  # what is passed on is the half of both
        assert absent == {}
    else:
        assert absent == dict.fromkeys(("attn 2", "mlp 2"), "a hook changes what the block returns")


class RMSNorm(torch.nn.Module):
    """A norm whose gain has a name of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.gain_is = name
        self.register_parameter(name, torch.nn.Parameter(torch.ones(32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * getattr(self, self.gain_is)


def norms_times(model: torch.nn.Module, factor: float) -> float:
    """The loss with the outputs of all blocks' norms times a factor."""
    norms = [norm for block in sites(model).blocks for norm in block.norms]
    undo = [norm.register_forward_hook(lambda _, args, out: out * factor) for norm in norms]
    loss = loss_of(model)
    for handle in undo:
        handle.remove()
    return loss


@pytest.mark.parametrize("name", ["weight", "scale", "gamma", "g"])
def test_a_gain_of_any_name_is_multiplied(name):
    model = model_of("pre_rmsnorm")
    for block in model.model.layers:
        block.input_layernorm, block.post_attention_layernorm = RMSNorm(name), RMSNorm(name)
    by_hand = norms_times(model, 0.25)
    assert abs(by_hand - loss_of(model)) > 1e-4
    assert ask(model, TOKENS, Change(gain=0.25)).loss == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("gate", [1.0, 0.5, 0.0])
def test_both_gains_of_a_norm_that_becomes_a_gain_are_multiplied(gate):
    model = model_of("tapernorm")
    for module in model.modules():
        if isinstance(module, TaperNorm):
            module.gate.fill_(gate)
    by_hand = norms_times(model, 0.25)
    assert abs(by_hand - loss_of(model)) > 1e-4
    assert ask(model, TOKENS, Change(gain=0.25)).loss == pytest.approx(by_hand, abs=1e-6)


def test_a_norm_without_a_gain_is_named():
    model = model_of("pre_rmsnorm")
    model.model.layers[1].input_layernorm = torch.nn.RMSNorm(32, elementwise_affine=False)
    ask(model, TOKENS, Change(block=0.5))
    with pytest.raises(NormlabError, match="no gain was found in the norm RMSNorm"):
        ask(model, TOKENS, Change(gain=0.25))
    with pytest.raises(NormlabError, match="block 1 has no norm whose gain could change"):
        ask(model_of("ngpt"), TOKENS, Change(gain=0.25))


def traces(widget: Intervene) -> dict[str, Any]:
    return {trace.name: trace for trace in widget.figure.data}


def test_the_change_is_a_trait_and_what_is_shown():
    widget = Intervene(model_of("bhyt"), TOKENS)
    assert repr(widget) == "Intervene(NormlabForCausalLM)"

    def sizes() -> list[list[float]]:
        lines = traces(widget)
        return [list(lines[f"{state} size"].y) for state in ("as it is", "intervened")]

    before, after = sizes()
    assert after == before
    widget.change = Change(gain=4.0, layers={1: {"block": 0}})
    assert widget.change == {"gain": 4.0, "layers": {"1": {"block": 0.0}}}
    trained, after = sizes()
    assert trained == before and after[-1] > 1.02 * before[-1]
    assert after[1] == pytest.approx(after[0])
    token = traces(widget)["intervened token"]
    assert sum(token.x) <= 1.0 and len(token.y) == 8
    widget.change = {"kappa": 0.25}
    shown = traces(widget)
    assert max(shown["intervened share"].y) > 0.0 == max(shown["as it is share"].y)
    with pytest.raises(NormlabError, match="not a change: block is 2; it must be at most 1"):
        widget.change = {"block": 2}
    widget.undo()
    assert widget.change == {} and sizes() == [before, before]


def test_the_figures_next_token_is_that_of_the_chosen_row_and_token():
    model = model_of("lns")
    widget = Intervene(model, TOKENS)
    with torch.no_grad():
        chances = model(input_ids=TOKENS).logits.softmax(-1)
    places = ((0, None, (0, 11)), (1, 3, (1, 3)), (7, 99, (0, 11)), (1, -1, (1, 11)), (0, -4, (0, 8)), (0, -99, (0, 0)))
    for row, token, (at, after) in places:
        widget.row, widget.token = row, token
        figure = widget.figure
        assert f"next token after token {after} of row {at}" in [note.text for note in figure.layout.annotations]
        shown = next(trace for trace in figure.data if trace.name == "as it is token")
        assert list(shown.x) == pytest.approx([float(chances[at, after, int(word[1:])]) for word in shown.y], abs=1e-6)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [("pre_rmsnorm", ([], "")), ("dyt", (["slope"], "α")), ("bhyt", (["slope", "kappa", "carried"], "λ"))],
)
def test_a_model_offers_what_its_norms_have(monkeypatch, scheme, expected):
    widget = Intervene(model_of(scheme), TOKENS)
    about = widget.data["models"][0]
    assert (about["traits"], about["slope"]) == expected
    notes = " ".join(note.text for note in widget.figure.layout.annotations)
    assert ("no λ or α in these norms" in notes) == (scheme == "pre_rmsnorm")
    assert ("|tanh z| > 0.95" in notes) == (scheme == "dyt")
    monkeypatch.setattr("normlab.norms.DyT.tanh_input", None)
    assert any("do not tell" in note.text for note in widget.figure.layout.annotations) == (scheme == "dyt")
    widget.change = {"lam": 16.0}
    assert (widget.now.loss != widget.before.loss) == bool(expected[1])


def test_both_states_are_told_apart_without_colour_and_a_broken_model_has_gaps():
    model = model_of("bhyt")
    shown = Intervene(model, TOKENS).static()
    parts = {trace.name: trace for trace in shown.data}
    for part in ("size", "share"):
        assert parts[f"as it is {part}"].line.dash == "dash" and parts[f"intervened {part}"].line.dash == "solid"
    assert parts["as it is token"].marker.pattern.shape == "/" and not parts["intervened token"].marker.pattern.shape
    legend = {trace.name: trace.line.dash for trace in shown.data if trace.showlegend is not False}
    assert legend == {"as it is": "dash", "intervened": "solid", "Chebyshev bound": "dot"}
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    for trace in Intervene(model, TOKENS).figure.data:
        numbers = [*(trace.x or ()), *(trace.y or ())]
        assert all(math.isfinite(v) for v in numbers if isinstance(v, float)), trace.name


def test_a_change_that_breaks_the_model_leaves_the_likeliest_tokens_of_the_model_as_it_is():
    widget = Intervene(model_of("pre_rmsnorm"), TOKENS)
    likeliest = widget.before.next_token.argsort()[::-1][:8]
    widget.change = {"gain": 1e30}
    assert not math.isfinite(widget.now.loss)
    assert [int(word[1:]) for word in traces(widget)["as it is token"].y] == likeliest.tolist()


def test_the_browser_is_asked_for_room_for_the_texts_alone():
    model = model_of("pre_rmsnorm", max_position_embeddings=32768)
    assert model_spec(model)["length"] == 1024
    assert model_spec(model_of("pre_rmsnorm"))["length"] == 12
    for length, room in ((2, 1024), (2000, 2000)):
        (about,) = Intervene(model, torch.zeros(1, length, dtype=torch.long)).data["models"]
        assert about["spec"]["length"] == room
    widget = Intervene(model, torch.zeros(1, 5000, dtype=torch.long))  # the kernel's
    assert widget.data["models"][0]["spec"] is None and not widget.weights


def test_words_of_a_tokenizer_are_no_markup():
    names = SimpleNamespace(decode=lambda ids: "<b>" if ids[0] % 2 else "a")
    widget = Intervene(model_of("lns"), TOKENS, names)
    words = next(trace.y for trace in widget.figure.data if trace.name == "as it is token")
    assert any("&lt;b&gt;" in word for word in words) and not any("<" in word for word in words)
    assert widget.data["vocabulary"][:2] == ["a", "<b>"]


def test_words_are_told_from_the_ends_of_words_also_where_a_tokenizer_drops_the_first_space():
    pieces = ["▁the", "the", "s", *(f"▁{place}" for place in range(47))]
    drops = SimpleNamespace(decode=lambda ids: "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" "))
    widget = Intervene(model_of("lns"), TOKENS, drops)
    assert widget.data["vocabulary"][:4] == [" the", "the", "s", " 0"]
    assert (widget._word(0), widget._word(1)) == ("' the' #0", "'the' #1")


# Which token is marked in the text, and the probability of the likeliest next one.
CHOSEN = "[...document.querySelectorAll('.panel .text span')].findIndex(word => word.matches('.chosen'))"
FIRST = "document.querySelector('.next .value')?.textContent"
MOVE = "() => { document.activeElement.stepUp(); document.activeElement.dispatchEvent(new Event('input')); }"


@pytest.mark.parametrize("where", ["browser", "kernel"])
def test_the_reader_and_python_hear_of_each_other(where, browser):
    """In the browser a model that the page computes, from the kernel one that it does not."""
    model: Any = model_of("bhyt") if where == "browser" else gpt2()
    widget = Intervene(model, TOKENS)
    assert bool(widget.weights) == (where == "browser")

    def shows(change: Change, row: int = 0) -> None:
        rows = TOKENS[row : row + 1]
        with changed(model, change), torch.no_grad():
            loss = float(model(input_ids=rows, labels=rows).loss)
        read = "loss => Math.abs(loss - +document.querySelector('.panel .loss b')?.textContent) < 2e-3"
        shown.until(read, loss)

    with page_in(browser) as (page, errors):
        shown = Mounted(page, widget)
        shows(Change())
        page.get_by_role("slider", name="block, block 2").focus()
        page.keyboard.press("End" if page.evaluate("document.activeElement.value") == "0" else "Home")
        shown.until("() => document.activeElement.value === '0'")
        skipped = Change(layers={2: {"block": 0}})
        shows(skipped)
        shown.until("() => document.querySelectorAll('.cost:not(.stale) .bar').length === 3")
        shown.until(lambda: Change(**widget.change) == skipped)
        shown.push(MOVE)  # what the kernel was told before the last move comes back after it
        assert page.evaluate("document.activeElement.value") == "0.05"
        shown.until(lambda: widget.change == {"layers": {"2": {"block": 0.05}}})
        widget.change, widget.row = {"gain": 2.0}, 1
        shown.push()
        shows(Change(gain=2.0), row=1)
        with torch.no_grad():
            chances = model(input_ids=TOKENS[1:2]).logits[0].softmax(-1)
        widget.undo()
        for token, after in ((-1, 11), (-4, 8), (-99, 0)):
            widget.token = token
            shown.push()
            likeliest = f"{100 * float(chances[after].max()):.1f}%"
            shown.until(f"() => {CHOSEN} === {after} && {FIRST} === '{likeliest}'")
        page.get_by_role("button", name="γ").click()
        for gain, place in ((0.25, -2), (0.0, -4), (1 / 64, -4)):  # below 1/16 the slider is at its end
            widget.change = {"gain": gain}
            shown.push()
            assert page.get_by_role("slider", name="γ, all blocks").input_value() == str(place)
        assert not errors


def test_a_readers_text_is_read_up_to_the_models_positions_also_beside_a_longer_text(browser):
    backend = Tokenizer.from_file(str(model_folder("bhyt-d8") / "tokenizer.json"))
    tokenizer = SimpleNamespace(backend_tokenizer=backend, decode=backend.decode)
    model = model_of("pre_rmsnorm", vocab_size=backend.get_vocab_size())
    widget = Intervene(model, torch.arange(20)[None], tokenizer)
    with page_in(browser) as (page, errors):
        shown = Mounted(page, widget)
        for text, tokens in ((None, 20), ("a b " * 20, 12)):
            if text is not None:
                page.get_by_label("reads").select_option("own")
                page.locator("textarea").fill(text)
            shown.until(f"() => document.querySelectorAll('.panel .text span').length === {tokens}")
        assert not errors


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


def test_a_lambda_that_does_not_learn_is_multiplied_too():
    models = [model_of("bhyt", learnable_lam=learns) for learns in (True, False)]
    learned, fixed = (ask(model, TOKENS, Change(lam=2.0)).loss for model in models)
    assert fixed == learned != ask(models[0], TOKENS, Change()).loss


def test_a_broken_model_in_the_kernel_has_gaps_and_any_error_is_answered(monkeypatch):
    model = model_of("bhyt")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    answer = ask_row(model, TOKENS[0].tolist(), Change(), 3)
    assert answer["loss"] is None and set(answer["losses"]) == {None} and None not in answer["sizes"]
    json.dumps(answer, allow_nan=False)
    widget, sent = Intervene(model_of("bhyt"), TOKENS), []
    monkeypatch.setattr(Intervene, "send", lambda self, message: sent.append(message))
    monkeypatch.setattr(Intervene, "answer", lambda self, asked: [][0])
    widget._reply(None, {"id": 7}, [])
    assert sent == [{"id": 7, "error": "IndexError: list index out of range"}]


def test_the_page_refuses_an_activation_that_it_does_not_compute():
    model_spec(model_of("bhyt"))
    with pytest.raises(NormlabError, match="does not compute bhyt: it has the activation gelu"):
        model_spec(model_of("bhyt", hidden_act="gelu"))


def ablate_by_a_hook(model: Any) -> None:
    model.model.layers[1].self_attn.register_forward_hook(lambda _, args, output: (output[0] * 0, *output[1:]))


def ablate_by_a_method(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, **kwargs: (0 * kwargs["hidden_states"], None)


def prune_a_matrix(model: Any) -> None:
    prune.l1_unstructured(model.model.layers[1].self_attn.q_proj, "weight", amount=0.5)


def parametrize_a_matrix(model: Any) -> None:
    parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)


@pytest.mark.parametrize(
    ("touch", "why"),
    [
        (ablate_by_a_hook, "hooks"),
        (ablate_by_a_method, "a part with a forward of its own"),
        (prune_a_matrix, "hooks"),
        (parametrize_a_matrix, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_model_that_is_more_than_its_weights_answers_from_the_kernel(touch, why):
    model = model_of("pre_rmsnorm")
    assert Intervene(model, TOKENS).weights
    touch(model)
    with pytest.raises(NormlabError, match=f"does not compute pre_rmsnorm: it has {why}"):
        model_spec(model)
    widget = Intervene(model, TOKENS[:1])
    assert widget.data["models"][0]["spec"] is None and not widget.weights
    asked = {"tokens": TOKENS[0].tolist(), "change": {}, "at": 11}
    with torch.no_grad():
        assert widget.answer(asked)["loss"] == pytest.approx(float(model(TOKENS[:1], labels=TOKENS[:1]).loss), abs=1e-6)


def test_a_model_that_was_asked_for_hidden_states_or_watched_backwards_still_runs_in_the_browser():
    model = model_of("bhyt")
    for options in ({}, {"output_hidden_states": True}, {"output_attentions": True}):
        with torch.no_grad():
            model(TOKENS, **options)
        assert Intervene(model, TOKENS).weights
    model.model.layers[1].register_full_backward_hook(lambda *_: None)
    model.model.layers[1].register_full_backward_pre_hook(lambda *_: None)
    assert Intervene(model, TOKENS).weights
    ablate_by_a_hook(model)
    assert not Intervene(model, TOKENS).weights


def scaled(model: torch.nn.Module, factor: float, part: str, centre: float = 0.0) -> torch.nn.Module:
    """The gains whose names hold `part` times a factor."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, gain in copied.named_parameters():
            if part in name:
                gain.copy_((gain + centre) * factor - centre)
    return copied


def test_gains_and_dimmers_of_other_models_are_what_they_say():
    """A gain of 1 + weight; a norm on a branch's output; two MLPs; a branch whose output holds the stream."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    gemma = GemmaForCausalLM(GemmaConfig(**sizes, head_dim=16)).eval()
    by_hand = loss_of(scaled(gemma, 0.5, "layernorm", 1.0))
    with changed(gemma, Change(gain=0.5)):
        assert loss_of(gemma) == pytest.approx(by_hand, abs=1e-6)
    olmo = Olmo2ForCausalLM(Olmo2Config(**sizes)).eval()
    by_hand = loss_of(scaled(olmo, 0.5, "post_attention_layernorm"))
    with changed(olmo, Change(attention=0.5)):
        assert loss_of(olmo) == pytest.approx(by_hand, abs=1e-6)
    granite = GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**sizes, shared_intermediate_size=48)).eval()
    by_hand = loss_of(scaled(scaled(granite, 0.5, "shared_mlp.output"), 0.5, "experts.down"))
    with changed(granite, Change(mlp=0.5)):
        assert loss_of(granite) == pytest.approx(by_hand, abs=1e-6)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2)).eval()
    with (
        pytest.raises(NormlabError, match="block 1's attention returns the stream"),
        changed(bloom, Change(attention=0)),
    ):
        pass
    with pytest.raises(NormlabError, match="block 1 has no mlp to dim"):
        skip_mlp = Change(mlp=0)
        with changed(MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)), skip_mlp):
            pass


def test_a_branch_of_a_block_that_stands_later_in_a_model_is_dimmed_by_its_number_there():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.layers = nn.Embedding(50, WIDTH), nn.ModuleDict({"4": PreLN(), "5": PreLN()})

        def forward(self, input_ids):
            h = self.embed(input_ids)
            for block in self.layers.values():
                h = block(h)
            return h

    stage = Stage()
    with torch.no_grad():
        with changed(stage, Change(layers={6: {"mlp": 0}})):
            found = stage(TOKENS)
        expected = stage.layers["5"].middle(stage.layers["4"](stage.embed(TOKENS)))
    torch.testing.assert_close(found, expected)
    with pytest.raises(NormlabError, match="no block 1 to change: the model has blocks 5 to 6"), changed(
        stage, Change(layers={1: {"mlp": 0}})
    ):
        pass
