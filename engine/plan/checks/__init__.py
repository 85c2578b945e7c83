"""The checks of a finished plan, in the order of their messages.

Owns: the list. Does not own: any check, a function from a Draft to what is wrong with it, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.plan.checks.devices import device_columns, turns
from engine.plan.checks.engines import engines
from engine.plan.checks.memory import memory
from engine.plan.checks.prompts import chunks, constant, groups
from engine.plan.checks.rows import kernels, producers, ratios
from engine.plan.checks.weights import aliases, routes
from engine.plan.checks.workers import hosts, workers, worlds
from engine.plan.draft import Draft

CHECKS: dict[str, Callable[[Draft], Iterator[str]]] = {
    "kernels": kernels,
    "producers": producers,
    "ratios": ratios,
    "groups": groups,
    "constant": constant,
    "workers": workers,
    "worlds": worlds,
    "engines": engines,
    "turns": turns,
    "hosts": hosts,
    "chunks": chunks,
    "aliases": aliases,
    "routes": routes,
    "device": device_columns,
    "memory": memory,
}
"""By the name in a PlanError."""
