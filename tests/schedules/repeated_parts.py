"""The parts of streamed Steps, over the runs of a case that is killed, or goes back.

Owns: what a record would have of them, and that a Step which is repeated is cut by it. Does not
own: the record's file (engine/keep/part_record.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.protocol.messages import PartFormed
from engine.run.simulated_workers.simulation import Simulation
from tests.schedules.expected import Expected
from tests.schedules.plans import ScheduleCase

Parts = dict[tuple[str, int], list[tuple[int, ...]]]
"""By source and Step, positions of each part."""


class RepeatedParts:
    """Of one case."""

    def __init__(self, case: ScheduleCase) -> None:
        self._case = case
        self._expected = Expected(case)
        self._recorded: Parts = {}

    def next_case(self) -> ScheduleCase:
        """The case as its next run is told of it."""
        case = self._case
        by_source: dict[str, dict[int, list[tuple[int, ...]]]] = {}
        for (source, step), parts in self._recorded.items():
            by_source.setdefault(source, {})[step] = list(parts)
        return replace(case, settings=replace(case.settings, parts=by_source))

    def note(self, run: Simulation) -> None:
        """Take down what a run has cut; a Step that was cut before has the same parts."""
        for key, parts in parts_of(run).items():
            recorded = self._recorded.setdefault(key, [])
            trained, before = (self._trained(key[0], each) for each in (parts, recorded))
            both = min(len(trained), len(before))
            assert trained[:both] == before[:both], f"{key}: {parts} after {recorded}"
            # As the record's file: what is cut in another way takes the place of all behind it.
            if recorded[: len(parts)] != parts:
                self._recorded[key] = parts

    def _trained(self, source: str, parts: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """The parts, of the groups that are trained: one that fails may do so before it is cut."""
        trained_parts: list[list[int]] = []
        for positions in parts:
            fates = [(place, self._expected.fate(source, (place, 0))) for place in positions]
            trained_parts.append([place for place, fate in fates if fate == "trained"])
        return [positions for positions in trained_parts if positions]


def parts_of(run: Simulation) -> Mapping[tuple[str, int], list[tuple[int, ...]]]:
    """What a run has cut, with parts counted from 0 in each Step."""
    formed_parts: Parts = {}
    for _, message in run.history.instructions:
        if isinstance(message, PartFormed):
            parts = formed_parts.setdefault((message.source, message.step), [])
            assert message.part == len(parts), f"part {message.part} after {len(parts)}"
            parts.append(message.positions)
    return formed_parts
