"""Environments of OpenEnv: a server at a URL, or a client's class with its own.

Owns: the adapter `openenv`: a client for each episode, texts as actions, tool calls as actions,
observations as texts. Does not own: the protocol (the package `openenv-core`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from ..background_loop import run_in_background
from ..exported_state import export_attributes
from ..tool_calls import ToolCalls, ToolFailed, ToolsLost, write_json

_OUTSIDE = ("done", "reward", "metadata")
"""Fields of an observation that are no part of what a model is shown."""
_REFUSED = "VALIDATION_ERROR"
"""In the error of a server that cannot read an action."""


class OpenEnvClient:
    """A client's calls, in the background loop: its connection goes on between them."""

    def __init__(self, target: Any, arguments: Mapping[str, Any]) -> None:
        self._target = target
        self._image: str | None = arguments["image"]
        self._base_url: str | None = arguments["base_url"]
        self._options: Mapping[str, Any] = arguments["arguments"]
        self._client: Any = None

    async def reset(self, seed: int, columns: Mapping[str, Any]) -> Any:
        """Connect, the first time, and reset."""
        return await run_in_background(self._reset(seed, columns))

    async def _reset(self, seed: int, columns: Mapping[str, Any]) -> Any:
        if self._client is None:
            self._client = await self._connect()
        return await as_awaited(self._client.reset(seed=seed, **dict(columns)))

    async def _connect(self) -> Any:
        if isinstance(self._target, str):
            core = importlib.import_module("openenv.core")
            return core.GenericEnvClient(base_url=self._target, **self._options)
        if self._image is not None:
            started = self._target.from_docker_image(self._image, **self._options)
            return await as_awaited(started)
        return self._target(base_url=self._base_url, **self._options)

    async def step(self, action: Any) -> Any:
        """One step."""
        return await run_in_background(as_awaited(self._client.step(action)))

    async def state(self) -> Any:
        """The server's state of the episode."""
        return await run_in_background(as_awaited(self._client.state()))

    async def close(self) -> None:
        """Disconnect; a container that was started for it stops."""
        client, self._client = self._client, None
        if client is not None:
            await run_in_background(as_awaited(client.close()))


async def as_awaited(returned: Any) -> Any:
    """A client of some versions returns awaitables, that of others does not."""
    return await returned if inspect.isawaitable(returned) else returned


class OpenEnvText:
    """An episode in which each text of the model is an action."""

    def __init__(
        self,
        client: OpenEnvClient,
        observe: Callable[[Any], str],
        act: Callable[[str], Any],
    ) -> None:
        self._client = client
        self._observe = observe
        self._act = act
        self._steps = 0
        self._refused = 0
        self._state: dict[str, Any] = {}

    async def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """Reset with the seed and the row's columns; returns the first observation."""
        self._steps = 0
        self._refused = 0
        return self._observe((await self._client.reset(seed, row)).observation)

    async def step(self, message: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Act as the text says; what the server or `act` cannot read costs a turn, no step."""
        try:
            step = await self._client.step(self._act(message["content"]))
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _REFUSED not in str(error):
                raise
            self._refused += 1
            return f"That is no action: {error}", None, False
        self._steps += 1
        return self._observe(step.observation), step.reward, bool(step.done)

    async def finish(self, reason: str) -> None:
        """All rewards were the turns' own; the server's state is asked for while it is there."""
        self._state = export_attributes(as_fields(await self._client.state()))

    def state(self) -> dict[str, Any]:
        """The server's state, and counts."""
        return {**self._state, "steps": self._steps, "refused": self._refused}

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


class OpenEnvTools:
    """An episode in which each tool call of the model is an action. tools: after `reset`."""

    def __init__(self, client: OpenEnvClient, observe: Callable[[Any], str]) -> None:
        self._client = client
        self._observe = observe
        self._calls = ToolCalls({}, {})
        self._state: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._is_done = False
        self.tools: list[dict[str, Any]] = []

    async def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """Reset with the seed and the row's columns, and ask for the tools; returns the first
        observation.
        """
        self._is_done = False
        text = self._observe((await self._client.reset(seed, row)).observation)
        listed = await self._client.step(mcp_actions().ListToolsAction())
        tools = [as_fields(tool) for tool in as_fields(listed.observation)["tools"]]
        self.tools = [as_function(tool) for tool in tools]
        functions = {tool["name"]: self._bind(tool["name"]) for tool in tools}
        self._calls = ToolCalls(functions, {}, converts=False)
        return text

    def _bind(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            return await self._call(name, arguments)

        return call

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        action = mcp_actions().CallToolAction(tool_name=name, arguments=arguments)
        try:
            step = await self._client.step(action)
        except Exception as error:  # a lost connection is no error of the model's
            raise ToolsLost(f"{name}: {error}") from error
        if step.reward is not None:
            self._rewards.append(float(step.reward))
        self._is_done = self._is_done or bool(step.done)
        answer = as_fields(step.observation)
        if answer.get("error"):
            raise ToolFailed(str(as_fields(answer["error"]).get("message")))
        return write_tool_answer(answer.get("result"))

    async def step(
        self, message: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], float | None, bool]:
        """Answer the message's calls, whose rewards are added up; done where it has none, or where
        the server says so.
        """
        self._rewards = []
        answers, _, done = await as_awaited(self._calls.answer(message))
        reward = sum(self._rewards) if self._rewards else None
        return answers, reward, self._is_done or done

    async def finish(self, reason: str) -> None:
        """All rewards were the turns' own; the server's state is asked for while it is there."""
        self._state = export_attributes(as_fields(await self._client.state()))

    def state(self) -> dict[str, Any]:
        """The server's state, and counts of tool calls."""
        return {**self._state, **self._calls.counts()}

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


def mcp_actions() -> Any:
    """OpenEnv's module of actions that list and call tools."""
    return importlib.import_module("openenv.core.env_server.mcp_types")


def as_fields(thing: Any) -> dict[str, Any]:
    """An object of a client, of pydantic or a dataclass, as a dict; a dict as it is."""
    if isinstance(thing, Mapping):
        return dict(thing)
    if hasattr(thing, "model_dump"):
        return thing.model_dump(mode="json")
    return dict(vars(thing))


def as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of OpenEnv as a function of OpenAI's form."""
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def write_tool_answer(answer: Any) -> str:
    """A tool's answer: of MCP's form its texts, anything else as JSON."""
    contents = answer.get("content") if isinstance(answer, dict) else None
    if not isinstance(contents, list):
        return write_json(answer)
    texts = [part["text"] for part in contents if part.get("type") == "text"]
    return "\n".join(texts)


def write_observation(observation: Any) -> str:
    """An observation where the user gave no function for it: its only text, or all as JSON."""
    if isinstance(observation, str):
        return observation
    fields = as_fields(observation)
    shown = {name: part for name, part in fields.items() if name not in _OUTSIDE}
    contents = list(shown.values())
    if len(contents) == 1 and isinstance(contents[0], str):
        return contents[0]
    return write_json(shown) if shown else ""


class OpenEnvFactory:
    """Makes clients of one URL or class."""

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, target: Any, arguments: Mapping[str, Any]) -> None:
        functions = dict(zip(arguments["functions"], target[1:]))  # noqa: B905 - Python 3.9
        self._entry = target[0]
        self._observe: Callable[[Any], str] | None = functions.get("observe")
        self._act: Callable[[str], Any] | None = functions.get("act")
        self._arguments = arguments
        self.columns: tuple[str, ...] = tuple(arguments.get("columns", ()))

    def make(self) -> OpenEnvText | OpenEnvTools:
        """The connection is opened by `reset`. Raises ValueError where the form of texts as actions
        is not known.
        """
        client = OpenEnvClient(self._entry, self._arguments)
        observe = self._observe or write_observation
        if self._arguments["tools"]:
            return OpenEnvTools(client, observe)
        return OpenEnvText(client, observe, self._act or self._find_act())

    def _find_act(self) -> Callable[[str], Any]:
        """A text as an action, where the server's actions have one text and nothing else."""
        url = self._entry if isinstance(self._entry, str) else self._arguments["base_url"]
        field = find_text_field(read_action_schema(url))
        return lambda text: {field: text}


def read_action_schema(url: str) -> dict[str, Any]:
    """What the server says of its actions."""
    address = url.replace("ws://", "http://").replace("wss://", "https://").rstrip("/")
    with urllib.request.urlopen(f"{address}/schema", timeout=10) as answer:
        return json.load(answer)["action"]


def find_text_field(schema: Mapping[str, Any]) -> str:
    """The only field that an action must have, a text. Raises ValueError where it is otherwise."""
    required = list(schema.get("required", ()))
    properties = schema.get("properties", {})
    if len(required) == 1 and properties[required[0]].get("type") == "string":
        return required[0]
    names = ", ".join(name for name in properties if name != "metadata")
    problem = f"expected actions with one text, found the fields {names}"
    raise ValueError(f"{problem}. Fix: act=, a function from the model's text to an action")


def load(target: Any, arguments: Mapping[str, Any]) -> OpenEnvFactory:
    """target: a URL or a client's class, then functions, which `functions` in the arguments names:
    `observe` and `act`. The other arguments: `base_url`, `image`, `tools`, `columns`, and the
    client's own `arguments`.
    """
    importlib.import_module("openenv.core")  # before the fork, once for all episodes
    mcp_actions()
    return OpenEnvFactory(target, arguments)
