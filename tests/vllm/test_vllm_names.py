"""What the kernel uses of vLLM, much of which vLLM does not promise to keep: a version that lacks
some of it fails here, by name; and what it leaves in shared memory. No engine is started.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import signal
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from operators.vllm_needs import REQUIRED_ENVIRONMENT, VLLM
from tests.kit.nothing_left import require_nothing_in_shared_memory, shared_memory
from tests.kit.processes import call_python

FOLDER = Path("operators/kernels/vllm")

KILLED = """
import mmap, os, signal
from types import SimpleNamespace
import vllm.distributed.device_communicators.cpu_communicator as communicator
import vllm.distributed.device_communicators.shm_broadcast as broadcast

memory = communicator._CPUSHMDistributed

def die(*args, **how):
    os.kill(os.getpid(), signal.SIGKILL)

def join(self):
    open(f"/dev/shm/{self.group_name}_0", "x").close()
    die()

memory._init_cpu_shm = join
import operators.kernels.vllm.rank

os.environ["VLLM_DIST_IDENT"] = f"test-{os.getpid()}"
mmap.mmap = die
"""
"""A process that is killed before its ranks have mapped their memory."""
DIES = {
    "a queue": "broadcast.ShmRingBuffer(1, 1024, 4)",
    "a rank": "memory(SimpleNamespace(unique_name='tp:0', ranks=[0, 1], rank=0))",
}

ATTRIBUTES = (
    "vllm.LLM.collective_rpc",
    "vllm.LLM.sleep",
    "vllm.LLM.wake_up",
    "vllm.config:VllmConfig.use_v2_model_runner",
    "vllm.v1.engine.core_client:InprocClient.abort_requests",
    "vllm.v1.engine.core_client:InprocClient.add_request",
    "vllm.v1.engine.core_client:InprocClient.get_output",
    "vllm.v1.engine.core_client:InprocClient.shutdown",
    "vllm.v1.core.sched.scheduler:Scheduler.has_unfinished_requests",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.start_worker_monitor",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
    "vllm.distributed.device_communicators.shm_broadcast:shared_memory.SharedMemory",
    "vllm.distributed.parallel_state:shared_memory.SharedMemory",
)
"""Of modules and classes; after a colon what is in a module that the kernel does not import."""

FIELDS = {
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "finish_reason",
        "prefill_stats",
    ),
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.outputs:LogprobsLists": ("logprobs",),
    "vllm.v1.outputs:LogprobsTensors": ("logprobs",),
    "vllm.v1.metrics.stats:PrefillStats": ("num_cached_tokens", "num_computed_tokens"),
    "vllm.v1.sample.logits_processor.interface:BatchUpdate": ("removed", "added", "moved"),
}

ARGUMENTS = {
    "vllm.v1.engine.core_client:InprocClient.reset_prefix_cache": ("reset_running_requests",),
    "vllm.engine.arg_utils:EngineArgs": (
        "skip_tokenizer_init",
        "enforce_eager",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "kv_cache_memory_bytes",
        "enable_prefix_caching",
        "async_scheduling",
        "disable_log_stats",
        "logprobs_mode",
        "max_logprobs",
        "logits_processors",
        "worker_extension_cls",
        "tensor_parallel_size",
        "distributed_executor_backend",
        "enable_sleep_mode",
        "block_size",
        "dtype",
    ),
}


def named(path: str) -> Any:
    """What is at `module:a.b`, or at `vllm.a.b`."""
    module, _, names = path.partition(":")
    if not names:
        module, names = "vllm", path.removeprefix("vllm.")
    return reduce(getattr, names.split("."), importlib.import_module(module))


def imports() -> Iterator[str]:
    """`module:name`, or `module`, for all that the kernel's files import of vLLM."""
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from (f"{node.module}:{name.name}" for name in node.names)
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names if name.name.startswith("vllm"))


@pytest.mark.parametrize("path", sorted(set(imports())))
def test_what_the_kernel_imports_is_in_vllm(path: str) -> None:
    module, _, name = path.partition(":")
    assert not name or hasattr(importlib.import_module(module), name)
    importlib.import_module(module)


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_what_the_kernel_calls_is_in_vllm(path: str) -> None:
    assert named(path) is not None


@pytest.mark.parametrize("path", FIELDS)
def test_the_fields_that_the_kernel_reads_are_in_vllm(path: str) -> None:
    fields = set(dir(named(path))) | set(inspect.signature(named(path)).parameters)
    assert not set(FIELDS[path]) - fields


@pytest.mark.parametrize("path", ARGUMENTS)
def test_the_arguments_that_the_kernel_passes_are_in_vllm(path: str) -> None:
    assert not set(ARGUMENTS[path]) - set(inspect.signature(named(path)).parameters)


@pytest.mark.parametrize("what", DIES)
def test_memory_that_no_rank_has_mapped_leaves_no_name(what: str) -> None:
    before = shared_memory()
    done = call_python("-c", KILLED + DIES[what], timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    require_nothing_in_shared_memory(before)


def test_vllm_reads_the_variables_of_the_kernels_process() -> None:
    envs = importlib.import_module("vllm.envs")
    variables = {name for name in VLLM.environment if name.startswith("VLLM_")}
    assert not variables - set(envs.environment_variables)


def test_where_there_is_triton_vllm_takes_the_model_runner_that_the_kernel_is_written_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA there is; the other one refuses our logits processor."""
    config = importlib.import_module("vllm.config.vllm")
    config.envs.disable_envs_cache()  # an engine of this process has turned it on
    monkeypatch.setattr(config, "HAS_TRITON", True)
    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.delenv(name, raising=False)
    assert config.VllmConfig().use_v2_model_runner, "vLLM takes the other one by itself"
    monkeypatch.setenv(name, REQUIRED_ENVIRONMENT[name])
    assert not config.VllmConfig().use_v2_model_runner
