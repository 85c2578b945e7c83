"""The last pass: changes nothing, and refuses a plan that cannot run.

Owns: the checks of a finished plan. Does not own: the rules of graphs (dataflow/rules), nor
any number that is compared here (estimate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from dataflow.device import declared
from dataflow.errors import PlanError, nearest
from engine.cost.memory import HOST_PARTS, host_peak, lasting, peak
from engine.plan.draft import Draft
from engine.plan.plan import Fetch, PlannedInput, PlannedNode, elsewhere


def verify(draft: Draft) -> Draft:
    """The same draft. Raises PlanError with every check that failed, by its name."""
    problems = [f"{name}: {problem}" for name, check in CHECKS.items() for problem in check(draft)]
    if problems:
        raise PlanError("\n".join(problems))
    return draft


def _kernels(draft: Draft) -> Iterator[str]:
    """Each node has a kernel, each use of a Model a module."""
    for node in draft.nodes:
        if not node.kernel:
            yield f"{node.name} has none. Fix: the pass choose_kernels comes before this one."
        for use in node.models:
            if not use.module:
                yield (
                    f"{node.name} has no module for {use.model!r}. Fix: the pass place comes before"
                    " this one."
                )


def _producers(draft: Draft) -> Iterator[str]:
    """Whatever is fetched is made, by a node that runs before; and each gate is such a node."""
    before: set[str] = set()
    made = {n.name: n for n in draft.nodes}
    for node in draft.nodes:
        for i in node.inputs:
            yield from _input(node.name, i, before, made)
        before.add(node.name)
    for i in draft.recorded:
        yield from _input("recorded", i, before, made)


def _input(
    where: str, i: PlannedInput, before: set[str], made: Mapping[str, PlannedNode]
) -> Iterator[str]:
    for name in (i.gate, *(f.producer for f in i.fetches)):
        if name not in before:
            found = "runs after it" if name in made else "is no node"
            near = nearest(name, before) or "a node upstream"
            yield (
                f"{where}.{i.name} expects rows of a node upstream, {name!r} {found}. Fix: {near}."
            )
    for fetch in i.fetches:
        missing = [
            c
            for c in fetch.columns
            if fetch.producer in made and c not in made[fetch.producer].returns
        ]
        if missing or not fetch.columns:
            lacks = f"does not return {', '.join(missing)}" if missing else "is asked for no column"
            yield (
                f"{where}.{i.name}: {fetch.producer!r} {lacks}. Fix: the pass project says what"
                " returns."
            )


def _ratios(draft: Draft) -> Iterator[str]:
    """Rows of a node's inputs are a whole multiple, as stated, of the rows of each gate and of each
    producer.
    """
    made = {n.name: n for n in draft.nodes}
    for node in draft.nodes:
        for i in node.inputs:
            pairs: list[PlannedInput | Fetch] = [i, *i.fetches]
            wide = node.inner * max(1, i.fan_in)
            for part in pairs:
                above = made.get(part.gate if isinstance(part, PlannedInput) else part.producer)
                if above is not None and above.rows * part.ratio != wide:
                    yield (
                        f"{node.name}.{i.name}: {wide} rows a prompt, and {part.ratio} for each of"
                        f" the {above.rows} of {above.name!r}. Fix: rows that {above.name!r} is an"
                        " ancestor of."
                    )
        if node.rows % node.inner and node.relation != "source":
            yield (
                f"{node.name}: {node.rows} rows a prompt of {node.inner}. Fix: a whole number of"
                " rows for each."
            )


def _groups(draft: Draft) -> Iterator[str]:
    """Every update has at least one whole group, and the same number of groups where the Step is
    full.
    """
    batches = {s.name: s.batch for s in draft.sources}
    loose = {
        n.source
        for n in draft.nodes
        if n.relation == "subset" and not n.refill and n.region != "evaluation"
    }
    for node in (n for n in draft.nodes if n.work == "train"):
        parts, batch = draft.graph.node(node.name).params["minibatches"], batches.get(node.source)
        if batch is None or (batch % parts == 0) or (node.source in loose and batch >= parts):
            continue
        near = max(d for d in range(1, min(parts, batch) + 1) if batch % d == 0)
        yield (
            f"{node.name}: {batch} prompts in {parts} minibatches of whole groups. Fix:"
            f" minibatches={near}."
        )


def _constant(draft: Draft) -> Iterator[str]:
    """aggregate="constant" divides by the longest completion, which only a sampler sets."""
    for node in draft.graph.nodes:
        params = node.params
        if params.get("aggregate") == "constant" and not params.get("max_tokens"):
            problem = (
                f"{node.name}: aggregate='constant' divides by max_tokens, and nothing sampled its"
                " rows"
            )
            yield f"{problem}. Fix: aggregate='token_mean'."


def _workers(draft: Draft) -> Iterator[str]:
    """Each node is on as many Workers as it has replicas, times their ranks, each another, with
    threads there are.
    """
    for node in draft.nodes:
        layout, count = node.layout, node.layout.replicas * node.ranks
        if len(node.workers) != count or len(set(node.workers)) < count or not all(node.workers):
            split = f"{layout.replicas} replicas" + (
                f" of {node.ranks} ranks" if node.ranks > 1 else ""
            )
            yield f"{node.name}: {split} on {list(node.workers)}. Fix: a worker each."
        if layout.threads < 1:
            yield f"{node.name}: {layout.threads} threads. Fix: threads=1."


def _worlds(draft: Draft) -> Iterator[str]:
    """A Worker is a rank of one world: nodes of several ranks that share a Worker have the same
    ones, in one order.
    """
    grouped = [n for n in draft.nodes if n.ranks > 1]
    for i, node in enumerate(grouped):
        for other in grouped[:i]:
            if not set(node.workers) & set(other.workers):
                continue
            fix = f"or pin {node.name} to other workers"
            if node.workers != other.workers:
                shown = (
                    f"{other.name} has ranks on {','.join(other.workers)}, {node.name} on"
                    f" {','.join(node.workers)}"
                )
                yield f"{shown}: one process in two worlds. Fix: equal ranks, {fix}."
            elif node.layout.tensor != other.layout.tensor:
                shown = (
                    f"{other.name} has tensor {other.layout.tensor}, {node.name}"
                    f" {node.layout.tensor}"
                )
                yield (
                    f"{shown}, on the same workers. Fix: tensor: {node.name}={other.layout.tensor},"
                    f" {fix}."
                )


def _leases(draft: Draft) -> Iterator[str]:
    """Leases name Workers that there are, each in one of them; ranks that act in lock-step take no
    turns.
    """
    known = list(dict.fromkeys(w for n in draft.nodes for w in n.workers))
    seen: set[str] = set()
    for group in draft.leases:
        shown = ",".join(group)
        for worker in group:
            if worker not in known:
                fix = nearest(worker, known) or f"one of {', '.join(known)}"
                yield f"{shown}: expected a worker, found {worker!r}. Fix: {fix}."
            elif worker in seen:
                yield (
                    f"{shown}: {worker} is leased twice. Fix: one lease of all that share its"
                    " devices."
                )
            seen.add(worker)
        if len(group) < 2:
            yield (
                f"{shown}: a lease of one worker, which has nobody to take turns with. Fix: leave"
                " it out."
            )
        for node in draft.nodes:
            if node.ranks > 1 and len(set(node.workers) & set(group)) > 1:
                problem = f"{shown}: these are ranks of {node.name}, which act together"
                yield f"{problem}. Fix: pin {node.name} to workers of different leases."


def _hosts(draft: Draft) -> Iterator[str]:
    """Ranks that act together, and Workers that take turns, are on one host."""
    groups = [
        (n.name, tuple(r.worker for r in ranks)) for n in draft.nodes for ranks in n.rank_groups
    ]
    groups += [("leases", lease) for lease in draft.leases]
    for name, group in groups:
        hosts = dict.fromkeys(draft.hosts.get(w, "") for w in group)
        if len(hosts) > 1:
            together = f"{','.join(group)} are on {', '.join(hosts)}, and have to be on one host"
            yield f"{name}: {together}. Fix: {' '.join(f'{w}@{next(iter(hosts))}' for w in group)}."


def _chunks(draft: Draft) -> Iterator[str]:
    """A chunk has at least one prompt of its cohort; below the cut, of its Step."""
    batches = {s.name: s.cohort or s.batch for s in draft.sources}
    for node in draft.nodes:
        most = batches.get(node.source, node.chunks)
        if not 1 <= node.chunks <= most:
            problem = f"{node.name}: {node.chunks} chunks of {most} prompts"
            yield (
                f"{problem}. Fix: chunks: {node.name}={min(max(node.chunks, 1), most)}, or a larger"
                " batch."
            )


def _aliases(draft: Draft) -> Iterator[str]:
    """A module is shared with its writer only in the writer's Workers, unsharded, and above the cut
    only at lag 0.
    """
    writers = {u.module: n for n in draft.nodes for u in n.models if u.access == "write"}
    for node in draft.nodes:
        for use in node.models:
            writer = writers.get(use.module)
            if (
                writer is None
                or node is writer
                or node.work == "evaluate"
                or use.param == "tokenizer"
            ):
                continue
            apart = not set(node.workers) <= set(writer.workers)
            if apart or node.lag or writer.layout.partial:
                what = (
                    "from another worker"
                    if apart
                    else f"at lag {node.lag}"
                    if node.lag
                    else "of which its rank has a part"
                )
                yield (
                    f"{node.name} shares the weights of {use.model!r} {what}. Fix: weights of its"
                    " own."
                )


def _routes(draft: Draft) -> Iterator[str]:
    """Weights go by collectives between Workers of one host that do not take turns."""
    plan = {n.name: n for n in draft.nodes}
    for model in draft.models:
        if model.route == "pull" or not model.writer:
            continue
        writer = plan[model.writer].workers[0]
        for worker in elsewhere(model, draft.models, draft.nodes):
            hosts = [draft.hosts.get(w, "") for w in (writer, worker)]
            turns = next((lease for lease in draft.leases if {writer, worker} <= set(lease)), ())
            if hosts[0] != hosts[1]:
                problem = (
                    f"{writer} on {hosts[0]} and {worker} on {hosts[1]}, and collectives stay on"
                    " one host"
                )
                yield f"weights of {model.name!r} from {problem}. Fix: weights=pull."
            elif turns:
                problem = (
                    f"{writer} and {worker}, which take turns with their devices"
                    f" ({','.join(turns)})"
                )
                yield f"weights of {model.name!r} between {problem}. Fix: weights=pull."


def _device_columns(draft: Draft) -> Iterator[str]:
    """Columns on a device are read on its host, by Workers that do not take turns; what is recorded
    is on none.
    """
    plan = {n.name: n for n in draft.nodes}
    for edge in (e for e in draft.edges if e.device):
        made, columns = plan[edge.producer], ", ".join(edge.device)
        readers = {f"{edge.consumer} in {w}": w for w in plan[edge.consumer].workers}
        if made.region == "stream":
            readers |= {f"{draft.recorder}, which writes checkpoints,": draft.recorder}
        for sender, (who, reader) in ((s, r) for s in made.workers for r in readers.items()):
            here, there = draft.hosts.get(sender, ""), draft.hosts.get(reader, "")
            if here != there:
                problem = (
                    f"{edge.producer} in {sender} has {columns} on a device of {here}, {who} reads"
                    f" it on {there}"
                )
                yield (
                    f"{problem}: collectives stay on one host. Fix: pin"
                    f" {edge.producer}={sender}@{there}."
                )
        turns = next((lease for lease in draft.leases if set(made.workers) & set(lease)), ())
        if turns:
            problem = (
                f"{edge.producer} has {columns} on a device that {', '.join(turns)} have by turns"
            )
            yield (
                f"{problem}. Fix: pin {edge.producer} to another worker, or {columns} without"
                " device=True."
            )
    for fetch in (f for i in draft.recorded for f in i.fetches):
        device = declared(draft.graph.node(fetch.producer).schemas)
        for name in (c for c in fetch.columns if c in device):
            yield (
                f"{fetch.producer}: {name!r} is recorded of each Step, from the host. Fix: {name!r}"
                " not on a device."
            )


def _memory(draft: Draft) -> Iterator[str]:
    """The peak of each Worker fits, and that of all of a host: on the GPU what is on it, in host
    memory the rest.
    """
    workers = list(dict.fromkeys(w for n in draft.nodes for w in n.workers))
    for host in dict.fromkeys(draft.hosts.get(w, "") for w in workers):
        yield from _memory_of(draft, host, [w for w in workers if draft.hosts.get(w, "") == host])


def _memory_of(draft: Draft, host: str, names: list[str]) -> Iterator[str]:
    cluster = draft.cluster.on(host)
    where = f"host {host}" if host else "this host"
    workers = {w: [n for n in draft.nodes if w in n.workers] for w in names}
    parts = {w: [n.estimate.bytes for n in nodes] for w, nodes in workers.items()}
    leases = [
        [w for w in lease if w in workers] for lease in draft.leases
    ]  # of others the check of leases tells
    if cluster.gpus:
        for index in dict.fromkeys(draft.devices.get(w, 0) for w in names):
            here = [w for w in names if draft.devices.get(w, 0) == index]
            turns = [[w for w in lease if w in here] for lease in leases]
            on_gpu = host_peak(
                {w: parts[w] for w in here}, turns, without=HOST_PARTS, gives_back=True
            )
            gpu = f"{'the GPU' if len(cluster.gpus) == 1 else f'GPU {index}'}{f' of {where}' if host else ''}"
            yield from _fits(
                {w: workers[w] for w in here}, on_gpu, cluster.gpus[index], gpu, HOST_PARTS
            )
        held = sum(p.get(name, 0) for nodes in parts.values() for p in nodes for name in HOST_PARTS)
        held += sum(
            lasting(p, without=HOST_PARTS) for lease in leases for w in lease for p in parts[w]
        )
        if held > cluster.memory:
            name = ", ".join(workers)
            yield (
                f"{name}: rows of {_gib(held)} wait in {_gib(cluster.memory)}. Fix: a lower batch"
                " or max_lag."
            )
    else:
        yield from _fits(workers, host_peak(parts, leases), cluster.memory, where, ())


def _fits(
    workers: Mapping[str, list[PlannedNode]],
    need: int,
    room: int,
    where: str,
    without: tuple[str, ...],
) -> Iterator[str]:
    """What needs more than there is: a Worker alone, else all together."""
    if need <= room:
        return
    alone = {
        w: peak((n.estimate.bytes for n in nodes), without=without) for w, nodes in workers.items()
    }
    single = next((w for w, size in alone.items() if size > room or len(workers) == 1), "")
    nodes = workers[single] if single else [n for group in workers.values() for n in group]
    told = (
        f"{single} needs {_gib(alone[single])}"
        if single
        else f"{', '.join(workers)} together need {_gib(need)}"
    )
    parts = {
        (size, part, n.name)
        for n in nodes
        for part, size in n.estimate.bytes.items()
        if part not in without
    }
    largest = sorted(parts, reverse=True)[:4]
    shown = ", ".join(f"{part} of {name} {_gib(size)}" for size, part, name in largest)
    fix = _smaller(largest[0][1]) + ("" if single else ", or fewer workers")
    yield f"{told}, {where} has {_gib(room)}: {shown}. Fix: {fix}."


def _smaller(part: str) -> str:
    """The nearest way to less of a part."""
    if part in ("snapshot", "copies"):
        return "readers in the writer's worker (workers: one)"
    if part in ("kv_cache", "outbox", "device_columns"):
        return "a lower batch, n, max_tokens or max_prompt_tokens"
    if part in ("activations", "logits"):
        return "shorter rows: a lower max_tokens or max_prompt_tokens"
    return 'a smaller base, or dtype="bfloat16" for Models that are not trained'


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


CHECKS: dict[str, Callable[[Draft], Iterator[str]]] = {
    "kernels": _kernels,
    "producers": _producers,
    "ratios": _ratios,
    "groups": _groups,
    "constant": _constant,
    "workers": _workers,
    "worlds": _worlds,
    "leases": _leases,
    "hosts": _hosts,
    "chunks": _chunks,
    "aliases": _aliases,
    "routes": _routes,
    "device": _device_columns,
    "memory": _memory,
}
"""By the name that a PlanError gives: each yields what is wrong."""
