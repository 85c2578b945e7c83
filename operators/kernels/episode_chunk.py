"""The rows of one chunk of episodes: which there are, which were lost, and what leaves together.

Owns: the rows that are over until their group leaves, groups that are given up, and tombstones.
Does not own: how an episode goes (episode_pass.py), attempts (interacting.py), columns
(episode_columns.py).

An episode has `segments` places for rows, next to one another; those of segments that it did not
need are given up one by one when its group leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dataflow.batch import Keys
from dataflow.kernel import Session
from operators.kernels.episodes import EpisodeRow


class EpisodeChunk:
    """keys: of all places, those of a group one after another. n: episodes of a group; segments:
    places of an episode.
    """

    def __init__(self, keys: Keys, n: int, segments: int, session: Session) -> None:
        self.keys = keys
        self.n = n
        self.segments = segments
        self.group_rows = n * segments
        self.lost_groups: set[int] = set()
        self._session = session
        self._rows: dict[int, EpisodeRow] = {}
        self._lost_rows: set[int] = set()

    @property
    def episode_count(self) -> int:
        """How many episodes there are to be."""
        return len(self.keys) // self.segments

    @property
    def rows(self) -> Collection[EpisodeRow]:
        """Those that are over and whole, in no order."""
        return self._rows.values()

    def group_of(self, episode: int) -> int:
        """The group of an episode."""
        return episode // self.n

    def is_lost(self, episode: int) -> bool:
        """Whether its group is given up."""
        return self.group_of(episode) in self.lost_groups

    def first_row(self, episode: int) -> int:
        """The first place of an episode."""
        return episode * self.segments

    def key_of(self, episode: int) -> tuple[int, int, int]:
        """The key of its first row."""
        return self.keys.take(np.array([self.first_row(episode)])).rows()[0]

    def places(self, episodes: Sequence[int]) -> np.ndarray:
        """int64: all places of these episodes."""
        first = np.array(episodes, np.int64)[:, None] * self.segments
        return (first + np.arange(self.segments)).ravel()

    def add(self, episode: int, last: EpisodeRow) -> None:
        """Take the rows of an episode that is over, until its group leaves."""
        for place, row in enumerate(last.all_rows, self.first_row(episode)):
            self._rows[place] = row

    def lose(self, episode: int, message: str) -> None:
        """The episode failed: all its rows are lost, alone."""
        places = self.places([episode])
        self._lost_rows.update(places.tolist())
        for key in self.keys.take(places).rows():
            self._session.tombstone(key, message, row_only=True)

    def lose_group(self, episode: int, message: str, *, failed: bool) -> None:
        """Give the group of this episode up, once."""
        group = self.group_of(episode)
        if group not in self.lost_groups:
            self.lost_groups.add(group)
            self._session.tombstone(self.key_of(episode), message, failed=failed)

    def take_whole(self, places: np.ndarray) -> tuple[Keys, list[EpisodeRow]]:
        """Of these places, which are whole groups, those with rows. Places of groups that are left
        without a row are given up.
        """
        whole: list[int] = []
        needless: list[int] = []
        for place in places.tolist():
            if place // self.group_rows in self.lost_groups:
                continue
            if place in self._rows:
                whole.append(place)
            elif place not in self._lost_rows:
                needless.append(place)
        text = "its episode was over before"
        for key in self.keys.take(np.array(needless, np.int64)).rows():
            self._session.tombstone(key, text, row_only=True, failed=False)
        return self.keys.take(np.array(whole, np.int64)), [self._rows[place] for place in whole]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
