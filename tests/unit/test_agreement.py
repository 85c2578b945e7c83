"""scripts/agreement.py: what it measures of a pair, and that docs/agreement.md has its tables."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from operators.generate import GENERATE
from tests.kit.processes import ROOT


@pytest.fixture
def agreement(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("agreement")


@pytest.mark.long
def test_the_torch_kernels_agree_and_a_sampler_without_an_update_is_seen(agreement: Any) -> None:
    case = agreement.AgreementCase(
        sampler="torch", model="qwen2", tied=True, dtype="float32", temperature=0.7, top_p=0.9
    )
    found = agreement.measured(case)
    assert 0.0 < agreement.worst(found) < 1e-4
    assert found.stale["policy/mismatch/mean"] > 0.1
    line = list(agreement.cells(found))
    assert len(line) == len(agreement.COLUMNS)
    assert line[:6] == ["`torch`", "qwen2", "tied", "float32", "0.7", "0.9"]
    assert agreement.table([found], {}).endswith(agreement.row(line) + "\n")
    assert agreement.lost_table([found]).count("\n") == 3


def test_a_difference_in_float32_that_is_no_rounding_is_refused(agreement: Any) -> None:
    bad = {"policy/mismatch/max": 0.5}
    cases = {case.dtype: case for case in agreement.cases(["torch"])}
    # In bfloat16 it goes on to the other numbers.
    for dtype, error in (("bfloat16", KeyError), ("float32", AssertionError)):
        measured = agreement.Agreement(case=cases[dtype], base=bad, stale=bad, loaded=bad)
        with pytest.raises(error):
            agreement.table([measured], {})


def test_a_sampler_that_cannot_be_measured_is_told_with_its_reason(
    agreement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agreement.lacking("torch") == ""
    assert agreement.lacking("nothing") == "`generate` has no such kernel"
    monkeypatch.setitem(GENERATE.kernels, "nothing", "operators.kernels.nothing:Nothing")
    assert agreement.lacking("nothing") == "its package is not installed"
    told = "Not measured: `nothing`, as its package is not installed.\n"
    assert agreement.table([], {"nothing": agreement.lacking("nothing")}).endswith(told)


def test_the_page_has_a_line_for_each_case_and_the_rest_of_it_stays(agreement: Any) -> None:
    page = agreement.PAGE.read_text()
    assert agreement.row(agreement.COLUMNS) in page
    for case in agreement.cases(["torch"]):
        tied = "tied" if case.tied else "untied"
        values = ("`torch`", case.model, tied, case.dtype, case.temperature, case.top_p)
        assert f"| {' | '.join(map(str, values))} |" in page
    again = agreement.placed(page, "other")
    assert again.startswith(page.partition(agreement.BEGIN)[0])
    assert again.endswith(f"{agreement.BEGIN}\nother\n{agreement.END}")
