"""What a kernel may take at once, and what it was at when its memory ran out.

Owns: these values, and which errors say that memory ran out, on the host or on a GPU. Does not own:
by how much limits are lowered (engine/coordinator/memory_limits.py), memory that is planned
(engine/plan/cost/memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.errors import DataflowError, ShortOfMemory
from dataflow.kernel import Layout, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Of a node: rows that a replica decodes at once, tokens of one forward or micro-batch, and
    what a backward pass computes again, as in Layout.
    """

    slots: int
    tokens: int
    recompute: Recompute = "none"

    @classmethod
    def of(cls, layout: Layout) -> MemoryLimits:
        """Those of the plan."""
        return cls(slots=layout.slots, tokens=layout.tokens, recompute=layout.recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What a kernel was at when its memory ran out. rows: at once; tokens: of them. key, longest:
    of the longest of these rows, and its tokens. is_divisible: whether lower limits would cut it.
    is_kept: whether what the kernel has is as it was before; updates: of a Step, how many are done,
    which are kept and not done again. All are of nothing where it had not begun.
    """

    doing: str = ""
    rows: int = 0
    tokens: int = 0
    key: tuple[int, int, int] | None = None
    longest: int = 0
    is_divisible: bool = True
    is_kept: bool = True
    updates: int = 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that there was not enough memory, on the host or on a GPU."""
    if isinstance(error, DataflowError):  # whatever its text quotes
        return isinstance(error, ShortOfMemory)
    # By name: torch need not be imported.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error)
    is_of_torch = isinstance(error, RuntimeError)
    return is_of_torch and ("out of memory" in message or "can't allocate memory" in message)
