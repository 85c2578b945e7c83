"""Schedules of published systems, as their papers describe them, on this project's cost model.

Owns: AReaL's synchronous baseline, StreamRL's streamed and colocated Steps and its allocation,
EARL's grid. Does not own: AReaL's asynchronous runs (published_areal.py), the inputs
(published.toml), the comparison with what was published (published.py), seconds of any pass
(engine/plan/cost).

Each is a model of its own, small enough to be read beside the paper; none is the coordinator of
this project, whose plans `dataflow simulate` runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.gpu_plans import EACH
from engine.plan.cost.decode import DecodeBatch, cache_capacity, schedule_decode
from engine.plan.cost.devices import Coefficients, Kind, Link, Place, catalogue_place, device
from engine.plan.cost.distribution import LengthDistribution
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.training import forward_time, pack_rows, train_time, update_time
from engine.plan.cost.transfers import weights_time

SLOTS = 1024
"""Rows at once that an engine takes, where its cache has room."""
Reached = Mapping[Kind, Coefficients]
"""What passes of each kind reach of a device's rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What every Step of a run trains: rows whose answers are drawn from a distribution."""

    rows: int
    prompt: int
    lengths: LengthDistribution
    microbatch: int

    def answers(self, seed: int, rows: int) -> np.ndarray:
        """int64 [rows]: lengths of answers."""
        return self.lengths.at(np.random.default_rng(seed).random(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What is done with a batch of rows. trained, scored: Models that are trained, and that only
    give log-probs or values.
    """

    model: Sizes
    where: Place
    updates: int = 1
    trained: int = 1
    scored: int = 0
    recomputed: bool = False

    def seconds(self, rollouts: Rollouts, answers: np.ndarray, *, scale: int = 1) -> float:
        """Of a batch, of which `answers` are one part in `scale`; with the updates."""
        rows = pack_rows(
            np.full(len(answers), rollouts.prompt),
            answers,
            budget=rollouts.microbatch,
            divisor=max(1, self.where.data // scale),
        )
        learnt = train_time(
            self.model, self.where, rows, updates=self.updates, recomputed=self.recomputed
        )
        scored = forward_time(self.model, self.where, rows)
        return self.trained * learnt.seconds + self.scored * scored.seconds

    def update(self) -> float:
        """Seconds of the updates alone."""
        return self.trained * self.updates * update_time(self.model, self.where).seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Equal replicas that generate. memory: the share of a device that weights and cache have."""

    model: Sizes
    where: Place
    replicas: int
    memory: float

    @property
    def room(self) -> int:
        """Tokens in the cache of one replica."""
        return cache_room(self.model, self.where, self.memory)

    def ends(self, rollouts: Rollouts, answers: np.ndarray) -> np.ndarray:
        """float64 [rows]: when each row of one batch is finished, dealt out to the replicas."""
        ends = np.zeros(len(answers))
        for replica in range(self.replicas):
            mine = answers[replica :: self.replicas]
            prompts = np.full(len(mine), rollouts.prompt)
            batch = DecodeBatch(prompts=prompts, answers=mine, slots=SLOTS, room=self.room)
            ends[replica :: self.replicas] = schedule_decode(self.model, self.where, batch).ends
        return ends


def cache_room(model: Sizes, where: Place, memory: float) -> int:
    """Tokens that fit beside the weights into this share of each device's memory."""
    free = memory * where.device.memory - model.weight_bytes / where.tensor
    return cache_capacity(model, where, int(free))


def gpus(name: str, reached: Reached | None = None, *, data: int = 1, tensor: int = 1) -> Place:
    """A place on devices of the catalogue, in hosts of eight: data ranks on several are a ring by
    the cards of all that a host has of them, as our plans have it. reached: None for the
    catalogue's.
    """
    of = device(name)
    where = catalogue_place(of, data=data, tensor=tensor)
    if where.devices > EACH:
        cards = EACH // tensor
        where = replace(where, rate=min(of.link, cards * of.network))
    return where if reached is None else replace(where, coefficients=reached)


def pushed(trainer: Place, engines: Engines) -> float:
    """Seconds until all engines have new weights, over the network."""
    way = Link(rate=trainer.device.network)
    time = weights_time(engines.model, trainer, engines.where, way, readers=engines.replicas)
    return time.seconds


def synchronous(rollouts: Rollouts, engines: Engines, trainer: Trainer, *, batches: int) -> float:
    """Seconds a Step: generation, training and the push of the weights, one after another."""
    found: list[float] = []
    for seed in range(batches):
        answers = rollouts.answers(seed, rollouts.rows)
        generated = float(engines.ends(rollouts, answers).max())
        found.append(generated + trainer.seconds(rollouts, answers))
    return float(np.mean(found)) + pushed(trainer.where, engines)


# StreamRL


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices of one kind to be divided between generation and training. tensor: of either; node:
    devices that are given to a side at once; trained, scored, recomputed: see Trainer; reached:
    None for the catalogue's.
    """

    model: Sizes
    device: str
    gpus: int
    tensor: tuple[int, int]
    node: int
    memory: float
    trained: int = 1
    scored: int = 0
    recomputed: bool = False
    reached: Reached | None = None

    def engines(self, count: int) -> Engines:
        """On so many of the devices."""
        where = gpus(self.device, self.reached, tensor=self.tensor[0])
        return Engines(
            model=self.model,
            where=where,
            replicas=count // self.tensor[0],
            memory=self.memory,
        )

    def trainer(self, count: int) -> Trainer:
        """On so many of the devices."""
        tensor = self.tensor[1]
        where = gpus(self.device, self.reached, data=count // tensor, tensor=tensor)
        return Trainer(
            model=self.model,
            where=where,
            trained=self.trained,
            scored=self.scored,
            recomputed=self.recomputed,
        )

    @property
    def splits(self) -> Sequence[int]:
        """Devices that can generate while the others train."""
        return range(self.node, self.gpus, self.node)


def colocated(pool: Pool, rollouts: Rollouts, answers: np.ndarray) -> float:
    """Seconds of a Step in which all devices generate, and then all train."""
    engines, trainer = pool.engines(pool.gpus), pool.trainer(pool.gpus)
    generated = float(engines.ends(rollouts, answers).max())
    copied = pool.model.weight_bytes / trainer.where.tensor / trainer.where.device.link
    return generated + trainer.seconds(rollouts, answers) + copied


def streamed(pool: Pool, rollouts: Rollouts, answers: np.ndarray) -> float:
    """Seconds of a synchronous Step at the best split: rows are trained as they are finished, as
    many as there are once they fill the trainer (section 4.1, dynamic-batch pipelining).
    """
    return best_streamed(pool, rollouts, answers)[0]


def best_streamed(pool: Pool, rollouts: Rollouts, answers: np.ndarray) -> tuple[float, int]:
    """Seconds of the best split, and the devices that generate in it."""
    return min((_streamed(pool, split, rollouts, answers), split) for split in pool.splits)


def _streamed(pool: Pool, split: int, rollouts: Rollouts, answers: np.ndarray) -> float:
    engines, trainer = pool.engines(split), pool.trainer(pool.gpus - split)
    ends = engines.ends(rollouts, answers)
    order = np.argsort(ends, kind="stable")
    ends, sizes = ends[order], answers[order]
    arrived = np.cumsum(sizes + rollouts.prompt)
    filled = rollouts.microbatch * trainer.where.data
    now, begin, parts = 0.0, 0, replace(trainer, updates=0)
    while begin < len(ends):
        fed = arrived[begin - 1] if begin else 0
        enough = min(int(np.searchsorted(arrived, fed + filled)), len(ends) - 1)
        now = max(now, float(ends[enough]))
        end = max(enough + 1, int(np.searchsorted(ends, now, side="right")))
        now += _part(parts, rollouts, sizes[begin:end])
        begin = end
    return now + trainer.update() + pushed(trainer.where, engines)


def _part(trainer: Trainer, rollouts: Rollouts, answers: np.ndarray) -> float:
    """Seconds of some rows; no rank is done before the longest of them."""
    alone = trainer.seconds(rollouts, np.array([answers.max()]), scale=trainer.where.data)
    return max(alone, trainer.seconds(rollouts, answers))


def overlapped(pool: Pool, split: int, rollouts: Rollouts, answers: np.ndarray) -> float:
    """Seconds of a Step in which one batch is generated while the one before is trained."""
    generated = float(pool.engines(split).ends(rollouts, answers).max())
    return max(generated, pool.trainer(pool.gpus - split).seconds(rollouts, answers))


def allocation(pool: Pool, rollouts: Rollouts, answers: np.ndarray) -> tuple[float, int]:
    """How much faster the best split is than an even one (algorithm 1), and the devices that
    generate in it.
    """
    seconds = {split: overlapped(pool, split, rollouts, answers) for split in pool.splits}
    best = min(seconds, key=seconds.__getitem__)
    return overlapped(pool, pool.gpus // 2, rollouts, answers) / seconds[best], best


def cost_gain(share: float, relative: float) -> float:
    """How much cheaper a Step becomes whose generation, this share of its cost, is done at this
    relative cost.
    """
    return 1.0 / ((1.0 - share) + relative * share)


# EARL


def decoded_rate(model: Sizes, where: Place, memory: float, context: int, rows: int) -> float:
    """Tokens a device and second of so many rows, decoded to this length."""
    batch = DecodeBatch(
        prompts=np.ones(rows, dtype=np.int64),
        answers=np.full(rows, context),
        room=cache_room(model, where, memory),
    )
    return rows * context / schedule_decode(model, where, batch).seconds / where.devices
