"""How far a Step is that is trained while it is generated, and whose rows wait for a slot.

Owns: these values, as the coordinator counts them and records of what flows keep them. Does not
own: the counting (engine/coordinator/run_progress.py), the records (engine/keep/flow/records.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

PartState = Literal["made", "ready", "training", "summed"]


class PartProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a Step. tokens: of its answers.

    made: nodes below the generation run on it. ready: its rows are there, and parts before it are
    trained first. training: the train node computes its gradients. summed: it has them.
    """

    groups: int = 0
    tokens: int = 0
    state: PartState = "made"


class StreamProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The Step of a source that is streamed. ended_rows, rows: of its first generations."""

    watermark: int = 0
    """The least tokens of a row that has not ended."""
    ended_rows: int = 0
    rows: int = 0
    waiting_groups: int = 0
    """Groups that have ended, and are in no part: their place waits for the watermark, or their
    part for more of them.
    """
    waiting_tokens: int = 0
    parts: list[PartProgress] = []


class PoolProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A generation whose rows are bound late. credit: the most rows that a replica may have under
    way, slots and a few ahead.
    """

    waiting_rows: int = 0
    """Rows that can begin, and wait with the coordinator for a slot."""
    slots: int = 0
    """Of one replica."""
    credit: int = 0
    under_way: dict[str, int] = {}
    """Rows by replica."""


class RunProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All of it: streams by source, pools by generation."""

    streams: dict[str, StreamProgress] = {}
    pools: dict[str, PoolProgress] = {}


def no_progress() -> RunProgress:
    """Of a run of neither kind."""
    return RunProgress()
