"""The cost model's parts: devices, passes, training, transfers; what holds for all."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import PlanError
from engine.plan.cost.devices import (
    CPU,
    KINDS,
    Device,
    Kind,
    Link,
    Place,
    catalogue,
    catalogue_place,
    coefficients,
    device,
)
from engine.plan.cost.memory import gradient_bytes
from engine.plan.cost.model_passes import Passes, Repeats, Sizes, Time, operations
from engine.plan.cost.models import Shape, formula
from engine.plan.cost.training import Microbatches, forward_time, pack_rows, train_time, update_time
from engine.plan.cost.transfers import rows_time, weights_time
from operators.kernels.torch.packing import first_fit_decreasing

SHAPE = Shape(
    layers=24,
    hidden=896,
    intermediate=4864,
    heads=14,
    kv_heads=2,
    head_dim=64,
    vocabulary=151936,
    context=32768,
    tied=True,
)
MODEL = Sizes(parameters=formula(SHAPE, {"model_type": "qwen2"}), shape=SHAPE)
H100, CORE = device("H100"), device(CPU)

NAMES = st.sampled_from(sorted(catalogue().devices))
PASSES = st.sampled_from(KINDS)
RANKS = st.sampled_from([1, 2, 4, 8])


def seconds(time: Time) -> float:
    """All of it, after what holds for every time."""
    assert min(getattr(time, f.name) for f in fields(time)) >= 0.0
    assert max(time.compute, time.memory) <= time.seconds * (1 + 1e-9)
    parts = time.compute + time.memory + time.link + time.latency
    assert time.seconds <= parts * (1 + 1e-9)
    assert getattr(time, time.bound) >= 0.25 * time.seconds * (1 - 1e-9)
    return time.seconds


def at_most(less: float, more: float) -> bool:
    """Whether one number is no more than the other, but for rounding."""
    return less <= more * (1 + 1e-9)


# Devices


@pytest.mark.parametrize("name", sorted(catalogue().devices))
def test_every_device_says_where_its_numbers_come_from_and_shares_are_shares(name: str) -> None:
    of = device(name)
    assert of.name == name
    assert len(of.source) > 10
    assert set(of.operations) == {"bfloat16", "float32"}
    assert min(*of.operations.values(), of.memory_rate, of.link, of.network) > 0
    assert of.is_gpu is (of.memory > 0) is (name != CPU)
    assert of.network <= of.link
    for each in coefficients(of).values():
        assert all(0 < share <= 1 for share in (each.compute, each.reads, each.link))
        assert min(each.step, each.layer, each.row, each.hop) >= 0


def test_all_gpus_have_the_same_coefficients() -> None:
    first, *others = (coefficients(d) for d in catalogue().devices.values() if d.is_gpu)
    assert len(others) >= 4
    assert others == [first] * len(others)


@pytest.mark.parametrize(("said", "meant"), [("H10", "H100"), ("h200", "H200"), ("L40", "L40S")])
def test_an_unknown_device_names_the_nearest_and_asks_for_a_profile(said: str, meant: str) -> None:
    pattern = rf"device {said}: .*found '{said}'\. Fix: .*{meant}.*dataflow profile GRAPH"
    with pytest.raises(PlanError, match=pattern):
        device(said)


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(PlanError, match=r"device H100: .*'bfloat1'\. Fix: .*bfloat16"):
        catalogue_place(H100).operations("bfloat1")


@given(cores=st.integers(1, 64), ranks=st.tuples(RANKS, RANKS, RANKS))
def test_a_place_counts_its_ranks_and_cores(cores: int, ranks: tuple[int, int, int]) -> None:
    data, tensor, context = ranks
    where = catalogue_place(CORE, cores=cores, data=data, tensor=tensor, context=context)
    assert where.devices == data * tensor * context
    assert where.operations("float32") == cores * CORE.operations["float32"]
    assert (where.between, replace(where, rate=5.0).between) == (CORE.link, 5.0)


# Passes


@given(name=NAMES, kind=PASSES, tokens=st.integers(0, 1 << 17), more=st.integers(0, 1 << 17))
def test_a_pass_grows_with_everything_it_is_given(
    name: str, kind: Kind, tokens: int, more: int
) -> None:
    passes = Passes(MODEL, catalogue_place(device(name)), kind)
    load = {"tokens": tokens, "keys": 8 * tokens, "cached": tokens, "rows": 3.0}
    load["predicted"] = tokens / 2
    before = seconds(passes.at(**load))
    for part in load:
        assert at_most(before, seconds(passes.at(**load | {part: load[part] + more})))


@given(kind=PASSES, tokens=st.integers(1, 1 << 17), name=NAMES)
def test_a_pass_is_no_faster_than_the_rates_allow(kind: Kind, tokens: int, name: str) -> None:
    where = catalogue_place(device(name))
    time = Passes(MODEL, where, kind).at(tokens, tokens * 100.0, cached=tokens * 10.0)
    least = operations(MODEL, tokens, tokens * 100.0, tokens) / where.operations(MODEL.dtype)
    assert time.seconds >= least
    assert time.compute == pytest.approx(least / where.coefficients[kind].compute)
    read = MODEL.read_bytes + tokens * 10.0 * MODEL.cached_bytes
    assert time.seconds >= read / where.device.memory_rate


def one_pass(kind: Kind, tokens: float, of: Device = H100, **where: Any) -> Time:
    """A pass over tokens that attend to nothing."""
    return Passes(MODEL, catalogue_place(of, **where), kind).at(tokens, 0.0)


@given(tensor=st.sampled_from([2, 4, 8]), tokens=st.integers(1, 1 << 16))
def test_tensor_ranks_divide_work_and_pay_for_it(tensor: int, tokens: int) -> None:
    one, many = one_pass("prefill", tokens), one_pass("prefill", tokens, tensor=tensor)
    assert many.compute == pytest.approx(one.compute / tensor)
    assert many.memory == pytest.approx(one.memory / tensor)
    assert one.link == 0.0 < many.link
    assert many.latency > one.latency
    slow = replace(H100, link=H100.link / 10)
    assert one_pass("prefill", tokens, slow, tensor=tensor).link == pytest.approx(10 * many.link)


def test_the_cores_of_a_host_share_its_memory() -> None:
    one, two = one_pass("decode", 1, CORE), one_pass("decode", 1, CORE, tensor=2)
    assert one.memory == two.memory
    assert two.compute == pytest.approx(one.compute / 2)


@given(ranks=st.sampled_from([(2, 2), (7, 14)]), tokens=st.integers(1, 1 << 16))
def test_context_ranks_divide_tokens_and_exchange_heads(
    ranks: tuple[int, int], tokens: int
) -> None:
    context, key_heads = ranks  # fewer heads of keys than ranks are repeated
    one, many = one_pass("train", tokens), one_pass("train", tokens, context=context)
    assert many.compute == pytest.approx(one.compute / context)
    numbers = 24 * 2 * (14 + key_heads) * 64 * (context - 1) / context**2
    assert moved(many) == pytest.approx(tokens * numbers * MODEL.width)


def test_two_tensor_ranks_have_norms_twice_and_tables_that_they_cannot_share() -> None:
    tables = MODEL.table_parameters
    assert 2 * MODEL.part_parameters(2) == 2 * MODEL.parameters - SHAPE.matrices - tables
    odd = replace(MODEL, shape=replace(SHAPE, vocabulary=SHAPE.vocabulary - 1))
    assert 2 * odd.part_parameters(2) == 2 * odd.parameters - SHAPE.matrices
    critic = replace(MODEL, head="scalar")
    assert 2 * critic.part_parameters(2) == 2 * critic.parameters - SHAPE.matrices


def test_sizes_count_every_parameter_once() -> None:
    embedding = SHAPE.vocabulary * SHAPE.hidden
    assert MODEL.body + embedding == MODEL.parameters
    apart = replace(SHAPE, tied=False)
    whole = formula(apart, {"model_type": "qwen2"})
    assert Sizes(parameters=whole, shape=apart).body == MODEL.body
    scalar = Sizes(parameters=MODEL.body + embedding, shape=SHAPE, head="scalar")
    assert scalar.head_parameters == SHAPE.hidden
    assert MODEL.cached_bytes == 2 * 24 * 128 * 2


# Training

ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2000)), min_size=1, max_size=40)


def arrays(lengths: list[tuple[int, int]]) -> np.ndarray:
    """Prompts and answers."""
    return np.array(lengths, dtype=np.int64).T


@given(lengths=ROWS, budget=st.integers(1, 20000), divisor=RANKS)
def test_packing_keeps_tokens_and_keys(
    lengths: list[tuple[int, int]], budget: int, divisor: int
) -> None:
    prompts, answers = arrays(lengths)
    found = pack_rows(prompts, answers, budget=budget, divisor=divisor)
    sizes, most = (prompts + answers).astype(np.float64), math.ceil(len(lengths) / divisor)
    assert found.tokens * divisor == pytest.approx(sizes.sum())
    assert found.keys * divisor == pytest.approx((sizes**2).sum() / 2)
    assert found.predicted * divisor == pytest.approx(answers.sum())
    assert 1 <= found.passes <= max(1, most)
    fitting = np.minimum(sizes, budget).sum()
    assert found.passes * budget * divisor >= fitting * (1 - 1e-9) or found.passes == most
    assert found.rows * divisor >= len(lengths)
    assert found.passes * divisor >= (2 * sizes > budget).sum()


@given(lengths=ROWS, budget=st.integers(300, 20000), shared=st.booleans())
def test_there_are_no_more_micro_batches_than_training_makes(
    lengths: list[tuple[int, int]], budget: int, shared: bool
) -> None:
    prompts, answers = arrays(lengths)
    sizes, group = [*prompts + answers], 1
    if shared:
        prompts[:] = prompts[0]
        sizes, group = [prompts[0], *answers], len(answers)
    found = pack_rows(prompts, answers, budget=budget, shared=group)
    assert found.passes <= len(first_fit_decreasing(sizes, budget))


@given(groups=st.integers(1, 12), shared=st.sampled_from([1, 2, 8]), prompt=st.integers(0, 200))
def test_a_shared_prompt_is_fed_once(groups: int, shared: int, prompt: int) -> None:
    count = groups * shared
    found = pack_rows(*arrays([(prompt, 50)] * count), budget=1 << 20, shared=shared)
    assert found.tokens == pytest.approx(groups * prompt + count * 50)
    # A prompt's tokens attend to each other, an answer's to the prompt and to each other.
    keys = groups * prompt**2 / 2 + count * (50 * prompt + 50**2 / 2)
    assert found.keys == pytest.approx(keys)


@given(lengths=ROWS, more=st.tuples(st.integers(0, 300), st.integers(1, 2000)), name=NAMES)
def test_training_and_forward_passes_grow_with_rows(
    lengths: list[tuple[int, int]], more: tuple[int, int], name: str
) -> None:
    where = catalogue_place(device(name))
    fewer = pack_rows(*arrays(lengths), budget=8192)
    all_of = pack_rows(*arrays([*lengths, more]), budget=8192)
    for one in (forward_time, partial(train_time, updates=2)):
        before, after = seconds(one(MODEL, where, fewer)), seconds(one(MODEL, where, all_of))
        assert at_most(before, after)


@given(lengths=ROWS, updates=st.integers(1, 8), epochs=st.integers(1, 4))
def test_training_is_more_than_a_forward_pass_and_grows_with_epochs_and_updates(
    lengths: list[tuple[int, int]], updates: int, epochs: int
) -> None:
    where, fed = catalogue_place(H100), pack_rows(*arrays(lengths), budget=8192)

    def trained(each: int, times: int, **how: bool) -> Time:
        return train_time(MODEL, where, fed, updates=each * times, epochs=times, **how)

    found, again = trained(updates, epochs), trained(updates, epochs, recomputed=True)
    one = seconds(found)
    assert one > 2 * seconds(forward_time(MODEL, where, fed))
    assert at_most(one, seconds(trained(updates + 1, epochs)))
    assert one < min(seconds(trained(updates, epochs + 1)), seconds(again))
    assert found.compute == pytest.approx(epochs * trained(updates, 1).compute)
    assert again.compute == pytest.approx(found.compute * 4 / 3)


def test_an_update_has_a_micro_batch_at_least() -> None:
    fed = Microbatches(tokens=100.0, keys=0.0, predicted=100.0, passes=1, rows=4)
    one, four = (train_time(MODEL, catalogue_place(H100), fed, updates=count) for count in (1, 4))
    latency = Passes(MODEL, catalogue_place(H100), "train", Repeats(rest=3.0)).at(1, 0.0).latency
    assert four.latency == pytest.approx(one.latency + 3 * latency)


def moved(time: Time) -> float:
    """Bytes, between GPUs of a kind that trains."""
    return time.link * H100.link * coefficients(H100)["train"].link


@given(data=RANKS, tensor=RANKS, shard=st.booleans())
def test_an_update_moves_the_gradients_round_the_data_ranks(
    data: int, tensor: int, shard: bool
) -> None:
    where = catalogue_place(H100, data=data, tensor=tensor, shard=shard)
    found = update_time(MODEL, where)
    seconds(found)
    part = MODEL.part_parameters(tensor)
    share = 2.0 * (data - 1) / data * gradient_bytes(part, MODEL.dtype)
    # What is split was summed in each backward pass.
    assert moved(found) == pytest.approx(0.0 if shard else share)
    whole = update_time(MODEL, replace(where, shard=False))
    assert found.memory == pytest.approx(whole.memory / (data if shard else 1))


@given(lengths=ROWS, data=st.sampled_from([2, 4, 8]), tensor=RANKS)
def test_sharded_weights_are_gathered_before_each_pass(
    lengths: list[tuple[int, int]], data: int, tensor: int
) -> None:
    """Of each tensor rank, its part; gradients are summed into parts, in float32."""
    fed = pack_rows(*arrays(lengths), budget=4096, divisor=data)
    whole = catalogue_place(H100, data=data, tensor=tensor)
    split = replace(whole, shard=True)
    part, tables = MODEL.part_parameters(tensor), MODEL.part_tables(tensor)
    each = fed.passes * (data - 1) / data
    ahead = moved(forward_time(MODEL, split, fed)) - moved(forward_time(MODEL, whole, fed))
    assert ahead == pytest.approx(each * part * MODEL.width)
    there, here = (train_time(MODEL, where, fed, updates=0) for where in (split, whole))
    size = (2 * part - tables) * MODEL.width + 4 * part
    assert moved(there) - moved(here) == pytest.approx(each * size)


FED = Microbatches(tokens=1e5, keys=0.0, predicted=1e5, passes=1)


def shard_longer(where: Place, *, trains: bool) -> tuple[float, Time]:
    """How many seconds a pass takes longer with split weights, and its time with whole ones."""
    price = partial(train_time, updates=0) if trains else forward_time
    split = price(MODEL, replace(where, shard=True), FED)
    whole = price(MODEL, where, FED)
    return seconds(split) - seconds(whole) - (split.latency - whole.latency), whole


@pytest.mark.parametrize("trains", [False, True])
def test_layers_are_gathered_while_others_compute(trains: bool) -> None:
    """A GPU waits for what is in no layer, and for a layer at either end."""
    tables = MODEL.part_tables(2)
    layer = (MODEL.part_parameters(2) - tables) / SHAPE.layers
    waited = (tables + layer) * MODEL.width
    if trains:
        waited += layer * MODEL.width + (tables + layer) * 4
    longer, _ = shard_longer(catalogue_place(H100, data=2, tensor=2), trains=trains)
    rate = 2 * H100.link * coefficients(H100)["train"].link
    assert longer == pytest.approx(waited / rate)


@pytest.mark.parametrize("trains", [False, True])
def test_what_is_gathered_beyond_what_is_computed_is_waited_for(trains: bool) -> None:
    rate = 1e6
    longer, whole = shard_longer(catalogue_place(H100, data=2, rate=rate), trains=trains)
    layers = MODEL.parameters - MODEL.table_parameters
    size = MODEL.parameters * MODEL.width
    if trains:
        size += layers * MODEL.width + MODEL.parameters * 4
    link = size / 2 / (rate * coefficients(H100)["train"].link)
    assert longer == pytest.approx(link - whole.compute, rel=1e-3)


def test_tensor_ranks_reduce_within_a_host_whatever_is_between_data_ranks() -> None:
    fed = pack_rows(*arrays([(100, 900)] * 8), budget=4096, divisor=2)
    one_host = catalogue_place(H100, data=2, tensor=4, shard=True)
    two_hosts = replace(one_host, rate=H100.link / 8)
    within = forward_time(MODEL, replace(one_host, shard=False), fed).link
    gathered = forward_time(MODEL, one_host, fed).link - within
    assert forward_time(MODEL, two_hosts, fed).link == pytest.approx(within + 8 * gathered)


# Transfers


@given(
    data=RANKS,
    tensors=st.tuples(RANKS, RANKS),
    readers=st.integers(1, 64),
    rate=st.floats(1e6, 1e12),
    delay=st.floats(0, 10),
)
def test_weights_do_not_leave_or_arrive_faster_than_the_ways_allow(
    data: int, tensors: tuple[int, int], readers: int, rate: float, delay: float
) -> None:
    here = catalogue_place(H100, data=data, tensor=tensors[0])
    there = catalogue_place(H100, tensor=tensors[1])

    def pulled(rate: float = rate, readers: int = readers, data: int = data) -> Time:
        way = Link(rate=rate, delay=delay)
        return weights_time(MODEL, replace(here, data=data), there, way, readers=readers)

    found = pulled()
    seconds(found)
    carried = found.link * rate * (1 + 1e-9)
    assert carried * here.devices >= readers * MODEL.weight_bytes
    assert carried * there.tensor >= MODEL.weight_bytes
    assert found.latency == delay
    assert at_most(found.link, pulled(readers=readers + 1).link)
    assert pulled(rate=2 * rate).link == pytest.approx(found.link / 2)
    assert at_most(pulled(data=2 * data).link, found.link)


@given(
    size=st.floats(0, 1e12),
    senders=st.integers(1, 64),
    readers=st.integers(1, 64),
    messages=st.integers(1, 9),
)
def test_rows_go_over_as_many_ways_as_both_ends_have(
    size: float, senders: int, readers: int, messages: int
) -> None:
    way = Link(rate=1e9, delay=0.5)
    found = rows_time(size, way, senders=senders, readers=readers, messages=messages)
    assert found.link * 1e9 * min(senders, readers) == pytest.approx(size)
    assert found.latency == messages * 0.5
    assert found.seconds == found.link + found.latency
