"""Nodes of a Ray cluster, as Ray describes them, as hosts of a plan.

Owns: their names, their labels, what is free on them. Does not own: asking Ray (ray.py), what a
node says of itself (engine/run/hosts/host_requirements.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.plan.cluster import Host
from engine.run.hosts.bundle import GPU, KIND, NODE
from engine.run.hosts.host_requirements import Looked

_ACCELERATOR = "ray.io/accelerator-type"


def names_of(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """A name for each node: its own, else its machine's; with a number where several have it."""
    found: dict[str, str] = {}
    for node in sorted(nodes, key=lambda n: n["NodeID"]):
        own, address = node["NodeName"], node["NodeManagerAddress"]
        name = own if own and own != address else node["NodeManagerHostname"]
        same = sum(other.partition("~")[0] == name for other in found.values())
        found[node["NodeID"]] = f"{name}~{same + 1}" if same else name
    return found


def host_of(
    node: Mapping[str, Any], name: str, what: Looked | str, free: Mapping[str, Any]
) -> Host:
    """A node as a host: with what is free; where nothing is, with all, for which a run waits."""
    every = node["Resources"]
    cores, gpus = (int(free.get(k, 0) or every.get(k, 0)) for k in ("CPU", "GPU"))
    seen = what if isinstance(what, Looked) else Looked(memory=0, gpus=())
    return Host(
        name=name,
        cores=cores,
        memory=seen.memory,
        gpus=(seen.gpus * gpus)[:gpus],  # of a node with fewer free ones, so many
        kind=seen.kind,
        labels=_labels(node),
        node=node["NodeID"],
        refused=what if isinstance(what, str) else "",
    )


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    """A node's labels, and as `gpu` the kind of its GPUs."""
    found = {k: v for k, v in node.get("Labels", {}).items() if k != NODE}
    kinds = [r.removeprefix(KIND) for r in node["Resources"] if r.startswith(KIND)]
    kind = found.get(_ACCELERATOR) or next(iter(kinds), "")
    return found | ({GPU: kind} if kind else {})
