"""What a Model trains of its base, counted without torch, against the modules themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow import Model, lora, subset
from dataflow.adapters import Lora
from dataflow.kernel import Layout
from dataflow.model_files import stored_weights
from dataflow.trained_weights import Shapes, find_missing_targets, list_leaves
from engine.plan.cost.devices import catalogue_place, device
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work, gradient_bytes, optimizer_bytes
from engine.plan.cost.model_passes import Passes, Sizes
from engine.plan.cost.models import cost_of_model
from engine.plan.cost.running_parts import RunningKernel, running_parts
from engine.plan.cost.training import Microbatches, train_time, update_time
from operators.kernels.torch.adapters import named_trained
from operators.kernels.torch.models import load_model
from tests.kit.architectures import tiny

pytest.importorskip("peft")

PARTS: dict[str, dict[str, Any]] = {
    "all-linear": {"trainable": True, "adapter": lora(rank=3)},
    "last": {"trainable": subset(last=1)},
    "norms": {"trainable": subset(parts=("norm",))},
    "critic": {"trainable": True, "adapter": lora(rank=3), "head": "scalar"},
    "critic of the last": {"trainable": subset(last=1), "head": "scalar"},
}
NAMES = ("qwen2", "llama", "qwen3", "gpt2", "gpt_neox", "phi3", "opt")
CASES = [(name, "all-linear") for name in NAMES] + [(name, "last") for name in NAMES]
EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "phimoe", "gpt_oss", "granitemoeshared")
CASES += [(name, "all-linear") for name in EXPERTS] + [("qwen3_moe", "last")]
CASES += [("qwen2", part) for part in PARTS] + [("phi3", part) for part in PARTS]
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
ROWS = Microbatches(tokens=65536.0, keys=1e6, predicted=4096.0, passes=4, rows=64)
WORK = Work(lengths=Lengths(prompt=64, completion=64), prompts=8, rows=64)


@pytest.mark.parametrize(("name", "part"), CASES)
def test_as_many_parameters_as_the_module_has(name: str, part: str, tmp_path: Path) -> None:
    model = Model("policy", str(tiny(name, tmp_path)), **PARTS[part])
    trained = cost_of_model(model).trained
    assert trained is not None
    weights = named_trained(load_model(model, "cpu"))
    assert trained.parameters == sum(weight.numel() for _, weight in weights)
    assert trained.is_added == (model.adapter is not None)


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("qwen2", "model.norm.weight"),
        ("gpt2", "transformer.ln_f.weight"),
        ("gpt_neox", "gpt_neox.final_layer_norm.weight"),
        ("phi", "model.final_layernorm.weight"),
    ],
)
def test_the_norm_behind_the_layers_is_among_the_last_weights(
    name: str, norm: str, tmp_path: Path
) -> None:
    model = Model("policy", str(tiny(name, tmp_path)), trainable=subset(last=1))
    assert norm in dict(named_trained(load_model(model, "cpu")))


def test_a_base_without_files_is_counted_by_formula(tmp_path: Path) -> None:
    folder = tiny("qwen2", tmp_path)
    model = Model("policy", str(folder), **PARTS["all-linear"])
    by_files = cost_of_model(model)
    (folder / "model.safetensors").unlink()
    by_formula = cost_of_model(model)
    assert by_formula.why == "by formula from config.json"
    assert by_formula.trained == by_files.trained


def test_a_whole_or_frozen_model_has_no_part(tmp_path: Path) -> None:
    base = str(tiny("qwen2", tmp_path))
    for model in (Model("policy", base, trainable=True), Model("reference", base)):
        cost = cost_of_model(model)
        assert (cost.trained, cost.version) == (None, cost.parameters)


def test_the_backward_pass_ends_at_the_first_trained_layer(tmp_path: Path) -> None:
    base = str(tiny("qwen2", tmp_path))
    layers: dict[str, int] = {}
    for name, part in PARTS.items():
        trained = cost_of_model(Model("policy", base, **part)).trained
        layers[name] = trained.layers if trained else -1
    assert layers == {
        "all-linear": 2,
        "last": 1,
        "norms": 2,
        "critic": 2,
        "critic of the last": 1,
    }


def shapes_of(folder: Path) -> Shapes:
    stored = stored_weights(folder)
    assert stored is not None
    return {name: tensor.shape for name, tensor in stored.items()}


@pytest.mark.parametrize(
    ("adapter", "missing"),
    [
        (lora(), []),
        (lora(targets=("q_proj", "mlp.up_proj")), []),
        (lora(targets="query"), ["query"]),
        (lora(targets=("q_proj", "lm_head", "norm")), ["lm_head", "norm"]),
    ],
)
def test_targets_are_names_of_linear_layers(
    adapter: Lora, missing: list[str], tmp_path: Path
) -> None:
    shapes = shapes_of(tiny("qwen2", tmp_path, tied=False))
    assert find_missing_targets(adapter, shapes) == missing
    leaves = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert list_leaves(shapes) == leaves


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A base of the size of Qwen2-0.5B, of which there is only the configuration."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def parts_of(model: Model) -> dict[str, int]:
    """Bytes of its training, by part."""
    cost = cost_of_model(model)
    kernel = RunningKernel(
        kind="train",
        layout=Layout(tokens=4096),
        dtype="bfloat16",
        passed_layers=cost.passed_layers,
        narrow=cost.narrow,
    )
    return running_parts(cost.version, cost.shape, (WORK,), kernel)


def size_of(model: Model) -> Sizes:
    cost = cost_of_model(model)
    assert cost.parameters
    assert cost.shape
    return Sizes(parameters=cost.parameters, shape=cost.shape, trained=cost.trained)


def seconds_of(model: Model) -> tuple[float, float]:
    """Of its training, and of one update."""
    sizes, where = size_of(model), catalogue_place(device("H100"))
    whole = train_time(sizes, where, ROWS, updates=0).compute
    return whole, update_time(sizes, where).seconds


def test_an_adapter_has_gradients_and_an_optimizer_of_its_own_size(large: str) -> None:
    model = Model("policy", large, trainable=True, adapter=lora(rank=16))
    trained = cost_of_model(model).trained
    assert trained is not None
    # Of a layer: query and output 896 x 896, keys and values 896 x 128, the MLP 896 x 4864.
    widths = 2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)
    assert trained.parameters == 24 * 16 * widths
    parts, whole = parts_of(model), parts_of(Model("policy", large, trainable=True))
    assert parts["optimizer"] == optimizer_bytes(trained.parameters, "bfloat16")
    assert parts["gradients"] == gradient_bytes(trained.parameters, "bfloat16")
    # Between the two matrices of each of seven in 24 layers, in bfloat16.
    narrow = 24 * 7 * 16 * 2
    assert parts["activations"] == whole["activations"] + WORK.at_once * narrow


def test_nothing_below_the_first_trained_layer_is_kept_or_computed_again(large: str) -> None:
    whole, last = (Model("policy", large, trainable=t) for t in (True, subset(last=4)))
    assert parts_of(last)["activations"] < 0.25 * parts_of(whole)["activations"]
    assert parts_of(last)["optimizer"] < 0.2 * parts_of(whole)["optimizer"]
    forward = seconds_of(whole)[0] / 3
    assert seconds_of(last)[0] - forward < 0.35 * (seconds_of(whole)[0] - forward)
    assert seconds_of(last)[1] < 0.2 * seconds_of(whole)[1]


def test_a_backward_pass_over_a_frozen_base_has_half_of_its_products(large: str) -> None:
    whole, adapted = (Model("policy", large, trainable=True, adapter=a) for a in (None, lora()))
    sizes = size_of(adapted)
    base, added = sizes.body, sizes.added_parameters
    # Forward and backward: one and one product with a weight of the base, one and two with those
    # of the adapter. Of the head's inputs there are gradients.
    head = sizes.head_parameters * ROWS.predicted
    attention = 2.0 * sizes.shape.layers * sizes.shape.attention * ROWS.keys
    of_adapter = (2 * base + 3 * added) * ROWS.tokens + 2 * head + 3 * attention
    of_whole = 3 * base * ROWS.tokens + 3 * head + 3 * attention
    assert seconds_of(adapted)[0] / seconds_of(whole)[0] == pytest.approx(of_adapter / of_whole)


def test_generation_with_an_adapter_multiplies_with_it_and_reads_it(large: str) -> None:
    adapted = size_of(Model("policy", large, trainable=True, adapter=lora()))
    where = catalogue_place(device("H100"))
    with_adapter = Passes(adapted, where, "decode").at(64.0, 0.0, predicted=0.0)
    base = Passes(replace(adapted, trained=None), where, "decode").at(64.0, 0.0, predicted=0.0)
    share = adapted.added_parameters / adapted.body
    assert share > 0.02
    assert with_adapter.compute == pytest.approx((1 + share) * base.compute)
    assert with_adapter.memory - base.memory == pytest.approx(
        adapted.added_parameters * adapted.width / where.device.memory_rate, rel=0.5
    )
