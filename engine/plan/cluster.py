"""The machine that a plan is for.

Owns: detection of one host's cores, memory and GPUs. Does not own: what is done with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """cores: that this process may use. memory: bytes of the host. gpus: bytes of each GPU's memory."""

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()

    def describe(self) -> str:
        """`2 cores, 23.5 GiB, no GPU`."""
        gpus = (
            f"{len(self.gpus)} GPU ({', '.join(f'{g / 2**30:.0f} GiB' for g in self.gpus)})" if self.gpus else "no GPU"
        )
        return f"{self.cores} core{'s' * (self.cores != 1)}, {self.memory / 2**30:.1f} GiB, {gpus}"


def detect() -> Cluster:
    """This host, as the process sees it: its CPU affinity, its cgroup's memory limit, GPUs that nvidia-smi lists."""
    return Cluster(cores=len(os.sched_getaffinity(0)), memory=_memory(), gpus=_gpus())


def _memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def _gpus() -> tuple[int, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return tuple(int(line) * 2**20 for line in found.stdout.split() if line.isdigit()) if found.returncode == 0 else ()
