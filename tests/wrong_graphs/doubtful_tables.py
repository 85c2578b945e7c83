"""Graphs with Tables that can be run and look wrong, one warning a function."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Table
from operators.generate import generate
from operators.tables import lookup, record
from tests.wrong_graphs.parts import graph, policy, source, updated


def lag_that_a_lookup_holds_back() -> Graph:
    lengths, prompt = Table("lengths"), source()
    weight = lookup(lengths, prompt)
    rollout = generate(policy, prompt, weight=weight, n=8, max_tokens=64, max_lag=1, name="rollout")
    return graph(updated(rollout), record(lengths, rollout))
