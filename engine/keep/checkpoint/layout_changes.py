"""What two plans of one run do differently that shows in the last bits of its numbers.

Owns: which numbers of a plan those are, and naming each that differs. Does not own: the plan
(engine/plan), when two are compared (engine/session/run_beginning.py).

A batched product's last bits depend on what is in the batch and on the kernel's threads, so chunks,
layouts and kernels count. Which Worker or host runs a node does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.keep.checkpoint.provenance import ProvenanceDifference

_OF_NODE = ("kernel", "chunks")
_OF_LAYOUT = (
    "data",
    "tensor",
    "context",
    "threads",
    "tokens",
    "inner",
    "cache_bytes",
    "part_tokens",
)


def layout_changes(old: str, new: str) -> list[ProvenanceDifference]:
    """What differs between two texts of plan.json, by node. An older plan that is not as this
    version writes it says nothing.
    """
    before, after = _numbers(old), _numbers(new)
    changes: list[ProvenanceDifference] = []
    for (where, what), new_text in after.items():
        old_text = before.get((where, what), new_text)
        if old_text != new_text:
            changes.append(ProvenanceDifference(where=where, what=what, old=old_text, new=new_text))
    return changes


def _numbers(text: str) -> dict[tuple[str, str], str]:
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(plan, dict):
        return {}
    if not isinstance(plan.get("phases"), list):
        return dict(_of_plan(plan, ""))
    numbers: dict[tuple[str, str], str] = {}
    for number, phase in enumerate(plan["phases"], start=1):
        numbers |= dict(_of_plan(phase, f"{number}/"))
    return numbers


def _of_plan(plan: Any, prefix: str) -> Iterator[tuple[tuple[str, str], str]]:
    if isinstance(plan, dict):
        nodes = plan.get("nodes")
    else:
        nodes = None
    for node in nodes if isinstance(nodes, list) else ():
        if not isinstance(node, Mapping):
            continue
        layout = node.get("layout")
        where = f"plan of {prefix}{node.get('name')}"
        for names, of in ((_OF_NODE, node), (_OF_LAYOUT, layout)):
            if isinstance(of, Mapping):
                yield from (((where, name), str(of[name])) for name in names if name in of)
