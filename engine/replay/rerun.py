"""A part of a recorded run, run again and compared with what was recorded.

Owns: what is compared, and which promise a rerun keeps. Does not own: running it (task_replay.py),
choosing what runs (needed_tasks.py), the comparison of cells (row_equality.py).

    promise      of                                              compared
    bits         chunks at lag 0; train and forward nodes at     rows, weights, metrics: every bit
                 any lag; the same ranks, threads and
                 installation
    tolerance    generation that took new weights within its     log-probs of its recorded tokens
                 rows, or whose kernel has a process of its own
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.keep.checkpoint.step_folders import steps_of_names
from engine.keep.checkpoint.store import read_checkpoint
from engine.keep.metrics.metric_lines import recorded_row
from engine.keep.record.recorder import own_columns
from engine.replay.needed_tasks import NeededRun, needed
from engine.replay.other_ranks import together
from engine.replay.recorded_run import RecordedRun, changed_later, open_recorded
from engine.replay.row_equality import first_difference, told
from engine.replay.task_replay import ReplayedTask
from engine.weights.probe import tolerance_of

Promise = Literal["bits", "tolerance", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRerun:
    """How a node's rerun compares. promise: what was compared, and to which measure; nothing, where
    the run recorded nothing of it. difference: the first one, in words; empty without any.
    """

    node: str
    promise: Promise
    compared: str
    difference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What a rerun did. checkpoint: the Step whose weights it began with; 0: the bases. trained:
    the Steps that were trained on the way. others: why bits may differ without a fault.
    """

    folder: Path
    step: int
    checkpoint: int
    trained: tuple[int, ...]
    remade: tuple[str, ...]
    others: tuple[str, ...]
    nodes: tuple[NodeRerun, ...] = field(default=())

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not any(node.difference for node in self.nodes)


def rerun(
    folder: Path | str,
    nodes: Sequence[str],
    step: int,
    *,
    graph: Graph | None = None,
    settings: Sequence[str] = (),
) -> Rerun:
    """Run these nodes of a Step of a recorded run again, in this process, and compare.
    graph: in the place of the recorded one. settings:
    parameters with other values. Raises RunError, GraphError, PlanError before anything runs, and
    what a kernel raises.
    """
    run = open_recorded(Path(folder), until=None, graph=graph, settings=settings)
    for name in nodes:
        run.node(name)
    stored = run.folder / "checkpoints"
    what = needed(run, nodes, step, _checkpoints(stored))
    edited = bool(settings) or graph is not None
    changed = [] if edited else changed_later(run, _first_step(what, step))
    if changed:
        problem = f"step {step} was run with other parameters: {'; '.join(changed)}"
        raise RunError(f"rerun of {run.folder}: {problem}. Fix: --set with the value of then.")
    begins = read_checkpoint(stored, what.checkpoint).path if what.checkpoint else None
    targets = {each.task.name for _, each in what.tasks if each.target}
    with together(run, what, begins) as replay:
        found = [each for each in replay.run() if each.task.name in targets]
    compared = tuple(
        _compared(run, name, [e for e in found if e.task.node == name]) for name in nodes
    )
    steps = {each.task.step for _, each in what.tasks if each.task.kind == "train"}
    return Rerun(
        folder=run.folder,
        step=step,
        checkpoint=what.checkpoint,
        trained=tuple(sorted(steps)),
        remade=what.remade,
        others=run.others,
        nodes=compared,
    )


def _checkpoints(folder: Path) -> list[int]:
    return steps_of_names(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _first_step(what: NeededRun, step: int) -> int:
    """The first Step of which something runs again."""
    return min((each.task.step for _, each in what.tasks if each.task.step), default=step)


def _compared(run: RecordedRun, node: str, found: Sequence[ReplayedTask]) -> NodeRerun:
    if found[0].task.kind != "chunk":
        return _measures(run, node, found[0])
    replayed = [each for each in found if each.logprobs is not None]
    if replayed:
        return _tokens(run, node, replayed)
    return _rows(run, node, found)


# --- rows -----------------------------------------------------------------------------------------


def _rows(run: RecordedRun, node: str, found: Sequence[ReplayedTask]) -> NodeRerun:
    made = [batch for each in found for batch in each.made]
    count = sum(len(batch) for batch in made)
    if node not in run.rows.nodes:
        said = f"made {count} rows; the run did not record its rows"
        return NodeRerun(node=node, promise="nothing", compared=said)
    columns: list[str] = []
    for each in found:
        wanted, difference = _chunk(run, node, each)
        columns = columns or wanted
        if difference:
            said = f"{count} rows, columns {', '.join(columns)}"
            return NodeRerun(node=node, promise="bits", compared=said, difference=difference)
    said = f"{count} rows, columns {', '.join(columns)}"
    return NodeRerun(node=node, promise="bits", compared=said)


def _chunk(run: RecordedRun, node: str, each: ReplayedTask) -> tuple[list[str], str]:
    """The columns, and the first difference of a chunk's rows from the recorded ones."""
    task = each.task
    wanted = sorted(key for keys in task.made for key in keys.rows())
    made = Batch.concat(list(each.made)).sorted() if each.made else None
    rows = sorted(made.keys.rows()) if made is not None else []
    if rows != wanted:
        other = next(iter(sorted(set(wanted) ^ set(rows))))
        where = "the run has" if other in wanted else "the rerun has"
        return [], f"row {told(other)}: only {where}"
    if made is None:
        return [], ""
    table, missing = run.rows.find(node, made.keys, task.step)
    if table is None:
        return [], f"row {told(missing[0])}: it is not on the disk"
    columns = own_columns(table.schema)
    again = pa.Table.from_batches([made.records])
    difference = first_difference(table, again, columns)
    if difference is None:
        return columns, ""
    row = told(made.keys.rows()[difference.row])
    return columns, f"row {row}: {difference} (the run, the rerun)"


# --- tokens that were replayed --------------------------------------------------------------------


def _tokens(run: RecordedRun, node: str, found: Sequence[ReplayedTask]) -> NodeRerun:
    """Log-probs of recorded tokens, each with the version that it was made with."""
    parts = [_pairs(each) for each in found]
    was, now = (np.concatenate(each) for each in zip(*parts, strict=True))
    off = np.abs(was.astype(np.float64) - now)
    tolerance = tolerance_of([_dtype(run, node)])
    scale = max(1.0, float(was.std())) if len(was) else 1.0
    worst, mean = (float(off.max()), float(off.mean())) if len(off) else (0.0, 0.0)
    versions = sorted({int(v) for each in found for v in _versions(each)})
    said = (
        f"log-probs of {len(was)} recorded tokens of versions {', '.join(map(str, versions))}:"
        f" |difference| {mean:.2g} on average, {worst:.2g} at most"
    )
    allowed = scale * tolerance.mean, scale * tolerance.max
    fine = mean <= allowed[0] and worst <= allowed[1]
    difference = "" if fine else f"more than {allowed[0]:.2g} on average, {allowed[1]:.2g} at most"
    return NodeRerun(node=node, promise="tolerance", compared=said, difference=difference)


def _pairs(each: ReplayedTask) -> tuple[np.ndarray, np.ndarray]:
    assert each.logprobs is not None
    assert each.at is not None
    return each.made[0].ragged("sampler_logprobs").values[each.at], each.logprobs


def _versions(each: ReplayedTask) -> np.ndarray:
    assert each.at is not None
    return np.unique(each.made[0].ragged("version").values[each.at])


def _dtype(run: RecordedRun, node: str) -> str:
    assert run.plan.program is not None
    used = run.plan.node(node).models[0].model
    states = (s for s in run.plan.program.states if isinstance(s, Model) and s.name == used)
    return next(str(state.dtype) for state in states)


# --- training -------------------------------------------------------------------------------------


def _measures(run: RecordedRun, node: str, each: ReplayedTask) -> NodeRerun:
    """The weights after a Step, and its metrics, as far as the run kept them."""
    task = each.task
    row = recorded_row(run.folder / "metrics.jsonl", task.step)
    metrics = {name: value for name, value in each.metrics.items() if name in row}
    parts = ["the weights" if task.digest else "", f"{len(metrics)} metrics" if metrics else ""]
    said = " and ".join(part for part in parts if part)
    if not said:
        return NodeRerun(node=node, promise="nothing", compared="the run kept no number of it")
    difference = next(_unequal(task.digest, each.digest, metrics, row), "")
    return NodeRerun(node=node, promise="bits", compared=said, difference=difference)


def _unequal(was: str, now: str, metrics: Any, row: Any) -> Iterator[str]:
    if was and was != now:
        yield f"weights: digest {was} and {now} (the run, the rerun)"
    for name, value in metrics.items():
        kept = math.nan if row[name] is None else row[name]
        if kept != value and not (math.isnan(kept) and not math.isfinite(value)):
            yield f"{name}: {kept!r} and {value!r} (the run, the rerun)"
