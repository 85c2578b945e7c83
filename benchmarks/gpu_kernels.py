"""A planned node's kernel, opened alone in this process, as a Worker opens it.

Owns: plan and open kernel, the clock of calls, the peak of the card's memory. Does not own: the
Models (gpu_models.py), which nodes and rows are measured (gpu_train.py, gpu_generate.py).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu_rates import await_card
from dataflow.graph import Graph
from dataflow.kernel import KernelNode, Layout
from engine.api import plan
from engine.plan.cost.memory import HOST_PARTS, peak
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import model_cost
from engine.plan.options import RunOptions
from engine.plan.plan import Plan, PlannedNode
from engine.predict.profile.kernel_timing import ProcessPeak
from engine.run.worker.kernel_loader import kernel_class, kernel_node
from engine.run.worker.kernel_session import NodeSession

_ELSEWHERE = (*HOST_PARTS, "device_columns", "copies")
"""Parts of an estimate that a kernel alone does not have on its device."""


def plan_graph(graph: Graph, options: RunOptions) -> Plan:
    """Plan a graph that is no Program."""
    planned = plan(graph, options)
    assert isinstance(planned, Plan)
    return planned


def model_sizes(base: str, dtype: str) -> Sizes:
    """What the formulas need of a Model."""
    cost = model_cost(base)
    assert cost.shape is not None
    assert cost.parameters is not None
    return Sizes(parameters=cost.parameters, shape=cost.shape, dtype=dtype)


def estimated_peak(node: PlannedNode) -> int:
    """Bytes that the plan expects a node alone in its Worker to have on its device at most."""
    return peak([node.estimate.bytes], without=_ELSEWHERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneKernel:
    """A kernel and its node. seconds: how long it took to open."""

    kernel: Any
    node: KernelNode
    seconds: float


def open_alone(planned: Plan, name: str, layout: Layout, modules: dict[str, Any]) -> AloneKernel:
    """Open the kernel of a node in one process. layout: in the place of the plan's; modules: those
    of kernels that were opened before, by name, which it shares.
    """
    assert planned.program is not None
    planned_node = planned.node(name)
    node = kernel_node(planned_node, planned.program)
    return open_node(planned_node, node, layout, modules)


def open_node(
    planned_node: PlannedNode, node: KernelNode, layout: Layout, modules: dict[str, Any]
) -> AloneKernel:
    """The same with another description of the node."""
    names = {use.model: use.module for use in planned_node.models}
    session = NodeSession(node.name, 0, modules, names)
    kernel = kernel_class(planned_node)()
    begun = time.perf_counter()
    kernel.open(node, replace(layout, replicas=1, data=1, tensor=1, context=1), session)
    await_card()
    return AloneKernel(kernel=kernel, node=node, seconds=time.perf_counter() - begun)


def time_each(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of so many calls, to the moment when the card has done it."""
    durations: list[float] = []
    for _ in range(repeats):
        await_card()
        begun = time.perf_counter()
        call()
        await_card()
        durations.append(time.perf_counter() - begun)
    return durations


class CardPeak:
    """The most bytes on the card since `begin`, or without one those of this process, above what
    was there when this was made.
    """

    def __init__(self) -> None:
        self._process: ProcessPeak | None = None
        self._before = 0
        # What a kernel before this one has left.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated()
        else:
            self._process = ProcessPeak()
            self._process.begin()

    def begin(self) -> None:
        """Forget the peak so far."""
        if self._process is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._process.again()

    def read(self) -> int:
        """The peak."""
        if self._process is None:
            return torch.cuda.max_memory_allocated() - self._before
        return self._process.most
