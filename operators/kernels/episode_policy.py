"""What becomes of episodes that failed, and of those whose answer did not fit.

Owns: attempts, on_error, and the message of a loss. Does not own: the rows of a chunk
(episode_chunk.py), when an episode begins again (episode_flow.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.errors import KernelError
from operators.kernels.environments.replies import EnvironmentFault
from operators.kernels.episode_chunk import EpisodeChunk
from operators.kernels.episodes import EpisodeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePolicy:
    """node: its name. attempts: how often an episode begins at most. on_error: what is lost with
    one that failed each time: `drop_row`, `drop_group`, `stop`. drops_overflow: whether a group is
    given up whose episode had no room for an answer.
    """

    node: str
    attempts: int
    on_error: str
    drops_overflow: bool

    def take(self, chunk: EpisodeChunk, episode: int, last: EpisodeRow) -> None:
        """Keep the rows of an episode that is over until its group leaves."""
        chunk.add(episode, last)
        if last.episode.overflowed and self.drops_overflow:
            limit = last.episode.limit
            message = f"{self.node}: an answer did not fit the {limit} tokens of its row"
            chunk.lose_group(episode, message, failed=False)
        chunk.close(episode)

    def begins_again(self, chunk: EpisodeChunk, episode: int) -> bool:
        """Whether an episode that came to nothing is begun once more."""
        return not chunk.is_lost(episode) and chunk.attempts[episode] < self.attempts

    def lose(self, chunk: EpisodeChunk, episode: int, fault: EnvironmentFault) -> None:
        """An episode came to nothing in every attempt. Raises KernelError where on_error is
        `stop`.
        """
        if chunk.is_lost(episode):
            chunk.close(episode)
            return
        detail = f"\n{fault.detail}" if fault.detail else ""
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        message = (
            f"{self.node}: episode {chunk.key_of(episode)}: expected its environment to"
            f" answer, found that it {fault.text} ({attempts}). Fix: the environment, or"
            f" on_error='drop_row' to go on without such episodes.{detail}"
        )
        if self.on_error == "stop":
            raise KernelError(message)
        if self.on_error == "drop_row":
            chunk.lose(episode, message)
        else:
            chunk.lose_group(episode, message, failed=True)
        chunk.close(episode)
