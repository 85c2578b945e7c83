"""What runs inside of each of vLLM's workers: weights in place, and death with the engine's Worker.

Owns: the module's weights in one rank, names in shared memory. Does not own: which weights have to
come (weights.py), when (engine.py).

vLLM imports this module in each of its workers, before they load the model (worker_extension_cls).
On CPU vLLM packs the weights of linear layers for oneDNN and drops the originals, so that nothing
could be loaded afterwards. `keep_weights` prevents that, in one of two ways: `plain` computes with
the weights themselves, `packed` keeps them beside their packed form and packs them again after each
load. vLLM has no public setting for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import uuid
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any

import torch

from operators.kernels.torch.products import linear_product
from operators.kernels.vllm.engine_errors import NotesCause

Linear = str
LINEAR = "DATAFLOW_VLLM_LINEAR"
"""The variable that tells a rank's process which of the two: `plain` or `packed`."""

_PR_SET_PDEATHSIG = 1


def keep_weights() -> None:
    """Let vLLM keep the weights of its linear layers on CPU; once, before a model is built."""
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.layers.utils as utils
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding

    if torch.cuda.is_available() or hasattr(utils, "_packed_by_vllm"):
        return
    packs = utils._packed_by_vllm = utils.dispatch_cpu_unquantized_gemm  # type: ignore[attr-defined]

    def dispatch_plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear_product

    def dispatch_packed(layer: Any, remove_weight: bool) -> None:
        packs(layer, remove_weight=False)

    dispatch = dispatch_packed if os.environ.get(LINEAR) == "packed" else dispatch_plain
    for module in (utils, linear, embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            vars(module)["dispatch_cpu_unquantized_gemm"] = dispatch


def die_with_parent() -> None:
    """End a rank in a process of its own at once with the process that started it."""
    if not _has_own_process():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def note_why_it_does_not_start() -> None:
    """Let a rank in a process of its own note it for the engine's, which vLLM tells only to look
    into the rank's log.
    """
    if _has_own_process():
        logging.getLogger("vllm.v1.executor.multiproc_executor").addHandler(NotesCause())


def _has_own_process() -> bool:
    """Whether this rank is in another process than the engine that started it."""
    process = str(os.getpid())
    return os.environ.get("DATAFLOW_VLLM_PARENT", process) != process


class TrackedMemory(SharedMemory):
    """Shared memory that Python's resource tracker knows before it is there: the tracker unlinks it
    where its processes are killed. Python tells it afterwards.
    """

    def __init__(
        self, name: str | None = None, create: bool = False, size: int = 0, **how: Any
    ) -> None:
        if create and name is None:
            name = f"psm_{uuid.uuid4().hex}"
            resource_tracker.register(f"/{name}", "shared_memory")
        super().__init__(name, create, size, **how)


def leave_no_names() -> None:
    """Unlink the shared memory of ranks once all of them have mapped it: what has no name is freed
    with its last process, however that ends. vLLM unlinks it at a clean end at best. Until then the
    resource tracker knows the name, a process that outlives the Worker and its ranks.
    """
    import vllm.distributed.device_communicators.cpu_communicator as communicator
    import vllm.distributed.device_communicators.shm_broadcast as broadcast
    import vllm.distributed.parallel_state as state

    memory = communicator._CPUSHMDistributed
    queue = broadcast.MessageQueue
    if hasattr(queue, "_ready_by_vllm"):
        return
    named = memory.make_group_name
    joined = memory._init_cpu_shm
    ready = queue.wait_until_ready
    queue._ready_by_vllm = ready  # type: ignore[attr-defined]

    def without_colons(communicator: Any) -> str:
        """In the tracker's messages a colon ends a name."""
        return named(communicator).replace(":", "-")

    def join(self: Any) -> int:
        name = f"{self.group_name}_{self.communicator.rank}"
        resource_tracker.register(f"/{name}", "shared_memory")
        handle = joined(self)  # it ends when every rank has joined
        _unlink(name)
        resource_tracker.unregister(f"/{name}", "shared_memory")
        return handle

    def wait_until_ready(self: Any) -> None:
        ready(self)
        buffer = self.buffer
        if self._is_writer and buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False  # else it unlinks it again

    memory.make_group_name = staticmethod(without_colons)  # type: ignore[method-assign]
    memory._init_cpu_shm = join  # type: ignore[method-assign]
    queue.wait_until_ready = wait_until_ready  # type: ignore[method-assign]
    modules: tuple[Any, ...] = (broadcast, state)
    for module in modules:
        module.shared_memory = SimpleNamespace(SharedMemory=TrackedMemory)


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"/dev/shm/{name}")


die_with_parent()
note_why_it_does_not_start()
keep_weights()
leave_no_names()


class EngineRank:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    model_runner: Any

    def take(self, pieces: list[tuple[str, torch.Tensor]]) -> list[str]:
        """Load these weights; returns vLLM's names of those of its own that did not come."""
        model = self.model_runner.model
        with torch.no_grad():
            loaded = set(model.load_weights(iter(pieces)))
            for layer in model.modules():
                if hasattr(layer, "cpu_linear") and os.environ.get(LINEAR) == "packed":
                    import vllm.model_executor.layers.utils as utils

                    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return sorted({name for name, _ in model.named_parameters()} - loaded)

    def take_shared(self, path: str, manifest: list[tuple[str, str, list[int], int]]) -> list[str]:
        """`take`, of weights in a file of shared memory: (name, dtype, shape, offset in bytes)."""
        size = os.stat(path).st_size
        block = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        pieces: list[tuple[str, torch.Tensor]] = []
        for name, dtype, shape, offset in manifest:
            pieces.append((name, _view(block, dtype, shape, offset)))
        return self.take(pieces)

    def say_log_probs(self, mode: str) -> str:
        """What vLLM returns for the tokens of a prompt from now on; returns what it did so far."""
        config = self.model_runner.model_config
        before = config.logprobs_mode
        config.logprobs_mode = mode
        return before


def _view(block: torch.Tensor, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    count = int(torch.Size(shape).numel()) * kind.itemsize
    return block[offset : offset + count].view(kind).view(shape)
