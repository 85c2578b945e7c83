"""Modules with adapters and subsets: shared base, beginning, targets, gradients, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dataflow import KernelError, Model, Ragged, lora, subset
from operators.kernels.torch.adapters import (
    BaseWeights,
    named_trained,
    piece_name,
)
from operators.kernels.torch.models import load_model, load_pieces, pieces, restore_model
from operators.kernels.torch.probe import compute_probe
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.shared_step import _mean_weight
from tests.kit.models import save_tiny

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"))


def load(model: Model, weights: BaseWeights | None = None, seed: int = 1) -> Any:
    """A Model's module, on shared weights where there are some."""
    return load_model(model, "cpu", weights or BaseWeights(), seed)


def numbers(module: Any, head: str = "lm") -> Any:
    """What the module computes of a few rows."""
    ids = Ragged(np.array([3, 4, 5, 6, 9, 8, 7], np.int32), np.array([0, 4, 7]))
    return compute_probe(module, ids, head=head)  # type: ignore[arg-type]


def trained_names(module: Any) -> list[str]:
    return [piece_name(name) for name, p in module.named_parameters() if p.requires_grad]


def policy(base: str, **how: Any) -> Model:
    return Model("policy", base, trainable=True, adapter=lora(rank=4, **how))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_adapter_changes_no_bit(base: str, dtype: Any) -> None:
    adapted = Model("policy", base, trainable=True, adapter=lora(rank=4), dtype=dtype)
    reference = Model("reference", base, dtype=dtype)
    assert np.array_equal(numbers(load(adapted)), numbers(load(reference)))


def layer_numbers(forward: Any, layer: Any) -> list[Any]:
    """What a layer computes of a few states, and the gradients of these and of its matrices."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, 5, layer.in_features, generator=generator).requires_grad_()
    output = forward(layer, states)
    output.square().sum().backward()
    gradients = [states.grad]
    for matrix in (layer.lora_A.adapter.weight, layer.lora_B.adapter.weight):
        gradients.append(matrix.grad)
        matrix.grad = None
    return [output, *gradients]


def test_a_layer_computes_what_peft_does(base: str) -> None:
    layer = load(policy(base)).model.layers[1].mlp.up_proj
    with torch.no_grad():
        layer.lora_B.adapter.weight.normal_()
    plain_class = peft.tuners.lora.Linear
    assert type(layer) is not plain_class
    ours, theirs = (layer_numbers(kind.forward, layer) for kind in (type(layer), plain_class))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_decode_step_has_the_threads_of_its_base(base: str) -> None:
    assert _mean_weight(load(policy(base))) == _mean_weight(load(Model("reference", base)))


def test_modules_of_one_base_are_the_same_weights(base: str) -> None:
    weights = BaseWeights()
    reference = load(Model("reference", base), weights)
    adapted = load(policy(base), weights)
    base_weights = {id(p) for p in reference.parameters()}
    own = [p for p in adapted.parameters() if id(p) not in base_weights]
    assert all(p.requires_grad for p in own)
    assert len(own) == len(trained_names(adapted)) == 28
    with torch.no_grad():
        for parameter in own:
            parameter.add_(0.1)
    assert not np.array_equal(numbers(adapted), numbers(reference))
    assert np.array_equal(numbers(reference), numbers(load(Model("reference", base))))


def test_an_adapter_begins_by_seed_and_name_alone(base: str) -> None:
    first, again = (dict(load(policy(base)).named_parameters()) for _ in range(2))
    other = dict(load(policy(base), seed=2).named_parameters())
    name = "model.layers.1.mlp.up_proj.lora_A.adapter.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    rival = Model("rival", base, trainable=True, adapter=lora(rank=4))
    assert not torch.equal(first[name], dict(load(rival).named_parameters())[name])
    follower = Model("follower", base, follows=policy(base), rate=0.5)
    assert torch.equal(first[name], dict(load(follower).named_parameters())[name])
    bound = 1 / first[name].shape[1] ** 0.5  # kaiming_uniform_ with a=sqrt(5)
    assert 0.5 * bound < first[name].abs().max() <= bound


def test_targets_by_name(base: str) -> None:
    adapted = load(policy(base, targets=("q_proj", "layers.0.mlp.up_proj")))
    paths = {name.partition(".lora_")[0] for name in trained_names(adapted)}
    assert sorted(paths) == [
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]


@pytest.mark.parametrize("name", ["query", "lm_head"])
def test_a_target_that_the_base_lacks_is_named(base: str, name: str) -> None:
    with pytest.raises(KernelError, match=f"Model 'policy'.*q_proj.*found '{name}'"):
        load(policy(base, targets=name))


def test_a_critic_has_its_own_head_and_adapter_on_the_policys_body(base: str) -> None:
    weights = BaseWeights()
    actor = load(policy(base), weights)
    critic_model = Model("critic", base, trainable=True, head="scalar", adapter=lora(rank=2))
    critic = load(critic_model, weights)
    actor_ids = {id(p) for p in actor.parameters()}
    own_names = [piece_name(n) for n, p in critic.named_parameters() if id(p) not in actor_ids]
    assert own_names == trained_names(critic)
    assert [name for name in own_names if "lora" not in name] == [
        "score.weight",
        "score.bias",
    ]


def test_a_subset_is_the_last_layers_and_the_norm_behind_them(base: str) -> None:
    weights = BaseWeights()
    reference = load(Model("reference", base), weights)
    model = Model("policy", base, trainable=subset(last=1))
    names = trained_names(load(model, weights))
    assert {name.partition(".layers.")[2].partition(".")[0] or name for name in names} == {
        "1",
        "model.norm.weight",
    }
    shared_names = {name for name, p in reference.named_parameters() if p.requires_grad}
    assert not shared_names


def test_parts_of_a_subset(base: str) -> None:
    model = Model("policy", base, trainable=subset(last=1, parts=("norm",)))
    assert trained_names(load(model)) == [
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    with pytest.raises(KernelError, match="expected weights in subset"):
        load(Model("policy", base, trainable=subset(parts=("bias_of",))))


def test_peft_reads_what_was_written(base: str, tmp_path: Path) -> None:
    adapted = load(policy(base))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    save_model(adapted, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path)
    ours = dict(named_trained(adapted))
    state = peft.get_peft_model_state_dict(theirs)
    assert {name.removeprefix("base_model.model.") for name in state} == set(ours)
    for name, parameter in state.items():
        assert torch.equal(parameter, ours[name.removeprefix("base_model.model.")])


def test_a_model_begins_with_a_folder_and_goes_on_with_it(base: str, tmp_path: Path) -> None:
    first = load(policy(base))
    with torch.no_grad():
        for _, parameter in named_trained(first):
            parameter.add_(0.02)
    save_model(first, tmp_path / "adapter")
    again = load(policy(base, start=str(tmp_path / "adapter")), seed=7)
    assert np.array_equal(numbers(first), numbers(again))
    fresh = load(policy(base))
    restore_model(fresh, policy(base), tmp_path / "adapter")
    assert np.array_equal(numbers(first), numbers(fresh))


def test_a_folder_of_another_rank_is_refused(base: str, tmp_path: Path) -> None:
    save_model(load(policy(base)), tmp_path)
    model = Model("policy", base, trainable=True, adapter=lora(rank=8, start=str(tmp_path)))
    with pytest.raises(
        KernelError, match=r"expected lora.rank=8.* found r=4.*lora.rank=4, alpha=32"
    ):
        load(model)
    with pytest.raises(KernelError, match=r"adapter_model\.safetensors"):
        load(policy(base, start=base))


def test_a_follower_moves_in_float32_on_a_base_in_bfloat16(tmp_path: Path) -> None:
    narrow = save_tiny(tmp_path, dtype="bfloat16")
    leader = Model("policy", narrow, trainable=True, adapter=lora(rank=4), dtype="bfloat16")
    weights = BaseWeights()
    leader_module = load(leader, weights)
    follower = load(Model("mean", narrow, follows=leader, rate=0.001), weights)
    with torch.no_grad():
        for _, parameter in named_trained(leader_module):
            parameter.fill_(1.0)
    for _ in range(3):
        load_pieces(follower, pieces(leader_module), rate=0.001)
    parameters = dict(follower.named_parameters())
    moved = parameters["model.layers.0.mlp.up_proj.lora_B.adapter.weight"]
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, torch.full_like(moved, 1 - 0.999**3))
    assert parameters["model.norm.weight"].dtype == torch.bfloat16
    assert np.isfinite(numbers(follower)).all()
