"""Kinds of random schedules; each proves every promise of the coordinator for the case of a seed.

    undisturbed   nobody dies, at any timing                  deaths    Workers die
    up            numbers that wait for all of their rows     beside    concats of generations
    own           a node that trains rows of two sources      elastic   replicas join and leave
    resumed       killed, and resumed from a checkpoint
    lossy         rows are lost alone                       table     a Table beside the Models
    streamed      Steps are trained in parts while they are generated
    formed        Steps with a lag are trained in parts once they are formed
    slow          the coordinator takes together what waits
    relayout      the run goes on with another layout at some Steps' ends, and Workers die
    ranked        replicas of several Workers         short     kernels run out of memory
    growing       rows grow, and memory holds less than the lag allows; so it is when Workers die,
                  kernels run out of memory, and the run is resumed
    late          samples are spread, rows weighed, and bound late to replicas with few slots

Owns: what a kind is. Does not own: cases (plans.py, elastic.py), what has to hold (proof.py), which
seeds are tried (test_schedules.py: few of each kind; many.py: others in each run).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from engine.plan.planned_source import LiveRoom
from engine.run.simulated_workers.simulation import Simulation
from engine.run.simulated_workers.store import SimulatedCheckpoint
from tests.schedules.elastic import elastic_case
from tests.schedules.late import late_case
from tests.schedules.plans import ScheduleCase, drawn_case, lossy
from tests.schedules.proof import Proof
from tests.schedules.record import Past
from tests.schedules.relayouts import prove_relayouts
from tests.schedules.repeated_parts import RepeatedParts
from tests.schedules.replicas_of_ranks import with_replica_ranks
from tests.schedules.streamed import formed_case, streamed_case
from tests.schedules.tables import with_table
from tests.schedules.weather import (
    begun,
    ended,
    prove,
    prove_undisturbed,
    require_same_parts,
    require_same_steps,
)

_TOGETHER = (2, 5, 30, 1000)
"""So many messages wait for a slow coordinator."""


def slow_case(seed: int) -> ScheduleCase:
    """A case of which a few messages wait, or very many."""
    draw = random.Random(f"slow {seed}")
    case = drawn_case(seed, up=seed % 4 == 1, beside=seed % 5 == 2, own=seed % 7 == 3)
    return replace(case, together=draw.choice(_TOGETHER))


def _with_deaths_in_odd_seeds(case: ScheduleCase) -> None:
    (prove if case.seed % 2 else prove_undisturbed)(case)


def _up(seed: int) -> None:
    """Two generations and mean_over, with selections and failures."""
    _with_deaths_in_odd_seeds(drawn_case(seed, up=True))


def _beside(seed: int) -> None:
    """Concats of generations: ragged, nested, across the cut."""
    _with_deaths_in_odd_seeds(drawn_case(seed, beside=True, up=seed % 3 == 0))


def _own(seed: int) -> None:
    """Each source has its batch in every Step and its own lag."""
    _with_deaths_in_odd_seeds(drawn_case(seed, own=True))


def lossy_case(seed: int) -> ScheduleCase:
    """A case of any of the shapes above, with rows that are lost alone."""
    return lossy(drawn_case(seed, up=seed % 4 == 1, beside=seed % 5 == 2, own=seed % 7 == 3))


def table_case(seed: int) -> ScheduleCase:
    """A case of any of the shapes above, with a Table."""
    return with_table(drawn_case(seed, up=seed % 4 == 1, beside=seed % 5 == 2, own=seed % 7 == 3))


def _elastic(seed: int) -> None:
    """As asked for, as their machines go, by the rule; and Workers die all the while."""
    prove(elastic_case(seed))


def _slow_elastic(seed: int) -> None:
    prove(replace(elastic_case(seed), together=_TOGETHER[seed % len(_TOGETHER)]))


def _killed_and_resumed(case: ScheduleCase) -> None:
    draw = random.Random(case.seed)
    often = replace(case.settings, checkpoint_every=draw.choice((1, 2)))
    case = replace(case, settings=often)
    whole = ended(begun(case, 0))
    run, past = _survived(case, whole, draw)
    Proof(case, run, past=past).all()
    if case.synchronous and past is not None:
        require_same_steps(run, whole, past)
        require_same_parts(case, run, whole)


def _survived(
    case: ScheduleCase, whole: Simulation, draw: random.Random
) -> tuple[Simulation, Past | None]:
    """The last of some runs, each resumed from the last checkpoint of the killed one before."""
    past: Past | None = None
    stored: SimulatedCheckpoint | None = None
    parts = RepeatedParts(case)
    for timing in range(1, draw.choice((2, 3)) + 1):
        run = begun(parts.next_case(), timing, stored)
        left = draw.randrange(len(whole.history.events))
        run.run(until=lambda run=run, left=left: len(run.history.events) >= left)
        parts.note(run)
        if run.store.stored:
            stored = run.store.stored[-1]
            past = Proof(case, run, past=past).past_of(stored)
    run = ended(begun(parts.next_case(), 0, stored))
    parts.note(run)
    return run, past


def _late(seed: int) -> None:
    """Any of the shapes above."""
    shape = (lossy_case, slow_case, drawn_case)[seed % 3]
    _with_deaths_in_odd_seeds(late_case(shape(seed)))


def _late_elastic(seed: int) -> None:
    prove(late_case(elastic_case(seed)))


def _late_resumed(seed: int) -> None:
    _killed_and_resumed(late_case(drawn_case(seed, own=seed % 3 == 0)))


def ranked_case(seed: int) -> ScheduleCase:
    """A case of any of the shapes above, with replicas of several ranks."""
    shape = (drawn_case, lossy_case, streamed_case, slow_case)[seed % 4]
    return with_replica_ranks(shape(seed))


def _relayout(seed: int) -> None:
    """Any of the shapes above but those whose replicas come and go."""
    shapes = (drawn_case, lossy_case, streamed_case, formed_case, table_case, slow_case)
    prove_relayouts(shapes[seed // 2 % len(shapes)](seed), deaths=seed % 2 == 1)


def short_case(seed: int) -> ScheduleCase:
    """A case of any of the shapes above, with kernels whose memory runs out."""
    shape = (drawn_case, lossy_case, streamed_case, slow_case, formed_case, ranked_case)[seed % 6]
    case = shape(seed)
    if seed % 5 == 2:
        case = late_case(case)
    return replace(case, shorts=random.Random(f"short {seed}").choice((1, 3, 10)))


def growing_case(seed: int) -> ScheduleCase:
    """A case of any of the shapes above, whose rows grow, with room for some of the first ones or
    for none; replicas of some bind late.
    """
    shape = (drawn_case, lossy_case, formed_case, slow_case)[seed % 4]
    case = shape(seed)
    if seed % 3 == 2:
        case = late_case(case)
    draw = random.Random(f"growing {seed}")
    sources = list(case.plan.sources)
    for index, source in enumerate(sources):
        if source.max_lag:
            prompts = draw.randint(source.batch, source.allowed)
            room = LiveRoom(
                prompts=prompts,
                tokens=prompts * draw.choice((0, 10, 40, 200)),
                beside=draw.choice((0, 5, 20)),
            )
            asked = draw.choice((0, 0, 50, 500))
            sources[index] = replace(source, room=room, live_tokens=asked)
    return replace(
        case,
        plan=replace(case.plan, sources=tuple(sources)),
        outcomes=replace(case.outcomes, growth=draw.choice((0, 1, 1, 7))),
    )


def _growing(seed: int) -> None:
    case = growing_case(seed)
    if seed % 2:
        prove(replace(case, shorts=random.Random(f"short {seed}").choice((0, 3))))
    else:
        prove_undisturbed(case)


def _relayout_short(seed: int) -> None:
    """Workers die in odd seeds; in some rows grow."""
    shapes = (short_case, short_case, growing_case)
    case = shapes[seed // 2 % len(shapes)](seed)
    case = replace(case, shorts=max(3, case.shorts))
    prove_relayouts(case, deaths=seed % 2 == 1)


KINDS: dict[str, Callable[[int], object]] = {
    "undisturbed": lambda seed: prove_undisturbed(drawn_case(seed)),
    "deaths": lambda seed: prove(drawn_case(seed)),
    "up": _up,
    "beside": _beside,
    "own": _own,
    "elastic": _elastic,
    "resumed": lambda seed: _killed_and_resumed(drawn_case(seed)),
    "own resumed": lambda seed: _killed_and_resumed(drawn_case(seed, own=True)),
    "lossy": lambda seed: _with_deaths_in_odd_seeds(lossy_case(seed)),
    "lossy resumed": lambda seed: _killed_and_resumed(lossy_case(seed)),
    "streamed": lambda seed: _with_deaths_in_odd_seeds(streamed_case(seed)),
    "streamed resumed": lambda seed: _killed_and_resumed(streamed_case(seed)),
    "formed": lambda seed: _with_deaths_in_odd_seeds(formed_case(seed)),
    "formed resumed": lambda seed: _killed_and_resumed(formed_case(seed)),
    "table": lambda seed: _with_deaths_in_odd_seeds(table_case(seed)),
    "table resumed": lambda seed: _killed_and_resumed(table_case(seed)),
    "slow": lambda seed: prove_undisturbed(slow_case(seed)),
    "slow deaths": lambda seed: prove(slow_case(seed)),
    "slow elastic": _slow_elastic,
    "late": _late,
    "late elastic": _late_elastic,
    "late resumed": _late_resumed,
    "ranked": lambda seed: prove_undisturbed(ranked_case(seed)),
    "ranked deaths": lambda seed: prove(ranked_case(seed)),
    "ranked resumed": lambda seed: _killed_and_resumed(ranked_case(seed)),
    "relayout": _relayout,
    "short": lambda seed: prove(short_case(seed)),
    "ranked short": lambda seed: prove(replace(ranked_case(seed), shorts=5)),
    "growing": _growing,
    "growing resumed": lambda seed: _killed_and_resumed(growing_case(seed)),
    "relayout short": _relayout_short,
    "slow resumed": lambda seed: _killed_and_resumed(slow_case(seed)),
}
