"""Checkpoints and best versions: which Worker writes what, and where it goes.

Owns: who is asked for which state, and reading it back in whatever places a plan has. Does not own:
a checkpoint's commit (engine/keep/checkpoint), a kernel's files, when one is made (coordinator).

    step_N/<train node>/            model and optimizer of a train node; all its ranks take part
    step_N/<record node>/           a Table
    step_N/followers/<model>/       weights of a follower, from the first of its readers
    step_N/rows/<node>.arrow        finished untrained rows
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dataflow.errors import CheckpointError
from dataflow.storage import writing
from engine.coordinator.coordinator import Restored
from engine.keep.checkpoint.best_versions import BestVersions
from engine.keep.checkpoint.cut import CUT, Cut, read_cut, read_positions
from engine.keep.checkpoint.outdated_rows import find_outdated_sources
from engine.keep.checkpoint.provenance import ProvenanceRecord
from engine.keep.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.plan.plan import Plan, PlannedModel
from engine.protocol.messages import Checkpoint, Evaluated
from engine.protocol.refs import Ref
from engine.protocol.workers import Ask, KeepRows, Restore, Save, SaveWeights, Workers

_log = logging.getLogger(__name__)


class RunStore(Protocol):
    """Where a run's state is kept; by default nowhere. Each method raises WorkerGone where a Worker
    is lost meanwhile, and then leaves the state as it was.
    """

    def restore(self, workers: Workers) -> Restored | None:
        """Read the run's checkpoint into the opened Workers; None: there is none."""

    def write(self, workers: Workers, message: Checkpoint) -> bool:
        """Write a checkpoint. Returns True."""
        return True

    def keep_best(self, workers: Workers, event: Evaluated) -> bool:
        """Keep the evaluated weights if they are among the best. Returns whether they were."""
        return False

    def prune(self) -> None:
        """The run is over: delete all versions but the best."""


class NoStore(RunStore):
    """The store of a run that leaves nothing behind."""


@dataclass(frozen=True, slots=True)
class DiskStore:
    """The store in a run folder. latest: the checkpoint to resume from. Raises StorageError where
    the disk is full or fails, CheckpointError for a checkpoint of another seed.
    """

    plan: Plan
    store: CheckpointStore
    best: BestVersions
    latest: StoredCheckpoint | None
    record: ProvenanceRecord
    keep_every: int = 0
    """Steps between checkpoints that stay."""
    on_rows: Callable[[Mapping[str, Mapping[str, Ref]]], None] = lambda rows: None
    """Called with what was put into outboxes: rows by source and node."""

    def restore(self, workers: Workers) -> Restored | None:
        """Also deletes later checkpoints. Without one, optimizers of an earlier phase go on.

        Finished rows that something else made than the run is made of now are left out.
        """
        latest, plan = self.latest, self.plan
        if latest is None:
            resume_states(plan, workers)
            return None
        cut = read_cut(latest.path, latest.step)
        cut.must_continue(seed=plan.seed)
        restore_state(plan, workers, latest.path, cut.step - plan.first)
        with writing(f"checkpoints up to step {latest.step}", latest.path.parent):
            self.store.truncate_after(latest.step)
        anew, why = find_outdated_sources(plan, cut.record, self.record)
        files = _files_of(plan, latest.path, anew)
        rows = restore_rows(plan, workers, files)
        self.on_rows(rows)
        for file in files:
            _must_wait(file, cut, plan.node(file.stem).source)
        again = {name: source.begun_again() for name, source in cut.sources.items() if name in anew}
        waiting = sum(len(cut.sources[name].finished) for name in again)
        if waiting:
            _log.warning("%d finished prompts begin again, as something changed: %s", waiting, why)
        sources = {**cut.sources, **again}
        step = cut.step - plan.first
        return Restored(step=step, sources=sources, rows=rows, evaluated=cut.evaluated)

    def write(self, workers: Workers, message: Checkpoint) -> bool:
        """Also deletes versions that are no longer among the best."""
        plan, step = self.plan, self.plan.first + message.step
        cut = Cut(
            step=step,
            seed=plan.seed,
            graph=plan.digest,
            sources=message.sources,
            evaluated=message.evaluated,
            record=self.record,
        )

        def fill(directory: Path) -> None:
            (directory / CUT).write_bytes(cut.to_json())
            if message.rows:
                (directory / "rows").mkdir()
            write_state(plan, workers, directory, message)

        stays = self.keep_every > 0 and message.step % self.keep_every == 0
        timed = message.timed and not stays
        self.store.write(step, fill, _meta(plan), timed=timed, for_good=stays)
        self.best.prune()
        return True

    def keep_best(self, workers: Workers, event: Evaluated) -> bool:
        """Keeps them only for an evaluate node with keep_best."""
        writer = evaluated_writer(self.plan, event)
        if not writer or event.score is None:
            return False

        def fill(directory: Path) -> None:
            save_weights(self.plan, workers, directory, writer)

        step = self.plan.first + event.version
        return self.best.offer(event.node, step, event.score, fill)

    def prune(self) -> None:
        self.best.prune()


def _meta(plan: Plan) -> dict[str, Any]:
    """What a manifest says: the graph; in a Program the phase, and where those before ended."""
    meta: dict[str, Any] = {"graph": plan.graph}
    if plan.phase is not None:
        meta |= {"phase": plan.phase.number, "boundaries": list(plan.phase.boundaries)}
    return meta


def resume_states(plan: Plan, workers: Workers) -> None:
    """Train nodes whose optimizer goes on read what the last training of their Model left."""
    states = plan.phase.states if plan.phase else {}
    paths_by_worker: dict[str, dict[str, str]] = defaultdict(dict)
    for node, path in states.items():
        for worker in plan.node(node).workers:
            paths_by_worker[worker][node] = path
    here = Path()  # these paths are not below a checkpoint
    asks = {w: Restore(directory=here, step=0, nodes=n) for w, n in paths_by_worker.items()}
    workers.ask(asks)


def write_state(
    plan: Plan, workers: Workers, directory: Path, message: Checkpoint
) -> dict[str, Any]:
    """Every Worker with state writes it, the recorder the rows. Returns the answers by Worker."""
    writers = _paths(plan, write=True)
    asked: dict[str, Ask] = {w: Save(directory=directory, nodes=n) for w, n in writers.items()}
    nodes = writers.get(plan.recorder, {})
    asked[plan.recorder] = Save(directory=directory, nodes=nodes, rows=message.rows)
    return workers.ask(asked)


def restore_state(plan: Plan, workers: Workers, directory: Path, step: int) -> None:
    """Every Worker with state reads it back."""
    readers = _paths(plan, write=False).items()
    workers.ask({w: Restore(directory=directory, step=step, nodes=n) for w, n in readers})


def restore_rows(plan: Plan, workers: Workers, files: Iterable[Path]) -> dict[str, dict[str, Ref]]:
    """Put the rows of these files into the outboxes of their nodes. By source and node."""
    rows: dict[str, dict[str, Ref]] = {}
    for file in files:
        node = next((n for n in plan.nodes if n.name == file.stem), None)
        if node is None:
            problem = "expected rows of a node, found none of that name"
            raise CheckpointError(f"{file}: {problem}. Fix: an earlier checkpoint.")
        worker = node.workers[0]
        answers = workers.ask({worker: KeepRows(file=file)})
        rows.setdefault(node.source, {})[node.name] = answers[worker]
    return rows


def save_weights(plan: Plan, workers: Workers, directory: Path, writer: str) -> None:
    """All ranks of this train node write its model."""
    asked = SaveWeights(node=writer, directory=directory)
    workers.ask(dict.fromkeys(plan.node(writer).workers, asked))


def evaluated_writer(plan: Plan, event: Evaluated) -> str:
    """The train node of the evaluated weights; empty where none trains them."""
    evaluated = {use.model for use in plan.node(event.node).models}
    return next((m.writer for m in plan.models if m.name in evaluated and m.writer), "")


def _files_of(plan: Plan, checkpoint: Path, anew: frozenset[str]) -> list[Path]:
    """The files of finished rows, except those of these sources."""
    files = sorted((checkpoint / "rows").glob("*.arrow"))
    if anew.issuperset(source.name for source in plan.sources):
        return []
    left_out = {node.name for node in plan.nodes if node.source in anew}
    return [file for file in files if file.stem not in left_out]


def _must_wait(file: Path, cut: Cut, source: str) -> None:
    """Raises CheckpointError where a file has rows that do not wait to be trained."""
    known = cut.sources.get(source)
    finished = set[int]()
    if known is not None:
        finished = {key[0] for key in known.finished}
    stray = sorted(read_positions(file) - finished)
    if stray:
        stray_row = f"found one of position {stray[0]}, which does not. Fix: an earlier checkpoint."
        raise CheckpointError(f"{file}: expected rows that wait to be trained, {stray_row}")


def _paths(plan: Plan, *, write: bool) -> dict[str, dict[str, str]]:
    """Worker -> node -> path in a checkpoint. All ranks of a train node write and read, and a
    record node; a follower is written by one of its readers and read into all of its modules.
    """
    paths: dict[str, dict[str, str]] = defaultdict(dict)
    for node in (node for node in plan.nodes if node.traits.steps):
        for worker in node.workers:
            paths[worker][node.name] = node.name
    for model in (model for model in plan.models if model.follows):
        modules = _modules(plan, model)
        if write:
            modules = modules[:1]  # all of them have the same weights
        for worker, node in modules:
            paths[worker][node] = f"followers/{model.name}"
    return paths


def _modules(plan: Plan, model: PlannedModel) -> list[tuple[str, str]]:
    """(Worker, node) for each module of a model: the first node there that reads it."""
    readers: dict[tuple[str, str], tuple[str, str]] = {}
    for node in map(plan.node, model.readers):
        module = next(use.module for use in node.models if use.model == model.name)
        for worker in node.workers:
            readers.setdefault((worker, module), (worker, node.name))
    return list(readers.values())
