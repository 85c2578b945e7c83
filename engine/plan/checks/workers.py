"""Workers: as many as a node has replicas and ranks, each a rank of one world, on the right hosts.

Owns: workers, worlds, hosts. Does not own: turns (devices.py), the placement (passes/place.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix


def check_workers(draft: Draft) -> Iterator[str]:
    """Each node is on replicas x ranks Workers, all different, with at least one thread."""
    for node in draft.nodes:
        layout = node.layout
        count = node.layout.replicas * node.ranks
        are_different = len(set(node.workers)) == len(node.workers)
        if len(node.workers) != count or not are_different or not all(node.workers):
            split = f"{layout.replicas} replicas"
            if node.ranks > 1:
                split += f" of {node.ranks} ranks"
            yield add_fix(f"{node.name}: {split} on {list(node.workers)}", "a worker each")
        spare = [worker for worker in node.workers if worker in draft.spare]
        if node.work != "train" and node.ranks > 1 and spare:
            problem = f"{node.name} has ranks on {','.join(spare)}, which join and leave"
            yield add_fix(problem, f"pin {node.name} to other workers")
        if layout.threads < 1:
            yield add_fix(f"{node.name}: {layout.threads} threads", "threads=1")


def check_worlds(draft: Draft) -> Iterator[str]:
    """A Worker is in one world: nodes of several ranks that share one have all ranks in common, or
    replicas of one are shares of the other.
    """
    ranked_nodes = [node for node in draft.nodes if node.ranks > 1]
    for index, node in enumerate(ranked_nodes):
        for other in ranked_nodes[:index]:
            if not set(node.workers).isdisjoint(other.workers):
                yield from _check_same_world(node, other)


def _check_same_world(node: PlannedNode, other: PlannedNode) -> Iterator[str]:
    fix = f"or pin {node.name} to other workers"
    tensor, other_tensor = node.layout.tensor, other.layout.tensor
    context, other_context = node.layout.context, other.layout.context
    are_alike = (tensor, context) == (other_tensor, other_context)
    has_replicas = node.work != "train" or other.work != "train"
    if has_replicas and are_alike and _have_equal_shares(node, other):
        return
    if node.workers != other.workers:
        workers = ",".join(node.workers)
        other_workers = ",".join(other.workers)
        problem = f"{other.name} has ranks on {other_workers}, {node.name} on {workers}"
        fix = f"equal ranks, {fix}"
        yield add_fix(f"{problem}: one process in two worlds", fix)
    elif tensor != other_tensor:
        splits = f"{other.name} has tensor {other_tensor}, {node.name} {tensor}"
        fix = f"tensor: {node.name}={other_tensor}, {fix}"
        yield add_fix(f"{splits}, on the same workers", fix)
    elif context != other_context:
        splits = f"{other.name} has context {other_context}, {node.name} {context}"
        fix = f"context: {node.name}={other_context}, {fix}"
        yield add_fix(f"{splits}, on the same workers", fix)


def _have_equal_shares(node: PlannedNode, other: PlannedNode) -> bool:
    """Whether a Worker of both has the same rows of each as the same others have."""
    share_by_worker: dict[str, tuple[str, ...]] = {}
    for share in other.shares:
        share_by_worker |= dict.fromkeys(share, share)
    for share in node.shares:
        for worker in share:
            if share_by_worker.get(worker, share) != share:
                return False
    return True


def check_hosts(draft: Draft) -> Iterator[str]:
    """Ranks of one share, and Workers that take turns, are on one host; ranks on hosts of
    one kind.
    """
    for node in draft.nodes:
        if node.ranks > 1:
            for share in node.shares:
                yield from _check_one_host(draft, node.name, share)
    for group in draft.turns:
        yield from _check_one_host(draft, "turns", group)
    for node in draft.nodes:
        if node.ranks > 1:
            yield from _check_alike(draft, node)


def _check_one_host(draft: Draft, name: str, workers: Sequence[str]) -> Iterator[str]:
    hosts = list(dict.fromkeys(map(draft.host_of, workers)))
    if len(hosts) > 1:
        problem = f"{','.join(workers)} are on {', '.join(hosts)}, and have to be on one host"
        fix = " ".join(f"{worker}@{hosts[0]}" for worker in workers)
        yield add_fix(f"{name}: {problem}", fix)


def _check_alike(draft: Draft, node: PlannedNode) -> Iterator[str]:
    """Ranks reduce on their GPUs, or all in host memory."""
    with_gpus = [worker for worker in node.workers if draft.devices.get(worker)]
    without = [worker for worker in node.workers if worker not in with_gpus]
    if with_gpus and without:
        workers = f"{','.join(with_gpus)} have a GPU and {','.join(without)} have none"
        first_host = draft.host_of(with_gpus[0])
        fix = " ".join(f"{worker}@{first_host}" for worker in without)
        yield add_fix(f"{node.name}: {workers}, and ranks have to be alike", fix)
