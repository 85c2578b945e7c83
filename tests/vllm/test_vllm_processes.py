"""What an engine leaves behind when its Worker dies: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vllm.conftest import KIND, TENSOR

OPENED = """
import sys, time
from pathlib import Path
from dataflow.kernel import Layout
from operators.kernels.vllm.generate import VllmGenerate
from tests.kit.kernels import open_kernel

layout = Layout(slots=8, inner=int(sys.argv[2]))
kernel = open_kernel(VllmGenerate(), sys.argv[1], layout=layout, max_tokens=8)
print("open", flush=True)
time.sleep(600)
"""


def children(process: int) -> set[int]:
    """All processes below this one."""
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | children(child)
    return found


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(KIND == "llama" and TENSOR == 1, reason="the same as with tied embeddings")
def test_ranks_die_with_their_worker(base: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OPENED, base, str(TENSOR)], stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            assert (
                "open" in iter(worker.stdout.readline, "").__next__() or "open\n" in worker.stdout
            )
            below = children(worker.pid)
            assert len(below) >= TENSOR if TENSOR > 1 else not below
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(10)
            until = time.monotonic() + 2
            while any(map(alive, below)) and time.monotonic() < until:
                os.sched_yield()
            assert not [each for each in below if alive(each)]
        finally:
            worker.kill()
