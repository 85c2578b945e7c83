"""What is heard and said where a kernel's memory runs out.

    a task       may also be answered by
    RunChunk     Short: its chunk came to nothing more; what has come of it stays
    TrainStep    Short, of every rank where there are several: the updates that are done stay
    TrainPart    Short, with all that was summed lost

Owns: these values; messages.py puts them among all others. Does not own: what follows from them
(engine/coordinator/memory_limits.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataflow.memory_limits import MemoryLimits, MemoryNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A kernel had no memory for a task. limits: those that were in force; need: what it was at;
    of several ranks one has it, the others say that one of them was short. error: in its words.
    peak: bytes that its process had at most, with those that it asked for last: on its GPU if it
    uses one, else on the host; 0 where nobody measured.

    is_lost: whether only a checkpoint, or another process, has what the Worker had; else it is as
    it was before, but for what had come of the task.
    """

    id: int
    node: str
    worker: str
    limits: MemoryLimits
    need: MemoryNeed = field(default_factory=MemoryNeed)
    error: str = ""
    peak: int = 0
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLowered:
    """A node has lower limits from now on, for the rest of the run. error: why, as the kernel said
    it. peak: as of Short, where the limits were the plan's before; else 0.
    """

    node: str
    worker: str
    limits: MemoryLimits
    before: MemoryLimits
    error: str
    peak: int = 0
