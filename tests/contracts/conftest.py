"""What contract suites share: processes as ranks, and a place where two of them meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.contracts.ranks import ListeningPlace, RankPool


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """As many as the module's RANKS says."""
    pool = RankPool(request.module.RANKS)
    yield pool
    pool.close()


@pytest.fixture
def listener() -> Iterator[ListeningPlace]:
    with closing(ListeningPlace()) as place:
        yield place
