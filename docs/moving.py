"""Film the live model for README.md: `python docs/moving.py` writes data/figures/live.gif, by a Chrome or Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from normlab.widgets.live import live_page

MODEL = "pre_rmsnorm-d8"
OUT = Path(__file__).parents[1] / "data" / "figures" / "live.gif"
STEPS = ["ArrowDown"] * 5 + ["ArrowUp"] * 5  # the gains of all blocks, a quarter of an octave each
MOVING, RESTING = 200, 1500  # milliseconds of a frame between two steps, and at both ends
COLORS = 64
WIDTH, HEIGHT = 1000, 1100
ANSWERED = "() => document.querySelectorAll('.panel .cost:not(.stale) .bar').length > 0"
COUNT = "() => { window.answers = 0; document.addEventListener('answered', () => window.answers++, true); }"


def frames(page: Page) -> list[Image.Image]:
    """The controls and charts after each step of the slider, and before the first."""
    page.wait_for_function(ANSWERED, timeout=60_000)
    page.evaluate(COUNT)
    slider = page.get_by_role("slider", name="γ, all blocks")
    top = page.locator(".controls").bounding_box()
    bottom = page.locator(".panel .charts").bounding_box()
    assert top is not None and bottom is not None
    clip = {"x": 0.0, "y": top["y"] - 10, "width": float(WIDTH), "height": bottom["y"] + 270 - top["y"]}
    found = []
    for key in ["", *STEPS]:
        if key:
            answers = page.evaluate("window.answers")
            slider.press(key)
            page.wait_for_function("answers => window.answers > answers", arg=answers, timeout=60_000)
            page.wait_for_function(ANSWERED, timeout=60_000)
        found.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))  # type: ignore[arg-type]
    return found


def main() -> None:
    """Move one slider of the page, and write what is seen as an endless film."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = live_page([MODEL], folder)
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(page_file.as_uri() + "#field=gain&step=none")
        film = frames(page)
        chromium.close()
    palette = film[0].quantize(COLORS)
    few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in film]
    times = [RESTING if place in (0, len(STEPS) // 2) else MOVING for place in range(len(film))]
    few[0].save(OUT, save_all=True, append_images=few[1:], duration=times, loop=0, optimize=True)
    print(f"{OUT}: {OUT.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
