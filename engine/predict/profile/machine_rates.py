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


def measure_rates(cores: int) -> Device:
    """Measure this process's GPU, if it sees one, else one core and the host's memory."""
    import torch

    if torch.cuda.is_available():
        return _measure_gpu(torch)
    # Products of one core, which the formulas multiply by a node's threads; copies of all cores.
    torch.set_num_threads(1)
    operations = {dtype: _time_products(torch, dtype, "cpu", _SIDE) for dtype in _DTYPES}
    torch.set_num_threads(cores)
    catalogue_cpu = device(CPU)
    return Device(
        name=CPU,
        operations=operations,
        memory_rate=_time_copies(torch, "cpu"),
        link=catalogue_cpu.link,
        network=catalogue_cpu.network,
        source="measured: square products on one core, copies on all; links of the catalogue",
    )


def _measure_gpu(torch: Any) -> Device:
    """Named as in the catalogue, where that has its kind; its links are not measured."""
    name = torch.cuda.get_device_name(0)
    kind = kind_of(name)
    linked = device(kind or CPU)
    return Device(
        name=kind or name,
        operations={dtype: _time_products(torch, dtype, "cuda", 8 * _SIDE) for dtype in _DTYPES},
        memory=int(torch.cuda.get_device_properties(0).total_memory),
        memory_rate=_time_copies(torch, "cuda"),
        link=linked.link,
        network=linked.network,
        host_link=linked.host_link,
        source=f"measured on {name}: square products, copies",
    )


def _time_products(torch: Any, dtype: str, where: str, side: int) -> float:
    """Operations a second of a product of square matrices."""
    matrix = torch.ones(side, side, dtype=getattr(torch, dtype), device=where)
    return 2.0 * side**3 / _time_calls(torch, lambda: matrix @ matrix)


def _time_copies(torch: Any, where: str) -> float:
    """Bytes a second that are read and written as one tensor is copied to another."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2.0 * _COPIED / _time_calls(torch, lambda: target.copy_(source))


def _time_calls(torch: Any, work: Callable[[], Any]) -> float:
    """The median seconds of some calls, after one that does not count; few if they take long."""
    durations: list[float] = []
    for _ in range(1 + _REPEATS):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            # A GPU goes on computing when the call has returned.
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - begun)
        if len(durations) > 1 and sum(durations) >= _ENOUGH:
            break
    return median(durations[1:])
