"""Columns declared `device`: what may be one, their rows and hashes, what plans do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys, Ragged
from dataflow.check import check
from dataflow.errors import DataError, GraphError, PlanError
from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.node import Port
from dataflow.schema import Reward, Rollout, Schema, column
from dataflow.user import Columns, operator
from engine.channels.tensors.column_hashes import of_tensors, on_device
from engine.plan.cluster import Cluster, Host
from engine.plan.plan import Plan
from engine.run.worker.row_digest import row_digests
from operators.losses import policy_gradient_loss
from operators.reward import reward
from tests.kit.graphs import compared, graph_of, sampled
from tests.kit.plans import headers, planned_on
from tests.kit.rewards import exact
from tests.kit.turns import example_count


class DeviceFloats(Schema):
    row = "completion"
    hidden = column(pa.list_(pa.float32(), 3), "T", device=True)
    top = column(pa.int64(), "T", device=True)
    total = column(pa.float64(), device=True)
    norm = column(pa.float32())


def distinct(lengths: Sequence[int]) -> Batch:
    """Rows whose values are all different."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count, rows = int(offsets[-1]), len(lengths)
    columns = {
        "hidden": Ragged(torch.arange(3.0 * count).reshape(-1, 3), offsets),
        "top": Ragged(torch.arange(count), offsets),
        "total": torch.arange(rows, dtype=torch.float64),
        "norm": np.arange(rows, dtype=np.float32),
    }
    return Batch.make(Keys.of(range(rows)), columns, DeviceFloats)


def values(batch: Batch) -> list[dict[str, Any]]:
    """Row by row, as Python has them."""
    return batch.on_host().records.to_pylist()


def test_a_schema_says_what_is_on_a_device() -> None:
    assert "hidden: 3 floats per completion token on its device" in DeviceFloats.describe()
    assert DeviceFloats.columns["hidden"].arrow.type == pa.large_list(pa.null())
    assert DeviceFloats.columns["total"].arrow.type == pa.null()
    assert DeviceFloats.columns["hidden"].whole.type.value_type == pa.list_(pa.float32(), 3)


@pytest.mark.parametrize(
    "kind", [pa.utf8(), pa.bool_(), pa.uint16(), pa.list_(pa.float32()), pa.list_(pa.utf8(), 2)]
)
def test_what_no_tensor_is_cannot_be_on_a_device(kind: pa.DataType) -> None:
    with pytest.raises(
        GraphError, match=r"expected a number, or a fixed-size list of one, .* Fix: pa.float32"
    ):
        column(kind, device=True)


def test_nulls_and_other_places_are_refused() -> None:
    with pytest.raises(GraphError, match="no tensor has nulls"):
        column(pa.float32(), device=True, nullable=True)
    with pytest.raises(
        GraphError, match=r"schema Mine: has 'reward' on a device, .* extends, on the host"
    ):

        class Mine(Reward):
            reward = column(pa.float32(), device=True)


@settings(max_examples=example_count(40))
@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_rows_keep_their_values(data: st.DataObject, lengths: list[int]) -> None:
    batch, count = distinct(lengths), len(lengths)
    expected = values(batch)
    for i, row in enumerate(expected):
        for name in ("hidden", "top"):
            assert row[name] == batch.tensor(name)[i].tolist()
        assert (row["total"], row["norm"]) == (batch.device["total"][i], batch.flat("norm")[i])
    chosen = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=8)), dtype=np.int64)
    part = batch.take(chosen)
    assert values(part) == [expected[i] for i in chosen]
    assert (row_digests(part) == row_digests(batch)[chosen]).all()
    cut = data.draw(st.integers(0, count))
    joined = Batch.concat([batch.take(np.arange(cut)), batch.take(np.arange(cut, count))])
    assert values(joined) == expected
    assert (row_digests(joined) == row_digests(batch)).all()
    assert not batch.on_host().device


def test_neighbours_are_views_and_columns_are_shared() -> None:
    batch = distinct([2, 0, 3, 1])
    part = batch.take(np.arange(1, 3))
    assert part.device["hidden"].data_ptr() == batch.device["hidden"][2:].data_ptr()
    assert batch.select(["hidden", "norm"]).device.keys() == {"hidden"}
    assert batch.select(["hidden"]).device["hidden"] is batch.device["hidden"]
    assert batch.with_columns({"hidden": pa.array([1, 2, 3, 4])}).device.keys() == {"top", "total"}
    assert batch.nbytes > sum(t.nbytes for t in batch.device.values()) == 6 * 12 + 6 * 8 + 4 * 8


SOMEWHERE_ELSE: dict[str, tuple[Callable[[Batch], Any], str]] = {
    "on the host": (
        lambda batch: batch.ragged("hidden"),
        r"'hidden' is declared device.* Fix: batch\.tensor",
    ),
    "on a device": (lambda batch: batch.tensor("norm"), "'norm' is not declared device"),
    "nowhere": (lambda batch: batch.tensor("other"), "no column 'other'"),
    "in a file": (
        Batch.with_keys,
        r"columns on a device: hidden, top, total\. Fix: batch\.on_host",
    ),
    "for other rows": (
        lambda batch: Batch(batch.keys, batch.records, {"top": torch.zeros(2)}),
        "its rows have 3 values, found 2",
    ),
}


@pytest.mark.parametrize("where", SOMEWHERE_ELSE)
def test_columns_are_asked_for_where_they_are(where: str) -> None:
    ask, told = SOMEWHERE_ELSE[where]
    with pytest.raises(DataError, match=told):
        ask(distinct([2, 1]))


TWO = np.array([0, 1, 2])
DOUBLES, VECTORS = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 3)
NARROW = r"expected torch.float64, found torch.float32. Fix: .to\(torch.float64\)"
SHAPE = r"expected the shape \[values, 3\], found \[2, 4\]"
SHORT = "offsets that ascend from 0 to its 3 values, found 0 to 2"
UNDECLARED = r"'norm' is given as a tensor, and is not declared device. Fix: .numpy"
WRONG: dict[str, tuple[str, Any, str]] = {
    "NumPy": ("total", np.zeros(2), "expected a torch tensor, found ndarray"),
    "dtype": ("total", torch.zeros(2), NARROW),
    "shape": ("hidden", Ragged(torch.zeros(2, 4), TWO), SHAPE),
    "a scalar": ("total", torch.zeros((), dtype=torch.float64), "expected the shape"),
    "rows": ("total", torch.zeros(3).double(), "expected a value for each of 2 rows, found 3"),
    "values": ("hidden", Ragged(torch.zeros(3, 3), TWO), SHORT),
    "descending": ("hidden", Ragged(VECTORS, np.array([0, 3, 2])), "offsets that ascend"),
    "no offsets": ("hidden", VECTORS, "expected Ragged"),
    "offsets": ("total", Ragged(DOUBLES, TWO), "expected one tensor for all rows"),
    "not declared": ("norm", torch.zeros(2), UNDECLARED),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_as_declared_is_refused(name: str) -> None:
    where, given_, said = WRONG[name]
    with pytest.raises(DataError, match=said):
        Batch.make(Keys.of(range(2)), {where: given_}, DeviceFloats)


def test_a_users_function_sees_tensors() -> None:
    columns = Columns(distinct([2, 1]), DeviceFloats)
    hidden, total = columns["hidden"], columns["total"]
    assert isinstance(total, torch.Tensor)
    assert (hidden.values.shape, hidden.lengths.tolist()) == ((3, 3), [2, 1])
    grown = torch.zeros(2, dtype=torch.float64, requires_grad=True) + 1
    changed = columns.set(hidden=hidden.like(hidden.values * 2), total=grown)
    assert torch.equal(changed["hidden"].values, hidden.values * 2)
    assert changed["top"].values.data_ptr() == columns["top"].values.data_ptr()
    assert not changed["total"].requires_grad


DTYPES = [torch.float32, torch.float16, torch.uint8, torch.int64]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from(DTYPES))
def test_hashes_on_a_device_are_of_rows_wherever_they_lie(
    lengths: list[int], dtype: torch.dtype
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    whole = Ragged(torch.zeros(int(offsets[-1]), 2, dtype=dtype), offsets)
    hashed = on_device(whole)
    assert len(set(hashed.tolist())) == len(set(lengths)), "zeros of one length are equal"
    if any(lengths):
        whole.values[-1, -1] = 1
        changed = np.flatnonzero(on_device(whole) != hashed).tolist()
        assert changed == [np.flatnonzero(lengths)[-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hashes_of_tensors_are_of_their_bits_in_their_order(dtype: torch.dtype) -> None:
    whole = torch.arange(24).to(dtype).reshape(4, 6)
    turned = whole.T.contiguous().T  # the same numbers, which lie otherwise
    one, same, part, none = of_tensors([whole, turned, whole[1:], whole[:0]])
    assert one == same
    assert len({one, part, none}) == 3
    whole[3, 5] += 1
    assert of_tensors([whole, turned]) != [one, one]


@operator()
def states(rollout: Columns[Rollout]) -> Columns[DeviceFloats]: ...


class Seen(Rollout):
    seen = column(pa.float32(), "T", device=True)


@operator()
def looked(rollout: Columns[Rollout]) -> Columns[Seen]: ...


@operator()
def steered(score: Columns[Reward], hidden: Columns[DeviceFloats]) -> Columns[Reward]: ...


@loss()
def beside(now: Now, hidden: Tensors[DeviceFloats]) -> Terms: ...


def graph() -> Graph:
    rollout = sampled(n=4, batch=8, max_tokens=16, max_lag=1)
    hidden = states(looked(rollout))
    score = steered(reward(exact, looked.named("again")(rollout), name="score"), hidden)
    return graph_of(rollout, policy_gradient_loss(compared(rollout, score)) + beside(hidden))


CLUSTER = Cluster(cores=8, memory=2**36)


def planned(hosts: tuple[Host, ...] = (), **options: Any) -> Plan:
    return planned_on(replace(CLUSTER, hosts=hosts), graph(), **options)


APART = {"rollout": "gen", "states": "a,b", "steered": "c", "train_policy": "train"}


def edge(plan: Plan, producer: str, consumer: str) -> Any:
    return next(e for e in plan.edges if (e.producer, e.consumer) == (producer, consumer))


def test_values_go_by_collectives_to_those_who_declare_them(tiny: None) -> None:
    plan = planned(pin=APART)
    states_to_steered = edge(plan, "states", "steered")
    assert states_to_steered.device == ("hidden", "top", "total")
    assert states_to_steered.route == "shm + collective (hidden, top, total)"
    assert states_to_steered.bytes == 32 * (8 + 16 * 12 + 8 + 16 * 8 + 8 + 4)
    assert edge(plan, "rollout", "looked").device == ()
    assert "seen" not in edge(plan, "looked", "states").columns, "states declares a Rollout"
    assert "seen" not in edge(plan, "again", "score").columns
    assert plan.node("states").estimate.bytes.keys() == {"outbox", "device_columns"}
    assert "completion_ids" in plan.node("looked").returns
    assert "seen" not in plan.node("looked").returns


def test_worlds_are_of_those_who_read_and_of_the_recorder(tiny: None) -> None:
    plan = planned(pin=APART)
    readers = {"c", "train", plan.recorder}
    assert plan.worlds >= {(made, reader) for made in "ab" for reader in readers if made != reader}
    assert not {w for w in plan.worlds if "gen" in w}
    assert not planned(workers="one").worlds


def test_other_hosts_are_refused(tiny: None) -> None:
    there = (Host(name="x", cores=8, memory=2**36), Host(name="y", cores=8, memory=2**36))
    told = (
        r"device: states in a has hidden, top, total on a device of x, steered in c reads it on y:"
        r" collectives stay.* Fix: pin states=a@y\."
    )
    with pytest.raises(PlanError, match=told):
        planned(hosts=there, pin=APART | {"steered": "c@y"})


def test_turns_are_refused(tiny: None) -> None:
    with pytest.raises(
        PlanError, match=r"device: states has hidden.* that a, train have by turns. Fix: pin states"
    ):
        planned(pin=APART, turns=(("a", "train"),))


def sees(completions: Sequence[str], seen: Sequence[float]) -> list[float]: ...


def trained_on(rollout: Port[Rollout], score: Port[Reward] | None = None) -> Graph:
    return graph_of(rollout, policy_gradient_loss(compared(rollout, score)))


def test_a_reward_function_cannot_read_a_device(tiny: None) -> None:
    rollout = looked(sampled())
    with pytest.raises(
        GraphError, match=r"wants 'seen', which 'looked' has on a device. Fix: an @operator"
    ):
        check(trained_on(rollout, reward(sees, rollout, name="score")), headers)


class Numbered(Rollout):
    prompt = column(pa.int64(), device=True)


@operator()
def numbered(rollout: Columns[Rollout]) -> Columns[Numbered]: ...


def test_what_is_recorded_is_on_no_device(tiny: None) -> None:
    with pytest.raises(
        PlanError, match="device: numbered: 'prompt' is recorded of each Step, from the host"
    ):
        planned_on(CLUSTER, trained_on(numbered(sampled())))
