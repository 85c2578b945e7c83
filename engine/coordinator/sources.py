"""The stream region: all training sources of a run, their tables and their credit, as one.

Owns: what is asked of every source at once: is there a Step, what is lost, what goes into a
checkpoint, how much was dropped. Does not own: one source's prompts (prompt_table.py) or credit
(admission.py), nor when any of this is asked (course.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.admission import Admission
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.part_cut import make_cut
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import FINISHED
from engine.coordinator.replica_loads import FindLoads, ReplicaLoads
from engine.coordinator.run_settings import RecordedParts, Restored, Settings
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.protocol.messages import Checkpoint, PartFormed, Task, Tombstoned
from engine.protocol.refs import Gather, Key, Ref
from engine.protocol.staleness import lag_metrics


class Sources:
    """See the module. `tables` and `admissions` are by the source's name."""

    def __init__(self, plan: Plan, settings: Settings, blocks: Blocks) -> None:
        self._plan = plan
        self._settings = settings
        self._blocks = blocks
        trained = (n.name for n in plan.nodes if any(use.trained for use in n.states))
        self._trained = frozenset(trained)
        """Nodes whose rows change with the weights."""
        self.loads = ReplicaLoads(plan, measures=settings.measures_loads)
        self.late = [s.name for s in plan.sources if s.max_lag > 0]
        self.tables = {
            s.name: _table(plan, s, blocks, settings.parts.get(s.name, {}), self.loads.of_chunks)
            for s in plan.sources
        }
        self.admissions = {
            s.name: Admission(s, self.tables[s.name], steps=settings.steps) for s in plan.sources
        }
        self.pools = [*chain.from_iterable(table.pools for table in self.tables.values())]
        """Units that wait for a slot of a replica, by node."""
        self._first_dropped = ""

    def restore(self, restored: Restored) -> None:
        """Take up what a checkpoint says."""
        for name, cut in restored.sources.items():
            self.admissions[name].restore(cut, dict(restored.rows.get(name, {})), restored.step)
        for table in self.tables.values():
            if table.stream is not None:
                table.stream.begin_step(restored.step + 1)

    # --- Steps ------------------------------------------------------------------------------------

    def take(self, version: int) -> dict[str, np.ndarray]:
        """For each source the slots that can form the next Step; none where there are too few."""
        return {name: admission.take(version) for name, admission in self.admissions.items()}

    @property
    def finished(self) -> tuple[int, ...]:
        """Of each source the prompts that are finished and in no Step; none if some source has no
        full batch of them.
        """
        counts: list[int] = []
        for admission in self.admissions.values():
            count = admission.table.prompts.count[FINISHED]
            if count < admission.source.batch:
                return ()
            counts.append(count)
        return tuple(counts)

    def choose_early(self, version: int) -> dict[str, np.ndarray] | None:
        """For each source the slots that will form the Step which starts from this version, if
        nothing happens to them; None where there are too few, or no such Step will be.
        """
        if self._settings.steps is not None and version >= self._settings.steps:
            return None
        chosen = {name: each.choose_early(version) for name, each in self.admissions.items()}
        if not all(map(len, chosen.values())):
            return None
        return chosen

    def note_formed(self) -> None:
        """A Step is formed."""
        for admission in self.admissions.values():
            admission.note_formed()
            if admission.table.stream is not None:
                admission.table.stream.end_step()

    def cut_parts(self) -> list[PartFormed]:
        """Cut the parts of streamed Steps that are full."""
        streams = [table.stream for table in self.tables.values() if table.stream is not None]
        return [*chain.from_iterable(stream.cut_parts() for stream in streams)]

    def take_parts(self) -> list[tuple[str, np.ndarray]]:
        """Each further part of which every row above the cut is decided: its source and slots."""
        parts: list[tuple[str, np.ndarray]] = []
        for name, table in self.tables.items():
            if table.stream is not None:
                parts += [(name, slots) for slots in table.stream.take_finished()]
        return parts

    @property
    def is_drained(self) -> bool:
        """Whether no further Step can be formed: some source has nothing left."""
        return any(admission.is_exhausted for admission in self.admissions.values())

    @property
    def has_begun(self) -> bool:
        """Whether a synchronous Step has begun, as it does with its admission."""
        return any(
            a.source.max_lag == 0 and a.table.prompts.outstanding for a in self.admissions.values()
        )

    def metrics(self, taken: Mapping[str, np.ndarray], version: int) -> dict[str, float]:
        """Of a Step that starts from this version, with these slots."""
        versions = [self.tables[name].versions(slots) for name, slots in taken.items()]
        admissions = self.admissions.values()
        return {
            **lag_metrics(version, np.concatenate(versions)),
            "data/prompts": float(sum(len(slots) for slots in taken.values())),
            "data/dropped": float(sum(a.dropped for a in admissions)),
            "data/lost_rows": float(sum(a.lost_rows for a in admissions)),
            "data/overlong": float(sum(a.overlong for a in admissions)),
            "data/admitted": float(sum(a.admitted for a in admissions)),
            **self._live_metrics(),
        }

    def _live_metrics(self) -> dict[str, float]:
        """Of sources of which memory may hold fewer prompts than their lag allows."""
        bounded = [a for a in self.admissions.values() if a.live.is_bounded]
        if not bounded:
            return {}
        tokens = sum(a.table.prompts.outstanding * (a.live.expect() or 0.0) for a in bounded)
        held_back = sum(a.source.allowed - a.live.most() for a in bounded)
        return {"intake/live_tokens": tokens, "intake/held_back": float(held_back)}

    # --- the verbs of a region --------------------------------------------------------------------

    def take_rows(self, chunk: NodeChunk, ref: Ref) -> int:
        """As in RunRegion."""
        node = chunk.node
        table = self.tables[node.source]
        live = self.admissions[node.source].live
        live.note(node.name, int(ref.lengths.sum()), len(ref.lengths))
        number = table.add_rows(node.name, ref)
        if table.stream is not None:
            table.stream.note_rows(chunk)
        return number

    def close_chunk(self, chunk: NodeChunk) -> Key | None:
        """As in RunRegion."""
        table = self.tables[chunk.node.source]
        if table.stream is not None:
            table.stream.note_end(chunk)
        return table.close_chunk(chunk)

    def drop_group(self, node: PlannedNode, event: Tombstoned) -> str:
        """Give up the group of a row that failed. Returns why the run fails, if it now does."""
        source = node.source
        self._note_loss(source)
        if not self.tables[source].drop(event.node, event.key[0], event.key[2]):
            return ""
        self._note_first(event)
        if not event.failed:
            self.admissions[source].note_given_up()
            return self._why_barren(source, event)
        self.admissions[source].dropped += 1
        return self._why_overspent()

    def lose_row(self, node: PlannedNode, event: Tombstoned) -> str:
        """Lose a row that failed, which its group goes on without. Returns why the run fails, if it
        now does.
        """
        source = node.source
        self._note_loss(source)
        self.admissions[source].live.note(node.name, 0, 1)
        what = self.tables[source].lose_row(event.node, event.key, failed=event.failed)
        if what == "group":
            return self.drop_group(node, event)
        if not what:
            return ""
        self._note_first(event)
        self.admissions[source].note_lost(node, failed=event.failed)
        if event.failed:
            return self._why_overspent()
        return self._why_barren(source, event)

    def _note_loss(self, source: str) -> None:
        stream = self.tables[source].stream
        if stream is not None:
            stream.note_loss()

    def _note_first(self, event: Tombstoned) -> None:
        first = f"{self._plan.place(event.node)} row {event.key}: {event.error}"
        self._first_dropped = self._first_dropped or first

    def _why_overspent(self) -> str:
        """Why the run fails once prompts, and rows that are a share of one each, have failed in
        greater number than the error budget allows.
        """
        admissions = self.admissions.values()
        failed = sum(admission.failed_prompts for admission in admissions)
        admitted = sum(admission.admitted for admission in admissions)
        if failed <= max(10, self._settings.error_budget * admitted):
            return ""
        spent = f"{failed:.6g} of {admitted} admitted prompts were dropped"
        if any(admission.lost_rows for admission in admissions):
            spent += " (a row lost alone is its share of a prompt)"
        return (
            f"{spent}, more than the error budget of {self._settings.error_budget:.0%}; the first:"
            f" {self._first_dropped}"
        )

    def _why_barren(self, source: str, event: Tombstoned) -> str:
        """Fail once two passes gave nothing: in two orders of the data in a row, any two rows are
        less than two passes apart, so nothing ever will.
        """
        admission, table = self.admissions[source], self.tables[source]
        if table.prompts.count[FINISHED] or admission.barren < 2 * max(1, admission.rows):
            return ""
        where = self._plan.place(event.node)
        return f"{where} gave up every prompt of {source}; the last: {event.error}"

    def fruitless(self) -> str:
        """Why no Step could be formed of all the data; empty if no prompt was given up."""
        if not any(a.dropped or a.overlong for a in self.admissions.values()):
            return ""
        given_up = sum(a.dropped + a.overlong for a in self.admissions.values())
        admitted = sum(a.admitted for a in self.admissions.values())
        what = f"{given_up} of {admitted} prompts were given up; the first: {self._first_dropped}"
        return f"the data has ended without a Step: {what}"

    def tell_again(self, task: Task) -> None:
        """Nothing is told again: the stream has no task but its chunks."""
        del task

    def reissue(self, chunk: NodeChunk) -> list[NodeChunk]:
        """As in RunRegion."""
        return self.tables[chunk.node.source].unissue(chunk)

    def lose_blocks(self, blocks: frozenset[int]) -> list[NodeChunk]:
        """These blocks are gone. Prompts with lost rows of a trained Model begin again, as its
        weights have changed; other rows are made again. Returns the sources' chunks.
        """
        chunks: list[NodeChunk] = []
        # Those of a synchronous source are made again by the chunks that made them: its weights
        # have not moved on since (decision 0009).
        for name in self.late:
            slots, ready = self.tables[name].lose(blocks, trained=self._trained)
            self.admissions[name].begin_again(slots)
            chunks += ready
        return chunks

    def abandon(self) -> None:
        """As in RunRegion."""
        for admission in self.admissions.values():
            admission.abandon()

    # --- checkpoints ------------------------------------------------------------------------------

    def checkpoint(self, step: int, dispatch: Dispatch) -> Checkpoint | None:
        """The cut as of now; None while a row that goes into it is missing."""
        rows: dict[str, tuple[Keys, Gather]] = {}
        for table in self.tables.values():
            if not table.prompts.count[FINISHED]:
                continue
            for node in table.nodes:
                stored = table.stored_rows(node.name)
                reading = self._blocks.reading(node.name, (), stored.block, stored.row)
                if not dispatch.there(reading.numbers):
                    return None
                rows[node.name] = (stored.keys, self._blocks.gather(reading))
        cuts = {name: admission.cut() for name, admission in self.admissions.items()}
        return Checkpoint(step=step, sources=cuts, rows=rows)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines: list[str] = []
        for name, table in self.tables.items():
            lines += table.waiting()
            done = table.prompts.count[FINISHED]
            lines.append(
                f"intake of {name}: {done} of {self.admissions[name].source.batch} prompts are"
                " finished"
            )
        return lines


def _table(
    plan: Plan,
    source: PlannedSource,
    blocks: Blocks,
    recorded: RecordedParts,
    loads: FindLoads,
) -> PromptTable:
    nodes = [n for n in plan.nodes if n.region == "stream" and n.source == source.name]
    above = {n.name for n in nodes}
    cut: list[str] = []
    for node in plan.nodes:
        if node.region == "step":
            cut += [gate for gate in node.gates if gate in above]
    table = PromptTable(source.name, nodes, cut, blocks, loads)
    if source.stream != "off":
        table.stream_groups(partial(make_cut, source.stream, source.part_tokens, recorded))
    return table
