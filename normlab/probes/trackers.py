"""Layer statistics where people log: one heat map of all layers, metrics and steps, and a few curves a metric.

`heatmap_image`  layers x steps, one panel a metric and site, as one RGB image
`send`           that image, and the curves of the first and the last layer, to TensorBoard, Weights & Biases, Trackio

Names group: `layers/heatmap`, `layers/<metric>/<site>/<layer>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from normlab.errors import NormlabError

if TYPE_CHECKING:
    import pandas

CELL, WIDE, LABEL, GAP = 8, 480, 14, 6  # pixels of a layer, of all steps, of a panel's title, between panels
# Anchors of the viridis colour map, dark to light.
_VIRIDIS = np.array(
    [(68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99),
     (170, 220, 50), (253, 231, 37)], dtype=float,
)  # fmt: skip
_UNKNOWN = (200, 200, 200)


def panels(table: pandas.DataFrame) -> list[tuple[str, np.ndarray, list[int], list[int]]]:
    """(title, layers x steps values, layers, steps) of every metric and site that has layers, all tokens counted."""
    rows = table[(table["mask"] == "all") & table["layer"].notna()]
    found = []
    for (metric, site), part in rows.groupby(["metric", "site"], sort=False):
        grid = part.pivot_table(index="layer", columns="step", values="value", aggfunc="last").sort_index()
        grid = grid.reindex(sorted(grid.columns), axis=1)
        values = grid.to_numpy(dtype=float)
        found.append((f"{metric} at {site}", values, [int(x) for x in grid.index], [int(x) for x in grid.columns]))
    return found


def _colours(values: np.ndarray) -> tuple[np.ndarray, str]:
    """(layers, steps, 3) uint8, and the range in words. Logarithmic where all values are positive and span a decade."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.full((*values.shape, 3), _UNKNOWN, dtype=np.uint8), "no values"
    low, high = float(known.min()), float(known.max())
    log = low > 0 and high / low >= 10
    scaled = np.log(np.where(values > 0, values, np.nan)) if log else values
    bottom, top = (np.log(low), np.log(high)) if log else (low, high)
    share = (scaled - bottom) / (top - bottom) if top > bottom else np.zeros_like(scaled)
    place = np.clip(np.nan_to_num(share), 0, 1) * (len(_VIRIDIS) - 1)
    below = np.minimum(place.astype(int), len(_VIRIDIS) - 2)
    part = (place - below)[..., None]
    colours = (_VIRIDIS[below] * (1 - part) + _VIRIDIS[below + 1] * part).round().astype(np.uint8)
    colours[~np.isfinite(share)] = _UNKNOWN
    return colours, f"{low:.3g} to {high:.3g}{', log' if log else ''}"


def heatmap_image(table: pandas.DataFrame) -> np.ndarray:
    """(height, width, 3) uint8: one panel a metric and site, the first layer at the bottom, steps to the right, each
    with its own range of colours (viridis), which its title tells.

    `table`: columns `step site layer metric mask value`. Raises `NormlabError` for a table without layers, and where
    Pillow is missing.
    """
    found = panels(table)
    if not found:
        raise NormlabError("the table has no layers: there is nothing to draw")
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise NormlabError("the heat map needs Pillow: pip install 'normlab[track]'") from error
    height = sum(LABEL + CELL * len(layers) + GAP for _, _, layers, _ in found)
    image = Image.new("RGB", (WIDE, height), "white")
    draw, top = ImageDraw.Draw(image), 0
    for title, values, layers, steps in found:
        colours, span = _colours(values)
        words = f"{title}, layers {layers[0]}-{layers[-1]}, steps {steps[0]}-{steps[-1]}: {span}"
        draw.text((2, top + 1), words, fill="black")
        panel = Image.fromarray(np.ascontiguousarray(colours[::-1]))
        image.paste(panel.resize((WIDE, CELL * len(layers)), Image.Resampling.NEAREST), (0, top + LABEL))
        top += LABEL + CELL * len(layers) + GAP
    return np.asarray(image)


def curves(table: pandas.DataFrame) -> dict[str, float]:
    """`layers/<metric>/<site>/<layer>` of the first and the last layer at each site, all tokens counted."""
    rows = table[(table["mask"] == "all") & table["layer"].notna()]
    found = {}
    for (metric, site), part in rows.groupby(["metric", "site"], sort=False):
        ordered = part.sort_values("layer")
        for row in (ordered.iloc[0], ordered.iloc[-1]):
            found[f"layers/{metric}/{site}/{row['layer']}"] = float(row["value"])
    return found


class Trackers:
    """The trackers that a Trainer reports to; a TensorBoard writer of its own, beside the Trainer's."""

    def __init__(self) -> None:
        self._writer: Any = None

    def send(self, report_to: Iterable[str], folder: Path, history: pandas.DataFrame, step: int) -> None:
        """Send the image of all steps so far and the curves of this one."""
        names = set(report_to) & {"tensorboard", "wandb", "trackio"}
        if not names or history.empty:
            return
        scalars, image = curves(history[history["step"] == step]), heatmap_image(history)
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            if self._writer is None:
                self._writer = SummaryWriter(str(folder))
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.add_image("layers/heatmap", image, step, dataformats="HWC")
            self._writer.flush()
        if "wandb" in names:
            import wandb

            if wandb.run is not None:
                wandb.log(scalars | {"layers/heatmap": wandb.Image(image), "train/global_step": step})
        if "trackio" in names:
            import trackio
            from trackio.context_vars import current_run

            if current_run.get() is not None:
                trackio.log(scalars | {"layers/heatmap": trackio.Image(image)}, step=step)

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
