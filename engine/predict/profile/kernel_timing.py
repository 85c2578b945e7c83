"""Seconds and peak bytes of one node's real kernel, cell by cell, in this process.

Owns: opening the kernel as a Worker does, the calls, their clocks, the peak. Does not own: rows
(generated_rows.py), the process (child.py), the kernel.

The cells come in ascending order of what they should need. The first round tells the peaks, since
memory that a smaller cell needed stays with the process; the rounds after it tell the seconds,
every cell once a round, so that whatever slows the machine for a while slows all cells. The mean
counts, not the median: a Step's seconds are a sum, which slow moments of a shared machine lengthen
as often as they come.

Calls that waited for cores which others had are made again, until there are enough that did not or
until _FURTHER rounds are over. Those that waited least count: they are chosen by what others did,
not by how long they took, so that the mean stays one of all that a quiet machine does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Assignment, Chunk, KernelNode
from dataflow.kernel_abilities import Sleeper
from dataflow.memory_limits import is_out_of_memory
from engine.plan.cost.machine import proc_bytes
from engine.plan.cost.machine_load import QUIET
from engine.plan.cost.profile import ProfileCell
from engine.plan.plan import Plan
from engine.predict.profile.generated_rows import draw_inputs, draw_prompts
from engine.predict.profile.other_load import CoreWaits, read_core_waits
from engine.predict.profile.predictions import MeasuredCell, ProfiledWork
from engine.run.worker.counters import cuda_in_use, wait_for_device
from engine.run.worker.kernel_loader import kernel_class, kernel_node
from engine.run.worker.kernel_session import NodeSession

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Written to clear_refs, this sets the greatest resident memory to what it is now (proc(5))."""
_FURTHER = 2
"""Rounds for each round that was asked for, at most, in which disturbed calls are made again."""
_ROUNDS_TO_SETTLE = 2
"""Rounds on a GPU before those that are timed."""


_Lengths = tuple[Sequence[int], ...]
"""Tokens of each row's prompt, and of its answer."""
_Call = Callable[[], _Lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """One call. seconds: by the wall clock; cpu: of this process; waits: for cores, meanwhile."""

    seconds: float
    cpu: float
    waits: CoreWaits

    @property
    def quiet(self) -> bool:
        """Whether others did not disturb it."""
        return self.waits.share <= QUIET


@dataclass(slots=True, kw_only=True)
class CellRun:
    """A cell under way. call: does the work once."""

    cell: ProfileCell
    call: _Call
    lengths: _Lengths = ((), ())
    calls: list[TimedCall] = field(default_factory=list)
    peak: int = 0
    failed: bool = False

    def call_once(self) -> bool:
        """Call once, and time it; whether there was enough memory."""
        cuda = cuda_in_use()
        try:
            # The clocks last: to read waits takes time, which is not the call's.
            waits_before = read_core_waits()
            cpu_before, begun = time.process_time(), time.perf_counter()
            self.lengths = self.call()
            # As a run waits before it takes a node's time (engine/run/worker/timing.py).
            wait_for_device()
            seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu_before
            waits = read_core_waits().since(waits_before)
            self.calls.append(TimedCall(seconds=seconds, cpu=cpu, waits=waits))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.failed = True
            gc.collect()
            if cuda is not None:
                cuda.empty_cache()
        return not self.failed

    def needs_more(self, repeats: int) -> bool:
        """Whether fewer calls than that were quiet."""
        return not self.failed and sum(call.quiet for call in self.calls) < repeats

    def summarise(self, cores: int, repeats: int) -> MeasuredCell:
        """Say what came of it, by so many threads: the mean of so many calls, those that waited
        least. CPU seconds count where these waited too long and there is one thread: of several it
        is not known how many were at work at the same time.
        """
        if self.failed:
            return MeasuredCell(cell=replace(self.cell, cores=cores))
        calls = sorted(self.calls, key=lambda call: call.waits.share)[:repeats]
        others = sum((call.waits for call in calls), CoreWaits()).share
        by_cpu = others > QUIET and cores == 1 and not cuda_in_use()
        cpu = fmean(call.cpu for call in calls)
        seconds = fmean(call.seconds for call in calls)
        prompts, answers = self.lengths
        cell = replace(
            self.cell,
            cores=cores,
            seconds=cpu if by_cpu else seconds,
            cpu=cpu,
            by_cpu=by_cpu,
            others=others,
            peak=self.peak,
        )
        return MeasuredCell(cell=cell, prompts=tuple(prompts), answers=tuple(answers))


def measure(
    plan: Plan, work: ProfiledWork, *, repeats: int, further: int = _FURTHER
) -> Iterator[MeasuredCell]:
    """Measure each cell. further: rounds for each of the repeats, at most, in which disturbed calls
    are made again. Raises KernelError, DataError where the kernel refuses rows that were drawn.
    """
    memory = ProcessPeak()
    kernels = _CellKernels(plan, work)
    # Before any kernel is open: the weights count as well.
    memory.begin()
    runs = [kernels.make_run(cell) for cell in work.cells]
    for run in runs:
        memory.again()
        # Twice: the allocator scatters what is left over.
        if run.call_once() and run.call_once():
            run.peak = memory.most
        run.calls.clear()
        kernels.rest()
    if work.on_gpu:
        # Keys that kernels share grow in the first round, and graphs are captured in the second.
        call_until_quiet(runs, _ROUNDS_TO_SETTLE, 0)
        for run in runs:
            run.calls.clear()
    call_until_quiet(runs, repeats, further * repeats)
    kernels.close()
    for run in runs:
        yield replace(run.summarise(work.cores, repeats), opening=kernels.seconds)


def call_until_quiet(runs: Sequence[CellRun], repeats: int, further: int) -> None:
    """Call every cell in so many rounds, then at most so many further rounds the disturbed cells
    alone.
    """
    for _ in range(repeats):
        for run in runs:
            if not run.failed:
                run.call_once()
    for _ in range(further):
        disturbed = [run for run in runs if run.needs_more(repeats)]
        if not disturbed:
            return
        for run in disturbed:
            run.call_once()


class _CellKernels:
    """Kernels of a node's class, and a session whose modules they all share."""

    def __init__(self, plan: Plan, work: ProfiledWork) -> None:
        assert plan.program is not None
        self._plan, self._planned = plan, plan.node(work.node)
        starts = plan.phase.starts if plan.phase else None
        self._class = _timed_class(kernel_class(self._planned))
        self._node = kernel_node(self._planned, plan.program, starts=starts)
        # Of one process, whatever the plan has.
        self._layout = replace(
            self._planned.layout,
            threads=work.cores,
            replicas=1,
            data=1,
            tensor=1,
            context=1,
            shard=False,
            # What either of these adds, the formulas know.
            recompute="none",
            offload="none",
        )
        self._kind = work.kind
        self._modules: dict[str, Any] = {}
        self._kernels: list[Any] = []
        self.seconds = 0.0
        """How long the first kernel took to open, which reads the weights for all."""

    def make_run(self, cell: ProfileCell) -> CellRun:
        """Give an open kernel and rows for it. One of generation has the cell's lengths as
        parameters; all others share one.
        """
        if self._kind == "decode":
            kernel = self._open(_set_lengths(self._node, cell))
            return CellRun(cell=cell, call=_make_generation(kernel, cell))
        kernel = self._kernels[0] if self._kernels else self._open(self._node)
        if self._kind == "train":
            return CellRun(cell=cell, call=_make_training(kernel, cell, self._node))
        return CellRun(cell=cell, call=_make_forward(kernel, cell, self._node))

    def _open(self, node: KernelNode) -> Any:
        names = {use.model: use.module for use in self._planned.models}
        kernel = self._class()
        self._kernels.append(kernel)
        session = _MeasuredSession(node.name, self._plan.seed, self._modules, names)
        begun = time.perf_counter()
        kernel.open(node, self._layout, session)
        wait_for_device()
        if len(self._kernels) == 1:
            self.seconds = time.perf_counter() - begun
        return kernel

    def rest(self) -> None:
        """Let the newest kernel give its GPU back and come again: what it keeps there from call to
        call is no part of the next cell's peak.
        """
        kernel = self._kernels[-1]
        if isinstance(kernel, Sleeper) and cuda_in_use():
            kernel.sleep()
            kernel.wake()

    def close(self) -> None:
        """Close all kernels."""
        while self._kernels:
            self._kernels.pop().close()


def _timed_class(kernel: type) -> type:
    """The kernel itself, or the one that writes as it does: environments are not asked, as how long
    they take is no matter of the machine.
    """
    return getattr(kernel, "writes_as", kernel)


class _MeasuredSession(NodeSession):
    """A session in which no row may fail, since its time would not be measured."""

    def tombstone(
        self,
        key: tuple[int, int, int],
        error: str,
        *,
        failed: bool = True,
        row_only: bool = False,
    ) -> None:
        """Raises DataError."""
        raise DataError(f"row {key}: {error}")


def _set_lengths(node: KernelNode, cell: ProfileCell) -> KernelNode:
    """The node with the cell's lengths, returning every column."""
    lengths = {"n": cell.samples, "max_tokens": cell.answer, "max_prompt_tokens": cell.prompt}
    return replace(node, params={**node.params, **lengths}, returns=())


def _make_generation(kernel: Any, cell: ProfileCell) -> _Call:
    prompts = draw_prompts(cell, kernel.vocabulary)
    chunk = Chunk(id=0, step=1, keys=prompts.keys, inputs={"prompt": prompts})

    def call() -> _Lengths:
        batches = list(kernel.run(chunk))
        return _token_counts(Batch.concat(batches).sort())

    return call


def _make_forward(kernel: Any, cell: ProfileCell, node: KernelNode) -> _Call:
    inputs = draw_inputs(cell, node, kernel.vocabulary)
    rows = inputs["rows"]
    chunk = Chunk(id=0, step=1, keys=rows.keys, inputs=inputs)

    def call() -> _Lengths:
        list(kernel.run(chunk))
        return _token_counts(rows)

    return call


def _find_trained_step(node: KernelNode) -> int:
    """The first Step in which the node makes updates."""
    every = int(node.params.get("every", 1))
    start = max(1, int(node.params.get("start", 0)))
    return -(-start // every) * every


def _make_training(kernel: Any, cell: ProfileCell, node: KernelNode) -> _Call:
    """Train the node's own rows; not those that terms of its loss have besides."""
    inputs = draw_inputs(cell, node, kernel.vocabulary)
    rows = inputs["rows"]
    step = _find_trained_step(node)
    assignment = Assignment(sequence=1, step=step, keys=rows.keys, inputs=inputs)

    def call() -> _Lengths:
        kernel.step(assignment)
        return _token_counts(rows)

    return call


def _token_counts(rows: Batch) -> _Lengths:
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    return prompts.lengths.tolist(), answers.lengths.tolist()


class ProcessPeak:
    """The most memory of this process above what it had at the beginning: on the host the greatest
    resident memory, on a GPU what torch's allocator gave out.
    """

    def __init__(self) -> None:
        self._base = 0

    def begin(self) -> None:
        """Count from here."""
        gc.collect()
        self._base = proc_bytes(_STATUS, "VmRSS")

    def again(self) -> None:
        """Forget the peak so far, not where it is counted from."""
        _CLEAR.write_text(_RESET_PEAK)
        cuda = cuda_in_use()
        if cuda is not None:
            cuda.reset_peak_memory_stats()

    @property
    def most(self) -> int:
        """Bytes, since `again`."""
        cuda = cuda_in_use()
        if cuda is not None:
            return cuda.max_memory_allocated()
        return proc_bytes(_STATUS, "VmHWM") - self._base
