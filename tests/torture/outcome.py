"""The outcome of one case: the record, its timing and the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case. `fault`: what did not hold, or empty; `said`: the first line that a user sees."""

    part: str
    case: str
    fault: str = ""
    said: str = ""
    seconds: float = 0.0


def timed(part: str, case: str, carry_out: Callable[[], tuple[str, str]]) -> CaseResult:
    """One case, carried out now, which returns its fault and what was said."""
    begun = time.monotonic()
    fault, said = carry_out()
    seconds = time.monotonic() - begun
    return CaseResult(part=part, case=case, fault=fault, said=said[:300], seconds=seconds)


def table(results: Sequence[CaseResult]) -> str:
    """One line a part: cases, how many held, seconds; then each case that failed, and why."""
    lines = [f"{'part':<12}{'cases':>7}{'held':>7}{'seconds':>10}"]
    for part in dict.fromkeys(result.part for result in results):
        of_part = [result for result in results if result.part == part]
        held = sum(not result.fault for result in of_part)
        seconds = sum(result.seconds for result in of_part)
        lines.append(f"{part:<12}{len(of_part):>7}{held:>7}{seconds:>10.1f}")
    wrong = [result for result in results if result.fault]
    lines += [f"FAILED {r.part}: {r.case}: {r.fault} (said: {r.said})" for r in wrong]
    return "\n".join(lines)
