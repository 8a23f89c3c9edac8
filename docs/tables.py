"""Tables and numbers that pages show, as Markdown, made from the registries and the shipped files at
every build.

substitutions   all of them by the name under which pages ask for them: {{ schemes }}
badges          where a notebook can be opened; nothing until pyproject.toml has the repository's address
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat
import pandas as pd

import normlab
from normlab.models import NormlabConfig
from normlab.models.costs import table as costs_of_schemes
from normlab.notebook.exporters import claim_of
from normlab.probes.metrics import ALL_METRICS, MASKS, SITES, Metric
from normlab.schemes import NormSite, Scheme
from normlab.study.league_figures import FIGURES
from normlab.study.presets import PRESETS
from normlab.training.grids import Preset, planned
from normlab.training.rates import Rates

ROOT = Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URLS: dict[str, str] = _PROJECT.get("urls", {})


def substitutions() -> dict[str, str]:
    return {
        "schemes": schemes(),
        "metrics": metrics(),
        "sites": sites(),
        "masks": table(("mask", "tokens"), ((f"`{name}`", mask.label) for name, mask in MASKS.items())),
        "figures": figures(),
        "presets": presets(),
        "audited_tasks": audited_tasks(),
        "audited_classes": audited_classes(),
        "shipped": shipped(),
        "notebooks": notebooks(),
    }


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; a cell's bars and line ends do not end it."""
    lines = [tuple(head)]
    lines += [tuple(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def plain(value: float, digits: int = 2, sign: str = "") -> str:
    """A number with so many digits and a true minus. sign: "+" for a change."""
    return f"{value:{sign}.{digits}f}".replace("-", "−")


def sites() -> str:
    return table(("site", "what it is"), ((f"`{site.name}`", site.label) for site in SITES.values()))


def site_names() -> str:
    """The sites of each kind, for the README."""
    kinds = {"activation": "activations", "branch": "what a branch adds", "gradient": "gradients"}
    names = {kind: ", ".join(f"`{site.name}`" for site in SITES.values() if site.takes == kind) for kind in kinds}
    return table(("what", "sites"), ((kinds[kind], names[kind]) for kind in kinds))


def arxiv_links(text: str) -> str:
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def schemes() -> str:
    """The table of `normlab schemes`, with each scheme's name in figures and its norms by place."""
    head = ("name", "in figures", "formula", "norm", "norms in a block", "parameters", "bytes", "operations", "source")
    costs = costs_of_schemes().set_index("name")[["parameters", "bytes", "operations"]]
    return table(head, (_scheme(scheme, costs.loc[scheme.name]) for scheme in normlab.SCHEMES.values()))


def _scheme(scheme: Scheme, costs: Iterable[int]) -> tuple[str, ...]:
    config = NormlabConfig(scheme=scheme.name, hidden_size=64, num_attention_heads=2, num_hidden_layers=4)
    layouts = [scheme.layout] if scheme.first_layout is None else [scheme.first_layout, scheme.layout]
    places = "; then ".join(", ".join(place.replace("_", " ") for place, _ in layout.places()) for layout in layouts)
    inside = scheme.layout.places()  # none in a block without norms
    norm = f"`{type(scheme.norm(NormSite(inside[0][0], 2, config))).__name__}`" if inside else "none"
    numbers = (f"{number:,}" for number in costs)
    return (
        *(f"`{scheme.name}`", scheme.title, f"`{scheme.formula}`", norm, places or "none"),
        *(*numbers, arxiv_links(scheme.paper)),
    )


def metrics() -> str:
    head = ("name", "definition", "compared by", "looked at")
    return table(head, (_metric(row) for row in ALL_METRICS.values()))


def _metric(row: Metric) -> tuple[str, ...]:
    unit = f" ({row.unit})" if row.unit else ""
    return f"`{row.name}`", row.definition + unit, row.compared, f"`{row.default_site}`"


def figures() -> str:
    head = ("name", "shows", "drawn by", "paper's figure")
    return table(
        head,
        ((f"`{row.name}`", row.shows, f"`{row.draw.__name__}`", row.paper_figure) for row in FIGURES.values()),
    )


def presets() -> str:
    head = ("preset", "schemes", "depths x seeds", "steps", "width", "learning rate", "runs")
    return table(head, (_preset(preset) for preset in PRESETS.values()))


def _preset(preset: Preset) -> tuple[object, ...]:
    plan = planned(preset)
    depths = "; ".join(", ".join(f"{depth} x {seeds}" for depth, seeds in part.depths.items()) for part in preset.parts)
    rates = preset.rate.rates if isinstance(preset.rate, Rates) else sorted({config.lr for config in plan})
    steps, width = plan[0].steps, plan[0].width
    schemes = len({config.scheme for config in plan})
    return f"`{preset.name}`", schemes, depths, steps, width, ", ".join(f"{rate:g}" for rate in rates), len(plan)


def shipped() -> str:
    """The runs in data/, counted from their manifests."""
    rows = []
    for folder in ("grid", "gpu", "initial_weights", "depth"):
        runs = normlab.load_configs(ROOT / "data" / folder)
        rows.append(
            (
                f"`data/{folder}/`",
                len(runs),
                runs["scheme"].nunique(),
                ", ".join(str(depth) for depth in sorted(runs["depth"].unique())),
                runs["seed"].nunique(),
                ", ".join(f"{steps:,}" for steps in sorted(runs["steps"].unique())),
            )
        )
    return table(("folder", "runs", "schemes", "depths", "seeds", "steps"), rows)


STATUSES = ("measured", "partly", "refused", "not built")


def _audit() -> pd.DataFrame:
    return pd.read_csv(ROOT / "data" / "bench" / "architectures.csv", keep_default_na=False)


def audited_tasks() -> str:
    """The number of classes of each task by the audit's status."""
    counts = _audit().groupby("task", sort=False)["status"].value_counts().unstack(fill_value=0)[list(STATUSES)]
    counts.loc["all"] = counts.sum()
    return table(("task", *STATUSES), ((task, *row) for task, row in counts.iterrows()))


def audited_classes() -> str:
    """Every class that the audit looked at: largest relative errors of what was measured, or why it was not."""
    head = ("class", "task", "status", "error of values", "of gradients", "what is not measured, or cannot be built")
    audit = _audit()
    audit = audit.sort_values(["status", "class"], key=lambda c: c.map(STATUSES.index) if c.name == "status" else c)
    columns = ["class", "task", "status", "value_error", "gradient_error", "reason"]
    rows = (
        (f"`{name}`", *cells, f"`{why.replace('`', '')}`" if why else "")
        for name, *cells, why in audit[columns].itertuples(index=False)
    )
    return table(head, rows)


def notebooks() -> str:
    """Every notebook: its page, where else it opens, its claim."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        title, claim = claim_of(nbformat.read(path, as_version=4))
        links = f'<a href="{path.stem}.html">the page</a>{badges(URLS, path.stem)}'
        found.append(f"## {title}\n\n{claim}\n\n{links} · `notebooks/{path.name}`")
    return "\n\n".join(found)


def badges(urls: Mapping[str, str], notebook: str) -> str:
    """Links that open a notebook at Colab and Binder, from the repository's address on GitHub; empty without one."""
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", urls.get("Repository", ""))
    if found is None:
        return ""
    places = {
        "Colab": f"https://colab.research.google.com/github/{found[1]}/blob/main/notebooks/{notebook}.ipynb",
        "Binder": f"https://mybinder.org/v2/gh/{found[1]}/main?urlpath=lab/tree/notebooks/{notebook}.ipynb",
    }
    return "".join(f' <a class="badge" href="{url}">open in {name}</a>' for name, url in places.items())
