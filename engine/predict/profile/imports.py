"""What a Worker's process has taken once it has imported what it needs.

Owns: the imports, of Workers without and with torch kernels, and the sizes. Does not own: what a
plan makes of them (engine/plan/passes/processes.py), the process (child.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.plan.cost.machine import proc_bytes
from engine.plan.cost.process_memory import ImportedMemory

_STATUS = Path("/proc/self/status")
PLAIN = (
    "engine.run.worker_process.worker_channel",
    "engine.run.worker_process.worker_ranks",
    "engine.run.worker.newest_rows",
    "engine.run.worker.worker",
    "engine.run.worker_process.worker_process",
    "operators.kernels.data",
    "operators.kernels.host",
    "operators.kernels.scoring",
)
"""What every Worker's process imports (engine/run/worker_process/template_process.py), and kernels
that compute with no Model.
"""
WITH_TORCH = (
    *PLAIN,
    "operators.kernels.torch.forward",
    "operators.kernels.torch.generate",
    "operators.kernels.torch.train",
)


def measure_imports(modules: Sequence[str]) -> Iterator[ImportedMemory]:
    """Import these in this process, and tell what memory it has then."""
    for name in modules:
        importlib.import_module(name)
    yield ImportedMemory(
        anonymous=proc_bytes(_STATUS, "RssAnon"), files=proc_bytes(_STATUS, "RssFile")
    )
