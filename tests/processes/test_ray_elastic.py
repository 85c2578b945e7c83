"""Replicas that join and leave a run on a Ray cluster, as nodes come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from engine.api import run
from tests.kit import run_graphs as graphs
from tests.kit.ray_clusters import RayNodes, groups_left, needs_ray, ray_cluster
from tests.kit.runs import require_same_numbers
from tests.kit.tiny_runs import TinyRuns

needs_ray()

pytestmark = [pytest.mark.timeout(400), pytest.mark.long, pytest.mark.hosts]
COUNTS = "/rollout"
"""The end of the metric that a run of fixed replicas lacks."""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with ray_cluster() as found:
        yield found
        assert groups_left() == []


class Changes:
    """An `until` of a run: does one thing after another, each once so many replicas are there, and
    ends the run after the last.
    """

    def __init__(self, *changes: tuple[int, Callable[[], object]]) -> None:
        self._left = list(changes)
        self.seen: set[float] = set()

    def __call__(self, row: Mapping[str, float]) -> bool:
        self.seen.add(row["replicas/rollout"])
        if self._left and row["replicas/rollout"] == self._left[0][0]:
            self._left.pop(0)[1]()
        return not self._left


def test_replicas_follow_the_nodes_and_change_no_bit(nodes: RayNodes, tiny: TinyRuns) -> None:
    """The run begins on both nodes, with one replica. Nodes join; one is drained, so its replica
    leaves; another one is lost without a word.
    """
    changes = Changes(
        (1, lambda: nodes.add("c")),
        (2, lambda: nodes.add("d")),
        (3, lambda: nodes.drain("c", seconds=3600.0)),
        (2, lambda: nodes.remove("d")),
        (1, lambda: nodes.add("e")),
        (2, lambda: None),
    )
    told = {"replicas": {"rollout": "1..3"}, "scaling": "most", "cluster": "ray", "lease": 5.0}
    graph = graphs.small(tiny.folder, batch=6)
    result = run(graph, tiny.options(50_000, name="elastic", **told), until=changes)
    assert changes.seen == {1.0, 2.0, 3.0}
    fixed = run(graph, tiny.options(result.step, chunks={"rollout": 3}, name="fixed"))
    require_same_numbers(result, fixed, but=COUNTS)
    log = (result.folder / "logs" / "coordinator.log").read_text()
    assert log.count("was lost") == 1, "whoever leaves is not lost"
