"""Which rows the selections of a simulated plan keep: shares that somebody gave or measured.

Owns: which shares are refused, and how rows are drawn by what a selection leaves of a group. Does
not own: the draws (engine/run/simulated_workers/behaviour.py), where measured shares come from
(engine/predict/row_statistics.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dataflow.errors import PlanError, nearest_or_all
from dataflow.graph import Graph
from dataflow.operator import Subset
from dataflow.rows import Domains
from engine.run.simulated_workers.behaviour import Outcomes

FLAG = "--kept"


def list_selections(graph: Graph) -> list[str]:
    """List the names of the nodes that may drop rows."""
    return [node.name for node in graph.nodes if isinstance(node.operator.rows, Subset)]


def require_shares(graph: Graph, shares: Mapping[str, float]) -> None:
    """Refuse a share of a node that is no selection, and what is no share. Raises PlanError."""
    names = list_selections(graph)
    for name, share in shares.items():
        if name not in names:
            raise PlanError(_describe_no_selection(name, names))
        refills = graph.node(name).params.get("refill", False)
        # One that keeps nothing and refills would never end.
        if not 0 <= share <= 1 or (refills and not share):
            least = "above 0" if refills else "0 or more"
            problem = f"{name}: expected the share of rows that it keeps, {least} and at most 1"
            raise PlanError(f"kept: {problem}, found {share:g}. Fix: {FLAG} {name}=0.5.")


def _describe_no_selection(name: str, names: list[str]) -> str:
    problem = f"expected a selection of the graph, found {name!r}"
    if names:
        fix = nearest_or_all(name, names)
    else:
        fix = f"leave {FLAG} out: this graph has none"
    return f"kept: {problem}. Fix: {fix}."


def make_outcomes(graph: Graph, shares: Mapping[str, float], seed: int) -> Outcomes:
    """Say how rows fare: each selection keeps its share, of all rows where nothing is said."""
    domains = Domains(graph)
    groups: set[str] = set()
    pairs: dict[str, int] = {}
    even: set[str] = set()
    for name in shares:
        node = graph.node(name)
        below = domains.of(node.ports[0])
        assert below is not None
        above = below.parent
        assert above is not None
        assert isinstance(node.operator.rows, Subset)
        if below.keeps == "groups":
            groups.add(name)
        elif below.keeps == "pairs":
            pairs[name] = above.group_size
        elif node.inputs[node.operator.rows.of].node.operator.scope == "group":
            even.add(name)  # it compares the rows of a group, and keeps some of each
    return Outcomes(
        seed=seed, keep=shares, groups=frozenset(groups), pairs=pairs, even=frozenset(even)
    )


def describe_selections(
    graph: Graph, shares: Mapping[str, float], flagged: Collection[str]
) -> dict[str, str]:
    """Say of each selection what it keeps, and who says so. flagged: those of --kept."""
    origins: dict[str, str] = {}
    for name in list_selections(graph):
        if name not in shares:
            origins[name] = f"keeps all rows, as nothing says a share ({FLAG} {name}=0.5)"
        else:
            who = f"{FLAG} says" if name in flagged else "the run did"
            origins[name] = f"keeps {100 * shares[name]:.3g} % of its rows, as {who}"
    return origins
