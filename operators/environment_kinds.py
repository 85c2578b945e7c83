"""Environments as people have them, unchanged: of TRL, Gymnasium, TextArena, SkyRL-Gym, OpenEnv and
MCP.

Owns: the constructors that a graph calls, and their checks. Does not own: the value that they make
(environments.py), how each kind is spoken to (kernels/environments/child/adapters/).

The package is imported in the environment's process alone, which may have a Python of its own:
`isolated(textarena_environment(...), python="games/bin/python")`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dataflow.calls import call_error, declares, require
from dataflow.operator import EVERY_COLUMN
from operators.environments import Environment, reset_columns

_NONE: Mapping[str, Any] = MappingProxyType({})


@declares
def trl_environment(factory: Callable[[], Any]) -> Environment:
    """A class written for TRL's `environment_factory=`, or a function of no arguments that makes an
    instance.

    `reset(**row)` gets the dataset columns that it names, and what it returns is added to the
    prompt's last user message. Each other public method with a docstring is a tool. The episode is
    over when the model calls none. Its final reward is `get_reward()`, or the attribute `reward`
    where there is no such method; its public attributes are exported, for reward functions.

    A class with `reset` and without `step` is taken as one of these by `interact` itself.
    """
    fix = "trl_environment(GuessNumber), the class itself"
    expected = "a class, or a function that makes an environment"
    require(
        "trl_environment", "factory", factory, fits=callable(factory), expected=expected, fix=fix
    )
    if not isinstance(factory, type):
        return Environment(adapter="trl", target=factory)
    reset = getattr(factory, "reset", None)
    if not callable(reset):
        problem = f"expected a class with `reset`, found {factory.__name__}"
        raise call_error("trl_environment", problem, "def reset(self, **row) -> str | None")
    return Environment(adapter="trl", target=factory, columns=reset_columns(reset))


@declares
def gymnasium_environment(
    environment: str | Callable[..., Any],
    *,
    observe: Callable[[Any], str] | None = None,
    act: Callable[[str], Any] | None = None,
    actions: Sequence[str] = (),
    columns: Sequence[str] = (),
    arguments: Mapping[str, Any] = _NONE,
) -> Environment:
    """An environment of Gymnasium, by its id, class or function, whose episodes go through text.

    observe: an observation as text. Without it, what the environment renders where `arguments` has
    `render_mode="ansi"` (FrozenLake, Taxi), else numbers as Python writes them. act: the model's
    text as an action; a ValueError of it is answered to the model. Without it, the last action that
    the text names: of a Discrete space a number, or one of `actions`, names of its actions in their
    order; of MultiDiscrete and MultiBinary its last numbers; of Text all of it. A text that names
    none is answered with what is allowed, and costs a turn. columns: dataset columns for `reset`,
    as its `options`. arguments: of `gymnasium.make`.

    Each turn has the reward of its step. The episode is over when it is terminated or truncated.
    """
    where = "gymnasium_environment"
    fix = 'gymnasium_environment("FrozenLake-v1", actions=["left", "down", "right", "up"])'
    _require_entry(where, environment, fix)
    functions = _named_functions(where, observe, act)
    names = _require_names(where, "actions", actions)
    if act is not None and names:
        problem = "expected act or actions, found both"
        raise call_error(where, problem, "actions= alone, or act= that knows the names")
    if len({name.casefold() for name in names}) < len(names):
        raise call_error(where, f"two actions have one name: {names}", "a name for each")
    settings = {
        "functions": list(functions),
        "actions": list(names),
        "columns": list(_require_names(where, "columns", columns)),
        "arguments": dict(arguments),
    }
    return Environment(
        adapter="gymnasium",
        target=(environment, *functions.values()),
        arguments=_as_arguments(where, settings),
        columns=tuple(columns),
    )


@declares
def textarena_environment(name: str, *, arguments: Mapping[str, Any] = _NONE) -> Environment:
    """A game of TextArena for one player, by its id: `GuessTheNumber-v0-hardcore`,
    `TowerOfHanoi-v0`.

    The game's prompt is added to the prompt's last user message; its answers are user messages,
    each with what is new. A text of the model is an action, in which the game finds its move. The
    final reward is the game's; an episode that ends before the game does has none. arguments: of
    the game, over those that its id stands for.
    """
    where = "textarena_environment"
    fix = 'textarena_environment("GuessTheNumber-v0")'
    require(where, "name", name, fits=_is_text(name), expected="a game's id", fix=fix)
    return Environment(
        adapter="textarena", target=name, arguments=_as_arguments(where, arguments), columns=()
    )


@declares
def skyrl_environment(
    environment: str | Callable[..., Any], *, arguments: Mapping[str, Any] = _NONE
) -> Environment:
    """An environment of SkyRL-Gym, by its id (`gsm8k_multi_turn`) or class.

    It is made from each row as SkyRL does: `prompt` goes to its `init`, all other columns are its
    `extras`, such as `reward_spec`. A text of the model is an action; its observations and rewards
    are those of the turn. Its `postprocessed_action` is not used, as what the model wrote stays:
    with `stop=` the model ends where such an environment would cut. arguments: its `env_config`.
    """
    where = "skyrl_environment"
    _require_entry(where, environment, 'skyrl_environment("gsm8k_multi_turn")')
    configuration = _as_arguments(where, arguments)
    return Environment(
        adapter="skyrl", target=environment, arguments=configuration, columns=(EVERY_COLUMN,)
    )


@declares
def openenv_environment(
    client: str | type,
    *,
    base_url: str | None = None,
    image: str | None = None,
    tools: bool = False,
    observe: Callable[[Any], str] | None = None,
    act: Callable[[str], Any] | None = None,
    columns: Sequence[str] = (),
    arguments: Mapping[str, Any] = _NONE,
) -> Environment:
    """An environment of OpenEnv: the URL of a server, or a client's class with the `base_url` of
    its server or the Docker `image` that is started for each episode.

    tools: the server's tools are the model's, and each call is a step; the episode is over when the
    model calls none, or the server says so. Otherwise each text of the model is an action. act: the
    text as an action of the client's; a ValueError of it is answered to the model. Without it, the
    server's actions must have one text and nothing else. observe: an observation as text; without
    it, its only text, or all its fields as JSON. columns: dataset columns for the server's `reset`,
    beside the seed. arguments: of the client.

    Each turn has the reward of its step, or the sum of its calls' rewards. The server's state is
    exported.
    """
    where = "openenv_environment"
    fix = 'openenv_environment("http://localhost:8000")'
    is_client = _is_url(client) or isinstance(client, type)
    require(where, "client", client, fits=is_client, expected="a URL or a client's class", fix=fix)
    _require_server(client, base_url, image)
    functions = _named_functions(where, observe, act)
    if isinstance(client, type) and act is None and not tools:
        problem = f"expected act, as the actions of {client.__name__} are not known, found none"
        raise call_error(where, problem, "act=, a function from the model's text to an action")
    if tools and act is not None:
        raise call_error(where, "expected act or tools, found both", "tools=True alone")
    settings = {
        "functions": list(functions),
        "base_url": base_url,
        "image": image,
        "tools": tools,
        "columns": list(_require_names(where, "columns", columns)),
        "arguments": dict(arguments),
    }
    return Environment(
        adapter="openenv",
        target=(client, *functions.values()),
        arguments=_as_arguments(where, settings),
        columns=tuple(columns),
    )


@declares
def mcp_tools(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] = _NONE,
    cwd: str | None = None,
    headers: Mapping[str, str] = _NONE,
) -> Environment:
    """The tools of an MCP server: a URL (streamable HTTP), or the words of a command that starts
    one (stdio).

    Each episode has a session of its own, and a command is started for each. The episode is over
    when the model calls no tool. Errors of a tool are answered to the model; a server that is gone
    ends the episode with a fault. env, cwd: variables and folder of the command. headers: of each
    request to the URL.
    """
    where = "mcp_tools"
    is_command = _is_words(server) and not isinstance(server, str)
    fix = 'mcp_tools(["python", "-m", "weather"]), or mcp_tools("http://localhost:8000/mcp")'
    expected = "a URL, or a command's words"
    require(where, "server", server, fits=is_command or _is_url(server), expected=expected, fix=fix)
    if is_command and headers:
        raise call_error(where, "expected no headers for a command, found some", fix)
    if not is_command and (env or cwd):
        raise call_error(where, "expected no env and no cwd for a URL, found some", fix)
    if not is_command:
        settings: dict[str, Any] = {"headers": dict(headers)}
        return Environment(
            adapter="mcp", target=server, arguments=_as_arguments(where, settings), columns=()
        )
    settings = {"env": dict(env), "cwd": cwd}
    return Environment(
        adapter="mcp", target=tuple(server), arguments=_as_arguments(where, settings), columns=()
    )


def _require_server(client: Any, base_url: str | None, image: str | None) -> None:
    """A class needs a server; a URL is one."""
    where = "openenv_environment"
    servers = [name for name in (base_url, image) if name is not None]
    if isinstance(client, str) and servers:
        problem = f"expected the URL alone, found {servers[0]!r} beside it"
        raise call_error(where, problem, f"openenv_environment({client!r})")
    if isinstance(client, type) and len(servers) != 1:
        problem = f"expected base_url or image, found {len(servers)} of them"
        fix = f'openenv_environment({client.__name__}, base_url="http://localhost:8000")'
        raise call_error(where, problem, fix)


def _require_entry(where: str, entry: Any, fix: str) -> None:
    fits = _is_text(entry) or callable(entry)
    require(where, "environment", entry, fits=fits, expected="an id, or a class", fix=fix)


def _named_functions(where: str, observe: Any, act: Any) -> dict[str, Callable[..., Any]]:
    """Those that were passed, by name. Raises GraphError for what is no function."""
    functions: dict[str, Callable[..., Any]] = {}
    for name, function in (("observe", observe), ("act", act)):
        if function is not None:
            fix = f"{name}=, the function itself"
            is_function = callable(function)
            require(where, name, function, fits=is_function, expected="a function", fix=fix)
            functions[name] = function
    return functions


def _require_names(where: str, name: str, names: Any) -> tuple[str, ...]:
    fits = not isinstance(names, str) and (not names or _is_words(names))
    fix = f'{name}=["first", "second"]'
    require(where, name, names, fits=fits, expected="a list of names", fix=fix)
    return tuple(names)


def _is_text(name: Any) -> bool:
    return isinstance(name, str) and bool(name)


def _is_words(words: Any) -> bool:
    if not isinstance(words, Sequence) or not words:
        return False
    return all(_is_text(word) for word in words)


def _is_url(address: Any) -> bool:
    schemes = ("http://", "https://", "ws://", "wss://")
    return isinstance(address, str) and address.startswith(schemes)


def _as_arguments(where: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises GraphError for what JSON cannot hold: it goes to another process."""
    try:
        json.dumps(dict(arguments), allow_nan=False)
    except (TypeError, ValueError) as error:
        problem = f"expected arguments that JSON can hold, found {error}"
        raise call_error(where, problem, "arguments={...} of texts, numbers, lists") from None
    return MappingProxyType(dict(arguments))
