"""How many tokens' keys rows keep between two turns, and what the plan says of rows of turns.

Owns: Layout.parked, and these words. Does not own: an engine's cache, which has room for such rows
from the start (engines.py), how a kernel keeps keys (operators/kernels).

A row between two turns needs its keys again. Those of all rows of a Step are kept where there is
room: of what a device, or a host without one, has free beside everything else, a half is shared out
among the Workers there. What is beyond is computed again when the row goes on, which costs time and
changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dataflow.node import Node
from dataflow.safe_text import shown_bytes
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import token_keys
from engine.plan.cost.models import Shape, counted_dtype, model_cost
from engine.plan.draft import Draft
from engine.plan.episodes import PARKED_PART, describe_environments, writes_turns
from engine.plan.kernel_needs import model_of
from engine.plan.lengths import all_lengths
from engine.plan.plan import PlannedNode

FREE_SHARE = 0.5
"""Of what is free, for keys between turns: what allocators scatter is not counted anywhere."""


def state_parked(draft: Draft) -> Draft:
    """Take over the parked tokens that a graph states, before memory is counted."""
    nodes: list[PlannedNode] = []
    for node in draft.nodes:
        stated = draft.graph.node(node.name).params.get("parked_tokens")
        if stated is not None and not node.layout.cache_bytes:
            node = replace(node, layout=replace(node.layout, parked=int(stated)))
        nodes.append(node)
    return replace(draft, nodes=tuple(nodes))


def park_keys(draft: Draft) -> Draft:
    """Decide for each node that writes turns how many tokens' keys it may keep, and say what its
    rows are.
    """
    writers = [node for node in draft.nodes if writes_turns(draft.graph.node(node.name))]
    if not writers:
        return draft
    sizes = _Sizes(draft, writers)
    nodes_by_name = {node.name: node for node in draft.nodes}
    notes = list(draft.notes)
    for node in writers:
        nodes_by_name[node.name] = sizes.park(node)
        notes += [f"{node.name}: {text}" for text in sizes.describe(nodes_by_name[node.name])]
    return replace(draft, nodes=tuple(nodes_by_name.values()), notes=tuple(notes))


class _Sizes:
    """What rows of turns need, and what is free for them."""

    def __init__(self, draft: Draft, writers: list[PlannedNode]) -> None:
        self._draft = draft
        self._free = _find_free(draft, writers)
        self._shapes: dict[str, Shape | None] = {}
        for model in draft.graph_models:
            self._shapes[model.name] = model_cost(model.base, model.head).shape
        self._lengths: Mapping[str, Lengths] = all_lengths(draft.graph, self._shapes)

    def park(self, node: PlannedNode) -> PlannedNode:
        """The node with its parked tokens, and their bytes among its own. What the graph states
        stays.
        """
        token_bytes = self._token_bytes(node)
        if not token_bytes:
            return node
        if node.layout.cache_bytes:  # an engine's, in which they lie with all others
            parked = node.layout.cache_bytes // (token_bytes // node.layout.inner)
            return replace(node, layout=replace(node.layout, parked=parked))
        if self._graph_node(node).params.get("parked_tokens") is not None:
            return node
        most = self.rows_between_turns(node) * self._lengths[node.name].row
        free = min(self._free[worker] for worker in node.workers)
        # At least one: to a kernel 0 is no bound.
        parked = max(1, min(most, int(free * FREE_SHARE) // token_bytes))
        node_bytes = {**node.estimate.bytes, PARKED_PART: parked * token_bytes}
        estimate = replace(node.estimate, bytes=node_bytes)
        return replace(node, layout=replace(node.layout, parked=parked), estimate=estimate)

    def rows_between_turns(self, node: PlannedNode) -> int:
        """The most rows of one chunk; an evaluation's fill the slots."""
        batches = {source.name: source.batch for source in self._draft.sources}
        if node.source not in batches:
            return node.layout.slots
        prompts = -(-batches[node.source] // max(node.layout.replicas, node.chunks))
        return prompts * node.live_rows

    def describe(self, node: PlannedNode) -> Iterator[str]:
        """Say how long its rows can be, what is kept between turns, and where environments run."""
        lengths = self._lengths[node.name]
        yield (
            f"at most {lengths.row:,} tokens a row: prompt {lengths.prompt:,},"
            f" {lengths.completion:,} written and answered"
        )
        if node.segments > 1:
            yield (
                f"an episode has up to {node.segments} rows, one after another: memory of"
                f" {node.live_rows} rows of a prompt at once, seconds and bytes as if all were"
                " needed"
            )
        token_bytes = self._token_bytes(node)
        if token_bytes:
            rows = self.rows_between_turns(node)
            size = shown_bytes(node.layout.parked * token_bytes)
            yield (
                f"keys of up to {rows:,} rows between turns: {size}, {node.layout.parked:,} tokens;"
                " what is beyond is computed again"
            )
        yield (
            "seconds as if all of a row's tokens were written; what environments take is not"
            " known before a profile"
        )
        yield from describe_environments(self._graph_node(node))

    def _graph_node(self, node: PlannedNode) -> Node:
        return self._draft.graph.node(node.name)

    def _token_bytes(self, node: PlannedNode) -> int:
        """Bytes of a token's keys, of all ranks; 0 where the Model's shape is not known."""
        name = model_of(node)
        shape = self._shapes.get(name)
        if shape is None:
            return 0
        model = next(model for model in self._draft.graph_models if model.name == name)
        return token_keys(shape, counted_dtype(model))


def _find_free(draft: Draft, writers: list[PlannedNode]) -> dict[str, int]:
    """Worker -> its share of what is free where it is: of several devices, of the fullest."""
    names = {node.name for node in writers}
    shares: dict[str, list[int]] = defaultdict(list)
    for room in find_memory_rooms(draft, draft.cluster):
        workers: list[str] = []
        for worker, nodes in room.workers.items():
            if any(node.name in names for node in nodes):
                workers.append(worker)
        for worker in workers:
            shares[worker].append(max(0, room.bytes - room.need) // len(workers))
    return {worker: min(each) for worker, each in shares.items()}
