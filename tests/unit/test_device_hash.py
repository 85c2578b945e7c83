"""The hash of pieces that CPU and GPU compute alike: its definition, and what it tells apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.weights import device_hash
from engine.weights.device_hash import (
    ROW,
    begin_hash_flat,
    hash_tensors,
    read_hashes,
    round_to_rows,
)
from tests.kit.turns import example_count

MASK = (1 << 64) - 1


def mix_plainly(number: int) -> int:
    """The finaliser of splitmix64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def hash_plainly(raw: bytes) -> bytes:
    """The definition in the module's docstring, with Python's integers."""
    step = 0x9E3779B97F4A7C15
    multipliers = [mix_plainly((i + 1) * step & MASK) | 1 for i in range(ROW // 4)]
    raw += bytes(-len(raw) % ROW)
    lanes = [0, 0]
    for row in range(len(raw) // ROW):
        products = [0, 0]
        for i in range(ROW // 8):
            word = raw[row * ROW + 8 * i :][:8]
            products[0] += multipliers[i] * int.from_bytes(word, "little")
            products[1] += multipliers[ROW // 8 + i] * int.from_bytes(
                word[4:], "little", signed=True
            )
        for lane in range(2):
            lanes[lane] += mix_plainly((products[lane] + (row + 1) * step) & MASK)
    return b"".join((lane & MASK).to_bytes(8, "little") for lane in lanes)


def hash_flat(flat: torch.Tensor, sizes: list[int]) -> list[bytes]:
    return read_hashes(begin_hash_flat(flat, sizes))


def draw_bytes(size: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw)


@pytest.mark.parametrize("size", [0, 1, 7, 8, ROW - 1, ROW, ROW + 1, 3 * ROW + 5])
def test_it_is_what_its_definition_says(size: int) -> None:
    content = draw_bytes(size, size)
    assert hash_tensors([content]) == [hash_plainly(bytes(content.tolist()))]


def test_known_hashes_stay() -> None:
    counted = torch.arange(256, dtype=torch.uint8).repeat(100)
    hashes = hash_tensors([counted, counted[:0], torch.zeros(1, dtype=torch.uint8)])
    assert [each.hex() for each in hashes] == [
        "c8bb9331286d5830136f045aa28c7a9f",
        "00000000000000000000000000000000",
        "afcd1d7b39a820e2afcd1d7b39a820e2",
    ]


@settings(max_examples=example_count(30), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * ROW), max_size=5),
    seed=st.integers(0, 99),
    at_once=st.sampled_from([ROW, 2 * ROW, 1 << 25]),
    shift=st.integers(0, 9),
)
def test_it_is_the_same_in_any_layout(
    sizes: list[int], seed: int, at_once: int, shift: int
) -> None:
    """In parts of any size, in one memory or in several, at any address."""
    contents = [draw_bytes(size, seed + i) for i, size in enumerate(sizes)]
    expected = [hash_tensors([content])[0] for content in contents]
    moved = [torch.cat([content.new_ones(shift), content])[shift:] for content in contents]
    padded = [torch.zeros(round_to_rows(size), dtype=torch.uint8) for size in sizes]
    for room, content in zip(padded, contents, strict=True):
        room[: len(content)] = content
    flat = torch.cat([torch.zeros(0, dtype=torch.uint8), *padded])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_hash, "_AT_ONCE", at_once)
        assert hash_tensors(contents) == expected
        assert hash_tensors(moved) == expected
        assert hash_flat(flat, sizes) == expected


@settings(max_examples=example_count(60), deadline=None)
@given(data=st.data(), size=st.integers(1, 3 * ROW), seed=st.integers(0, 99))
def test_any_changed_bit_is_seen(data: st.DataObject, size: int, seed: int) -> None:
    content = draw_bytes(size, seed)
    changed = content.clone()
    for place in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=3)):
        changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert hash_tensors([changed]) != hash_tensors([content])


@settings(max_examples=example_count(60), deadline=None)
@given(
    dtype=st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int64]),
    places=st.sets(st.integers(0, 2000), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
def test_swapped_values_are_seen(dtype: torch.dtype, places: set[int], seed: int) -> None:
    """Also of numbers that differ in nothing but their sign, the upper bit of a word."""
    draw = torch.Generator().manual_seed(seed)
    values = (torch.randint(0, 2, (2001,), generator=draw) * 2 - 1).to(dtype)
    first, second = places
    values[first], values[second] = 1, -1 if dtype.is_signed else 0
    swapped = values.clone()
    swapped[first], swapped[second] = values[second].clone(), values[first].clone()
    was, now = hash_tensors([values.view(torch.uint8), swapped.view(torch.uint8)])
    assert was != now


@pytest.mark.parametrize("rows", [(0, 1), (0, 2), (1, 2)])
def test_swapped_rows_are_seen(rows: tuple[int, int]) -> None:
    content = draw_bytes(3 * ROW, 1).view(3, ROW)
    order = list(range(3))
    first, second = rows
    order[first], order[second] = second, first
    assert hash_tensors([content[order].reshape(-1)]) != hash_tensors([content.reshape(-1)])


def test_signs_that_change_together_are_seen() -> None:
    """Modulo 2**64 two changes of a word's upper bit make none, whatever odd number multiplies."""
    ones = torch.ones(64, dtype=torch.float64)
    for count in (2, 4, 64):
        changed = ones.clone()
        changed[:count] *= -1
        first, second = hash_tensors([ones.view(torch.uint8), changed.view(torch.uint8)])
        assert first != second


def test_a_memory_of_other_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 rows of 16384 bytes, found 16384 bytes"):
        hash_flat(torch.zeros(ROW, dtype=torch.uint8), [1, 1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [0, 1, ROW + 1, 5 * ROW, 3 << 20]
    contents = [draw_bytes(size, size) for size in sizes]
    expected = hash_tensors(contents)
    on_device = [content.cuda() for content in contents]
    assert hash_tensors(on_device) == expected
    monkeypatch.setattr(device_hash, "_AT_ONCE", 1 << 20)
    padded = [torch.nn.functional.pad(each, (0, -len(each) % ROW)) for each in on_device]
    assert hash_flat(torch.cat(padded), sizes) == expected
