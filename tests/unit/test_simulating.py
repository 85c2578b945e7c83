"""`dataflow simulate` and `--what-if`: which plans there are, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import GraphError, PlanError
from dataflow.graph import Graph
from dataflow.program import Program
from dataflow.set_expressions import edited
from engine.cli import main
from engine.keep.trace.timeline import read_trace
from engine.plan.options import RunOptions
from engine.predict.simulations import (
    MOST,
    Variant,
    change_variant,
    expand_values,
    simulate,
    what_if,
)
from tests.kit.comparison import require_golden
from tests.kit.graphs import grpo_graph
from tests.kit.processes import ROOT

pytestmark = pytest.mark.usefixtures("tiny")

HOSTS = """
[hosts.train]
cores = 32
memory_gib = 256
devices = "4xH100"
price = 12.0

[hosts.gen]
count = 2
cores = 32
memory_gib = 256
devices = "4xL40S"
price = 4.0
"""
PINS = {"rollout": "gen@gpu:L40S", "train_policy": "train@gpu:H100"}


@pytest.mark.parametrize(
    "text, values",
    [
        ("2..16", ["2", "4", "8", "16"]),
        ("1..6", ["1", "2", "4", "6"]),
        ("3..3", ["3"]),
        ("1,5..7,x", ["1", "5", "7", "x"]),
        ("cosine(1e-6, 100),1e-6", ["cosine(1e-6, 100)", "1e-6"]),
    ],
)
def test_values_of_a_text(text: str, values: list[str]) -> None:
    assert list(expand_values(text)) == values


def variant(key: str, value: str, **options: Any) -> Variant:
    """The base with one other value."""
    base = Variant(graph=grpo_graph(), options=RunOptions(**options))

    def make(texts: Mapping[str, str]) -> Graph:
        return edited(base.graph, [f"{k}={v}" for k, v in texts.items()])

    return change_variant(base, {key: value}, make)


@pytest.mark.parametrize(
    "key, value, options",
    [
        ("rollout", "3", {"replicas": {"rollout": 3}}),
        ("train_policy", "2", {"ranks": {"train_policy": 2}}),
        ("threads", "3", {"threads": 3}),
        ("shard", "true", {"shard": True}),
        ("tensor.train_policy", "2", {"tensor": {"train_policy": 2}}),
        ("kernel.rollout", "vllm", {"kernel": {"rollout": "vllm"}}),
    ],
)
def test_a_key_changes_an_option(key: str, value: str, options: dict[str, Any]) -> None:
    assert variant(key, value).options == RunOptions(**options)


def test_a_key_changes_a_workers_pins_the_devices_or_a_parameter_of_a_node() -> None:
    assert variant("gen", "2", pin=PINS).options.pin["rollout"] == "gen@gpu:L40S,gen-1@gpu:L40S"
    assert variant("devices", "8").devices == 8
    assert variant("rollout.max_lag", "1").graph.node("rollout").params["max_lag"] == 1


@pytest.mark.parametrize(
    "text, told",
    [
        ("rolout=2", r"found 'rolout'\. Fix: rollout\."),
        ("rolout.n=2", r"found 'rolout\.n'\. Fix: rollout\."),
        ("rollout.nope=2", "no parameter 'nope'.* Fix: "),
        ("watchdog=2", "found 'watchdog'. Fix: "),
        ("turns=a,b", "found 'turns'. Fix: "),
        ("prompts=2", "found 'prompts'. Fix: "),
        ("rollout=many", "rollout: expected a whole number, found 'many'. Fix: "),
        ("devices=x", "devices: expected a whole number, found 'x'. Fix: "),
        ("threads=x", r"threads: expected a whole number, found 'x'\. Fix: threads=1,2,4"),
        ("shard=2", "shard: expected true or false, found '2'. Fix: "),
        ("weights=x", "weights: expected one of auto, pull, collective, ipc, found 'x'. Fix: "),
        ("tensor=2", r"expected tensor\.NODE, found tensor=2. Fix: "),
        ("threads.rollout=2", "expected threads, found threads.rollout=2. Fix: "),
    ],
)
def test_a_key_or_a_value_that_means_nothing(text: str, told: str) -> None:
    with pytest.raises((PlanError, GraphError), match=told):
        variant(*text.split("="))


@pytest.mark.parametrize(
    "asked, told",
    [
        (["rollout"], "expected KEY=2..16 or KEY=a,b,c, found 'rollout'"),
        (["rollout="], "expected KEY=2..16"),
        (["rollout=1..2", "rollout=3"], "rollout is given twice"),
        (["rollout=0..2"], r"expected a range from 1 up, found 0\.\.2\. Fix: rollout=1\.\.2"),
        (["rollout=4..2"], r"found 4\.\.2"),
        (["rollout=1..x"], r"expected a value or a range such as 2\.\.16, found '1\.\.x'"),
        (["rollout=1,,2"], "found ''"),
        (["rollout=1..64", "threads=1..512"], f"at most {MOST} plans, found 7 x 10 = 70"),
        (["devices=2,4"], "expected a cluster file, found this machine"),
    ],
)
def test_texts_that_make_no_plans(asked: list[str], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        what_if(Variant(graph=grpo_graph(), options=RunOptions()), asked)


def test_a_program_is_not_simulated() -> None:
    with pytest.raises(PlanError, match="expected a graph, found a Program of 2 phases"):
        simulate(Program((grpo_graph(), 1), (grpo_graph(), 2)))


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path, tiny: None) -> list[str]:
    """GRPO on eight prompts a Step, on the machines of a file."""
    lines = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(32)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "hosts.toml").write_text(HOSTS)
    flags = "--base tiny --data train.jsonl --reward-fn tests.kit.rewards:exact --batch 32 --n 8"
    flags += " --max-tokens 256 --max-lag 1 --cluster hosts.toml --pin"
    return ["graphs.grpo:grpo", *flags.split(), *(f"{k}={v}" for k, v in PINS.items())]


FIRST = ["--seconds", "score=0.002", "--lengths", "lognormal:60,0.9,256", "--prompts", "20"]
QUICK = [*FIRST, "--steps", "2"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What the command prints; the coordinator's seconds, which are measured, are left out."""
    assert main(["simulate", *words]) == code
    out = capsys.readouterr()
    text = out.out if code == 0 else out.out + out.err
    return re.sub(r"; [^;]* of CPU measured .*?(?=\n)", "; ...", text)


def plans(capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    """The figures of each plan that the command compares."""
    simulated(capsys, *words, "--json", "p.json")
    return json.loads(Path("p.json").read_text())["plans"]


def test_a_plan_is_simulated(target: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--json", "figures.json", "--timeline", "timeline.json"]
    require_golden("simulate/grpo.txt", simulated(capsys, *target, *FIRST, *more))
    assert len(json.loads(Path("figures.json").read_text())["steps"]["seconds"]) == 5
    events = read_trace(Path("timeline.json"))
    assert {"gen", "train"} <= {e["args"]["name"] for e in events if e["name"] == "thread_name"}


@pytest.mark.long
def test_plans_are_compared(target: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--what-if", "rollout=1..8", "--picture", "p.svg", "--json", "p.json", "--no-progress"]
    require_golden("simulate/what_if.txt", simulated(capsys, *target, *FIRST, *more))
    assert len(json.loads(Path("p.json").read_text())["plans"]) == 4
    assert Path("p.svg").read_text().startswith("<svg ")


@pytest.mark.long
def test_what_if_takes_seeds_and_parameters_of_the_graphs_function_and_of_its_nodes(
    target: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--what-if", "seed=0,1", "batch=2,4", "rollout.temperature=0.5"]
    compared = plans(capsys, *target, *QUICK, *more)
    assert [plan["values"]["batch"] for plan in compared] == ["2", "4", "2", "4"]
    assert [plan["steps"]["rows"] for plan in compared] == [16.0, 32.0, 16.0, 32.0]
    assert compared[1]["steps"]["tokens"] != compared[3]["steps"]["tokens"], "another seed"


def test_devices_grow_hosts_and_workers(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--what-if", "devices=12,24", "--json", "p.json"]
    simulated(capsys, *target, *FIRST, *more)
    plans = json.loads((tmp_path / "p.json").read_text())["plans"]
    for node in ("rollout", "train_policy"):
        assert [plan["nodes"][node]["workers"] for plan in plans] == [1, 2]
    assert plans[1]["cost"]["hour"] == 2 * plans[0]["cost"]["hour"]


def test_a_plan_that_cannot_be_is_a_line_that_says_why(
    target: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = simulated(capsys, *target, *QUICK, "--what-if", "train_policy=1,64")
    assert re.search(r"64 +place: ranks: .*a minibatch has 32 prompts", " ".join(text.split()))
    text = simulated(capsys, *target, *QUICK, "--what-if", "train_policy=64", code=1)
    assert "a minibatch has 32 prompts" in " ".join(text.split())


@pytest.mark.parametrize(
    "more, code, told",
    [
        (["--seconds", "scor=1"], 1, "expected a node of the graph, found 'scor'. Fix: score."),
        (["--cpu", "scor=1"], 1, "cpu: expected a node of the graph, found 'scor'. Fix: score."),
        (["--cpu", "score=1.5"], 2, "--cpu: expected a share from 0 to 1, found score=1.5"),
        (["--kept", "score=0.5"], 1, "found 'score'. Fix: leave --kept out: this graph has none."),
        (["--lengths", "many"], 1, "--lengths: expected 512, lognormal:"),
        (["--steps", "0"], 2, "--steps: expected 1 Step or more, found 0. Fix: --steps 5."),
        (["--picture", "p.svg"], 2, "--picture: expected --what-if, found one plan"),
        (["--what-if", "rollout=1", "--timeline", "t"], 2, "--timeline: expected one plan"),
        (["--json", "."], 2, "--json: expected the name of a file"),
        (["--devices", "16"], 1, "expected whole hosts, found 4/3 x train, 8/3 x gen"),
    ],
)
def test_what_is_refused(
    target: list[str], capsys: pytest.CaptureFixture[str], more: list[str], code: int, told: str
) -> None:
    text = " ".join(simulated(capsys, *target, *more, code=code).split())
    assert told in text
    assert "Fix: " in text


@pytest.mark.long
def test_it_imports_no_torch(target: list[str], tmp_path: Path) -> None:
    heavy = "heavy = {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    call = f"import sys; from engine.cli import main; code = main(sys.argv[1:]); {heavy}"
    done = subprocess.run(
        [sys.executable, "-c", f"{call}; sys.exit(str(heavy) if heavy else code)"]
        + ["simulate", *target, *FIRST, "--steps", "1"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 simulated Step" in done.stdout
