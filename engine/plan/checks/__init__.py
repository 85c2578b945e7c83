"""The checks of a finished plan, in the order of their messages.

Owns: the list. Does not own: any check, a function from a Draft to what is wrong with it, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.plan.checks.devices import check_device_columns, check_turns
from engine.plan.checks.engines import check_engines
from engine.plan.checks.memory import check_memory
from engine.plan.checks.prompts import check_chunks, check_constant, check_groups
from engine.plan.checks.rows import check_kernels, check_producers, check_ratios
from engine.plan.checks.weights import check_aliases, check_offload, check_routes
from engine.plan.checks.workers import check_hosts, check_workers, check_worlds
from engine.plan.draft import Draft

CHECKS: dict[str, Callable[[Draft], Iterator[str]]] = {
    "kernels": check_kernels,
    "producers": check_producers,
    "ratios": check_ratios,
    "groups": check_groups,
    "constant": check_constant,
    "workers": check_workers,
    "worlds": check_worlds,
    "engines": check_engines,
    "turns": check_turns,
    "hosts": check_hosts,
    "chunks": check_chunks,
    "aliases": check_aliases,
    "routes": check_routes,
    "offload": check_offload,
    "device": check_device_columns,
    "memory": check_memory,
}
"""By the name in a PlanError."""
