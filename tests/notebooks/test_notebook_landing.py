"""The first page: what the runs say, in sentences computed from them; a picture and a sentence per notebook."""

import html
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from browser_helpers import page_of
from figures_helpers import activation, final_loss, table
from notebook_helpers import NOTEBOOKS, PLOTLY, write_runs

from normlab import load_runs
from normlab.analysis import claims
from normlab.errors import NormlabError
from normlab.figures import layer_growth, loss_curves, theme
from normlab.notebook import landing
from normlab.notebook.exporters import claim_of
from normlab.notebook.landing import card_picture, findings, picture_of, sentence_of, write_index
from normlab.runs import MANIFEST


def known(runs: Path, trigram: float | None = 4.6, **fields: Any) -> Path:
    """The same runs, trained in float32 on a CPU with AVX2; those whose loss is below the trigram's have learned."""
    for path in runs.glob(f"*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        manifest["config"]["dtype"] = "float32"
        manifest |= {"environment": {"device": "cpu", "cpu_capability": "AVX2"}, "trigram_loss": trigram} | fields
        path.write_text(json.dumps(manifest))
    return runs


def executed(*figures: Any, tags: tuple[str, ...] = (), claim: str = "It grows. With depth.") -> nbformat.NotebookNode:
    """A notebook whose last cell, with these tags, shows the last figure."""
    cells = [nbformat.v4.new_markdown_cell(f"# Growth\n\n**Claim.** {claim}")]
    for figure in figures:
        output = nbformat.v4.new_output("display_data", {PLOTLY: json.loads(figure.to_json())})
        cells.append(nbformat.v4.new_code_cell("figure.show()", outputs=[output]))
    cells[-1].metadata["tags"] = list(tags)
    return nbformat.v4.new_notebook(cells=cells)


def test_what_was_found_is_computed_from_the_runs(tmp_path):
    runs = known(
        write_runs(tmp_path, schemes=["pre_rmsnorm", "lns", "bhyt"], seeds=[0], statuses={("lns", 4): "diverged"})
    )
    said = findings(runs)
    assert said["Trained"].startswith("6 runs of 3 schemes, in float32 on a CPU with AVX2. Depth 2, 4, width")
    losses = {title: final_loss(name, 0) for name, title in (("bhyt", "BHyT"), ("pre_rmsnorm", "Pre-LN"))}
    ordered = [f"{title} {loss:.2f}" for title, loss in sorted(losses.items(), key=lambda item: item[1])]
    assert said["Loss"] == f"Held-out loss at 4 layers, in nats per token: {'; '.join(ordered)}; LNS diverged."
    growth = activation("pre_rmsnorm", 4, 20) / activation("pre_rmsnorm", 1, 20)
    assert f"Pre-LN {growth:.2f}" in said["Growth"]
    assert "One seed per scheme" in said["Trust"] and "0.05 nats" in said["Trust"]


def test_runs_of_before_there_were_precisions_are_in_float32_and_a_damaged_one_is_left_out(tmp_path):
    runs = write_runs(tmp_path, schemes=["pre_rmsnorm", "lns"], depths=(2,), seeds=[0])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / MANIFEST).write_text("{")
    with pytest.warns(UserWarning, match="left out: .*damaged"):
        assert findings(runs)["Trained"].startswith("2 runs of 2 schemes, in float32 on an unknown device")


def test_who_has_not_learned_is_named(tmp_path):
    runs = known(
        write_runs(tmp_path, schemes=["pre_rmsnorm", "bhyt"], depths=(2,)), trigram=final_loss("bhyt", 0) - 0.01
    )
    below = sum(
        final_loss(name, seed) < final_loss("bhyt", 0) - 0.01 for name in ("pre_rmsnorm", "bhyt") for seed in range(3)
    )
    said = findings(runs)
    assert said["Learned"].startswith(f"{below} of 6 runs have learned")
    assert "BHyT at 2 layers" in said["Learned"] and "3 seeds per scheme" in said["Trust"]
    assert "nothing says which" in findings(known(runs, trigram=None))["Learned"]
    assert findings(known(runs, corpus={"unigram_entropy": 1.0}))["Learned"].startswith("0 of 6 runs have learned")


def test_runs_of_two_texts_are_not_summed_up(tmp_path):
    runs = write_runs(tmp_path, schemes=["pre_rmsnorm", "lns", "bhyt"], depths=(2,), seeds=[0])
    path = next(runs.glob(f"bhyt*/{MANIFEST}"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus": {"unigram_entropy": 4.95}}))
    with pytest.raises(NormlabError, match="depth 2 were measured on 2 texts"):
        findings(runs)


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_claim_has_a_first_sentence(name):
    claim = claim_of(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4))[1]
    sentence = sentence_of(claim)
    assert sentence in claim and sentence.endswith(".") and "**" not in sentence
    assert len(sentence.split()) > 5 and ". " not in sentence.removesuffix(".")


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        ("**Claim.** One is so. Two is not.", "One is so."),
        ("**Claim** ([A](b), Fig. 2). Is it `1. x`? It is.", "Is it `1. x`?"),
        ("**Claim** ([A](b), [C](d)). A [Tool](e.f) of 1.5 is so", "A [Tool](e.f) of 1.5 is so"),
    ],
)
def test_the_first_sentence_of_a_claim(claim, sentence):
    assert sentence_of(claim) == sentence


def test_the_tagged_cell_gives_the_picture_else_the_first_figure_does():
    first, second = loss_curves(table()), layer_growth(table(), "grad_l2_total")
    assert picture_of(executed(first, second)).layout.title.text == first.layout.title.text
    assert picture_of(executed(first, second, tags=("picture",))).layout.title.text == second.layout.title.text
    assert picture_of(executed()) is None


def test_of_runs_at_several_rates_each_scheme_counts_at_its_best(tmp_path):
    for lr in (1e-3, 4e-3):
        write_runs(tmp_path / f"{lr:g}", schemes=["pre_rmsnorm", "bhyt"], depths=(2,), seeds=[0], lr=lr)
        known(tmp_path / f"{lr:g}")
    said = findings(tmp_path)
    assert said["Trained"].startswith("4 runs of 2 schemes at learning rates 0.001, 0.004, in ")
    assert "at each scheme's best rate" in said["Loss"]
    assert "runs, at each scheme's best rate, have learned" in said["Learned"]


@pytest.mark.parametrize("shared", [True, False])
def test_growth_names_its_rates_and_titles_keep_their_letters(tmp_path, shared):
    rates = {"pre_rmsnorm": [4e-3], "bhyt": [4e-3, 8e-3] if shared else [8e-3], "rmsnorm_gain": [4e-3]}
    for scheme, own in rates.items():
        for lr in own:
            seeds = [0, 1] if lr == 8e-3 else [0]  # the rate with most seeds is a scheme's own
            known(write_runs(tmp_path / f"{scheme} {lr}", schemes=[scheme], depths=(2,), seeds=seeds, lr=lr))
    said = findings(tmp_path)
    own = "ach scheme's learning rate: 0.004 (Pre-LN; Pre-LN, gain λ/κ), 0.008 (BHyT)"
    assert f"e{own}." in said["Trained"] or f", E{own}." in said["Trained"]
    end = " A stream may grow by a large factor and stay small."
    rate = "Learning rate 0.004." if shared else f"E{own}, so the factors differ not by normalization alone."
    assert said["Growth"].endswith(f". {rate}{end}")


def test_runs_that_do_not_know_the_trigram_are_named_and_not_counted(tmp_path):
    for scheme, trigram in (("pre_rmsnorm", 9.0), ("lns", 1.0), ("bhyt", None)):
        known(write_runs(tmp_path / scheme, schemes=[scheme], depths=(2,), seeds=[0]), trigram)
    known(write_runs(tmp_path / "another", schemes=["pre_rmsnorm"], depths=(2,), seeds=[1]), None)
    said = findings(tmp_path)["Learned"]
    assert said.startswith("1 of 2 runs have learned") and "Others: LNS at 2 layers. Conclude" in said
    assert said.endswith("and are not counted: Pre-LN at 2 layers; BHyT at 2 layers.")


def test_only_what_diverged_is_called_diverged(tmp_path):
    rows = [pd.Series(["lns", "dyt", "bhyt"]), pd.Series([1.0, float("nan"), float("inf")])]
    assert landing._in_order(*rows) == "LNS 1.00; BHyT diverged; DyT unknown"
    schemes = ["pre_rmsnorm", "lns", "bhyt"]
    runs = known(write_runs(tmp_path, schemes=schemes, depths=(2,), seeds=[0], statuses={("lns", 2): "diverged"}))
    assert "; LNS diverged." in findings(runs)["Growth"]


def test_the_index_leads_to_every_page_and_says_which_runs_a_sentence_is_of(tmp_path, chromium):
    from plotly.offline import get_plotlyjs

    runs = known(write_runs(tmp_path / "runs", depths=(2,)))
    shipped = write_runs(tmp_path / "shipped", depths=(3,), seeds=[0])
    asked = executed(loss_curves(table()))
    asked.cells[0].metadata["tags"] = ["card:Does it?"]
    nbformat.write(asked, tmp_path / "one.ipynb")
    nbformat.write(executed(claim="`code` & <b>. More."), tmp_path / "two.ipynb")
    (tmp_path / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    both = [tmp_path / "one.ipynb", tmp_path / "two.ipynb"]
    page = write_index(tmp_path, both, runs, shipped).read_text(encoding="utf-8")
    links = re.findall(r'href="([^"#]+)"', page)
    assert list(dict.fromkeys(links)) == ["one.html", "explorer.html", "two.html"]
    assert "It grows." in page and "With depth" not in page and "More" not in page
    assert ">Does it?</a>" in page and claims.apart(load_runs(runs)) in html.unescape(page)
    assert html.unescape(page).count(claims.apart(load_runs(shipped))) == 1
    with page_of(chromium) as (view, _):
        view.goto((tmp_path / "index.html").as_uri())
        view.wait_for_function("() => document.querySelector('.card img')?.naturalWidth === 760")
        assert view.locator(".card img").count() == 1 and view.locator(".card img").get_attribute("alt")
        view.locator("summary").click()
        assert "float32 on a CPU with AVX2" in view.locator("dl").inner_text()
    page = write_index(tmp_path, [tmp_path / "one.ipynb"], runs, runs).read_text(encoding="utf-8")
    assert landing.HERE not in page and landing.COME_ALONG in page


def test_an_index_of_nothing_is_refused(tmp_path):
    with pytest.raises(NormlabError, match="no notebook has a page"):
        write_index(tmp_path, [], tmp_path)


@pytest.mark.parametrize("is_one_text", [False, True])
def test_a_card_has_the_whole_title_without_the_small_lines(is_one_text):
    title = "L2 norm of a token after the last layer: 0.33 (BHyT) to 1.69 (Pre-LN, gain λ/κ) of Pre-LN's when trained"
    figure = theme.titled(loss_curves(table()), title, "depth 4", 300)
    if is_one_text:
        figure.update_layout(title_text=theme.in_one(figure.layout.title.text, "depth 4"))
    assert card_picture(figure)["title"] == title
