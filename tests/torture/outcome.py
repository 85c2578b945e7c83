"""What one case of the torture came to.

Owns: the record and the table. Does not own: any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case. `fault` is empty where everything held, else what did not; `said` the first line
    that a user sees.
    """

    part: str
    case: str
    fault: str = ""
    said: str = ""
    seconds: float = 0.0


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a part: cases, how many held, seconds; then each case that did not hold, with its
    fault.
    """
    lines = [f"{'part':<12}{'cases':>7}{'held':>7}{'seconds':>10}"]
    for part in dict.fromkeys(o.part for o in outcomes):
        of_part = [o for o in outcomes if o.part == part]
        held = sum(not o.fault for o in of_part)
        lines.append(
            f"{part:<12}{len(of_part):>7}{held:>7}{sum(o.seconds for o in of_part):>10.1f}"
        )
    lines += [f"FAILED {o.part}: {o.case}: {o.fault} (said: {o.said})" for o in outcomes if o.fault]
    return "\n".join(lines)
