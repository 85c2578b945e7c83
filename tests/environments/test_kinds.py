"""Several environments in one data set, each in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataflow.errors import DataError
from operators.environment_kinds import gymnasium_environment, textarena_environment
from operators.environments import environments_by, isolated, tools
from operators.kernels.environments.pool import ProcessPool
from operators.kernels.environments.routing import RoutedPool
from tests.environments.episodes import PooledEpisode, texts


def add(first: int, second: int) -> int:
    """Adds."""
    return first + second


@pytest.fixture
def pool(python: str) -> Iterator[RoutedPool]:
    """A game and a lake in the other interpreter, functions in this one."""
    lake = gymnasium_environment("FrozenLake-v1", arguments={"render_mode": "ansi"})
    environment = environments_by(
        "task",
        {
            "game": isolated(textarena_environment("TowerOfHanoi-v0"), python=python),
            "lake": isolated(lake, python=python),
            "sum": tools(add),
        },
    )
    pools: dict[str, ProcessPool] = {}
    for name, kind in environment.kinds.items():
        pools[name] = ProcessPool(kind, name=name, reset_timeout=300, step_timeout=300)
    routed = RoutedPool(environment, pools, name="tested")
    yield routed
    routed.close()
    routed.close()


def test_rows_go_to_the_environment_that_they_name(pool: RoutedPool) -> None:
    game = PooledEpisode(pool, {"task": "game"}, seed=1, number=0)
    lake = PooledEpisode(pool, {"task": "lake"}, seed=1, number=1)
    total = PooledEpisode(pool, {"task": "sum"}, seed=1, number=2)
    assert "Tower of Hanoi" in game.first.text
    assert lake.first.text.startswith("[S]FFF")
    assert total.first.tools[0]["function"]["name"] == "add"
    assert texts(total.call(("add", {"first": 1, "second": 2}))) == ["3"]
    assert "You moved disk 1" in texts(game.say("[A C]"))[0]
    assert lake.say("2").reward == 0.0
    for episode in (game, lake, total):
        assert episode.end().fault is None
    assert pool.wait(None) == []


def test_all_are_waited_for_at_once(pool: RoutedPool) -> None:
    kinds = ["game", "lake", "sum"] * 4
    for number, kind in enumerate(kinds):
        pool.reset(number, 1, {"task": kind})
    pool.abandon(0)
    begun: set[int] = set()
    while len(begun) < len(kinds) - 1:
        replies = pool.wait(None)
        assert replies
        begun.update(reply.episode for reply in replies)
    assert begun == set(range(1, len(kinds)))
    assert pool.wait(None) == []


def test_a_row_that_names_no_kind_is_refused(pool: RoutedPool) -> None:
    with pytest.raises(DataError, match="one of game, lake, sum, found 'chess'"):
        pool.reset(0, 1, {"task": "chess"})
    with pytest.raises(DataError, match="found None"):
        pool.reset(0, 1, {})
