"""Prompts by token ids, and conversations that end in the assistant's turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.prompt_types import is_token_ids
from dataflow.schema import Completion, Prompt, TokenPrompt
from dataflow.user import Columns, operator
from operators import data_files, data_shapes
from operators.kernels.answers import DatasetAnswers
from operators.kernels.continued import Continued
from operators.kernels.data import Prompts
from operators.kernels.scoring_columns import Function, columns_for
from operators.kernels.text import Tokenizer, load_tokenizer, to_ragged
from operators.kernels.torch.generate import TorchGenerate
from operators.rewards import wants
from tests.kit.files import save_jsonl
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.models import EOS, character_tokenizer
from tests.kit.rows import ragged

USER, NEXT = {"role": "user", "content": "q?"}, {"role": "user", "content": "Sure?"}
ENDED = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def speaking(template: str | None) -> Tokenizer:
    inner = character_tokenizer()
    inner.chat_template = template
    return Tokenizer("tiny", inner, frozenset({EOS}))


def ids(text: str) -> list[int]:
    return character_tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


def said(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# conversations that end in the assistant's turn


KEPT = ENDED.replace(" | trim", "")


@pytest.mark.parametrize("template, turns, rendered", [
    (ENDED, [USER, said("So ")], "<user>q?<eos>\n<assistant>So"),
    (KEPT, [USER, said("So ")], "<user>q?<eos>\n<assistant>So "),
    (ENDED, [USER, said("It is")], "<user>q?<eos>\n<assistant>It is"),
    (ENDED, [USER, said("")], "<user>q?<eos>\n<assistant>"),
    (ENDED, [USER], "<user>q?<eos>\n<assistant>"),
    (
        ENDED,
        [USER, said("a"), NEXT],
        "<user>q?<eos>\n<assistant>a<eos>\n<user>Sure?<eos>\n<assistant>",
    ),
], ids=["blanks cut", "blanks kept", "text", "empty", "none", "two turns"])  # fmt: skip
def test_the_assistants_last_turn_is_continued(
    template: str, turns: list[Any], rendered: str
) -> None:
    tokenizer = speaking(template)
    found = tokenizer.encode_prompts([turns, [USER]])
    texts = [rendered, "<user>q?<eos>\n<assistant>"]
    assert [found[0].tolist(), found[1].tolist()] == tokenizer.encode(texts, special=False)


LISTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOTH = LISTS.replace(
    "{% for part", "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part"
).replace("{% endfor %}<eos>", "{% endfor %}{% endif %}<eos>")


@pytest.mark.parametrize("template", [LISTS, BOTH], ids=["parts alone", "texts and parts"])
@pytest.mark.parametrize("turns", [[USER], [USER, said("So"), NEXT], [USER, said("So")]], ids=len)
def test_a_template_that_reads_parts_gets_the_text_all_the_same(
    template: str, turns: list[Any]
) -> None:
    found, plain = (
        speaking(template).encode_prompts([turns]),
        speaking(KEPT).encode_prompts([turns]),
    )
    assert found.values.tolist() == plain.values.tolist()


def test_turns_that_cannot_be_continued_are_refused() -> None:
    with pytest.raises(DataError, match="expected text in the assistant's turn"):
        speaking(ENDED).encode_prompts([[USER, said(None)]])
    silent = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="expected a chat template that renders these messages"):
        speaking(silent).encode_prompts([[USER, said("So")]])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 / 0 }}", "found: ZeroDivisionError: division by zero. Fix: the template"),
        ("{{ messages + 1 }}", "found: TypeError: can only concatenate list"),
        ("{% for i in range(1000000) %}x{% endfor %}", "found: OverflowError: Range too big"),
        ("{% include 'x' %}", "found: TypeError: no loader"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "found: RecursionError: "),
        ("{{ messages | no_filter }}", r"found: No filter named 'no_filter'\. Fix"),
        ("{% for m in messages %}", "found: Unexpected end of template"),
    ],
)
def test_what_a_template_raises_is_one_line(template: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        speaking(template).encode_prompts([[USER]])


# token ids as they are


def generated(base: str, column: pa.Array, **params: Any) -> Batch:
    """Answers to prompts from position 3 on."""
    keys = Keys.of(range(3, 3 + len(column)))
    batch = Batch.make(keys, {"prompt": column}, Prompt)
    kernel = open_kernel(TorchGenerate(), base, **{"max_tokens": 4, "n": 2} | params)
    return Batch.concat(list(kernel.run(Chunk(id=0, step=1, keys=keys, inputs={"prompt": batch}))))


@pytest.mark.parametrize("kind", [
    pa.list_(pa.int32()), pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16()),
])  # fmt: skip
def test_ids_are_answered_as_they_are(base: str, kind: pa.DataType) -> None:
    rows = [[EOS, 5, 5], [7]]
    answers = generated(base, pa.array(rows, kind))
    assert answers.array("prompt_ids").to_pylist() == [rows[0], rows[0], rows[1], rows[1]]
    again = generated(base, pa.array([[1], *rows, [2]], kind).slice(1, 2))
    assert again.array("completion_ids").to_pylist() == answers.array("completion_ids").to_pylist()


def test_ids_and_the_text_that_they_say_are_answered_alike(base: str) -> None:
    by_text = generated(base, pa.array(["abc", "x"]))
    by_ids = generated(base, pa.array([ids("abc"), ids("x")], pa.list_(pa.int32())))
    assert by_ids.records.equals(by_text.records)


@pytest.mark.parametrize("row, message", [
    ([5, 98], "row .4, 0, 0.: expected token ids below the 98 that Model 'policy' knows, found 98"),
    ([-1], "row .4, 0, 0.: expected token ids below the 98 that Model 'policy' knows, found -1"),
    ([], "row .4, 0, 0.: expected at least one token in its prompt, found none"),
])  # fmt: skip
def test_ids_that_the_model_does_not_know_are_refused(
    base: str, row: list[int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        generated(base, pa.array([[1], row], pa.list_(pa.int32())))


def test_the_last_ids_stay_of_a_prompt_that_is_too_long(base: str) -> None:
    column = pa.array([[1, 2, 3, 4]], pa.list_(pa.int32()))
    found = generated(base, column, max_prompt_tokens=2, overlong_prompt="truncate")
    assert found.array("prompt_ids").to_pylist() == [[3, 4]] * 2


# data


def saved(folder: Path, rows: list[Any], kind: pa.DataType | None = None) -> str:
    """A file of prompts: Parquet of this type, else JSONL."""
    if kind is None:
        return save_jsonl(folder / "d.jsonl", *({"prompt": row, "answer": "x"} for row in rows))
    table = pa.table({"prompt": pa.array(rows, kind), "answer": ["x"] * len(rows)})
    pq.write_table(table, folder / "d.parquet")
    return str(folder / "d.parquet")


def opened(kernel: Any, base: str, returns: tuple[str, ...] = (), **params: Any) -> Any:
    """A kernel that has a tokenizer, or none where there is no base."""
    models = {"tokenizer": Model("policy", base)} if base else {}
    node = KernelNode(name="n", operator="n", params=params, models=models, returns=returns)
    kernel.open(node, Layout(), FakeSession())
    return kernel


def batch_of(kernel: Any, count: int, **inputs: Batch) -> Batch:
    """The one batch of a chunk of this many rows."""
    (batch,) = kernel.run(Chunk(id=0, step=1, keys=Keys.of(range(count)), inputs=inputs))
    return batch


def read(data: str, base: str = "", returns: tuple[str, ...] = ()) -> Batch:
    """All rows of a file of prompts."""
    kernel = opened(Prompts(), base, returns, data=data, shuffle=False)
    return batch_of(kernel, kernel.rows)


@pytest.mark.parametrize("kind", [None, pa.list_(pa.int32()), pa.large_list(pa.int64())])
def test_files_of_ids_are_read(tmp_path: Path, base: str, kind: pa.DataType | None) -> None:
    data = saved(tmp_path, [ids("ab"), [*ids("c"), EOS]], kind)
    assert is_token_ids(data_files.prompt_columns(data)["prompt"])
    found = read(data, base, ("answer", "prompt_text"))
    assert found.array("prompt").to_pylist() == [ids("ab"), [*ids("c"), EOS]]
    assert found.array("prompt").type.value_type == pa.int32()
    assert found.array("prompt_text").to_pylist() == ["ab", "c"]
    assert read(data, returns=("answer",)).names == ["prompt", "answer"]


def test_a_file_may_say_itself_what_its_ids_mean(tmp_path: Path) -> None:
    table = pa.table({"prompt": [[1, 2]], "prompt_text": ["one two"]})
    pq.write_table(table, tmp_path / "d.parquet")
    found = read(str(tmp_path / "d.parquet"), returns=("prompt_text",))
    assert found.array("prompt_text").to_pylist() == ["one two"]


@pytest.mark.parametrize("rows, message", [
    ([[1], []], r"d.jsonl:2: prompt: expected token ids, whole numbers from 0 on, found none"),
    ([[1], [2, None]], r"d.jsonl:2: prompt: expected token ids, .* found null"),
    ([[1], [2], [3, -4]], r"d.jsonl:3: prompt: expected token ids, .* found -4"),
    ([[1], [2**31]], r"d.jsonl:2: prompt: expected token ids, .* found 2147483648"),
    ([[1.5]], r"expected a column 'prompt' .*token ids.*, found prompt: list<"),
])  # fmt: skip
def test_files_of_what_are_no_ids_are_refused(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(saved(tmp_path, rows))


def test_demonstrations_are_not_read_from_ids() -> None:
    columns = {"prompt": pa.list_(pa.int32()), "completion": pa.utf8()}
    with pytest.raises(DataError, match="expected prompt and completion as text or as messages"):
        data_shapes.demonstration_shape("d.parquet", columns)


def answered(base: str, **columns: pa.Array) -> Batch:
    """The completions that the data has in its column `answer`."""
    rows = len(columns["prompt"])
    batch = Batch.make(Keys.of(range(rows)), columns, Prompt)
    return batch_of(opened(DatasetAnswers(), base, column="answer"), rows, prompt=batch)


def test_the_datas_answers_follow_prompts_by_ids(base: str) -> None:
    prompt = pa.array([[EOS, 5], [7]], pa.large_list(pa.int32()))
    found = answered(base, prompt=prompt, answer=pa.array(["ab", "c"]))
    assert found.array("prompt_ids").to_pylist() == [[EOS, 5], [7]]
    assert found.array("completion_ids").to_pylist() == [[*ids("ab"), EOS], [*ids("c"), EOS]]
    messages = pa.array([[said("a")], [said("b")]])
    with pytest.raises(DataError, match="expected text in column 'answer', as the prompts are tok"):
        answered(base, prompt=prompt, answer=messages)


def test_reward_functions_get_the_text_of_ids() -> None:
    def judge(prompts: list[str], completions: list[str]) -> list[float]:
        return [0.0] * len(prompts)

    keys = Keys.of([0])
    columns = {"prompt": pa.array([[1, 2]]), "prompt_text": ["ab"], "completion": ["c"]}
    rows = Batch.make(keys, columns, Completion)
    found = columns_for(Function(name="judge", asked=wants(judge), weight=1.0), rows)
    assert found.to_pydict() == {"completion": ["c"], "prompt": ["ab"]}


# continued


def continued_rows(
    base: str, answers: list[list[int]], returns: tuple[str, ...] = (), **params: Any
) -> Batch:
    """Rows of the prompt 9, 8 and these answers, continued."""
    columns = {"prompt_ids": ragged([[9, 8]] * len(answers)), "completion_ids": ragged(answers)}
    rows = Batch.make(Keys.of(range(len(answers))), columns, Completion)
    return batch_of(opened(Continued(), base, returns, **params), len(rows), rows=rows)


def test_the_ids_of_prompt_and_answer_are_the_prompt(base: str) -> None:
    found = continued_rows(base, [[5, 6, EOS], [], [7]])
    assert found.array("prompt").to_pylist() == [[9, 8, 5, 6, EOS], [9, 8], [9, 8, 7]]
    assert found.array("prompt_text").to_pylist() == ["9856", "98", "987"]
    assert continued_rows(base, [[1]], ("prompt",)).names == ["prompt"]


def test_the_next_turn_follows_the_end_of_the_answer(tmp_path: Path) -> None:
    speaking(ENDED).inner.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    turn = tokenizer.encode(["<eos>\n<user>Sure?<eos>\n<assistant>"], special=False)[0]
    found = continued_rows(str(tmp_path), [[5, EOS], [5], []], then="Sure?")
    expected = [[9, 8, 5, EOS, *turn[1:]], [9, 8, 5, *turn], [9, 8, *turn]]
    assert found.array("prompt").to_pylist() == expected
    assert found.array("prompt_text")[0].as_py() == "985\n<user>Sure?\n<assistant>"


def test_a_template_without_an_end_of_turn_adds_none(base: str) -> None:
    found = continued_rows(base, [[5, EOS]], then="Sure?")
    assert found.array("prompt").to_pylist() == [[9, 8, 5, EOS, *ids("\nu:Sure?\na:")]]


@pytest.mark.parametrize("template, message", [
    (None, "message lists need a chat template"),
    ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
     "expected a chat template that shows an answer and the user's next turn as they are"),
    ("{{ messages[1]['content'] }}", "shows an answer and the user's next turn as they are"),
])  # fmt: skip
def test_templates_without_a_next_turn_are_refused(
    tmp_path: Path, template: str | None, message: str
) -> None:
    speaking(template).inner.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=message):
        continued_rows(str(tmp_path), [[5]], then="Sure?")


def test_a_users_operator_may_make_prompts_by_ids() -> None:
    @operator()
    def again(rollout: Columns[Completion]) -> Columns[TokenPrompt]:
        ids, text = rollout["prompt_ids"], rollout["completion"]
        return Columns.make(TokenPrompt, like=rollout, prompt=ids, prompt_text=text)

    columns = {"prompt_ids": to_ragged([[1, 2], [3]]), "completion": ["a", "b"]}
    asked = again.fn(Columns(Batch.make(Keys.of([0, 1]), columns, Completion), Completion))
    assert asked["prompt"].values.tolist() == [1, 2, 3]
    assert asked.batch.array("prompt").type.value_type == pa.int32()
    assert asked["prompt_text"].tolist() == ["a", "b"]
