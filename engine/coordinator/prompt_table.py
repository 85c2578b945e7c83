"""One source's prompts on their way to the cut.

Owns: which prompts are outstanding, which of their rows have come, which rows a node may
run on next. Does not own: how many prompts are admitted and which form a Step
(admission.py), nor who runs a chunk (core.py).

A prompt is in one of these states:

    running    some row of it may still come            -> finished, rejected, dropped
    finished   every row of every node is decided       -> taken
    rejected   a refilling select kept nothing of it    -> retired at once, its credit returned
    dropped    a row of it failed for good              -> retired at once, its credit returned
    taken      its rows form the Step under way         -> retired when the Step is trained

Where rows are lost, a finished prompt runs again, or begins again with the next attempt (`lose`); a
taken one whose Step comes to nothing is finished again.

A prompt leaves `running` only when every node above the cut has decided every row of it: were it to
leave as soon as its fate is known, then which other chunks it is in would depend on who was faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks, Readings
from engine.coordinator.reading import held, lane_readings
from engine.coordinator.reduced import reduced_state, uppers
from engine.coordinator.refs import NO_VERSION, Key, Ref, SourceCut
from engine.coordinator.tables import (
    ABSENT,
    NO_BLOCK,
    PENDING,
    PRESENT,
    RowTable,
    StepRows,
    by_prompt,
    input_state,
    longer,
    read_by,
)
from engine.plan.plan import PlannedNode

FREE, RUNNING, FINISHED, REJECTED, DROPPED, TAKEN = range(6)
_FIRST_SLOTS = 64
_NEWEST = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """Rows that a node may run on now. holds: the numbers of the blocks that the chunk reads."""

    node: PlannedNode
    keys: Keys
    inputs: Readings
    holds: frozenset[int] = frozenset()


class PromptTable:
    """The prompts of one source. `nodes`: the source and what stands on it above the cut, in
    running order.

    cut: names of the nodes whose rows the Step (or the evaluation) reads.
    """

    def __init__(
        self, source: str, nodes: Sequence[PlannedNode], cut: Sequence[str], blocks: Blocks
    ) -> None:
        self.source = source
        self.nodes = tuple(nodes)
        self.cut = tuple(dict.fromkeys(cut))
        self.blocks = blocks
        self._gates = {n.name: frozenset(n.gates) for n in self.nodes}
        self._uppers = uppers(self.nodes)
        self.next = 0
        self.watermark = 0
        self._retired: set[int] = set()
        self._tables = {n.name: RowTable(n.rows, _FIRST_SLOTS) for n in self.nodes}
        self._issued = {n.name: np.zeros((_FIRST_SLOTS, n.inner), dtype=bool) for n in self.nodes}
        self.status = np.zeros(_FIRST_SLOTS, dtype=np.uint8)
        self.count = [_FIRST_SLOTS, 0, 0, 0, 0, 0]
        """Slots in each state: every event asks for these, and most change none."""
        self.position = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.attempt = np.zeros(_FIRST_SLOTS, dtype=np.int32)
        self.begun = np.zeros(_FIRST_SLOTS, dtype=np.int32)
        self.cohort = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.order = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        """Number of its admission: the age of a prompt among those of one version."""
        self._failed = np.zeros(_FIRST_SLOTS, dtype=bool)
        self._dirty = np.zeros(_FIRST_SLOTS, dtype=bool)
        self._touched: set[str] = set()
        self._unmade = False
        """Whether rows have been lost that are made again: a gate may then be there, and who has
        the bytes not.
        """
        self._by_position: tuple[np.ndarray, np.ndarray] | None = None
        self.admissions = 0

    # --- admission --------------------------------------------------------------------------------

    def admit(self, positions: Sequence[int], attempts: Sequence[int], version: int) -> Ready:
        """Take up prompts as one cohort; returns the source's rows to make. `version`: the one they
        can begin with.
        """
        slots = self._free_slots(len(positions))
        self.position[slots] = positions
        self.attempt[slots] = attempts
        self.begun[slots] = version
        self._move(slots, RUNNING)
        self.order[slots] = self.admissions + np.arange(len(slots))
        self.cohort[slots] = self.admissions
        self._failed[slots] = False
        self.admissions += len(slots)
        self.next = max(self.next, max(positions, default=-1) + 1)
        self._by_position = None
        return Ready(self.nodes[0], self._keys(slots, np.zeros(len(slots), dtype=np.int64)), {})

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
        if not sum(self.count[state] for state in states):
            return np.zeros(0, dtype=np.int64)
        found = np.flatnonzero(np.any([self.status == state for state in states], axis=0))
        return found[np.argsort(self.order[found], kind="stable")]

    def _move(self, slots: np.ndarray, state: int) -> None:
        for old, count in enumerate(
            np.bincount(self.status[slots], minlength=len(self.count)).tolist()
        ):
            self.count[old] -= count
        self.status[slots] = state
        self.count[state] += len(slots)

    # --- what comes in ----------------------------------------------------------------------------

    def produced(self, node: str, ref: Ref) -> int:
        """Rows have come. Those that nobody waits for (of a retired prompt, an older attempt,
        twice) are let go.

        Returns the block's number.
        """
        table = self._tables[node]
        slots = self._running_slots(ref.keys)
        samples = ref.keys.sample
        wanted = (slots >= 0) & (samples < table.rows)
        wanted[wanted] = table.state[slots[wanted], samples[wanted]] == PENDING
        rows = np.flatnonzero(wanted)
        number = self.blocks.add(ref, len(rows))
        slots = slots[rows]
        table.put(slots, samples[rows], number, rows.astype(np.int32), ref)
        self._mark(node, slots)
        return number

    def closed(self, node: PlannedNode, keys: Keys) -> Key | None:
        """A chunk is done: a select's missing rows are absent; returns the first other row that
        never came, if any.
        """
        slots, samples = self._located(keys, node)
        table = self._tables[node.name]
        missing = table.state[slots, samples] == PENDING
        if not missing.any():
            return None
        if node.relation == "subset":
            table.state[slots[missing], samples[missing]] = ABSENT
            self._mark(node.name, slots[missing])
            return None
        first = int(np.flatnonzero(missing)[0])
        return (
            int(self.position[slots[first]]),
            int(samples[first]),
            int(self.attempt[slots[first]]),
        )

    def drop(self, node: str, position: int, attempt: int) -> bool:
        """The group of this prompt is given up: nothing of it goes on below `node`, and it never
        reaches a Step.

        Returns False where it was given up already, is retired, or is of another attempt.
        """
        slots = self._running_slots(Keys.of([position], attempt=[attempt]))
        slots = slots[slots >= 0]
        if not len(slots):
            return False
        first = not self._failed[slots[0]]
        self._failed[slots] = True
        self._tables[node].state[slots] = ABSENT
        self._tables[node].given_up[slots] = True
        self._issued[node][slots] = True
        self._mark(node, slots)
        return bool(first)

    def _mark(self, node: str, slots: np.ndarray) -> None:
        self._dirty[slots] = True
        self._touched.add(node)

    def _located(self, keys: Keys, node: PlannedNode) -> tuple[np.ndarray, np.ndarray]:
        """Slots and samples of the output rows of a chunk, as far as their prompts still run."""
        out = keys.expand(node.rows // node.inner) if node.rows > node.inner else keys
        slots = self._running_slots(out)
        return slots[slots >= 0], out.sample[slots >= 0]

    def _running_slots(self, keys: Keys) -> np.ndarray:
        """The slot of each key's prompt; -1 where that prompt does not run, or not in this attempt."""
        if self._by_position is None:
            used = np.flatnonzero(self.status != FREE)
            used = used[np.argsort(self.position[used])]
            self._by_position = (self.position[used], used)
        positions, used = self._by_position
        if not len(used):
            return np.full(len(keys), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(positions, keys.position), len(used) - 1)
        slots = used[at]
        same = (positions[at] == keys.position) & (self.attempt[slots] == keys.attempt)
        return np.where(same & (self.status[slots] == RUNNING), slots, -1)

    # --- what can run -----------------------------------------------------------------------------

    def pump(self) -> list[Ready]:
        """Everything that can run now and could not before. Absent rows are passed on downstream on
        the way.
        """
        if not self._touched:
            return []
        slots = self._sorted(np.flatnonzero(self._dirty & (self.status == RUNNING)))
        self._dirty[:] = False
        found: list[Ready] = []
        if len(slots):
            for node in self.nodes[1:]:
                if not self._touched.isdisjoint(self._gates[node.name]):
                    found += self._ready(node, slots)
            self._settle(slots)
        self._touched.clear()
        return found

    def _sorted(self, slots: np.ndarray) -> np.ndarray:
        return slots[np.argsort(self.position[slots])] if len(slots) > 1 else slots

    def _ready(self, node: PlannedNode, slots: np.ndarray) -> Iterator[Ready]:
        """The chunks of a node that can begin, now that rows of these prompts have come or turned
        out absent.
        """
        state = self._input_state(node, slots)
        if (state == ABSENT).any():
            self._pass_on_absent(node, slots, state)
        if node.chunking == "cohort":
            whole = slots[(state != PENDING).all(axis=1)]
            if len(whole):
                yield from self._whole_cohorts(node, whole)
            return
        ready = (state == PRESENT) & ~self._issued[node.name][slots]
        if node.scope == "group":
            ready &= (state != PENDING).all(axis=1)[:, None]
        if ready.any():
            yield from self._issue(node, slots, ready)

    def _whole_cohorts(self, node: PlannedNode, slots: np.ndarray) -> Iterator[Ready]:
        """The chunks of each cohort of these prompts of which every row is decided."""
        for number in np.unique(self.cohort[slots]):
            mates = self._sorted(np.flatnonzero((self.status == RUNNING) & (self.cohort == number)))
            state = self._input_state(node, mates)
            ready = (state == PRESENT) & ~self._issued[node.name][mates]
            if (state != PENDING).all() and ready.any():
                yield from self._issue(node, mates, ready)

    def _input_state(self, node: PlannedNode, slots: np.ndarray) -> np.ndarray:
        """uint8 [slots, inner]: PRESENT where every input has come, ABSENT where some input never
        will.
        """
        above, unmade = self._uppers.get(node.name, ()), self._unmade
        reduced = partial(
            reduced_state, tables=self._tables, slots=slots, above=above, unmade=unmade
        )
        return input_state(node, self._tables, slots, unmade=unmade, reduced=reduced)

    def _pass_on_absent(self, node: PlannedNode, slots: np.ndarray, state: np.ndarray) -> None:
        gone = (state == ABSENT) & ~self._issued[node.name][slots]
        if gone.any():
            where, sample = np.nonzero(np.repeat(gone, node.rows // node.inner, axis=1))
            self._tables[node.name].state[slots[where], sample] = ABSENT
            self._issued[node.name][slots] |= gone
            self._touched.add(node.name)

    def _issue(self, node: PlannedNode, slots: np.ndarray, ready: np.ndarray) -> Iterator[Ready]:
        """These rows in chunks of whole prompts; `slots` are sorted by position, so the rows are
        sorted by key.
        """
        where, samples = np.nonzero(ready)
        at = slots[where]
        self._issued[node.name][at, samples] = True
        if node.chunks == 1:
            yield self._chunk(node, at, samples)
            return
        tokens = self.blocks.tokens(self._chunk(node, at, samples).inputs, len(at))
        for rows in by_prompt(self.position[at], tokens, node.chunks):
            yield self._chunk(node, at[rows], samples[rows])

    def _chunk(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> Ready:
        inputs = lane_readings(node, self._tables, self.blocks, at, samples, self._keys)
        return Ready(node, self._keys(at, samples), inputs, held(inputs))

    def _keys(self, slots: np.ndarray, samples: np.ndarray) -> Keys:
        return Keys(self.position[slots], samples.astype(np.int32), self.attempt[slots])

    # --- at the cut -------------------------------------------------------------------------------

    def _settle(self, slots: np.ndarray) -> None:
        """Prompts of which every row has come, or never will, are finished, rejected or dropped."""
        done = slots
        for node in reversed(self.nodes):  # the last ones are the last to be decided
            done = done[(self._tables[node.name].state[done] != PENDING).all(axis=1)]
            if not len(done):
                return
        self._move(done, FINISHED)
        for node in self.nodes:
            if node.refill:
                kept = (self._tables[node.name].state[done] == PRESENT).any(axis=1)
                self._move(done[~kept], REJECTED)
        self._move(done[self._failed[done]], DROPPED)
        self._date(done)

    def _date(self, slots: np.ndarray) -> None:
        """Set `begun` to the oldest version that any row of a prompt was made with, where one was."""
        oldest = np.full(len(slots), _NEWEST, dtype=np.int32)
        for table in self._tables.values():
            version = table.version[slots]
            oldest = np.minimum(
                oldest, np.where(version == NO_VERSION, _NEWEST, version).min(axis=1)
            )
        known = oldest != _NEWEST
        self.begun[slots[known]] = oldest[known]

    def oldest(self, slots: np.ndarray) -> tuple[str, int]:
        """The node that made the oldest row of these prompts, and its version; ("", NO_VERSION)
        where none has one.
        """
        made = [(table.oldest(slots), name) for name, table in self._tables.items()]
        version, name = min((m for m in made if m[0] != NO_VERSION), default=(NO_VERSION, ""))
        return name, version

    def take(self, slots: np.ndarray) -> None:
        """These finished prompts form the Step under way."""
        self._move(slots, TAKEN)

    def rows(self, node: str, slots: np.ndarray) -> StepRows:
        """The rows of a node that have come for these prompts."""
        table, slots = self._tables[node], self._sorted(slots)
        where, samples = np.nonzero(table.state[slots] == PRESENT)
        at = slots[where]
        return StepRows(self._keys(at, samples), table.block[at, samples], table.row[at, samples])

    def versions(self, slots: np.ndarray) -> np.ndarray:
        """int32: for each row at the cut that a trained Model had a part in, the oldest version of
        its lineage.

        Where nodes of different widths cross the cut, the rows are those of the widest; of two
        generations whose widths are no multiples of each other, those of both.
        """
        widths = {self._tables[name].rows for name in self.cut}
        widest = sorted(
            w for w in widths if not any(other > w and other % w == 0 for other in widths)
        )
        return np.concatenate([self._versions_at(slots, width) for width in widest])

    def _versions_at(self, slots: np.ndarray, width: int) -> np.ndarray:
        """The same, of the nodes at the cut with so many rows a prompt."""
        there = np.zeros((len(slots), width), dtype=bool)
        for name in self.cut:
            table = self._tables[name]
            if table.rows == width:
                there |= table.state[slots] == PRESENT
        oldest = np.full((len(slots), width), _NEWEST, dtype=np.int32)
        for table in self._tables.values():
            if width % table.rows == 0:
                version = np.repeat(table.version[slots], width // table.rows, axis=1)
                oldest = np.minimum(oldest, np.where(version == NO_VERSION, _NEWEST, version))
        return oldest[there & (oldest != _NEWEST)]

    def retire(self, slots: np.ndarray) -> None:
        """Forget these prompts for good; their rows are wanted no longer."""
        self._retired.update(self.position[slots].tolist())
        while self.watermark in self._retired:
            self._retired.discard(self.watermark)
            self.watermark += 1
        self._forget(slots)

    def again(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """Give these prompts up in their present attempt; returns (position, next attempt) to admit
        again.
        """
        pairs = list(
            zip(self.position[slots].tolist(), (self.attempt[slots] + 1).tolist(), strict=True)
        )
        self._forget(slots)
        return pairs

    # --- losses -----------------------------------------------------------------------------------

    def reads(self, slots: np.ndarray, blocks: frozenset[int]) -> bool:
        """Whether a row of these prompts lies in one of these blocks."""
        return any(table.lies_in(slots, blocks).any() for table in self._tables.values())

    def give_back(self, slots: np.ndarray) -> None:
        """The Step that these prompts were taken for comes to nothing."""
        self._move(slots, FINISHED)

    def lose(self, blocks: frozenset[int], *, trained: Set[str]) -> tuple[np.ndarray, list[Ready]]:
        """Rows in these blocks are gone for good. Those of a node that reads a trained Model
        (`trained`) cannot be made again, as the weights have moved on: the slots of their prompts
        are returned, to begin once more. The rows of the other nodes are: what is to be made by the
        source is returned, the rest comes with `pump`.
        """
        slots = self.slots(RUNNING, FINISHED)
        gone = {name: table.lies_in(slots, blocks) for name, table in self._tables.items()}
        harmed = np.zeros(len(slots), dtype=bool)
        for name in trained & gone.keys():
            harmed |= gone[name].any(axis=1)
        found: list[Ready] = []
        for node in self.nodes:
            where, samples = np.nonzero(gone[node.name] & ~harmed[:, None])
            if len(where):
                found += self._unmake(node, slots[where], samples)
        self._dirty[self.slots(RUNNING)] = True  # of who is gone the cohort no longer waits
        self._touched.update(n.name for n in self.nodes)
        return slots[harmed], found

    def _unmake(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> list[Ready]:
        table = self._tables[node.name]
        if not self._unmade:
            self._unmade = True
            self._gates = {n.name: read_by(n) for n in self.nodes}
        self.blocks.drop(table.block[at, samples])
        table.state[at, samples] = PENDING
        table.block[at, samples] = NO_BLOCK
        table.version[at, samples] = NO_VERSION
        self._move(np.unique(at), RUNNING)
        self._by_position = None
        return self._unissue(node, at, samples // (node.rows // node.inner))

    def unissue(self, node: PlannedNode, keys: Keys) -> list[Ready]:
        """A chunk of these rows came to nothing: what has not come of it is to be made by another
        one. What is to be made by the source is returned, the rest comes with `pump`.
        """
        slots = self._running_slots(keys)
        at, samples = slots[slots >= 0], keys.sample[slots >= 0]
        factor = node.rows // node.inner
        state = self._tables[node.name].state[at].reshape(len(at), node.inner, factor)
        left = (state[np.arange(len(at)), samples] == PENDING).any(axis=1)
        return self._unissue(node, at[left], samples[left])

    def _unissue(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> list[Ready]:
        if node.relation == "source":
            prompts = self._sorted(np.unique(at))
            ready = Ready(node, self._keys(prompts, np.zeros(len(prompts), dtype=np.int64)), {})
            return [ready] if len(prompts) else []
        self._issued[node.name][at, samples] = False
        self._dirty[at] = True
        self._touched.update(node.gates)
        return []

    def _forget(self, slots: np.ndarray) -> None:
        for name, table in self._tables.items():
            self.blocks.drop(table.clear(slots))
            self._issued[name][slots] = False
        self._move(slots, FREE)
        self._dirty[slots] = False
        self._by_position = None

    # --- the cut of a checkpoint ------------------------------------------------------------------

    def cut_state(self, again: Sequence[tuple[int, int]]) -> SourceCut:
        """Every position's fate. `again`: (position, attempt) that wait to be admitted a further
        time.
        """
        running = [(int(self.position[s]), 0, int(self.attempt[s])) for s in self.slots(RUNNING)]
        waiting = [(p, 0, a - 1) for p, a in again]
        finished = [(int(self.position[s]), 0, int(self.attempt[s])) for s in self.slots(FINISHED)]
        return SourceCut(
            next=self.next,
            watermark=self.watermark,
            retired=tuple(sorted(self._retired)),
            running=tuple(running + waiting),
            finished=tuple(finished),
        )

    def restore(
        self, cut: SourceCut, rows: Mapping[str, Ref], version: int
    ) -> list[tuple[int, int]]:
        """Take up a cut: finished prompts with their rows; returns (position, attempt) of those
        that begin again.
        """
        self.watermark, self._retired = cut.watermark, set(cut.retired)
        if cut.finished:
            self.admit([p for p, _, _ in cut.finished], [a for _, _, a in cut.finished], version)
            for name, ref in rows.items():
                self.produced(name, ref)
            slots = self.slots(RUNNING)
            for (
                table
            ) in self._tables.values():  # what a select had taken away is known by its absence
                state = table.state[slots]
                table.state[slots] = np.where(state == PENDING, ABSENT, state)
            self._date(slots)
            self._move(slots, FINISHED)
            self._dirty[:] = False
            self._touched.clear()
        self.next = cut.next
        return [(p, a + 1) for p, _, a in cut.running]

    def stored(self, node: str) -> StepRows:
        """The rows of a node that belong to finished prompts."""
        return self.rows(node, self.slots(FINISHED))

    def waiting(self) -> list[str]:
        """For the watchdog: which node waits for whose rows, in words."""
        lines = []
        slots = self.slots(RUNNING)
        for node in self.nodes:
            missing = self._tables[node.name].state[slots] == PENDING
            if missing.any():
                gates = ", ".join(node.gates) or "its data"
                first = int(self.position[slots[missing.any(axis=1)][0]])
                count = int(missing.sum())
                lines.append(
                    f"{node.name}: {count} rows have not come (first: prompt {first}); it reads"
                    f" {gates}"
                )
        return lines

    # --- slots ------------------------------------------------------------------------------------

    def _free_slots(self, count: int) -> np.ndarray:
        found = np.flatnonzero(self.status == FREE)
        while len(found) < count:
            self._grow(2 * len(self.status))
            found = np.flatnonzero(self.status == FREE)
        return found[:count]

    def _grow(self, slots: int) -> None:
        self.count[FREE] += slots - len(self.status)
        for table in self._tables.values():
            table.grow(slots)
        for name, old in self._issued.items():
            self._issued[name] = longer(old, slots)
        for name in (
            "status",
            "position",
            "attempt",
            "begun",
            "cohort",
            "order",
            "_failed",
            "_dirty",
        ):
            setattr(self, name, longer(getattr(self, name), slots))
