"""Operators that return what no such column can have.

Owns: their graphs. Does not own: how they are judged (data.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

_RETURNS = """
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import Rollout
from dataflow.user import Columns, operator
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.run_graphs import vowels


@operator()
def changed(rollout: Columns[Rollout]) -> Columns[Rollout]:
    column = rollout[{name!r}]
    values = column.values.copy()
    values[0] = {value}
    return rollout.set(**{{{name!r}: column.like(values)}})


def f(base: str, data: str) -> Graph:
    policy = Model("policy", base, trainable=True)
    rows = generate(policy, prompts(data, batch=2), n=2, max_tokens=2, name="rollout")
    again = changed(rows)
    loss = clipped_policy_loss(group_advantage(again, reward(vowels, again)))
    return Graph("bad", train(policy, again, loss=loss, lr=1e-3))
"""


def _returned(name: str, value: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        text = _RETURNS.format(name=name, value=value)
        path = folder / f"torture_{folder.name.replace('-', '_')}.py"
        path.write_text(text)
        return str(path)

    return write


def run_of(folder: Path, target: str, base: str) -> list[str]:
    """The command that trains one Step of a graph file."""
    words = ["run", target, "--base", base, "--data", f"{folder}/good.jsonl", "--steps", "1"]
    return [*words, "--runs", f"{folder}/runs", "--name", Path(target).stem, "--no-progress"]


RETURNED: Mapping[str, Callable[[Path], str]] = {
    "a mask of 2": _returned("completion_mask", "2"),
    "a log-prob above 0": _returned("sampler_logprobs", "0.5"),
    "a log-prob that is none": _returned("sampler_logprobs", "float('nan')"),
    "a negative id": _returned("completion_ids", "-1"),
    "an id outside the vocabulary": _returned("completion_ids", "2**30"),
    "a version from the future": _returned("version", "9"),
}
