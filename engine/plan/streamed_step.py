"""How long a synchronous Step takes that is worked on in parts while it is generated.

Owns: which node works on which part when, and when the Step has ended. Does not own: when parts are
there (streamed_generation.py), seconds of passes (engine/plan/costs.py), Steps without parts
(step_price.py).

A node works on one part after another, and begins one when the nodes that it reads have it and its
Workers are free: of those that may begin, the one that could begin first. The update waits for all
parts and all chunks.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from dataflow.loss_terms import ROWS
from engine.plan.cost.decode_curve import RowDistributions
from engine.plan.costs import PlanCosts
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import list_fetches
from engine.plan.planned_source import PlannedSource
from engine.plan.streamed_generation import GeneratedPart, GeneratedParts, generate_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPrices:
    """What parts cost. places: what has to be free for a node. moving: seconds in which all rows of
    a Step move from one node to another. function: seconds of so many rows of a node without a
    Model.
    """

    costs: PlanCosts
    places: Callable[[PlannedNode], Set[str]]
    moving: Callable[[str, str], float]
    function: Callable[[PlannedNode, int], float]

    def slowdown(self, node: PlannedNode) -> float:
        """By how much a node takes longer as others compute meanwhile; none on a GPU."""
        return self.costs.beside(node.name)

    def seconds(self, node: PlannedNode, part: GeneratedPart) -> float:
        """Seconds of a node's busiest replica, or rank, for a part; without its update."""
        replicas = node.layout.replicas
        if not node.traits.computes:
            return self.function(node, len(part.cut(replicas)))
        if self.costs.unpriced_reason(node.name):
            return 0.0
        slowdown = self.slowdown(node)
        if node.work == "train":
            share = {ROWS: part.cut(node.layout.data)}
            time = self.costs.train(node.name, share, share=True, updates=False)
            return time.seconds * slowdown
        chunks = max(1, node.chunks)
        turns = -(-chunks // replicas)
        if node.traits.generates:
            seconds = self.costs.decode(node.name, part.cut(chunks)).seconds
        else:
            seconds = self.costs.forward(node.name, part.cut(chunks)).seconds
        return turns * seconds * slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSource:
    """A source whose Steps are worked on in parts. root: its first generation. nodes: those that
    work on parts, in running order. lengths: of the root's rows.
    """

    source: PlannedSource
    root: PlannedNode
    nodes: tuple[PlannedNode, ...]
    lengths: RowDistributions

    def run(self, prices: PartPrices, begin: float, is_free: Mapping[str, float]) -> PartFlow:
        """Generate from `begin` on, and work on the parts up to the update. is_free: when each
        Worker has ended what it did before.
        """
        costs, message = prices.costs, prices.costs.message
        generated = generate_parts(
            costs, self.root, self.source, self.lengths, prices.slowdown(self.root)
        )
        flow = PartFlow(prices, self.nodes, generated, begin, is_free)
        end = begin + generated.seconds + message
        flow.is_free.update(dict.fromkeys(prices.places(self.root), end))
        flow.ends[self.root.name] = end
        flow.run()
        for node in self.nodes:
            flow.ends[node.name] = flow.ends.get(node.name, end) + message
        whole_end = max(flow.ends.values())
        for node in self.nodes:
            # Train nodes are updated one after another.
            if node.work == "train" and not costs.unpriced_reason(node.name):
                places = prices.places(node)
                begin = max([whole_end, *(flow.is_free[place] for place in places)])
                end = begin + costs.update(node.name).seconds * prices.slowdown(node) + message
                whole_end = end
                flow.ends[node.name] = end
                flow.is_free.update(dict.fromkeys(places, end))
        return flow


class PartFlow:
    """The parts of one source's Step on their way through the nodes that work on parts. nodes:
    these, in running order. begin: when the generation begins, in seconds from the Step's.
    """

    def __init__(
        self,
        prices: PartPrices,
        nodes: Sequence[PlannedNode],
        generated: GeneratedParts,
        begin: float,
        is_free: Mapping[str, float],
    ) -> None:
        self._prices, self._nodes, self._begin = prices, nodes, begin
        self._parts = generated.parts
        self._names = {node.name for node in nodes}
        self.is_free = defaultdict(float, is_free)
        """When each Worker, or group of those that take turns, has ended what it was given."""
        self.ends: dict[str, float] = {}
        """When each node has ended its last part."""
        self._ends: dict[tuple[int, int], float] = {}
        """(part, node) -> when it has ended."""

    def run(self) -> None:
        """Go through all parts."""
        waiting: list[tuple[float, int, int]] = []
        queued: set[tuple[int, int]] = set()
        for part in range(len(self._parts)):
            self._tell(part, waiting, queued)
        while waiting:
            ready, part, place = heapq.heappop(waiting)
            node = self._nodes[place]
            busy = self._prices.places(node)
            begin = max([ready, *(self.is_free[each] for each in busy)])
            end = begin + self._prices.seconds(node, self._parts[part])
            self.is_free.update(dict.fromkeys(busy, end))
            self._ends[part, place] = end
            self.ends[node.name] = max(end, self.ends.get(node.name, 0.0))
            self._tell(part, waiting, queued)
            if part + 1 < len(self._parts):
                self._tell(part + 1, waiting, queued)

    def _tell(
        self, part: int, waiting: list[tuple[float, int, int]], queued: set[tuple[int, int]]
    ) -> None:
        """Tell nodes of a part that has all that they read."""
        for place, node in enumerate(self._nodes):
            if (part, place) in queued:
                continue
            ready = self._find_ready(part, place, node)
            if ready is not None:
                queued.add((part, place))
                heapq.heappush(waiting, (ready, part, place))

    def _find_ready(self, part: int, place: int, node: PlannedNode) -> float | None:
        """When a node has all that it reads of a part; None while that is not known."""
        of_part = self._parts[part]
        message, reads = self._prices.costs.message, list_producers(node)
        generated = self._begin + of_part.seconds + message
        moving = [0.0]
        for name in reads - self._names:
            moving.append(of_part.share * self._prices.moving(name, node.name))
        ready = generated + max(moving)
        for above, other in enumerate(self._nodes[:place]):
            # What is above the cut ends a part before anything below it begins.
            if other.name not in reads and (node.region, other.region) != ("step", "stream"):
                continue
            if (part, above) not in self._ends:
                return None
            way = of_part.share * self._prices.moving(other.name, node.name)
            ready = max(ready, self._ends[part, above] + message + way)
        if part and node.work == "train":
            # Gradients are summed in the order of the parts.
            if (part - 1, place) not in self._ends:
                return None
            ready = max(ready, self._ends[part - 1, place])
        return ready


def list_producers(node: PlannedNode) -> set[str]:
    """The nodes whose rows a node waits for, or reads."""
    return {*node.gates, *(fetch.producer for fetch in list_fetches(node.inputs))}
