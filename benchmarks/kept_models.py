"""What the models that come with normlab show, as docs/findings.md says it: outliers, few bits, use of depth.

    python -m benchmarks.kept_models --out data/bench/kept_models.csv

One row per model, on blocks of text that it has not seen. Where the same scheme and learning rate is kept with more
blocks, linear maps say which of its layers predicts which of the deeper model (`normlab.probes.layer_maps`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from benchmarks.timing import arguments, report, run, written
from normlab.models.pretrained import load_held_out, load_model
from normlab.probes import attention_sinks, layer_maps, massive_activations, quantization_costs, void_tokens
from normlab.release import shipped_models

PLACE = ("row", "position")
BITS = {"weights_8": (8, "weights"), "both_8": (8, "both"), "weights_4": (4, "weights"), "both_4": (4, "both")}
COLUMNS = (
    "model",
    "scheme",
    "depth",
    "largest_activation",
    "strongest_sink",
    "same_token",
    *BITS,
    "void",
    "unchanged",
    "deeper",
    "off_diagonal",
    "left_at_best",
    "sequences",
)


def measure(names: list[str], rows: int) -> Iterator[dict[str, Any]]:
    """One row per model. Costs are in nats per token, shares of tokens are means over blocks."""
    depths = {name: load_model(name).config.num_hidden_layers for name in names}
    for name in names:
        model, blocks = load_model(name), load_held_out(name)[:rows]
        batches = [{"input_ids": blocks}]
        largest = massive_activations(model, batches[0], least=0.0).nearest or {}
        sink = attention_sinks(model, batches[0]).nearest or {}
        costs = quantization_costs(model, batches, progress=False).set_index(["bits", "part"])["delta_loss"]
        void = void_tokens(model, batches, progress=False).groupby("rule")["value"].mean()
        row = {
            "model": name,
            "scheme": model.config.scheme,
            "depth": depths[name],
            "largest_activation": largest["ratio"],
            "strongest_sink": sink["weight"],
            "same_token": all(largest[one] == sink[one] for one in PLACE),
            **{column: costs[where] for column, where in BITS.items()},
            "void": void["void"],
            "unchanged": void["small"],
            "sequences": rows,
        }
        stem = name.rpartition("-")[0]
        for deeper in sorted((other for other in names if other.rpartition("-")[0] == stem), key=depths.__getitem__):
            if depths[deeper] > depths[name]:
                yield row | _mapped(layer_maps(model, load_model(deeper), batches, progress=False), deeper)
                break
        else:
            yield row


def _mapped(maps: pd.DataFrame, deeper: str) -> dict[str, Any]:
    """How far the best layers lie from equal relative depth (0: at it, 0.5: half of the depth off, on average), and the
    share of variance that the best map leaves at the deeper model's last layer."""
    inner = maps.iloc[1:, 1:]
    off = (inner.idxmin() / maps.index[-1] - inner.columns / maps.columns[-1]).abs().mean()
    return {"deeper": deeper, "off_diagonal": off, "left_at_best": inner.iloc[:, -1].min()}


def main() -> None:
    """Measure, print, and write each row to the CSV file as it comes."""
    parser = arguments(__doc__, {"rows": 16})
    parser.set_defaults(out=Path("kept_models.csv"))
    options = parser.parse_args()
    names = shipped_models()
    rows = tqdm(measure(names, options.rows), total=len(names), desc="models")
    report(pd.DataFrame(written(rows, options.out, COLUMNS)), None)


if __name__ == "__main__":
    run(main)
