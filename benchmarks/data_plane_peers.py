"""Ray and TransferQueue, for comparison with this project's channels, in their own environment.

Owns: creating that environment, running a peer there, the goals against it. Does not own: what a
peer does (ray_side.py), the batch, this project's own times (data_plane.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from statistics import median

from benchmarks.report import SideResult

PEERS = {
    "ray-numpy": "Ray, NumPy",
    "ray-arrow": "Ray, Arrow",
    "transferqueue": "TransferQueue",
}
GOALS = {
    ("ray-numpy", "4 kB"): 8.0,
    ("ray-numpy", "16 MB"): 4.0,
    ("transferqueue", "4 kB"): 25.0,
    ("transferqueue", "16 MB"): 50.0,
}
"""How many times as fast shm with one copy has to be."""
_SECONDS = 300
OURS = "shm, one copy"


def prepare() -> str:
    """Create the environment if it is missing; returns why that failed, or an empty string."""
    done = subprocess.run(
        ["benchmarks/ray_env.sh"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    return (
        "" if not done.returncode else (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    )


def measure(peer: str, sizes: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Median seconds for each size (bytes, rounds). Exits if the peer fails.

    What Ray writes into a home directory (an access token) and its sockets are removed afterwards.
    """
    command = [".venv-ray/bin/python", "-m", "benchmarks.ray_side", peer, json.dumps(sizes)]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        environment = os.environ | {
            "HOME": folder,
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{tail}")
    return {
        size: median(seconds) for size, seconds in json.loads(done.stdout.splitlines()[-1]).items()
    }


def results(
    found: Mapping[str, Mapping[str, float]], ours: Mapping[str, float]
) -> list[SideResult]:
    """Milliseconds for each peer and size, and how many times as fast shm with one copy is."""
    rows = [
        SideResult(name=f"{OURS}, by itself, {size}", value=1e3 * s, unit="ms")
        for size, s in ours.items()
    ]
    for peer, by_size in found.items():
        for size, seconds in by_size.items():
            rows.append(SideResult(name=f"{PEERS[peer]}, {size}", value=1e3 * seconds, unit="ms"))
            if size in ours:
                name = f"{size}, {PEERS[peer]} / {OURS}"
                rows.append(
                    SideResult(
                        name=name,
                        value=seconds / ours[size],
                        unit="x",
                        goal=GOALS.get((peer, size)),
                    )
                )
    return rows
