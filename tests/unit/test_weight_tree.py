"""From whom readers load a version: each gets it, none before its source has it, few at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from engine.coordinator.weight_tree import FAN_OUT, WeightSource, WeightTree
from engine.plan.cost.transfers import count_rounds

WRITER = WeightSource(worker="t0", block=0, digest="d")


@dataclass
class Readers:
    """Readers of one version, which load when the tree says so."""

    tree: WeightTree
    hosts: dict[str, str]
    waiting: list[str]
    loading: dict[int, tuple[str, str, bool]] = field(default_factory=dict)
    """Load -> reader, source, whether the reader keeps it."""
    region_of: Callable[[str], str] = lambda worker: ""
    having: set[str] = field(default_factory=lambda: {"t0"})
    loaded: set[str] = field(default_factory=set)
    loads: int = 0
    crossings: Counter[str] = field(default_factory=Counter[str])
    """Region -> how often the version was taken into it."""

    def begin(self) -> None:
        """Let everybody load who can now; what the tree promises is asserted of each."""
        for reader in list(self.waiting):
            others_wait = len(self.waiting) > 1
            choice = self.tree.choose(self.loads, reader, others_wait=others_wait)
            if choice is None:
                continue
            source = choice.source.worker
            assert source in self.having, f"{reader} is to load from {source}, which has nothing"
            self.waiting.remove(reader)
            self.loading[self.loads] = reader, source, choice.keeps
            self.crossings[self.region_of(reader)] += self._crosses(reader, source)
            self.loads += 1
        far: Counter[str] = Counter()
        for reader, source, _ in self.loading.values():
            is_near = not self._crosses(reader, source)
            far[source] += is_near and self.hosts[reader] != self.hosts[source]
        assert max(far.values(), default=0) <= FAN_OUT

    def _crosses(self, reader: str, source: str) -> bool:
        return self.region_of(reader) != self.region_of(source)

    def end(self, load: int) -> None:
        reader, _, keeps = self.loading.pop(load)
        self.tree.end(load)
        self.loaded.add(reader)
        if keeps:
            self.having.add(reader)
            self.tree.add(WeightSource(worker=reader, block=load, digest="d"))

    def die(self, worker: str) -> None:
        """A reader is gone, and begins again; who loads from it gets nothing."""
        self.tree.drop(worker)
        self.having.discard(worker)
        self.loaded.discard(worker)
        for load, (reader, source, _) in list(self.loading.items()):
            if worker in (reader, source):
                del self.loading[load]
                self.tree.end(load)
                self.waiting.append(reader)
        if worker not in self.waiting:
            self.waiting.append(worker)


def readers_on(hosts: list[str], regions: Mapping[str, str] | None = None) -> Readers:
    """One reader for each host that is named; the writer is on the host `a`. regions: of hosts."""
    host_of = {f"g{number}": host for number, host in enumerate(hosts)} | {"t0": "a"}
    waiting = [name for name in host_of if name != "t0"]

    def region_of(worker: str) -> str:
        return (regions or {}).get(host_of[worker], "")

    tree = WeightTree(host_of.__getitem__, region_of)
    return Readers(tree=tree, hosts=host_of, waiting=waiting, region_of=region_of)


@given(
    hosts=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=16),
    regions=st.fixed_dictionaries({host: st.sampled_from("rst") for host in "abcdefgh"}),
    chance=st.randoms(use_true_random=False),
    deaths=st.integers(0, 6),
)
def test_every_reader_gets_the_version_whoever_dies_and_each_region_once(
    hosts: list[str], regions: dict[str, str], chance: Random, deaths: int
) -> None:
    """Each death costs one way more into a region at most."""
    readers, most = readers_on(hosts, regions), 1 + deaths
    readers.begin()
    assert not readers.loading, "nobody has it yet"
    readers.tree.add(WRITER)
    readers.begin()
    while readers.loading or readers.waiting:
        assert readers.loading, f"{readers.waiting} wait for nobody"
        if deaths and chance.random() < 0.3:
            deaths -= 1
            readers.die(chance.choice([name for name in readers.hosts if name != "t0"]))
        else:
            readers.end(chance.choice(list(readers.loading)))
        readers.begin()
    assert readers.loaded == readers.hosts.keys() - {"t0"}
    far_regions = {regions[host] for host in hosts} - {regions["a"]}
    assert readers.crossings.keys() >= far_regions
    assert not readers.crossings[regions["a"]], "the writer, which stays, is there"
    assert max(readers.crossings.values()) <= most


def test_on_one_host_all_load_from_the_writer_at_once() -> None:
    readers = readers_on(["a"] * 9)
    readers.tree.add(WRITER)
    readers.begin()
    assert {source for _, source, _ in readers.loading.values()} == {"t0"}
    assert not any(keeps for _, _, keeps in readers.loading.values())
    assert len(readers.loading) == 9


def test_a_host_gets_it_over_the_network_once() -> None:
    readers = readers_on(["b"] * 5)
    readers.tree.add(WRITER)
    readers.begin()
    assert list(readers.loading.values()) == [("g0", "t0", True)]
    readers.end(0)
    readers.begin()
    assert {source for _, source, _ in readers.loading.values()} == {"g0"}


def test_the_way_into_a_region_takes_no_room_of_hosts_nearby() -> None:
    regions = {"a": "east", "b": "east", "c": "east", "x": "west", "y": "west"}
    readers = readers_on(["b", "c", "x", "y"], regions)
    readers.tree.add(WRITER)
    readers.begin()
    assert [reader for reader, _, _ in readers.loading.values()] == ["g0", "g1", "g2"]
    readers.end(2)
    readers.begin()
    assert readers.loading[3] == ("g3", "g2", False), "y takes it from x"


def test_a_reader_takes_the_place_of_one_that_died_on_the_way() -> None:
    readers = readers_on(["x", "y"], {"a": "east", "x": "west", "y": "west"})
    readers.tree.add(WRITER)
    readers.begin()
    assert list(readers.loading.values()) == [("g0", "t0", True)]
    readers.die("g0")
    readers.begin()
    assert list(readers.loading.values()) == [("g1", "t0", True)]


def test_rounds_grow_with_the_logarithm_of_the_hosts() -> None:
    readers = readers_on([f"h{number}" for number in range(60)])
    readers.tree.add(WRITER)
    rounds = 0
    readers.begin()
    while readers.loading:
        rounds += 1
        for load in list(readers.loading):
            readers.end(load)
        readers.begin()
    assert rounds == 4, "2, then 6, 18, and the last 34: each that has it serves two at a time"


def test_each_rank_that_offers_serves_its_share() -> None:
    readers = readers_on(["b", "c", "d", "e"])
    readers.hosts["t1"] = "x"
    readers.having.add("t1")
    readers.tree.add(WRITER)
    readers.tree.add(WeightSource(worker="t1", block=7, digest="d"))
    readers.begin()
    assert Counter(source for _, source, _ in readers.loading.values()) == {"t0": 2, "t1": 2}


def test_rounds_of_a_tree() -> None:
    """Each host that has a version passes it on to two: 1, 3, 9 hosts have it."""
    assert [count_rounds(hosts) for hosts in (0, 1, 2, 3, 8, 9)] == [0, 1, 1, 2, 2, 3]
