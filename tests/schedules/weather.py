"""Runs in which Workers die: one case, begun anew from its last checkpoint as often as it has to go
back.

Owns: driving a case through faults to its end, and what is to be compared with a run without any.
Does not own: what has to hold (proof.py), nor which faults there are (engine/simulate/faults.py).
"""

from __future__ import annotations

import random

from engine.simulate.faults import Faults
from engine.simulate.workers import Simulation, Stored
from tests.schedules.plans import Case
from tests.schedules.proof import Past, Proof, chunks, contents

_ATTEMPTS = 6
"""Of which the last has no faults any more."""


def begun(
    it: Case, timing: int, stored: Stored | None = None, faults: Faults | None = None
) -> Simulation:
    """A run of the case, with one of its timings, from a checkpoint or from the beginning."""
    run = Simulation(
        it.plan,
        it.settings,
        rows=it.rows,
        timing=it.timing(timing),
        outcomes=it.outcomes,
        faults=faults,
    )
    run.begin(stored)
    return run


def ended(run: Simulation) -> Simulation:
    """The run at its end; the bound on outstanding prompts holds at every moment."""
    run.run(until=lambda: _within_bounds(run))
    return run


def _within_bounds(run: Simulation) -> bool:
    """Asserts the bound; never says that a run should stop."""
    for name, admission in run.coordinator.sources.admissions.items():
        source, outstanding = admission.source, admission.lane.outstanding
        assert outstanding <= (1 + source.max_lag) * source.batch, (
            f"{name}: {outstanding} prompts are outstanding"
        )
    return False


def weathered(it: Case) -> tuple[Simulation, Past | None, int]:
    """The run that reached the end, what it went on from, and how often Workers died in all."""
    draw = random.Random(f"weather {it.seed}")
    past: Past | None = None
    stored: Stored | None = None
    deaths = 0
    for attempt in range(_ATTEMPTS):
        faults = drawn(draw, 0 if attempt == _ATTEMPTS - 1 else draw.choice((1, 2, 4, 8)))
        run = ended(begun(it, attempt, stored, faults))
        deaths += run.deaths
        if run.gone_back is None:
            break
        if run.history.stored:
            stored = run.history.stored[-1]
            past = Proof(it, run, past=past).past_of(stored)
    return run, past, deaths


def drawn(draw: random.Random, deaths: int) -> Faults:
    """Faults of one attempt."""
    return Faults(
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


def prove(it: Case) -> int:
    """Every promise of a run in which Workers die, and, where it is synchronous, that its rows and
    chunks are those of a run in which none does. Returns how many died.
    """
    run, past, deaths = weathered(it)
    Proof(it, run, past=past).all()
    if it.synchronous:
        plain = ended(begun(it, 0))
        Proof(it, plain).all()
        _same_as(it, run, plain, past)
    return deaths


def _same_as(it: Case, run: Simulation, plain: Simulation, past: Past | None) -> None:
    """Every Step has the same rows; with whole cohorts they are made in the same chunks."""
    later = {
        key: rows for key, rows in contents(plain).items() if past is None or key[1] > past.step
    }
    assert contents(run) == later
    if all(n.chunking == "cohort" for n in it.plan.nodes) and len(it.plan.sources) == 1:
        ours, theirs = chunks(run), chunks(plain)
        for node, made in ours.items():
            assert set(made) <= set(theirs[node]), (
                f"{node}: {set(made) - set(theirs[node])} is no chunk without deaths"
            )
            assert past is not None or set(made) == set(theirs[node]), f"{node}: a chunk is missing"
