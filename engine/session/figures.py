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
_TURNS = ("turns", "episode/turns", "{:.1f}")
_LAG = ("lag", "policy/lag/max", "{:.0f}")
_SPEED = (
    ("s/step", "time/step", "{:.2f}"),
    ("tok/s", "throughput/tokens_per_second", "{:,.0f}"),
)
_LEFT_OUT = ("/reward", "/rows")
"""Numbers of an evaluation that its functions' own say better; metrics.jsonl has them all."""


def figures(row: Mapping[str, float], *, lag: bool) -> list[Figure]:
    """Choose what is shown of a Step's row, evaluations left out: rewards, or where there are none
    the loss; then what tells how training goes; then time. lag: rows may be older than a version.
    """
    step_figures = list(_rewards(row)) or list(_losses(row))
    for label, name, form in _metrics(row, lag=lag):
        for node, number in _find_numbers(row, name):
            step_figures.append((f"{label} {node}".rstrip(), form.format(number)))
    return step_figures


def _metrics(row: Mapping[str, float], *, lag: bool) -> Iterator[tuple[str, str, str]]:
    """List the metrics beside rewards and losses that are shown where a row has them: label, name
    and form.
    """
    names = {_split_label(key)[0] for key in row}
    for label, name, form in _TRAINING:
        # What the loss says of the entropy is better than an estimate.
        if name != "policy/sampled_entropy" or "policy/entropy" not in names:
            yield label, name, form
    yield _LENGTH
    yield _TURNS
    if lag:
        yield _LAG
    yield from _SPEED


def _find_numbers(row: Mapping[str, float], name: str) -> Iterator[tuple[str, float]]:
    """Find a metric's number, or those of several train nodes; each with the node's label, which is
    empty for the only one.
    """
    if name in row:
        yield "", row[name]
        return
    for key, number in row.items():
        metric, label = _split_label(key)
        if metric == name:
            yield label, number


def _split_label(name: str) -> tuple[str, str]:
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
    """Show the reward that training reads, and each function's own where there are several."""
    for name, number in row.items():
        match = _REWARD.fullmatch(name)
        if match is not None:
            yield f"reward {match[1] or ''}".rstrip(), f"{number:.3f}"
    if "reward/mean" not in row:
        return
    functions = [name for name in row if _FUNCTION.fullmatch(name)]
    if len(functions) > 1:
        for name in functions:
            yield name.removesuffix("/mean"), f"{row[name]:.3f}"


def _losses(row: Mapping[str, float]) -> Iterator[Figure]:
    """Show the loss; of several each by its name."""
    names = [name for name in row if name.startswith("loss/")]
    for name in names:
        label = name if len(names) > 1 else "loss"
        yield label, f"{row[name]:.4f}"


def evaluations(row: Mapping[str, float]) -> dict[str, float]:
    """Choose the numbers of the row's evaluations after Step 0 that are shown, by metric."""
    numbers: dict[str, float] = {}
    for name, number in row.items():
        is_later = name.startswith("eval/") and not name.startswith("eval/initial/")
        if is_later and not name.endswith(_LEFT_OUT):
            numbers[name] = number
    return numbers
