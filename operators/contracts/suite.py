"""The suite: all promises of one subject, each tested on generated rows.

Owns: searching for a failing case and its report. Does not own: promises (operators.py, losses.py),
what shows the report (the command, the pytest plugin).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky, Unsatisfiable, UnsatisfiedAssumption

from dataflow.schema import Keep, Schema
from dataflow.testing import Contract, ContractError, Verdict
from operators.contracts import losses, operators
from operators.contracts.cases import Generated, format_rows
from operators.contracts.generate import RowKind, RowPlan, generated_rows
from operators.contracts.loss_rows import plan_loss_rows
from operators.contracts.promise import Broken, Promise
from operators.contracts.subject import (
    LossSubject,
    OperatorSubject,
    Subject,
    make_subject,
)


def make_suite(
    target: Callable[..., Any],
    parameters: Mapping[str, Any],
    *,
    examples: int,
    columns: Mapping[str, Any],
    ports: Mapping[str, type[Schema]],
) -> Suite:
    """Make the suite of a target, as dataflow.testing.contract describes it."""
    if examples < 1:
        raise ContractError(f"examples: expected a whole number >= 1, found {examples}. Fix: 50.")
    subject = make_subject(target, parameters, ports)
    return Suite(subject, columns, examples)


_CHECKS = (HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large)

_SHRINKS = 20
"""How many smaller cases are tried, for each example, before the smallest so far will do."""


class _Enough(BaseException):
    """Ends a search; hypothesis lets it through."""


class Suite(Contract):
    """The promises of one subject, and the answers so far."""

    def __init__(self, subject: Subject, columns: Mapping[str, Any], examples: int) -> None:
        self.name = subject.name
        self._subject: Any = subject
        self._examples = examples
        self._verdicts: dict[str, Verdict] = {}
        self._plan, promises = _plan_promises(subject, columns)
        self._promises: dict[str, Promise[Any]] = {promise.name: promise for promise in promises}
        self._drawn: dict[RowKind, list[Generated]] = {}

    @property
    def promises(self) -> tuple[str, ...]:
        return tuple(self._promises)

    def verdict(self, promise: str) -> Verdict:
        if promise not in self._verdicts:
            self._verdicts[promise] = self._judge(self._promises[promise])
        return self._verdicts[promise]

    def _judge(self, promise: Promise[Any]) -> Verdict:
        is_kept = Verdict(promise=promise.name, says=promise.says, outcome="kept")
        if why := promise.unless(self._subject):
            return replace(is_kept, outcome="not promised", text=why)
        for base in promise.rests_on:
            if self.verdict(base).outcome in ("broken", "not judged"):
                return replace(is_kept, outcome="not judged", text=f"{base} is broken")
        failure = self._search(promise)
        if failure is None:
            return is_kept
        broken, rows = failure
        if broken.promise != promise.name and self._is_broken(broken.promise):
            return replace(is_kept, outcome="not judged", text=f"{broken.promise} is broken")
        return replace(is_kept, outcome="broken", text=self._report(broken, rows))

    def _is_broken(self, base: str) -> bool:
        return self.verdict(base).outcome == "broken"

    def _keeps_on_earlier_rows(self, promise: Promise[Any], kind: RowKind) -> bool:
        """Whether it holds on rows of this kind that were drawn before. Drawing takes longer than
        most tests, and a search of its own would draw the same.
        """
        earlier_rows = self._drawn.get(kind)
        # Without any, a promise would be kept on no row at all.
        if not earlier_rows:
            return False
        try:
            for rows in earlier_rows:
                promise.test(self._subject, rows)
        except (Broken, UnsatisfiedAssumption):
            return False
        return True

    def _search(self, promise: Promise[Any]) -> tuple[Broken, Generated] | None:
        """The smallest failing case of a promise that was found, or None."""
        kind = self._row_kind(promise)
        if self._keeps_on_earlier_rows(promise, kind):
            return None
        seen: list[tuple[Broken, Generated]] = []
        held: list[Generated] = []
        calls = count()

        # hypothesis derives its random seed from the text of this function.
        def test(rows: Generated) -> None:
            try:
                promise.test(self._subject, rows)
                held.append(rows)
            except Broken as broken:
                seen.append((broken, rows))
                if broken.promise != promise.name:
                    raise _Enough from None
                raise
            finally:
                if seen and next(calls) > _SHRINKS * self._examples:
                    raise _Enough

        try:
            search = given(generated_rows(self._plan, kind))(test)
            self._settings()(search)()
        except (Broken, _Enough):
            return min(seen, key=lambda failure: len(format_rows(failure[1])))
        except Flaky:
            # It failed, and with the same rows it did not.
            return Broken("deterministic", "the same rows fail once, and once do not"), seen[-1][1]
        except Unsatisfiable:
            raise ContractError(
                f"{self.name}: expected rows to test {promise.name} on, found that it refuses all."
                " Fix: other parameters, or columns= with values that it takes."
            ) from None
        self._drawn.setdefault(kind, held)
        return None

    def _settings(self) -> settings:
        return settings(
            max_examples=self._examples,
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=_CHECKS,
            phases=(Phase.generate, Phase.shrink),
        )

    def _row_kind(self, promise: Promise[Any]) -> RowKind:
        kind = RowKind(**promise.rows)
        # Which of two equal rows is chosen may depend on their order.
        if promise.name == "row_order" and self._chooses_rows():
            return replace(kind, distinct=True)
        return kind

    def _chooses_rows(self) -> bool:
        if not isinstance(self._subject, OperatorSubject):
            return False
        return issubclass(self._subject.output_schema, Keep)

    def _report(self, broken: Broken, rows: Generated) -> str:
        """One paragraph, and the rows."""
        promise = self._promises[broken.promise]
        return (
            f"{self.name} breaks the promise {promise.name}: {promise.says}. Found: {broken}. Fix:"
            f" {promise.fix}.\nThe smallest rows that show it (columns that are not shown are 0 or"
            f" empty):\n{format_rows(rows)}"
        )


def _plan_promises(
    subject: Subject, columns: Mapping[str, Any]
) -> tuple[RowPlan, tuple[Promise[Any], ...]]:
    """What its rows are made of, and what it may promise."""
    if isinstance(subject, LossSubject):
        return plan_loss_rows(subject, columns), losses.PROMISES
    plan = RowPlan(
        ports=subject.inputs,
        values_by_column=columns,
        free=subject.free,
        defaults=subject.params,
        settle=subject.settle,
    )
    return plan, operators.PROMISES
