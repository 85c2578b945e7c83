"""Ranks of a train node on two hosts (loopback addresses): numbers, deaths, errors, who meets."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.kit.host_processes import HostProcess, cluster_file, host, with_lease

from dataflow.errors import KernelError
from engine.api import Result, resume
from engine.launch import failures
from engine.launch.failures import Failures
from tests.kit.processes import command_of, kill
from tests.kit.run_graphs import deadly, small, unlucky, with_score
from tests.kit.runs import metrics, require_same_numbers
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

HERE = {"train_policy": "t0,t1"}
SPREAD = {"train_policy": "t0@a,t1@b"}
TWO: dict[str, Any] = {"ranks": {"train_policy": 2}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster_file(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def host_b(cluster: Path) -> Iterator[HostProcess]:
    """Host b, which serves one test after another."""
    with host(cluster) as process:
        yield process


@pytest.mark.usefixtures("host_b")
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "shard"])
def test_ranks_on_two_hosts_have_the_numbers_of_one_host(
    tiny: TinyRuns, cluster: Path, shard: bool
) -> None:
    one = tiny.run(small, 3, name="one", pin=HERE, shard=shard, **TWO)
    two = tiny.run(small, 3, name="two", pin=SPREAD, cluster=cluster, shard=shard, **TWO)
    require_same_numbers(two, one)
    assert metrics(two)[-1]["edge/zmq/bytes"] > 0, "the rows of rank 1 came from the other host"
    log = (two.folder / "logs" / "t1.log").read_text()
    assert "Traceback" not in log


def dying(tiny: TinyRuns, marker: Path, **how: Any) -> Result:
    """Rank 1 kills itself in Step 3, unless the marker is there."""
    loss_of = partial(deadly, marker=str(marker), untold="cluster" in how)
    graph = with_score(tiny.folder, None, loss_of)
    return tiny.run(graph, 5, name=marker.name, checkpoint_every=2, **TWO, **how)


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "shard"])
def test_a_rank_that_dies_on_the_other_host_takes_the_run_back_to_its_checkpoint(
    tiny: TinyRuns,
    tmp_path: Path,
    cluster: Path,
    host_b: HostProcess,
    shard: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its mate fails in the same collective, and is heard before the death is told: that is not the
    run's failure. Both begin again, and meet again.
    """
    (tmp_path / "one").touch()
    one = dying(tiny, tmp_path / "one", pin=HERE, shard=shard)
    judge, failed = Failures.judged, []

    def judged(self: Failures, *given: Any) -> BaseException | None:
        found = judge(self, *given)
        if self._waiting and not failed:
            failed.extend(child.name for _, child, _ in self._waiting)
            os.kill(host_b.serving, signal.SIGCONT)
        return found

    monkeypatch.setattr(Failures, "judged", judged)
    monkeypatch.setattr(failures, "GRACE", 0.0)
    two = dying(tiny, tmp_path / "two", pin=SPREAD, shard=shard, cluster=cluster)
    assert failed == ["t0"]
    assert (tmp_path / "two").exists()
    require_same_numbers(two, one)
    said = (two.folder / "logs" / "coordinator.log").read_text()
    assert "Worker t1 was lost" in said
    assert "scored begins after step 2" in said


@pytest.mark.usefixtures("host_b")
def test_what_one_rank_alone_fails_with_ends_the_run_after_the_lease(
    tiny: TinyRuns, cluster: Path
) -> None:
    graph = with_score(tiny.folder, None, unlucky)
    with pytest.raises(KernelError, match="out of luck"):
        tiny.run(graph, 4, pin=SPREAD, cluster=cluster, **TWO)


def test_a_run_whose_rank_is_killed_between_steps_goes_on_and_back_to_one_host(
    tiny: TinyRuns, cluster: Path, host_b: HostProcess
) -> None:
    """Also in a private network, where ranks meet without keys."""
    killed: list[int] = []

    def kill_rank(row: Mapping[str, float]) -> None:
        if row["step"] == 3 and not killed:
            killed.extend(pid for pid in host_b.workers() if "t1" in command_of(pid))
            kill(killed)

    one = tiny.run(small, 6, name="one", pin=HERE, checkpoint_every=2, **TWO)
    private = with_lease(cluster, 10.0, private=True)
    how: dict[str, Any] = {"pin": SPREAD, "cluster": private, "on_step": [kill_rank]}
    two = tiny.run(small, 4, name="two", checkpoint_every=2, **how, **TWO)
    assert len(killed) == 1
    assert "t1 was lost" in (two.folder / "logs" / "coordinator.log").read_text()
    resume(two.folder, steps=6, pin=HERE, cluster=None, **TWO)
    require_same_numbers(two, one)
