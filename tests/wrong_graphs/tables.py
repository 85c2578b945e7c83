"""Tables that are written twice or never, read by nobody, or read on rows of other data."""

from __future__ import annotations

from typing import Any, cast

from dataflow.graph import Graph
from dataflow.model import Model, Table
from dataflow.node import Node, Port
from dataflow.schema import Prompt, Rollout
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.tables import lookup, record
from operators.train import evaluate
from tests.wrong_graphs.parts import BASE, exact, graph, policy, sampled, source, updated

lengths = Table("lengths")


def weighed(prompt: Port[Prompt], table: Table = lengths) -> Port[Rollout]:
    """Answers to prompts that a Table weighs."""
    weight = lookup(table, prompt)
    return generate(policy, prompt, weight=weight, n=8, max_tokens=64, name="rollout")


def recorded(rollout: Port[Rollout], *records: Node) -> Graph:
    return graph(updated(rollout), *records)


def table_that_nobody_writes() -> Graph:
    return recorded(weighed(source()))


def table_that_nobody_reads() -> Graph:
    rollout = weighed(source())
    return recorded(rollout, record(lengths, rollout), record(Table("other"), rollout))


def table_with_two_writers() -> Graph:
    rollout = weighed(source())
    second = record(lengths, rollout, column="prompt_ids", name="second")
    return recorded(rollout, record(lengths, rollout), second)


def table_of_texts() -> Graph:
    rollout = weighed(source())
    return recorded(rollout, record(lengths, rollout, column="completion"))


def table_of_a_column_that_nothing_has() -> Graph:
    rollout = weighed(source())
    return recorded(rollout, record(lengths, rollout, column="lenght"))


def lookup_of_rows_of_other_data() -> Graph:
    rollout = weighed(source())
    other = prompts("data/test.parquet", name="other")
    weight = lookup(lengths, other, name="lookup_of_other")
    held = generate(policy, other, weight=weight, max_tokens=64, name="held")
    evaluation = evaluate(policy, reward(exact, held), every=10)
    return recorded(rollout, record(lengths, rollout), evaluation)


def model_for_a_table() -> Graph:
    rollout = sampled()
    return recorded(rollout, record(cast(Any, Model("judge", BASE)), rollout))


def table_of_an_unknown_statistic() -> Graph:
    rollout = sampled()
    return recorded(rollout, record(Table("lengths", statistic=cast(Any, "median")), rollout))


def port_for_a_table() -> Graph:
    rollout = sampled()
    return recorded(rollout, record(cast(Any, rollout), rollout))


def lookup_with_a_negative_lag() -> Graph:
    prompt = source()
    weight = lookup(lengths, prompt, max_lag=-1)
    rollout = generate(policy, prompt, weight=weight, n=8, max_tokens=64, name="rollout")
    return recorded(rollout, record(lengths, rollout))
