"""Episodes trained per second against TRL's tool calling on CPU: paired, alternating runs.

    python -m benchmarks.agents [two_turns six_turns] [--quick] [--json FILE]

Owns: the sides, the pairing, the goals and what is reported. Does not own: the settings
(agents_settings.py), what a side does (agents_our_side.py, agents_trl_side.py).

Both sides get the same model, chat template, description of turns, data, environment, batch,
lengths, learning rate, threads and one update per batch. An episode is trained when its Step is
over: turns, tool calls, reward and update. Each pair runs both, in alternating order, so that a
slow minute of the machine affects both; the ratio is the median over pairs. Turns and tokens of an
episode are reported of both sides: they must be alike, or the ratio compares two tasks.
"""

from __future__ import annotations

import json as json_text
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import tyro

from benchmarks.agents_settings import AGENT_SETTINGS, AgentRun, prepare_agents
from benchmarks.report import SavedResults, SideResult
from benchmarks.sides import last_line

GOALS = {"two_turns": 3.0, "six_turns": 5.0}
"""Least ratio of episodes per second, ours to TRL's."""

UNITS = {
    "episodes_per_second": "1/s",
    "step_ms": "ms",
    "rollout_ms": "ms",
    "train_ms": "ms",
    "turns": "turns",
    "prompt_tokens": "tokens",
    "written_tokens": "tokens",
    "answered_tokens": "tokens",
    "reward": "mean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEpisodes:
    """One run of one side, over the Steps after the warm-up; times are per Step."""

    episodes_per_second: float
    """Episodes trained per second of wall time, including everything between Steps."""
    step_ms: float
    rollout_ms: float
    """Turns, tool calls and rewards."""
    train_ms: float
    """The update."""
    turns: float
    """Mean of an episode, like the tokens below."""
    prompt_tokens: float
    written_tokens: float
    answered_tokens: float
    """What stands between two turns."""
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSide:
    """One of the systems compared. command: what runs it, before the path of its AgentRun."""

    name: str
    command: tuple[str, ...]

    def run(self, run: AgentRun) -> MeasuredEpisodes:
        """Train as told, in fresh processes. Exits if that fails."""
        with tempfile.TemporaryDirectory() as folder:
            run_file = Path(folder) / "run.json"
            run_file.write_text(json_text.dumps(asdict(run)))
            return measured_episodes(last_line([*self.command, str(run_file)], run.threads))


OURS = AgentSide(name="ours", command=(sys.executable, "-m", "benchmarks.agents_our_side"))
TRL = AgentSide(name="trl", command=(".venv-trl/bin/python", "-m", "benchmarks.agents_trl_side"))

AgentPairs = list[dict[str, MeasuredEpisodes]]
"""One entry per pair: what each side measured, by the side's name."""


def measured_episodes(numbers: Mapping[str, float]) -> MeasuredEpisodes:
    """From a side's JSON; extra keys are ignored, a missing one is a KeyError."""
    names = [field.name for field in fields(MeasuredEpisodes)]
    return MeasuredEpisodes(**{name: numbers[name] for name in names})


def run_agent_pairs(sides: Sequence[AgentSide], run: AgentRun, pairs: int) -> AgentPairs:
    """Every side once per pair, with the pair's own seed; the order alternates."""
    paired: AgentPairs = []
    for pair in range(pairs):
        order = sides if pair % 2 == 0 else list(reversed(sides))
        seeded = replace(run, seed=run.seed + pair)
        paired.append({side.name: side.run(seeded) for side in order})
    return paired


def agent_results(setting: str, paired: AgentPairs) -> list[SideResult]:
    """All numbers of one setting: each side's medians, then the ratio."""
    results: list[SideResult] = []
    for side in (OURS.name, TRL.name):
        runs = [pair[side] for pair in paired]
        for name, unit in UNITS.items():
            middle = statistics.median(getattr(run, name) for run in runs)
            results.append(SideResult(name=f"{setting}/{side}/{name}", value=middle, unit=unit))
    ratios: list[float] = []
    for pair in paired:
        ours, peer = pair[OURS.name], pair[TRL.name]
        ratios.append(ours.episodes_per_second / peer.episodes_per_second)
    results += [
        SideResult(
            name=f"{setting}/ratio",
            value=statistics.median(ratios),
            unit="x",
            goal=GOALS[setting],
        ),
        SideResult(name=f"{setting}/ratio_least", value=min(ratios), unit="x"),
        SideResult(name=f"{setting}/ratio_greatest", value=max(ratios), unit="x"),
    ]
    return results


def main(
    settings: tyro.conf.Positional[tuple[str, ...]] = tuple(AGENT_SETTINGS),
    *,
    pairs: int = 3,
    quick: bool = False,
    json: Path | None = None,
) -> None:
    """Compare in these settings.

    Args:
        settings: which of two_turns, six_turns.
        pairs: how many pairs of runs.
        quick: one pair of few Steps: shows that it works; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    subprocess.run(["benchmarks/trl_env.sh"], check=True)
    saved = SavedResults(json)
    for name in settings:
        run = prepare_agents(AGENT_SETTINGS[name])
        if quick:
            run = replace(run, steps=2, warmup_steps=1)
        saved.add(*agent_results(name, run_agent_pairs((OURS, TRL), run, 1 if quick else pairs)))
    saved.show("agents against TRL" + (", quick" if quick else ""))


if __name__ == "__main__":
    tyro.cli(main)
