"""What kernels waited for outside of the run, taken out of the seconds in which they were busy.

Owns: these seconds until a stretch has them, and the counts of rows in flight. Does not own: how a
kernel says that it waits (engine/run/worker/outside_waits.py), when a node is busy (activity.py).

The coordinator sees a node as busy while it has a task; its Worker tells how much of that was a
wait. Reports may come after the stretch that they are about, as a heartbeat brings them: what is
more than the busy seconds of a stretch counts in the next one.
"""

from __future__ import annotations

from collections import defaultdict


class OutsideSeconds:
    """Of one attempt. Replicas are `node@worker`."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Replica -> what is waited for -> seconds that no stretch has yet."""
        self._flights: dict[str, int] = {}

    def add(self, whose: str, seconds: float) -> None:
        """Add a report. whose: `node@worker/reason`."""
        replica, _, reason = whose.rpartition("/")
        self._seconds[replica][reason] += seconds

    def take(self, replica: str, busy: float) -> dict[str, float]:
        """Take what a replica waited for out of its busy seconds of a stretch, at most all."""
        waited = self._seconds.pop(replica, {})
        whole = sum(waited.values())
        if whole <= busy:
            return dict(waited)
        part = busy / whole
        left = self._seconds[replica]
        taken: dict[str, float] = {}
        for reason, seconds in waited.items():
            taken[reason] = seconds * part
            left[reason] = seconds - taken[reason]
        if busy <= 0:
            return {}
        return taken

    def set_in_flight(self, replica: str, count: int) -> None:
        """So many rows are in flight in a replica from now on."""
        self._flights[replica] = count

    def in_flight(self, replica: str) -> int:
        """How many rows are in flight in a replica."""
        return self._flights.get(replica, 0)

    def forget_worker(self, worker: str) -> None:
        """Forget a Worker that is gone, with its rows."""
        end = f"@{worker}"
        for known in (self._seconds, self._flights):
            of_worker = [replica for replica in known if replica.endswith(end)]
            for replica in of_worker:
                del known[replica]
