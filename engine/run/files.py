"""Checkpoints and best versions: which Worker writes what.

Owns: who is asked for which state, and reading it back in whatever places a plan has. Does not
own: a checkpoint's commit (engine/checkpoint), a kernel's files, when one is made (coordinator).

    step_N/<train node>/            model and optimizer of a train node; all its ranks take part
    step_N/followers/<model>/       weights of a follower, from the first of its readers
    step_N/rows/<node>.arrow        finished untrained rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from dataflow.errors import CheckpointError
from dataflow.storage import writing
from engine.checkpoint.best import BestVersions
from engine.checkpoint.cut import CUT, Cut, positions_of, read_cut
from engine.checkpoint.provenance import ProvenanceRecord
from engine.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.coordinator.core import Restored
from engine.coordinator.messages import Checkpoint, Evaluated
from engine.coordinator.refs import Ref
from engine.plan.plan import Plan, PlannedModel
from engine.run.workers import Ask, KeepRows, Restore, Save, SaveWeights, Workers


def write_checkpoint(
    plan: Plan,
    store: CheckpointStore,
    workers: Workers,
    message: Checkpoint,
    record: ProvenanceRecord | None = None,
) -> None:
    """Every Worker with state writes it, the recorder the rows. record: of what the run is made.

    Raises WorkerGone where one of them is lost, StorageError where the disk is full or fails; what
    was there before stays.
    """
    cut = Cut(
        step=message.step,
        seed=plan.seed,
        graph=plan.digest,
        sources=message.sources,
        evaluated=message.evaluated,
        record=record,
    )

    def fill(directory: Path) -> None:
        (directory / CUT).write_bytes(cut.to_json())
        if message.rows:
            (directory / "rows").mkdir()
        told: dict[str, Ask] = {
            w: Save(directory=directory, nodes=nodes) for w, nodes in _writers(plan).items()
        }
        nodes = _writers(plan).get(plan.recorder, {})
        workers.ask(
            told | {plan.recorder: Save(directory=directory, nodes=nodes, rows=message.rows)}
        )

    store.write(message.step, fill, {"graph": plan.graph}, timed=message.timed)


def read_checkpoint(
    plan: Plan, store: CheckpointStore, workers: Workers, latest: StoredCheckpoint
) -> Restored:
    """Read a checkpoint into the (opened) Workers; later ones are forgotten.

    Raises CheckpointError where it is of another seed, WorkerGone where a Worker is lost meanwhile.
    """
    cut = read_cut(latest.path, latest.step)
    cut.must_continue(seed=plan.seed)
    told = {
        w: Restore(directory=latest.path, step=cut.step, nodes=nodes)
        for w, nodes in _readers(plan).items()
    }
    workers.ask(told)
    with writing(f"checkpoints up to step {latest.step}", latest.path.parent):
        store.truncate_after(latest.step)
    rows: dict[str, dict[str, Ref]] = {}
    for file in sorted((latest.path / "rows").glob("*.arrow")):
        node = next((n for n in plan.nodes if n.name == file.stem), None)
        if node is None:
            raise CheckpointError(
                f"{file}: expected rows of a node, found none of that name. Fix: an earlier"
                " checkpoint."
            )
        worker = node.workers[0]
        rows.setdefault(node.source, {})[node.name] = workers.ask({worker: KeepRows(file=file)})[
            worker
        ]
        _must_wait(file, cut, node.source)
    return Restored(step=cut.step, sources=cut.sources, rows=rows, evaluated=cut.evaluated)


def _must_wait(file: Path, cut: Cut, source: str) -> None:
    """Raises CheckpointError where a file has rows that do not wait to be trained, as the cut
    knows.
    """
    known = cut.sources.get(source)
    finished = {key[0] for key in known.finished} if known else set()
    stray = sorted(positions_of(file) - finished)
    if stray:
        raise CheckpointError(
            f"{file}: expected rows that wait to be trained, found one of position {stray[0]},"
            " which does not. Fix: an earlier checkpoint."
        )


def save_best(plan: Plan, best: BestVersions, workers: Workers, event: Evaluated) -> bool:
    """Offer the weights that were evaluated to the best versions; whether they were kept. Raises
    WorkerGone.
    """
    evaluated = {use.model for use in plan.node(event.node).models}
    writer = next((m.writer for m in plan.models if m.name in evaluated and m.writer), "")
    if not writer or event.score is None:
        return False

    def save(directory: Path) -> None:
        workers.ask(
            {
                worker: SaveWeights(node=writer, directory=directory)
                for worker in plan.node(writer).workers
            }
        )

    return best.offer(event.node, event.version, event.score, save)


def _writers(plan: Plan) -> dict[str, dict[str, str]]:
    """Worker -> node -> its path in a checkpoint: train nodes on all their ranks, followers by one
    reader each.
    """
    found = _trains(plan)
    for model in _followers(plan):
        first = plan.node(model.readers[0])
        found[first.workers[0]][first.name] = _path(model)
    return found


def _readers(plan: Plan) -> Mapping[str, dict[str, str]]:
    """Likewise for reading back: a follower goes into every module that some Worker has of it."""
    found = _trains(plan)
    for model in _followers(plan):
        done: set[tuple[str, str]] = set()
        for node in (plan.node(reader) for reader in model.readers):
            module = next(u.module for u in node.models if u.model == model.name)
            for worker in node.workers:
                if (worker, module) not in done:
                    done.add((worker, module))
                    found[worker][node.name] = _path(model)
    return found


def _trains(plan: Plan) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for node in plan.nodes:
        for worker in node.workers if node.work == "train" else ():
            found[worker][node.name] = node.name
    return found


def _followers(plan: Plan) -> list[PlannedModel]:
    return [m for m in plan.models if m.follows and m.readers]


def _path(model: PlannedModel) -> str:
    return f"followers/{model.name}"
