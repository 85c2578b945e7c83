"""Which Workers are ranks of one group, how they meet, and which of their failures end the run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest

from dataflow.errors import DataError, KernelError, PlanError, RunError
from dataflow.kernel import Layout
from engine.run.launch.failures import Failures
from engine.run.launch.ranks import far_seat, find_spanning, groups_by_worker, open_meetings
from tests.kit.host_plans import plan

pytestmark = pytest.mark.timeout(180)
PAIR = {"a": ("a", "b"), "b": ("a", "b")}
"""Two Workers that are ranks of one group."""


def test_ranks_meet_in_a_file_that_nobody_else_has() -> None:
    there = open_meetings(["a", "b", "c"], PAIR)
    assert there.keys() == {"a", "b"}
    seats = [there[name].seat(name) for name in ("a", "b")]
    assert [(seat.rank, seat.world) for seat in seats] == [(0, 2), (1, 2)]
    ends = [there[name].descriptor() for name in ("a", "b")]
    assert os.fstat(ends[0]).st_ino == os.fstat(ends[1]).st_ino
    for end in ends:
        os.close(end)
    there["a"].close()
    with pytest.raises(PlanError, match="ranks begin together, and b would not"):
        open_meetings(["a"], PAIR)


def test_the_ranks_of_a_plan() -> None:
    planned = plan()
    assert groups_by_worker(planned) == {}
    numbers, doubled = planned.nodes
    two = replace(doubled, layout=Layout(data=2), workers=("a", "b"))
    assert groups_by_worker(replace(planned, nodes=(numbers, two))) == PAIR
    other = replace(doubled, name="other", layout=Layout(data=2), workers=("b", "c"))
    with pytest.raises(PlanError, match="worker b is a rank of b, c and of a, b"):
        groups_by_worker(replace(planned, nodes=(two, other)))


@dataclass
class StandInChild:
    """The part of a ChildProcess that is used."""

    name: str
    epoch: int = 0
    gone: bool = False
    replaced: bool = False
    killed: bool = False

    def kill(self) -> None:
        self.killed = True


def test_a_rank_that_fails_beside_one_that_ended_is_no_failure_of_the_run() -> None:
    children = {name: StandInChild(name) for name in ("a", "b", "alone")}
    failures, error = Failures(PAIR), RunError("lost its peer")
    failures.add(children["alone"], error, 0.0)
    assert failures.judge(children, 0.0) is error

    failures = Failures(PAIR)
    failures.add(children["a"], error, 1.0)
    assert failures.judge({"a": children["a"]}, 1.0) is None, "the other has not begun yet"
    # the end of the other may not have been noticed yet
    assert failures.judge(children, 1.5) is None
    children["b"].gone = True
    assert failures.judge(children, 1.6) is None
    assert children["a"].killed, "whoever waits for an answer of it is told"
    children["b"].gone = False
    assert failures.judge(children, 99.0) is None, "it was dropped"

    failures.add(children["a"], error, 100.0)
    children["a"].replaced = True
    assert failures.judge(children, 103.0) is None, "it was to end"
    failures.add(children["b"], error, 100.0)
    assert failures.judge(children, 102.5) is error, "both are there"


def test_which_groups_are_on_several_hosts() -> None:
    of = PAIR | {"c": ("c", "d"), "d": ("c", "d")}
    assert find_spanning(of, ["a", "b", "c", "d", "alone"]) == {}
    assert find_spanning(of, ["a", "c", "d"]) == {"a": ("a", "b")}
    seat = far_seat("b", ("a", "b"))
    assert (seat.rank, seat.world, seat.names) == (1, 2, ("a", "b"))


LEASE = 30.0


def test_a_rank_that_fails_beside_one_of_another_host_waits_for_word_of_it() -> None:
    """As long as the lease, since then that host is given up anyway."""
    children = {"a": StandInChild("a", epoch=1)}
    error = KernelError("train_policy: connection closed by peer")
    failures = Failures(PAIR, {"a": LEASE})
    failures.add(children["a"], error, 100.0)
    failures.note_gone("b", 0)  # of the life before
    assert failures.judge(children, 100.0 + LEASE - 1) is None
    assert not children["a"].killed
    assert failures.judge(children, 100.0 + LEASE) is error
    failures.note_gone("b", 1)
    assert failures.judge(children, 100.0 + LEASE - 1) is None
    assert children["a"].killed, "the group goes back together"
    assert failures.judge(children, 999.0) is None, "it was dropped"


def test_what_no_other_rank_can_cause_is_told_at_once_on_many_hosts_too() -> None:
    children = {"a": StandInChild("a")}
    failures = Failures(PAIR, {"a": LEASE})
    error = DataError("the model is not there")
    failures.add(children["a"], error, 100.0)
    assert failures.judge(children, 101.0) is None
    assert failures.judge(children, 103.0) is error
