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
from operators.kernels.torch.attention import AttentionPass, compute_hidden, forward
from operators.kernels.torch.cache import Again, Cache, Common, Decode, Level, Prefill
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
    """Runs one DecodeTask on one module; `write_rows` drives it, `written` holds the result."""

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

    def write_rows(self, interrupted: Callable[[], bool] | None = None) -> Iterator[np.ndarray]:
        """Write all rows; after each step in which rows ended, yields which ones.

        interrupted: asked before each step; if true, an empty array is yielded first, and the step
        is taken afterwards, with the weights that are there by then.
        """
        rows = len(self.written.length)
        while self._waiting < rows or len(self._row):
            if interrupted is not None and interrupted():
                yield np.zeros(0, np.int64)
            free = self._slots - len(self._row)
            waiting = rows - self._waiting
            enough = min(max(1, self._slots // 8), waiting)
            if waiting and free >= enough:
                ended_rows = self._admit(min(free, waiting))
            else:
                ended_rows = self._step()
            if len(ended_rows):
                yield ended_rows

    @torch.inference_mode()
    def renew(self, version: int) -> None:
        """Continue under new weights: live rows keep their tokens, and all keys and values are
        computed again, first those of the prompts, then those of what the rows have written (in
        parts that fit the budget).
        """
        self.version = version
        # _prefill appends to self._prompt again, so the prompts keep their groups.
        prompts, self._prompt = self._prompt, np.zeros(0, np.int64)
        self._cache = Cache(prefix=self._cache.prefix)
        parts = _split_by_budget(prompts, self._lengths[prompts], self.task.budget)
        logits = [self._prefill(part) for part in parts]
        if self._waiting % self.task.n:  # some rows of the last prompt have not been admitted
            group = int(self._group[self._waiting // self.task.n])
            self._next = torch.cat(logits)[group : group + 1]
        # The last token of each row is fed by the next step.
        written = self.written.length[self._row].astype(np.int64) - 1
        fed = self._lengths[prompts].sum() + written.sum()
        self.counts.again += int(fed)
        longest_prompt = int(self._lengths[self._prompt].max(initial=0))
        # Copying the prompt's keys for each row costs far less than feeding its tokens.
        cost = np.maximum(written, (longest_prompt + written) // 4)
        for part in _split_by_budget(np.arange(len(written)), cost, self.task.budget):
            if written[part].any():
                self._feed_again(part, written[part])

    def _feed_again(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Feed the first `lengths` tokens of the rows in these adjacent slots."""
        rows, width = self._row[slots], int(lengths.max())
        segment, within = _lay_out(lengths)
        prompts = rows // self.task.n
        rests = self._lengths[prompts] - self._cache.prefix
        again = Again(
            cache=self._cache,
            first=int(slots[0]),
            rows=len(rows),
            width=width,
            prompt=int(rests.max()),
            group=self._to(self._group[prompts]),
            rest=self._to(rests),
            place=self._to(segment * width + within),
            mask=self._make_mask(rests, width),
        )
        ids = self.written.tokens[rows[segment], within]
        self._fill(ids, self._lengths[prompts][segment] + within, again)

    def _make_mask(self, rests: np.ndarray, width: int) -> Tensor:
        """bool [rows, 1, width, prefix + longest rest + width]: see Again.

        rests int64 [rows]: the length of each row's prompt rest.
        """
        shape = (len(rests), 1, width)
        triangle = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        prefix_mask = triangle.new_ones(*shape, self._cache.prefix)
        places = torch.arange(int(rests.max()), device=self.device)
        in_rest = places < self._to(rests)[:, None]
        prompt_mask = in_rest[:, None, None].expand(*shape, -1)
        return torch.cat([prefix_mask, prompt_mask, triangle.expand(*shape, -1)], -1)

    @torch.inference_mode()
    def _admit(self, count: int) -> np.ndarray:
        """Prefill the next rows' prompts, write first tokens; returns the rows that ended there."""
        first, n = self._waiting, self.task.n
        rows = np.arange(first, first + count)
        begun = -(-first // n)  # prompts before this one are already in the cache
        fresh = np.arange(begun, rows[-1] // n + 1)
        parts = _split_by_budget(fresh, self._lengths[fresh], self.task.budget)
        by_prompt: list[Tensor] = []
        if self._next is not None and first % n != 0:
            by_prompt.append(self._next)  # some rows of this prompt were admitted before
        by_prompt += [self._prefill(part) for part in parts]
        logits = torch.cat(by_prompt)
        self._next, self._waiting = logits[-1:], first + count
        before = np.zeros(len(self._row), bool)
        self._row, self._layout = np.concatenate([self._row, rows]), None
        prompt_of_row = rows // n - first // n  # among those of `logits`
        ended = self._write(rows, logits[self._to(prompt_of_row)])
        return self._drop(np.concatenate([before, ended]))

    def _prefill(self, prompts: np.ndarray) -> Tensor:
        """Feed some prompts, which become the cache's last groups. Returns the logits [prompts,
        vocabulary] after them.
        """
        cache, ids, prefix = self._cache, self.task.prompts, self._cache.prefix
        if prefix and not cache.prefixes:
            common = Common(cache=cache, longest=prefix)
            self._fill(ids[0][:prefix], np.arange(prefix), common)
        lengths = self._lengths[prompts] - prefix
        segment, within = _lay_out(lengths)
        starts = ids.offsets[prompts] + prefix
        tokens = ids.values[starts[segment] + within]
        width = int(lengths.max())
        place = None
        if (lengths != width).any():
            place = self._to(segment * width + within)
        prefill = Prefill(
            cache=cache,
            first=len(self._prompt),
            groups=len(prompts),
            width=width,
            place=place,
        )
        self._group[prompts] = len(self._prompt) + np.arange(len(prompts))
        self._prompt = np.concatenate([self._prompt, prompts])
        last_tokens = self._to(np.cumsum(lengths) - 1)
        return self._logits(tokens, prefix + within, prefill, keep=last_tokens)

    @torch.inference_mode()
    def _step(self) -> np.ndarray:
        """Write one more token for each live row; returns the rows that ended with it."""
        rows = self._row
        worthwhile = max(1, len(rows) * self._weight // SHARE)
        with _threads(min(self._threads, worthwhile), self._threads):
            last = self.written.length[rows].astype(np.int64) - 1
            logits = self._forward(last)
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
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        attention_pass: AttentionPass,
        keep: Tensor | None = None,
    ) -> Tensor:
        with self._products:
            return forward(
                self.module, self._to(ids), self._to(positions), attention_pass, keep=keep
            )

    def _fill(self, ids: np.ndarray, positions: np.ndarray, attention_pass: AttentionPass) -> None:
        """Compute these tokens' keys and values alone."""
        with self._products:
            compute_hidden(self.module, self._to(ids), self._to(positions), attention_pass)

    def _pass(self, last: np.ndarray) -> Decode:
        """Describe the pass over each live row's token at index `last` [rows]."""
        if self._layout is None:
            self._layout = self._arrange()
        members, place = self._layout
        rests = self._lengths[self._prompt] - self._cache.prefix
        last_index, longest_own = self._to(last), int(last.max()) + 1
        # Without a bias where all are equally long: an addition less in each layer.
        own_bias, prompt_bias = None, None
        if (last != last[0]).any():
            own_bias = _make_bias(last_index + 1, longest_own, self.module.dtype)
        if (rests != rests[0]).any():
            prompt_bias = _make_bias(self._to(rests), int(rests.max()), self.module.dtype)
        return Decode(
            cache=self._cache,
            rows=len(last),
            groups=len(self._prompt),
            members=members,
            width=int(rests.max()),
            longest_own=longest_own,
            place=place,
            last=last_index,
            own_bias=own_bias,
            prompt_bias=prompt_bias,
            rest=self._lengths[self._row // self.task.n] - self._cache.prefix,
        )

    def _arrange(self) -> tuple[int, Tensor | None]:
        """Find the most rows in any group, and where each row goes in [groups, members] (see
        Decode).
        """
        group = self._group[self._row // self.task.n]
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=len(self._prompt))
        _, within = _lay_out(counts)
        rank = np.empty(len(order), np.int64)
        rank[order] = within
        members = int(counts.max())
        place = group * members + rank
        full = len(place) == members * len(counts)
        if full and (place == np.arange(len(place))).all():
            return members, None
        return members, self._to(place)

    def _write(self, rows: np.ndarray, logits: Tensor) -> np.ndarray:
        """Sample and record one token per row; returns bool [rows]: which rows ended with it."""
        task, written = self.task, self.written
        draws = uniform(task.seeds[rows], written.length[rows])
        drawn = sample(logits, torch.from_numpy(draws).to(self.device), task.how)
        # Waits for the device: whether a row ended decides what is fed next.
        tokens, logprobs = drawn.tokens.cpu().numpy(), drawn.logprobs.cpu().numpy()
        mass = None if drawn.mass is None else drawn.mass.cpu().numpy()
        written.append(rows, tokens, logprobs, mass, self.version)
        return task.find_ended(written, rows)

    def _drop(self, ended: np.ndarray) -> np.ndarray:
        """Take the ended rows out of their slots; returns their indices."""
        ended_rows = self._row[ended]
        if not len(ended_rows):
            return ended_rows
        count, source, target = _find_moves(~ended)
        self._move(self._cache.own, source, target)
        self._row[target] = self._row[source]
        self._row, self._layout = self._row[:count], None
        self._drop_groups()
        return ended_rows

    def _drop_groups(self) -> None:
        """Once a quarter of the cache's prompts have no live or waiting rows, drop those."""
        groups = self._group[self._row // self.task.n]
        used = np.bincount(groups, minlength=len(self._prompt)) > 0
        if self._waiting % self.task.n:  # some rows of this prompt have not been admitted
            used[self._group[self._waiting // self.task.n]] = True
        if 4 * used.sum() > 3 * len(used):
            return
        count, source, target = _find_moves(used)
        self._move(self._cache.prompts, source, target)
        self._prompt[target] = self._prompt[source]
        self._prompt = self._prompt[:count]
        self._group[self._prompt] = np.arange(count)

    def _move(self, levels: dict[int, Level], source: np.ndarray, target: np.ndarray) -> None:
        """Copy holders `source` (ascending) over holders `target` in each layer."""
        if not len(source):
            return
        source_index, target_index = self._to(source), self._to(target)
        for level in levels.values():
            level.move(source_index, target_index, int(source[-1]) + 1)

    def _to(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index.astype(np.int64, copy=False)).to(self.device)


def common_prefix(prompts: Ragged) -> int:
    """Count the tokens that all prompts share, leaving each at least one; 0 if too few to
    matter.
    """
    least = int(prompts.lengths.min()) - 1
    if len(prompts) < 2 or least < LEAST_PREFIX:
        return 0
    places = prompts.offsets[:-1, None] + np.arange(least)
    heads = prompts.values[places]
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


def _lay_out(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lay segments out one after another: for each token its segment, and its place in that."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return segment, np.arange(len(segment)) - starts[segment]


def _split_by_budget(indices: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Split indices, in order, into parts whose padded size fits the budget; at least one in each.

    lengths: of each index's row.
    """
    cuts, begin, longest = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if index > begin and longest * (index - begin + 1) > budget:
            cuts.append(index)
            begin, longest = index, length
    return [part for part in np.split(indices, cuts) if len(part)]


def _find_moves(alive: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Count the living, and find the moves (source, target) that fill holes from the end."""
    count = int(alive.sum())
    source = count + np.flatnonzero(alive[count:])
    target = np.flatnonzero(~alive[:count])
    return count, source, target


def _make_bias(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """[holders, 1, 1, longest]: 0 for the first `lengths` keys of each, -inf after them."""
    behind = torch.arange(longest, device=lengths.device) >= lengths.unsqueeze(1)
    bias = torch.zeros(behind.shape, dtype=dtype, device=lengths.device)
    return bias.masked_fill_(behind, -torch.inf)[:, None, None]
