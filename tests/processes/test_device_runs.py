"""Columns declared `device` in whole runs: the numbers of one process to the bit, deaths on the
way, files, peek.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from device_graphs import GATE, WIDTH, Hidden, steering
from test_across import numbers

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import CheckpointError, KernelError
from dataflow.user import Columns
from engine.api import Result, peek, plan, resume, run
from engine.channels.contract import BlockRequest
from engine.channels.inproc import InprocChannel
from engine.checkpoint.cut import read_rows
from engine.coordinator.prompt_table import FINISHED, TAKEN, PromptTable
from engine.coordinator.refs import Gather
from engine.observe.samples import read_samples
from engine.run.workers import KeepRows, Save
from engine.worker.worker import Worker
from tests.kit.processes import children, workers
from tests.kit.runs import metrics, weights

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(240)
TWO = {"states": "a,b"}
"""Two replicas make them; an operator and a loss read them in the Worker of everything else."""
APART = TWO | {"steered": "c", "train_policy": "t"}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(children())
    yield
    assert set(children()) <= before


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run in one process."""
    from engine.options import RunOptions

    runs = tmp_path_factory.mktemp("whole")
    return run(
        steering(tiny), RunOptions(steps=3, runs=runs, threads=1, progress=False, workers="one")
    )


def same(result: Result, whole: Result) -> None:
    assert numbers(result) == numbers(whole)
    assert weights(result) == weights(whole)
    assert read_samples(result.folder / "samples").equals(read_samples(whole.folder / "samples"))


def sent(folder: Path, route: str) -> list[float]:
    return [row.get(f"edge/{route}/bytes", 0.0) for row in metrics(folder)]


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_across_processes_the_values_go_by_collectives_alone(
    tiny: Path, options: Options, whole: Result
) -> None:
    result = run(steering(tiny), options(3, pin=TWO))
    same(result, whole)
    read = [(row["completion/tokens"], row["data/rows"]) for row in metrics(result.folder)]
    values = [
        2 * (4 * WIDTH * tokens + 8 * rows) for tokens, rows in read
    ]  # hidden, total; each for two readers
    assert min(read)[1] < 16, "no row was selected away"
    assert sent(result.folder, "collective") == values
    assert max(sent(result.folder, "shm")) < min(values) / 2
    assert not any(sent(whole.folder, "collective"))


@pytest.mark.long
def test_content_may_be_checked_too(tiny: Path, options: Options, whole: Result) -> None:
    same(run(steering(tiny), options(3, pin=TWO, verify="content")), whole)


@pytest.mark.long
@pytest.mark.parametrize("worker, pin", [("a", TWO), ("c", APART)])
def test_a_death_at_either_end_changes_nothing(
    tiny: Path, options: Options, whole: Result, worker: str, pin: dict[str, str]
) -> None:
    killed: list[int] = []

    def kill(row: Any) -> None:
        if row["step"] < 3 and len(killed) < row["step"]:
            killed.append(workers()[worker])
            os.kill(killed[-1], signal.SIGKILL)

    result = run(steering(tiny), options(3, pin=pin), on_step=[kill])
    assert len(set(killed)) == 2
    same(result, whole)


@pytest.mark.long
def test_in_the_middle_of_steps_too(tiny: Path, options: Options, whole: Result) -> None:
    """The trainer dies, so that rows are made again from the last checkpoint, and whoever makes
    them dies with it.
    """
    killed: list[int] = []

    def kill(row: Any) -> None:
        if row["step"] == 2 and not killed:
            killed.extend(workers()[name] for name in ("t", "b"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    result = run(steering(tiny), options(3, pin=APART, checkpoint_every=1), on_step=[kill])
    assert len(killed) == 2
    same(result, whole)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def a_prompt_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first Step that has rows trains no earlier than a prompt of the next one is finished, as
    the coordinator sees it.
    """
    os.mkfifo(path := tmp_path / "gate")
    monkeypatch.setenv(GATE, str(path))
    gate = os.open(path, os.O_RDWR)

    def looked_at(
        change: Callable[[PromptTable, np.ndarray], None],
    ) -> Callable[[PromptTable, np.ndarray], None]:
        """The change, and then a look whether that is so now; of its prompts some may be finished,
        then rejected.
        """

        def changed(lane: PromptTable, slots: np.ndarray) -> None:
            change(lane, slots)
            if lane.count[FINISHED] and len(lane.rows("select", lane.slots(TAKEN)).keys):
                os.write(gate, b".")

        return changed

    for change in ("_settle", "take"):
        monkeypatch.setattr(PromptTable, change, looked_at(getattr(PromptTable, change)))
    yield
    os.close(gate)


@pytest.mark.long
@pytest.mark.usefixtures("a_prompt_waits")
def test_rows_that_wait_are_in_checkpoints_with_their_values(tiny: Path, options: Options) -> None:
    """With lag some prompts are finished and not trained when a checkpoint is made: resume goes on
    with them.
    """
    asked = options(4, pin=TWO | {"train_policy": "t"}, checkpoint_every=1, keep=10, workers="one")
    first = run(steering(tiny, max_lag=1), asked)
    cut = next(int(row["step"]) for row in metrics(first.folder) if row["data/rows"])
    assert cut < 4, "no Step before the last has rows"
    assert plan(steering(tiny, max_lag=1), asked).recorder == "a", (
        "which gets what b has of these rows"
    )
    rows = read_rows(first.folder / f"checkpoints/step_{cut}/rows/states.arrow")
    assert not rows.device
    assert rows.array("hidden").type.value_type == pa.list_(pa.float32(), WIDTH)
    for step in range(cut + 1, 5):
        shutil.rmtree(first.folder / f"checkpoints/step_{step}", ignore_errors=True)
    again = resume(first.folder, pin={})
    assert again.step == 4
    samples = read_samples(again.folder / "samples")
    keys = zip(samples["position"].to_pylist(), samples["sample"].to_pylist(), strict=True)
    assert len(set(keys)) == samples.num_rows


def alone(tiny: Path, options: Options) -> Worker:
    return Worker("main", plan(steering(tiny), options()), channel=InprocChannel())


def some(lengths: list[int]) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns = {
        "hidden": Ragged(torch.randn(int(offsets[-1]), WIDTH), offsets),
        "total": torch.randn(len(lengths), dtype=torch.float64),
        "norm": Ragged(np.ones(offsets[-1], np.float32), offsets),
    }
    return Batch.make(Keys.of(range(len(lengths))), columns, Hidden)


def test_a_file_brings_back_the_bits_and_the_form(
    tiny: Path, options: Options, tmp_path: Path
) -> None:
    worker, batch = alone(tiny, options), some([2, 0, 3, 1])
    ref = worker.keep("states", batch)
    row = np.array([3, 1, 2])
    gather = Gather(
        producer="states",
        columns=(),
        refs=(("main", ref.block),),
        block=np.zeros(3, np.int64),
        row=row,
    )
    (tmp_path / "rows").mkdir()
    worker.answer(Save(directory=tmp_path, rows={"states": (batch.keys.take(row), gather)}))
    back = worker.rows("states", worker.answer(KeepRows(file=tmp_path / "rows" / "states.arrow")))
    wanted = batch.take(row)
    assert back.keys.rows() == wanted.keys.rows()
    assert back.records.equals(wanted.records)
    assert back.records.schema == wanted.records.schema, (
        "else rows of several blocks could not be joined"
    )
    for name in ("hidden", "total"):
        assert torch.equal(back.device[name], wanted.device[name])
    worker.release([ref.block])
    with pytest.raises(KeyError):
        worker.rows("states", ref)


def test_a_file_of_another_width_is_refused(tiny: Path, options: Options, tmp_path: Path) -> None:
    from engine.checkpoint.cut import write_rows

    worker, batch = alone(tiny, options), some([1, 2]).on_host()
    narrow = batch.with_columns(
        {"hidden": pa.array([[[1.0]], [[1.0]] * 2], pa.large_list(pa.list_(pa.float32(), 1)))}
    )
    write_rows(tmp_path / "states.arrow", narrow)
    with pytest.raises(
        CheckpointError, match="rows of states, column 'hidden': expected large_list"
    ):
        worker.answer(KeepRows(file=tmp_path / "states.arrow"))


# --- one Worker -----------------------------------------------------------------------------------


def test_rows_of_several_blocks_come_in_order(tiny: Path, options: Options) -> None:
    from engine.worker.assemble import assemble

    worker, parts = alone(tiny, options), [some([1, 2, 3]), some([4, 0]), some([2])]
    refs = [worker.keep("states", part) for part in parts]
    block, row = np.array([1, 0, 2, 0, 1]), np.array([0, 2, 0, 1, 1])
    gather = Gather(
        producer="states",
        columns=("hidden", "total"),
        refs=tuple(("main", r.block) for r in refs),
        block=block,
        row=row,
    )
    keys = Keys.of(range(5))
    found = assemble(keys, {"rows": (gather,)}, worker.channel, worker._device)["rows"]
    expected = [parts[b].tensor("hidden")[r] for b, r in zip(block, row, strict=True)]
    assert all(torch.equal(found.tensor("hidden")[i], expected[i]) for i in range(5))
    assert found.names == ["hidden", "total"]
    one = Gather(
        producer="states",
        columns=("total",),
        refs=(("main", refs[0].block),),
        block=row[:0],
        row=np.arange(3),
    )
    mine = assemble(keys.take(np.arange(3)), {"rows": (one,)}, worker.channel, worker._device)[
        "rows"
    ]
    assert mine.device["total"].data_ptr() == parts[0].device["total"].data_ptr(), (
        "in one Worker nothing moves"
    )


def test_what_is_not_where_it_was_declared_is_refused(tiny: Path, options: Options) -> None:
    worker, batch = alone(tiny, options), some([1])
    with pytest.raises(
        KernelError, match="states: column 'hidden' is declared device, and is no tensor"
    ):
        worker.keep("states", batch.on_host())
    wrong = Batch(
        batch.keys, batch.records, batch.device | {"total": batch.device["total"].float()}
    )
    with pytest.raises(
        KernelError, match=r"states: column 'total': expected torch.float64, found torch.float32"
    ):
        worker.keep("states", wrong)


def test_values_that_are_not_finite_name_their_row(tiny: Path, options: Options) -> None:
    from dataflow.kernel import Chunk, KernelNode, Layout
    from operators.kernels.host import ColumnFunction

    def broken(rows: Columns[Hidden]) -> Columns[Hidden]:
        values = rows["hidden"].values.clone()
        values[4, 7] = torch.inf
        return rows.set(hidden=rows["hidden"].like(values))

    kernel, batch = ColumnFunction(), some([2, 0, 3])
    node = KernelNode(
        name="n", operator="n", function=broken, schemas={"rows": Hidden}, returns=("hidden",)
    )
    kernel.open(node, Layout(), None)  # type: ignore[arg-type]
    with pytest.raises(
        KernelError, match=r"\(2, 0, 0\): column 'hidden' has a value that is not finite"
    ):
        list(kernel.run(Chunk(id=1, step=0, keys=batch.keys, inputs={"rows": batch})))
    node = KernelNode(
        name="n",
        operator="n",
        function=lambda rows: rows,
        schemas={"rows": Hidden},
        returns=("total",),
    )
    kernel.open(node, Layout(), None)  # type: ignore[arg-type]
    (made,) = kernel.run(Chunk(id=1, step=0, keys=batch.keys, inputs={"rows": batch}))
    assert made.device.keys() == {"total"}, (
        "nobody reads the other, which would take room on the device"
    )


def test_peek_shows_values(tiny: Path) -> None:
    table = peek(steering(tiny), "states", rows=2)
    assert table["hidden"].type.value_type == pa.list_(pa.float32(), WIDTH)
    assert np.isfinite(table["total"].to_numpy()).all()
    assert len(table) == 2


def test_a_fetch_alone_brings_lengths(tiny: Path, options: Options) -> None:
    worker, batch = alone(tiny, options), some([2, 1])
    ref = worker.keep("states", batch)
    (found,) = worker.channel.fetch([BlockRequest(worker="main", block=ref.block)])
    assert found.nbytes < batch.device["hidden"].nbytes / 10
