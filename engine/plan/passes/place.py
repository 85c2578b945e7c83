"""Which Workers each node is on: replicas, ranks, turns, hosts, and who records.

Owns: the Workers, from what was asked for (engine/plan/placing.py) and from what overlaps. Does
not own: searching over layouts, threads (cores.py), modules (modules.py), batching (batching.py).

A Worker carries its instructions out one after another. Hence above max_lag 0 whatever stands below
a generation is not placed in the Worker that generates: its rows would wait there behind the next
generation, and hold up the Step. A source is: next to rewards, prompts would wait behind them, and
generation for the prompts.

    train    train nodes and all below the cut; forward passes below a generation; evaluated models
    rollout  generation, with its source, and forward passes above it
    data     rewards, advantages, selections, and the sources of evaluations; records too
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from dataflow.errors import PlanError, nearest
from dataflow.kernel import Layout
from engine.plan.draft import Draft
from engine.plan.passes.tensor import tensor_problems
from engine.plan.plan import PlannedNode

MAIN, TRAIN, ROLLOUT, DATA = "main", "train", "rollout", "data"


def place(draft: Draft) -> Draft:
    """Workers and layouts of all nodes. Raises PlanError with everything that was asked for and
    cannot be.
    """
    problems = [*_unknown(draft), *_unfit(draft), *_unknown_hosts(draft)]
    if problems:
        raise PlanError("\n".join(f"place: {problem}" for problem in problems))
    nodes = tuple(_split(draft))
    if draft.placing.inproc:
        nodes = tuple(replace(n, workers=(MAIN,), layout=Layout()) for n in nodes)
    turns = () if draft.placing.inproc else draft.placing.turns
    notes = (*draft.notes, *_notes(draft))
    hosts = _hosts(draft, nodes)
    devices = _devices(draft, nodes, hosts, turns)
    return replace(
        draft,
        nodes=nodes,
        turns=turns,
        recorder=_recorder(nodes),
        hosts=hosts,
        devices=devices,
        notes=notes,
    )


def above(nodes: Iterable[PlannedNode]) -> dict[str, frozenset[str]]:
    """For each node, all whose rows it stands on, directly or not."""
    found: dict[str, frozenset[str]] = {}
    for node in nodes:
        direct = {*node.gates, *(f.producer for i in node.inputs for f in i.fetches)}
        found[node.name] = frozenset(chain(direct, *(found[name] for name in direct)))
    return found


# --- workers --------------------------------------------------------------------------------------


def _split(draft: Draft) -> Iterator[PlannedNode]:
    """Each node with its Workers: several are ranks of a train node, replicas of any other."""
    placing = draft.placing
    places = _places(draft)
    for node in draft.nodes:
        workers, train = places[node.name], node.work == "train"
        tensor = placing.tensor.get(node.name, 1)
        layout = Layout(
            replicas=1 if train else len(workers),
            data=len(workers) // tensor if train else 1,
            tensor=tensor,
            shard=train and placing.shard and len(workers) > 1,
        )
        chunks = placing.chunks.get(node.name, layout.replicas)
        yield replace(node, workers=workers, layout=layout, chunks=chunks)


def _places(draft: Draft) -> dict[str, tuple[str, ...]]:
    placing = draft.placing
    base = _bases(draft)
    places = {
        n.name: placing.pin.get(n.name) or _copies(draft, n, base[n.name]) for n in draft.nodes
    }
    nodes = {n.name: n for n in draft.nodes}
    for node in draft.nodes:
        if node.work == "source" and base[node.name] == ROLLOUT and node.name not in placing.pin:
            places[node.name] = _beside_generation(draft, node, places)
    for group in placing.together:
        workers = places[_leader(draft, [nodes[name] for name in group])]
        for name in group:
            places[name] = workers if _divisible(draft, nodes[name]) else workers[:1]
    return places


def _beside_generation(
    draft: Draft, source: PlannedNode, places: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """With one generation it is fed in time; several must not wait for one of them."""
    first = next(n.name for n in draft.nodes if n.source == source.name and n.traits.generates)
    return places[first] if len(places[first]) == 1 else (source.name,)


def _bases(draft: Draft) -> dict[str, str]:
    """The Worker of each node that nothing else was asked for."""
    if draft.placing.workers == "apart":
        return {n.name: n.name for n in draft.nodes}
    if draft.placing.workers == "one" or not any(s.max_lag for s in draft.sources):
        return {n.name: MAIN for n in draft.nodes}
    return _overlapping(draft)


def _overlapping(draft: Draft) -> dict[str, str]:
    """Streams with a lag go on while the Step is trained; those without one take turns with it, in
    its Worker.
    """
    generations = {n.name for n in draft.nodes if n.traits.generates}
    fed = {n.source for n in draft.nodes if n.traits.generates and n.region == "stream"}
    uppers = above(draft.nodes)
    return {n.name: _base(n, bool(uppers[n.name] & generations), fed) for n in draft.nodes}


def _base(node: PlannedNode, below: bool, fed: Collection[str]) -> str:
    """below: whether a generation is above it. fed: sources of streams that generate."""
    if node.lag and node.traits.generates:
        return node.name if below else ROLLOUT
    if node.lag and node.work == "forward":
        return TRAIN if below else ROLLOUT
    if node.lag and node.work == "source" and node.name in fed:
        return ROLLOUT
    return TRAIN if node.region == "step" or node.traits.computes else DATA


def _copies(draft: Draft, node: PlannedNode, base: str) -> tuple[str, ...]:
    """Rank 0 stays where the node would be alone, so that those who share its weights can; replicas
    are among themselves.
    """
    ranks = draft.placing.ranks.get(node.name, 1) * draft.placing.tensor.get(node.name, 1)
    replicas = draft.placing.replicas.get(node.name, 1)
    if ranks > 1:
        return (base, *(f"{base}-{i}" for i in range(1, ranks)))
    return tuple(f"{node.name}-{i}" for i in range(replicas)) if replicas > 1 else (base,)


def _leader(draft: Draft, group: Sequence[PlannedNode]) -> str:
    """Of nodes that are together, whose Workers they all get: a pinned one's, else the train
    node's, else those of the one with most replicas, else the first one's.
    """
    placing = draft.placing

    def rank(node: PlannedNode) -> tuple[bool, bool, int]:
        return node.name in placing.pin, node.work == "train", placing.replicas.get(node.name, 1)

    return max(group, key=rank).name


def _divisible(draft: Draft, node: PlannedNode) -> bool:
    return node.work == "train" or not _kept(draft, node)


def _kept(draft: Draft, node: PlannedNode) -> str:
    """Why a node can be on one Worker only; empty where it can have replicas."""
    followers = {s.name for s in draft.graph.states if getattr(s, "follows", None) is not None}
    if node.work == "source":
        return "a source, which has a place in its data"
    if node.work == "train":
        return "a train node"
    if node.scope == "batch":
        return "of batch scope: it sees all rows of the Step at once"
    follower = next((u.model for u in node.models if u.model in followers), "")
    return f"a reader of {follower!r}, which moves by its own steps" if follower else ""


def _recorder(nodes: Sequence[PlannedNode]) -> str:
    """A Worker that neither generates nor trains, so that writing delays nobody and its death loses
    no state: the source's where it is one. Else the first train node's.
    """
    trains = [n for n in nodes if n.work == "train"]
    free = sorted(_beside_models(nodes), key=lambda n: n.work != "source")
    return next(iter([*free, *trains, nodes[0]])).workers[0]


def _beside_models(nodes: Sequence[PlannedNode]) -> list[PlannedNode]:
    """Nodes of columns, in Workers that neither generate nor train."""
    busy = {w for n in nodes if n.traits.generates or n.work == "train" for w in n.workers}
    columns = (n for n in nodes if n.region != "evaluation" and not n.traits.computes)
    return [n for n in columns if n.workers[0] not in busy]


def _hosts(draft: Draft, nodes: Sequence[PlannedNode]) -> dict[str, str]:
    """The host of each Worker: the first one's, unless another was asked for; none where all are on
    that.
    """
    if draft.placing.inproc or not draft.placing.hosts:
        return {}
    first = draft.cluster.hosts[0].name
    found = {w: draft.placing.hosts.get(w, first) for n in nodes for w in n.workers}
    return found if set(found.values()) != {first} else {}


def _devices(
    draft: Draft,
    nodes: Sequence[PlannedNode],
    hosts: Mapping[str, str],
    turns: Sequence[Sequence[str]],
) -> dict[str, int]:
    """The GPU of each Worker that computes with a Model: one of its own as far as its host's reach,
    and then again from the first. Workers that take turns have the same one.
    """
    mates = {worker: group for group in turns for worker in group}
    found: dict[str, int] = {}
    used: Counter[str] = Counter()
    for worker in dict.fromkeys(w for n in nodes if n.traits.computes for w in n.workers):
        host = hosts.get(worker, "")
        count = len(draft.cluster.on(host).gpus)
        shared = next((found[w] for w in mates.get(worker, ()) if w in found), None)
        if shared is not None:
            found[worker] = shared
        elif count:
            found[worker] = used[host] % count
            used[host] += 1
    return found


# --- what was asked for ---------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_Problems = Callable[[Draft, PlannedNode, Any], Iterator[str]]
"""Why a node cannot have what was asked for."""


def _unknown(draft: Draft) -> Iterator[str]:
    """Names of nodes that the plan does not have, and of Workers that no file can have."""
    placing = draft.placing
    asked: dict[str, Iterable[str]] = {
        "pin": placing.pin,
        "together": chain(*placing.together),
        "replicas": placing.replicas,
        "chunks": placing.chunks,
        "ranks": placing.ranks,
        "tensor": placing.tensor,
    }
    known = [n.name for n in draft.nodes]
    for option, names in asked.items():
        for name in names:
            if name not in known:
                fix = nearest(name, known) or f"one of {', '.join(known)}"
                yield f"{option}: expected a node of the plan, found {name!r}. Fix: {fix}."
    for node, workers in placing.pin.items():
        for worker in workers:
            if not _NAME.fullmatch(worker):
                yield (
                    f"pin: {node!r} on {worker!r}, which is no name of a Worker. Fix: letters,"
                    " digits, '-', '_', '.'."
                )
        if len(set(workers)) < len(workers):
            yield (
                f"pin: {node!r} on {','.join(workers)}, one of them twice. Fix: a Worker for each"
                " replica."
            )


def _unknown_hosts(draft: Draft) -> Iterator[str]:
    """Hosts that the cluster file does not have."""
    known = [h.name for h in draft.cluster.hosts]
    for worker, host in draft.placing.hosts.items():
        if not known:
            yield (
                f"pin: {worker!r} on host {host!r}, and no hosts are known. Fix: --cluster with a"
                " file of hosts."
            )
        elif host not in known:
            fix = nearest(host, known) or f"one of {', '.join(known)}"
            yield f"pin: {worker!r} expected a host of the cluster, found {host!r}. Fix: {fix}."


def _unfit(draft: Draft) -> Iterator[str]:
    """What these nodes cannot have."""
    nodes = {n.name: n for n in draft.nodes}
    placing = draft.placing
    asked: list[tuple[Mapping[str, Any], _Problems]] = [
        (placing.replicas, _replicas),
        (placing.ranks, _ranks),
        (placing.tensor, tensor_problems),
        (placing.chunks, _chunks),
        (placing.pin, _pins),
    ]
    for values, problems in asked:
        for name, value in values.items():
            if name in nodes:
                yield from problems(draft, nodes[name], value)
    yield from _groups(placing.together, placing.pin, nodes)


def _replicas(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    why = _kept(draft, node)
    if count < 1:
        yield f"replicas: {node.name}={count}. Fix: {node.name}=1."
    elif count > 1 and why:
        fix = f"ranks: {node.name}={count}" if node.work == "train" else f"{node.name}=1"
        yield f"replicas: {node.name}={count}, but it is {why}. Fix: {fix}."


def _ranks(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    if node.work != "train":
        if count != 1:
            yield (
                f"ranks: {node.name}={count}, but only train nodes have ranks. Fix: replicas:"
                f" {node.name}={count}."
            )
        return
    batch = next((s.batch for s in draft.sources if s.name == node.source), 0)
    parts = draft.graph.node(node.name).params["minibatches"]
    most = max(1, batch // parts)
    if not 1 <= count <= most:
        problem = (
            f"ranks: {node.name}={count}, and a minibatch has {most} prompts ({batch} in {parts})"
        )
        yield f"{problem}. Fix: {node.name}={min(max(count, 1), most)}."


def _chunks(_: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    fixed = (
        "a source" if node.work == "source" else "of batch scope" if node.scope == "batch" else ""
    )
    if count < 1 or (count > 1 and fixed):
        yield (
            f"chunks: {node.name}={count}{f', but it is {fixed}' if fixed else ''}. Fix:"
            f" {node.name}=1."
        )


def _pins(draft: Draft, node: PlannedNode, workers: tuple[str, ...]) -> Iterator[str]:
    if len(workers) == 1 and not workers[0]:
        return  # told already as no name
    if node.work == "train":
        tensor = max(1, draft.placing.tensor.get(node.name, 1))
        shares = -(-len(workers) // tensor)
        asked = draft.placing.ranks.get(node.name, shares) * tensor
        yield from _ranks(draft, node, shares) if node.name not in draft.placing.ranks else ()
        what = "ranks"
    else:
        asked = draft.placing.replicas.get(node.name, len(workers))
        yield from (
            _replicas(draft, node, len(workers)) if node.name not in draft.placing.replicas else ()
        )
        what = "replicas"
    if asked != len(workers):
        names = [*workers, *(f"{workers[0]}-{i}" for i in range(1, asked))][:asked]
        problem = f"pin: {node.name} on {','.join(workers)} has {asked} {what}"
        yield f"{problem}. Fix: {node.name}={','.join(names)}."


def _groups(
    together: Iterable[tuple[str, ...]],
    pin: Mapping[str, tuple[str, ...]],
    nodes: Mapping[str, PlannedNode],
) -> Iterator[str]:
    """Nodes are together once, and not pinned apart."""
    seen: set[str] = set()
    for group in together:
        twice = sorted(seen & set(group))
        if twice:
            yield f"together: {twice[0]} is in two groups. Fix: one group of all that are together."
        seen |= set(group)
        pinned = {name: pin[name] for name in group if name in pin}
        places = list(dict.fromkeys(pinned.values()))
        if len(places) > 1:
            first, other = next(iter(pinned)), next(n for n, w in pinned.items() if w != places[0])
            problem = (
                f"together: {','.join(group)}, but {first} is pinned to {','.join(places[0])} and"
                f" {other} to"
            )
            yield f"{problem} {','.join(places[1])}. Fix: one pin, {first}={','.join(places[0])}."


# --- why ------------------------------------------------------------------------------------------


def _notes(draft: Draft) -> Iterator[str]:
    placing = draft.placing
    if placing.inproc:
        yield (
            "every node is in this process, for breakpoints (inproc); chunks are as they would be"
            " otherwise"
        )
    elif placing.workers == "auto" and any(s.max_lag for s in draft.sources):
        yield (
            "generation, columns and training have a Worker each, so that they overlap: max_lag"
            " allows it"
        )
