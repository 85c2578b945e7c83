"""Which rows the selections of a simulated plan keep: shares that somebody gave or measured.

Owns: which shares are refused, and how rows are drawn by what a selection leaves of a group. Does
not own: the draws (engine/run/simulated_workers/behaviour.py), where measured shares come from
(engine/predict/row_statistics.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dataflow.errors import PlanError, nearest_or_all
from dataflow.graph import Graph
from dataflow.operator import Subset
from dataflow.rows import Domains
from engine.run.simulated_workers.behaviour import Outcomes

FLAG = "--kept"


def selections(graph: Graph) -> list[str]:
    """The names of the nodes that may drop rows."""
    return [node.name for node in graph.nodes if isinstance(node.operator.rows, Subset)]


def require_shares(graph: Graph, shares: Mapping[str, float]) -> None:
    """Raises PlanError for a share of a node that is no selection, and for one that is no share."""
    names = selections(graph)
    for name, share in shares.items():
        if name not in names:
            raise PlanError(_no_selection(name, names))
        refills = graph.node(name).params.get("refill", False)
        # One that keeps nothing and refills would never end.
        if not 0 <= share <= 1 or (refills and not share):
            least = "above 0" if refills else "0 or more"
            problem = f"{name}: expected the share of rows that it keeps, {least} and at most 1"
            raise PlanError(f"kept: {problem}, found {share:g}. Fix: {FLAG} {name}=0.5.")


def _no_selection(name: str, names: list[str]) -> str:
    problem = f"expected a selection of the graph, found {name!r}"
    fix = nearest_or_all(name, names) if names else f"leave {FLAG} out: this graph has none"
    return f"kept: {problem}. Fix: {fix}."


def outcomes(graph: Graph, shares: Mapping[str, float], seed: int) -> Outcomes:
    """Of every row, by the share that each selection keeps; all where nothing is said."""
    domains = Domains(graph)
    groups, pairs, even = set[str](), dict[str, int](), set[str]()
    for name in shares:
        node = graph.node(name)
        below = domains.of(node.ports[0])
        above = below.parent if below is not None else None
        assert below is not None
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


def told(graph: Graph, shares: Mapping[str, float], given: Iterable[str]) -> dict[str, str]:
    """In words, by selection: what it keeps, and who says so. given: those of a flag."""
    origins: dict[str, str] = {}
    for name in selections(graph):
        if name not in shares:
            origins[name] = f"keeps all rows, as nothing says a share ({FLAG} {name}=0.5)"
        else:
            who = f"{FLAG} says" if name in set(given) else "the run did"
            origins[name] = f"keeps {100 * shares[name]:.3g} % of its rows, as {who}"
    return origins
