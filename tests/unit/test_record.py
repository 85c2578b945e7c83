"""Records of a run: what was told and made comes back, and the first cell that differs is found."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError, PlanError
from dataflow.schema import Advantage
from engine.checkpoint.store import CheckpointStore
from engine.coordinator import messages as m
from engine.coordinator.refs import Gather, Ref
from engine.observe.events import EventHeard, InstructionTold, WritingBegan
from engine.plan.plan import PlannedNode
from engine.record.assignments import Assignments, step_file
from engine.record.place import (
    RecordPlace,
    begin_life,
    folder_of,
    nodes_in,
    require_known,
    row_file,
    row_files,
)
from engine.record.recorder import RowRecorder
from engine.record.stored_rows import StoredRows, batch_of, cut_after, read_file
from engine.record.told import Told
from engine.rerun.same import first_difference
from tests.kit.plans import plan_of

NODES = (
    PlannedNode(name="made", operator="made", work="host", scope="row", region="stream",
                relation="same", source="made", workers=("w",)),
    PlannedNode(name="learn", operator="train", work="train", scope="batch", region="step",
                relation="sink", source="made"),
)  # fmt: skip
PLAN = plan_of(*NODES)


def ref(block: int, *positions: int) -> Ref:
    keys = Keys.of(positions)
    zeros = np.zeros(len(keys), np.int64)
    return Ref(worker="w", block=block, keys=keys, lengths=zeros, version=zeros.astype(np.int32))


def chunk(number: int, *positions: int, again: bool = False) -> m.RunChunk:
    keys = Keys.of(positions)
    return m.RunChunk(id=number, node="made", worker="w", step=0, keys=keys, again=again)


def train(number: int, step: int, *blocks: Ref) -> m.TrainStep:
    keys = Keys.concat([each.keys for each in blocks])
    index = np.repeat(np.arange(len(blocks)), [len(each.keys) for each in blocks])
    row = np.concatenate([np.arange(len(each.keys)) for each in blocks])
    refs = tuple((each.worker, each.block) for each in blocks)
    gather = Gather(producer="made", columns=("x",), refs=refs, block=index, row=row)
    given: dict[str, Any] = {"keys": keys, "inputs": {"rows": (gather,)}}
    return m.TrainStep(id=number, node="learn", worker="main", step=step, **given)


def tell(assignments: Assignments, *told: Any) -> None:
    """Instructions and events, as the loop emits them."""
    for each in told:
        heard = isinstance(each, m.Produced | m.Stepped)
        event: Any = EventHeard(at=0.0, event=each) if heard else None
        assignments.take(event or InstructionTold(at=0.0, instruction=each))


def made(number: int, block: Ref) -> m.Produced:
    return m.Produced(id=number, node="made", ref=block)


def stepped(number: int, step: int) -> m.Stepped:
    return m.Stepped(id=number, node="learn", step=step, worker="main", digest=f"digest {step}")


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


def place_in(folder: Path) -> RecordPlace:
    return RecordPlace(folder=folder, nodes=("made",), life=begin_life(folder))


def test_what_was_told_comes_back_with_the_keys_of_gathered_rows(tmp_path: Path) -> None:
    place, blocks = place_in(tmp_path), (ref(0, 4, 5), ref(1, 6))
    assignments = Assignments(PLAN, tmp_path, place.life)
    tell(assignments, chunk(0, 4, 5), made(0, blocks[0]), chunk(1, 6), made(1, blocks[1]))
    tell(assignments, train(2, 1, *reversed(blocks)), stepped(2, 1), closed(1))
    tell(assignments, m.Release(worker="w", blocks=(0, 1)), chunk(3, 7))  # Step 2 never closes
    assignments.close()
    told = Told.read(tmp_path, PLAN)
    assert [(task.kind, task.id, task.closed) for task in told.tasks] == [
        ("chunk", 0, 1), ("chunk", 1, 1), ("train", 2, 1)
    ]  # fmt: skip
    trained = told.tasks[-1]
    assert trained.done
    assert trained.digest == "digest 1"
    (gather,) = trained.gathers
    assert (gather.producer, gather.columns) == ("made", ("x",))
    assert gather.keys.position.tolist() == [6, 4, 5]
    assert [task.id for task in told.makers("made", (5, 0, 0), 0)] == [0]
    assert told.step_of("made", (5, 0, 0), told.tasks[0]) == 1
    assert told.step_of("made", (7, 0, 0), told.tasks[0]) == 0


def test_a_share_of_a_step_comes_back(tmp_path: Path) -> None:
    place, block = place_in(tmp_path), ref(0, 1, 2, 3)
    assignments = Assignments(PLAN, tmp_path, place.life)
    whole = train(1, 1, block)
    mine = np.array([0, 2], np.int32)
    own = Gather(**{**vars_of(whole.inputs["rows"][0]), "block": np.zeros(2, int), "row": mine})
    share = m.TrainStep(
        id=1, node="learn", worker="main", step=1, keys=whole.keys.take(mine),
        inputs={"rows": (own,)}, mine=mine, total=len(whole.keys),
        others={"demos": m.OwnRows(keys=Keys.of([9]))},
    )  # fmt: skip
    tell(assignments, chunk(0, 1, 2, 3), made(0, block), share, stepped(1, 1), closed(1))
    assignments.close()
    task = Told.read(tmp_path, PLAN).tasks[-1]
    assert task.keys.position.tolist() == [1, 3]
    rows = task.rows["rows"]
    assert rows.mine is not None
    assert (rows.mine.tolist(), rows.count) == ([0, 2], 3)
    assert task.rows["demos"].keys.position.tolist() == [9]
    assert task.gathers[0].keys is task.keys


def vars_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def test_a_step_that_closes_twice_keeps_all_lines(tmp_path: Path) -> None:
    assignments = Assignments(PLAN, tmp_path, place_in(tmp_path).life)
    tell(assignments, chunk(0, 1), closed(1), chunk(1, 2), closed(1))
    assignments.close()
    assert [task.id for task in Told.read(tmp_path, PLAN).tasks] == [0, 1]


def test_a_checkpoint_has_what_was_made_since_its_step_closed(tmp_path: Path) -> None:
    place, block = place_in(tmp_path), ref(0, 1)
    assignments = Assignments(PLAN, tmp_path, place.life)
    tell(assignments, closed(1), chunk(1, 1), made(1, block))
    of = m.Checkpoint(step=1, sources={}, rows={})
    assignments.take(WritingBegan(of=of, at=0.0))
    tell(assignments, chunk(2, 2), closed(2))
    assignments.close()
    assert [task.id for task in Told.read(tmp_path, PLAN, 1).tasks] == [1]
    cut_after(tmp_path, PLAN, 1)
    assert [task.id for task in Told.read(tmp_path, PLAN).makers("made", (1, 0, 0), 0)] == [1]


def test_the_cut_leaves_each_row_once(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    assignments = Assignments(PLAN, tmp_path, place.life)
    blocks = {n: ref(n, *rows) for n, rows in {0: (1, 2), 1: (1, 2), 2: (3,), 3: (4, 5)}.items()}
    tell(assignments, chunk(0, 1, 2), made(0, blocks[0]), chunk(1, 1, 2, again=True))
    tell(assignments, made(1, blocks[1]), chunk(3, 4, 5), made(3, ref(3, 4)), closed(1))
    tell(assignments, chunk(2, 3), made(2, blocks[2]), made(3, ref(4, 5)), closed(2))
    assignments.close()
    for number, rows in ((0, (1, 2)), (1, (1, 2)), (2, (3,)), (3, (4, 5)), (9, (8,))):
        write(place, number, *rows)
    folder_of(tmp_path, "made").joinpath(".1-1-1-w.parquet.tmp").write_bytes(b"torn")
    cut_after(tmp_path, PLAN, 1)
    left = {f.first: read_file(f.path)["key.position"].to_pylist() for f in files(tmp_path)}
    assert left == {0: [1, 2], 3: [4]}
    assert not step_file(tmp_path, 2).exists()
    assert not list(tmp_path.rglob("*.tmp"))
    rows, missing = StoredRows(tmp_path, Told.read(tmp_path, PLAN)).find("made", Keys.of([4, 1]), 0)
    assert rows is not None
    assert not missing
    assert rows["key.position"].to_pylist() == [4, 1]
    assert rows["made.version"].to_pylist() == [3, 3]
    assert rows["made.step"].to_pylist() == [None, None]
    assert batch_of(rows).ragged("advantage").values.tolist() == [0.5] * 4


def files(folder: Path) -> list[Any]:
    return row_files(folder, "made")


def test_rows_that_only_a_later_chunk_has_on_the_disk_are_found_there(tmp_path: Path) -> None:
    """The first one's Worker died before they were written."""
    place = place_in(tmp_path)
    assignments = Assignments(PLAN, tmp_path, place.life)
    tell(assignments, chunk(0, 1), made(0, ref(0, 1)), chunk(1, 1, again=True))
    tell(assignments, made(1, ref(1, 1)), closed(1))
    assignments.close()
    write(place, 1, 1, value=2.0)
    rows, _ = StoredRows(tmp_path, Told.read(tmp_path, PLAN)).find("made", Keys.of([1]), 0)
    assert rows is not None
    assert rows["made.chunk"].to_pylist() == [1]


@pytest.mark.parametrize("damage", [lambda data: data[:40], lambda data: b"", lambda data: b"PAR1"])
def test_damaged_assignments_are_named(tmp_path: Path, damage: Any) -> None:
    assignments = Assignments(PLAN, tmp_path, place_in(tmp_path).life)
    tell(assignments, chunk(0, 1), closed(1))
    assignments.close()
    path = step_file(tmp_path, 1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"step_000001\.parquet: expected assignments of a run"):
        Told.read(tmp_path, PLAN)


@given(name=st.text(min_size=1, max_size=20), worker=st.text(min_size=1, max_size=8))
def test_any_name_of_a_node_is_a_folder_of_its_own(name: str, worker: str) -> None:
    path = row_file(Path("r"), name, life=1, first=2, last=3, worker=worker)
    assert len(path.parts) == 3
    assert path.parts[1][0] not in "._"


def test_nodes_are_named_as_in_the_graph(tmp_path: Path) -> None:
    for name in ("a/b", "_assignments", ".hidden", "rollout"):
        folder_of(tmp_path, name).mkdir(parents=True)
    begin_life(tmp_path)
    assert nodes_in(tmp_path) == sorted(["a/b", "_assignments", ".hidden", "rollout"])


@pytest.mark.parametrize("text, told", [
    ("mde", "no node 'mde'. Fix: made."),
    ("made,learn", "'learn' makes no rows; how it was told to run is recorded in any case."),
])  # fmt: skip
def test_what_cannot_be_recorded_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError) as refused:
        require_known([PLAN], text)
    assert told in str(refused.value)
    require_known([PLAN], "made, all")


# cells


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


FLOATS = st.floats(width=32)
LISTS = st.lists(st.one_of(st.none(), st.lists(FLOATS, max_size=4)), min_size=1, max_size=6)


@settings(max_examples=200)
@given(one=LISTS, other=LISTS)
def test_the_first_list_that_differs_is_found(one: Any, other: Any) -> None:
    count = min(len(one), len(other))
    one, other = one[:count], other[:count]
    kind = pa.large_list(pa.float32())
    a, b = (pa.table({"x": pa.array(rows, kind)}) for rows in (one, other))

    def exact(row: Any) -> Any:
        return None if row is None else [bits(value) for value in row]

    wanted = next((n for n in range(count) if exact(one[n]) != exact(other[n])), None)
    found = first_difference(a, b, ["x"])
    assert (None if found is None else found.row) == wanted
    if found is not None and found.at is not None:
        x, y = exact(one[found.row]), exact(other[found.row])
        assert x[: found.at] == y[: found.at]
        assert x[found.at] != y[found.at]


@given(st.lists(st.one_of(st.none(), FLOATS), min_size=1))
def test_equal_bits_are_equal_whatever_they_mean(values: Any) -> None:
    table = pa.table({"x": pa.array(values, pa.float32()), "y": [str(v) for v in values]})
    assert first_difference(table, table.slice(0), ["x", "y"]) is None


def test_zero_and_minus_zero_differ_and_the_first_row_counts_before_the_first_column() -> None:
    a = pa.table({"x": [1.0, 0.0, 2.0], "y": ["a", "b", "c"], "z": [[1], [2], [3]]})
    b = pa.table({"x": [1.0, -0.0, 2.0], "y": ["A", "b", "c"], "z": [[1], [2], [3]]})
    first = first_difference(a, b, ["x", "y", "z"])
    assert first is not None
    assert (first.row, str(first)) == (0, "y: 'a' and 'A'")
    second = first_difference(a, b, ["x", "z"])
    assert second is not None
    assert (second.row, second.column) == (1, "x")
    longer = pa.table({"z": [[1], [2, 5], [3]]})
    third = first_difference(a, longer, ["z"])
    assert third is not None
    assert str(third) == "z: '1 elements' and '2 elements'"


# checkpoints that a rerun begins from


def test_checkpoints_for_good_stay_and_displace_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step, kept, timed in ((2, False, False), (3, True, False), (4, False, True)):
        store.write(step, lambda folder: None, {}, kept=kept, timed=timed)
    assert store.steps() == [2, 3, 4]
    for step in (5, 6, 7):
        store.write(step, lambda folder: None, {}, kept=step == 6)
    assert CheckpointStore(tmp_path, keep=1).steps() == [3, 4, 6, 7]
    store.truncate_after(3)
    assert store.steps() == [3]
