"""What all kernels of `generate` share: prompts in, rollouts out.

Owns: the node's parameters, the tokenizer, the columns of Rollout, the recorded version, and in
which batches rows leave. Does not own: a decode loop, or a module and its weights (torch/, vllm/).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Chunk, Interruptible, KernelNode, Layout, Session
from dataflow.model import Model
from dataflow.schema import Rollout, TruncatedRollout
from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.overlong import Room, rows_of
from operators.kernels.text import load_tokenizer, require_ends, require_known, to_ragged
from operators.kernels.torch.sampling import Sampling


class DecodeLoop(Protocol):
    """Runs one DecodeTask; `finished` drives it. version: of the weights that write now."""

    version: int
    written: Written
    counts: Counts

    def finished(self, interrupted: Callable[[], bool]) -> Iterator[np.ndarray]:
        """Write all rows; after each step in which rows ended, yields which ones. interrupted:
        asked before each step; if true, an empty array is yielded first, and the step is taken
        afterwards, with the weights that are there by then.
        """
        ...

    def renew(self, version: int) -> None:
        """Continue under new weights: live rows keep their tokens, and their keys and values are
        computed again.
        """
        ...


class Generating(Interruptible):
    """A kernel of `generate`, but for its decode loop.

    Columns: those of Rollout that `node.returns` names (all if it names none), or of
    TruncatedRollout if top-k or top-p truncate: then each token also has the mass that was kept
    when it was drawn. completion_ids include a sampled eos and the token that completed a stop
    string; finish is `stop` for both, `length` if max_tokens came first. The mask is 1 everywhere.

    Rows leave as whole groups: a chunk that fits the slots in one batch at its end, a larger one
    in batches of at least a quarter of the slots as groups finish. An interruption sends out
    everything that has finished. Batching changes no row.

    Metrics: generate/tokens, written tokens per row; generate/slot_waste, the share of rows in
    decode forwards that wrote nothing (0: ended rows leave at once); generate/slot_idle, the share
    of slots without a row; generate/recomputed, tokens whose keys were computed again under new
    weights, per written token.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load tokenizer and module. Raises KernelError or DataError if the base lacks one."""
        self._node, self._layout, self._session = node, layout, session
        self._model: Model = node.models["policy"]
        model, given = self._model, node.params
        self._how = Sampling(
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            top_k=int(given.get("top_k", 0)),
        )
        self._n, self._max_tokens = int(given.get("n", 1)), int(given["max_tokens"])
        if self._n < 1 or self._max_tokens < 1:
            raise KernelError(
                f"{node.name}: expected n and max_tokens >= 1, found {self._n} and"
                f" {self._max_tokens}."
            )
        stop = given.get("stop", ())
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._sampler = str(given.get("sampler", "keyed"))
        self._version = 0
        self._drains = given.get("on_update") == "drain"
        self._asked = Event()
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
        """Yield the n rows of every prompt, keyed `chunk.keys.expand(n)`.

        Weights loaded between two batches of a chunk interrupt its rows: they keep their tokens,
        each with its version, and continue under the new weights; with on_update="drain" this is a
        KernelError. After `interrupt` a batch leaves before the next decode step, an empty one if
        no group has finished. Raises DataError for a prompt longer than max_prompt_tokens.
        """
        if not len(chunk.keys):
            return
        stay, prompts = self._encoded(chunk)
        keys = chunk.keys.take(stay).expand(self._n)
        if not len(keys):
            return
        decoder = self._decoder(self._task(prompts, keys))
        left = len(keys)
        for rows in _whole_groups(
            decoder.finished(self._told), self._n, len(keys), self._least(len(keys))
        ):
            left -= len(rows)
            if not left:  # report before the last rows leave: the Step may end soon after
                self._count(decoder)
            yield self._batch(decoder, prompts, keys, rows)
            if self._version != decoder.version:
                self._renew(decoder)

    @property
    def interruptible(self) -> bool:
        """Unless on_update="drain"."""
        return not self._drains

    def interrupt(self) -> None:
        """Make the current chunk yield before its next decode step; callable from any thread.

        Between two chunks, it makes the next one begin with an empty batch.
        """
        self._asked.set()

    def _told(self) -> bool:
        """Whether an interruption was requested since the last call."""
        if not self._asked.is_set():
            return False
        self._asked.clear()
        return True

    def _renew(self, decoder: DecodeLoop) -> None:
        if self._drains:
            raise KernelError(
                f"{self._node.name}: version {self._version} came between two batches of a chunk"
                f" begun at version {decoder.version}, and on_update='drain'. Fix: load between"
                " chunks, or on_update='interrupt'."
            )
        decoder.renew(self._version)

    def _encoded(self, chunk: Chunk) -> tuple[np.ndarray, Ragged]:
        """The indices of the prompts to answer, and their token ids."""
        prompts = self._tokenizer.encode_column(chunk.inputs["prompt"].array("prompt"))
        require_known(self._node.name, self._model.name, prompts, chunk.keys, self.vocabulary)
        some, keys = self._not_empty(prompts, chunk.keys), chunk.keys
        if len(some) < len(keys):
            prompts, keys = rows_of(prompts, some), keys.take(some)
        stay, prompts = self._room.fitted(prompts, keys, self._session)
        return some[stay], prompts

    def _not_empty(self, prompts: Ragged, keys: Keys) -> np.ndarray:
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

    def _task(self, prompts: Ragged, keys: Keys) -> DecodeTask:
        longest = max((len(s) for s in self._stop), default=0)
        return DecodeTask(
            prompts=prompts,
            n=self._n,
            seeds=self._session.row_seeds(keys),
            max_tokens=self._max_tokens,
            how=self._how,
            ends=np.array(sorted(self._tokenizer.eos_ids), np.int64),
            slots=self._layout.slots,
            budget=self._layout.tokens,
            stopped=self._holds_stop if self._stop else None,
            # A character takes at most 4 byte-level tokens, and may begin in the token before.
            window=4 * longest + 4,
            sampler=self._sampler,
        )

    def _holds_stop(self, tails: list[np.ndarray]) -> np.ndarray:
        texts = self._tokenizer.decode(to_ragged([tail.tolist() for tail in tails]))
        return np.array([any(s in text for s in self._stop) for text in texts], bool)

    def _least(self, rows: int) -> int:
        return rows if rows <= self._layout.slots else max(1, self._layout.slots // 4)

    def _batch(self, decoder: DecodeLoop, prompts: Ragged, keys: Keys, rows: np.ndarray) -> Batch:
        """The requested columns of some finished rows."""
        written = decoder.written
        spans = list(zip(rows.tolist(), written.length[rows].tolist(), strict=True))

        def column(data: np.ndarray) -> Ragged:
            return self._packed([data[row, :length] for row, length in spans], data.dtype)

        ids = column(written.tokens)
        make = {
            "prompt_ids": lambda: self._packed(
                [prompts[g] for g in (rows // self._n).tolist()], prompts.values.dtype
            ),
            "completion_ids": lambda: ids,
            "completion_mask": lambda: ids.like(self._ones(len(ids.values))),
            "completion": lambda: pa.array(
                self._tokenizer.decode(ids) if len(ids) else [], pa.utf8()
            ),
            "sampler_logprobs": lambda: column(written.logprobs),
            "version": lambda: column(written.versions),
            "finish": lambda: pa.array(np.where(written.stop[rows], "stop", "length"), pa.utf8()),
        }
        mass = written.mass
        if mass is not None:
            make["sampler_mass"] = lambda: column(mass)
        wanted = self._node.returns or tuple(make)
        schema = Rollout if mass is None else TruncatedRollout
        return Batch.make(
            keys.take(rows), {name: make[name]() for name in make if name in wanted}, schema
        )

    def _packed(self, rows: list[np.ndarray], kind: np.dtype) -> Ragged:
        """A list column of these rows, built in the session's memory: each value is copied once."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = self._session.allocate(int(offsets[-1]), kind)
        if rows:
            np.concatenate(rows, out=values)
        return Ragged(values, offsets)

    def _ones(self, count: int) -> np.ndarray:
        values = self._session.allocate(count, np.uint8)
        values.fill(1)
        return values

    def _count(self, decoder: DecodeLoop) -> None:
        counts, lengths = decoder.counts, decoder.written.length
        self._session.metric("generate/tokens", float(lengths.mean()), len(lengths))
        if counts.rows:
            # A row's first token comes from the prefill, every other one from a decode forward.
            wasted = counts.rows - int((lengths - 1).sum())
            self._session.metric("generate/slot_waste", wasted / counts.rows, counts.rows)
            self._session.metric(
                "generate/slot_idle", 1.0 - counts.rows / counts.slots, counts.slots
            )
        if counts.again:
            self._session.metric(
                "generate/recomputed", counts.again / lengths.sum(), float(lengths.sum())
            )


def _whole_groups(
    finished: Iterator[np.ndarray], n: int, rows: int, least: int
) -> Iterator[np.ndarray]:
    """Finished rows, sorted, as whole groups, at least `least` at a time; the rest at the end.

    An empty array is an interruption: all finished groups are yielded at once, even if none are.
    """
    left = np.full(rows // n, n)
    ready: list[np.ndarray] = []
    for done in finished:
        groups = done // n
        np.subtract.at(left, groups, 1)
        ready.append(np.unique(groups[left[groups] == 0]))
        if not len(done) or sum(map(len, ready)) * n >= least:
            yield _rows_of(np.concatenate(ready), n)
            ready = []
    if any(map(len, ready)):
        yield _rows_of(np.concatenate(ready), n)


def _rows_of(groups: np.ndarray, n: int) -> np.ndarray:
    return (np.sort(groups)[:, None] * n + np.arange(n)).ravel()
