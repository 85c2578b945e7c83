"""Draws random small plans from a seed, with outcomes and settings to run them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from dataflow.kernel import Layout
from engine.coordinator.coordinator import Settings
from engine.plan.cluster import Cluster, Host, with_first
from engine.plan.passes.shape import set_lags
from engine.plan.plan import ModelUse, Plan, PlannedModel, PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.plan.planned_source import PlannedSource
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from tests.schedules.draft import POLICY, TARGET, NodeRows, PlanDraft


@dataclass(frozen=True, kw_only=True)
class ScheduleCase:
    """Everything that decides a run, but for its timing. together: as a Simulation's.
    shorts: how often memory runs out in an attempt at most.
    """

    seed: int
    plan: Plan
    settings: Settings
    rows: dict[str, int]
    outcomes: Outcomes
    together: int = 1
    shorts: int = 0

    @property
    def synchronous(self) -> bool:
        return all(s.max_lag == 0 for s in self.plan.sources)

    @property
    def whole_cohorts(self) -> bool:
        """Whether its chunks follow from its rows alone."""
        cohorts = all(n.chunking != "ready" for n in self.plan.nodes)
        as_they_come = any(source.stream == "arrival" for source in self.plan.sources)
        return cohorts and len(self.plan.sources) == 1 and not as_they_come

    def timing(self, seed: int) -> Durations:
        """How long things take in one run of the case."""
        draw = random.Random(f"{self.seed}/{seed}")
        if not self.synchronous and all(s.cohort == 1 for s in self.plan.sources):
            return overtaking(draw.randrange(1 << 30))
        return Durations(
            seed=draw.randrange(1 << 30),
            row={n.name: draw.choice((0.0, 0.1, 1.0, 5.0)) for n in self.plan.nodes},
            tail=draw.choice((0.0, 0.5, 1.5)),
            slow=draw.choice((0.0, 0.1)),
            train=draw.choice((0.5, 3.0, 10.0)),
            load=draw.choice((0.0, 0.3, 4.0)),
            store=draw.choice((0.0, 1.0, 5.0)),
            slots=draw.choice((1, 2, 8)),
            loads=draw.choice(("drain", "interrupt")),
        )


def overtaking(seed: int) -> Durations:
    """Some rows take so long that many Steps could pass them by."""
    quick = {"train": 0.1, "load": 0.5, "store": 0.0, "slots": 8, "loads": "interrupt"}
    return Durations(seed=seed, slow=0.15, slower=60.0, **quick)


def drawn_case(
    seed: int, *, up: bool = False, beside: bool = False, own: bool = False
) -> ScheduleCase:
    """The case of a seed. up: with generations whose numbers go up and wait for all descendants;
    beside: with rows of several generations in one group; own: with a second source, of rows that a
    term of the first train node's loss has of its own.
    """
    draw = random.Random(seed)
    lag = draw.choice((0, 0, 1, 4))
    overtaking = lag > 0 and draw.random() < 0.5
    draft = _draft(draw, lag, overtaking)
    batch = draw.randint(1, 4)
    sources = [_first_source(draw, batch, lag, overtaking)]
    ports = _stream(draft)
    if beside:
        _beside(draft, ports)
    if up:
        _go_up(draft, ports)
    _step(draft, beside=beside)
    if own:
        sources.append(_own_rows(draft))
    elif draw.random() < 0.15:
        sources.append(_second_source(draft))
    if draw.random() < 0.4:
        _evaluation(draft)
    plan = _plan(draft, seed, sources)
    steps = draw.choice((None, draw.randint(1, 5))) if not overtaking else 6
    settings = Settings(
        steps=steps,
        checkpoint_every=draw.choice((0, 1, 2, 3)),
        checkpoint_seconds=_timed(seed),
        error_budget=1.0,
        patience=1e-9,  # no prompt is ever given up in vain, whatever the weather
    )
    draw.choice((0, 1))  # so that seeds that once failed are the same cases as then
    outcomes = Outcomes(seed=seed, keep=draft.keep, groups=frozenset(draft.groups), fail=draft.fail)
    return ScheduleCase(
        seed=seed,
        plan=_patient(plan) if any(n.refill for n in plan.nodes) else plan,
        settings=settings,
        rows={
            "prompts": draw.randint(1, 5 * batch + 2),
            "other": draw.randint(1, 12),
            "questions": draw.randint(1, 4),
        },
        outcomes=outcomes,
    )


def lossy(case: ScheduleCase) -> ScheduleCase:
    """The same, with rows that are lost alone, drawn apart so that a seed's case stays the same."""
    draw, lose = random.Random(f"{case.seed}/lose"), {}
    for node in case.plan.nodes:
        if node.region == "stream" and draw.random() < 0.4:
            lose[node.name] = draw.choice((0.05, 0.3, 0.6))
        elif node.region == "evaluation" and node.relation != "source":
            lose[node.name] = draw.choice((0.0, 0.2))
    return replace(
        case,
        outcomes=replace(case.outcomes, lose=lose),
        settings=replace(case.settings, error_budget=1000.0),
        rows=case.rows | {"questions": 4},  # of which some answers are left
    )


def _draft(draw: random.Random, lag: int, overtaking: bool) -> PlanDraft:
    """Nothing planned yet. overtaking: many Workers, so that rows pass one another by."""
    pool = tuple(f"w{i}" for i in range(6 if overtaking else draw.choice((1, 1, 3, 5))))
    chunkings = ("ready",) if overtaking else draw.choice((("cohort",), ("cohort", "ready")))
    replicas = 6 if overtaking else 3
    return PlanDraft(draw=draw, pool=pool, lag=lag, chunkings=chunkings, replicas=replicas)


def _first_source(draw: random.Random, batch: int, lag: int, overtaking: bool) -> PlannedSource:
    intake = draw.choice(("exact", "exact", "admission", "drop"))
    cohort = 1 if overtaking else draw.choice((0, 0, 0, 1, 2, batch))
    return PlannedSource(name="prompts", batch=batch, max_lag=lag, intake=intake, cohort=cohort)


def _plan(draft: PlanDraft, seed: int, sources: list[PlannedSource]) -> Plan:
    draw, nodes = draft.draw, (*draft.nodes, *draft.trains)
    return Plan(
        graph=f"case{seed}",
        digest="",
        seed=seed,
        nodes=set_lags((*draft.nodes, *(_tensor(seed, n) for n in draft.trains)), sources),
        sources=tuple(sources),
        models=_models(draft),
        recorded=_recorded(draft) if draw.random() < 0.5 else (),
        recorder=draw.choice([worker for node in nodes for worker in node.workers]),
        turns=_turns(draft) if draw.random() < 0.25 else (),
        hosts=_hosts(seed, draft.pool),
        cluster=_cluster(seed),
    )


def _hosts(seed: int, workers: tuple[str, ...]) -> dict[str, str]:
    """Several hosts in half of the cases; drawn apart so that a seed's case stays the same."""
    draw = random.Random(f"{seed}/hosts")
    if draw.random() < 0.5:
        return {}
    return {worker: draw.choice(("a", "b", "c", "d")) for worker in workers}


def _cluster(seed: int) -> Cluster | None:
    """These hosts in two regions, in half of the cases; each anywhere."""
    draw = random.Random(f"{seed}/regions")
    if draw.random() < 0.5:
        return None
    regions = {name: draw.choice(("east", "west")) for name in "abcd"}
    hosts = [Host(name=name, cores=8, memory=2**34, region=regions[name]) for name in regions]
    return with_first(hosts)


def _turns(draft: PlanDraft) -> tuple[tuple[str, ...], ...]:
    """Some of the Workers on the same devices, once or twice over; never two ranks of one node."""
    nodes = (*draft.nodes, *draft.trains)
    there = list(dict.fromkeys(worker for node in nodes for worker in node.workers))
    draft.draw.shuffle(there)
    cut = draft.draw.randint(2, max(2, len(there)))
    shared = [_one_of_each(draft.trains, some) for some in (there[:cut], there[cut:])]
    return tuple(some for some in shared if len(some) > 1)


def _one_of_each(nodes: list[PlannedNode], workers: list[str]) -> tuple[str, ...]:
    """The Workers, but of the ranks of each node the first alone."""
    for node in nodes:
        ranks = [worker for worker in workers if worker in node.workers]
        workers = [worker for worker in workers if worker not in ranks[1:]]
    return tuple(workers)


def _tensor(seed: int, node: PlannedNode) -> PlannedNode:
    """Tensor ranks for half of these nodes, drawn apart so that a seed's case stays the same."""
    draw, count = random.Random(f"{seed}/{node.name}/tensor"), len(node.workers)
    tensor = draw.choice([n for n in range(2, count + 1) if count % n == 0] or [1])
    layout = Layout(data=count // tensor, tensor=tensor)
    return replace(node, layout=layout) if draw.random() < 0.5 else node


def _timed(seed: int) -> float:
    """Half of the runs are stored by the clock, too. Drawn apart from all else, as in _tensor."""
    return random.Random(f"{seed}/timed").choice((0.0, 0.0, 2.0, 20.0, 100.0))


def _patient(plan: Plan) -> Plan:
    return replace(plan, nodes=tuple(replace(n, max_attempts=1000) for n in plan.nodes))


def _stream(draft: PlanDraft) -> list[NodeRows]:
    """From the source to the cut."""
    draw = draft.draw
    ports = [draft.add("prompts", [], work="source", relation="source")]
    samples = draw.choice((1, 2, 3))
    if draw.random() < 0.9:
        models = (POLICY,) if draw.random() < 0.9 else ()
        relation = "expand" if samples > 1 else draw.choice(("same", "expand"))
        how = {"work": "decode", "relation": relation, "models": models}
        ports.append(draft.add("rollout", ports[:], factor=samples, **how))
    for number in range(draw.randint(0, 5)):
        ports.append(_stream_node(draft, f"node{number}", ports))
    for name in (n.name for n in draft.nodes):
        if draw.random() < 0.06:
            draft.fail[name] = draw.choice((0.03, 0.2))
    return ports


def _stream_node(draft: PlanDraft, name: str, ports: list[NodeRows]) -> NodeRows:
    draw = draft.draw
    kind = draw.choice(("host", "host", "group", "forward", "select", "select", "expand", "lagged"))
    chosen = draft.pick(ports, 2)
    if kind == "select":
        draft.keep[name] = draw.choice((0.3, 0.7, 0.9))
        if draw.random() < 0.6:
            draft.groups.add(name)
        refill = draw.random() < 0.5
        return draft.add(name, chosen, work="select", relation="subset", refill=refill)
    if kind == "expand" and max(p.rows for p in chosen) < 4:
        return draft.add(name, chosen, work="decode", relation="expand", factor=2)
    if kind == "lagged" and draft.lag > 0:
        return draft.add(name, chosen, work="forward", models=(POLICY,), max_lag=draft.lag)
    scope = "group" if kind == "group" else "row"
    return draft.add(name, chosen, work="forward" if kind == "forward" else "host", scope=scope)


def _go_up(draft: PlanDraft, ports: list[NodeRows]) -> None:
    """Generations below some rows, some selected away or failed, and the mean of what is left."""
    draw = draft.draw
    for number in range(draw.randint(1, 2)):
        onto = draw.choice([p for p in ports if p.rows < 4])
        rows = draw.choice((1, 1, 2))
        fields = {"work": "decode", "models": (POLICY,) if draw.random() < 0.7 else ()}
        below = draft.add(f"turn{number}", [onto], relation="expand", factor=rows, **fields)
        if draw.random() < 0.5:
            judges = {"work": "decode", "relation": "expand", "factor": draw.choice((1, 2))}
            below = draft.add(f"judge{number}", [below], **judges)
        if draw.random() < 0.5:
            name = f"left{number}"
            draft.keep[name] = draw.choice((0.5, 0.8, 0.95))
            if draw.random() < 0.5:
                draft.groups.add(name)
            refill = draw.random() < 0.5
            below = draft.add(name, [below], work="select", relation="subset", refill=refill)
        if draw.random() < 0.2:
            draft.fail[f"turn{number}"] = draw.choice((0.03, 0.2))
        ports.append(draft.reduce(f"mean{number}", below, onto))


def _beside(draft: PlanDraft, ports: list[NodeRows]) -> None:
    """Further generations, some selected away or failed, side by side with other rows; then nodes
    on these: a group, a generation, another concat.
    """
    draw = draft.draw
    for number in range(draw.randint(1, 2)):
        parts = [draw.choice(ports)]
        for part in range(draw.randint(1, 2)):
            name, onto = f"also{number}{part}", draw.choice([p for p in ports if p.rows < 4])
            fields = {"work": "decode", "models": (POLICY,) if draw.random() < 0.7 else ()}
            made = draft.add(name, [onto], relation="expand", factor=draw.choice((1, 2)), **fields)
            if draw.random() < 0.2:
                draft.fail[name] = draw.choice((0.03, 0.2))
            if draw.random() < 0.4:
                made = _some(draft, f"some{number}{part}", made)
            parts.append(made)
        draw.shuffle(parts)
        ports.append(draft.concat(f"concat{number}", parts))
        if draw.random() < 0.6:
            chosen = draft.pick(ports[-1:], 1)
            ports.append(draft.add(f"of_group{number}", chosen, scope="group"))
        if draw.random() < 0.4 and ports[-1].rows < 8:
            fields = {"work": "decode", "relation": "expand", "models": (POLICY,)}
            ports.append(draft.add(f"again{number}", ports[-1:], factor=2, **fields))


def _some(draft: PlanDraft, name: str, made: NodeRows) -> NodeRows:
    draw = draft.draw
    draft.keep[name] = draw.choice((0.5, 0.8, 0.95))
    if draw.random() < 0.5:
        draft.groups.add(name)
    refill = draw.random() < 0.5
    return draft.add(name, [made], work="select", relation="subset", refill=refill)


def _step(draft: PlanDraft, *, beside: bool) -> None:
    """From the cut to the train nodes. beside: with rows above and below the cut in one group."""
    draw = draft.draw
    ports = list(draft.unread.values())
    for number in range(draw.randint(0, 3)):
        kind = draw.choice(("reader", "reader", "batch", "frozen", "target", "select"))
        chosen = draft.pick(ports, 2)
        name = f"below{number}"
        if kind == "select":
            draft.keep[name] = 0.7
            ports.append(draft.add(name, chosen, work="select", relation="subset", region="step"))
            continue
        models = {"reader": (POLICY,), "target": (TARGET,)}.get(kind, ())
        work, scope = ("host", "batch") if kind == "batch" else ("forward", "row")
        ports.append(draft.add(name, chosen, work=work, scope=scope, models=models, region="step"))
    if beside and draw.random() < 0.7:
        below = [port for port in ports if port.gate.startswith("below")]
        parts = draw.sample(ports, min(2, len(ports)))
        parts = parts if not below or below[-1] in parts else [*parts, below[-1]]
        ports.append(draft.concat("both", parts, region="step"))
    writers = [("learn", "policy")] + ([("criticise", "critic")] if draw.random() < 0.4 else [])
    draw.shuffle(writers)
    rest: list[list[NodeRows]] = [[], []]
    for gate in list(draft.unread):
        rest[draw.randrange(len(writers))].append(draft.unread[gate])
    for (name, model), mine in zip(writers, rest, strict=False):
        _train(draft, name, model, mine or [draw.choice(ports)])


def _train(draft: PlanDraft, name: str, model: str, ports: list[NodeRows]) -> None:
    """A train node; rows of another domain are read by a train node of their own."""
    how = {"work": "train", "relation": "sink", "region": "step"}
    widest = max(ports, key=lambda p: p.rows)
    for other in [p for p in ports if widest.rows % p.rows]:
        ports.remove(other)
        draft.add(f"{name}_{other.gate}", [other], **how)
    use = ModelUse(param="model", model=model, access="write")
    draft.add(name, ports, scope="batch", models=(use,), **how)


def _second_source(draft: PlanDraft) -> PlannedSource:
    draw, of = draft.draw, {"source": "other"}
    first = draft.add("other", [], work="source", relation="source", **of)
    second = draft.add("prepare", [first], chunking=draft.chunking(), **of)
    use = ModelUse(param="model", model="other_model", access="write")
    how = {"work": "train", "relation": "sink", "region": "step"}
    draft.add("learn_other", [second], models=(use,), **how, **of)
    lag = draft.lag if draw.random() < 0.5 else 0
    return PlannedSource(name="other", batch=draw.randint(1, 3), max_lag=lag)


def _own_rows(draft: PlanDraft) -> PlannedSource:
    """Demonstrations or pairs, some of them selected away, beside the rows of a train node."""
    draw, of = draft.draw, {"source": "other"}
    how = {"work": "source", "relation": "source", "factor": draw.choice((1, 2))}
    ports = [draft.add("other", [], **how, **of)]
    if draw.random() < 0.7:
        ports.append(draft.add("prepare", ports[:], chunking=draft.chunking(), **of))
    if draw.random() < 0.4:
        draft.keep["choose"] = draw.choice((0.3, 0.8))
        draft.groups.add("choose")
        given = {"work": "select", "relation": "subset", "refill": draw.random() < 0.5}
        ports.append(draft.add("choose", ports[:], **given, **of))
    if draw.random() < 0.4:
        given = {"work": "forward", "models": (POLICY,), "region": "step"}
        ports.append(draft.add("compare", ports[-1:], **given, **of))
    widest = max(port.rows for port in ports)
    read = draft.read(
        [ports[-1], *draw.sample(ports[:-1], draw.randint(0, len(ports) - 1))], widest
    )
    named = tuple(replace(i, name=f"own.{i.name}", row_set="own.in0") for i in read)
    node = draft.trains[0]
    draft.trains[0] = replace(node, inputs=(*node.inputs, *named))
    lag = draft.lag if draw.random() < 0.5 else 0
    return PlannedSource(name="other", batch=draw.randint(1, 3), max_lag=lag)


def _evaluation(draft: PlanDraft) -> None:
    draw = draft.draw
    of = {"source": "questions", "region": "evaluation"}
    asked = draft.add("questions", [], work="source", relation="source", **of)
    decode = {"work": "decode", "relation": "expand", "models": (POLICY,)}
    answer = draft.add("answer", [asked], factor=2, **decode, **of)
    mark = draft.add("mark", [answer], **of)
    if draw.random() < 0.3:
        draft.keep["pass"] = 0.5
        mark = draft.add("pass", [mark], work="select", relation="subset", **of)
    exam = {"work": "evaluate", "relation": "sink", "models": (POLICY,)}
    draft.add("exam", [mark], every=draw.randint(1, 3), **exam, **of)
    if draw.random() < 0.3:
        draft.add("exam2", [mark], every=draw.randint(1, 3), **exam, **of)


def _models(draft: PlanDraft) -> tuple[PlannedModel, ...]:
    nodes = [*draft.nodes, *draft.trains]
    models = [_trained(draft, node, use) for node in draft.trains for use in node.models]
    followers = tuple(n.name for n in nodes if TARGET in n.models)
    every = draft.draw.choice((1, 2))
    if followers:
        target = {"readers": followers, "follows": "policy", "rate": 0.1, "every": every}
        models.append(PlannedModel(name="target", base="b", **target))
    return tuple(models)


def _trained(draft: PlanDraft, node: PlannedNode, use: ModelUse) -> PlannedModel:
    """The Model that a train node writes; some of its readers share the writer's module."""
    nodes = [n for n in (*draft.nodes, *draft.trains) if _reads(n, use.model)]
    soon = [n.name for n in nodes if not (draft.lag and n.region == "stream")]
    aliases = tuple(name for name in soon if draft.draw.random() < 0.7)
    readers = tuple(n.name for n in nodes)
    return PlannedModel(
        name=use.model, base="b", writer=node.name, readers=readers, aliases=aliases
    )


def _reads(node: PlannedNode, model: str) -> bool:
    """Whether it has weights of its own; an evaluation only names what it judges."""
    reads = any((use.model, use.access) == (model, "read") for use in node.models)
    return reads and node.work != "evaluate"


def _recorded(draft: PlanDraft) -> tuple[PlannedInput, ...]:
    return tuple(
        replace(next(i for i in n.inputs if i.ratio == 1), name=n.name) for n in draft.trains
    )
