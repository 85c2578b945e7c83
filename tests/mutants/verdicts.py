"""What became of each fault, as a table, and what was caught before.

Owns: caught.json and the comparison with it. Does not own: the trials (trials.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CAUGHT = Path(__file__).parent / "caught.json"
Outcome = Literal["caught", "hung", "survived", "not reached", "not run"]
_NOTICED = frozenset({"caught", "hung"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """hung: a test did not end, and all was killed, which counts as caught. by: the test that
    failed. not run: pytest refused its tests. seconds: of the trial, with pytest's start. ran:
    tests that ended.
    """

    fault: str
    outcome: Outcome
    by: str = ""
    seconds: float = 0.0
    ran: int = 0

    @property
    def noticed(self) -> bool:
        return self.outcome in _NOTICED


def verdict_line(verdict: TrialVerdict) -> str:
    """A line of the table."""
    how = f"({verdict.ran} tests)"
    if verdict.noticed:
        how = f"by {verdict.by}" if verdict.by else f"by a time-out, after {verdict.ran} tests"
    return f"{verdict.fault:<34} {verdict.seconds:6.1f} s  {verdict.outcome:<11} {how}"


def summary(verdicts: Sequence[TrialVerdict]) -> str:
    """How many are of each outcome."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    total = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{len(verdicts)} faults: {total or 'none'}"


def read_caught(path: Path = CAUGHT) -> Mapping[str, str]:
    """Which faults were caught before, and by what; none if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_caught(verdicts: Iterable[TrialVerdict], path: Path = CAUGHT) -> None:
    """Note these verdicts as the state to hold; of faults that were not tried what stands there."""
    caught = dict(read_caught(path))
    for verdict in verdicts:
        caught.pop(verdict.fault, None)
        if verdict.noticed:
            caught[verdict.fault] = verdict.by or "a time-out"
    text = json.dumps(caught, indent=1, sort_keys=True) + "\n"
    path.write_text(text, encoding="ascii")


def no_longer_caught(
    verdicts: Iterable[TrialVerdict], before: Mapping[str, str]
) -> list[TrialVerdict]:
    """Those that some test caught before, and none does now."""
    return [each for each in verdicts if each.fault in before and not each.noticed]
