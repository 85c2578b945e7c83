"""Doubtful: valid graphs that look wrong. Warnings, each shown once by its name; with `--strict`,
errors.

Owns: what the graph and the footers of its data show. Does not own: what only a plan shows
(engine/plan/warnings.py) or only a run (engine/coordinator), who displays them.

A new one is a function from a Context to warnings, and its line in WARNINGS (rules/__init__.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from dataflow.errors import GraphWarning
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node
from dataflow.rules.context import Context, Wire, counted, data_name, function_at, line_of, place
from dataflow.schema import Logprobs


def large_batches(context: Context) -> Iterator[GraphWarning]:
    """A Step that takes more prompts than the data has."""
    for source in context.sources:
        batch, path = source.params.get("batch"), source.operator.data_rows
        if not path or not _whole(batch) or id(source) not in context.data:
            continue
        rows = function_at(path)(source.params["data"], source.params.get("split"))
        if rows is not None and rows < batch:
            yield large_batch(source, rows)


def large_batch(source: Node, rows: int) -> GraphWarning:
    """The warning for a source whose batch is larger than its data."""
    batch = source.params["batch"]
    problem = (
        f"batch={batch} is larger than its {counted(rows, 'row')}: a Step has the same prompt"
        " several times, or "
    )
    problem += "fewer prompts where the run is one pass over the data"
    fix = f"batch={max(rows, 1)}, or more data"
    return GraphWarning(
        rule="large_batch", where=data_name(source), problem=problem, fix=fix, origin=source.origin
    )


def greedy_groups(context: Context) -> Iterator[GraphWarning]:
    """Several answers that are all the same."""
    for node in context.graph.nodes:
        n, greedy = node.params.get("n"), greedy_by(node)
        if greedy and _whole(n) and n > 1:
            problem = f"greedy decoding ({greedy}) gives each prompt {n} times the same answer"
            fix = "temperature=1.0, or n=1" if greedy != "top_k=1" else "top_k=0, or n=1"
            yield GraphWarning(
                rule="greedy_group", where=place(node), problem=problem, fix=fix, origin=node.origin
            )


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
            log_probs = issubclass(wire.port.schema, Logprobs)
            if wire.name in ("reference", "teacher") and log_probs and not _unread(node, wire):
                yield from _self_reference(context, wire)
            if wire.name == "teacher" and log_probs:
                yield from _same_base(context, wire)


def _self_reference(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    for model in wire.port.node.states.values():
        if not isinstance(model, Model) or model.name not in context.writers:
            continue
        writer = context.writers[model.name][0]
        problem = (
            f"expected log-probs of a Model that stays as it is, found {model.name!r}, which"
            f" {writer.name} trains ({line_of(writer, wire.origin)}): the divergence from it is"
            " about 0"
        )
        fix = (
            f'logprobs(Model("reference", {model.base!r}), ...), or a Model that follows'
            f" {model.name!r}"
        )
        if wire.name == "teacher":
            fix = "logprobs of a larger Model, or of one that was trained longer"
        where, origin = wire.where, wire.origin
        yield GraphWarning(
            rule="self_reference", where=where, problem=problem, fix=fix, origin=origin
        )


def _same_base(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    """A teacher that stays what its student begins as."""
    students = {student.name: student for student in _students(context, wire)}
    for teacher in wire.port.node.states.values():
        if not isinstance(teacher, Model) or teacher.name in context.trained | context.carried:
            continue
        for student in students.values():
            if student.name in context.carried or student.base != teacher.base:
                continue
            problem = (
                f"expected a teacher that knows more than {student.name!r}, found {teacher.name!r}"
                f" at the same base, {teacher.base!r}: it tells {student.name!r} what it says"
                " already"
            )
            yield GraphWarning(
                rule="same_teacher",
                where=wire.where,
                problem=problem,
                fix="logprobs of a larger Model, or of one that was trained longer",
                origin=wire.origin,
            )


def _students(context: Context, wire: Wire) -> Iterator[Model]:
    """The trained Model, or those that wrote the rows which a teacher judges."""
    nodes = [wire.node]
    if wire.node.operator.work != "train":
        samples = context.samplers.of(wire.node.inputs[wire.row_set])
        nodes = [maker for makers in samples for maker in makers]
    for state in (state for node in nodes for state in node.states.values()):
        if isinstance(state, Model) and state.name in context.trained:
            yield state


def _unread(node: Node, wire: Wire) -> bool:
    """Whether the weight of a loss's port is the constant 0."""
    label, loss = wire.key.partition(".")[0], node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        if term.label == label and any(
            dict(term.params).get(p) == 0 for port, p in term.function.zero if port == wire.name
        ):
            return True
    return False


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
