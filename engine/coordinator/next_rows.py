"""Rows ahead: what the next Step will be formed of, chosen while this one is trained.

    a next Step is   waits for                                    left by
    open             a full batch of every source, at a lag       its choice -> chosen
    chosen           this Step's end; its rows to stay as they    it is formed, of these rows or, if
                     are                                          some are gone, of others

Owns: when the choice is made, which rows are fetched ahead for whom, keeping their blocks until
that Step is over. Does not own: which prompts may form a Step (admission.py), the Step (step.py),
how ranks divide the rows (ranks.py).

The choice is the one that the intake would make: once made, it stands while it is allowed
(`Admission.choose_early`), so that what was fetched is what is trained. A node below the cut whose
rows are made in the Step itself gets those as ever; all that the stream has made is fetched ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from engine.coordinator.blocks import Blocks, Reading, Readings
from engine.coordinator.sources import Sources
from engine.coordinator.step import StepRun
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.protocol.messages import FetchAhead
from engine.protocol.refs import Gather

IsThere = Callable[[str], bool]
"""Whether a Worker can be told something."""


class NextRows:
    """What is fetched ahead, in a run whose sources all have a lag; else nothing."""

    def __init__(self, plan: Plan, blocks: Blocks, sources: Sources) -> None:
        self._blocks = blocks
        self._sources = sources
        self._above = {n.name for n in plan.nodes if n.region == "stream"}
        self._step_nodes = [n for n in plan.nodes if n.region == "step"]
        # Of several replicas of a node nobody knows yet which one gets which rows, and of parts
        # which rank.
        single = [n for n in self._step_nodes if len(n.rank_groups) == 1]
        self._nodes = [n for n in single if not n.in_parts]
        makers = _workers_of(n for n in plan.nodes if n.region == "stream")
        readers = _workers_of(self._nodes)
        lags = [source.max_lag for source in plan.sources]
        are_apart = len(makers | readers) > 1 and bool(readers)
        self._wanted = bool(lags) and min(lags) > 0 and are_apart
        self._chosen_for = -1
        """The Step that was last chosen."""
        self._refused: tuple[int, tuple[int, ...]] = (-1, ())
        """At this version, with so many prompts finished, the intake chose none of them: it is
        asked again once there are more, as this is asked at every event.
        """
        self._held: dict[int, list[frozenset[int]]] = {}
        """By Step, the blocks that are kept for those who fetch ahead."""

    def tell(self, version: int, is_there: IsThere) -> Iterator[FetchAhead]:
        """Say what to fetch for the Step that starts from this version, once that is known."""
        if not self._wanted or version < self._chosen_for:
            return
        finished = self._sources.finished
        if not finished or (version, finished) == self._refused:
            return
        chosen = self._sources.choose_early(version)
        if chosen is None:
            self._refused = version, finished
            return
        self._chosen_for = step = version + 1
        run = StepRun(step, self._step_nodes, self._sources.tables, chosen, self._blocks)
        for node in self._nodes:
            message = self._message(run, node, is_there)
            if message is not None:
                yield message

    def _message(self, run: StepRun, node: PlannedNode, is_there: IsThere) -> FetchAhead | None:
        """What a node's first Worker is told; None where there is nothing to fetch."""
        keys_by_set: dict[str, Keys] = {}
        readings: dict[str, tuple[Reading, ...]] = {}
        holds = frozenset[int]()
        for name, inputs in node.row_sets.items():
            known = self._known(inputs)
            if not known:
                continue
            keys_by_set[name] = keys = run.keys(known)
            further_readings, blocks = run.inputs(known, keys)
            readings |= further_readings
            holds |= blocks
        if ROWS not in keys_by_set:
            return None
        if not self._can_be_read(holds) or not all(map(is_there, node.workers)):
            return None
        gathers = self._gathers(node, readings)
        if not gathers:
            return None
        self._blocks.hold(holds)
        self._held.setdefault(run.step, []).append(holds)
        return FetchAhead(
            node=node.name, worker=node.workers[0], step=run.step, keys=keys_by_set, inputs=gathers
        )

    def _known(self, inputs: tuple[PlannedInput, ...]) -> list[PlannedInput]:
        """The inputs whose rows the stream has made, if they alone say which rows a node gets."""
        known = [each for each in inputs if self._is_above(each)]
        if len(known) < len(inputs) and any(each.width or each.fan_in for each in inputs):
            return []
        has_own_rows = any(each.ratio == 1 and not each.fan_in for each in known)
        return known if has_own_rows else []

    def _is_above(self, each: PlannedInput) -> bool:
        return {each.gate, *(fetch.producer for fetch in each.fetches)} <= self._above

    def _can_be_read(self, numbers: frozenset[int]) -> bool:
        return bool(numbers) and not self._blocks.missing(numbers)

    def _gathers(self, node: PlannedNode, readings: Readings) -> dict[str, tuple[Gather, ...]]:
        """Those of them that some Worker of the node has to fetch from another."""
        gathers = self._blocks.gathers(readings)
        here = {node.workers[0]} if len(node.workers) == 1 else set[str]()
        for name, its_gathers in list(gathers.items()):
            refs = chain.from_iterable(gather.refs for gather in its_gathers)
            if all(worker in here for worker, _ in refs):
                del gathers[name]
        return gathers

    def end_step(self, step: int) -> None:
        """A Step is over: nobody fetches its rows, or those of earlier ones, any more."""
        for held_step in [held_step for held_step in self._held if held_step <= step]:
            for numbers in self._held.pop(held_step):
                self._blocks.let_go(numbers)

    def abandon(self) -> None:
        """The run is over."""
        self.end_step(max(self._held, default=0))


def _workers_of(nodes: Iterable[PlannedNode]) -> frozenset[str]:
    return frozenset(chain.from_iterable(node.workers for node in nodes))
