"""Weights: who may share a module with its writer, by which route versions go, which ones wait.

Owns: aliases, routes, and modules that wait on the host for all who share them. Does not own: the
choices (passes/modules.py, passes/memory_fit.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.plan.draft import Draft
from engine.plan.plan import ModelUse, PlannedNode
from engine.plan.refusals import add_fix
from engine.plan.waiting_weights import find_sharing_nodes, why_weights_stay


def check_aliases(draft: Draft) -> Iterator[str]:
    """Only the writer's Workers share its module, unsharded and with equal tensor ranks, and above
    the cut only at lag 0.
    """
    writers: dict[str, PlannedNode] = {}
    for node in draft.nodes:
        writers |= {use.module: node for use in node.states if use.access == "write"}
    for node in draft.nodes:
        for use in node.states:
            why = _why_not_shared(node, use, writers)
            if why:
                problem = f"{node.name} shares the weights of {use.model!r} {why}"
                yield add_fix(problem, "weights of its own")


def _why_not_shared(node: PlannedNode, use: ModelUse, writers: Mapping[str, PlannedNode]) -> str:
    """Empty if sharing is safe, or if nobody else writes this module while the node computes."""
    writer = writers.get(use.module)
    if writer is None or node is writer or node.work == "evaluate" or use.param == "tokenizer":
        return ""
    if not set(node.workers) <= set(writer.workers):
        return "from another worker"
    if node.lag:
        return f"at lag {node.lag}"
    return "" if node.layout.has_equal_part(writer.layout) else "of which its rank has another part"


def check_offload(draft: Draft) -> Iterator[str]:
    """Weights wait on the host for all nodes that compute with a module, or for none."""
    for node in draft.nodes:
        if node.layout.offload != "weights":
            continue
        why = why_weights_stay(draft, node)
        if why:
            yield add_fix(f"{node.name}=weights, but {why}", f"leave out {node.name}")
        for other in find_sharing_nodes(draft, node):
            if other.layout.offload != "weights":
                problem = f"{node.name}=weights, but {other.name} computes with the same weights"
                fix = f"leave out {node.name}"
                if not why_weights_stay(draft, other):
                    fix = f"{other.name}=weights, too, or {fix}"
                yield add_fix(problem, fix)


def check_routes(draft: Draft) -> Iterator[str]:
    """Weights go by collectives between Workers of one host that do not take turns, and by IPC
    between those of one host that compute on one device.
    """
    for model in draft.models:
        if not model.writer or model.route == "pull":
            continue
        writer = draft.node(model.writer).workers[0]
        for reader in draft.remote_readers(model):
            if model.route == "collective":
                why = _why_no_collective(writer, reader, draft)
            else:
                why = _why_no_ipc(writer, reader, draft)
            if why:
                yield add_fix(f"weights of {model.name!r} {why}", "weights=pull")


def _why_no_collective(writer: str, reader: str, draft: Draft) -> str:
    """Empty if these two can have a world."""
    hosts = _describe_hosts(writer, reader, draft)
    if hosts:
        return f"{hosts}, and collectives stay on one host"
    turns = draft.turns_of(writer)
    if reader in turns:
        both = f"between {writer} and {reader}, which take turns with their devices"
        return f"{both} ({','.join(turns)})"
    return ""


def _why_no_ipc(writer: str, reader: str, draft: Draft) -> str:
    """Empty if the reader can map the writer's memory."""
    hosts = _describe_hosts(writer, reader, draft)
    if hosts:
        return f"{hosts}, and no process maps memory of another host"
    written, read = draft.devices.get(writer, ()), draft.devices.get(reader, ())
    if written == read and len(written) < 2:
        return ""
    places = f"from {writer} on {_name_devices(written)} and {reader} on {_name_devices(read)}"
    return f"{places}, and memory is mapped on the one device that both have"


def _describe_hosts(writer: str, reader: str, draft: Draft) -> str:
    """Empty if both are on one host."""
    writer_host, reader_host = draft.host_of(writer), draft.host_of(reader)
    if writer_host == reader_host:
        return ""
    return f"from {writer} on {writer_host} and {reader} on {reader_host}"


def _name_devices(devices: Sequence[int]) -> str:
    if not devices:
        return "the CPU"
    return f"GPU {','.join(map(str, devices))}"
