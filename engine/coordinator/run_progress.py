"""How far streamed Steps and late-bound generations are, for whoever watches the run.

Owns: reading it off the coordinator's parts. Does not own: these parts (streamed_groups.py,
step_parts.py, late_binding.py), who asks, and when (engine/keep/flow).

Another thread may ask while the loop changes what is read: lists and dicts are copied before they
are gone through, and a number may be that of a moment ago.
"""

from __future__ import annotations

from engine.coordinator.late_binding import LateBinding
from engine.coordinator.sources import Sources
from engine.coordinator.step_parts import StepParts
from engine.coordinator.streamed_groups import StreamedGroups
from engine.protocol.progress import (
    PartProgress,
    PartState,
    PoolProgress,
    RunProgress,
    StreamProgress,
)


def find_progress(sources: Sources, parts: StepParts, late: LateBinding) -> RunProgress:
    """Read it off; empty of a run that is neither streamed nor binds rows late."""
    streams: dict[str, StreamProgress] = {}
    for name, table in sources.tables.items():
        if table.stream is not None:
            streams[name] = _stream_progress(name, table.stream, parts)
    return RunProgress(streams=streams, pools=_pool_progress(late))


def _stream_progress(source: str, stream: StreamedGroups, parts: StepParts) -> StreamProgress:
    ended_rows, rows = stream.count_rows()
    waiting = stream.waiting_groups
    return StreamProgress(
        watermark=stream.watermark,
        ended_rows=ended_rows,
        rows=rows,
        waiting_groups=len(waiting),
        waiting_tokens=sum(group.tokens for group in waiting),
        parts=_part_progress(source, stream, parts),
    )


def _part_progress(source: str, stream: StreamedGroups, parts: StepParts) -> list[PartProgress]:
    """Of each part of the Step, in the order of the cut."""
    states = parts.states(source)
    if stream.is_cut and not states:  # they are of the Step before
        return []
    progress: list[PartProgress] = []
    # Those that the train nodes do not know yet are being made.
    parts_of_step = list(stream.parts)
    makes: list[PartState] = ["made"] * len(parts_of_step)
    states.extend(makes)
    for groups, state in zip(parts_of_step, states, strict=False):
        tokens = sum(group.tokens for group in groups)
        progress.append(PartProgress(groups=len(groups), tokens=tokens, state=state))
    return progress


def _pool_progress(late: LateBinding) -> dict[str, PoolProgress]:
    return {name: credit.progress() for name, credit in late.credits.items()}
