"""What the ranks of a replica that decode with a lag take up, and when: the same at the same step.

    a rank           waits for                          unblocked by
    between steps    the others to stop there, too      the first rank, which stops all of them
    before a run     the version that another one has   its Load: all are told of every version

Owns: what each rank could take up next, and whether all take it. Does not own: where a kernel stops
(operators/kernels/torch/rank_tokens.py), how a chunk joins (chunk_runs.py) or weights are loaded
(weight_delivery.py).

All ranks are told chunks in one order, and weights each by itself, whenever it has fetched them. So
at each stop every rank says what it could take up next: a chunk, a version of its weights, or
nothing. What all of them say is taken up by all; else the run goes on without it, and the first
rank stops all again before the next step. Where all have weights, but of several versions, those
who have an older one drop it: the newest comes to all. Between two runs each loads by itself; the
next run begins once all have one version. Nobody waits in a run, so none stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.plan.plan import PlannedNode
from engine.protocol import messages as m
from engine.run.worker.weight_delivery import Delivery

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast

_NOTHING, _CHUNK, _WEIGHTS = range(3)
_NO_VERSION = -1

Wanted = Callable[[m.ToWorker], bool]


@dataclass(frozen=True, slots=True)
class Agreed:
    """taken: what all ranks take up now. dropped: weights that this one has, of an older version
    than another. waits: whether something else could be taken up here.
    """

    taken: m.ToWorker | None = None
    dropped: m.Load | None = None
    waits: bool = False


class RankAgreement:
    """Of one rank. broadcast: among the ranks of its replica; None where it is alone."""

    def __init__(self, worker: str, delivery: Delivery, broadcast: RowBroadcast | None) -> None:
        self._worker, self._delivery, self._broadcast = worker, delivery, broadcast
        self._take_out: Callable[[m.ToWorker], None] = _nothing_is_told
        self._wait_for: Callable[[Wanted], m.ToWorker | None] = lambda wanted: None

    def hear(
        self,
        take_out: Callable[[m.ToWorker], None],
        wait_for: Callable[[Wanted], m.ToWorker | None],
    ) -> None:
        """take_out: called with what was told and is carried out next. wait_for: waits for what is
        wanted, and takes it out.
        """
        self._take_out, self._wait_for = take_out, wait_for

    def governs(self, node: PlannedNode) -> bool:
        """Whether ranks agree on what they take up while this node runs."""
        return node.ranks > 1 and node.work != "train" and node.lag >= 1

    def begin(self, node: PlannedNode) -> Iterator[m.Event]:
        """Wait until all ranks have one version of the node's weights."""
        while True:
            version = self._delivery.version_of(node)
            number = _NO_VERSION if version is None else version
            versions = [each[0] for each in self._share(node, (number,))]
            if len(set(versions)) == 1:
                return
            if number < max(versions):
                yield from self._load_next(node)

    def _load_next(self, node: PlannedNode) -> Iterator[m.Event]:
        """Load the next version that comes."""
        load = self._wait_for(lambda each: isinstance(each, m.Load) and each.reader == node.name)
        if load is None:
            raise RunError(f"{node.name}: the run ended before all ranks had one version")
        assert isinstance(load, m.Load)
        yield from self._delivery.bring(load)

    def agree(self, node: PlannedNode, next_told: m.ToWorker | None) -> Agreed:
        """Say what this rank could take up next, None for nothing; returns whether all do. What is
        taken up, or dropped by those who have an older version, is taken out.
        """
        mine = _describe(next_told)
        all_ranks = self._share(node, mine)
        if next_told is None:
            return Agreed()
        if all(each == mine for each in all_ranks):
            self._take_out(next_told)
            return Agreed(taken=next_told)
        have_weights = all(kind == _WEIGHTS for kind, _ in all_ranks)
        if isinstance(next_told, m.Load) and have_weights and mine < max(all_ranks):
            self._take_out(next_told)
            return Agreed(dropped=next_told)
        return Agreed(waits=True)

    def _share(self, node: PlannedNode, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Raises RunError where another rank is gone."""
        assert self._broadcast is not None
        try:
            return self._broadcast.share(numbers)
        except PeerLost as lost:
            raise RunError(f"{node.name}: what its ranks take up next: {lost}") from lost


def _describe(instruction: m.ToWorker | None) -> tuple[int, int]:
    """What a rank says of what it could take up next."""
    if isinstance(instruction, m.RunChunk):
        return _CHUNK, instruction.id
    if isinstance(instruction, m.Load):
        return _WEIGHTS, instruction.version
    return _NOTHING, 0


def _nothing_is_told(instruction: m.ToWorker) -> None:
    raise AssertionError(f"{instruction} was told to nobody")
