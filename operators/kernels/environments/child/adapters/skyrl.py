"""Environments of SkyRL-Gym.

Owns: the adapter `skyrl`: making one from a row, as SkyRL's generator does, and its outputs. Does
not own: the environments.

An environment's `postprocessed_action` would be text in place of what the model wrote. What was
decoded is never encoded again here, so it is counted and not used: let the model stop where such an
environment would cut (`stop=`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from ..awaitable_steps import complete
from ..exported_state import export_attributes


class SkyrlEnvironment:
    """One environment, made anew for each episode: it takes the row when it is made."""

    def __init__(self, make_environment: Callable[[dict[str, Any]], Any]) -> None:
        self._make_environment = make_environment
        self._environment: Any = None
        self._metadata: Mapping[str, Any] = {}
        self._postprocessed = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Make it with all of the row but its prompt, and pass the prompt to `init`; returns the
        messages that `init` added.
        """
        self.close()
        self._postprocessed = 0
        extras = {name: cell for name, cell in row.items() if name != "prompt"}
        prompt = as_conversation(row.get("prompt"))
        self._environment = self._make_environment(extras)
        conversation, self._metadata = self._environment.init([dict(each) for each in prompt])
        return added_messages(prompt, conversation)

    def step(self, message: Mapping[str, Any]) -> Any:
        """The whole text is the action. Returns messages, reward and done, or an awaitable of them,
        as the environment's own `step` does.
        """
        return complete(self._step(message))

    def _step(self, message: Mapping[str, Any]) -> Generator[Any, Any, tuple[list[Any], Any, bool]]:
        output = yield self._environment.step(message["content"])
        self._metadata = output.get("metadata") or {}
        written = output.get("postprocessed_action")
        if written is not None and written != message["content"]:
            self._postprocessed += 1
        observations = list(output["observations"] or ())
        return observations, output["reward"], bool(output["done"])

    def finish(self, reason: str) -> None:
        """All rewards were the turns' own."""

    def state(self) -> dict[str, Any]:
        """Its metrics, what JSON can hold of the last metadata, and how many actions it would have
        written otherwise.
        """
        metrics = getattr(self._environment, "get_metrics", dict)()
        return {
            **export_attributes(metrics),
            "metadata": export_attributes(self._metadata),
            "postprocessed": self._postprocessed,
        }

    def close(self) -> None:
        """Close the environment, if one was made."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()


def as_conversation(prompt: Any) -> list[dict[str, Any]]:
    """A row's prompt as messages: text is one user message."""
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt)


def added_messages(
    prompt: Sequence[Mapping[str, Any]], conversation: Sequence[Any]
) -> list[dict[str, Any]]:
    """The messages behind a prompt's own. Raises ValueError where those were changed."""
    conversation = list(conversation)
    if conversation[: len(prompt)] != list(prompt):
        problem = "`init` changed the messages of the prompt, which is written already"
        raise ValueError(f"{problem}. Fix: put what it writes there into the data's prompt")
    return conversation[len(prompt) :]


class SkyrlFactory:
    """Makes environments of one id or class."""

    tools: tuple[Mapping[str, Any], ...] = ()
    columns: tuple[str, ...] = ("*",)

    def __init__(self, entry: str | Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._entry = entry
        self._arguments = dict(arguments)
        if isinstance(entry, str):
            importlib.import_module("skyrl_gym")  # before the fork, once for all episodes

    def make(self) -> SkyrlEnvironment:
        """The environment itself is made by `reset`, from a row."""
        return SkyrlEnvironment(self._make_environment)

    def _make_environment(self, extras: dict[str, Any]) -> Any:
        # As SkyRL's generator passes it.
        configuration = importlib.import_module("omegaconf").OmegaConf.create(self._arguments)
        if not isinstance(self._entry, str):
            return self._entry(env_config=configuration, extras=extras)
        make = importlib.import_module("skyrl_gym").make
        return make(self._entry, env_config=configuration, extras=extras)


def load(target: str | Callable[..., Any], arguments: Mapping[str, Any]) -> SkyrlFactory:
    """target: an id, or a class. arguments: its `env_config`."""
    return SkyrlFactory(target, arguments)
