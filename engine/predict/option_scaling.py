"""Options of a run for more or fewer Workers, or devices, than they were given for.

Owns: which options change, and how names of Workers and their hosts go on. Does not own: the
options (engine/plan/options.py), the hosts (cluster_scaling.py), whether such a plan can be (the
planner).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from dataflow.errors import PlanError, nearest_or_all
from dataflow.graph import Graph
from dataflow.node import Node
from engine.plan.cluster import Cluster
from engine.plan.options import RunOptions
from engine.predict.cluster_scaling import device_count


def countable(graph: Graph, options: RunOptions) -> list[str]:
    """Names whose number of Workers may change: nodes that may have several, and pinned Workers."""
    nodes = [node.name for node in graph.nodes if node.operator.work != "source"]
    return list(dict.fromkeys([*nodes, *(w for pin in options.pin.values() for w in _names(pin))]))


def with_workers(graph: Graph, options: RunOptions, name: str, count: int) -> RunOptions:
    """With so many replicas of a node (of a train node: data-parallel ranks), and of all nodes that
    are pinned to its Workers. name: the node's, or that of a Worker of a pin. Raises PlanError.
    """
    known = countable(graph, options)
    if name not in known:
        problem = f"expected a node that may have several Workers, or a pinned Worker, found {name}"
        raise PlanError(f"what-if: {problem}. Fix: {nearest_or_all(name, known)}.")
    if count < 1:
        raise PlanError(f"what-if: {name}: expected 1 Worker or more, found {count}. Fix: 1..8.")
    pin = options.pin.get(name) or next(p for p in [*options.pin.values(), ""] if _on(p, name))
    if not pin:
        return _counted(options, graph.node(name), count)
    found = options
    for node in (graph.node(node) for node, own in options.pin.items() if own == pin):
        if node.name == name or _grows(node, len(_names(pin))):
            found = _pinned(found, node.name, _grown(pin, count * _tensor(options, node)))
    return found


def _grows(node: Node, workers: int) -> bool:
    """Whether a node has more Workers where others on its Workers have."""
    operator = node.operator
    if operator.work == "train":
        return True
    fixed = operator.work == "source" or operator.scope == "batch"
    return not fixed and (operator.traits.computes or workers > 1)


def _on(pin: str, name: str) -> bool:
    """Whether a pin names a Worker; no pin is the end of the search."""
    return not pin or name in _names(pin)


def _names(pin: str) -> list[str]:
    return [worker.partition("@")[0].strip() for worker in pin.split(",")]


def _tensor(options: RunOptions, node: Node) -> int:
    """Workers of one data-parallel rank."""
    return options.tensor.get(node.name, 1) if node.operator.work == "train" else 1


def _counted(options: RunOptions, node: Node, count: int) -> RunOptions:
    """Of a node without a pin."""
    if node.operator.work == "train":
        return replace(options, ranks={**options.ranks, node.name: count})
    return replace(options, replicas={**options.replicas, node.name: count})


def _pinned(options: RunOptions, node: str, pin: str) -> RunOptions:
    """With another pin, which says the number alone."""
    replicas = {name: count for name, count in options.replicas.items() if name != node}
    ranks = {name: count for name, count in options.ranks.items() if name != node}
    return replace(options, pin={**options.pin, node: pin}, replicas=replicas, ranks=ranks)


def _grown(pin: str, count: int) -> str:
    """So many Workers: the first ones of the pin, then others on the same hosts in turn."""
    given = [worker.strip() for worker in pin.split(",")]
    taken = set(_names(pin))
    fresh = _fresh(given[0].partition("@")[0], taken)
    more = []
    for number in range(len(given), count):
        _, at, host = given[number % len(given)].partition("@")
        more.append(f"{next(fresh)}{at}{host}")
    return ",".join([*given[:count], *more])


def _fresh(name: str, taken: set[str]) -> Iterator[str]:
    """Names of Workers that nobody has."""
    number = 0
    while True:
        number += 1
        if f"{name}-{number}" not in taken:
            yield f"{name}-{number}"


# --- devices --------------------------------------------------------------------------------------


def with_devices(graph: Graph, options: RunOptions, before: Cluster, after: Cluster) -> RunOptions:
    """With as many times more Workers of each node as there are devices: of nodes that compute with
    a Model or have several, if a pin or a number says their Workers. Raises PlanError where none
    does, or where that comes to no whole Workers.
    """
    factor = Fraction(device_count(after), device_count(before))
    found = options
    if factor != 1 and not (options.pin or options.replicas or options.ranks):
        problem = "expected the Workers of the nodes that grow, found no pin and no number"
        host = next(h for h in before.hosts if h.gpus)
        at = f"gpu:{host.kind}" if host.kind else host.name
        raise PlanError(f"devices: {problem}. Fix: --pin {_example(graph, at)}.")
    for pin in dict.fromkeys(options.pin.values()):
        there = len(_names(pin))
        nodes = [graph.node(node) for node, own in options.pin.items() if own == pin]
        for node in (node for node in nodes if _grows(node, there)):
            count = _whole(there * factor, f"{node.name} on {pin}", factor)
            found = _pinned(found, node.name, _spread(_grown(pin, count), there, before, after))
    return _numbers(found, options, factor)


def _numbers(found: RunOptions, options: RunOptions, factor: Fraction) -> RunOptions:
    """Replicas and ranks of nodes without a pin, which the planner spreads over the hosts."""
    said: dict[str, Mapping[str, int | str]] = {"replicas": found.replicas, "ranks": found.ranks}
    own: dict[str, dict[str, int | str]] = {}
    for flag, counts in said.items():
        own[flag] = {}
        for node, count in counts.items():
            if node in options.pin or isinstance(count, str) or factor == 1:
                own[flag][node] = count
                continue
            own[flag][node] = _whole(count * factor, f"{flag} {node}={count}", factor)
    return replace(found, **own)  # type: ignore[arg-type]


def _whole(count: Fraction, what: str, factor: Fraction) -> int:
    """A number of Workers. Raises PlanError for a part of one."""
    if count.denominator != 1:
        problem = f"{what}: expected whole Workers, found {count} at {factor} times the devices"
        fix = f"a number of devices {count.denominator} times as large"
        raise PlanError(f"devices: {problem}. Fix: {fix}.")
    return int(count)


def _spread(pin: str, first: int, before: Cluster, after: Cluster) -> str:
    """The pin with Workers that were grown from those of a host by name on its further hosts."""
    tables: dict[str, list[str]] = {}
    for host in after.hosts:
        tables.setdefault(host.table or host.name, []).append(host.name)
    old = {host.name: host for host in before.hosts}
    counts: dict[str, int] = {}
    for host in before.hosts:
        counts[host.table or host.name] = counts.get(host.table or host.name, 0) + 1
    told = []
    for number, worker in enumerate(pin.split(",")):
        name, at, host = worker.partition("@")
        if host in old:
            table = old[host].table or host
            place = list(tables[table])
            was = [h.name for h in before.hosts if (h.table or h.name) == table].index(host)
            host = place[(was + (number // first) * counts[table]) % len(place)]
        told.append(f"{name}{at}{host}")
    return ",".join(told)


def _example(graph: Graph, at: str) -> str:
    nodes = [n.name for n in graph.nodes if n.operator.traits.generates]
    nodes += [n.name for n in graph.nodes if n.operator.work == "train"]
    return " ".join(f"{node}={node}@{at}" for node in nodes[:2])
