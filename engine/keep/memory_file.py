"""memory.json: what memory that ran out has taught a run, of each node whose memory did.

    {"rollout": {"limits": {"slots": 64, "tokens": 16384, "recompute": "none"},
                 "stand": "1x1x1x1 gpu none rollout", "margin": 1.31}}

Owns: the file's form, reading it, writing it as limits are lowered. Does not own: the values
(engine/plan/memory_margins.py), by how much limits are lowered
(engine/coordinator/memory_limits.py). A resume counts with it; who deletes it has the plan's own
limits and estimates again.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from dataflow.errors import RunError
from dataflow.memory_limits import MemoryLimits
from engine.keep.run_folder import MEMORY, RunFolder
from engine.plan.memory_margins import NodeMemory, RunMemory, describe_stand, measure_margin
from engine.plan.plan import Plan
from engine.protocol.events import InstructionTold
from engine.protocol.memory_messages import LimitLowered

_log = logging.getLogger(__name__)


def read_memory(folder: Path) -> dict[str, NodeMemory]:
    """Read a run folder's file; of no node where there is none. Raises RunError."""
    path = folder / MEMORY
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, NodeMemory])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        fix = "restore it; or delete it, and the run goes on with the plan's limits"
        problem = f"expected what memory that ran out has taught the run, found {error}"
        raise RunError(f"{path}: {problem}. Fix: {fix}.") from error


def find_lowered(plan: Plan, memory: RunMemory) -> dict[str, MemoryLimits]:
    """The limits of nodes that stand as they stood when memory ran out, and are not planned so."""
    lowered: dict[str, MemoryLimits] = {}
    for node in plan.nodes:
        known = memory.get(node.name)
        if known is None or known.stand != describe_stand(plan, node):
            continue
        planned = MemoryLimits.of(node.layout)
        limits = replace(
            known.limits,
            slots=min(planned.slots, known.limits.slots),
            tokens=min(planned.tokens, known.limits.tokens),
        )
        if limits != planned:
            lowered[node.name] = limits
    return lowered


class MemoryRecord:
    """Subscribes to a run's events and writes the file. Of a Worker's loss nothing is lost: the
    file is whole before the task is told again.
    """

    takes = (LimitLowered,)

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        self._plan, self._folder = plan, folder
        self._memory = read_memory(folder.path)

    def take(self, event: InstructionTold) -> None:
        """See `engine.protocol.events`."""
        lowered = event.instruction
        assert isinstance(lowered, LimitLowered)
        node, before = self._plan.node(lowered.node), self._memory.get(lowered.node)
        margin = 1.0 if before is None else before.margin
        if lowered.peak:
            measured = measure_margin(self._plan, node, lowered.worker, lowered.peak)
            margin = max(margin, round(measured, 4))
        self._memory[node.name] = NodeMemory(
            limits=lowered.limits, stand=describe_stand(self._plan, node), margin=margin
        )
        if margin > 1 and (before is None or margin > before.margin):
            counted = "from now on its bytes are counted"
            _log.warning("%s: %s %.2f times in plans of this run", node.name, counted, margin)
        text = msgspec.json.format(msgspec.json.encode(self._memory)).decode()
        self._folder.write_text(MEMORY, text)
