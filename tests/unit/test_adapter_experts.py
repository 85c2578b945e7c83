"""Adapters beside experts, which have one weight of three dimensions for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from dataflow import GraphError, Model, lora
from dataflow.architectures import EXPERTS_BY_NAME
from dataflow.batch import Ragged
from dataflow.check import check
from dataflow.errors import KernelError
from graphs.grpo import grpo
from operators.kernels.torch.adapters import BaseWeights, find_fused_experts, named_trained
from operators.kernels.torch.models import load_model
from operators.kernels.torch.probe import compute_probe
from tests.kit import architectures
from tests.kit.plans import headers
from tests.kit.rewards import exact
from tests.kit.training import distance, open_supervised
from tests.unit.test_adapter_training import train_here, train_plainly

peft: Any = pytest.importorskip("peft")
ROWS = Ragged(np.array([3, 4, 5, 6, 9, 8, 7], np.int32), np.array([0, 4, 7]))


@pytest.fixture(scope="module")
def experts_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = architectures.tiny("qwen3_moe", tmp_path_factory.mktemp("experts"))
    module = AutoModelForCausalLM.from_pretrained(folder)
    if not find_fused_experts(module):
        pytest.skip("this transformers has linear layers for each expert")
    return str(folder)


def policy(base: str, **how: Any) -> Model:
    return Model("policy", base, trainable=True, adapter=lora(rank=4, **how))


def read_by_peft(base: str, folder: Path) -> Any:
    plain = AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).eval()


def test_all_linear_has_experts_and_trains_them_as_peft(experts_base: str, tmp_path: Path) -> None:
    kernel = open_supervised(policy(experts_base))
    kernel.save_weights(tmp_path)
    theirs = read_by_peft(experts_base, tmp_path)
    prefix = "base_model.model."
    plain_weights = train_plainly(
        theirs, lambda name: name.removeprefix(prefix).replace(".default.", ".")
    )
    trained = train_here(kernel)
    assert [name for name in trained if ".experts." in name]
    assert distance(trained, plain_weights) < 1e-5
    again = open_supervised(policy(experts_base), recompute="layers")
    assert distance(train_here(again), trained) == 0
    kernel.save_weights(tmp_path)
    state = peft.get_peft_model_state_dict(read_by_peft(experts_base, tmp_path))
    saved = {name.removeprefix(prefix): weight for name, weight in state.items()}
    assert distance(saved, trained) == 0


def test_it_begins_as_its_base_and_goes_on_from_a_folder(experts_base: str, tmp_path: Path) -> None:
    weights = BaseWeights()
    reference = load_model(Model("reference", experts_base), "cpu", weights)
    before = compute_probe(reference, ROWS, head="lm")
    fresh = load_model(policy(experts_base), "cpu", weights)
    assert np.array_equal(compute_probe(fresh, ROWS, head="lm"), before)
    kernel = open_supervised(policy(experts_base))
    trained = train_here(kernel)
    kernel.save_weights(tmp_path)
    again = load_model(policy(experts_base, start=str(tmp_path)), "cpu", weights)
    begun = {name: weight.detach() for name, weight in named_trained(again)}
    assert distance(begun, trained) == 0
    assert not np.array_equal(compute_probe(again, ROWS, head="lm"), before)
    assert np.array_equal(compute_probe(reference, ROWS, head="lm"), before)


@pytest.mark.parametrize("name", sorted(EXPERTS_BY_NAME))
def test_layers_that_peft_takes_for_experts_are_refused(name: str, tmp_path: Path) -> None:
    base = str(architectures.tiny(name, tmp_path))
    graph = grpo(base, "train.parquet", exact, adapter=lora(rank=4))
    with pytest.raises(
        GraphError, match=r"found model\.layers\.\S+_proj, which it takes"
    ) as caught:
        check(graph, headers)
    assert "'o_proj'" in str(caught.value).partition("Fix: targets=")[2]
    with pytest.raises(KernelError, match="which PEFT takes for those of experts"):
        load_model(policy(base), "cpu")
    attention = policy(base, targets="o_proj")
    assert dict(named_trained(load_model(attention, "cpu")))


def test_a_router_is_no_target(tmp_path: Path) -> None:
    # Of some bases it is a kind of linear layer, which returns the choice of experts.
    module = load_model(policy(str(architectures.tiny("phimoe", tmp_path))), "cpu")
    assert not [name for name, _ in named_trained(module) if "router" in name]
