"""What an engine and its ranks import, for a process that forks those of tests.

Not the module of ours that changes vLLM as it is imported (rank.py): engines and ranks import that
themselves, as they do for users.
"""

from __future__ import annotations

import importlib
import sys

from operators.vllm_needs import VLLM

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "operators.kernels.vllm.generate",
)
"""In a process of its own an engine takes 10 CPU seconds for these."""

# As it is imported vLLM reads how much it logs, and torch whether it compiles.
ENVIRONMENT = {**VLLM.environment, **VLLM.cpu_environment}

SPIN = 0.01
"""Seconds."""


def import_all() -> None:
    """Without Ray, which vLLM imports where it is installed: it reads the environment then."""
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in MODULES:
        importlib.import_module(name)
    del sys.modules["ray"]
    _spin_shortly()


def _spin_shortly() -> None:
    """Ranks look for the next message without a pause for a second after each, and here one core
    is all that they and the engine have.
    """
    conditions = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    conditions.SpinCondition.__init__.__defaults__ = (SPIN,)
