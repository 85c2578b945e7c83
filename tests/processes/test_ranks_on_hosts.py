"""Ranks of a train node on two hosts (loopback addresses): numbers, deaths, errors, who meets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.api import plan as plan_of
from engine.api import resume
from tests.kit.host_processes import HostProcess, cluster_file, host, with_lease
from tests.kit.processes import command_of, kill
from tests.kit.run_graphs import small
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


def kill_rank(host_b: HostProcess, step: int, row: Mapping[str, float]) -> None:
    """After this Step, the first time."""
    ranks = [pid for pid in host_b.workers() if "t1" in command_of(pid)]
    if row["step"] == step and not host_b.said.count("killed"):
        host_b.said += "killed"
        kill(ranks)


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "shard"])
def test_a_rank_that_dies_on_the_other_host_takes_the_run_back_to_its_checkpoint(
    tiny: TinyRuns, cluster: Path, host_b: HostProcess, shard: bool
) -> None:
    """Its mate here fails too, which is not the run's failure; both begin again, and meet again."""
    one = tiny.run(small, 5, name="one", pin=HERE, shard=shard, checkpoint_every=2, **TWO)
    killed = [partial(kill_rank, host_b, 3)]
    how: dict[str, Any] = {"pin": SPREAD, "shard": shard, "cluster": cluster}
    two = tiny.run(small, 5, name="two", checkpoint_every=2, on_step=killed, **how, **TWO)
    require_same_numbers(two, one)
    said = (two.folder / "logs" / "coordinator.log").read_text()
    assert "t1 was lost" in said
    assert "SIGKILL" in said
    for worker in ("t0", "t1"):
        log = (two.folder / "logs" / f"{worker}.log").read_text()
        assert f"worker {worker}, epoch 1" in log
