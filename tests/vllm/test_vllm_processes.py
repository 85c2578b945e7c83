"""What an engine leaves behind when its Worker dies: nothing."""

from __future__ import annotations

import subprocess

import pytest

from tests.kit.processes import ended, family, limited, start_python, wait_for
from tests.vllm.conftest import KIND, TENSOR

OPENED = """
import sys
from dataflow.kernel import Layout
from operators.kernels.vllm.generate import VllmGenerate
from tests.kit.kernels import open_kernel

layout = Layout(slots=8, inner=int(sys.argv[2]))
kernel = open_kernel(VllmGenerate(), sys.argv[1], layout=layout, max_tokens=8)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(KIND == "llama" and TENSOR == 1, reason="the same as with tied embeddings")
def test_ranks_die_with_their_worker(base: str) -> None:
    how = {"stdin": subprocess.PIPE, "stderr": None}
    with limited(start_python("-c", OPENED, base, TENSOR, **how)) as worker:
        wait_for(worker, "open")
        below = family(worker.pid)[1:]
        assert len(below) >= TENSOR if TENSOR > 1 else not below
        worker.kill()
        worker.wait()
        assert all(ended(process, 2.0) for process in below)
