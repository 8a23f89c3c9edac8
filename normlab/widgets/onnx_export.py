"""A trained model as an ONNX graph: the change by layer is its input, and the layers' sizes are an output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError, require_packages
from normlab.models.pretrained import load_model, model_folder
from normlab.probes import sites
from normlab.widgets.change import Change, LayerChange, slope_of, writer_of

FIELDS = tuple(LayerChange.model_fields)
LENGTH = 16  # of the tokens that the graph is traced with; it takes other lengths


class _Changed(nn.Module):
    """The model under a change: `change` is (fields, layers), in the order of FIELDS; exact is 0 or 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        blocks = sites(self.model).blocks
        names = {module: name for name, module in self.model.named_modules()}
        weights: dict[str, Tensor] = {}
        sizes: list[Tensor] = []
        handles: list[Any] = []

        def size(x: Tensor) -> None:
            sizes.append(torch.linalg.vector_norm(x.float(), dim=-1).mean())

        for place, block in enumerate(blocks):
            own = dict(zip(FIELDS, change[:, place], strict=True))
            for norm in block.norms:
                _scale(norm, names[norm], own, weights)
                if getattr(norm, "takes_mean_square", False):
                    handles.append(norm.register_forward_pre_hook(_choose_statistic(own["exact"]), with_kwargs=True))
            for part in ("attention", "mlp"):
                handles.append(writer_of(block, part).register_forward_hook(_dim(own[part])))

            def finish(_: nn.Module, args: tuple, kwargs: dict, output: Any, share: Tensor = own["block"]) -> Any:
                before = args[0] if args else kwargs["hidden_states"]
                if not sizes:
                    size(before)
                after = before + share * (output - before)
                size(after)
                return after

            handles.append(block.module.register_forward_hook(finish, with_kwargs=True))
        try:
            output = torch.func.functional_call(self.model, weights, (), {"input_ids": tokens, "use_cache": False})
        finally:
            for handle in handles:
                handle.remove()
        return output.logits, torch.stack(sizes)


def _scale(norm: Any, name: str, own: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Gamma times the gain; the slope times lambda's factor over kappa's, which enter a norm as their ratio."""
    centre = getattr(norm, "centre", 0.0)
    if isinstance(getattr(norm, "weight", None), Tensor):
        weights[f"{name}.weight"] = (norm.weight + centre) * own["gain"] - centre
    if slope := slope_of(norm):
        ratio = own["lam"] / own["kappa"] if hasattr(norm, "kappa") else own["lam"]
        weights[f"{name}.{slope}"] = getattr(norm, slope) * ratio


def _choose_statistic(exact: Tensor) -> Any:
    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        carried = kwargs.get("mean_square")
        if carried is None:
            return args, kwargs
        own = args[0].float().pow(2).mean(-1, keepdim=True)
        return args, {**kwargs, "mean_square": torch.where(exact > 0, own, carried)}

    return hook


def _dim(share: Tensor) -> Any:
    def hook(_: nn.Module, args: tuple, output: Any) -> Any:
        return output * share if isinstance(output, Tensor) else (output[0] * share, *output[1:])

    return hook


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
