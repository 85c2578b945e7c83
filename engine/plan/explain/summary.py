"""The head of an explained plan: rows a Step, staleness, memory and time.

Owns: these lines. Does not own: what single nodes need (nodes.py, memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.graph import Graph
from dataflow.loss_terms import ROWS
from dataflow.rows import Domains
from dataflow.width import folded
from engine.plan.explain import memory
from engine.plan.explain.layout import count, duration, laid, wrapped
from engine.plan.plan import Plan, PlannedNode, PlannedSource
from engine.plan.warnings import step_seconds


def summary(plan: Plan, width: int) -> list[str]:
    """The first lines: the Step, staleness, memory and time, this many columns wide."""
    where = f" on {_machines(plan)}" if plan.cluster else ""
    lines = [f"{plan.graph}{where}; seed {plan.seed}; graph {plan.digest[:8]}"]
    said = [*_steps(plan), *_staleness(plan), *memory.totals(plan), *_time(plan)]
    laid_out = (laid(line, width - 2) for text in said for line in wrapped(text, after=2))
    return [
        *folded(lines[0], width).split("\n"),
        *(f"  {line}" for each in laid_out for line in each),
    ]


def _machines(plan: Plan) -> str:
    assert plan.cluster is not None
    hosts = [h for h in dict.fromkeys(plan.hosts.values()) if h not in plan.spare]
    shown = [f"{host}: {plan.cluster.on(host).describe()}" for host in hosts]
    return "; ".join(shown) or plan.cluster.describe()


def _steps(plan: Plan) -> Iterator[str]:
    """`64 prompts x 8 = 512 completions a Step, 4 updates of 128 (train_policy)`."""
    graph = program(plan)
    domains = Domains(graph)
    for source in plan.sources:
        line = [n for n in plan.nodes if n.source == source.name]
        limit = "at most " if any(_may_shrink(graph, domains, n) for n in line) else ""
        for train in (n for n in plan.nodes if n.work == "train"):
            node, of = graph.node(train.name), plan.sources_of(train)
            for name in (name for name in of if of[name] == source.name):
                domain = domains.of(node.inputs[name])
                group = domain.group_size if domain else train.inner
                parts, epochs = node.params["minibatches"], node.params["epochs"]
                updates = f"{count(epochs * parts, 'update')} of {source.batch * group // parts:,}"
                where = train.name if name == ROWS else f"{train.name}, {name}"
                yield f"{limit}{_rows(source.batch, group)} a Step, {updates} ({where})"


def _rows(batch: int, group: int) -> str:
    if group == 1:
        return count(batch, "row")
    return f"{count(batch, 'prompt')} x {group} = {count(batch * group, 'completion')}"


def _may_shrink(graph: Graph, domains: Domains, select: PlannedNode) -> bool:
    """Whether a node is a selection that may leave a Step with fewer rows."""
    if select.relation != "subset" or not select.refill:
        return select.relation == "subset"
    domain = domains.of_node(graph.node(select.name))
    return domain is None or domain.keeps not in ("groups", "pairs")


def _staleness(plan: Plan) -> Iterator[str]:
    for source in plan.sources:
        line = [n for n in plan.nodes if n.source == source.name and n.region == "stream"]
        if not any(u.trained and u.param != "tokenizer" for n in line for u in n.models):
            yield f"{source.name}: no row depends on a Model that is trained"
        elif not source.max_lag:
            yield f"{source.name}: synchronous, each row is trained by the version that made it"
        else:
            yield f"{source.name}: {_bound(source)}"


def _bound(source: PlannedSource) -> str:
    versions = count(source.max_lag, "version")
    if source.intake == "admission":
        late = "a row that took long may be older"
        return f"up to {versions} ahead at admission; {late} (intake=admission)"
    how = "older rows are dropped and made again"
    if source.intake == "exact":
        how = "the oldest finished rows train first"
    return f"no row is more than {versions} old when it is trained; {how} (intake={source.intake})"


def _time(plan: Plan) -> Iterator[str]:
    found = step_seconds(plan)
    if found is None:
        return
    seconds, slowest = found
    whose = f", those of {slowest} while others overlap" if slowest else ""
    yield f"at most about {duration(seconds)} a Step{whose}, {_rates(plan)}"


def _rates(plan: Plan) -> str:
    """Where they come from, and what they leave out."""
    timed = [n for n in plan.nodes if n.estimate.seconds is not None]
    models = {n.estimate.origin for n in timed if n.traits.computes}
    text = "by rates of a profile, of the catalogue where it has none"
    if models == {"fitted"}:
        text = "by rates fitted to a profile"
    elif models <= {"catalogue"}:
        text = "by the catalogue's rates, good for comparing nodes"
    users = (n for n in plan.nodes if n.estimate.seconds is None and not n.traits.computes)
    left = any(n.region != "evaluation" for n in users)
    return f"{text}; users' functions not counted" if left else text


def program(plan: Plan) -> Graph:
    """The graph of a plan that the planner has made."""
    assert plan.program is not None
    return plan.program
