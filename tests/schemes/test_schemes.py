"""The registry: what each scheme is, what it starts at, what decays, and that schemes differ in nothing else."""

import dataclasses
import math
import re

import pytest
import torch
from model_helpers import (
    LLAMA,
    assert_bits,
    assert_near,
    every_scheme,
    fresh_model,
    lively,
    tiny_config,
    tiny_model,
    tokens,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

import normlab
from normlab import SCHEMES, NormlabConfig, NormlabError, NormlabForCausalLM
from normlab.models import swap_norms, without_blocks
from normlab.norms import BHyT, LayerNorm, Norm, RMSNorm
from normlab.schemes import TAGS, NormSite, Scheme, Sublayer, get_scheme, tagged


def test_schemes_are_registered_under_their_names_and_no_two_are_called_alike():
    assert all(scheme.name == name for name, scheme in SCHEMES.items())
    assert normlab.SCHEMES is SCHEMES
    assert len({row.title for row in SCHEMES.values()}) == len(SCHEMES)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_says_who_it_is(scheme):
    row = SCHEMES[scheme]
    assert row.title and row.formula and row.family and (not row.color or re.fullmatch(r"#[0-9a-f]{6}", row.color))
    assert re.search(r"\d{4}\.\d{5}|GPT-2|code", row.paper), "a source"
    assert row.is_control == row.paper.startswith("control: ")
    assert row.carries_statistic == ("uniform" in row.carried)
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.title = "another"


def test_every_tag_of_a_row_is_known_and_every_known_tag_is_used():
    assert {tag for row in SCHEMES.values() for tag in row.tags.split()} == set(TAGS)
    with pytest.raises(NormlabError, match="unknown tag 'cor': choose one of short, "):
        tagged("cor")


@every_scheme
def test_norms_start_where_the_scheme_says(scheme):
    model = fresh_model(scheme, lam_input=2.5, lam_post=0.75, kappa=4.0)
    for name, tensor in model.state_dict().items():
        site = name.split(".")[-2]
        attention = site == "input_layernorm"
        if name.endswith("bias"):
            expected = 0.0
        elif name.endswith(".lam"):
            expected = 2.5 if attention else 0.75
        elif name.endswith(".alpha"):
            expected = 1.0
        elif name.endswith("shared_scale"):
            expected = math.sqrt(32)
        elif tensor.dim() == 1:
            gain = (2.5 if attention else 0.75) / 4.0
            expected = gain if scheme == "rmsnorm_gain" and "layers" in name else 1.0
            if scheme == "lns_gain" and "layers" in name:
                expected = 1 / math.sqrt(int(name.split(".")[2]) + 1)
        else:
            continue
        if not name.endswith("c_attn"):
            assert_bits(tensor, torch.full_like(tensor, expected), name)


def test_the_gain_control_starts_where_bhyt_starts():
    """lambda small against kappa: tanh is the identity, and the control is BHyT with the exact statistic."""
    fields = {"lam_input": 0.02, "lam_post": 0.01, "kappa": 10.0, "rms_norm_eps": 1e-6}
    control, bhyt = fresh_model("rmsnorm_gain", **fields), fresh_model("bhyt_exact", **fields)
    assert_near(control(tokens()).logits, bhyt(tokens()).logits, 1e-4)
    linear = fresh_model("bhyt_linear", **fields)
    assert_near(linear(tokens()).logits, control(tokens()).logits, 1e-3)


@pytest.mark.parametrize(
    ("width", "attention", "other"),
    [(128, 1.0, 1.0), (1024, 1.0, 1.0), (2048, 1.0, 0.5), (4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05)],
)
def test_dyts_alpha_starts_by_width(width, attention, other):
    config = tiny_config("dyt", hidden_size=width, num_attention_heads=width // 64, num_key_value_heads=1)
    for place, expected in (("attn_in", attention), ("mlp_in", other), ("final", other)):
        alpha = get_scheme("dyt").norm(NormSite(place, 1, config)).alpha
        assert alpha.shape == (1,) and alpha.item() == pytest.approx(expected)


@pytest.mark.parametrize(("depth", "start"), [(12, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layer_scale_starts_by_depth(depth, start):
    row = get_scheme("layer_scale")
    rule = row.residual(Sublayer("mlp", 2, tiny_config("layer_scale", num_hidden_layers=depth)))
    assert rule.scale.unique().item() == pytest.approx(start)


@pytest.mark.parametrize("scheme", [name for name, row in SCHEMES.items() if row.residual is not None])
def test_a_rule_says_whether_it_takes_only_a_branchs_direction(scheme):
    config = tiny_config(scheme, num_hidden_layers=4)
    for part in ("attn", "mlp"):
        rule = get_scheme(scheme).residual(Sublayer(part, 2, config))
        with torch.no_grad():
            for parameter in rule.parameters():
                parameter.fill_(0.5)
        if "alpha" in rule._buffers:  # ProRes: its branches start switched off
            rule.alpha.fill_(1.0)
        x, branch = torch.randn(2, 3, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
        state = rule.open(x)
        if part == "mlp" and scheme == "b2t":  # whose state has the block's input too
            state = torch.cat([x, x], -1)
        once, twice = (rule.join(state, factor * branch, lambda total: total, x) for factor in (1.0, 2.0))
        assert rule.takes_direction == torch.allclose(once, twice, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_norms_kernel_gets_what_its_formula_has(scheme):
    """The kernels' own formulas on a CPU, from the operands of a module, equal the module."""
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))
    config = tiny_config(scheme, num_hidden_layers=4)
    for place in ("attn_in", "mlp_in", "mlp_out", "final"):
        norm = get_scheme(scheme).norm_at(NormSite(place, 3, config))
        if getattr(norm, "kernel", None) is None:
            continue
        with torch.no_grad():
            for number, parameter in enumerate(norm.parameters()):
                parameter.add_(0.1 + 0.05 * number)
            y = norm.kernel(x, *norm.operands(), kernels="torch")
            assert_near(y[0] if isinstance(y, tuple) else y, norm(x), 1e-5)


def test_dyts_alpha_starts_where_it_is_told_to_at_every_site():
    model = fresh_model("dyt", alpha0=0.25)
    alphas = [tensor for name, tensor in model.state_dict().items() if name.endswith(".alpha")]
    assert len(alphas) == 2 * model.config.num_hidden_layers + 1 and all(alpha.item() == 0.25 for alpha in alphas)
    with pytest.raises(NormlabError, match="alpha0 0 must be positive"):
        NormlabConfig(scheme="dyt", alpha0=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_logit_depends_on_later_tokens(scheme):
    """A scheme that leaks them would have a low loss in the league."""
    model = lively(tiny_model(scheme)).double().eval()
    ids, others = tokens(), tokens(seed=2)
    others[:, :6] = ids[:, :6]
    with torch.no_grad():
        before, after = model(ids).logits, model(others).logits
    assert_near(after[:, :6], before[:, :6], 1e-12)
    assert not torch.allclose(after[:, 6:], before[:, 6:])


@every_scheme
def test_the_random_state_after_building_is_the_same_for_every_scheme(scheme):
    """Whatever is drawn next, data order included, does not depend on the scheme."""
    fresh_model("pre_rmsnorm")
    expected = torch.rand(4)
    fresh_model(scheme)
    assert_bits(torch.rand(4), expected)


@pytest.mark.parametrize("scheme", ["pre_rmsnorm", "gatednorm"])
def test_a_model_is_built_of_fake_tensors_too(scheme):
    with FakeTensorMode():
        sizes = {name: tensor.shape for name, tensor in fresh_model(scheme).state_dict().items()}
    assert sizes == {name: tensor.shape for name, tensor in fresh_model(scheme).state_dict().items()}


def test_a_schemes_norm_may_be_pytorchs(monkeypatch):
    rms = lambda site: nn.RMSNorm(site.width, eps=site.config.rms_norm_eps)  # noqa: E731
    monkeypatch.setitem(SCHEMES, "pytorchs", Scheme("pytorchs", "own", "own", "own", rms, "norm"))
    expected = fresh_model("pre_rmsnorm")(tokens()).logits
    assert_near(fresh_model("pytorchs")(tokens()).logits, expected, 1e-6)
    model, plain = fresh_model("pytorchs"), fresh_model("pre_rmsnorm")
    with without_blocks(model, [2]), without_blocks(plain, [2]):
        assert_near(model(tokens()).logits, plain(tokens()).logits, 1e-6)
    torch.manual_seed(0)
    swapped = lively(LlamaForCausalLM(LlamaConfig(**LLAMA))).eval()
    expected = swapped(tokens()).logits
    assert_near(swap_norms(swapped, "pytorchs")(tokens()).logits, expected, 1e-5)
    with pytest.raises(NormlabError, match="^RMSNorm has no zero-centred gain: zero_centred needs a subclass"):
        fresh_model("pytorchs", zero_centred=True)


def test_a_norm_that_ignores_its_centre_is_refused_zero_centred(monkeypatch):
    class Unaware(RMSNorm):
        def forward(self, x):
            return self.weight * x

    monkeypatch.setitem(SCHEMES, "unaware", Scheme("unaware", "own", "own", "own", lambda s: Unaware(s.width), "norm"))
    fresh_model("unaware")
    with pytest.raises(NormlabError, match=r"^Unaware leaves out the centre .* by self.gamma\(\), not by self.w"):
        fresh_model("unaware", zero_centred=True)


def test_every_gain_is_tried_for_its_centre(monkeypatch):
    class Unaware(Norm):
        gains = ("weight", "second")

        def __init__(self, width):
            super().__init__(width)
            self.add_parameter("weight", width, 1.0)
            self.add_parameter("second", width, 1.0)

        def forward(self, x):
            return self.gamma() * self.second * x

    monkeypatch.setitem(SCHEMES, "unaware", Scheme("unaware", "own", "own", "own", lambda s: Unaware(s.width), "norm"))
    with pytest.raises(NormlabError, match="^Unaware leaves out the centre of a zero-centred gain: .* self.gamma()"):
        fresh_model("unaware", zero_centred=True)


def test_a_gain_that_only_its_class_starts_is_refused_zero_centred(monkeypatch):
    class Own(Norm):
        def __init__(self, width):
            super().__init__(width)
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return self.gamma() * x

    monkeypatch.setitem(SCHEMES, "own", Scheme("own", "own", "own", "own", lambda s: Own(s.width), "norm"))
    fresh_model("own")
    with pytest.raises(NormlabError, match="^Own starts its gain weight itself: register it by add_parameter for zero"):
        fresh_model("own", zero_centred=True)


@pytest.mark.parametrize("gain", [None, 1])
def test_a_norm_without_a_gain_or_a_width_may_be_zero_centred(gain, monkeypatch):
    class Narrow(Norm):
        def __init__(self, width):
            super().__init__()
            self.width = width
            self.register_parameter("weight", None) if gain is None else self.add_parameter("weight", gain, 1.0)

        def forward(self, x):
            y = nn.functional.rms_norm(x, (self.width,), eps=1e-6)
            return y if self.weight is None else self.gamma() * y

    monkeypatch.setitem(SCHEMES, "narrow", Scheme("narrow", "own", "own", "own", lambda s: Narrow(s.width), "norm"))
    expected = fresh_model("narrow")(tokens()).logits
    assert_bits(fresh_model("narrow", zero_centred=True)(tokens()).logits, expected)


def test_a_norm_with_a_kernel_may_have_no_operands():
    class Free(Norm):
        @staticmethod
        def kernel(x, kernels):
            return 2 * x

        def operands(self):
            return ()

    x = torch.ones(3, 4)
    assert_bits(Free(4)(x), 2 * x)
    assert_bits(Free(4).add(x, x)[1], 4 * x)


DRAWN = [("gatednorm", ".down", 7), ("mhc", "_residual.matrix", 6), ("osp_rmsnorm", "projection.weight", 2)]
WAYS = [(*drawn, way) for drawn in DRAWN for way in ("built", "loaded")] + [(*DRAWN[0], "swapped")]


@pytest.mark.parametrize(("scheme", "drawn", "count", "way"), WAYS)
def test_starts_of_different_places_are_drawn_independently_and_move_no_other_draw(scheme, drawn, count, way, tmp_path):
    def start():
        torch.manual_seed(3)
        if way == "built":
            return fresh_model(scheme)
        llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
        if way == "swapped":
            return swap_norms(llama, scheme)
        llama.save_pretrained(tmp_path)
        return NormlabForCausalLM.from_pretrained(
            tmp_path, config=tiny_config(scheme), ignore_mismatched_sizes=True
        )

    model, state = start(), torch.get_rng_state()
    starts = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(drawn)}
    assert len(starts) == count
    correlation = torch.corrcoef(torch.stack([tensor.flatten() for tensor in starts.values()]))
    assert correlation.fill_diagonal_(0).abs().max() < 0.25  # of at least 512 numbers each
    again = start().state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in starts.items()), "the seed decides"
    if way == "swapped":
        torch.manual_seed(3)
        LlamaForCausalLM(LlamaConfig(**LLAMA))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("scheme", "plain_scheme"), [("pre_rmsnorm_scaled_init", "pre_rmsnorm"), ("lns_scaled_init", "lns")]
)
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_scaled_init_is_the_same_draws_over_the_root_of_2L(depth, scheme, plain_scheme):
    scaled = fresh_model(scheme, num_hidden_layers=depth).state_dict()
    for name, plain in fresh_model(plain_scheme, num_hidden_layers=depth).state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert_near(scaled[name], plain.double() / math.sqrt(2 * depth), 2e-7, name)
        else:
            assert_bits(scaled[name], plain, name)


MATRIX = re.compile(r"(embed_tokens|lm_head|_proj)\.weight$")


@every_scheme
def test_weight_decay_acts_on_matrices_and_on_what_the_scheme_adds(scheme):
    model = fresh_model(scheme, lam_last=1.4)
    names = [name for name, _ in model.named_parameters()]
    expected = [name for name in names if scheme == "dyt" or MATRIX.search(name)]
    assert model.decay_parameter_names() == expected
    assert scheme == "dyt" or len(expected) < len(names)


def test_weight_decay_spares_biases_and_counts_tied_matrices_once():
    biased = fresh_model("bhyt", attention_bias=True, mlp_bias=True)
    assert not [name for name in biased.decay_parameter_names() if name.endswith("bias")]
    tied = fresh_model("bhyt", tie_word_embeddings=True).decay_parameter_names()
    assert "model.embed_tokens.weight" in tied and "lm_head.weight" not in tied


def test_each_scheme_takes_its_own_eps():
    """BHyT's is 1e-6 whatever the configuration says, LayerNorm's 1e-5, RMSNorm's the configuration's."""
    expected = {BHyT: 1e-6, LayerNorm: 1e-5, RMSNorm: 3e-4}
    for scheme in SCHEMES:
        for module in fresh_model(scheme, rms_norm_eps=3e-4, lam_last=1.0).modules():
            if type(module) in expected:
                assert module.eps == expected[type(module)], scheme


@every_scheme
def test_a_block_does_the_same_whatever_stands_before_it(scheme):
    """Deleting a block gives each other block's own map of its new input: no block counts the others."""
    model, ids = tiny_model(scheme, num_hidden_layers=4), tokens()
    calls = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda block, args, kwargs, y: calls.append((args[0], kwargs, y)), with_kwargs=True)
    del model.model.layers[1]
    with torch.no_grad():
        model(ids, use_cache=False)
        whole = tiny_model(scheme, num_hidden_layers=4)
        for index, (x, kwargs, y) in zip((0, 2, 3), calls, strict=True):
            assert_bits(whole.model.layers[index](x, **kwargs), y, f"block {index + 1}")


BAD = {
    "scheme": ({"scheme": "bhty"}, "unknown scheme 'bhty'"),
    "no_scheme": ({"scheme": None}, "scheme is None: give a value of type str"),
    "depth_0": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "depth_negative": ({"num_hidden_layers": -4}, "num_hidden_layers is -4"),
    "heads": ({"num_attention_heads": 5}, "5 attention heads do not divide hidden_size 32"),
    "no_heads": ({"num_attention_heads": 0}, "0 attention heads"),
    "kv_heads": ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 attention heads"),
    "odd_head": ({"hidden_size": 36, "num_attention_heads": 12, "num_key_value_heads": 12}, "heads of width 3"),
    "width": ({"hidden_size": 0}, "hidden_size is 0"),
    "kappa": ({"kappa": 0.0}, "kappa 0.0 must be positive"),
    "kappa_negative": ({"kappa": -10.0}, "must be positive"),
    "kappa_nan": ({"kappa": math.nan}, "must be positive"),
    "lam_infinite": ({"lam_input": math.inf}, "finite"),
    "lam_input": ({"lam_input": 0.0}, "lam_input 0.0"),
    "lam_post": ({"lam_post": -1.0}, "lam_post -1.0"),
    "lam_last": ({"lam_last": -0.5}, "lam_last -0.5"),
    "carried_exact": ({"scheme": "bhyt_exact", "carried": "uniform"}, "scheme bhyt_exact takes exact"),
    "carried_unknown": ({"scheme": "bhyt", "carried": "mean"}, "takes uniform, causal, exact"),
    "length": ({"train_seq_len": 0}, "train_seq_len is 0"),
    "fraction": ({"scheme": "mix_ln", "post_fraction": 1.5}, "post_fraction is 1.5"),
    "misspelt": ({"lambda_input": 3.0}, "unknown field lambda_input: do you mean lam_input?"),
    "text": ({"lam_post": "2"}, "lam_post is '2': give a value of type float | int"),
    "streams": ({"scheme": "mhc", "streams": 2.5}, "streams is 2.5: give a value of type int"),
    "streams_text": ({"scheme": "mhc", "streams": "two"}, "streams is 'two': give a value of type int"),
    "no_warmup": ({"scheme": "prores", "residual_warmup": 0}, "residual_warmup is 0: give at least 1"),
    "switch": ({"zero_centred": "no"}, "zero_centred is 'no': give a value of type bool"),
    "affine": ({"affine_attention": 1}, "affine_attention is 1: give a value of type bool"),
    "width_text": ({"hidden_size": "64"}, "hidden_size is '64': give a value of type int"),
    "layers": ({"exact_layers": 3}, "exact_layers is 3: give a value of type list[int]"),
    "fraction_negative": ({"scheme": "mix_ln", "post_fraction": -0.1}, "post_fraction is -0.1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_is_refused_in_one_line_that_says_what_is_wrong(case):
    fields, message = BAD[case]
    with pytest.raises(NormlabError, match=re.escape(message)) as caught:
        tiny_config(**{"scheme": "pre_rmsnorm", **fields})
    text = str(caught.value).replace(", ".join(SCHEMES), "")
    assert "\n" not in text and len(text) < 250


def test_an_unknown_scheme_names_the_known_ones():
    with pytest.raises(NormlabError) as caught:
        NormlabConfig(scheme="rmsnorm")
    assert all(name in str(caught.value) for name in SCHEMES)


@every_scheme
def test_every_scheme_builds_from_its_name_alone(scheme):
    config = NormlabConfig(scheme=scheme, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32)
    carried = {"bhyt": "uniform", "bhyt_linear": "uniform", "bhyt_exact": "exact"}.get(scheme)
    assert config.carried == carried and config.train_seq_len == config.max_position_embeddings
    with torch.device("meta"):
        NormlabForCausalLM(config)
