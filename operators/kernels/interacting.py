"""What all kernels of `interact` share: prompts in, episodes out.

Owns: the node's parameters, chunks that join, batches and metrics of each chunk. Does not own: when
episodes begin (episode_flow.py), turns (episode_pass.py), which rows there are and leave together
(episode_chunk.py), columns (episode_columns.py), a decode loop (torch/, vllm/), environments'
processes (environments/).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import Episode, Segment, TruncatedEpisode, TruncatedSegment
from operators.kernels.decoding import DecodeTask
from operators.kernels.environments.opening import open_pool
from operators.kernels.environments.replies import EnvironmentPool
from operators.kernels.episode_chunk import EpisodeChunk
from operators.kernels.episode_columns import EpisodeColumns
from operators.kernels.episode_flow import EpisodeFlow, FlowParts
from operators.kernels.episode_pass import EpisodeRules
from operators.kernels.episode_policy import EpisodePolicy
from operators.kernels.episode_segments import Segments
from operators.kernels.episode_starts import EpisodeStarts, PromptRoom
from operators.kernels.episodes import TokenBudget
from operators.kernels.generating import Generating
from operators.kernels.overlong import Room
from operators.kernels.turn_loop import TurnLoop
from operators.kernels.turn_rendering import TurnRenderer


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
        renderer = TurnRenderer(self._tokenizer, thinking=params.get("thinking", "keep"))
        self._segments = Segments(
            renderer=renderer,
            most=int(params.get("segments", 1)),
            compact=params.get("compact"),
            room=self._room.most,
            # With room for less, a turn might be cut, which ends an episode.
            least=(budget.turn or 1) if params.get("compact") else 1,
        )
        self._pool: EnvironmentPool = open_pool(params["environment"], node)
        self._parts = self._make_parts(renderer)
        self._next_number = 0
        """Of the next episode that begins: no two of a kernel have the same."""
        self._chunks: list[EpisodeChunk] = []
        self._flow: EpisodeFlow | None = None

    @abstractmethod
    def _make_turn_loop(self, task: DecodeTask) -> TurnLoop:
        """A loop of this task, at the version that was loaded last."""

    @property
    def joinable(self) -> bool:
        """With pace free: rounds are of one chunk."""
        return not self._rules.rounds

    def interrupt(self) -> None:
        """As Generating.interrupt; also where all rows wait for their environments."""
        super().interrupt()
        self._pool.wake()

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Yield the rows of the n episodes of every prompt, keyed `chunk.keys.expand(n *
        segments)`, or of those in the chunk's spans; those that are lost, or that an episode did
        not need, are tombstones. New weights as in Generating.run. Raises KernelError for an
        environment that fails where on_error is `stop`, and for spans of parts of episodes.
        """
        if not len(chunk.keys):
            return
        flow = self._flow = EpisodeFlow(self._parts, self._next_number)
        try:
            self._add(flow, chunk)
            for is_interrupted in flow.play(self._was_interrupted):
                yield from self._take_leaving(flow, is_interrupted=is_interrupted)
        finally:
            # Also where the run is given up, which leaves environments in the middle.
            flow.close()
            self._next_number = flow.next_number
            self._flow = None
            self._chunks.clear()

    def join(self, chunk: Chunk) -> None:
        """Play the episodes of a further chunk as well, as they come near a slot. Raises
        KernelError where no chunk is played that it could join.
        """
        flow = self._flow
        if flow is None or not self.joinable:
            raise KernelError(
                f"{self._node.name}: expected a run with pace='free' for chunk {chunk.id} to join,"
                " found none. Fix: run it by itself."
            )
        self._add(flow, chunk)

    def _add(self, flow: EpisodeFlow, chunk: Chunk) -> None:
        rows = EpisodeChunk(
            chunk,
            n=self._n,
            segments=self._segments.most,
            least=self._least_places(chunk),
            session=self._session,
        )
        if not rows.is_over:
            self._chunks.append(rows)
            flow.add(rows)

    def close_environments(self) -> None:
        """End all environments; a kernel calls it where it closes."""
        # Not there if the kernel could not be opened.
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()

    # Rows leave.

    def _take_leaving(self, flow: EpisodeFlow, *, is_interrupted: bool) -> Iterator[Batch]:
        """A batch of each chunk of which rows leave now; after an interruption at least one."""
        batches = 0
        for chunk in list(self._chunks):
            places = chunk.pop_places(all_whole=is_interrupted)
            if not len(places):
                continue
            if chunk.is_over:  # report before the last rows leave: the Step may end soon after
                self._chunks.remove(chunk)
                chunk.metrics.report(chunk.rows, flow.take_counts())
            yield self._make_batch(chunk, places)
            batches += 1
            self._renew_loop(flow)
        if is_interrupted and not batches:
            yield self._make_batch(self._chunks[0], np.zeros(0, np.int64))
            self._renew_loop(flow)

    def _renew_loop(self, flow: EpisodeFlow) -> None:
        """Let rows go on under weights that have come meanwhile."""
        loop = flow.loop
        if loop is not None and loop.version != self._version:
            self._renew(loop)

    def _least_places(self, chunk: Chunk) -> int:
        """How many places leave together at least: as many as make room for rows that wait where
        each goes on by itself; else all of a chunk that fits the slots, or a quarter of these.
        """
        slots = self._layout.slots
        if self.joinable:
            return max(1, slots // 8)
        if len(chunk.keys) * self._n * self._segments.most <= slots:
            return slots
        return max(1, slots // 4)

    # What episodes are played with.

    def _make_parts(self, renderer: TurnRenderer) -> FlowParts:
        params = self._node.params
        room = PromptRoom(
            node=self._node.name,
            model=self._model.name,
            vocabulary=self.vocabulary,
            room=self._room,
            require_fit=self._require_fit,
        )
        policy = EpisodePolicy(
            node=self._node.name,
            attempts=int(params.get("retries", 1)) + 1,
            on_error=str(params.get("on_error", "drop_row")),
            drops_overflow=params.get("overflow") == "drop_group",
        )
        return FlowParts(
            starts=EpisodeStarts(self._pool, renderer, self._session, room),
            pool=self._pool,
            segments=self._segments,
            rules=self._rules,
            policy=policy,
            session=self._session,
            slots=self._layout.slots,
            make_task=self._make_task,
            make_loop=self._make_turn_loop,
        )

    def _make_task(self, prompts: Ragged, counts: np.ndarray, keys: Keys) -> DecodeTask:
        """Write `counts` rows for each prompt, int64 [prompts], with these keys."""
        task = replace(self._task(prompts, keys, 1), counts=counts)
        self._note_need(task, keys, sum(chunk.episode_count for chunk in self._chunks))
        return task

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
