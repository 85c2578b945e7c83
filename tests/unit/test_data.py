"""Sources: data files, what is refused, the order of positions, demonstrations as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from operators.data_files import read_table, source_columns
from operators.kernels.data import Demonstrations, Order, Prompts, open_demonstrations, open_rows
from operators.kernels.text import (
    Tokenizer,
    load_tokenizer,
    prompts_of,
    to_ragged,
    vocabulary_hash,
)
from tests.kit.files import save_jsonl
from tests.kit.kernels import FakeSession
from tests.kit.models import EOS as TINY_EOS
from tests.kit.models import character_tokenizer

LETTERS = [chr(code) for code in range(32, 127)]
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def opened(
    kernel: Any, data: str, returns: tuple[str, ...] = (), models: Any = None, **params: Any
) -> Any:
    fields = {"params": {"data": data, **params}, "returns": returns, "models": models or {}}
    node = KernelNode(name="prompts", operator="prompts", **fields)
    kernel.open(node, Layout(), FakeSession(seed=7))
    return kernel


def rows_of(kernel: Any, positions: Iterable[int], attempt: Iterable[int] | None = None) -> Batch:
    [batch] = kernel.run(Chunk(id=0, step=1, keys=Keys.of(positions, attempt=attempt), inputs={}))
    return batch


# Files


def test_jsonl_in_trl_shape_keeps_columns_and_texts_that_look_like_dates(tmp_path: Path) -> None:
    written = {"prompt": "p", "answer": "2024-01-01"}, "", {"prompt": "q", "level": 2}
    data = save_jsonl(tmp_path / "a.jsonl", *written)
    rows = open_rows(data)
    assert rows.shape == "trl"
    columns = {"prompt": ["p", "q"], "answer": ["2024-01-01", None], "level": [None, 2]}
    assert rows.table.to_pydict() == columns
    assert source_columns(data) == {"prompt": pa.utf8(), "answer": pa.utf8(), "level": pa.int64()}


def test_message_prompts_lose_the_fields_that_only_other_messages_have(tmp_path: Path) -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    second = [{"role": "tool", "content": "t", "name": "f"}]
    rows = open_rows(save_jsonl(tmp_path / "a.jsonl", {"prompt": first}, {"prompt": second}))
    assert prompts_of(rows.take(np.array([1, 0])).column("prompt")) == [second, first]


def test_verl_parquet_is_read_as_it_is_and_split_by_extra_info(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "math",
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": split, "index": i},
        }
        for i, split in enumerate(("train", "test", "train"))
    ]
    data = str(tmp_path / "v.parquet")
    pq.write_table(pa.Table.from_pylist(rows), data)
    assert pa.schema(source_columns(data)) == pq.read_schema(data).remove_metadata()
    assert open_rows(data).shape == "verl"
    extra = open_rows(data, "train").table.column("extra_info").to_pylist()
    assert [row["index"] for row in extra] == [0, 2]
    assert source_columns(data, "test") == source_columns(data)
    for read in (open_rows, source_columns):
        with pytest.raises(DataError, match=r"no row of split 'val'; there are: test, train"):
            read(data, "val")


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_a_split_that_no_row_has_is_known_before_the_rows_are_read(
    tmp_path: Path, ending: str
) -> None:
    """As is a file without splits."""
    table = pa.table({"prompt": ["a", "b"], "split": ["train", "test"]})
    write = {
        "parquet": pq.write_table,
        "csv": csv.write_csv,
        "jsonl": lambda table, path: save_jsonl(path, *table.to_pylist()),
    }[ending]
    with_splits, without = tmp_path / f"with.{ending}", tmp_path / f"without.{ending}"
    write(table, with_splits)
    write(table.drop_columns("split"), without)
    assert list(source_columns(str(with_splits), "test")) == ["prompt", "split"]
    with pytest.raises(DataError, match=r"no row of split 'tset'; there are: test, train\. Fix"):
        source_columns(str(with_splits), "tset")
    with pytest.raises(DataError, match=r"to choose split 'test' by, found columns: prompt"):
        source_columns(str(without), "test")


def test_a_task_has_two_splits() -> None:
    with pytest.raises(DataError, match=r"expected split 'train' or 'test' of a task, found 'val'"):
        source_columns("reasoning_gym:spell_backward", "val")


def test_folders_are_read_whole_or_by_split_and_never_mix_splits_unasked(tmp_path: Path) -> None:
    for name, prompt in (("train-0", "a"), ("train-1", "b"), ("test", "c")):
        pq.write_table(pa.table({"prompt": [prompt]}), tmp_path / f"{name}.parquet")
    assert read_table(str(tmp_path), "train").column("prompt").to_pylist() == ["a", "b"]
    with pytest.raises(DataError, match=r"holds the splits test, train.*split='test'"):
        read_table(str(tmp_path))
    (tmp_path / "test.parquet").unlink()
    assert len(read_table(str(tmp_path))) == 2
    save_jsonl(tmp_path / "more.jsonl", {"prompt": "x"})
    with pytest.raises(DataError, match=r"found \.jsonl, \.parquet"):
        read_table(str(tmp_path))


def test_parquet_with_more_columns_and_dictionaries_becomes_one_plain_table(tmp_path: Path) -> None:
    first, second = (pa.array(texts).dictionary_encode() for texts in (["a", "b"], ["c"]))
    pq.write_table(pa.table({"prompt": first}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"prompt": second, "n": [1]}), tmp_path / "1.parquet")
    assert source_columns(str(tmp_path)) == {"prompt": pa.utf8(), "n": pa.int64()}
    rows = open_rows(str(tmp_path)).table.to_pydict()
    assert rows == {"prompt": ["a", "b", "c"], "n": [None, None, 1]}


GOOD = {"prompt": "a"}


@pytest.mark.parametrize("rows, message", [
    ([{"n": 1} | GOOD, {"n": "x"} | GOOD], r"a\.jsonl:2: column 'n': expected a value like '1'"),
    ([{"prompt": [{"text": "u"}]}], "found prompt: list<"),
    ([GOOD, {"prompt": None}], r"a\.jsonl:2: expected a prompt, found null \(1 of 2 rows\)"),
    ([""], "found an empty file"),
])  # fmt: skip
def test_bad_files_are_refused_with_place_found_and_fix(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    """More in tests/mistakes/data.py."""
    with pytest.raises(DataError, match=message):
        open_rows(save_jsonl(tmp_path / "a.jsonl", *rows))


@pytest.mark.parametrize(("name", "message"), [
    ("no/a.jsonl", "nor is there a folder"),
    ("bad.parquet", "expected a Parquet file"),
])  # fmt: skip
def test_files_that_are_not_there_or_no_files_are_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    save_jsonl(tmp_path / "bad.parquet", "no data")
    with pytest.raises(DataError, match=message):
        source_columns(str(tmp_path / name))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_without_a_name_is_refused(tmp_path: Path, suffix: str) -> None:
    data, rows = tmp_path / f"rows.{suffix}", pa.table({"prompt": ["a"], "": ["b"]})
    if suffix == "jsonl":
        save_jsonl(data, *rows.to_pylist())
    else:
        pq.write_table(rows, data)
    message = "expected a name for each column, found an empty one beside prompt. Fix: "
    with pytest.raises(DataError, match=message):
        source_columns(str(data))


TASK = "reasoning_gym:spell_backward?size=60&seed=3&min_word_len=3&max_word_len=6&suffix=%0A"


def test_tasks_are_a_source_whose_splits_share_no_question() -> None:
    assert set(source_columns(TASK)) == {"prompt", "answer", "entry", "task"}
    whole, train, test = (
        open_rows(TASK, split).table.to_pydict() for split in (None, "train", "test")
    )
    assert [prompt.split()[-1][::-1] for prompt in whole["prompt"]] == whole["answer"]
    assert all(prompt.endswith("\n") for prompt in whole["prompt"])
    assert test["prompt"]
    assert not {*train["prompt"]} & {*test["prompt"]}
    assert {*train["prompt"], *test["prompt"]} == {*whole["prompt"]}


@pytest.mark.parametrize("data, message", [
    ("reasoning_gym:spel_backward", "Fix: reasoning_gym:spell_backward"),
    ("reasoning_gym:spell_backward?sise=3", r"unknown setting 'sise'.*Fix: size="),
    ("reasoning_gym:spell_backward?min_word_len=9&max_word_len=3", "refuses these settings"),
    ("reasoning_gym:arc_agi?size=1", "entries change when they travel as JSON"),
])  # fmt: skip
def test_unknown_tasks_and_settings_are_refused(data: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_rows(data)


# Positions


@settings(max_examples=30)
@given(rows=st.integers(1, 40), seed=st.integers(0, 3), epoch=st.integers(0, 6))
def test_each_epoch_is_a_permutation_that_any_process_makes_again(
    rows: int, seed: int, epoch: int
) -> None:
    positions = np.arange(rows) + epoch * rows
    found = Order(rows, seed, "prompts", True).at(positions)
    assert sorted(found) == list(range(rows))
    other = Order(rows, seed, "prompts", True)
    for at in reversed(range(rows)):
        assert other.at(positions[at : at + 1]) == found[at]
    assert Order(rows, seed, "prompts", False).at(positions).tolist() == list(range(rows))


def test_orders_differ_by_epoch_seed_and_node() -> None:
    first, second = np.arange(100), np.arange(100) + 100
    orders = [(0, "a", first), (0, "a", second), (1, "a", first), (0, "b", first)]
    found = {tuple(Order(100, seed, name, True).at(p).tolist()) for seed, name, p in orders}
    assert len(found) == 4


def test_prompts_make_the_rows_asked_for_with_the_columns_read(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i, "unread": 0} for i in range(5)]
    data = save_jsonl(tmp_path / "a.jsonl", *rows)
    kernel = opened(Prompts(), data, ("answer",), shuffle=False)
    batch = rows_of(kernel, [1, 3, 8], attempt=[0, 0, 4])
    assert (kernel.rows, kernel.position()) == (5, 9)
    expected = {"prompt": ["p1", "p3", "p3"], "answer": [1, 3, 3]}
    assert batch.records.to_pydict() == expected
    kernel.seek(2)
    assert kernel.position() == 2
    with pytest.raises(DataError, match="no column 'solution', data has: prompt, answer, unread"):
        opened(Prompts(), data, ("solution",))


# Tokens


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of one token a character, with a chat template; 98 and 99 end answers."""
    ends = {"eos_token_id": [98, 99]}
    return save_tokenizer(tmp_path_factory.mktemp("base"), template=CHATML, generation=ends)


def save_tokenizer(
    folder: Path, template: str | None = None, generation: dict[str, Any] | None = None
) -> str:
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Inner
    from transformers import PreTrainedTokenizerFast

    words = [*LETTERS, "\n", "<pad>", "<bos>", "<eos>", "<end>"]
    names = {word: i for i, word in enumerate(words)}
    inner = Inner(models.WordLevel(names, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    marks = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **marks)
    whole.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def ids(text: str) -> list[int]:
    return [LETTERS.index(c) if c != "\n" else 95 for c in text]


BOS, EOS = 97, 98
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ASKED = [*ids("<user>q"), EOS, *ids("\n<assistant>")]
"""The tokens of a conversation in which the user has spoken."""


def test_prompts_are_encoded_with_bos_and_without_a_trailing_eos(base: str) -> None:
    found = load_tokenizer(base).encode_prompts(["ab", "xyz"])
    again = load_tokenizer(base).encode_prompts(["<bos>ab", "<bos>xyz"])
    assert found.values.tolist() == again.values.tolist(), "rendered by hand"
    assert [found[i].tolist() for i in range(2)] == [[BOS, *ids("ab")], [BOS, *ids("xyz")]]
    assert (found.values.dtype, found.offsets.tolist()) == (np.int32, [0, 3, 7])


def test_message_prompts_go_through_the_chat_template(base: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(base)
    assert tokenizer.encode_prompts([[USER]])[0].tolist() == ASKED
    with pytest.raises(DataError, match="no tokens"):
        load_tokenizer(save_tokenizer(tmp_path, template="{{ '' }}")).encode_prompts([[]])


def test_a_tokenizer_without_template_or_directory_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="need a chat template"):
        load_tokenizer(save_tokenizer(tmp_path)).encode_prompts([[USER]])
    with pytest.raises(DataError, match="expected a directory with a tokenizer"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_decode_leaves_special_tokens_out_and_keeps_rows(base: str) -> None:
    tokenizer = load_tokenizer(base)
    rows = to_ragged([[BOS, *ids("a b ."), EOS], [], ids("\n")])
    assert tokenizer.decode(rows) == ["a b .", "", "\n"]
    assert tokenizer.decode(Ragged(rows.values, rows.offsets[1:])) == ["", "\n"]


def test_eos_ids_come_from_the_generation_config_or_tokenizer(base: str, tmp_path: Path) -> None:
    assert load_tokenizer(base).eos_ids == {98, 99}
    assert load_tokenizer(save_tokenizer(tmp_path)).eos_ids == {EOS}
    assert vocabulary_hash(base) == vocabulary_hash(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"<pad>"', '"<gap>"'))
    assert vocabulary_hash(base) != vocabulary_hash(str(tmp_path))


def demonstrations(base: str, folder: Path, *rows: Any, **params: Any) -> Batch:
    """What the kernel makes of a file of these rows."""
    data, models = save_jsonl(folder / "d.jsonl", *rows), {"tokenizer": Model("policy", base)}
    kernel = opened(Demonstrations(), data, models=models, shuffle=False, **params)
    return rows_of(kernel, range(kernel.rows))


def row(batch: Batch, index: int) -> tuple[list[int], list[int], list[int], str]:
    names = ("prompt_ids", "completion_ids", "completion_mask")
    prompt, completion, mask = (batch.ragged(name)[index].tolist() for name in names)
    return prompt, completion, mask, batch.array("completion")[index].as_py()


def test_text_demonstrations_end_with_eos_and_train_on_all_of_the_answer(
    base: str, tmp_path: Path
) -> None:
    rows = {"prompt": "ab", "completion": "c"}, {"prompt": "x", "completion": ""}
    batch = demonstrations(base, tmp_path, *rows)
    assert row(batch, 0) == ([BOS, *ids("ab")], [*ids("c"), EOS], [1, 1], "c")
    assert row(batch, 1) == ([BOS, *ids("x")], [EOS], [1], "")
    assert batch.array("completion_mask").type.value_type == pa.uint8()


def test_demonstrations_have_the_columns_of_the_file_that_are_read(
    base: str, tmp_path: Path
) -> None:
    long = {"prompt": "ab", "completion": "c" * 2000, "label": 1, "tag": "x"}
    rows = (long, {"prompt": "ab", "completion": "c", "label": 2, "tag": "y"})
    returns = ("completion_ids", "label", "prompt")
    batch = demonstrations(base, tmp_path, *rows, returns=returns, overlong="drop", positions=64)
    assert batch.array("label").to_pylist() == [2]
    assert batch.array("prompt").to_pylist() == ["ab"]
    assert "tag" not in batch.names


@pytest.mark.parametrize("ended, plain", [
    ({"prompt": "ab", "completion": "c<eos>"}, {"prompt": "ab", "completion": "c"}),
    ({"prompt": "ab", "completion": "c<eos><eos>"}, {"prompt": "ab", "completion": "c"}),
    ({"prompt": "<bos>ab", "completion": "c"}, {"prompt": "ab", "completion": "c"}),
    ({"prompt": "ab", "completion": "<eos>"}, {"prompt": "ab", "completion": ""}),
    ({"text": "<bos>abc<eos>"}, {"text": "abc"}),
    ({"messages": [USER, ANSWER | {"content": "a<eos>"}]}, {"messages": [USER, ANSWER]}),
])  # fmt: skip
def test_what_begins_with_bos_or_ends_with_eos_already_gets_no_second(
    base: str, tmp_path: Path, ended: dict[str, Any], plain: dict[str, Any]
) -> None:
    batch = demonstrations(base, tmp_path, ended, plain)
    assert row(batch, 0) == row(batch, 1)


def test_an_eos_that_a_prompt_itself_ends_with_stays(base: str) -> None:
    """With a tokenizer that adds one to every text, and with one that adds none."""
    assert load_tokenizer(base).encode_prompts(["ab<eos>"])[0].tolist() == [BOS, *ids("ab"), EOS]
    plain = Tokenizer("tiny", character_tokenizer(), frozenset({TINY_EOS}))
    assert plain.encode_prompts(["ab<eos>"])[0].tolist()[-1] == TINY_EOS


def test_a_mark_of_the_text_that_is_not_at_its_edge_stays(base: str, tmp_path: Path) -> None:
    inside = {"prompt": "a<bos><eos>b", "completion": "c<eos>d"}
    batch = demonstrations(base, tmp_path, inside)
    expected = ([BOS, *ids("a"), BOS, EOS, *ids("b")], [*ids("c"), EOS, *ids("d"), EOS])
    assert row(batch, 0)[:2] == expected


def test_a_reward_model_reads_one_bos_of_a_prompt_that_has_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    found = tokenizer.encode_answered(["<bos>ab", "ab"], ["c", "c"])
    assert found[0].tolist() == found[1].tolist() == [BOS, *ids("abc"), EOS]


def test_plain_texts_have_their_first_token_as_prompt(base: str, tmp_path: Path) -> None:
    batch = demonstrations(base, tmp_path, {"text": "abc"})
    assert row(batch, 0) == ([BOS], [*ids("abc"), EOS], [1, 1, 1, 1], "abc")


def test_conversations_are_cut_where_the_assistant_speaks(base: str, tmp_path: Path) -> None:
    pair = demonstrations(base, tmp_path, {"prompt": [USER], "completion": [ANSWER]})
    assert row(pair, 0) == (ASKED, [*ids("a"), EOS], [1, 1], "a")
    talk = {"messages": [USER, ANSWER, USER, ANSWER]}
    between = [*ids("\n<user>q"), EOS, *ids("\n<assistant>")]
    tokens = [*ids("a"), EOS, *between, *ids("a"), EOS]
    mask = [1, 1, *[0] * len(between), 1, 1]
    assert row(demonstrations(base, tmp_path, talk), 0)[:3] == (ASKED, tokens, mask)
    whole = demonstrations(base, tmp_path, talk, assistant_only=False)
    assert row(whole, 0)[2] == [1] * len(tokens)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    rewriting = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    base = save_tokenizer(tmp_path / "t", template=rewriting)
    data = save_jsonl(tmp_path / "d.jsonl", {"messages": [USER, ANSWER]})
    with pytest.raises(DataError, match=r"d\.jsonl:1: .*renders earlier turns differently"):
        opened(Demonstrations(), data, models={"tokenizer": Model("policy", base)})


def test_a_conversation_that_the_template_refuses_is_named_with_its_row(tmp_path: Path) -> None:
    strict = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    base = save_tokenizer(tmp_path / "t", template=strict)
    rows = {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, USER, ANSWER]}
    with pytest.raises(DataError, match=r"d\.jsonl:2: .*renders these messages, found: too long"):
        demonstrations(base, tmp_path, *rows)


@pytest.mark.parametrize("line, message", [
    (GOOD | {"completion": [ANSWER]}, "both as text or both as messages"),
    (GOOD | {"completion": None}, "expected a completion, found null"),
])  # fmt: skip
def test_bad_demonstrations_are_refused(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_demonstrations(save_jsonl(tmp_path / "d.jsonl", line))
