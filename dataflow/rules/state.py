"""State: one writer each, a writer for every trainable one, heads that fit.

Owns: who may write and read a Model, followers, heads. Does not own: how old a version may be
(versions.py), loops without a State (liveness.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault, Origin
from dataflow.model import Model, Table
from dataflow.node import Node
from dataflow.rules.context import Context, line_of, loss_terms, name_node, node_models
from dataflow.schema import Logprobs, Reward, Values

OF_MODELS = ("decode", "forward", "train", "evaluate")
"""Kinds of work whose States are Models; of all others that have one it is a Table."""


def check_states(context: Context) -> Iterator[Fault]:
    """States of the wrong kind, writers, followers, heads."""
    for node in context.graph.nodes:
        yield from _check_kinds(node)
        yield from _check_heads(node)
    for name, writers in context.writers.items():
        if len(writers) > 1:
            yield _several_writers(name, writers)
    # Of two Models of one name, which names.py reports, the first one.
    models = {model.name: model for model in reversed(context.models)}
    for model in models.values():
        yield from _check_writers(context, model)
        yield from _check_follower(context, model)


def _fault(where: str, problem: str, fix: str, origin: Origin | None) -> Fault:
    return Fault(rule="state", where=where, problem=problem, fix=fix, origin=origin)


def _check_kinds(node: Node) -> Iterator[Fault]:
    for param, state in node.states.items():
        kind, fix = Table, f'Table("{param}")'
        if node.operator.work in OF_MODELS:
            kind, fix = Model, f'Model("{param}", base)'
        if not isinstance(state, kind):
            where = f"{node.operator.name}.{param}"
            problem = f"expected a {kind.__name__}, found {type(state).__name__} {state.name!r}"
            yield _fault(where, problem, fix, node.origin)


def _several_writers(name: str, writers: tuple[Node, ...]) -> Fault:
    last_origin = writers[-1].origin
    *others, last = (f"{writer.name} ({line_of(writer, last_origin)})" for writer in writers)
    count = "two" if len(writers) == 2 else str(len(writers))
    kind = type(next(iter(writers[-1].states.values()))).__name__
    where = f"{kind} {name!r} has {count} writers"
    fix = "add the losses (a + 0.1 * b) or use two Models"
    if kind == "Table":
        fix = "concat the rows, or use two Tables"
    return _fault(where, f"{', '.join(others)} and {last}", fix, last_origin)


def _check_writers(context: Context, model: Model) -> Iterator[Fault]:
    writers = context.writers.get(model.name, ())
    where = f"Model {model.name!r}"
    if model.trainable and not writers:
        readers = context.readers.get(model.name, ())
        if readers:
            origin = readers[0].origin
            problem = f"read by {readers[0].name!r} ({line_of(readers[0], origin)})"
        else:
            origin, problem = _find_line(context, model), "nothing reads it either"
        loss = "value_loss(...)" if model.head == "scalar" else "clipped_policy_loss(...)"
        fix = f"sink train({model.name}, rollout, loss={loss}), or trainable=False"
        yield _fault(f"{where} is trainable but no train node writes it", problem, fix, origin)
    if writers and not model.trainable:
        what = f"a follower of {model.follows.name!r}" if model.follows else "not trainable"
        problem = f"{writers[0].name} writes it, and it is {what}"
        fix = f"Model({model.name!r}, base, trainable=True)"
        yield _fault(where, problem, fix, writers[0].origin)


def _check_follower(context: Context, model: Model) -> Iterator[Fault]:
    leader = model.follows
    if leader is None:
        return
    where, origin = f"Model {model.name!r}", _find_line(context, model)
    if leader.name not in context.trained and not leader.trainable:
        problem = f"it follows {leader.name!r}, which no train node writes"
        yield _fault(where, problem, f"train {leader.name!r}, or leave follows= out", origin)
    if (leader.base, leader.head) != (model.base, model.head):
        problem = (
            f"it copies the weights of {leader.name!r}, expected base {leader.base!r} and head"
            f" {leader.head!r}, found {model.base!r} and {model.head!r}"
        )
        fix = f"Model({model.name!r}, {leader.base!r}, head={leader.head!r}, follows={leader.name})"
        yield _fault(where, problem, fix, origin)
    if leader.adapter != model.adapter:
        problem = (
            f"it copies the weights of {leader.name!r}, expected its adapter, {leader.adapter},"
            f" found {model.adapter}"
        )
        yield _fault(where, problem, "no adapter= beside follows=", origin)


def _find_line(context: Context, model: Model) -> Origin | None:
    """The line of the first node that has this Model, or one that follows it."""
    for node in context.graph.nodes:
        for state in node.states.values():
            if state is model or getattr(state, "follows", None) is model:
                return node.origin
    return None


def _check_heads(node: Node) -> Iterator[Fault]:
    for head, reader, origin in _list_needed_heads(node):
        for model in node_models(node):
            if model.head != head:
                problem = (
                    f"{reader} needs a Model with head={head!r}, {model.name!r} has"
                    f" head={model.head!r}"
                )
                fix = f"Model({model.name!r}, base, head={head!r})"
                yield _fault(name_node(node), problem, fix, origin)


def _list_needed_heads(node: Node) -> Iterator[tuple[str, str, Origin | None]]:
    """(head, what needs it, its line) of what computes with a node's Models."""
    for term in loss_terms(node):
        yield term.function.head, term.function.name, term.origin or node.origin
    if node.operator.traits.generates:
        yield "lm", "generation", node.origin
    elif node.operator.work == "forward" and node.schemas:
        output = node.schemas[0]
        if issubclass(output, Logprobs):
            yield "lm", node.operator.name, node.origin
        elif issubclass(output, (Values, Reward)):
            yield "scalar", node.operator.name, node.origin
