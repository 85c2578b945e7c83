"""Graphs and runs whose memory runs out for real: by a limit on the addresses of their process."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.model import Model
from dataflow.schema import Advantage
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import train
from tests.kit.run_graphs import vowels

ROOM = 2 << 30
"""Bytes that a limited process may take more than it has."""
BYTES = 192 << 20
"""That a graph takes for each token."""
_CALLS = [0]
"""Of `hungry`, in this process."""


def limit_memory(room: int = ROOM) -> None:
    """Let this process take so many bytes more, and no others."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def take(nbytes: int) -> Any:
    """Memory as a computation takes it. It is not written, so that a machine need not have it."""
    import torch  # reward children import this file, and should start fast

    return torch.empty(nbytes, dtype=torch.uint8)


@loss(scope="token")
def hungry(
    now: Now,
    advantage: Tensors[Advantage],
    *,
    rank: int,
    call: int,
    nbytes: int,
    in_forward: bool = False,
) -> Terms:
    """Takes nbytes for each token; one rank has little memory from so many calls on. in_forward: it
    is the model's forward that takes them, of that rank from then on.
    """
    import torch.distributed as dist

    own_rank = dist.get_rank() if dist.is_initialized() else 0
    if own_rank == rank:
        if _CALLS[0] == call:
            limit_memory()
            if in_forward:
                take_in_forward(nbytes)
        _CALLS[0] += 1
    assert now.logprobs is not None
    scratch = None if in_forward else take(nbytes * len(now.logprobs))
    terms = Terms(-now.logprobs * advantage["advantage"])
    del scratch
    return terms


def take_in_forward(nbytes: int) -> None:
    """Have each forward of training take so much for each token, before it computes."""
    from operators.kernels.torch.loss_backward import LossBackward

    ask = LossBackward._ask

    def taking(self: Any, completions: Any, packed: Any, *others: Any) -> Any:
        scratch = take(nbytes * len(packed.tokens))
        numbers = ask(self, completions, packed, *others)
        del scratch
        return numbers

    LossBackward._ask = taking  # type: ignore[method-assign]


def hungry_graph(
    folder: Path, *, rank: int = -1, call: int = 0, minibatches: int = 2, in_forward: bool = False
) -> Graph:
    """GRPO whose loss takes memory for each token of a micro-batch."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    prompt = prompts(str(folder / "train.parquet"), batch=4)
    rollout = generate(policy, prompt, n=4, max_tokens=6, name="rollout")
    score = reward(vowels, rollout, name="score")
    advantage = group_advantage(rollout, score, name="advantage")
    settings = {"rank": rank, "call": call, "nbytes": BYTES, "in_forward": in_forward}
    objective = hungry(advantage, **settings)
    sink = train(policy, rollout, loss=objective, lr=1e-3, minibatches=minibatches)
    return Graph("hungry", sink)
