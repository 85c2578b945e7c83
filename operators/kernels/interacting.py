"""What all kernels of `interact` share: prompts in, episodes out.

Owns: the node's parameters, attempts at episodes, what is lost with one, and in which batches rows
leave. Does not own: first prompts (episode_starts.py), turns (episode_pass.py), columns
(episode_columns.py), a decode loop (torch/, vllm/), environments' processes (environments/).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.randomness import row_seeds
from dataflow.schema import Episode, TruncatedEpisode
from operators.kernels.decoding import DecodeTask
from operators.kernels.environments.opening import open_pool
from operators.kernels.environments.replies import EnvironmentFault, EnvironmentPool
from operators.kernels.episode_columns import EpisodeColumns
from operators.kernels.episode_metrics import EpisodeMetrics
from operators.kernels.episode_pass import EpisodePass, EpisodeRules
from operators.kernels.episode_starts import EpisodeStart, EpisodeStarts, PromptRows
from operators.kernels.episodes import EpisodeRow, EpisodeState, TokenBudget
from operators.kernels.generating import Generating, gather_whole_groups
from operators.kernels.overlong import Room
from operators.kernels.text import require_embedded_ids, to_ragged
from operators.kernels.turn_loop import TurnLoop
from operators.kernels.turn_rendering import TurnRenderer

_STREAM = "environments"
"""The random stream of environments' seeds: the same in every node, so that two nodes that read one
prompt play one task.
"""

Faults = dict[int, EnvironmentFault]
"""By row of the chunk."""


class Interacting(Generating):
    """A kernel of `interact`, but for its decode loop.

    Columns: those of Episode, or of TruncatedEpisode if top-k or top-p truncate. Rows leave as
    whole groups, but for those that were lost; an interruption sends out all that are over.

    Metrics: generate/tokens (written ones of an episode), generate/slot_idle and
    generate/recomputed as those of `generate`; episode/turns, episode/reward, episode/tokens
    (written and answered), episode/context/max (of prompt and completion), episode/overflow (the
    share that ended because an answer did not fit), env/step/seconds, env/errors and env/timeouts
    (how many of all that were begun).
    """

    writes_as: ClassVar[type[Generating]]
    """The kernel of `generate` with the same loop, which a profile measures in this one's place."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """As Generating.open. Raises DataError for a chat template that changes earlier turns."""
        super().open(node, layout, session)
        params = node.params
        budget = TokenBudget(
            completion=self._max_tokens,
            turn=params.get("max_turn_tokens"),
            context=_least(params.get("max_context"), self._row_positions()),
        )
        self._rules = EpisodeRules(
            max_turns=int(params["max_turns"]),
            budget=budget,
            timeout=float(params.get("timeout", 1800.0)),
            rounds=_pace_of(params) == "rounds",
        )
        self._room = self._make_room(budget)
        self._on_error = str(params.get("on_error", "drop_row"))
        self._drops_overflow = params.get("overflow") == "drop_group"
        self._attempts = int(params.get("retries", 1)) + 1
        self._renderer = TurnRenderer(self._tokenizer)
        self._pool: EnvironmentPool = open_pool(params["environment"], node)
        self._starts = EpisodeStarts(node.name, self._pool, self._renderer, session)
        self._episode_count = 0
        self._loop: TurnLoop | None = None

    @abstractmethod
    def _make_turn_loop(self, task: DecodeTask) -> TurnLoop:
        """A loop of this task, at the version that was loaded last."""

    def interrupt(self) -> None:
        """As Generating.interrupt; also where all rows wait for their environments."""
        super().interrupt()
        self._pool.wake()

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Yield the n episodes of every prompt, keyed `chunk.keys.expand(n)`; those that are lost
        are tombstones. New weights as in Generating.run. Raises KernelError for an environment that
        fails where on_error is `stop`.
        """
        if not len(chunk.keys):
            return
        keys = chunk.keys.expand(self._n)
        self._rows: dict[int, EpisodeRow] = {}
        self._lost_groups: set[int] = set()
        self._metrics = EpisodeMetrics(self._session)
        rows_left = len(keys)
        over = self._write_rows(chunk, keys)
        least = self._least_rows(len(keys))
        for rows in gather_whole_groups(over, self._n, len(keys), least):
            rows_left -= len(rows)
            if not rows_left:  # report before the last rows leave: the Step may end soon after
                self._metrics.report(self._rows.values())
            yield self._make_batch(keys, rows)
            if self._loop is not None and self._loop.version != self._version:
                self._renew(self._loop)
        self._rows.clear()

    def close_environments(self) -> None:
        """End all environments; a kernel calls it where it closes."""
        # Not there if the kernel could not be opened.
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()

    # Attempts.

    def _write_rows(self, chunk: Chunk, keys: Keys) -> Iterator[np.ndarray]:
        """Yields which of the chunk's rows are over, in whichever way, and none at all after an
        interruption.
        """
        prompts = PromptRows(chunk.inputs["prompt"])
        rows = np.arange(len(keys))
        faults: Faults = {}
        for _ in range(self._attempts):
            faults = yield from self._attempt(prompts, keys, rows)
            needless = [row for row in sorted(faults) if row // self._n in self._lost_groups]
            if needless:  # of groups that are given up already
                yield np.array(needless, np.int64)
            rows = np.setdiff1d(np.array(sorted(faults), np.int64), needless)
            if not len(rows):
                return
        for row in rows.tolist():
            self._lose(keys, row, faults[row])
        yield rows

    def _attempt(
        self, prompts: PromptRows, keys: Keys, rows: np.ndarray
    ) -> Generator[np.ndarray, None, Faults]:
        """Begin these rows' episodes and run them; returns the faults of those that failed."""
        first = self._episode_count
        self._episode_count += len(rows)
        self._metrics.count_attempts(len(rows))
        try:
            return (yield from self._run_episodes(prompts, keys, rows, first))
        finally:
            # Also where the chunk is given up, which leaves environments in the middle.
            for number in range(first, self._episode_count):
                self._pool.abandon(number)

    def _run_episodes(
        self, prompts: PromptRows, keys: Keys, rows: np.ndarray, first: int
    ) -> Generator[np.ndarray, None, Faults]:
        """first: the number of the first one."""
        groups = (rows // self._n).tolist()
        replies = yield from self._starts.reset(
            [prompts.row(group) for group in groups],
            self._environment_seeds(keys.take(rows)),
            first,
            self._was_interrupted,
        )
        starts, start_faults = self._starts.render(replies, prompts, groups)
        fitting_starts = self._fit(starts, keys, rows)
        unfit = starts.keys() - fitting_starts.keys()
        if unfit:
            yield rows[sorted(unfit)]
        faults = {int(rows[index]): fault for index, fault in start_faults.items()}
        self._metrics.count_faults(faults.values())
        if fitting_starts:
            faults |= yield from self._run_pass(fitting_starts, keys, rows)
        return faults

    def _run_pass(
        self, starts: Mapping[int, EpisodeStart], keys: Keys, rows: np.ndarray
    ) -> Generator[np.ndarray, None, Faults]:
        """Run the episodes that could begin, by their index among `rows`."""
        loop = self._make_loop(starts, keys.take(rows))
        episodes: dict[int, EpisodeState] = {}
        for index, start in starts.items():
            episodes[index] = EpisodeState(
                number=start.number,
                raw=start.raw,
                messages=start.messages,
                tools=start.tools,
                prompt=start.ids,
                limit=self._rules.budget.row_limit(len(start.ids)),
            )
        episode_pass = EpisodePass(
            episodes, loop, self._pool, self._renderer, self._rules, self._session
        )
        self._metrics.watch(episode_pass, loop)
        self._loop = loop
        try:
            for indices in episode_pass.write_rows(self._was_interrupted):
                whole = [index for index in indices.tolist() if index in episode_pass.rows]
                for index in whole:
                    self._take(keys, int(rows[index]), episode_pass.rows.pop(index))
                if whole or not len(indices):
                    yield rows[np.array(whole, np.int64)]
        finally:
            episode_pass.abandon()
            loop.close()
            self._loop = None
        return {int(rows[index]): fault for index, fault in episode_pass.faults.items()}

    def _environment_seeds(self, keys: Keys) -> list[int]:
        """A seed for each episode by its source position, below 2^31, as NumPy takes them."""
        seeds = row_seeds(self._session.seed, _STREAM, Keys.of(keys.position))
        return (seeds >> np.uint64(33)).tolist()

    def _make_loop(self, starts: Mapping[int, EpisodeStart], keys: Keys) -> TurnLoop:
        """Make a loop with a row for each key; those that do not begin are dropped at once."""
        count = len(keys)
        n, prompts = self._n, _share_prompts(starts, count, self._n)
        if prompts is None:
            n, prompts = 1, _share_prompts(starts, count, 1)
        assert prompts is not None, "a group of one row has one prompt"
        loop = self._make_turn_loop(self._task(to_ragged(prompts), keys, n))
        unbegun = np.setdiff1d(np.arange(count), list(starts))
        if len(unbegun):
            loop.drop(unbegun)
        return loop

    # First prompts.

    def _make_room(self, budget: TokenBudget) -> Room:
        """Room for a first prompt: what leaves a token of an answer."""
        bounds: list[tuple[int, str]] = []
        most_by_param = self._node.params.get("max_prompt_tokens")
        if most_by_param is not None:
            bounds.append((int(most_by_param), f"max_prompt_tokens={most_by_param}"))
        if budget.context is not None:
            why = (
                f"a row has at most {budget.context} tokens (max_context, or its Models' positions)"
            )
            bounds.append((budget.context - 1, why))
        most, why = min(bounds, default=(None, ""))
        policy = self._node.params.get("overlong_prompt", "error")
        fix = "overlong_prompt='drop' or 'truncate', a larger max_context, or other data"
        return Room(node=self._node.name, most=most, why=why, policy=policy, fix=fix)

    def _row_positions(self) -> int | None:
        """The most tokens of a row, in every Model that reads it: the plan knows the others'."""
        return _least(self._node.params.get("positions"), self._positions())

    def _require_fit(self, keys: Keys, prompts: Ragged) -> None:
        """Raise DataError for a prompt that the kernel has no room for."""

    def _fit(
        self, starts: Mapping[int, EpisodeStart], keys: Keys, rows: np.ndarray
    ) -> dict[int, EpisodeStart]:
        """The starts whose prompts fit, cut where they are to be; of others the group is given up,
        or the run ends.
        """
        longest: dict[int, np.ndarray] = {}
        for index, start in starts.items():
            group = int(rows[index]) // self._n
            if len(start.ids) > len(longest.get(group, ())):
                longest[group] = start.ids
        groups = np.array(sorted(longest), np.int64)
        group_keys = keys.take(groups * self._n)
        prompts = to_ragged([longest[group].tolist() for group in groups.tolist()])
        node, model = self._node.name, self._model.name
        require_embedded_ids(node, model, prompts, group_keys, self.vocabulary)
        fitting, fitted = self._room.fit(prompts, group_keys, self._session)
        self._require_fit(group_keys.take(fitting), fitted)
        fitting_groups = set(groups[fitting].tolist())
        fitting_starts: dict[int, EpisodeStart] = {}
        for index, start in starts.items():
            if int(rows[index]) // self._n in fitting_groups:
                if self._room.most is not None:
                    start.ids = start.ids[-self._room.most :]
                fitting_starts[index] = start
            else:
                self._pool.abandon(start.number)
        self._lost_groups |= set(longest) - fitting_groups
        return fitting_starts

    # What is over.

    def _lose_group(self, keys: Keys, row: int, message: str, *, failed: bool) -> None:
        """Give the group of this row up, once."""
        group = row // self._n
        if group not in self._lost_groups:
            self._lost_groups.add(group)
            self._session.tombstone(keys.rows()[row], message, failed=failed)

    def _take(self, keys: Keys, row: int, episode_row: EpisodeRow) -> None:
        """Keep a row until its group leaves."""
        self._rows[row] = episode_row
        if episode_row.episode.overflowed and self._drops_overflow:
            limit = episode_row.episode.limit
            message = f"{self._node.name}: an answer did not fit the {limit} tokens of its row"
            self._lose_group(keys, row, message, failed=False)

    def _lose(self, keys: Keys, row: int, fault: EnvironmentFault) -> None:
        """An episode came to nothing in every attempt."""
        key = keys.rows()[row]
        detail = f"\n{fault.detail}" if fault.detail else ""
        message = (
            f"{self._node.name}: episode {key}: expected its environment to answer, found that it"
            f" {fault.text} ({self._attempts} attempts). Fix: the environment, or"
            f" on_error='drop_row' to go on without such episodes.{detail}"
        )
        if self._on_error == "stop":
            raise KernelError(message)
        if self._on_error == "drop_row":
            self._session.tombstone(key, message, row_only=True)
        else:
            self._lose_group(keys, row, message, failed=True)

    def _make_batch(self, keys: Keys, rows: np.ndarray) -> Batch:
        """The requested columns of those of these rows that are whole, of groups that are not given
        up.
        """
        whole = [row for row in rows.tolist() if row in self._rows]
        whole = [row for row in whole if row // self._n not in self._lost_groups]
        schema = TruncatedEpisode if self._how.truncates else Episode
        names = self._node.returns or tuple(schema.columns)
        columns = EpisodeColumns(
            [self._rows[row] for row in whole], self._pack, self._tokenizer.decode
        )
        return Batch.make(keys.take(np.array(whole, np.int64)), columns.make(names), schema)


def _pace_of(params: Mapping[str, Any]) -> str:
    """In rounds unless rows may lag, where nothing is the same from run to run anyway."""
    usual_pace = "free" if params.get("max_lag") else "rounds"
    return params.get("pace") or usual_pace


def _least(*limits: int | None) -> int | None:
    stated = [limit for limit in limits if limit is not None]
    return min(stated, default=None)


def _share_prompts(starts: Mapping[int, EpisodeStart], rows: int, n: int) -> list[list[int]] | None:
    """The prompt of each n rows; None where those of a group differ. A group none of whose rows
    begins has a token that nobody reads.
    """
    if rows % n:
        return None
    prompts: list[list[int]] = []
    for begin in range(0, rows, n):
        in_group = [starts[row].ids.tolist() for row in range(begin, begin + n) if row in starts]
        if any(ids != in_group[0] for ids in in_group):
            return None
        prompts.append(in_group[0] if in_group else [0])
    return prompts
