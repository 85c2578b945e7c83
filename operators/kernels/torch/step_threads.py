"""How many threads compute a part of a decode step.

Owns: the change of torch's number of threads, and back. Does not own: how many are worth it
(shared_step.py for linear layers, decode_pass.py for attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads, then with as many as before."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
