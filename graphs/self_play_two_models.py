"""Self-play of two Models: one writes tasks, the other answers; both are trained.

Use it when tasks are to get harder as the solver gets better.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from dataflow.schema import Prompt, Rollout
from dataflow.user import Columns, operator
from operators.advantage import add, baseline_advantage, group_advantage
from operators.data import prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import train


@operator()
def posed(task: Columns[Rollout]) -> Columns[Prompt]:
    """What the setter wrote, as a prompt for the solver.
    adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
    """
    return Columns.make(Prompt, like=task, prompt=list(task["completion"]))


@declares
def self_play_two_models(
    setter_base: str,
    solver_base: str,
    data: str,
    reward_fn: RewardFn,
    *,
    n: int = 8,
    batch: int = 64,
    max_tokens: int = 512,
    lr: Number = 1e-6,
    adapter: Adapter = None,
    eval_data: str | None = None,
    eval_every: int = 50,
) -> Graph:
    """The setter earns what the solver loses: tasks compete, and so do the answers to each task.

    Args:
        setter_base: model directory or hub name of the Model that writes tasks.
        solver_base: model directory or hub name of the Model that answers.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        reward_fn: a function with TRL's signature, module:function on the command line.
        n: answers to each prompt.
        batch: prompts per Step.
        max_tokens: longest answer.
        lr: learning rate, or a schedule of the Step.
        adapter: as lora(rank=16): only weights beside those of each base are trained; None: all.
        eval_data: held-out prompts, which the solver answers greedily; None: no evaluation.
        eval_every: Steps between evaluations; one comes before the first Step, one at the end.
    """
    setter = Model("setter", setter_base, trainable=True, adapter=adapter)
    solver = Model("solver", solver_base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    task = generate(setter, prompt, n=n, max_tokens=max_tokens, name="task")
    asked = posed(task)
    answer = generate(solver, asked, n=n, max_tokens=max_tokens, empty_prompt="drop", name="answer")
    score = reward(reward_fn, answer, name="score")
    solved = mean_over(score, task, name="solved")
    unsolved = add(solved, weights=[-1.0], name="unsolved")
    answers = clipped_policy_loss(baseline_advantage(answer, score, solved))
    tasks = clipped_policy_loss(group_advantage(task, unsolved))
    train_solver = train(solver, answer, loss=answers, lr=lr)
    train_setter = train(setter, task, loss=tasks, lr=lr)
    evaluation = held_out(solver, eval_data, reward_fn, every=eval_every, max_tokens=max_tokens)
    return Graph("self_play_two_models", train_solver, train_setter, *evaluation)
