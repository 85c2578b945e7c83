"""Records of a run: what was told and made comes back, and the first cell that differs is found."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError, Fault, GraphError, PlanError, RunError
from dataflow.memory_limits import MemoryLimits
from dataflow.schema import Advantage
from engine.cli import main
from engine.keep.checkpoint.store import CheckpointStore
from engine.keep.record.assignments import LATER, Assignments, step_file
from engine.keep.record.place import (
    RecordPlace,
    begin_life,
    node_folder,
    nodes_in,
    require_recordable,
    row_file,
    row_files,
)
from engine.keep.record.recorder import RowRecorder
from engine.keep.record.stored_assignments import TaskHistory
from engine.keep.record.stored_rows import (
    StoredRows,
    cut_after,
    read_file,
    recorded_batch,
    was_joined,
)
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, WritingBegan
from engine.protocol.refs import Gather, Ref
from engine.replay.row_equality import first_difference
from tests.kit.plans import plan_of, planned_node
from tests.kit.plans import ref as ref_of
from tests.kit.turns import example_count

PLAN = plan_of(
    planned_node("made", source="made", workers=("w",)),
    planned_node("learn", work="train", region="step", relation="sink", source="made"),
)


def ref(block: int, *positions: int) -> Ref:
    return ref_of(positions, block)


def chunk(number: int, *positions: int, again: bool = False) -> m.RunChunk:
    keys = Keys.of(positions)
    return m.RunChunk(id=number, node="made", worker="w", step=0, keys=keys, again=again)


def train(number: int, *blocks: Ref) -> m.TrainStep:
    """Of Step 1, on all rows of these blocks."""
    sizes = [len(each.keys) for each in blocks]
    gather = Gather(
        producer="made",
        columns=("x",),
        refs=tuple((each.worker, each.block) for each in blocks),
        block=np.repeat(np.arange(len(blocks)), sizes),
        row=np.concatenate([np.arange(size) for size in sizes]),
    )
    keys = Keys.concat([each.keys for each in blocks])
    inputs = {"rows": (gather,)}
    return m.TrainStep(id=number, node="learn", worker="main", step=1, keys=keys, inputs=inputs)


def tell(assignments: Assignments, *told: Any) -> None:
    """Instructions, events, and what else the loop emits."""
    for each in told:
        if isinstance(each, m.Produced | m.Stepped):
            assignments.take(EventHeard(at=0.0, event=each))
        elif isinstance(each, WritingBegan):
            assignments.take(each)
        else:
            assignments.take(InstructionTold(at=0.0, instruction=each))


def made(number: int, block: Ref) -> m.Produced:
    return m.Produced(id=number, node="made", ref=block)


def stepped(number: int) -> m.Stepped:
    return m.Stepped(id=number, node="learn", step=1, worker="main", digest="digest 1")


def closed(step: int) -> m.StepClosed:
    return m.StepClosed(step=step, metrics={})


def write(place: RecordPlace, number: int, *positions: int, value: float = 0.5) -> None:
    """The rows of a chunk, as a Worker records them."""
    recorder = RowRecorder(place, "w", PLAN)
    counts = np.arange(len(positions) + 1) * 2
    columns = {"advantage": Ragged(np.full(counts[-1], value, np.float32), counts)}
    recorder.add(chunk(number), Batch.make(Keys.of(positions), columns, Advantage), 3)
    recorder.end(chunk(number))
    recorder.close()


def recorded(place: RecordPlace, *told: Any) -> None:
    """The files of a run that was told this."""
    assignments = Assignments(PLAN, place.folder, place.life)
    tell(assignments, *told)
    assignments.close()


@pytest.fixture
def place(tmp_path: Path) -> RecordPlace:
    return RecordPlace(folder=tmp_path, nodes=("made",), life=begin_life(tmp_path))


def told_in(place: RecordPlace, until: int | None = None) -> TaskHistory:
    return TaskHistory.read(place.folder, PLAN, until)


def found_in(place: RecordPlace, *positions: int) -> pa.Table:
    """The recorded rows of these positions."""
    rows, missing = StoredRows(place.folder, told_in(place)).find("made", Keys.of(positions), 0)
    assert not missing
    return rows


def test_lowered_limits_come_back_with_their_tasks(place: RecordPlace) -> None:
    block, limits = ref(0, 4), MemoryLimits(slots=3, tokens=40, recompute="layers")
    recorded(
        place,
        *(replace(chunk(0, 4), limits=limits), made(0, block), chunk(1, 6)),
        *(replace(train(2, block), limits=limits), stepped(2), closed(1)),
    )
    assert [task.limits for task in told_in(place).tasks] == [limits, None, limits]
    # Files that were written before there were limits in them.
    path = step_file(place.folder, 1)
    pq.write_table(pq.read_table(path).drop_columns(list(LATER[-3:])), path)
    assert [task.limits for task in told_in(place).tasks] == [None] * 3


def test_what_was_told_comes_back_with_the_keys_of_gathered_rows(place: RecordPlace) -> None:
    first, second = ref(0, 4, 5), ref(1, 6)
    recorded(
        place,
        *(chunk(0, 4, 5), made(0, first), chunk(1, 6), made(1, second)),
        *(train(2, second, first), stepped(2), closed(1)),
        *(m.Release(worker="w", blocks=(0, 1)), chunk(3, 7)),  # Step 2 never closes
    )
    record = told_in(place)
    assert [(task.kind, task.id, task.closed) for task in record.tasks] == [
        ("chunk", 0, 1), ("chunk", 1, 1), ("train", 2, 1)
    ]  # fmt: skip
    trained = record.tasks[-1]
    assert (trained.done, trained.digest) == (True, "digest 1")
    (gather,) = trained.gathers
    assert (gather.producer, gather.columns) == ("made", ("x",))
    assert gather.keys.position.tolist() == [6, 4, 5]
    assert record.makers("made", (5, 0, 0), 0) == record.tasks[:1]
    assert record.step_of("made", (5, 0, 0), record.tasks[0]) == 1
    assert record.step_of("made", (7, 0, 0), record.tasks[0]) == 0


def test_spans_and_weights_come_back_and_older_files_have_none(place: RecordPlace) -> None:
    spans, weights = np.array([[0, 2], [3, 4]], np.int32), np.array([0.5, 2.0], np.float32)
    told = replace(chunk(0, 4, 5), spans=spans, weights=weights)
    recorded(place, told, made(0, ref(0, 4, 5)), chunk(1, 6), made(1, ref(1, 6)), closed(1))
    first, second = told_in(place).tasks
    assert first.spans is not None
    assert first.weights is not None
    assert (first.spans.tolist(), first.weights.tolist()) == (spans.tolist(), weights.tolist())
    assert (second.spans, second.weights) == (None, None)
    path = step_file(place.folder, 1)
    pq.write_table(pq.read_table(path).drop_columns(list(LATER)), path)
    assert [(task.spans, task.weights) for task in told_in(place).tasks] == [(None, None)] * 2


def test_chunks_that_are_made_together_are_recorded_each_by_itself(place: RecordPlace) -> None:
    recorder = RowRecorder(place, "w", PLAN)
    one, other = chunk(0, 4, 5), chunk(1, 6)
    for each, position in ((one, 4), (other, 6), (one, 5)):
        columns = {"advantage": Ragged(np.ones(1, np.float32), np.array([0, 1]))}
        recorder.add(each, Batch.make(Keys.of([position]), columns, Advantage), 3)
    recorder.end(other)
    recorder.flush()
    recorder.end(one, joined=True)
    recorder.close()
    recorded(place, one, other, made(0, ref(0, 4, 5)), made(1, ref(1, 6)), closed(1))
    tasks = told_in(place)
    rows = StoredRows(place.folder, tasks)
    tables = [rows.of_task("made", task) for task in tasks.tasks]
    assert [len(table) for table in tables if table is not None] == [2, 1]
    assert [was_joined(table) for table in tables if table is not None] == [True, False]


def test_a_share_of_a_step_comes_back(place: RecordPlace) -> None:
    block = ref(0, 1, 2, 3)
    whole, mine = train(1, block), np.array([0, 2], np.int32)
    (gather,) = whole.inputs["rows"]
    share = replace(
        whole, keys=whole.keys.take(mine), mine=mine, total=len(whole.keys),
        inputs={"rows": (replace(gather, block=np.zeros(2, int), row=mine),)},
        others={"demos": m.OwnRows(keys=Keys.of([9]))},
    )  # fmt: skip
    recorded(place, chunk(0, 1, 2, 3), made(0, block), share, stepped(1), closed(1))
    task = told_in(place).tasks[-1]
    assert task.keys.position.tolist() == [1, 3]
    rows = task.rows["rows"]
    assert (rows.mine.tolist(), rows.count) == ([0, 2], 3)
    assert task.rows["demos"].keys.position.tolist() == [9]
    assert task.gathers[0].keys is task.keys


def test_a_step_that_closes_twice_keeps_all_lines(place: RecordPlace) -> None:
    recorded(place, chunk(0, 1), closed(1), chunk(1, 2), closed(1))
    assert [task.id for task in told_in(place).tasks] == [0, 1]


def test_a_checkpoint_has_what_was_made_since_its_step_closed(place: RecordPlace) -> None:
    begins = WritingBegan(of=m.Checkpoint(step=1, sources={}, rows={}), at=0.0)
    recorded(place, closed(1), chunk(1, 1), made(1, ref(0, 1)), begins, chunk(2, 2), closed(2))
    assert [task.id for task in told_in(place, 1).tasks] == [1]
    cut_after(place.folder, PLAN, 1)
    assert [task.id for task in told_in(place).makers("made", (1, 0, 0), 0)] == [1]


def test_the_cut_leaves_each_row_once(place: RecordPlace) -> None:
    recorded(
        place,
        *(chunk(0, 1, 2), made(0, ref(0, 1, 2)), chunk(1, 1, 2, again=True)),
        *(made(1, ref(1, 1, 2)), chunk(3, 4, 5), made(3, ref(3, 4)), closed(1)),
        *(chunk(2, 3), made(2, ref(2, 3)), made(3, ref(4, 5)), closed(2)),
    )
    for number, rows in ((0, (1, 2)), (1, (1, 2)), (2, (3,)), (3, (4, 5)), (9, (8,))):
        write(place, number, *rows)
    node_folder(place.folder, "made").joinpath(".1-1-1-w.parquet.tmp").write_bytes(b"torn")
    cut_after(place.folder, PLAN, 1)
    files = row_files(place.folder, "made")
    left = {file.first: read_file(file.path)["key.position"].to_pylist() for file in files}
    assert left == {0: [1, 2], 3: [4]}
    assert not step_file(place.folder, 2).exists()
    assert not list(place.folder.rglob("*.tmp"))
    rows = found_in(place, 4, 1)
    assert rows["key.position"].to_pylist() == [4, 1]
    assert rows["made.version"].to_pylist() == [3, 3]
    assert rows["made.step"].to_pylist() == [None, None]
    assert recorded_batch(rows).ragged("advantage").values.tolist() == [0.5] * 4


def test_rows_that_only_a_later_chunk_has_on_the_disk_are_found_there(place: RecordPlace) -> None:
    """The first one's Worker died before they were written."""
    first, again = made(0, ref(0, 1)), made(1, ref(1, 1))
    recorded(place, chunk(0, 1), first, chunk(1, 1, again=True), again, closed(1))
    write(place, 1, 1, value=2.0)
    assert found_in(place, 1)["made.chunk"].to_pylist() == [1]


@pytest.mark.parametrize("length", [0, 4, 40])
def test_damaged_assignments_are_named(place: RecordPlace, length: int) -> None:
    recorded(place, chunk(0, 1), closed(1))
    os.truncate(step_file(place.folder, 1), length)
    with pytest.raises(DataError, match=r"step_000001\.parquet: expected assignments of a run"):
        told_in(place)


def test_a_damaged_file_stays_and_does_not_keep_a_run_from_going_on(
    place: RecordPlace, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(place, chunk(0, 1), made(0, ref(0, 1)), chunk(1, 2), made(1, ref(1, 2)), closed(1))
    for number in (0, 1, 9):
        write(place, number, number + 1)
    damaged, good, stale = (file.path for file in row_files(place.folder, "made"))
    damaged.write_bytes(b"torn")
    cut_after(place.folder, PLAN, 1)
    assert damaged.read_bytes() == b"torn"
    assert (good.exists(), stale.exists()) == (True, False)
    assert f"cannot use it: {damaged}: expected recorded rows" in caplog.text
    write(place, 9, 10)
    os.truncate(step_file(place.folder, 1), 10)
    cut_after(place.folder, PLAN, 1)
    assert (good.exists(), stale.exists()) == (True, True)
    assert "step_000001.parquet: expected assignments of a run" in caplog.text


def test_rows_and_assignments_of_another_form_are_named(place: RecordPlace) -> None:
    recorded(place, chunk(0, 1), closed(1))
    write(place, 0, 1)
    (rows,) = (file.path for file in row_files(place.folder, "made"))
    pq.write_table(pq.read_table(rows).drop_columns("made.chunk"), rows)
    with pytest.raises(DataError, match=r"damaged file \(no whole numbers made.chunk\)"):
        read_file(rows)
    assigned = step_file(place.folder, 1)
    table = pq.read_table(assigned)
    events = pa.array(["gather"] * len(table))
    at = table.schema.get_field_index("event")
    pq.write_table(table.set_column(at, table.schema.field("event"), events), assigned)
    with pytest.raises(DataError, match="expected assignments as a run writes them"):
        told_in(place)


@pytest.mark.parametrize("text", ["", "one", "-3", "0", "2147483647", "9" * 30, "9" * 5000])
def test_a_life_that_no_run_has_is_one_clear_error(tmp_path: Path, text: str) -> None:
    begin_life(tmp_path)
    (tmp_path / "_life").write_text(text)
    message = r"_life: expected the number of the run's life, found .* Fix: --record \"\" goes on"
    with pytest.raises(RunError, match=message):
        begin_life(tmp_path)


@given(name=st.text(min_size=1, max_size=20), worker=st.text(min_size=1, max_size=8))
def test_any_name_of_a_node_is_a_folder_of_its_own(name: str, worker: str) -> None:
    path = row_file(Path("r"), name, life=1, first=2, last=3, worker=worker)
    assert len(path.parts) == 3
    assert path.parts[1][0] not in "._"


def test_nodes_are_named_as_in_the_graph(tmp_path: Path) -> None:
    names = [".hidden", "_assignments", "a/b", "rollout"]
    for name in names:
        node_folder(tmp_path, name).mkdir(parents=True)
    begin_life(tmp_path)
    assert nodes_in(tmp_path) == names


@pytest.mark.parametrize("text, told", [
    ("mde", "no node 'mde'. Fix: made."),
    ("made,learn", "'learn' makes no rows; how it was told to run is recorded in any case."),
])  # fmt: skip
def test_what_cannot_be_recorded_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError) as refused:
        require_recordable([PLAN], text)
    assert told in str(refused.value)
    require_recordable([PLAN], "made, all")


# cells


def bits(row: Any) -> Any:
    """A list of float32 as their bits; None for none."""
    return None if row is None else [struct.pack("<f", value) for value in row]


FLOATS = st.floats(width=32)
ROW = st.one_of(st.none(), st.lists(FLOATS, max_size=4))


@settings(max_examples=example_count(200))
@given(st.lists(st.tuples(ROW, ROW), min_size=1, max_size=6))
def test_the_first_list_that_differs_is_found(rows: list[tuple[Any, Any]]) -> None:
    kind = pa.large_list(pa.float32())
    a, b = (pa.table({"x": pa.array(side, kind)}) for side in zip(*rows, strict=True))
    exact = [(bits(one), bits(other)) for one, other in rows]
    wanted = next((n for n, (one, other) in enumerate(exact) if one != other), None)
    found = first_difference(a, b, ["x"])
    assert (None if found is None else found.row) == wanted
    if found is not None and found.at is not None:
        one, other = exact[found.row]
        assert one[: found.at] == other[: found.at]
        assert one[found.at] != other[found.at]


@given(st.lists(st.one_of(st.none(), FLOATS), min_size=1))
def test_equal_bits_are_equal_whatever_they_mean(values: Any) -> None:
    table = pa.table({"x": pa.array(values, pa.float32()), "y": [str(v) for v in values]})
    assert first_difference(table, table.slice(0), ["x", "y"]) is None


A = {"x": [1.0, 0.0], "y": ["a", "b"], "z": [[1], [2]]}
B = {"x": [1.0, -0.0], "y": ["A", "b"], "z": [[1], [2, 5]]}


@pytest.mark.parametrize(("columns", "row", "message"), [
    ("xyz", 0, "y: 'a' and 'A'"),  # the first row counts before the first column
    ("x", 1, "x: 0.0 and -0.0"),
    ("z", 1, "z: '1 elements' and '2 elements'"),
])  # fmt: skip
def test_the_first_difference_is_told(columns: str, row: int, message: str) -> None:
    difference = first_difference(pa.table(A), pa.table(B), [*columns])
    assert (difference.row, str(difference)) == (row, message)


# checkpoints that a rerun begins from


def test_checkpoints_for_good_stay_and_displace_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)

    def write(step: int, **how: bool) -> None:
        store.write(step, lambda folder: None, {}, **how)

    write(2)
    write(3, for_good=True)
    write(4, timed=True)
    assert store.steps() == [2, 3, 4]
    write(5)
    write(6, for_good=True)
    write(7)
    assert CheckpointStore(tmp_path, keep=1).steps() == [3, 4, 6, 7]
    store.truncate_after(3)
    assert store.steps() == [3]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("a damaged file"), 3),
        (RunError("rows that were not recorded"), 3),
        (GraphError(Fault(rule="snapshot", where="graph.json", problem="x", fix="y")), 3),
        (GraphError(Fault(rule="setting", where="setting 'a.b=1'", problem="x", fix="y")), 2),
    ],
)
def test_what_keeps_a_rerun_from_comparing_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def again(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr("engine.replay.rerun.rerun_nodes", again)
    assert main(["rerun", str(tmp_path), "--node", "made", "--step", "1"]) == code
