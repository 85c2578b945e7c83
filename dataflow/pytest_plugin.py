"""The pytest plugin: a Contract in a test file becomes one test of each of its promises.

Owns: that, and a line at the end where tests cannot import our packages. Does not own: promises,
or how they are tested (testing.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dataflow.import_order import describe_replaced_packages
from dataflow.testing import Contract


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> pytest.Collector | None:
    """`test_mine = contract(mine)` is `test_mine::row_order` and so on."""
    if not isinstance(obj, Contract) or not name.startswith("test"):
        return None
    tests: Any = ContractTests.from_parent(collector, name=name)
    tests.contract = obj
    return tests


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """pytest puts a test's folder first on the path, which may have a package of our name."""
    if not terminalreporter.stats.get("error"):
        return
    line = describe_replaced_packages()
    if line:
        terminalreporter.write_line(line)


class ContractTests(pytest.Collector):
    """The tests of one contract."""

    contract: Contract

    def collect(self) -> Iterator[pytest.Item]:
        for promise in self.contract.promises:
            item: Any = PromiseTest.from_parent(self, name=promise)
            item.contract = self.contract
            yield item


class PromiseTest(pytest.Item):
    """The test of one promise; skipped, with the reason, if it is not promised."""

    contract: Contract

    def runtest(self) -> None:
        verdict = self.contract.verdict(self.name)
        if verdict.outcome == "broken":
            pytest.fail(verdict.text, pytrace=False)
        if verdict.outcome != "kept":
            pytest.skip(str(verdict))

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.contract.name} {self.name}"
