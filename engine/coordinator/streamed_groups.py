"""The groups of a synchronous source that are generated while others are not, and the watermark.

    a row of a first generation   counts as
    in no chunk yet               having no token
    under way                     as many tokens as its chunk's rows have at least (Produced)
    ended                         its length

Owns: which groups have ended, what no row is shorter than that has not, and the parts that follow.
Does not own: the order of parts (part_cut.py), the rows (prompt_table.py), nor what runs on a part.

First generations are those that no generation stands above: a judge's answers, made part by part,
change nothing of the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.part_cut import EndedGroup, PartCut
from engine.coordinator.prompts import FINISHED, RUNNING, TAKEN, PromptStates
from engine.coordinator.readiness import Readiness
from engine.coordinator.tables import PENDING, PRESENT, RowTable
from engine.plan.plan import PlannedNode
from engine.protocol.loop_messages import PartFormed


class StreamedGroups:
    """Of one source. roots: its first generations, with their tables. make_cut: that of a Step."""

    def __init__(
        self,
        source: str,
        roots: Sequence[tuple[str, RowTable]],
        prompts: PromptStates,
        readiness: Readiness,
        blocks: Blocks,
        make_cut: Callable[[int], PartCut],
    ) -> None:
        self._source = source
        self._roots = dict(roots)
        self._prompts = prompts
        self._readiness = readiness
        self._blocks = blocks
        self._make_cut = make_cut
        self._step = 1
        self._cut = make_cut(self._step)
        self._under_way: dict[NodeChunk, None] = {}
        """Chunks of first generations that have not ended, in the order of their begin."""
        self._has_news = False
        self._first = 0
        """The number of the Step's first part: numbers go on from Step to Step."""
        self._next = 0
        self._taken = 0
        """How many of the Step's parts were handed out."""
        self.parts: list[Sequence[EndedGroup]] = []
        """The groups of each part of the Step."""
        self._waiting: dict[int, EndedGroup] = {}
        """By slot, the groups that have ended and are in no part."""
        self.is_cut = False
        """Whether the Step has all of its parts, and none of the next is cut."""

    # --- what is heard ----------------------------------------------------------------------------

    def note_chunks(self, chunks: Sequence[NodeChunk]) -> None:
        """These chunks begin."""
        for chunk in chunks:
            if chunk.node.name in self._roots:
                self._under_way[chunk] = None

    def note_rows(self, chunk: NodeChunk) -> None:
        """Rows of a chunk have come."""
        self._has_news |= chunk in self._under_way

    def note_end(self, chunk: NodeChunk) -> None:
        """A chunk has ended: of a selection too, below which first generations may have no row."""
        self._under_way.pop(chunk, None)
        self._has_news = True

    def note_loss(self) -> None:
        """Rows were given up."""
        self._has_news = True

    # --- parts ------------------------------------------------------------------------------------

    def cut_parts(self) -> list[PartFormed]:
        """Cut the parts that are full by now, and let nodes run on them."""
        if not self._has_news:
            return []
        self._has_news = False
        self._add_ended()
        parts = self._cut.cut(self.watermark)
        if not self._is_any_pending():
            parts += self._cut.close()
        return [self._open(groups) for groups in parts]

    def _add_ended(self) -> None:
        prompts = self._prompts
        # Finished where no node above the cut works on parts.
        slots = prompts.slots(RUNNING, FINISHED)
        slots = slots[~prompts.in_cut[slots]]
        for table in self._roots.values():
            slots = slots[(table.state[slots] != PENDING).all(axis=1)]
        prompts.in_cut[slots] = True
        for slot in slots.tolist():
            lengths = self._lengths(slot)
            # Without one it is given up, and nodes pass on that it has none.
            if len(lengths):
                position = prompts.position.item(slot)
                longest, tokens = int(lengths.max()), int(lengths.sum())
                group = EndedGroup(longest, position, slot, tokens)
                self._waiting[slot] = group
                self._cut.add(group)

    def _lengths(self, slot: int) -> np.ndarray:
        """Tokens of a group's rows."""
        lengths: list[np.ndarray] = []
        for table in self._roots.values():
            here = table.state[slot] == PRESENT
            lengths.append(self._blocks.row_tokens(table.block[slot, here], table.row[slot, here]))
        return np.concatenate(lengths)

    @property
    def watermark(self) -> int:
        """The least tokens of a row that has not ended."""
        if any(self._readiness.has_unissued(name) for name in self._roots):
            return 0
        return min((chunk.watermark for chunk in list(self._under_way)), default=0)

    def _is_any_pending(self) -> bool:
        """Whether a row of a first generation may still come."""
        slots = self._prompts.slots(RUNNING)
        tables = self._roots.values()
        return any(bool((table.state[slots] == PENDING).any()) for table in tables)

    def _open(self, groups: Sequence[EndedGroup]) -> PartFormed:
        """Let nodes run on a part."""
        if self.is_cut:
            self.parts, self.is_cut = [], False
        self.parts.append(groups)
        for group in groups:
            self._waiting.pop(group.slot, None)
        slots = np.array([group.slot for group in groups], dtype=np.int64)
        self._prompts.part[slots] = self._next
        self._next += 1
        self._readiness.note_part(slots, self._roots)
        return PartFormed(
            step=self._step,
            source=self._source,
            part=self._next - 1 - self._first,
            positions=tuple(sorted(group.position for group in groups)),
        )

    def take_finished(self) -> list[np.ndarray]:
        """The slots of each further part of which every row above the cut is decided, in order.
        Prompts that failed meanwhile are in none.
        """
        finished: list[np.ndarray] = []
        prompts = self._prompts
        while self._first + self._taken < self._next:
            in_part = prompts.part == self._first + self._taken
            if (in_part & (prompts.status == RUNNING)).any():
                break
            self._taken += 1
            finished.append(
                prompts.sort_slots(np.flatnonzero(in_part & (prompts.status == FINISHED)))
            )
        return finished

    # --- what it tells ----------------------------------------------------------------------------

    @property
    def waiting_groups(self) -> list[EndedGroup]:
        """The groups that have ended and are in no part."""
        return list(self._waiting.values())

    def count_rows(self) -> tuple[int, int]:
        """The Step's rows of first generations: those that have ended, and all. From any thread."""
        is_in_step = np.isin(self._prompts.status, (RUNNING, FINISHED, TAKEN))
        rows = pending = 0
        for table in self._roots.values():
            # Another thread may ask while these grow, one after another.
            state = table.state
            slots = is_in_step[: len(state)].nonzero()[0]
            rows += len(slots) * state.shape[1]
            pending += int((state[slots] == PENDING).sum())
        return rows - pending, rows

    def end_step(self) -> None:
        """All groups of the Step are there: the next one's parts are counted anew."""
        self._first, self._taken = self._next, 0
        self._waiting.clear()
        self.is_cut = True
        self.begin_step(self._step + 1)
        self._has_news = False

    def begin_step(self, step: int) -> None:
        """What comes is of this Step."""
        self._step = step
        self._cut = self._make_cut(step)


def first_generations(nodes: Iterable[PlannedNode]) -> list[str]:
    """The generations among these nodes, in running order, that stand on no other one."""
    below: set[str] = set()
    names: list[str] = []
    for node in nodes:
        if not below.isdisjoint(node.gates):
            below.add(node.name)
        elif node.traits.generates:
            below.add(node.name)
            names.append(node.name)
    return names
