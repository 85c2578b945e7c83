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
_REGION = "ray.io/availability-region"


def names_of(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """A name for each node: its own, else its machine's; with a number where several have it."""
    names: dict[str, str] = {}
    for node in sorted(nodes, key=lambda n: n["NodeID"]):
        own_name, address = node["NodeName"], node["NodeManagerAddress"]
        # Ray names a node for its address unless it is given a name.
        has_own_name = own_name and own_name != address
        name = own_name if has_own_name else node["NodeManagerHostname"]
        same = sum(other.partition("~")[0] == name for other in names.values())
        if same:
            name = f"{name}~{same + 1}"
        names[node["NodeID"]] = name
    return names


def host_of(
    node: Mapping[str, Any], name: str, what: Looked | str, free: Mapping[str, Any]
) -> Host:
    """A node as a host: with what is free; where nothing is, with all, for which a run waits."""
    every = node["Resources"]
    cores, gpus = (int(free.get(k, 0) or every.get(k, 0)) for k in ("CPU", "GPU"))
    hardware, refused = Looked(memory=0, gpus=()), ""
    if isinstance(what, Looked):
        hardware = what
    else:
        refused = what
    return Host(
        name=name,
        cores=cores,
        memory=hardware.memory,
        gpus=(hardware.gpus * gpus)[:gpus],  # of a node with fewer free ones, so many
        kind=hardware.kind,
        region=node.get("Labels", {}).get(_REGION, ""),
        labels=_labels(node),
        node=node["NodeID"],
        refused=refused,
    )


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    """A node's labels, and as `gpu` the kind of its GPUs."""
    labels = {k: v for k, v in node.get("Labels", {}).items() if k != NODE}
    kinds = [r.removeprefix(KIND) for r in node["Resources"] if r.startswith(KIND)]
    if kind := labels.get(_ACCELERATOR) or next(iter(kinds), ""):
        labels[GPU] = kind
    return labels
