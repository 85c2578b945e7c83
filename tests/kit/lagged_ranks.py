"""What each of two ranks does that decode with a lag, each told things in an order of its own: a
Worker with torch and a tiny model, whose versions come from a writer beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from dataflow.batch import Batch, Keys
from dataflow.graph import Graph
from dataflow.schema import Prompt
from engine.api import plan
from engine.channels.tensors.row_broadcast import join
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.run.worker.rank_agreement import Agreed
from engine.run.worker.rows import WorkerRows
from engine.run.worker.worker import Worker
from graphs.grpo import grpo
from tests.kit import host_plans
from tests.kit.generate_suite import logprobs_under
from tests.kit.run_graphs import vowels
from tests.kit.told_worker import GatedChannel, ToldWorker
from tests.kit.training import gloo_world

RANKS, WRITER, ELSEWHERE = ("r0", "r1"), "train", "data"
N, SLOTS, LONGEST = 4, 4, 12
WORDS = ("abc", "hello you", "q", "Reverse this", "12", "xyz")
FIRST, DROPPED, SECOND, THIRD = 0, 1, 5, 6
"""Versions. DROPPED comes to the first rank alone, as the other is told of SECOND at once."""
BASES = {FIRST: "old", DROPPED: "old", SECOND: "new", THIRD: "old"}

ACTS: tuple[Mapping[int, Sequence[str]], ...] = (
    {1: ["chunk 2"], 3: ["weights 1"], 6: ["weights 5"], 9: ["chunk 3"]},
    {2: ["weights 5"], 5: ["chunk 2", "chunk 3"]},
)
"""Of each rank: at which stop it is told what."""


def make_plan(folder: Path, model: str) -> Plan:
    """`rollout` at lag 1, on two ranks with few slots."""
    rows = folder / "train.parquet"
    pq.write_table(pa.table({"prompt": list(WORDS)}), rows)
    graph: Graph = grpo(
        str(folder / model), str(rows), vowels, n=N, batch=2, max_tokens=LONGEST, max_lag=1
    )
    pins = {"rollout": ",".join(RANKS), "train_policy": WRITER}
    planned = plan(graph, RunOptions(threads=1, pin=pins, tensor={"rollout": 2}))
    nodes: list[Any] = []
    for node in planned.nodes:
        nodes.append(replace(node, layout=replace(node.layout, slots=SLOTS)))
    return replace(planned, nodes=tuple(nodes))


class RankBench:
    """One rank's Worker, and what it is told. taken: at which stop it took up what."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = RANKS[number]
        self.channel = GatedChannel(self.name)
        self.plan = make_plan(folder / str(number), "../old")
        store = FileStore(str(folder / "rows"), 2)
        group = dist.group.WORLD
        worker = Worker(
            self.name,
            self.plan,
            channel=self.channel,
            group=group,
            replica_group=group,
            cast=join(store, 0, number, RANKS),
        )
        list(worker.open())
        self.told = ToldWorker(worker)
        self.writers: dict[str, Worker] = {}
        for model in ("old", "new"):
            writer_plan = make_plan(folder / str(number), f"../{model}")
            self.writers[model] = Worker(WRITER, writer_plan, channel=self.channel)
            list(self.writers[model].open())
        self.acts = dict(ACTS[number])
        self.taken: list[tuple[int, str]] = []
        self._stops = 0
        self._agree = worker.runs.ranks.agree
        worker.runs.ranks.agree = self.agree  # type: ignore[method-assign]

    def agree(self, node: Any, next_told: Any) -> Agreed:
        """As RankAgreement, before which this rank is told what comes at this stop."""
        agreed = self._agree(node, next_told)
        if isinstance(agreed.taken, m.RunChunk):
            self.taken.append((self._stops, f"chunk {agreed.taken.id}"))
        elif isinstance(agreed.taken, m.Load):
            self.taken.append((self._stops, f"weights {agreed.taken.version}"))
        if agreed.taken is None:
            self._stops += 1
            for act in self.acts.pop(self._stops, ()):
                self.tell(act)
        return agreed

    def tell(self, act: str) -> None:
        """`chunk 2`, `weights 5`."""
        what, number = act.split()
        make: Callable[[int], Any] = self.make_chunk if what == "chunk" else self.make_load
        self.told.tell(make(int(number)))

    def make_chunk(self, number: int) -> m.RunChunk:
        """The chunk of two prompts, as this rank is told of it."""
        positions = [2 * number - 2, 2 * number - 1]
        texts = [WORDS[position % len(WORDS)] for position in positions]
        batch = Batch.make(Keys.of(positions), {"prompt": texts}, Prompt)
        ref = WorkerRows(ELSEWHERE, self.plan, self.channel).keep("prompts", batch)
        gathers = (host_plans.gathered(ref, producer="prompts"),)
        inputs: dict[str, Any] = {"prompt": gathers if self.name == RANKS[0] else ()}
        return m.RunChunk(
            id=number,
            node="rollout",
            worker=self.name,
            step=1,
            keys=ref.keys,
            inputs=inputs,
            giver=RANKS[0],
        )

    def make_load(self, version: int) -> m.Load:
        """A version, which the writer offers now."""
        offer = m.Offer(
            id=90 + version, model="policy", writer="train_policy", worker=WRITER, version=version
        )
        offered = next(self.writers[BASES[version]].execute(offer))
        assert isinstance(offered, m.Offered)
        return m.Load(
            id=80 + version,
            model="policy",
            writer="train_policy",
            reader="rollout",
            version=version,
            worker=self.name,
            source=WRITER,
            block=offered.block,
            digest=offered.digest,
        )

    def rows(self) -> Batch:
        """All that was made."""
        batches: list[Batch] = []
        for event in self.told.events:
            if isinstance(event, m.Produced) and len(event.ref.keys):
                batches.append(self.told.worker.rows.of(event.node, event.ref))
        return Batch.concat(batches).sort()


def main(number: int, folder: Path) -> None:
    """Writes what this rank took up, which events it said, and of the first the rows' versions and
    how far their log-probs are from those of each token's version.
    """
    with gloo_world(folder / "world", number, 2):
        (folder / str(number)).mkdir()
        bench = RankBench(number, folder)
        bench.told.tell(bench.make_load(FIRST))
        bench.told.carry_out()
        bench.tell("chunk 1")
        bench.told.carry_out()
        # The first one loads between two runs; the other is told once the next one has begun.
        if number == 0:
            bench.tell(f"weights {THIRD}")
            bench.told.carry_out()
        else:
            bench.told.tell_while_waiting(lambda: bench.tell(f"weights {THIRD}"))
        bench.tell("chunk 4")
        bench.told.carry_out()
        report: dict[str, Any] = {"taken": bench.taken, "events": _list_events(bench)}
        if number == 0:
            report |= _compare(bench.rows(), folder)
    (folder / f"{number}.json").write_text(json.dumps(report), encoding="ascii")


def _list_events(bench: RankBench) -> list[str]:
    """What was said, but for rows and metrics."""
    skipped = (m.Produced, m.Reported, m.Probed)
    return [
        f"{type(each).__name__} {getattr(each, 'id', '')}"
        for each in bench.told.events
        if not isinstance(each, skipped)
    ]


def _compare(rows: Batch, folder: Path) -> dict[str, Any]:
    versions = rows.ragged("version").values
    expected = np.zeros(len(versions))
    for version, base in BASES.items():
        logprobs = logprobs_under(str(folder / base), rows, 1.0)
        expected = np.where(versions == version, logprobs, expected)
    distance = np.abs(rows.ragged("sampler_logprobs").values - expected).max()
    by_row = [sorted(set(each.tolist())) for each in rows.ragged("version")]
    return {"distance": float(distance), "versions": by_row, "keys": rows.keys.rows()}
