"""What all kernels of `interact` share: prompts in, episodes out.

Owns: the node's parameters, passes over episodes until all are over, attempts, and in which batches
rows leave. Does not own: first prompts (episode_starts.py), turns (episode_pass.py), which rows
there are (episode_chunk.py), columns (episode_columns.py), a decode loop (torch/, vllm/),
environments' processes (environments/).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.randomness import row_seeds
from dataflow.schema import Episode, Segment, TruncatedEpisode, TruncatedSegment
from operators.kernels.decoding import DecodeTask
from operators.kernels.environments.opening import open_pool
from operators.kernels.environments.replies import EnvironmentFault, EnvironmentPool
from operators.kernels.episode_chunk import EpisodeChunk
from operators.kernels.episode_columns import EpisodeColumns
from operators.kernels.episode_metrics import EpisodeMetrics
from operators.kernels.episode_pass import EpisodePass, EpisodeRules
from operators.kernels.episode_segments import Segments
from operators.kernels.episode_starts import EpisodeStarts, PromptRows
from operators.kernels.episodes import EpisodeRow, EpisodeStart, EpisodeState, TokenBudget
from operators.kernels.generating import Generating, gather_whole_groups
from operators.kernels.overlong import Room
from operators.kernels.text import require_embedded_ids, to_ragged
from operators.kernels.turn_loop import TurnLoop
from operators.kernels.turn_rendering import TurnRenderer

_STREAM = "environments"
"""The random stream of environments' seeds: the same in every node, so that two nodes that read one
prompt play one task.
"""

GoingOn = dict[int, EpisodeStart]
"""By episode of the chunk, what it begins or goes on with."""


@dataclass(frozen=True, slots=True)
class _Passed:
    """Episodes that are not over after a pass: those that go on in another row, and the faults of
    those that came to nothing.
    """

    going_on: GoingOn
    faults: dict[int, EnvironmentFault]


class Interacting(Generating):
    """A kernel of `interact`, but for its decode loop.

    Columns: those of Episode, of Segment where an episode may have several rows, or of their
    Truncated ones if top-k or top-p truncate. Rows leave as whole groups, but for those that were
    lost; an interruption sends out all that are over.

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
        self._renderer = TurnRenderer(self._tokenizer, thinking=params.get("thinking", "keep"))
        self._segments = Segments(
            renderer=self._renderer,
            most=int(params.get("segments", 1)),
            compact=params.get("compact"),
            room=self._room.most,
            # With room for less, a turn might be cut, which ends an episode.
            least=(budget.turn or 1) if params.get("compact") else 1,
        )
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
        """Yield the rows of the n episodes of every prompt, keyed `chunk.keys.expand(n *
        segments)`; those that are lost, or that an episode did not need, are tombstones. Chunks
        that join follow, one after another. New weights as in Generating.run. Raises KernelError
        for an environment that fails where on_error is `stop`.
        """
        self._joined = deque([chunk])
        while self._joined:
            yield from self._run_chunk(self._joined.popleft())

    def join(self, chunk: Chunk) -> None:
        """See Joinable: its episodes begin when those of the chunks before are over."""
        self._joined.append(chunk)

    def _run_chunk(self, chunk: Chunk) -> Iterator[Batch]:
        if not len(chunk.keys):
            return
        group_rows = self._n * self._segments.most
        keys = chunk.keys.expand(group_rows)
        rows = EpisodeChunk(keys, self._n, self._segments.most, self._session)
        self._metrics = EpisodeMetrics(self._session, has_segments=self._segments.most > 1)
        places_left = len(keys)
        over = self._write_rows(PromptRows(chunk.inputs["prompt"]), rows)
        least = self._least_rows(len(keys))
        for places in gather_whole_groups(over, group_rows, len(keys), least):
            places_left -= len(places)
            if not places_left:  # report before the last rows leave: the Step may end soon after
                self._metrics.report(rows.rows)
            yield self._make_batch(rows, places)
            if self._loop is not None and self._loop.version != self._version:
                self._renew(self._loop)
        rows.clear()

    def close_environments(self) -> None:
        """End all environments; a kernel calls it where it closes."""
        # Not there if the kernel could not be opened.
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()

    # Passes.

    def _write_rows(self, prompts: PromptRows, rows: EpisodeChunk) -> Iterator[np.ndarray]:
        """Run passes until all episodes are over: over those that begin or begin again, and those
        that go on in another row. Yields all places of episodes that are over, in whichever way,
        and none at all after an interruption.
        """
        attempts = np.zeros(rows.episode_count, np.int64)
        unbegun = list(range(rows.episode_count))
        going_on: GoingOn = {}
        first_number = self._episode_count
        try:
            while unbegun or going_on:
                attempts[unbegun] += 1
                passed = yield from self._run_episodes(prompts, rows, unbegun, going_on)
                unbegun = []
                for episode, fault in sorted(passed.faults.items()):
                    is_needless = rows.is_lost(episode)
                    if not is_needless and attempts[episode] < self._attempts:
                        unbegun.append(episode)
                        continue
                    if not is_needless:
                        self._lose(rows, episode, fault)
                    yield rows.places([episode])
                going_on = {}
                for episode, start in passed.going_on.items():
                    if rows.is_lost(episode):
                        yield rows.places([episode])
                    else:
                        going_on[episode] = start
        finally:
            # Also where the chunk is given up, which leaves environments in the middle.
            for number in range(first_number, self._episode_count):
                self._pool.abandon(number)

    def _run_episodes(
        self,
        prompts: PromptRows,
        rows: EpisodeChunk,
        unbegun: Sequence[int],
        going_on: GoingOn,
    ) -> Generator[np.ndarray, None, _Passed]:
        """Begin these episodes and run them, together with those that go on in another row."""
        first = self._episode_count
        self._episode_count += len(unbegun)
        self._metrics.count_attempts(len(unbegun))
        groups = [rows.group_of(episode) for episode in unbegun]
        first_keys = rows.keys.take(np.array(unbegun, np.int64) * rows.segments)
        replies = yield from self._starts.reset(
            [prompts.row(group) for group in groups],
            self._environment_seeds(first_keys),
            first,
            self._was_interrupted,
        )
        starts, start_faults = self._starts.render(replies, prompts, groups)
        fitting_starts = self._fit(starts, rows, unbegun)
        unfit = sorted(starts.keys() - fitting_starts.keys())
        if unfit:
            yield rows.places([unbegun[index] for index in unfit])
        faults = {unbegun[index]: fault for index, fault in start_faults.items()}
        self._metrics.count_faults(faults.values())
        all_starts = going_on | {unbegun[index]: each for index, each in fitting_starts.items()}
        if not all_starts:
            return _Passed({}, faults)
        passed = yield from self._run_pass(all_starts, rows, sorted({*unbegun, *going_on}))
        return _Passed(passed.going_on, faults | passed.faults)

    def _run_pass(
        self, starts: GoingOn, rows: EpisodeChunk, episodes: Sequence[int]
    ) -> Generator[np.ndarray, None, _Passed]:
        """Run those of these episodes that have a start, each in one row."""
        index_of = {episode: index for index, episode in enumerate(episodes)}
        states: dict[int, EpisodeState] = {}
        places = np.array([rows.first_row(episode) for episode in episodes], np.int64)
        for episode, start in starts.items():
            state = start.begin(self._rules.budget)
            states[index_of[episode]] = state
            places[index_of[episode]] += state.segment
        loop = self._make_loop(states, rows.keys.take(places))
        episode_pass = EpisodePass(
            states, loop, self._pool, self._segments, self._rules, self._session
        )
        self._metrics.watch(episode_pass, loop)
        self._loop = loop
        try:
            for indices in episode_pass.write_rows(self._was_interrupted):
                whole = [index for index in indices.tolist() if index in episode_pass.rows]
                for index in whole:
                    self._take(rows, episodes[index], episode_pass.rows.pop(index))
                if whole or not len(indices):
                    yield rows.places([episodes[index] for index in whole])
        finally:
            episode_pass.abandon()
            loop.close()
            self._loop = None
        going_on = {episodes[index]: each for index, each in episode_pass.going_on.items()}
        faults = {episodes[index]: fault for index, fault in episode_pass.faults.items()}
        return _Passed(going_on, faults)

    def _environment_seeds(self, keys: Keys) -> list[int]:
        """A seed for each episode by its source position, below 2^31, as NumPy takes them."""
        seeds = row_seeds(self._session.seed, _STREAM, Keys.of(keys.position))
        return (seeds >> np.uint64(33)).tolist()

    def _make_loop(self, episodes: Mapping[int, EpisodeState], keys: Keys) -> TurnLoop:
        """Make a loop with a row for each key; those that do not begin are dropped at once."""
        count = len(keys)
        n, prompts = self._n, _share_prompts(episodes, count, self._n)
        if prompts is None:
            n, prompts = 1, _share_prompts(episodes, count, 1)
        assert prompts is not None, "a group of one row has one prompt"
        loop = self._make_turn_loop(self._task(to_ragged(prompts), keys, n))
        unbegun = np.setdiff1d(np.arange(count), list(episodes))
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
        self, starts: Mapping[int, EpisodeStart], rows: EpisodeChunk, episodes: Sequence[int]
    ) -> dict[int, EpisodeStart]:
        """The starts whose prompts fit, cut where they are to be; of others the group is given up,
        or the run ends. starts: by their index among `episodes`.
        """
        longest: dict[int, np.ndarray] = {}
        for index, start in starts.items():
            group = rows.group_of(episodes[index])
            if len(start.ids) > len(longest.get(group, ())):
                longest[group] = start.ids
        groups = np.array(sorted(longest), np.int64)
        group_keys = rows.keys.take(groups * rows.group_rows)
        prompts = to_ragged([longest[group].tolist() for group in groups.tolist()])
        node, model = self._node.name, self._model.name
        require_embedded_ids(node, model, prompts, group_keys, self.vocabulary)
        fitting, fitted = self._room.fit(prompts, group_keys, self._session)
        self._require_fit(group_keys.take(fitting), fitted)
        fitting_groups = set(groups[fitting].tolist())
        fitting_starts: dict[int, EpisodeStart] = {}
        for index, start in starts.items():
            if rows.group_of(episodes[index]) in fitting_groups:
                if self._room.most is not None:
                    start.ids = start.ids[-self._room.most :]
                fitting_starts[index] = start
            else:
                self._pool.abandon(start.number)
        rows.lost_groups |= set(longest) - fitting_groups
        return fitting_starts

    # What is over.

    def _take(self, rows: EpisodeChunk, episode: int, last: EpisodeRow) -> None:
        """Keep the rows of an episode until its group leaves."""
        rows.add(episode, last)
        if last.episode.overflowed and self._drops_overflow:
            limit = last.episode.limit
            message = f"{self._node.name}: an answer did not fit the {limit} tokens of its row"
            rows.lose_group(episode, message, failed=False)

    def _lose(self, rows: EpisodeChunk, episode: int, fault: EnvironmentFault) -> None:
        """An episode came to nothing in every attempt."""
        detail = f"\n{fault.detail}" if fault.detail else ""
        attempts = "1 attempt" if self._attempts == 1 else f"{self._attempts} attempts"
        message = (
            f"{self._node.name}: episode {rows.key_of(episode)}: expected its environment to"
            f" answer, found that it {fault.text} ({attempts}). Fix: the environment, or"
            f" on_error='drop_row' to go on without such episodes.{detail}"
        )
        if self._on_error == "stop":
            raise KernelError(message)
        if self._on_error == "drop_row":
            rows.lose(episode, message)
        else:
            rows.lose_group(episode, message, failed=True)

    def _make_batch(self, rows: EpisodeChunk, places: np.ndarray) -> Batch:
        """The requested columns of those of these places that are whole rows, of groups that are
        not given up.
        """
        keys, whole = rows.take_whole(places)
        schema = self._schema
        names = self._node.returns or tuple(schema.columns)
        numbers = keys.sample.astype(np.int64) // rows.segments
        columns = EpisodeColumns(whole, self._pack, self._tokenizer.decode, numbers)
        return Batch.make(keys, columns.make(names), schema)

    @property
    def _schema(self) -> type[Episode]:
        if self._segments.most > 1:
            return TruncatedSegment if self._how.truncates else Segment
        return TruncatedEpisode if self._how.truncates else Episode


def _pace_of(params: Mapping[str, Any]) -> str:
    """In rounds unless rows may lag, where nothing is the same from run to run anyway."""
    usual_pace = "free" if params.get("max_lag") else "rounds"
    return params.get("pace") or usual_pace


def _least(*limits: int | None) -> int | None:
    stated = [limit for limit in limits if limit is not None]
    return min(stated, default=None)


def _share_prompts(
    episodes: Mapping[int, EpisodeState], rows: int, n: int
) -> list[list[int]] | None:
    """The prompt of each n rows; None where those of a group differ. A group none of whose rows
    begins has a token that nobody reads.
    """
    if rows % n:
        return None
    prompts: list[list[int]] = []
    for begin in range(0, rows, n):
        its_rows = [row for row in range(begin, begin + n) if row in episodes]
        in_group = [episodes[row].prompt.tolist() for row in its_rows]
        if any(ids != in_group[0] for ids in in_group):
            return None
        prompts.append(in_group[0] if in_group else [0])
    return prompts
