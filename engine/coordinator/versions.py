"""Who has which version of which trained Model.

    an offer      waits for                        ends with
    offering      the writer's Worker              Offered; then readers elsewhere are told
    loading       each Worker of each reader       Loaded of each, or its loss; its blocks go

    a reader      waits for                        ends with
    owed          its Worker to be there again,    Load
                  the writer not to be training
    held          a source for it                  Load

Owns: what a publish tells each Worker of each reader, and the blocks that weights travel in. Does
not own: when a version is published (course.py), who has not loaded it yet
(weight_readers.py), which source each loads from (weight_tree.py), nor how the bytes travel.

A reader loads straight from a writer of one rank in its own Worker; for all others the writer's
Worker makes a block at once (Offer), so that it can go on training. Readers ask for the block when
they can load it, and the writer pushes nothing: a reader that drains a chunk may be ready minutes
later, and a push would hold the writer up that long (decision 0013).

Nobody waits for the answer of a reader at lag 0 in the writer's Worker: that carries out the load
before all that it is told later, so that the next chunk can be told at once.

On other hosts the first readers keep what they fetched, and others load from them. A source that
cannot be reached is one no more, and who asked it is told another; without any the version is
offered again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from engine.coordinator.recovery import nobody_considers
from engine.coordinator.task_ledger import Outstanding
from engine.coordinator.weight_readers import Place, StillLoading, list_readers, place_of
from engine.coordinator.weight_tree import WeightSource, WeightTree
from engine.plan.plan import Plan, PlannedModel, PlannedNode
from engine.plan.replica_ranges import elastic_nodes
from engine.protocol.messages import Fetched, FetchFailed, Load, Loaded, Offer, Offered


@dataclass(slots=True, eq=False)
class _Weights:
    """One version of one Model on its way. held: whom to tell once there is a source for them.
    offered: whether the writer's first rank has made its block.
    """

    tree: WeightTree
    held: list[Load] = field(default_factory=list)
    offered: bool = False


class Versions:
    """The readers of every Model that some train node writes, of its followers, and of Tables,
    which are versions like a Model's.
    """

    def __init__(self, plan: Plan, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self._models = plan.states
        self._nodes = {n.name: n for n in plan.nodes}
        self._writers = {m.name: m.writer for m in plan.states if m.writer}
        self._readers = list_readers(plan)
        self._late = {n.name for n in plan.nodes if n.lag}
        """Readers that may use an older version while they load this one."""
        self._in_turns = frozenset(chain.from_iterable(plan.turns))
        """Workers that may be told later, once they have their devices."""
        self._published = 0
        self._weights: dict[tuple[str, int], _Weights] = {}
        """(model, version) -> what is on its way."""
        self._host_of = plan.host_of
        self._region_of = plan.regions.__getitem__
        self._is_freed = False
        """Whether a load has ended, so that who is held may have a source now."""
        self._gone: list[tuple[str, int]] = []
        self._leaving: list[tuple[str, int]] = []
        """Blocks that nobody is told to load from any more, and some may still read."""
        self._down: set[str] = set()
        self._owed: dict[str, set[Place]] = {}
        """By Worker, who is to be told of the published version as soon as possible."""
        self._due: set[str] = set()
        """The Workers of these that are there."""
        self._loading = StillLoading(n.name for n in elastic_nodes(plan))
        self._reads: Counter[tuple[str, int]] = Counter()
        """Blocks of weights that are being loaded."""
        self._under_way: Counter[tuple[str, int]] = Counter()
        """(model, version) -> loads of it from a block."""
        outstanding.on_load = self._count_load
        self.on_able: Callable[[str], None] = nobody_considers
        """Called with a Worker that has a version, after it had none."""
        for worker in plan.spare:
            self.forget_worker(worker)

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
                load = self._load((reader, model.name, worker), version)
                yield replace(load, alias=True) if alias else load

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
        held: dict[tuple[str, int], None] = {}
        for message in messages:
            place = place_of(message)
            self._settle(place)
            if message.worker in self._down:
                self._owe(place)
                continue
            if self._on_the_spot(message):
                yield self._ask_load(message)
                continue
            key = written, message.version
            if key not in self._weights:
                self._weights[key] = _Weights(WeightTree(self._host_of, self._region_of))
                yield self._offer(written, message)
            self._weights[key].held.append(message)
            self._loading.add(place)
            held[key] = None
        # Together, so that who loads first knows that others wait for what it has.
        for key in held:
            if self._weights[key].tree.sources:
                yield from self._ask_held(key)

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

    def _ask_load(self, message: Load) -> Load:
        task = replace(message, id=self._outstanding.new_id())
        self._outstanding.ask(task)
        return task

    def _ask_held(self, key: tuple[str, int]) -> list[Load]:
        """Tell those who are held from whom to load, as far as there are sources for them."""
        weights = self._weights[key]
        waiting, weights.held = weights.held, []
        # A way into another region takes longest, so it begins first.
        messages = sorted(waiting, key=lambda message: not weights.tree.crosses(message.worker))
        loads: list[Load] = []
        for place, message in enumerate(messages):
            number = self._outstanding.new_id()
            others_wait = bool(weights.held) or place + 1 < len(messages)
            choice = weights.tree.choose(number, message.worker, others_wait=others_wait)
            if choice is None:
                weights.held.append(message)
                continue
            source = choice.source
            load = replace(
                message,
                id=number,
                source=source.worker,
                block=source.block,
                digest=source.digest,
                keeps=choice.keeps,
            )
            self._outstanding.ask(load)
            # Only now that it loads, which is a reason to wait, too: in between nobody counts as
            # having the version.
            self._loading.drop(place_of(message))
            loads.append(load)
        return loads

    def _ask_all_held(self) -> list[Load]:
        """The same for every version, where loads have ended since the last call."""
        loads: list[Load] = []
        if self._is_freed:
            self._is_freed = False
            for key in list(self._weights):
                self._owe_if_sourceless(key)
            for key in self._weights:
                loads += self._ask_held(key)
        return loads

    def _owe_if_sourceless(self, key: tuple[str, int]) -> None:
        """Have a version offered again that nobody has any more, if somebody waits for it."""
        weights = self._weights[key]
        if weights.offered and not weights.tree.sources:
            del self._weights[key]
            for message in weights.held:
                self._loading.drop(place_of(message))
                self._owe_again(message)

    def _on_the_spot(self, message: Load) -> bool:
        return message.alias or self._nodes[message.writer].workers == (message.worker,)

    # --- what comes of it -------------------------------------------------------------------------

    def note_answer(
        self, event: Loaded | Offered | Fetched | FetchFailed, task: Offer | Load
    ) -> list[Load]:
        """Note the answer to a task; returns who is told what now."""
        loads: list[Load] = []
        match event:
            case Offered():
                loads = self._take_offer(event, task)
            case Fetched() if isinstance(task, Load):
                loads = self._take_fetched(event, task)
            case FetchFailed() if isinstance(task, Load):
                self._take_failure(event, task)
            case Loaded() if task.version == self._published and isinstance(task, Load):
                place = place_of(task)
                self._loading.has_one(place)
                self.on_able(place[2])
        self._let_go()
        return loads

    def _take_offer(self, event: Offered, task: Offer | Load) -> list[Load]:
        """Tell who waits for these weights, which are a block now, or release it if nobody does."""
        key = task.model, task.version
        weights = self._weights.get(key)
        if weights is not None:
            weights.offered |= event.worker == task.worker
        if weights is None or event.worker in weights.tree.sources:
            self._gone.append((event.worker, event.block))
            return []
        source = WeightSource(worker=event.worker, block=event.block, digest=event.digest)
        weights.tree.add(source)
        return self._ask_held(key)

    def _take_fetched(self, event: Fetched, task: Load) -> list[Load]:
        """A reader's Worker has the weights as a block: it is a source, too."""
        key = _written(task), task.version
        weights = self._weights.get(key)
        if weights is None or event.worker in weights.tree.sources:
            self._leaving.append((event.worker, event.block))
            return []
        weights.tree.end(task.id)
        source = WeightSource(worker=event.worker, block=event.block, digest=task.digest)
        weights.tree.add(source)
        return self._ask_held(key)

    def _take_failure(self, event: FetchFailed, task: Load) -> None:
        """A reader could not reach its source: it gets another, or the published version."""
        weights = self._weights.get((_written(task), task.version))
        source = None if weights is None else weights.tree.drop(event.peer)
        if source is not None:
            self._leaving.append((source.worker, source.block))
        if weights is not None and weights.tree.sources:
            weights.held.append(task)
            self._loading.add(place_of(task))
        else:
            self._owe_again(task)
        self._is_freed = True

    def _owe_again(self, message: Load) -> None:
        """What a reader was to load is nowhere: it is owed what is published, unless it was told
        that since. A follower is told nothing: its leader's writer is gone, and the run goes back.
        """
        if not message.leader and message.version == self._published:
            self._owe(place_of(message))

    # --- losses -----------------------------------------------------------------------------------

    def forget_worker(self, worker: str) -> None:
        """Note that a Worker is gone, with its weights. It has no train node and no follower (else
        the run goes back to a checkpoint), so everything that it read can be loaded again.
        """
        self._down.add(worker)
        self._due.discard(worker)
        for reader, model in self._readers.get(worker, ()):
            place = (reader, model, worker)
            self._loading.has_none(place)
            self._owe(place)
        for weights in self._weights.values():
            of_worker = [message for message in weights.held if message.worker == worker]
            for message in of_worker:
                weights.held.remove(message)
                self._loading.drop(place_of(message))
            weights.tree.drop(worker)
        self._is_freed = True
        self._let_go()
        self._leaving = [place for place in self._leaving if place[0] != worker]
        self._gone = [place for place in self._gone if place[0] != worker]

    def note_opened(self, worker: str) -> None:
        """Note that a Worker is there again: it is told what it is owed."""
        self._down.discard(worker)
        if worker in self._owed:
            self._due.add(worker)

    def lacks(self, node: str, worker: str) -> bool:
        """Whether a node still lacks a Model in a Worker that restarted."""
        return self._loading.lacks(node, worker)

    def bring(self, *, may_offer: bool) -> list[Offer | Load]:
        """Tell who is owed the published version, and who is held and has a source now.

        may_offer: False while a writer's ranks may have to write files, and once the writers train
        the next version. Then this version is only loaded from a block that is already offered;
        others get the next one. That suffices: while a Step trains, nobody reads at lag 0, and
        later readers do not need this very version.
        """
        tasks: list[Offer | Load] = [*self._ask_all_held()]
        if not self._due:
            return tasks
        loads_by_model: dict[str, list[Load]] = {}
        for place in sorted(chain.from_iterable(self._owed[worker] for worker in self._due)):
            load = self._load(place, self._published)
            loads_by_model.setdefault(place[1], []).append(load)
        for model, loads in loads_by_model.items():
            if may_offer or (model, self._published) in self._weights:
                tasks += self._bring(model, loads)
        return tasks

    def _let_go(self) -> None:
        for key, weights in [*self._weights.items()]:
            if weights.offered and not weights.held and not self._under_way[key]:
                del self._weights[key], self._under_way[key]
                sources = weights.tree.sources.values()
                self._gone += [(source.worker, source.block) for source in sources]
        leaving, self._leaving = self._leaving, []
        for place in leaving:
            (self._leaving if self._reads[place] else self._gone).append(place)

    def drain(self) -> list[tuple[str, int]]:
        """(worker, block) of weights that everybody has loaded; each is returned once."""
        gone, self._gone = self._gone, []
        return gone

    # --- who has it -------------------------------------------------------------------------------

    def _owe(self, place: Place) -> None:
        """It is to be told of the published version, as soon as its Worker is there."""
        owed = self._owed.setdefault(place[2], set())
        if place not in owed:
            owed.add(place)
            self._loading.add(place)
        if place[2] not in self._down:
            self._due.add(place[2])

    def _settle(self, place: Place) -> None:
        """It is told, or put off."""
        owed = self._owed.get(place[2], set())
        if place in owed:
            owed.discard(place)
            self._loading.drop(place)
        if not owed:
            self._owed.pop(place[2], None)
            self._due.discard(place[2])

    def _count_load(self, load: Load, more: int) -> None:
        """Count one load more (1), or less (-1)."""
        if self._comes_first(load):
            return
        if more > 0:
            self._loading.add(place_of(load))
        else:
            self._loading.drop(place_of(load))
            self._end_load(load)
        if load.source:
            self._under_way[_written(load), load.version] += more
        self._reads[load.source, load.block] += more
        if not self._reads[load.source, load.block]:
            del self._reads[load.source, load.block]

    def _comes_first(self, load: Load) -> bool:
        """Whether nobody waits for a load: it needs no other Worker, and comes before what is told
        later.
        """
        in_order = load.reader not in self._late and load.worker not in self._in_turns
        return in_order and not load.source

    def _end_load(self, load: Load) -> None:
        """It needs its source no more, whatever has become of it."""
        weights = self._weights.get((_written(load), load.version))
        if weights is not None and load.source:
            weights.tree.end(load.id)
            self._is_freed |= bool(weights.held)

    @property
    def loaded_everywhere(self) -> bool:
        """Whether every reader has the published version."""
        return not self._loading.readers

    @property
    def is_settled(self) -> bool:
        """Whether every reader that needs exactly the published version has it."""
        return self._loading.readers.keys() <= self._late

    @property
    def no_offer_under_way(self) -> bool:
        """Whether no offer is under way. Ranks make one together, and write files together whether
        asleep or awake: then no rank may still wait for its devices with an offer.
        """
        return all(weights.offered for weights in self._weights.values())

    def behind(self, nodes: Iterable[PlannedNode]) -> bool:
        """Whether one of these nodes has not loaded the published version yet."""
        late = self._loading.readers
        return bool(late) and any(node.name in late for node in nodes)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = [
            f"{self._writers[model]}: has not offered {model!r} version {version}"
            for (model, version), weights in self._weights.items()
            if not weights.offered
        ]
        return lines + [
            f"{reader} in {worker}: has not loaded {model!r} version {self._published}"
            for reader, model, worker in sorted(self._loading.places())
        ]


def _written(load: Load) -> str:
    """The Model whose weights it loads: a follower's are its leader's."""
    return load.leader or load.model
