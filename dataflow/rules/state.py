"""State: one writer each, a writer for every trainable one, heads that fit.

Owns: who may write and read a Model, followers, heads. Does not own: how old a version may be
(versions.py), loops without a State (liveness.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault, Origin
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node
from dataflow.rules.context import Context, line_of, place
from dataflow.schema import Logprobs, Reward, Values

_OF_MODELS = ("decode", "forward", "train", "evaluate")
"""Kinds of work whose States are Models."""


def check(context: Context) -> Iterator[Fault]:
    """States of the wrong kind, writers, followers, heads."""
    for node in context.graph.nodes:
        yield from _kinds(node)
        yield from _heads(node)
    for name, writers in context.writers.items():
        if len(writers) > 1:
            yield _two_writers(name, writers)
    for model in {m.name: m for m in reversed(context.models)}.values():
        yield from _trainable(context, model)
        yield from _follower(context, model)


def _kinds(node: Node) -> Iterator[Fault]:
    for param, state in node.states.items():
        if node.operator.work in _OF_MODELS and not isinstance(state, Model):
            where = f"{node.operator.name}.{param}"
            problem = f"expected a Model, found {type(state).__name__} {state.name!r}"
            yield Fault(
                rule="state",
                where=where,
                problem=problem,
                fix=f'Model("{param}", base)',
                origin=node.origin,
            )


def _two_writers(name: str, writers: tuple[Node, ...]) -> Fault:
    last = writers[-1].origin
    shown = [f"{n.name} ({line_of(n, last)})" for n in writers]
    count = "two" if len(writers) == 2 else str(len(writers))
    return Fault(
        rule="state",
        where=f"Model {name!r} has {count} writers",
        problem=f"{', '.join(shown[:-1])} and {shown[-1]}",
        fix="add the losses (a + 0.1 * b) or use two Models",
        origin=last,
    )


def _trainable(context: Context, model: Model) -> Iterator[Fault]:
    writers = context.writers.get(model.name, ())
    where = f"Model {model.name!r}"
    if model.trainable and not writers:
        readers = context.readers.get(model.name, ())
        origin = readers[0].origin if readers else _origin(context, model)
        problem = (
            f"read by {readers[0].name!r} ({line_of(readers[0], origin)})"
            if readers
            else "nothing reads it either"
        )
        loss = "value_loss(...)" if model.head == "scalar" else "clipped_policy_loss(...)"
        fix = f"sink train({model.name}, rollout, loss={loss}), or trainable=False"
        missing = f"{where} is trainable but no train node writes it"
        yield Fault(rule="state", where=missing, problem=problem, fix=fix, origin=origin)
    if writers and not model.trainable:
        problem = f"{writers[0].name} writes it, and it is "
        problem += f"a follower of {model.follows.name!r}" if model.follows else "not trainable"
        fix = f"Model({model.name!r}, base, trainable=True)"
        yield Fault(rule="state", where=where, problem=problem, fix=fix, origin=writers[0].origin)


def _follower(context: Context, model: Model) -> Iterator[Fault]:
    leader = model.follows
    if leader is None:
        return
    where = f"Model {model.name!r}"
    if leader.name not in context.trained and not leader.trainable:
        problem = f"it follows {leader.name!r}, which no train node writes"
        fix = f"train {leader.name!r}, or leave follows= out"
        yield Fault(
            rule="state", where=where, problem=problem, fix=fix, origin=_origin(context, model)
        )
    if (leader.base, leader.head) != (model.base, model.head):
        problem = (
            f"it copies the weights of {leader.name!r}, expected base {leader.base!r} and head"
            f" {leader.head!r}, "
        )
        problem += f"found {model.base!r} and {model.head!r}"
        fix = f"Model({model.name!r}, {leader.base!r}, head={leader.head!r}, follows={leader.name})"
        yield Fault(
            rule="state", where=where, problem=problem, fix=fix, origin=_origin(context, model)
        )


def _origin(context: Context, model: Model) -> Origin | None:
    for node in context.graph.nodes:
        if any(s is model or getattr(s, "follows", None) is model for s in node.states.values()):
            return node.origin
    return None


def _heads(node: Node) -> Iterator[Fault]:
    models = [s for s in node.states.values() if isinstance(s, Model)]
    for wanted, by, origin in _wanted_heads(node):
        for model in models:
            if model.head != wanted:
                problem = (
                    f"{by} needs a Model with head={wanted!r}, {model.name!r} has"
                    f" head={model.head!r}"
                )
                fix = f"Model({model.name!r}, base, head={wanted!r})"
                yield Fault(
                    rule="state", where=place(node), problem=problem, fix=fix, origin=origin
                )


def _wanted_heads(node: Node) -> Iterator[tuple[str, str, Origin | None]]:
    loss = node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        yield term.function.head, term.function.name, term.origin or node.origin
    if node.operator.traits.generates:
        yield "lm", "generation", node.origin
    elif node.operator.work == "forward" and node.schemas:
        made = node.schemas[0]
        if issubclass(made, Logprobs):
            yield "lm", node.operator.name, node.origin
        elif issubclass(made, (Values, Reward)):
            yield "scalar", node.operator.name, node.origin
