"""Unused: settings that change nothing. The graph is valid all the same.

Owns: lags without a trained Model or beyond that of rows above, intakes where no row lags, ports
whose parameter is left out and rewards of tokens of which only the sum is read, which are warned
of; ports with weight 0, which are only noted, as an algorithm may have them for other weights. Does
not own: unknown parameters (refused at the call), pruning (a pass of the planner).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import GraphWarning
from dataflow.graph import Graph
from dataflow.model import Buffer, State
from dataflow.node import Node
from dataflow.regions import find_written_tables
from dataflow.rules.context import (
    Context,
    Wire,
    line_of,
    list_read_models,
    loss_terms,
    name_node,
    warning_at,
)
from dataflow.rules.versions import staleness
from dataflow.schema import Episode, Reward, TokenReward


def unused_lags(context: Context) -> Iterator[GraphWarning]:
    """max_lag where no version can lag."""
    for node in context.graph.nodes:
        models = list_read_models(node)
        if not node.params.get("max_lag") or not models:
            continue
        if all(model.name not in context.trained for model in models):
            yield _changes_nothing(node, "max_lag", f"Model {models[0].name!r} is never trained")
        elif context.regions.of[node.name] == "evaluation":
            yield _changes_nothing(node, "max_lag", "an evaluation reads exactly one version")


def held_back_lags(context: Context) -> Iterator[GraphWarning]:
    """A generation that may lag, on rows of what may lag less: the least lag counts for all."""
    changing = context.trained | find_written_tables(context.graph)
    least: dict[int, Node] = {}
    for node in context.graph.nodes:
        above = [least[id(parent)] for parent in node.parents if id(parent) in least]
        lag = node.params.get("max_lag", 0)
        if node.operator.traits.generates and context.regions.of[node.name] == "stream":
            for holder in sorted(above, key=_lag_of)[:1]:
                if _lag_of(holder) < lag:
                    yield _held_back(node, holder)
        if any(state.name in changing for state in _list_read_states(node)):
            above.append(node)
        if above:
            least[id(node)] = min(above, key=_lag_of)


def _lag_of(node: Node) -> int:
    return node.params.get("max_lag", 0)


def _list_read_states(node: Node) -> list[State]:
    states = (node.states.get(param) for param in node.operator.reads)
    return [state for state in states if state is not None]


def _held_back(node: Node, holder: Node) -> GraphWarning:
    lag, less = _lag_of(node), _lag_of(holder)
    problem = (
        f"max_lag={lag} counts as {less}: it waits for the rows of {holder.name!r}"
        f" ({line_of(holder, node.origin)}), which has max_lag={less}"
    )
    return warning_at(node, "held_back", problem, f"max_lag={lag} in {holder.name!r}")


def unused_intakes(context: Context) -> Iterator[GraphWarning]:
    """A policy for rows that lag, where none lags."""
    stale = staleness(context)
    for node in context.graph.nodes:
        intake = node.params.get("intake", "exact")
        if intake != "exact" and not stale.get(node.name):
            yield _changes_nothing(node, f"intake={intake!r}", "no row may lag")


def unused_ports(context: Context) -> Iterator[GraphWarning]:
    """A port of a loss that is only read with a parameter, which is None."""
    for node in context.graph.nodes:
        for term in loss_terms(node):
            params = dict(term.params)
            for port, parameter in term.function.only_with:
                if f"{term.label}.{port}" in node.inputs and params[parameter] is None:
                    yield GraphWarning(
                        rule="unused",
                        where=term.function.name,
                        problem=f"{port}= changes nothing: it is only read with {parameter}=",
                        fix=f"{parameter}=0.2, or leave {port}= out",
                        origin=term.origin or node.origin,
                    )


def unused_token_rewards(context: Context) -> Iterator[GraphWarning]:
    """Rewards of single tokens, made of none of whole rows, of which only the sums are read."""
    for node in context.graph.nodes:
        is_shaping = any(issubclass(port.schema, Reward) for port in node.inputs.values())
        is_evaluation = context.regions.of[node.name] == "evaluation"
        # An environment gives rewards by turn, of which the sum may be all that is wanted.
        is_of_turns = any(issubclass(i.schema, Episode) for i in node.operator.inputs)
        if not _makes_token_rewards(node) or is_shaping or is_evaluation or is_of_turns:
            continue
        readers = list(_readers_of_tokens(context, node))
        if readers and not any(map(_reads_tokens, readers)):
            reader = readers[0].node
            problem = (
                f"{name_node(reader)} ({line_of(reader, node.origin)}) reads only the sum of its"
                " rewards, so that nothing is learnt of which tokens got them"
            )
            fix = "returns(rollout, score) or gae(...), or one number an answer: reward(fn, ...)"
            yield warning_at(node, "only_sum", problem, fix)


def _makes_token_rewards(node: Node) -> bool:
    return any(issubclass(schema, TokenReward) for schema in node.schemas)


def _readers_of_tokens(context: Context, maker: Node) -> Iterator[Wire]:
    """The inputs that read these rewards, also behind what hands them on token by token."""
    carriers = {id(maker)}
    for node in context.graph.nodes:
        for wire in context.wires[id(node)]:
            if id(wire.port.node) not in carriers or not issubclass(wire.port.schema, TokenReward):
                continue
            if _makes_token_rewards(node):
                carriers.add(id(node))
            elif node.operator.work not in ("select", "evaluate"):
                yield wire


def _reads_tokens(wire: Wire) -> bool:
    return wire.input.columns is None or "token_reward" in wire.input.columns


def _changes_nothing(node: Node, what: str, why: str) -> GraphWarning:
    """what: the parameter, or `parameter=value`."""
    parameter = what.partition("=")[0]
    problem = f"{what} changes nothing: {why}"
    return warning_at(node, "unused", problem, f"leave {parameter}= out")


def notes(context: Context) -> Iterator[str]:
    """Ports that are not read, one sentence each, the place first."""
    for node in context.graph.nodes:
        place = name_node(node)
        if node.origin:
            place = f"{node.origin} {place}"
        for key, why in _find_unread(node):
            yield f"{place}: {node.inputs[key].node.name!r} is not read: {why}"


def _find_unread(node: Node) -> Iterator[tuple[str, str]]:
    """(input, why) of each port of a loss whose weight is the constant 0."""
    for term in loss_terms(node):
        params = dict(term.params)
        for port, parameter in term.function.zero:
            key = f"{term.label}.{port}"
            if key in node.inputs and params.get(parameter) == 0:
                yield key, f"{term.function.name} has {parameter}={params[parameter]}"


def live_nodes(graph: Graph) -> set[int]:
    """Ids of the nodes that the sinks need, ports of weight 0 left out."""
    ids: set[int] = set()
    stack = list(graph.sinks)
    while stack:
        node = stack.pop()
        if id(node) not in ids:
            ids.add(id(node))
            unread = {key for key, _ in _find_unread(node)}
            stack += [port.node for key, port in node.inputs.items() if key not in unread]
            stack += [state.writer for state in node.states.values() if isinstance(state, Buffer)]
    return ids
