"""The rows of one chunk of episodes: which there are, which were lost, and what leaves together.

Owns: the rows that are over until their group leaves, which groups are whole, those that are given
up, and tombstones. Does not own: how an episode goes (episode_pass.py), when one begins
(episode_flow.py), columns (episode_columns.py).

An episode has `segments` places for rows, next to one another; those of segments that it did not
need are given up one by one when its group leaves. A group is what the chunk has of one prompt: all
of its episodes, or those of a span.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, Session
from operators.kernels.episode_metrics import EpisodeMetrics
from operators.kernels.episode_prompts import PromptRows
from operators.kernels.episodes import EpisodeRow


class EpisodeChunk:
    """n: episodes of each prompt; segments: places of an episode; least: how many places leave
    together at least. Episodes and groups are numbered in the order of their keys.
    """

    def __init__(
        self, chunk: Chunk, *, n: int, segments: int, least: int, session: Session
    ) -> None:
        self.segments = segments
        self.keys = chunk.keys.expand_spans(n * segments, chunk.spans)
        self._prompt_keys = chunk.keys
        self.prompts = PromptRows(chunk.inputs["prompt"])
        self.metrics = EpisodeMetrics(session, has_segments=segments > 1)
        self.lost_groups: set[int] = set()
        counts = _count_episodes(chunk, n, segments)
        self._first_episodes = np.cumsum(counts) - counts
        self._group_of = np.repeat(np.arange(len(counts)), counts).tolist()
        self._ranks = _rank_groups(chunk.weights, len(counts))
        self.attempts = np.zeros(self.episode_count, np.int64)
        """[episodes]: how often each has begun."""
        self._session = session
        self._least = min(least, len(self.keys))
        self._rows: dict[int, EpisodeRow] = {}
        self._losses: dict[int, str] = {}
        """Why episodes were lost alone, until their group leaves."""
        self._counts = counts.tolist()
        self._episodes_left = counts.tolist()
        self._places_left = len(self.keys)
        self._whole_groups: list[int] = []
        self._whole_places = 0

    @property
    def episode_count(self) -> int:
        """How many episodes there are to be."""
        return len(self._group_of)

    @property
    def rows(self) -> Collection[EpisodeRow]:
        """Those that are over and whole, in no order."""
        return self._rows.values()

    @property
    def is_over(self) -> bool:
        """Whether all places have left."""
        return self._places_left == 0

    def list_groups(self) -> list[list[int]]:
        """The episodes of each group that has some, heavier groups first."""
        groups: list[list[int]] = [[] for _ in self._ranks]
        for episode, group in enumerate(self._group_of):
            groups[self._ranks[group]].append(episode)
        return [episodes for episodes in groups if episodes]

    def group_of(self, episode: int) -> int:
        """The group of an episode."""
        return self._group_of[episode]

    def rank_of(self, episode: int) -> tuple[int, int]:
        """By which episodes are ordered where all begin at once."""
        return self._ranks[self.group_of(episode)], episode

    def is_lost(self, episode: int) -> bool:
        """Whether its group is given up."""
        return self.group_of(episode) in self.lost_groups

    def keys_of_rows(self, episodes: Sequence[int], segments: Sequence[int]) -> Keys:
        """The keys of these rows, each of an episode's segment."""
        places = np.array(episodes, np.int64) * self.segments + np.array(segments, np.int64)
        return self.keys.take(places)

    def keys_of_groups(self, groups: np.ndarray) -> Keys:
        """The keys of the prompts of these groups, by which they are given up."""
        return self._prompt_keys.take(groups)

    def key_of(self, episode: int) -> tuple[int, int, int]:
        """The key of its first row."""
        return self.keys_of_rows([episode], [0]).rows()[0]

    # What is over.

    def add(self, episode: int, last: EpisodeRow) -> None:
        """Take the rows of an episode that is over, until its group leaves."""
        for place, row in enumerate(last.all_rows, episode * self.segments):
            self._rows[place] = row

    def lose(self, episode: int, message: str) -> None:
        """The episode failed: all its rows are lost, alone, unless its group is given up yet."""
        self._losses[episode] = message

    def lose_group(self, episode: int, message: str, *, failed: bool) -> None:
        """Give the group of this episode up, once."""
        group = self.group_of(episode)
        if group not in self.lost_groups:
            self.lost_groups.add(group)
            [key] = self.keys_of_groups(np.array([group])).rows()
            self._session.tombstone(key, message, failed=failed)

    def close(self, episode: int) -> None:
        """An episode is over, in whichever way."""
        group = self.group_of(episode)
        self._episodes_left[group] -= 1
        if not self._episodes_left[group]:
            self._whole_groups.append(group)
            self._whole_places += self._counts[group] * self.segments

    def pop_places(self, *, all_whole: bool) -> np.ndarray:
        """The places, int64 ascending, of the groups that are to leave now: of all whole ones, or
        none if they are too few.
        """
        count = self._whole_places
        if not (all_whole or count >= self._least or count == self._places_left):
            return np.zeros(0, np.int64)
        groups, self._whole_groups, self._whole_places = sorted(self._whole_groups), [], 0
        self._places_left -= count
        places: list[int] = []
        for group in groups:
            first = int(self._first_episodes[group])
            last = first + self._counts[group]
            places += range(first * self.segments, last * self.segments)
        return np.array(places, np.int64)

    def take_whole(self, places: np.ndarray) -> tuple[Keys, list[EpisodeRow]]:
        """Of these places, which are whole groups, those with rows. Places of groups that are left
        without a row are given up.
        """
        whole: list[int] = []
        for place in places.tolist():
            episode = place // self.segments
            if self.is_lost(episode):
                continue
            if place in self._rows:
                whole.append(place)
            else:
                self._give_up(place, self._losses.get(episode))
        return self.keys.take(np.array(whole, np.int64)), [self._rows[place] for place in whole]

    def _give_up(self, place: int, failure: str | None) -> None:
        """A place stays empty, for this failure, or because nobody needs it."""
        [key] = self.keys.take(np.array([place])).rows()
        text = failure or "its episode was over before"
        self._session.tombstone(key, text, row_only=True, failed=failure is not None)


def _count_episodes(chunk: Chunk, n: int, segments: int) -> np.ndarray:
    """int64 [prompts]: the episodes of each that the chunk has."""
    spans = chunk.spans
    if spans is None:
        return np.full(len(chunk.keys), n, np.int64)
    cut = np.flatnonzero((spans % segments).any(1))
    for row in cut.tolist():
        raise KernelError(
            f"chunk {chunk.id}: expected spans of whole episodes, of {segments} places each, found"
            f" {spans[row].tolist()}. Fix: cut the samples of a prompt at multiples of {segments}."
        )
    return ((spans[:, 1] - spans[:, 0]) // segments).astype(np.int64)


def _rank_groups(weights: np.ndarray | None, count: int) -> list[int]:
    """Of each group, how many begin before it: heavier ones, and of equal ones the first."""
    if weights is None:
        return list(range(count))
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(-weights, kind="stable")] = np.arange(count)
    return ranks.tolist()
