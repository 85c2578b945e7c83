"""Which row of the data a source's rows stand on, for those who read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.operator import DATA_ROW
from operators.kernels.data import Demonstrations, Order, Prompts
from operators.kernels.preferences import Preferences
from tests.kit.files import save_jsonl
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny

POSITIONS = [0, 3, 4, 6, 11, 12]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    save_tiny(folder, layers=1)
    return str(folder)


def rows_of(kernel: Any, data: str, returns: Sequence[str], base: str = "", **params: Any) -> Batch:
    """The rows of a source at POSITIONS; a data epoch has 5."""
    models = {"tokenizer": Model("policy", base)} if base else {}
    node = KernelNode(
        name="source",
        operator="source",
        params={"data": data, **params},
        returns=tuple(returns),
        models=models,
    )
    kernel.open(node, Layout(), FakeSession(seed=7))
    [batch] = kernel.run(Chunk(id=0, step=1, keys=Keys.of(POSITIONS), inputs={}))
    return batch


@pytest.mark.parametrize("shuffle", [True, False])
def test_prompts_say_which_row_of_the_data_each_is(tmp_path: Path, shuffle: bool) -> None:
    data = save_jsonl(tmp_path / "a.jsonl", *({"prompt": f"p{i}"} for i in range(5)))
    batch = rows_of(Prompts(), data, ("prompt", DATA_ROW), shuffle=shuffle)
    rows = batch.array(DATA_ROW).to_pylist()
    assert rows == Order(5, 7, "source", shuffle).at(np.array(POSITIONS)).tolist()
    assert batch.array("prompt").to_pylist() == [f"p{row}" for row in rows]
    assert DATA_ROW not in rows_of(Prompts(), data, ("prompt",)).names


def test_demonstrations_say_it_of_those_that_are_left(tmp_path: Path, base: str) -> None:
    long = {"prompt": "ab", "completion": "c" * 2000}
    rows = [long if i == 2 else {"prompt": "ab", "completion": str(i)} for i in range(5)]
    data = save_jsonl(tmp_path / "d.jsonl", *rows)
    returns = ("completion", DATA_ROW)
    batch = rows_of(Demonstrations(), data, returns, base, overlong="drop", positions=64)
    order = Order(5, 7, "source", True).at(np.array(POSITIONS)).tolist()
    assert batch.array(DATA_ROW).to_pylist() == [row for row in order if row != 2]
    assert batch.array("completion").to_pylist() == [str(row) for row in order if row != 2]


def test_both_answers_of_a_pair_stand_on_its_row(tmp_path: Path, base: str) -> None:
    pairs = ({"prompt": "ab", "chosen": str(i), "rejected": "x"} for i in range(5))
    data = save_jsonl(tmp_path / "p.jsonl", *pairs)
    batch = rows_of(Preferences(), data, ("completion", DATA_ROW), base)
    order = Order(5, 7, "source", True).at(np.array(POSITIONS)).tolist()
    assert batch.array(DATA_ROW).to_pylist() == [row for row in order for _ in range(2)]
    assert batch.array("completion").to_pylist()[::2] == [str(row) for row in order]
