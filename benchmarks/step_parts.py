"""What it costs to train a Step part by part: processor time of the train kernel for 1, 2, 4, 8 and
16 parts, as a multiple of that for the same Step at once.

Owns: the cut of a Step by its longest answers, and the comparison. Does not own: the kernel, the
rows (train_step.py), when a part of a real run begins.

    OMP_NUM_THREADS=2 python -m benchmarks.step_parts --threads 2 --tokens 1024

Parts are whole groups in the order of their longest answer, of about equal numbers of tokens, as a
Step that streams is cut. Repeats of all cuts take turns, and processor time is counted, so that a
busy machine changes little. A part has its own micro-batches: with a budget of `tokens` above a
part's size, many parts are many small micro-batches.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import tyro

from benchmarks.train_step import opened, rows_of
from dataflow.batch import Batch
from dataflow.kernel import Assignment
from dataflow.schema import Advantage
from operators.kernels.torch.train import TorchTrain

WARM_UP = 2
CUTS = (1, 2, 4, 8, 16)


def make_step(kind: str) -> Assignment:
    """A Step of rows of this kind, with advantages drawn at random."""
    rows = rows_of(kind)
    ids = rows.ragged("completion_ids")
    gain = np.random.default_rng(1).standard_normal(len(ids.values)).astype(np.float32)
    advantage = Batch.make(rows.keys, {"advantage": ids.like(gain)}, Advantage)
    inputs = {"rows": rows, "loss.advantage": advantage}
    return Assignment(sequence=1, step=1, keys=rows.keys, inputs=inputs)


def cut_step(whole: Assignment, count: int) -> list[Assignment]:
    """Cut a Step into parts of whole groups, in the order of their longest answer, of about equal
    numbers of tokens.
    """
    lengths = whole.inputs["rows"].ragged("completion_ids").lengths
    positions, group = np.unique(whole.keys.position, return_inverse=True)
    longest = np.zeros(len(positions), dtype=np.int64)
    np.maximum.at(longest, group, lengths)
    tokens = np.bincount(group, weights=lengths)
    order = np.argsort(longest, kind="stable")
    before = np.cumsum(tokens[order]) - tokens[order]
    part_of_group = np.empty(len(positions), dtype=np.int64)
    part_of_group[order] = (before * count / tokens.sum()).astype(np.int64)
    return [_take_rows(whole, part_of_group[group] == part) for part in range(count)]


def _take_rows(whole: Assignment, is_taken: np.ndarray) -> Assignment:
    rows = np.flatnonzero(is_taken)
    inputs = {name: batch.take(rows) for name, batch in whole.inputs.items()}
    return replace(whole, keys=whole.keys.take(rows), inputs=inputs)


def train_parts(kernel: TorchTrain, parts: Sequence[Assignment]) -> dict[str, float]:
    """Train one Step in these parts."""
    for part in parts:
        kernel.train_part(part)
    return dict(kernel.finish_parts(parts[0].step))


def compare(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Milliseconds of each call, in turns: [calls, repeats]."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + WARM_UP):
        for call, taken in zip(calls, seconds, strict=True):
            begun = time.process_time()
            call()
            if turn >= WARM_UP:
                taken.append(1e3 * (time.process_time() - begun))
    return seconds


def main(
    threads: int = 2,
    repeats: int = 20,
    tokens: int = 16384,
    kinds: tuple[str, ...] = ("long_tail",),
) -> None:
    """Print the median ratio of a Step in parts to the Step at once, repeat by repeat."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        kernel = opened(folder, minibatches=1, tokens=tokens)
    for kind in kinds:
        print_prices(kernel, make_step(kind), f"{kind}, {tokens} tokens a micro-batch", repeats)


def print_prices(kernel: TorchTrain, whole: Assignment, title: str, repeats: int) -> None:
    """Print what each cut of a Step costs."""
    cuts = [cut_step(whole, count) for count in CUTS]
    metrics = [train_parts(kernel, cut) for cut in cuts]
    calls: list[Callable[[], object]] = [partial(kernel.step, whole)]
    calls += [partial(train_parts, kernel, cut) for cut in cuts]
    at_once, *in_parts = compare(calls, repeats)
    print(f"{title}: {statistics.median(at_once):.1f} ms at once")
    for count, taken, fed in zip(CUTS, in_parts, metrics, strict=True):
        ratios = [part / one for part, one in zip(taken, at_once, strict=True)]
        batches, tokens = fed["train/micro_batches"], fed["train/fed_tokens"]
        print(
            f"{count:3} parts: {statistics.median(ratios):.3f} times; {batches:.0f} micro-batches"
            f" of together {tokens:.0f} tokens"
        )


if __name__ == "__main__":
    tyro.cli(main)
