"""Runs on a Ray cluster that lose a Worker, a host's process, a node, or their own process: the
numbers of an undisturbed run, and nothing left.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import RunError
from dataflow.graph import Graph
from engine.api import Result, rerun, run
from engine.run.hosts.link import HostLink
from graphs.grpo import grpo
from tests.kit.killable_run import killable_run
from tests.kit.nothing_left import (
    require_gone,
    require_nothing_in_shared_memory,
    shared_memory,
)
from tests.kit.processes import MARK, ended, go_on, kill, new_mark, wait_for
from tests.kit.ray_clusters import (
    HOOK,
    RayNodes,
    groups_left,
    needs_ray,
    ray_cluster,
    require_nothing_runs,
)
from tests.kit.run_graphs import small, vowels
from tests.kit.runs import metrics, require_same_numbers, steps_stored
from tests.kit.tiny_runs import PROMPTS, TinyRuns

needs_ray()
from engine.run.hosts.ray import (  # noqa: E402  (it imports Ray)
    HostActor,
    _ActorCalls,
    _room,
    avoid,
    cluster,
    join_cluster,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.long, pytest.mark.hosts]
LEASE = 10.0
STEPS = 6
USUAL = {"cluster": "ray", "lease": LEASE, "checkpoint_every": 2}
GENERATES_THERE = {"rollout": "gen@zone:x", "train_policy": "train"}
TRAINS_THERE = {"rollout": "gen", "score": "gen", "train_policy": "train@zone:x"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """The node a; each test adds others, of the zone x, and loses them."""
    with ray_cluster(b=False) as found:
        yield found


@pytest.fixture
def there(nodes: RayNodes) -> Iterator[RayNodes]:
    """The nodes a and b, and whatever a test has added."""
    nodes.add("b", labels={"zone": "x"})
    yield nodes
    for name in nodes.others():
        nodes.remove(name)
    assert groups_left() == []


def at_step(number: int, act: Callable[[], object]) -> Callable[[Mapping[str, float]], None]:
    """For `on_step`: does it once, at this Step."""
    left = [act]

    def told(row: Mapping[str, float]) -> None:
        if row["step"] == number and left:
            left.pop()()

    return told


@pytest.fixture(scope="module")
def undisturbed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run in one process."""
    alone = TinyRuns(folder=tiny_folder, runs=tmp_path_factory.mktemp("alone"))
    return alone.run(small, STEPS, checkpoint_every=2)


def log_of(run: Result) -> str:
    return (run.folder / "logs" / "coordinator.log").read_text()


def free_cores() -> dict[str, float]:
    """Of the nodes of the cluster that have any."""
    _, free = _room()
    return {name: of["CPU"] for name, of in free.items() if of.get("CPU")}


def test_a_host_whose_process_is_killed_begins_again(
    there: RayNodes, tiny: TinyRuns, undisturbed: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Workers end with it; it needs no lease, since its node is there. And what was recorded
    runs again without any Ray.
    """

    def kill_the_host() -> None:
        worker = there.workers()["gen"]
        kill([there.host_of("gen")])
        assert ended(worker, 2.0), "its Worker is there still"

    usual = USUAL | {"record": "all", "pin": GENERATES_THERE}
    result = tiny.run(small, STEPS, on_step=[at_step(3, kill_the_host)], **usual)
    require_same_numbers(result, undisturbed)
    assert re.search(r"Worker gen was lost.*\n?.*host b: ", log_of(result))
    assert "not heard of" not in log_of(result)
    monkeypatch.delattr("engine.run.hosts.ray_cluster.ray_cluster")  # nobody asks for nodes
    assert rerun(result.folder, ["rollout", "train_policy"], 5).same


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_hosts_process_that_dies_as_it_starts_has_three_tries(
    there: RayNodes, tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    log = tiny.folder / f"dies {deaths} times"

    class DiesAsItStarts(HostActor):
        """Pickled by value, as nodes do not import this file."""

        def __init__(self, host: str) -> None:
            with log.open("a") as file:
                file.write(f"{host}\n")
            if log.read_text().count("b\n") <= deaths and host == "b":
                os.kill(os.getpid(), signal.SIGKILL)
            super().__init__(host)

    monkeypatch.setattr("engine.run.hosts.ray.HostActor", DiesAsItStarts)
    usual = USUAL | {"pin": GENERATES_THERE}
    if deaths == 2:
        assert tiny.run(small, 1, **usual).step == 1
        return
    told = "host b: expected its process to start, found that it died 3 times as it started. The"
    with pytest.raises(RunError, match=told):
        tiny.run(small, 1, **usual)


@pytest.mark.repeats
@pytest.mark.parametrize("pin", [GENERATES_THERE, TRAINS_THERE], ids=["generates", "trains"])
def test_a_node_that_is_lost_is_replaced_by_another(
    there: RayNodes, tiny: TinyRuns, undisturbed: Result, pin: dict[str, str]
) -> None:
    """In the same command; one that trained goes back to its checkpoint."""

    def lose_the_node() -> None:
        there.remove("b")
        there.add("c", labels={"zone": "x"})

    result = tiny.run(small, STEPS, pin=pin, on_step=[at_step(3, lose_the_node)], **USUAL)
    require_same_numbers(result, undisturbed)
    assert "host b: not heard of for" in log_of(result)


def test_a_node_that_answers_again_after_the_lease_is_used_again(
    there: RayNodes, tiny: TinyRuns, undisturbed: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off for longer than the lease, and not for so long that Ray takes it for dead. No
    other node has room, and on this one the run has all that there is.
    """

    def avoid_and_heal(node: str) -> None:
        avoid(node)
        there.signal_all("b", signal.SIGCONT)

    monkeypatch.setattr("engine.run.hosts.host_bundles.avoid", avoid_and_heal)
    cut = at_step(3, lambda: there.signal_all("b", signal.SIGSTOP))
    usual = USUAL | {"pin": GENERATES_THERE, "wait": 60.0}
    result = tiny.run(small, STEPS, on_step=[cut], **usual)
    require_same_numbers(result, undisturbed)
    assert "host b: not heard of for" in log_of(result)


def test_a_host_whose_process_hangs_leaves_its_room_to_the_next(
    there: RayNodes, tiny: TinyRuns, undisturbed: Result
) -> None:
    """Also where another node has room: the node of the first would be held by nobody."""

    def stop_the_host() -> None:
        there.add("c", labels={"zone": "x"})
        kill([there.host_of("gen")], signal.SIGSTOP)

    free: list[dict[str, float]] = []
    at_end = at_step(STEPS, lambda: free.append(free_cores()))
    usual = USUAL | {"pin": GENERATES_THERE}
    result = tiny.run(small, STEPS, on_step=[at_step(3, stop_the_host), at_end], **usual)
    require_same_numbers(result, undisturbed)
    assert "host b: not heard of for" in log_of(result)
    assert free == [{"c": 1.0}]


def test_a_node_that_begins_again_has_its_name(there: RayNodes) -> None:
    """Also while Ray takes the lost one for alive."""
    join_cluster("ray")
    there.remove("b")
    there.add("b", labels={"zone": "y"})
    hosts = {host.name: host for host in cluster([]).hosts}
    assert list(hosts) == ["a", "b"]
    assert (hosts["b"].labels["zone"], hosts["b"].refused) == ("y", "")


def test_nothing_outlives_a_run_that_is_killed(there: RayNodes, tiny: TinyRuns) -> None:
    join_cluster("ray")
    before = shared_memory()
    options = tiny.options(1000, name="killed", pin=GENERATES_THERE, **USUAL)
    with killable_run("small", tiny.folder, options) as run:
        wait_for(run, "step 2")
        assert {"gen", "train"} <= set(there.workers())
        assert len(there.hosts()) == 2
        assert groups_left()
        run.kill()
        require_nothing_runs(there, LEASE + 10.0)
    require_nothing_in_shared_memory(before)


def test_a_run_that_is_not_heard_of_is_ended_by_its_hosts(
    there: RayNodes, tiny: TinyRuns, undisturbed: Result
) -> None:
    """And once it wakes up, they begin again."""
    join_cluster("ray")
    options = tiny.options(STEPS, name="stopped", pin=GENERATES_THERE, **USUAL)
    with killable_run("small", tiny.folder, options, "hold=3") as run:
        wait_for(run, "step 3")
        workers = there.workers().values()
        run.send_signal(signal.SIGSTOP)
        end = time.monotonic() + LEASE + 10.0
        assert all(ended(pid, end - time.monotonic()) for pid in workers)
        run.send_signal(signal.SIGCONT)
        go_on(run)
        _, errors = run.communicate()
        assert run.returncode == 0, errors
    require_same_numbers(tiny.runs / "stopped", undisturbed)
    require_nothing_runs(there, 10.0)


def test_a_node_that_is_about_to_be_taken_away_leaves_a_checkpoint(
    there: RayNodes, tiny: TinyRuns
) -> None:
    """With training on it; from that the run goes on once the node is gone."""
    lost_at: list[float] = []

    def goes_on(row: Mapping[str, float]) -> bool:
        if row["step"] == 2 and not lost_at:
            there.drain("b", seconds=3600.0)
        if not lost_at and steps_stored(tiny.runs / "drained"):
            lost_at.append(row["step"])
            there.remove("b")
            there.add("c", labels={"zone": "x"})
        return bool(lost_at) and row["step"] == lost_at[0] + 3

    usual = USUAL | {"checkpoint_every": 0}
    options = tiny.options(100_000, name="drained", pin=TRAINS_THERE, **usual)
    result = run(small(tiny.folder), options, until=goes_on)
    log = log_of(result)
    assert "the node of host b is taken away" in log
    assert re.search(r"begins after step [1-9]", log), "it did not go on from its checkpoint"
    require_same_numbers(result, tiny.run(small, result.step, name="whole"))


def test_all_in_one_command(
    tiny: TinyRuns, undisturbed: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray:local` starts Ray and ends it; the Workers are the same."""
    mark = new_mark()
    options = tiny.options(STEPS, name="local", cluster="ray:local", checkpoint_every=2)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # it makes a token, in the home folder
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(MARK, mark)
    # Ray gives up a node whose agents have not started after 20 s, as on a busy machine.
    with killable_run("small", tiny.folder, options, path=[HOOK]) as run:
        _, errors = run.communicate()
        assert run.returncode == 0, errors
    require_same_numbers(tiny.runs / "local", undisturbed)
    require_gone(mark)


# --- what passes through Ray ----------------------------------------------------------------------

MARKER = "zqzqzqzq"
INLINE = 100 * 1024
"""Bytes pickled above which Ray puts an argument or a result into its object store."""


@pytest.fixture(scope="module")
def marked_graph(tiny_folder: Path) -> Graph:
    """GRPO on prompts that contain a unique text."""
    data = tiny_folder / "marked.parquet"
    pq.write_table(pa.table({"prompt": [MARKER + prompt for prompt in PROMPTS]}), data)
    base = str(tiny_folder / "model")
    return grpo(base, str(data), vowels, n=4, batch=4, max_tokens=6, lr=1e-3)


def overheard(patch: pytest.MonkeyPatch) -> list[Any]:
    """All arguments and results of calls of hosts, from now on."""
    found: list[Any] = []
    say, take = _ActorCalls.say, HostLink._take

    def said(calls: _ActorCalls, first: int, frames: list[bytes]) -> None:
        found.append((first, frames))
        say(calls, first, frames)

    def taken(link: HostLink, done: Future[Any]) -> float:
        if done.exception() is None:
            found.append(done.result())
        return take(link, done)

    patch.setattr(_ActorCalls, "say", said)
    patch.setattr(HostLink, "_take", taken)
    return found


def test_no_row_passes_through_ray(
    there: RayNodes, marked_graph: Graph, tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process's bits although a remote Worker dies; nothing goes into the object store."""
    one = tiny.run(marked_graph, 4, name="one")
    heard = overheard(monkeypatch)
    join_cluster("ray")
    stored = [there.stored()]
    told = [
        at_step(2, lambda: kill([there.workers()["gen"]])),
        lambda _: stored.append(there.stored()),
    ]
    pin = {"rollout": "gen@b", "score": "ops@b", "train_policy": "train"}
    two = tiny.run(marked_graph, 4, name="two", pin=pin, on_step=told, **USUAL)
    require_same_numbers(two, one)
    row = metrics(two)[-1]
    assert min(row["edge/shm/bytes"], row["edge/zmq/bytes"], row["coordinator/bytes"]) > 0
    assert "Worker gen was lost" in log_of(two)
    assert len(heard) > 50
    calls = [pickle.dumps(call, protocol=5) for call in heard]
    assert max(map(len, calls)) < INLINE
    assert stored[0] + 6 >= stored[1], "the task and the actors"
    assert stored[1:] == [stored[1]] * 4, "no call"
    marker = MARKER.encode()
    assert not [call for call in calls if marker in call]
    files = [path.read_bytes() for path in (two.folder / "samples").iterdir()]
    assert any(marker in file for file in files), "where rows are, it is"
