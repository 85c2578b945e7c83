"""Numbers of rows and prompts in a decode loop, which others get when theirs have left."""

from __future__ import annotations

import numpy as np

from operators.kernels.task_rows import TaskRows
from tests.kit.decode_tasks import make_task
from tests.kit.rows import ragged


def test_a_prompt_whose_keys_are_in_use_keeps_its_number() -> None:
    rows = TaskRows(make_task(ragged([[5, 6], [7]]), n=2))
    rows.release(np.array([0, 1, 2, 3]))
    held = np.array([True, False])
    numbers = rows.join(make_task(ragged([[8, 9, 10]]), n=2), held)
    assert set(rows.prompt_of_row[numbers].tolist()) == {1}
    assert rows.prompt(0).tolist() == [5, 6]
    assert rows.prompt(1).tolist() == [8, 9, 10]


def test_rows_know_their_prompts_in_the_order_of_the_rows() -> None:
    rows = TaskRows(make_task(ragged([[5], [6], [7]]), n=2))
    asked = np.array([4, 1, 5, 0])
    prompts, indices = rows.order_prompts(asked)
    assert prompts.tolist() == [2, 0]
    assert indices.tolist() == [0, 1, 0, 1]
    assert prompts[indices].tolist() == rows.prompt_of_row[asked].tolist()
