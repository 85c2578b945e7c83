"""The other ranks of a rerun: a process for each, which carries out the same tasks in step.

Owns: these processes, from start to end, and the error where one fails. Does not own: what they do
(rank_replay.py), the group in which they meet (engine/channels/tensors/world.py).

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
from dataflow.signals import hold_back_signals, leave_signals_to_the_run
from engine.channels.contract import PeerLost
from engine.channels.tensors.row_broadcast import join
from engine.channels.tensors.world import leave, meeting_place, rendezvous, world
from engine.plan.plan import Plan, PlannedNode
from engine.replay.needed_tasks import NeededRun
from engine.replay.rank_replay import RankReplay
from engine.replay.recorded_run import RecordedRun
from engine.replay.task_replay import RankSeat, Replay, find_opened_nodes
from engine.run.launch import child

_MODULE = "engine.replay.other_ranks"
_BOOTSTRAP = (
    "from engine.run.control.lifeline import die_with; die_with(int(sys.argv[3]));"
    f" from {_MODULE} import main; main(int(sys.argv[4]))"
)
_TAIL = 20
"""Lines of a failed rank's output that the error shows."""
_WAIT = 3.0
"""Seconds in which a rank that failed has ended, once its end of a collective is gone."""


@contextlib.contextmanager
def open_replay(
    run: RecordedRun, needed_run: NeededRun, checkpoint: Path | None
) -> Iterator[Replay]:
    """Open the replay as the first rank, while the others go on beside it; alone where no node that
    it opens has several. Raises RunError for nodes of different numbers of ranks, and for a rank
    that fails alone.
    """
    ranked_node = _find_ranked_node(run, needed_run)
    if ranked_node is None:
        yield Replay(run, needed_run, checkpoint)
        return
    size = ranked_node.ranks
    meeting = meeting_place()
    with contextlib.ExitStack() as stack:
        others: list[_OtherRank] = []
        for rank in range(1, size):
            environment = _make_environment(run.plan, ranked_node, rank)
            started = _start(rank, os.dup(meeting), environment)
            others.append(stack.enter_context(started))
        # Once all are started: a pipe takes the whole of it only when its reader has done its
        # imports, which they do side by side.
        assignment = cloudpickle.dumps((run, needed_run, checkpoint, size))
        for other in others:
            other.send(assignment)
        stack.callback(leave)
        try:
            yield Replay(run, needed_run, checkpoint, _take_seat(0, size, meeting))
        except Exception as error:
            # What all ranks refuse alike this one says best.
            if isinstance(error, PeerLost) or not isinstance(error, DataflowError):
                _blame(others, error)
            raise
        for other in others:
            other.join()


def _find_ranked_node(run: RecordedRun, needed_run: NeededRun) -> PlannedNode | None:
    """The first node of several ranks that is opened. Raises RunError if another has another number
    of them, and for replicas of several.
    """
    opened_nodes = find_opened_nodes(run.plan, needed_run)
    ranked = [node for node in run.plan.nodes if node.name in opened_nodes and node.ranks > 1]
    if len({node.ranks for node in ranked}) > 1:
        counts = ", ".join(f"{node.name} with {node.ranks}" for node in ranked)
        problem = f"expected nodes of one number of ranks, found {counts}"
        fix = "a node that needs the weights of one of them only"
        raise RunError(f"rerun of {run.folder}: {problem}. Fix: {fix}.")
    for node in ranked:
        if node.work != "train":
            problem = f"expected replicas of one Worker each, found {node.ranks} of {node.name}"
            fix = "record a run without tensor ranks of nodes that do not train"
            raise RunError(f"rerun of {run.folder}: {problem}. Fix: {fix}.")
    return ranked[0] if ranked else None


class _OtherRank:
    """One process. log: what it prints."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.rank, self.process, self._log = rank, process, log

    def send(self, assignment: bytes) -> None:
        """Send all that it needs; one that has ended is noticed later."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(assignment)
            self.process.stdin.close()

    def join(self) -> None:
        """Wait for its end: it has nothing left to do. Raises RunError if it failed."""
        if self.process.wait() != 0:
            raise self.error()

    def has_failed(self, seconds: float) -> bool:
        """Whether it has ended with an error, or does so within these seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds) != 0
        return False

    def error(self) -> RunError:
        """How it ended, and what it said last."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_TAIL:]
        output = "".join(f"\n  | {line}" for line in lines)
        return RunError(f"rank {self.rank} of the rerun ended with {self.process.wait()}{output}")


def _blame(others: Sequence[_OtherRank], error: Exception) -> None:
    """Raise RunError for the first of them that failed: a collective of this one then breaks."""
    for other in others:
        if other.has_failed(_WAIT):
            raise other.error() from error


@contextlib.contextmanager
def _start(rank: int, descriptor: int, environment: Mapping[str, str]) -> Iterator[_OtherRank]:
    """Start a rank's process, and kill it at the end. Closes the descriptor, which the process
    inherits.
    """
    arguments = [str(os.getpid()), str(descriptor), str(rank)]
    with tempfile.TemporaryFile() as log:
        try:
            with hold_back_signals():
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


def _make_environment(plan: Plan, node: PlannedNode, rank: int) -> Mapping[str, str]:
    """Threads and GPUs of the run's own rank; a `breakpoint()` stops the first rank alone."""
    devices = plan.devices.get(node.workers[rank], ())
    return child.environment(node.layout.threads, devices) | {"PYTHONBREAKPOINT": "0"}


def main(descriptor: int) -> None:
    """Be one of the other ranks, as standard input says."""
    leave_signals_to_the_run()
    run, needed_run, checkpoint, size = cloudpickle.loads(sys.stdin.buffer.read())
    seat = _take_seat(int(sys.argv[5]), size, descriptor)
    for _ in RankReplay(run, needed_run, checkpoint, seat).run():
        pass
    leave()


def _take_seat(rank: int, size: int, descriptor: int) -> RankSeat:
    """Wait for all ranks; this process's place among them."""
    store = rendezvous(descriptor)
    group = world(rank, size, store)
    names = tuple(f"rank {i}" for i in range(size))
    return RankSeat(rank=rank, group=group, rows=join(store, 0, rank, names))
