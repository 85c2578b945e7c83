"""The parts of streamed Steps, over the runs of a case that is killed, or goes back.

Owns: what a record would have of them, and that a Step which is repeated is cut by it. Does not
own: the record's file (engine/keep/part_record.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.protocol.messages import PartFormed
from engine.run.simulated_workers.simulation import Simulation
from tests.schedules.plans import ScheduleCase

Parts = dict[tuple[str, int], list[tuple[int, ...]]]
"""By source and Step, positions of each part."""


class RepeatedParts:
    """Of one case. `repeated` counts parts that an earlier run had."""

    def __init__(self) -> None:
        self._recorded: Parts = {}
        self.repeated = 0

    def of_case(self, case: ScheduleCase) -> ScheduleCase:
        """The case as its next run is told of it."""
        by_source: dict[str, dict[int, list[tuple[int, ...]]]] = {}
        for (source, step), parts in self._recorded.items():
            by_source.setdefault(source, {})[step] = list(parts)
        return replace(case, settings=replace(case.settings, parts=by_source))

    def note(self, run: Simulation) -> None:
        """Take down what a run has cut; a Step that was cut before has the same parts."""
        for key, parts in parts_of(run).items():
            recorded = self._recorded.setdefault(key, [])
            both = min(len(parts), len(recorded))
            assert parts[:both] == recorded[:both], f"{key}: {parts} after {recorded}"
            self.repeated += both
            recorded += parts[both:]


def parts_of(run: Simulation) -> Mapping[tuple[str, int], list[tuple[int, ...]]]:
    """What a run has cut, with parts counted from 0 in each Step."""
    formed_parts: Parts = {}
    for _, message in run.history.instructions:
        if isinstance(message, PartFormed):
            parts = formed_parts.setdefault((message.source, message.step), [])
            assert message.part == len(parts), f"part {message.part} after {len(parts)}"
            parts.append(message.positions)
    return formed_parts
