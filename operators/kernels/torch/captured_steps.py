"""CUDA graphs of decode steps: each captured once, then replayed.

Owns: warm-up, capture, how many graphs are kept, and what happens where a capture fails. Does not
own: what a step computes (static_step.py), when graphs are no longer true (static_memory.py).

On a CPU, and after a failure, a step is computed as it is called: the same code, launched one
operation after another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

WARM_UPS = 3
"""Runs before a capture, as torch's notes on CUDA graphs do it: libraries make their handles and
workspaces, compiled layers compile.
"""

MOST_GRAPHS = 48
"""Graphs that are kept; the one that was not replayed for longest goes first. Eight row counts with
six key lengths are as many.
"""


class CapturedSteps:
    """Runs steps on a device by replaying graphs. name: of the model, for the warning. captures:
    how many graphs were captured so far.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.captures = 0
        self._device, self._name = device, name
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # torch names no type for its handles
        self._stream: torch.cuda.Stream | None = None
        self._fails = device.type != "cuda"

    def run(self, key: Hashable, compute: Callable[[], None], state: Tensor) -> None:
        """Run `compute`, which changes only tensors that stay where they are. key: names all that
        it computes. state: what it reads and changes; runs that only warm up do not change it.
        """
        graph = None if self._fails else self._find_graph(key, compute, state)
        if graph is None:
            compute()
        else:
            graph.replay()

    def clear(self) -> None:
        """Forget all graphs, once none is running: their tensors are about to go."""
        if not self._graphs:
            return
        torch.cuda.synchronize(self._device)
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._pool = None

    def _find_graph(
        self, key: Hashable, compute: Callable[[], None], state: Tensor
    ) -> torch.cuda.CUDAGraph | None:
        """The graph of this step, captured if there is none yet; None if that failed."""
        graph = self._graphs.pop(key, None)
        if graph is None:
            graph = self._try_capture(compute, state)
            if graph is None:
                return None
            self._make_room()
        self._graphs[key] = graph  # the last in the order of use
        return graph

    def _make_room(self) -> None:
        if len(self._graphs) >= MOST_GRAPHS:
            torch.cuda.synchronize(self._device)
            oldest = next(iter(self._graphs))
            self._graphs.pop(oldest).reset()

    def _try_capture(
        self, compute: Callable[[], None], state: Tensor
    ) -> torch.cuda.CUDAGraph | None:
        """Capture a step. If the module does what no graph can hold, warn, and never try again."""
        try:
            return self._capture(compute, state)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            _log.warning(
                "%s: expected decode steps that a CUDA graph can hold, found %s: %s. Each of their"
                " operations is launched by itself from now on, which is slower; nothing else"
                " changes. Fix: a base of another architecture, or --kernel NODE=vllm.",
                self._name, type(error).__name__, first_line,
            )  # fmt: skip
            self._fails = True
            # What warmed up on the other stream must not run into what follows on this one.
            torch.cuda.synchronize(self._device)
            self.clear()
            return None

    def _capture(self, compute: Callable[[], None], state: Tensor) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            if self._pool is None:
                # One pool for all: only one of them runs at a time.
                self._pool = torch.cuda.graph_pool_handle()
            before = state.clone()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            # This outer context brings the current stream back even where the capture's end raises.
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    compute()
                    state.copy_(before)
                graph = torch.cuda.CUDAGraph()
                # thread_local: threads that receive weights may allocate meanwhile.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ):
                    compute()
            current.wait_stream(self._stream)
        self.captures += 1
        return graph
