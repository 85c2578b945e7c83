"""Places that the user asked for, as limits of the search.

Owns: which Workers a pinned node's group has, and why wishes leave nothing to search. Does not own:
the wishes (engine/plan/placement.py), whether they can be met (passes/placement_problems.py).

A pinned node has as many replicas or ranks as it has Workers. Others may come to it, and nodes that
are pinned to other Workers never do. A group's members use its first Workers: so pins of one group
are the beginnings of one list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from engine.plan.draft import Draft
from engine.plan.placement import Placing

Workers = tuple[str, ...]


def why_all_is_placed(draft: Draft) -> str:
    """The wish that leaves nothing to search; empty if there is none."""
    placing = draft.placing
    if placing.search == "off":
        return "--search off"
    if placing.inproc:
        return "all is in this process (--inproc)"
    if placing.workers != "auto":
        return f"--workers {placing.workers} says where nodes are"
    wishes: Mapping[str, object] = {
        "--turns": placing.turns,
        "--pin (hosts)": placing.hosts,
        "a range of --replicas": placing.least,
        "--context": placing.context,
    }
    asked = [flag for flag, wish in wishes.items() if wish]
    return f"{', '.join(asked)} says where nodes are" if asked else ""


def find_pinned_groups(placing: Placing, names: Sequence[str]) -> dict[str, Workers] | None:
    """The Workers of the group of each pinned node of these: of pins that share some the longest.
    None where such pins are not the beginnings of one list, as no search says that.
    """
    pins = {name: placing.pin[name] for name in names if name in placing.pin}
    groups = dict(pins)
    for one, other in combinations(pins, 2):
        if set(pins[one]).isdisjoint(pins[other]):
            continue
        shorter, longer = sorted((pins[one], pins[other]), key=len)
        if longer[: len(shorter)] != shorter:
            return None
        for name in (one, other):
            groups[name] = max(groups[name], longer, key=len)
    return groups


def join_together(placing: Placing, searched: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """What stays of `--together` where searched nodes have been placed: of each group one of these
    with all nodes that are not searched, which follow it.
    """
    kept_groups: list[tuple[str, ...]] = []
    for group in placing.together:
        placed = [name for name in group if name in searched]
        followers = [name for name in group if name not in searched]
        if followers:
            kept_groups.append((*placed[:1], *followers))
    return tuple(kept_groups)
