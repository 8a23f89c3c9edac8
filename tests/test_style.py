"""The prose of each room is as plain as it was; `docs/style.py` finds what the style does not allow."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "style.py"
LONG = " ".join(["word"] * 30)


@pytest.fixture(scope="module")
def style() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_style", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(style: ModuleType, file: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = style.main([str(file)])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert code == (1 if any(lines) else 0)
    return [line.removeprefix(f"{file}:")[:25] for line in lines if line]


def test_long_sentences_and_words_to_avoid_are_found_with_their_line(style, tmp_path, capsys):
    (page := tmp_path / "page.md").write_text(
        f"# {LONG}\n\nA short one. The {LONG}.\n\n```\n{LONG}\n```\n\n| {LONG} |\n\n- A table.\n- A room of its own.\n"
    )
    assert found(style, page, capsys) == ["3: 31 words: The word wor", "12: avoid 'of its own': A"]


# Words per sentence, and the share of sentences with three separators or more. Lower a bound when a room improves.
GOAL = (14.0, 0.15)
BOUNDS = {"tests": (14.0, 0.20)}


def test_the_style_of_every_room_is_held(style):
    measured = {room.name: style.numbers(room) for room in style.rooms()}
    worse = []
    for name, numbers in measured.items():
        words, many = BOUNDS.get(name, GOAL)
        if numbers.words > words or numbers.many > many:
            worse.append(f"{name}: {numbers.words:.1f} words, {numbers.many:.0%} with {style.MANY} separators or more")
        if numbers.avoided or numbers.openers:  # words to avoid; first lines that begin with a question word or "Of"
            worse.append(f"{name}: {numbers.avoided} words to avoid, {numbers.openers} openers")
    assert not worse, f"python docs/style.py PATHS lists the findings; {worse}"
