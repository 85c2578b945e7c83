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
from dataflow.model import Model
from dataflow.program import Phase, Program
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


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def of_phase(run: Result, number: int) -> list[dict[str, Any]]:
    """The rows of a phase as its graph alone would have them."""
    rows = [dict(row) for row in timeless(metrics(run)) if row["phase"] == number]
    first = rows[0]["step"] - 1
    return [{**row, "step": row["step"] - first} for row in rows]


def without_phase(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "phase"} for row in rows]


# one phase after another


def test_steps_go_on_and_each_line_names_its_phase(whole: Result) -> None:
    assert whole.step == ALL
    assert column(whole, "step") == list(range(1, ALL + 1))
    assert column(whole, "phase") == [1] * WARM_STEPS + [2] * STEPS
    assert steps_stored(whole) == [2, 3, 5, 7, 8], "by the Steps of each phase, and at its end"
    rows = samples(whole).to_pylist()
    assert {(row["step"], row["phase"]) for row in rows} == {(s, 2) for s in range(4, ALL + 1)}
    assert sorted(p.name for p in (whole.folder / "trace").iterdir()) == [
        "run_0_phase_1.json", "run_1_phase_2.json",
    ]  # fmt: skip
    plans = json.loads((whole.folder / "plan.json").read_text())["phases"]
    assert [p["graph"] for p in plans] == ["sft", "grpo"]
    assert "phase 2 of 2: grpo, 5 Steps" in (whole.folder / "plan.txt").read_text()
    kept = json.loads((whole.folder / "checkpoints/step_7/manifest.json").read_text())["meta"]
    assert kept == {"graph": "grpo", "phase": 2, "boundaries": [3]}


def test_the_first_phase_is_the_run_of_its_graph(whole: Result, tiny: TinyRuns) -> None:
    alone = tiny.run(warm, WARM_STEPS)
    assert without_phase(of_phase(whole, 1)) == timeless(metrics(alone))
    boundary = whole.folder / "checkpoints" / f"step_{WARM_STEPS}" / "train_policy"
    assert files(boundary) == files(alone.trained["policy"])


def test_the_next_one_is_that_of_its_graph_on_the_weights_so_far(
    whole: Result, tiny: TinyRuns
) -> None:
    """Schedules, evaluations and draws count its own Steps; the frozen copy is the policy as the
    phase began: here a Model that has just these weights as its base.
    """
    boundary = whole.folder / "checkpoints" / f"step_{WARM_STEPS}" / "train_policy"
    graph = reinforced(tiny.folder, str(boundary), copied=False)
    alone = tiny.run(graph, STEPS, seed=phase_seed(0, 2))
    assert without_phase(of_phase(whole, 2)) == timeless(metrics(alone))
    assert files(whole.trained["policy"]) == files(alone.trained["policy"])
    assert "eval/initial/vowels" in of_phase(whole, 2)[0]
    assert of_phase(whole, 2)[0]["optim/lr"] == pytest.approx(1e-3, rel=0.2)
    (best,) = whole.best["evaluate"]
    (other,) = alone.best["evaluate"]
    assert best.parent.name == "best_phase_2_evaluate"
    assert int(best.name[5:]) == WARM_STEPS + int(other.name[5:])


def test_its_draws_are_not_those_of_the_phase_before(tiny: TinyRuns) -> None:
    """Two phases of one graph, of which neither learns, see other prompts and say other things."""
    assert phase_seed(5, 1) == 5
    assert len({phase_seed(seed, n) for seed in range(20) for n in range(1, 20)}) == 19 * 20
    graph = small(tiny.folder)
    said = samples(tiny.run(Program((graph, 1), (graph, 1)), None)).to_pylist()
    first, second = ([r["completion"] for r in said if r["phase"] == n] for n in (1, 2))
    assert first != second


@pytest.mark.long
def test_in_workers_of_their_own_the_bits_are_the_same(whole: Result, tiny: TinyRuns) -> None:
    apart = tiny.run(two_phases, None, workers="apart", checkpoint_every=2, keep=10, name="whole")
    assert without_phase(of_phase(apart, 2)) == without_phase(of_phase(whole, 2))
    assert files(apart.trained["policy"]) == files(whole.trained["policy"])
    assert samples(apart).equals(samples(whole))


def test_a_frozen_copy_stays_while_its_leader_learns(tiny: TinyRuns) -> None:
    """Outside of a Program it is the leader as it was at Step 0: its base."""
    copied, fixed = (
        tiny.run(reinforced(tiny.folder, copied=c), 3, name=str(c)) for c in (True, False)
    )
    assert timeless(metrics(copied)) == timeless(metrics(fixed))
    shown = json.loads((copied.folder / "plan.json").read_text())["models"]
    assert [(m["name"], m["follows"]) for m in shown] == [("policy", ""), ("near", "")]


# optimizers


def moments(run: Result, step: int) -> list[float]:
    """How many updates AdamW's moments count, by parameter."""
    path = run.folder / "checkpoints" / f"step_{step}" / "train_policy" / "optimizer.pt"
    state = torch.load(path, weights_only=True)["adam"]["state"]
    return sorted({float(of["step"]) for of in state.values()})


@pytest.mark.parametrize("workers", ["one", pytest.param("apart", marks=pytest.mark.long)])
def test_an_optimizer_goes_on_only_where_it_is_asked_to(tiny: TinyRuns, workers: str) -> None:
    graph = warm(tiny.folder)
    anew = tiny.run(Program((graph, 2), (graph, 1)), None, name="anew", workers=workers)
    asked = Phase(graph, 1, optimizers=("policy",))
    on = tiny.run(Program((graph, 2), asked), None, name="on", workers=workers)
    assert moments(anew, 3) == [1.0]
    assert moments(on, 3) == [3.0]
    assert metrics(anew)[-1]["loss/supervised_loss"] == metrics(on)[-1]["loss/supervised_loss"]
    assert files(anew.trained["policy"]) != files(on.trained["policy"])


# Models that a phase lacks


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


def test_a_trained_model_is_only_read_in_the_next_phase(tiny: TinyRuns) -> None:
    """It has its weights there, and none of the same base has them."""
    base = str(tiny.folder / "model")
    held = prompts(str(tiny.folder / "test.parquet"), shuffle=False, name="held_out")
    plain, learnt = Model("plain", base), Model("policy", base)
    said = [generate(m, held, max_tokens=6, temperature=0.0, name=m.name) for m in (plain, learnt)]
    scores = [reward(code_points, rollout, name=f"of_{rollout.node.name}") for rollout in said]
    looks = [
        evaluate(model, score, every=1, name=f"look_{model.name}")
        for model, score in zip((plain, learnt), scores, strict=True)
    ]
    second = taught(tiny.folder, "student").extend(*looks)
    program = Program((warm(tiny.folder), 8), (second, 1))
    planned = plan(program, tiny.options(None))
    modules = {n.name: n.models[0].module for n in planned.phases[1].nodes if n.models}
    assert modules["plain"] != modules["policy"]
    run = tiny.run(program, None)
    row = metrics(run)[-1]
    assert row["eval/look_plain/reward"] != row["eval/look_policy/reward"]


def test_a_follower_goes_on_where_it_was_left(tiny: TinyRuns) -> None:
    run = tiny.run(Program((followed(tiny.folder), 2), (followed(tiny.folder), 1)), None, keep=10)
    slow = [
        files(run.folder / "checkpoints" / f"step_{step}" / "followers" / "slow") for step in (2, 3)
    ]
    assert slow[0] == slow[1], "it moves every second Step of a phase"
    past = [
        state_of(run.folder / "checkpoints" / f"step_{step}" / "followers" / "past")
        for step in (2, 3)
    ]
    assert all(torch.equal(past[0][name], past[1][name]) for name in past[0])


# thresholds and data


def test_a_threshold_ends_its_phase(tiny: TinyRuns) -> None:
    run = tiny.run(early, None)
    assert column(run, "phase") == [1, 2, 2]
    assert run.reason == "all steps are done"
    assert resume(cut_back(run, 1)).step == 3
    assert column(run, "phase") == [1, 2, 2]


def test_a_threshold_of_the_last_phase_ends_the_run(tiny: TinyRuns) -> None:
    program = early(tiny.folder)
    run = tiny.run(Program(program.phases[1], program.phases[0]), None)
    assert (run.step, run.reason) == (3, "reached optim/lr >= 0.01")
    again = resume(run.folder)
    assert (again.step, again.reason) == (3, "nothing to do, as all 2 phases are done")


def test_a_threshold_whose_metric_never_comes(tiny: TinyRuns) -> None:
    """A misspelt name makes no longer phase, nor does a resume pass."""
    program = early(tiny.folder, metric="optim/lrr")
    program = Program(
        Phase(warm(tiny.folder), 2, until=program.phases[0].until), (small(tiny.folder), 1)
    )
    said = "phase 1 'sft': its threshold is of 'optim/lrr', and no Step of it had that metric"
    with pytest.raises(RunError, match=f"{said}. Fix: until=Threshold\\('optim/lr'"):
        tiny.run(program, None)
    with pytest.raises(RunError, match=said):
        resume(tiny.runs / "sft-grpo")


def test_a_phase_without_steps_is_one_pass_over_its_data(tiny: TinyRuns) -> None:
    run = tiny.run(Program((warm(tiny.folder), None), (warm(tiny.folder), 1)), None)
    assert column(run, "phase") == [1] * 4 + [2], "24 rows in batches of 6"
    assert resume(cut_back(run, 4)).step == 5


# resumed


def cut_back(run: Result, step: int) -> Path:
    """The folder as a kill after this Step's checkpoint would have left it."""
    for later in steps_stored(run):
        if later > step:
            shutil.rmtree(run.folder / "checkpoints" / f"step_{later}")
    return run.folder


@pytest.mark.parametrize("step", [
    pytest.param(2, id="first", marks=pytest.mark.long), pytest.param(3, id="boundary"),
    pytest.param(5, id="second"), pytest.param(8, id="end", marks=pytest.mark.long),
])  # fmt: skip
def test_resumed_in_any_phase_the_bits_are_the_same(
    whole: Result, tiny: TinyRuns, step: int
) -> None:
    copy = tiny.runs / "whole"
    shutil.copytree(whole.folder, copy)
    for later in (s for s in steps_stored(copy) if s > step):
        shutil.rmtree(copy / "checkpoints" / f"step_{later}")
    assert resume(copy).step == ALL
    require_same_runs(copy, whole)


@pytest.mark.parametrize("step", [
    5, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long),
    pytest.param(4, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.long),
])  # fmt: skip
def test_killed_in_any_phase_and_resumed(whole: Result, tiny: TinyRuns, step: int) -> None:
    options = tiny.options(None, name="whole", checkpoint_every=2, keep=10)
    with killable_run("program", tiny.folder, options, f"hold={step}") as process:
        kit.wait_for(process, f"step {step}")
        process.kill()
    assert resume(tiny.runs / "whole").step == ALL
    require_same_runs(tiny.runs / "whole", whole)


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


def test_a_damaged_boundary_is_refused_where_its_weights_are_needed(
    whole: Result, tiny: TinyRuns
) -> None:
    copy = tiny.runs / "whole"
    shutil.copytree(whole.folder, copy)
    damaged = copy / "checkpoints" / "step_3" / "train_policy" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"step_3: cannot be used: .* has .* bytes"):
        resume(copy)


def test_a_program_that_changed_is_refused(whole: Result, tiny: TinyRuns) -> None:
    copy = tiny.runs / "whole"
    shutil.copytree(whole.folder, copy)
    phases = two_phases(tiny.folder).phases
    other = Program(phases[0], (phases[1].graph, STEPS + 1))
    with pytest.raises(CheckpointError, match=r"phase 2: steps: 5 -> 6"):
        resume(copy, graph=other)
    less = Program((warm(tiny.folder), WARM_STEPS), (small(tiny.folder), STEPS))
    with pytest.raises(CheckpointError, match=r"node: 2/near: there -> not there"):
        resume(copy, graph=less)
    assert resume(copy, graph=other, accept_changes=True).step == ALL + 1


# what is refused before anything runs


def test_a_fault_of_the_second_phase_is_found_before_the_first_runs(tiny: TinyRuns) -> None:
    with pytest.raises(PlanError, match="phase 2 'grpo': place: replicas: prompts=2, but it is a"):
        tiny.run(two_phases, None, replicas={"prompts": 2})
    with pytest.raises(PlanError, match="expected a node of the plan, found 'rolout'"):
        tiny.run(two_phases, None, replicas={"rolout": 2})
    with pytest.raises(
        PlanError, match="a Program's phases have Steps of their own, found steps=3"
    ):
        tiny.run(two_phases, 3)
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
Ran = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Ran:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        code = main(list(words))
        out = capsys.readouterr()
        return code, out.out + out.err

    return run


def test_every_command_takes_a_program(command: Ran, tiny: TinyRuns) -> None:
    target = (TWO, "--folder", str(tiny.folder))
    for name, shown in (
        ("check", "phase 2 of 2: grpo, 5 Steps"),
        ("draw", "near: begins with those of 'policy' after phase 1"),
        ("explain", "frozen copy of policy as it begins"),
    ):
        code, text = command(name, *target)
        assert code == 0, text
        assert shown in text
        assert "train_policy" in text
    code, text = command("diff", target[0], "tests.kit.run_programs:larger", *target[1:])
    assert code == 0
    assert "phase 1\n  steps: 3 -> 4\n\nphase 2: no difference" in text
    options = ("--runs", "runs", "--threads", "1", "--no-progress")
    code, text = command("run", *target, "--steps-after", "1", *options)
    assert code == 0, text
    assert "all steps are done: step 4" in text
    kept = str(Path("runs") / "sft-grpo" / "graph.json")
    assert isinstance(read(Path(kept).read_text()), Program)
    assert command("diff", kept, *target, "--steps-after", "1")[1].count("no difference") == 2
    code, text = command("draw", kept)
    assert code == 0
    assert "phase 1 of 2: sft, 3 Steps" in text
    code, text = command("explain", *target, "--measured", "runs/sft-grpo")
    assert code == 0, text
    assert "measured" in text
    code, text = command("resume", "runs/sft-grpo")
    assert code == 0, text
    assert "nothing to do, as all 2 phases are done: step 4" in text


def test_peek_finds_the_phase_of_a_node(command: Ran, tiny: TinyRuns) -> None:
    target = (TWO, "rollout", "--folder", str(tiny.folder), "--rows", "1")
    code, text = command("peek", *target)
    assert code == 0, text
    assert "completion" in text
    program = Program((small(tiny.folder), 1), (small(tiny.folder), 1))
    with pytest.raises(GraphError, match=r"found several of this name. Fix: 1/rollout"):
        peek(program, "rollout")
    with pytest.raises(GraphError, match=r"found none of this name. Fix: 1/rollout"):
        peek(program, "rolout")
    assert peek(program, "2/rollout", 1, tiny.options(None)).num_rows == 1


def test_a_program_says_its_steps_itself(command: Ran, tiny: TinyRuns) -> None:
    code, text = command("run", TWO, "--folder", str(tiny.folder), "--steps", "3")
    assert code == 1, text
    assert "options: --steps: a Program's phases have Steps of their own, found steps=3" in text
