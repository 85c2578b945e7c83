"""Why the Workers that were asked for cannot be had.

Owns: the refusals of names, numbers and pins, and which nodes cannot have replicas. Does not own:
those of ranges (spare.py), of tensor ranks (tensor.py) and of context ranks (context_ranks.py), the
Workers themselves (place.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import get_args

from dataflow.errors import nearest, nearest_or_all
from dataflow.kernel import Layout, Offload, Recompute
from engine.plan.draft import Draft
from engine.plan.passes.context_ranks import count_alike_ranks, find_context_problems
from engine.plan.passes.side_modules import find_side_problems
from engine.plan.passes.spare import find_range_problems
from engine.plan.passes.tensor import find_tensor_problems
from engine.plan.placement import Compiled, Placing, StreamChoice
from engine.plan.plan import PlannedNode
from engine.plan.profiled_passes import samples_of
from engine.plan.refusals import add_fix
from engine.plan.waiting_weights import why_weights_stay

_WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def find_placement_problems(draft: Draft) -> Iterator[str]:
    """Everything that is wrong with the wishes: unknown names, then numbers, then hosts."""
    yield from _find_unknown_nodes(draft)
    yield from _find_bad_pins(draft.placing)
    yield from _find_unfit(draft)
    yield from _find_training_problems(draft)
    yield from find_side_problems(draft)
    yield from _find_divided_groups(draft.placing)
    yield from _find_unknown_hosts(draft)


def why_one_replica(draft: Draft, node: PlannedNode) -> str:
    """Why a node cannot have replicas; empty if it can."""
    if node.work == "source":
        return "a source, which has a place in its data"
    if node.traits.steps:
        return f"a {node.work} node"
    if node.scope == "batch":
        return "of batch scope: it sees all rows of the Step at once"
    followers: set[str] = set()
    for model in draft.graph_models:
        if model.follows is not None and model.copies is None:
            followers.add(model.name)
    for use in node.models:
        if use.model in followers:
            return f"a reader of {use.model!r}, which moves by its own steps"
    return ""


def _find_unknown_nodes(draft: Draft) -> Iterator[str]:
    """Names of nodes that the plan lacks."""
    placing = draft.placing
    names_by_option: dict[str, Iterable[str]] = {
        "pin": placing.pin,
        "together": chain(*placing.together),
        "replicas": placing.replicas,
        "chunks": placing.chunks,
        "spread": placing.spread,
        "tail": placing.tail,
        "ranks": placing.ranks,
        "tensor": placing.tensor,
        "context": placing.context,
        "recompute": placing.recompute,
        "offload": placing.offload,
        "microbatch": placing.microbatch,
        "slots": placing.slots,
    }
    known_names = [node.name for node in draft.nodes]
    for option, names in names_by_option.items():
        for name in names:
            if name not in known_names:
                fix = nearest_or_all(name, known_names)
                yield add_fix(f"{option}: expected a node of the plan, found {name!r}", fix)


def _find_bad_pins(placing: Placing) -> Iterator[str]:
    """Workers' names that are no file names, or that one node has twice."""
    for node, workers in placing.pin.items():
        for worker in workers:
            if not _WORKER_NAME.fullmatch(worker):
                problem = f"pin: {node!r} on {worker!r}, which cannot name a Worker"
                yield add_fix(problem, "letters, digits, '-', '_', '.'")
        if len(set(workers)) < len(workers):
            problem = f"pin: {node!r} on {','.join(workers)}, one of them twice"
            yield add_fix(problem, "a Worker for each replica")


def _find_unknown_hosts(draft: Draft) -> Iterator[str]:
    """Hosts that the cluster does not have, or that cannot run anything."""
    hosts = {host.name: host for host in draft.cluster.hosts}
    labels: list[str] = []
    for host in hosts.values():
        labels += map(":".join, host.labels.items())
    for worker, name in draft.placing.hosts.items():
        if not hosts:
            problem = f"pin: {worker!r} on host {name!r}, and no hosts are known"
            yield add_fix(problem, "--cluster ray")
        elif name not in hosts:
            problem = f"pin: {worker!r} expected a host of the cluster, found {name!r}"
            known_names = dict.fromkeys([*hosts, *labels])
            yield add_fix(problem, nearest_or_all(name, list(known_names)))
        elif hosts[name].refused:
            yield f"pin: {worker!r} on host {name}: {hosts[name].refused}"


def _find_unfit(draft: Draft) -> Iterator[str]:
    """Wishes that these nodes cannot have, option by option."""
    nodes = {node.name: node for node in draft.nodes}
    placing = draft.placing
    counted_options = (
        (_find_replica_problems, placing.replicas),
        (find_range_problems, placing.least),
        (_find_rank_problems, placing.ranks),
        (find_tensor_problems, placing.tensor),
        (find_context_problems, placing.context),
        (_find_chunk_problems, placing.chunks),
        (_find_microbatch_problems, placing.microbatch),
        (_find_slots_problems, placing.slots),
    )
    for find_problems, counts in counted_options:
        for name, count in counts.items():
            if name in nodes:
                yield from find_problems(draft, nodes[name], count)
    yield from _find_dispatch_problems(draft)
    for name, workers in placing.pin.items():
        if name in nodes:
            yield from _find_pin_problems(draft, nodes[name], workers)


def _find_microbatch_problems(draft: Draft, node: PlannedNode, tokens: int) -> Iterator[str]:
    """Why a node cannot have micro-batches of so many tokens."""
    del draft
    wish = f"microbatch: {node.name}={tokens}"
    if not node.traits.computes:
        others = "nodes that run no Model have no micro-batches"
        yield add_fix(f"{wish}, and {others}", f"leave out {node.name}")
    elif tokens < 1:
        yield add_fix(wish, f"{node.name}={Layout().tokens}")


def _find_slots_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    """Why a node cannot decode so many rows at once."""
    wish = f"slots: {node.name}={count}"
    if not node.traits.generates:
        generations = [each.name for each in draft.nodes if each.traits.generates]
        others = "only generations have rows in slots"
        fix = f"{generations[0]}={count}" if generations else f"leave out {node.name}"
        yield add_fix(f"{wish}, and {others}", fix)
    elif count < 1:
        yield add_fix(wish, f"{node.name}={Layout().slots}")


def _find_replica_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    wish = f"replicas: {node.name}={count}"
    fix = f"{node.name}=1"
    why = why_one_replica(draft, node)
    if count < 1:
        yield add_fix(wish, fix)
    elif count > 1 and why:
        if node.work == "train":
            fix = f"ranks: {node.name}={count}"
        yield add_fix(f"{wish}, but it is {why}", fix)


def _find_rank_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    wish = f"ranks: {node.name}={count}"
    if node.work != "train":
        if count != 1:
            fix = f"replicas: {node.name}={count}"
            yield add_fix(f"{wish}, but only train nodes have ranks", fix)
        return
    batch, parts = _count_prompts(draft, node)
    most = count_most_ranks(draft, node)
    if not 1 <= count <= most:
        problem = f"{wish}, and a minibatch has {most} prompts ({batch} in {parts})"
        nearest_count = min(max(count, 1), most)
        yield add_fix(problem, f"{node.name}={nearest_count}")


def count_most_ranks(draft: Draft, node: PlannedNode) -> int:
    """The most data ranks of a train node: each has a prompt of every minibatch."""
    batch, parts = _count_prompts(draft, node)
    return max(1, batch // parts)


def _count_prompts(draft: Draft, node: PlannedNode) -> tuple[int, int]:
    """Prompts of a train node's smallest source, and its minibatches."""
    sources = set(draft.sources_of(node).values())
    batches = [source.batch for source in draft.sources if source.name in sources]
    return min(batches, default=0), draft.graph.node(node.name).params["minibatches"]


def _find_chunk_problems(_: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    why = ""
    if node.work == "source":
        why = ", but it is a source"
    elif node.scope == "batch":
        why = ", but it is of batch scope"
    if count < 1 or (count > 1 and why):
        yield add_fix(f"chunks: {node.name}={count}{why}", f"{node.name}=1")


def _find_dispatch_problems(draft: Draft) -> Iterator[str]:
    """Wishes for how answers go to replicas, of nodes that make none or have no weights."""
    nodes = {node.name: node for node in draft.nodes}
    for name, count in draft.placing.spread.items():
        if name not in nodes:
            continue
        node, wish = nodes[name], f"spread: {name}={count}"
        samples = samples_of(node)
        if not node.traits.generates:
            yield add_fix(f"{wish}, but only generations have answers", "leave it out")
        elif not 1 <= count <= samples:
            problem = f"{wish}, and a prompt has {samples} answers"
            yield add_fix(problem, f"{name}={min(max(count, 1), samples)}")
    for name, share in draft.placing.tail.items():
        if name not in nodes:
            continue
        wish = f"tail: {name}={share:g}"
        if not 0 <= share < 1:
            yield add_fix(f"{wish}, expected a share from 0 to below 1", f"{name}=0.2")
        elif share and not has_weights(nodes[name]):
            fix = "generate(..., weight=port), or leave it out"
            yield add_fix(f"{wish}, but nobody says how much its rows take", fix)


def has_weights(node: PlannedNode) -> bool:
    """Whether a generation is told how much each of its rows is expected to take."""
    return node.traits.generates and any(each.name == "weight" for each in node.inputs)


def _find_training_problems(draft: Draft) -> Iterator[str]:
    """Wishes for the memory of nodes that have no such state, and words that stand for no wish, as
    they may come from Python.
    """
    placing = draft.placing
    of_words = {"compiled": (placing.compiled, Compiled), "stream": (placing.stream, StreamChoice)}
    for option, (word, kind) in of_words.items():
        words = get_args(kind)
        if word not in words:
            problem = f"{option}: expected {', '.join(words[:-1])} or {words[-1]}, found {word!r}"
            yield add_fix(problem, nearest_or_all(word, words))
    if placing.part_tokens < 0:
        yield f"part_tokens: expected 0 or more, found {placing.part_tokens}. Fix: 0"
    wishes: tuple[tuple[str, Mapping[str, str], tuple[str, ...]], ...] = (
        ("recompute", placing.recompute, get_args(Recompute)),
        ("offload", placing.offload, get_args(Offload)),
    )
    nodes = {node.name: node for node in draft.nodes}
    for option, choices, words in wishes:
        for name, choice in choices.items():
            wish = f"{option}: {name}={choice}"
            if choice not in words:
                near = nearest(str(choice), words) or words[1]
                expected = f"{', '.join(words[:-1])} or {words[-1]}"
                yield add_fix(f"{wish}, expected {expected}", f"{name}={near}")
            elif name in nodes and choice != "none":
                yield from _find_state_problems(draft, nodes[name], option, choice)


def _find_state_problems(
    draft: Draft, node: PlannedNode, option: str, choice: str
) -> Iterator[str]:
    """Why a node's state cannot be spared in this way."""
    wish = f"{option}: {node.name}={choice}"
    why = why_weights_stay(draft, node)
    if choice == "weights":
        if why:
            fix = f"{node.name}=optimizer" if node.work == "train" else "leave it out"
            yield add_fix(f"{wish}, but {why}", fix)
    elif node.work != "train":
        fix = f"{node.name}=weights" if option == "offload" and not why else "leave it out"
        yield add_fix(f"{wish}, but only train nodes have such state", fix)


def _find_pin_problems(draft: Draft, node: PlannedNode, workers: tuple[str, ...]) -> Iterator[str]:
    if len(workers) == 1 and not workers[0]:
        return  # already refused as a name
    placing = draft.placing
    count = len(workers)
    alike = max(1, count_alike_ranks(draft, node))
    shares = -(-count // alike)
    if node.work == "train":
        expected_count = placing.ranks.get(node.name, shares) * alike
        if node.name not in placing.ranks:  # else they were looked at as ranks
            yield from _find_rank_problems(draft, node, shares)
    else:
        expected_count = placing.replicas.get(node.name, shares) * alike
        if node.name not in placing.replicas:  # likewise
            yield from _find_replica_problems(draft, node, shares)
    if expected_count != count:
        unit = "replicas" if node.work != "train" and alike == 1 else "ranks"
        more_names = (f"{workers[0]}-{i}" for i in range(1, expected_count))
        names = [*workers, *more_names][:expected_count]
        problem = f"pin: {node.name} on {','.join(workers)} has {expected_count} {unit}"
        yield add_fix(problem, f"{node.name}={','.join(names)}")


def _find_divided_groups(placing: Placing) -> Iterator[str]:
    """Nodes are together once, and not pinned apart."""
    earlier_names: set[str] = set()
    for group in placing.together:
        twice = sorted(earlier_names & set(group))
        if twice:
            problem = f"together: {twice[0]} is in two groups"
            yield add_fix(problem, "one group of all that are together")
        earlier_names |= set(group)
        pins = {name: placing.pin[name] for name in group if name in placing.pin}
        places = list(dict.fromkeys(pins.values()))
        if len(places) > 1:
            first = next(iter(pins))
            other = next(name for name, workers in pins.items() if workers != places[0])
            first_workers = ",".join(places[0])
            other_workers = ",".join(places[1])
            pinned = f"{first} is pinned to {first_workers} and {other} to {other_workers}"
            problem = f"together: {','.join(group)}, but {pinned}"
            yield add_fix(problem, f"one pin, {first}={first_workers}")
