"""Tokens of prompts, counted in a sample of the data before a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from dataflow.batch import Keys
from dataflow.graph import Graph
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.token_counts import NotCounted, TokenCounts
from engine.simulation.lengths import DrawnLengths, UnknownDistributions
from operators.data import demonstrations
from operators.kernels import token_counts
from operators.kernels.data import (
    Demonstrations,
    open_demonstrations,
    open_rows,
    tokenize_demonstrations,
)
from operators.kernels.preferences import Preferences
from operators.kernels.text import load_tokenizer
from operators.kernels.token_counts import (
    SAMPLE,
    count_demonstrations,
    count_preferences,
    count_prompts,
)
from operators.kernels.tokenizer_files import read_tokenizer
from operators.losses import supervised_loss
from operators.train import train
from tests.kit.files import save_character_tokenizer, save_jsonl
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.plans import placed
from tests.kit.processes import ROOT

TEXTS = ["a", "two words", "  caf\u00e9\n", "<eos>x"]
USER, BEGUN = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}
CONVERSATIONS = [[USER], [{"role": "system", "content": "Be brief."}, USER], [USER, BEGUN]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A directory with the files of a tokenizer, one token a character."""
    return save_character_tokenizer(tmp_path / "tokenizer")


def saved(folder: Path, prompts: list[Any], name: str = "train.parquet") -> str:
    pq.write_table(pa.table({"prompt": prompts}), folder / name)
    return str(folder / name)


def counted(data: str, base: str) -> TokenCounts:
    counts = count_prompts(data, None, base)
    assert isinstance(counts, TokenCounts), counts
    return counts


def why_not(data: str, base: str, split: str | None = None) -> str:
    counts = count_prompts(data, split, base)
    assert isinstance(counts, NotCounted)
    return counts.why


def with_bos(folder: Path, **settings: Any) -> None:
    """Its tokenizer writes a bos before each text, and an eos behind it."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [(text, inner.token_to_id(text)) for text in ("<pad>", "<eos>")]
    inner.post_processor = TemplateProcessing(single="<pad> $A <eos>", special_tokens=ends)
    inner.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": "<pad>"} | settings))


@pytest.mark.parametrize("ends", ["plain", "both", "by settings"])
@pytest.mark.parametrize("prompts", [TEXTS, CONVERSATIONS], ids=["texts", "conversations"])
def test_the_ids_are_those_that_a_run_reads(tmp_path: Path, prompts: list[Any], ends: str) -> None:
    from tests.kit.models import character_tokenizer

    character_tokenizer().save_pretrained(tmp_path)
    if ends == "both":
        with_bos(tmp_path)
    elif ends == "by settings":
        with_bos(tmp_path, add_bos_token=True, add_eos_token=False)
    column = open_rows(saved(tmp_path, prompts)).table.column("prompt").combine_chunks()
    ours, run = read_tokenizer(tmp_path), load_tokenizer(str(tmp_path))
    assert ours.encode_column(column).values.tolist() == run.encode_column(column).values.tolist()
    assert counted(saved(tmp_path, prompts), str(tmp_path)).longest == max(
        run.encode_column(column).lengths
    )


def test_a_sample_and_the_longest_row_are_counted(tmp_path: Path, tokenizer: str) -> None:
    texts = ["x" * (1 + row % 40) for row in range(1000)]
    counts = counted(saved(tmp_path, [*texts, "y" * 700]), tokenizer)
    assert len(counts.prompts) == SAMPLE
    assert (counts.prompts[0], counts.longest) == (1, 700)
    assert 19 < counts.prompts.mean() < 23
    assert str(counts) == (
        f"1 to 40 tokens, mean {counts.prompts.mean():.0f}, from 256 rows of train.parquet, and of"
        " its longest 700"
    )
    again = counted(saved(tmp_path, [*texts, "y" * 700], "same.parquet"), tokenizer)
    assert again.prompts.tolist() == counts.prompts.tolist(), "equal data has equal counts"


def test_few_of_very_long_rows_are_counted(tmp_path: Path, tokenizer: str) -> None:
    counts = counted(saved(tmp_path, ["x" * 50_000] * 100), tokenizer)
    assert len(counts.prompts) == token_counts.LEAST


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    counts = counted(saved(tmp_path, [[1] * 7, [2]]), "nowhere")
    assert (counts.prompts.tolist(), counts.longest) == ([1, 7], 7)


def test_files_that_were_written_anew_are_counted_anew(tmp_path: Path, tokenizer: str) -> None:
    assert counted(saved(tmp_path, ["abc"]), tokenizer).longest == 3
    assert counted(saved(tmp_path, ["abcde"]), tokenizer).longest == 5


def test_what_is_not_counted_says_why(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, folder = saved(tmp_path, ["abc"], "texts.parquet"), Path(tokenizer)
    turns = saved(tmp_path, CONVERSATIONS, "turns.parquet")
    assert why_not("reasoning_gym:zebra_puzzles", tokenizer) == "a task's rows are made in the run"
    assert why_not("hf:some/data", tokenizer).startswith("a data set of the hub is read")
    assert "no such file" in why_not(str(tmp_path / "none.parquet"), tokenizer)
    assert "split" in why_not(texts, tokenizer, "test")
    assert "a directory with a tokenizer here, found 'hub/name'" in why_not(texts, "hub/name")
    assert "need a chat template, and its tokenizer has none" in why_not(turns, tokenizer)
    monkeypatch.setattr(token_counts, "MOST_BYTES", 10)
    assert "more than 10 B, and is read in the run" in why_not(texts, tokenizer)
    monkeypatch.undo()
    unknown = {"type": "WordLevel", "vocab": {"abc": 0}, "unk_token": "?"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": unknown}))
    assert "Missing [UNK] token" in why_not(saved(tmp_path, ["other"]), tokenizer)
    (folder / "tokenizer.json").write_text("{}")
    assert "expected a tokenizer, found" in why_not(texts, tokenizer)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json: no such file" in why_not(texts, tokenizer)


@pytest.mark.long
def test_counting_texts_imports_neither_torch_nor_transformers(
    tmp_path: Path, tokenizer: str
) -> None:
    data = saved(tmp_path, TEXTS)
    code = (
        "import sys; from operators.kernels.token_counts import count_prompts;"
        f"print(count_prompts({data!r}, None, {tokenizer!r}));"
        "sys.exit(str({'torch', 'transformers'} & set(sys.modules) or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "from 4 rows of train.parquet" in done.stdout, done.stderr
    assert done.stderr.strip() == ""


def pairs_of_kernel(kernel: Any, data: str, base: str) -> tuple[list[int], list[int]]:
    """Tokens of prompts and answers as the kernel of a source makes them."""
    node = KernelNode(
        name="source",
        operator="source",
        params={"data": data, "overlong": "error"},
        models={"tokenizer": Model("policy", base)},
    )
    kernel.open(node, Layout(), FakeSession(seed=7))
    rows = Chunk(id=0, step=1, keys=Keys.of(range(kernel.rows)), inputs={})
    [batch] = kernel.run(rows)
    prompts, answers = batch.lengths("prompt_ids"), batch.lengths("completion_ids")
    return sorted(prompts.tolist()), sorted(answers.tolist())


def answers_of(counts: TokenCounts) -> list[int]:
    assert counts.answers is not None
    return counts.answers.tolist()


SAID = {"role": "assistant", "content": "It is 4."}
DEMONSTRATIONS: dict[str, list[Any]] = {
    "texts": [{"prompt": "2+2=", "completion": "four"}, {"prompt": "1", "completion": "a" * 90}],
    "messages": [{"prompt": [USER], "completion": [SAID]}],
    "conversations": [{"messages": [USER, SAID, USER, SAID]}, {"messages": [USER, SAID]}],
    "plain": [{"text": "whole texts"}, {"text": "are answers"}],
}


@pytest.mark.parametrize("form", DEMONSTRATIONS)
def test_demonstrations_are_counted_as_their_kernel_makes_them(form: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "model", layers=1)
    data = save_jsonl(tmp_path / "a.jsonl", *DEMONSTRATIONS[form])
    counts = count_demonstrations(data, None, base)
    assert isinstance(counts, TokenCounts), counts
    prompts, answers = pairs_of_kernel(Demonstrations(), data, base)
    assert (counts.prompts.tolist(), answers_of(counts)) == (prompts, answers)
    assert counts.longest_answer == answers[-1]


def test_a_place_is_looked_for_where_a_row_is_wrong_alone(tmp_path: Path) -> None:
    rows = open_demonstrations(save_jsonl(tmp_path / "a.jsonl", *DEMONSTRATIONS["conversations"]))
    tokenizer = load_tokenizer(save_tiny(tmp_path / "model", layers=1))

    def place(row: int) -> str:
        raise AssertionError(f"the file is read for row {row}, which is right")

    pairs = tokenize_demonstrations(tokenizer, rows.shape, rows.take(np.arange(2)), True, place)
    assert len(pairs.prompt) == 2


@pytest.mark.parametrize("prompt", [{"prompt": "2+2= "}, {}], ids=["prompt", "implicit"])
def test_preferences_are_counted_as_their_kernel_makes_them(
    prompt: dict[str, str], tmp_path: Path
) -> None:
    base, begun = save_tiny(tmp_path / "model", layers=1), "" if prompt else "2+2= "
    row = {**prompt, "chosen": begun + "four", "rejected": begun + "no idea"}
    data = save_jsonl(tmp_path / "a.jsonl", row)
    counts = count_preferences(data, None, base)
    assert isinstance(counts, TokenCounts), counts
    prompts, answers = pairs_of_kernel(Preferences(), data, base)
    assert (counts.prompts.tolist(), answers_of(counts)) == (prompts, answers)
    assert counts.longest_row == prompts[0] + answers[-1]


def test_estimates_and_simulated_rows_stand_on_counted_answers(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "model", layers=1)
    data = save_jsonl(tmp_path / "a.jsonl", *DEMONSTRATIONS["texts"])
    policy, rows = Model("policy", base, trainable=True), demonstrations(data, batch=2)
    graph = Graph("sft", train(policy, rows, loss=supervised_loss(), lr=1e-3))
    plan = placed(graph)
    drawn = DrawnLengths(plan, UnknownDistributions(), seed=0)
    greatest = drawn.greatest("demonstrations")
    assert (greatest.prompt, greatest.completion) == (1, 91), "the longest answer in its row"
    keys = Keys.of(range(50))
    assert set(drawn.completions("demonstrations", keys).tolist()) == {5, 91}
    assert set(drawn.prompts("demonstrations", keys).tolist()) == {1, 4}
