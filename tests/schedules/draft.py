"""Plans in the making: nodes on ports, with random Workers and fetches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from dataflow.kernel import Layout
from engine.plan.plan import ModelUse, PlannedNode
from engine.plan.planned_input import Fetch, PlannedInput

POLICY = ModelUse(param="model", model="policy", access="read", trained=True)
TARGET = ModelUse(param="model", model="target", access="read", trained=True)


def fetch(producer: str, ratio: int) -> Fetch:
    """The column of a node, for rows of which so many come of each of its own."""
    return Fetch(producer=producer, columns=("x",), ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class NodeRows:
    """Rows of a node as others read them: behind a select the bytes lie with its ancestors."""

    gate: str
    rows: int
    holders: tuple[tuple[str, int], ...]
    """(node, rows) of every node that holds columns of these rows or of their ancestors."""


@dataclass
class PlanDraft:
    """A plan in the making, one source's nodes after another."""

    draw: random.Random
    pool: tuple[str, ...]
    lag: int = 0
    chunkings: tuple[str, ...] = ("cohort", "ready")
    replicas: int = 3
    nodes: list[PlannedNode] = field(default_factory=list)
    trains: list[PlannedNode] = field(default_factory=list)
    unread: dict[str, NodeRows] = field(default_factory=dict)
    keep: dict[str, float] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    fail: dict[str, float] = field(default_factory=dict)

    def workers(self) -> tuple[str, ...]:
        count = self.draw.randint(1, min(self.replicas, len(self.pool)))
        return tuple(self.draw.sample(self.pool, count))

    def chunking(self) -> str:
        return self.draw.choice(self.chunkings)

    def read(self, ports: list[NodeRows], inner: int) -> tuple[PlannedInput, ...]:
        inputs = []
        for number, port in enumerate(ports):
            count = self.draw.randint(0, min(2, len(port.holders)))
            holders = self.draw.sample(port.holders, count)
            fetches = tuple(fetch(name, inner // rows) for name, rows in holders)
            name, ratio = f"in{number}", inner // port.rows
            inputs.append(PlannedInput(name=name, gate=port.gate, fetches=fetches, ratio=ratio))
            self.unread.pop(port.gate, None)
        return tuple(inputs)

    def add(
        self,
        name: str,
        ports: list[NodeRows],
        *,
        relation: str = "same",
        factor: int = 1,
        **given: object,
    ) -> NodeRows:
        """A node on these ports; returns what others read of it."""
        inner, workers = max((p.rows for p in ports), default=1), self.workers()
        usual = {"operator": name, "work": "host", "scope": "row", "region": "stream"}
        usual |= {"source": "prompts", "chunking": self.chunking(), "workers": workers}
        node = PlannedNode(
            name=name,
            relation=relation,
            rows=inner * factor,
            inner=inner,
            chunks=self.draw.choice((1, 1, 1, 2, 3)),
            inputs=self.read(ports, inner),
            layout=Layout(data=len(workers) if given.get("work") == "train" else 1),
            **usual | given,
        )
        (self.trains if node.work == "train" else self.nodes).append(node)
        above = tuple(dict.fromkeys(h for p in ports for h in p.holders))
        holders = above if relation == "subset" else (*above, (name, inner * factor))
        self.unread[name] = port = NodeRows(gate=name, rows=inner * factor, holders=holders)
        return port

    def reduce(self, name: str, below: NodeRows, onto: NodeRows) -> NodeRows:
        """A node that makes each row of `onto` of its rows in `below` that are left."""
        means = self.add(name, [onto], relation="reduce", operator="mean_over")
        node, fan_in = self.nodes[-1], below.rows // onto.rows
        holder, rows = self.draw.choice([h for h in below.holders if h[1] >= onto.rows])
        fetches = (fetch(holder, below.rows // rows),)
        reduced = PlannedInput(name="below", gate=below.gate, fetches=fetches, fan_in=fan_in)
        self.nodes[-1] = replace(node, inputs=(reduced, *node.inputs))
        self.unread.pop(below.gate, None)
        return means

    def concat(self, name: str, parts: list[NodeRows], **given: object) -> NodeRows:
        """A node that puts the rows of these side by side."""
        self.add(name, parts[:1], relation="concat", operator="concat", **given)
        node, inputs, offset = self.nodes[-1], [], 0
        for number, part in enumerate(parts):
            held = [h for h in part.holders if h[1] == part.rows]
            holder, _ = self.draw.choice(held)
            fetches = (fetch(holder, 1),) if self.draw.random() < 0.8 else ()
            beside = {"offset": offset, "width": part.rows, "fetches": fetches}
            inputs.append(PlannedInput(name=f"part{number}", gate=part.gate, **beside))
            offset += part.rows
            self.unread.pop(part.gate, None)
        self.nodes[-1] = replace(node, rows=offset, inner=offset, inputs=tuple(inputs))
        common = [h for h in parts[0].holders if all(h in part.holders for part in parts)]
        holders = (*(h for h in common if h[1] == 1), (name, offset))
        self.unread[name] = port = NodeRows(gate=name, rows=offset, holders=holders)
        return port

    def pick(self, ports: list[NodeRows], most: int) -> list[NodeRows]:
        """Some ports of widths that divide the widest, which comes first."""
        some = self.draw.sample(ports, self.draw.randint(1, min(most, len(ports))))
        widest, *_ = some = sorted(some, key=lambda p: -p.rows)
        return [p for p in some if widest.rows % p.rows == 0]
