"""`normlab check`: what a checkpoint's files show. `benchmarks/first_layer.py --check` asks ten families."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from model_helpers import fresh_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from normlab.cli import main
from normlab.errors import NormlabError
from normlab.models import check as module
from normlab.models.check import check
from normlab.norms import BHyT
from normlab.schemes import SCHEMES

Weights = dict[str, torch.Tensor]
SHAPE: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def family(request, tmp_path_factory) -> Path:
    """A saved model whose norms multiply by w, or by 1 + w; gains are 1 +- 0.1."""
    torch.manual_seed(0)
    if request.param == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=8, tie_word_embeddings=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("check") / request.param
    model.save_pretrained(folder)
    return folder


def spoiled(folder: Path, to: Path, change: Callable[[Weights], Any]) -> Path:
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors")
    return to


def gains(weights: Weights, by: float) -> None:
    for name in weights:
        weights[name] += by * float("norm" in name)


UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
FAULTS: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "one gain": (lambda w: w[NORM].add_(1), f"{NORM}: its median is "),
    "zero rows": (lambda w: w[UP].index_fill_(0, torch.tensor([3, 5]), 0),
                  f"{UP}: 2 of 24 rows are zero, the first is row 3"),
    "constant row": (lambda w: w[DOWN][15].fill_(0.5), f"{DOWN}: 1 of 16 rows is constant, the first is row 15"),
    "zero embedding": (lambda w: w["model.embed_tokens.weight"][7].zero_(),
                       "model.embed_tokens.weight: 1 of 300 rows is zero, the first is row 7"),
    "nan": (lambda w: w[DOWN][0, :2].fill_(math.nan), f"{DOWN}: 2 of 384 values are not finite"),
    "inf": (lambda w: w[NORM][0].fill_(-math.inf), f"{NORM}: 1 of 16 values are not finite"),
    "dtype": (lambda w: w.update({UP: w[UP].half()}), f"dtypes: {UP} in F16, most matrices in F32"),
    "dtype of a norm": (lambda w: w.update({NORM: w[NORM].half()}), f"dtypes: {NORM} in F16, most matrices in F32"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_names_it(family, fault, tmp_path):
    change, words = FAULTS[fault]
    (line,) = check(spoiled(family, tmp_path / "model", change))
    assert line.startswith(words)


def test_a_model_without_a_fault_has_no_line(family, tmp_path, capsys):
    def padded(weights: Weights) -> None:
        weights["model.embed_tokens.weight"][[0, 298, 299]] = 0  # padding's row, and rows beyond the tokenizer's

    folder = spoiled(family, tmp_path / "model", padded)
    assert check(folder) == check(folder / "model.safetensors") == []
    assert main(["check", str(folder)]) == 0 and capsys.readouterr().out == f"{folder}: no fault found\n"
    nan = spoiled(folder, tmp_path / "nan", lambda weights: weights[UP].fill_(math.nan))
    assert main(["check", str(nan)]) == 1 and capsys.readouterr().out.startswith(f"{UP}: 384 of 384 values")


QUICK = ("bhyt", "dyt", "pre_rmsnorm_fixed", "scalenorm", "unified_norm")  # a kind of gain or buffer each


@pytest.mark.parametrize(
    "scheme", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_models_of_every_scheme_have_no_fault(scheme, tmp_path):
    for fields, dtype in (({}, torch.bfloat16), ({"zero_centred": True}, torch.float32)):
        model = fresh_model(scheme, **fields)
        with torch.no_grad():
            for parameter in model.parameters():  # as trained: a matrix that starts at 0, too
                parameter += 0.03 * parameter.abs().mean().clamp(min=1) * torch.randn_like(parameter)
        model.to(dtype).save_pretrained(tmp_path / str(dtype))
        assert check(tmp_path / str(dtype)) == [], fields


def test_a_gain_that_starts_above_1_is_not_judged_by_its_size(tmp_path):
    fresh_model("bhyt", gamma0=3.0, lam_last=1.0).save_pretrained(tmp_path)
    assert check(tmp_path) == []


class Bounded(nn.Module):
    """A norm of one's own: a gain, perhaps around 1, a slope inside the tanh, a fixed size, a bias."""

    def __init__(self, one: float) -> None:
        super().__init__()
        self.one = one
        self.weight, self.alpha, self.shift = (nn.Parameter(torch.zeros(n)) for n in (8, 1, 8))
        self.register_buffer("size", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one + self.weight) * self.size * torch.tanh(self.alpha * x) + self.shift


@pytest.mark.parametrize(
    ("norm", "adds"),
    [
        (lambda: Bounded(1.0), True),
        (lambda: Bounded(0.0), False),
        (lambda: nn.LayerNorm(8), False),
        (lambda: BHyT(8, 1.0, 5.0), False),
        (lambda: nn.GroupNorm(2, 4), None),
    ],
)
def test_whether_a_norm_adds_1_is_told_with_no_value_of_its_own(norm, adds):
    """Memory that nobody wrote to may hold anything."""
    with torch.device("meta"):
        built = norm()
    assert module._adds_one(built) is adds


@pytest.mark.parametrize(
    ("by", "ends"),
    [
        (1, {"llama": "is it 1 + w, or was a 1 added twice?", "gemma3": "is the 1 in the file too?"}),
        (-1, {"llama": "is it w - 1?", "gemma3": "was the 1 taken off twice?"}),
    ],
)
def test_how_gains_are_stored_is_judged_by_the_familys_own_norm(family, by, ends, tmp_path):
    (line,) = check(spoiled(family, tmp_path / "model", lambda weights: gains(weights, by)))
    usual = {"llama": "LlamaRMSNorm multiplies by w,", "gemma3": "Gemma3RMSNorm multiplies by 1 + w,"}
    assert line.startswith("gains: ") and usual[family.name] in line and line.endswith(ends[family.name])


def test_a_head_that_is_tied_is_compared(family, tmp_path):
    def copied(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    def moved(weights: Weights) -> None:
        copied(weights)
        weights["lm_head.weight"][299, 15] += 1

    assert check(spoiled(family, tmp_path / "same", copied)) == []
    lines = ["lm_head.weight differs from model.embed_tokens.weight, and config.json ties them"]
    assert check(spoiled(family, tmp_path / "moved", moved)) == lines * (family.name == "gemma3")


def test_shards_are_read_a_piece_at_a_time(family, tmp_path, monkeypatch):
    folder = spoiled(family, tmp_path / "model", lambda w: (w[DOWN][15].zero_(), w[UP][23].fill_(math.nan)))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i in range(3):
        part = {name: weights[name] for name in sorted(weights)[i::3]}
        save_file(part, folder / f"model-0000{i + 1}-of-00003.safetensors")
    sizes = []
    opened = safetensors.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def __enter__(self) -> "Watched":
            return self

        def __exit__(self, *exception: Any) -> None: ...

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> Any:
            cut = self.file.get_slice(name)

            class Cut:
                get_shape, get_dtype = cut.get_shape, cut.get_dtype

                def __getitem__(self, index: Any) -> torch.Tensor:
                    sizes.append(cut[index].numel())
                    return cut[index]

            return Cut()

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    monkeypatch.setattr(module, "PIECE", 64)
    found = sorted(check(folder))
    assert found == [f"{UP}: 16 of 384 values are not finite", f"{DOWN}: 1 of 16 rows is zero, the first is row 15"]
    assert max(sizes) <= 64 and sum(sizes) >= sum(x.numel() for x in weights.values())


def rewritten(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "model-00002-of-00002.safetensors"), "shard 1 of 2 is missing"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no .safetensors file"),
        (lambda f: rewritten(f / "model.safetensors", lambda data: data[:-9]), "cannot be read"),
        (lambda f: rewritten(f / "model.safetensors", lambda data: b"\xff" * 7 + data[7:]), "cannot be read"),
        (lambda f: (f / "config.json").write_text(
            json.dumps(json.loads((f / "config.json").read_text()) | {"vocab_size": 2**40})), "far larger model"),
    ],
    ids=["a shard", "no file", "cut short", "a header of any size", "a vocabulary of any size"],
)  # fmt: skip
def test_files_that_cannot_be_checked_are_one_line(family, change, words, tmp_path, refused):
    folder = tmp_path / "model"
    shutil.copytree(family, folder)
    change(folder)
    with pytest.raises(NormlabError, match=words):
        check(folder)
    refused("check", str(folder))
