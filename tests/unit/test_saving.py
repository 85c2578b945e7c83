"""What is saved has the base's dtype, and what is read back has every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from operators.kernels.torch.forward import TorchLogprobs, TorchValues
from operators.kernels.torch.models import load_model, pieces
from operators.kernels.torch.saving import EXACT, save_model
from tests.kit import training
from tests.kit.kernels import open_kernel
from tests.kit.models import save_critic, save_tiny
from tests.kit.rows import random_rows

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def narrow(tmp_path: Path, dtype: str = "bfloat16", kind: str = "qwen2") -> str:
    """A tiny base in this dtype, in the folder `base`."""
    folder = tmp_path / "base"
    save_tiny(folder, kind)
    AutoModelForCausalLM.from_pretrained(folder, dtype=TYPES[dtype]).save_pretrained(folder)
    return str(folder)


def stated(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["dtype"]


def kept(module: Any) -> dict[str, Tensor]:
    return {piece.name: piece.data for piece in pieces(module)}


@pytest.mark.parametrize("dtype, kind", [("bfloat16", "qwen2"), ("float16", "llama")])
def test_a_run_on_a_narrow_base_saves_a_narrow_one_and_resumes_exactly(
    tmp_path: Path, dtype: str, kind: str
) -> None:
    base, saved = narrow(tmp_path, dtype, kind), tmp_path / "saved"
    rows = random_rows(4, 2)
    first, second = (training.opened(base, training.PG, dtype="float32", lr=1e-5) for _ in range(2))
    first.step(training.with_advantage(rows, 1, seed=1))
    first.save(saved)
    weights = training.weights_of(first)
    tensors = load_file(saved / "model.safetensors")
    assert stated(saved) == dtype
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name].to(TYPES[dtype])) for name in tensors)
    assert training.distance(tensors, weights) > 0.0
    plain, loading = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert plain.dtype == TYPES[dtype]
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    second.restore(saved)
    for kernel in (first, second):
        kernel.step(training.with_advantage(rows, 2, seed=2))
    assert training.distance(training.weights_of(first), training.weights_of(second)) == 0.0


def test_a_phase_begins_with_the_exact_weights_of_a_checkpoint(tmp_path: Path) -> None:
    kernel = training.opened(narrow(tmp_path), training.PG, dtype="float32", lr=1e-5)
    kernel.step(training.with_advantage(random_rows(4, 2)))
    kernel.save(tmp_path / "saved")
    again = load_model(Model("policy", str(tmp_path / "saved"), dtype="float32"), "cpu")
    assert training.distance(kept(again), training.weights_of(kernel)) == 0.0
    save_model(again, tmp_path / "next")
    assert stated(tmp_path / "next") == "bfloat16"
    assert (tmp_path / "next" / "tokenizer.json").is_file()


def test_only_a_checkpoint_has_the_exact_weights(tmp_path: Path) -> None:
    kernel = training.opened(narrow(tmp_path), training.PG, dtype="float32")
    kernel.save(tmp_path / "both")
    exact = tmp_path / "both" / EXACT
    assert (exact / "model.safetensors").is_file()
    kernel.save_weights(tmp_path / "both")
    assert not exact.exists()
    assert stated(tmp_path / "both") == "bfloat16"


def test_a_follower_is_read_back_exactly(tmp_path: Path) -> None:
    base = save_critic(tmp_path / "critic", narrow(tmp_path))
    leader = Model("critic", base, trainable=True, head="scalar")
    follower = Model("slow", base, head="scalar", follows=leader, rate=0.1)
    first, second = (open_kernel(TorchValues(), follower) for _ in range(2))
    first.load([type(p)(p.name, p.data + 1e-3) for p in pieces(first._module)], 1)
    first.save(tmp_path / "saved")
    assert stated(tmp_path / "saved") == "bfloat16"
    second.restore(tmp_path / "saved")
    assert training.distance(kept(first._module), kept(second._module)) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_base_is_saved_as_it_is_held(base: str, tmp_path: Path, dtype: Any) -> None:
    save_model(load_model(Model("policy", base, dtype=dtype), "cpu"), tmp_path, exact=True)
    assert stated(tmp_path) == dtype
    assert not (tmp_path / EXACT).exists()


def test_training_in_the_bfloat16_of_a_base_resumes_with_the_same_bits(tmp_path: Path) -> None:
    base, rows = narrow(tmp_path), random_rows(4, 2)
    first, second = (training.opened(base, training.PG, lr=1e-5) for _ in range(2))
    for step in (1, 2):
        first.step(training.with_advantage(rows, step, seed=step))
    first.save(tmp_path / "saved")
    assert stated(tmp_path / "saved") == "bfloat16"
    assert not (tmp_path / "saved" / EXACT).exists()
    second.restore(tmp_path / "saved")
    third = training.with_advantage(rows, 3, seed=3)
    assert first.step(third) == second.step(third)
    assert training.distance(training.weights_of(first), training.weights_of(second)) == 0.0
    pairs = zip(first._optimizer.masters, second._optimizer.masters, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_follower_of_a_bfloat16_base_moves_by_small_parts(tmp_path: Path) -> None:
    """In bfloat16 a part of 1/200 of so small a difference is nothing, however often it comes."""
    base = narrow(tmp_path)
    leader = Model("policy", base, trainable=True)
    slow = Model("reference", base, follows=leader, rate=0.005)
    kernel = open_kernel(TorchLogprobs(), slow)
    before = {name: weight.clone() for name, weight in kept(kernel._module).items()}
    target = [Piece(name, (weight + 0.01).bfloat16()) for name, weight in before.items()]
    for version in range(1, 51):
        kernel.load(target, version, slow.rate)
    after = kept(kernel._module)
    part = 1 - 0.995**50
    for piece in target:
        expected = before[piece.name] + part * (piece.data.float() - before[piece.name])
        assert torch.allclose(after[piece.name], expected, atol=1e-5)


def test_a_base_that_states_no_dtype_has_that_of_its_weights(tmp_path: Path) -> None:
    base = Path(narrow(tmp_path, "float16"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    save_model(load_model(Model("policy", str(base)), "cpu"), tmp_path / "saved")
    assert stated(tmp_path / "saved") == "float16"


def test_a_weight_that_the_dtype_does_not_have_is_refused(tmp_path: Path) -> None:
    module = load_model(Model("policy", narrow(tmp_path, "float16")), "cpu")
    with torch.no_grad():
        module.get_parameter("model.norm.weight")[3] = 1e5
    with pytest.raises(KernelError, match=r"'model.norm.weight': .* at most 65504, found 100000"):
        save_model(module, tmp_path / "saved")
