"""Which Workers each node is on: replicas, ranks, turns, hosts, and who records.

Owns: the Workers, from what was asked for (engine/plan/placement.py) and what overlaps. Does not
own: threads (cores.py), modules (modules.py), batching (batching.py). It searches nothing.

A Worker does one thing after another. So with a lag no node below a generation is in the Worker
that generates: its rows would wait there behind the next generation, and hold up the Step. A source
is: beside rewards, prompts would wait behind these, and generation for the prompts.

    train    train nodes and all below the cut; forward passes below a generation; evaluated models
    rollout  generation, with its source, and forward passes above it
    data     rewards, advantages, selections, and the sources of evaluations; records too

Some kernels have their Worker to themselves (engine/plan/kernel_needs.py): the nodes of one Model
share one, `rollout`, at lag 0 too; what else would compute there moves to a Worker of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from dataflow.errors import PlanError, nearest_or_all
from dataflow.kernel import Layout
from dataflow.model import Model
from engine.plan.draft import Draft
from engine.plan.kernel_needs import alike
from engine.plan.passes.devices import devices
from engine.plan.passes.spare import (
    range_problems,
    sharing_problems,
    spare_notes,
    spare_places,
    spare_workers,
)
from engine.plan.passes.spread import spread, spread_note
from engine.plan.passes.tensor import tensor_problems
from engine.plan.placement import Placing
from engine.plan.plan import PlannedNode

MAIN, TRAIN, ROLLOUT, DATA = "main", "train", "rollout", "data"
Workers = tuple[str, ...]


def place(draft: Draft) -> Draft:
    """Workers and layouts of all nodes. Raises PlanError with every wish that cannot be met."""
    _refuse([*_unknown(draft), *_unfit(draft), *_unknown_hosts(draft)])
    nodes, turns = tuple(_split(draft)), draft.placing.turns
    _refuse([*sharing_problems(draft, nodes, turns)])
    if draft.placing.inproc:
        nodes, turns = tuple(replace(n, workers=(MAIN,), layout=Layout()) for n in nodes), ()
    spare, recorder = spare_workers(draft, nodes), _recorder(nodes)
    placed = replace(draft, nodes=nodes, turns=turns, recorder=recorder, spare=spare)
    hosts = _hosts(placed)
    own, cluster = spare_places(draft, nodes, hosts)
    notes = (*_notes(draft), *spread_note(hosts, draft.placing.hosts), *spare_notes(draft, nodes))
    placed = replace(placed, hosts=hosts | own, cluster=cluster, notes=(*draft.notes, *notes))
    return replace(placed, devices=devices(placed))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise PlanError("\n".join(f"place: {problem}" for problem in problems))


def above(nodes: Iterable[PlannedNode]) -> dict[str, frozenset[str]]:
    """For each node, all nodes that its rows depend on, directly or not."""
    found: dict[str, frozenset[str]] = {}
    for node in nodes:
        direct = {*node.gates, *(f.producer for i in node.inputs for f in i.fetches)}
        found[node.name] = frozenset(chain(direct, *(found[name] for name in direct)))
    return found


def _split(draft: Draft) -> Iterator[PlannedNode]:
    """Each node with its Workers: several are ranks of a train node, replicas of any other."""
    placing = draft.placing
    places = _places(draft)
    shared = {name: names for names in alike(draft) for name in names}
    for node in draft.nodes:
        workers, train = places[node.name], node.work == "train"
        tensor = placing.tensor.get(node.name, 1) if train else 1
        layout = Layout(
            replicas=1 if train else len(workers),
            data=len(workers) // tensor if train else 1,
            tensor=tensor,
            inner=_inner(draft, node, shared.get(node.name, ()), places),
            shard=train and placing.shard and len(workers) > 1,
        )
        chunks = placing.chunks.get(node.name, layout.replicas)
        yield replace(node, workers=workers, layout=layout, chunks=chunks)


def _inner(
    draft: Draft, node: PlannedNode, mine: Sequence[str], places: Mapping[str, Workers]
) -> int:
    """The tensor ranks of the engine that a node shares with some of `mine`; 1 without one."""
    beside = (name for name in mine if set(places[name]) & set(places[node.name]))
    return max((draft.placing.tensor.get(name, 1) for name in beside), default=1)


def _places(draft: Draft) -> dict[str, Workers]:
    pin, base = draft.placing.pin, _bases(draft)
    places = {n.name: pin.get(n.name) or _copies(draft, n, base[n.name]) for n in draft.nodes}
    for group in alike(draft) if draft.placing.workers != "apart" else ():
        shared = _shared(draft, group, places[_leader(draft, group)])
        asked = {*pin, *draft.placing.replicas}
        places |= {name: workers for name, workers in shared.items() if name not in asked}
    for node in (n for n in draft.nodes if n.work == "source" and n.name not in pin):
        if base[node.name] == ROLLOUT:
            places[node.name] = _beside_generation(draft, node, places)
    for group in draft.placing.together:
        places |= _shared(draft, group, places[_leader(draft, group)])
    return places


def _beside_generation(draft: Draft, source: PlannedNode, places: Mapping[str, Workers]) -> Workers:
    """Near the only generation it is fed in time; several must not wait for one of them."""
    first = next(n.name for n in draft.nodes if n.source == source.name and n.traits.generates)
    return places[first] if len(places[first]) == 1 else (source.name,)


def _bases(draft: Draft) -> dict[str, str]:
    """The default Worker of each node."""
    if draft.placing.workers == "apart":
        return {n.name: n.name for n in draft.nodes}
    bases, own = _without_engines(draft), _own_workers(draft)
    moved = (n for n in draft.nodes if n.traits.computes and bases[n.name] in own.values())
    return bases | {n.name: n.name for n in moved} | own


def _own_workers(draft: Draft) -> dict[str, str]:
    """The Worker of each node whose kernel has one to itself; no other node has its name."""
    found: dict[str, str] = {}
    for group in alike(draft):
        others = {n.name for n in draft.nodes if n.name not in group} | set(found.values())
        taken = {*others, MAIN, TRAIN, DATA}
        names = [name for name in (ROLLOUT, *group, f"{group[0]}-0") if name not in taken]
        found |= dict.fromkeys(group, names[0])
    return found


def _without_engines(draft: Draft) -> dict[str, str]:
    if draft.placing.workers == "one" or not any(s.max_lag for s in draft.sources):
        return {n.name: MAIN for n in draft.nodes}
    return _overlapping(draft)


def _overlapping(draft: Draft) -> dict[str, str]:
    """Workers of their own for streams with a lag; streams without one share training's."""
    generations = {n.name for n in draft.nodes if n.traits.generates}
    fed = {n.source for n in draft.nodes if n.traits.generates and n.region == "stream"}
    uppers = above(draft.nodes)
    return {n.name: _base(n, bool(uppers[n.name] & generations), fed) for n in draft.nodes}


def _base(node: PlannedNode, below: bool, fed: Collection[str]) -> str:
    """The default Worker of a node where streams overlap training. below: of a generation."""
    if node.lag:
        if node.traits.generates:
            return node.name if below else ROLLOUT
        if node.work == "forward":
            return TRAIN if below else ROLLOUT
        if node.work == "source" and node.name in fed:
            return ROLLOUT
    return TRAIN if node.region == "step" or node.traits.computes else DATA


def _copies(draft: Draft, node: PlannedNode, base: str) -> Workers:
    """The Workers of ranks or replicas; rank 0 stays in the base, near readers of its weights."""
    ranks = draft.placing.ranks.get(node.name, 1)
    if node.work == "train":
        ranks *= draft.placing.tensor.get(node.name, 1)
    replicas = draft.placing.replicas.get(node.name, 1)
    if ranks > 1:
        return (base, *(f"{base}-{i}" for i in range(1, ranks)))
    return tuple(f"{node.name}-{i}" for i in range(replicas)) if replicas > 1 else (base,)


def _leader(draft: Draft, group: Sequence[str]) -> str:
    """The node whose Workers the group gets: pinned, else train, else with most replicas."""
    placing, trains = draft.placing, {n.name for n in draft.nodes if n.work == "train"}
    return max(group, key=lambda n: (n in placing.pin, n in trains, placing.replicas.get(n, 1)))


def _shared(draft: Draft, group: Sequence[str], workers: Workers) -> dict[str, Workers]:
    """The Workers of nodes that are together; only the first for a node that cannot have more."""
    nodes = [n for n in draft.nodes if n.name in group]
    one = {n.name for n in nodes if n.work != "train" and _kept(draft, n)}
    return {n.name: workers[:1] if n.name in one else workers for n in nodes}


def _kept(draft: Draft, node: PlannedNode) -> str:
    """Why a node cannot have replicas; empty if it can."""
    models = (s for s in draft.graph.states if isinstance(s, Model))
    followers = {m.name for m in models if m.follows is not None and m.copies is None}
    if node.work == "source":
        return "a source, which has a place in its data"
    if node.work == "train":
        return "a train node"
    if node.scope == "batch":
        return "of batch scope: it sees all rows of the Step at once"
    follower = next((u.model for u in node.models if u.model in followers), "")
    return f"a reader of {follower!r}, which moves by its own steps" if follower else ""


def _recorder(nodes: Sequence[PlannedNode]) -> str:
    """A Worker that neither generates nor trains, best a source's; else the first trainer's."""
    trains = [n for n in nodes if n.work == "train"]
    # There writing delays nobody, and the Worker's death loses no state.
    free = sorted(_beside_models(nodes), key=lambda n: n.work != "source")
    return next(iter([*free, *trains, nodes[0]])).workers[0]


def _beside_models(nodes: Sequence[PlannedNode]) -> list[PlannedNode]:
    """Nodes of columns in Workers that neither generate nor train."""
    busy = {w for n in nodes if n.traits.generates or n.work == "train" for w in n.workers}
    columns = (n for n in nodes if n.region != "evaluation" and not n.traits.computes)
    return [n for n in columns if n.workers[0] not in busy]


def _hosts(draft: Draft) -> dict[str, str]:
    """The host of each Worker (engine/plan/passes/spread.py); empty if all are on the first."""
    cluster = draft.cluster
    if draft.placing.inproc or not cluster.hosts:
        return {}
    host_of = spread(draft)
    first = next((h.name for h in cluster.hosts if not h.refused), cluster.hosts[0].name)
    return host_of if cluster.live or set(host_of.values()) != {first} else {}


# --- what was asked for ---------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_Problems = Callable[[Draft, PlannedNode, Any], Iterator[str]]
"""Why a node cannot have what was asked for."""


def _unknown(draft: Draft) -> Iterator[str]:
    """Names of nodes that the plan lacks, and Workers' names that are no file names."""
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
                fix = nearest_or_all(name, known)
                yield f"{option}: expected a node of the plan, found {name!r}. Fix: {fix}."
    for node, workers in placing.pin.items():
        for worker in workers:
            if not _NAME.fullmatch(worker):
                problem = f"pin: {node!r} on {worker!r}, which cannot name a Worker"
                yield f"{problem}. Fix: letters, digits, '-', '_', '.'."
        if len(set(workers)) < len(workers):
            problem = f"pin: {node!r} on {','.join(workers)}, one of them twice"
            yield f"{problem}. Fix: a Worker for each replica."


def _unknown_hosts(draft: Draft) -> Iterator[str]:
    """Hosts that the cluster does not have, or that cannot run anything."""
    known = {h.name: h for h in draft.cluster.hosts}
    for worker, host in draft.placing.hosts.items():
        if not known:
            problem = f"pin: {worker!r} on host {host!r}, and no hosts are known"
            yield f"{problem}. Fix: --cluster ray."
        elif host not in known:
            labels = (f"{k}:{v}" for h in known.values() for k, v in h.labels.items())
            fix = nearest_or_all(host, list(dict.fromkeys([*known, *labels])))
            yield f"pin: {worker!r} expected a host of the cluster, found {host!r}. Fix: {fix}."
        elif known[host].refused:
            yield f"pin: {worker!r} on host {host}: {known[host].refused}"


def _unfit(draft: Draft) -> Iterator[str]:
    """Wishes that these nodes cannot have."""
    nodes = {n.name: n for n in draft.nodes}
    placing = draft.placing
    asked: list[tuple[Mapping[str, Any], _Problems]] = [
        (placing.replicas, _replicas),
        (placing.least, range_problems),
        (placing.ranks, _ranks),
        (placing.tensor, tensor_problems),
        (placing.chunks, _chunks),
        (placing.pin, _pins),
    ]
    for values, problems in asked:
        for name, value in values.items():
            if name in nodes:
                yield from problems(draft, nodes[name], value)
    yield from _groups(placing)


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
            problem = f"ranks: {node.name}={count}, but only train nodes have ranks"
            yield f"{problem}. Fix: replicas: {node.name}={count}."
        return
    sources = set(draft.sources_of(node).values())
    batch = min((s.batch for s in draft.sources if s.name in sources), default=0)
    parts = draft.graph.node(node.name).params["minibatches"]
    most = max(1, batch // parts)
    if not 1 <= count <= most:
        problem = f"a minibatch has {most} prompts ({batch} in {parts})"
        fix = f"{node.name}={min(max(count, 1), most)}"
        yield f"ranks: {node.name}={count}, and {problem}. Fix: {fix}."


def _chunks(_: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    fixed = ", but it is of batch scope" if node.scope == "batch" else ""
    fixed = ", but it is a source" if node.work == "source" else fixed
    if count < 1 or (count > 1 and fixed):
        yield f"chunks: {node.name}={count}{fixed}. Fix: {node.name}=1."


def _pins(draft: Draft, node: PlannedNode, workers: Workers) -> Iterator[str]:
    if len(workers) == 1 and not workers[0]:
        return  # already refused as a name
    placing = draft.placing
    if node.work == "train":
        tensor = max(1, placing.tensor.get(node.name, 1))
        shares = -(-len(workers) // tensor)
        what, asked = "ranks", placing.ranks.get(node.name, shares) * tensor
        yield from _ranks(draft, node, shares) if node.name not in placing.ranks else ()
    else:
        count = len(workers)
        what, asked = "replicas", placing.replicas.get(node.name, count)
        yield from _replicas(draft, node, count) if node.name not in placing.replicas else ()
    if asked != len(workers):
        names = [*workers, *(f"{workers[0]}-{i}" for i in range(1, asked))][:asked]
        problem = f"pin: {node.name} on {','.join(workers)} has {asked} {what}"
        yield f"{problem}. Fix: {node.name}={','.join(names)}."


def _groups(placing: Placing) -> Iterator[str]:
    """Nodes are together once, and not pinned apart."""
    seen: set[str] = set()
    for group in placing.together:
        twice = sorted(seen & set(group))
        if twice:
            yield f"together: {twice[0]} is in two groups. Fix: one group of all that are together."
        seen |= set(group)
        pinned = {name: placing.pin[name] for name in group if name in placing.pin}
        places = list(dict.fromkeys(pinned.values()))
        if len(places) > 1:
            first, other = next(iter(pinned)), next(n for n, w in pinned.items() if w != places[0])
            here, there = ",".join(places[0]), ",".join(places[1])
            problem = f"{first} is pinned to {here} and {other} to {there}"
            yield f"together: {','.join(group)}, but {problem}. Fix: one pin, {first}={here}."


def _notes(draft: Draft) -> Iterator[str]:
    placing = draft.placing
    if placing.inproc:
        same = "chunks are as they would be otherwise"
        yield f"every node is in this process, for breakpoints (inproc); {same}"
    elif placing.workers == "auto" and any(s.max_lag for s in draft.sources):
        why = "so that they overlap: max_lag allows it"
        yield f"generation, columns and training have a Worker each, {why}"
