"""Rows that are segments of episodes: only to those that know that an episode has several.

Owns: which operators and losses take each row for a whole episode. Does not own: how many rows an
episode may have (the parameters of its generation), groups (groups.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.node import Node
from dataflow.operator import Concat, Expand, Reduce
from dataflow.rows import Domain
from dataflow.rules.context import Context, fault_at, line_of, loss_terms

_FIX = "segments=1 (overflow='stop'), or group_advantage(rollout, score), which adds them up"


def check_segments(context: Context) -> Iterator[Fault]:
    """Operators and losses to which a row is all of an episode, on rows that are a part of one."""
    for node in context.graph.nodes:
        if id(node) in context.doubtful:
            continue
        yield from _check_parts(context, node)
        for key, reader in _find_readers(node):
            port = node.inputs.get(key)
            domain = context.domains.of(port) if port is not None else None
            maker = None if domain is None else find_segment_maker(domain)
            if maker is None:
                continue
            problem = (
                f"{reader} takes each row for a whole episode; those of {maker.name!r}"
                f" ({line_of(maker, node.origin)}) are up to {maker.params['segments']} rows of one"
            )
            yield fault_at(node, "segments", problem, _FIX)
            break


def _check_parts(context: Context, node: Node) -> Iterator[Fault]:
    """A concat of segments and of other rows: the result could not say which are of one episode."""
    if not isinstance(node.operator.rows, Concat):
        return
    makers: list[Node | None] = []
    for port in node.inputs.values():
        domain = context.domains.of(port)
        makers.append(None if domain is None else find_segment_maker(domain))
    makes_segments = [maker for maker in makers if maker is not None]
    if makes_segments and len(makes_segments) < len(makers):
        maker = makes_segments[0]
        problem = (
            f"some of its parts are rows of episodes that may have several ({maker.name!r},"
            f" {line_of(maker, node.origin)}), others are not"
        )
        yield fault_at(node, "segments", problem, "segments=1, or two train nodes")


def find_segment_maker(domain: Domain) -> Node | None:
    """The generation whose episodes may have several of these rows; None if there is none."""
    origin = domain.rows_before_selection
    for part in origin.parts or (origin,):
        maker = part.rows_before_selection.node
        rows = maker.operator.rows
        if isinstance(rows, Expand) and rows.times and _is_several(maker.params.get(rows.times)):
            return maker
    return None


def _is_several(count: object) -> bool:
    return isinstance(count, int) and count > 1


def _find_readers(node: Node) -> Iterator[tuple[str, str]]:
    """What takes rows for episodes: the input with the rows, and its name in a message."""
    operator = node.operator
    if operator.whole_episodes:
        yield next(iter(node.inputs), ""), operator.name
    if isinstance(operator.rows, (Expand, Reduce)):
        yield operator.rows.of, operator.name
    for term in loss_terms(node):
        if term.function.scope == "group":
            yield term.on, term.function.name
