"""The parts that users see stay as recorded. After a change that is meant run `python tests/net/record.py`."""

import pytest
from net import PARTS
from net_compare import differences, environment, read


@pytest.mark.parametrize("name", PARTS)
def test_everything_is_as_recorded(name):
    snapshot = read(name)
    lines = differences(snapshot["content"], PARTS[name](), with_text=snapshot["environment"] in ({}, environment()))
    assert not lines, "\n".join([f"{name}: {len(lines)} differences from the snapshot", *lines[:20]])


def test_every_difference_is_found_and_what_is_new_is_none():
    there = {"a": [1, 4], "names": ["x", "y"], "more": {"b": 1}, "text": ["help"]}
    assert differences(there, there | {"new": 1}) == []
    assert differences(there, there | {"text": ["Help"]}, with_text=False) == []
    assert differences(there, {"a": [1, 5], "names": ["y", "x"], "more": {}, "text": ["Help"]}) == [
        "/a[1]: recorded 4, now 5",
        "/names[0]: recorded 'x', now 'y'",
        "/names[1]: recorded 'y', now 'x'",
        "/more/b: is gone",
        "/text[0]: recorded 'help', now 'Help'",
    ]
