"""The page that runs models: it opens from a file, fetches nothing, and says what Python says."""

import gzip
import json
import random
import re
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_helpers import page_in
from safetensors.torch import load, load_file, save_file
from tokenizers import Tokenizer, processors

import normlab
from normlab.cli import main
from normlab.errors import NormlabError
from normlab.figures.theme import style_of
from normlab.models.pretrained import model_folder
from normlab.widgets.change import Change, ask
from normlab.widgets.live import PASSAGES, SCRIPTS, labelled, live_page, page_tokenizer, pairs_of, weights_of
from normlab.widgets.plot import static_text

MODELS = ["pre_rmsnorm-d8", "lns-d8", "bhyt-d8"]
READY = "() => document.querySelectorAll('.panel .cost:not(.stale) .bar').length > 0"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return live_page(MODELS, tmp_path_factory.mktemp("page"))


def loss_in(page: Any) -> float:
    return float(page.locator(".panel .loss b").first.inner_text())


def wait_for_costs(page: Any) -> None:
    page.wait_for_function(READY, timeout=60_000)


COUNT = "() => { window.answers = 0; document.addEventListener('answered', () => window.answers++, true); }"


def press(page: Any, control: Any, key: str = "Enter") -> None:
    """Press a key on a control that changes the model, and wait for the answer and the blocks' costs under that change.

    Costs of the model before are shown until the answer is there.
    """
    answers = page.evaluate("window.answers")
    control.press(key)
    page.wait_for_function("answers => window.answers > answers", arg=answers, timeout=60_000)
    wait_for_costs(page)


def python_loss(name: str, change: Change) -> float:
    return ask(normlab.load_model(name), normlab.load_held_out(name)[75:76, 32:96], change).loss


def test_the_tokenizer_is_that_of_tokenizers(browser):
    text = (model_folder("bhyt-d8") / "tokenizer.json").read_text()
    source, truth = random.Random(0), Tokenizer.from_str(text)
    letters = "abcdefgh     \n\t.,_'\"(){}=0123456789éßñ中文字🙂\u00a0\u2003\u0085\ufeffÀ-—½²Ⅷ"
    words = ["def ", "return", " self", "don't", "we'll", "<|endoftext|>", "  ", "\n\n", "'''", "123456", "naïve", "ﬁ"]
    strings = ["".join(source.choices(letters, k=source.randint(0, 40))) for _ in range(500)]
    strings += ["".join(source.choices(words, k=source.randint(1, 12))) for _ in range(250)]
    rows = normlab.load_held_out("bhyt-d8")[:250, :100].tolist()
    strings += [truth.decode(row, skip_special_tokens=False) for row in rows]
    with page_in(browser) as (page, errors):
        ask = "([source, data, texts]) => { const t = new Function(source + '; return bytePairs')()(data);"
        ask += " return texts.map(text => t.encode(text)); }"
        encoded = page.evaluate(ask, [static_text("tokenizer.js"), page_tokenizer(text), strings])
        end = ("<|endoftext|>", 0)
        for marks in (processors.BertProcessing(end, ("a", 7)), one_before(*end)):  # as RoBERTa's and OPT's
            marked = Tokenizer.from_str(text)
            marked.post_processor = marks
            marked.enable_padding(length=99)
            marked.enable_truncation(2)
            data = page_tokenizer(marked.to_str())
            marked.no_padding()
            marked.no_truncation()
            few = strings[:9]
            for string, ids in zip(few, page.evaluate(ask, [static_text("tokenizer.js"), data, few]), strict=True):
                assert ids == marked.encode(string).ids != truth.encode(string).ids, string
    assert len(strings) == 1000 and not errors
    for string, ids in zip(strings, encoded, strict=True):
        assert ids == truth.encode(string).ids, string


def one_before(token: str, number: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])


def test_it_opens_from_a_file_and_answers_as_python_does(site, browser):
    assert len(gzip.compress(site.read_bytes())) < 200_000
    with page_in(browser) as (page, errors):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(site.as_uri() + "#model=bhyt-d8&all=kappa:0.5&3=block:0.25")
        wait_for_costs(page)
        change = Change(kappa=0.5, layers={3: {"block": 0.25}})
        assert loss_in(page) == pytest.approx(python_loss("bhyt-d8", change), abs=1e-3)
        page.get_by_role("group", name="what to change").get_by_role("button", name="κ").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.textContent") == "κ"  # the focus stays
        page.locator("#dark").press("Space")
        page.wait_for_function("() => location.hash.includes('dark=1') && location.hash.includes('3=block:0.25')")
        page.get_by_role("slider", name="κ, all blocks").focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function("() => location.hash.includes('all=kappa:0.420448')")
        assert page.locator(".panel").count() == 1  # an address that names one model shows that one
        page.get_by_label("compare with").select_option("pre_rmsnorm-d8")
        page.wait_for_function("() => document.querySelectorAll('.panel').length === 2")
        assert "different learning rates" in page.locator(".rates").inner_text()
        whole = "() => document.querySelectorAll('.panel .cost:not(.stale) .bar').length === 16"
        page.wait_for_function(whole, timeout=60_000)
        page.evaluate(COUNT)
        press(page, page.get_by_role("button", name="as trained"))
        page.wait_for_function("() => !location.hash.includes('all=')")
        assert loss_in(page) == pytest.approx(python_loss("bhyt-d8", Change()), abs=1e-3)
        own = 'def add(first, second):\n    """Return'
        page.get_by_label("reads").select_option("own")
        page.locator("textarea").fill(own)
        page.wait_for_function("() => location.hash.includes('own=def')")
        truth = Tokenizer.from_file(str(model_folder("bhyt-d8") / "tokenizer.json")).encode(own).ids
        page.wait_for_function(
            "count => document.querySelector('.status').textContent.startsWith(count)", arg=str(len(truth))
        )
        loss = ask(normlab.load_model("bhyt-d8"), torch.tensor([truth]), Change()).loss
        assert loss_in(page) == pytest.approx(loss, abs=1e-3)
        assert not errors and {url.partition(":")[0] for url in asked} <= {"file", "blob"}


def test_the_tour_says_what_happens(site, browser):
    with page_in(browser) as (page, errors):
        page.goto(site.as_uri())
        wait_for_costs(page)
        page.evaluate(COUNT)
        costs = []
        for step in range(5):
            before = loss_in(page)
            press(page, page.locator(".tour .primary"))
            if step == 4:  # inputs beyond lambda, below the bound; none as trained
                shown = page.locator(".share svg").get_attribute("aria-label").split(". ", 1)[1]
                shares = dict(part.split(": ") for part in shown.split("; "))
                beyond = [float(value.strip("%")) for value in shares["attention"].split(", ")]
                assert min(beyond) > 0 and max(beyond) < 16 and set(shares["as trained"].split(", ")) == {"0%"}
                assert set(shares["bound"].split(", ")) == {"16%"}
            if step == 3:  # the step shows a model that carries its statistic
                before = python_loss("bhyt-d8", Change())
            costs.append(loss_in(page) - before)
            if step < 4:
                press(page, page.locator(".tour").get_by_role("button", name="next"))
        skip, half_blocks, half_gains, exact, kappa = costs
        guess = json.loads((model_folder(MODELS[0]) / "manifest.json").read_text())["corpus"]["unigram_entropy"]
        assert python_loss(MODELS[0], Change()) + skip > guess
        assert half_blocks < 0.3 and half_gains > 3 * half_blocks and abs(exact) < 0.2 and kappa > 1
        assert not errors


def trained_at(rate: float | None, scheme: str, name: str, **others: Any) -> dict[str, Any]:
    """What the page knows of a model."""
    title = style_of(scheme).title
    about = {"scheme": scheme, "name": name, "short": title, "title": f"{title} ({name})", "rate": rate, "depth": 8}
    return about | {"spec": {"width": 128}} | others


@pytest.mark.parametrize(
    ("models", "offered"),
    [
        ([("bhyt", 0.004), ("lns", 0.004), ("pre_rmsnorm", 0.004), ("dyt", 0.008)],
         ["Pre-LN and LNS, rate 0.004", "Pre-LN and BHyT, rate 0.004"]),
        ([("lns", 0.004), ("lns", 0.004)], ["LNS (0) and LNS (1), rate 0.004"]),
        ([("lns", 0.004, 4), ("lns", 0.004), ("pre_rmsnorm", 0.004, 4), ("pre_rmsnorm", 0.004), ("dyt", 0.004)],
         ["Pre-LN (8 blocks) and LNS (8 blocks), rate 0.004", "Pre-LN (8 blocks) and DyT, rate 0.004",
          "Pre-LN (4 blocks) and LNS (4 blocks), rate 0.004"]),
        ([("lns", 0.004), ("lns", 0.002), ("bhyt", 0.002)], ["BHyT and LNS, rate 0.002"]),
        ([("lns", 0.004), ("bhyt", 0.002)], []),
        ([("lns", None), ("bhyt", None)], []),
    ],
)  # fmt: skip
def test_models_of_one_rate_are_offered_in_pairs_under_names_that_tell_them_apart(models, offered):
    made = labelled(
        [
            trained_at(rate, scheme, str(at), depth=depth[0] if depth else 8)
            for at, (scheme, rate, *depth) in enumerate(models)
        ]
    )
    assert [pair["label"] for pair in pairs_of(made)] == offered
    assert len({model["label"] for model in made}) == len(made)
    other = [model | {"depth": 20 + at} for at, model in enumerate(made)]
    assert pairs_of(other) == []


def test_rates_are_those_of_the_table_and_weights_are_of_types_that_the_page_reads(tmp_path):
    rates = {"ours": 0.0003, "other": 0.1 * 0.003}
    for name, rate in rates.items():
        shutil.copytree(model_folder("pre_rmsnorm-d4"), tmp_path / name)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        manifest["config"]["lr"] = rate
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    weights = tmp_path / "ours" / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    path = live_page([tmp_path / name for name in rates], tmp_path / "page")
    packed = re.search('<script id="data" type="text/plain">(.*?)</script>', path.read_text(), re.DOTALL)
    assert packed is not None
    page = json.loads(gzip.decompress(b64decode(packed[1])))
    assert [model["rate"] for model in page["models"]] == [0.0003, 0.0003] and len(page["pairs"]) == 1
    found = load(weights_of(tmp_path / "ours"))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert all(torch.equal(tensor.half(), found[name].half()) for name, tensor in load_file(weights).items())
    kept = model_folder("pre_rmsnorm-d4")
    assert weights_of(kept) == (kept / "model.safetensors").read_bytes()


# Looks of losses, and the tokens that are shown: of a changed model and of the model as trained.
BROKEN = """source => {
    const { lossLook, likeliest } = new Function(source + '; return { lossLook, likeliest };')();
    const none = [NaN, NaN, NaN], some = [0.2, 0.001, 0.7];
    const losses = [[NaN, 2, true], [Infinity, NaN, true], [4, 3.5, true], [NaN, NaN, false], [9, 2, false]];
    return [losses.map(loss => lossLook(...loss)),
            [likeliest(none, some), likeliest(some, none), likeliest(none, none), likeliest([0.9, 0.05, 0.001], some)]];
}"""


def test_what_is_not_finite_looks_the_worst_and_hides_no_token(browser):
    with page_in(browser) as (page, errors):
        page.goto("about:blank")
        looks, tokens = page.evaluate(BROKEN, static_text(*SCRIPTS))
        assert not errors
    assert [(look["heat"], look["worse"], look["title"]) for look in looks] == [
        (62, True, "loss not finite, as trained 2.00"),
        (62, True, "loss not finite, as trained not finite"),
        (31, False, "4.00 nats, as trained 3.50"),
        (62, True, "loss not finite"),
        (62, True, "9.00 nats"),
    ]
    assert tokens == [[2, 0], [2, 0], [], [0, 2, 1]]


def test_passages_are_what_their_names_say():
    truth = Tokenizer.from_file(str(model_folder("bhyt-d8") / "tokenizer.json"))
    blocks = normlab.load_held_out("bhyt-d8")
    texts = {name: truth.decode(blocks[at, start:].tolist()).strip() for name, (at, start) in PASSAGES.items()}
    begins = {
        "a docstring": "def find_dynamicsymbols(",
        "a loop": "core_set = set(core)\n        for outer_n in outer:",
        "prose": "Wrapper functions to more user-friendly calling",
        "a function": "def findcommonblocks(",
        "examples": ">>> nx.is_valid_degree_sequence",
        "imports": "from pandas.core.dtypes.dtypes import (",
    }
    assert {name: text[: len(begins[name])] for name, text in texts.items()} == begins


PLACES = "() => [...document.querySelectorAll('h2, .panel .text')].map(part => part.getBoundingClientRect().top)"


def test_a_pair_shares_its_axes_and_the_bars_stay_under_a_change(site, browser):
    with page_in(browser) as (page, errors):
        held: list[Any] = []
        page.route("**/*-d8.js", lambda weights: held.append(weights))
        page.goto(site.as_uri() + "#step=none")
        page.wait_for_selector(".panel.loading .text span")
        assert "rate 0.004 · held-out loss 3.057" in page.locator(".panel .facts").first.inner_text()
        places = page.evaluate(PLACES)
        for weights in held:
            weights.continue_()
        wait_for_costs(page)
        page.wait_for_function("() => document.querySelectorAll('.panel .cost:not(.stale) .bar').length === 16")
        page.evaluate(COUNT)
        assert page.evaluate(PLACES) == places  # nothing has jumped
        assert page.locator(".pairs button[aria-pressed=true]").inner_text().endswith("rate 0.004")
        ticks = "part => [...document.querySelectorAll(part + ' .tick[text-anchor=end]')].map(tick => tick.textContent)"
        for part in (".profile", ".cost"):
            shown = page.evaluate(ticks, part)
            assert len(shown) > 4 and shown[: len(shown) // 2] == shown[len(shown) // 2 :]
        bars = "[...document.querySelectorAll('.cost .bar')].map(bar => [bar.y, bar.height].map(x => x.baseVal.value))"
        before = page.evaluate(bars)
        assert page.locator(".cost .dot").count() == 0
        press(page, page.get_by_role("slider", name="block, block 1"), "Home")
        # Eight in each, and one in each legend.
        page.wait_for_function("() => document.querySelectorAll('.cost:not(.stale) .dot').length === 18")
        assert page.evaluate(bars) == before
        shown = page.locator(".cost svg").first.get_attribute("aria-label")
        trained, changed = (part.partition(": ")[2].split(", ") for part in shown.split(". ", 1)[1].split("; "))
        assert float(trained[0]) > 2 and changed[0] == "0"  # it is skipped already
        assert not errors


# Labels of charts beyond their drawing, and options longer than their select.
CUT = """() => [...document.querySelectorAll('svg text')].filter(text => {
    const box = text.getBoundingClientRect(), drawing = text.closest('svg').getBoundingClientRect();
    return box.left < drawing.left - 1 || box.right > drawing.right + 1;
}).concat([...document.querySelectorAll('select')].flatMap(select => [...select.options].filter(option => {
    const pen = document.createElement('canvas').getContext('2d');
    pen.font = getComputedStyle(select).font;
    return pen.measureText(option.text).width > select.clientWidth - 30;
}))).map(part => part.textContent)"""


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_a_phone_and_follows_a_dark_page(site, browser, width):
    with page_in(browser, width=width, height=844, color_scheme="dark") as (page, errors):
        page.goto(site.as_uri() + "#model=bhyt-d8&all=gain:0.5")
        wait_for_costs(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT) == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert page.get_by_role("button", name="γ").get_attribute("aria-pressed") == "true"
        assert not errors


def test_missing_weights_and_other_bad_input_are_one_line(tmp_path, browser, capsys):
    with pytest.raises(NormlabError, match="no model for the page"):
        live_page([], tmp_path)
    assert main(["page", "bhyt-d8", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "index.html")
    (tmp_path / "bhyt-d8.js").unlink()
    with page_in(browser) as (page, _):
        page.goto((tmp_path / "index.html").as_uri())
        page.wait_for_function("() => document.querySelector('.status').textContent.includes('bhyt-d8.js has to lie')")
    other = json.loads((model_folder("bhyt-d8") / "tokenizer.json").read_text())
    assert page_tokenizer(json.dumps(other | {"normalizer": {"type": "NFC"}})) is None
