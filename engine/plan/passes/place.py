"""Which Workers each node is on: replicas, ranks, turns, hosts, and who records.

Owns: the Workers, from what was asked for (engine/plan/placement.py) and what overlaps; how many
chunks they share. Does not own: why a wish is refused (placement_problems.py), threads (cores.py),
modules (modules.py), how large a cohort is (batching.py). It searches nothing.

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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dataflow.errors import PlanError
from dataflow.kernel import Layout
from engine.plan.draft import Draft
from engine.plan.kernel_needs import group_engine_nodes
from engine.plan.passes.context_ranks import count_alike_ranks, count_context_ranks
from engine.plan.passes.devices import assign_devices
from engine.plan.passes.placement_problems import find_placement_problems, why_one_replica
from engine.plan.passes.spare import (
    add_spare_hosts,
    describe_spare,
    find_sharing_problems,
    find_spare_workers,
)
from engine.plan.passes.spread import describe_spread, spread_workers
from engine.plan.passes.tensor import (
    count_worker_ranks,
    describe_rank_steps,
    find_lagged_rank_problems,
)
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import list_fetches

MAIN, TRAIN, ROLLOUT, DATA = "main", "train", "rollout", "data"
Workers = tuple[str, ...]


def place_nodes(draft: Draft) -> Draft:
    """Decide the Workers and layouts of all nodes. Raises PlanError with every wish that cannot be
    met.
    """
    _require_none(find_placement_problems(draft))
    nodes = tuple(_place_each(draft))
    turns = draft.placing.turns
    _require_none(find_sharing_problems(draft, nodes, turns))
    _require_none(find_lagged_rank_problems(nodes, turns))
    if draft.placing.inproc:
        # Only now: chunks are as they would be without it.
        nodes = tuple(_put_here(node) for node in nodes)
        turns = ()
    placed_draft = replace(
        draft,
        nodes=nodes,
        turns=turns,
        recorder=_choose_recorder(nodes),
        spare=find_spare_workers(draft, nodes),
    )
    hosts = _choose_hosts(placed_draft)
    spare_hosts, cluster = add_spare_hosts(draft, nodes, hosts)
    notes = (
        *draft.notes,
        *_describe_workers(draft),
        *describe_spread(hosts, draft.placing.hosts),
        *describe_spare(draft, nodes),
    )
    placed_draft = replace(placed_draft, hosts=hosts | spare_hosts, cluster=cluster, notes=notes)
    placed_draft = replace(placed_draft, devices=assign_devices(placed_draft))
    return replace(placed_draft, notes=(*placed_draft.notes, *describe_rank_steps(placed_draft)))


def _require_none(problems: Iterable[str]) -> None:
    lines = [f"place: {problem}" for problem in problems]
    if lines:
        raise PlanError("\n".join(lines))


def find_ancestors(nodes: Iterable[PlannedNode]) -> dict[str, frozenset[str]]:
    """For each node, all nodes that its rows depend on, directly or not."""
    ancestors: dict[str, frozenset[str]] = {}
    for node in nodes:
        parents = set(node.gates)
        parents.update(fetch.producer for fetch in list_fetches(node.inputs))
        above_parents = (ancestors[name] for name in parents)
        ancestors[node.name] = frozenset(parents).union(*above_parents)
    return ancestors


def _place_each(draft: Draft) -> Iterator[PlannedNode]:
    """Each node with its Workers: several are ranks of a train node, replicas of any other, of
    which each may be several as well.
    """
    places = _choose_workers(draft)
    engine_groups: dict[str, tuple[str, ...]] = {}
    for group in group_engine_nodes(draft):
        engine_groups |= dict.fromkeys(group, group)
    for node in draft.nodes:
        workers = places[node.name]
        inner = _count_engine_ranks(draft, node, engine_groups.get(node.name, ()), places)
        tokens = draft.placing.microbatch.get(node.name, Layout().tokens)
        slots = draft.placing.slots.get(node.name, Layout().slots)
        split = _split(draft, node, len(workers))
        layout = replace(split, inner=inner, tokens=tokens, slots=slots)
        chunks = draft.placing.chunks.get(node.name, layout.replicas)
        yield replace(node, workers=workers, layout=layout, chunks=chunks)


def _put_here(node: PlannedNode) -> PlannedNode:
    """The node in this process, with what its layout says besides places."""
    planned = node.layout
    layout = Layout(
        recompute=planned.recompute,
        offload=planned.offload,
        tokens=planned.tokens,
        slots=planned.slots,
    )
    return replace(node, workers=(MAIN,), layout=layout)


def _split(draft: Draft, node: PlannedNode, worker_count: int) -> Layout:
    """How a node is divided among its Workers."""
    tensor, context = count_worker_ranks(draft, node), count_context_ranks(draft, node)
    offload = draft.placing.offload.get(node.name, "none")
    shares = worker_count // (tensor * context)
    if node.work != "train":
        return Layout(replicas=shares, tensor=tensor, context=context, offload=offload)
    # Ranks with the same rows have different weights already.
    is_sharded = draft.placing.shard or node.name in draft.placing.sharded
    shard = is_sharded and worker_count > tensor
    return Layout(
        data=shares,
        tensor=tensor,
        context=context,
        shard=shard,
        recompute=draft.placing.recompute.get(node.name, "none"),
        offload=offload,
    )


def _count_engine_ranks(
    draft: Draft, node: PlannedNode, group: Sequence[str], places: Mapping[str, Workers]
) -> int:
    """The tensor ranks of the engine that a node shares with some of `group`; 1 without one."""
    counts: list[int] = []
    for name in group:
        if not set(places[name]).isdisjoint(places[node.name]):
            counts.append(draft.placing.tensor.get(name, 1))
    return max(counts, default=1)


def _choose_workers(draft: Draft) -> dict[str, Workers]:
    """The Workers of each node: pinned ones, then those of nodes that have to share some."""
    pin = draft.placing.pin
    bases = _choose_bases(draft)
    places: dict[str, Workers] = {}
    for node in draft.nodes:
        copies = _name_copies(draft, node, bases)
        places[node.name] = pin.get(node.name) or copies
    if draft.placing.workers != "apart":
        _share_engines(draft, places)
    # After engines: a source is beside the generation that it feeds, wherever that is now.
    for node in draft.nodes:
        if node.work == "source" and node.name not in pin and bases[node.name] == ROLLOUT:
            places[node.name] = _place_beside_generation(draft, node, places)
    # Last: what the user wants together counts above all.
    for group in draft.placing.together:
        places |= _share_workers(draft, group, places[_find_leader(draft, group)])
    return places


def _share_engines(draft: Draft, places: dict[str, Workers]) -> None:
    """Put nodes that may share an engine on one node's Workers, but for what was asked for."""
    requested = {*draft.placing.pin, *draft.placing.replicas}
    for group in group_engine_nodes(draft):
        shared = _share_workers(draft, group, places[_find_leader(draft, group)])
        for name, workers in shared.items():
            if name not in requested:
                places[name] = workers


def _place_beside_generation(
    draft: Draft, source: PlannedNode, places: Mapping[str, Workers]
) -> Workers:
    """Put a source beside the generation that it feeds, if that has one Worker: there prompts come
    in time. Else it gets a Worker of its own: several replicas must not wait for one of them.
    """
    generations = (n for n in draft.nodes if n.source == source.name and n.traits.generates)
    workers = places[next(generations).name]
    return workers if len(workers) == 1 else (source.name,)


def _choose_bases(draft: Draft) -> dict[str, str]:
    """The default Worker of each node."""
    if draft.placing.workers == "apart":
        return {node.name: node.name for node in draft.nodes}
    bases = _bases_without_engines(draft)
    engine_workers = _name_engine_workers(draft)
    names_in_use = set(engine_workers.values())
    for node in draft.nodes:
        # Nothing else computes beside an engine.
        if node.traits.computes and bases[node.name] in names_in_use:
            bases[node.name] = node.name
    return bases | engine_workers


def _name_engine_workers(draft: Draft) -> dict[str, str]:
    """The Worker of each node whose kernel has one to itself; no other node has its name."""
    engine_workers: dict[str, str] = {}
    for group in group_engine_nodes(draft):
        names_in_use = {node.name for node in draft.nodes if node.name not in group}
        names_in_use.update(engine_workers.values(), (MAIN, TRAIN, DATA))
        candidates = (ROLLOUT, *group, f"{group[0]}-0")
        name = next(name for name in candidates if name not in names_in_use)
        engine_workers |= dict.fromkeys(group, name)
    return engine_workers


def _bases_without_engines(draft: Draft) -> dict[str, str]:
    """Workers of their own for streams with a lag; streams without one share training's."""
    if draft.placing.workers == "one" or not any(s.max_lag for s in draft.sources):
        return {node.name: MAIN for node in draft.nodes}
    generations = {n.name for n in draft.nodes if n.traits.generates}
    fed_sources = {n.source for n in draft.nodes if n.traits.generates and n.region == "stream"}
    ancestors = find_ancestors(draft.nodes)
    bases: dict[str, str] = {}
    for node in draft.nodes:
        is_below = not generations.isdisjoint(ancestors[node.name])
        bases[node.name] = _choose_base(node, is_below, fed_sources)
    return bases


def _choose_base(node: PlannedNode, is_below: bool, fed_sources: Collection[str]) -> str:
    """The default Worker of a node where streams overlap training. is_below: of a generation;
    fed_sources: those of generations above the cut.
    """
    if node.lag:
        if node.traits.generates:
            return node.name if is_below else ROLLOUT
        if node.work == "forward":
            return TRAIN if is_below else ROLLOUT
        if node.work == "source" and node.name in fed_sources:
            return ROLLOUT
    if node.region == "step" or node.traits.computes:
        return TRAIN
    return DATA


def _name_copies(draft: Draft, node: PlannedNode, bases: Mapping[str, str]) -> Workers:
    """The Workers of ranks or replicas; rank 0 stays in the base, near readers of its weights."""
    base = bases[node.name]
    alike = count_alike_ranks(draft, node)
    ranks = draft.placing.ranks.get(node.name, 1) * alike
    replicas = draft.placing.replicas.get(node.name, 1)
    if replicas > 1 or _is_split_otherwise(draft, node, bases):
        return tuple(f"{node.name}-{i}" for i in range(replicas * alike))
    if ranks > 1:
        return (base, *(f"{base}-{i}" for i in range(1, ranks)))
    return (base,)


def _is_split_otherwise(draft: Draft, node: PlannedNode, bases: Mapping[str, str]) -> bool:
    """Whether a node's ranks with the same rows cannot be in its base, as those that train there
    have other shares.
    """
    ways = (count_worker_ranks(draft, node), count_context_ranks(draft, node))
    if node.work == "train" or ways == (1, 1):
        return False
    for other in draft.nodes:
        if other.work == "train" and bases[other.name] == bases[node.name]:
            other_ways = (count_worker_ranks(draft, other), count_context_ranks(draft, other))
            ranks = draft.placing.ranks.get(other.name, 1) * count_alike_ranks(draft, other)
            if ranks > 1 and other_ways != ways:
                return True
    return False


def _find_leader(draft: Draft, group: Sequence[str]) -> str:
    """The node whose Workers the group gets: pinned, else train, else with most replicas."""
    pin, replicas = draft.placing.pin, draft.placing.replicas
    trains = {node.name for node in draft.nodes if node.work == "train"}

    def rank(name: str) -> tuple[bool, bool, int]:
        return name in pin, name in trains, replicas.get(name, 1)

    return max(group, key=rank)


def _share_workers(draft: Draft, group: Sequence[str], workers: Workers) -> dict[str, Workers]:
    """The Workers of nodes that are together; only the first for a node that cannot have more."""
    places: dict[str, Workers] = {}
    for node in draft.nodes:
        if node.name in group:
            is_single = node.work != "train" and bool(why_one_replica(draft, node))
            places[node.name] = workers[:1] if is_single else workers
    return places


def _choose_recorder(nodes: Sequence[PlannedNode]) -> str:
    """A Worker that neither generates nor trains, best a source's; else the first trainer's."""
    trains = [n for n in nodes if n.traits.steps]
    # There writing delays nobody, and the Worker's death loses no state.
    free = sorted(_find_free_nodes(nodes), key=lambda n: n.work != "source")
    return next(iter([*free, *trains, nodes[0]])).workers[0]


def _find_free_nodes(nodes: Sequence[PlannedNode]) -> list[PlannedNode]:
    """Nodes of columns in Workers that neither generate nor train."""
    busy_workers: set[str] = set()
    for node in nodes:
        if node.traits.generates or node.traits.steps:
            busy_workers.update(node.workers)
    columns = (n for n in nodes if n.region != "evaluation" and not n.traits.computes)
    return [node for node in columns if node.workers[0] not in busy_workers]


def _choose_hosts(draft: Draft) -> dict[str, str]:
    """The host of each Worker (engine/plan/passes/spread.py); empty if all are on the first."""
    cluster = draft.cluster
    if draft.placing.inproc or not cluster.hosts:
        return {}
    host_of = spread_workers(draft)
    usable = [host for host in cluster.hosts if not host.refused] or cluster.hosts
    is_on_first = set(host_of.values()) == {usable[0].name}
    # A run in a Ray cluster has hosts, even if there is only one.
    return {} if is_on_first and not cluster.live else host_of


def _describe_workers(draft: Draft) -> Iterator[str]:
    placing = draft.placing
    if placing.inproc:
        why = "chunks are as they would be otherwise"
        yield f"every node is in this process, for breakpoints (inproc); {why}"
    elif placing.workers == "auto" and any(s.max_lag for s in draft.sources):
        why = "so that they overlap: max_lag allows it"
        yield f"generation, columns and training have a Worker each, {why}"
