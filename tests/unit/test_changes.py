"""What changes between two Steps of a run: which parameters may, and what of a cut goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow.check import check
from dataflow.errors import CheckpointError
from dataflow.graph import Graph
from dataflow.program import Program
from dataflow.set_expressions import edited, settable
from engine.keep.checkpoint.layout_changes import layout_changes
from engine.keep.checkpoint.outdated_rows import find_outdated_sources
from engine.keep.checkpoint.parameter_edits import parameter_edits, require_edits_allowed
from engine.keep.checkpoint.provenance import ProvenanceRecord, provenance
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.protocol.refs import SourceCut
from graphs.grpo import grpo
from operators import data, train
from tests.kit.files import save_jsonl
from tests.kit.run_graphs import vowels


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.chdir(tmp_path)
    save_jsonl(tmp_path / "rows.jsonl", *({"prompt": letter, "answer": "b"} for letter in "abcd"))
    return grpo("hub/name", "rows.jsonl", vowels, n=2, batch=2, max_lag=1)


def planned(graph: Graph, **options: Any) -> Plan:
    return make_plan(check(graph), seed=0, **options)


def test_only_what_a_position_or_the_start_depends_on_is_fixed(graph: Graph) -> None:
    """All others may change; test_changed_parameters.py shows what that means of each."""
    fixed = {node.name: sorted(node.operator.fixed) for node in graph.nodes if node.operator.fixed}
    assert fixed == {"prompts": ["data", "shuffle", "split"], "train_policy": ["start"]}
    others = (data.PROMPTS, data.DEMONSTRATIONS, data.PREFERENCES, train.TRAIN, train.EVALUATE)
    for operator in others:
        assert operator.fixed.keys() <= operator.limits.keys()
    assert settable(graph)


def test_an_edit_names_node_parameter_and_both_values(graph: Graph) -> None:
    settings = ["rollout.n=4", "train_policy.clipped_policy_loss.clip=0.3"]
    found = parameter_edits(graph, edited(graph, settings))
    assert [(e.where, e.what, e.old, e.new, e.fixed) for e in found] == [
        ("node rollout", "n", "2", "4", ""),
        ("node train_policy", "loss.clipped_policy_loss.clip", "0.2", "0.3", ""),
    ]
    require_edits_allowed(found, "runs/x")
    assert parameter_edits(graph, graph) == ()


def test_in_a_program_a_phase_that_is_over_does_not_change(graph: Graph) -> None:
    program = Program((graph, 2), (graph, 3))
    (edit,) = parameter_edits(program, edited(program, ["1/rollout.n=4"]))
    assert (edit.where, edit.phase) == ("node 1/rollout", 1)
    require_edits_allowed([edit], "runs/x")
    told = "runs/x: node 1/rollout: n: phase 1 has ended, so from 2 to 4 would change nothing. Fix:"
    with pytest.raises(CheckpointError, match=told):
        require_edits_allowed([edit], "runs/x", ended=1)


@pytest.mark.parametrize(("settings", "anew"), [
    ("rollout.temperature=0.5", True),
    ("prompts.batch=1", True),
    ("score.timeout=9.0", True),
    ("train_policy.intake=drop", True),
    ("train_policy.lr=0.5", False),
    ("advantage.scale=none", True),
    ("train_policy.epochs=2", False),
])  # fmt: skip
def test_waiting_rows_go_on_unless_something_above_them_changed(
    graph: Graph, settings: str, anew: bool
) -> None:
    plan = planned(graph)
    before = ProvenanceRecord(made_of=provenance(graph))
    after = ProvenanceRecord(made_of=provenance(edited(graph, [settings])))
    found, why = find_outdated_sources(plan, before, after)
    assert (list(found), bool(why)) == (["prompts"] * anew, anew)
    assert find_outdated_sources(plan, before, before) == (frozenset(), "")
    assert find_outdated_sources(plan, None, after) == (frozenset(), "")


def test_another_model_or_source_file_makes_all_rows_anew(graph: Graph) -> None:
    made_of = provenance(graph)
    other = replace(made_of, sources={**made_of.sources, "tests.kit.run_graphs": "content x"})
    before, after = ProvenanceRecord(made_of=made_of), ProvenanceRecord(made_of=other)
    assert find_outdated_sources(planned(graph), before, after)[0] == {"prompts"}


def test_finished_prompts_that_begin_again_come_first_and_none_is_lost() -> None:
    cut = SourceCut(next=5, watermark=2, running=((4, 0, 1),), finished=((2, 0, 0), (3, 0, 0)))
    again = cut.begun_again()
    assert again.running == ((2, 0, 0), (3, 0, 0), (4, 0, 1))
    assert (again.finished, again.next, again.watermark) == ((), 5, 2)


def test_what_a_plan_does_otherwise_is_named_by_node(graph: Graph) -> None:
    one = planned(graph, threads=1).to_json()
    two = planned(graph, threads=2, placing=Placing(chunks={"rollout": 2})).to_json()
    found = [str(each) for each in layout_changes(one, two)]
    assert "plan of rollout: chunks: 1 -> 2" in found
    assert "plan of train_policy: threads: 1 -> 2" in found
    for known in (one, "", "[]", '{"nodes": [1, {"name": "rollout"}]}'):
        assert layout_changes(known, one) == []
