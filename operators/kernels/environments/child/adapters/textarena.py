"""Games of TextArena with one player.

Owns: the adapter `textarena`: making a game, its observations as user messages, its reward. Does
not own: the games.

Wrappers of actions stay. Those of observations repeat the whole game in each of them; here each
message has what is new since the last one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ..exported_state import export_attributes

_PLAYER = 0


class TextArenaEnvironment:
    """One game, made anew for each episode."""

    def __init__(self, textarena: Any, name: str, arguments: Mapping[str, Any]) -> None:
        """textarena: the package."""
        self._textarena = textarena
        self._name = name
        self._arguments = dict(arguments)
        self._game: Any = None
        self._outcome: tuple[float | None, Mapping[str, Any]] | None = None
        self._steps = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """Begin a game; returns its prompt, with the first board where it has one."""
        self._outcome = None
        self._steps = 0
        self._game = self._textarena.make(self._name, **self._arguments)
        self._game.reset(num_players=1, seed=seed)
        return self._read_observations()

    def _read_observations(self) -> str:
        """What the game says since it was last asked, without what the player wrote."""
        inner = self._game
        while isinstance(inner, self._textarena.Wrapper):
            inner = inner.env
        _, observations = inner.get_observation()
        written = self._textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in observations if kind is not written).strip()

    def step(self, message: Mapping[str, Any]) -> tuple[str, None, bool]:
        """The whole text is the action: games find their moves in it."""
        done, _ = self._game.step(action=message["content"])
        self._steps += 1
        if done:
            self._close_game()
        return self._read_observations(), None, bool(done)

    def _close_game(self) -> None:
        rewards, infos = self._game.close()
        self._outcome = ((rewards or {}).get(_PLAYER), (infos or {}).get(_PLAYER, {}))

    def finish(self, reason: str) -> float | None:
        """The player's reward; None where the game was not over."""
        if self._outcome is None:
            self._close_game()
        return self._outcome[0] if self._outcome else None

    def state(self) -> dict[str, Any]:
        """How many moves there were, and what the game says of the player, its reason among it."""
        information = self._outcome[1] if self._outcome else {}
        return {"steps": self._steps, **export_attributes(information)}

    def close(self) -> None:
        """Close a game that is not over."""
        if self._game is not None and self._outcome is None:
            self._close_game()


class TextArenaFactory:
    """Makes games of one id."""

    tools: tuple[Mapping[str, Any], ...] = ()
    columns: tuple[str, ...] = ()

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._textarena = importlib.import_module("textarena")  # before the fork
        self._name = name
        self._arguments = arguments

    def make(self) -> TextArenaEnvironment:
        """The game itself is made by `reset`."""
        return TextArenaEnvironment(self._textarena, self._name, self._arguments)


def load(target: str, arguments: Mapping[str, Any]) -> TextArenaFactory:
    """target: the game's id. arguments: of the game, over those that its id stands for."""
    return TextArenaFactory(target, arguments)
