"""Doubtful: valid graphs that look wrong. Warnings, each shown once by its name; with `--strict`,
errors.

Owns: what the graph and the footers of its data show. Does not own: what only a plan shows
(engine/plan/warnings.py) or only a run (engine/coordinator), who displays them.

A new one is a function from a Context to warnings, and its line in WARNINGS (rules/__init__.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeGuard

from dataflow.errors import GraphWarning
from dataflow.model import Model
from dataflow.node import Node
from dataflow.rules.context import (
    Context,
    Wire,
    data_name,
    describe_count,
    function_at,
    line_of,
    loss_terms,
    node_models,
    warning_at,
)
from dataflow.schema import Logprobs

_BETTER_TEACHER = "logprobs of a larger Model, or of one that was trained longer"


def large_batches(context: Context) -> Iterator[GraphWarning]:
    """A Step that takes more prompts than the data has."""
    for source in context.sources:
        batch, path = source.params.get("batch"), source.operator.data_rows
        if not path or not _is_whole(batch) or id(source) not in context.data:
            continue
        count_rows = function_at(path)
        rows = count_rows(source.params["data"], source.params.get("split"))
        if rows is not None and rows < batch:
            yield large_batch(source, rows)


def large_batch(source: Node, rows: int) -> GraphWarning:
    """The warning for a source whose batch is larger than its data."""
    batch = source.params["batch"]
    problem = (
        f"batch={batch} is larger than its {describe_count(rows, 'row')}: a Step has the same"
        " prompt several times, or fewer prompts where the run is one pass over the data"
    )
    where, fix = data_name(source), f"batch={max(rows, 1)}, or more data"
    return GraphWarning(
        rule="large_batch", where=where, problem=problem, fix=fix, origin=source.origin
    )


def greedy_groups(context: Context) -> Iterator[GraphWarning]:
    """Several answers that are all the same."""
    for node in context.graph.nodes:
        n, setting = node.params.get("n"), greedy_by(node)
        if setting and _is_whole(n) and n > 1:
            problem = f"greedy decoding ({setting}) gives each prompt {n} times the same answer"
            fix = "temperature=1.0, or n=1" if setting != "top_k=1" else "top_k=0, or n=1"
            yield warning_at(node, "greedy_group", problem, fix)


def greedy_by(node: Node) -> str:
    """The setting by which a generation takes the likeliest token; empty if it samples."""
    if not node.operator.traits.generates:
        return ""
    temperature, top_k = node.params.get("temperature"), node.params.get("top_k")
    if temperature == 0:
        return f"temperature={temperature}"
    return "top_k=1" if top_k == 1 else ""


def references_of_the_policy(context: Context) -> Iterator[GraphWarning]:
    """A divergence from the trained Model itself: about 0, whatever it does."""
    for node in context.graph.nodes:
        for wire in context.wires[id(node)]:
            if not issubclass(wire.port.schema, Logprobs):
                continue
            if wire.name in ("reference", "teacher") and not _is_unread(node, wire):
                yield from _check_reference(context, wire)
            if wire.name == "teacher":
                yield from _check_teacher(context, wire)


def _check_reference(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    for model in node_models(wire.port.node):
        if model.name not in context.writers:
            continue
        writer = context.writers[model.name][0]
        problem = (
            f"expected log-probs of a Model that stays as it is, found {model.name!r}, which"
            f" {writer.name} trains ({line_of(writer, wire.origin)}): the divergence from it is"
            " about 0"
        )
        if wire.name == "teacher":
            fix = _BETTER_TEACHER
        else:
            reference = f'logprobs(Model("reference", {model.base!r}), ...)'
            fix = f"{reference}, or a Model that follows {model.name!r}"
        yield wire.warning("self_reference", problem, fix)


def _check_teacher(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    """A teacher that stays what its student begins as."""
    students = {student.name: student for student in _find_students(context, wire)}
    for teacher in node_models(wire.port.node):
        if teacher.name in context.trained or teacher.name in context.carried:
            continue
        for student in students.values():
            if student.name in context.carried or student.base != teacher.base:
                continue
            problem = (
                f"expected a teacher that knows more than {student.name!r}, found {teacher.name!r}"
                f" at the same base, {teacher.base!r}: it tells {student.name!r} what it says"
                " already"
            )
            yield wire.warning("same_teacher", problem, _BETTER_TEACHER)


def _find_students(context: Context, wire: Wire) -> Iterator[Model]:
    """The trained Model, or those that wrote the rows which a teacher judges."""
    nodes = [wire.node]
    if wire.node.operator.work != "train":
        samples = context.samplers.of(wire.node.inputs[wire.row_set])
        nodes = list(chain.from_iterable(samples))
    for node in nodes:
        for model in node_models(node):
            if model.name in context.trained:
                yield model


def _is_unread(node: Node, wire: Wire) -> bool:
    """Whether the weight of a loss's port is the constant 0."""
    label = wire.key.partition(".")[0]
    for term in loss_terms(node):
        if term.label != label:
            continue
        params = dict(term.params)
        for port, parameter in term.function.zero:
            if port == wire.name and params.get(parameter) == 0:
                return True
    return False


def _is_whole(number: Any) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool)
