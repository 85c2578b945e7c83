"""How vLLM is started: in which environment, with which settings, of which size.

Owns: both, and the refusal of an environment in which the engine cannot run. Does not own: the
engine once it has started (engine.py), what happens in its ranks (rank.py).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from dataflow.errors import KernelError
from operators.kernels.vllm.engine_errors import VllmErrors, noted_causes
from operators.vllm_needs import REQUIRED_ENVIRONMENT, VLLM

BLOCK = 32
"""Tokens of a block of the KV cache on CPU: a prompt is shared up to its last whole block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """slots: rows at once. tokens: of one forward. length: of a row. cache: bytes of keys and
    values. tensor: ranks. threads: of each rank.
    """

    slots: int
    tokens: int
    length: int
    cache: int
    tensor: int = 1
    threads: int = 1


def start_engine(model: str, base: str, dtype: str, size: EngineSize, adapter_rank: int = 0) -> Any:
    """A vLLM of this Model, whose base is a directory. adapter_rank: up to which rank it has room
    for one adapter; 0: for none. Raises KernelError if the environment says what the kernel cannot
    run with.
    """
    cuda = torch.cuda.is_available()
    _set_environment(model, cuda=cuda)
    torch.set_num_threads(size.threads)
    set_threads = torch.set_num_threads  # vLLM replaces it by one that does nothing
    from vllm import LLM

    import operators.kernels.vllm.rank as _  # noqa: F401  before vLLM builds the model

    _quieten()
    instead = "--kernel NODE=torch, or a base that vLLM takes"
    with noted_causes() as noted, VllmErrors(model, "vLLM to start", [], instead, noted):
        llm = LLM(
            model=base,
            dtype=dtype,  # type: ignore[arg-type]
            skip_tokenizer_init=True,
            enable_sleep_mode=cuda,
            block_size=None if cuda else BLOCK,  # None: vLLM chooses
            enforce_eager=not cuda,
            max_num_seqs=size.slots,
            max_num_batched_tokens=max(size.tokens, size.slots),
            max_model_len=size.length,
            kv_cache_memory_bytes=size.cache,
            enable_prefix_caching=True,
            async_scheduling=False,
            disable_log_stats=True,
            logprobs_mode="processed_logits",
            max_logprobs=2,
            logits_processors=["operators.kernels.vllm.sampling_processor:Keyed"],
            worker_extension_cls="operators.kernels.vllm.rank.EngineRank",
            tensor_parallel_size=size.tensor,
            distributed_executor_backend="mp" if size.tensor > 1 else None,
            **_describe_room(adapter_rank),
        )
    torch.set_num_threads = set_threads
    return llm


def _describe_room(adapter_rank: int) -> dict[str, Any]:
    """vLLM's settings for one adapter of at most this rank; none for rank 0."""
    if adapter_rank == 0:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": adapter_rank}


def rank_processes(llm: Any) -> list[Any]:
    """The processes of its tensor ranks, if they have processes of their own."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return [worker.proc for worker in executor.workers]


def _set_environment(model: str, *, cuda: bool) -> None:
    """Set what vLLM and torch read as they are imported, and what their ranks read. What the user
    has set stays.
    """
    variables = dict(VLLM.environment)
    if not cuda:
        variables |= VLLM.cpu_environment
    for name, default in variables.items():
        os.environ.setdefault(name, default)
    _require_environment(model)
    os.environ["DATAFLOW_VLLM_PARENT"] = str(os.getpid())
    import torch._dynamo.config as dynamo

    dynamo.disable = dynamo.disable or not cuda


def _quieten() -> None:
    """Keep out of the log what hides the error there. By filters: vLLM sets levels as it starts."""
    least_levels = {
        # It warms a chat template up, for which it would need a tokenizer: a warning of 20 lines.
        "vllm.renderers.base": logging.ERROR,
        # Where a call fails it logs its whole configuration: 100 lines, after the error.
        "vllm.logging_utils.dump_input": logging.CRITICAL,
    }
    for name, least in least_levels.items():
        logging.getLogger(name).addFilter(lambda record, least=least: record.levelno >= least)


def _require_environment(model: str) -> None:
    """Raise KernelError where a variable that the user has set forbids the engine."""
    for name, required in REQUIRED_ENVIRONMENT.items():
        if os.environ[name] != required:
            raise KernelError(
                f"Model {model!r}: expected {name}={required} for its vLLM engine, found"
                f" {name}={os.environ[name]} in the environment. Fix: unset {name}."
            )
