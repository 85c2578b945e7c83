"""Every process of a run has ended and was waited for when the call returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.processes import children


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Use it with `pytestmark = pytest.mark.usefixtures("nothing_is_left")`."""
    before = set(children())
    yield
    assert set(children()) <= before
