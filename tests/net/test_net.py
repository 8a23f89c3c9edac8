"""The parts that users see stay as recorded. After a change that is meant run `python tests/net/record.py`."""

import warnings
from typing import Any

import pytest
from net import CURVES, PARTS
from net_compare import differences, read
from net_curves import KILLED, LAUNCHED

every_part = pytest.mark.parametrize(
    "name",
    [*PARTS, *(pytest.param(name, marks=pytest.mark.slow if name.endswith(LAUNCHED) else ()) for name in CURVES)],
)


def recorded(name: str) -> tuple[Any, dict[str, str]]:
    """The content of a snapshot, and the environment that it was recorded in."""
    snapshot = read("curves" if name in CURVES else name)
    return snapshot["content"][name] if name in CURVES else snapshot["content"], snapshot["environment"]


@every_part
def test_everything_is_as_recorded_bit_for_bit_and_to_rounding_in_another_environment(name):
    (content, there), part = recorded(name), (PARTS | CURVES)[name]
    here = part.environment()
    if here != there:
        warnings.warn(f"recorded with {there}, here {here}: numbers are compared to rounding", stacklevel=1)
    lines = differences(content, part.record(), None if here == there else part.tolerance)
    assert not lines, "\n".join([f"{name}: {len(lines)} differences from the snapshot", *lines[:20]])


@pytest.mark.parametrize("curve", [name for name in CURVES if name.endswith(KILLED)])
def test_a_run_killed_and_resumed_was_recorded_as_one_that_was_not(curve):
    assert recorded(curve)[0] == recorded(curve.removesuffix(f", {KILLED}"))[0]


def test_a_difference_of_one_bit_is_found_and_one_of_rounding_is_allowed_elsewhere():
    there = {"a": [1.0, -4.0], "bits": "00", "names": ["x", "y"], "more": {"b": 1}}
    assert differences(there, there | {"new": 1}, None) == []
    assert differences(there, there | {"a": [1.0 + 2**-52, -4.0]}, None) == [
        "/a[0]: recorded 1.0, now 1.0000000000000002"
    ]
    assert differences(there, there | {"a": [1.003, -4.0], "bits": "01"}, 1e-3) == []
    assert differences(there, there | {"a": [1.005, -4.0]}, 1e-3) == ["/a[0]: recorded 1.0, now 1.005"]
    assert differences(there, there | {"a": [float("nan"), -4.0]}, 1e-3) == ["/a[0]: recorded 1.0, now nan"]
    assert differences(there, {"a": [1.0, -4.0], "names": ["y", "x"], "more": {}}, 1e-3) == [
        "/names[0]: recorded 'x', now 'y'",
        "/names[1]: recorded 'y', now 'x'",
        "/more/b: is gone",
    ]
