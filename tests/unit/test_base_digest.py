"""A part of a Model is read beside its own base alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dataflow import KernelError, Model, lora, subset
from dataflow.base_digest import base_digest
from operators.kernels.torch.base_piece import NAME
from operators.kernels.torch.forward import TorchLogprobs
from tests.kit.kernels import open_kernel
from tests.kit.models import save_tiny
from tests.kit.training import SUPERVISED, opened

WEIGHTS = "model.safetensors"
PARTS = {"adapter": {"adapter": lora(rank=2)}, "subset": {"trainable": subset(last=1)}}


def copy_base(base: str, folder: Path, change: float = 0.0, **how: Any) -> Path:
    """A copy of a base; change: added to each of its weights."""
    copy = folder / "copy"
    shutil.copytree(base, copy)
    tensors = load_file(copy / WEIGHTS)
    save_file({name: tensor + change for name, tensor in tensors.items()}, copy / WEIGHTS, **how)
    return copy


def test_equal_weights_have_one_digest_wherever_they_are(base: str, tmp_path: Path) -> None:
    digest = base_digest(Path(base))
    assert re.fullmatch("[0-9a-f]{32}", digest)
    copy = copy_base(base, tmp_path)
    assert base_digest(copy) == digest
    tensors = load_file(copy / WEIGHTS)
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, copy / f"part{number}.safetensors")
    (copy / WEIGHTS).unlink()
    assert base_digest(copy) == digest


def test_other_weights_names_and_dtypes_have_another(base: str, tmp_path: Path) -> None:
    digests = {base_digest(Path(base))}
    digests.add(base_digest(copy_base(base, tmp_path / "moved", 1e-3)))
    narrow = copy_base(base, tmp_path / "narrow")
    tensors = load_file(narrow / WEIGHTS)
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, narrow / WEIGHTS)
    digests.add(base_digest(narrow))
    named = copy_base(base, tmp_path / "named")
    save_file({f"x.{name}": tensor for name, tensor in tensors.items()}, named / WEIGHTS)
    digests.add(base_digest(named))
    assert len(digests) == 4


def test_a_base_without_such_files_has_none(tmp_path: Path) -> None:
    assert base_digest(tmp_path) == ""


@pytest.mark.parametrize("part", PARTS)
def test_a_reader_with_another_base_is_refused(base: str, tmp_path: Path, part: str) -> None:
    if part == "adapter":
        pytest.importorskip("peft")
    writer = opened(base, SUPERVISED, **PARTS[part])
    pieces = list(writer.pieces())
    assert [piece.name for piece in pieces if piece.name == NAME] == [NAME]
    for where, change in (("same", 0.0), ("other", 1e-3)):
        copy = copy_base(base, tmp_path / where, change)
        model = Model("policy", str(copy), **{"trainable": True, **PARTS[part]})
        reader = open_kernel(TorchLogprobs(), model)
        if not change:
            reader.load(pieces, 1)
            continue
        before = [weight.clone() for weight in reader._module.parameters()]
        message = rf"base {copy}: expected weights that were trained beside it.*Fix: the same files"
        with pytest.raises(KernelError, match=message):
            reader.load(pieces, 1)
        after = list(reader._module.parameters())
        assert all(map(torch.equal, before, after))


def test_a_checkpoint_is_restored_on_its_own_base_alone(base: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    opened(base, SUPERVISED, **PARTS["adapter"]).save(tmp_path / "saved")
    same = copy_base(base, tmp_path / "same")
    opened(str(same), SUPERVISED, **PARTS["adapter"]).restore(tmp_path / "saved")
    other = opened(str(copy_base(base, tmp_path / "other", 1e-3)), SUPERVISED, **PARTS["adapter"])
    with pytest.raises(KernelError, match="Fix: the base beside which it was trained"):
        other.restore(tmp_path / "saved")


def test_a_whole_model_needs_no_digest(base: str) -> None:
    assert NAME not in [piece.name for piece in opened(base, SUPERVISED).pieces()]


def test_the_bytes_of_the_edge_are_those_of_what_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = save_tiny(tmp_path / "base", hidden_size=256, intermediate_size=768)
    sizes: list[int] = []
    for adapter in (None, lora(rank=16)):
        pieces = list(opened(base, SUPERVISED, adapter=adapter).pieces())
        sizes.append(sum(piece.data.nbytes for piece in pieces))
    whole, adapted = sizes
    assert adapted < 0.15 * whole
