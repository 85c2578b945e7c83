"""`--relayout 16384=replicas.rollout=2,tensor.train_policy=2`: layouts by live tokens, as a user
writes them.

Owns: reading the option into a table, what it cannot be combined with. Does not own: the table
(layout_table.py), one option's text (option_texts.py), when a run switches
(engine/coordinator/relayout_policy.py).

From so many live tokens on, options are as if the run were resumed with them; those of a higher
number come on top of those of the lower ones. `--relayout auto` leaves the table to a search
(searched_table.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dataflow.errors import PlanError, nearest_or_all
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout
from engine.plan.option_texts import CHANGEABLE, set_option
from engine.plan.options import AUTO, RunOptions, make_placing
from engine.plan.program_plan import AnyPlan

_LIKE = "16384=replicas.rollout=2"
_FIXED = ("seed", "cluster", "profile", "stream", "part_tokens")
"""Options of a plan that stay as the run began: each would be another run, or other hosts."""
_ALLOWED = tuple(name for name in CHANGEABLE if name not in _FIXED)


def read_relayout(options: RunOptions) -> LayoutTable | None:
    """Read the option into a table; None where none is written. Raises PlanError for what is no
    number of tokens, and for an option that is none or cannot change.
    """
    if not options.relayout or options.relayout == AUTO:
        return None
    starts: dict[int, str] = {}
    for text, changes in options.relayout.items():
        start = _read_start(text)
        if start in starts:
            problem = f"expected each number of tokens once, found {start} twice"
            raise PlanError(f"relayout: {problem}. Fix: {start}={starts[start]},{changes}.")
        starts[start] = changes
    layouts = [RunLayout()]
    buckets = [LayoutBucket(start=0, best=0)]
    latest, texts = options, dict[str, str]()
    for start in sorted(starts):
        for change in starts[start].split(","):
            key, setting = _read_change(change)
            latest = set_option(latest, key, setting, where="relayout")
            texts[key] = setting
        words = ",".join(f"{key}={setting}" for key, setting in texts.items())
        layouts.append(RunLayout(changes=find_changes(options, latest), text=words))
        buckets.append(LayoutBucket(start=start, best=len(layouts) - 1))
    return LayoutTable(layouts=tuple(layouts), buckets=tuple(buckets))


def require_searchable(options: RunOptions) -> None:
    """Raise PlanError for `--relayout auto` beside options that say where nodes are, or that make
    something else least than seconds.
    """
    asked: Mapping[str, object] = {
        "--search off": options.search == "off",
        f"--workers {options.workers}": options.workers != "auto",
        "--pin": options.pin,
        "--together": options.together,
        "--turns": options.turns,
        "a range of --replicas": make_placing(options).least,
        "--inproc": options.inproc,
        "--objective cost": options.objective != "seconds",
    }
    flags = [flag for flag, wish in asked.items() if wish]
    if flags:
        problem = f"expected layouts that are left to a search, found {', '.join(flags)}"
        raise PlanError(f"relayout: auto: {problem}. Fix: leave one out, or {_LIKE}.")


def require_generation(planned: AnyPlan) -> None:
    """Raise PlanError where there are no live tokens by which a layout could be chosen."""
    for plan in planned.phases:
        if any(node.traits.generates and node.region == "stream" for node in plan.nodes):
            return
    problem = "expected a graph that generates what it trains on, found none that does"
    raise PlanError(f"relayout: {problem}. Fix: leave --relayout out.")


def _read_start(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        problem = f"expected a number of live tokens, 1 or more, found {text!r}"
        raise PlanError(f"relayout: {problem}. Fix: {_LIKE}.")
    return int(text)


def _read_change(change: str) -> tuple[str, str]:
    key, equals, setting = (part.strip() for part in change.partition("="))
    if not (key and equals and setting):
        problem = f"expected OPTION.NODE=VALUE, found {change!r}"
        raise PlanError(f"relayout: {problem}. Fix: {_LIKE}.")
    key = key.removeprefix("--")
    name = key.partition(".")[0].replace("-", "_")
    if name not in _ALLOWED:
        problem = f"expected an option that a running run may change, found {name!r}"
        raise PlanError(f"relayout: {problem}. Fix: {nearest_or_all(name, _ALLOWED)}.")
    return key, setting


def find_changes(before: RunOptions, after: RunOptions) -> Mapping[str, Any]:
    """Find the options that differ, with what they then are."""
    changes: dict[str, Any] = {}
    for option in fields(RunOptions):
        setting = getattr(after, option.name)
        if setting != getattr(before, option.name):
            changes[option.name] = setting
    return changes
