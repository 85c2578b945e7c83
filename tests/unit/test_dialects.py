"""Dialects of graphs: who follows, who keeps its own, what rewrites and snapshots make of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from dataflow.check import check
from dataflow.convention import DIALECTS
from dataflow.dialect import find_dialect_uses, with_dialects
from dataflow.diff import diff
from dataflow.draw import draw
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import LossFunction, Now, Tensors, Terms, loss
from dataflow.operator import Operator
from dataflow.program import Program
from dataflow.schema import Advantage, Reward, Rollout
from dataflow.snapshot import fingerprint, from_json, to_json
from dataflow.user import Columns, operator
from engine.keep.checkpoint.provenance import provenance
from operators.advantage import Scale, group_advantage, whiten
from operators.losses import policy_gradient_loss
from tests.kit.graphs import graph_of, sampled, scored, trained
from tests.kit.plans import headers
from tests.kit.processes import ROOT


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
    score = straight(curved(scored(rollout)))
    advantage = group_advantage(rollout, score, dialect=own, name="advantage")
    return Graph("g", trained(rollout, bent(whiten(advantage, rollout))), dialect=dialect)


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
    second = trained(rollout, bent(advantage), name="again")
    edited = graph.replace(advantage=other).extend(second).renamed("h").map(lambda node: node)
    assert (edited.dialect, edited.name) == ("verl", "h")
    assert {use.where: use.dialect for use in find_dialect_uses(with_dialects(edited))}[
        "again.bent"
    ] == "verl"
    assert graph.in_dialect("verl") is graph
    assert dialects(graph.in_dialect("nemo_rl")) == dialects(made("nemo_rl"))


def test_a_program_has_a_dialect_in_every_phase() -> None:
    program = Program((made("trl"), 2), (made("verl"), 1), name="both")
    assert program.in_dialect("verl") == Program((made("verl"), 2), (made("verl"), 1), name="both")


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
    with pytest.raises(GraphError, match=r"expected a dialect of trl, .*, found 'dapo'\. Fix"):
        from_json(text)


def test_a_snapshot_of_an_earlier_format_has_no_dialect_of_its_own() -> None:
    text = to_json(made(own="verl")).replace('"format": 3', '"format": 2')
    assert from_json(text.replace('  "dialect": "trl",\n', "", 1)) == made(own="verl")


def test_naming_the_graphs_own_dialect_changes_nothing_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was begun with each node's dialect written out can go on with the graph's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"rows")
    followed, named = made("verl"), made("verl", own="verl")
    assert followed != named
    assert fingerprint(followed) == fingerprint(named)
    assert provenance(followed).nodes == provenance(named).nodes
    assert fingerprint(followed) != fingerprint(made("trl"))
    assert provenance(followed).nodes != provenance(made("trl")).nodes


def test_a_difference_names_the_graphs_dialect_and_all_that_follow_it() -> None:
    assert str(diff(made("trl", own="openrlhf"), made("verl", own="openrlhf"))) == (
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


def test_every_operator_and_loss_with_a_dialect_says_what_it_does_in_each() -> None:
    modules = [f"operators.{path.stem}" for path in (ROOT / "operators").glob("*.py")]
    parts = [part for name in modules for part in vars(importlib.import_module(name)).values()]
    names = set()
    for part in (part for part in parts if isinstance(part, Operator | LossFunction)):
        parameters = set(part.limits if isinstance(part, Operator) else part.parameters)
        if "dialect" not in parameters:
            continue
        names.add(part.name)
        assert tuple(dict(part.conventions)) == DIALECTS, part.name
        for convention in dict(part.conventions).values():
            assert convention.says, part.name
            for gap in convention.gaps:
                assert {name for name, _ in gap.where} <= parameters, (part.name, gap)
    assert {"group_advantage", "whiten", "gae", "returns", "kl_in_reward"} < names


def described(dialect: str, scale: Scale) -> str:
    rollout = sampled()
    advantage = group_advantage(rollout, scored(rollout), scale=scale)
    graph = graph_of(rollout, policy_gradient_loss(advantage)).in_dialect(dialect)
    return check(graph, headers).describe()


def test_what_a_peer_has_no_answer_to_is_said_with_what_happens_instead() -> None:
    lacks = "verl has no scale by the mean reward: the paper's, without an epsilon"
    assert f"  group_advantage: as verl does it\n    {lacks}" in described("verl", "mean")
    assert "has no" not in described("verl", "std")
