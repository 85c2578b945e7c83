"""Dialects of graphs: who follows, who keeps its own, what rewrites and snapshots make of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.check import check
from dataflow.convention import DIALECTS, Convention, Gap
from dataflow.dialect import spoken, with_dialects
from dataflow.diff import diff
from dataflow.draw import draw
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import LossFunction, Now, Tensors, Terms, loss
from dataflow.node import Node, Port
from dataflow.operator import Operator
from dataflow.program import Program
from dataflow.schema import Advantage, Completion, Reward, Rollout
from dataflow.snapshot import fingerprint, from_json, to_json
from dataflow.user import Columns, column_operator, operator
from engine.checkpoint.provenance import provenance
from operators.advantage import group_advantage, whiten
from operators.losses import policy_gradient_loss
from operators.reward import reward
from operators.train import train
from tests.kit.plans import headers
from tests.kit.rewards import exact
from tests.right_graphs import policy, sampled

ROOT = Path(__file__).resolve().parents[2]


@operator()
def curved(score: Columns[Reward], *, dialect: str | None = None) -> Columns[Reward]:
    return score


@operator()
def straight(score: Columns[Reward], *, dialect: str = "openrlhf") -> Columns[Reward]:
    return score


@loss()
def bent(now: Now, advantage: Tensors[Advantage], *, dialect: str | None = None) -> Terms:
    return Terms(-advantage["advantage"])


def made(dialect: Any = "trl", own: Any = None) -> Graph:
    """Users' parts and two of ours that have a dialect; own: that of the advantage."""
    rollout = sampled()
    score = straight(curved(reward(exact, rollout, name="score")))
    advantage = group_advantage(rollout, score, dialect=own, name="advantage")
    objective = bent(whiten(advantage, rollout))
    return Graph("g", train(policy, rollout, loss=objective, lr=1e-6), dialect=dialect)


def dialects(graph: Graph) -> dict[str, str]:
    return dict(check(graph, headers).dialects)


def test_all_that_name_none_follow_the_graph_and_an_explicit_one_wins() -> None:
    assert dialects(made("verl", own="openrlhf")) == {
        "curved": "verl",
        "straight": "openrlhf",
        "advantage": "openrlhf",
        "whiten": "verl",
        "train_policy.bent": "verl",
    }
    assert set(dialects(made()).values()) == {"trl", "openrlhf"}


def test_a_checked_graph_has_them_written_out_in_nodes_and_in_terms() -> None:
    known = check(made("verl"), headers).graph
    assert known.node("advantage").params["dialect"] == "verl"
    assert dict(known.node("train_policy").params["loss"].terms[0].params) == {"dialect": "verl"}
    assert known.dialect == "verl"
    assert with_dialects(known) is known


def test_rewrites_keep_the_graphs_dialect_and_new_nodes_follow_it() -> None:
    graph = made("verl")
    rollout, score = graph.port("rollout", Rollout), graph.port("score", Reward)
    other = group_advantage(rollout, score, scale="none", name="advantage")
    advantage = graph.port("advantage", Advantage)
    second = train(policy, rollout, loss=bent(advantage), lr=1e-6, name="again")
    edited = graph.replace(advantage=other).extend(second).renamed("h").map(lambda node: node)
    assert (edited.dialect, edited.name) == ("verl", "h")
    assert {use.where: use.dialect for use in spoken(with_dialects(edited))}["again.bent"] == "verl"
    assert graph.in_dialect("verl") is graph
    assert dialects(graph.in_dialect("nemo_rl")) == dialects(made("nemo_rl"))


def test_a_program_has_a_dialect_in_every_phase() -> None:
    program = Program((made("trl"), 2), (made("verl"), 1), name="both")
    assert program.in_dialect("verl") == Program((made("verl"), 2), (made("verl"), 1), name="both")


def test_graphs_of_two_dialects_differ() -> None:
    assert made("verl") != made("trl")
    assert made("verl") == made("verl")


@pytest.mark.parametrize("imports", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_snapshot_read_again_means_the_same_and_still_follows(
    dialect: str, imports: bool
) -> None:
    graph = made(dialect, own="openrlhf")
    again = from_json(to_json(graph), imports=imports)
    assert to_json(again) == to_json(graph)
    assert (again.dialect, again.node("whiten").params["dialect"]) == (dialect, None)
    assert dialects(again.in_dialect("verl"))["advantage"] == "openrlhf"
    if imports:
        assert again == graph


def test_a_snapshot_of_a_peer_that_is_none_is_refused() -> None:
    text = to_json(made()).replace('"dialect": "trl"', '"dialect": "dapo"')
    with pytest.raises(
        GraphError, match=r"expected a dialect of trl, verl, .*, found 'dapo'\. Fix"
    ):
        from_json(text)


def test_a_snapshot_of_an_earlier_format_has_no_dialect_of_its_own() -> None:
    text = to_json(made(own="verl")).replace('"format": 3', '"format": 2')
    again = from_json(text.replace('  "dialect": "trl",\n', "", 1))
    assert again == made(own="verl")


def test_naming_the_graphs_own_dialect_changes_nothing_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was begun with each node's dialect written out can go on with the graph's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_bytes(b"rows")
    followed, named = made("verl"), made("verl", own="verl")
    assert followed != named
    assert fingerprint(followed) == fingerprint(named)
    assert provenance(followed).nodes == provenance(named).nodes
    assert fingerprint(followed) != fingerprint(made("trl"))
    assert provenance(followed).nodes != provenance(made("trl")).nodes


def test_a_difference_names_the_graphs_dialect_and_all_that_follow_it() -> None:
    told = str(diff(made("trl", own="openrlhf"), made("verl", own="openrlhf")))
    assert told == (
        "g\n"
        "dialect: trl -> verl\n"
        "\n"
        "Nodes\n"
        "  ~ curved        dialect: trl -> verl\n"
        "  ~ whiten        dialect: trl -> verl\n"
        "  ~ train_policy  bent.dialect: trl -> verl\n"
        "\n"
        "changed 3\n"
    )
    assert not diff(made("verl"), made("verl", own="verl"))


def test_a_drawing_names_the_graphs_dialect_once() -> None:
    drawn = draw(check(made("verl"), headers).graph)
    assert drawn.startswith("g (dialect=verl)")
    assert drawn.count("verl") == 1
    assert drawn == draw(made("verl"))
    assert "dialect" not in draw(made("trl"))
    assert "group_advantage(dialect=openrlhf)" in draw(made("verl", own="openrlhf"))


@pytest.mark.parametrize("name", ["verll", None, 3])
def test_a_graph_of_a_peer_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(GraphError, match=r"Graph 'g': expected dialect to be .*Fix: d"):
        made(name)


def _flat(rollout: Columns[Completion], *, wide: bool, dialect: str) -> Columns[Reward]:
    return Columns.make(Reward, like=rollout, reward=np.zeros(len(rollout), np.float32))


_LONE = Gap(lacks="groups of one", instead="0, as trl", where=(("wide", (True,)),))
_SAID = {
    "verl": Convention(says="divides by n"),
    "openrlhf": Convention(says="n - 1", gaps=(_LONE,)),
}
FLAT = column_operator(_flat, "tests.unit.test_dialects:FLAT", name="flat", conventions=_SAID)


def flat(rollout: Port[Completion], *, wide: bool, dialect: str | None = None) -> Port[Reward]:
    params = {"wide": wide, "dialect": dialect}
    return Node(FLAT, "flat", inputs={"rollout": rollout}, params=params).port()


def told(dialect: Any, *, wide: bool) -> str:
    rollout = sampled()
    objective = policy_gradient_loss(group_advantage(rollout, flat(rollout, wide=wide)))
    sink = train(policy, rollout, loss=objective, lr=1e-6)
    return check(Graph("g", sink, dialect=dialect), headers).describe()


def test_what_a_peer_has_no_answer_to_is_said_with_what_happens_instead() -> None:
    assert "  flat: as openrlhf does it\n    openrlhf has no groups of one: 0, as trl" in told(
        "openrlhf", wide=True
    )
    assert "has no groups of one" not in told("openrlhf", wide=False)
    assert "has no groups of one" not in told("verl", wide=True)


def declared() -> dict[str, tuple[dict[str, Convention], set[str]]]:
    """Conventions and parameters of each operator and loss of ours that has a dialect."""
    found = {}
    for path in sorted((ROOT / "operators").glob("*.py")):
        for part in vars(importlib.import_module(f"operators.{path.stem}")).values():
            if isinstance(part, Operator) and "dialect" in part.limits:
                found[part.name] = (dict(part.conventions), set(part.limits))
            if isinstance(part, LossFunction) and "dialect" in part.parameters:
                found[part.name] = (dict(part.conventions), set(part.parameters))
    return found


def test_every_operator_and_loss_with_a_dialect_says_what_it_does_in_each() -> None:
    parts = declared()
    assert {"group_advantage", "whiten", "gae", "returns", "kl_in_reward"} < parts.keys()
    for name, (conventions, parameters) in parts.items():
        assert tuple(conventions) == DIALECTS, name
        for convention in conventions.values():
            assert convention.says, name
            for gap in convention.gaps:
                assert {parameter for parameter, _ in gap.where} <= parameters, (name, gap)


def test_explain_says_what_each_dialect_means_and_what_it_lacks() -> None:
    sink = train(policy, sampled(), loss=policy_gradient_loss(
        group_advantage(sampled(), reward(exact, sampled()), scale="mean", dialect="verl")
    ), lr=1e-6)  # fmt: skip
    (use,) = spoken(with_dialects(Graph("g", sink)))  # policy_gradient_loss has none
    assert use.says == "unbiased deviation + 1e-06; a group's only row gets its own reward"
    lacks = "verl has no scale by the mean reward: the paper's, without an epsilon"
    assert list(use.unanswered()) == [lacks]
