"""Wrong messages by the hundred thousand against live receivers of the data plane.

    python -m tests.chaos.frames --count 100000 --seed 0

Half are an owner's answers or block index (structure and content verified), half are frames
between hosts; an honest answer follows each. Nothing crashes, nothing wrong is accepted,
descriptors and memory do not grow. The mutations: tests/contracts/pull_mutants.py.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))

from pull_liars import Owner, answered, changed_messages, liar, noted_wrongly, outcome, resident
from pull_rows import batch

from dataflow.schema import Rollout
from engine.channels.contract import BlockRequest
from engine.channels.zmq.channel import ZmqChannel
from engine.channels.zmq.curve_keys import Address

GROWTH = 64 << 20
"""Bytes by which the process may grow."""
_OFTEN = 5000


def through_slabs(count: int, rng: np.random.Generator, *, content: bool) -> Counter[str]:
    """What a reader makes of changed descriptors."""
    rows = batch(Rollout, 7, 1, skipped=1)
    owner, outcomes = Owner(rows), Counter[str]()

    for number in range(count):
        if number % 4:
            seen = answered(owner, content, lambda honest: changed_messages(honest, rng))
        else:
            seen = noted_wrongly(owner, content, rng)
        if isinstance(seen, pa.RecordBatch):
            outcomes["right"] += 1
            seen.validate(full=True)
            assert not content or seen.equals(rows.records), "rows were accepted that nobody kept"
        else:
            outcomes["asked" if seen is None else seen.__name__] += 1
    owner.outbox.close()
    return outcomes


def between_hosts(count: int, rng: np.random.Generator) -> Counter[str]:
    """What a channel makes of changed frames."""
    rows, outcomes = batch(Rollout, 6, 2), Counter[str]()
    with liar(rows.records, rng) as endpoint:
        channel = ZmqChannel("b", 0, lambda _: Address(endpoint=endpoint), patience=5.0)
        for _ in range(count):
            seen = outcome(lambda: channel.fetch([BlockRequest(worker="a", block=0)])[0])
            outcomes["right" if isinstance(seen, pa.RecordBatch) else seen.__name__] += 1
            if isinstance(seen, pa.RecordBatch):
                assert seen.num_rows == 6, "rows were accepted that nobody kept"
                seen.validate(full=True)
        channel.close()
    return outcomes


def main() -> None:
    """Send them in parts, and check the process after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # a line for each refusal
    rng, start = np.random.default_rng(given.seed), time.monotonic()
    quarter = given.count // 4
    _sent("slabs, structure", lambda n: through_slabs(n, rng, content=False), quarter)
    _sent("slabs, content", lambda n: through_slabs(n, rng, content=True), quarter)
    _sent("between hosts", lambda n: between_hosts(n, rng), 2 * quarter)
    print(f"{given.count} wrong messages in {time.monotonic() - start:.0f} s")


def _sent(name: str, way: Callable[[int], Counter[str]], count: int) -> None:
    outcomes = way(min(200, count))  # so that everything that is created once exists
    before, started, left = len(os.listdir("/proc/self/fd")), resident(), count - min(200, count)
    while left:
        outcomes += way(min(_OFTEN, left))
        left -= min(_OFTEN, left)
        descriptors, grown = len(os.listdir("/proc/self/fd")), resident() - started
        assert descriptors <= before, f"{name}: expected {before} descriptors, found {descriptors}"
        assert grown < GROWTH, f"{name}: the process has grown by {grown} bytes"
    assert outcomes.total() == count
    assert outcomes["right"] < count // 2, f"{name}: most were taken: {dict(outcomes)}"
    print(f"{name}: {', '.join(f'{kind} {n}' for kind, n in outcomes.most_common())}", flush=True)


if __name__ == "__main__":
    main()
