"""Runs of Programs: weights and optimizers across phases, metrics, resumes, the command line."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.errors import CheckpointError, GraphError, PlanError, RunError
from dataflow.graph import Phase, Threshold
from dataflow.model import Model
from dataflow.node import Node
from dataflow.program import Program
from dataflow.program_snapshot import read
from engine.api import Result, peek, plan, resume
from engine.cli import main
from engine.plan.program_plan import phase_seed
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import evaluate
from tests.kit import processes as kit
from tests.kit.killable_run import killable_run, require_stopped
from tests.kit.run_graphs import followed, small
from tests.kit.run_programs import (
    STEPS,
    WARM_STEPS,
    code_points,
    early,
    reinforced,
    taught,
    two_phases,
    warm,
)
from tests.kit.runs import (
    column,
    metrics,
    require_same_runs,
    samples,
    state_of,
    steps_stored,
    timeless,
)
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
ALL = WARM_STEPS + STEPS


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The undisturbed run of two phases, with every checkpoint."""
    tiny = TinyRuns(folder=tiny_folder, runs=tmp_path_factory.mktemp("whole"))
    return tiny.run(two_phases(tiny_folder), None, name="whole", checkpoint_every=2, keep=10)


@pytest.fixture
def copy(whole: Result, tiny: TinyRuns) -> Path:
    """Its folder, to be changed."""
    return Path(shutil.copytree(whole.folder, tiny.runs / "whole"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def of_phase(run: Result, number: int) -> list[dict[str, Any]]:
    """The rows of a phase as its graph alone would have them."""
    rows = [row for row in timeless(metrics(run)) if row["phase"] == number]
    before = rows[0]["step"] - 1
    for row in rows:
        row["step"] -= before
        del row["phase"]
    return rows


# one phase after another


def test_steps_go_on_and_each_line_names_its_phase(whole: Result) -> None:
    assert column(whole, "step") == list(range(1, ALL + 1))
    assert column(whole, "phase") == [1] * WARM_STEPS + [2] * STEPS
    assert steps_stored(whole) == [2, 3, 5, 7, 8], "by the Steps of each phase, and at its end"
    rows = samples(whole).to_pylist()
    assert {(row["step"], row["phase"]) for row in rows} == {(s, 2) for s in range(4, ALL + 1)}
    assert sorted(p.name for p in (whole.folder / "trace").iterdir()) == [
        "run_0_phase_1.json", "run_1_phase_2.json",
    ]  # fmt: skip
    assert "phase 2 of 2: grpo, 5 Steps" in (whole.folder / "plan.txt").read_text()
    kept = json.loads((whole.folder / "checkpoints/step_7/manifest.json").read_text())["meta"]
    assert kept == {"graph": "grpo", "phase": 2, "boundaries": [3]}


def test_the_first_phase_is_the_run_of_its_graph(whole: Result, tiny: TinyRuns) -> None:
    alone = tiny.run(warm, WARM_STEPS)
    assert of_phase(whole, 1) == timeless(metrics(alone))
    boundary = whole.folder / "checkpoints" / f"step_{WARM_STEPS}" / "train_policy"
    assert files(boundary) == files(alone.trained["policy"])


@pytest.mark.long
def test_the_next_one_is_that_of_its_graph_on_the_weights_so_far(
    whole: Result, tiny: TinyRuns
) -> None:
    """Schedules, evaluations and draws count its own Steps; the frozen copy is the policy as the
    phase began: here a Model that has just these weights as its base.
    """
    boundary = whole.folder / "checkpoints" / f"step_{WARM_STEPS}" / "train_policy"
    graph = reinforced(tiny.folder, str(boundary), copied=False)
    alone = tiny.run(graph, STEPS, seed=phase_seed(0, 2))
    assert of_phase(whole, 2) == timeless(metrics(alone))
    assert files(whole.trained["policy"]) == files(alone.trained["policy"])
    assert "eval/initial/vowels" in of_phase(whole, 2)[0]
    assert of_phase(whole, 2)[0]["optim/lr"] == pytest.approx(1e-3, rel=0.2)
    (best,) = whole.best["evaluate"]
    (other,) = alone.best["evaluate"]
    assert best.parent.name == "best_phase_2_evaluate"
    assert int(best.name[5:]) == WARM_STEPS + int(other.name[5:])


def test_its_draws_are_not_those_of_the_phase_before() -> None:
    """Of any two phases, and of any two runs; the first phase's are those of its graph alone."""
    assert phase_seed(5, 1) == 5
    assert len({phase_seed(seed, n) for seed in range(20) for n in range(1, 20)}) == 19 * 20


@pytest.mark.long
def test_in_workers_of_their_own_the_bits_are_the_same(whole: Result, tiny: TinyRuns) -> None:
    apart = tiny.run(two_phases, None, workers="apart", checkpoint_every=2, keep=10)
    require_same_runs(apart, whole)


def test_outside_of_a_program_a_frozen_copy_is_its_leaders_base(tiny: TinyRuns) -> None:
    base = str(tiny.folder / "model")
    for model in plan(reinforced(tiny.folder), tiny.options()).models:
        assert (model.base, model.follows) == (base, ""), model.name


# optimizers


def moments(run: Result, step: int) -> list[float]:
    """How many updates AdamW's moments count, by parameter."""
    path = run.folder / "checkpoints" / f"step_{step}" / "train_policy" / "optimizer.pt"
    state = torch.load(path, weights_only=True)["adam"]["state"]
    return sorted({float(of["step"]) for of in state.values()})


@pytest.mark.long
def test_an_optimizer_goes_on_only_where_it_is_asked_to(tiny: TinyRuns) -> None:
    graph = warm(tiny.folder)
    anew = tiny.run(Program((graph, 2), (graph, 1)), None, name="anew")
    asked = Phase(graph, 1, optimizers=("policy",))
    on = tiny.run(Program((graph, 2), asked), None, name="on")
    assert moments(anew, 3) == [1.0]
    assert moments(on, 3) == [3.0]
    assert metrics(anew)[-1]["loss/supervised_loss"] == metrics(on)[-1]["loss/supervised_loss"]
    assert files(anew.trained["policy"]) != files(on.trained["policy"])


# Models that a phase lacks


@pytest.mark.long
def test_an_absent_model_keeps_its_weights_through_retention(tiny: TinyRuns) -> None:
    """Four phases, of which two know nothing of the policy; one checkpoint is kept."""
    other, later = taught(tiny.folder, "other"), taught(tiny.folder, "policy", start=9)
    program = Program((warm(tiny.folder), 2), (other, 2), (other, 2), (later, 1))
    run = tiny.run(program, None, keep=1)
    assert steps_stored(run) == [2, 6, 7], "what has the policy's last weights, and the other's"
    after = files(run.folder / "checkpoints" / "step_2" / "train_policy")
    assert after == files(run.trained["policy"])
    assert run.trained["other"].parts[-2:] == ("step_6", "train_other")
    assert after != files(tiny.folder / "model")


@pytest.mark.long
def test_a_trained_model_is_only_read_in_the_next_phase(tiny: TinyRuns) -> None:
    """It has its weights there, and none of the same base has them."""
    held = prompts(str(tiny.folder / "test.parquet"), shuffle=False, name="held_out")

    def look(name: str) -> Node:
        model = Model(name, str(tiny.folder / "model"))
        answers = generate(model, held, max_tokens=6, temperature=0.0, name=name)
        score = reward(code_points, answers, name=f"of_{name}")
        return evaluate(model, score, every=1, name=f"look_{name}")

    second = taught(tiny.folder, "student").extend(look("plain"), look("policy"))
    program = Program((warm(tiny.folder), 8), (second, 1))
    planned = plan(program, tiny.options(None))
    modules = {n.name: n.models[0].module for n in planned.phases[1].nodes if n.models}
    assert modules["plain"] != modules["policy"]
    row = metrics(tiny.run(program, None))[-1]
    assert row["eval/look_plain/reward"] != row["eval/look_policy/reward"]


@pytest.mark.long
def test_a_follower_goes_on_where_it_was_left(tiny: TinyRuns) -> None:
    run = tiny.run(Program((followed(tiny.folder), 2), (followed(tiny.folder), 1)), None, keep=10)
    before, after = (run.folder / "checkpoints" / f"step_{n}" / "followers" for n in (2, 3))
    assert files(before / "slow") == files(after / "slow"), "it moves every second Step of a phase"
    past, later = state_of(before / "past"), state_of(after / "past")
    assert all(torch.equal(past[name], later[name]) for name in past)


# thresholds and data


def test_a_threshold_ends_its_phase_and_the_last_one_the_run(tiny: TinyRuns) -> None:
    ends = early(tiny.folder).phases[0]
    run = tiny.run(Program(ends, ends), None)
    assert column(run, "phase") == [1, 2]
    cut_back(run.folder, 1)
    again = resume(run.folder)
    assert column(run, "phase") == [1, 2]
    assert (again.step, again.reason) == (2, "reached optim/lr >= 0.01")
    assert resume(run.folder).reason == "nothing to do, as all 2 phases are done"


def test_a_threshold_whose_metric_never_comes(tiny: TinyRuns) -> None:
    """A misspelt name makes no longer phase, nor does a resume pass."""
    ends = Phase(warm(tiny.folder), 2, until=Threshold("optim/lrr", at_least=1e-2))
    program = Program(ends, (small(tiny.folder), 1))
    said = "phase 1 'sft': its threshold is of 'optim/lrr', and no Step of it had that metric"
    with pytest.raises(RunError, match=f"{said}. Fix: until=Threshold\\('optim/lr'"):
        tiny.run(program, None)
    with pytest.raises(RunError, match=said):
        resume(tiny.runs / "sft-grpo")


@pytest.mark.long
def test_a_phase_without_steps_is_one_pass_over_its_data(tiny: TinyRuns) -> None:
    run = tiny.run(Program((warm(tiny.folder), None), (warm(tiny.folder), 1)), None)
    assert column(run, "phase") == [1] * 4 + [2], "24 rows in batches of 6"
    cut_back(run.folder, 4)
    assert resume(run.folder).step == 5


# resumed


def cut_back(folder: Path, step: int) -> None:
    """Leave what a kill after this Step's checkpoint would have left."""
    for later in steps_stored(folder):
        if later > step:
            shutil.rmtree(folder / "checkpoints" / f"step_{later}")


@pytest.mark.parametrize("step", [
    pytest.param(2, id="first", marks=pytest.mark.long), pytest.param(3, id="boundary"),
    pytest.param(5, id="second"), pytest.param(8, id="end", marks=pytest.mark.long),
])  # fmt: skip
def test_resumed_in_any_phase_the_bits_are_the_same(whole: Result, copy: Path, step: int) -> None:
    cut_back(copy, step)
    assert resume(copy).step == ALL
    require_same_runs(copy, whole)


@pytest.mark.long
def test_ctrl_c_ends_the_run_and_not_only_its_phase(whole: Result, tiny: TinyRuns) -> None:
    """At the last Step of a phase: the next one does not begin until the run is resumed."""
    options = tiny.options(None, name="whole", checkpoint_every=2, keep=10)
    with killable_run("program", tiny.folder, options, f"hold={WARM_STEPS}") as process:
        kit.wait_for(process, f"step {WARM_STEPS}")
        process.send_signal(signal.SIGINT)
        kit.wait_for_error(process, "Ctrl-C again")
        kit.go_on(process)
        require_stopped(process, tiny.runs / "whole", "Ctrl-C", 130)
    assert column(tiny.runs / "whole", "step") == [1, 2, 3]
    assert resume(tiny.runs / "whole").step == ALL
    require_same_runs(tiny.runs / "whole", whole)


def test_a_damaged_boundary_is_refused_where_its_weights_are_needed(copy: Path) -> None:
    damaged = copy / "checkpoints" / "step_3" / "train_policy" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"step_3: cannot be used: .* has .* bytes"):
        resume(copy)


@pytest.mark.long
def test_a_program_that_changed_is_refused(copy: Path, tiny: TinyRuns) -> None:
    first, second = two_phases(tiny.folder).phases
    longer = Program(first, (second.graph, STEPS + 1))
    with pytest.raises(CheckpointError, match=r"phase 2: steps: 5 -> 6"):
        resume(copy, graph=longer)
    with pytest.raises(CheckpointError, match=r"node: 2/near: there -> not there"):
        resume(copy, graph=Program(first, (small(tiny.folder), STEPS)))
    assert resume(copy, graph=longer, accept_changes=True).step == ALL + 1


# what is refused before anything runs


def test_a_fault_of_the_second_phase_is_found_before_the_first_runs(tiny: TinyRuns) -> None:
    with pytest.raises(PlanError, match="phase 2 'grpo': place: replicas: prompts=2, but it is a"):
        tiny.run(two_phases, None, replicas={"prompts": 2})
    with pytest.raises(PlanError, match="expected a node of the plan, found 'rolout'"):
        tiny.run(two_phases, None, replicas={"rolout": 2})
    assert not tiny.runs.exists()


def test_wishes_for_places_count_in_the_phases_that_have_the_nodes(tiny: TinyRuns) -> None:
    pin, turns = {"rollout": "gen", "greedy": "gen"}, (("gen", "main"),)
    options = tiny.options(None, pin=pin, turns=turns)
    first, second = plan(two_phases(tiny.folder), options).phases
    assert (first.workers, first.turns) == (("main",), ())
    assert set(second.workers) == {"gen", "main"}
    assert second.turns == (("gen", "main"),)
    together = plan(
        two_phases(tiny.folder),
        tiny.options(None, workers="apart", together=(("rollout", "score", "demonstrations"),)),
    )
    assert together.phases[1].node("score").workers == together.phases[1].node("rollout").workers


@pytest.mark.long
def test_warnings_are_told_once_and_strict_refuses_them(
    tiny: TinyRuns, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program((warm(tiny.folder), 1), (reinforced(tiny.folder, copied=False), 1))
    with pytest.raises(GraphError, match="base_again"):
        tiny.run(program, None, strict=True)
    tiny.run(program, None)
    assert caplog.text.count("[base_again]") == 1


# the command line


TWO = "tests.kit.run_programs:two"
Command = Callable[..., str]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """The command line in this test's folder; it returns all that was printed."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> str:
        ended = main(list(words))
        out = capsys.readouterr()
        assert ended == code, out.err
        return out.out + out.err

    return run


@pytest.mark.long
def test_every_command_takes_a_program(command: Command, tiny: TinyRuns) -> None:
    target = (TWO, "--folder", str(tiny.folder))
    assert "phase 2 of 2: grpo, 5 Steps" in command("check", *target)
    assert "near: begins with those of 'policy' after phase 1" in command("draw", *target)
    assert "frozen copy of policy as it begins" in command("explain", *target)
    text = command("diff", target[0], "tests.kit.run_programs:larger", *target[1:])
    assert "phase 1\n  steps: 3 -> 4\n\nphase 2: no difference" in text
    options = ("--runs", "runs", "--threads", "1", "--no-progress")
    text = command("run", *target, "--steps-after", "1", *options)
    assert "all steps are done: step 4" in text
    kept = "runs/sft-grpo/graph.json"
    assert isinstance(read(Path(kept).read_text()), Program)
    assert command("diff", kept, *target, "--steps-after", "1").count("no difference") == 2
    assert "phase 1 of 2: sft, 3 Steps" in command("draw", kept)
    assert "measured" in command("explain", *target, "--measured", "runs/sft-grpo")
    text = command("resume", "runs/sft-grpo")
    assert "nothing to do, as all 2 phases are done: step 4" in text


def test_peek_finds_the_phase_of_a_node(command: Command, tiny: TinyRuns) -> None:
    text = command("peek", TWO, "rollout", "--folder", str(tiny.folder), "--rows", "1")
    assert "completion" in text
    program = Program((small(tiny.folder), 1), (small(tiny.folder), 1))
    with pytest.raises(GraphError, match=r"found several of this name. Fix: 1/rollout"):
        peek(program, "rollout")
    with pytest.raises(GraphError, match=r"found none of this name. Fix: 1/rollout"):
        peek(program, "rolout")
    assert peek(program, "2/rollout", 1, tiny.options(None)).num_rows == 1


def test_a_program_says_its_steps_itself(command: Command, tiny: TinyRuns) -> None:
    text = command("run", TWO, "--folder", str(tiny.folder), "--steps", "3", code=1)
    assert "options: --steps: a Program's phases have Steps of their own, found steps=3" in text
