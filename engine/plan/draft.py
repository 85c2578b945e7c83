"""A plan in the making: what one pass hands to the next.

Owns: the data type. Does not own: any decision (passes/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from dataflow.graph import Graph
from dataflow.model import Model
from engine.plan.cluster import Cluster
from engine.plan.cost.profile import Profile
from engine.plan.memory_margins import NodeMemory
from engine.plan.placement import Placing
from engine.plan.plan import Decisions


@dataclass(frozen=True, kw_only=True)
class Draft(Decisions):
    """The graph as rewritten so far, what was asked for, and the decisions so far."""

    graph: Graph
    seed: int
    cluster: Cluster
    threads: int | None = None
    """Of each kernel; None for all that its Worker has."""
    placing: Placing = field(default_factory=Placing)
    profile: Profile | None = None
    """Whose measured rates count before the catalogue's."""
    memory: Mapping[str, NodeMemory] = field(default_factory=dict)
    """Of nodes whose memory ran out in the run that goes on."""
    dataset: Mapping[str, Mapping[str, pa.DataType]] = field(default_factory=dict)
    """Source node -> the columns of its data."""

    @cached_property
    def graph_models(self) -> Sequence[Model]:
        """The Models of the graph, in its order; `models` are those that are planned."""
        return [state for state in self.graph.states if isinstance(state, Model)]

    @cached_property
    def graph_model_by_name(self) -> Mapping[str, Model]:
        """The Models of the graph by name; of several of one name the first."""
        return {model.name: model for model in reversed(self.graph_models)}
