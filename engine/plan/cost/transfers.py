"""Seconds of what moves: weights of a version, rows between places, columns through functions.

Owns: the formulas. Does not own: which way there is between two places (engine/plan), how many
bytes rows have (column_bytes.py).
"""

from __future__ import annotations

import math

from engine.plan.cost.devices import Device, Link, Place
from engine.plan.cost.model_passes import Sizes, Time
from engine.plan.run_limits import FAN_OUT

HOST_DELAY = 2e-4
"""Seconds of a message between processes of one host: half to all of ZeroMQ's round trip of 4 kB,
0.3 ms on two cores of an AMD EPYC.
"""

NETWORK_DELAY = 5e-4
"""The same between hosts of one region: TCP over Ethernet, both ends' threads woken."""

MESSAGE = 1e-3
"""Seconds from what a Worker tells the coordinator until what follows begins, on the same Worker or
another: both ends' threads woken, and the coordinator's own time. 0.5 to 4 ms on two cores of an
AMD EPYC; a profile measures it.
"""

HASH_TRAFFIC = 6.0
"""Bytes that a device reads or writes for each byte that it hashes (engine/weights/device_hash.py):
it reads each twice, and writes and reads two products; less where products stay in its cache.
"""

START = 0.3
"""Seconds until a Worker that joins a run, forked from the template of its host, has begun to open
its kernels; of a small Model on two cores of an AMD EPYC, opened, 0.33 (benchmarks/starts.py).
"""

DISK_RATE = 2e9
"""Bytes of weights a second from a directory: a local NVMe disk, or files that are cached."""

COLUMN_RATE = 2e8
"""Bytes of columns a second that NumPy expressions go through: some ten passes over memory."""


def weights_time(
    model: Sizes, writer: Place, reader: Place, way: Link, *, readers: int = 1
) -> Time:
    """Time until so many replicas have a version: taken out of the writer, over the way, put into
    each.

    Each reader fetches by itself (a pull), each of its ranks its part of the tensors. The writer's
    ranks serve in parallel; one that serves several reader ranks serves them in turn.
    """
    size = float(model.version_bytes)
    copied = size / writer.devices / writer.device.memory_rate
    copied += size / reader.tensor / reader.device.memory_rate
    servers = max(1, writer.data * writer.tensor)
    turns = math.ceil(readers * reader.tensor / servers)
    link = turns * size / reader.tensor / way.rate
    return Time(seconds=copied + link + way.delay, memory=copied, link=link, latency=way.delay)


def count_rounds(hosts: int) -> int:
    """Count the rounds of loads, one after another, until so many hosts have a version that one
    has: each that has it passes it on to `FAN_OUT` more.
    """
    rounds, sources = 0, 1
    while sources <= hosts:
        sources *= 1 + FAN_OUT
        rounds += 1
    return rounds


def opening_seconds(model: Sizes, device: Device) -> float:
    """Seconds until a kernel has read a Model's weights, without what an engine does besides."""
    size = float(model.weight_bytes)
    seconds = size / DISK_RATE
    if device.is_gpu:
        seconds += size / device.link
    return seconds


def rows_time(
    size: float, way: Link, *, senders: int = 1, readers: int = 1, messages: int = 1
) -> Time:
    """Time of so many bytes of rows, which senders and readers divide among them evenly."""
    link = size / (way.rate * max(1, min(senders, readers)))
    latency = way.delay * messages
    return Time(seconds=link + latency, link=link, latency=latency)


def columns_time(size: float) -> Time:
    """Time of a column function of the vocabulary over its inputs of so many bytes."""
    return Time(seconds=size / COLUMN_RATE, memory=size / COLUMN_RATE)
