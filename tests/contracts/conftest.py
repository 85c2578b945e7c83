"""What several contract suites share: processes that play ranks, and a socket at which two of them meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.contracts.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """As many as the module's RANKS says."""
    pool = Ranks(request.module.RANKS)
    yield pool
    pool.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found
