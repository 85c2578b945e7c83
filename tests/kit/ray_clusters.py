"""Ray clusters of simulated nodes on this machine, and what runs on them.

    with ray_cluster() as nodes:          # a, the head, and b, of one CPU each
        run(graph, RunOptions(cluster="ray", pin={"rollout": "gen@b"}))

It is started by the main thread. All that comes of it is marked, and gone afterwards.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forked
from tests.kit.nothing_left import require_gone
from tests.kit.processes import (
    MARK,
    ROOT,
    command_of,
    ended,
    family,
    host_of,
    kill,
    marked,
    new_mark,
    parent_of,
    workers,
)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_AUTH_MODE": "disabled",  # else `ray start` looks for a token in the home folder
    "RAY_prestart_worker_first_driver": "0",  # else each run starts processes that nobody needs
    "RAY_worker_niceness": "0",  # else what runs on Ray hardly runs beside other tests
}
HOOK = Path(__file__).parent / "ray_start"
"""What Python imports in each process of Ray."""
_STORE = 80 * 2**20
"""Bytes of each node's object store; a run uses none."""


def ray_environment() -> dict[str, str]:
    """Variables for whoever starts a Ray cluster: Ray is quiet, and its processes run HOOK."""
    folders = os.pathsep.join(filter(None, (str(HOOK), str(ROOT), os.environ.get("PYTHONPATH"))))
    return QUIET | {"PYTHONPATH": folders} | forked.at_this_server()


def needs_ray() -> None:
    """Skips where Ray is not installed."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'dataflow-rl[ray]')")


class RayNodes:
    """A cluster. mark: that of its processes."""

    def __init__(self, **head: Any) -> None:
        """head: what the node a has, for Ray."""
        from ray.cluster_utils import Cluster

        self.mark = os.environ[MARK]
        self._nodes: dict[str, Any] = {}
        self._cluster = Cluster()
        self.add("a", **head)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, *, env: dict[str, str] | None = None, **what: Any) -> None:
        """Start a node, and wait until it is there. env: added for its processes."""
        head = {} if self._nodes else {"no_monitor": True, "include_log_monitor": False}
        usual = {"num_cpus": 1, "object_store_memory": _STORE} | head
        with _environment(env or {}), _no_dashboard():
            self._nodes[name] = self._cluster.add_node(node_name=name, **usual | what)

    def end(self, name: str) -> None:
        """End a node, of which Ray is told."""
        self._cluster.remove_node(self._nodes.pop(name))

    def remove(self, name: str) -> None:
        """Kill a node with everything on it, and tell nobody."""
        node = self._nodes.pop(name)
        below = self.of_node(node)
        self._cluster.remove_node(node, allow_graceful=False)
        kill(below)

    def signal_all(self, name: str, number: int) -> None:
        """Send a signal to a node's raylet and to all that come of it."""
        for each in self._nodes[name].all_processes["raylet"]:
            kill(family(each.process.pid), number)

    def others(self) -> list[str]:
        """The nodes that are there beside the head."""
        return [name for name in self._nodes if name != "a"]

    def drain(self, name: str, seconds: float) -> None:
        """Tell Ray that a node will be taken away so soon, as a cloud does."""
        import ray
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        (node,) = [n["NodeID"] for n in ray.nodes() if n["NodeName"] == name and n["Alive"]]
        why = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        until = time.time_ns() // 10**6 + int(seconds * 1000)
        accepted, problem = GcsClient(address=self.address).drain_node(node, why, "test", until)
        assert accepted, problem

    def stored(self) -> int:
        """How many objects were ever put into the object stores of its nodes.

        The head is asked, which asks the others: Ray would ask the first node that it believes to
        be there, and for some seconds it believes that of a node that was removed.
        """
        from ray._private.internal_api import get_memory_info_reply, get_state_from_address

        head = self._nodes["a"]
        state = get_state_from_address(self.address)
        reply = get_memory_info_reply(state, head.node_ip_address, head.node_manager_port)
        return int(reply.store_stats.cumulative_created_objects)

    def wait_until_free(self, cores: float) -> None:
        """Until so many are free: what the run before had comes back a little after its end."""
        import ray

        end = time.monotonic() + 30.0
        while (free := ray.available_resources().get("CPU", 0.0)) < cores:
            assert time.monotonic() < end, f"{free:g} of {cores:g} cores are free"

    def of_node(self, node: Any) -> list[int]:
        """Ray's processes of the node of a simulated machine, which would die with that."""
        raylets = [each.process.pid for each in node.all_processes.get("raylet", ())]
        return [pid for pid in marked(self.mark) if _parent(pid) in raylets]

    def workers(self) -> dict[str, int]:
        """The processes of runs' Workers on all nodes, by name."""
        return workers(self.mark)

    def host_of(self, worker: str) -> int:
        """The process of the host that a Worker is on."""
        return host_of(self.workers()[worker])

    def hosts(self) -> list[int]:
        """The processes of runs' hosts."""
        found = {pid: command_of(pid) for pid in marked(self.mark)}
        return [pid for pid, words in found.items() if words[:1] and "HostActor" in words[0]]

    def close(self) -> None:
        """End it, whatever is left of it."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        kill(marked(self.mark))
        require_gone(self.mark)


def _parent(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return parent_of(pid)
    return 0


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """This process's environment with more, which Ray's processes inherit."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in more.items():
            patch.setenv(name, value)
        yield


@contextlib.contextmanager
def _no_dashboard() -> Iterator[None]:
    """Ray starts one for a head even where it is told not to, and waits until it has imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.services.start_api_server", lambda *_, **__: (None, None))
        yield


@contextlib.contextmanager
def ray_cluster(*, b: bool = True, **what: Any) -> Iterator[RayNodes]:
    """The nodes a (the head, which a run from this process begins on) and b, and RAY_ADDRESS.
    what: each has, for Ray.
    """
    with _environment(ray_environment() | {MARK: new_mark()}):
        nodes = RayNodes(**what)
        with contextlib.ExitStack() as after:
            after.callback(nodes.close)
            if b:
                nodes.add("b", **what)
            after.enter_context(_environment({"RAY_ADDRESS": nodes.address}))
            yield nodes


def groups_left() -> list[str]:
    """The placement groups of runs that were not given back."""
    from ray.util import placement_group_table

    found = placement_group_table().items()
    return [f"{name} {said['state']}" for name, said in found if said["state"] != "REMOVED"]


def require_nothing_runs(nodes: RayNodes, seconds: float) -> float:
    """Hosts, Workers and placement groups are gone in time. Returns how long it took."""
    began = time.monotonic()
    for pid in (*nodes.workers().values(), *nodes.hosts()):
        assert ended(pid, began + seconds - time.monotonic()), command_of(pid)
    while left := groups_left():
        assert time.monotonic() < began + seconds, f"placement groups are left: {left}"
    return time.monotonic() - began
