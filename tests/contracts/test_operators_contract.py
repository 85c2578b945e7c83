"""Every operator on columns and every loss keeps what it promises, ours and those of the examples;
and each promise catches the mistake that it is there for.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import operators
from dataflow import Advantage, Port, TokenReward
from dataflow.loss import Loss, LossDeclaration
from dataflow.testing import Verdict, contract
from dataflow.user import OperatorDeclaration
from operators.importance import importance
from operators.losses import clipped_policy_loss, entropy_loss
from tests.contracts import broken_losses, broken_operators

FEW = 3
"""Examples of each promise of a part that keeps them, in `make test`."""

ENOUGH = 6
"""As many as it takes to break a promise that is not kept."""

MANY = int(os.environ.get("CONTRACT_EXAMPLES", "12"))
"""In the long tests; `make contracts` takes 100."""

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

NOT_ON_COLUMNS = {
    "prompts", "demonstrations", "preferences", "generate", "logprobs", "values", "scores",
    "reward", "step_reward", "mean_over", "concat", "select", "answers", "continued",
    "interact", "transitions", "data_weight", "prompt_rows", "lookup",
}  # fmt: skip
"""Operators with kernels of their own, which have tests of their own."""

SETTINGS: Mapping[str, list[dict[str, Any]]] = {
    "overlong_penalty": [{"max_tokens": 4, "buffer": 2}],
    "kl_in_reward": [{"beta": 0.1}],
    "trajectory_balance_loss": [{"beta": 0.5}],
    "gae": [{}, {"ports": {"score": TokenReward}}],
    "add": [{}, {"ports": {"scores": TokenReward}}, {"weights": (0.5, 2.0)}],
    "policy_gradient_loss": [{}, {"correction": importance()}],
}
"""How a part is called, where its defaults are not all: parameters without one, ports that may
carry more.
"""


def parts() -> dict[str, Callable[..., Any]]:
    """The functions of `operators` that a graph calls with Ports or for Ports, by name."""
    found = {}
    for module in pkgutil.iter_modules(operators.__path__, "operators."):
        if not module.ispkg:
            here = vars(importlib.import_module(module.name)).items()
            found |= {name: value for name, value in here if _is_part(name, value, module.name)}
    return found


def _is_part(name: str, value: Any, module: str) -> bool:
    if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module:
        return False
    told = str(value.__annotations__.get("return", ""))
    return told == "Loss" or "Port[" in told or name == "select"


PARTS = parts()
CALLS = [
    pytest.param(name, given, id=f"{name}{number or ''}")
    for name in sorted(PARTS.keys() - NOT_ON_COLUMNS)
    for number, given in enumerate(SETTINGS.get(name, [{}]))
]


def test_no_part_is_forgotten() -> None:
    assert PARTS.keys() >= NOT_ON_COLUMNS
    assert SETTINGS.keys() <= PARTS.keys()
    declared = {"group_advantage", "mixed_groups", "clipped_policy_loss", "entropy_loss"}
    assert declared <= PARTS.keys() - NOT_ON_COLUMNS


def judged(verdicts: Iterator[Verdict]) -> list[Verdict]:
    """All but those that are not promised; none may be broken."""
    found = [v for v in verdicts if v.outcome != "not promised"]
    assert [str(v) for v in found if v.outcome != "kept"] == []
    return found


ON_MANY_ROWS = [pytest.mark.long, pytest.mark.repeats, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "examples",
    [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=ON_MANY_ROWS)],
)
@pytest.mark.parametrize("name, given", CALLS)
def test_a_part_keeps_its_promises(name: str, given: dict[str, Any], examples: int) -> None:
    assert len(judged(contract(PARTS[name], examples=examples, **given).verdicts())) >= 8


USERS = sorted(
    file.stem
    for file in EXAMPLES.glob("*.py")
    if "@operator(" in (text := file.read_text()) or "@loss(" in text
)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(EXAMPLES)):
            del sys.modules[name]


@pytest.mark.parametrize("name", USERS)
def test_the_parts_of_an_example_keep_their_promises(name: str, examples: None) -> None:
    found = vars(importlib.import_module(name)).values()
    own = [x for x in found if isinstance(x, (OperatorDeclaration, LossDeclaration))]
    assert own
    for part in own:
        assert len(judged(contract(part, examples=FEW).verdicts())) >= 8


def test_a_sum_of_losses_keeps_its_promises() -> None:
    def both(advantage: Port[Advantage], *, clip: float = 0.2) -> Loss:
        return clipped_policy_loss(advantage, clip=clip) + 0.01 * entropy_loss()

    judged(contract(both, examples=FEW).verdicts())


MUTANTS = [
    pytest.param(part, promise, id=f"{kind}-{promise}", marks=marks)
    for kind, broken, marks in (
        ("operator", broken_operators.BROKEN, ()),
        ("loss", broken_losses.BROKEN, [pytest.mark.long, pytest.mark.repeats]),
    )
    for promise, part in broken.items()
]


@pytest.mark.parametrize("part, promise", MUTANTS)
def test_a_promise_catches_what_breaks_it(part: Any, promise: str) -> None:
    verdict = contract(part, examples=ENOUGH).verdict(promise)
    assert verdict.outcome == "broken"
    begins = f"{contract(part).name} breaks the promise {promise}: {verdict.says}. "
    assert verdict.text.startswith(begins)
    for words in ("Found: ", ". Fix: ", "\n  position  sample"):
        assert words in verdict.text


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.parametrize("part, promise", MUTANTS)
def test_and_no_other_promise_is_broken_by_it(part: Any, promise: str) -> None:
    verdicts = contract(part, examples=ENOUGH).verdicts()
    assert [v.promise for v in verdicts if v.outcome == "broken"] == [promise]


@pytest.mark.parametrize("parts", [broken_operators, broken_losses])
def test_every_promise_has_a_mutant_and_the_honest_part_keeps_all(parts: Any) -> None:
    suite = contract(parts.honest, examples=FEW)
    assert set(suite.promises) == set(parts.BROKEN)
    judged(suite.verdicts())
