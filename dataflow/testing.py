"""Contract tests of operators and losses: what each promises, tested on generated rows.

Owns: `contract`, with which users test their own, and what it answers. Does not own: any promise,
nor how rows are generated (operators/contracts, which is imported when a contract is made: it needs
torch and hypothesis), the command (engine/cli/test.py), pytest (pytest_plugin.py).

    from dataflow.testing import contract

    test_novelty = contract(novelty, weight=0.5)

With the package installed, pytest makes one test of each promise.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dataflow.errors import DataflowError
from dataflow.schema import Schema

EXAMPLES = 50
"""How many generated batches each promise is tested on."""

_SUITE = "operators.contracts.suite"

Outcome = Literal["kept", "broken", "not promised", "not judged"]


class ContractError(DataflowError, ValueError):
    """Something that cannot be put to a contract test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one promise. text: the reason; for a broken one what was found, the smallest
    rows that show it, and a fix.
    """

    promise: str
    says: str
    outcome: Outcome
    text: str = ""

    def __str__(self) -> str:
        if self.outcome == "broken":
            return self.text
        line = f"{self.promise}: {self.outcome}"
        return f"{line}: {self.text}" if self.text else line


class Contract(ABC):
    """The promises of one operator or loss."""

    name: str

    @property
    @abstractmethod
    def promises(self) -> tuple[str, ...]:
        """Their names, in the order in which they build on each other."""

    @abstractmethod
    def verdict(self, promise: str) -> Verdict:
        """Test one; the answer is kept."""

    def verdicts(self) -> Iterator[Verdict]:
        """Test all, one after another."""
        return map(self.verdict, self.promises)


def contract(
    target: Callable[..., Any],
    *,
    examples: int = EXAMPLES,
    columns: Mapping[str, Any] | None = None,
    ports: Mapping[str, type[Schema]] | None = None,
    **parameters: Any,
) -> Contract:
    """Make a test of what this operator or loss promises, on generated rows.

    target: what a graph calls: an operator on columns or a loss, built in or your own, or a
    function of Ports that returns what one of them does. parameters: its own; others have their
    defaults or, where limits are declared, any value within them. columns: by name, a hypothesis
    strategy or a list of examples, for columns whose content matters (dataset columns are text by
    default). ports: by name, what a port carries, if more than its declared schema. examples:
    batches for each promise; they are the same in each run.

    Raises ContractError for anything else, for a parameter without a value, and where hypothesis is
    missing; GraphError for parameters that the target refuses.
    """
    try:
        suite: Any = importlib.import_module(_SUITE)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ContractError(
            "contract tests: expected the package hypothesis, found none. Fix: pip install"
            " 'dataflow-rl[test]'."
        ) from None
    return suite.make_suite(
        target, parameters, examples=examples, columns=columns or {}, ports=ports or {}
    )
