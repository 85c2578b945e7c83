"""`dataflow simulate` and `--what-if`: which plans there are, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import GraphError, PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.program import Program
from dataflow.settings import edited
from engine.cli import main
from engine.observe.trace import read_trace
from engine.options import RunOptions
from engine.plan.cluster import Cluster
from engine.seen_rows import seen_rows
from engine.simulate.predict import predict
from engine.simulate.summed import summary_of
from engine.simulating import MOST, Variant, changed, simulate, spread, what_if
from tests.kit.comparison import require_golden
from tests.kit.graphs import grpo_graph, small_ppo
from tests.kit.plans import planned
from tests.right_graphs import preferring_while_exploring, two_generators, with_evaluation

pytestmark = pytest.mark.usefixtures("tiny")

ROOT = Path(__file__).resolve().parents[2]
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


def variant(key: str, value: str, **options: Any) -> Variant:
    """The base with one other value."""
    base = Variant(graph=grpo_graph(), options=RunOptions(**options))

    def make(texts: Mapping[str, str]) -> Graph:
        return edited(base.graph, [f"{k}={v}" for k, v in texts.items()])

    return changed(base, {key: value}, make)


@pytest.mark.parametrize(
    "text, values",
    [
        ("2..16", "2 4 8 16"),
        ("1..6", "1 2 4 6"),
        ("3..3", "3"),
        ("1,5..7,x", "1 5 7 x"),
        ("true,false", "true false"),
    ],
)
def test_values_of_a_text(text: str, values: str) -> None:
    assert list(spread(text)) == values.split()


def test_a_comma_in_brackets_is_within_a_value() -> None:
    found = list(spread("cosine(1e-6, 100),1e-6"))
    assert found == ["cosine(1e-6, 100)", "1e-6"]


def test_what_a_key_changes() -> None:
    assert variant("rollout", "3").options.replicas == {"rollout": 3}
    assert variant("train_policy", "2").options.ranks == {"train_policy": 2}
    pinned = variant("gen", "2", pin=PINS).options.pin["rollout"]
    assert pinned == "gen@gpu:L40S,gen-1@gpu:L40S"
    assert variant("threads", "3").options.threads == 3
    assert variant("shard", "true").options.shard is True
    assert variant("tensor.train_policy", "2").options.tensor == {"train_policy": 2}
    assert variant("kernel.rollout", "vllm").options.kernel == {"rollout": "vllm"}
    assert variant("devices", "8").devices == 8
    assert variant("rollout.max_lag", "1").graph.node("rollout").params["max_lag"] == 1


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("rolout", "2", r"found 'rolout'\. Fix: rollout\."),
        ("rolout.n", "2", r"found 'rolout\.n'\. Fix: rollout\."),
        ("watchdog", "2", "found 'watchdog'"),
        ("turns", "a,b", "found 'turns'"),
        ("prompts", "2", "found 'prompts'"),
        ("rollout", "many", "rollout: expected a whole number, found 'many'"),
        ("devices", "x", "devices: expected a whole number, found 'x'"),
        ("threads", "x", r"threads: expected a whole number, found 'x'\. Fix: threads=1,2,4"),
        ("shard", "2", "shard: expected true or false, found '2'"),
        ("weights", "x", "weights: expected one of auto, pull, collective, found 'x'"),
        ("tensor", "2", r"expected tensor\.NODE, found tensor=2"),
        ("threads.rollout", "2", "expected threads, found threads.rollout=2"),
    ],
)
def test_a_key_or_a_value_that_means_nothing(key: str, value: str, told: str) -> None:
    with pytest.raises(PlanError, match=told) as caught:
        variant(key, value)
    assert "Fix: " in str(caught.value)


def test_a_parameter_that_a_node_does_not_have() -> None:
    with pytest.raises(GraphError, match="no parameter 'nope'"):
        variant("rollout.nope", "2")


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


@pytest.mark.parametrize(
    "make", [grpo_graph, small_ppo, with_evaluation, preferring_while_exploring, two_generators]
)
def test_graphs_of_all_kinds_are_simulated(make: Callable[[], Graph], tmp_path: Path) -> None:
    graph = make()
    for model in (state for state in graph.states if isinstance(state, Model)):
        if not (tmp_path / model.base).exists():
            (tmp_path / model.base).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / model.base).symlink_to(tmp_path / "tiny")
    plan = planned(graph, Cluster(cores=64, memory=2**40))
    functions = [n.name for n in plan.nodes if not n.traits.computes and n.work != "train"]
    rows = seen_rows("16", "8")
    found = predict(plan, steps=3, lengths=rows, seconds=dict.fromkeys(functions, 1e-3))
    figures = summary_of(found)
    path = sum(part.seconds for part in figures.path)
    assert path == pytest.approx(figures.seconds[figures.last - 1])
    assert figures.rate > 0


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


def simulated(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What the command prints; the coordinator's seconds, which are measured, are left out."""
    assert main(["simulate", *words]) == code
    out = capsys.readouterr()
    text = out.out if code == 0 else out.out + out.err
    return re.sub(r"; [^;]* of CPU measured .*?(?=\n)", "; ...", text)


def test_a_plan_is_simulated(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--json", "figures.json", "--timeline", "timeline.json"]
    require_golden("simulate/grpo.txt", simulated(capsys, *target, *FIRST, *more))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["steps"]["seconds"]) == 5
    for shares in (*figures["nodes"].values(), *figures["devices"].values()):
        parts = [share for share in shares.values() if isinstance(share, float)]
        assert sum(parts) == pytest.approx(1.0)
    path = sum(part["seconds"] for part in figures["critical_path"])
    assert path == pytest.approx(figures["steps"]["seconds"][figures["steps"]["until"] - 1])
    events = read_trace(tmp_path / "timeline.json")
    assert {"gen", "train"} <= {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_equal_seeds_give_equal_figures(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        simulated(capsys, *target, *FIRST, "--json", name, "--seed", seed)
        data = json.loads((tmp_path / name).read_text())
        texts.append({key: data[key] for key in ("steps", "nodes", "critical_path")})
    assert texts[0] == texts[1] != texts[2]


def test_plans_are_compared(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--what-if", "rollout=1..8", "--picture", "p.svg", "--json", "p.json"]
    text = simulated(capsys, *target, *FIRST, *more, "--no-progress")
    require_golden("simulate/what_if.txt", text)
    plans = json.loads((tmp_path / "p.json").read_text())["plans"]
    steps = [plan["steps"] for plan in plans]
    assert len({step["tokens"] for step in steps}) == 1, "the same rows"
    means = [step["mean"] for step in steps]
    assert means == sorted(means, reverse=True), "no slower with more replicas"
    assert (tmp_path / "p.svg").read_text().startswith("<svg ")


def test_what_if_takes_parameters_of_the_graphs_function_and_of_its_nodes(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--what-if", "batch=16,32", "rollout.temperature=0.5,1.0", "--json", "p.json"]
    simulated(capsys, *target, *FIRST, *more)
    plans = json.loads((tmp_path / "p.json").read_text())["plans"]
    assert [plan["values"]["batch"] for plan in plans] == ["16", "16", "32", "32"]
    assert [plan["steps"]["rows"] for plan in plans] == [128.0, 128.0, 256.0, 256.0]


def test_devices_grow_hosts_and_workers(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--what-if", "devices=12,24", "--json", "p.json"]
    simulated(capsys, *target, *FIRST, *more)
    plans = json.loads((tmp_path / "p.json").read_text())["plans"]
    assert [plan["nodes"]["rollout"]["workers"] for plan in plans] == [1, 2]
    assert [plan["nodes"]["train_policy"]["workers"] for plan in plans] == [1, 2]
    assert plans[1]["cost"]["hour"] == 2 * plans[0]["cost"]["hour"]


def test_a_plan_that_cannot_be_is_a_line_that_says_why(
    target: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = simulated(capsys, *target, *FIRST, "--what-if", "train_policy=1,64")
    assert re.search(r"64 +place: ranks: .*a minibatch has 32 prompts", " ".join(text.split()))
    text = simulated(capsys, *target, *FIRST, "--what-if", "train_policy=64", code=1)
    assert "a minibatch has 32 prompts" in " ".join(text.split())


@pytest.mark.parametrize(
    "more, code, told",
    [
        (["--seconds", "scor=1"], 1, "expected a node of the graph, found 'scor'. Fix: score."),
        ([], 1, "score"),
        (["--lengths", "many"], 1, "--lengths: expected 512, lognormal:"),
        (["--what-if", "rolout=1..4"], 1, "found 'rolout'. Fix: rollout."),
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
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 simulated Step" in done.stdout
