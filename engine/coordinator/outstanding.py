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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeVar

from engine.coordinator import messages as m
from engine.coordinator.chunk import NodeChunk

T = TypeVar("T", bound=m.Task)
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
    def __init__(self) -> None:
        self._ids = count()
        self._asked: dict[int, Pending] = {}
        self._of: dict[type, dict[int, Pending]] = {}
        self.rows: Counter[str] = Counter()
        """Rows of the chunks that each Worker has."""

    def new_id(self) -> int:
        """For the next task; later tasks have greater ones."""
        return next(self._ids)

    def ask(
        self, task: m.Task, reads: frozenset[int] = frozenset(), chunk: NodeChunk | None = None
    ) -> None:
        """A Worker is to be told this."""
        asked = Pending(task, {task.worker: "due"}, reads, chunk)
        self._asked[task.id] = asked
        self._of.setdefault(type(task), {})[task.id] = asked
        if chunk is not None:
            self.rows[task.worker] += len(chunk.keys)

    def ask_all(self, task: m.Task, workers: Iterable[str]) -> None:
        """All of these Workers, the ranks of a node, are to be told it, and have to answer."""
        self._asked[task.id].parts = dict.fromkeys(workers, "due")

    # --- what is outstanding ----------------------------------------------------------------------

    def of(self, kind: type[m.Task]) -> list[Pending]:
        """All tasks of a kind that are still wanted, in the order in which they were asked."""
        return [asked for asked in self._of.get(kind, {}).values() if asked.wanted]

    def tasks(self, kind: type[T]) -> list[T]:
        """The same, the tasks alone."""
        return [asked.task for asked in self.of(kind) if isinstance(asked.task, kind)]

    def sent(self, task: int, worker: str) -> None:
        """A Worker was told, now that it has its devices."""
        asked = self._asked.get(task)
        if asked is not None:
            asked.parts[worker] = "told"

    def chunks(self) -> list[tuple[str, str]]:
        """(node, Worker) of every chunk under way, wanted or not."""
        told = self._of.get(m.RunChunk, {}).values()
        return [(a.chunk.node.name, a.task.worker) for a in told if a.chunk is not None]

    def owes(self, worker: str) -> bool:
        """Whether a Worker has not answered something, though it may wait for its devices."""
        return any(worker in asked.parts for asked in self._asked.values())

    def busy(self, worker: str) -> bool:
        """Whether a Worker was told something that it has not ended."""
        return any(asked.parts.get(worker, "due") != "due" for asked in self._asked.values())

    # --- what comes of it -------------------------------------------------------------------------

    def heard(self, event: m.Event) -> Pending | None:
        """What this answers, once that is noted; None for no task, or one that is forgotten."""
        asked = self._asked.get(event.id) if isinstance(event, m.TaskEvent) else None
        match event:
            case m.Prepared() if asked is not None and asked.wanted:
                asked.parts[event.worker] = "prepared"
            case m.Prepared() | m.Stepped() | m.Offered() | m.Loaded() | m.FetchFailed():
                self._answered(asked, event.worker)
            case m.Produced() | m.Tombstoned() | m.Reported():
                pass
            case _ if asked is not None:
                self._answered(asked, asked.task.worker)
        return asked

    def begin(self, asked: Pending) -> None:
        """All ranks are told Go."""
        asked.parts = dict.fromkeys(asked.parts, "begun")

    def give_up(self, asked: Pending) -> None:
        """Nobody wants it any more: ranks that wait for Go need not answer."""
        asked.wanted = False
        for worker in [name for name, part in asked.parts.items() if part == "prepared"]:
            self._answered(asked, worker)

    def lost(self, worker: str) -> list[Pending]:
        """A Worker is gone; returns what it owed, in the order in which it was asked."""
        owed = [asked for asked in self._asked.values() if worker in asked.parts]
        for asked in owed:
            self._answered(asked, worker)
        return owed

    def _answered(self, asked: Pending | None, worker: str) -> None:
        if asked is None or asked.parts.pop(worker, None) is None or asked.parts:
            return
        del self._asked[asked.task.id], self._of[type(asked.task)][asked.task.id]
        if asked.chunk is not None:
            self.rows[worker] -= len(asked.chunk.keys)
