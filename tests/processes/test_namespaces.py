"""A run on two network namespaces as nodes; tests.chaos.namespaces has longer partitions."""

from __future__ import annotations

import pytest

from tests.chaos.namespaces import heals, two_hosts, why_not

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]


def test_a_short_partition_heals() -> None:
    """The Steps of one host, to the bit."""
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        heals(hosts, 4, 3.0)
