"""Versions that are fetched beside what a Worker does, until its kernels load them.

    a Load       waits for                                   left by
    queued       the thread, the version before it of its    its turn -> under way
                 module to be loaded                         a newer one -> superseded
    under way    the Worker that keeps its block             its pieces, or an error -> fetched
    fetched      the main thread, between two steps          `take`

Owns: this order, the thread, what has been fetched and not been taken. Does not own: how pieces are
fetched (version_pieces.py), when a kernel loads them (weight_delivery.py).

A second buffer, and no third: of each module one version at most is under way or fetched. A newer
Load of the same reader takes the place of one that is queued, which is then answered without a
load; of a follower, which moves with every version, each counts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from engine.protocol import messages as m
from engine.run.worker.version_pieces import FetchedPieces

Fetch = Callable[[m.Load], FetchedPieces]
PassOn = Callable[[m.Load], None]


class FetchedVersions:
    """Of one Worker, from any thread. fetch: of one Load, on the thread; who takes it gets what it
    raises. module_of: the module that a Load is for.
    """

    def __init__(self, fetch: Fetch, module_of: Callable[[m.Load], str]) -> None:
        self._fetch = fetch
        self._module_of = module_of
        self._pass_on: PassOn = _nobody_takes
        self._thread: ThreadPoolExecutor | None = None
        self._queued: deque[m.Load] = deque()
        self._under_way: m.Load | None = None
        self._fetched: dict[int, tuple[m.Load, Future[FetchedPieces]]] = {}
        self._superseded: set[int] = set()
        self._last: dict[str, tuple[str, str, int]] = {}
        """The version that was fetched last for each module."""
        self._lock = threading.RLock()

    def add(self, load: m.Load, pass_on: PassOn) -> None:
        """Have a version fetched. pass_on: called then with its Load, from any thread."""
        with self._lock:
            self._pass_on = pass_on
            self._queued.append(load)
        self._begin_next()

    def take(self, load: m.Load) -> Future[FetchedPieces] | None:
        """What has been fetched for a Load; None if nothing has."""
        with self._lock:
            _, future = self._fetched.pop(load.id, (load, None))
        self._begin_next()
        return future

    def take_superseded(self, load: m.Load) -> bool:
        """Whether a newer version has taken the place of this one, which is not loaded."""
        with self._lock:
            is_superseded = load.id in self._superseded
            self._superseded.discard(load.id)
            return is_superseded

    def forget(self) -> int:
        """Drop everything; returns how many Loads were not passed on."""
        with self._lock:
            count = len(self._queued) + (self._under_way is not None)
            self._queued.clear()
            self._fetched.clear()
            self._under_way = None
            return count

    def _begin_next(self) -> None:
        """Begin the first fetch whose module has room, if none is under way; pass on those that
        need none.
        """
        with self._lock:
            superseded = [load for load in self._queued if self._is_superseded(load)]
            self._superseded.update(load.id for load in superseded)
            fetchless = superseded + self._shared_loads()
            for load in fetchless:
                self._queued.remove(load)
            self._begin_first()
            pass_on = self._pass_on
        for load in fetchless:
            pass_on(load)

    def _shared_loads(self) -> list[m.Load]:
        """Those whose module has been given this very version for another of its readers."""
        if self._under_way is not None:
            return []
        return [load for load in self._queued if self._last.get(self._module_of(load)) == _at(load)]

    def _begin_first(self) -> None:
        if self._under_way is not None:
            return
        full_modules = {self._module_of(load) for load, _ in self._fetched.values()}
        ready = (load for load in self._queued if self._module_of(load) not in full_modules)
        load = next(ready, None)
        if load is None:
            return
        self._queued.remove(load)
        self._under_way = load
        self._last[self._module_of(load)] = _at(load)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        future = self._thread.submit(self._fetch, load)
        future.add_done_callback(partial(self._end, load))

    def _is_superseded(self, load: m.Load) -> bool:
        newer = (other for other in self._queued if other.version > load.version)
        return not load.leader and any(_place(other) == _place(load) for other in newer)

    def _end(self, load: m.Load, future: Future[FetchedPieces]) -> None:
        """On the thread: a fetch has ended, well or not."""
        with self._lock:
            is_wanted = self._under_way is load
            if is_wanted:
                self._under_way = None
                self._fetched[load.id] = load, future
            pass_on = self._pass_on
        if is_wanted:
            pass_on(load)
        self._begin_next()


def _place(load: m.Load) -> tuple[str, str, str]:
    return load.reader, load.model, load.leader


def _at(load: m.Load) -> tuple[str, str, int]:
    """Where its pieces are, and of which Model a follower moves with them."""
    return load.leader, load.source, load.block


def _nobody_takes(load: m.Load) -> None:
    del load
