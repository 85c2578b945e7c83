"""Which nodes can have tensor ranks: a part of every weight matrix each, and the same rows.

Those of a train node, of forward passes and of generation by torch, are Workers: consecutive ones
are a share, or a replica. Those of a kernel that starts them itself are not. With `shard` FSDP
splits what each rank of a train node has over the ranks of other rows.

Owns: which these are; the refusals, from a Model's config. Does not own: how a kernel splits its
module (operators/kernels/torch/slices.py), which decides if there is no config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from dataflow.side_module import Side
from engine.plan.cost.models import Shape, model_cost
from engine.plan.draft import Draft
from engine.plan.kernel_needs import find_model, kernel_name, needs_of
from engine.plan.passes.kernels import find_tensor_kernel
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix


def find_tensor_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    """Why a node cannot have so many tensor ranks."""
    wish = f"tensor: {node.name}={count}"
    needs = needs_of(draft.graph, node)
    if node.work != "train" and not (needs.tensor or needs.ranks):
        if count != 1:
            lack = _explain_lack(draft, node)
            yield f"{wish}, but {lack} replicas: {node.name}={count}."
        return
    if count > 1 and (node.work == "train" or needs.ranks):
        yield from _find_adapter_problems(draft, node, wish)
    if count > 1 and needs.ranks:
        yield from find_replica_problems(draft, node, "tensor", count)
    if count < 1:
        fix = f"{node.name}=1"
        yield add_fix(wish, fix)
    elif count > 1:
        shape = _find_shape(draft, node)
        if shape is not None:
            yield from _find_indivisible(wish, node.name, shape, count)


def count_worker_ranks(draft: Draft, node: PlannedNode) -> int:
    """How many Workers of a node have the same tokens: its tensor ranks, where these are
    Workers.
    """
    if node.work == "train" or needs_of(draft.graph, node).ranks:
        return draft.placing.tensor.get(node.name, 1)
    return 1


def describe_rank_steps(draft: Draft) -> Iterator[str]:
    """Say where torch decodes with parts of matrices on GPUs, whose steps no CUDA graph has."""
    for node in draft.nodes:
        if node.traits.generates and node.layout.tensor > 1 and draft.is_on_gpus(node):
            why = "so each of its operations is launched by itself"
            yield f"{node.name}: no CUDA graph holds a step of several tensor ranks, {why}"


def find_replica_problems(
    draft: Draft, node: PlannedNode, option: str, count: int
) -> Iterator[str]:
    """Why a replica of a node that does not train cannot have several Workers. option: by which so
    many were asked for.
    """
    wish = f"{option}: {node.name}={count}"
    model = find_model(draft, node)
    fix = f"{node.name}=1"
    if model is not None and model.follows is not None and model.copies is None:
        why = f"{model.name!r} moves by its own steps, in one Worker"
        yield add_fix(f"{wish}, and {why}", fix)
    if node.name in draft.placing.least:
        why = "its replicas come and go, which one of several Workers does not"
        most = draft.placing.replicas.get(node.name, 1)
        yield add_fix(f"{wish}, and {why}", f"replicas: {node.name}={most}, or {option}: {fix}")


def find_lagged_rank_problems(
    nodes: Sequence[PlannedNode], turns: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    """Why ranks of a node whose weights come while it runs cannot be where they are. nodes: as they
    are placed.
    """
    training: set[str] = set()
    for node in nodes:
        if node.work == "train":
            training.update(node.workers)
    in_turns = set(chain.from_iterable(turns))
    for node in nodes:
        has_versions = node.lag > 0 and any(use.trained for use in node.models)
        if node.work == "train" or node.ranks == 1 or not has_versions:
            continue
        problem = f"tensor: {node.name}={node.layout.tensor} with a lag of {node.lag}"
        if shared := sorted(training.intersection(node.workers)):
            why = f"{shared[0]} trains, too, whose ranks would wait for its next version in a chunk"
            yield add_fix(f"{problem}, and {why}", f"other Workers, max_lag=0, or {node.name}=1")
        elif shared := sorted(in_turns.intersection(node.workers)):
            why = f"{shared[0]} takes turns with its devices, and weights come at any time"
            yield add_fix(f"{problem}, and {why}", f"no turns, max_lag=0, or {node.name}=1")


def _find_adapter_problems(draft: Draft, node: PlannedNode, wish: str) -> Iterator[str]:
    """Why ranks cannot have a part of each matrix of a Model with an adapter."""
    model = find_model(draft, node)
    if model is None or model.adapter is None:
        return
    why = f"the adapter of {model.name!r} is computed with whole matrices"
    fix = f"{node.name}=1"
    if node.work == "train" and not isinstance(model.adapter, Side):
        fix += f", or --ranks {wish.removeprefix('tensor: ')} --shard"
    yield add_fix(f"{wish}, and {why}", fix)


def _explain_lack(draft: Draft, node: PlannedNode) -> str:
    """Say that a node's kernel has no tensor ranks, and which one has. The fix is to follow."""
    operator = draft.graph.node(node.name).operator
    kernel = kernel_name(operator, node.kernel)
    other = find_tensor_kernel(operator, kernel)
    if other:
        return f"its kernel {kernel} has no tensor ranks. Fix: --kernel {node.name}={other}, or"
    return f"{node.operator} has no tensor ranks. Fix:"


def _find_shape(draft: Draft, node: PlannedNode) -> Shape | None:
    """The shape of the Model that a node computes with, or trains; None if unknown here."""
    model = find_model(draft, node)
    return None if model is None else model_cost(model.base, model.head).shape


def _find_indivisible(wish: str, name: str, shape: Shape, count: int) -> Iterator[str]:
    sizes = {
        "heads": shape.heads,
        "key heads": shape.kv_heads,
        "intermediate columns": shape.intermediate,
    }
    indivisible_sizes = [f"{size} {what}" for what, size in sizes.items() if size % count]
    if not indivisible_sizes:
        return
    nearest = count
    while any(size % nearest for size in sizes.values()):
        nearest -= 1
    problem = f"{wish}, and its Model has {', '.join(indivisible_sizes)}, which are not divisible"
    fix = f"{name}={nearest}"
    yield add_fix(problem, fix)
