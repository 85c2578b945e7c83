"""What is said to Workers that take turns on devices, and what they answer.

Owns: these values; messages.py puts them among all others. Does not own: whose turn it is
(engine/coordinator/device_turns.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """A Worker has its devices."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slept:
    """A Worker has given its devices back."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Take the devices, until Sleep. A Worker that shares its devices opens asleep."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Give the devices back: all that was told before has ended, except an assignment that waits
    for Go, which is dropped. The outbox still serves rows, and requests are answered.
    """

    worker: str
