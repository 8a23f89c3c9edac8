"""One browser for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Any]:
    """One browser for the pages of all these tests: none of them runs asyncio beside it."""
    from browser_helpers import browser_of

    with browser_of(chromium) as browser:
        yield browser
