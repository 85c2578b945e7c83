"""The runs below a root, as the page asks for them: one method for each question.

Owns: which indices of which runs are kept in memory, and what each answer is made of. Does not own:
HTTP (app.py), the parts of an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dataflow.draw import draw
from dataflow.errors import DataflowError
from dataflow.safe_text import one_line
from engine.keep.flow.records import Flow
from engine.keep.flow.stretch import last_seconds, seconds_named, steps_named
from engine.keep.reader.flow_index import EVENTS, EVER, FlowIndex, LiveTail, read_live_flows
from engine.keep.reader.metric_index import MetricIndex
from engine.keep.reader.open_folder import FileMark, NotServed, OpenFolder, RunRoot, inside
from engine.keep.reader.plan_records import (
    GRAPH,
    PLAN,
    KeptRecords,
    PlanFile,
    PlanNode,
    read_records,
)
from engine.keep.reader.run_summary import last_row
from engine.keep.reader.sample_index import SampleIndex, SampleQuery
from engine.watch.critical_path import critical_path
from engine.watch.edge_rows import edge_rows
from engine.watch.lanes import Lanes
from engine.watch.logs import errors_of, log_lines, logged_workers
from engine.watch.run_comparison import compare_runs
from engine.watch.run_description import (
    describe_in_list,
    describe_node,
    describe_run,
    page_state,
    planned_bytes,
)
from engine.watch.sample_answers import SampleAnswers, SampleKey
from engine.watch.series import thinned_series
from engine.watch.token_texts import Vocabulary, find_vocabulary
from engine.watch.waits import sentences

KEPT = 3
"""Runs whose indices stay in memory."""


@dataclass(slots=True)
class KeptRun:
    """What is kept of a run between requests; its folder is opened anew for each."""

    inode: int
    metrics: MetricIndex = field(default_factory=MetricIndex)
    flows: FlowIndex = field(default_factory=FlowIndex)
    lanes: Lanes = field(default_factory=Lanes)
    samples: SampleIndex = field(default_factory=SampleIndex)
    records: tuple[tuple[FileMark | None, ...], KeptRecords] | None = None
    vocabularies: dict[str, Vocabulary | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, folder: OpenFolder) -> KeptRecords:
        """The run's plan and graph; read anew where their files have changed."""
        marks = tuple(folder.mark(name) for name in (PLAN, GRAPH))
        with self.lock:
            if self.records is None or self.records[0] != marks:
                self.records = (marks, read_records(folder))
            return self.records[1]

    def vocabulary(self, folder: OpenFolder, node: str) -> Vocabulary | None:
        """Find the vocabulary of a train node's tokenizer; looks again until there is one."""
        with self.lock:
            if self.vocabularies.get(node) is None:
                self.vocabularies = {node: find_vocabulary(folder, node)}
            return self.vocabularies[node]

    def answers(self, folder: OpenFolder) -> SampleAnswers:
        """Answers about its samples while the folder is open."""
        return SampleAnswers(
            folder=folder,
            index=self.samples,
            vocabulary=lambda node: self.vocabulary(folder, node),
        )


class ServedRuns:
    """Answers about the runs of a root. Its methods may be called by several threads."""

    def __init__(self, root: Path) -> None:
        self.root = RunRoot(root)
        self._kept: OrderedDict[str, KeptRun] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def open_run(self, name: str) -> Iterator[tuple[OpenFolder, KeptRun]]:
        """Open a run's folder; yields it and what is kept of it. Raises NotServed without one."""
        with self.root.open(name) as folder:
            yield folder, self._state(name, folder.inode)

    def runs(self) -> list[dict[str, Any]]:
        """A line for each run, the one that began last first."""
        lines = []
        for name in self.root.runs():
            try:
                with self.root.open(name) as folder:
                    lines.append(describe_in_list(name, folder))
            except NotServed as error:
                lines.append({"name": name, "state": "ended", "reason": str(error)})
        return sorted(lines, key=lambda run: -(run.get("began") or 0.0))

    def run(self, name: str, phase: int | None) -> dict[str, Any]:
        """All that does not move in a run."""
        with self.open_run(name) as (folder, run):
            records = run.read(folder)
            at = self._phase(folder, records, phase)
            return describe_run(name, folder, run.metrics, records, at)

    def drawing(
        self,
        name: str,
        phase: int | None = None,
        *,
        by_worker: bool = False,
        fold: bool | None = None,
        life: bool = True,
    ) -> str:
        """The drawing of a run's graph, as SVG. by_worker: with boxes of Workers around its nodes;
        life: with room for figures.
        """
        with self.open_run(name) as (folder, run):
            records = run.read(folder)
            at = self._phase(folder, records, phase)
            graph = records.graph_of(at)
            if graph is None:
                raise NotServed("; ".join(records.problems) or "no graph")
            placed = None
            if by_worker and records.plans:
                placed = records.plans[at].placed_nodes
            return draw(graph, "svg", life=life, placed=placed, fold=fold)

    def series(
        self, name: str, names: Sequence[str], first: int | None, last: int | None, points: int
    ) -> dict[str, Any]:
        """Curves of metrics."""
        with self.open_run(name) as (folder, run):
            return thinned_series(run.metrics, folder, names, first=first, last=last, points=points)

    def flow(self, name: str, first: int | None, last: int | None) -> dict[str, Any]:
        """What flowed in the Steps first..last; by default, in its last seconds while it goes on,
        else in all Steps. words: which these are.
        """
        with self.open_run(name) as (folder, run):
            if first is None and last is None and page_state(folder)[0] == "running":
                seconds = last_seconds(read_live_flows(folder))
                if seconds is not None:
                    return self.describe_flow(
                        folder, run, seconds, seconds_named(seconds), live=True
                    )
            begin = 0 if first is None else first
            end = EVER if last is None else last
            flow = run.flows.total(folder, begin, end)
            return self.describe_flow(folder, run, flow, _steps_named(first, last, flow))

    def lanes(self, name: str, first: int, last: int | None, points: int) -> dict[str, Any]:
        """A lane for each Worker."""
        with self.open_run(name) as (folder, run):
            end = EVER if last is None else last
            return run.lanes.read(run.flows, folder, first, end, points)

    def samples(self, name: str, query: SampleQuery) -> dict[str, Any]:
        """A page of samples; read and files tell how far the index is, problems which files are
        damaged and left out.
        """
        with self._samples(name) as answers:
            return answers.page(query)

    def sample(self, name: str, step: int, node: str, position: int, sample: int) -> dict[str, Any]:
        """One sample in full; of an episode its first messages."""
        with self._samples(name) as answers:
            return answers.whole((step, node, position, sample))

    def conversation(self, name: str, key: SampleKey, first: int) -> dict[str, Any]:
        """A page of an episode's messages, from this one on."""
        with self._samples(name) as answers:
            return answers.conversation(key, first)

    def tokens(self, name: str, key: SampleKey, first: int, last: int) -> dict[str, Any]:
        """The tokens first..last of a sample, as many as are sent together."""
        with self._samples(name) as answers:
            return answers.tokens(key, first, last)

    def group(self, name: str, step: int, node: str, position: int) -> dict[str, Any]:
        """The samples of one prompt in a Step."""
        with self._samples(name) as answers:
            return answers.group(step, node, position)

    def same(self, name: str, step: int, node: str, position: int) -> dict[str, Any]:
        """The samples of the same prompt text over all Steps, the newest first."""
        with self._samples(name) as answers:
            return answers.same(step, node, position)

    @contextmanager
    def _samples(self, name: str) -> Iterator[SampleAnswers]:
        with self.open_run(name) as (folder, run):
            yield run.answers(folder)

    def edge(self, name: str, edge_name: str) -> dict[str, Any]:
        """An edge, with rows that it carried."""
        with self.open_run(name) as (folder, run):
            flow = run.flows.newest(folder)
            moved = flow.edges.get(edge_name) if flow is not None else None
            per_row = None
            if moved is not None and moved.rows:
                per_row = moved.bytes / moved.rows
            plan = self._plan(folder, run)
            answer = run.answers(folder).past_damage(
                lambda: edge_rows(folder, plan, run.samples, edge_name)
            )
            if per_row is not None:
                answer["bytes_per_row"] = per_row
            return answer

    def node(self, name: str, node: str) -> dict[str, Any]:
        """A node, with what was measured of it, its errors, and the ends of its Workers' logs."""
        with self.open_run(name) as (folder, run):
            records = run.read(folder)
            at = self._phase(folder, records, None)
            plan = self._plan(folder, run)
            planned = plan.node(node)
            if planned is None:
                raise NotServed(f"no node {one_line(node)[:80]!r}")
            flow = run.flows.newest(folder)
            mishaps = run.flows.mishaps(folder)
            return describe_node(planned, records.graph_of(at)) | {
                "measured": measured_figures(flow, planned, last_row(folder)),
                "figures": _figures(flow, node),
                "errors": errors_of(mishaps, node, planned.workers),
                "log": _logs(folder, planned.workers),
            }

    def log(self, name: str, worker: str | None, lines: int) -> dict[str, Any]:
        """The end of a Worker's log; of the first one by default."""
        with self.open_run(name) as (folder, _):
            workers = logged_workers(folder)
            if worker is not None:
                chosen = worker
            else:
                chosen = next(iter(workers), "main")
            return {"worker": chosen, "lines": log_lines(folder, chosen, lines), "workers": workers}

    def compare(self, names: Sequence[str]) -> dict[str, Any]:
        """Several runs side by side."""
        with ExitStack() as stack:
            unique_names = list(dict.fromkeys(names))
            opened = [stack.enter_context(self.open_run(name)) for name in unique_names]
            folders = [folder for folder, _ in opened]
            records = [run.read(folder) for folder, run in opened]
            return compare_runs(unique_names, folders, records)

    def prometheus(self) -> bytes:
        """The figures of each run that is running, as Prometheus reads them."""
        from engine.watch.prometheus import exposition  # here: a package that only this needs

        running: dict[str, Path] = {}
        for name in self.root.runs():
            with suppress(NotServed), self.root.open(name) as folder:
                if page_state(folder)[0] == "running" and _is_own(folder):
                    running[name] = self.root.path / name
        return exposition(running)

    def watcher(self, name: str) -> RunWatcher:
        """What a stream looks at. Raises NotServed where there is no such run."""
        with self.open_run(name):
            return RunWatcher(self, name)

    def describe_flow(
        self,
        folder: OpenFolder,
        run: KeptRun,
        flow: Flow | None,
        words: str,
        *,
        live: bool = False,
    ) -> dict[str, Any]:
        """A Flow with its sentences and the path that bounds it, by the plan of its own phase.
        words: which stretch of time it is. live: it ends now.
        """
        records = run.read(folder)
        at = self._phase(folder, records, flow.phase if flow is not None else None)
        plan = records.plan_of(at)
        about = {"words": words, "plan": planned_bytes(plan)}
        if flow is None:
            return about | {"flow": None, "sentences": [], "critical": []}
        train = [node.name for node in plan.nodes if node.work == "train"]
        return about | {
            "flow": msgspec.to_builtins(flow),
            "sentences": sentences(flow, records.raw[at], live=live) if records.raw else [],
            "critical": critical_path(flow, train),
        }

    def _plan(self, folder: OpenFolder, run: KeptRun) -> PlanFile:
        records = run.read(folder)
        at = self._phase(folder, records, None)
        return records.plan_of(at)

    def _phase(self, folder: OpenFolder, records: KeptRecords, wanted_phase: int | None) -> int:
        """The index of the phase that is asked for, or of the one that the run is in."""
        if wanted_phase is not None:
            number = wanted_phase
        else:
            number = last_row(folder).get("phase", 1)
        return records.phase(number if isinstance(number, int) else 1)

    def _state(self, name: str, inode: int) -> KeptRun:
        with self._lock:
            run = self._kept.get(name)
            if run is None or run.inode != inode:
                run = self._kept[name] = KeptRun(inode=inode)
            self._kept.move_to_end(name)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return run


class RunWatcher:
    """What is new in a run: its state, its last Step, its last seconds."""

    def __init__(self, served: ServedRuns, name: str) -> None:
        self._served, self._name = served, name
        self._tail = LiveTail()
        self._marks: dict[str, FileMark | None] = {}
        self._flow: dict[str, Any] | None = None

    def look(self) -> dict[str, Any]:
        """The newest event of each kind; of one that has none, nothing."""
        try:
            with self._served.open_run(self._name) as (folder, run):
                return self._look_inside(folder, run)
        except (DataflowError, OSError) as error:
            return {"state": {"state": "ended", "reason": str(error), "step": 0}}

    def _look_inside(self, folder: OpenFolder, run: KeptRun) -> dict[str, Any]:
        row = last_row(folder)
        step = row.pop("step", 0)
        state, reason = page_state(folder)
        events: dict[str, Any] = {"state": {"state": state, "reason": reason, "step": step}}
        if row:
            events["step"] = {"step": step, "metrics": row}
        seconds = self._tail.advance(folder)
        if seconds is not None:
            words = seconds_named(seconds)
            self._flow = self._served.describe_flow(folder, run, seconds, words, live=True)
            self._flow["flow"] = round_numbers(self._flow["flow"])
        if self._flow is not None:
            events["flow"] = self._flow
        return events


def _steps_named(first: int | None, last: int | None, flow: Flow | None) -> str:
    """The words for the Steps first..last of a run; for all of them without these."""
    if flow is None:
        return ""
    if flow.phase:
        phase = f" of phase {flow.phase}"
    else:
        phase = ""
    begin = first or 1
    end = flow.step if last is None else last
    if begin == end:
        return steps_named(begin, end)
    if first is None and last is None:
        if phase:
            return f"all Steps{phase}"
        return f"all {end} Steps"
    return steps_named(begin, end) + phase


def round_numbers(figure: Any) -> Any:
    """Round to as many digits as a screen shows: a stream has few bytes."""
    if isinstance(figure, dict):
        figures: dict[str, Any] = {}
        for name, number in figure.items():
            is_time = name in ("wall", "start", "end")
            figures[name] = number if is_time else round_numbers(number)
        return figures
    if isinstance(figure, float):
        return round(figure, 4)
    return figure


def _is_own(folder: OpenFolder) -> bool:
    """Whether all that figures are made of are plain files. Raises NotServed if not."""
    for name in (PLAN, "metrics.jsonl"):
        file = folder.open(name)
        if file is not None:
            file.close()
    with inside(folder, EVENTS):
        return True


def measured_figures(flow: Flow | None, node: PlanNode, row: Mapping[str, Any]) -> dict[str, Any]:
    """A node's seconds in a Step, and the greatest memory of one of its Workers."""
    peaks: list[int] = []
    workers = flow.workers if flow is not None else {}
    for name in node.workers:
        worker = workers.get(name)
        if worker is not None:
            peaks.append(worker.device_peak or worker.peak)
    seconds = row.get(f"time/{node.name}")
    return {"seconds": seconds, "bytes": max(peaks, default=None)}


def _figures(flow: Flow | None, node: str) -> dict[str, Any]:
    """By replica."""
    figures: dict[str, Any] = {}
    if flow is not None:
        for key, replica in flow.nodes.items():
            if key.partition("@")[0] == node:
                figures[key] = msgspec.to_builtins(replica)
    return figures


def _logs(folder: OpenFolder, workers: Sequence[str]) -> list[str]:
    logged = logged_workers(folder)
    named = [worker for worker in workers if worker.replace("/", "_") in logged]
    lines = max(20, 200 // max(1, len(named)))
    last_lines: list[str] = []
    for worker in named:
        last_lines += log_lines(folder, worker, lines)
    return last_lines
