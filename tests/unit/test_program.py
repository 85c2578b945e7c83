"""Programs as values: what they refuse, whose weights go on, their check, JSON, drawings, diff."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.adapters import Lora, lora
from dataflow.carried_weights import Carried
from dataflow.check import check
from dataflow.diff import Difference
from dataflow.draw import draw
from dataflow.draw.phases import program_picture
from dataflow.draw.picture import make_picture
from dataflow.draw.svg import draw_program_svg
from dataflow.errors import GraphError
from dataflow.graph import Graph, Phase, Threshold
from dataflow.model import Model
from dataflow.program import Lineage, Program
from dataflow.program_diff import compare
from dataflow.program_snapshot import identity, named_modules, read, write_snapshot
from dataflow.rules.programs import program_faults
from dataflow.snapshot import fingerprint, from_json, to_json
from graphs.sft import sft
from operators.data import demonstrations, prompts
from operators.forward import logprobs, scores
from operators.generate import generate
from operators.losses import clipped_policy_loss, supervised_loss
from operators.train import evaluate, train
from tests.kit.comparison import golden_names, require_golden
from tests.kit.graphs import BASE, compared, grpo_graph, policy, sampled, small_grpo, trained
from tests.kit.turns import example_count
from tests.unit.test_check import headers

WARM = sft(BASE, "demos.parquet")


def warmed(graph: Graph, **changes: Any) -> Program:
    return Program((WARM, 20), Phase(graph, 30, **changes))


def with_reference(reference: Model) -> Graph:
    rollout = sampled()
    loss = clipped_policy_loss(compared(rollout), reference=logprobs(reference, rollout), beta=0.1)
    return Graph("g", trained(rollout, loss))


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(GraphError) as error:
        make()
    return str(error.value)


# The values


def test_a_pair_is_a_phase() -> None:
    assert Program((WARM, 20)) == Program(Phase(WARM, 20))
    assert Program((WARM, 20)).name == "sft"
    assert warmed(grpo_graph()).name == "sft-grpo"
    assert Program((WARM, 20), name="warm").name == "warm"


@pytest.mark.parametrize("other", [
    Program((WARM, 21)),
    Program((WARM, None)),
    Program((sft(BASE, "demos.parquet", lr=1e-3), 20)),
    Program((WARM, 20), (WARM, 20)),
    Program(Phase(WARM, 20, until=Threshold("loss/x", at_most=1.0))),
    Program(Phase(WARM, 20, optimizers=("policy",))),
    Program((WARM, 20), name="other"),
])  # fmt: skip
def test_whatever_a_phase_is_counts(other: Program) -> None:
    one = Program((WARM, 20))
    assert one != other
    assert identity(one) != identity(other)
    assert hash(one) == hash(Program((WARM, 20)))


@pytest.mark.parametrize("make, problem", [
    (Program, "Program: expected at least one phase, found none. Fix: Program((sft(...), 200)"),
    (lambda: Program(WARM), "expected a Phase, or a graph and its steps, found Graph Graph("),
    (lambda: Program((WARM, 1, 2)), "expected a Phase, or a graph and its steps, found tuple"),
    (lambda: Program((WARM, 1), name=""), "expected name to be text or None, found ''"),
    (lambda: Program((BASE, 1)), "Phase: expected graph to be a Graph, found 'tiny'"),
    (lambda: Phase(WARM, 0), "expected steps to be a whole number >= 1 or None, found 0"),
    (lambda: Phase(WARM, 1, until="x"), "expected until to be a Threshold or None, found 'x'"),
    (lambda: Phase(WARM, 1, optimizers="policy"), "expected optimizers to be names of Models"),
    (lambda: Phase(WARM, 1, optimizers=(policy,)), "expected optimizers to be names of Models"),
    (lambda: Phase(WARM, step=1), "Phase: unknown parameter 'step'. Fix: steps=1."),
    (lambda: Threshold("", at_least=1.0), "expected metric to be a metric's name, found ''"),
    (lambda: Threshold("eval/x"), "expected one of at_least and at_most. Fix: Threshold("),
    (lambda: Threshold("eval/x", at_least=1, at_most=2), "expected one of at_least and at_most"),
    (lambda: Threshold("eval/x", at_least="much"), "expected at_least to be a number or None"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_at_once(make: Callable[[], Any], problem: str) -> None:
    said = refusal(make)
    assert problem in said
    assert said.startswith("test_program.py:")


def test_a_threshold_is_met_by_a_number_on_its_side() -> None:
    high, low = Threshold("x", at_least=0.5), Threshold("x", at_most=0.5)
    for value, at_least, at_most in ((0.4, False, True), (0.5, True, True), (0.6, True, False)):
        assert (high.reached({"x": value}), low.reached({"x": value})) == (at_least, at_most)
    for nothing in ({}, {"x": None}, {"x": math.nan}):
        assert not high.reached(nothing)
    assert (str(high), str(low)) == ("x >= 0.5", "x <= 0.5")


# Whose weights go on


def taught(name: str) -> Graph:
    """A Graph that trains this Model on what the policy says."""
    model = Model(name, BASE, trainable=True)
    return Graph(name, train(model, sampled(), loss=supervised_loss(), lr=1.0))


COPY = with_reference(Model("reference", BASE, follows=policy, every=0))
NO_COPY = with_reference(Model("reference", BASE))
SLOW = with_reference(Model("slow", BASE, follows=policy, every=2))


POLICY_1 = {"policy": "policy 1"}


@pytest.mark.parametrize("graphs, begins", [
    ((small_grpo(),), {}),
    ((WARM, NO_COPY), POLICY_1),
    ((WARM, COPY), POLICY_1 | {"reference": "policy 1"}),
    ((COPY, COPY), POLICY_1 | {"reference": "policy 1"}),
    # without its leader it is a Model like others, and has the weights that it was left with
    ((WARM, COPY, NO_COPY), {"policy": "policy 2", "reference": "policy 1"}),
    ((WARM, SLOW), POLICY_1 | {"slow": "policy 1"}),
    ((SLOW, SLOW), POLICY_1 | {"slow": "slow 1"}),
    ((with_reference(Model("slow", BASE)), SLOW), POLICY_1),  # it had the weights of its base
    ((taught("reference"), NO_COPY), {"reference": "reference 1"}),
    ((WARM, WARM, taught("other")), {"policy": "policy 2"}),
    ((WARM, WARM, taught("other"), small_grpo()), {"policy": "policy 2"}),
], ids=[
    "at first", "a frozen Model", "a copy", "a copy again", "a copy that is read later",
    "a new follower", "an old follower", "a Model that follows later", "trained, then only read",
    "only read", "absent",
])  # fmt: skip
def test_whose_weights_the_models_of_the_last_phase_begin_with(
    graphs: tuple[Graph, ...], begins: dict[str, str]
) -> None:
    """Model and phase, of those that do not begin with their base."""
    program = Program(*[(graph, 1) for graph in graphs])
    assert list(program_faults(program)) == []
    carried = program.begins[-1].items()
    assert {name: f"{weights.model} {weights.phase}" for name, weights in carried} == begins


def test_a_follower_that_nothing_read_in_the_end_was_not_there() -> None:
    """The planner leaves out what only a port of weight 0 reads: the next phase does not count on
    its weights.
    """
    slow = Model("slow", BASE, follows=policy)
    lineage, graph = Lineage(), with_reference(slow)
    lineage.begin(graph)
    assert lineage.end(1, grpo_graph()).keys() == {"policy"}
    assert lineage.begin(graph)["policy"] == Carried(phase=1, model="policy")


# The check


def test_a_right_program_is_described_phase_by_phase() -> None:
    checked = check(Program((WARM, 20), Phase(COPY, 1, optimizers=("policy",))), headers)
    assert checked.warnings == ()
    assert [c.graph.name for c in checked.phases] == ["sft", "g"]
    require_golden("program/described.txt", checked.describe() + "\n")


@pytest.mark.parametrize("field, value", [
    ("base", "models/other"), ("head", "scalar"), ("dtype", "bfloat16"),
])  # fmt: skip
def test_unequal_specs_name_both_phases_and_the_field(field: str, value: str) -> None:
    other, writer = Model("policy", **{"base": BASE, field: value}), policy_of("writer")
    rollout = generate(writer, prompts("train.parquet", batch=4), max_tokens=4)
    read = scores(other, rollout) if field == "head" else logprobs(other, rollout)
    watched = evaluate(writer, read, every=1, allow_train_data=True)
    learns = train(writer, rollout, loss=supervised_loss(), lr=1e-3)
    program = Program((WARM, 1), (Graph("second", learns, watched), 1))
    error = refusal(lambda: check(program, headers))
    was = getattr(policy, field)
    expected = f"phase 2 'second', Model 'policy': expected {field}={was!r}, as in phase 1 'sft'"
    assert f"{expected}, since its weights go on, found {value!r}" in error
    assert f"Fix: {field}={was!r}, or another name for this Model." in error


def adapted(adapter: Lora | None, **how: Any) -> Phase:
    """Imitation by the policy with this adapter."""
    model = Model("policy", BASE, trainable=True, adapter=adapter)
    rows = demonstrations("demos.jsonl", batch=4)
    return Phase(Graph("tuned", train(model, rows, loss=supervised_loss(), lr=1e-3)), 2, **how)


def test_an_adapter_goes_on_as_it_was_or_merged() -> None:
    first = adapted(lora(rank=4))
    for second in (adapted(lora(rank=4)), adapted(None)):
        assert check(Program(first, second), headers)
    assert check(Program(adapted(None), first), headers)
    error = refusal(lambda: check(Program(first, adapted(lora(rank=8))), headers))
    assert (
        "phase 2 'tuned', Model 'policy': expected lora(rank=4, alpha=32), which phase 1 'tuned'"
        " trained, since its weights go on, found lora(rank=8, alpha=32). Fix:"
        " adapter=lora(rank=4, alpha=32), or no adapter=, and it begins with that one merged."
    ) in error
    error = refusal(lambda: check(Program(first, adapted(None, optimizers=("policy",))), headers))
    assert "it begins with its adapter merged" in error


def policy_of(name: str) -> Model:
    return Model(name, BASE, trainable=True)


@pytest.mark.parametrize("phases, said", [
    (lambda: (Phase(WARM, 1, optimizers=("policy",)),),
     "phase 1 'sft', optimizers: expected a Model that this phase and one before it train, found "
     "'policy': no phase before trains it. Fix: leave optimizers= out."),
    (lambda: ((WARM, 1), Phase(small_grpo(), 1, optimizers=("reference",))),
     "found 'reference': this phase does not train it. Fix: optimizers=('policy',)."),
    (lambda: ((WARM, 1), Phase(small_grpo(), 1, optimizers=("polcy",))),
     "found 'polcy': this phase does not train it. Fix: optimizers=('policy',)."),
])  # fmt: skip
def test_an_optimizer_that_cannot_go_on(phases: Callable[[], Any], said: str) -> None:
    assert said in refusal(lambda: check(Program(*phases()), headers))


def test_faults_of_all_phases_are_told_at_once_each_with_its_phase() -> None:
    bad = Graph("bad", train(policy, sampled(), loss=supervised_loss(), lr=-1.0))
    said = refusal(lambda: check(Program((bad, 1), (WARM, 1), (bad, 1)), headers))
    assert "phase 1 'bad', train" in said
    assert "phase 3 'bad', train" in said
    assert "phase 2" not in said


def test_a_base_that_was_trained_already_is_warned_of() -> None:
    (warning,) = check(warmed(small_grpo()), headers).warnings
    assert warning.rule == "base_again"
    assert warning.origin is not None
    require_golden("program/base_again.txt", f"{replace(warning, origin=None)}\n")
    student = Model("student", BASE, trainable=True)
    rollout = generate(student, prompts("train.parquet", batch=4), n=2, max_tokens=4)
    teacher = logprobs(Model("teacher", BASE), rollout)
    loss = clipped_policy_loss(compared(rollout), reference=teacher, beta=0.1)
    graph = Graph("g", train(student, rollout, loss=loss, lr=1e-3))
    (other,) = check(warmed(graph), headers).warnings
    assert "Fix: Model('policy', base), which has the trained weights. [base_again]" in str(other)


@pytest.mark.parametrize("program", [
    lambda: warmed(small_grpo(beta=0.0)),  # nothing reads the reference
    lambda: warmed(COPY),
    lambda: warmed(with_reference(Model("reference", "models/other"))),
    lambda: warmed(SLOW),
    lambda: Program((small_grpo(), 10), (WARM, 10)),  # nothing was trained before it
], ids=["unread", "copy", "another base", "follower", "first"])  # fmt: skip
def test_no_warning_where_none_is_due(program: Callable[[], Program]) -> None:
    assert [w.rule for w in check(program(), headers).warnings] == []


def test_warnings_of_a_phase_are_those_of_the_program() -> None:
    greedy = Graph("greedy", trained(sampled(temperature=0.0), supervised_loss()))
    warnings = check(Program((WARM, 1), (greedy, 1)), headers).warnings
    assert [w.rule for w in warnings] == ["greedy_group"]
    assert "phase 2 'greedy', generate 'rollout'" in str(warnings[0])


# JSON


PROGRAMS = {
    "short": lambda: Program((WARM, 20), (small_grpo(), None), name="mine"),
    "all": lambda: warmed(
        small_grpo(), until=Threshold("eval/x", at_least=0.5), optimizers=("policy",)
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("imports", [True, False])
def test_a_program_is_read_as_it_was_written(name: str, imports: bool) -> None:
    program = PROGRAMS[name]()
    again = read(write_snapshot(program), imports=imports)
    assert write_snapshot(again) == write_snapshot(program)
    assert identity(again) == identity(program)
    if imports:
        assert again == program
        assert again.phases[1].origin == program.phases[1].origin


def test_a_graph_is_written_and_read_as_ever() -> None:
    graph = small_grpo()
    assert write_snapshot(graph) == to_json(graph)
    assert read(write_snapshot(graph)) == graph
    assert identity(graph) == fingerprint(graph)
    assert named_modules(write_snapshot(warmed(graph))) == named_modules(to_json(graph))


@pytest.mark.parametrize("of_phase, change, problem", [
    (False, {"format": 2}, "it has format 2, and this version reads up to 1"),
    (False, {"format": "1"}, "expected a Program with its format number, found none"),
    (False, {"phases": {}}, "expected an entry with its phases, found {}"),
    (False, {"phases": []}, "expected at least one phase"),
    (False, {"phases": [1]}, "phase 1: expected an entry with its graph, found 1"),
    (False, {"name": 1}, "expected an entry with its name, found 1"),
    (True, {"steps": "many"}, "phase 2: expected Phase.steps to be"),
    (True, {"steps": 0}, "expected steps to be a whole number >= 1 or None, found 0"),
    (True, {"until": {"metric": "x", "more": 1}}, "phase 2: Threshold has no field 'more'"),
    (True, {"until": {"metric": "x"}}, "expected one of at_least and at_most"),
    (True, {"optimizers": [1]}, "optimizers"),
    (True, {"graph": {"format": 2}}, "phase 2: expected a graph with its format number"),
])  # fmt: skip
def test_another_document_is_refused(of_phase: bool, change: dict[str, Any], problem: str) -> None:
    """Of the Program, or of its second phase."""
    document = json.loads(write_snapshot(PROGRAMS["all"]()))
    changed = document["phases"][1] if of_phase else document
    changed.update(change)
    assert problem in refusal(lambda: read(json.dumps(document)))


def test_a_program_is_no_graph() -> None:
    error = refusal(lambda: from_json(write_snapshot(PROGRAMS["all"]()), "runs/a/graph.json"))
    assert "runs/a/graph.json: expected one graph, found a Program of several" in error


# Drawings and differences


@pytest.mark.parametrize("form, ending", [("text", "txt"), ("mermaid", "mmd"), ("dot", "dot")])
def test_golden(form: Any, ending: str) -> None:
    require_golden(f"program/drawn.{ending}", draw(PROGRAMS["all"](), form))


def test_the_picture_has_every_node_of_every_phase() -> None:
    program = PROGRAMS["all"]()
    pictures = [make_picture(phase.graph) for phase in program.phases]
    text = draw_program_svg(program_picture(program, pictures))
    ElementTree.fromstring(text)
    for phase in program.phases:
        assert all(node.name in text for node in phase.graph.nodes)
    assert "policy: begins with its weights after phase 1" in text
    assert "<svg" in draw(program, "svg")


def test_a_difference_is_told_phase_by_phase() -> None:
    a, b = PROGRAMS["short"](), PROGRAMS["all"]()
    again = Program(*b.phases, (small_grpo(n=4), 5))
    assert not compare(a, a)
    shown = f"{compare(a, b)}\n{compare(b, again)}\n{compare(again, b)}"
    require_golden("program/compared.txt", f"{shown}\n{compare(WARM, b)}\n{compare(a, a)}")
    assert isinstance(compare(WARM, WARM), Difference)


# For any line of phases


@settings(max_examples=example_count(60), deadline=None)
@given(st.lists(st.sampled_from(["trains", "copies", "is without"]), max_size=6))
def test_a_model_begins_with_its_last_training(line: list[str]) -> None:
    """Phases by what each does with the policy."""
    made = {"trains": grpo_graph(), "copies": COPY, "is without": alone("other")}
    program = Program(*[(made[what], 1) for what in ["trains", *line]])
    last = {"policy": 1}
    for number, what in enumerate(line, start=2):
        begins = program.begins[number - 1]
        name = "other" if what == "is without" else "policy"
        wanted = Carried(phase=last[name], model=name) if name in last else None
        assert begins.get(name) == wanted
        if what == "copies":
            assert begins["reference"] == wanted
        last[name] = number


def alone(name: str) -> Graph:
    """A Graph of no other Model."""
    model = policy_of(name)
    rollout = generate(model, prompts("train.parquet", batch=4), max_tokens=4)
    return Graph(name, train(model, rollout, loss=supervised_loss(), lr=1.0))


def test_goldens_are_all_used() -> None:
    assert golden_names("program") == {"described", "base_again", "compared", "drawn"}
    assert golden_names("program", "mmd") == golden_names("program", "dot") == {"drawn"}
