"""What a pool of environments is asked and what it answers.

Owns: the values between a kernel and a pool, and the pool's protocol. Does not own: processes
(pool.py), what becomes of an episode (interacting.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dataflow.prompt_types import Message

FaultKind = Literal["raised", "timeout", "died", "answer"]
"""An exception, no reply in time, an end of the process, or a reply that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFault:
    """Why an environment did not answer. text: one line that ends a sentence about the
    environment; detail: a traceback, or the last lines that it printed.
    """

    kind: FaultKind
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReply:
    """What one call of an episode's environment returned.

    episode: the caller's number. messages: of `reset` those that begin the conversation, behind the
    prompt's own; of `step` those that answer the turn. text: what `reset` returned as a string,
    which is added to the prompt's last user turn. reward: of a turn, or of `finish`. done: whether
    the episode is over. tools: of `reset`, the tools that the model may call, in OpenAI's form.
    state: of `finish`, what the environment exports, which JSON can hold. seconds: of the call, in
    its process. fault: why there is none of these.
    """

    episode: int
    call: Literal["reset", "step", "finish"]
    messages: Sequence[Message] = ()
    text: str | None = None
    reward: float | None = None
    done: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    fault: EnvironmentFault | None = None


class EnvironmentPool(Protocol):
    """Environments of many episodes at once, each an object that is asked one thing at a time.

    Calls return at once; replies come by `wait`. A fault is the end of that episode's environment
    alone: nothing more is asked of it. One that can still hear that is told `finish("error")`,
    whatever that returns, and closed.
    """

    def reset(self, episode: int, seed: int, row: Mapping[str, Any]) -> None:
        """Begin an episode, of any number that is not under way. row: dataset columns by name, as
        Python values; only those that the environment's `reset` takes are passed.
        """
        ...

    def step(self, episode: int, message: Message) -> None:
        """Show the environment what the model wrote: role, content, and `tool_calls` where it
        called tools.
        """
        ...

    def finish(self, episode: int, reason: str) -> None:
        """End an episode: the environment's `finish(reason)`, its exported state, its `close` (or
        the next `reset`, where it is used again).
        """
        ...

    def abandon(self, episode: int, reason: str | None = None) -> None:
        """Give an episode up, whatever it does. No reply comes: its environment's `finish(reason)`,
        without a reason none, and its `close` are called where nobody waits for them. A process
        that has not ended within the time of a step is killed.
        """
        ...

    def wait(self, seconds: float | None) -> list[EnvironmentReply]:
        """Wait for replies, at most so long (None: until one comes; 0: take what is there). Calls
        whose time is up are replies with a fault. Never raises because of what an environment does.
        """
        ...

    def wake(self) -> None:
        """Make a `wait` that is under way return at once, or the next one; callable from any
        thread.
        """
        ...

    def close(self) -> None:
        """Close all environments, in a bounded time, and end their processes. Closing twice does
        nothing.
        """
        ...
