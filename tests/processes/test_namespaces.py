"""A run on two network namespaces as hosts; tests.chaos.namespaces has longer partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.namespaces import heals, two_hosts, why_not

pytestmark = [pytest.mark.timeout(180), pytest.mark.long]


def test_a_short_partition_heals(tmp_path: Path) -> None:
    """The Steps of one host, to the bit."""
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        heals(hosts, 4, 3.0)
