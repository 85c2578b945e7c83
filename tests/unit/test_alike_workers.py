"""What is worked out for one of alike Workers, places and hosts is as if for each of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.kernel import Layout
from engine.plan.alike_workers import name_alike, unite_places
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Host, with_first
from engine.plan.context_limits import _take_neighbours
from engine.plan.draft import Draft
from engine.plan.estimates import Estimate
from engine.plan.passes.cores import _can_overlap, _Kernels
from engine.plan.passes.place import find_ancestors
from engine.plan.plan import PlannedNode
from engine.plan.worker_index import workers_by_host
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned_node
from tests.kit.turns import example_count

GIB = 2**30
SEEDS = st.integers(0, 1_000_000)


def draw_draft(draw: Random) -> Draft:
    """Nodes on some of ten Workers, which are on three hosts of two GPUs; some take turns."""
    workers = [f"w{number}" for number in range(10)]
    nodes: list[PlannedNode] = []
    for number in range(draw.randint(1, 6)):
        above = [node.name for node in nodes if draw.random() < 0.4]
        node_workers = tuple(draw.sample(workers, draw.choice([1, 2, 4])))
        node = planned_node(
            f"node{number}",
            *above,
            work=draw.choice(["forward", "generate", "train"]),
            region=draw.choice(["stream", "step"]),
            lag=draw.choice([0, 0, 1]),
            workers=node_workers,
            layout=Layout(replicas=len(node_workers)),
            estimate=Estimate(bytes={"weights": draw.randrange(60) * GIB}),
        )
        nodes.append(node)
    turns = tuple(draw.sample(workers, draw.choice([2, 3])))
    hosts = [Host(name=name, cores=16, memory=2**38, gpus=(80 * GIB,) * 2) for name in "abc"]
    draft = Draft(
        graph=grpo_graph(),
        seed=0,
        cluster=with_first(hosts),
        nodes=tuple(nodes),
        turns=(turns,) if draw.random() < 0.5 else (),
        hosts={worker: draw.choice("abc") for worker in workers},
    )
    devices = {worker: (draw.randrange(2),) for worker in draft.workers}
    return replace(draft, devices=devices)


def place_by_hand(draft: Draft, worker: str) -> str:
    """A Worker, or the first of those that it takes turns with."""
    return next((group[0] for group in draft.turns if worker in group), worker)


@given(seed=SEEDS)
@settings(max_examples=example_count(60), deadline=None)
def test_places_are_one_where_the_same_nodes_run(seed: int) -> None:
    draft = draw_draft(Random(seed))
    nodes_at: dict[str, list[str]] = defaultdict(list)
    for node in draft.nodes:
        for place in {place_by_hand(draft, worker) for worker in node.workers}:
            nodes_at[place].append(node.name)
    united = unite_places(draft.nodes, draft.turns_by_worker)
    for one in draft.workers:
        for other in draft.workers:
            ones, others = (nodes_at[place_by_hand(draft, w)] for w in (one, other))
            assert (united[one] == united[other]) == (ones == others)


@given(seed=SEEDS)
@settings(max_examples=example_count(60), deadline=None)
def test_kernels_that_compute_at_once_are_those_counted_one_by_one(seed: int) -> None:
    draft = draw_draft(Random(seed))
    ancestors = find_ancestors(draft.nodes)
    kernels = _Kernels(draft, draft.nodes)
    for node in draft.nodes:
        units: dict[str, set[str]] = defaultdict(set)
        for other in draft.nodes:
            if other is node or _can_overlap(node, other, ancestors):
                for worker in other.workers:
                    units[draft.host_of(worker)].add(place_by_hand(draft, worker))
        counts = kernels.count_beside(node)
        assert counts == {host: len(units[host]) for host in map(draft.host_of, node.workers)}


@given(seed=SEEDS)
@settings(max_examples=example_count(60), deadline=None)
def test_one_host_of_each_class_says_whether_all_rooms_of_a_node_suffice(seed: int) -> None:
    draft = draw_draft(Random(seed))
    by_host = workers_by_host(draft, draft.workers)
    for node in draft.nodes:
        rooms = list(find_memory_rooms(draft, draft.cluster))
        near = _take_neighbours(node, draft, by_host)
        few = list(find_memory_rooms(near.draft, draft.cluster, near.hosts))
        needs = {(room.need, room.is_full) for room in rooms if node.name in room.node_names}
        assert needs == {(room.need, room.is_full) for room in few if node.name in room.node_names}


def test_many_names_are_the_first_the_last_and_their_number() -> None:
    assert name_alike(["a", "b", "c"]) == "a, b, c"
    assert name_alike(["a", "b", "c", "d"]) == "a ... d (4)"
