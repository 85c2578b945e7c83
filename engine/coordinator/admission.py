"""One source's credit: how many prompts may be outstanding, and which of them form a Step.

Owns: the bound on outstanding prompts, what is admitted next, the intake, the bound on how much a
refilling select may reject. Does not own: the policies' formulas (intake.py), where the prompts
stand (prompt_table.py), nor the moments that decide when any of this happens (course.py).

Outstanding prompts (admitted, not retired) never exceed (1 + max_lag) * batch, nor what the
remaining Steps can train. Beyond one batch none is admitted that memory would not hold with rows as
long as they are just now (live_tokens.py), nor any while some outbox spills to files: a Step can
always be formed, so that it ends. Back-pressure acts here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dataflow.arrays import all_true, any_true
from engine.coordinator import intake
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.live_tokens import LiveTokens
from engine.coordinator.lost_rows import EmptiedGroup
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import DROPPED, FINISHED, REJECTED, RUNNING, TAKEN
from engine.plan.plan import PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.protocol.refs import Ref, SourceCut

_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Vain:
    """Prompts given up as too old though admitted and made since the last Step was formed: how
    many, at which version, and the node and version of the oldest of their rows.
    """

    prompts: int = 0
    version: int = 0
    node: str = ""
    oldest: int = 0


class Admission:
    """The credit of one source. steps None: one pass over its rows."""

    def __init__(self, source: PlannedSource, table: PromptTable, *, steps: int | None) -> None:
        self.source = source
        self.table = table
        self.live = LiveTokens(source, table.nodes)
        self.rows = 0
        """Rows in one pass; known once the source has opened."""
        self.admitted = 0
        self.dropped = 0
        self.overlong = 0
        """Prompts that a node's own policy gave up: generate(overlong_prompt="drop")."""
        self.barren = 0
        """The same, since the last Step was formed."""
        self.lost_rows = 0
        """Rows that were lost alone."""
        self._lost_share = 0.0
        """Those of them that failed, each its share of a prompt, but for dropped prompts."""
        self._steps = steps
        self._again: list[tuple[int, int]] = []
        """(position, attempt) that are to begin again."""
        self._rejected = 0
        """Prompts that refilling selects kept nothing of since the last Step was formed."""
        self.vain = Vain()
        self._formed_at = 0
        """Admissions before the last Step was formed."""
        self._early: tuple[np.ndarray, np.ndarray] | None = None
        """Slots that were chosen for the next Step, and the admissions that they are of."""

    @property
    def prompt_counts(self) -> tuple[int, int, int, int]:
        """Prompts: finished and in no Step yet, of a Step, outstanding, the most outstanding."""
        prompts, most = self.table.prompts, self.live.most()
        return prompts.count[FINISHED], self.source.batch, prompts.outstanding, most

    # --- what comes in ----------------------------------------------------------------------------

    def admit(self, version: int, *, sparing: bool = False) -> list[NodeChunk]:
        """Admit all that the credit allows, in cohorts; returns the source's chunks. sparing: no
        more than one batch is to be outstanding.
        """
        chunks = []
        room = self._room(version, 0 if sparing else self.source.max_lag)
        while room > 0:
            chosen = self._next_prompts(min(room, self.source.cohort or room))
            if not chosen:
                break
            room -= len(chosen)
            self.admitted += len(chosen)
            positions = [position for position, _ in chosen]
            attempts = [attempt for _, attempt in chosen]
            chunks.append(self.table.admit(positions, attempts, version))
        return chunks

    def foresee(self, version: int) -> list[tuple[int, int]]:
        """The (position, attempt) of the prompts that `admit` will admit at once when the Step is
        over that starts from this version, without a lag; none where they are several cohorts.
        """
        left = self.table.prompts.outstanding - self.table.prompts.count[TAKEN]
        room = self._room_beside(left, version + 1, 0)
        if room <= 0 or room > (self.source.cohort or room):
            return []
        return self._list_next(room)

    @property
    def failed_prompts(self) -> float:
        """What counts against the error budget; each failed row once."""
        # Rounded, as a sum of thirds may be a little more than the whole that it is.
        return round(self.dropped + self._lost_share, 6)

    def note_given_up(self) -> None:
        """A node's own policy gave a prompt up."""
        self.overlong += 1
        self.barren += 1

    def note_lost(self, node: PlannedNode, *, failed: bool) -> None:
        """A row of a node was lost alone. One that a node's own policy gave up is not counted."""
        if failed:
            self.lost_rows += 1
            self._lost_share += 1 / node.rows

    def _note_emptied(self, group: EmptiedGroup) -> None:
        """A prompt is dropped, as its last rows were lost alone."""
        if not group.failed:
            self.note_given_up()
            return
        self.dropped += 1
        self._lost_share -= group.share

    def give_back(self) -> bool:
        """Retire what was rejected or dropped, which returns its credit. Whether there was any."""
        count = self.table.prompts.count
        if not count[REJECTED] and not count[DROPPED]:
            return False
        for group in self.table.take_emptied():
            self._note_emptied(group)
        self._rejected += count[REJECTED]
        self.table.retire(self.table.prompts.slots(REJECTED, DROPPED))
        return True

    def why_starved(self, step: int, place: Callable[[str], str] = str) -> str:
        """Why no attempt is left to fill a Step; empty while one is, or a row is on its way."""
        if not self._is_spent() or self.table.prompts.running:
            return ""
        finished = self.table.prompts.count[FINISHED]
        most, name = min((n.max_attempts, n.name) for n in self.table.nodes if n.refill)
        return (
            f"step {step}: {place(name)} kept {finished} of {finished + self._rejected} groups, and"
            f" {self.source.batch} are wanted; max_attempts is {most}: the data is too easy or too"
            " hard, or the reward constant"
        )

    def _room(self, version: int, ahead: int) -> int:
        room = self._room_beside(self.table.prompts.outstanding, version, ahead)
        return 0 if room <= 0 or self._is_spent() else room

    def _room_beside(self, outstanding: int, version: int, ahead: int) -> int:
        """How many more prompts the bound allows beside these."""
        room = (1 + ahead) * self.source.batch
        if self.live.is_bounded:
            room = min(room, self.live.most())
        if self._steps is not None:
            room = min(room, (self._steps - version) * self.source.batch)
        return room - outstanding

    def _is_spent(self) -> bool:
        """Whether the refilling selects allow no further prompt for a Step that is not full yet."""
        if not self._rejected:
            return False
        most = min(n.max_attempts for n in self.table.nodes if n.refill)
        finished, batch = self.table.prompts.count[FINISHED], self.source.batch
        return finished < batch and finished + self._rejected >= most * batch

    def _next_prompts(self, most: int) -> list[tuple[int, int]]:
        chosen = self._list_next(most)
        self._again = self._again[most:]
        return chosen

    def _list_next(self, most: int) -> list[tuple[int, int]]:
        chosen = self._again[:most]
        first = self.table.prompts.next
        end = min(first + most - len(chosen), self._end)
        return chosen + [(position, 0) for position in range(first, end)]

    @property
    def _end(self) -> int:
        """The first position that is never made; with a number of Steps the source has no end."""
        return self.rows if self._steps is None else _ENDLESS

    # --- what is taken out ------------------------------------------------------------------------

    def take(self, version: int) -> np.ndarray:
        """Slots of the prompts that can form the next Step, in admission order; empty if too few.

        Under `drop`, finished prompts that are too old begin again. At the end of the data a short
        batch is taken as it is. What was chosen early is taken if it may be.
        """
        if self.source.intake == "drop":
            self._give_up_old(version)
        if self._early is not None:
            slots, order = self._early
            if self._may_form(slots, order, version):
                return slots
            self._early = None
        return self._choose(version)

    def choose_early(self, version: int) -> np.ndarray:
        """The slots that would form the Step that starts from this version, which is to come; empty
        if there are too few, or some would be too old. `take` then takes them, while the intake's
        policy allows it.
        """
        prompts, slots = self.table.prompts, self._choose(version)
        is_late = version - prompts.begun[slots] > self.source.max_lag
        if self.source.intake == "drop" and any_true(is_late):
            return slots[:0]
        self._early = slots, prompts.order[slots]
        return slots

    def _may_form(self, slots: np.ndarray, order: np.ndarray, version: int) -> bool:
        """Whether prompts that were chosen early are as they were then, and may be taken now."""
        prompts, source = self.table.prompts, self.source
        same = (prompts.status[slots] == FINISHED) & (prompts.order[slots] == order)
        if not all_true(same) or (len(slots) < source.batch and self._coming()):
            return False
        if source.intake != "exact":
            return True
        left = np.setdiff1d(prompts.slots(FINISHED, RUNNING), slots)
        return intake.is_in_time(
            prompts.begun[left], batch=source.batch, max_lag=source.max_lag, version=version
        )

    def _choose(self, version: int) -> np.ndarray:
        """Slots by the intake's policy, in admission order; empty if there are too few."""
        table, source = self.table, self.source
        last = not self._coming()
        if table.prompts.count[FINISHED] < source.batch and not last:
            return table.prompts.slots()
        finished = table.prompts.slots(FINISHED)
        begun = table.prompts.begun[finished]
        if source.intake != "exact":
            return finished[intake.choose_oldest(begun, batch=source.batch, last=last)]
        chosen = intake.choose_exact(
            begun,
            table.prompts.begun[table.prompts.slots(RUNNING)],
            batch=source.batch,
            max_lag=source.max_lag,
            version=version,
            last=last,
        )
        return finished[chosen]

    def _give_up_old(self, version: int) -> None:
        prompts = self.table.prompts
        finished = prompts.slots(FINISHED)
        begun = prompts.begun[finished]
        old = finished[intake.find_too_old(begun, max_lag=self.source.max_lag, version=version)]
        vain = old[prompts.order[old] >= self._formed_at]
        if len(vain):
            self.vain = Vain(self.vain.prompts + len(vain), version, *self.table.oldest(vain))
        self.begin_again(old)

    def begin_again(self, slots: np.ndarray) -> None:
        """Give these prompts up in this attempt; they are admitted again, before any other."""
        self._again += self.table.again(slots)

    def note_formed(self) -> None:
        """A Step is formed: count the attempts to fill the next one from 0."""
        self._rejected, self.barren, self.vain = 0, 0, Vain()
        self._formed_at = self.table.prompts.admissions
        self._early = None

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left to train: none to come, on its way or finished."""
        return not self.table.prompts.count[FINISHED] and not self._coming()

    def _coming(self) -> bool:
        """Whether some prompt is still to come, or on its way."""
        prompts = self.table.prompts
        return bool(self._again) or prompts.next < self._end or prompts.running

    def abandon(self) -> None:
        """The run is over: give up all prompts."""
        self.table.retire(self.table.prompts.slots(RUNNING, FINISHED, REJECTED, DROPPED, TAKEN))

    # --- the cut of a checkpoint ------------------------------------------------------------------

    def cut(self) -> SourceCut:
        """Every position's fate."""
        return replace(
            self.table.prompts.cut_state(self._again),
            admitted=self.admitted,
            dropped=self.dropped,
            overlong=self.overlong,
            lost_rows=self.lost_rows,
            lost_share=round(self._lost_share, 6),
        )

    def restore(self, cut: SourceCut, rows: dict[str, Ref], version: int) -> None:
        """Take up a cut: finished prompts with their rows; running ones begin once more."""
        self.admitted = cut.admitted - len(cut.running)
        self.dropped, self.overlong = cut.dropped, cut.overlong
        self.lost_rows, self._lost_share = cut.lost_rows, cut.lost_share
        self._again = self.table.restore(cut, rows, version)
        self._formed_at = self.table.prompts.admissions
