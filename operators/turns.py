"""Turns: rewards of the turns of episodes, and turns as rows of their own.

Owns: the declarations. Does not own: the formulas (turn_formulas.py), the kernels
(kernels/turn_rewards.py, kernels/transitions.py), episodes (interact.py).
"""

from __future__ import annotations

from dataflow.limits import whole
from dataflow.node import Node, Port
from dataflow.operator import Expand, Input, Operator, declares
from dataflow.schema import (
    Episode,
    TokenReward,
    Transition,
    TruncatedEpisode,
    TruncatedTransition,
)
from dataflow.user import column_operator
from operators import turn_formulas as formulas

TURN_REWARD = column_operator(
    formulas.turn_reward,
    "operators.turns:TURN_REWARD",
    name="turn_reward",
    columns={"episode": ("completion_mask", "turn_end", "turn_reward", "final_reward")},
    kernel="operators.kernels.turn_rewards:TurnRewards",
)

TRANSITIONS = Operator(
    path="operators.turns:TRANSITIONS",
    name="transitions",
    work="host",
    rows=Expand("episode", "max_turns"),
    inputs=(
        Input(
            name="episode",
            schema=Episode,
            columns=(
                "prompt_ids",
                "completion_ids",
                "completion_mask",
                "sampler_logprobs",
                "sampler_mass",
                "version",
                "finish",
                "turn_end",
                "turn_reward",
                "final_reward",
            ),
        ),
    ),
    outputs=(Transition,),
    decodes="episode",
    kernels={"host": "operators.kernels.transitions:Transitions"},
    limits={"max_turns": whole(1, like=8)},
    repeats=("max_turns",),
)


@declares
def turn_reward(episode: Port[Episode], *, name: str = "turn_reward") -> Port[TokenReward]:
    """The rewards that an episode's environment gave: each turn's on the last token that the turn
    wrote, the final one on the last of all.

    `reward` is their sum. A turn without a reward counts nothing, and an episode without any has
    reward 0, as has one that wrote no token; the metric reward/turn/none is the share of rows
    without any, so 1 where the environment gives none. Beside a function's: `add(turn_reward(e),
    reward(fn, e))`. `returns` and `gae` discount over written tokens alone; `group_advantage` reads
    the sum.
    """
    return Node(TURN_REWARD, name, inputs={"episode": episode}).port()


@declares
def transitions(
    episode: Port[Episode], *, max_turns: int, name: str = "transitions"
) -> Port[Transition]:
    """A row for each turn of each episode: what stood before it, what it wrote, its reward.

    prompt_ids: all tokens before the first one that the turn wrote; completion_ids: those that it
    wrote, with their mask, log-probs and versions, so that a critic and a policy loss read a turn
    as any row (ArCHer, arXiv:2402.19446). reward: the turn's, 0 without one, in the last turn
    together with the episode's final one. The state after a turn is the next row's prompt: the rows
    of an episode (`episode_id`) are adjacent, in the order of `turn`, and the last is `done`.

    max_turns: as in the episode's `interact`; each episode has so many places for rows, and those
    of turns that it did not take are given up one by one. An episode with more turns is an error.
    The rows of a prompt stand for several states: a baseline of their group means little. A
    function of `reward` on these rows gets the data's prompt, not what stood before a turn.
    """
    schema = Transition
    if isinstance(episode, Port) and issubclass(episode.schema, TruncatedEpisode):
        schema = TruncatedTransition
    params = {"max_turns": max_turns}
    inputs = {"episode": episode}
    return Node(TRANSITIONS, name, inputs=inputs, params=params, schemas=(schema,)).port()
