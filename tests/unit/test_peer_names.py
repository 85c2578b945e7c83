"""Other systems' names: each leads to something that exists, the pages, calls and flags."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import dataflow.adapters
import dataflow.model
import dataflow.schedule
import engine.api
import operators
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.peer_parameters import SYSTEMS, Known, PeerName, peer_name, read_peer_names
from engine.cli.flags import graph_and
from engine.cli.graphs import shipped_graphs
from engine.cli.target import UsageError
from engine.plan.options import RunOptions
from graphs.grpo import grpo
from operators.data import prompts
from scripts import peer_pages
from tests.kit.rewards import exact
from tests.peers import record_names

DOCS = Path(__file__).parents[2] / "docs"
EVERY = [peer for stem in SYSTEMS for peer in read_peer_names(stem)]
COMMANDS = ("dataflow run", "dataflow resume")


def language() -> dict[str, Any]:
    """What a graph is written with, by name."""
    modules = [dataflow.adapters, dataflow.model, dataflow.schedule]
    for found in pkgutil.iter_modules(operators.__path__):
        if not found.ispkg:
            modules.append(importlib.import_module(f"operators.{found.name}"))
    return {name: each for module in modules for name, each in vars(module).items()}


LANGUAGE = language()


def test_each_name_leads_to_something_that_exists() -> None:
    options = {f"--{field.name.replace('_', '-')}" for field in fields(RunOptions)}
    for peer in EVERY:
        assert bool(peer.ours) == (peer.mark != "-"), peer
        assert peer.ours or peer.note, peer
        for ours in peer.ours:
            if ours.startswith("graphs."):
                assert ours.removeprefix("graphs.") in shipped_graphs(), peer
            elif not (ours in options or ours in COMMANDS):
                require_parameters(peer, ours)


def require_parameters(peer: PeerName, ours: str) -> None:
    name, _, inside = ours.partition("(")
    assert callable(LANGUAGE.get(name)), (peer.name, ours)
    known = inspect.signature(LANGUAGE[name]).parameters
    if name == "select":
        known = LANGUAGE["_SIGNATURE"].parameters
    asked = re.findall(r"\w+", inside)
    assert all(parameter in known for parameter in asked), (peer.name, ours, list(known))
    assert inside == "" or inside == f"{', '.join(f'{p}=' for p in asked)})", ours


@pytest.mark.parametrize("peer", record_names.PEERS)
def test_every_name_of_a_peers_configuration_has_its_line(peer: str) -> None:
    lines = [line.name for line in read_peer_names(peer.removesuffix("_ppo"))]
    starts = tuple(name.removesuffix("*") for name in lines if name.endswith("*"))
    found = record_names.recorded(peer)
    assert len(found) > 30
    missing = [name for name in found if not (name in lines or name.startswith(starts or "?"))]
    if peer == "openrlhf":
        missing = [name for name in missing if peer_name(name) is None]
    assert missing == []


def test_a_name_is_once_in_its_table() -> None:
    for stem in SYSTEMS:
        names = [peer.name for peer in read_peer_names(stem)]
        assert sorted(set(names)) == sorted(names), {n for n in names if names.count(n) > 1}


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(("name", "known", "found"), [
    (f"{ACTOR}.optim.lr", (), f"{ACTOR}.optim.lr"),
    ("trainer.v1.sync.x", (), "trainer.*"),
    ("actor_rollout_ref.model.lora.x.y", (), "actor_rollout_ref.model.lora.*"),
    (f"{ACTOR}.new", (), f"{ACTOR}.*"),
    ("ppo_mini_batch_size", (), f"{ACTOR}.ppo_mini_batch_size"),
    ("path", ("base",), "actor_rollout_ref.model.path"),
    ("path", ("data",), None),
    ("beta", (), None),
    ("nobody_says_this", (), None),
])  # fmt: skip
def test_wholes_prefixes_and_last_parts_are_found_and_names_of_ours_are_not(
    name: str, known: tuple[str, ...], found: str | None
) -> None:
    peer = peer_name(name, Known(parameters=known))
    assert (peer and peer.name) == found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"learning_rate": 1e-6}, r"\(TRL's name\)\. Fix: lr=1e-06\."),
        ({"steps_per_generation": 4}, r"Fix: minibatches= \(steps_per_generation / "),
        ({"ppo_mini_batch_size": 4}, r"\(verl's name\)\. Fix: minibatches= counts the updates"),
        ({"epsilon_high": 0.28}, r"Fix: clipped_policy_loss\(clip=\) \(the second of a pair"),
        ({"save_freq": 5}, r"Fix: RunOptions\(checkpoint_every=\)\."),
        ({"lora_rank": 8}, r"\(verl's name\)\. Fix: adapter=lora\(rank=16\)\."),
        ({"use_dora": True}, r"\(TRL's name\)\. Fix: leave it out: it cannot be served"),
        ({"init_lora_weights": "pissa"}, r"\. Fix: leave it out: A is drawn .* PiSSA and OLoRA"),
        ({"modules_to_save": ["x"]}, r"\. Fix: leave it out: every trained weight is one of the"),
        ({"actor.eps_clip": 0.2}, r"\(OpenRLHF's name\)\. Fix: clipped_policy_loss\(clip=\)\."),
    ],
)
def test_a_graph_called_with_a_name_of_another_system_names_ours(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(GraphError, match=r"grpo: unknown parameter ") as refused:
        grpo("model", "train.jsonl", exact, **given)
    assert re.search(told, str(refused.value)), str(refused.value)
    assert refused.value.faults[0].origin.file == __file__


def test_options_of_a_run_and_models_know_other_systems_names() -> None:
    with pytest.raises(GraphError, match=r"RunOptions: .*\(TRL's name\)\. Fix: steps=200\."):
        RunOptions(max_steps=200)  # type: ignore[call-arg]
    with pytest.raises(GraphError, match=r"Model: .*'path' \(verl's name\)\. Fix: base='x'\."):
        Model("policy", path="x")  # type: ignore[call-arg]
    with pytest.raises(GraphError, match=r"prompts: unknown parameter 'path'\. Fix: "):
        prompts("x", path="y")  # type: ignore[call-arg]
    with pytest.raises(GraphError, match=r"'run_name' .*Fix: RunOptions\(name=\)\."):
        prompts("x", run_name="y")  # type: ignore[call-arg]


TARGET = "graphs.grpo:grpo"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--save_steps=8", r"\(TRL's name\)\. Fix: --checkpoint-every\."),
        ("--actor_rollout_ref.actor.optim.lr 1e-6", r"\(verl's name\)\. Fix: --lr\."),
        ("algorithm.adv_estimator=grpo", r"Fix: group_advantage\(baseline=\).*graphs\.rloo"),
        ("+trainer.v1.new=3", r"\(verl's name\)\. Fix: leave it out: not there\."),
        ("trainer.n_gpus_per_node=8", r"Fix: --ranks \(ranks of a train node"),
        ("--epsilon 0.2", r"Fix: clipped_policy_loss\(clip=\) in the graph\."),
        ("--gradient-accumulation-steps 4", r"Fix: --minibatches \(counts updates"),
        ("--rollout.n_samples_per_prompt 4", r"\(OpenRLHF's name\)\. Fix: --n\."),
        ("--reward-weights 1", r"Fix: reward\(weights=\) in the graph\."),
    ],
)
def test_a_flag_or_an_override_of_another_system_names_ours(words: str, told: str) -> None:
    base = ["--base", "m", "--data", "hf:d.x?split=train", "--reward-fn", "tests.kit.rewards:exact"]
    with pytest.raises(UsageError) as refused:
        graph_and(RunOptions, "check", [TARGET, *base, *words.split()])
    assert re.search(told, str(refused.value)), str(refused.value)
    graph_and(RunOptions, "check", [TARGET, *base])


# Pages


@pytest.mark.parametrize("name", peer_pages.PAGES)
def test_pages_have_the_tables_that_the_script_makes(name: str) -> None:
    told = "run scripts/peer_pages.py"
    assert (DOCS / name).read_text() == peer_pages.page(name), told


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def test_the_run_on_trls_page_is_a_graph_in_python_and_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[Graph, RunOptions]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(engine.api, "run", lambda graph, options: runs.append((graph, options)))
    (tmp_path / "rewards.py").write_text("def right(completions, answer): return [0.0]\n")
    [ours] = [block for block in blocks("from-trl.md", "python") if "from engine" in block]
    exec(compile(ours, "from-trl.md", "exec"), {})
    graph, options = flags(blocks("from-trl.md", "bash")[0])
    assert [(graph, options)] == runs
    assert options.steps == 200


def test_the_command_on_verls_page_is_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
    )
    [ours] = blocks("from-verl.md", "python")
    (tmp_path / "score_ours.py").write_text(ours)
    theirs, command = blocks("from-verl.md", "bash")
    graph, options = flags(command)
    assert (graph.dialect, options.steps) == ("verl", 200)
    for word in shlex.split(theirs.replace("\\\n", " "))[3:]:
        assert peer_name(word.partition("=")[0]), word


def flags(command: str) -> tuple[Any, RunOptions]:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["dataflow", "run"]
    return graph_and(RunOptions, "run", words[2:])
