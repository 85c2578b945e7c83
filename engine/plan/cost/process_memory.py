"""What the process of a Worker takes before and beside the rows and Models of its nodes.

Owns: the sizes, as measured once for every machine without a profile. Does not own: what nodes take
(memory.py), which Worker has what process (engine/plan/passes/processes.py), measuring them here
(engine/predict/profile/imports.py).

All are resident bytes of Python 3.11 with torch 2.13 for CPUs on Linux, as /proc/self/status tells
them. Pages of files (libraries) are shared by all processes that have mapped them; a fork has the
anonymous ones from its beginning and the others as it touches them.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedMemory:
    """After the imports of a Worker: anonymous bytes, and pages of files."""

    anonymous: int
    files: int


_PLAIN = ImportedMemory(anonymous=65 * _MIB, files=79 * _MIB)
_TORCH = ImportedMemory(anonymous=294 * _MIB, files=180 * _MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """plain: of a Worker whose kernels compute with no Model: the interpreter, the engine, NumPy
    and Arrow. torch: of one with torch kernels: torch and transformers, too.
    """

    plain: ImportedMemory = _PLAIN
    torch: ImportedMemory = _TORCH


FORKED_FILES = 40 * _MIB
"""Pages of files that a forked process has touched before its kernels are opened."""
OPENED = 14 * _MIB
"""Of every Worker, as it works: stacks and arenas of its threads, buffers of its channel, pages of
libraries that it touches; 12 to 17 MiB of Workers with a reward or advantages alone.
"""
READS = 18 * _MIB
"""Of one with a source: Arrow's readers of Parquet and JSON."""
FIRST_USE = 95 * _MIB
"""Of one with torch kernels, where no profile tells: a Model's class and its tokenizer, buffers and
code of the products' libraries. 84 to 99 MiB with Models of a few thousand weights, whichever kind
of pass.
"""
ADAPTERS = 9 * _MIB
"""Of one with an adapter: PEFT."""
SCATTERED = 0.15
"""Of what passes with a torch kernel, where no profile tells: memory that the allocator keeps and
that no further tensor fits into. 0 to 0.12 of it (benchmarks/worker_peaks.py), and a little, as it
differs from run to run.
"""
SCATTERED_BESIDE = 0.2
"""The same of one that trains an adapter: what is between its matrices is small, stays until the
backward pass, and lies between what is large and free. 0.16 with a Model of 4 x 256.
"""
