"""What this machine's processors reach: products and copies.

Owns: short measurements. Does not own: what models reach of them (fitting.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from engine.plan.cost.devices import CPU, Device, device, kind_of

_SIDE = 1024
"""Of the square matrices of a CPU; on a GPU eight times as many."""
_COPIED = 256 << 20
_REPEATS = 5
_ENOUGH = 2.0
"""Seconds of all calls: a core without instructions for bfloat16 takes two for one product."""
_DTYPES = ("float32", "bfloat16")


def measured_rates(cores: int) -> Device:
    """Of this process's GPU, if it sees one, else of one core and the host's memory."""
    import torch

    if torch.cuda.is_available():
        return _gpu(torch)
    torch.set_num_threads(1)
    operations = {dtype: _products(torch, dtype, "cpu", _SIDE) for dtype in _DTYPES}
    torch.set_num_threads(cores)
    known = device(CPU)
    return Device(
        name=CPU,
        operations=operations,
        memory_rate=_copies(torch, "cpu"),
        link=known.link,
        network=known.network,
        source="measured: square products on one core, copies on all; links of the catalogue",
    )


def _gpu(torch: Any) -> Device:
    """Named as in the catalogue, where that has its kind; its links are not measured."""
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    kind = kind_of(name)
    known = device(kind) if kind else None
    return Device(
        name=kind or name,
        operations={dtype: _products(torch, dtype, "cuda", 8 * _SIDE) for dtype in _DTYPES},
        memory=int(memory),
        memory_rate=_copies(torch, "cuda"),
        link=known.link if known else device(CPU).link,
        network=known.network if known else device(CPU).network,
        source=f"measured on {name}: square products, copies",
    )


def _products(torch: Any, dtype: str, where: str, side: int) -> float:
    """Operations a second of a product of square matrices."""
    one = torch.ones(side, side, dtype=getattr(torch, dtype), device=where)
    return 2.0 * side**3 / _seconds(torch, lambda: one @ one)


def _copies(torch: Any, where: str) -> float:
    """Bytes a second that are read and written as one tensor is copied to another."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2.0 * _COPIED / _seconds(torch, lambda: target.copy_(source))


def _seconds(torch: Any, work: Callable[[], Any]) -> float:
    """The median of some calls, after one that does not count; of few where they take long."""
    durations: list[float] = []
    while len(durations) <= _REPEATS and (len(durations) < 2 or sum(durations) < _ENOUGH):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - begun)
    return median(durations[1:])
