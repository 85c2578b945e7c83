"""Turns of episodes in NumPy: where each turn's tokens are, and the rewards on them.

Owns: these places, and the formula of `turn_reward`. Does not own: the operators (turns.py),
transitions (kernels/transitions.py). A function on columns has its operator's name, which is part
of every graph's digest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError
from dataflow.schema import Episode, TokenReward
from dataflow.user import Columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnPlaces:
    """The turns of all episodes, in order. row, turn: int64 [turns], the episode of each, and its
    number there. stop: where its written tokens end among the flat completion tokens. is_last: of
    its episode.
    """

    row: np.ndarray
    turn: np.ndarray
    stop: np.ndarray
    is_last: np.ndarray

    def find_starts(self, mask: Ragged) -> np.ndarray:
        """Where the written tokens of each turn begin: behind what the turn before was answered."""
        before = np.where(self.turn > 0, np.roll(self.stop, 1), mask.offsets[:-1][self.row])
        written = np.flatnonzero(mask.values)
        # There is one, as a turn ends on a written token.
        return written[np.searchsorted(written, before)]


def find_turns(turn_end: Ragged, mask: Ragged, keys: Keys) -> TurnPlaces:
    """Find the turns of episodes. Raises DataError for one that does not end on a written token of
    its row, behind the turn before.
    """
    row = turn_end.segments()
    turn = np.arange(len(row)) - turn_end.offsets[:-1][row]
    end = turn_end.values.astype(np.int64)
    stop = end + mask.offsets[:-1][row]
    end_before = np.where(turn > 0, np.roll(end, 1), 0)
    is_within = (end > end_before) & (end <= mask.lengths[row])
    ends_on_written = np.zeros(len(row), dtype=bool)
    ends_on_written[is_within] = mask.values[stop[is_within] - 1] > 0
    if not ends_on_written.all():
        wrong = int(np.argmin(ends_on_written))
        key = keys.take(row[wrong : wrong + 1]).rows()[0]
        raise DataError(
            f"row (position, sample, attempt) {key}: expected turn {turn[wrong]} to end behind"
            f" {end_before[wrong]} of {mask.lengths[row[wrong]]} completion tokens, on one with"
            f" mask 1, found turn_end {end[wrong]}. Fix: in turn_end for each turn the number of"
            " completion tokens up to the last one that it wrote."
        )
    is_last = np.arange(len(row)) == turn_end.offsets[1:][row] - 1
    return TurnPlaces(row=row, turn=turn, stop=stop, is_last=is_last)


def sum_turn_rewards(episodes: Batch, turns: TurnPlaces) -> np.ndarray:
    """float64 [turns]: the reward of each turn, of an episode's last turn with its final reward; a
    null counts nothing.
    """
    by_turn = episodes.array("turn_reward").flatten().fill_null(0.0)
    final = episodes.array("final_reward").fill_null(0.0)
    rewards = by_turn.to_numpy(zero_copy_only=False).astype(np.float64)
    final_rewards = final.to_numpy(zero_copy_only=False).astype(np.float64)
    return rewards + np.where(turns.is_last, final_rewards[turns.row], 0.0)


def find_unrewarded(episodes: Batch) -> np.ndarray:
    """bool [rows]: no turn of the episode has a reward, and it has no final one."""
    array = episodes.array("turn_reward")
    is_valid = np.asarray(array.flatten().is_valid())
    row = np.repeat(np.arange(len(episodes)), episodes.lengths("turn_reward"))
    rewarded_turns = np.bincount(row[is_valid], minlength=len(episodes))
    has_final = np.asarray(episodes.array("final_reward").is_valid())
    return (rewarded_turns == 0) & ~has_final


def turn_reward(episode: Columns[Episode]) -> Columns[TokenReward]:
    mask = episode["completion_mask"]
    turns = find_turns(episode["turn_end"], mask, episode.keys)
    rewards = sum_turn_rewards(episode.batch, turns)
    tokens = np.zeros(len(mask.values), np.float32)
    tokens[turns.stop - 1] = rewards
    # In float64, rounded once.
    total = np.bincount(turns.row, weights=rewards, minlength=len(mask))
    return Columns.make(
        TokenReward,
        like=episode,
        reward=total.astype(np.float32),
        token_reward=mask.like(tokens),
    )
