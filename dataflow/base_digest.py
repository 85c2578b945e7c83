"""The digest of a base: whether two directories have the same weights, on any two hosts.

Owns: that. Does not own: who compares them (operators/kernels/torch/base_piece.py), damaged files,
which the reading of a whole file finds (model_files.py).

It has the names, dtypes and shapes of all tensors, and of each SAMPLES blocks of bytes: two bases
that were trained apart differ in nearly every weight. It does not depend on how the tensors are
divided among files. The whole of a large base would take as long to read as to load.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import xxhash

from dataflow.model_files import header

SAMPLES, BLOCK = 4, 512
"""Blocks of bytes of a tensor, and their size."""


def base_digest(folder: Path) -> str:
    """The digest of the safetensors files in a directory, 32 hexadecimal digits; empty if there are
    none. Raises DataError for a damaged file.
    """
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    stamps: list[tuple[Path, int, int]] = []
    for path in files:
        stat = path.stat()
        stamps.append((path, stat.st_mtime_ns, stat.st_size))
    return _digest_files(tuple(stamps))


@lru_cache(maxsize=16)
def _digest_files(stamps: tuple[tuple[Path, int, int], ...]) -> str:
    """Of files that have not changed."""
    if not stamps:
        return ""
    digests: dict[str, bytes] = {}
    for path, _, _ in stamps:
        digests.update(_digest_tensors(path))
    whole = xxhash.xxh3_128()
    for name in sorted(digests):
        whole.update(digests[name])
    return whole.hexdigest()


def _digest_tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    tensors = header(path)  # which refuses a damaged file
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        entries = json.loads(file.read(length))
        for name, tensor in tensors.items():
            begin, end = entries[name]["data_offsets"]
            digest = xxhash.xxh3_128(f"{name}\0{tensor.dtype}\0{tensor.shape}".encode())
            for block in _read_samples(file, 8 + length + begin, end - begin):
                digest.update(block)
            yield name, digest.digest()


def _read_samples(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    """Read blocks spread over so many bytes of a file."""
    last = max(0, size - BLOCK)
    for number in range(SAMPLES):
        file.seek(start + number * last // (SAMPLES - 1))
        yield file.read(min(BLOCK, size))
