"""Mistakes in a graph of one's own."""

from __future__ import annotations

from tests.mistakes import Mistake

IMPORTS = """from dataflow import Graph, Model
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from rewards import exact


"""
RIGHT = """def mine(base: str = "model", data: str = "train.jsonl") -> Graph:
    policy = Model("policy", base, trainable=True)
    prompt = prompts(data, batch=4)
    rollout = generate(policy, prompt, n=8, max_tokens=16, name="rollout")
    score = reward(exact, rollout, name="score")
    advantage = group_advantage(rollout, score, name="advantage")
    return Graph("mine", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-6))
"""
COMMAND = "dataflow check my_graph.py:mine"


def mistake(what: str, old: str, new: str, why: str) -> Mistake:
    """A right graph with one part of it another."""
    assert old in RIGHT, old
    text = IMPORTS + RIGHT.replace(old, new)
    return Mistake(what=what, why=why, command=COMMAND, files={"my_graph.py": text})


MISTAKES = (
    mistake(
        "A graph function that returns nothing",
        '    return Graph("mine", ',
        '    Graph("mine", ',
        "The last line returns the Graph.",
    ),
    mistake(
        "A Model that is not trainable",
        ", trainable=True",
        "",
        "Only `trainable=True` lets a train node write a Model.",
    ),
    mistake(
        "Groups of one answer",
        "n=8, ",
        "",
        "An advantage within a group compares several answers to one prompt.",
    ),
    mistake(
        "A score in place of an advantage",
        "clipped_policy_loss(advantage)",
        "clipped_policy_loss(score)",
        "Ports have types; a score becomes an advantage by an operator such as group_advantage.",
    ),
    mistake(
        "A name of TRL",
        "n=8, ",
        "num_generations=8, ",
        "[from-trl.md](from-trl.md) and [from-verl.md](from-verl.md) have all names side by side.",
    ),
    mistake(
        "A misspelt parameter",
        "max_tokens=16",
        "max_token=16",
        "The nearest name is in the message.",
    ),
    mistake(
        "A KL term without a reference",
        "clipped_policy_loss(advantage)",
        "clipped_policy_loss(advantage, beta=0.1)",
        "The reference's log-probs are a node of the graph, as everything that is computed.",
    ),
    mistake(
        "A missing parameter",
        ", lr=1e-6",
        "",
        "Nothing that changes what is learned has a hidden default.",
    ),
    mistake(
        "Two nodes of one name",
        'name="score"',
        'name="rollout"',
        "Names are how flags, metrics and messages find a node.",
    ),
    mistake(
        "A parameter without an annotation",
        'base: str = "model"',
        'base="model"',
        "The annotations of a graph function are its flags on the command line.",
    ),
)
