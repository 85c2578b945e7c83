"""How long a Step of a plan takes, without simulating it.

Owns: what of a plan's nodes adds up in a Step, and what overlaps. Does not own: their seconds
(engine/plan/cost/node_price.py), the work of each (priced_work.py), a run event by event
(engine/simulation).

    step_seconds(plan, StepLengths(answers=lognormal(3000, 0.9, 16000)))

A node begins when the rows that it reads are there and its Workers are free; Workers that take
turns are free one after another. Without a lag a Step is the time from its first node to the last,
and until the weights are back; where it is worked on in parts, these go through its nodes one after
another. With a lag of k Steps it is the time of the busiest Worker, or of
the whole way over 1 + k, whichever is longer: so many Steps are under way at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import cached_property

from engine.plan.alike_workers import unite_places
from engine.plan.cost.decode_curve import make_batch
from engine.plan.cost.model_passes import Time
from engine.plan.cost.node_price import NodeWork, decode_rows, node_time
from engine.plan.cost.profile import Profile
from engine.plan.costs import PlanCosts, plan_costs
from engine.plan.joining_decode import PricedDecode
from engine.plan.lengths import greatest_lengths
from engine.plan.plan import Decisions, Plan, PlannedNode
from engine.plan.priced_work import PricedWork, StepLengths
from engine.plan.rates import correct_by_work
from engine.plan.replica_price import time_unlike
from engine.plan.row_lengths import RowLengths
from engine.plan.step_flow import StepFlow, time_flow
from engine.plan.streamed_step import PartPrices, StreamedSource

_MOST_ROWS = 2048
"""Rows of a replica in a Step, of which several Steps are gone through one by one."""


def step_seconds(
    plan: Plan,
    lengths: StepLengths | None = None,
    *,
    profile: Profile | None = None,
    seconds: Mapping[str, float] | None = None,
) -> float:
    """Price a Step of a plan. lengths: of prompts and answers. seconds: a row of nodes that are
    functions, before those of the profile; of others that nobody knows none. Raises PlanError for a
    node whose device or Model is not known, and for a row that a cache cannot hold.
    """
    return price_step(plan, lengths, profile=profile, seconds=seconds).seconds()


def price_step(
    plan: Plan,
    lengths: StepLengths | None = None,
    *,
    profile: Profile | None = None,
    seconds: Mapping[str, float] | None = None,
) -> StepPrice:
    """Price the nodes of a plan, as `step_seconds` does."""
    assert plan.program is not None
    greatest = greatest_lengths(plan.program)
    work = PricedWork(plan, plan.program, greatest, lengths or StepLengths())
    return StepPrice(plan, plan_costs(plan, profile), work, seconds or {})


class StepPrice:
    """The price of a Step, node by node."""

    def __init__(
        self,
        decided: Decisions,
        costs: PlanCosts,
        work: PricedWork,
        seconds: Mapping[str, float],
    ) -> None:
        self._decided, self._costs, self._work = decided, costs, work
        self._function_seconds = seconds
        self._batches = {source.name: source.batch for source in decided.sources}
        self._step_nodes = [node for node in decided.nodes if node.region != "evaluation"]
        self._place_of = unite_places(self._step_nodes, decided.turns_by_worker)
        self.by_node = {node.name: self.node_seconds(node) for node in decided.nodes}
        self._alone = self._time_alone()
        """Of a generation whose rows are bound late: a Step's rows alone, which are on their way at
        least as long.
        """

    def node_seconds(self, node: PlannedNode) -> float:
        """Seconds of a node's busiest replica in a Step; 0 outside of Steps, and where they are not
        known.
        """
        if node.region == "evaluation" or node.work == "evaluate":
            return 0.0
        if node.traits.computes:
            if self._costs.unpriced_reason(node.name):
                return 0.0
            works = self._work.list_works(node)
            return sum(self.time_work(node, work).seconds for work in works)
        rows = -(-self._batches.get(node.source, 0) * node.rows // node.layout.replicas)
        return self._function_rows(node, rows)

    def _function_rows(self, node: PlannedNode, rows: int) -> float:
        """Seconds of so many rows of a node that computes with no Model; 0 where nobody knows."""
        if node.name in self._function_seconds:
            return self._function_seconds[node.name] * rows
        return self._costs.function(node.name, rows) or 0.0

    def time_work(self, node: PlannedNode, work: NodeWork) -> Time:
        """Time a node's work in a Step, as it was measured where it was."""
        if not self._costs.is_alike(node.name):
            return time_unlike(self._costs, node, work)
        layout = node.layout
        where = self._costs.place(node.name)
        time = node_time(self._costs.require_sizes(node.name), where, layout, work)
        return time.times(self._correct(node, work))

    def _correct(self, node: PlannedNode, work: NodeWork) -> float:
        """The factor on a node's seconds by what was measured."""
        return correct_by_work(self._costs.entry(node.name), work, node.layout)

    def count_answers(self, source: str) -> int:
        """Tokens of a Step's answers, in the mean, that first generations of a source make of which
        parts are worked on.
        """
        tokens = 0.0
        for node in self._step_nodes:
            if node.source == source and node.layout.part_tokens:
                mean = self._work.distributions(node.name).answers.mean
                tokens += self._batches[source] * node.live_rows * mean
        return int(tokens)

    def _time_alone(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for node in self._decided.nodes:
            if node.binds_late and not self._costs.unpriced_reason(node.name):
                (work,) = self._work.list_works(node)
                alone = replace(work, steps=0, chunks=node.layout.replicas)
                seconds[node.name] = self.time_work(node, alone).seconds
        return seconds

    def seconds(self, changed: Mapping[str, float] | None = None) -> float:
        """Seconds of a Step. changed: of some nodes, by name, in the place of their own."""
        by_node = {**self.by_node, **(changed or {})}
        lag = min((source.max_lag for source in self._decided.sources), default=0)
        if not lag:
            # What others of a node's seconds change of its parts is not looked at.
            return self._time_way(by_node, None if changed else self._find_streamed())
        flow = None if changed else self._time_flow()
        if flow is not None:
            return flow
        way = self._time_way({**by_node, **self._alone})
        return max(self._time_busiest(by_node), way / (1 + lag))

    def _time_flow(self) -> float | None:
        """Seconds of a Step by its one generation that binds rows late; None of other plans, where
        it shares its Workers, and of so many rows that they even out.
        """
        late = [node for node in self._step_nodes if node.name in self._alone]
        if len(late) != 1:
            return None
        (node,) = late
        if self._shares_workers(node):
            return None
        (work,) = self._work.list_works(node)
        limits = self._costs.decode_limits(node.name)
        where = self._costs.place(node.name)
        rows = make_batch(work.lengths, decode_rows(where, node.layout, work, limits.room))
        if len(rows.answers) > _MOST_ROWS:
            return None
        without = {**self.by_node, node.name: 0.0}
        flow = StepFlow(
            lag=node.lag,
            after=self._time_way(without),
            between=self._time_busiest(without),
            slots=limits.slots,
            unit=limits.shared,
        )
        factor = self._correct(node, work)
        decode = PricedDecode(
            self._costs.require_sizes(node.name), where, limits, slowdown=lambda _: factor
        )
        return time_flow(decode, RowLengths(rows.prompts, rows.answers), flow)

    def _shares_workers(self, node: PlannedNode) -> bool:
        """Whether a node waits for others that compute in its Workers, or takes turns with them."""
        places = self._places(node)
        for other in self._step_nodes:
            is_other = other.name != node.name and other.traits.computes
            if is_other and not places.isdisjoint(self._places(other)):
                return True
        return False

    def _time_way(
        self, by_node: Mapping[str, float], streamed: StreamedSource | None = None
    ) -> float:
        """Seconds from a Step's first node until its new weights are everywhere. streamed: what is
        worked on in parts while it is generated.
        """
        ends: dict[str, float] = {}
        is_free: dict[str, float] = defaultdict(float)
        for node in self._step_nodes:
            if node.name in ends:
                continue  # it worked on parts
            seconds = by_node[node.name]
            if node.chunking == "ready" and not node.traits.generates:
                seconds = 0.0  # it works on rows while the next ones are generated
            places = self._places(node)
            begins = [is_free[place] for place in places]
            for gate in node.gates:
                begins.append(ends.get(gate, 0.0) + self._moving_seconds(gate, node.name))
            if node.work == "train":
                # Train nodes have their turns once all rows of the Step are there.
                begins += ends.values()
            begin = max(begins, default=0.0)
            if streamed is not None and node.name == streamed.root.name:
                flow = streamed.run(self._part_prices(), begin, is_free)
                ends |= flow.ends
                is_free |= flow.is_free
                continue
            ends[node.name] = begin + seconds + self._costs.message
            is_free |= dict.fromkeys(places, ends[node.name])
        weights = max(self._weight_seconds.values(), default=0.0)
        return max(ends.values(), default=0.0) + weights + self._costs.message

    def _find_streamed(self) -> StreamedSource | None:
        """The one source whose Steps are worked on in parts; None without one, of several, and
        where it has several first generations: then a Step is priced as if it had no parts.
        """
        streams = [source for source in self._decided.sources if source.stream != "off"]
        if len(streams) != 1:
            return None
        (source,) = streams
        nodes = [node for node in self._step_nodes if node.source == source.name]
        roots = [n for n in nodes if n.traits.generates and n.layout.part_tokens]
        if len(roots) != 1 or self._costs.unpriced_reason(roots[0].name):
            return None
        return StreamedSource(
            source=source,
            root=roots[0],
            nodes=tuple(node for node in nodes if node.in_parts),
            lengths=self._work.distributions(roots[0].name),
        )

    def _part_prices(self) -> PartPrices:
        return PartPrices(
            costs=self._costs,
            places=self._places,
            moving=self._moving_seconds,
            function=self._function_rows,
        )

    def _time_busiest(self, by_node: Mapping[str, float]) -> float:
        """Seconds of a Step of the Worker that has most to do."""
        busy: dict[str, float] = defaultdict(float)
        for node in self._step_nodes:
            for place in self._places(node):
                busy[place] += by_node[node.name]
        most = max(busy.values(), default=0.0)
        turns = self._decided.turns_by_worker
        loaded: dict[str, float] = {}
        """What takes in weights, or those that take turns with it, which others alike may not."""
        for worker, seconds in self._weight_seconds.items():
            place = turns.get(worker, (worker,))[0]
            if place not in loaded:
                loaded[place] = busy.get(self._place_of.get(worker, worker), 0.0)
            loaded[place] += seconds
        return max(most, max(loaded.values(), default=0.0))

    def _places(self, node: PlannedNode) -> Set[str]:
        """What has to be free for a node: its Workers, or who they take turns with; of places that
        are alike one.
        """
        return self._places_by_node[node.name]

    @cached_property
    def _places_by_node(self) -> Mapping[str, Set[str]]:
        places: dict[str, Set[str]] = {}
        for node in self._step_nodes:
            places[node.name] = {self._place_of[worker] for worker in node.workers}
        return places

    def _moving_seconds(self, producer: str, consumer: str) -> float:
        return self._seconds_by_edge.get((producer, consumer), 0.0)

    @cached_property
    def _seconds_by_edge(self) -> Mapping[tuple[str, str], float]:
        seconds: dict[tuple[str, str], float] = {}
        for edge in self._decided.edges:
            seconds.setdefault((edge.producer, edge.consumer), edge.seconds or 0.0)
        return seconds

    @cached_property
    def _weight_seconds(self) -> Mapping[str, float]:
        """Worker -> seconds in which it takes in new weights."""
        seconds: dict[str, float] = {}
        for model in self._decided.models:
            if not model.writer or model.seconds is None:
                continue
            for worker in self._decided.remote_readers(model):
                seconds[worker] = seconds.get(worker, 0.0) + model.seconds
        return seconds
