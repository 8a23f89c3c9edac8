"""A small table of kernels' times, for the tests of their figures and widget."""

import pandas as pd

CALL = {"device": "cpu", "pass": "both", "rows": 8, "width": 16, "dtype": "float32", "copy_gigabytes_per_second": 2.0}
U = 8 * 16 * 4


def times(**changes: object) -> pd.DataFrame:
    """Two of our calls that must move the same bytes, one three times as slow, and one of them by a peer."""
    rows = [
        CALL | {"function": "norm", "peer": "normlab", "microseconds": 2.0, "floor_bytes": 5 * U},
        CALL | {"function": "other", "peer": "normlab", "microseconds": 6.0, "floor_bytes": 5 * U},
        CALL | {"function": "norm", "peer": "eager", "microseconds": 8.0, "floor_bytes": 5 * U},
        CALL | {"function": "add_norm", "peer": "normlab", "microseconds": 4.0, "floor_bytes": 8 * U},
    ]
    table = pd.DataFrame(rows).assign(shape="8 x 16")
    floor = table["floor_bytes"] / table["copy_gigabytes_per_second"] / 1e3
    return table.assign(share_of_copy=floor / table["microseconds"]).assign(**changes)
