"""Environments as people have them, by their adapters: functions, classes of TRL, several kinds.

Those of other packages are tested with these in tests/environments.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import pytest
from transformers.utils import get_json_schema

from dataflow.errors import GraphError
from dataflow.json_values import decode, encode
from operators.environment_kinds import (
    gymnasium_environment,
    mcp_tools,
    openenv_environment,
    skyrl_environment,
    textarena_environment,
    trl_environment,
)
from operators.environments import (
    EnvironmentsByColumn,
    as_environment,
    environments_by,
    isolated,
    tools,
)
from operators.kernels.environments.child.adapters import native, trl
from operators.kernels.environments.child.adapters import tools as function_tools
from operators.kernels.environments.child.background_loop import run_in_background


class Paint(Enum):
    """What a tool may be asked for."""

    RED = "red"
    BLUE = "blue"


def undocumented(word: str) -> str:
    return word


def untyped(word) -> str:  # type: ignore[no-untyped-def]
    """Has no type."""
    return word


def spread(*words: str) -> str:
    """Takes any number."""
    return ""


def run(returned: Any) -> Any:
    """What an environment's method returns, awaited where it can be."""

    async def complete() -> Any:
        return await returned

    return asyncio.run(complete()) if inspect.isawaitable(returned) else returned


def called(tool: str, /, **arguments: Any) -> dict[str, Any]:
    """A call as a message has it."""
    return {"type": "function", "function": {"name": tool, "arguments": arguments}}


def turn(*calls: dict[str, Any], errors: Sequence[str] = ()) -> dict[str, Any]:
    """A message of the model."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if calls:
        message["tool_calls"] = list(calls)
    if errors:
        message["tool_call_errors"] = list(errors)
    return message


def add(first: int, second: int) -> int:
    """Adds."""
    return first + second


async def greet(name: str) -> str:
    """Greets."""
    await asyncio.sleep(0)
    return f"hello {name}"


def paint(colour: Paint) -> dict[str, str]:
    """Paints."""
    return {"name": colour.name, "umlaut": "ä"}


def explode(why: str) -> None:
    """Raises."""
    raise KeyError(why)


def function_environment() -> Any:
    declared = tools(add, greet, paint, explode)
    factory = function_tools.load(declared.target, declared.arguments)
    assert factory.columns == declared.columns == ()
    assert [tool["function"]["name"] for tool in factory.tools] == [
        "add",
        "greet",
        "paint",
        "explode",
    ]
    return factory.make()


def test_functions_answer_calls_in_their_order() -> None:
    environment = function_environment()
    assert run(environment.reset(1, {})) is None
    calls = [called("add", first=1, second=2), called("greet", name="Bo")]
    calls.append(called("paint", colour="blue"))
    messages, reward, done = run(environment.step(turn(*calls)))
    assert messages == [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "greet", "content": "hello Bo"},
        {"role": "tool", "name": "paint", "content": '{"name": "BLUE", "umlaut": "ä"}'},
    ]
    assert (reward, done) == (None, False)
    assert run(environment.step(turn()))[2] is True
    assert environment.state() == {"tool_calls": 3, "tool_failures": 0}


def test_nothing_is_awaited_where_no_function_is_async() -> None:
    """Then a function that blocks runs in its episode's own thread."""
    environment = function_environment()
    environment.reset(1, {})
    messages, _, done = environment.step(turn(called("add", first=1, second=2)))
    assert ([message["content"] for message in messages], done) == (["3"], False)
    assert inspect.isawaitable(environment.finish("stop")) is False


async def stumble() -> None:
    """Raises once it is awaited."""
    raise ValueError("late")


def test_calls_run_in_order_whatever_is_awaited() -> None:
    order: list[str] = []

    def first() -> str:
        """Goes at once."""
        order.append("first")
        return "1"

    async def second() -> str:
        """Goes when it is awaited."""
        order.append("second")
        return "2"

    environment = function_tools.load((first, second, stumble), {}).make()
    environment.reset(1, {})
    names = ["second", "first", "stumble", "second"]
    messages, _, _ = run(environment.step(turn(*map(called, names))))
    assert order == ["second", "first", "second"]
    answers = [message["content"] for message in messages]
    assert answers == ["2", "1", "Error: ValueError: late", "2"]


def test_what_goes_wrong_is_answered() -> None:
    environment = function_environment()
    run(environment.reset(1, {}))
    calls = [called("sub"), called("add", first="1", second=2), called("explode", why="a")]
    messages, _, done = run(environment.step(turn(*calls, errors=["no closing brace"])))
    texts = [message["content"] for message in messages]
    assert texts[0] == "Error: there is no tool 'sub'; the tools are: add, greet, paint, explode"
    assert texts[1] == 'Error: add: expected first to be integer, found "1"'
    assert texts[2] == "Error: KeyError: 'a'"
    assert "no closing brace" in texts[3]
    assert {message["role"] for message in messages} == {"tool"}
    assert done is False
    assert environment.state() == {"tool_calls": 4, "tool_failures": 4}
    run(environment.reset(2, {}))
    assert environment.state() == {"tool_calls": 0, "tool_failures": 0}


def test_a_message_with_unreadable_calls_alone_is_no_end() -> None:
    environment = function_environment()
    run(environment.reset(1, {}))
    messages, _, done = run(environment.step(turn(errors=["not JSON"])))
    assert (len(messages), done) == (1, False)


def test_the_background_loop_goes_on_between_calls() -> None:
    """A server's pings are answered there while the model writes."""
    pings = threading.Event()

    async def answer_pings() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        pings.set()

    tasks: list[asyncio.Task[None]] = []

    async def connect() -> str:
        tasks.append(asyncio.ensure_future(answer_pings()))
        return "connected"

    assert run(run_in_background(connect())) == "connected"
    assert pings.wait(timeout=60)


class Warehouse:
    """As TRL's documentation has environments."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.stock: dict[str, int] = {}
        self.lock = object()
        self._secret = 3

    def reset(self, item_name: str, **row: Any) -> str | None:
        self.reward = 0.0
        self.stock = {item_name: row["amount"]}
        return f"There is {item_name}."

    def take(self, item_name: str, amount: int) -> str | dict:
        """
        Takes something out.

        Args:
            item_name: What.
            amount: How many.

        Returns:
            What is left.
        """
        if item_name not in self.stock:
            raise ValueError(f"No {item_name}.")
        self.stock[item_name] -= amount
        self.reward = 1.0
        return {item_name: self.stock[item_name]}

    async def look(self) -> list:
        """Looks around."""
        return [{"type": "text", "text": "shelves"}]

    def _hidden(self) -> None:
        """Is no tool."""

    def helper(self) -> None:
        pass


def trl_factory(target: Callable[[], Any]) -> Any:
    declared = as_environment(target)
    assert declared.adapter == "trl"
    factory = trl.load(declared.target, declared.arguments)
    return factory


def test_a_class_of_trl_is_an_environment() -> None:
    factory = trl_factory(Warehouse)
    assert as_environment(Warehouse).columns == ("item_name", "*")
    assert [tool["function"]["name"] for tool in factory.tools] == ["look", "take"]
    assert factory.tools[1] == get_json_schema(Warehouse.take)
    environment = factory.make()
    assert run(environment.reset(7, {"item_name": "tea", "amount": 5})) == "There is tea."
    calls = [called("take", item_name="tea", amount=2), called("look")]
    calls.append(called("take", item_name="milk", amount=1))
    messages, reward, done = run(environment.step(turn(*calls)))
    # What TRL's trainer writes: str of a result, and of {"error": ...}.
    assert [message["content"] for message in messages] == [
        "{'tea': 3}",
        "shelves",
        "{'error': 'No milk.'}",
    ]
    assert (reward, done) == (None, False)
    assert run(environment.step(turn()))[2] is True
    assert run(environment.finish("stop")) == 1.0
    state = environment.state()
    assert state["stock"] == {"tea": 3}
    assert state["reward"] == 1.0
    assert state["tool_failures"] == 1
    assert "lock" not in state
    assert "_secret" not in state
    json.dumps(state)


class JudgedEnvironment:
    """Its reward is its own; it names the seed and one column."""

    def reset(self, seed: int, question: str) -> None:
        self.seed = seed
        self.question = question

    async def get_reward(self) -> float:
        return 0.5


def make_judged() -> JudgedEnvironment:
    return JudgedEnvironment()


@pytest.mark.parametrize("target", [JudgedEnvironment, make_judged])
def test_get_reward_is_the_final_reward(target: Callable[[], Any]) -> None:
    declared = trl_environment(target)
    factory = trl.load(declared.target, declared.arguments)
    environment = factory.make()
    assert run(environment.reset(7, {"question": "why", "other": 1})) is None
    assert environment.tools == []
    assert run(environment.finish("stop")) == 0.5
    assert environment.state()["seed"] == 7
    assert environment.state()["question"] == "why"


class Wordless:
    """Its reset returns something else."""

    def reset(self, **row: Any) -> Any:
        return 3


def test_a_column_that_is_called_seed_is_the_datas_to_trl_and_nobodys_here() -> None:
    """TRL passes columns alone; a class of ours gets the seed of its episode, if it asks for it."""
    row = {"seed": 3, "size": 1}
    assert trl.select_keywords(with_seed, 7, row) == row
    assert trl.select_keywords(with_seed, 7, {"size": 1}) == {"seed": 7, "size": 1}
    for target, expected in ((Seedless, {"size": 1}), (Seeded, {"seed": 7, "size": 1})):
        environment = native.load(target, {}).make()
        assert environment.reset(7, row) == expected


def with_seed(seed: int, size: int) -> None:
    """As a `reset` of TRL that asks for both."""


class Seedless:
    """Returns the columns that it gets."""

    def reset(self, **row: Any) -> dict[str, Any]:
        return row

    def step(self, message: Any) -> str:
        return "on"


class Seeded(Seedless):
    """It asks for the seed, too."""

    def reset(self, seed: int, **row: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"seed": seed, **row}


def test_an_observation_is_text() -> None:
    environment = trl.load(Wordless, {}).make()
    with pytest.raises(TypeError, match="expected a string or None"):
        run(environment.reset(1, {}))
    with pytest.raises(TypeError, match="has no `reset`"):
        trl.load(object, {}).make()


@pytest.mark.parametrize(
    "declare, problem",
    [
        (lambda: tools(), "one or more functions"),
        (lambda: tools(add, add), "another name"),
        (lambda: tools(undocumented), "docstring"),
        (lambda: tools(untyped), "no type"),
        (lambda: tools(spread), "a name each"),
        (lambda: tools(lambda word: word), "a name"),
        (lambda: tools(Warehouse), "function"),
        (lambda: environments_by("", {"a": Warehouse}), "a column's name"),
        (lambda: environments_by("kind", {}), "a dict"),
        (lambda: environments_by("kind", {1: Warehouse}), "a text"),
        (lambda: environments_by("kind", {"a": 3}), "environment's class"),
        (
            lambda: environments_by("k", {"a": environments_by("k", {"b": JudgedEnvironment})}),
            "itself",
        ),
        (lambda: trl_environment(3), "a class"),
        (lambda: trl_environment(Paint), "`reset`"),
        (lambda: gymnasium_environment(3), "an id, or a class"),
        (lambda: gymnasium_environment("A-v1", act=int, actions=["a"]), "found both"),
        (lambda: gymnasium_environment("A-v1", actions=["a", "A"]), "two actions"),
        (lambda: gymnasium_environment("A-v1", actions="ab"), "a list of names"),
        (lambda: gymnasium_environment("A-v1", observe=3), "a function"),
        (lambda: gymnasium_environment("A-v1", arguments={"a": print}), "JSON can hold"),
        (lambda: textarena_environment(""), "a game's id"),
        (lambda: skyrl_environment(3), "an id, or a class"),
        (lambda: openenv_environment("localhost"), "a URL or a client's class"),
        (lambda: openenv_environment("http://a", base_url="http://b"), "the URL alone"),
        (lambda: openenv_environment(Paint, act=str), "base_url or image, found 0"),
        (lambda: openenv_environment(Paint, base_url="http://a"), "expected act"),
        (lambda: openenv_environment("http://a", act=str, tools=True), "found both"),
        (lambda: mcp_tools("shop"), "a command's words"),
        (lambda: mcp_tools([]), "a command's words"),
        (lambda: mcp_tools(["shop"], headers={"a": "b"}), "no headers"),
        (lambda: mcp_tools("http://a/mcp", cwd="b"), "no cwd"),
    ],
)
def test_declarations_are_checked(declare: Callable[[], Any], problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        declare()


def test_kinds_by_a_column_keep_their_places() -> None:
    shop = isolated(Warehouse, python="shop/bin/python", memory_mb=100, processes=3)
    kinds = environments_by("task", {"shop": shop, "quiz": JudgedEnvironment, "sum": tools(add)})
    assert as_environment(kinds) is kinds
    assert kinds.columns == ("task", "item_name", "*", "question")
    placed = isolated(kinds, processes=2, memory_mb=200)
    assert isinstance(placed, EnvironmentsByColumn)
    assert placed.kinds["shop"].python == "shop/bin/python"
    assert [kind.processes for kind in placed.kinds.values()] == [3, 2, 2]
    assert {kind.memory_mb for kind in placed.kinds.values()} == {200}
    assert isolated(kinds).kinds["shop"].memory_mb == 100  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "environment",
    [
        tools(add, greet),
        trl_environment(Warehouse),
        gymnasium_environment("FrozenLake-v1", actions=["left"], arguments={"is_slippery": False}),
        gymnasium_environment("CartPole-v1", act=make_judged, observe=undocumented),
        textarena_environment("TowerOfHanoi-v0"),
        skyrl_environment(Warehouse, arguments={"word": "hello"}),
        openenv_environment("http://localhost:8000", tools=True),
        mcp_tools(["python", "-m", "shop"], env={"SHOP": "open"}),
        environments_by("task", {"shop": Warehouse, "sum": isolated(tools(add), processes=2)}),
    ],
)
def test_a_snapshot_keeps_environments(environment: Any) -> None:
    written = json.loads(json.dumps(encode(environment, "test")))
    assert decode(written, "test") == environment
