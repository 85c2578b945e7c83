"""Which phase a node's name is of.

Owns: that look-up, and its error. Does not own: what is done with the node (peek.py). It imports
nothing that runs kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataflow.errors import Fault, GraphError, nearest_or_all
from dataflow.graph import Graph, Phase
from dataflow.program import AnyGraph, numbered_name, numbered_phases


def find_phase(graph: AnyGraph, node: str) -> tuple[Graph, str]:
    """Find the graph of the only phase that has this node, or of the one that is named before it by
    its graph's name or its number; also returns the node's name there. Raises GraphError.
    """
    if isinstance(graph, Graph):  # a name in it may have a slash
        graph.node(node)  # raises with the names that there are
        return graph, node
    prefix, slash, name = node.rpartition("/")
    phases = list(numbered_phases(graph))
    matches: list[tuple[int, Phase]] = []
    for number, phase in phases:
        is_meant = not slash or prefix in (str(number), phase.graph.name)
        if is_meant and any(each.name == name for each in phase.graph.nodes):
            matches.append((number, phase))
    if len(matches) == 1:
        ((_, phase),) = matches
        return phase.graph, name
    raise _no_single_phase(node, name, matches or phases, several=bool(matches))


def _no_single_phase(
    node: str, name: str, phases: Sequence[tuple[int, Phase]], *, several: bool
) -> GraphError:
    """Make the error for a name that is of no phase, or of several. phases: those that it may be
    of.
    """
    names: list[str] = []
    for number, phase in phases:
        names += [numbered_name(number, each.name) for each in phase.graph.nodes]
    count = "several" if several else "none"
    problem = f"expected a node of one phase, found {count} of this name"
    namesakes = [each for each in names if each.endswith(f"/{name}")]
    if namesakes:
        fix = namesakes[0]
    else:
        fix = nearest_or_all(f"1/{name}", names)
    return GraphError(Fault(rule="peek", where=f"peek {node!r}", problem=problem, fix=fix))
