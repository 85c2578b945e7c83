"""The cores of simulated hosts: who keeps them busy, and how long functions take meanwhile.

Owns: which kernels and functions compute now, and the time of a function while others come and go.
Does not own: how long it takes with a core of its own (kernel_times.py), what it makes (chunks.py).

A function that finds all cores of its host busy shares one, and what it computes takes SHARES times
as long until a core is free. What it waits for, a judge over HTTP, takes as long as ever. Kernels
are not slowed: those of a host that compute at the same time are priced as such
(engine/predict/simulation/priced_times.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.plan.plan import Plan, PlannedNode
from engine.run.simulated_workers.clock import VirtualClock
from engine.run.simulated_workers.kernel_times import KernelTimes

SHARES = 2.0
"""How much longer computing takes with half of a core."""


class Process(Protocol):
    """A simulated process, as far as what it computes is concerned."""

    name: str

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action of this process, if it is still there by then."""
        ...


@dataclass(slots=True, eq=False)
class _Function:
    """A chunk of a function under way. left: seconds to go, had it a core of its own. since: when
    that was so. stretch: how much longer they take now. plans: how often its end was foreseen; what
    was foreseen before counts for nothing.
    """

    worker: Process
    cpu: float
    left: float
    then: Callable[[], None]
    since: float
    stretch: float = 0.0
    plans: int = 0


class SimulatedCores:
    """Of all hosts of a plan."""

    def __init__(self, plan: Plan, clock: VirtualClock, times: KernelTimes) -> None:
        self._plan, self._clock, self._times = plan, clock, times
        self._kernels: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Host -> Worker/node -> threads of each kernel that runs now."""
        self._functions: defaultdict[str, dict[str, _Function]] = defaultdict(dict)
        """Host -> Worker -> the function that it runs now."""

    def begin(self, worker: str, node: PlannedNode) -> None:
        """A Worker begins to run a kernel."""
        if threads := self._times.threads(node):
            host = self._plan.host_of(worker)
            self._kernels[host][f"{worker}/{node.name}"] = threads
            self._settle(host)

    def end(self, worker: str, node: PlannedNode) -> None:
        """It has ended."""
        host = self._plan.host_of(worker)
        if self._kernels[host].pop(f"{worker}/{node.name}", None) is not None:
            self._settle(host)

    def lose(self, worker: str) -> None:
        """A Worker is gone, with all that it ran."""
        for node in self._plan.nodes_on(worker):
            self.end(worker, node)
        self._end_function_of(worker)

    def _end_function_of(self, worker: str) -> None:
        host = self._plan.host_of(worker)
        if self._functions[host].pop(worker, None) is not None:
            self._settle(host)

    def run(
        self, worker: Process, node: PlannedNode, seconds: float, then: Callable[[], None]
    ) -> None:
        """Run a function, which takes so long with a core of its own, and call `then`."""
        cpu = self._times.computing(node)
        if not cpu:
            worker.after(seconds, then)
            return
        host = self._plan.host_of(worker.name)
        self._functions[host][worker.name] = _Function(worker, cpu, seconds, then, self._clock.now)
        self._settle(host)

    def _settle(self, host: str) -> None:
        """Foresee anew the ends of the functions that go faster or slower from now on."""
        functions = self._functions[host]
        if not functions:
            return
        busy = sum(self._kernels[host].values()) + sum(each.cpu for each in functions.values())
        for name, each in functions.items():
            others = busy - each.cpu
            lacking = min(1.0, max(0.0, others - (self._times.cores(name) - 1)))
            stretch = 1.0 + each.cpu * (SHARES - 1.0) * lacking
            if stretch != each.stretch:
                self._foresee(each, stretch)

    def _foresee(self, function: _Function, stretch: float) -> None:
        now = self._clock.now
        if function.stretch:
            function.left -= (now - function.since) / function.stretch
        function.since, function.stretch = now, stretch
        function.plans += 1
        end = partial(self._end_function, function, function.plans)
        function.worker.after(max(0.0, function.left) * stretch, end)

    def _end_function(self, function: _Function, plan: int) -> None:
        if function.plans != plan:
            return
        self._end_function_of(function.worker.name)
        function.then()
