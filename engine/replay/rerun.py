"""A part of a recorded run, run again and compared with what was recorded.

Owns: what is compared, and which promise a rerun keeps (0034). Does not own: running it
(task_replay.py), choosing what runs (needed_tasks.py), the comparison of cells (row_equality.py).

    promise      of                                              compared
    bits         chunks at lag 0; train and forward nodes at     rows, weights, metrics: every bit
                 any lag; the same ranks, threads and
                 installation
    tolerance    generation that took new weights within its     log-probs of its recorded tokens
                 rows, or whose kernel has a process of its own
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.graph import Graph
from engine.keep.checkpoint.step_folders import steps_of_names
from engine.keep.checkpoint.store import read_checkpoint
from engine.keep.metrics.metric_lines import recorded_row
from engine.keep.record.recorder import compared_columns
from engine.protocol.refs import Key
from engine.replay.needed_tasks import NeededRun, find_needed_tasks
from engine.replay.other_ranks import open_replay
from engine.replay.recorded_run import (
    RecordedRun,
    list_later_changes,
    list_other_layouts,
    open_recorded,
)
from engine.replay.row_equality import describe_key, first_difference
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


def rerun_nodes(
    folder: Path | str,
    nodes: Sequence[str],
    step: int,
    *,
    graph: Graph | None = None,
    settings: Sequence[str] = (),
) -> Rerun:
    """Run these nodes of a Step of a recorded run again, in this process, and compare. graph: in
    the place of the recorded one. settings: parameters with other values. Raises RunError,
    GraphError, PlanError before anything runs, and what a kernel raises.
    """
    run = open_recorded(Path(folder), until=None, graph=graph, settings=settings)
    for name in nodes:
        run.node(name)
    stored = run.folder / "checkpoints"
    needed_run = find_needed_tasks(run, nodes, step, _list_checkpoints(stored))
    # Whoever gives other parameters means them; else they have to be those of the Step.
    is_edited = bool(settings) or graph is not None
    if not is_edited:
        _refuse_later_changes(run, needed_run, step)
    checkpoint = None
    if needed_run.checkpoint:
        checkpoint = read_checkpoint(stored, needed_run.checkpoint).path
    replayed = _replay_targets(run, needed_run, checkpoint)
    compared_nodes = tuple(_compare_node(run, name, replayed[name]) for name in nodes)
    tasks = [needed.task for _, needed in needed_run.tasks]
    trained_steps = {task.step for task in tasks if task.kind == "train"}
    return Rerun(
        folder=run.folder,
        step=step,
        checkpoint=needed_run.checkpoint,
        trained=tuple(sorted(trained_steps)),
        remade=needed_run.remade,
        others=(*run.installation_changes, *list_other_layouts(run.folder, step)),
        nodes=compared_nodes,
    )


def _list_checkpoints(folder: Path) -> list[int]:
    """The Steps that have a checkpoint."""
    if not folder.is_dir():
        return []
    return steps_of_names(path.name for path in folder.iterdir())


def _refuse_later_changes(run: RecordedRun, needed_run: NeededRun, step: int) -> None:
    """Raise RunError if parameters were changed after the first Step of which something runs."""
    steps = [needed.task.step for _, needed in needed_run.tasks if needed.task.step]
    changes = list_later_changes(run, min(steps, default=step))
    if changes:
        problem = f"step {step} was run with other parameters: {'; '.join(changes)}"
        raise RunError(f"rerun of {run.folder}: {problem}. Fix: --set with the value of then.")


def _replay_targets(
    run: RecordedRun, needed_run: NeededRun, checkpoint: Path | None
) -> dict[str, list[ReplayedTask]]:
    """Run all that is needed; by node, what came of the tasks that were asked for."""
    targets = {needed.task.name for _, needed in needed_run.tasks if needed.is_target}
    replayed: dict[str, list[ReplayedTask]] = defaultdict(list)
    with open_replay(run, needed_run, checkpoint) as replay:
        for each in replay.run():
            if each.task.name in targets:
                replayed[each.task.node].append(each)
    return replayed


def _compare_node(run: RecordedRun, node: str, replayed: Sequence[ReplayedTask]) -> NodeRerun:
    if replayed[0].task.kind != "chunk":
        return _compare_training(run, node, replayed[0])
    with_tokens = [each for each in replayed if each.logprobs is not None]
    if with_tokens:
        return _compare_tokens(run, node, with_tokens)
    return _compare_rows(run, node, replayed)


# --- rows -----------------------------------------------------------------------------------------


def _compare_rows(run: RecordedRun, node: str, replayed: Sequence[ReplayedTask]) -> NodeRerun:
    count = sum(sum(map(len, each.batches)) for each in replayed)
    if node not in run.rows.nodes:
        compared = f"made {count} rows; the run did not record its rows"
        return NodeRerun(node=node, promise="nothing", compared=compared)
    columns: list[str] = []
    difference = ""
    for each in replayed:
        chunk_columns, difference = _compare_chunk(run, node, each)
        columns = columns or chunk_columns
        if difference:
            break
    compared = f"{count} rows, columns {', '.join(columns)}"
    return NodeRerun(node=node, promise="bits", compared=compared, difference=difference)


def _compare_chunk(run: RecordedRun, node: str, replayed: ReplayedTask) -> tuple[list[str], str]:
    """The columns, and the first difference of a chunk's rows from the recorded ones."""
    task = replayed.task
    recorded_keys = sorted(task.made_rows())
    replayed_keys: list[Key] = []
    for batch in replayed.batches:
        replayed_keys.extend(batch.keys.rows())
    replayed_keys.sort()
    if replayed_keys != recorded_keys:
        lone_key = min(set(recorded_keys) ^ set(replayed_keys))
        owner = "the run has" if lone_key in recorded_keys else "the rerun has"
        return [], f"row {describe_key(lone_key)}: only {owner}"
    if not replayed_keys:
        return [], ""
    batch = Batch.concat(list(replayed.batches)).sort()
    table, missing = run.rows.find(node, batch.keys, task.step)
    if table is None:
        return [], f"row {describe_key(missing[0])}: it is not on the disk"
    columns = compared_columns(table.schema)
    replayed_table = pa.Table.from_batches([batch.records])
    difference = first_difference(table, replayed_table, columns)
    if difference is None:
        return columns, ""
    row = describe_key(batch.keys.rows()[difference.row])
    return columns, f"row {row}: {difference} (the run, the rerun)"


# --- tokens that were replayed --------------------------------------------------------------------


def _compare_tokens(run: RecordedRun, node: str, replayed: Sequence[ReplayedTask]) -> NodeRerun:
    """Log-probs of recorded tokens, each with the version that it was made with."""
    parts = [_read_tokens(each) for each in replayed]
    old = np.concatenate([part.recorded for part in parts])
    new = np.concatenate([part.replayed for part in parts])
    differences = np.abs(old.astype(np.float64) - new)
    mean, worst, spread = 0.0, 0.0, 0.0
    if len(differences):
        mean, worst = float(differences.mean()), float(differences.max())
        spread = float(old.std())
    versions: set[int] = set()
    for part in parts:
        versions.update(map(int, part.versions))
    version_list = ", ".join(map(str, sorted(versions)))
    compared = (
        f"log-probs of {len(old)} recorded tokens of versions {version_list}:"
        f" |difference| {mean:.2g} on average, {worst:.2g} at most"
    )
    tolerance = tolerance_of([_find_dtype(run, node)])
    # Tolerances grow with the spread of the log-probs, as those of a weight edge's probe do.
    scale = max(1.0, spread)
    most_mean, most_worst = scale * tolerance.mean, scale * tolerance.max
    difference = ""
    is_within = mean <= most_mean and worst <= most_worst
    if not is_within:
        difference = f"more than {most_mean:.2g} on average, {most_worst:.2g} at most"
    return NodeRerun(node=node, promise="tolerance", compared=compared, difference=difference)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ReplayedTokens:
    """Log-probs of a chunk's tokens, as recorded and as replayed, and the versions of them all."""

    recorded: np.ndarray
    replayed: np.ndarray
    versions: np.ndarray


def _read_tokens(replayed: ReplayedTask) -> _ReplayedTokens:
    assert replayed.logprobs is not None
    assert replayed.token_indices is not None
    rows = replayed.batches[0]
    return _ReplayedTokens(
        recorded=rows.ragged("sampler_logprobs").values[replayed.token_indices],
        replayed=replayed.logprobs,
        versions=np.unique(rows.ragged("version").values[replayed.token_indices]),
    )


def _find_dtype(run: RecordedRun, node: str) -> str:
    """The dtype of the Model that a node computes with; empty if its base is not here."""
    name = run.plan.node(node).models[0].model
    return next(model.dtype for model in run.plan.models if model.name == name)


# --- training -------------------------------------------------------------------------------------


def _compare_training(run: RecordedRun, node: str, replayed: ReplayedTask) -> NodeRerun:
    """The weights after a Step, and its metrics, as far as the run kept them."""
    task = replayed.task
    row = recorded_row(run.folder / "metrics.jsonl", task.step)
    metrics = {name: number for name, number in replayed.metrics.items() if name in row}
    parts: list[str] = []
    if task.digest:
        parts.append("the weights")
    if metrics:
        parts.append(f"{len(metrics)} metrics")
    if not parts:
        return NodeRerun(node=node, promise="nothing", compared="the run kept no number of it")
    differences = _list_differences(task.digest, replayed.digest, metrics, row)
    return NodeRerun(
        node=node,
        promise="bits",
        compared=" and ".join(parts),
        difference=next(differences, ""),
    )


def _list_differences(
    recorded_digest: str,
    digest: str,
    metrics: Mapping[str, float],
    row: Mapping[str, float | None],
) -> Iterator[str]:
    """Each difference in words: of the weights, if the run has a digest of them; of each metric
    from the Step's row, where one that was not finite is None.
    """
    if recorded_digest and recorded_digest != digest:
        yield f"weights: digest {recorded_digest} and {digest} (the run, the rerun)"
    for name, number in metrics.items():
        entry = row[name]
        recorded = math.nan if entry is None else entry
        both_not_finite = math.isnan(recorded) and not math.isfinite(number)
        if recorded != number and not both_not_finite:
            yield f"{name}: {recorded!r} and {number!r} (the run, the rerun)"
