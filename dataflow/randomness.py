"""Counter-based random numbers: every draw is keyed by (seed, node, row key, position).

Owns: the only way in which a kernel draws. A draw depends on nothing else: not on the rows in the
same batch, order, process or a row's attempt. Does not own: torch generators; a kernel that needs
one seeds it from `row_seeds`.

The mixing function is splitmix64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195).
"""

from __future__ import annotations

import hashlib

import numpy as np

from dataflow.batch import Keys

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(bits: np.ndarray) -> np.ndarray:
    """splitmix64's last step, uint64; overflow is meant."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def stream_seed(seed: int, name: str) -> np.uint64:
    """One 64-bit seed for a named stream (a node, a shuffle) of a run."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def row_seeds(seed: int, name: str, keys: Keys) -> np.ndarray:
    """uint64 [rows]: one stream per row, for this node in this run."""
    with np.errstate(over="ignore"):
        seeds = np.full(len(keys), stream_seed(seed, name), dtype=np.uint64)
        for part in (keys.position, keys.sample, keys.attempt):
            seeds = _mix(seeds + _GOLDEN * (part.astype(np.uint64) + np.uint64(1)))
    return seeds


def uniform(seeds: np.ndarray, position: np.ndarray | int) -> np.ndarray:
    """float64 [rows] in [0, 1): the draw of each row's stream at `position` (one for all, or one
    per row).
    """
    with np.errstate(over="ignore"):
        counter = np.asarray(position, dtype=np.uint64) + np.uint64(1)
        bits = _mix(seeds + _GOLDEN * counter)
    # A float64 holds 53 bits.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
