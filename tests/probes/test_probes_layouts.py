"""Tokens that count where activations do not lie as (batch, length, width), against other hooks in float64."""

import contextlib

import pytest
import torch
import transformers
from model_helpers import cached
from probe_toys import WIDTH, PreLN, Stack, X, contribution, rms, size
from probe_zoo import values
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import record, sites, skip_sensitivity
from normlab.probes.sites import stacks
from normlab.probes.stream_sums import explain

LENGTH = 16
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def recorded(where, call, module, metrics=("rms",), reads=False):
    """The record at every place, and what `module` returned (or read) in each call."""
    kept = []

    def keep(_, args, output=None):
        x = args[0] if reads else output
        kept.append(x[0] if isinstance(x, tuple) else x)

    handle = module.register_forward_pre_hook(keep) if reads else module.register_forward_hook(keep)
    with record(where, list(metrics)) as rec, torch.no_grad():
        call()
    handle.remove()
    return values(rec.stats()), kept, rec.stats().manifest["absent"]


def tokens(*shape):
    return torch.randint(5, 60, shape, generator=torch.Generator().manual_seed(1))


def pegasus():
    torch.manual_seed(0)
    sizes = {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.PegasusXConfig(
        vocab_size=64, d_model=WIDTH, block_size=8, num_global_tokens=3, max_position_embeddings=64, **sizes, **heads
    )
    model = transformers.PegasusXForConditionalGeneration(config).eval()
    return model, {name.split(".")[1]: where for name, where in stacks(model).items()}


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config).eval()


def test_an_encoder_with_global_tokens_keeps_its_own_mask():
    model, found = pegasus()
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[:, 11:] = 0
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": mask, "decoder_input_ids": tokens(2, 6)}
    for name, counted in (("encoder", mask.bool()), ("decoder", torch.ones(2, 6, dtype=torch.bool))):
        where = found[name]
        table, (out,), _ = recorded(where, lambda: model(**inputs), where.blocks[0].module)
        assert table["block_out", 1, "rms", "all"] == rms(out[counted]), name


def test_rows_flattened_into_one_lose_their_first_token_each_without_a_mask():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **SMALL, ffn_dim=24, word_embed_proj_dim=WIDTH, max_position_embeddings=64, pad_token_id=0
    )
    model = transformers.OPTForCausalLM(config).eval()
    norm = model.model.decoder.layers[0].final_layer_norm
    table, (x,), _ = recorded(model, lambda: model(input_ids=tokens(3, LENGTH)), norm, reads=True)
    assert x.shape == (3 * LENGTH, WIDTH)
    assert table["mlp_norm_in", 1, "rms", "no_first"] == rms(x.view(3, LENGTH, WIDTH)[:, 1:])


class Streams(nn.Module):
    """Blocks whose state is (streams, batch, length, width), Gemma 3n's order."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, h):
            return h + self.mlp(self.norm(h))

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 4 * WIDTH)
        self.layers = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, input_ids):
        h = self.embed(input_ids).unflatten(-1, (4, WIDTH)).movedim(2, 0)
        for block in self.layers:
            h = block(h)
        return h


def test_streams_before_the_rows_each_lose_their_first_token():
    torch.manual_seed(0)
    model = Streams()
    where, ids = model.layers[0], tokens(2, LENGTH)
    table, (out,), _ = recorded(model, lambda: model(ids), where, ("rms",))
    assert table["block_out", 1, "rms", "no_first"] == rms(out[:, :, 1:])
    with pytest.raises(NormlabError, match="rows and streams cannot be told apart"):
        recorded(model, lambda: model(tokens(4, 4)), where)


class Mixing(nn.Module):
    """A convolution and a norm of twice the width, as in a gated Mamba."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.conv, self.norm = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 1), nn.LayerNorm(2 * WIDTH)

    def forward(self, h):
        return h + self.down(self.norm(self.conv(self.up(h).mT).mT))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(64, WIDTH), Stack(Mixing, Mixing)

    def forward(self, input_ids=None, text=None):
        return self.body(self.embed(text if input_ids is None else input_ids))


@pytest.mark.parametrize("name", ["input_ids", "text"])
def test_as_many_tokens_as_a_convolution_has_channels_are_no_channels(name):
    model, ids = Mixed(), {name: tokens(2, 2 * WIDTH)}
    table, (out,), _ = recorded(model, lambda: model(**ids), model.body.layers[0], ("token_l2_mean",))
    assert table["block_out", 1, "token_l2_mean", "all"] == size(out)


class Handing(nn.Module):
    """Blocks that are handed and return other tensors beside the stream, and a head."""

    def __init__(self, give, wrap, unwrap):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(64, WIDTH), nn.ModuleList(PreLN() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 64)
        self.give, self.unwrap = give, unwrap
        for block in self.layers:
            block.forward = lambda *args, block=block, **given: wrap(PreLN.forward(block, self.read(*args, **given)))

    @staticmethod
    def read(x=None, bias=None, hidden_states=None):
        x = hidden_states if x is None else x
        return x[0] if isinstance(x, tuple) else x

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.layers:
            args, kwargs = self.give(x)
            x = self.unwrap(block(*args, **kwargs))
        return self.head(self.norm(x))


def scores_first(h):
    return {"router_logits": h.flatten(0, 1)[:, :4], "hidden_states": h}


BIAS = torch.zeros(2, 1, 8, 8)
PLAIN = (lambda x: ((x,), {}), lambda x: x, lambda x: x)
HANDING = {
    "router scores come first": (PLAIN[0], scores_first, lambda o: o["hidden_states"]),
    "attention weights come first": (PLAIN[0], lambda x: (x.new_ones(2, 8, 8), x), lambda o: o[1]),
    "scores by token come first": (PLAIN[0], lambda x: (x[..., :4], x), lambda o: o[1]),
    "a mask by name comes first": (lambda x: ((), {"bias": BIAS, "hidden_states": x}), *PLAIN[1:]),
    "a mask comes first": (lambda x: ((), {"bias": BIAS, "x": x}), *PLAIN[1:]),
    "the stream is in a tuple": (lambda x: (((x, None),), {}), *PLAIN[1:]),
}


@pytest.mark.parametrize("name", HANDING)
def test_the_stream_need_not_come_first(name):
    tables, costs, reasons, ids = [], [], [], {"input_ids": tokens(2, 8)}
    for how in (PLAIN, HANDING[name]):
        model = Handing(*how).requires_grad_(False)
        with record(model, ["rms", "relative_contribution", "grad_l2_total"], loss_tokens=1) as rec:
            rec.backward(model(**ids).square().sum())
        tables.append(values(rec.stats()))
        reasons.append(list(rec.stats().manifest["absent"]))
        with contextlib.suppress(NormlabError):
            costs.append(skip_sensitivity(model, [ids], progress=False)["skip_delta_loss"].tolist())
    stream = [key for key in tables[0] if key[0] in ("block_out", "block_in_grad")]
    assert {key: tables[1][key] for key in stream} == {key: tables[0][key] for key in stream}
    if name == "scores by token come first":  # only what reads the stream shows it
        assert {"block 1", "block 2"} <= set(reasons[1]) and len(costs) == 1
    else:
        assert tables[1] == tables[0] and costs[1:] == costs[:1] and reasons[1] == reasons[0]


@pytest.mark.parametrize("side", [16, 32, 64])
def test_an_image_as_wide_as_a_norm_has_channels_keeps_its_channels(side):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(hidden_sizes=[16, 32], depths=[2, 2], embedding_size=8)
    model = transformers.ResNetForImageClassification(config).eval()
    pixels = torch.randn(2, 3, side, side)
    for block in sites(model).blocks:
        table, (out,), _ = recorded(model, lambda: model(pixels), block.module, ("token_l2_mean",))
        assert table["block_out", block.layer, "token_l2_mean", "all"] == size(out.movedim(1, -1)), block.name


def longformer():
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        **SMALL, attention_window=16, intermediate_size=24, max_position_embeddings=80
    )
    return transformers.LongformerForMaskedLM(config).eval()


@pytest.mark.parametrize("has_mask", [False, True])
def test_positions_that_the_model_pads_itself_are_refused_with_the_way_out(has_mask):
    model, ids = longformer(), tokens(2, 17)
    mask = torch.ones_like(ids) if has_mask else None
    block = model.longformer.encoder.layer[0]
    with pytest.raises(NormlabError, match=r"holds 32 positions a row for 17 tokens.*pad to that length"):
        recorded(model, lambda: model(input_ids=ids, attention_mask=mask), block)
    whole, padded = torch.zeros(2, 32, dtype=torch.long), torch.ones(2, 32, dtype=torch.long)
    whole[:, :17], padded[:, 17:] = ids, 0
    table, (out,), _ = recorded(model, lambda: model(input_ids=whole, attention_mask=padded), block)
    assert table["block_out", 1, "rms", "all"] == rms(out[:, :17])


def test_an_encoder_that_pads_to_its_blocks_is_refused_and_its_decoder_is_measured():
    model, found = pegasus()
    inputs = {"input_ids": tokens(2, 11), "decoder_input_ids": tokens(2, 6)}
    with pytest.raises(NormlabError, match="holds 16 positions a row for 11 tokens"):
        recorded(found["encoder"], lambda: model(**inputs), found["encoder"].blocks[0].module)
    where = found["decoder"]
    table, (out,), _ = recorded(where, lambda: model(**inputs), where.blocks[0].module)
    assert table["block_out", 1, "rms", "no_first"] == rms(out[:, 1:])


def test_virtual_tokens_of_prompt_tuning_are_refused_and_count_in_the_inner_model():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(gpt2(), config).eval()
    block = model.base_model.transformer.h[0]
    with pytest.raises(NormlabError, match=r"holds 12 positions a row for 8 tokens.*record the inner model"):
        recorded(model, lambda: model(input_ids=tokens(2, 8)), block)
    table, (out,), _ = recorded(model.base_model, lambda: model(input_ids=tokens(2, 8)), block)
    assert table["block_out", 1, "rms", "all"] == rms(out) and out.shape[1] == 12


def test_cached_decoding_without_a_mask_leaves_out_each_rows_first_token_once():
    model, ids = gpt2(), tokens(2, 11)
    cache = transformers.DynamicCache(config=model.config)

    def decode():
        for begin, end in ((0, 6), *((i, i + 1) for i in range(6, 11))):
            cached(model, ids[:, begin:end], cache)

    table, kept, _ = recorded(model, decode, model.transformer.h[0])
    out = torch.cat(kept, dim=1)
    assert table["block_out", 1, "rms", "all"] == rms(out)
    assert table["block_out", 1, "rms", "no_first"] == rms(out[:, 1:])


def test_a_model_on_the_meta_device_is_refused_in_one_line():
    model = gpt2().to("meta")
    with pytest.raises(NormlabError, match="on the meta device.*load its weights"), record(model), torch.no_grad():
        model(input_ids=torch.zeros(2, 8, dtype=torch.long, device="meta"))


class TwoMLPs(nn.Module):
    """LongCat's order: attention, experts and an MLP, attention, another MLP; the experts are added last."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        self.attn = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.moe = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        h = h + self.attn[0](self.norms[0](h))
        read = self.norms[1](h)
        late = self.moe(read)
        h = h + self.mlps[0](read)
        h = h + self.attn[1](self.norms[2](h))
        return h + self.mlps[1](self.norms[3](h)) + late


def test_branches_of_one_kind_in_turn_are_not_pooled():
    model = Stack(TwoMLPs, TwoMLPs)
    table, (out,), absent = recorded(model, lambda: model(X), model.layers[0], ("relative_contribution",))
    assert not [place for place in table if place[0] in ("mlp", "attn")]
    assert "2 branches of this kind in turn" in absent["mlp 1"] and "in turn" in absent["attn 1"]
    assert table["block", 1, "relative_contribution", "all"] == contribution(out - X, X)


class Dropping(PreLN):
    """Stochastic depth drops its attention while it trains."""

    def middle(self, h):
        adds = self.attn(self.norm1(h))
        return h if self.training else h + adds


def test_a_branch_that_stochastic_depth_drops_is_said_to_be_dropped():
    model = Stack(Dropping, Dropping)
    _, _, absent = recorded(model, lambda: model(X), model.layers[0], ("rms", "relative_contribution"))
    assert "may have been dropped, by stochastic depth" in absent["attn 1"]


def test_a_dropped_branch_is_told_beside_features_that_are_zero():
    before, out = torch.randn(2, 8, WIDTH).double()
    before[:, 0] = out[:, 0] = 0
    kept = torch.arange(8) % 2 == 0
    found = explain(before, before + torch.where(kept[:, None], 2 * out, 0), [out], torch.finfo().eps)
    assert found is not None and found.form == "dropped" and found.factors == pytest.approx((2.0,))
