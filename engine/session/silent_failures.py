"""Steps that end well and teach nothing, by their metrics.

Owns: these signs, and how many Steps in a row make a warning. Does not own: the metrics
(engine/run/worker/row_metrics.py), nor who is warned (run_log.py, engine/keep/metrics/sinks.py).
None of them ends a run, even with --strict: it may have solved its task.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.plan.plan import Plan
from engine.protocol.events import EventStream, FailingSilently, StepEnded
from engine.session.learning import (
    GRADIENT,
    Standstill,
    TrainedModel,
    find_standstills,
    list_trained_models,
)

STEPS = 10
"""In a row, after which a sign is told; as long as it stays, again after as many."""

_APPLIED = re.compile("reward/([^/]+)/applied")

_Key = tuple[str, str, str]
"""Rule, the train node whose rows it is about where several have rows of their own, and the
function or the Model.
"""


def watch_silent_failures(
    plan: Plan, samples: Path, stream: EventStream, steps: int | None = None
) -> SilentFailures:
    """Make what counts the signs in a plan's Steps. samples: the folder of the run's samples.
    steps: how many the run, or its phase, has, if that is known.
    """
    compares_groups = False
    if plan.program is not None:
        nodes = plan.program.nodes
        compares_groups = any(node.operator.normalises == "group" for node in nodes)
    last = None
    if steps is not None:
        last = plan.first + steps
    return SilentFailures(
        stream,
        samples,
        compares_groups=compares_groups,
        trained=list_trained_models(plan),
        last=last,
    )


class SilentFailures:
    """Counts the Steps with each sign, and emits FailingSilently. A Step whose metrics do not tell
    leaves a count as it is. compares_groups: advantages compare the rows of a group, so that a
    group of equal rewards teaches nothing; else only a Step of equal rewards does not. trained:
    the Models that should learn. last: the run's last Step, if that is known.
    """

    takes = (StepEnded,)

    def __init__(
        self,
        stream: EventStream,
        samples: Path,
        *,
        compares_groups: bool,
        trained: Sequence[TrainedModel] = (),
        last: int | None = None,
    ) -> None:
        self._stream = stream
        self._samples = samples
        self._compares_groups = compares_groups
        self._trained = trained
        self._last = last
        self._standstills: dict[str, Standstill] = {}
        """By Model, what was 0 in the last Step that taught it nothing."""
        self._counts: Counter[_Key] = Counter()

    def take(self, event: StepEnded) -> None:
        """Look at a Step's metrics, once."""
        if event.again:
            return
        signs: list[tuple[_Key, bool]] = []
        several = event.metrics.get("data/rows", 0.0) > 1.0
        for node, row_metrics in _split_by_train_node(event.metrics).items():
            signs += self._find_row_signs(node, row_metrics, several=several)
        without_signal = any(key[0] == "no_signal" and is_present for key, is_present in signs)
        signs += self._find_standstill_signs(event, without_signal=without_signal)
        for key, is_present in signs:
            if not is_present:
                self._counts[key] = 0
                continue
            self._counts[key] += 1
            if self._counts[key] % STEPS == 0:
                rule, node, what = key
                text = self._text(rule, what, self._counts[key], event.step)
                if node:
                    text = f"rows of {node}: {text}"
                self._stream.emit(FailingSilently(step=event.step, rule=rule, text=text))

    def _find_row_signs(
        self, node: str, metrics: Mapping[str, float], *, several: bool
    ) -> Iterator[tuple[_Key, bool]]:
        """Whether a Step has each sign of its rows. several: it has more than one."""
        if self._compares_groups:
            if "reward/no_signal" in metrics:
                yield ("no_signal", node, ""), metrics["reward/no_signal"] == 1.0
        elif several and "reward/std" in metrics:
            yield ("no_signal", node, ""), metrics["reward/std"] == 0.0
        if "completion/truncated" in metrics:
            yield ("all_truncated", node, ""), metrics["completion/truncated"] == 1.0
        for function in self._partial_functions(node, metrics):
            share = metrics.get(f"reward/{function}/applied", 1.0)
            yield ("reward_never_applies", node, function), share == 0.0

    def _find_standstill_signs(
        self, event: StepEnded, *, without_signal: bool
    ) -> Iterator[tuple[_Key, bool]]:
        """Whether a Step taught each Model nothing. without_signal: its rows had no signal."""
        standstills = find_standstills(self._trained, event.metrics, event.step, self._last)
        for model, standstill in standstills.items():
            if standstill is GRADIENT and without_signal:
                continue  # no_signal says why it is 0
            if standstill is not None:
                self._standstills[model] = standstill
            yield ("nothing_learnt", "", model), standstill is not None

    def _partial_functions(self, node: str, metrics: Mapping[str, float]) -> set[str]:
        """List the reward functions that did not apply to every row, now or before."""
        if "reward/mean" not in metrics:
            return set()
        functions = {key[2] for key in self._counts if key[:2] == ("reward_never_applies", node)}
        for name in metrics:
            match = _APPLIED.fullmatch(name)
            if match is not None:
                functions.add(match[1])
        return functions

    def _text(self, rule: str, function: str, count: int, step: int) -> str:
        """Say what a sign means, and where to look. function: or the Model that it is about."""
        steps = f"in the last {count} Steps (up to step {step})"
        if rule == "nothing_learnt":
            standstill = self._standstills[function]
            cause, fix = standstill.cause, standstill.fix
            return f"{function!r} learnt nothing {steps}: {cause}. Fix: {fix}."
        look = f"look at the answers in {self._samples}"
        if rule == "all_truncated":
            fix = f"{look}; a larger max_tokens, or a prompt that asks for shorter answers"
            return f"every answer {steps} ended at max_tokens, before it was complete. Fix: {fix}."
        if rule == "reward_never_applies":
            fix = f"{look}; the columns of the data that {function!r} reads, its conditions"
            return f"reward {function!r} returned None for every row {steps}. Fix: {fix}."
        rows = "each group" if self._compares_groups else "a Step"
        why = f"all rewards of {rows} were equal {steps}, so that no answer was better than another"
        fix = f"{look}, or with dataflow peek TARGET NODE; then the reward function, a task of"
        return f"{why}. Fix: {fix} another difficulty, a higher temperature or a larger n."


def _split_by_train_node(metrics: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """Split the metrics of a Step's rows where several train nodes have their own."""
    by_node: dict[str, dict[str, float]] = {}
    for name, number in metrics.items():
        if name.startswith("rows/"):
            _, node, metric = name.split("/", 2)
            by_node.setdefault(node, {})[metric] = number
    return by_node or {"": metrics}
