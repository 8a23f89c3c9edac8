"""Few bits against NumPy's rounding: weights per output channel, activations per token, and nothing left behind."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from probe_zoo import batch_for, tiny_llama
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import quantization_costs


def by_numpy(x: np.ndarray, bits: int) -> np.ndarray:
    """Every row to its own grid, one value at a time."""
    most = 2 ** (bits - 1) - 1
    out = np.zeros_like(x)
    for row, values in np.ndenumerate(np.abs(x).max(-1)):
        if values > 0:
            out[row] = [np.round(v / (values / most)) * (values / most) for v in x[row]]
    return out


class Coarse(nn.Module):
    """A linear layer of rounded weights that rounds what it reads."""

    def __init__(self, linear, weights, activations):
        super().__init__()
        self.bias, self.activations = linear.bias, activations
        self.weight = torch.tensor(by_numpy(linear.weight.detach().numpy(), weights)) if weights else linear.weight

    def forward(self, x):
        x = torch.tensor(by_numpy(x.detach().numpy(), self.activations)) if self.activations else x
        return nn.functional.linear(x, self.weight, self.bias)


def loss_of(model, batch, weights=None, activations=None) -> float:
    model = copy.deepcopy(model)
    for block in model.model.layers:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                block.set_submodule(name, Coarse(module, weights, activations))
    with torch.no_grad():
        return float(model(**batch, use_cache=False).loss)


def test_the_loss_is_that_of_a_model_whose_linear_layers_were_replaced():
    model, batch = tiny_llama(num_hidden_layers=2), batch_for("llama")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    table = quantization_costs(model, [batch], bits=(8, 3), progress=False).set_index(["bits", "part"])
    base = loss_of(model, batch)
    for bits in (8, 3):
        for part, given in (("weights", (bits, None)), ("activations", (None, bits)), ("both", (bits, bits))):
            found = table.loc[(bits, part)]
            assert found["delta_loss"] == pytest.approx(loss_of(model, batch, *given) - base, abs=2e-6)
            assert found["loss"] == pytest.approx(base, abs=1e-6) and found["low"] <= found["high"]
    assert table.loc[3, "delta_loss"].abs().max() > 10 * table.loc[8, "delta_loss"].abs().max()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


class Idle(nn.Linear):
    """A linear layer beside one that no token is sent to; `how` may have its weight read all the same."""

    def __init__(self, linear, how=None):
        nn.Module.__init__(self)
        self.weight, self.bias, self.how = linear.weight, linear.bias, how
        self.expert = nn.Linear(linear.in_features, linear.out_features)

    def forward(self, x):
        if self.how == "by a product":
            return super().forward(x) + nn.functional.linear(x, self.expert.weight)
        return super().forward(x) + (0 * x @ self.expert.weight.T if self.how == "turned" else 0)


def test_layers_that_do_not_run_are_left_out_and_weights_that_other_code_reads_are_refused():
    model, batch = tiny_llama(num_hidden_layers=2), batch_for("llama")
    before = quantization_costs(model, [batch], bits=4, progress=False)
    mlp = model.model.layers[1].mlp
    linear = mlp.up_proj
    mlp.up_proj = Idle(linear)
    assert quantization_costs(model, [batch], bits=4, progress=False).equals(before)
    for how in ("by a product", "turned"):
        mlp.up_proj = Idle(linear, how)
        with pytest.raises(NormlabError, match="a linear layer's weight is read by other code"):
            quantization_costs(model, [batch], bits=4, progress=False)
    for block in model.model.layers:
        block.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(NormlabError, match="no linear layer of the blocks ran"):
        quantization_costs(model, [batch], bits=4, progress=False)


def test_the_weights_come_back_where_a_pass_fails():
    model, batch = tiny_llama(num_hidden_layers=2), batch_for("llama")
    before, calls = model.model.layers[0].mlp.down_proj.weight.clone(), []

    def fail(*_):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no memory")

    model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        quantization_costs(model, [batch], progress=False)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, before)


def test_gpt2s_transposed_layers_are_rounded_per_output_channel_and_other_matrices_are_refused():
    torch.manual_seed(0)
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()
    ids = torch.randint(64, (2, 12))
    found = quantization_costs(gpt2, [{"input_ids": ids}], bits=(2,), progress=False).set_index("part")
    cut = copy.deepcopy(gpt2)
    for block in cut.transformer.h:
        for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            module.weight.data = torch.tensor(by_numpy(module.weight.detach().numpy().T.copy(), 2).T.copy())
    with torch.no_grad():
        expected = float(cut(ids, labels=ids).loss - gpt2(ids, labels=ids).loss)
    assert found.loc["weights", "delta_loss"] == pytest.approx(expected, abs=2e-6) and abs(expected) > 1e-4
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(64, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    with pytest.raises(NormlabError, match=r"block 1 holds self_attn.in_proj_weight in a Multihead"):
        quantization_costs(model, [{"input": ids}], progress=False)
    with pytest.raises(NormlabError, match=r"bits is \(1,\): give whole numbers from 2 on"):
        quantization_costs(gpt2, [{"input_ids": ids}], bits=(1,), progress=False)


class Packed(nn.Module):
    """A linear layer whose weight is packed into a buffer, as GPTQ's."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("qweight", (linear.weight * 100).round().to(torch.int32))

    def forward(self, x):
        return nn.functional.linear(x, self.qweight.to(x.dtype) / 100)


def test_packed_weights_and_floats_of_a_byte_are_refused():
    model, batch = tiny_llama(num_hidden_layers=2), batch_for("llama")
    model.model.layers[1].mlp.down_proj = Packed(model.model.layers[1].mlp.down_proj)
    with pytest.raises(NormlabError, match=r"block 2 holds mlp.down_proj.qweight in a Packed: only linear layers"):
        quantization_costs(model, [batch], progress=False)
    model = tiny_llama(num_hidden_layers=2)
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.to(torch.float8_e4m3fn)
    with pytest.raises(NormlabError, match=r"block 1 holds mlp.up_proj.weight in a Linear: only linear layers"):
        quantization_costs(model, [batch], progress=False)
    assert quantization_costs(tiny_llama(), [batch], bits=4, progress=False)["bits"].tolist() == [4, 4, 4]
