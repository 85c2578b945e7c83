"""What all kernels of `generate` share: prompts in, rollouts out.

Owns: the node's parameters, the tokenizer, the columns of Rollout, the recorded version, and the
chunks that are in a loop. Does not own: in which batches rows leave (leaving_rows.py), a decode
loop, or a module and its weights (torch/, vllm/).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.kernel_abilities import Joinable
from dataflow.memory_limits import MemoryNeed
from dataflow.model import Model
from dataflow.schema import Rollout, TruncatedRollout
from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.leaving_rows import ChunkRows, LeavingRows
from operators.kernels.overlong import Room, take_rows
from operators.kernels.text import load_tokenizer, require_embedded_ids, require_ends, to_ragged
from operators.kernels.torch.sampling import Sampling


class Renewable(Protocol):
    """Rows that go on under new weights. version: of the weights that write now."""

    version: int

    def renew(self, version: int) -> None:
        """Continue under new weights: live rows keep their tokens, and their keys and values are
        computed again.
        """
        ...


class DecodeLoop(Renewable, Protocol):
    """Runs a DecodeTask, and those that join it; `write_rows` drives it."""

    written: Written
    counts: Counts

    def write_rows(self, interrupted: Callable[[], bool]) -> Iterator[np.ndarray]:
        """Write all rows that are there; after each step in which rows ended, yields which ones.
        interrupted: asked before each step; if true, an empty array is yielded first, and the step
        is taken afterwards, with the weights and rows that are there by then.
        """
        ...

    def join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task, alike in all else; returns their numbers, int64 in
        its order, which may be those of rows that were released.
        """
        ...

    def release(self, rows: np.ndarray) -> None:
        """What these ended rows wrote has been read."""
        ...


@dataclass(slots=True, kw_only=True)
class _Running:
    """A `run` under way. reported: the loop's counts at the last report."""

    loop: DecodeLoop
    leaving: LeavingRows
    reported: Counts


class Generating(Joinable):
    """A kernel of `generate`, but for its decode loop.

    Columns: those of Rollout that `node.returns` names (all if it names none), or of
    TruncatedRollout if top-k or top-p truncate: then each token also has the mass that was kept
    when it was drawn. completion_ids include a sampled eos and the token that completed a stop
    string; finish is `stop` for both, `length` if max_tokens came first. The mask is 1 everywhere.

    All rows that a chunk has of a prompt leave together (leaving_rows.py). An interruption sends
    out everything that has finished. Batching changes no row. Rows of a chunk that joins wait with
    those that wait already, and enter slots by their weights.

    Metrics of a chunk: generate/tokens, written tokens per row. And of what was computed since the
    chunk that ended before it: generate/slot_waste, the share of rows in decode forwards that wrote
    nothing (0 where ended rows leave at once; forwards of a power of two of rows have some);
    generate/slot_idle, the share of slots without a row; generate/recomputed, tokens whose keys
    were computed again under new weights, per written token.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load tokenizer and module. Raises KernelError or DataError if the base lacks one."""
        self._node = node
        self._layout = layout
        self._session = session
        self._model: Model = node.models["policy"]
        model = self._model
        params = node.params
        self._how = Sampling(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k", 0)),
        )
        self._n = int(params.get("n", 1))
        self._max_tokens = int(params["max_tokens"])
        if self._n < 1 or self._max_tokens < 1:
            raise KernelError(
                f"{node.name}: expected n and max_tokens >= 1, found {self._n} and"
                f" {self._max_tokens}."
            )
        stop = params.get("stop", ())
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._sampler = str(params.get("sampler", "keyed"))
        self._version = 0
        self._drains = params.get("on_update") == "drain"
        # With a lag a chunk may go on for as long as the run; without, all is needed at once.
        self._flows = bool(params.get("max_lag"))
        self._interruption = Event()
        self._running: _Running | None = None
        self._need = MemoryNeed()
        self._start()
        self._tokenizer: Any = load_tokenizer(model.base)
        require_ends(
            node.name, model.name, self._tokenizer, self.vocabulary, stops=bool(self._stop)
        )
        self._room = Room.of(node, model.name, self._positions())

    @abstractmethod
    def _start(self) -> None:
        """Load the module."""

    @abstractmethod
    def _positions(self) -> int | None:
        """The most tokens of a row, prompt and answer; None if there is no limit."""

    @abstractmethod
    def _decoder(self, task: DecodeTask) -> DecodeLoop:
        """A decode loop of this task, at the version that was loaded last."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """How many token ids the module knows."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Yield the rows of every prompt, keyed `chunk.keys.expand_spans(n, chunk.spans)`, and
        those of chunks that join meanwhile.

        Weights loaded between two batches interrupt all rows: they keep their tokens, each with its
        version, and continue under the new weights; with on_update="drain" this is a KernelError.
        After `interrupt` a batch leaves before the next decode step, an empty one if no prompt's
        rows have all finished. Raises DataError for a prompt longer than max_prompt_tokens.
        """
        encoded = self._encode_rows(chunk)
        if encoded is None:
            return
        task, rows = encoded
        self._note_need(task, rows.keys, len(rows.keys))
        loop = self._decoder(task)
        leaving = LeavingRows(
            self._layout.slots,
            flows=self._flows,
            tokens=self._layout.part_tokens,
            lengths=lambda: loop.written.length,
        )
        leaving.add(rows)
        self._running = _Running(loop=loop, leaving=leaving, reported=Counts())
        try:
            while leaving.chunks:  # again where a chunk joined as the last rows left
                yield from self._write_batches(self._running)
        finally:
            self._running = None

    def _note_need(self, task: DecodeTask, keys: Keys, rows: int) -> None:
        """Note what the loop has from now on, should memory run out. keys: of the task's rows;
        rows: of the whole loop.
        """
        lengths = np.repeat(task.prompts.lengths, task.row_counts)
        longest = int(np.argmax(lengths))
        slots = min(self._layout.slots, rows)
        length = int(lengths[longest]) + self._max_tokens
        self._need = MemoryNeed(
            doing=f"decoding {slots} rows at once",
            rows=slots,
            key=keys.rows()[longest],
            longest=length,
            is_divisible=slots > 1,
        )

    def join(self, chunk: Chunk) -> None:
        """See Joinable. Raises KernelError where nothing runs."""
        running = self._running
        if running is None:
            raise KernelError(
                f"{self._node.name}: chunk {chunk.id}: expected a chunk that runs, which it could"
                " join, found none. Fix: run(chunk)."
            )
        encoded = self._encode_rows(chunk)
        if encoded is not None:
            task, rows = encoded
            here = len(running.loop.written.length)
            self._note_need(task, rows.keys, here + len(rows.keys))
            rows.numbers = running.loop.join(task)
            running.leaving.add(rows)

    def _encode_rows(self, chunk: Chunk) -> tuple[DecodeTask, ChunkRows] | None:
        """What to write of a chunk, and its rows, numbered from 0; None if no prompt is left."""
        if not len(chunk.keys):
            return None
        fitting_prompts, prompts = self._encode(chunk)
        keys = chunk.keys.take(fitting_prompts)
        counts = np.full(len(keys), self._n, np.int64)
        spans, weights = chunk.spans, chunk.weights
        if spans is not None:
            spans = spans[fitting_prompts]
            counts = (spans[:, 1] - spans[:, 0]).astype(np.int64)
        if weights is not None:
            weights = weights[fitting_prompts]
        row_keys = keys.expand_spans(self._n, spans)
        if not len(row_keys):
            return None
        task = self._task(prompts, row_keys, self._n)
        numbers = np.arange(len(row_keys))
        rows = ChunkRows(prompts=prompts, counts=counts, keys=row_keys, numbers=numbers)
        return replace(task, counts=counts, weights=weights), rows

    def _write_batches(self, running: _Running) -> Iterator[Batch]:
        """Yield all rows of the chunks that are there."""
        loop, leaving = running.loop, running.leaving
        for chunk, rows in leaving.gather(loop.write_rows(self._was_interrupted)):
            numbers = chunk.numbers[rows]
            chunk.tokens += int(loop.written.length[numbers].sum())
            # Before the last rows leave: the Step may end soon after.
            if not chunk.rows_left:
                self._report(chunk, running)
            if self._layout.part_tokens:
                self._session.note_least_tokens(leaving.find_least_tokens(chunk))
            batch = self._batch(loop.written, chunk, rows)
            loop.release(numbers)
            yield batch
            if self._version != loop.version:
                self._renew(loop)

    @property
    def interruptible(self) -> bool:
        """Unless on_update="drain"."""
        return not self._drains

    def interrupt(self) -> None:
        """Make `run` yield before its next decode step; callable from any thread. Between two runs,
        it makes the next one begin with an empty batch.
        """
        self._interruption.set()

    def _was_interrupted(self) -> bool:
        """Whether an interruption was requested since the last call."""
        if not self._interruption.is_set():
            return False
        self._interruption.clear()
        return True

    def _renew(self, decoder: Renewable) -> None:
        if self._drains:
            raise KernelError(
                f"{self._node.name}: version {self._version} came between two batches of a chunk"
                f" begun at version {decoder.version}, and on_update='drain'. Fix: load between"
                " chunks, or on_update='interrupt'."
            )
        decoder.renew(self._version)

    def _encode(self, chunk: Chunk) -> tuple[np.ndarray, Ragged]:
        """Encode the prompts: the indices of those to answer, and their token ids."""
        prompts = self._tokenizer.encode_column(chunk.inputs["prompt"].array("prompt"))
        keys = chunk.keys
        require_embedded_ids(self._node.name, self._model.name, prompts, keys, self.vocabulary)
        not_empty = self._find_not_empty(prompts, keys)
        if len(not_empty) < len(keys):
            prompts, keys = take_rows(prompts, not_empty), keys.take(not_empty)
        fitting, prompts = self._room.fit(prompts, keys, self._session)
        return not_empty[fitting], prompts

    def _find_not_empty(self, prompts: Ragged, keys: Keys) -> np.ndarray:
        """The indices of the prompts that have tokens; others are given up, or end the run."""
        empty = np.flatnonzero(prompts.lengths == 0)
        drops = self._node.params.get("empty_prompt") == "drop"
        if drops and len(prompts):
            self._session.metric("prompt/empty", len(empty) / len(prompts), len(prompts))
        for key in keys.take(empty).rows():
            message = (
                f"{self._node.name}: row {key}: expected at least one token in its prompt, found"
                " none. Fix: prompts that are not empty, or empty_prompt='drop'."
            )
            if not drops:
                raise DataError(message)
            self._session.tombstone(key, message, failed=False)
        return np.flatnonzero(prompts.lengths)

    def _task(self, prompts: Ragged, keys: Keys, n: int) -> DecodeTask:
        """What to write: n rows for each prompt, in the order of their keys."""
        longest_stop = max((len(stop) for stop in self._stop), default=0)
        return DecodeTask(
            prompts=prompts,
            n=n,
            seeds=self._session.row_seeds(keys),
            max_tokens=self._max_tokens,
            how=self._how,
            ends=np.array(sorted(self._tokenizer.eos_ids), np.int64),
            slots=self._layout.slots,
            budget=self._layout.tokens,
            parked=self._layout.parked,
            stopped=self._holds_stop if self._stop else None,
            # A character takes at most 4 byte-level tokens, and may begin in the token before.
            window=4 * longest_stop + 4,
            sampler=self._sampler,
        )

    def _holds_stop(self, tails: list[np.ndarray]) -> np.ndarray:
        ids = to_ragged([tail.tolist() for tail in tails])
        texts = self._tokenizer.decode(ids)
        return np.array([self._has_stop(text) for text in texts], bool)

    def _has_stop(self, text: str) -> bool:
        return any(stop in text for stop in self._stop)

    def _batch(self, written: Written, chunk: ChunkRows, rows: np.ndarray) -> Batch:
        """The requested columns of some finished rows."""
        numbers = chunk.numbers[rows]
        spans = list(zip(numbers.tolist(), written.length[numbers].tolist(), strict=True))

        def column(tokens: np.ndarray) -> Ragged:
            return self._pack([tokens[row, :length] for row, length in spans], tokens.dtype)

        def row_prompts() -> Ragged:
            prompts = chunk.prompt_of_row[rows].tolist()
            ids = chunk.prompts
            return self._pack([ids[prompt] for prompt in prompts], ids.values.dtype)

        def texts() -> pa.Array:
            decoded = self._tokenizer.decode(ids) if len(ids) else []
            return pa.array(decoded, pa.utf8())

        ids = column(written.tokens)
        # Functions, in the order of the columns: only what somebody reads is computed.
        make = {
            "prompt_ids": row_prompts,
            "completion_ids": lambda: ids,
            "completion_mask": lambda: ids.like(self._ones(len(ids.values))),
            "completion": texts,
            "sampler_logprobs": lambda: column(written.logprobs),
            "version": lambda: column(written.versions),
            "finish": lambda: pa.array(
                np.where(written.stop[numbers], "stop", "length"), pa.utf8()
            ),
        }
        mass = written.mass
        if mass is not None:
            make["sampler_mass"] = lambda: column(mass)
        names = self._node.returns or tuple(make)
        columns = {name: make[name]() for name in make if name in names}
        schema = Rollout if mass is None else TruncatedRollout
        return Batch.make(chunk.keys.take(rows), columns, schema)

    def _pack(self, rows: list[np.ndarray], dtype: np.dtype) -> Ragged:
        """Pack rows to a list column in the session's memory: each value is copied once."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = self._session.allocate(int(offsets[-1]), dtype)
        if rows:
            np.concatenate(rows, out=values)
        return Ragged(values, offsets)

    def _ones(self, count: int) -> np.ndarray:
        values = self._session.allocate(count, np.uint8)
        values.fill(1)
        return values

    def _report(self, chunk: ChunkRows, running: _Running) -> None:
        """Report the metrics of a chunk whose rows have all ended, and of what was computed since
        the last report.
        """
        metric, rows = self._session.metric, len(chunk.keys)
        metric("generate/tokens", chunk.tokens / rows, rows)
        counts = running.loop.counts.since(running.reported)
        running.reported = replace(running.loop.counts)
        if counts.rows:
            # A row's first token comes from the prefill, every other one from a decode forward.
            computed = counts.rows + counts.padded
            metric("generate/slot_waste", counts.padded / computed, computed)
            metric("generate/slot_idle", 1.0 - counts.rows / counts.slots, counts.slots)
        if counts.again:
            metric("generate/recomputed", counts.again / chunk.tokens, float(chunk.tokens))
