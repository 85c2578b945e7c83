"""What the vLLM kernel needs of its process and refuses, without vLLM."""

from __future__ import annotations

import re

import pytest

from dataflow.errors import KernelError
from operators.kernels.vllm.startup import EngineSize, start_engine
from operators.vllm_needs import REQUIRED_ENVIRONMENT, VLLM

SIZE = EngineSize(slots=1, tokens=1, length=1, cache=1)


@pytest.mark.parametrize("name", REQUIRED_ENVIRONMENT)
def test_a_users_variable_with_which_the_engine_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in (*VLLM.environment, *VLLM.cpu_environment):
        monkeypatch.setenv(variable, VLLM.environment.get(variable, "1"))
    monkeypatch.setenv(name, "1")
    expected = f"expected {name}=0 for its vLLM engine, found {name}=1 in the environment."
    with pytest.raises(KernelError, match=re.escape(expected) + f" Fix: unset {name}"):
        start_engine("policy", "base", "float32", SIZE)
