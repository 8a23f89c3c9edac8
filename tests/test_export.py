"""Figures as files: images where there is a browser, one line where there is none."""

from figures_helpers import table

from normlab.export import NO_BROWSER, save_images
from normlab.figures import layer_growth, loss_curves


def test_a_missing_browser_is_one_line(tmp_path, monkeypatch):
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    monkeypatch.setattr("plotly.io.write_images", fails)
    files, note = save_images({"loss": loss_curves(table())}, tmp_path / "new")
    assert files == [] and note == NO_BROWSER and "\n" not in NO_BROWSER


def test_images_are_written_where_there_is_a_browser(tmp_path, chromium):
    drawn = {"one": loss_curves(table()), "two": layer_growth(table())}
    files, note = save_images(drawn, tmp_path / "new")
    assert [file.name for file in files] == ["one.png", "two.png"] and note == ""
    assert all(file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for file in files)
