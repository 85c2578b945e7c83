"""Which GPUs each Worker has that computes with a Model.

Owns: the numbers. Does not own: the Workers (place.py), who takes turns (the user's wish).

Ranks inside of one Worker need a GPU each, which nobody else has, but for Workers that take turns
with theirs. All others get one each, from the rest, and share from the first again if it runs out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.plan.draft import Draft
from engine.plan.worker_index import turns_by_worker, workers_by_host

Unit = tuple[str, ...]
"""A Worker, or Workers that take turns with the same devices."""


def devices(draft: Draft) -> dict[str, tuple[int, ...]]:
    """The GPUs of each Worker; too few where a host has too few, which a check refuses."""
    ranks = inner_ranks(draft)
    turns = turns_by_worker(draft.turns)
    # A group of Workers on several hosts is on the first one's; a check refuses it.
    firsts = {next(w for w in u if w in ranks): u for u in (turns.get(w, (w,)) for w in ranks)}
    found: dict[str, tuple[int, ...]] = {}
    for host, here in workers_by_host(draft, firsts).items():
        units = [firsts[w] for w in here]
        found |= _given(units, ranks, len(draft.cluster.on(host).gpus))
    return {w: found[w] for w in ranks if w in found}


def inner_ranks(draft: Draft) -> dict[str, int]:
    """How many ranks each Worker has that computes with a Model, in running order."""
    found: dict[str, int] = {}
    for node in (n for n in draft.nodes if n.traits.computes):
        for worker in node.workers:
            found[worker] = max(found.get(worker, 1), node.layout.inner)
    return found


def _given(
    units: Iterable[Unit], ranks: Mapping[str, int], count: int
) -> dict[str, tuple[int, ...]]:
    if not count:
        return {}
    wide = {unit: max(ranks.get(w, 1) for w in unit) for unit in units}
    found: dict[str, tuple[int, ...]] = {}
    first = 0
    for unit in (unit for unit, width in wide.items() if width > 1):
        for worker in (w for w in unit if w in ranks):
            found[worker] = tuple(range(first, min(first + ranks[worker], count)))
        first += wide[unit]
    rest = range(first, count) or range(count)
    for i, unit in enumerate(unit for unit, width in wide.items() if width == 1):
        found |= dict.fromkeys((w for w in unit if w in ranks), (rest[i % len(rest)],))
    return found
