"""A decode step with keys on three levels, each once for all rows that share it.

Owns: which rows are live, where they are in the cache, and the threads of a step. Does not own: the
loop (decode.py), attention and its cache (cache.py), the choice of a token (sampling.py).

No forward ever includes a row that has ended: the last live rows move into the freed slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dataflow.randomness import uniform
from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.task_rows import TaskRows
from operators.kernels.torch.adapter_layers import is_added
from operators.kernels.torch.again_pass import Again
from operators.kernels.torch.alike_lengths import cut_alike
from operators.kernels.torch.cache import Cache, Level
from operators.kernels.torch.decode_pass import PART_READS, Decode, OwnPart
from operators.kernels.torch.decode_step import StepTokens
from operators.kernels.torch.prompt_feeding import Feeder, lay_out_segments
from operators.kernels.torch.rank_tokens import RankTokens
from operators.kernels.torch.sampling import sample
from operators.kernels.torch.step_threads import use_threads

SHARE = 3_000_000
"""Multiplications in one matrix product that justify one thread. Each further thread costs a
wake-up at every product of a step, and a scheduler time slice where another process is using its
core: next to one busy test run, a chunk of the long-tailed benchmark took 1348 ms with 2 threads
and 162 ms with 1; on an idle machine both took about 150 ms.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How the live rows lie in the cache. members, place: as in Decode; parts: the first slot of
    each OwnPart and the one behind it.
    """

    members: int
    place: Tensor | None
    parts: list[tuple[int, int]]


class SharedStep:
    """Implements DecodeStep. written: what the loop records; counts: of its decode forwards. ranks:
    where several decode the same rows, each with a part of the module.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        task: DecodeTask,
        written: Written,
        counts: Counts,
        ranks: RankTokens | None = None,
    ) -> None:
        self._task = task
        # transformers looks a module's dtype up among all of its parameters.
        self._dtype = module.dtype
        self._written, self._counts = written, counts
        self._rows = TaskRows(task)
        self._ranks = ranks
        predicts = ranks is None or ranks.predicts
        self._feeder = Feeder(module, task, self._rows, predicts=predicts)
        self.slots = min(task.slots, len(self._rows))
        self._cache = Cache(prefix=self._feeder.prefix)
        self._has_joined = False
        # [rows]: which are still to be admitted.
        self._unbegun = np.ones(len(self._rows), bool)
        self._row = np.zeros(0, np.int64)  # [live]: the row in each slot
        # [groups]: the prompt in each group of the cache; [prompts]: the group of each, or -1.
        self._prompt = np.zeros(0, np.int64)
        self._group = np.full(len(task.prompts), -1)
        # The prompt of which some rows have begun and others have not, and the logits after it.
        self._open_prompt: int | None = None
        self._open_logits: Tensor | None = None
        # While the live rows stay the same.
        self._layout: _Layout | None = None
        self._threads = torch.get_num_threads()
        self._weight = _mean_weight(module)

    @property
    def rows(self) -> np.ndarray:
        """The row in each slot."""
        return self._row

    @property
    def _lengths(self) -> np.ndarray:
        """int64 [prompts]: their tokens."""
        return self._rows.lengths

    def join(self, task: DecodeTask) -> np.ndarray:
        """See DecodeStep. What all prompts share is what the new ones share too."""
        rows = self._rows.join(task, self._group >= 0)
        self._written.reserve_rows(len(self._rows))
        self._written.clear(rows, task.max_tokens)
        more = len(self._rows) - len(self._unbegun)
        self._unbegun = np.pad(self._unbegun, (0, more))
        self._unbegun[rows] = True
        more_prompts = len(self._lengths) - len(self._group)
        self._group = np.pad(self._group, (0, more_prompts), constant_values=-1)
        prompts, _ = self._rows.order_prompts(rows)
        if self._feeder.shorten_prefix(prompts):
            self._cache.shorten_prefix(self._feeder.prefix)
        self.slots = min(task.slots, max(self.slots, self._rows.count()))
        self._has_joined = True
        return rows

    def release(self, rows: np.ndarray) -> None:
        """See DecodeStep. A prompt's number stays while its keys are in the cache."""
        self._rows.release(rows)

    def admit(self, rows: np.ndarray) -> StepTokens:
        """Prefill the prompts that are not in the cache yet, and draw first tokens."""
        prompts, prompt_of_row = self._rows.order_prompts(rows)
        fresh, by_prompt = prompts, list[Tensor]()
        if self._open_logits is not None and prompts[0] == self._open_prompt:
            fresh = prompts[1:]  # some rows of the first prompt were admitted before
            by_prompt.append(self._open_logits)
        by_prompt += [self._prefill(part) for part in self._feeder.split_prompts(fresh)]
        logits = torch.cat(by_prompt)
        self._unbegun[rows] = False
        self._open_prompt = int(prompts[-1])
        self._open_logits = logits[-1:]
        self._close_prompt()
        self._row, self._layout = np.concatenate([self._row, rows]), None
        return self._draw(rows, logits[self._to(prompt_of_row)])

    def _close_prompt(self) -> None:
        """Forget the open prompt if all of its rows have begun."""
        prompt = self._open_prompt
        if prompt is None or self._unbegun[self._rows.prompt_of_row == prompt].any():
            return
        self._open_prompt, self._open_logits = None, None

    def advance(self) -> StepTokens:
        """Feed each live row its last token; draws one more."""
        rows = self._row
        worthwhile = max(1, len(rows) * self._weight // SHARE)
        with use_threads(min(self._threads, worthwhile)):
            last = self._written.length[rows].astype(np.int64) - 1
            ids = self._written.tokens[rows, last]
            positions = self._lengths[self._rows.prompt_of_row[rows]] + last
            self._counts.rows += len(rows)
            self._counts.slots += self.slots
            return self._draw(
                rows, self._feeder.compute_logits(ids, positions, self._make_pass(last))
            )

    def drop(self, ended_rows: np.ndarray) -> None:
        """Move the last live rows into the slots of those that have ended."""
        goes_on = np.ones(len(self._rows), bool)
        goes_on[ended_rows] = False
        count, source, target = _find_moves(goes_on[self._row])
        self._move(self._cache.own, source, target)
        self._row[target] = self._row[source]
        self._row, self._layout = self._row[:count], None
        self._drop_groups()

    def renew(self) -> int:
        """Compute the keys of the prompts again, then those of what the rows have written."""
        # _prefill appends to self._prompt again, so the prompts keep their groups.
        prompts, self._prompt = self._prompt, np.zeros(0, np.int64)
        to_feed = np.union1d(prompts, self._rows.list_prompts())
        if self._has_joined and len(to_feed):
            # Prompts that had not the same beginning may have left.
            self._feeder.find_prefix(to_feed)
        self._cache = Cache(prefix=self._feeder.prefix)
        logits = [self._prefill(part) for part in self._feeder.split_prompts(prompts)]
        if self._open_prompt is not None:
            group = int(self._group[self._open_prompt])
            self._open_logits = torch.cat(logits)[group : group + 1]
        # The last token of each row is fed by the next step.
        written = self._written.length[self._row].astype(np.int64) - 1
        longest_prompt = int(self._lengths[self._prompt].max(initial=0))
        # Copying the prompt's keys for each row costs far less than feeding its tokens.
        cost = np.maximum(written, (longest_prompt + written) // 4)
        for part in self._feeder.split(np.arange(len(written)), cost):
            if written[part].any():
                self._feeder.fill(*self._lay_out_own(part, np.zeros_like(part), written[part]))
        return int(self._lengths[prompts].sum() + written.sum())

    def _lay_out_own(
        self, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Again]:
        """Lay out tokens begins .. ends - 1, int64 [rows], of the rows in these adjacent slots:
        their ids and positions, int64 [tokens], and the pass over them.
        """
        rows, lengths = self._row[slots], ends - begins
        width, first = int(lengths.max()), int(slots[0])
        segment, within = lay_out_segments(lengths)
        index = begins[segment] + within
        prompts = self._rows.prompt_of_row[rows]
        prompt_lengths = self._lengths[prompts]
        again = Again(
            cache=self._cache,
            live=len(self._row),
            first=first,
            rows=len(rows),
            width=width,
            prompt=int(prompt_lengths.max()) - self._cache.prefix,
            longest_own=int(ends.max()),
            most=self._task.max_tokens,
            group=self._to(self._group[prompts]),
            own_begin=self._to(prompt_lengths),
            begin=self._to(begins),
            holder=self._to(first + segment),
            index=self._to(index),
            place=self._to(segment * width + within),
            mask=self._make_mask(prompt_lengths - self._cache.prefix, begins, ends),
        )
        ids = self._written.tokens[rows[segment], index]
        return ids, prompt_lengths[segment] + index, again

    def _make_mask(self, rests: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> Tensor:
        """bool [rows, 1, width, prefix + longest rest + longest own]: see Again.

        rests int64 [rows]: the length of each row's prompt rest.
        """
        device, width = self._feeder.device, int((ends - begins).max())
        shape = (len(rests), 1, width)
        prefix_mask = torch.ones(*shape, self._cache.prefix, dtype=torch.bool, device=device)
        places = torch.arange(int(rests.max()), device=device)
        in_rest = places < self._to(rests)[:, None]
        prompt_mask = in_rest[:, None, None].expand(*shape, -1)
        own_places = torch.arange(int(ends.max()), device=device)
        query_places = self._to(begins)[:, None] + torch.arange(width, device=device)
        own_mask = own_places <= query_places[:, None, :, None]
        return torch.cat([prefix_mask, prompt_mask, own_mask], -1)

    def _prefill(self, prompts: np.ndarray) -> Tensor:
        """Feed some prompts, which become the cache's last groups. Returns the logits [prompts,
        vocabulary] after them.
        """
        first = len(self._prompt)
        logits = self._feeder.prefill(self._cache, prompts, first)
        self._group[prompts] = first + np.arange(len(prompts))
        self._prompt = np.concatenate([self._prompt, prompts])
        return logits

    def _make_pass(self, last: np.ndarray) -> Decode:
        """Describe the pass over each live row's token at index `last` [rows]."""
        if self._layout is None:
            self._layout = self._arrange(last)
        rests = self._lengths[self._prompt] - self._cache.prefix
        last_index = self._to(last)
        parts: list[OwnPart] = []
        for begin, end in self._layout.parts:
            lengths = last[begin:end] + 1
            # Without a bias where all are equally long: an addition less in each layer.
            bias = None
            if (lengths != lengths[0]).any():
                bias = _make_bias(last_index[begin:end] + 1, int(lengths.max()), self._dtype)
            parts.append(OwnPart(begin=begin, end=end, longest=int(lengths.max()), bias=bias))
        prompt_bias = None
        if (rests != rests[0]).any():
            prompt_bias = _make_bias(self._to(rests), int(rests.max()), self._dtype)
        return Decode(
            cache=self._cache,
            rows=len(last),
            groups=len(self._prompt),
            members=self._layout.members,
            width=int(rests.max()),
            place=self._layout.place,
            last=last_index,
            parts=parts,
            most=self._task.max_tokens,
            prompt_bias=prompt_bias,
            rest=self._lengths[self._rows.prompt_of_row[self._row]] - self._cache.prefix,
            threads=self._threads,
        )

    def _arrange(self, last: np.ndarray) -> _Layout:
        """Find how the live rows lie in the cache; last int64 [rows]: see `_make_pass`."""
        group = self._group[self._rows.prompt_of_row[self._row]]
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=len(self._prompt))
        _, within = lay_out_segments(counts)
        rank = np.empty(len(order), np.int64)
        rank[order] = within
        members = int(counts.max())
        place = group * members + rank
        full = len(place) == members * len(counts)
        in_order = full and (place == np.arange(len(place))).all()
        return _Layout(
            members=members,
            place=None if in_order else self._to(place),
            parts=self._cut_slots(last + 1),
        )

    def _cut_slots(self, lengths: np.ndarray) -> list[tuple[int, int]]:
        """Cut the slots into parts that read own keys together; on a GPU, where what a part costs
        is not the reading, they all do.
        """
        level = next(iter(self._cache.own.values()), None)
        if level is None or self._feeder.device.type != "cpu":
            return [(0, len(lengths))]
        return cut_alike(lengths, PART_READS / level.numbers)

    def _draw(self, rows: np.ndarray, logits: Tensor) -> StepTokens:
        """Draw one token per row from logits [rows, vocabulary]."""
        draws = torch.from_numpy(uniform(self._rows.seeds[rows], self._written.length[rows]))
        if self._ranks is not None:
            return self._ranks.draw(rows, logits, draws, self._task.how)
        drawn = sample(logits, draws.to(logits.device), self._task.how)
        # Waits for the device: whether a row ended decides what is fed next.
        tokens, logprobs = drawn.tokens.cpu().numpy(), drawn.logprobs.cpu().numpy()
        mass = None if drawn.mass is None else drawn.mass.cpu().numpy()
        return StepTokens(rows=rows, tokens=tokens, logprobs=logprobs, mass=mass)

    def _drop_groups(self) -> None:
        """Once a quarter of the cache's prompts have no live or waiting rows, drop those."""
        groups = self._group[self._rows.prompt_of_row[self._row]]
        used = np.bincount(groups, minlength=len(self._prompt)) > 0
        if self._open_prompt is not None:
            used[self._group[self._open_prompt]] = True
        if 4 * used.sum() > 3 * len(used):
            return
        self._release_prompts(self._prompt[~used])
        count, source, target = _find_moves(used)
        self._move(self._cache.prompts, source, target)
        self._prompt[target] = self._prompt[source]
        self._prompt = self._prompt[:count]
        self._group[self._prompt] = np.arange(count)

    def _release_prompts(self, prompts: np.ndarray) -> None:
        """These prompts, int64 [prompts], are about to leave the cache."""
        self._group[prompts] = -1

    def _move(self, levels: dict[int, Level], source: np.ndarray, target: np.ndarray) -> None:
        """Copy holders `source` (ascending) over holders `target` in each layer."""
        if not len(source):
            return
        source_index, target_index = self._to(source), self._to(target)
        for level in levels.values():
            level.move(source_index, target_index, int(source[-1]) + 1)

    def _to(self, index: np.ndarray) -> Tensor:
        return self._feeder.to_device(index)


def _mean_weight(module: PreTrainedModel) -> int:
    """The mean number of elements in the weight matrices of the module's base, or of this rank's
    parts of them.
    """
    sizes: list[int] = []
    for name, weight in module.named_parameters():
        if weight.dim() > 1 and not is_added(name):
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            sizes.append(part.numel())
    return sum(sizes) // len(sizes)


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
