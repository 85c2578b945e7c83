"""Which machine and which installation this is, in words and as a digest.

Owns: what counts for measured seconds. Does not own: what a plan may use (engine/plan/cluster.py).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import xxhash

from dataflow.errors import PlanError

COST_FORMAT = 2
"""Raised whenever a formula of engine/plan/cost changes what fitted coefficients mean."""

PACKAGES = ("torch", "numpy", "pyarrow", "transformers", "vllm", "dataflow-rl")
"""Whose versions may change a measured time."""

MEMINFO = Path("/proc/meminfo")

_PATIENCE = 30.0
"""Seconds for nvidia-smi; the first call after a start of the machine loads the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """digest: of the words, which say it to a reader."""

    digest: str
    words: str


def make_fingerprint(words: str) -> Fingerprint:
    """Make the fingerprint of these words."""
    return Fingerprint(digest=xxhash.xxh3_128_hexdigest(words.encode()), words=words)


@cache
def this_machine() -> Fingerprint:
    """Name the processor, the cores that this process may use, memory, and GPUs with their driver.
    Raises PlanError where nvidia-smi fails.
    """
    cores, memory = len(os.sched_getaffinity(0)), _read_memory()
    host = f"{_read_processor()}, {cores} core{'s' * (cores != 1)}, {memory} GiB"
    return make_fingerprint(", ".join([host, *gpus()]))


@cache
def this_installation() -> Fingerprint:
    """Name the versions of Python, of those of PACKAGES that are installed, and of our formulas."""
    versions = [f"{name} {version}" for name, version in _read_versions(PACKAGES)]
    python = f"python {platform.python_version()}"
    return make_fingerprint(", ".join([python, *versions, f"cost format {COST_FORMAT}"]))


def gpus() -> list[str]:
    """Name each GPU: `NVIDIA H100 80GB HBM3 (driver 550.54)`; none without nvidia-smi. Raises
    PlanError where it fails.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"expected the names of GPUs, found: {error}"
        raise PlanError(f"nvidia-smi: {problem}. Fix: mend the driver, or hide it.") from error
    pairs = (line.rsplit(",", 1) for line in answer.stdout.splitlines() if "," in line)
    return [f"{name.strip()} (driver {driver.strip()})" for name, driver in pairs]


def _read_versions(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names and versions of those that are installed."""
    versions: list[tuple[str, str]] = []
    for name in names:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return versions


def _read_processor() -> str:
    """The name of its model; the architecture where the kernel tells none (some ARM)."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, text = line.partition(":")
        if key.strip() == "model name":
            return text.strip()
    return platform.machine()


def proc_bytes(path: Path, name: str) -> int:
    """Read a size that the kernel tells as `name: 123 kB`, in bytes. Raises KeyError without it."""
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, size = line.partition(":")
        if key == name:
            return int(size.split()[0]) << 10
    raise KeyError(name)


def _read_memory() -> int:
    """GiB of the machine, rounded: kernels keep back a little that differs between their
    versions.
    """
    return round(proc_bytes(MEMINFO, "MemTotal") / 2**30)
