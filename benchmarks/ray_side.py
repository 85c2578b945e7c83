"""Ray and TransferQueue as routes from one process to another; runs in .venv-ray (see ray_env.sh).

    python -m benchmarks.ray_side WAY '{"4 kB": [4096, 20], ...}'      sizes in bytes, and rounds

Owns: what is timed there. Does not own: the batch (data_plane_batch.py), the comparison
(data_plane_peers.py).

The last line of output is a JSON object: seconds of each round by size. As in data_plane.py, a
round ends when the receiving actor has torch views of all columns and has reported how many values
they have.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyarrow as pa
import ray  # type: ignore[import-not-found]

from benchmarks.data_plane_batch import make_batch, views
from dataflow.batch import as_ragged

LOGICAL_CORES = 8
"""CPUs that Ray may use: with two, TransferQueue's own actors deadlock."""
WARM = 3


def main(way: str, sizes: dict[str, tuple[int, int]]) -> None:
    """Measure every size."""
    ray.init(num_cpus=LOGICAL_CORES, include_dashboard=False, log_to_driver=False)
    make = {"ray-numpy": _ray_numpy, "ray-arrow": _ray_arrow, "transferqueue": _transferqueue}[way]
    found = {}
    for name, (nbytes, rounds) in sizes.items():
        once = make(make_batch(nbytes))
        found[name] = [_timed(once) for _ in range(rounds + WARM)][WARM:]
    print(json.dumps(found), flush=True)
    ray.shutdown()


def _timed(once: Callable[[], None]) -> float:
    start = time.perf_counter()
    once()
    return time.perf_counter() - start


def _tensors(records: pa.RecordBatch) -> dict[str, Any]:
    """Each column's values as a NumPy array."""
    columns = zip(records.schema.names, records.columns, strict=True)
    return {
        n: as_ragged(c).values if pa.types.is_large_list(c.type) else c.to_numpy()
        for n, c in columns
    }


def _ray_numpy(records: pa.RecordBatch) -> Callable[[], None]:
    """A dict of values and offsets, each a NumPy array."""

    class NumpyReceiver:
        """The other process."""

        def take(self, columns: dict[str, Any]) -> int:
            import torch

            return sum(torch.from_numpy(c).numel() for c in columns.values())

    receiver = ray.remote(num_cpus=1)(NumpyReceiver).remote()
    columns = _tensors(records) | {"offsets": as_ragged(records.column("completion_ids")).offsets}
    return lambda: _received(ray.get(receiver.take.remote(ray.put(columns))), records)


def _ray_arrow(records: pa.RecordBatch) -> Callable[[], None]:
    """The record batch itself."""

    class ArrowReceiver:
        """The other process."""

        def take(self, found: pa.RecordBatch) -> int:
            return views(found)

    receiver = ray.remote(num_cpus=1)(ArrowReceiver).remote()
    return lambda: _received(ray.get(receiver.take.remote(ray.put(records))), records)


def _transferqueue(records: pa.RecordBatch) -> Callable[[], None]:
    """One key per row, ragged columns as jagged nested tensors."""
    import torch
    import transfer_queue as queue  # type: ignore[import-not-found]
    from tensordict import TensorDict  # type: ignore[import-not-found]

    class QueueReceiver:
        """The other process."""

        def __init__(self) -> None:
            queue.init()

        def take(self, keys: list[str], columns: list[str]) -> int:
            found = queue.kv_batch_get(keys=keys, partition_id="rows", select_fields=columns)
            tensors = [found[name] for name in columns]
            return sum(t.values().numel() if t.is_nested else t.numel() for t in tensors)

    queue.init()
    receiver = ray.remote(num_cpus=1)(QueueReceiver).remote()
    keys = [str(i) for i in range(records.num_rows)]
    fields = {}
    for name, column in zip(records.schema.names, records.columns, strict=True):
        if pa.types.is_large_list(column.type):
            rows = as_ragged(column)
            parts = [
                torch.from_numpy(rows.values[a:b].copy())
                for a, b in pairwise(rows.offsets.tolist())
            ]
            fields[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        else:
            fields[name] = torch.from_numpy(column.to_numpy().copy())
    data = TensorDict(fields, batch_size=[records.num_rows])

    def once() -> None:
        queue.kv_batch_put(keys=keys, partition_id="rows", fields=data)
        _received(ray.get(receiver.take.remote(keys, list(fields))), records)
        queue.kv_clear(keys=keys, partition_id="rows")

    return once


def _received(count: int, records: pa.RecordBatch) -> None:
    if count < records.num_rows:
        raise SystemExit(
            f"expected at least {records.num_rows} values on the other side, found {count}"
        )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
