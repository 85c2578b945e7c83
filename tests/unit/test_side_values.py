"""What a user says of a side module: values, refusals, settings, snapshots, provenance, plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow import Graph, GraphError, Model, PlanError, check, lora, side
from dataflow.adapter_settings import with_adapter_settings
from dataflow.graph import Phase
from dataflow.node import content
from dataflow.program import Program
from dataflow.scripts import write_importable_snapshot
from dataflow.set_expressions import settable
from dataflow.side_module import Side
from dataflow.snapshot import from_json, modules, to_json
from engine.keep.checkpoint.provenance import provenance
from engine.keep.checkpoint.user_sources import imported_files
from engine.plan.cluster import Cluster
from engine.plan.explain import explain
from graphs.grpo import grpo
from operators.kernels.torch.models import load_model
from operators.kernels.torch.saving import save_model
from tests.kit import side_modules
from tests.kit.models import save_tiny
from tests.kit.plans import headers, planned, planned_on
from tests.kit.rewards import exact
from tests.kit.side_modules import READER, make_reader

BASE = "path/to/model"
CLUSTER = Cluster(cores=4, memory=24 * 2**30)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"))


def small_grpo(base: str, adapter: Any = READER, **params: Any) -> Graph:
    return grpo(base, "train.parquet", exact, n=2, batch=4, max_tokens=8, adapter=adapter, **params)


def adapter_of(graph: Graph) -> Side:
    (adapter,) = {s.adapter for s in graph.states if isinstance(s, Model) and s.adapter}
    assert isinstance(adapter, Side)
    return adapter


def test_two_of_equal_content_are_equal() -> None:
    assert side(make_reader, width=4) == side(make_reader, width=4)
    assert hash(side(make_reader, width=4)) == hash(side(make_reader, width=4))
    assert side(make_reader, width=4) != side(make_reader, width=8)
    assert content(side(make_reader)) != content(side(side_modules.make_mixer))


def test_its_text_names_the_function() -> None:
    text = str(side(make_reader, width=4, start="folder"))
    assert text == "side(tests.kit.side_modules:make_reader, width=4, start='folder')"


def with_rest(config: Any, **rest: Any) -> None:
    del config, rest


def with_start(config: Any, start: int) -> None:
    del config, start


def without_place() -> None:
    pass


@pytest.mark.parametrize("build,params,words", [
    (lambda config: config, {}, "at the top level of a module"),
    ("make_reader", {}, "expected a function"),
    (side_modules.NarrowReader, {}, "expected a function"),
    (make_reader, {"widht": 4}, "unknown parameter 'widht'"),
    (make_reader, {"width": [{}]}, "a number, text"),
    (make_reader, {"start": 4}, "text or None"),
    (with_rest, {}, "parameters that have a name each"),
    (with_start, {}, "names a saved module here"),
    (without_place, {}, "to take the base's configuration"),
])  # fmt: skip
def test_one_that_cannot_be_is_refused_at_its_line(
    build: Any, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(GraphError, match=words):
        side(build, **params)


def test_a_setting_changes_a_param() -> None:
    graph = with_adapter_settings(small_grpo(BASE), ["policy.adapter.width=32"])
    assert adapter_of(graph) == side(make_reader, width=32)
    for text, words in (("depth=2", "has no field 'depth'"), ("width=wide", "for width expected")):
        with pytest.raises(GraphError, match=words):
            with_adapter_settings(small_grpo(BASE), [f"policy.adapter.{text}"])
    (settings,) = (node for node in settable(graph) if node.name == "policy.adapter")
    assert settings.operator == "side"
    assert {each.name: each.value for each in settings.parameters} == {"width": 32, "start": None}


@pytest.mark.parametrize("imports", [True, False])
def test_a_snapshot_names_the_function(imports: bool) -> None:
    graph = small_grpo(BASE)
    text = to_json(graph)
    assert "tests.kit.side_modules" in modules(text)
    again = from_json(text, imports=imports)
    assert str(adapter_of(again)) == str(READER)
    assert again == graph
    changed = with_adapter_settings(again, ["policy.adapter.width=4"])
    assert adapter_of(changed).params == (("width", 4),)


def test_a_function_of_a_script_cannot_be_read_from_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(with_rest, "__module__", "__main__")
    monkeypatch.setattr(make_reader, "__module__", "__main__")
    with pytest.raises(GraphError, match="Model 'policy': it holds 'make_reader'"):
        from_json(to_json(small_grpo(BASE)))


def test_a_script_is_the_same_where_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(make_reader, "__module__", "__main__")
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    graph = small_grpo(BASE)
    adapter = provenance(graph, script="mine").models["policy"]["adapter"]
    assert "mine:make_reader" in adapter
    assert "__main__" not in adapter
    _, _, notice = write_importable_snapshot(graph)
    assert "Model 'policy' has 'make_reader'" in notice


def test_its_source_is_part_of_what_a_run_is_made_of() -> None:
    without = imported_files(small_grpo(BASE, None))
    files = imported_files(small_grpo(BASE))
    assert side_modules.__file__ in files
    assert side_modules.__file__ not in without


@pytest.mark.parametrize("adapter", [None, lora(rank=4), side(make_reader, width=4)])
def test_a_phase_that_goes_on_without_it_is_refused(base: str, adapter: Any) -> None:
    first, second = small_grpo(base), small_grpo(base, adapter)
    with pytest.raises(GraphError, match="another name for this Model"):
        check(Program(Phase(first, steps=1), Phase(second, steps=1)))


def change_rollout(graph: Graph, **params: Any) -> Graph:
    def change(node: Any) -> Any:
        if not node.operator.traits.generates:
            return node
        return node.changed(params=node.params | params)

    return graph.map(change)


def test_it_is_not_merged(base: str) -> None:
    with pytest.raises(GraphError, match="has a side module, which is no part of it"):
        check(change_rollout(small_grpo(base), merge=True))


def test_it_begins_with_a_file_that_is_of_it(base: str, tmp_path: Path) -> None:
    model = Model("policy", base, trainable=True, adapter=READER)
    save_model(load_model(model, "cpu"), tmp_path / "saved")
    planned(small_grpo(base, side(make_reader, width=8, start=str(tmp_path / "saved"))))
    for params, words in (
        ({"width": 4, "start": str(tmp_path / "saved")}, "expected params {'width': 4}, found"),
        ({"width": 8, "start": str(tmp_path)}, "expected side_model.safetensors"),
    ):
        with pytest.raises(GraphError, match=words):
            planned(small_grpo(base, side(make_reader, **params)))


def test_its_rate_is_the_users(base: str) -> None:
    checked = check(small_grpo(base, lr=1e-6), headers)
    assert "low_adapter_rate" not in {warning.rule for warning in checked.warnings}


@pytest.mark.parametrize("options,words", [
    ({"shard": True}, "shard: train_policy trains the side module of 'policy'"),
    ({"recompute": {"train_policy": "layers"}}, "nothing of a layer is kept below the side module"),
    ({"tensor": {"train_policy": 2}, "ranks": {"train_policy": 1}}, "computed with whole matrices"),
    ({"kernel": {"rollout": "vllm"}}, "'policy' has a side module, which torch alone computes"),
])  # fmt: skip
def test_what_it_cannot_have_is_refused_by_the_plan(
    base: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        planned_on(CLUSTER, small_grpo(base), **options)


def test_a_plan_says_that_it_did_not_count_its_weights(base: str) -> None:
    graph = small_grpo(base)
    plan = planned_on(CLUSTER, graph)
    assert "side module not counted" in explain(plan)
    (train,) = (node for node in plan.nodes if node.work == "train")
    assert not train.layout.compiled
