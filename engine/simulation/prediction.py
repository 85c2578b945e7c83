"""What a simulated run came to: its Steps, who did what when, the coordinator's load.

Owns: the data, as plain values. Does not own: how it is found (prediction_run.py), what is said of
it (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.plan.cost.machine_load import MachineLoad
from engine.plan.plan import Plan
from engine.run.simulated_workers.spans import SimulatedSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One Step. rows, tokens (prompts and answers): what was trained on. lag: by reader, the mean
    number of versions between what a row was made with and what it was trained into. replicas: by
    elastic node, how many were there at its end.
    """

    step: int
    start: float
    end: float
    rows: int
    tokens: int
    lag: Mapping[str, float]
    replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLoad:
    """What the coordinator itself did; seconds: of CPU, measured."""

    events: int
    instructions: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one plan. seconds: simulated, of the whole run. spans: in the order in which they began;
    empty where nobody asked for them. present: from when to when each Worker was there (its start
    included) that was not there all the time. rows: by node, in words, where the number and the
    lengths of its rows come from. load: how busy the machine of the profile was.
    """

    plan: Plan
    seconds: float
    steps: tuple[SimulatedStep, ...]
    spans: tuple[SimulatedSpan, ...]
    coordinator: CoordinatorLoad
    present: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    load: MachineLoad = field(default_factory=MachineLoad)
