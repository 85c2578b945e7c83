"""Who has which version of which trained Model.

    an offer      waits for                        ends with
    offering      the writer's Worker              Offered; then each reader elsewhere is told
    loading       each Worker of each reader       Loaded of each, or its loss; its block goes

    a reader      waits for                        ends with
    owed          its Worker to be there again,    Load
                  the writer not to be training

Owns: what a publish tells each Worker of each reader, which of them have not loaded it yet,
and the blocks that weights travel in. Does not own: when a version is published (core.py),
nor how the bytes travel.

A reader loads straight from a writer of one rank in its own Worker; for all others the writer's
Worker makes a block at once (Offer), so that it can go on training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from engine.coordinator.messages import Load, Loaded, Offer, Offered
from engine.coordinator.outstanding import Outstanding
from engine.plan.elastic import elastic
from engine.plan.plan import Plan, PlannedModel, PlannedNode

Place = tuple[str, str, str]
"""(reader, model, worker)."""


@dataclass(slots=True, eq=False)
class _Weights:
    """One version of one Model on its way. held: whom to tell when the block is known."""

    held: list[Load] = field(default_factory=list)
    offered: Offered | None = None


class Versions:
    """The readers of every Model that some train node writes, and of its followers."""

    def __init__(self, plan: Plan, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self._models = plan.models
        self._nodes = {n.name: n for n in plan.nodes}
        self._writers = {m.name: m.writer for m in plan.models if m.writer}
        self._late = {n.name for n in plan.nodes if n.lag}
        """Readers that may use an older version while they load this one."""
        self._published = 0
        self._weights: dict[tuple[str, int], _Weights] = {}
        """(model, version) -> what is on its way."""
        self._gone: list[tuple[str, int]] = []
        self._down: set[str] = set()
        self._owed: set[Place] = set()
        """Who is to be told of the published version as soon as possible."""
        self._fresh: set[Place] = set()
        """Who has had no version since its Worker restarted."""
        self._elastic = {n.name for n in elastic(plan)}
        """Readers whose replicas nobody waits for until they have had a version."""
        for worker in plan.spare:
            self.lost(worker)

    # --- publishing -------------------------------------------------------------------------------

    def publish(self, version: int, *, moved: bool = True) -> Iterator[Offer | Load]:
        """Tell every reader's Workers to load this version, and followers to move to their leader.

        moved: whether the version is new. At the start of a run it is not: readers load, followers
        stay.
        """
        self._published = version
        for model in self._models:
            if model.writer:
                yield from self._bring(model.name, self._publishes(model, version))
            elif moved and model.follows in self._writers and version % model.every == 0:
                yield from self._bring(model.follows, self._follows(model, version))

    def _publishes(self, model: PlannedModel, version: int) -> Iterator[Load]:
        writer = self._nodes[model.writer]
        for reader in model.readers:
            for worker in self._nodes[reader].workers:
                alias = reader in model.aliases and worker in writer.workers
                yield replace(self._load((reader, model.name, worker), version), alias=alias)

    def _follows(self, model: PlannedModel, version: int) -> Iterator[Load]:
        for reader in model.readers:
            for worker in self._nodes[reader].workers:
                load = self._load((reader, model.follows, worker), version)
                yield replace(load, model=model.name, leader=model.follows, rate=model.rate)

    def _load(self, place: Place, version: int) -> Load:
        """Without an id, which it gets when it is told."""
        reader, model, worker = place
        writer = self._writers[model]
        return Load(
            id=-1, model=model, writer=writer, reader=reader, version=version, worker=worker
        )

    def _bring(self, written: str, messages: Iterable[Load]) -> Iterator[Offer | Load]:
        """Tell at once who can load on the spot; for the others offer the Model, unless it is."""
        for message in messages:
            place = _place(message)
            self._owed.discard(place)
            if message.worker in self._down:
                self._owed.add(place)
                continue
            if self._on_the_spot(message):
                yield self._asked(message)
                continue
            weights = self._weights.get((written, message.version))
            if weights is None:
                weights = self._weights[written, message.version] = _Weights()
                yield self._offer(written, message)
            if weights.offered is None:
                weights.held.append(message)
            else:
                yield self._addressed(message, weights.offered)

    def _offer(self, written: str, message: Load) -> Offer:
        task = Offer(
            id=self._outstanding.new_id(),
            model=written,
            writer=message.writer,
            worker=self._nodes[message.writer].workers[0],
            version=message.version,
        )
        self._outstanding.ask(task)
        return task

    def _asked(self, message: Load) -> Load:
        task = replace(message, id=self._outstanding.new_id())
        self._outstanding.ask(task)
        return task

    def _addressed(self, message: Load, offered: Offered) -> Load:
        where = {"source": offered.worker, "block": offered.block, "digest": offered.digest}
        return self._asked(replace(message, **where))

    def _on_the_spot(self, message: Load) -> bool:
        return message.alias or self._nodes[message.writer].workers == (message.worker,)

    # --- what comes of it -------------------------------------------------------------------------

    def heard(self, event: Loaded | Offered, task: Offer | Load) -> list[Load]:
        """Note the answer to a task; returns who is told what now."""
        if isinstance(event, Offered):
            return self._offered(event, (task.model, task.version))
        if isinstance(task, Load) and task.version == self._published:
            self._fresh.discard(_place(task))
        self._let_go()
        return []

    def _offered(self, event: Offered, model: tuple[str, int]) -> list[Load]:
        """The weights are a block: tell who waits for it, or release it if nobody does."""
        weights = self._weights.get(model)
        if weights is None or weights.offered is not None:
            self._gone.append((event.worker, event.block))
            return []
        weights.offered = event
        told = [self._addressed(message, event) for message in weights.held]
        weights.held = []
        self._let_go()
        return told

    # --- losses -----------------------------------------------------------------------------------

    def lost(self, worker: str) -> None:
        """A Worker is gone, with its weights. It has no train node and no follower (else the run
        goes back to a checkpoint), so everything that it read can be loaded again.
        """
        self._down.add(worker)
        for model in self._models:
            for reader in model.readers if model.writer else ():
                if worker in self._nodes[reader].workers:
                    place = (reader, model.name, worker)
                    self._owed.add(place)
                    self._fresh.add(place)
        for weights in self._weights.values():
            weights.held = [message for message in weights.held if message.worker != worker]
        self._let_go()

    def opened(self, worker: str) -> None:
        """It is there again."""
        self._down.discard(worker)

    def lacks(self, node: str, worker: str) -> bool:
        """Whether a node still lacks a Model in a Worker that restarted."""
        return bool(self._fresh) and any(
            (reader, at) == (node, worker) for reader, _, at in self._fresh
        )

    def bring(self, *, may_offer: bool) -> list[Offer | Load]:
        """Tell who is owed the published version.

        may_offer: False while a writer's ranks may have to write files, and once the writers train
        the next version. Then this version is only loaded from a block that is already offered;
        others get the next one. That suffices: while a Step trains, nobody reads at lag 0, and
        later readers do not need this very version.
        """
        found: list[Offer | Load] = []
        if not self._owed:
            return found
        for place in sorted(place for place in self._owed if place[2] not in self._down):
            model = place[1]
            if may_offer or (model, self._published) in self._weights:
                found += self._bring(model, [self._load(place, self._published)])
        return found

    def _let_go(self) -> None:
        reads = {(load.source, load.block) for load in self._outstanding.tasks(Load)}
        for key, weights in [*self._weights.items()]:
            found = weights.offered
            if found is not None and not weights.held and (found.worker, found.block) not in reads:
                del self._weights[key]
                self._gone.append((found.worker, found.block))

    def drain(self) -> list[tuple[str, int]]:
        """(worker, block) of weights that everybody has loaded; each is returned once."""
        gone, self._gone = self._gone, []
        return gone

    # --- who has it -------------------------------------------------------------------------------

    @property
    def _loading(self) -> set[Place]:
        """Who was told of a version, or is to be, and has not loaded it; no replica that joins."""
        loads = self._outstanding.tasks(Load)
        if not (loads or self._weights or self._owed):
            return set()
        told = {_place(load) for load in loads}
        held = {_place(m) for weights in self._weights.values() for m in weights.held}
        late = (place for place in self._fresh if place[0] in self._elastic)
        return (self._owed | told | held).difference(late)

    @property
    def loaded_everywhere(self) -> bool:
        """Whether every reader has the published version."""
        return not self._loading

    @property
    def settled(self) -> bool:
        """Whether every reader that needs exactly the published version has it."""
        return all(reader in self._late for reader, _, _ in self._loading)

    @property
    def offered(self) -> bool:
        """Whether no offer is under way. Ranks make one together, and write files together whether
        asleep or awake: then no rank may still wait for its devices with an offer.
        """
        return all(weights.offered is not None for weights in self._weights.values())

    def behind(self, nodes: Iterable[PlannedNode]) -> bool:
        """Whether one of these nodes has not loaded the published version yet."""
        late = {reader for reader, _, _ in self._loading}
        return bool(late) and any(node.name in late for node in nodes)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = [
            f"{self._writers[model]}: has not offered {model!r} version {version}"
            for (model, version), weights in self._weights.items()
            if weights.offered is None
        ]
        return lines + [
            f"{reader} in {worker}: has not loaded {model!r} version {self._published}"
            for reader, model, worker in sorted(self._loading)
        ]


def _place(message: Load) -> Place:
    return message.reader, message.model, message.worker
