"""The torch kernel of generate on several tensor ranks writes the rows of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.errors import KernelError
from dataflow.kernel import Layout
from operators.kernels.torch.generate import TorchGenerate
from tests.kit import generate_ranks
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.models import save_tiny
from tests.kit.training import as_ranks


@pytest.mark.long
def test_ranks_write_the_rows_of_one_also_after_new_weights(tmp_path: Path) -> None:
    """Sampled, truncated and greedy, with fewer slots than rows; one rank may be interrupted."""
    bases = [save_tiny(tmp_path / f"lm {seed}", seed=seed) for seed in (0, 1)]
    as_ranks(2, generate_ranks.main, tmp_path / "store", bases, tmp_path, limit=120.0)
    for number in range(2):
        distances = json.loads((tmp_path / f"{number}.json").read_text(encoding="ascii"))
        assert distances.keys() == {*generate_ranks.HOWS, "unsound"}
        assert max(max(each) for each in distances.values()) < 1e-5, distances


def test_ranks_that_decode_need_a_group(base: str) -> None:
    session, layout = FakeSession(world=2), Layout(tensor=2)
    with pytest.raises(KernelError, match="expected a process group for its 2 ranks, found none"):
        open_kernel(TorchGenerate(), base, layout=layout, session=session, max_tokens=4)
