"""A process that computes on a CPU keeps the memory that it frees."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from operators.kernels.torch.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2 << 20) for _ in range(16)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Page faults of the third time that 16 x 8 MiB are filled: 32,768 pages."""


def faults(way: str) -> int:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, way], env=plain, capture_output=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's mallopt")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults("keep") < 1000 < 10_000 < faults("as it is")
