"""`contract`: what it takes, the rows that it generates, its report, the command and the plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from dataflow import Columns, DataError, Reward, Rollout, Schema, column, operator
from dataflow.testing import ContractError, contract
from engine.cli import main
from operators.forward import logprobs
from operators.select import best_of
from tests.contracts.broken_operators import BROKEN, honest

ROOT = Path(__file__).resolve().parents[2]

TYPES = {
    "whole": pa.int64(), "small": pa.uint8(), "half": pa.float16(), "wide": pa.float64(),
    "flag": pa.bool_(), "text": pa.utf8(), "long_text": pa.large_utf8(), "raw": pa.binary(),
    "when": pa.timestamp("us"), "day": pa.date32(), "took": pa.duration("s"),
    "money": pa.decimal128(8, 2), "some": pa.list_(pa.float32()), "two": pa.list_(pa.int32(), 2),
    "said": pa.struct([pa.field("role", pa.utf8()), pa.field("at", pa.int32())]),
}  # fmt: skip


Anything: Any = type("Anything", (Reward,), {n: column(t) for n, t in TYPES.items()})
PerToken: Any = type("PerToken", (Schema,), {n: column(t, "T") for n, t in TYPES.items()})
SEEN: list[dict[str, int]] = []


@operator()
def counts(score: Columns[Anything], tokens: Columns[PerToken]) -> Columns[Reward]:
    SEEN.append({n: len(score.batch.array(n)) + len(tokens.batch.array(n)) for n in TYPES})
    return Columns.make(Reward, like=score, reward=score["reward"])


def test_columns_of_any_type_are_generated() -> None:
    SEEN.clear()
    assert contract(counts, examples=5).verdict("schema").outcome == "kept"
    assert all(n > 0 for n in SEEN[0].values())


class OddReward(Reward):
    odd = column(pa.map_(pa.utf8(), pa.int32()))


@operator()
def of_odd_rewards(score: Columns[OddReward]) -> Columns[Reward]:
    return Columns.make(Reward, like=score, reward=score["reward"])


def test_a_type_that_cannot_be_generated_is_asked_for() -> None:
    with pytest.raises(ContractError, match=r"column 'odd': expected a type .* columns=\{'odd'"):
        contract(of_odd_rewards, examples=5).verdict("schema")
    given = contract(of_odd_rewards, examples=5, columns={"odd": [[("a", 1)]]})
    assert given.verdict("schema").outcome == "kept"


@operator(reads={"rollout": ["answer"]}, parent="before")
def right(rollout: Columns[Rollout], before: Columns[Reward]) -> Columns[Reward]:
    same = [a in ("yes", "no") for a in rollout["answer"]]
    for group in np.unique(rollout.groups):
        own = rollout.groups == group
        assert len(set(rollout["answer"][own])) == len(set(before["reward"][own])) == 1
    return Columns.make(Reward, like=rollout, reward=np.array(same, dtype=np.float32))


@pytest.mark.parametrize("answers", [["yes", "no"], st.sampled_from(["yes", "no"])])
def test_dataset_columns_are_text_or_what_is_given_and_ancestors_are_a_groups(answers: Any) -> None:
    for columns in ({}, {"answer": answers}):
        assert contract(right, examples=8, columns=columns).verdict("chunks").outcome == "kept"


@pytest.mark.long
def test_rows_that_an_operator_refuses_are_no_case_for_it() -> None:
    @operator()
    def root(score: Columns[Reward], *, least: float = 0.0) -> Columns[Reward]:
        if (score["reward"] < least).any():
            raise DataError("expected rewards >= 0")
        return score.set(reward=np.sqrt(score["reward"]))

    assert contract(root, examples=10).verdict("finite").outcome == "kept"
    with pytest.raises(ContractError, match="expected rows to test finite on, found that it ref"):
        contract(root, examples=10, least=1e9).verdict("finite")


def test_the_smallest_rows_are_shown() -> None:
    told = contract(BROKEN["holes"], examples=50).verdict("holes").text
    found, _, rest = told.partition(". Fix: ")
    assert "Found: position 0, sample 0: advantage 1 at token " in found
    assert rest.startswith("multiply by the mask")
    heads, *rows = [line.split() for line in told.splitlines()[2:]]
    assert heads[:3] == ["position", "sample", "mask"]
    assert heads[-1] == "score.reward"
    assert [row[:2] + row[-1:] for row in rows] == [["0", "0", "1"]]


def test_what_is_not_promised_is_said() -> None:
    verdict = contract(best_of, examples=2).verdict("masked")
    assert str(verdict) == "masked: not promised: no port of it has a mask"


@pytest.mark.parametrize("target, given, expected", [
    (3, {}, "contract: expected an operator or a loss, found int 3"),
    (len, {}, "expected an operator or a loss, found builtin"),
    (lambda completions, **kw: [0.0], {}, "found a function without Ports"),
    (logprobs, {}, "logprobs: expected an operator on columns, found one that needs 'model'"),
    (best_of, {"ports": {"scor": Reward}}, r"best_of: no port 'scor'. Fix: score"),
    (best_of, {"examples": 0}, "examples: expected a whole number >= 1, found 0"),
])  # fmt: skip
def test_anything_else_is_refused(target: Any, given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ContractError, match=expected):
        contract(target, **given)


def test_a_parameter_without_a_default_is_asked_for() -> None:
    @operator()
    def scaled(score: Columns[Reward], *, by: float) -> Columns[Reward]:
        return score.set(reward=score["reward"] * np.float32(by))

    expected = r"expected a value for 'by', which has no default, found none. Fix: contract\(scaled"
    with pytest.raises(ContractError, match=expected):
        contract(scaled)
    assert contract(scaled, examples=3, by=2.0).verdict("finite").outcome == "kept"


def test_without_hypothesis_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("operators.contracts")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ContractError, match=r"found none. Fix: pip install 'dataflow-rl\[test\]'"):
        contract(honest)


MODULE = "tests.contracts.broken_operators"


def test_the_command_has_a_line_for_each_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", f"{MODULE}:honest", "--examples", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(contract(honest).promises)
    assert "keeps" in lines[-1]
    assert "not promised: it returns Advantage, no Keep" in lines[-1]
    assert main(["test", f"{MODULE}:first_sample_wins", "--examples", "5"]) == 1
    assert "breaks the promise row_order" in capsys.readouterr().out


def test_the_command_sets_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["test", "operators.advantage:overlong_penalty", "--examples", "2", "--set"]
    assert main([*call, "max_tokens=4"]) == 1
    assert "expected a value for 'buffer'" in capsys.readouterr().err
    assert main([*call, "max_tokens=4", "buffer=2"]) == 0
    assert main([*call, "max_tokens=4", "buffer=2", "buffers=2"]) == 1
    assert "no parameter 'buffers'. Fix: buffer." in capsys.readouterr().err


TEST_FILE = f"""
from dataflow.testing import contract
from {MODULE} import first_sample_wins, honest

test_honest = contract(honest, examples=2)
test_broken = contract(first_sample_wins, examples=5)
helper = contract(honest)
"""


@pytest.mark.long
def test_the_plugin_makes_a_test_of_each_promise(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST_FILE)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    command += ["-p", "dataflow.pytest_plugin", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_mine.py::test_honest::relabelling" in done.stdout
    assert "test_mine.py::test_broken::row_order" in done.stdout
    assert "not promised: it returns Advantage, no Keep" in done.stdout
    assert "helper" not in done.stdout
    assert "Traceback" not in done.stdout
