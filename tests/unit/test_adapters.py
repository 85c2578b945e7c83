"""What a user says of adapters and subsets: values, refusals, drawings, snapshots, digests."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow import GraphError, Model, lora, subset
from dataflow.adapters import Lora

BASE = "path/to/model"


def test_two_of_equal_content_are_equal() -> None:
    first, second = (Model("policy", BASE, trainable=True, adapter=lora(rank=8)) for _ in range(2))
    assert first == second
    assert first != Model("policy", BASE, trainable=True, adapter=lora(rank=4))


@pytest.mark.parametrize("scale,factor", [("lora", 2.0), ("rslora", 8.0)])
def test_the_factor_is_of_the_papers(scale: Any, factor: float) -> None:
    assert lora(rank=16, alpha=32, scale=scale).factor == factor


def test_texts_are_the_calls_that_make_them() -> None:
    assert str(lora()) == "lora(rank=16, alpha=32)"
    one = lora(rank=4, targets=["q_proj", "v_proj"], start="folder", scale="rslora")  # type: ignore[arg-type]
    assert str(one) == (
        "lora(rank=4, alpha=32, targets=('q_proj', 'v_proj'), start='folder', scale='rslora')"
    )
    assert eval(str(one)) == one
    assert str(subset(last=4, parts=("norm",))) == "subset(last=4, parts=('norm',))"


@pytest.mark.parametrize("arguments,words", [
    ({"rank": 0}, "a whole number >= 1"),
    ({"alpha": 0.0}, "a number > 0"),
    ({"scale": "pissa"}, "'lora' or 'rslora'"),
    ({"targets": ()}, "names of modules of the base"),
    ({"targets": ("q_proj", "")}, "names of modules of the base"),
])  # fmt: skip
def test_an_adapter_that_cannot_be_is_refused_at_its_line(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(GraphError, match=words):
        lora(**arguments)


@pytest.mark.parametrize("arguments", [{}, {"last": 0}, {"parts": ("",)}])
def test_a_subset_names_layers_or_parts(arguments: dict[str, Any]) -> None:
    with pytest.raises(GraphError):
        subset(**arguments)


@pytest.mark.parametrize("arguments,words", [
    ({"trainable": subset(last=1), "adapter": lora()}, "names a subset of them"),
    ({"adapter": lora()}, "begins as nothing"),
    ({"trainable": 1}, "True, False or subset"),
    ({"trainable": True, "adapter": "lora"}, "lora(...), side(...) or None"),
])  # fmt: skip
def test_a_model_without_a_part_that_can_be_trained_is_refused(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(GraphError) as refused:
        Model("policy", BASE, **arguments)
    assert words in str(refused.value)


def test_a_follower_has_its_leaders_adapter() -> None:
    policy = Model("policy", BASE, trainable=True, adapter=lora(rank=8))
    assert Model("mean", BASE, follows=policy, rate=0.1).adapter == policy.adapter


def test_a_frozen_model_begins_with_what_its_folder_has() -> None:
    assert Model("reference", BASE, adapter=lora(start="folder")).adapter == Lora(start="folder")
