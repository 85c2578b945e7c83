"""Which of a Step's numbers a user sees while a run goes on, and in which form.

Owns: their choice, by what metrics there are, and their order. Does not own: where they are shown
(progress.py), nor any number (docs/metrics.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

Figure = tuple[str, str]
"""(label, text)."""

_REWARD = re.compile(r"(?:rows/([^/]+)/)?reward/mean")
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
    exact = any(of == "policy/entropy" for of, _ in map(_unlabelled, row))
    # What the loss says of the entropy is better than an estimate.
    wanted = [each for each in _TRAINING if not (exact and each[1] == "policy/sampled_entropy")]
    wanted += [_LENGTH, _LAG, *_SPEED] if lag else [_LENGTH, *_SPEED]
    for label, name, form in wanted:
        for of, number in _of_each(row, name):
            shown.append((f"{label} {of}".rstrip(), form.format(number)))
    return shown


def _of_each(row: Mapping[str, float], name: str) -> Iterator[tuple[str, float]]:
    """The metric's number, or of several train nodes those of each, with what it is labelled by."""
    if name in row:
        yield "", row[name]
        return
    for key, number in row.items():
        metric, label = _unlabelled(key)
        if metric == name:
            yield label, number


def _unlabelled(name: str) -> tuple[str, str]:
    """`policy/first/mismatch/mean`: (`policy/mismatch/mean`, `first`); so of `rows/first/...`."""
    if name.startswith("rows/"):
        _, label, metric = name.split("/", 2)
        return metric, label
    first, _, rest = name.partition("/")
    label, _, last = rest.partition("/")
    if first == "policy" and last:
        return f"{first}/{last}", label
    return name, ""


def _rewards(row: Mapping[str, float]) -> Iterator[Figure]:
    """The reward that training reads, and each function's own where there are several."""
    for name, number in row.items():
        if found := _REWARD.fullmatch(name):
            yield f"reward {found[1] or ''}".rstrip(), f"{number:.3f}"
    if "reward/mean" not in row:
        return
    functions = [name for name in row if _FUNCTION.fullmatch(name)]
    if len(functions) > 1:
        for name in functions:
            yield name.removesuffix("/mean"), f"{row[name]:.3f}"


def _losses(row: Mapping[str, float]) -> Iterator[Figure]:
    """The loss; of several each by its name."""
    names = [name for name in row if name.startswith("loss/")]
    for name in names:
        yield (name if len(names) > 1 else "loss"), f"{row[name]:.4f}"


def evaluations(row: Mapping[str, float]) -> dict[str, float]:
    """The numbers of the row's evaluations after Step 0 that are shown, by metric."""
    later = {n: v for n, v in row.items() if n.startswith("eval/")}
    return {
        name: value
        for name, value in later.items()
        if not name.startswith("eval/initial/") and not name.endswith(_LEFT_OUT)
    }
