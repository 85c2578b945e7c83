"""Workers of which nothing is heard, or that hang: whom to give up, and where their code stands.

Owns: the judgement, and its words. Does not own: heartbeats (engine/launch/worker_process.py), killing
(local.py).

    a process that is silent for too long   is asked where it stands, which it answers at C level if it can
    half a second later                     is given up: it was stopped, or its code holds the interpreter's lock
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.launch.child import ChildProcess

_FIRST = 120.0
"""Seconds within which the first heartbeat has to come: an interpreter starts, and many may at
once.
"""
_STACK = 0.5
"""Seconds for a process to write where it stands."""
_STOOD_STILL = 5.0
"""Seconds after which this process itself is taken to have been stopped, and nobody's silence
counts.
"""


def silent(
    children: Sequence[ChildProcess], before: float, now: float, heartbeat: float
) -> list[ChildProcess]:
    """Those to be killed, marked as lost, with the reason. before: when they were looked at last.
    Its user locks.
    """
    for child in children:
        if now - before > _STOOD_STILL:
            child.heard = now
    quiet = [c for c in children if now - c.heard > (heartbeat if c.spoke else _FIRST)]
    found = [c for c in quiet if c.heard <= c.asked_where <= now - _STACK]
    for child in quiet:
        if child.heard > child.asked_where:
            child.ask_where(now)
    for child in found:
        child.lost = True
        child.error = (
            f"was killed as nothing was heard of it for {now - child.heard:.1f} s{child.where()}:"
            " it was stopped, or is in code that holds the interpreter's lock"
        )
    return found


def stacks(busy: Sequence[ChildProcess]) -> list[str]:
    """Of each of these the stack of its main thread, which it writes into its log when it is asked."""
    for child in busy:
        child.ask_where(time.monotonic())
    end = time.monotonic() + _STACK
    for child in busy:
        child.over.wait(max(0.0, end - time.monotonic()))
    return [
        f"{child.name}, process {child.process.pid},{stack}"
        for child in busy
        if (stack := child.stack())
    ]
