"""One episode of a pool, asked one thing after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from operators.kernels.environments.replies import EnvironmentPool, EnvironmentReply

_SECONDS = 400.0


class PooledEpisode:
    """An episode that has begun. first: what `reset` answered. number: in its pool."""

    def __init__(
        self, pool: EnvironmentPool, row: Mapping[str, Any], seed: int, number: int = 0
    ) -> None:
        self.pool = pool
        self.number = number
        pool.reset(number, seed, row)
        self.first = self.reply()

    def reply(self) -> EnvironmentReply:
        """The next reply, which is of this episode."""
        replies = self.pool.wait(_SECONDS)
        assert [reply.episode for reply in replies] == [self.number]
        return replies[0]

    def say(self, text: str) -> EnvironmentReply:
        """Write a turn of text, in an episode that has begun."""
        assert self.first.fault is None, self.first.fault
        self.pool.step(self.number, {"role": "assistant", "content": text})
        return self.reply()

    def call(self, *calls: tuple[str, dict[str, Any]]) -> EnvironmentReply:
        """Write a turn with these tool calls, in an episode that has begun."""
        assert self.first.fault is None, self.first.fault
        tool_calls: list[dict[str, Any]] = []
        for name, arguments in calls:
            function = {"name": name, "arguments": arguments}
            tool_calls.append({"type": "function", "function": function})
        message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
        self.pool.step(self.number, message)
        return self.reply()

    def end(self) -> EnvironmentReply:
        """Finish it."""
        self.pool.finish(self.number, "stop")
        return self.reply()


def texts(reply: EnvironmentReply) -> list[str]:
    """The contents of an answer, which has no fault."""
    assert reply.fault is None, reply.fault
    return [message["content"] for message in reply.messages]
