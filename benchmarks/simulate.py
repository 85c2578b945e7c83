"""What simulating a plan of thousands of devices takes, and whether it says the same twice.

    python -m benchmarks.simulate [--quick] [--json FILE]

Owns: the sizes, and the goals. Does not own: the plans (gpu_plans.py), how results are shown
(report.py). Seconds are of CPU, in a process of its own for each size.
"""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import tyro

from benchmarks.gpu_plans import SCORED, GpuPlan, planned
from benchmarks.published import inputs, sizes
from benchmarks.report import SideResult, machine, show, write_json
from engine.plan.cost.distribution import LengthDistribution, constant_length, lognormal
from engine.simulation.prediction import Prediction

STEPS = 5
MINUTES = 10.0
MEMORY = 4.0
"""GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSize:
    """So many devices, a quarter of which train; prompts a Step, 16 samples each."""

    devices: int
    prompts: int
    goal: bool = False


SIZES = (
    SimulatedSize(devices=64, prompts=64),
    SimulatedSize(devices=1000, prompts=1024),
    SimulatedSize(devices=10_000, prompts=8192, goal=True),
)


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """Prompts of one length, answers of many."""

    prompts: LengthDistribution
    answers: LengthDistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTaken:
    """What one size took. digest: of all Steps and spans."""

    plan: float
    seconds: float
    gib: float
    events: int
    simulated: float
    digest: str


def simulated(size: SimulatedSize) -> SimulatedTaken:
    """Plan and simulate here."""
    from engine.simulation.prediction_run import predict

    training = size.devices // 4 // 16 * 16
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        plan = planned(
            Path(folder),
            GpuPlan(
                model=sizes(inputs(), "1_5B"),
                device="H100",
                generating=size.devices - training,
                training=training,
                tensor=2,
                prompts=size.prompts,
                samples=16,
                longest=16_000,
                max_lag=1,
            ),
        )
        ready = time.process_time()
        lengths = AnswerRows(constant_length(128), lognormal(3000, 0.7, 16_000))
        found = predict(plan, steps=STEPS, lengths=lengths, seconds=SCORED)
    return SimulatedTaken(
        plan=ready - begun,
        seconds=time.process_time() - ready,
        gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        events=found.coordinator.events,
        simulated=found.seconds,
        digest=_digest(found),
    )


def _digest(found: Prediction) -> str:
    same = replace(found.coordinator, seconds=0.0)
    told = hashlib.blake2b(repr((same, found.steps)).encode(), digest_size=16)
    for span in found.spans:
        told.update(repr(span).encode())
    return told.hexdigest()


def in_process(size: SimulatedSize) -> SimulatedTaken:
    """The same in a fresh process, so that none has another's memory."""
    asked = msgspec.json.encode(size).decode()
    call = [sys.executable, "-m", "benchmarks.simulate", "--one", asked]
    done = subprocess.run(call, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=SimulatedTaken)


def results(*, quick: bool) -> Iterator[SideResult]:
    """Of each size; the smallest twice."""
    for size in SIZES[:2] if quick else SIZES:
        took = in_process(size)
        where = f"{size.devices:,} devices, {size.prompts:,} x 16 rows"
        minutes = took.seconds / 60
        goal = MINUTES if size.goal else None
        most = MEMORY if size.goal else None
        yield SideResult(name=f"{where}/plan", value=took.plan, unit="s")
        yield SideResult(
            name=f"{where}/{STEPS} Steps", value=minutes, unit="min", goal=goal, least=False
        )
        yield SideResult(name=f"{where}/memory", value=took.gib, unit="GiB", goal=most, least=False)
        each = 1e6 * took.seconds / took.events
        yield SideResult(name=f"{where}/events", value=took.events, unit="events")
        yield SideResult(name=f"{where}/of an event", value=each, unit="us")
        yield SideResult(name=f"{where}/simulated", value=took.simulated, unit="s")
    twice = {in_process(SIZES[0]).digest for _ in range(2)}
    yield SideResult(
        name="runs that differ from their first", value=len(twice) - 1, unit="", goal=0, least=False
    )


def main(*, quick: bool = False, json: Path | None = None, one: str = "") -> None:
    """Measure.

    Args:
        quick: without the largest size.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        one: a size as JSON, to be simulated in this process; prints what it took.
    """
    if one:
        took = simulated(msgspec.json.decode(one, type=SimulatedSize))
        sys.stdout.write(msgspec.json.encode(took).decode())
        return
    where = machine()
    found = list(results(quick=quick))
    show("simulate", found, where)
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
