"""A run in a thread of this process, for notebooks.

    handle = run(graph, options, wait=False)
    handle.metrics["reward/mean"], handle.history
    handle.checkpoint()
    handle.scale(rollout=4)
    handle.stop()
    result = handle.result()

Owns: the handle, and that one run at a time goes on in a process. Does not own: the run (api.py),
how wishes reach it (engine/run/loop/run_requests.py).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal

import pyarrow as pa

from dataflow.display import Displayed
from dataflow.errors import RunError, nearest_or_all
from engine.keep.metrics.metrics_table import history
from engine.run.loop.run_requests import RunRequests
from engine.session.run_result import Result

State = Literal["running", "ended", "failed"]

_under_way: list[RunHandle] = []
"""The last run that a thread of this process began."""
_starting = threading.Lock()


class RunHandle(Displayed):
    """A run that goes on in a thread. It keeps the process alive until it ends. Ctrl-C ends what
    waits for it, not the run; `stop` ends the run.
    """

    _page = "engine.session.notebook_pages:handle_page"

    def __init__(
        self,
        folder: Path,
        requests: RunRequests,
        elastic: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """elastic: the least and most replicas of each node whose replicas come and go."""
        self.folder = folder
        self._requests = requests
        self._elastic = dict(elastic or {})
        self._metrics: Mapping[str, float] = {}
        self._run: Future[Result] = Future()

    def __repr__(self) -> str:
        return f"RunHandle({str(self.folder)!r}: {self.state}, step {self.step})"

    @property
    def state(self) -> State:
        """Whether the run goes on, has ended, or failed."""
        if not self._run.done():
            return "running"
        if self._run.exception():
            return "failed"
        return "ended"

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last Step's row; empty before the first."""
        return self._metrics

    @property
    def step(self) -> int:
        """The last Step that is complete; 0 before the first."""
        return int(self._metrics.get("step", 0))

    @property
    def history(self) -> pa.Table:
        """Every Step's metrics so far, as `Result.history`."""
        return history(self.folder / "metrics.jsonl")

    def stop(self) -> None:
        """Have the run end after the Step under way, with a checkpoint; does not wait."""
        self._requests.stop()

    def checkpoint(self) -> None:
        """Have a checkpoint written at the end of the Step under way; does not wait."""
        self._requests.checkpoint()

    def scale(self, **replicas: int) -> None:
        """Have so many replicas of these nodes, which the run began with `replicas="2..8"`; does
        not wait. With `scaling="balance"` the rule goes on from there. Raises RunError for another
        node, and for a number below its least or above its most.
        """
        for node, count in replicas.items():
            self._refuse_scale(node, count)
        self._requests.scale(replicas)

    def _refuse_scale(self, node: str, count: int) -> None:
        if node not in self._elastic:
            fix = nearest_or_all(node, list(self._elastic))
            if not fix:  # no node has a range
                fix = f"replicas={{{node!r}: '1..{count}'}}"
            problem = f"expected a node with a range of replicas, found {node!r}"
            raise RunError(f"{self.folder}: scale: {problem}. Fix: {fix}.")
        least, most = self._elastic[node]
        if not least <= count <= most:
            fix = f"{node}={min(max(count, least), most)}"
            problem = f"expected {least} to {most} replicas of {node}, found {count}"
            raise RunError(f"{self.folder}: scale: {problem}. Fix: {fix}.")

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. timeout: seconds, after which TimeoutError is raised and the run goes
        on. Raises what made the run fail.
        """
        if not wait([self._run], timeout).done:
            raise TimeoutError(f"{self.folder}: the run goes on, at step {self.step}")
        return self._run.result()

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Note a Step's row."""
        self._metrics = dict(metrics)

    def start(self, go: Callable[[], Result]) -> None:
        """Begin. Raises RunError while another run goes on in this process."""
        with _starting:
            refuse_second()
            thread = ThreadPoolExecutor(1, f"run {self.folder.name}")
            self._run = thread.submit(go)
            thread.shutdown(wait=False)
            _under_way[:] = [self]
        self._run.add_done_callback(self._tell)

    def _tell(self, run: Future[Result]) -> None:
        """Say at once that the run failed; whoever asks for its result gets the error."""
        if error := run.exception():
            print(f"{self.folder}: the run failed: {error}", file=sys.stderr, flush=True)


def refuse_second() -> None:
    """Raise RunError while a run goes on in a thread of this process: torch's threads, the log and
    signals are the process's.
    """
    for handle in _under_way:
        if handle.state == "running":
            problem = "expected one run at a time in a process, found that this one goes on"
            fix = "handle.result() waits for it, handle.stop() ends it"
            raise RunError(f"{handle.folder}: {problem}. Fix: {fix}.")
