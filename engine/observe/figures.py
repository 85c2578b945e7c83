"""Which of a Step's numbers a user sees while a run goes on, and in which form.

Owns: their choice, by what metrics there are, and their order. Does not own: where they are shown
(progress.py), nor any number (docs/metrics.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

Figure = tuple[str, str]
"""(label, text)."""

_FUNCTION = re.compile(r"reward/[^/]+/mean")
_TRAINING = (
    ("kl", "policy/kl_reference", "{:.4f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("sampled entropy", "policy/sampled_entropy", "{:.3f}"),
    ("no signal", "reward/no_signal", "{:.0%}"),
    ("mismatch", "policy/mismatch/mean", "{:.1e}"),
)
_LENGTH = ("length", "completion/length/mean", "{:.1f}")
_LAG = ("lag", "policy/lag/max", "{:.0f}")
_SPEED = (
    ("s/step", "time/step", "{:.2f}"),
    ("tok/s", "throughput/tokens_per_second", "{:,.0f}"),
)
_LEFT_OUT = ("/reward", "/rows")
"""Numbers of an evaluation that its functions' own say better; metrics.jsonl has them all."""


def figures(row: Mapping[str, float], *, lag: bool) -> list[Figure]:
    """What is shown of a Step's row, evaluations left out: rewards, or where there are none the
    loss; then what tells how training goes; then time. lag: rows may be older than a version.
    """
    shown = [*_rewards(row)] or [*_losses(row)]
    exact = "policy/entropy" in row  # it is better than an estimate
    wanted = [each for each in _TRAINING if not (exact and each[1] == "policy/sampled_entropy")]
    wanted += [_LENGTH, *([_LAG] if lag else []), *_SPEED]
    return shown + [(label, form.format(row[name])) for label, name, form in wanted if name in row]


def _rewards(row: Mapping[str, float]) -> Iterator[Figure]:
    """The reward that training reads, and each function's own where there are several."""
    if "reward/mean" in row:
        yield "reward", f"{row['reward/mean']:.3f}"
        several = [name for name in row if _FUNCTION.fullmatch(name)]
        for name in several if len(several) > 1 else ():
            yield name.removesuffix("/mean"), f"{row[name]:.3f}"


def _losses(row: Mapping[str, float]) -> Iterator[Figure]:
    """The loss; of several each by its name."""
    found = [name for name in row if name.startswith("loss/")]
    for name in found:
        yield (name if len(found) > 1 else "loss"), f"{row[name]:.4f}"


def evaluations(row: Mapping[str, float]) -> dict[str, float]:
    """The numbers of the row's evaluations after Step 0 that are shown, by metric."""
    later = {n: v for n, v in row.items() if n.startswith("eval/")}
    return {
        name: value
        for name, value in later.items()
        if not name.startswith("eval/initial/") and not name.endswith(_LEFT_OUT)
    }
