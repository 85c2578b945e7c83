"""An operator that loses rows alone, as an episode that fails does, and graphs with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from dataflow.batch import Batch, Keys
from dataflow.graph import Graph
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.limits import choice, number
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Same
from dataflow.randomness import uniform
from dataflow.schema import Completion, Reward
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import policy_gradient_loss
from operators.train import evaluate, train
from tests.kit.run_graphs import rolled_out

Loses = Literal["rows", "sample 0", "prompt 1"]


class LossyReward:
    """Kernel of `lossy`: the length of each answer, but for rows that it loses."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self._session = session
        self._loses, self._share = node.params["loses"], node.params["share"]

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        lost = self._draw_lost_rows(chunk.keys)
        for key in chunk.keys.take(lost).rows():
            self._session.tombstone(key, "the environment raised", row_only=True)
        lengths = chunk.inputs["rollout"].ragged("completion_mask").lengths.astype(np.float32)
        yield Batch.make(chunk.keys.take(~lost), {"reward": lengths[~lost]}, Reward)

    def _draw_lost_rows(self, keys: Keys) -> np.ndarray:
        if self._loses == "sample 0":
            return keys.sample == 0
        if self._loses == "prompt 1":
            return keys.position == 1
        return uniform(self._session.row_seeds(keys), 0) < self._share

    def close(self) -> None:
        pass


LOSSY = Operator(
    path="tests.kit.lost_rows:LOSSY",
    name="lossy",
    work="host",
    rows=Same("rollout"),
    inputs=(Input(name="rollout", schema=Completion, columns=("completion_mask",)),),
    outputs=(Reward,),
    kernels={"host": "tests.kit.lost_rows:LossyReward"},
    limits={"loses": choice("rows", "sample 0", "prompt 1"), "share": number(0.0, 1.0, like=0.5)},
)


def lossy(
    rollout: Port[Completion], loses: Loses = "rows", share: float = 0.3, name: str = "score"
) -> Port[Reward]:
    params = {"loses": loses, "share": share}
    return Node(LOSSY, name, inputs={"rollout": rollout}, params=params).port()


def lossy_graph(folder: Path, loses: Loses = "rows", share: float = 0.3) -> Graph:
    """GRPO of four answers each, some of them lost, and an evaluation of which some are, too."""
    policy, rollout = rolled_out(folder, n=4)
    advantage = group_advantage(rollout, lossy(rollout, loses, share))
    questions = prompts(str(folder / "test.parquet"), name="questions")
    held_out = generate(policy, questions, n=2, max_tokens=6, name="answers")
    exam = evaluate(policy, lossy(held_out, share=share, name="mark"), every=1)
    return Graph(
        "lossy", train(policy, rollout, loss=policy_gradient_loss(advantage), lr=1e-3), exam
    )
