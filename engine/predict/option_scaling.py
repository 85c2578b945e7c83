"""Options of a run for more or fewer Workers, or devices, than they were given for.

Owns: which options change, and how names of Workers and their hosts go on. Does not own: the
options (engine/plan/options.py), the hosts (cluster_scaling.py), whether such a plan can be (the
planner).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from fractions import Fraction

from dataflow.errors import PlanError, nearest_or_all
from dataflow.graph import Graph
from dataflow.node import Node
from engine.plan.cluster import Cluster
from engine.plan.options import RunOptions
from engine.predict.cluster_scaling import count_devices, group_by_table


def list_scalable(graph: Graph, options: RunOptions) -> list[str]:
    """List the names whose number of Workers may change: nodes that may have several, and pinned
    Workers.
    """
    names = [node.name for node in graph.nodes if node.operator.work != "source"]
    for pin in options.pin.values():
        names += _worker_names(pin)
    return list(dict.fromkeys(names))


def scale_workers(graph: Graph, options: RunOptions, name: str, count: int) -> RunOptions:
    """Give a node so many replicas (a train node: data-parallel ranks), and all nodes that are
    pinned to its Workers as many. name: the node's, or that of a Worker of a pin. Raises PlanError.
    """
    known = list_scalable(graph, options)
    if name not in known:
        problem = f"expected a node that may have several Workers, or a pinned Worker, found {name}"
        raise PlanError(f"what-if: {problem}. Fix: {nearest_or_all(name, known)}.")
    if count < 1:
        raise PlanError(f"what-if: {name}: expected 1 Worker or more, found {count}. Fix: 1..8.")
    pin = options.pin.get(name) or _find_pin(options, name)
    if not pin:
        return _set_count(options, graph.node(name), count)
    scaled_options = options
    for node in _list_pinned(graph, options, pin):
        if node.name == name or _grows(node, len(_worker_names(pin))):
            longer_pin = _resize_pin(pin, count * _count_alike_ranks(options, node))
            scaled_options = _set_pin(scaled_options, node.name, longer_pin)
    return scaled_options


def _find_pin(options: RunOptions, worker: str) -> str:
    """The first pin that names a Worker; empty without one."""
    for pin in options.pin.values():
        if worker in _worker_names(pin):
            return pin
    return ""


def _list_pinned(graph: Graph, options: RunOptions, pin: str) -> list[Node]:
    """The nodes with just this pin."""
    return [graph.node(name) for name, other in options.pin.items() if other == pin]


def _grows(node: Node, workers: int) -> bool:
    """Whether a node has more Workers where others on its Workers have."""
    operator = node.operator
    if operator.work == "train":
        return True
    # Such a node cannot have replicas.
    if operator.work == "source" or operator.scope == "batch":
        return False
    return operator.traits.computes or workers > 1


def _worker_names(pin: str) -> list[str]:
    return [worker.partition("@")[0].strip() for worker in pin.split(",")]


def _count_alike_ranks(options: RunOptions, node: Node) -> int:
    """Workers of one data-parallel rank, or replica."""
    if node.operator.work not in ("train", "forward"):
        return 1
    return options.tensor.get(node.name, 1) * options.context.get(node.name, 1)


def _set_count(options: RunOptions, node: Node, count: int) -> RunOptions:
    """Set the ranks, or replicas, of a node without a pin."""
    if node.operator.work == "train":
        return replace(options, ranks={**options.ranks, node.name: count})
    return replace(options, replicas={**options.replicas, node.name: count})


def _set_pin(options: RunOptions, node: str, pin: str) -> RunOptions:
    """Give a node another pin, which says the number alone."""
    replicas = {name: count for name, count in options.replicas.items() if name != node}
    ranks = {name: count for name, count in options.ranks.items() if name != node}
    return replace(options, pin={**options.pin, node: pin}, replicas=replicas, ranks=ranks)


def _resize_pin(pin: str, count: int) -> str:
    """So many Workers: the first ones of the pin, then others on the same hosts in turn."""
    pinned = [worker.strip() for worker in pin.split(",")]
    free_names = _list_free_names(pinned[0].partition("@")[0], set(_worker_names(pin)))
    workers = pinned[:count]
    for number in range(len(pinned), count):
        _, at, host = pinned[number % len(pinned)].partition("@")
        workers.append(f"{next(free_names)}{at}{host}")
    return ",".join(workers)


def _list_free_names(name: str, taken: set[str]) -> Iterator[str]:
    """Names of Workers that no Worker of the pin has, without end."""
    number = 0
    while True:
        number += 1
        if f"{name}-{number}" not in taken:
            yield f"{name}-{number}"


# --- devices --------------------------------------------------------------------------------------


def scale_devices(graph: Graph, options: RunOptions, before: Cluster, after: Cluster) -> RunOptions:
    """Scale each node's Workers by the growth in devices. Applies to nodes that compute with a
    Model or have several Workers, if a pin or a number says them. Raises PlanError where none does,
    or where that comes to no whole Workers.
    """
    factor = Fraction(count_devices(after), count_devices(before))
    if factor != 1 and not (options.pin or options.replicas or options.ranks):
        problem = "expected the Workers of the nodes that grow, found no pin and no number"
        host = next(host for host in before.hosts if host.gpus)
        place = f"gpu:{host.kind}" if host.kind else host.name
        raise PlanError(f"devices: {problem}. Fix: --pin {_example_pins(graph, place)}.")
    scaled_options = options
    for pin in dict.fromkeys(options.pin.values()):
        worker_count = len(_worker_names(pin))
        for node in _list_pinned(graph, options, pin):
            if _grows(node, worker_count):
                count = _require_whole(worker_count * factor, f"{node.name} on {pin}", factor)
                longer_pin = _spread_pin(_resize_pin(pin, count), worker_count, before, after)
                scaled_options = _set_pin(scaled_options, node.name, longer_pin)
    return _scale_counts(scaled_options, options.pin, factor)


def _scale_counts(options: RunOptions, pinned: Collection[str], factor: Fraction) -> RunOptions:
    """Scale the numbers of nodes without a pin; the planner spreads their Workers over hosts."""
    if factor == 1:
        return options
    replicas: dict[str, int | str] = dict(options.replicas)
    ranks = dict(options.ranks)
    for node, count in options.replicas.items():
        # A range is a text, and stays as it is.
        if node not in pinned and not isinstance(count, str):
            replicas[node] = _require_whole(count * factor, f"replicas {node}={count}", factor)
    for node, count in options.ranks.items():
        if node not in pinned:
            ranks[node] = _require_whole(count * factor, f"ranks {node}={count}", factor)
    return replace(options, replicas=replicas, ranks=ranks)


def _require_whole(count: Fraction, what: str, factor: Fraction) -> int:
    """A number of Workers. Raises PlanError for a part of one."""
    if count.denominator != 1:
        problem = f"{what}: expected whole Workers, found {count} at {factor} times the devices"
        fix = f"a number of devices {count.denominator} times as large"
        raise PlanError(f"devices: {problem}. Fix: {fix}.")
    return int(count)


def _spread_pin(pin: str, round_size: int, before: Cluster, after: Cluster) -> str:
    """Move Workers that were added to a host by name to the further hosts of its table. round_size:
    the Workers that the pin had; each round after them is on the next hosts, as many as there were.
    """
    old_hosts, new_hosts = _host_names_by_table(before), _host_names_by_table(after)
    table_of = {host.name: host.table or host.name for host in before.hosts}
    workers: list[str] = []
    for number, worker in enumerate(pin.split(",")):
        name, at, host = worker.partition("@")
        # A host may be a label, of which the planner chooses the hosts.
        if host in table_of:
            old_names, new_names = old_hosts[table_of[host]], new_hosts[table_of[host]]
            place = old_names.index(host) + number // round_size * len(old_names)
            host = new_names[place % len(new_names)]
        workers.append(f"{name}{at}{host}")
    return ",".join(workers)


def _host_names_by_table(cluster: Cluster) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for table, hosts in group_by_table(cluster).items():
        names[table] = [host.name for host in hosts]
    return names


def _example_pins(graph: Graph, place: str) -> str:
    """Pins for an error: a generation and a train node, each in a Worker of its own."""
    names = [node.name for node in graph.nodes if node.operator.traits.generates]
    names += [node.name for node in graph.nodes if node.operator.work == "train"]
    return " ".join(f"{name}={name}@{place}" for name in names[:2])
