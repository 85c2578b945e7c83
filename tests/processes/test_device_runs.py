"""`device` columns in whole runs: one process's numbers to the bit, deaths, files, peek."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import CheckpointError, KernelError
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.user import Columns
from engine.api import Result, peek, plan, resume
from engine.channels.contract import BlockRequest
from engine.channels.inproc import InprocChannel
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import FINISHED, TAKEN
from engine.keep.checkpoint.cut import read_waiting_rows, write_waiting_rows
from engine.protocol.refs import Gather, Ref
from engine.protocol.workers import KeepRows, Save
from engine.run.worker.input_batches import assemble
from engine.run.worker.worker import Worker
from operators.kernels.host import ColumnFunction
from tests.kit.device_graphs import GATE, WIDTH, HiddenStates, steering
from tests.kit.processes import KillWorkers
from tests.kit.runs import column, metrics, require_same_runs, samples
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
TWO = {"states": "a,b"}
"""Two replicas make them; an operator and a loss read them in the Worker with all else."""
APART = TWO | {"steered": "c", "train_policy": "t"}
SCHEMAS = {"rows": HiddenStates}


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run in one process."""
    return TinyRuns(folder=tiny_folder, runs=tmp_path_factory.mktemp("whole")).run(steering)


@pytest.mark.long
def test_across_processes_the_values_go_by_collectives_alone(tiny: TinyRuns, whole: Result) -> None:
    result = tiny.run(steering, pin=TWO)
    require_same_runs(result, whole)
    read = [(row["completion/tokens"], row["data/rows"]) for row in metrics(result)]
    # hidden, total; each for two readers
    values = [2 * (4 * WIDTH * tokens + 8 * rows) for tokens, rows in read]
    assert min(read)[1] < 16, "no row was selected away"
    assert column(result, "edge/collective/bytes") == values
    assert max(column(result, "edge/shm/bytes")) < min(values) / 2
    assert not any(column(whole, "edge/collective/bytes"))


@pytest.mark.long
@pytest.mark.parametrize(("deaths", "how"), [
    ({1: "a", 2: "a"}, {"pin": TWO, "verify": "content"}),
    ({1: "c", 2: "t b"}, {"pin": APART, "checkpoint_every": 1}),
], ids=["who makes them", "who reads them, then both"])  # fmt: skip
def test_a_death_at_either_end_changes_nothing(
    tiny: TinyRuns, whole: Result, deaths: dict[int, str], how: dict[str, Any]
) -> None:
    kills = KillWorkers(deaths)
    result = tiny.run(steering, on_step=[kills], **how)
    assert len(set(kills.killed)) >= 2
    require_same_runs(result, whole)


@pytest.fixture
def a_prompt_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first Step that has rows trains only after a prompt of the next one is finished."""
    os.mkfifo(path := tmp_path / "gate")
    monkeypatch.setenv(GATE, str(path))
    gate = os.open(path, os.O_RDWR)
    Change = Callable[[PromptTable, np.ndarray], None]

    def looked_at(change: Change) -> Change:
        """The change, then a look; prompts of it that are finished may be rejected later."""

        def changed(lane: PromptTable, slots: np.ndarray) -> None:
            change(lane, slots)
            if lane.prompts.count[FINISHED] and len(
                lane.rows("select", lane.prompts.slots(TAKEN)).keys
            ):
                os.write(gate, b".")

        return changed

    for change in ("_settle", "take"):
        monkeypatch.setattr(PromptTable, change, looked_at(getattr(PromptTable, change)))
    yield
    os.close(gate)


@pytest.mark.long
@pytest.mark.usefixtures("a_prompt_waits")
def test_rows_that_wait_are_in_checkpoints_with_their_values(tiny: TinyRuns) -> None:
    """With lag, prompts wait finished but untrained at a checkpoint: resume goes on with them."""
    graph = steering(tiny.folder, max_lag=1)
    spread = {"pin": TWO | {"train_policy": "t"}, "checkpoint_every": 1, "keep": 10}
    first = tiny.run(graph, 4, **spread)
    cut = next(int(row["step"]) for row in metrics(first) if row["data/rows"])
    assert cut < 4, "no Step before the last has rows"
    # which gets what b has of these rows
    assert plan(graph, tiny.options(4, **spread)).recorder == "a"
    rows = read_waiting_rows(first.folder / f"checkpoints/step_{cut}/rows/states.arrow")
    assert not rows.device
    assert rows.array("hidden").type.value_type == pa.list_(pa.float32(), WIDTH)
    for step in range(cut + 1, 5):
        shutil.rmtree(first.folder / f"checkpoints/step_{step}", ignore_errors=True)
    again = resume(first.folder, pin={})
    assert again.step == 4
    keys = [(row["position"], row["sample"]) for row in samples(again).to_pylist()]
    assert len(set(keys)) == len(keys)


@pytest.fixture
def worker(tiny: TinyRuns) -> Worker:
    """The Worker of the whole graph, whose kernels are not open."""
    return Worker("main", plan(steering(tiny.folder), tiny.options()), channel=InprocChannel())


def hidden_states(*lengths: int) -> Batch:
    """Rows with this many tokens."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns = {
        "hidden": Ragged(torch.randn(int(offsets[-1]), WIDTH), offsets),
        "total": torch.randn(len(lengths), dtype=torch.float64),
        "norm": Ragged(np.ones(offsets[-1], np.float32), offsets),
    }
    return Batch.make(Keys.of(range(len(lengths))), columns, HiddenStates)


def states_of(refs: list[Ref], block: list[int], row: list[int], *columns: str) -> Gather:
    """Rows of blocks of `states`."""
    at = {"block": np.array(block, np.int64), "row": np.array(row)}
    blocks = tuple(("main", ref.block) for ref in refs)
    return Gather(producer="states", columns=columns, refs=blocks, **at)


def test_a_file_brings_back_the_bits_and_the_form(worker: Worker, tmp_path: Path) -> None:
    batch, rows = hidden_states(2, 0, 3, 1), [3, 1, 2]
    ref = worker.rows.keep("states", batch)
    gather = states_of([ref], [0, 0, 0], rows)
    (tmp_path / "rows").mkdir()
    wanted = batch.take(np.array(rows))
    worker.files.answer(Save(directory=tmp_path, rows={"states": (wanted.keys, gather)}))
    file = tmp_path / "rows" / "states.arrow"
    back = worker.rows.of("states", worker.files.answer(KeepRows(file=file)))
    assert back.keys.rows() == wanted.keys.rows()
    assert back.records.equals(wanted.records)
    # else rows of several blocks could not be joined
    assert back.records.schema == wanted.records.schema
    for name in ("hidden", "total"):
        assert torch.equal(back.device[name], wanted.device[name])
    worker.release([ref.block])
    with pytest.raises(KeyError):
        worker.rows.of("states", ref)


def test_a_file_of_another_width_is_refused(worker: Worker, tmp_path: Path) -> None:
    width_1 = pa.large_list(pa.list_(pa.float32(), 1))
    hidden = pa.array([[[1.0]], [[1.0]] * 2], width_1)
    narrow = hidden_states(1, 2).on_host().with_columns({"hidden": hidden})
    write_waiting_rows(tmp_path / "states.arrow", narrow)
    told = "rows of states, column 'hidden': expected large_list"
    with pytest.raises(CheckpointError, match=told):
        worker.files.answer(KeepRows(file=tmp_path / "states.arrow"))


def test_rows_of_several_blocks_come_in_order(worker: Worker) -> None:
    parts = [hidden_states(1, 2, 3), hidden_states(4, 0), hidden_states(2)]
    refs = [worker.rows.keep("states", part) for part in parts]
    block, row = [1, 0, 2, 0, 1], [0, 2, 0, 1, 1]

    def assembled(gather: Gather) -> Batch:
        keys = Keys.of(range(len(gather.row)))
        return assemble(keys, {"rows": (gather,)}, worker.channel, worker.rows.device)["rows"]

    rows = assembled(states_of(refs, block, row, "hidden", "total"))
    expected = [parts[b].tensor("hidden")[r] for b, r in zip(block, row, strict=True)]
    assert all(torch.equal(rows.tensor("hidden")[i], expected[i]) for i in range(5))
    assert rows.names == ["hidden", "total"]
    own = assembled(states_of(refs[:1], [0, 0, 0], [0, 1, 2], "total")).device["total"]
    assert own.data_ptr() == parts[0].device["total"].data_ptr(), "in one Worker nothing moves"


def test_what_is_not_where_it_was_declared_is_refused(worker: Worker) -> None:
    batch = hidden_states(1)
    told = "states: column 'hidden' is declared device, and is no tensor"
    with pytest.raises(KernelError, match=told):
        worker.rows.keep("states", batch.on_host())
    device = batch.device | {"total": batch.device["total"].float()}
    told = r"states: column 'total': expected torch.float64, found torch.float32"
    with pytest.raises(KernelError, match=told):
        worker.rows.keep("states", Batch(batch.keys, batch.records, device))


def test_values_that_are_not_finite_name_their_row() -> None:
    batch = hidden_states(2, 0, 3)

    def ran(function: Callable[..., object], column: str) -> list[Batch]:
        kernel, usual = ColumnFunction(), {"name": "n", "operator": "n", "schemas": SCHEMAS}
        node = KernelNode(function=function, returns=(column,), **usual)
        kernel.open(node, Layout(), None)  # type: ignore[arg-type]
        return list(kernel.run(Chunk(id=1, step=0, keys=batch.keys, inputs={"rows": batch})))

    def broken(rows: Columns[HiddenStates]) -> Columns[HiddenStates]:
        values = rows["hidden"].values.clone()
        values[4, 7] = torch.inf
        return rows.set(hidden=rows["hidden"].like(values))

    told = r"\(2, 0, 0\): column 'hidden' has a value that is not finite"
    with pytest.raises(KernelError, match=told):
        ran(broken, "hidden")
    (output,) = ran(lambda rows: rows, "total")
    # nobody reads the other, which would take room on the device
    assert output.device.keys() == {"total"}


def test_peek_shows_values(tiny: TinyRuns) -> None:
    table = peek(steering(tiny.folder), "states", rows=2)
    assert table["hidden"].type.value_type == pa.list_(pa.float32(), WIDTH)
    assert np.isfinite(table["total"].to_numpy()).all()
    assert len(table) == 2


def test_a_fetch_alone_brings_lengths(worker: Worker) -> None:
    batch = hidden_states(2, 1)
    ref = worker.rows.keep("states", batch)
    (fetched,) = worker.channel.fetch([BlockRequest(worker="main", block=ref.block)])
    assert fetched.nbytes < batch.device["hidden"].nbytes / 10
