"""Runs in which Workers die: one case, resumed from its last checkpoint until it ends.

proof.py says what has to hold, engine/run/simulated_workers/faults.py which faults there are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engine.protocol.events import Subscriber
from engine.run.simulated_workers.faults import FaultModel
from engine.run.simulated_workers.simulation import Simulation
from engine.run.simulated_workers.store import SimulatedCheckpoint
from tests.schedules.credit import (
    CreditWatch,
    require_no_credit_left_over,
    require_no_idle_replica,
)
from tests.schedules.elastic import fixed, with_moves
from tests.schedules.late import on_one_replica
from tests.schedules.plans import ScheduleCase
from tests.schedules.proof import Proof
from tests.schedules.record import Past, chunks, contents, parts
from tests.schedules.repeated_parts import RepeatedParts
from tests.schedules.watermark import require_watermark_behind

_ATTEMPTS = 6
"""Of which the last has no faults any more."""


def begun(
    case: ScheduleCase,
    timing: int,
    stored: SimulatedCheckpoint | None = None,
    faults: FaultModel | None = None,
    watchers: Sequence[Subscriber] = (),
) -> Simulation:
    """A run of the case, with one of its timings, from a checkpoint or from the beginning."""
    how = {"durations": case.timing(timing), "outcomes": case.outcomes, "faults": faults}
    how |= {"watchers": (CreditWatch(case.plan), *watchers), "together": case.together}
    return Simulation(case.plan, case.settings, rows=case.rows, latest=stored, **how)


def ended(run: Simulation) -> Simulation:
    """The run at its end; the bound on outstanding prompts holds at every moment, and no replica
    idles beside rows that wait for one.
    """
    before: dict[str, int] = {}
    run.run(until=lambda: _within_bounds(run, before))
    _within_bounds(run, before)
    if run.finish is not None:
        require_no_credit_left_over(run)
    return run


def _within_bounds(run: Simulation, before: dict[str, int]) -> bool:
    """Asserts the bounds; never says that a run should stop. before: outstanding prompts at the
    last look, of each source: with rows that have grown none is admitted that does not fit.
    """
    for name, admission in run.coordinator.sources.admissions.items():
        source, outstanding = admission.source, admission.table.prompts.outstanding
        assert outstanding <= (1 + source.max_lag) * source.batch, (
            f"{name}: {outstanding} prompts are outstanding"
        )
        if outstanding > before.get(name, outstanding):
            assert outstanding <= admission.live.most(), f"{name}: {outstanding} do not fit"
        before[name] = outstanding
    require_no_idle_replica(run)
    require_watermark_behind(run)
    return False


def weathered(case: ScheduleCase) -> tuple[Simulation, Past | None, int]:
    """The run that reached the end, what it went on from, and how often Workers died in all."""
    draw = random.Random(f"weather {case.seed}")
    past: Past | None = None
    stored: SimulatedCheckpoint | None = None
    deaths = 0
    parts = RepeatedParts(case)
    for attempt in range(_ATTEMPTS):
        faults = drawn(draw, 0 if attempt == _ATTEMPTS - 1 else draw.choice((1, 2, 4, 8)))
        if case.plan.spare:
            faults = with_moves(draw, faults, last=attempt == _ATTEMPTS - 1)
        if case.shorts and attempt < _ATTEMPTS - 1:
            faults = with_shorts(draw, faults, case.shorts)
        run = ended(begun(parts.next_case(), attempt, stored, faults))
        parts.note(run)
        deaths += run.workers.deaths
        if not run.went_back:
            break
        if run.store.stored:
            stored = run.store.stored[-1]
            past = Proof(case, run, past=past).past_of(stored)
    return run, past, deaths


def drawn(draw: random.Random, deaths: int) -> FaultModel:
    """Faults of one attempt."""
    return FaultModel(
        seed=draw.randrange(1 << 30),
        deaths=deaths,
        rate=draw.choice((0.02, 0.1, 0.3)),
        stateful=draw.choice((0.0, 0.0, 0.1, 0.5)),
        detect=draw.choice((0.0, 0.5, 5.0)),
        respawn=draw.choice((0.1, 3.0, 20.0)),
        fetch=draw.choice((0.0, 0.3, 2.0)),
        delay=draw.choice((0.0, 0.3, 2.0)),
        doubles=draw.choice((0.0, 0.1, 0.3)),
    )


def with_shorts(draw: random.Random, faults: FaultModel, most: int) -> FaultModel:
    """The same, with kernels whose memory runs out."""
    return replace(
        faults,
        shorts=most,
        short_rate=draw.choice((0.1, 0.3, 1.0)),
        short_lost=draw.choice((0.0, 0.0, 0.2)),
    )


def prove(case: ScheduleCase) -> int:
    """Prove all promises of a run with deaths; a synchronous one is as without. Returns deaths."""
    run, past, deaths = weathered(case)
    Proof(case, run, past=past).all()
    if case.synchronous:
        plain = ended(begun(replace(fixed(case), together=1), 0))
        Proof(case, plain).all()
        _same_as(case, run, plain, past)
        require_same_parts(case, run, plain)
    return deaths


def _same_as(case: ScheduleCase, run: Simulation, plain: Simulation, past: Past | None) -> None:
    """Every Step has the same rows; with whole cohorts they are made in the same chunks."""
    require_same_steps(run, plain, past)
    if case.whole_cohorts:
        ours, theirs = chunks(run), chunks(plain)
        for node, those in ours.items():
            beyond = set(those) - set(theirs[node])
            assert not beyond, f"{node}: {beyond} is no chunk without deaths"
            assert past is not None or set(those) == set(theirs[node]), (
                f"{node}: a chunk is missing"
            )


def require_same_steps(run: Simulation, plain: Simulation, past: Past | None = None) -> None:
    """The Steps that the run made have the rows that they have in the other."""
    first = past.step if past is not None else -1
    later = {key: rows for key, rows in contents(plain).items() if key[1] > first}
    assert contents(run) == later


def require_same_parts(case: ScheduleCase, run: Simulation, plain: Simulation) -> None:
    """The parts of ordered Steps that the run made are those of the other: no group was cut while
    one that stands before it could still come.
    """
    if any(source.stream == "arrival" for source in case.plan.sources):
        return
    expected = parts(plain)
    for place, rows in parts(run).items():
        assert rows == expected[place], f"{place}: {rows}, expected {expected[place]}"


def require_same_at_any_time(case: ScheduleCase, one: Simulation) -> None:
    """With other timings the same Steps; with whole cohorts also the same chunks, in order where
    there is one cohort at a time.

    With two sources the run ends when one has ended, wherever the other is.
    """
    other = ended(begun(replace(case, together=1), 1))
    require_same_steps(one, other)
    require_same_parts(case, one, other)
    if case.whole_cohorts:
        first, second = chunks(one), chunks(other)
        assert first.keys() == second.keys()
        assert all(Counter(first[node]) == Counter(second[node]) for node in first)
        one_at_a_time = all(source.cohort == 0 for source in case.plan.sources)
        if one_at_a_time and not any(len(node.workers) > 1 for node in case.plan.nodes):
            assert first == second


def require_same_on_one_replica(case: ScheduleCase, several: Simulation) -> None:
    """With one replica of each generation the same Steps; with whole cohorts also the chunks."""
    one = ended(begun(replace(on_one_replica(case), together=1), 2))
    require_same_steps(several, one)
    require_same_parts(case, several, one)
    if case.whole_cohorts:
        ours, theirs = chunks(several), chunks(one)
        assert ours.keys() == theirs.keys()
        assert all(Counter(ours[node]) == Counter(theirs[node]) for node in ours)


def prove_undisturbed(case: ScheduleCase) -> None:
    """Every promise of a run without deaths, at any timing."""
    run = ended(begun(case, 0))
    Proof(case, run).all()
    if case.synchronous:
        require_same_at_any_time(case, run)
        if len(case.plan.sources) == 1:
            require_same_on_one_replica(case, run)
