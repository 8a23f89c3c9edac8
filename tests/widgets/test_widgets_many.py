"""The explorer of all schemes of the registry."""

from __future__ import annotations

from figures_helpers import table

import normlab
from normlab.schemes import tagged
from normlab.widgets import NormExplorer


def test_of_many_schemes_it_opens_with_the_short_list_and_keeps_the_rest_by_family():
    explorer = NormExplorer(table(tuple(normlab.SCHEMES), depths=(2,), seeds=(0,)))
    pane = explorer.panes[0]
    assert {name for name, box in pane.schemes.items() if box.value} == set(tagged("short"))
    first, further = pane.children[2:4]
    assert set(first.children) == {pane.schemes[name] for name in tagged("short")}
    families = {row.children[0].value.rstrip(":"): row.children[1:] for row in further.children[0].children}
    hidden = len(normlab.SCHEMES) - len(tagged("short"))
    assert further.selected_index is None and sum(map(len, families.values())) == hidden
    for family, boxes in families.items():
        assert all(normlab.SCHEMES[name].family == family for name, box in pane.schemes.items() if box in boxes)
    assert "keel" not in {trace.name for trace in explorer.figure.data}
    pane.schemes["keel"].value = True
    assert "keel" in {trace.name for trace in explorer.figure.data}
