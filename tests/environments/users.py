"""A user's own classes and functions, in a file that another interpreter can import: it imports
nothing of ours.
"""

from __future__ import annotations

from typing import Any


def observe_cart(observation: Any) -> str:
    """A user's own text."""
    return "leans right" if observation[2] > 0 else "leans left"


def act_on_cart(text: str) -> int:
    """A user's own reading."""
    if text not in ("push left", "push right"):
        raise ValueError("push left, or push right")
    return int(text == "push right")


class AddingUp:
    """An environment of a user's, made by its class: it counts to the sum that it is told."""

    def __init__(self, most: int) -> None:
        from gymnasium import spaces

        self.action_space = spaces.MultiDiscrete([most, most])

    def reset(self, seed: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self.sum = 0
        return {"sum": 0, "goal": (options or {}).get("goal")}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.sum += int(action.sum())
        return self.sum, 0.5, False, self.sum > 3, {"array": action}

    def close(self) -> None:
        pass


def act_by_name(text: str) -> dict[str, str]:
    """A user's own reading; some of it the server refuses."""
    if text == "nothing":
        raise ValueError("a digit")
    field = "guess" if text.isdecimal() else "gess"
    return {field: text}


class Greeter:
    """A user's own, which takes its settings by name and adds a message to the prompt."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.word = env_config.word
        self.extras = extras

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": self.word}], {}

    def step(self, action: str) -> dict[str, Any]:
        return {
            "observations": [],
            "reward": float(action == self.extras["name"]),
            "done": True,
            "metadata": {"length": len(action)},
            "postprocessed_action": action[:1],
        }

    def close(self) -> None:
        pass


class Rewriter(Greeter):
    """It changes the prompt."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": self.word}, *prompt], {}
