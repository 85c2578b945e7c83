"""The decode loop: rows enter slots, each step writes one token per row, finished rows leave at
once.

Owns: which rows are live, where they are in the cache, and when a row ends. Does not own:
attention and its cache (cache.py), the choice of a token (sampling.py), columns (generate.py).

Rows wait in order. Slots are refilled when an eighth of them is free (a prefill of one prompt
costs nearly as much as one of several). No forward ever includes a row that has ended: the last
live rows move into the freed slots. A row's tokens depend on its prompt, its random stream and the
weights; on the rows next to it only through the rounding of batched products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataflow.batch import Ragged
from dataflow.randomness import uniform
from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.torch.attention import AttentionPass, forward, hidden
from operators.kernels.torch.cache import Again, Cache, Common, Decode, Prefill
from operators.kernels.torch.products import fast_products
from operators.kernels.torch.sampling import sample

LEAST_PREFIX = 8
"""Shared tokens that justify a prefix level, which costs a few small products per step."""

SHARE = 3_000_000
"""Multiplications in one matrix product that justify one thread. Each further thread costs a
wake-up at every product of a step, and a scheduler time slice where another process is using its
core: next to one busy test run, a chunk of the long-tailed benchmark took 1348 ms with 2 threads
and 162 ms with 1; on an idle machine both took about 150 ms.
"""


class Decoder:
    """Runs one DecodeTask on one module; `finished` drives it, `written` holds the result."""

    def __init__(self, module: PreTrainedModel, task: DecodeTask, version: int = 0) -> None:
        rows = len(task.prompts) * task.n
        self.module, self.task, self.device = module, task, module.device
        self.version = version
        self.written = Written.empty(rows, truncates=task.how.truncates)
        self.counts = Counts()
        self._slots = min(task.slots, rows)
        self._lengths = task.prompts.lengths
        self._cache = Cache(prefix=common_prefix(task.prompts))
        self._waiting = 0  # the first row that has not been admitted
        self._row = np.zeros(0, np.int64)  # [live]: the row in each slot
        # [groups]: the prompt in each group of the cache; [prompts]: the group of each such prompt.
        self._prompt = np.zeros(0, np.int64)
        self._group = np.zeros(len(task.prompts), np.int64)
        # Logits after the last prefilled prompt, some of whose rows may still wait.
        self._next: Tensor | None = None
        # members and place of Decode, while the live rows stay the same.
        self._layout: tuple[int, Tensor | None] | None = None
        self._threads = torch.get_num_threads()
        self._weight = _mean_weight(module)
        self._products = fast_products(module)

    def finished(self, interrupted: Callable[[], bool] | None = None) -> Iterator[np.ndarray]:
        """Write all rows; after each step in which rows ended, yields which ones.

        interrupted: asked before each step; if true, an empty array is yielded first, and the step
        is taken afterwards, with the weights that are there by then.
        """
        rows = len(self.written.length)
        while self._waiting < rows or len(self._row):
            if interrupted is not None and interrupted():
                yield np.zeros(0, np.int64)
            free = self._slots - len(self._row)
            admit = self._waiting < rows and free >= min(
                max(1, self._slots // 8), rows - self._waiting
            )
            done = self._admit(min(free, rows - self._waiting)) if admit else self._step()
            if len(done):
                yield done

    @torch.inference_mode()
    def renew(self, version: int) -> None:
        """Continue under new weights: live rows keep their tokens, and all keys and values are
        computed again, first those of the prompts, then those of what the rows have written (in
        parts that fit the budget).
        """
        self.version = version
        prompts, self._prompt = self._prompt, np.zeros(0, np.int64)
        self._cache = Cache(prefix=self._cache.prefix)
        logits = [
            self._prefill(part)
            for part in _budgeted(prompts, self._lengths[prompts], self.task.budget)
        ]
        if self._waiting % self.task.n:
            held = int(self._group[self._waiting // self.task.n])
            self._next = torch.cat(logits)[held : held + 1]
        # The last token of each row is fed by the next step.
        written = self.written.length[self._row].astype(np.int64) - 1
        self.counts.again += int(self._lengths[prompts].sum() + written.sum())
        beside = int(self._lengths[self._prompt].max(initial=0))
        # Copying the prompt's keys for each row costs far less than feeding its tokens.
        cost = np.maximum(written, (beside + written) // 4)
        for part in _budgeted(np.arange(len(written)), cost, self.task.budget):
            if written[part].any():
                self._again(part, written[part])

    def _again(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Feed the first `lengths` tokens of the rows in these adjacent slots."""
        rows, width, prefix = self._row[slots], int(lengths.max()), self._cache.prefix
        segment = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(segment)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        prompts = rows // self.task.n
        widths = self._lengths[prompts] - prefix
        own = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        beside = torch.arange(int(widths.max()), device=self.device) < self._to(widths)[:, None]
        shape = (len(rows), 1, width)
        mask = torch.cat(
            [
                own.new_ones(*shape, prefix),
                beside[:, None, None].expand(*shape, -1),
                own.expand(*shape, -1),
            ],
            -1,
        )
        one = Again(
            cache=self._cache,
            first=int(slots[0]),
            rows=len(rows),
            width=width,
            prompt=int(widths.max()),
            group=self._to(self._group[prompts]),
            rest=self._to(widths),
            place=self._to(segment * width + within),
            mask=mask,
        )
        ids = self.written.tokens[rows[segment], within]
        self._fill(ids, self._lengths[prompts][segment] + within, one)

    @torch.inference_mode()
    def _admit(self, count: int) -> np.ndarray:
        """Prefill the next rows' prompts, write first tokens; returns the rows that ended there."""
        first, n = self._waiting, self.task.n
        rows = np.arange(first, first + count)
        begun = -(-first // n)  # prompts before this one are already in the cache
        fresh = np.arange(begun, rows[-1] // n + 1)
        logits = [] if self._next is None or first % n == 0 else [self._next]
        logits += [
            self._prefill(part) for part in _budgeted(fresh, self._lengths[fresh], self.task.budget)
        ]
        known = torch.cat(logits)
        self._next, self._waiting = known[-1:], first + count
        before = np.zeros(len(self._row), bool)
        self._row, self._layout = np.concatenate([self._row, rows]), None
        ended = self._write(rows, known[self._to(rows // n - first // n)])
        return self._drop(np.concatenate([before, ended]))

    def _prefill(self, prompts: np.ndarray) -> Tensor:
        """Logits [prompts, vocabulary] after some prompts, which become the cache's last groups."""
        cache, ids, prefix = self._cache, self.task.prompts, self._cache.prefix
        if prefix and not cache.prefixes:
            self._fill(ids[0][:prefix], np.arange(prefix), Common(cache=cache, longest=prefix))
        lengths = self._lengths[prompts] - prefix
        segment = np.repeat(np.arange(len(prompts)), lengths)
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1]) - (ends - lengths)[segment]
        tokens = ids.values[(ids.offsets[prompts] + prefix)[segment] + within]
        width = int(lengths.max())
        even = (lengths == width).all()
        one = Prefill(
            cache=cache,
            first=len(self._prompt),
            groups=len(prompts),
            width=width,
            place=None if even else self._to(segment * width + within),
        )
        self._group[prompts] = len(self._prompt) + np.arange(len(prompts))
        self._prompt = np.concatenate([self._prompt, prompts])
        return self._logits(tokens, prefix + within, one, keep=self._to(ends - 1))

    @torch.inference_mode()
    def _step(self) -> np.ndarray:
        """Write one more token for each live row; returns the rows that ended with it."""
        rows = self._row
        with _threads(min(self._threads, max(1, len(rows) * self._weight // SHARE)), self._threads):
            logits = self._forward(self.written.length[rows].astype(np.int64) - 1)
            return self._drop(self._write(rows, logits))

    def _forward(self, last: np.ndarray) -> Tensor:
        """Feed each live row its token at index `last` [rows]; returns the logits after it."""
        rows = self._row
        ids = self.written.tokens[rows, last]
        positions = self._lengths[rows // self.task.n] + last
        self.counts.rows += len(rows)
        self.counts.slots += self._slots
        return self._logits(ids, positions, self._pass(last))

    def _logits(
        self, ids: np.ndarray, positions: np.ndarray, one: AttentionPass, keep: Tensor | None = None
    ) -> Tensor:
        with self._products:
            return forward(self.module, self._to(ids), self._to(positions), one, keep=keep)

    def _fill(self, ids: np.ndarray, positions: np.ndarray, one: AttentionPass) -> None:
        """Compute these tokens' keys and values alone."""
        with self._products:
            hidden(self.module, self._to(ids), self._to(positions), one)

    def _pass(self, last: np.ndarray) -> Decode:
        if self._layout is None:
            self._layout = self._arranged()
        members, place = self._layout
        widths = self._lengths[self._prompt] - self._cache.prefix
        index, longest = self._to(last), int(last.max()) + 1
        return Decode(
            cache=self._cache,
            rows=len(last),
            groups=len(self._prompt),
            members=members,
            width=int(widths.max()),
            longest_own=longest,
            place=place,
            last=index,
            own_bias=(
                None if (last == last[0]).all() else _bias(index + 1, longest, self.module.dtype)
            ),
            prompt_bias=(
                None
                if (widths == widths[0]).all()
                else _bias(self._to(widths), int(widths.max()), self.module.dtype)
            ),
            rest=self._lengths[self._row // self.task.n] - self._cache.prefix,
        )

    def _arranged(self) -> tuple[int, Tensor | None]:
        """The most rows in any group, and where each row goes in [groups, members] (see Decode)."""
        group = self._group[self._row // self.task.n]
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=len(self._prompt))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        members = int(counts.max())
        place = group * members + rank
        full = len(place) == members * len(counts)
        return members, None if full and (place == np.arange(len(place))).all() else self._to(place)

    def _write(self, rows: np.ndarray, logits: Tensor) -> np.ndarray:
        """Sample and record one token per row; returns bool [rows]: which rows ended with it."""
        task, written = self.task, self.written
        draws = torch.from_numpy(uniform(task.seeds[rows], written.length[rows])).to(self.device)
        drawn = sample(logits, draws, task.how)
        written.append(
            rows,
            drawn.tokens.cpu().numpy(),
            drawn.logprobs.cpu().numpy(),
            None if drawn.mass is None else drawn.mass.cpu().numpy(),
            self.version,
        )
        return task.ended(written, rows)

    def _drop(self, ended: np.ndarray) -> np.ndarray:
        """Take the ended rows out of their slots; returns their indices."""
        done = self._row[ended]
        if not len(done):
            return done
        kept, source, target = _moves(~ended)
        self._move(self._cache.own, source, target)
        self._row[target] = self._row[source]
        self._row, self._layout = self._row[:kept], None
        self._drop_groups()
        return done

    def _drop_groups(self) -> None:
        """Once a quarter of the cache's prompts have no live or waiting rows, drop those."""
        used = np.bincount(self._group[self._row // self.task.n], minlength=len(self._prompt)) > 0
        if self._waiting % self.task.n:
            used[self._group[self._waiting // self.task.n]] = True
        if 4 * used.sum() > 3 * len(used):
            return
        kept, source, target = _moves(used)
        self._move(self._cache.prompts, source, target)
        self._prompt[target] = self._prompt[source]
        self._prompt = self._prompt[:kept]
        self._group[self._prompt] = np.arange(kept)

    def _move(self, levels: dict, source: np.ndarray, target: np.ndarray) -> None:
        if len(source):
            here, there = self._to(source), self._to(target)
            for level in levels.values():
                level.move(here, there, int(source[-1]) + 1)

    def _to(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index.astype(np.int64, copy=False)).to(self.device)


def common_prefix(prompts: Ragged) -> int:
    """How many tokens all prompts share, leaving each at least one; 0 if too few to matter."""
    least = int(prompts.lengths.min()) - 1
    if len(prompts) < 2 or least < LEAST_PREFIX:
        return 0
    heads = prompts.values[prompts.offsets[:-1, None] + np.arange(least)]
    differs = (heads != heads[0]).any(0)
    length = int(differs.argmax()) if differs.any() else least
    return length if length >= LEAST_PREFIX else 0


def _mean_weight(module: PreTrainedModel) -> int:
    """The mean number of elements in the module's weight matrices."""
    sizes = [weight.numel() for weight in module.parameters() if weight.dim() > 1]
    return sum(sizes) // len(sizes)


@contextmanager
def _threads(count: int, usual: int) -> Iterator[None]:
    """Compute with `count` threads, then go back to `usual`."""
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _budgeted(prompts: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Prompts in order, in parts whose padded size fits the budget; at least one per part."""
    cuts, begin, longest = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if index > begin and longest * (index - begin + 1) > budget:
            cuts.append(index)
            begin, longest = index, length
    return [part for part in np.split(prompts, cuts) if len(part)]


def _moves(alive: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """How many are alive, and the moves (source, target) that fill holes from the end."""
    kept = int(alive.sum())
    return kept, kept + np.flatnonzero(alive[kept:]), np.flatnonzero(~alive[:kept])


def _bias(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """[holders, 1, 1, longest]: 0 for the first `lengths` keys of each, -inf after them."""
    behind = torch.arange(longest, device=lengths.device) >= lengths.unsqueeze(1)
    return torch.zeros(behind.shape, dtype=dtype, device=lengths.device).masked_fill_(
        behind, -torch.inf
    )[:, None, None]
