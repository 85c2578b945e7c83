"""What a run folder's plan.json, graph.json and other records say, as the page needs it.

Owns: reading these files, which others may have written, without importing what they name. Does not
own: the Plan (engine/plan/plan.py), the description made of it (engine/watch/run_description.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from dataflow.draw.node_places import Placed
from dataflow.errors import DataflowError
from dataflow.graph import Graph
from dataflow.program import AnyGraph
from dataflow.program_snapshot import read
from engine.keep.reader.open_folder import OpenFolder
from engine.keep.untrusted_files import reading
from engine.plan.drawing import locate_nodes

PLAN, GRAPH = "plan.json", "graph.json"


class PlanCost(msgspec.Struct, frozen=True):
    """What a node should cost."""

    bytes: dict[str, int] = {}
    seconds: float | None = None


class PlanLayout(msgspec.Struct, frozen=True):
    """How a node is split."""

    data: int = 1
    tensor: int = 1
    context: int = 1
    threads: int = 1
    shard: bool = False
    recompute: str = "none"
    offload: str = "none"
    compiled: bool = False


class PlanNode(msgspec.Struct, frozen=True):
    """What is shown of a node of plan.json."""

    name: str
    operator: str = ""
    work: str = ""
    kernel: str = ""
    region: str = ""
    relation: str = ""
    source: str = ""
    workers: list[str] = []
    layout: PlanLayout = PlanLayout()
    estimate: PlanCost = PlanCost()


class PlanEdge(msgspec.Struct, frozen=True):
    """What is shown of a data edge."""

    producer: str
    consumer: str
    columns: list[str] = []
    bytes: int = 0
    route: str = ""


class PlanModel(msgspec.Struct, frozen=True):
    """What is shown of a Model."""

    name: str
    base: str = ""
    writer: str = ""
    readers: list[str] = []
    route: str = ""
    parameters: int | None = None


class PlanSource(msgspec.Struct, frozen=True):
    """What is shown of a source."""

    name: str
    batch: int = 0
    max_lag: int = 0
    intake: str = ""


class PlanFile(msgspec.Struct, frozen=True):
    """What is shown of a plan.json, or of one phase in it."""

    graph: str = ""
    nodes: list[PlanNode] = []
    edges: list[PlanEdge] = []
    models: list[PlanModel] = []
    tables: list[PlanModel] = []
    sources: list[PlanSource] = []
    hosts: dict[str, str] = {}
    devices: dict[str, list[int]] = {}
    notes: list[str] = []

    def node(self, name: str) -> PlanNode | None:
        """The node of that name; None where there is none."""
        return next((node for node in self.nodes if node.name == name), None)

    @property
    def placed_nodes(self) -> Placed:
        """Which node is on which Workers, for a drawing."""
        return locate_nodes(self.nodes, self.hosts, self.devices)

    @property
    def workers(self) -> list[str]:
        """Every Worker of some node."""
        workers: dict[str, None] = {}
        for node in self.nodes:
            workers |= dict.fromkeys(node.workers)
        return list(workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRecords:
    """What a run's records say. plans: of each phase, one for a graph alone, none without a file.

    raw: the same as plain dicts. problems: what could not be read, in words.
    """

    plans: tuple[PlanFile, ...]
    raw: tuple[dict[str, Any], ...]
    graph: AnyGraph | None
    problems: tuple[str, ...]

    def phase(self, number: int) -> int:
        """The index of a phase that counts from 1, or of the one there is."""
        return max(0, min(number, len(self.plans)) - 1)

    def plan_of(self, index: int) -> PlanFile:
        """A phase's plan; an empty one where there is none."""
        if not self.plans:
            return PlanFile()
        return self.plans[index]

    def graph_of(self, index: int) -> Graph | None:
        """A phase's graph."""
        phases = self.graph.phases if self.graph is not None else ()
        return phases[index].graph if index < len(phases) else None


def read_records(folder: OpenFolder) -> KeptRecords:
    """Read them. What is missing or damaged is a problem in words, not an error."""
    problems: list[str] = []
    raw = _phases(_json(folder, PLAN, problems), problems)
    plans = tuple(msgspec.convert(phase, PlanFile) for phase in raw)
    return KeptRecords(
        plans=plans, raw=tuple(raw), graph=_graph(folder, problems), problems=tuple(problems)
    )


def _phases(document: Any, problems: list[str]) -> list[dict[str, Any]]:
    """The plans in a plan.json; none if it is not as a run writes it."""
    if isinstance(document, dict):
        phases = document.get("phases", [document])
    else:
        phases = []
    try:
        for phase in phases:
            msgspec.convert(phase, PlanFile)
    except (msgspec.ValidationError, TypeError) as error:
        problems.append(f"{PLAN}: it is not as a run writes it: {error}")
        return []
    return phases


def _json(folder: OpenFolder, name: str, problems: list[str]) -> Any:
    """A file's JSON; None, with a problem, where there is none."""
    content = folder.read(name)
    try:
        if content is None:
            problems.append(f"{name}: no such file")
            return None
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problems.append(f"{name}: expected JSON, found {error}")
        return None


def read_record(folder: OpenFolder, name: str) -> Any:
    """The JSON of one of a run's records; None where it is missing or damaged."""
    return _json(folder, name, [])


def _graph(folder: OpenFolder, problems: list[str]) -> AnyGraph | None:
    content = folder.read(GRAPH)
    if content is None:
        problems.append(f"{GRAPH}: no such file")
        return None
    try:
        with reading(GRAPH):
            return read(content.decode(), GRAPH, imports=False)
    except (DataflowError, UnicodeDecodeError) as error:
        problems.append(f"{GRAPH}: {error}")
        return None
