"""Starts the processes of a host's Workers, forked from a template where that saves importing.

Owns: which Workers are forked, the templates, what each process is given. Does not own: the
processes once they run (child.py), when they are started (supervisor.py).

    a Worker                                         its process
    with a GPU, or whose kernels need an environment an interpreter of its own
    with an environment that no other here has       an interpreter of its own
    any other                                        forked from the template of its environment

CUDA does not survive a fork, and an environment is read as a process starts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

from dataflow.errors import RunError
from dataflow.import_order import import_path
from engine.channels.descriptors import explain_shortage
from engine.keep.run_folder import RunFolder
from engine.plan.plan import Plan
from engine.run.launch.child import ChildProcess, environment, open_log, start_fresh
from engine.run.launch.process_handle import StartedProcess
from engine.run.launch.template import Template, TemplateGone

_OURS = "operators.kernels."
"""Only kernels of ours are imported by a template: a user's may start threads."""
_Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]


class Starter:
    """Of the Workers of one plan on this host; for one thread."""

    def __init__(self, plan: Plan, workers: Collection[str], folder: RunFolder) -> None:
        self._plan = plan
        self._folder = folder
        self._threads = {w: _threads(plan, w) for w in workers}
        self._alike = Counter(n for w, n in self._threads.items() if self._is_plain(w))
        self._templates: dict[_Key, Template] = {}

    def is_forked(self, worker: str) -> bool:
        """Whether it is forked from a template."""
        return self._is_plain(worker) and self._alike[self._threads[worker]] > 1

    def prepare(self, workers: Collection[str]) -> None:
        """Start the templates of these, which then import while others start."""
        for worker in workers:
            if self.is_forked(worker):
                with _room_for(worker):
                    self._template(worker)

    def start(self, worker: str, epoch: int, still: Callable[[], None]) -> ChildProcess:
        """Start its process. still: called while a template imports, to raise what ends the wait.
        Raises RunError if there is no room for another process.
        """

        def start(descriptor: int, output: BinaryIO) -> StartedProcess:
            if self.is_forked(worker):
                return self._fork(worker, descriptor, output, still)
            return start_fresh(worker, descriptor, output, self._environment(worker))

        with _room_for(worker):
            return ChildProcess(worker, epoch, start=start, log=self._folder.log(worker))

    def close(self) -> None:
        """End the templates, once all Workers have ended."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()

    def _fork(
        self, worker: str, descriptor: int, output: BinaryIO, still: Callable[[], None]
    ) -> StartedProcess:
        """From the template of its environment; from a new one, once, if that has died."""
        try:
            return self._template(worker).fork(worker, descriptor, output, still)
        except TemplateGone:
            self._templates.pop(self._key(worker)).close()
        try:
            return self._template(worker).fork(worker, descriptor, output, still)
        except TemplateGone as gone:
            log = self._folder.log(worker)
            problem = "expected a process that imports for it and others, found that it ended twice"
            raise RunError(f"worker {worker}: {problem}. Fix: see the end of {log}.") from gone

    def _template(self, worker: str) -> Template:
        key = self._key(worker)
        if key not in self._templates:
            modules, variables = self._modules(worker), self._environment(worker)
            with open_log(self._folder.log(worker)) as output:
                self._templates[key] = Template(modules, variables, output)
        return self._templates[key]

    def _modules(self, worker: str) -> list[str]:
        """Of the kernels of all that are forked from its template."""
        threads = self._threads[worker]
        alike = {w for w, n in self._threads.items() if n == threads and self.is_forked(w)}
        modules: set[str] = set()
        for node in self._plan.nodes:
            module, _, _ = node.kernel.partition(":")
            if module.startswith(_OURS) and not alike.isdisjoint(node.workers):
                modules.add(module)
        return sorted(modules)

    def _key(self, worker: str) -> _Key:
        """What a process has from the moment that it starts."""
        environment = self._environment(worker)
        return os.getcwd(), tuple(import_path()), tuple(sorted(environment.items()))

    def _environment(self, worker: str) -> Mapping[str, str]:
        devices = self._plan.devices.get(worker, ())
        needed = self._plan.environments.get(worker, {})
        return environment(self._threads[worker], devices, needed)

    def _is_plain(self, worker: str) -> bool:
        return not (self._plan.devices.get(worker) or self._plan.environments.get(worker))


@contextmanager
def _room_for(worker: str) -> Iterator[None]:
    """RunError if there is no room for a process."""
    try:
        yield
    except OSError as error:
        fix = "Fix: allow more processes (ulimit -u)"
        cause = explain_shortage(error) or f"{error}. {fix}"
        problem = f"expected its process to start, found: {cause}"
        raise RunError(f"worker {worker}: {problem}, or plan fewer workers.") from error


def _threads(plan: Plan, worker: str) -> int:
    return max((n.layout.threads for n in plan.nodes if worker in n.workers), default=1)
