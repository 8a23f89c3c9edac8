"""A trained model as an ONNX graph: the change by layer is its input, and the layers' sizes are an output."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError, require_packages
from normlab.models.pretrained import load_model, model_folder
from normlab.probes import sites
from normlab.widgets.change import Change, LayerChange, change_block

FIELDS = tuple(LayerChange.model_fields)
LENGTH = 16  # of the tokens that the graph is traced with; it takes other lengths


class _Changed(nn.Module):
    """The model under a change: `change` is (fields, layers), in the order of FIELDS; exact is 0 or 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        blocks = sites(self.model).blocks
        sizes: list[Tensor] = []

        def size(_: nn.Module, args: tuple, output: Any = None) -> None:
            x = args[0] if output is None else output
            sizes.append(torch.linalg.vector_norm(x.float(), dim=-1).mean())

        with ExitStack() as undo:
            undo.callback(blocks[0].module.register_forward_pre_hook(size).remove)
            for block, values in zip(blocks, change.unbind(1), strict=True):
                change_block(block, dict(zip(FIELDS, values.unbind(), strict=True)), undo)
                undo.callback(block.module.register_forward_hook(size).remove)
            logits = self.model(input_ids=tokens, use_cache=False).logits
        return logits, torch.stack(sizes)


def change_input(change: Change, depth: int) -> Tensor:
    """A change as the graph's input: (fields, layers), float32."""
    rows = [change.at(layer).model_dump() for layer in range(1, depth + 1)]
    return torch.tensor([[float(row[name]) for row in rows] for name in FIELDS])


def export_onnx(name: str | Path, out: str | Path) -> Path:
    """Write `model.onnx` in folder `out`.

    Inputs: tokens (1, length), int64. change (7, layers), float32, in the rows of FIELDS; 1, 1, 1, 0, 1, 1, 1 changes
    nothing. Outputs: logits (1, length, vocabulary). sizes (layers + 1), the mean L2 norm of a token at the embeddings
    and after each block.

    Args:
        name: a model that comes with normlab, or the folder of a run that kept its weights.
        out: made where it is missing.

    Raises:
        NormlabError: no such model, or the extra `onnx` is missing.
    """
    require_packages("an ONNX graph", ["onnx", "onnxscript"], "'normlab[onnx]'")
    model = load_model(model_folder(name), attn_implementation="eager")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    return write_onnx(model, out / "model.onnx")


def write_onnx(model: Any, path: Path) -> Path:
    """The graph of a model in memory; see `export_onnx`."""
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    change = change_input(Change(), len(sites(model).blocks))
    length = torch.export.Dim("length", min=2, max=model.config.max_position_embeddings)
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                _Changed(model).eval(),
                (tokens, change),
                dynamo=True,
                verbose=False,
                input_names=["tokens", "change"],
                output_names=["logits", "sizes"],
                dynamic_shapes={"tokens": {1: length}, "change": None},
            )
    except torch.onnx.OnnxExporterError as error:
        raise NormlabError(f"torch cannot export this model: {str(error).splitlines()[0]}") from error
    assert program is not None
    program.save(path)
    return path
