"""The dtype that a Model computes in: by its base unless it names one, and not in the graph."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from dataflow.check import check
from dataflow.errors import KernelError
from dataflow.model import Model
from dataflow.model_dtype import find_dtype, stored_dtype
from dataflow.model_files import CONFIG
from dataflow.snapshot import fingerprint, from_json, to_json
from engine.plan.explain import explain
from graphs.grpo import grpo
from operators.kernels.torch import models
from operators.kernels.torch.models import load_dtype, load_model
from tests.kit.graphs import grpo_graph
from tests.kit.models import save_tiny
from tests.kit.plans import headers, planned
from tests.kit.rewards import exact


def base_in(folder: Path, dtype: str) -> str:
    """A tiny base with weights in this dtype."""
    save_tiny(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return str(folder)


def state_dtype(base: str, dtype: str | None) -> None:
    """Write what config.json says of the dtype; None: nothing."""
    config = json.loads((Path(base) / CONFIG).read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    if dtype is not None:
        config["torch_dtype"] = dtype
    (Path(base) / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "by its weights"])
@pytest.mark.parametrize(("stored", "computed"), [
    ("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32"),
    ("float64", "float32"),
])  # fmt: skip
def test_the_plan_and_the_kernel_take_the_dtype_of_the_base(
    tmp_path: Path, stored: str, computed: str, stated: bool
) -> None:
    base = base_in(tmp_path / "base", stored)
    if not stated:
        state_dtype(base, None)
    assert stored_dtype(Path(base)) == stored
    model = Model("policy", base)
    assert find_dtype(model) == computed
    assert load_dtype(model) == computed
    assert str(load_model(model, "cpu").dtype) == f"torch.{computed}"


def test_what_is_named_counts_before_the_base(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base", "bfloat16")
    wide = Model("policy", base, dtype="float32", trainable=True)
    assert find_dtype(wide) == "float32"
    assert find_dtype(Model("policy", "a/b/nowhere", dtype="bfloat16")) == "bfloat16"
    # A plain copy is as wide as its leader, one that moves by parts as wide as there is.
    assert find_dtype(Model("copy", base, follows=wide, every=0)) == "float32"
    narrow = replace(wide, dtype="auto")
    assert find_dtype(Model("copy", base, follows=narrow)) == "bfloat16"
    assert find_dtype(Model("slow", base, follows=narrow, rate=0.1)) == "float32"


def test_a_hub_name_that_does_not_tell_is_refused_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights may be in the cache of one Worker's host and not in that of another."""
    (tmp_path / CONFIG).write_text('{"model_type": "qwen2"}')
    monkeypatch.setattr(models, "cached_file", lambda base, name: str(tmp_path / name))
    assert find_dtype(Model("policy", "owner/name")) is None
    with pytest.raises(KernelError, match=r"'policy': expected a dtype .* owner/name, found none"):
        load_dtype(Model("policy", "owner/name"))
    state_dtype(str(tmp_path), "torch.bfloat16")
    assert load_dtype(Model("policy", "owner/name")) == "bfloat16"


def test_the_graph_is_the_same_whatever_the_base_is_in(tiny: None) -> None:
    wide_graph = grpo_graph()
    text = to_json(wide_graph)
    wide_plan = planned(wide_graph)
    state_dtype("tiny", "bfloat16")
    narrow_graph = grpo_graph()
    assert to_json(narrow_graph) == text
    assert narrow_graph.digest == wide_graph.digest
    assert '"dtype": "auto"' in text
    narrow_plan = planned(narrow_graph)
    for plan, dtype in ((wide_plan, "float32"), (narrow_plan, "bfloat16")):
        assert f"452,480 parameters in {dtype}, from tiny" in explain(plan)
    parts = [plan.node("train_policy").estimate.bytes for plan in (wide_plan, narrow_plan)]
    assert parts[0]["weights"] == 2 * parts[1]["weights"]


def test_check_says_in_what_models_compute(tiny: None) -> None:
    state_dtype("tiny", "bfloat16")
    checked = check(grpo_graph(beta=0.1), headers)
    assert checked.dtypes == {"policy": "bfloat16", "reference": "bfloat16"}
    assert "  policy, reference: in bfloat16" in checked.describe().splitlines()


def test_a_snapshot_of_an_earlier_version_computes_in_float32_as_it_did(tiny: None) -> None:
    state_dtype("tiny", "bfloat16")
    written: dict[str, Any] = json.loads(to_json(grpo_graph()))
    for state in written["states"]:
        state["dtype"] = "float32"
    graph = from_json(json.dumps(written))
    dtypes = {find_dtype(state) for state in graph.states if isinstance(state, Model)}
    assert dtypes == {"float32"}
    assert fingerprint(graph) != fingerprint(grpo_graph())
    assert "parameters in float32" in explain(planned(graph))


def test_where_the_base_is_not_here_the_plan_says_so() -> None:
    plan = planned(grpo("owner/name", "train.parquet", exact, beta=0.0))
    assert "parameters unknown in the dtype of its base, from owner/name" in explain(plan)
