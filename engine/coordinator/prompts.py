"""The prompts of one source, and the state of each.

    running    some row of it may still come            -> finished, rejected, dropped
    finished   every row of every node is decided       -> taken
    rejected   a refilling select kept nothing of it    -> retired at once, its credit returned
    dropped    a row of it failed for good              -> retired at once, its credit returned
    taken      its rows form the Step under way         -> retired when the Step is trained

Owns: which prompts are outstanding, in which slot each is, and which positions are retired. Does
not own: their rows (prompt_table.py), nor how many are admitted (admission.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataflow.arrays import all_true
from dataflow.batch import Keys
from engine.coordinator.lost_rows import lengthen
from engine.protocol.refs import Key, SourceCut

FREE, RUNNING, FINISHED, REJECTED, DROPPED, TAKEN = range(6)
FIRST_SLOTS = 64
NO_PART = -1


class PromptStates:
    """Arrays with an entry for each slot; a slot is an outstanding prompt, or free."""

    def __init__(self) -> None:
        self.next = 0
        self.watermark = 0
        self._retired: set[int] = set()
        self.status = np.zeros(FIRST_SLOTS, dtype=np.uint8)
        self.count = [FIRST_SLOTS, 0, 0, 0, 0, 0]
        """Slots in each state: every event asks for these, and most change none."""
        self.position = np.zeros(FIRST_SLOTS, dtype=np.int64)
        self.attempt = np.zeros(FIRST_SLOTS, dtype=np.int32)
        self.begun = np.zeros(FIRST_SLOTS, dtype=np.int32)
        """The version that its oldest row was made with, or that it can begin with."""
        self.cohort = np.zeros(FIRST_SLOTS, dtype=np.int64)
        self.order = np.zeros(FIRST_SLOTS, dtype=np.int64)
        """Number of its admission: the age of a prompt among those of one version."""
        self.failed = np.zeros(FIRST_SLOTS, dtype=bool)
        self.part = np.full(FIRST_SLOTS, NO_PART, dtype=np.int64)
        """The part of a streamed Step that it is in."""
        self.in_cut = np.zeros(FIRST_SLOTS, dtype=bool)
        """Whether it has ended, so that it has a part or is about to get one."""
        self.admissions = 0
        self._by_position: tuple[np.ndarray, np.ndarray] | None = None
        self._slot_of: dict[int, int] = {}
        """The same, for one position at a time."""
        self._asked: tuple[Keys, np.ndarray] | None = None
        """The last keys that were looked for, and their slots: a chunk's end has the keys of its
        rows, and nothing has moved between.
        """

    def admit(self, positions: Sequence[int], attempts: Sequence[int], version: int) -> np.ndarray:
        """Admit prompts as one cohort that can begin with a version; returns their slots."""
        slots = self._free_slots(len(positions))
        self.position[slots] = positions
        self.attempt[slots] = attempts
        self.begun[slots] = version
        self.move(slots, RUNNING)
        self.order[slots] = self.admissions + np.arange(len(slots))
        self.cohort[slots] = self.admissions
        self.failed[slots] = False
        self.part[slots] = NO_PART
        self.in_cut[slots] = False
        self.admissions += len(slots)
        self.next = max(self.next, max(positions, default=-1) + 1)
        self._by_position = None
        self._slot_of.update(zip(positions, slots.tolist(), strict=True))
        return slots

    @property
    def outstanding(self) -> int:
        """Prompts that were admitted and are not retired; finished and taken ones count."""
        return len(self.status) - self.count[FREE]

    @property
    def running(self) -> bool:
        """Whether some prompt is on its way."""
        return self.count[RUNNING] > 0

    def slots(self, *states: int) -> np.ndarray:
        """Slots in one of these states, in the order of their admission."""
        nonempty = [state for state in states if self.count[state]]
        if not nonempty:
            return np.zeros(0, dtype=np.int64)
        is_in_one = self.status == nonempty[0]
        for state in nonempty[1:]:
            is_in_one |= self.status == state
        slots = is_in_one.nonzero()[0]
        return slots[self.order[slots].argsort(kind="stable")]

    def move(self, slots: np.ndarray, state: int) -> None:
        """Put these in another state."""
        self._asked = None
        counts = np.bincount(self.status[slots], minlength=len(self.count))
        for old_state, count in enumerate(counts.tolist()):
            self.count[old_state] -= count
        self.status[slots] = state
        self.count[state] += len(slots)

    def find(self, keys: Keys) -> np.ndarray:
        """The slot of each key's prompt; -1 where it does not run, or not in this attempt."""
        if self._asked is None or self._asked[0] is not keys:
            self._asked = (keys, self._find(keys))
        return self._asked[1]

    def _find(self, keys: Keys) -> np.ndarray:
        if self._by_position is None:
            used = (self.status != FREE).nonzero()[0]
            used = used[self.position[used].argsort()]
            self._by_position = (self.position[used], used)
        positions, used = self._by_position
        if not len(used):
            return np.full(len(keys), -1, dtype=np.int64)
        at = np.minimum(positions.searchsorted(keys.position), len(used) - 1)
        slots = used[at]
        same = (positions[at] == keys.position) & (self.attempt[slots] == keys.attempt)
        same &= self.status[slots] == RUNNING
        return slots if all_true(same) else np.where(same, slots, -1)

    def find_one(self, position: int, attempt: int) -> int:
        """The same for one prompt, without arrays."""
        slot = self._slot_of.get(position, -1)
        if slot >= 0 and (self.status.item(slot) != RUNNING or self.attempt.item(slot) != attempt):
            return -1
        return slot

    def sort_slots(self, slots: np.ndarray) -> np.ndarray:
        """Sort slots by their positions."""
        return slots[self.position[slots].argsort()] if len(slots) > 1 else slots

    def keys(self, slots: np.ndarray, samples: np.ndarray) -> Keys:
        """The keys of these samples of these prompts."""
        return Keys(self.position[slots], samples.astype(np.int32), self.attempt[slots])

    def run_again(self, slots: np.ndarray) -> None:
        """Rows of these are made again."""
        self.move(slots, RUNNING)
        self._by_position = None

    def retire(self, slots: np.ndarray) -> None:
        """Their positions never come again."""
        self._retired.update(self.position[slots].tolist())
        while self.watermark in self._retired:
            self._retired.discard(self.watermark)
            self.watermark += 1

    def free(self, slots: np.ndarray) -> None:
        """Forget these prompts."""
        self.move(slots, FREE)
        self._by_position = None
        for position in self.position[slots].tolist():
            del self._slot_of[position]

    def cut_state(self, again: Sequence[tuple[int, int]]) -> SourceCut:
        """Every position's fate. again: (position, attempt) that wait to be admitted again."""
        # A cut says the last attempt that was admitted: whoever takes it up admits the next one.
        waiting = [(position, 0, attempt - 1) for position, attempt in again]
        return SourceCut(
            next=self.next,
            watermark=self.watermark,
            retired=tuple(sorted(self._retired)),
            running=tuple(self._keys_in(RUNNING) + waiting),
            finished=tuple(self._keys_in(FINISHED)),
        )

    def _keys_in(self, state: int) -> list[Key]:
        slots = self.slots(state)
        positions, attempts = self.position[slots].tolist(), self.attempt[slots].tolist()
        pairs = zip(positions, attempts, strict=True)
        return [(position, 0, attempt) for position, attempt in pairs]

    def restore(self, cut: SourceCut) -> None:
        """Take up what a cut says of the positions."""
        self.watermark, self._retired = cut.watermark, set(cut.retired)

    def _free_slots(self, count: int) -> np.ndarray:
        while self.count[FREE] < count:
            self._grow(2 * len(self.status))
        return np.flatnonzero(self.status == FREE)[:count]

    def _grow(self, slots: int) -> None:
        self.count[FREE] += slots - len(self.status)
        names = ("status", "position", "attempt", "begun", "cohort", "order", "failed", "in_cut")
        for name in names:
            setattr(self, name, lengthen(getattr(self, name), slots))
        no_parts = np.full(slots - len(self.part), NO_PART, dtype=np.int64)
        self.part = np.concatenate([self.part, no_parts])
