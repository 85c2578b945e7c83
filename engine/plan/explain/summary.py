"""The head of an explained plan: rows a Step, staleness, memory, time and cost.

Owns: these lines. Does not own: what single nodes need (nodes.py, memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from dataflow.graph import Graph
from dataflow.loss_terms import ROWS
from dataflow.node import Node
from dataflow.rows import Domains
from dataflow.safe_text import shown_number
from dataflow.width import fold_lines
from engine.plan.alike_workers import name_alike
from engine.plan.cluster import Cluster
from engine.plan.explain import memory
from engine.plan.explain.layout import count, duration, lay_out, wrap_line
from engine.plan.explain.planned_graph import planned_graph
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.plan.step_cost import step_cost
from engine.plan.warnings import step_seconds

_MOST_HOSTS = 32
"""Hosts that are described one by one; of more, those that are alike are together."""


def summary_lines(plan: Plan, width: int) -> list[str]:
    """The first lines: the Step, staleness, memory, time and cost, this many columns wide."""
    graph = str(plan.graph)
    if plan.cluster:
        graph = f"{graph} on {_hardware(plan, plan.cluster)}"
    title = f"{graph}; seed {plan.seed}; graph {plan.digest[:8]}"
    lines = fold_lines(title, width).split("\n")
    for text in chain(_steps(plan), _staleness(plan), memory.total_lines(plan), _time(plan)):
        for line in wrap_line(text, after=2):
            lines += [f"  {part}" for part in lay_out(line, width - 2)]
    return lines


def _hardware(plan: Plan, cluster: Cluster) -> str:
    """Each host of the plan; the cluster where its Workers have none."""
    hosts = [host for host in dict.fromkeys(plan.hosts.values()) if host not in plan.spare]
    descriptions = {host: cluster.on(host).describe() for host in hosts}
    if len(hosts) > _MOST_HOSTS:
        return "; ".join(_describe_alike(descriptions))
    lines = (f"{host}: {description}" for host, description in descriptions.items())
    return "; ".join(lines) or cluster.describe()


def _describe_alike(descriptions: Mapping[str, str]) -> Iterator[str]:
    """Each kind of host, with the names of those that are of it."""
    hosts_by_text: dict[str, list[str]] = {}
    for host, text in descriptions.items():
        hosts_by_text.setdefault(text, []).append(host)
    for text, hosts in hosts_by_text.items():
        yield f"{name_alike(hosts)}: {text}"


def _steps(plan: Plan) -> Iterator[str]:
    """`64 prompts x 8 = 512 completions a Step, 4 updates of 128 (train_policy)`."""
    graph = planned_graph(plan)
    domains = Domains(graph)
    for source in plan.sources:
        nodes = [node for node in plan.nodes if node.source == source.name]
        may_shrink = any(_may_shrink(graph, domains, node) for node in nodes)
        for train, row_set in _trained_row_sets(plan, source):
            node = graph.node(train.name)
            domain = domains.of(node.inputs[row_set])
            group = domain.group_size if domain else train.inner
            rows = f"{_rows(source.batch, group)} a Step"
            if may_shrink:
                rows = f"at most {rows}"
            where = train.name if row_set == ROWS else f"{train.name}, {row_set}"
            yield f"{rows}, {_updates(node, source.batch * group)} ({where})"


def _trained_row_sets(plan: Plan, source: PlannedSource) -> Iterator[tuple[PlannedNode, str]]:
    """Train nodes, with the name of each of their row sets that comes from a source."""
    for node in plan.nodes:
        if node.work == "train":
            for row_set, its_source in plan.sources_of(node).items():
                if its_source == source.name:
                    yield node, row_set


def _updates(train: Node, rows: int) -> str:
    """`4 updates of 128`."""
    parts, epochs = train.params["minibatches"], train.params["epochs"]
    return f"{count(epochs * parts, 'update')} of {rows // parts:,}"


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
        if not _reads_trained(plan, source):
            yield f"{source.name}: no row depends on a Model that is trained"
        elif not source.max_lag:
            yield f"{source.name}: synchronous, each row is trained by the version that made it"
        else:
            yield f"{source.name}: {_describe_lag(source)}"


def _reads_trained(plan: Plan, source: PlannedSource) -> bool:
    """Whether a node of the source's stream computes with a Model that is trained."""
    nodes = [n for n in plan.nodes if n.source == source.name and n.region == "stream"]
    uses = chain.from_iterable(node.models for node in nodes)
    return any(use.trained and use.param != "tokenizer" for use in uses)


def _describe_lag(source: PlannedSource) -> str:
    versions = count(source.max_lag, "version")
    if source.intake == "admission":
        late = "a row that took long may be older"
        return f"up to {versions} ahead at admission; {late} (intake=admission)"
    how = "older rows are dropped and made again"
    if source.intake == "exact":
        how = "the oldest finished rows train first"
    return f"no row is more than {versions} old when it is trained; {how} (intake={source.intake})"


def _time(plan: Plan) -> Iterator[str]:
    predicted = step_seconds(plan)
    if predicted is None:
        return
    seconds, slowest = predicted
    text = f"at most about {duration(seconds)} a Step"
    if slowest:
        text = f"{text}, those of {slowest} while others overlap"
    yield f"{text}, {_rates(plan)}"
    cost = step_cost(plan, plan.cluster, seconds)
    if not cost.unpriced:
        hosts = f"{count(cost.hosts, 'host')} at {cost.hour:,.2f} an hour"
        yield f"at most about {shown_number(cost.step)} a Step: {hosts}"


def _rates(plan: Plan) -> str:
    """Where the rates come from, and what they leave out."""
    timed = [node for node in plan.nodes if node.estimate.seconds is not None]
    origins = {node.estimate.origin for node in timed if node.traits.computes}
    text = "by rates of a profile, of the catalogue where it has none"
    if origins == {"fitted"}:
        text = "by rates fitted to a profile"
    elif origins <= {"catalogue"}:
        text = "by the catalogue's rates, good for comparing nodes"
    functions = [n for n in plan.nodes if n.estimate.seconds is None and not n.traits.computes]
    if any(node.region != "evaluation" for node in functions):
        return f"{text}; users' functions not counted"
    return text
