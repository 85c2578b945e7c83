"""The forward kernels on several ranks of a replica give the numbers of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.errors import KernelError
from dataflow.kernel import Layout
from operators.kernels.torch.forward import TorchLogprobs
from tests.kit import forward_ranks
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.models import save_critic, save_tiny
from tests.kit.training import as_ranks


@pytest.mark.long
@pytest.mark.parametrize("way", ["tensor", "context"])
def test_ranks_have_the_numbers_of_one_also_after_new_weights(tmp_path: Path, way: str) -> None:
    """In a replica that is a half of a world, as a share of what trains there."""
    bases: list[str] = []
    for seed in (0, 1):
        base = save_tiny(tmp_path / f"lm {seed}", seed=seed)
        bases += [base, save_critic(tmp_path / f"critic {seed}", base)]
    as_ranks(4, forward_ranks.main, tmp_path, bases, 4, way, limit=120.0)
    for number in range(4):
        differences = json.loads((tmp_path / f"{number}.json").read_text(encoding="ascii"))
        assert differences.keys() == forward_ranks.KERNELS.keys()
        assert max(max(each) for each in differences.values()) < 1e-5


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(context=2)])
def test_ranks_need_a_group(base: str, layout: Layout) -> None:
    with pytest.raises(KernelError, match="expected a process group for its 2 ranks, found none"):
        open_kernel(TorchLogprobs(), base, layout=layout, session=FakeSession(world=2))
