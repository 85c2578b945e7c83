"""The hosts of a Ray cluster, for the plan of a graph.

Owns: which paths every node has to see as this process does. Does not own: asking the nodes
(engine/run/hosts/ray.py), comparing (engine/run/hosts/host_requirements.py).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from dataflow.errors import DataflowError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.program import AnyGraph
from dataflow.storage import writing
from engine.keep.checkpoint.user_sources import imported_files
from engine.plan.cluster import Cluster
from engine.plan.options import RunOptions
from engine.run.hosts.ray import cluster, join_cluster


def ray_cluster(options: RunOptions, source: AnyGraph) -> Cluster:
    """The nodes of the cluster that the options name. Raises RunError where there is none, or none
    that can be used.
    """
    join_cluster(options.cluster or "")
    paths = sorted({os.path.abspath(path) for path in _paths(source)})
    with _place_mark(options.runs) as mark:
        return cluster(
            [*paths, str(mark)],
            whole=options.verify == "content",
            lease=options.lease,
            private=options.private,
        )


def _paths(source: AnyGraph) -> Iterator[str]:
    """The local files and folders that a graph names, models and data, and the user's sources."""
    for phase in source.phases:
        graph = phase.graph
        bases = (state.base for state in graph.states if isinstance(state, Model))
        yield from (base for base in bases if os.path.isdir(base))
        yield from _data(graph)
        yield from imported_files(graph)


def _data(graph: Graph) -> Iterator[str]:
    """The local files of each node's data, as its operator finds them."""
    for node in graph.nodes:
        dataset = node.params.get("data")
        if node.operator.data_files and isinstance(dataset, str):
            module, _, name = node.operator.data_files.partition(":")
            with contextlib.suppress(DataflowError):  # the check has said so, or the kernel will
                find_files = getattr(importlib.import_module(module), name)
                files = find_files(dataset, node.params.get("split")) or ()
                yield from (str(file) for file in files if isinstance(file, Path))


@contextlib.contextmanager
def _place_mark(runs: Path) -> Iterator[Path]:
    """Write a file among the run folders that nobody else can have there by chance."""
    mark = Path(runs).absolute() / f".seen-by-all-{secrets.token_hex(8)}"
    with writing("the runs folder", mark):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text("Every node has to see this.\n")
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
