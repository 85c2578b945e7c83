"""A run's provenance: which changes of parameters, data, models and source files count."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import CheckpointError
from dataflow.graph import Graph
from dataflow.set_expressions import edited
from engine.keep.checkpoint.content_digests import code_digest, model_content
from engine.keep.checkpoint.cut import Cut
from engine.keep.checkpoint.provenance import (
    AcceptedChange,
    ProvenanceRecord,
    differences,
    in_python,
    provenance,
)
from engine.keep.checkpoint.store import CheckpointStore
from engine.keep.run_folder import RunFolder
from engine.replay.run_diff import accepted_changes
from engine.session.run_beginning import Beginning, WantedRun, find_beginning, keep_changes
from graphs.grpo import grpo
from tests.kit.files import save_jsonl

REWARD = """import my_helpers

def same(completions, answer):
    return my_helpers.compare(completions, answer)
"""
HELPERS = "def compare(a, b):\n    return [float(x == y) for x, y in zip(a, b)]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with data, a model's files, and a reward file that imports another."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 32, "hidden_size": 8}')
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(100))
    save_jsonl(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "b"})
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "my_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_rewards", "my_helpers"):
        sys.modules.pop(name, None)


def graph(
    here: Path, *, model: str = "model", data: str = "rows.jsonl", **parameters: object
) -> Graph:
    importlib.invalidate_caches()
    fn = importlib.import_module("my_rewards").same
    given = {"n": 2, "batch": 1, "beta": 0.04} | parameters
    return grpo(str(here / model), str(here / data), fn, **given)


def changed(here: Path, change: Callable[[], object]) -> list[str]:
    """What differs after this change."""
    before = provenance(graph(here))
    change()
    return [str(each) for each in differences(before, provenance(graph(here)))]


@pytest.mark.parametrize("value, told", [
    ("clipped_policy_loss.clip=(0.2, 0.28)", "clipped_policy_loss.clip: 0.2 -> (0.2, 0.28)"),
    ("lr=cosine(1e-3, 10)", "lr: 1e-06 -> Schedule(kind='cosine', start=0.001, stop=0.0, steps=10,"
                            " warmup=0)"),
    ("optimizer=AdamW(weight_decay=0.1)", "optimizer: adamw -> AdamW(betas=(0.9, 0.99), eps=1e-08,"
                                          " weight_decay=0.1)"),
])  # fmt: skip
def test_a_value_is_told_as_python_has_it(here: Path, value: str, told: str) -> None:
    before = graph(here)
    after = edited(before, [f"train_policy.{value}"])
    [found] = differences(provenance(before), provenance(after))
    assert str(found) == f"node train_policy: {told}"


@pytest.mark.parametrize("text, told", [
    ("true", "True"), ('{"tuple": ["a"]}', "('a',)"), ("[1, null]", "[1, None]"),
    ('{"float": "inf"}', '{"float": "inf"}'), ("{a", "{a"), ("adamw", "adamw"),
])  # fmt: skip
def test_what_is_no_written_value_stays_as_it_is(text: str, told: str) -> None:
    assert in_python(text) == told


def test_of_several_files_those_that_differ_are_named(here: Path) -> None:
    (here / "rows").mkdir()
    for name in "abc":
        save_jsonl(here / "rows" / f"{name}.jsonl", {"prompt": name, "answer": "b"})
    before = provenance(graph(here, data="rows"))
    save_jsonl(here / "rows" / "b.jsonl", {"prompt": "z", "answer": "b"})
    (found,) = differences(before, provenance(graph(here, data="rows")))
    assert str(found) == f"node prompts: data ({here}/rows): its content changed: b.jsonl"


def test_a_model_counts_by_its_files(here: Path) -> None:
    weights = here / "model" / "model.safetensors"
    assert changed(here, lambda: weights.write_bytes(bytes(99) + b"x")) == [
        f"model {name}: base ({here}/model): its content changed: model.safetensors"
        for name in ("policy", "reference")
    ]


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("my_rewards", REWARD + "\n\nBONUS = 1.0\n", ""),
        ("my_rewards", REWARD.replace("answer)", "answer, )"), ": same"),
        ("my_helpers", HELPERS + "\n\nclass Kept:\n    pass\n", ": Kept"),
    ],
    ids=["itself", "a function", "what it imports"],
)
def test_source_files_count_with_those_that_they_import(
    here: Path, name: str, text: str, what: str
) -> None:
    """The function or class that differs is named."""
    told = f"source file: {name} ({name}.py): its content changed{what}"
    assert changed(here, lambda: (here / f"{name}.py").write_text(text)) == [told]


def test_paths_lines_comments_and_dates_do_not_count(here: Path) -> None:
    before, elsewhere = provenance(graph(here)), here / "elsewhere"
    elsewhere.mkdir()
    (here / "model").rename(elsewhere / "other")
    (here / "rows.jsonl").rename(elsewhere / "moved.jsonl")
    commented = "# what is compared\n\n\n" + REWARD.replace("):", "):  # both", 1)
    (here / "my_rewards.py").write_text(commented)
    os.utime(elsewhere / "moved.jsonl", (1, 1))
    sys.modules.pop("my_rewards")
    after = provenance(graph(here, model="elsewhere/other", data="elsewhere/moved.jsonl"))
    assert differences(before, after) == []


def digest_of(model: Path) -> str:
    return model_content(str(model)).digest


def test_a_large_file_is_read_in_pieces_and_at_both_ends(tmp_path: Path) -> None:
    path, size, piece = tmp_path / "model.safetensors", (64 << 20) + 12_345, 65_536
    path.touch()
    os.truncate(path, size)
    digests = {digest_of(tmp_path)}
    between = size // 2 // piece * piece
    # in the header, the first piece, one between and the end
    for place, length in ((5, 1), (1 << 20, 1), (between, 8 * piece), (size - 3, 1)):
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x" * length)
        digests.add(digest_of(tmp_path))
    assert len(digests) == 5
    assert model_content("hub/name") is None


CODE = st.lists(
    st.sampled_from(
        ["x = 1", "def f():", "    return '''a", "b'''", "", "  ", "y = '#no'", "# c", "z = f'{x}'"]
    )
)


@given(CODE)
def test_what_is_no_code_never_counts_and_texts_do(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        compile(text, "", "exec")
    except SyntaxError:
        return
    assert code_digest(f"# first\n\n{text}\n\n# last\n") == code_digest(text)
    assert code_digest(text + "\nw = 2") != code_digest(text)


@pytest.mark.parametrize(("one", "other", "same"), [
    ('a = """x\n\ny"""', 'a = """x\ny"""', False),
    ("a = 'x # y'", "a = 'x # z'", False),
    ("if a:\n    b", "if a:\n        b", False),
    ("a = 1  # y", "a = 1", True),
])  # fmt: skip
def test_blank_lines_and_hashes_within_texts_count(one: str, other: str, same: bool) -> None:
    assert (code_digest(one) == code_digest(other)) is same


@pytest.fixture
def run(here: Path) -> Iterator[RunFolder]:
    """The folder of a run that was stored at Step 2 and came to Step 3."""
    with RunFolder.create("r", here / "runs") as folder:
        store_at(folder, 2, ProvenanceRecord(made_of=provenance(graph(here))))
        steps(folder, 1, 2, 3)
        yield folder


def store_at(
    folder: RunFolder, step: int, record: ProvenanceRecord | None, graph: str = "g"
) -> None:
    """A checkpoint of this Step with nothing but its cut."""
    text = Cut(step=step, seed=0, graph=graph, record=record).to_json()
    store = CheckpointStore(folder.checkpoints)
    store.write(step, lambda directory: (directory / "cut.json").write_bytes(text), {})


def steps(folder: RunFolder, *numbers: int) -> None:
    save_jsonl(folder.metrics, *({"step": step} for step in numbers))


def begin(folder: RunFolder, graph: Graph, *, accept: bool = False) -> Beginning:
    wanted = WantedRun(made_of=provenance(graph), graph="g", accept=accept)
    begins = find_beginning(folder, CheckpointStore(folder.checkpoints).latest(), wanted)
    keep_changes(folder, begins)
    return begins


def test_what_differs_is_refused_each_by_name(here: Path, run: RunFolder) -> None:
    begin(run, graph(here))
    (here / "my_helpers.py").write_text(HELPERS.replace("==", "!="))
    with pytest.raises(CheckpointError) as refused:
        begin(run, graph(here, lr=1e-3))
    assert str(refused.value).splitlines() == [
        f"{run.path}: expected what the run had up to step 2, found that 2 things are another:",
        "  node train_policy: lr: 1e-06 -> 0.001",
        "  source file: my_helpers (my_helpers.py): its content changed: compare",
        "Fix: undo that; or --accept-changes, which records that it holds from step 3 on.",
    ]


def test_what_was_accepted_is_recorded_and_not_asked_again(here: Path, run: RunFolder) -> None:
    plain, faster = graph(here), graph(here, lr=1e-3)
    record = begin(run, faster, accept=True).record
    where, what = "node train_policy", "lr"
    change = AcceptedChange(step=3, where=where, what=what, old="1e-06", new="0.001")
    assert record.changes == (change,)
    assert accepted_changes(run.path / "changes.json") == [change]
    assert begin(run, faster).record == record  # it died before its next checkpoint
    store_at(run, 3, record)
    assert begin(run, faster).record == record
    with pytest.raises(CheckpointError, match=r"lr: 0\.001 -> 1e-06"):
        begin(run, plain)
    assert [c.step for c in begin(run, plain, accept=True).record.changes] == [3, 4]


def test_a_gap_in_the_metrics_is_refused(here: Path, run: RunFolder) -> None:
    store_at(run, 9, ProvenanceRecord(made_of=provenance(graph(here))))
    steps(run, 1, 3, 4, 8, 9)
    told = r"metrics\.jsonl: steps: steps 1 to 9 -> all but 2, 5-7"
    with pytest.raises(CheckpointError, match=told):
        begin(run, graph(here))
    begin(run, graph(here), accept=True)


def test_a_run_without_a_checkpoint_begins_anew_and_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create("new", here / "runs") as folder:
        assert begin(folder, graph(here)).checkpoint is None
        told = "no checkpoint was written before the run ended. It starts over"
        assert told in capsys.readouterr().err
        steps(folder, 1, 2)
        begin(folder, graph(here))
        assert "its metrics reached step 2, of which nothing is left" in capsys.readouterr().err


def test_an_older_cut_has_nothing_but_a_digest(here: Path, run: RunFolder) -> None:
    store_at(run, 2, None, graph="g")
    begin(run, graph(here, lr=1e-3))
    store_at(run, 2, None, graph="h")
    with pytest.raises(CheckpointError, match="graph: nodes: that of an older version"):
        begin(run, graph(here))
