"""One vLLM engine in this process: token ids in, tokens and log-probs out, weights in place.

Owns: how vLLM is asked. Does not own: how it is started (startup.py), which rows (decode.py), what
a token is drawn by (sampling_processor.py), what is done in vLLM's workers (rank.py).

The engine is stepped by its caller. With one tensor rank nothing of it runs in another process. An
engine whose call raised is lost: what vLLM had scheduled by then is unknown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.batch import Ragged
from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from operators.kernels.torch.adapter_files import read_adapter
from operators.kernels.torch.adapters import describe_adapter
from operators.kernels.torch.base_piece import find_base, take_base
from operators.kernels.vllm.engine_errors import VllmErrors
from operators.kernels.vllm.merging_weights import MergingWeights
from operators.kernels.vllm.served_adapter import ServedAdapter
from operators.kernels.vllm.startup import BLOCK, EngineSize, rank_processes, start_engine
from operators.kernels.vllm.weights import (
    SharedWeights,
    names_and_shapes,
    require_shapes,
    require_whole,
)

CANARY = 2 * BLOCK + 1
"""Tokens of the request that shows whether keys and values of other weights are still there."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a request; mass: None unless the sampler truncates. version: of the weights.
    cached: with the request's first token, of how many of its prompt's tokens keys were there.
    """

    request: str
    token: int
    logprob: float
    mass: float | None
    version: int
    cached: int | None = None


class Engine:
    """A Model's engine, which all generate nodes of that Model in a Worker share."""

    def __init__(
        self,
        model: Model,
        described: Any,
        base: str,
        dtype: str,
        size: EngineSize,
        *,
        is_merged: bool = False,
    ) -> None:
        """described: the Model's module of transformers, on the meta device. base: directory.
        dtype: that the Model computes in, by torch's name. is_merged: it has the Model's adapter
        merged into its matrices.
        """
        self.name = model.name
        self.size = size
        self.version = 0
        self._names, self._shapes = names_and_shapes(described)
        self._base, self._base_digest = base, find_base(described)
        self._adapter: ServedAdapter | None = None
        self.merging: MergingWeights | None = None
        if is_merged:
            self.merging = MergingWeights(model.name, described, base, dtype)
        elif model.adapter is not None:
            self._adapter = ServedAdapter(model, describe_adapter(described))
        self._is_part = model.is_partial
        rank = self._adapter.room if self._adapter else 0
        self._llm = start_engine(model.name, base, dtype, size, adapter_rank=rank)
        self._core: Any = self._llm.llm_engine.engine_core
        self._shared = SharedWeights() if size.tensor > 1 else None
        self._ranks: list[Any] = rank_processes(self._llm) if size.tensor > 1 else []
        self._held: deque[list[Token]] = deque()
        self._count = 0
        self._lost = self._asleep = self._closed = False
        self._probed: int | None = None
        self.vocabulary = int(described.config.vocab_size)
        self._begin_adapter(model)

    def add(self, ids: Sequence[int], params: Any) -> str:
        """Begin a row by these SamplingParams (sampling_processor.py); returns its request."""
        from vllm.v1.engine import EngineCoreRequest

        self._count += 1
        name = f"{self._count}"
        with self._call_context():
            self._core.add_request(
                EngineCoreRequest(
                    request_id=name,
                    prompt_token_ids=list(ids),
                    mm_features=None,
                    sampling_params=params,
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=self._request_adapter(),
                    cache_salt=None,
                    data_parallel_rank=None,
                )
            )
        return name

    def _request_adapter(self) -> Any:
        """What a row names its adapter by; None while no version of one has come."""
        if self._adapter is None:
            return None
        if not self._adapter.is_loaded:
            if self.version:
                raise KernelError(
                    f"Model {self.name!r}: expected the adapter of version {self.version} in its"
                    " engine, found none. Fix: nothing here; rows would be the base's."
                )
            return None
        return self._adapter.make_request(load=False)

    def step(self) -> list[Token]:
        """One token of each row that runs."""
        if self._held:
            return self._held.popleft()
        return self._read_tokens(self._get_outputs())

    def _get_outputs(self) -> list[Any]:
        with self._call_context():
            return self._core.get_output().outputs

    def _read_tokens(self, outputs: Iterable[Any]) -> list[Token]:
        """The tokens of outputs that have log-probs: others are a probe's."""
        tokens: list[Token] = []
        for output in outputs:
            if output.new_logprobs is None:
                continue
            stats = output.prefill_stats
            cached = None if stats is None else stats.num_cached_tokens
            for place, token_id in enumerate(output.new_token_ids):
                # Of the token, of the greatest logit (the same one), and of the mass beside it.
                logprobs = output.new_logprobs.logprobs[place]
                mass = float(logprobs[2]) if len(logprobs) > 2 else None
                token = Token(
                    request=output.request_id,
                    token=int(token_id),
                    logprob=float(logprobs[0]),
                    mass=mass,
                    version=self.version,
                    cached=cached,
                )
                tokens.append(token)
        return tokens

    def abort(self, requests: list[str]) -> None:
        """End these rows, in this order. Those of a lost engine are gone, and its error is on its
        way.
        """
        if requests and not self._lost:
            with self._call_context():
                # Of several at once vLLM makes a set of names, whose order is another in each
                # process, and in that order it would free and later evict their blocks.
                for request in requests:
                    self._core.abort_requests([request])

    @property
    def idle(self) -> bool:
        """Whether no row is running or waiting."""
        return not self._core.engine_core.scheduler.has_unfinished_requests()

    def forget(self) -> None:
        """Drop all keys and values; those of running rows are computed again from their tokens."""
        with self._call_context():
            is_reset = self._core.reset_prefix_cache(reset_running_requests=True)
        if not is_reset:
            raise KernelError(
                f"Model {self.name!r}: expected vLLM to forget its keys and values, found that it"
                " declined. Fix: nothing here; tokens would be written with old keys."
            )

    def load(self, pieces: list[Piece], version: int) -> None:
        """Load all weights of a version, in place; then forget what older ones computed. Raises
        KernelError for half a version, and for one beside another base.
        """
        pieces = take_base(pieces, self._base_digest, self._base)
        require_whole(self.name, self._names, pieces)
        require_shapes(self.name, self._shapes, pieces)
        self._load_version(pieces)
        self.version = version
        self.forget()

    def _load_version(self, pieces: list[Piece]) -> None:
        if self._adapter is not None:
            self._load_adapter(self._adapter, pieces)
        elif self.merging is not None:
            self._load_weights(self.merging.merge(pieces))
        else:
            self._load_weights(pieces)

    def _begin_adapter(self, model: Model) -> None:
        """Load what a Model's adapter begins with; a fresh one changes no number."""
        if model.adapter is not None and model.adapter.start is not None:
            folder = Path(model.adapter.start).expanduser()
            self._load_version(read_adapter(model, folder))

    def _load_adapter(self, adapter: ServedAdapter, pieces: list[Piece]) -> None:
        adapter.write({piece.name: piece.data for piece in pieces})
        with self._call_context():
            is_loaded = self._core.add_lora(adapter.make_request(load=True))
        if not is_loaded:
            raise KernelError(
                f"Model {self.name!r}: expected vLLM to load its adapter, found that it declined."
                " Fix: --kernel NODE=torch."
            )
        adapter.is_loaded = True

    def _load_weights(self, pieces: list[Piece]) -> None:
        with self._call_context():
            if self._shared is None:
                pairs = [(piece.name, piece.data) for piece in pieces]
                missing_of_ranks = self._llm.collective_rpc("take", args=(pairs,))
            else:
                where = (self._shared.path, self._shared.write(pieces))
                missing_of_ranks = self._llm.collective_rpc("take_shared", args=where)
        missing = next(filter(None, missing_of_ranks), None)
        # Of a subset, and beside merged matrices, the engine has the rest from its base.
        if missing and not self._is_part:
            raise KernelError(
                f"Model {self.name!r}: expected all weights of vLLM's module, found that"
                f" {missing[0]} did not come. Fix: a base whose names vLLM knows,"
                " or --kernel NODE=torch."
            )

    def probe(self, ids: Ragged) -> np.ndarray:
        """float32: the log-prob at temperature 1 of each token but its row's first, in one pass.

        Raises KernelError if keys and values of other weights are still there.
        """
        from vllm import SamplingParams

        self._require_forgotten()
        mode_before = self._call("say_log_probs", "raw_logprobs")
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        row_of_request: dict[str, int] = {}
        for row in range(len(ids)):
            if len(ids[row]) > 1:  # else it has no token but its first
                row_of_request[self.add(ids[row].tolist(), params)] = row
        row_logprobs = [np.zeros(0, np.float32)] * len(ids)
        for output in self._run_until_done(set(row_of_request)):
            tensors = output.new_prompt_logprobs_tensors
            if tensors is not None:
                row = row_of_request[output.request_id]
                row_logprobs[row] = tensors.logprobs[:, 0].float().cpu().numpy()
        self._call("say_log_probs", mode_before)
        return np.concatenate(row_logprobs)

    def _require_forgotten(self) -> None:
        """Raise KernelError if a fixed request finds keys of its own that this version has not
        computed.
        """
        from vllm import SamplingParams

        length = min(CANARY, self.size.length - 1)
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
        request = self.add((np.arange(length) % self.vocabulary).tolist(), params)
        cached_tokens: list[int] = []
        for output in self._run_until_done({request}):
            if output.prefill_stats is not None:
                cached_tokens.append(output.prefill_stats.num_cached_tokens)
        if self._probed != self.version and any(cached_tokens):
            raise KernelError(
                f"Model {self.name!r}: expected no keys of older weights at version"
                f" {self.version}, found those of {max(cached_tokens)} tokens. Fix: nothing here;"
                " tokens would be written with old keys."
            )
        self._probed = self.version

    def _run_until_done(self, requests: set[str]) -> Iterator[Any]:
        """Step until these requests have ended; yields their outputs. Tokens of other rows
        wait for `step`, those of each step by themselves.
        """
        running = set(requests)
        while running:
            outputs = self._get_outputs()
            held = self._read_tokens(out for out in outputs if out.request_id not in requests)
            if held:
                self._held.append(held)
            for output in outputs:
                if output.request_id in requests:
                    yield output
                    if output.finish_reason is not None:
                        running.discard(output.request_id)

    def _call(self, method: str, *args: Any) -> Any:
        """The first rank's answer; all are called."""
        with self._call_context():
            return self._llm.collective_rpc(method, args=args)[0]

    @contextmanager
    def _call_context(self) -> Iterator[None]:
        """Around every call of vLLM: one that raises makes the engine a lost one."""
        if self._lost:
            raise KernelError(
                f"Model {self.name!r}: expected a vLLM engine, found one that was lost when a call"
                " of it raised. Fix: see that error, in its Worker's log."
            )
        self._lost = True
        with VllmErrors(self.name, "its vLLM engine to answer", self._ranks):
            yield
        self._lost = False

    def sleep(self) -> None:
        """vLLM's sleep level 1: weights move to the host, keys and values are dropped. Each node
        of the engine asks; the first does it.
        """
        if not self._asleep:
            with self._call_context():
                self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Take the device again."""
        if self._asleep:
            with self._call_context():
                self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """End the engine and the processes of its ranks. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._core.shutdown()
        if self._shared is not None:
            self._shared.close()
        if self._adapter is not None:
            self._adapter.close()
