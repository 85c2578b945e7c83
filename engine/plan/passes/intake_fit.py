"""How many prompts of a source with a lag may wait in memory with the longest rows.

Owns: that number, where not all fit that the lag allows, and what it is in tokens of answers. Does
not own: bytes (estimate.py), what fits (checks/memory.py), what is admitted when rows are shorter
(engine/coordinator/live_tokens.py).

Rows wait from when they are made until their Step is trained, so with a lag of k up to k + 1 Steps
wait. Where these do not fit with rows as long as the graph allows, the run admits fewer prompts as
long as rows are that long, never fewer than a Step has. No other choice costs less: in most runs
rows are shorter than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.plan.checks.memory import check_memory
from engine.plan.draft import Draft
from engine.plan.passes.correct import correct_peaks
from engine.plan.passes.estimate import estimate_costs
from engine.plan.passes.processes import estimate_processes
from engine.plan.plan import PlannedNode
from engine.plan.planned_source import LiveRoom, PlannedSource
from engine.plan.waiting_rows import WaitingRows, measure_waiting_rows

WAITING_PARTS = ("outbox", "device_columns")
"""Parts of a node that makes rows: these, until their Step is trained."""
FINEST = 1024
"""Shares of what the lag allows that are tried: multiples of one in so many."""


def fit_intake(draft: Draft) -> Draft:
    """Let fewer prompts wait where that makes the plan fit, or less of it does not; change nothing
    if all fits, or that does not help.
    """
    if draft.placing.live_tokens:
        sources = [_ask(source, draft.placing.live_tokens) for source in draft.sources]
        draft = replace(draft, sources=tuple(sources))
    if not list_late_sources(draft.sources):
        return draft
    problem_count = count_problems(draft)
    if not problem_count or count_problems(hold(draft, 0.0)) >= problem_count:
        return draft
    share = find_share(draft, count_problems(hold(draft, 0.0)), most=FINEST)
    return _decide(draft, share)


def _ask(source: PlannedSource, live_tokens: int) -> PlannedSource:
    return replace(source, live_tokens=live_tokens) if source.max_lag else source


def list_late_sources(sources: Iterable[PlannedSource]) -> list[PlannedSource]:
    """The sources of which more than one Step's rows may wait."""
    return [source for source in sources if source.max_lag]


def count_problems(draft: Draft) -> int:
    """How many memories are too small."""
    return len(list(check_memory(draft)))


def find_share(draft: Draft, problem_count: int, *, most: int) -> float:
    """The greatest share of what the lag allows, up to `most` times 1 / 1024, that leaves no more
    memories too small than this.
    """
    least, too_much = 0, most + 1
    while too_much - least > 1:
        middle = (least + too_much) // 2
        if count_problems(hold(draft, middle / FINEST)) <= problem_count:
            least = middle
        else:
            too_much = middle
    return least / FINEST


def hold(draft: Draft, share: float) -> Draft:
    """The draft, as far as bytes go, if this share of the prompts waits that the lag allows; of
    each source at least a Step's.
    """
    shares: dict[str, float] = {}
    for source in list_late_sources(draft.sources):
        shares[source.name] = count_held(source, share) / source.most
    nodes = [_scale(node, shares.get(node.source, 1.0)) for node in draft.nodes]
    # What is scattered in a process depends on the peaks of its nodes.
    return estimate_processes(replace(draft, nodes=tuple(nodes)))


def count_held(source: PlannedSource, share: float) -> int:
    """Prompts of this share, at least a Step's."""
    return max(source.batch, int(share * source.allowed))


def _scale(node: PlannedNode, share: float) -> PlannedNode:
    if node.region != "stream":
        return node
    parts = dict(node.estimate.bytes)
    for part in WAITING_PARTS:
        if part in parts:
            parts[part] = int(parts[part] * share)
    return replace(node, estimate=replace(node.estimate, bytes=parts))


def describe_room(prompts: int, rows: WaitingRows) -> LiveRoom:
    """What memory holds that has room for so many prompts with the longest rows."""
    tokens = prompts * (rows.longest + rows.beside)
    return LiveRoom(prompts=prompts, tokens=tokens, beside=rows.beside)


def _decide(draft: Draft, share: float) -> Draft:
    """The draft with this share, estimated anew. What the passes note is noted already."""
    sources = list(draft.sources)
    notes = list(draft.notes)
    for index, source in enumerate(sources):
        if source.max_lag:
            rows = measure_waiting_rows(draft, source.name)
            room = describe_room(count_held(source, share), rows)
            sources[index] = replace(source, room=room)
            notes.append(
                f"{source.name}: with the longest rows {room.prompts} of the {source.allowed}"
                " prompts that max_lag allows have room; the intake slows from"
                f" {room.live_tokens(source.allowed):,} live tokens on"
            )
    changed = replace(draft, sources=tuple(sources))
    for run in (estimate_costs, correct_peaks, estimate_processes):
        changed = run(changed)
    return replace(changed, notes=tuple(notes))
