"""KernelTimes shows the rows that its controls say, and says in one line what cannot be shown."""

import pandas as pd
import pytest
from kernels_helpers import U, times

from normlab.errors import NormlabError
from normlab.figures.theme import template
from normlab.widgets import KernelTimes


def test_the_chosen_call_is_shown_with_its_bytes_and_peers():
    widget = KernelTimes(times(), "norm")
    size, time, _ = widget.figure.data
    assert list(time.x) == ["normlab", "eager"] and list(size.y) == [5 * U / 1e6]
    widget.call.value = "add_norm"
    assert list(widget.figure.data[0].x) == ["one call", "two kernels"] and list(widget.figure.data[1].y) == [4.0]
    widget.part.value = "forward"
    assert widget.figure.layout.title.text.startswith("not timed: add_norm, forward")
    widget.plot.dark_page = True
    assert widget.figure.layout.template == template("dark")


def test_a_device_offers_what_was_timed_there():
    """The largest shape of another device was shown as an empty plot."""
    elsewhere = times().query("function != 'norm'").assign(device="gpu", shape="64 x 64")
    widget = KernelTimes(pd.concat([times(), elsewhere], ignore_index=True), "norm")
    assert "64 x 64" not in widget.shape.options and widget.call.value == "norm"
    widget.device.value = "gpu"
    assert widget.shape.options == ("64 x 64",) and "norm" not in widget.call.options
    assert not widget.figure.layout.title.text.startswith("not timed")


def test_no_times_and_an_unknown_call_are_refused():
    with pytest.raises(NormlabError, match="has no times"):
        KernelTimes(times().iloc[:0])
    with pytest.raises(NormlabError, match="no call 'softmax'.*norm, other, add_norm"):
        KernelTimes(times(), "softmax")
