"""The cores of simulated hosts: who keeps them busy, and how long functions and kernels take
meanwhile.

Owns: which kernels and functions compute now, the time of a function while others come and go, and
what kernels lose to functions and to the coordinator. Does not own: how long they take with cores
of their own (kernel_times.py), what they make (chunks.py).

A function that finds all cores of its host busy shares one, and what it computes takes SHARES times
as long until a core is free. What it waits for, a judge over HTTP, takes as long as ever. What it
computes meanwhile, and what the coordinator does, the kernels of that host do not: each loses an
equal share of it for each of its threads. What kernels that compute at the same time are to each
other is in their times (engine/simulation/priced_times.py).
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
_LEAST = 1e-9
"""Seconds that a kernel has lost, from which its end is put off."""


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
    lacking: float = 0.0
    """The share of a core that is not free for it, 0 to 1."""

    @property
    def taken_cores(self) -> float:
        """Seconds of cores a second that it has now and kernels have not."""
        if not self.stretch:
            return 0.0
        speed = self.cpu / self.stretch
        return self.lacking * speed


@dataclass(slots=True)
class _Lost:
    """What each kernel of a host has lost since the run began. rate: seconds a second since then,
    the time `since`.
    """

    seconds: float = 0.0
    rate: float = 0.0
    since: float = 0.0

    def advance(self, now: float) -> None:
        """Count up to now."""
        self.seconds += (now - self.since) * self.rate
        self.since = now


class SimulatedCores:
    """Of all hosts of a plan."""

    def __init__(self, plan: Plan, clock: VirtualClock, times: KernelTimes) -> None:
        self._plan, self._clock, self._times = plan, clock, times
        self._kernels: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Host -> Worker/node -> threads of each kernel that runs now."""
        self._functions: defaultdict[str, dict[str, _Function]] = defaultdict(dict)
        """Host -> Worker -> the function that it runs now."""
        self._lost: defaultdict[str, _Lost] = defaultdict(_Lost)
        """By host."""

    def compute(self, worker: Process, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` once a kernel of a Worker, which computes now, has had cores for so long."""
        before = self.find_lost(worker.name)

        def come() -> None:
            lost = self.find_lost(worker.name) - before
            if lost > _LEAST:
                self.compute(worker, lost, then)
            else:
                then()

        worker.after(seconds, come)

    def find_lost(self, worker: str) -> float:
        """Seconds that a kernel of a Worker would have lost so far had it computed all the time."""
        host = self._plan.host_of(worker)
        lost = self._lost[host]
        lost.advance(self._clock.now)
        return lost.seconds

    def count_computed(self, worker: str, begun: float, lost: float) -> float:
        """Seconds that a kernel of a Worker has had cores for since it began, when so much had been
        lost; what ends now has ended.
        """
        seconds = self._clock.now - begun
        since = self.find_lost(worker) - lost
        if since <= 0.0:
            return seconds
        computed = seconds - since
        return computed + 2.0 * _LEAST

    def take(self, worker: str, seconds: float) -> None:
        """Something beside nodes computes for so long on a Worker's host: the coordinator."""
        host = self._plan.host_of(worker)
        threads = sum(self._kernels[host].values())
        if not threads:
            return
        lost = self._lost[host]
        lost.advance(self._clock.now)
        lacking = self._lack(host, worker, 0.0)
        lost.seconds += lacking * seconds / threads

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
        lost = self._lost[host]
        lost.advance(self._clock.now)
        for name, each in functions.items():
            each.lacking = self._lack(host, name, each.cpu)
            stretch = 1.0 + each.cpu * (SHARES - 1.0) * each.lacking
            if stretch != each.stretch:
                self._foresee(each, stretch)
        lost.rate = self._rate_of_loss(host)

    def _rate_of_loss(self, host: str) -> float:
        """Seconds a second that each kernel of a host loses to its functions."""
        functions = self._functions[host]
        threads = sum(self._kernels[host].values())
        if not threads or not functions:
            return 0.0
        taken_cores = sum(each.taken_cores for each in functions.values())
        # Of many functions none has more than the kernel that it shares a core with.
        cores = self._times.cores(next(iter(functions)))
        fair = cores / self._count_busy(host)
        most = max(0.0, 1.0 - fair)
        return min(most, taken_cores / threads)

    def _lack(self, host: str, worker: str, cpu: float) -> float:
        """The share of a core that is not free for something on a Worker of a host, 0 to 1. cpu:
        what counts of it as busy already.
        """
        others = self._count_busy(host) - cpu
        free = self._times.cores(worker) - others
        lacking = 1.0 - free
        return min(1.0, max(0.0, lacking))

    def _count_busy(self, host: str) -> float:
        """Cores of a host that kernels and functions would keep busy, each with its own."""
        functions = self._functions[host].values()
        threads = sum(self._kernels[host].values())
        wanted = sum(each.cpu for each in functions)
        return threads + wanted

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
