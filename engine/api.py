"""Check, plan, run: the whole way as Python calls; the command line and notebooks use these.

Owns: putting the parts together for one process. Does not own: any of the parts.

    from engine.api import run
    from engine.options import RunOptions

    result = run(grpo("path/to/model", "prompts.parquet", my_reward), RunOptions(steps=100))
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.check import CheckedGraph, check
from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.snapshot import fingerprint, from_json, to_json
from engine.checkpoint.best import BestVersions
from engine.checkpoint.cut import Cut, read_rows
from engine.checkpoint.store import Checkpoint, CheckpointStore
from engine.coordinator.core import Coordinator, Restored, Settings
from engine.coordinator.messages import Finish, Ref
from engine.observe.logs import logged
from engine.observe.progress import Progress
from engine.observe.runfolder import RunFolder
from engine.observe.samples import SamplesBehind, SampleWriter
from engine.observe.sinks import JsonLines, Sink, TensorBoard, Wandb
from engine.observe.trace import Trace
from engine.options import RunOptions
from engine.peek import first_rows
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.runtime.loop import Loop, Observers, OnStep
from engine.runtime.stop import Stop
from engine.runtime.worker import Worker

_log = logging.getLogger(__name__)

OPTIONS = "options.json"
WORKER = "main"
"""The name of the one Worker of a process."""

Until = Callable[[Mapping[str, float]], bool]
"""Of a Step's metrics: whether the run is to end there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended. `metrics` is the row of its last Step; `checkpoint` the folder of its last checkpoint."""

    folder: Path
    reason: str
    step: int
    metrics: Mapping[str, float]
    checkpoint: Path | None
    trained: Mapping[str, Path] = field(default_factory=dict)
    """Model name -> its Hugging Face directory in the last checkpoint."""
    best: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Evaluate node with keep_best -> the Hugging Face directories of its best versions, the best first."""
    interrupted: bool = False
    """Whether Ctrl-C ended it; `resume` goes on from its checkpoint."""


def plan(graph: Graph | CheckedGraph, options: RunOptions | None = None) -> Plan:
    """Check a graph and plan it for this machine. Raises GraphError or PlanError."""
    options = options or RunOptions()
    checked = graph if isinstance(graph, CheckedGraph) else check(graph)
    return make_plan(checked, seed=options.seed, threads=options.threads)


def run(
    graph: Graph | CheckedGraph,
    options: RunOptions | None = None,
    *,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
) -> Result:
    """Run a graph from its beginning. on_step: called with each Step's metrics. until: ends the run when it holds.

    Raises GraphError, PlanError, DataError before anything starts; KernelError or RunError where the run fails.
    """
    options = options or RunOptions()
    source = graph.graph if isinstance(graph, CheckedGraph) else graph
    planned = replace(plan(graph, options), digest=fingerprint(source))
    with RunFolder.create(options.name or planned.graph, options.runs, overwrite=options.overwrite) as folder:
        folder.write_text("graph.json", to_json(source))
        folder.write_text("plan.json", planned.to_json())
        folder.write_text("plan.txt", explain(planned))
        folder.write_text(OPTIONS, _options_json(options))
        return _go(planned, options, folder, on_step, until)


def resume(
    folder: Path | str,
    *,
    graph: Graph | None = None,
    on_step: Sequence[OnStep] = (),
    until: Until | None = None,
    **changes: Any,
) -> Result:
    """Go on from a run folder's last checkpoint. changes: options that are to differ, such as steps=.

    A run that was killed before its first checkpoint begins anew. graph: the graph of the run, for one whose functions
    cannot be imported (a lambda, a notebook's). Raises CheckpointError where every checkpoint is damaged, or where the
    graph is another one, and RunError where the folder is no run's.
    """
    path = Path(folder)
    with RunFolder.open_existing(path) as opened:
        options = _read_options(path, changes)
        again = graph or from_json(_recorded(path / "graph.json"))
        planned = replace(plan(again, options), digest=fingerprint(again))
        opened.write_text(OPTIONS, _options_json(options))
        return _go(planned, options, opened, on_step, until, resumed=True)


def peek(graph: Graph, node: str, rows: int = 4, options: RunOptions | None = None) -> pa.Table:
    """The first rows of a node's output, running only what it needs. Raises GraphError for an unknown node."""
    graph.node(node)  # raises with the names that there are
    return first_rows(plan(graph, options), node, rows)


def _go(
    planned: Plan,
    options: RunOptions,
    folder: RunFolder,
    on_step: Sequence[OnStep],
    until: Until | None,
    *,
    resumed: bool = False,
) -> Result:
    store = CheckpointStore(folder.checkpoints, keep=options.keep)
    samples = SampleWriter(folder.samples, every=options.samples_every)
    best = BestVersions(folder.checkpoints, _kept_best(planned))
    settings = Settings(steps=options.steps, checkpoint_every=options.checkpoint_every)
    coordinator = Coordinator(planned, settings)
    with ExitStack() as stack:
        stack.enter_context(logged(folder.log(WORKER)))
        behind = stack.enter_context(closing(SamplesBehind(samples)))
        worker = stack.enter_context(closing(Worker(WORKER, planned, inproc=options.inproc, samples=behind, best=best)))
        latest = store.latest() if resumed else None
        start = latest.step if latest is not None else 0
        lines = _lines(folder, planned, start, stack)
        samples.truncate_after(start)
        best.truncate_after(start)
        number = len(list(folder.trace.glob("*.json")))
        trace = stack.enter_context(closing(Trace(folder.trace / f"run_{number}.json", process="dataflow")))
        progress = stack.enter_context(Progress(options.steps, title=planned.graph)) if options.progress else None
        tell = [*on_step, progress.update] if progress is not None else list(on_step)
        views = _views(options, folder, planned, stack)
        observers = Observers(lines=lines, views=views, trace=trace, on_step=tell, until=until)
        stop = stack.enter_context(Stop(options.watchdog, lambda: _describe(worker, coordinator)))
        loop = Loop(planned, coordinator, worker, store, best, observers, stop)
        _log.info("%s begins after step %d", planned.graph, start)
        finish = _run_loop(loop, stop, lambda: _restored(latest, store, worker, planned) if latest else None)
        _log.info("%s ended at step %d: %s", planned.graph, coordinator.version, finish.reason)
    last = store.latest()
    trained = {m.name: last.path / m.writer for m in planned.models if m.writer} if last else {}
    return Result(
        folder=folder.path,
        reason=finish.reason,
        step=coordinator.version,
        metrics=loop.last,
        checkpoint=last.path if last else None,
        trained=trained,
        best=best.paths(),
        interrupted=stop.requested,
    )


def _run_loop(loop: Loop, stop: Stop, restored: Callable[[], Restored | None]) -> Finish:
    try:
        return loop.run(restored)
    except KeyboardInterrupt:
        if stop.hung:
            raise RunError(stop.hung) from None
        raise


def _restored(latest: Checkpoint, store: CheckpointStore, worker: Worker, planned: Plan) -> Restored:
    """Read a checkpoint into the (opened) worker."""
    cut = Cut.from_json((latest.path / "cut.json").read_bytes())
    cut.must_continue(graph=planned.digest, seed=planned.seed)
    worker.restore(latest.path, cut.step)
    store.truncate_after(latest.step)
    rows: dict[str, dict[str, Ref]] = {}
    for file in sorted((latest.path / "rows").glob("*.arrow")):
        node = planned.node(file.stem)
        rows.setdefault(node.source, {})[node.name] = worker.keep(read_rows(file))
    return Restored(step=cut.step, sources=cut.sources, rows=rows)


def _lines(folder: RunFolder, planned: Plan, step: int, stack: ExitStack) -> JsonLines:
    """The metrics file, without the lines of Steps that come again."""
    lines = JsonLines()
    stack.callback(lines.close)
    lines.open(folder, _config(planned))
    lines.truncate_after(step)
    return lines


def _views(options: RunOptions, folder: RunFolder, planned: Plan, stack: ExitStack) -> list[Sink]:
    views: list[Sink] = [{"tensorboard": TensorBoard, "wandb": Wandb}[name]() for name in options.sinks]
    for view in views:
        stack.callback(view.close)
        view.open(folder, _config(planned))
    return views


def _config(planned: Plan) -> dict[str, Any]:
    return {"graph": planned.graph, "seed": planned.seed}


def _kept_best(planned: Plan) -> dict[str, int]:
    """Evaluate nodes that keep their best versions, and how many."""
    assert planned.program is not None
    evaluations = [planned.program.node(n.name) for n in planned.nodes if n.work == "evaluate"]
    return {node.name: node.params["keep_best"] for node in evaluations if node.params["keep_best"]}


def _describe(worker: Worker, coordinator: Coordinator) -> str:
    doing = worker.doing
    lines = [f"{worker.name} is in {doing.node} ({doing.what})"] if doing else []
    return "\n  ".join([*lines, *coordinator.waiting()])


def _options_json(options: RunOptions) -> str:
    data = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    return json.dumps(data | {"path": _import_path()}, indent=1)


def _import_path() -> list[str]:
    """Folders beyond the installation's own from which this process imports: a resume needs them too."""
    installed = tuple({sys.prefix, sys.base_prefix})
    return [os.path.abspath(p) for p in sys.path if p and not os.path.abspath(p).startswith(installed)]


def _recorded(path: Path) -> str:
    if not path.is_file():
        raise RunError(f"{path}: the run was killed before it was written. Fix: run again with overwrite.")
    return path.read_text(encoding="utf-8")


def _read_options(folder: Path, changes: Mapping[str, Any]) -> RunOptions:
    data = json.loads(_recorded(folder / OPTIONS))
    for entry in data.pop("path"):
        if entry not in sys.path:
            sys.path.append(entry)
    data |= {k: v for k, v in changes.items() if v is not None}
    return RunOptions(**data | {"runs": Path(data["runs"]), "sinks": tuple(data["sinks"])})
