"""Plans of PPO with a critic on GPUs that are not here, as StreamRL trains it.

Owns: the graph, and which devices do what. Does not own: Models without weights (gpu_plans.py),
what is done with the plans (published_ours.py).

A row is generated for each prompt. The reference gives log-probs, the critic values, and the actor
its own log-probs. Without a lag and with one update a Step the planner leaves the last ones out,
since they are those of the update itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_plans import EACH, PlanFiles, host_of, right, write_inputs
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import plan
from engine.plan.cost.model_passes import Sizes
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from operators.advantage import gae, kl_in_reward
from operators.data import prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, decoupled_policy_loss, value_loss
from operators.reward import reward
from operators.train import train

TRAINED = ("train_policy", "train_critic")
_TRAINING_PASSES = 4
"""Of an update, in forward passes: forward, backward as two, and once more what is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoPlan:
    """What is planned. generating, training: GPUs of either side; tensor: ranks that split each
    matrix, of either; rows: prompts of a Step, with one answer each; longest: tokens of an answer;
    microbatch: tokens that are trained at once; stream: of a Step without a lag.
    """

    model: Sizes
    device: str
    generating: int
    training: int
    tensor: tuple[int, int]
    rows: int
    longest: int
    longest_prompt: int
    microbatch: int
    max_lag: int = 0
    stream: Literal["off", "ordered", "arrival"] = "off"

    @property
    def scored(self) -> tuple[str, ...]:
        """Nodes of forward passes."""
        return ("reference", "value", "old") if self.max_lag else ("reference", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSide:
    """How the devices that do not generate are used. scoring: devices of each node of forward
    passes; 0: those that train. tensor: ranks that split each matrix of what is trained; shard:
    whether what they have is split over the ranks with other rows. scored: tensor ranks of forward
    passes. tokens: of a micro-batch. may_wait: whether weights of forward passes wait on the host
    where memory asks for it.
    """

    scoring: int
    tensor: int
    scored: int
    tokens: int
    shard: bool = True
    may_wait: bool = True


def list_sides(asked: PpoPlan) -> Iterator[Sequence[TrainingSide]]:
    """The ways to use them, what is nearest to the published one first; those of one tier differ in
    how training is split. Forward passes with devices of their own have as many as their share of
    the work, at least those of one replica.
    """
    width, tokens = asked.tensor[1], asked.microbatch
    splits = _list_splits(width)
    whole = TrainingSide(scoring=0, tensor=width, scored=width, tokens=tokens, shard=False)
    yield (replace(whole, may_wait=False),)
    yield whole, *_share_sides(splits, tokens)
    # A row is never cut: less than the longest one takes no less memory.
    longest = asked.longest_prompt + asked.longest
    yield _share_sides(splits, longest)
    work = len(asked.scored) + _TRAINING_PASSES * len(TRAINED)
    share = asked.training / work
    yield _split_sides(asked, max(1, round(share)), 1, tokens)
    devices = max(1, round(share / width)) * width
    if devices * len(asked.scored) < asked.training:
        yield _split_sides(asked, devices, width, tokens)
        yield _split_sides(asked, devices, width, longest)


def _share_sides(splits: Sequence[int], tokens: int) -> Sequence[TrainingSide]:
    """One for each way to split training, with forward passes on the devices that train."""
    sides: list[TrainingSide] = []
    for split in splits:
        sides.append(TrainingSide(scoring=0, tensor=split, scored=split, tokens=tokens))
    return sides


def _split_sides(asked: PpoPlan, scoring: int, scored: int, tokens: int) -> Sequence[TrainingSide]:
    """One for each way to split training, with devices of their own for forward passes."""
    sides: list[TrainingSide] = []
    for split in _list_splits(asked.tensor[1]):
        sides.append(TrainingSide(scoring=scoring, tensor=split, scored=scored, tokens=tokens))
    return sides


def _list_splits(most: int) -> Sequence[int]:
    """Tensor ranks of training: those that were published, halves of them, and none."""
    splits = [most]
    while splits[-1] > 1:
        splits.append(splits[-1] // 2)
    return splits


def plan_ppo(folder: Path, asked: PpoPlan) -> Sequence[Plan]:
    """The plans of the first ways of list_sides of which some fit. Raises PlanError where none
    does: that of the last one.
    """
    count = -(-(asked.generating + asked.training) // EACH)
    files = write_inputs(folder, asked.model, asked.device, hosts=count)
    graph = _make_graph(files, asked)
    problem = PlanError("no way to use the devices")
    for sides in list_sides(asked):
        plans: list[Plan] = []
        for side in sides:
            try:
                plans.append(_plan_side(graph, files, asked, side))
            except PlanError as error:
                problem = error
        if plans:
            return plans
    raise problem


def _plan_side(graph: Graph, files: PlanFiles, asked: PpoPlan, side: TrainingSide) -> Plan:
    training = asked.training - side.scoring * len(asked.scored)
    if training % side.tensor:
        problem = f"{training} devices train, in shares of {side.tensor} tensor ranks"
        raise PlanError(f"expected whole shares, found {problem}. Fix: other tensor ranks.")
    ranks = training // side.tensor
    options = RunOptions(
        cluster=files.hosts,
        workers="apart",
        pin=_pin_nodes(asked, side),
        ranks=dict.fromkeys(TRAINED, ranks),
        tensor={
            "rollout": asked.tensor[0],
            **dict.fromkeys(TRAINED, side.tensor),
            **dict.fromkeys(asked.scored, side.scored),
        },
        shard=side.shard,
        microbatch=dict.fromkeys((*TRAINED, *asked.scored), side.tokens),
        kernel={"rollout": "vllm"},
        offload={} if side.may_wait else dict.fromkeys(asked.scored, "none"),
    )
    if asked.stream != "off":
        # Half a micro-batch of each rank: smaller parts begin sooner, and fill passes less. With a
        # lag all rows are there: the planner takes whole ones.
        part_tokens = 0 if asked.max_lag else side.tokens * ranks // 2
        options = replace(options, stream=asked.stream, part_tokens=part_tokens)
    planned = plan(graph, options)
    assert isinstance(planned, Plan)
    return planned


def _pin_nodes(asked: PpoPlan, side: TrainingSide) -> dict[str, str]:
    """Generation on the first devices, then training, then forward passes, node by node."""
    count = -(-(asked.generating + asked.training) // EACH)
    width = asked.tensor[0]
    engines = range(asked.generating // width)
    training = asked.training - side.scoring * len(asked.scored)
    ranks = ",".join(f"t{i}@{host_of(asked.generating + i, count)}" for i in range(training))
    pins = {"rollout": ",".join(f"g{i}@{host_of(i * width, count)}" for i in engines)}
    pins |= dict.fromkeys(TRAINED, ranks)
    first = asked.generating + training
    for name in asked.scored:
        replicas = range(side.scoring)
        own_pins = ",".join(f"{name}-{i}@{host_of(first + i, count)}" for i in replicas)
        pins[name] = own_pins or ranks
        first += side.scoring
    return pins


def _make_graph(files: PlanFiles, asked: PpoPlan) -> Graph:
    policy = Model("policy", files.base, trainable=True, dtype="bfloat16")
    critic = Model("critic", files.base, trainable=True, head="scalar", dtype="bfloat16")
    rollout = generate(
        policy,
        prompts(files.data, batch=asked.rows),
        n=1,
        max_tokens=asked.longest,
        max_prompt_tokens=asked.longest_prompt,
        max_lag=asked.max_lag,
        name="rollout",
    )
    reference = Model("reference", files.base, dtype="bfloat16")
    divergence = logprobs(reference, rollout, name="reference")
    value = values(critic, rollout, name="value")
    old = logprobs(policy, rollout, name="old")
    score = kl_in_reward(rollout, reward(right, rollout, name="score"), divergence, beta=0.05)
    advantage = gae(rollout, score, value, gamma=1.0, lam=0.95)
    loss = clipped_policy_loss(advantage, old=old)
    if asked.max_lag:
        loss = decoupled_policy_loss(advantage, proximal=old)
    how: dict[str, Any] = {"intake": "admission" if asked.max_lag else "exact"}
    actor = train(policy, rollout, loss=loss, lr=1e-6, **how)
    fit = value_loss(advantage, old=value, clip=0.2)
    return Graph("ppo", actor, train(critic, rollout, loss=fit, lr=1e-5, **how))
