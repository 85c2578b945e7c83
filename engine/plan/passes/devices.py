"""Which GPUs each Worker has that computes with a Model.

Owns: the numbers. Does not own: the Workers (place.py), who takes turns (the user's wish).

Ranks inside of one Worker need a GPU each, which nobody else has, but for Workers that take turns
with theirs. All others get one each, from the rest, and share from the first again if it runs out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.plan.draft import Draft
from engine.plan.worker_index import workers_by_host

Unit = tuple[str, ...]
"""A Worker, or Workers that take turns with the same devices."""
DevicesByWorker = dict[str, tuple[int, ...]]


def assign_devices(draft: Draft) -> DevicesByWorker:
    """Number the GPUs of each Worker; too few where a host has too few, which a check refuses."""
    ranks = count_inner_ranks(draft)
    turns = draft.turns_by_worker
    units_by_first: dict[str, Unit] = {}
    for worker in ranks:
        unit = turns.get(worker, (worker,))
        # A group of Workers on several hosts is on the first one's; a check refuses it.
        first = next(member for member in unit if member in ranks)
        units_by_first[first] = unit
    devices: DevicesByWorker = {}
    for host, firsts in workers_by_host(draft, units_by_first).items():
        units = [units_by_first[worker] for worker in firsts]
        gpu_count = len(draft.cluster.on(host).gpus)
        if gpu_count:
            devices |= _assign_gpus(units, ranks, gpu_count)
    return {worker: devices[worker] for worker in ranks if worker in devices}


def count_inner_ranks(draft: Draft) -> dict[str, int]:
    """How many ranks each Worker has that computes with a Model, in running order."""
    ranks: dict[str, int] = {}
    for node in draft.nodes:
        if node.traits.computes:
            for worker in node.workers:
                ranks[worker] = max(ranks.get(worker, 1), node.layout.inner)
    return ranks


def _assign_gpus(
    units: Iterable[Unit], ranks: Mapping[str, int], gpu_count: int
) -> DevicesByWorker:
    """Number the GPUs of one host: first the units that need several, then one for each other."""
    widths: dict[Unit, int] = {}
    for unit in units:
        widths[unit] = max(ranks.get(worker, 1) for worker in unit)
    devices: DevicesByWorker = {}
    first = 0
    for unit, width in widths.items():
        if width > 1:
            for worker in _computing_members(unit, ranks):
                end = min(first + ranks[worker], gpu_count)
                devices[worker] = tuple(range(first, end))
            first += width
    remaining = range(first, gpu_count) or range(gpu_count)
    narrow_units = [unit for unit, width in widths.items() if width == 1]
    for index, unit in enumerate(narrow_units):
        gpu = remaining[index % len(remaining)]
        devices |= dict.fromkeys(_computing_members(unit, ranks), (gpu,))
    return devices


def _computing_members(unit: Unit, ranks: Mapping[str, int]) -> list[str]:
    """The Workers of a unit that compute with a Model."""
    return [worker for worker in unit if worker in ranks]
