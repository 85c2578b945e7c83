"""The next wave: rows of synchronous sources, made while a Step is trained.

    a wave is   waits for                            left by
    open        a Step to be trained                 RunChunk of the source -> told
    told        the end of that Step                 its prompts are admitted -> admitted
                                                     the end of the run -> open
    admitted    what was heard of it to be noted     at once -> open

Without a lag prompts are admitted once the Step before is over (decision 0003), and which ones is
known when that Step is formed. So the source makes their rows meanwhile, and generation begins as
soon as the weights are there. The prompts are not admitted any earlier: whether there is another
Step, what a checkpoint has of them and what they are counted as is all as if the source had not
been told yet. What it answers is put off until then.

Owns: when a source is told of its next wave, and answers to that until the wave is admitted. Does
not own: which prompts a wave has (admission.py), when it is admitted (course.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from dataflow.batch import Keys
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.sources import Sources
from engine.coordinator.task_ledger import Pending
from engine.plan.plan import Plan, PlannedNode
from engine.protocol import messages as m

Answer = tuple[m.Event, Pending]
"""What a source has said, and what it was asked."""


class NextWave:
    """Of a run without a lag, for sources in Workers that have their devices for themselves."""

    def __init__(self, plan: Plan, sources: Sources) -> None:
        self._sources = sources
        in_turns = frozenset(chain.from_iterable(plan.turns))
        self._nodes: list[PlannedNode] = []
        if not sources.late:
            self._nodes = [
                node
                for node in plan.nodes
                if node.name in sources.admissions and in_turns.isdisjoint(node.workers)
            ]
        self._told: dict[str, NodeChunk] = {}
        """By source."""
        self._put_off: list[Answer] = []
        self._due: list[Answer] = []

    @property
    def chunks(self) -> list[NodeChunk]:
        """The chunks whose prompts are not admitted yet."""
        return [*self._told.values()]

    def begin(self, version: int) -> Iterator[NodeChunk]:
        """The sources' chunks for the Step behind the one that starts from this version, once."""
        for node in self._nodes:
            if node.name in self._told:
                continue
            admission = self._sources.admissions[node.name]
            prompts = admission.foresee(version)
            if prompts:
                positions, attempts = zip(*prompts, strict=True)
                keys = Keys.of(positions, attempt=attempts)
                self._told[node.name] = chunk = NodeChunk(node, keys, {})
                yield chunk

    def put_off(self, event: m.Event, asked: Pending | None) -> bool:
        """Whether an answer is about prompts that are not admitted yet; then it is kept."""
        if not self._told or asked is None or asked.chunk not in self._told.values():
            return False
        self._put_off.append((event, asked))
        return True

    def admit(self, chunks: Iterable[NodeChunk]) -> list[NodeChunk]:
        """These chunks of sources are to run, as their prompts are admitted; returns those that
        were not told before.
        """
        return [chunk for chunk in chunks if not self._is_told(chunk)]

    def _is_told(self, chunk: NodeChunk) -> bool:
        early = self._told.pop(chunk.node.name, None)
        if early is None:
            return False
        assert early.keys.rows() == chunk.keys.rows(), "a wave has other prompts than was foreseen"
        self._due += [answer for answer in self._put_off if answer[1].chunk is early]
        self._put_off = [answer for answer in self._put_off if answer[1].chunk is not early]
        return True

    def take_due(self) -> list[Answer]:
        """What was put off and is to be noted now; each is returned once."""
        due, self._due = self._due, []
        return due

    def lose(self, worker: str) -> list[Pending]:
        """A Worker is gone, and the rows with it; returns what it had done and has to do again."""
        lost = [answer for answer in self._put_off if answer[1].task.worker == worker]
        self._put_off = [answer for answer in self._put_off if answer[1].task.worker != worker]
        ended = [asked for event, asked in lost if isinstance(event, m.ChunkDone)]
        for asked in ended:
            assert asked.chunk is not None
            asked.chunk.has_counted = True
        return ended

    def abandon(self) -> list[Answer]:
        """The run is over: returns what was put off, as nothing is admitted any more."""
        put_off, self._put_off = self._put_off, []
        self._told.clear()
        return put_off
