"""Check, plan, run: the whole way as Python calls; the command line and notebooks use these.

Owns: putting the parts together for one process. Does not own: any of the parts.

    from engine.api import run
    from engine.options import RunOptions

    result = run(grpo("path/to/model", "prompts.parquet", my_reward), RunOptions(steps=100))
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.check import CheckedGraph, check
from dataflow.errors import CheckpointError, RunError
from dataflow.graph import Graph
from dataflow.snapshot import from_json, to_json
from engine.checkpoint.cut import Cut, read_rows
from engine.checkpoint.store import CheckpointStore
from engine.coordinator.core import Coordinator, Restored, Settings
from engine.coordinator.messages import Ref
from engine.observe.progress import Progress
from engine.observe.runfolder import RunFolder
from engine.observe.samples import SampleWriter
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

OPTIONS = "options.json"

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
    planned = plan(graph, options)
    with RunFolder.create(options.name or planned.graph, options.runs, overwrite=options.overwrite) as folder:
        assert planned.program is not None
        source = graph.graph if isinstance(graph, CheckedGraph) else graph
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

    graph: the graph of the run, for one whose functions cannot be imported (lambdas, a notebook's).
    Raises CheckpointError where there is nothing to go on from, or where the graph is another one.
    """
    path = Path(folder)
    with RunFolder.open_existing(path) as opened:
        options = _read_options(path, changes)
        again = graph or from_json((path / "graph.json").read_text())
        planned = plan(again, options)
        store = CheckpointStore(opened.checkpoints, keep=options.keep)
        if store.latest() is None:
            raise CheckpointError(f"{path}: no checkpoint was written yet. Fix: run again with --overwrite.")
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
    worker = Worker("main", planned, inproc=options.inproc, samples=samples)
    settings = Settings(steps=options.steps, checkpoint_every=options.checkpoint_every)
    coordinator = Coordinator(planned, settings)
    with ExitStack() as stack:
        stack.callback(worker.close)
        latest = store.latest() if resumed else None
        sinks = _sinks(options, folder, planned, latest.step if latest else 0, stack)
        number = len(list(folder.trace.glob("*.json")))
        trace = stack.enter_context(_closing(Trace(folder.trace / f"run_{number}.json", process="dataflow")))
        progress = stack.enter_context(Progress(options.steps, title=planned.graph)) if options.progress else None
        tell = [*on_step, progress.update] if progress is not None else list(on_step)
        observers = Observers(sinks=sinks, trace=trace, on_step=tell, until=until)
        stop = stack.enter_context(Stop(options.watchdog, lambda: _describe(worker, coordinator)))
        loop = Loop(planned, coordinator, worker, store, observers, stop)
        finish = _run_loop(loop, stop, lambda: _restored(store, worker, planned, samples) if resumed else None)
    last = store.latest()
    trained = {m.name: last.path / m.writer for m in planned.models if m.writer} if last else {}
    return Result(
        folder=folder.path,
        reason=finish.reason,
        step=coordinator.version,
        metrics=loop.last,
        checkpoint=last.path if last else None,
        trained=trained,
    )


def _run_loop(loop: Loop, stop: Stop, restored: Any) -> Any:
    try:
        return loop.run(restored)
    except KeyboardInterrupt:
        if stop.hung:
            raise RunError(stop.hung) from None
        raise


def _restored(store: CheckpointStore, worker: Worker, planned: Plan, samples: SampleWriter) -> Restored:
    """Read the last checkpoint into the (opened) worker; files of later Steps are cut off."""
    latest = store.latest()
    assert latest is not None
    cut = Cut.from_json((latest.path / "cut.json").read_bytes())
    cut.must_continue(graph=planned.digest, seed=planned.seed)
    worker.restore(latest.path)
    store.truncate_after(latest.step)
    samples.truncate_after(latest.step)
    rows: dict[str, dict[str, Ref]] = {}
    for file in sorted((latest.path / "rows").glob("*.arrow")):
        node = planned.node(file.stem)
        rows.setdefault(node.source, {})[node.name] = worker.keep(read_rows(file))
    return Restored(step=cut.step, sources=cut.sources, rows=rows)


def _sinks(options: RunOptions, folder: RunFolder, planned: Plan, step: int, stack: ExitStack) -> list[Sink]:
    lines = JsonLines()
    made: list[Sink] = [lines, *({"tensorboard": TensorBoard, "wandb": Wandb}[name]() for name in options.sinks)]
    for sink in made:
        sink.open(folder, {"graph": planned.graph, "seed": planned.seed})
        stack.callback(sink.close)
    lines.truncate_after(step)
    return made


def _describe(worker: Worker, coordinator: Coordinator) -> str:
    doing = worker.doing
    lines = [f"{worker.name} is in {doing.node} ({doing.what})"] if doing else []
    return "\n  ".join([*lines, *coordinator.waiting()])


@contextmanager
def _closing(trace: Trace) -> Iterator[Trace]:
    try:
        yield trace
    finally:
        trace.close()


def _options_json(options: RunOptions) -> str:
    data = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    return json.dumps(data | {"path": _import_path()}, indent=1)


def _import_path() -> list[str]:
    """Folders beyond the installation's own from which this process imports: a resume needs them too."""
    installed = tuple({sys.prefix, sys.base_prefix})
    return [os.path.abspath(p) for p in sys.path if p and not os.path.abspath(p).startswith(installed)]


def _read_options(folder: Path, changes: Mapping[str, Any]) -> RunOptions:
    data = json.loads((folder / OPTIONS).read_text())
    for entry in data.pop("path"):
        if entry not in sys.path:
            sys.path.append(entry)
    data |= {k: v for k, v in changes.items() if v is not None}
    return RunOptions(**data | {"runs": Path(data["runs"]), "sinks": tuple(data["sinks"])})
