"""Chunks in a Worker's kernels, with torch and a tiny model: spans, weights, chunks that join,
watermarks, new weights between two steps, and rows that are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import Prompt
from engine.api import plan
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.refs import Key
from engine.run.worker.rows import WorkerRows
from engine.run.worker.worker import Worker
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import evaluate, train
from tests.kit import host_plans
from tests.kit.models import save_tiny
from tests.kit.run_graphs import vowels
from tests.kit.told_worker import SOON, GatedChannel, ToldWorker
from tests.kit.turns import example_count

HERE, ELSEWHERE, WRITER = "gen", "data", "train"
PIN = {"rollout": HERE, "in_parts": HERE, "train_policy": WRITER}
N, LONGEST, SLOTS = 4, 12, 4
WORDS = ("abc", "hello you", "q", "Reverse this", "12", "Reverse that", "xyz", "no")
TOO_LONG = "a prompt that has more tokens than there is room for"
STOPS = tuple("abcdefghijklmXYZ0123456789")
"""Rows of all lengths."""
NEW = 5
"""The version with other weights."""


def make_graph(folder: Path, model: str) -> Graph:
    """`rollout` at lag 1, and `in_parts` at lag 0 with the same module."""
    files: list[str] = []
    for name in ("train", "test"):
        files.append(str(folder / f"{name}.parquet"))
        pq.write_table(pa.table({"prompt": [f"{name} {word}" for word in WORDS]}), files[-1])
    policy = Model("policy", str(folder / model), trainable=True)
    asked = prompts(files[0], batch=4)
    how: dict[str, Any] = {"n": N, "max_tokens": LONGEST, "stop": STOPS}
    how |= {"max_prompt_tokens": 20, "overlong_prompt": "drop"}
    rollout = generate(policy, asked, max_lag=1, name="rollout", **how)
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"), name="advantage")
    held_out = prompts(files[1], shuffle=False, name="held_out")
    in_parts = generate(policy, held_out, name="in_parts", **how)
    score = reward(vowels, in_parts, name="in_parts_score")
    return Graph(
        "chunks",
        train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-3),
        evaluate(policy, score, every=2),
    )


def make_plan(folder: Path, model: str) -> Plan:
    """Few slots, and all that has ended leaves at once where rows leave in parts."""
    planned = plan(make_graph(folder, model), RunOptions(threads=1, pin=PIN))
    nodes: list[Any] = []
    for node in planned.nodes:
        layout = replace(node.layout, slots=SLOTS)
        if node.name == "in_parts":
            layout = replace(node.layout, slots=3 * SLOTS, part_tokens=1)
        nodes.append(replace(node, layout=layout))
    return replace(planned, nodes=tuple(nodes))


@dataclass(kw_only=True)
class ChunkBench:
    """A Worker that generates, rows that others keep, and what it has made."""

    told: ToldWorker
    channel: GatedChannel
    plan: Plan
    writers: dict[str, Worker]
    _ids: list[int] = field(default_factory=lambda: [0])

    def make_chunk(
        self, node: str, positions: Sequence[int], texts: Sequence[str], **how: Any
    ) -> m.RunChunk:
        """A chunk of these prompts, which another Worker keeps. how: spans, weights."""
        batch = Batch.make(Keys.of(positions), {"prompt": list(texts)}, Prompt)
        producer = "prompts" if node == "rollout" else "held_out"
        ref = WorkerRows(ELSEWHERE, self.plan, self.channel).keep(producer, batch)
        self._ids[0] += 1
        inputs = {"prompt": (host_plans.gathered(ref, producer=producer),)}
        return m.RunChunk(
            id=self._ids[0], node=node, worker=HERE, step=1, keys=ref.keys, inputs=inputs, **how
        )

    def run(self, *chunks: m.RunChunk) -> list[m.Event]:
        """These chunks, each by itself."""
        events: list[m.Event] = []
        for chunk in chunks:
            self.told.tell(chunk)
            events += self.told.carry_out()
        return events

    def rows(self, events: Sequence[m.Event]) -> dict[Key, list[int]]:
        """The tokens of each row that was made, which comes once."""
        tokens: dict[Key, list[int]] = {}
        for produced in select_made(events):
            if not len(produced.ref.keys):
                continue
            batch = self.told.worker.rows.of(produced.node, produced.ref)
            ids = batch.ragged("completion_ids")
            for number, key in enumerate(batch.keys.rows()):
                assert key not in tokens
                tokens[key] = ids[number].tolist()
        return tokens

    def list_versions(self, events: Sequence[m.Event]) -> list[list[int]]:
        """Of each row that was made the versions of its tokens."""
        versions: list[list[int]] = []
        for produced in select_made(events):
            batch = self.told.worker.rows.of(produced.node, produced.ref)
            versions += [each.tolist() for each in batch.ragged("version")]
        return versions

    def offer(self, model: str, version: int) -> m.Load:
        """The weights of a model as a version for `rollout`."""
        offer = m.Offer(
            id=90, model="policy", writer="train_policy", worker=WRITER, version=version
        )
        offered = next(self.writers[model].execute(offer))
        assert isinstance(offered, m.Offered)
        return m.Load(
            id=91,
            model="policy",
            writer="train_policy",
            reader="rollout",
            version=version,
            worker=HERE,
            source=WRITER,
            block=offered.block,
            digest=offered.digest,
        )


def open_worker(name: str, planned: Plan, channel: GatedChannel) -> Worker:
    worker = Worker(name, planned, channel=channel)
    list(worker.open())
    return worker


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, channel = tmp_path_factory.mktemp("chunks"), GatedChannel(HERE)
    writers: dict[str, Worker] = {}
    for seed, model in enumerate(("old", "new")):
        save_tiny(folder / model, seed=seed)
        writers[model] = open_worker(WRITER, make_plan(folder, model), channel)
    planned = make_plan(folder, "old")
    worker = open_worker(HERE, planned, channel)
    yield ChunkBench(told=ToldWorker(worker), channel=channel, plan=planned, writers=writers)
    for each in (worker, *writers.values()):
        each.close()


@pytest.fixture
def bench(opened: ChunkBench) -> Any:
    """At the old weights."""
    yield opened
    opened.channel.lost.clear()
    opened.channel.may_answer.set()
    opened.told.tell(opened.offer("old", 0))
    opened.told.carry_out()


def select_made(events: Sequence[m.Event]) -> list[m.Produced]:
    return [event for event in events if isinstance(event, m.Produced)]


def id_of(event: m.Event) -> int | None:
    return getattr(event, "id", None)


def list_kinds(events: Sequence[m.Event]) -> list[type]:
    return [type(event) for event in events]


def require_whole(events: Sequence[m.Event], chunks: Sequence[m.RunChunk]) -> None:
    """Each chunk's rows come once, or were given up, under its id, and then at once its end."""
    for chunk in chunks:
        numbers = [number for number, event in enumerate(events) if id_of(event) == chunk.id]
        rows: list[Key] = []
        lost: set[int] = set()
        for event in (events[number] for number in numbers):
            if isinstance(event, m.Produced):
                rows += event.ref.keys.rows()
            elif isinstance(event, m.Tombstoned):
                lost.add(event.key[0])
        expected = chunk.keys.expand_spans(N, chunk.spans).rows()
        assert sorted(rows) == sorted(key for key in expected if key[0] not in lost)
        kinds = list_kinds([events[number] for number in numbers])
        assert kinds.index(m.ChunkDone) == len(kinds) - 1, "the end comes once, and last"
        first_behind = numbers[-2] + 1 if len(numbers) > 1 else numbers[-1]
        assert not select_made(events[first_behind : numbers[-1]]), "no other row comes before"


def test_a_chunk_of_spans_makes_these_samples_and_the_rest_makes_the_others(
    bench: ChunkBench,
) -> None:
    texts = ("abc", "q", "12")
    whole = bench.make_chunk("rollout", [0, 1, 2], texts)
    expected = bench.rows(bench.run(whole))
    spans = np.array([[0, 2], [1, 4], [3, 4]], np.int32)
    first = bench.make_chunk("rollout", [0, 1, 2], texts, spans=spans)
    rest = np.array([[2, 4], [0, 1], [0, 3]], np.int32)
    second = bench.make_chunk("rollout", [0, 1, 2], texts, spans=rest)
    for events, chunk in ((bench.run(first), first), (bench.run(second), second)):
        require_whole(events, [chunk])
        rows = bench.rows(events)
        assert rows == {key: expected.pop(key) for key in rows}
    assert not expected


@pytest.mark.parametrize("joins", [False, True])
def test_the_heaviest_rows_of_a_chunk_are_begun_first(bench: ChunkBench, joins: bool) -> None:
    weights = np.array([2, 5, 1, 6, 3, 4], np.float32)
    chunk = bench.make_chunk("rollout", range(6), WORDS[:6], weights=weights)
    if joins:
        first = bench.make_chunk("rollout", [9], ["no"])
        bench.told.tell(first)
        events = bench.told.carry_out([(1, partial(bench.told.tell, chunk))])
        require_whole(events, [first, chunk])
    else:
        events = bench.run(chunk)
    positions: list[int] = []
    for produced in select_made(events):
        if produced.id == chunk.id:
            positions += produced.ref.keys.position.tolist()
    assert list(dict.fromkeys(positions)) == [3, 1, 5, 4, 0, 2]


DRAWN = st.tuples(
    st.lists(st.tuples(st.sampled_from([*WORDS, TOO_LONG]), st.integers(0, 9)), max_size=4),
    st.booleans(),  # whether it has spans
    st.booleans(),  # whether it has weights
    st.integers(0, 40),  # behind how many events it is told
)


def draw_chunk(bench: ChunkBench, number: int, drawn: Any) -> m.RunChunk:
    prompts_and_draws, has_spans, has_weights, _ = drawn
    how: dict[str, Any] = {}
    draws = np.array([draw for _, draw in prompts_and_draws], np.int32)
    if has_spans:
        first = draws % N
        how["spans"] = np.stack([first, first + 1 + draws % (N - first)], axis=1)
    if has_weights:
        how["weights"] = draws.astype(np.float32)
    texts = [text for text, _ in prompts_and_draws]
    return bench.make_chunk("rollout", range(10 * number, 10 * number + len(texts)), texts, **how)


def test_a_chunk_that_comes_as_a_run_ends_begins_its_own(bench: ChunkBench) -> None:
    none_fits = bench.make_chunk("rollout", [0, 1], [TOO_LONG] * 2)
    late = bench.make_chunk("rollout", [2], ["no"])
    is_here = threading.Event()

    def tell_late() -> None:
        bench.told.tell(late)
        bench.told.worker.runs._joined_inputs.call_when_ready(late, is_here.set)
        assert is_here.wait(SOON)

    bench.told.tell(none_fits)
    events = bench.told.carry_out([(1, tell_late)])
    require_whole(events, [none_fits, late])


@settings(max_examples=example_count(15), deadline=None)
@given(drawn=st.lists(DRAWN, min_size=1, max_size=5))
def test_each_row_comes_once_and_is_what_it_is_alone_whenever_chunks_join(
    opened: ChunkBench, drawn: list[Any]
) -> None:
    drawn.sort(key=lambda each: each[-1])
    chunks = [draw_chunk(opened, number, each) for number, each in enumerate(drawn)]
    acts: list[tuple[int, Any]] = []
    for chunk, each in zip(chunks, drawn, strict=True):
        acts.append((each[-1], partial(opened.told.tell, chunk)))
    events = opened.told.carry_out(acts)
    require_whole(events, chunks)
    alone = opened.run(*chunks)
    require_whole(alone, chunks)
    assert opened.rows(events) == opened.rows(alone)


@settings(max_examples=example_count(30), deadline=None)
@given(
    words=st.lists(st.sampled_from([*WORDS, TOO_LONG]), min_size=1, max_size=4),
    asks=st.sets(st.integers(0, 12)),
)
def test_no_group_that_still_comes_has_as_few_tokens_as_the_watermark(
    opened: ChunkBench, words: list[str], asks: set[int]
) -> None:
    """Whenever a heartbeat asks for it."""
    chunk = opened.make_chunk("in_parts", range(len(words)), words)
    opened.told.tell(chunk)
    ask = opened.told.worker.runs.ask_for_watermark
    opened.told.worker.kernels["in_parts"].interrupt()
    events = opened.told.carry_out([(place, ask) for place in sorted(asks)])
    require_whole(events, [chunk])
    longest: dict[int, int] = {}
    for produced in reversed(select_made(events)):
        assert produced.watermark < min(longest.values(), default=1)
        lengths = produced.ref.lengths.tolist()
        for position, length in zip(produced.ref.keys.position.tolist(), lengths, strict=True):
            longest[position] = max(length, longest.get(position, 0))


def test_rows_go_on_under_new_weights_between_two_steps(bench: ChunkBench) -> None:
    chunk = bench.make_chunk("rollout", range(8), WORDS)
    bench.told.tell(chunk)
    events = bench.told.carry_out([(3, partial(bench.told.tell, bench.offer("new", NEW)))])
    require_whole(events, [chunk])
    kinds = list_kinds(events)
    assert kinds.count(m.Loaded) == 1
    assert 3 <= kinds.index(m.Loaded) < kinds.index(m.ChunkDone)
    versions = bench.list_versions(events)
    assert [NEW] in map(list, map(dict.fromkeys, versions))
    assert [0, NEW] in map(list, map(dict.fromkeys, versions)), "a row that was in a slot"
    assert all(each == sorted(each) for each in versions)


def test_another_nodes_weights_wait_for_a_run_with_the_same_module(bench: ChunkBench) -> None:
    first, second = (bench.make_chunk("rollout", [at], ["abc"]) for at in (0, 1))
    in_parts = bench.make_chunk("in_parts", [0], ["q"])
    expected = bench.rows(bench.run(first, second))
    load = replace(bench.offer("new", NEW), reader="in_parts")
    bench.told.tell(first)
    acts = [(1, partial(bench.told.tell, each)) for each in (load, in_parts, second)]
    events = bench.told.carry_out(acts)
    require_whole(events, [first, second, in_parts])
    loaded = list_kinds(events).index(m.Loaded)
    done = [event.id for event in events[:loaded] if isinstance(event, m.ChunkDone)]
    assert done == [first.id]
    before = bench.rows(events[:loaded])
    assert before == {key: expected[key] for key in before}
    assert {version for row in bench.list_versions(events[:loaded]) for version in row} == {0}


def test_a_run_goes_on_while_the_rows_of_one_that_joins_are_on_their_way(bench: ChunkBench) -> None:
    first = bench.make_chunk("rollout", range(6), WORDS[:6])
    second = bench.make_chunk("rollout", [9], ["abc"])
    bench.told.tell(first)

    def tell_second() -> None:
        bench.channel.may_answer.clear()
        bench.told.tell(second)

    events = bench.told.carry_out([(2, tell_second), (12, bench.channel.may_answer.set)])
    require_whole(events, [first, second])
    ids = [produced.id for produced in select_made(events)]
    assert ids[:10] == [first.id] * 10


def test_a_chunk_whose_rows_are_gone_fails_once_and_others_go_on(bench: ChunkBench) -> None:
    chunks = [bench.make_chunk("rollout", [at, at + 1], WORDS[at : at + 2]) for at in (0, 2, 4)]
    first, gone, third = chunks
    bench.told.tell(first)

    def lose() -> None:
        bench.channel.lost = {ELSEWHERE}
        bench.told.tell(gone)
        assert bench.channel.refused.acquire(timeout=SOON)

    def find() -> None:
        bench.channel.lost.clear()
        bench.told.tell(third)

    events = bench.told.carry_out([(1, lose), (4, find)])
    failed = [event for event in events if isinstance(event, m.FetchFailed)]
    assert failed == [m.FetchFailed(id=gone.id, worker=HERE, peer=ELSEWHERE)]
    require_whole(events, [first, third])
    assert set(map(id_of, events)) == {each.id for each in chunks}
    require_whole(bench.run(gone), [gone])
