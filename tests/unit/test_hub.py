"""Data sets through the library `datasets`: from folders, as no test has a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

from dataflow.check import check
from dataflow.errors import DataError, GraphError
from engine.keep.checkpoint.content_digests import data_content
from graphs.grpo import grpo
from operators import data_hub
from operators.data_files import prompt_columns, read_table, source_columns, source_files
from operators.data_sources import overlap, row_count
from operators.kernels.data import open_rows
from tests.kit.files import save_jsonl

datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    data_hub._load.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder as a repository of the hub has it: two splits of JSONL."""
    made = tmp_path / "gsm"
    made.mkdir()
    for split, letter, count in (("train", "q", 10), ("test", "t", 4)):
        rows = ({"question": f"{letter}{i}", "answer": i} for i in range(count))
        save_jsonl(made / f"{split}.jsonl", *rows)
    return f"hf:{made}"


def questions(data: str, split: str | None = None) -> list[str]:
    return read_table(data, split).column("question").to_pylist()


def test_splits_and_slices_are_the_librarys(folder: str) -> None:
    assert questions(folder, "test") == ["t0", "t1", "t2", "t3"]
    assert questions(f"{folder}?split=train[:3]") == ["q0", "q1", "q2"]
    assert questions(folder, "train[80%:]+test[:1]") == ["q8", "q9", "t0"]
    assert questions(f"{folder}?split=train[-1:]", "train[-1:]") == ["q9"]
    assert row_count(folder, "train[2:5]") == 3
    assert row_count(folder, None) is None


@pytest.mark.parametrize(("settings", "split", "told"), [
    ("", None, r"has the splits train, test.*Fix: .*\?split=train"),
    ("", "dev", r"expected a split of train, test.*found 'dev'.*Fix"),
    ("", "train[20:30]", "expected at least one row, found none"),
    ("?split=train", "test", "found split=train in it and split='test' beside it"),
    ("?split=train&prompt=questions", None, r"no column 'questions'.*Fix: question"),
    ("?answers=x", None, "found 'answers=x'"),
])  # fmt: skip
def test_what_a_data_set_has_not_is_refused(
    folder: str, settings: str, split: str | None, told: str
) -> None:
    with pytest.raises(DataError, match=told):
        read_table(folder + settings, split)


def test_parts_are_joined_and_images_refused_by_the_check(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = [*texts, {"type": "image", "text": ""}]
    rows = [{"prompt": [{"role": "user", "content": parts}]} for parts in (texts, image)]
    save_jsonl(folder / "train.jsonl", *rows)
    found = open_rows(f"hf:{folder}", "train[:1]").table.to_pydict()["prompt"]
    assert found == [[{"role": "user", "content": "ab"}]]
    with pytest.raises(DataError, match=r"row 1: prompt: .*found a part of type 'image'"):
        prompt_columns(f"hf:{folder}")


def test_columns_are_renamed_and_chosen(folder: str) -> None:
    data = f"{folder}?split=train&prompt=question&columns=answer"
    assert list(prompt_columns(data)) == ["prompt", "answer"]
    assert source_columns(data) == {"prompt": pa.string(), "answer": pa.int64()}
    assert open_rows(data).table.slice(1, 1).to_pydict() == {"prompt": ["q1"], "answer": [1]}
    with pytest.raises(DataError, match="Fix: prompt=question among the settings of hf:"):
        prompt_columns(f"{folder}?split=train")


def test_a_saved_data_set_and_conversations(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    made = datasets.Dataset.from_dict({"conversations": [turns] * 3})
    made.save_to_disk(tmp_path / "saved")
    rows = open_rows(f"hf:{tmp_path / 'saved'}")
    assert rows.table.column("prompt").to_pylist() == [[{"role": "user", "content": "q"}]] * 3
    datasets.DatasetDict(train=made, test=made.select([0])).save_to_disk(tmp_path / "both")
    assert row_count(f"hf:{tmp_path / 'both'}?split=test", None) == 1


def test_the_digest_is_that_of_the_rows_wherever_they_are(folder: str, tmp_path: Path) -> None:
    def digest(data: str, split: str | None = None) -> str:
        return data_content(source_files(data, split)).digest

    first = digest(folder, "train")
    assert digest(folder, "train[:9]") != first
    assert digest(f"{folder}?split=train&prompt=question") != first
    Path(folder.removeprefix("hf:")).rename(tmp_path / "moved")
    data_hub._load.cache_clear()
    assert digest(f"hf:{tmp_path / 'moved'}", "train") == first
    with (tmp_path / "moved/train.jsonl").open("a") as file:
        file.write('{"question": "more", "answer": 1}\n')
    data_hub._load.cache_clear()
    assert digest(f"hf:{tmp_path / 'moved'}", "train") != first


def test_held_out_rows_are_told_apart_by_slices(folder: str) -> None:
    assert overlap(folder, "train", folder, "train[:1]")
    assert not overlap(folder, "train", folder, "test")
    assert not overlap(folder, "train[:50%]", f"{folder}?split=train[50%:]", None)
    assert not overlap(folder, "train", folder.removeprefix("hf:"), "train")


@pytest.mark.parametrize(("data", "told"), [
    ("hf:no-such/data-set", r"the library datasets cannot load it: .*Fix: the name"),
    ("hf:/no/such/folder", r"the library datasets cannot load it: .*Fix: the name"),
    ("openai/gsm8k", "Fix: hf:openai/gsm8k, if it is a data set of the hub"),
    ("hf:", "expected the name of a data set"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_one_error(data: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        source_columns(data)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "datasets.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"Fix: pip install 'dataflow-rl\[hub\]'"):
        source_columns("hf:openai/gsm8k")


def by_answer(completions: list[str], answer: list[int]) -> list[float]:
    return [float(a == str(b)) for a, b in zip(completions, answer, strict=True)]


def test_a_graph_of_hub_data_is_checked(folder: str) -> None:
    known = check(grpo("models/tiny", f"{folder}?split=train&prompt=question", by_answer))
    assert list(known.columns["prompts", 0]) == ["prompt", "answer"]
    with pytest.raises(GraphError, match=r"expected a column 'prompt'.*Fix: prompt=question among"):
        check(grpo("models/tiny", f"{folder}?split=train", by_answer))
