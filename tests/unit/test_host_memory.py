"""A process that computes on a CPU keeps the memory that it frees."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

KEPT = """
import sys
from pathlib import Path
import torch
from engine.plan.cost.machine import proc_bytes
from operators.kernels.torch.host_memory import keep_freed_memory

def resident():
    return proc_bytes(Path("/proc/self/status"), "VmRSS")

if sys.argv[1] == "keep":
    keep_freed_memory()
torch.ones(1)
before = resident()
tensor = torch.ones(6 << 20)
del tensor
print(resident() - before)
"""
"""Bytes that are still there after 24 MiB were filled and freed."""


def kept(way: str) -> int:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", KEPT, way], env=plain, capture_output=True, check=True, timeout=300
    )
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's mallopt")
def test_freed_memory_stays_with_the_process() -> None:
    assert kept("as it is") < 8 << 20 < 20 << 20 < kept("keep")
