"""Adapters that cross from host to host of a Ray cluster: the numbers of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit import run_graphs
from tests.kit.adapted_graphs import adapted
from tests.kit.processes import KillWorkers
from tests.kit.ray_clusters import RayNodes, groups_left, needs_ray, ray_cluster
from tests.kit.runs import column, require_same_numbers
from tests.kit.tiny_runs import TinyRuns

pytest.importorskip("peft")
needs_ray()
pytestmark = [pytest.mark.timeout(240), pytest.mark.long, pytest.mark.hosts]
STEPS = 4
THERE = {"rollout": "gen@b", "train_policy": "train"}


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """Nodes a and b."""
    with ray_cluster() as cluster_nodes:
        yield cluster_nodes
        assert groups_left() == []


def test_a_generator_on_another_host_has_each_version(nodes: RayNodes, tiny: TinyRuns) -> None:
    """It is killed once, and gets the adapter anew."""
    make = adapted(run_graphs.small)
    alone = tiny.run(make, STEPS, name="alone")
    death = KillWorkers({2: "gen"})
    spread: dict[str, Any] = {"cluster": "ray", "lease": 10.0, "pin": THERE}
    there = tiny.run(make, STEPS, name="there", checkpoint_every=1, on_step=[death], **spread)
    assert len(death.killed) == 1
    require_same_numbers(there, alone)
    assert sum(column(there, "edge/zmq/bytes")) > 0
