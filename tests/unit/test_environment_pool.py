"""A pool of environments: replies, faults of one episode alone, limits, what is printed."""

from __future__ import annotations

import json
import math
import random
import resource
import select
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dataflow.errors import DataError, KernelError
from operators.environments import Environment
from operators.kernels.environments.open_files import allow_episodes
from operators.kernels.environments.pool import ProcessPool
from operators.kernels.environments.replies import EnvironmentPool
from tests.kit.environment_classes import (
    Obedient,
    Reluctant,
    Unreset,
    Unsteppable,
    message,
    refuses,
)
from tests.kit.environment_pools import (
    begin,
    contents,
    fault_of,
    finish,
    opened,
    opened_here,
    replies,
    step,
)
from tests.kit.interact_kernels import with_arguments
from tests.kit.processes import ended, parent_of

pytestmark = pytest.mark.timeout(180)


def drawn_game(pool: EnvironmentPool) -> list[object]:
    """What an episode answers, without its times and its process."""
    began = begin(pool, 4)[4]
    turns = [step(pool, 4, content) for content in ("say hi", "draw", "draw")]
    last = finish(pool, 4)
    state = dict(last.state)
    assert state.pop("pid") > 0
    turn_records = [(contents(turn), turn.reward, turn.done) for turn in turns]
    return [began.text, began.messages, turn_records, last.reward, state]


def test_an_episode_is_the_same_in_a_process_and_here() -> None:
    with opened() as pool, opened_here() as here:
        in_process = drawn_game(pool)
        assert drawn_game(here) == in_process
    text, messages, turn_records, reward, state = in_process
    assert (text, messages, reward) == ("hello q4", (), 2.5)
    assert turn_records[0] == (["hi"], 0.5, False)
    assert turn_records[1] != turn_records[2]
    assert state["steps"] == 3
    assert (state["seed"], state["reason"]) == (7, "stop")
    assert "_hidden" not in state
    assert "holds_no_json" not in state


def test_a_process_that_finished_is_used_again_and_seeded_anew() -> None:
    with opened() as pool:
        first = [finish(pool, episode).state for episode in begin(pool, 1)]
        again = [finish(pool, episode).state for episode in begin(pool, 1)]
        assert first == again
        begin(pool, 2, seed=8)
        other = finish(pool, 2).state
        assert other["pid"] == first[0]["pid"]
        assert other["drawn"] != first[0]["drawn"]


def test_interleaved_episodes_in_one_process_have_generators_of_their_own() -> None:
    with opened_here() as here, opened() as pool:
        drawn = []
        for each in (here, pool):
            begin(each, 1, 2)
            drawn.append([contents(step(each, episode, "draw")) for episode in (1, 2, 1)])
    assert drawn[0] == drawn[1]


def test_environments_here_leave_the_generators_of_the_run_as_they_are() -> None:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with opened_here() as here:
        begin(here, 1)
        step(here, 1, "draw")
        finish(here, 1)
    assert random.getstate() == python_state
    np.testing.assert_equal(np.random.get_state(), numpy_state)


class Noting(Obedient):
    """Notes in a file that it was closed, and draws NumPy's numbers."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.file = Path(folder, "closed")

    def do_draw(self, rest: str) -> Any:
        return str(np.random.random()), None, False

    def close(self) -> None:
        self.file.touch()


def test_an_environment_is_closed_before_its_process_ends_and_numpy_is_seeded_with_each_episode(
    tmp_path: Path,
) -> None:
    with opened(with_arguments(Noting, folder=str(tmp_path))) as pool:
        begin(pool, 1)
        drawn = contents(step(pool, 1, "draw"))
        assert contents(step(pool, 1, "draw")) != drawn
        finish(pool, 1)
        begin(pool, 1)
        assert contents(step(pool, 1, "draw")) == drawn
        [pid] = contents(step(pool, 1, "pid"))
        assert list(tmp_path.iterdir()) == []
        step(pool, 1, "raise boom")
        while pool.seconds_left() < math.inf:
            pool.wait(0.1)
        assert ended(int(pid), 20)
    assert [file.name for file in tmp_path.iterdir()] == ["closed"]


class Closing(Obedient):
    """Notes which episodes of this process it was closed in."""

    closed: ClassVar[list[str]] = []

    def reset(self, seed: int, question: str = "none") -> str:
        self.question = question
        return super().reset(seed, question)

    def close(self) -> None:
        self.closed.append(self.question)


def test_an_environment_here_is_closed_as_its_episode_is_given_up() -> None:
    Closing.closed.clear()
    with opened_here(Closing) as here:
        begin(here, 1, 2)
        here.abandon(1)
        assert Closing.closed == ["q1"]
    assert Closing.closed == ["q1", "q2"]


def test_episodes_are_spread_over_the_templates_in_turn() -> None:
    with opened(processes=2) as pool:
        begin(pool, *range(4))
        assert len(pool.pids()) == 2 + 2 + 4, "keepers, templates, episodes"
        parents = [parent_of(int(contents(step(pool, episode, "pid"))[0])) for episode in range(4)]
        assert parents[0] == parents[2] != parents[1] == parents[3]


FAULTS = {
    "raise boom": ("raised", "raised ValueError: boom"),
    "exit 3": ("died", "lost its process, which ended with exit code 3"),
    "abort": ("died", "lost its process, which was killed by SIGABRT"),
    "garbage": ("answer", r"broke the connection to its process: b'\x00garbage"),
    "return large": ("answer", "returned 68157"),
    "return set": ("answer", "returned messages[0]['more'] = {1}, which JSON cannot hold"),
    "return nan": ("answer", "returned nan as reward, expected a finite number or None"),
    "return text": ("answer", "returned '1.0' as reward, expected a number or None"),
    "return done": ("answer", "returned 'no' as done, expected True or False"),
    "return none": ("answer", "returned None from `step`, expected a Turn, a tuple"),
    "return role": ("answer", "returned message 0 without 'role'"),
    "return content": ("answer", "returned message 0 with 1 as content, expected a text"),
    "return surrogate": ("answer", r"returned messages = '\ud800', which JSON cannot hold"),
    "unknown": ("raised", "raised AttributeError: 'Obedient' object has no attribute 'do_unknown'"),
}
"""What an episode does, the kind and the beginning of its fault."""


def test_whatever_an_environment_does_is_the_fault_of_its_episode() -> None:
    with opened() as pool:
        begin(pool, 0)
        for content, (kind, text) in FAULTS.items():
            begin(pool, 1)
            fault = fault_of(step(pool, 1, content))
            assert (fault.kind, fault.text[: len(text)]) == (kind, text)
            assert "\n" not in fault.text
        assert contents(step(pool, 0, "say still here")) == ["still here"]


IN_PROCESS = [content for content, (kind, _) in FAULTS.items() if kind == "raised"]
IN_PROCESS += [content for content in FAULTS if content.startswith("return")]


@pytest.mark.parametrize("content", IN_PROCESS)
def test_a_fault_reads_the_same_in_the_kernels_own_process(content: str) -> None:
    with opened_here() as here:
        begin(here, 1)
        fault = fault_of(step(here, 1, content))
        kind, text = FAULTS[content]
        assert (fault.kind, fault.text[: len(text)]) == (kind, text)
        assert (here.raised_error(1) is not None) == (kind == "raised")


def test_a_fork_that_returns_ends_and_the_environment_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened() as pool:
        begin(pool, 1)
        assert contents(step(pool, 1, "fork")) == ["from one of two"]
        assert "a fork of the environment returned: it has to end by os._exit" in caplog.text


def test_a_fault_shows_the_users_frames_or_the_last_lines() -> None:
    with opened() as pool:
        begin(pool, 1, 2)
        raised = fault_of(step(pool, 1, "raise boom")).detail
        assert raised.startswith("Traceback (most recent call last):\n")
        assert "in do_raise" in raised
        assert "environments/child" not in raised
        died = fault_of(step(pool, 2, "abort")).detail
        assert "  | the last words\n" in died
        assert "in do_abort" in died
        assert "environments/child" not in died


def test_a_late_episode_alone_times_out_and_says_where_it_stood() -> None:
    with opened(step_timeout=1.0) as pool:
        begin(pool, 1, 2)
        [pid] = contents(step(pool, 1, "pid"))
        fault = fault_of(step(pool, 1, "hang"))
        assert (fault.kind, fault.text) == ("timeout", "timed out: its step took longer than 1 s")
        assert fault.detail.startswith("It stood at (the innermost call first):\n")
        assert "in do_hang" in fault.detail
        assert "environments/child" not in fault.detail
        assert contents(step(pool, 2, "say fine")) == ["fine"]
        assert ended(int(pid), 20)
        begin(pool, 1)


def test_an_environment_that_raised_is_not_used_again_and_has_its_time_to_close() -> None:
    with opened(Reluctant, step_timeout=1.0) as pool:
        begin(pool, 1)
        [pid] = contents(step(pool, 1, "pid"))
        assert fault_of(step(pool, 1, "raise boom")).kind == "raised"
        begin(pool, 2)
        assert contents(step(pool, 2, "pid")) != [pid]
        while pool.seconds_left() < math.inf:
            pool.wait(0.1)
        assert ended(int(pid), 20)


def test_an_abandoned_episode_ends_with_what_it_started_and_nothing_comes() -> None:
    with opened(step_timeout=1.0) as pool:
        begin(pool, 1, 2)
        pids = json.loads(contents(step(pool, 1, "children"))[0])
        pool.step(1, message("hang"))
        pool.abandon(1)
        pool.abandon(1)
        assert list(replies_until(pool, 2)) == [2]
        pool.wait(2.0)
        assert all(ended(pid, 20) for pid in pids)
        assert len(pids) == 3
        begin(pool, 1)


def test_what_an_environment_started_ends_with_its_process() -> None:
    """What is in another session ends with the pool at the latest."""
    with opened() as pool:
        begin(pool, 1)
        pids = json.loads(contents(step(pool, 1, "children"))[0])
        assert fault_of(step(pool, 1, "abort")).kind == "died"
        assert all(ended(pid, 20) for pid in pids[:2])
    assert ended(pids[2], 0)


def replies_until(pool: EnvironmentPool, episode: int) -> dict[int, object]:
    """All replies up to that of this episode's next step."""
    pool.step(episode, message("say here"))
    received: dict[int, object] = {}
    while episode not in received:
        received.update({reply.episode: reply for reply in pool.wait(20.0)})
    return received


@pytest.mark.parametrize("above", ["template", "keeper"])
def test_a_template_that_is_lost_is_started_again(above: str) -> None:
    with opened() as pool:
        begin(pool, 1, 2)
        before = pool.pids()
        pool.step(2, message("hang"))
        pool.step(1, message(f"kill {above}"))
        lost = replies(pool, 2)
        for reply in lost.values():
            fault = fault_of(reply)
            assert fault.kind == "died"
            assert fault.text.startswith("lost ")
        assert all(ended(pid, 20) for pid in before)
        assert begin(pool, 1)[1].text == "hello q1"


def test_an_episode_whose_process_ended_between_two_calls_has_its_fault_with_the_next() -> None:
    with opened() as pool:
        begin(pool, 1, 3)
        pool.step(1, message("say x"))
        replies(pool, 1)
        begin(pool, 2)
        pool.step(2, message("kill template"))
        replies(pool, 1)
        pool.step(3, message("say x"))
        pool.abandon(3)
        pool.step(1, message("say x"))
        assert pool.seconds_left() == 0.0, "who watches the pool's descriptor must look at once"
        [reply] = pool.wait(0)
        assert fault_of(reply).kind == "died"


def test_limits_hold_for_an_episodes_process() -> None:
    with opened(memory_mb=4096, cpu_seconds=1, open_files=64) as pool:
        begin(pool, 1, 2, 3)
        memory = fault_of(step(pool, 1, "allocate 5000"))
        assert memory.text.startswith("raised MemoryError")
        files = fault_of(step(pool, 2, "open 64"))
        assert files.text.startswith("raised OSError: [Errno 24]")
        computes = fault_of(step(pool, 3, "compute"))
        assert computes.text == "lost its process, which was killed by SIGXCPU"


def test_a_message_that_fills_the_socket_holds_nobody_up() -> None:
    with opened() as pool:
        begin(pool, 1, 2)
        large = "x" * (8 << 20)
        pool.step(1, message(f"say {large}"))
        pool.step(2, message(f"say {large}"))
        for reply in replies(pool, 2).values():
            assert contents(reply) == [large]


def test_what_is_printed_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with opened() as pool, opened_here() as here:
        for each in (pool, here):
            caplog.clear()
            begin(each, 1)
            step(each, 1, "print some words")
            printed = [record.getMessage() for record in caplog.records]
            assert printed == ["environment 'played' printed: some words"]


def test_what_cannot_be_loaded_is_refused_at_once() -> None:
    with pytest.raises(KernelError, match="could not load it: is a Unsteppable without a method"):
        load(Environment(adapter="native", target=Unsteppable))
    with pytest.raises(KernelError, match=r"expected an adapter, found 'nativ'\. Fix: one of"):
        load(Environment(adapter="nativ", target=Obedient))
    with pytest.raises(KernelError, match="expected arguments that JSON can hold"):
        load(Environment(adapter="native", target=Obedient, arguments={"a": {1}}))
    with pytest.raises(KernelError, match="no cpu_seconds with isolation='shared'"):
        load(Environment(adapter="native", target=Obedient, isolation="shared", cpu_seconds=1))


def load(environment: Environment) -> None:
    ProcessPool(environment, name="played", reset_timeout=60.0, step_timeout=60.0).close()


def test_what_cannot_be_made_is_the_fault_of_each_episode() -> None:
    with opened(refuses) as pool:
        pool.reset(1, 7, {})
        fault = fault_of(replies(pool, 1)[1])
        assert fault.text == "raised RuntimeError: out of order"


def test_arguments_go_to_the_class_and_a_column_that_json_cannot_hold_is_named() -> None:
    environment = Environment(adapter="native", target=Obedient, arguments={"greeting": "hi"})
    pool = ProcessPool(environment, name="played", reset_timeout=60.0, step_timeout=60.0)
    try:
        assert begin(pool, 1)[1].text == "hi q1"
        with pytest.raises(DataError, match=r"found b'x' in column 'question'\. Fix: "):
            pool.reset(2, 7, {"question": b"x"})
    finally:
        pool.close()
    pool.close()


def test_messages_of_tools_pass_as_they_are() -> None:
    with opened() as pool:
        begin(pool, 1)
        reply = step(pool, 1, "return tool")
        assert reply.messages == ({"role": "tool", "content": "x", "tool_call_id": "7"},)
        assert (reply.reward, reply.done) == (1.0, True)


def test_a_pool_can_be_watched_by_its_descriptor() -> None:
    with opened() as pool:
        begin(pool, 1)
        pool.step(1, message("say x"))
        assert select.select([pool.fileno()], [], [], 60.0)[0]
        assert 50.0 < pool.seconds_left() <= 60.0


def test_an_environment_that_takes_no_columns_gets_none() -> None:
    with opened(Unreset) as pool:
        assert begin(pool, 1)[1].text is None


def test_with_no_call_under_way_nothing_is_waited_for() -> None:
    with opened() as pool:
        assert pool.wait(None) == []
        assert pool.wait(0) == []


def test_more_episodes_may_open_more_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 712, "no room to raise anything"
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        allow_episodes(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600
        allow_episodes(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 712
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        allow_episodes(hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
