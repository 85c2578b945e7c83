"""Ranks of a train node on two nodes of a Ray cluster: numbers, deaths, errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import KernelError
from engine.api import Result, resume
from engine.run.launch import failures
from engine.run.launch.failures import Failures
from tests.kit.processes import kill
from tests.kit.ray_clusters import RayNodes, groups_left, needs_ray, ray_cluster
from tests.kit.run_graphs import deadly, small, unlucky, with_score
from tests.kit.runs import metrics, require_same_numbers
from tests.kit.tiny_runs import TinyRuns

needs_ray()
from engine.run.hosts import ray as ray_hosts  # noqa: E402  (it imports Ray)
from engine.run.hosts.ray import HostActor  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.long, pytest.mark.hosts]

TWO: dict[str, Any] = {"ranks": {"train_policy": 2}}
HERE: dict[str, Any] = TWO | {"pin": {"train_policy": "t0,t1"}}
SPREAD: dict[str, Any] = TWO | {
    "pin": {"train_policy": "t0@a,t1@b"},
    "cluster": "ray",
    "lease": 10.0,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """Nodes a and b, which serve one test after another."""
    with ray_cluster(num_cpus=2) as found:
        yield found


@pytest.fixture
def nodes(cluster: RayNodes) -> Iterator[RayNodes]:
    """Of them Ray keeps nothing for a test that has ended."""
    yield cluster
    assert groups_left() == []


@pytest.mark.repeats
@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "shard"])
def test_ranks_on_two_hosts_have_the_numbers_of_one_host(tiny: TinyRuns, shard: bool) -> None:
    one = tiny.run(small, 3, name="one", shard=shard, **HERE)
    two = tiny.run(small, 3, name="two", shard=shard, **SPREAD)
    require_same_numbers(two, one)
    assert metrics(two)[-1]["edge/zmq/bytes"] > 0, "the rows of rank 1 came from the other host"
    assert "Traceback" not in (two.folder / "logs" / "t1.log").read_text()


def dying(tiny: TinyRuns, marker: Path, **how: Any) -> Result:
    """Rank 1 kills itself in Step 3, unless the marker is there."""
    loss_of = partial(deadly, marker=str(marker), untold="cluster" in how)
    graph = with_score(tiny.folder, None, loss_of)
    return tiny.run(graph, 5, name=marker.name, checkpoint_every=2, **how)


def late_host(marker: Path, failed: Path) -> type[HostActor]:
    """Hosts of which b, which has stopped, goes on once a rank on a has failed; that one's name is
    then in the file `failed`. marker: the file that has b's process.
    """

    class LateHostActor(HostActor):
        """Ray has it by value, so its process needs nothing of the tests."""

        def __init__(self, host: str) -> None:
            if host == "a":
                judge = Failures.judge

                def judged(self: Failures, *given: Any) -> BaseException | None:
                    found = judge(self, *given)
                    if self._waiting and not failed.exists():
                        failed.write_text(" ".join(child.name for _, child, _ in self._waiting))
                        os.kill(int(marker.read_text()), signal.SIGCONT)
                    return found

                Failures.judge = judged  # type: ignore[method-assign]
                failures.GRACE = 0.0
            super().__init__(host)

    return LateHostActor


@pytest.mark.usefixtures("nodes")
def test_a_rank_that_dies_on_the_other_host_takes_the_run_back_to_its_checkpoint(
    tiny: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mate fails in the same collective, and is heard before the death is told: that is not the
    run's failure. Both begin again, and meet again.
    """
    (tmp_path / "one").touch()
    one = dying(tiny, tmp_path / "one", shard=True, **HERE)
    failed = tmp_path / "failed"
    monkeypatch.setattr(ray_hosts, "HostActor", late_host(tmp_path / "two", failed))
    two = dying(tiny, tmp_path / "two", shard=True, **SPREAD)
    assert failed.read_text() == "t0"
    require_same_numbers(two, one)
    said = (two.folder / "logs" / "coordinator.log").read_text()
    assert "Worker t1 was lost" in said
    assert "scored begins after step 2" in said


@pytest.mark.usefixtures("nodes")
def test_what_one_rank_alone_fails_with_ends_the_run_after_the_lease(tiny: TinyRuns) -> None:
    graph = with_score(tiny.folder, None, unlucky)
    with pytest.raises(KernelError, match="out of luck"):
        tiny.run(graph, 4, **SPREAD)


def test_a_run_whose_rank_is_killed_between_steps_goes_on_and_back_to_one_host(
    tiny: TinyRuns, nodes: RayNodes
) -> None:
    """Also in a private network, where ranks meet without keys."""
    killed: list[int] = []

    def kill_rank(row: Mapping[str, float]) -> None:
        if row["step"] == 3 and not killed:
            killed.append(nodes.workers()["t1"])
            kill(killed)

    one = tiny.run(small, 6, name="one", checkpoint_every=2, **HERE)
    how: dict[str, Any] = {"private": True, "on_step": [kill_rank], "checkpoint_every": 2}
    two = tiny.run(small, 4, name="two", **how, **SPREAD)
    assert len(killed) == 1
    assert "t1 was lost" in (two.folder / "logs" / "coordinator.log").read_text()
    resume(two.folder, steps=6, pin=HERE["pin"])
    require_same_numbers(two, one)
