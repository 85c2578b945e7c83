"""The other ranks of a rerun: a process for each, which carries out the same tasks in step.

Owns: these processes, from start to end, and what is said when one fails. Does not own: what they
do (rank_replay.py), the group in which they meet (engine/channels/tensors/world.py).

A node that several ranks trained is trained by as many again. The first of them is the process of
the rerun, so that a debugger sees it. What the others need is sent to them through a pipe that
nobody else has.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import cloudpickle

from dataflow.errors import DataflowError, RunError
from dataflow.import_order import interpreter
from dataflow.signals import held_back, left_to_the_run
from engine.channels.contract import PeerLost
from engine.channels.tensors.row_broadcast import join
from engine.channels.tensors.world import leave, meeting_place, rendezvous, world
from engine.plan.plan import Plan, PlannedNode
from engine.replay.needed_tasks import NeededRun
from engine.replay.rank_replay import RankReplay
from engine.replay.recorded_run import RecordedRun
from engine.replay.task_replay import RankSeat, Replay, opened
from engine.run.launch import child

_MODULE = "engine.replay.other_ranks"
_BOOTSTRAP = (
    "from engine.run.control.lifeline import die_with; die_with(int(sys.argv[3]));"
    f" from {_MODULE} import main; main(int(sys.argv[4]))"
)
_TAIL = 20
_WAIT = 3.0
"""Seconds in which a rank that failed has ended, once its end of a collective is gone."""


@contextlib.contextmanager
def together(run: RecordedRun, what: NeededRun, checkpoint: Path | None) -> Iterator[Replay]:
    """The replay as the first rank, while the others go on beside it; alone where no node that it
    opens has several. Raises RunError for nodes of different numbers of ranks, and for a rank that
    fails alone.
    """
    ranked = _ranked(run, what)
    if ranked is None:
        yield Replay(run, what, checkpoint)
        return
    size = ranked.ranks
    place = meeting_place()
    with contextlib.ExitStack() as stack:
        others: list[_OtherRank] = []
        for rank in range(1, size):
            environment = _environment(run.plan, ranked, rank)
            others.append(stack.enter_context(_started(rank, os.dup(place), environment)))
        told = cloudpickle.dumps((run, what, checkpoint, size))
        for other in others:
            other.tell(told)
        stack.callback(leave)
        try:
            yield Replay(run, what, checkpoint, _seat(0, size, place))
        except Exception as error:
            # What all ranks refuse alike this one says best.
            if isinstance(error, PeerLost) or not isinstance(error, DataflowError):
                _blame(others, error)
            raise
        for other in others:
            other.end()


def _ranked(run: RecordedRun, what: NeededRun) -> PlannedNode | None:
    """The first node of several ranks that is opened."""
    there = opened(run.plan, what)
    several = [node for node in run.plan.nodes if node.name in there and node.ranks > 1]
    if len({node.ranks for node in several}) > 1:
        found = ", ".join(f"{node.name} with {node.ranks}" for node in several)
        problem = f"expected nodes of one number of ranks, found {found}"
        fix = "a node that needs the weights of one of them only"
        raise RunError(f"rerun of {run.folder}: {problem}. Fix: {fix}.")
    return several[0] if several else None


class _OtherRank:
    """One process. log: what it prints."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.rank, self.process, self._log = rank, process, log

    def tell(self, data: bytes) -> None:
        """Send all that it needs; one that has ended is noticed later."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(data)
            self.process.stdin.close()

    def end(self) -> None:
        """It has nothing left to do. Raises RunError if it failed."""
        if self.process.wait() != 0:
            raise self.error()

    def failed(self, seconds: float) -> bool:
        """Whether it has ended with an error, or does so soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds) != 0
        return False

    def error(self) -> RunError:
        """How it ended, and what it said last."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_TAIL:]
        said = "".join(f"\n  | {line}" for line in lines)
        return RunError(f"rank {self.rank} of the rerun ended with {self.process.wait()}{said}")


def _blame(others: Sequence[_OtherRank], error: Exception) -> None:
    """Raises RunError for the first of them that failed: a collective of this one then breaks."""
    for other in others:
        if other.failed(_WAIT):
            raise other.error() from error


@contextlib.contextmanager
def _started(rank: int, descriptor: int, environment: Mapping[str, str]) -> Iterator[_OtherRank]:
    arguments = [str(os.getpid()), str(descriptor), str(rank)]
    with tempfile.TemporaryFile() as log:
        try:
            with held_back():
                process = subprocess.Popen(
                    interpreter(_BOOTSTRAP, _MODULE, *arguments),
                    pass_fds=[descriptor],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
        finally:
            os.close(descriptor)
        try:
            yield _OtherRank(rank, process, log)
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()


def _environment(plan: Plan, node: PlannedNode, rank: int) -> Mapping[str, str]:
    """Threads and GPUs of the run's own rank; a `breakpoint()` stops the first rank alone."""
    devices = plan.devices.get(node.workers[rank], ())
    return child.environment(node.layout.threads, devices) | {"PYTHONBREAKPOINT": "0"}


def main(descriptor: int) -> None:
    """Be one of the other ranks, as standard input tells."""
    left_to_the_run()
    run, what, checkpoint, size = cloudpickle.loads(sys.stdin.buffer.read())
    seat = _seat(int(sys.argv[5]), size, descriptor)
    for _ in RankReplay(run, what, checkpoint, seat).run():
        pass
    leave()


def _seat(rank: int, size: int, descriptor: int) -> RankSeat:
    """This process's place, once all have come."""
    store = rendezvous(descriptor)
    group = world(rank, size, store)
    names = tuple(f"rank {i}" for i in range(size))
    return RankSeat(rank=rank, group=group, rows=join(store, 0, rank, names))
