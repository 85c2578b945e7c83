"""A Worker: one process with one or more kernels, which it runs one after another.

    executes      waits for                         unblocked by
    RunChunk      nothing (its rows are there)      -
    TrainStep     nothing                           -
    Publish       the writer's pieces               the writer, at a Step boundary
    Record        nothing                           -
    Checkpoint    nothing                           -

Owns: kernels, their sessions, the outbox. Does not own: any decision (coordinator), nor
messages between processes.
"""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.errors import DataError, DataflowError, KernelError, PlanError
from dataflow.graph import Graph
from dataflow.kernel import Assignment, Chunk, KernelNode
from dataflow.model import Model
from engine.channels.inproc import InprocChannel
from engine.checkpoint.best import BestVersions
from engine.checkpoint.cut import write_rows
from engine.coordinator.messages import (
    NO_VERSION,
    Checkpoint,
    ChunkDone,
    Evaluate,
    Evaluated,
    Event,
    Follow,
    Loaded,
    Produced,
    Publish,
    Record,
    Recorded,
    Ref,
    RunChunk,
    SourceOpened,
    Stepped,
    Tombstoned,
    TrainStep,
)
from engine.observe.record import row_metrics, tokens
from engine.observe.samples import SamplesBehind, sample_table
from engine.plan.plan import Plan, PlannedNode
from engine.runtime.assemble import assemble, collect
from engine.runtime.session import Modules, NodeSession, Report

Span = Callable[[str, str, float, float], None]
"""(track, name, start, end) of something that the Worker did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a Worker is doing, for the watchdog."""

    node: str
    what: str


class Worker:
    """The kernels of one Worker. `execute` runs one instruction and yields what comes of it."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        inproc: bool = False,
        samples: SamplesBehind | None = None,
        best: BestVersions | None = None,
    ) -> None:
        assert plan.program is not None
        self.name = name
        self.channel = InprocChannel()
        self.doing: Doing | None = None
        self.span: Span | None = None
        self._plan = plan
        self._samples = samples
        self._best = best
        self._nodes = {n.name: n for n in plan.nodes if name in n.workers}
        self._inproc = inproc
        self._labels = _metric_labels(plan)
        self._modules = Modules()
        self._sessions: dict[str, NodeSession] = {}
        self._kernels: dict[str, Any] = {}
        self._followed: dict[str, int] = {}
        self._reports: list[Report] = []

    # --- life ---------------------------------------------------------------------------------------------------

    def open(self) -> Iterator[Event]:
        """Open every kernel, in running order; a source says how many rows it has.

        Raises what a kernel refuses its node with (DataError, KernelError, ...); anything else as KernelError.
        """
        assert self._plan.program is not None
        for node in self._nodes.values():
            names = {use.model: use.module for use in node.models}
            session = NodeSession(node.name, self._plan.seed, self._modules, names)
            kernel = _kernel_class(node)()
            self._sessions[node.name] = session
            self._kernels[node.name] = kernel
            with self._timed(node.name, "open"):
                kernel.open(kernel_node(node, self._plan.program, inproc=self._inproc), node.layout, session)
            if node.work == "source":
                yield SourceOpened(node=node.name, rows=kernel.rows)

    def close(self) -> None:
        """Close every kernel that was opened, the last first, whatever one of them raises."""
        kernels = list(self._kernels.values())
        self._kernels.clear()
        _close_all(kernels)

    def reports(self) -> list[Report]:
        """Metrics since the last call."""
        found, self._reports = self._reports, []
        for session in self._sessions.values():
            found += session.reports()
        return found

    # --- instructions -------------------------------------------------------------------------------------------

    def execute(self, instruction: Any) -> Iterator[Event]:
        """Carry out one instruction, yielding events as they come about."""
        match instruction:
            case RunChunk():
                yield from self._run_chunk(instruction)
            case TrainStep():
                self._train(instruction)
                yield Stepped(node=instruction.node, step=instruction.step)
            case Evaluate():
                self._evaluate(instruction)
                yield Evaluated(node=instruction.node, version=instruction.version)
            case Publish():
                yield self._publish(instruction)
            case Follow():
                yield self._follow(instruction)
            case Record():
                self._record(instruction)
                yield Recorded(step=instruction.step)

    def release(self, blocks: Iterable[int]) -> None:
        """Forget blocks."""
        for block in blocks:
            self.channel.release(block)

    def save(self, directory: Path, instruction: Checkpoint) -> None:
        """Write trained models, their followers, and the rows of finished untrained prompts into a folder."""
        if self._samples is not None:
            self._samples.flush()
        for node, folder in self._stored(directory).items():
            with self._timed(node, "save"):
                self._kernels[node].save(folder)
        if instruction.rows:
            (directory / "rows").mkdir()
        for name, (keys, gather) in instruction.rows.items():
            write_rows(directory / "rows" / f"{name}.arrow", Batch(keys, collect([gather], self.channel)[0]))

    def restore(self, directory: Path, step: int) -> None:
        """Read back what `save` wrote after this Step."""
        for node, folder in self._stored(directory).items():
            with self._timed(node, "restore"):
                self._kernels[node].restore(folder)
        for model in self._plan.models:
            for reader in model.readers if model.follows else ():
                self._kernels[reader].load((), step - step % model.every)

    def _stored(self, directory: Path) -> dict[str, Path]:
        """Node whose kernel has weights that change, and the folder for them; a follower's first reader has them."""
        trains = {n.name: directory / n.name for n in self._nodes.values() if n.work == "train"}
        followers = [m for m in self._plan.models if m.follows and m.readers]
        return trains | {m.readers[0]: directory / "followers" / m.name for m in followers}

    def keep(self, batch: Batch) -> Ref:
        """Put rows into the outbox, as if a kernel had made them."""
        lengths = (
            batch.ragged("completion_ids").lengths
            if "completion_ids" in batch.names
            else np.zeros(len(batch), np.int64)
        )
        return Ref(
            worker=self.name, block=self.channel.keep(batch), keys=batch.keys, lengths=lengths, version=_oldest(batch)
        )

    # --- each of them -------------------------------------------------------------------------------------------

    def _run_chunk(self, chunk: RunChunk) -> Iterator[Event]:
        inputs = assemble(chunk.keys, chunk.inputs, self.channel)
        rows = self._kernels[chunk.node].run(Chunk(id=chunk.id, step=chunk.step, keys=chunk.keys, inputs=inputs))
        what = f"chunk {chunk.id}, {len(chunk.keys)} rows"
        while True:
            with self._timed(chunk.node, what):
                batch = next(rows, None)
            if batch is None:
                break
            yield Produced(chunk=chunk.id, node=chunk.node, ref=self.keep(batch))
        for key, error in self._sessions[chunk.node].tombstones():
            yield Tombstoned(chunk=chunk.id, node=chunk.node, key=key, error=error)
        yield ChunkDone(chunk=chunk.id, node=chunk.node)

    def _train(self, message: TrainStep) -> None:
        inputs = assemble(message.keys, message.inputs, self.channel)
        assignment = Assignment(sequence=message.sequence, step=message.step, keys=message.keys, inputs=inputs)
        with self._timed(message.node, f"step {message.step}, {len(message.keys)} rows"):
            metrics: Mapping[str, float] = self._kernels[message.node].step(assignment)
        label = self._labels[message.node]
        self._reports += [(label.on(name), value, 1.0) for name, value in metrics.items()]

    def _evaluate(self, message: Evaluate) -> None:
        inputs = assemble(message.keys, message.inputs, self.channel)
        assignment = Assignment(sequence=0, step=message.version, keys=message.keys, inputs=inputs)
        with self._timed(message.node, f"version {message.version}, {len(message.keys)} rows"):
            metrics: Mapping[str, float] = self._kernels[message.node].step(assignment)
        self._reports += [(name, value, 1.0) for name, value in metrics.items()]
        if self._best is not None and metrics:
            evaluated = {use.model for use in self._nodes[message.node].models}
            writer = next((m.writer for m in self._plan.models if m.name in evaluated and m.writer), "")
            if writer:
                score = next(iter(metrics.values()))
                with self._timed(writer, f"save version {message.version} if among the best"):
                    self._best.offer(message.node, message.version, score, self._kernels[writer].save_weights)

    def _publish(self, message: Publish) -> Loaded:
        pieces = () if message.alias else self._kernels[message.writer].pieces()
        with self._timed(message.reader, f"load version {message.version}"):
            self._kernels[message.reader].load(pieces, message.version)
        return Loaded(node=message.reader, model=message.model, version=message.version)

    def _follow(self, message: Follow) -> Loaded:
        """Move a follower once for each module, however many nodes read it."""
        use = next(u for u in self._nodes[message.reader].models if u.model == message.model)
        moved = self._followed.get(use.module) == message.version
        pieces = () if moved else self._kernels[message.writer].pieces()
        with self._timed(message.reader, f"follow version {message.version}"):
            self._kernels[message.reader].load(pieces, message.version, rate=message.rate)
        self._followed[use.module] = message.version
        return Loaded(node=message.reader, model=message.model, version=message.version)

    def _record(self, message: Record) -> None:
        rows = assemble(message.keys, message.inputs, self.channel)["rows"]
        self._reports += row_metrics(rows)
        self._reports += [("data/rows", float(len(rows)), 1.0), ("completion/tokens", float(tokens(rows)), 1.0)]
        if self._samples is not None and self._samples.due(message.step) and len(rows):
            with self._timed("record", f"samples of step {message.step}"):
                self._samples.write(message.step, sample_table(message.step, rows))

    def _timed(self, node: str, what: str) -> _Timed:
        return _Timed(self, node, what)

    def note(self, node: str, what: str, start: float, end: float) -> None:
        """Something took this long."""
        self._reports.append((f"time/{node}", end - start, 1.0))
        if self.span is not None:
            self.span(node, what, start, end)


class _Timed:
    """What the Worker is doing, and how long it takes; whatever a kernel raises comes out naming its node."""

    def __init__(self, worker: Worker, node: str, what: str) -> None:
        self._worker, self._node, self._what = worker, node, what
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._worker.doing = Doing(node=self._node, what=self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._worker.doing = None
        self._worker.note(self._node, self._what, self._start, time.perf_counter())
        if isinstance(error, DataError) and self._what != "open" and self._node not in str(error):
            raise KernelError(f"{self._node}: {self._what}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, DataflowError):
            told = "".join(traceback.format_exception(error)).rstrip()
            raise KernelError(
                f"{self._node}: {self._what}: raised {type(error).__name__}: {error}. Fix: see the traceback.\n{told}"
            ) from error


def kernel_node(planned: PlannedNode, program: Graph, *, inproc: bool = False) -> KernelNode:
    """What a kernel is told of its node."""
    node = program.node(planned.name)
    models = {s.name: s for s in program.states if isinstance(s, Model)}
    schemas = {key: port.schema for key, port in node.inputs.items()}
    return KernelNode(
        name=planned.name,
        operator=planned.operator,
        scope=planned.scope,
        models={use.param: models[use.model] for use in planned.models},
        params=node.params,
        reads={i.name: tuple(c for f in i.fetches for c in f.columns) for i in planned.inputs},
        returns=planned.returns,
        function=node.operator.function,
        schemas=schemas,
        inproc=inproc,
    )


def _kernel_class(node: PlannedNode) -> type:
    module, _, name = node.kernel.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise PlanError(
            f"{node.name}: kernel {node.kernel} cannot be imported: {error}. Fix: install what it needs."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Label:
    """What the metrics of a further train node are labelled with; `every`: all of them, not the optimizer's alone."""

    model: str = ""
    every: bool = False

    def on(self, name: str) -> str:
        """`optim/lr` -> `optim/critic/lr`: the numbers of two optimizers are not averaged."""
        first, _, rest = name.partition("/")
        labelled = self.model and rest and (self.every or first in ("optim", "train"))
        return f"{first}/{self.model}/{rest}" if labelled else name


def _metric_labels(plan: Plan) -> dict[str, _Label]:
    """For each train node. The first has none; one whose Model has the head of an earlier one labels everything."""
    assert plan.program is not None
    found: dict[str, _Label] = {}
    heads: list[str] = []
    for planned in plan.nodes:
        if planned.work == "train":
            model = plan.program.node(planned.name).states["model"]
            assert isinstance(model, Model)
            found[planned.name] = _Label(model=model.name, every=model.head in heads) if heads else _Label()
            heads.append(model.head)
    return found


def _close_all(kernels: list[Any]) -> None:
    """Close the last; whatever it raises, close the others too."""
    if kernels:
        try:
            kernels.pop().close()
        finally:
            _close_all(kernels)


def _oldest(batch: Batch) -> np.ndarray:
    """int32 [rows]: the oldest version among each row's tokens; NO_VERSION without tokens or without the column."""
    oldest = np.full(len(batch), NO_VERSION, dtype=np.int32)
    if "version" in batch.names:
        tokens_ = batch.ragged("version")
        full = tokens_.lengths > 0
        if full.any():
            oldest[full] = np.minimum.reduceat(tokens_.values, tokens_.offsets[:-1][full])
    return oldest
