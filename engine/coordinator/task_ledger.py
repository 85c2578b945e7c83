"""The ledger: who has been asked what, and has not answered.

    a Worker's part is   waits for                       left by
    due                  its devices                     its turn (device_turns.py) -> told
    told                 the Worker                      its last answer -> answered
                                                         Prepared -> prepared
    prepared             the other ranks                 Go -> begun
                                                         FetchFailed of another -> answered
    begun                the updates                     Stepped -> answered

Owns: the ids of tasks, and what each Worker owes: so what a lost one owed. Does not own: when
something is asked (dispatch.py, training.py, evaluation.py, versions.py), nor what follows from an
answer. An answer whose id is unknown is one to a task that was given up.

Everything that is asked for at each event is counted as it changes: nothing here walks all tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeVar

from engine.coordinator.chunk import NodeChunk
from engine.protocol import messages as m

T = TypeVar("T", bound=m.Task)
_NO_END = (m.Produced, m.Tombstoned, m.Reported, m.Fetched)
"""Answers after which everything that was owed is owed still."""
Part = Literal["due", "told", "prepared", "begun"]


@dataclass(slots=True, eq=False)
class Pending:
    """A task, and how far each Worker that has not answered has come with it. reads: the numbers of
    the blocks that it reads. wanted: False once it was given up, and answers are only awaited.
    """

    task: m.Task
    parts: dict[str, Part]
    reads: frozenset[int] = frozenset()
    chunk: NodeChunk | None = None
    wanted: bool = True


class Outstanding:
    """on_load: called with each Load when it is asked (1) and when it is over (-1). on_chunk: all
    are called with the node and Worker of each chunk, likewise.
    """

    def __init__(self) -> None:
        self._ids = count()
        self._asked: dict[int, Pending] = {}
        self._of: dict[type, dict[int, Pending]] = {}
        self._owed: dict[str, dict[int, Pending]] = {}
        """What each Worker has not answered."""
        self._told: Counter[str] = Counter()
        """How much of that it was told."""
        self._eased: set[str] = set()
        self.rows: Counter[str] = Counter()
        """Rows of the chunks that each Worker has."""
        self.under_way: Counter[tuple[str, str]] = Counter()
        """Chunks of each (node, Worker), wanted or not."""
        self.on_load: Callable[[m.Load, int], None] = _nobody_counts
        self.on_chunk: list[Callable[[str, str, int], None]] = []

    def new_id(self) -> int:
        """For the next task; later tasks have greater ones."""
        return next(self._ids)

    def ask(
        self, task: m.Task, reads: frozenset[int] = frozenset(), chunk: NodeChunk | None = None
    ) -> None:
        """A Worker is to be told this."""
        asked = Pending(task, {}, reads, chunk)
        self._asked[task.id] = asked
        self._of.setdefault(type(task), {})[task.id] = asked
        self._set(asked, task.worker, "due")
        if chunk is not None:
            self._runs(chunk, task.worker, 1)
        elif isinstance(task, m.Load):
            self.on_load(task, 1)

    def ask_all(self, task: m.Task, workers: Iterable[str]) -> None:
        """All of these Workers, the ranks of a node, are to be told it, and have to answer."""
        asked = self._asked[task.id]
        for worker in list(asked.parts):
            self._drop_part(asked, worker)
        for worker in workers:
            self._set(asked, worker, "due")

    # --- what is outstanding ----------------------------------------------------------------------

    def of(self, kind: type[m.Task]) -> list[Pending]:
        """All tasks of a kind that are still wanted, in the order in which they were asked."""
        return [asked for asked in self._of.get(kind, {}).values() if asked.wanted]

    def tasks(self, kind: type[T]) -> list[T]:
        """The same, the tasks alone."""
        return [asked.task for asked in self.of(kind) if isinstance(asked.task, kind)]

    def note_sent(self, task: int, worker: str) -> None:
        """Note that a Worker was told, now that it has its devices."""
        asked = self._asked.get(task)
        if asked is not None:
            self._set(asked, worker, "told")

    def owes(self, worker: str) -> bool:
        """Whether a Worker has not answered something, though it may wait for its devices."""
        return bool(self._owed.get(worker))

    def busy(self, worker: str) -> bool:
        """Whether a Worker was told something that it has not ended."""
        return self._told[worker] > 0

    def drain_eased(self) -> set[str]:
        """Return the Workers that have answered something since this was asked last."""
        eased, self._eased = self._eased, set()
        return eased

    # --- what comes of it -------------------------------------------------------------------------

    def note_answer(self, event: m.Event) -> Pending | None:
        """Note an answer; returns what it answers: None for no task, or one that is forgotten."""
        if isinstance(event, _NO_END):  # most events
            return self._asked.get(event.id)
        if not isinstance(event, m.TaskEvent):
            return None
        asked = self._asked.get(event.id)
        match event:
            case m.Prepared() if asked is not None and asked.wanted:
                self._set(asked, event.worker, "prepared")
            case m.Prepared() | m.Stepped() | m.PartTrained() | m.Offered() | m.Loaded():
                self._close_part(asked, event.worker)
            case m.Short(is_lost=True):  # its Worker ends, and owes it until then
                pass
            case m.FetchFailed() | m.RankDone() | m.Short():
                self._close_part(asked, event.worker)
            case _ if asked is not None:
                self._close_part(asked, asked.task.worker)
        return asked

    def begin(self, asked: Pending) -> None:
        """All ranks are told Go."""
        for worker in asked.parts:
            self._set(asked, worker, "begun")

    def give_up(self, asked: Pending) -> None:
        """Nobody wants it any more: ranks that wait for Go need not answer."""
        asked.wanted = False
        for worker in [name for name, part in asked.parts.items() if part == "prepared"]:
            self._close_part(asked, worker)

    def end_chunk(self, asked: Pending) -> None:
        """Nothing of a chunk is to come but that other ranks have ended, too."""
        if asked.chunk is not None and asked.parts:
            self._runs(asked.chunk, asked.task.worker, -1)
        asked.chunk, asked.wanted = None, False

    def forget_worker(self, worker: str) -> list[Pending]:
        """Forget a Worker that is gone; returns what it owed, in the order it was asked in."""
        # Sorted, as the parts of a task of several ranks are entered after it was asked.
        owed = [asked for _, asked in sorted(self._owed.get(worker, {}).items())]
        for asked in owed:
            self._close_part(asked, worker)
        return owed

    def _close_part(self, asked: Pending | None, worker: str) -> None:
        if asked is None or worker not in asked.parts:
            return
        self._drop_part(asked, worker)
        if asked.parts:
            return
        task = asked.task
        del self._asked[task.id], self._of[type(task)][task.id]
        if asked.chunk is not None:
            self._runs(asked.chunk, task.worker, -1)
        elif isinstance(task, m.Load):
            self.on_load(task, -1)

    # --- counting ---------------------------------------------------------------------------------

    def _set(self, asked: Pending, worker: str, part: Part) -> None:
        """How far a Worker is with a task from now on."""
        old = asked.parts.get(worker, "due")
        asked.parts[worker] = part
        self._told[worker] += (part != "due") - (old != "due")
        self._owed.setdefault(worker, {})[asked.task.id] = asked

    def _drop_part(self, asked: Pending, worker: str) -> None:
        """Note that a Worker owes nothing of this any more."""
        self._told[worker] -= asked.parts.pop(worker) != "due"
        del self._owed[worker][asked.task.id]
        self._eased.add(worker)

    def _runs(self, chunk: NodeChunk, worker: str, more: int) -> None:
        """A Worker has one chunk more, or less."""
        node = chunk.node.name
        self.rows[worker] += more * len(chunk.keys)
        self.under_way[node, worker] += more
        if not self.under_way[node, worker]:
            del self.under_way[node, worker]
        for take in self.on_chunk:
            take(node, worker, more)


def _nobody_counts(task: m.Load, more: int) -> None:
    del task, more
