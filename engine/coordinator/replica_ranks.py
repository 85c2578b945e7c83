"""Replicas of several Workers: chunks of forward passes that tensor ranks run together.

    split(chunk) -> instructions          the core's, to every rank of the replica

Owns: which rank fetches a chunk's rows, and what is left of it once its lead has ended. Does not
own: the choice of a replica (replica_choice.py), ranks that train (ranks.py), what a death ends
(losses.py).

The core tells the first Worker of a replica, its lead, and hears rows from there alone. The lead
fetches a chunk's rows and gives them to the others before any of them computes; one that cannot
fetch them gives nothing, so that nobody waits in a collective for it. A chunk has ended when its
lead says so: all rows are there then. The others answer for their devices' turns alone.

All ranks are told a chunk at once, and each Worker carries out what ranks do together in the order
in which it was told: so no two collectives cross (decision 0048).
"""

from __future__ import annotations

from dataclasses import replace

from engine.coordinator.task_ledger import Outstanding, Pending
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.refs import Gather


class ReplicaRanks:
    """Of a plan; without such a replica, everything passes as it is."""

    def __init__(self, plan: Plan, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self.nodes = {n.name: n for n in plan.nodes if n.work != "train" and n.ranks > 1}

    def split(self, chunk: m.RunChunk) -> list[m.Instruction]:
        """One message for each rank; only the lead is told where the rows are."""
        ranks = self.nodes[chunk.node].share_of(chunk.worker)
        self._outstanding.ask_all(chunk, ranks)
        to_lead = replace(chunk, giver=chunk.worker)
        no_gathers: dict[str, tuple[Gather, ...]] = dict.fromkeys(chunk.inputs, ())
        others = [replace(to_lead, worker=rank, inputs=no_gathers) for rank in ranks[1:]]
        return [to_lead, *others]

    def ranks_of(self, task: m.Task) -> tuple[str, ...]:
        """The Workers that carry out a chunk."""
        if isinstance(task, m.RunChunk) and task.node in self.nodes:
            return self.nodes[task.node].share_of(task.worker)
        return (task.worker,)

    def note_ended(self, event: m.Event, asked: Pending | None) -> None:
        """Note that the core knows what has become of a chunk, though other ranks may still have
        to answer.
        """
        if asked is None or not isinstance(asked.task, m.RunChunk):
            return
        is_end = isinstance(event, m.ChunkDone | m.FetchFailed)
        if is_end and asked.task.node in self.nodes:
            self._outstanding.end_chunk(asked)
