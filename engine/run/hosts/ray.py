"""Hosts as nodes of a Ray cluster. Nothing else here imports Ray.

Owns: the connection to the cluster, what its nodes have, placement groups, the actor on a host, and
calling it. Does not own: what is said (link.py, hosts.py), what the actor does (desk.py, host.py).

Of Ray a run uses this: where there is room, a process on that node, calls of that process, and word
of its death. Rows, weights and metrics never pass through its object store: a call carries less
than Ray's limit for that (numbered_messages.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from dataflow.errors import PlanError, RunError
from engine.coordinator.recovery import DEATHS
from engine.plan.cluster import LEASE, Cluster, detect, with_first
from engine.run.control.thread_errors import ErrorsTo
from engine.run.hosts.bundle import NODE, Bundle, BundleState, what_is_free
from engine.run.hosts.desk import Desk, Heard
from engine.run.hosts.host_requirements import Looked, describe_difference, look
from engine.run.hosts.link import Calls, Dial, Gone, HostLost, Unreachable
from engine.run.hosts.node_hosts import host_of, names_of
from engine.run.hosts.ray_joining import is_answered, own_breakpoint, token_for_us_alone

try:
    import ray
    from ray._private.state import available_resources_per_node
    from ray._private.state import state as cluster_state
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    needs = "expected the package ray for --cluster ray, found none"
    raise PlanError(f"{needs}. Fix: pip install 'dataflow-rl[ray]'.") from error

_log = logging.getLogger(__name__)

_LOOK = 120.0
"""Seconds for every node to say what it has."""
_OF_RAY = (ConnectionError, RuntimeError, ValueError, RayError)
"""What Ray raises where it cannot be joined or started."""
_POLL = 0.25
"""Seconds between two looks at what Ray is still doing."""
_FIRST_WORD, _AGAIN = 3.0, 10.0
"""Seconds until a run that waits for room says so, and between two times."""
_START = "`ray start --head`, or `ray symmetric-run`, starts one; or --cluster ray:local"


# --- the cluster ----------------------------------------------------------------------------------


def join_cluster(where: str) -> None:
    """Join the cluster of RAY_ADDRESS, or the one that runs here; for `ray:local` start one. Stays
    as long as this process. Raises RunError where there is none.
    """
    if ray.is_initialized():
        return
    _lost.clear()  # what was asked in a session that is over
    if where != "ray:local" and not is_answered(os.environ.get("RAY_ADDRESS", "")):
        problem = f"expected a Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}, found none"
        raise RunError(f"--cluster {where}: {problem}. Fix: {_START}.")
    try:
        with own_breakpoint():
            _join_or_start(where)
    except Exception as error:
        # Where a node does not start in Ray's half minute, it raises an Exception of no kind.
        if type(error) is not Exception and not isinstance(error, _OF_RAY):
            raise
        first = str(error).strip().partition("\n")[0].rstrip(".")
        problem = f"expected a Ray cluster, found none: {first}"
        raise RunError(f"--cluster {where}: {problem}. Fix: {_START}.") from error


def _join_or_start(where: str) -> None:
    quiet = partial(ray.init, log_to_driver=False, logging_level=logging.ERROR)
    if where != "ray:local":
        quiet(address="auto")
        return
    with token_for_us_alone():
        quiet(address="local", num_cpus=detect().cores, include_dashboard=False)


def cluster(
    paths: Sequence[str], *, whole: bool = False, lease: float = LEASE, private: bool = False
) -> Cluster:
    """The nodes of the cluster with what is free on them, this process's first. A node that lacks
    one of these paths, has something else there, or other versions, is refused. whole: read large
    files in full. lease, private: of the Cluster. Raises RunError if none is left.
    """
    this_node = ray.get_runtime_context().get_node_id()
    answers = _ask_nodes(sorted(_alive()), paths, whole=whole)
    free = available_resources_per_node()
    # A node may have gone, or come, while the others were asked.
    alive = [node for node in _alive_nodes() if node["NodeID"] in answers]
    hosts, names = [], names_of(alive)
    for node in sorted(alive, key=lambda n: (n["NodeID"] != this_node, names[n["NodeID"]])):
        number = node["NodeID"]
        hosts.append(host_of(node, names[number], answers[number], free.get(number, {})))
    usable = [h for h in hosts if not h.refused and h.cores]
    if not usable:
        refusals = "\n".join(f"host {h.name}: {h.refused or 'it has no cores'}" for h in hosts)
        raise RunError(f"no node of the Ray cluster can be used:\n{refusals}")
    for host in (h for h in hosts if h.refused):
        _log.warning("host %s is left out: %s", host.name, host.refused)
    unusable = [h for h in hosts if h not in usable]
    return with_first([*usable, *unusable], lease=lease, private=private)


def _ask_nodes(
    nodes: Sequence[str], paths: Sequence[str], *, whole: bool
) -> dict[str, Looked | str]:
    """What each node says of itself, or why it says nothing."""
    looking = ray.remote(look)
    asked = {_task_on(node, looking).remote(paths, whole=whole): node for node in nodes}
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK)
    answers: dict[str, Looked | str] = {
        asked[ref]: f"expected an answer within {_LOOK:g} s, found none. Fix: see its raylet's log."
        for ref in late
    }
    for ref in done:
        try:
            answers[asked[ref]] = ray.get(ref)
        except RayError as error:
            last = str(error).strip().rpartition("\n")[2]
            fix = "Fix: install dataflow-rl there as here"
            answers[asked[ref]] = f"expected it to say what it has, found {last}. {fix}."
    here = look(paths, whole=whole)
    return {
        node: what if isinstance(what, str) else describe_difference(here, what) or what
        for node, what in answers.items()
    }


# --- room -----------------------------------------------------------------------------------------


class ClusterReservation:
    """A placement group: one bundle a host, each on another node. Its thread waits until it is
    there, and says so every ten seconds; after `wait` seconds it has failed. Which nodes it may
    have changes as nodes are lost: until somebody is in it, another group then takes its place.
    Later Ray places a bundle again whose node is gone, unless that had to be on this very node.
    """

    def __init__(self, bundles: Sequence[Bundle], wait: float) -> None:
        self.nodes: dict[str, str] = {}
        """The node of each bundle in which a process has begun."""
        self._bundles = {bundle.host: bundle for bundle in bundles}
        self._wait = wait
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._failure: RunError | None = None
        self._group: Any = None
        self._selectors: list[dict[str, str]] = []
        self._thread = self._start_watch()

    @property
    def is_settled(self) -> bool:
        """Whether `dial` does not wait for room: it is there, or has failed."""
        return self._settled.is_set()

    def dial(self, bundle: str, host: str) -> Dial:
        """What waits for a host's process, and connects to it. bundle: its own, or the one of
        another host that is not there any more.
        """

        def dial_host(stop: threading.Event) -> Calls | None:
            while not self._settled.wait(_POLL):
                if stop.is_set():
                    return None
            if self._failure is not None:
                raise self._failure
            at = self._index(bundle)
            self.nodes[bundle] = node = _node(self._group, at)
            return _start_host(host, self._group, at, node, stop)

        return dial_host

    def moves(self, host: str) -> bool:
        """Whether Ray places a host's bundle again, elsewhere, once its node is gone."""
        at = self._index(host)
        return not self._selectors or self._selectors[at].get(NODE, "!").startswith("!")

    def state(self, host: str) -> BundleState:
        """That of the bundle of a host which is not there any more."""
        at = self._index(host)
        node = _node(self._group, at)
        if node not in _alive():
            return BundleState.GONE
        if node in _nodes_to_avoid():
            return BundleState.SILENT
        free = available_resources_per_node().get(node, {})
        group = self._group.id.hex()
        wants = self._bundles[host].resources
        is_free = all(free.get(f"{k}_group_{at}_{group}", 0.0) >= n for k, n in wants.items())
        return BundleState.FREE if is_free else BundleState.BUSY

    def _index(self, host: str) -> int:
        return list(self._bundles).index(host)

    def wait_again(self) -> None:
        """Until every bundle has a node, and none that was lost: `dial` waits for that."""
        self._settled.clear()
        self._thread.join()
        self._thread = self._start_watch()

    def close(self) -> None:
        """Give everything back, which ends the processes that are there."""
        self._closed.set()
        self._thread.join()
        if self._group is not None:
            remove_placement_group(self._group)

    def _bundle_selectors(self) -> list[dict[str, str]]:
        alive, avoided = _alive(), _nodes_to_avoid()
        return [bundle.selector(alive, avoided) for bundle in self._bundles.values()]

    def _claim(self) -> None:
        """Ask for a group, in the place of one that has other selectors and nobody in it."""
        if self.nodes or (selectors := self._bundle_selectors()) == self._selectors:
            return
        if self._group is not None:
            remove_placement_group(self._group)
        wants = [bundle.resources for bundle in self._bundles.values()]
        self._selectors = selectors
        self._group = placement_group(
            wants, strategy="STRICT_SPREAD", bundle_label_selector=selectors
        )

    def _is_placed(self) -> bool:
        # `wait` of a group says for seconds, on a busy machine, that it is not there when it is.
        table = placement_group_table(self._group)
        if table["state"] != "CREATED":
            return False
        nodes = table["bundles_to_node_id"].values()
        avoided = _nodes_to_avoid()
        return all(node and node not in avoided for node in nodes)

    def _start_watch(self) -> threading.Thread:
        thread = threading.Thread(target=self._watch, name="room", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        with contextlib.ExitStack() as after:
            after.callback(self._settled.set)
            after.enter_context(ErrorsTo(self._fail))
            self._wait_for_nodes()

    def _fail(self, error: BaseException) -> None:
        """Let `dial` raise whatever goes wrong here."""
        self._failure = RunError(f"--cluster ray: {type(error).__name__}: {error}")
        self._failure.__cause__ = error

    def _wait_for_nodes(self) -> None:
        began, due = time.monotonic(), time.monotonic() + _FIRST_WORD
        self._claim()
        while not self._closed.is_set() and not self._is_placed():
            now = time.monotonic()
            self._claim()
            self._closed.wait(_POLL)
            if now - began > self._wait:
                fix = "Fix: more nodes, fewer or smaller Workers, or a longer --wait"
                problem = f"no room within {self._wait:g} s: {self._describe_shortage()}"
                self._failure = RunError(f"--cluster ray: {problem}. {fix}.")
                break
            if now > due:
                text = "waiting for room in the Ray cluster: %s"
                if self._wait == math.inf:  # a replica more, which nobody waits for
                    due = math.inf
                    _log.info(text, self._describe_shortage())
                else:
                    due = now + _AGAIN
                    _log.warning(text, self._describe_shortage())

    def _describe_shortage(self) -> str:
        """Say what is wanted, which of it fits nowhere, and what is there."""
        nodes, free = _room()
        alone = [b for b in self._bundles.values() if not any(map(b.fits, free.values()))]
        wanted = ", ".join(map(str, self._bundles.values()))
        short = f"; nowhere free: {', '.join(map(str, alone))}" if alone else ""
        by_node = "; ".join(f"{name} {what_is_free(nodes[name], free[name])}" for name in nodes)
        return f"wanted {wanted}{short}; there: {by_node}"


def _room() -> tuple[dict[str, Any], dict[str, Any]]:
    """The resources of each node by name: all, and those that are free."""
    alive, free = _alive_nodes(), available_resources_per_node()
    names = names_of(alive)
    every = {names[n["NodeID"]]: n["Resources"] for n in alive}
    return every, {names[n["NodeID"]]: free.get(n["NodeID"], {}) for n in alive}


_lost: dict[str, Any] = {}
"""What was asked of each node on which this process lost a host."""


def avoid(node: str) -> None:
    """Begin nothing on this node until it has answered: what is scheduled onto a node that is gone,
    and that Ray takes for alive, is lost with it.
    """
    _lost[node] = _task_on(node, ray.remote(_is_there)).remote()


def _task_on(node: str, task: Any) -> Any:
    """A task on this very node, which claims no resource and, if it is lost, is not tried again."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=place)


def _is_there() -> None:
    """What a node answers with."""


def _nodes_to_avoid() -> list[str]:
    """The nodes that have not answered yet. One that Ray knows to be gone is no longer among them:
    nothing is scheduled onto it.
    """
    for node, asked in list(_lost.items()):
        if ray.wait([asked], timeout=0)[0]:
            _lost.pop(node, None)
    return sorted(_lost)


def _alive_nodes() -> list[dict[str, Any]]:
    """What Ray says of each node that it takes for alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def _alive() -> frozenset[str]:
    """The nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in _alive_nodes())


def draining() -> frozenset[str]:
    """The nodes that are about to be taken away."""
    with contextlib.suppress(RayError):  # the links hear of what is wrong
        return frozenset(cluster_state.get_draining_nodes())
    return frozenset()


# --- a host's process -----------------------------------------------------------------------------


class HostActor:
    """What Ray runs on a host: one run's part, in a thread of its own. Calls come one after
    another, those of `hear` beside the others.
    """

    def __init__(self, host: str) -> None:
        from engine.run.hosts.host import HostedRun

        self._desk = Desk()
        self._part = HostedRun(self._desk, host, ray.util.get_node_ip_address())
        threading.Thread(target=self._part.run, name="run", daemon=True).start()

    def say(self, first: int, frames: list[bytes]) -> None:
        """See Desk."""
        self._desk.accept(first, frames)

    @ray.method(concurrency_group="hear")
    def hear(self, count: int, known: float) -> Heard:
        """See Desk."""
        return self._desk.answer(count, known)


class _ActorCalls:
    """Calls of a HostActor. node: the node that it is on."""

    def __init__(self, actor: Any, node: str) -> None:
        self._actor, self._node = actor, node

    def say(self, first: int, frames: list[bytes]) -> None:
        self._actor.say.remote(first, frames)

    def hear(self, count: int, known: float) -> Future[Heard]:
        return self._actor.hear.remote(count, known).future()

    def meaning(self, error: BaseException) -> RunError:
        """What the failure of a call says of the host."""
        if isinstance(error, ActorDiedError):
            last = str(error).strip().rpartition("\n")[2]
            return Gone(last.partition(". ")[0].rstrip("."), ended=self._node in _alive())
        if isinstance(error, ActorUnavailableError):
            return Unreachable("it cannot be reached")
        return RunError(f"{type(error).__name__}: {error}")

    def end(self) -> None:
        ray.kill(self._actor)


def _node(group: Any, bundle: int) -> str:
    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return nodes[bundle]


def _start_host(
    host: str, group: Any, bundle: int, node: str, stop: threading.Event
) -> Calls | None:
    """Start a host's process in a bundle, and wait until it is there. One that dies meanwhile is
    started again, as often as a Worker. None once the event is set.
    """
    causes: list[str] = []
    while len(causes) < DEATHS:
        actor = _actor(host, group, bundle)
        ready = actor.__ray_ready__.remote()
        while not ray.wait([ready], timeout=_POLL)[0]:
            if stop.is_set():
                ray.kill(actor)
                return None
        try:
            ray.get(ready)
        except RayError as error:
            causes.append(str(error).strip().rpartition("\n")[2].rstrip("."))
            if node not in _alive():
                problem = f"host {host}: its process died as it started: {causes[-1]}"
                raise HostLost(problem, ended=False) from error
        else:
            return _ActorCalls(actor, node)
    problem = f"expected its process to start, found that it died {len(causes)} times as it started"
    how = f"The first time: {causes[0]}. Fix: see its raylet's log."
    raise RunError(f"host {host}: {problem}. {how}")


def _actor(host: str, group: Any, bundle: int) -> Any:
    """Begin a host's process in a bundle."""
    remote: Any = ray.remote  # Ray's types do not know concurrency_groups
    kind = remote(concurrency_groups={"hear": 1})(HostActor)
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    wants = group.bundle_specs[bundle]
    return kind.options(
        num_cpus=wants.get("CPU", 0), num_gpus=wants.get("GPU", 0), scheduling_strategy=place
    ).remote(host)
