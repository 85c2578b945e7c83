"""The limits of heartbeats: when a silent Worker is killed.

    each BEAT seconds           a Worker's process sends what it is doing, whatever its kernel does
    none for too long           it is asked for its stack, which it writes at C level if it can
    STACK_WAIT seconds later    it is given up: it is stopped, or holds the interpreter's lock

"Too long" is the option `heartbeat`, or FIRST_BEAT until the first one has come. Owns: this
judgement. Does not own: sending heartbeats (engine/run/worker_process), killing (worker_io.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.run.launch.child import ChildProcess

FIRST_BEAT = 120.0
"""Seconds for the first one: an interpreter starts, and many may start at once."""
STACK_WAIT = 0.5
"""Seconds for a process to write its stack."""
SUPERVISOR_STOPPED = 5.0
"""Seconds between two looks after which this process itself was stopped: no silence counts."""


def mark_silent(
    children: Sequence[ChildProcess], before: float, now: float, heartbeat: float
) -> list[ChildProcess]:
    """Mark and return those to be killed. before: the last look. The caller holds the lock."""
    if now - before > SUPERVISOR_STOPPED:
        for child in children:
            child.heard = now
    silent_children: list[ChildProcess] = []
    for child in children:
        limit = heartbeat if child.spoke else FIRST_BEAT
        if now - child.heard <= limit:
            continue
        if child.heard > child.stack_asked:
            child.ask_for_stack(now)
        elif child.stack_asked <= now - STACK_WAIT:
            silent_children.append(child)
            child.lost = True
            child.error = (
                f"was killed as nothing was heard of it for {now - child.heard:.1f} s"
                f"{child.where()}: it was stopped, or is in code that holds the interpreter's lock"
            )
    return silent_children
