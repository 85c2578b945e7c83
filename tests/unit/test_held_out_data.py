"""Evaluation data is compared with training data by files and items; versions by reward."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.errors import Fault, GraphError
from dataflow.kernel import Assignment, KernelNode, Layout
from operators.data_sources import overlap, row_count
from operators.kernels.host import HostEvaluate
from tests.kit.kernels import FakeSession
from tests.wrong_graphs.held_out import trained_and_evaluated

TASK = "reasoning_gym:spell_backward"
LINE = '{"prompt": "2+2", "answer": "4", "split": "train"}\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text(LINE)
    (folder / "test.jsonl").write_text(LINE.replace("2+2", "3+1").replace("train", "test"))
    return folder


Split = str | None


def copied(file: Path) -> Path:
    """A copy of the file beside it."""
    return Path(shutil.copy(file, file.with_stem("copy")))


def refused(train: object, test: object, split: Split = None, test_split: Split = None) -> bool:
    faults: tuple[Fault, ...] = ()
    try:
        check(trained_and_evaluated(str(train), str(test), split, test_split))
    except GraphError as error:
        faults = error.faults
    assert {fault.rule for fault in faults} <= {"held_out"}, faults
    return bool(faults)


def test_one_file_of_many_names(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = data / "train.jsonl"
    os.link(file, tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to(file)
    (tmp_path / "elsewhere").symlink_to(data)
    monkeypatch.chdir(data)
    others = [tmp_path / name for name in ("hard.jsonl", "soft.jsonl", f"elsewhere/{file.name}")]
    for name in (*others, file.name):
        assert [refused(file, name), refused(name, file)] == [True, True], name
    assert not refused(file, data / "test.jsonl")


def test_a_copy_of_a_file_is_that_file(data: Path, tmp_path: Path) -> None:
    """Also one of a folder's; files of one size may differ, and empty ones say nothing."""
    copy, other = tmp_path / "copy.jsonl", tmp_path / "other.jsonl"
    copy.write_text(LINE)
    other.write_text(LINE.replace("2+2", "1+3"))
    assert refused(data / "train.jsonl", copy)
    assert not refused(data / "train.jsonl", other)
    assert overlap(str(data), "train", str(copy), None)
    assert not overlap(str(data), "test", str(copy), None)
    other.write_text("")
    copy.write_text("")
    assert not overlap(str(other), None, str(copy), None)


def test_splits_of_one_file_are_apart(data: Path) -> None:
    file = data / "train.jsonl"
    file.write_text(LINE + LINE.replace('"train"', '"test"'))
    assert not refused(file, file, "train", "test")
    assert not overlap(str(file), "train", str(copied(file)), "test")
    assert refused(file, file, "train", "train")
    assert refused(file, file, None, "test")


def test_a_hard_link_is_known_without_reading_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(data / "train.jsonl", tmp_path / "hard.jsonl")
    monkeypatch.setattr("operators.data_sources.filecmp.cmp", lambda *files, **how: False)
    assert overlap(str(data / "train.jsonl"), None, str(tmp_path / "hard.jsonl"), None)


def test_a_folder_is_its_files(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    os.link(data / "train.jsonl", other / "part.jsonl")
    assert refused(data, other, split="train")
    assert not refused(data, other, split="test")
    assert refused(other, data / "train.jsonl")
    assert refused(other, data / "train.jsonl", split=None, test_split="train")


@pytest.mark.parametrize(("one", "split", "two", "other", "shared"), [
    ("?seed=0&size=10", None, "?seed=9&size=10", None, True),
    ("?seed=0&size=10", None, "?seed=10&size=10", None, False),
    ("?seed=0&size=10", "train", "?size=10&seed=0", "test", False),
    ("?seed=0&size=10", "train", "?size=10", None, True),
    ("?seed=1", None, "?seed=1&min_word_len=3", None, True),  # which is the default
    ("?seed=1", None, "?seed=1&min_word_len=4", None, False),
    ("?seed=1&suffix=%0A", None, "?seed=1", None, True),
])  # fmt: skip
def test_tasks_are_compared_by_what_they_make(
    one: str, split: str | None, two: str, other: str | None, shared: bool
) -> None:
    assert overlap(TASK + one, split, TASK + two, other) is shared
    assert overlap(TASK + two, other, TASK + one, split) is shared


def test_a_file_and_a_task_and_a_task_that_is_none_share_nothing(data: Path) -> None:
    unknown = "reasoning_gym:no_such_task"
    assert not overlap(TASK, None, str(data / "train.jsonl"), None)
    assert not overlap(unknown, None, unknown, None)


def test_rows_are_counted_without_reading_them(data: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), tmp_path / "three.parquet")
    assert row_count(str(tmp_path / "three.parquet"), None) == 3
    assert row_count(str(tmp_path / "three.parquet"), "train") is None
    assert row_count(str(data / "train.jsonl"), None) == 1
    assert row_count(str(data), "test") == 1
    assert row_count(f"{TASK}?size=12", None) == 12
    assert row_count("no/such/file.jsonl", None) is None


# keep_best


def evaluated(name: str = "evaluate", **columns: list[float | None]) -> dict[str, float]:
    kernel = HostEvaluate()
    kernel.open(KernelNode(name=name, operator="evaluate"), Layout(), FakeSession())
    keys = Keys.of(range(len(columns["reward"])))
    given = {name.replace("__", "/"): pa.array(v, pa.float32()) for name, v in columns.items()}
    rows = Batch(keys, pa.RecordBatch.from_pydict(given))
    return dict(kernel.step(Assignment(sequence=0, step=3, keys=keys, inputs={"score": rows})))


def test_the_first_number_is_the_reward_as_the_graph_defines_it() -> None:
    found = evaluated(reward__length=[9.0, 7.0], reward__exact=[0.0, 1.0], reward=[-0.9, 0.3])
    assert next(iter(found)) == "eval/reward"
    assert np.isclose(found["eval/reward"], -0.3)
    assert found["eval/length"] == 8.0
    assert evaluated("held", reward=[1.0])["eval/held/reward"] == 1.0


def test_functions_of_the_evaluations_own_names_hide_nothing() -> None:
    found = evaluated(reward__reward=[5.0], reward__rows=[7.0], reward=[2.0])
    assert found == {"eval/reward": 2.0, "eval/rows": 1.0, "eval/reward_2": 5.0, "eval/rows_2": 7.0}


def test_a_function_that_applies_to_no_row_has_no_mean() -> None:
    assert evaluated(reward__exact=[None], reward=[None]) == {"eval/rows": 1.0}
