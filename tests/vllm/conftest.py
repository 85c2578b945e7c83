"""One engine for all tests of this folder: a process can have one.

They run in a process of their own (scripts/test-vllm): vLLM changes the process that it is in.
The variables choose the model (DATAFLOW_VLLM_KIND: qwen2 has tied embeddings, llama has not), the
tensor ranks (DATAFLOW_VLLM_TENSOR) and the slots (DATAFLOW_VLLM_SLOTS).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from dataflow.kernel import Layout
from dataflow.model import Model
from tests.kit.forked_ranks import forked_spawns
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.models import save_tiny

# Not in a process with other tests, nor where `make setup VLLM=1` has not been run.
apart = int(os.environ.get("TEST_WORKERS") or 0) < 2 and find_spec("vllm") is not None
collect_ignore_glob = [] if apart else ["test_*.py"]

KIND = os.environ.get("DATAFLOW_VLLM_KIND", "qwen2")
TENSOR = int(os.environ.get("DATAFLOW_VLLM_TENSOR", "1"))
SLOTS = int(os.environ.get("DATAFLOW_VLLM_SLOTS", "8"))
# Few tokens of a forward: a test of prompts that fill several then needs few prompts.
LAYOUT = Layout(slots=SLOTS, tokens=2048, inner=TENSOR)
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"), KIND, **SHAPE)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("other"), KIND, seed=1, **SHAPE)


@pytest.fixture
def tolerance() -> float:
    return 1e-4


@pytest.fixture(scope="session")
def modules(base: str) -> Iterator[dict[Any, Any]]:
    """The engine, as a Worker keeps it for all nodes of a Model."""
    from operators.kernels.vllm.generate import VllmGenerate

    session = FakeSession()
    # Ranks of Workers are spawned, as for users: test_vllm_runs.py.
    with forked_spawns():
        first = open_kernel(
            VllmGenerate(),
            Model("policy", base),
            session=session,
            layout=LAYOUT,
            max_tokens=64,
        )
    yield session.modules
    first.close()


@pytest.fixture
def make(base: str, modules: dict[Any, Any]) -> Any:
    """Opens a kernel on the engine, with the weights of `base` at version 0."""
    from operators.kernels.vllm.generate import VllmGenerate
    from tests.kit.generate_suite import weights_of

    def opened(**given: Any) -> VllmGenerate:
        session = FakeSession()
        session.modules = modules
        how = {"n": 1, "max_tokens": 12, "layout": LAYOUT} | given
        kernel = open_kernel(VllmGenerate(), base, session=session, **how)
        kernel.load(weights_of(base), 0)
        return kernel

    return opened
