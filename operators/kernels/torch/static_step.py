"""A decode step at fixed places, which one CUDA graph can hold.

Owns: which row is in which slot, what a step computes, and the step that is computed ahead. Does
not own: the loop (decode.py), keys and their passes (static_keys.py), what outlives a chunk
(static_memory.py).

A step computes so many first slots as hold all live rows, a power of two, and so many first keys as
hold the longest of them, a power of two or the middle between two: a graph for each such pair. A
slot without a row computes for nobody. Rows stay in their slots until half as many hold them.

The device knows what it feeds next, so a step is started before the numbers of the one before have
reached the host, which then has a step's time to record these. What a row that ended meanwhile
wrote in it is left out. Under new weights it is left out for all rows and computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataflow.errors import KernelError
from dataflow.randomness import uniform
from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.task_rows import TaskRows
from operators.kernels.torch.cache import Cache, Level
from operators.kernels.torch.decode_step import StepTokens
from operators.kernels.torch.device_sampling import (
    NUMBERS,
    draw_packed,
    draw_uniform,
    unpack_rows,
)
from operators.kernels.torch.flash_decode import make_key_lengths
from operators.kernels.torch.prompt_feeding import Feeder, lay_out_segments
from operators.kernels.torch.result_copies import ResultCopy
from operators.kernels.torch.static_keys import StaticAgain, StaticDecode
from operators.kernels.torch.static_memory import (
    FEWEST_KEYS,
    FEWEST_ROWS,
    ID,
    INDEX,
    LIVE,
    POSITION,
    SEED,
    StaticMemory,
    round_up,
    round_up_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedStep:
    """A step that the device computes. rows, slots int64 [live] as it was started; width: slots
    that it computes.
    """

    rows: np.ndarray
    slots: np.ndarray
    width: int
    copy: ResultCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenPrompt:
    """The prompt of which some rows have begun and others have not: its keys, as a cache of one
    group, and the logits [1, vocabulary] after it.
    """

    prompt: int
    cache: Cache
    logits: Tensor


class StaticStep:
    """Implements DecodeStep. written: what the loop records; counts: of its decode forwards."""

    def __init__(
        self,
        module: PreTrainedModel,
        task: DecodeTask,
        written: Written,
        counts: Counts,
        memory: StaticMemory,
    ) -> None:
        self._task, self._written, self._counts, self._memory = task, written, counts, memory
        self._rows = TaskRows(task)
        self._feeder = Feeder(module, task, self._rows)
        self.slots = min(task.slots, len(self._rows))
        # [rows]: which are still to be admitted.
        self._unbegun = np.ones(len(self._rows), bool)
        self._has_joined = False
        self._open_prompt: _OpenPrompt | None = None
        self._prefixes: dict[int, Level] = {}
        self._row = np.zeros(0, np.int64)  # [live]
        self._slot = np.zeros(0, np.int64)  # [live]: of each such row
        capacity = round_up(self.slots, FEWEST_ROWS)
        # [slots]: where the token is that the next step feeds.
        self._position = np.zeros(capacity, np.int64)
        # [slots]: whether the device has another row there than the host, or knows less of it.
        self._stale = np.ones(capacity, bool)
        self._ahead: _LaunchedStep | None = None
        memory.open(capacity, self._count_prompt_keys())

    def _count_prompt_keys(self) -> int:
        """Keys for which a slot has room from the start: those of a prompt and of one token."""
        return round_up_keys(int(self._lengths.max()) + 1, FEWEST_KEYS)

    @property
    def rows(self) -> np.ndarray:
        """The live rows, in the order of their admission."""
        return self._row

    @property
    def _lengths(self) -> np.ndarray:
        """int64 [prompts]: their tokens."""
        return self._rows.lengths

    def join(self, task: DecodeTask) -> np.ndarray:
        """See DecodeStep. What all prompts share is what the new ones share too."""
        held = np.zeros(len(self._lengths), bool)
        rows = self._rows.join(task, held)
        self._written.reserve_rows(len(self._rows))
        self._written.clear(rows, task.max_tokens)
        self._unbegun = np.pad(self._unbegun, (0, len(self._rows) - len(self._unbegun)))
        self._unbegun[rows] = True
        prompts, _ = self._rows.order_prompts(rows)
        if self._feeder.shorten_prefix(prompts):
            self._prefixes = {}
        self._has_joined = True
        self.slots = min(task.slots, max(self.slots, self._rows.count()))
        more_slots = round_up(self.slots, FEWEST_ROWS) - len(self._stale)
        if more_slots > 0:
            self._position = np.pad(self._position, (0, more_slots))
            self._stale = np.pad(self._stale, (0, more_slots), constant_values=True)
        self._memory.reserve(len(self._stale), self._count_prompt_keys())
        return rows

    def release(self, rows: np.ndarray) -> None:
        """See DecodeStep."""
        self._rows.release(rows)

    # Prompts.

    def admit(self, rows: np.ndarray) -> StepTokens:
        """Prefill prompts, copy each to the slots of its rows, and draw first tokens."""
        slots = self._take_slots(rows)
        self._unbegun[rows] = False
        prompts, prompt_of_row = self._rows.order_prompts(rows)
        fresh, by_prompt = prompts, list[Tensor]()
        opened = self._open_prompt
        if opened is not None and prompts[0] == opened.prompt:
            fresh = prompts[1:]
            its_slots = slots[prompt_of_row == 0]
            groups = self._feeder.to_device(np.zeros(len(its_slots), np.int64))
            self._memory.keys.store_prompts(opened.cache, groups, self._feeder.to_device(its_slots))
            by_prompt.append(opened.logits)
        by_prompt += self._prefill(fresh, rows, slots)
        self._close_prompt()
        logits = torch.cat(by_prompt)[self._feeder.to_device(prompt_of_row)]
        return self._draw_first(rows, logits)

    def _take_slots(self, rows: np.ndarray) -> np.ndarray:
        """Give each row a free slot; returns these, int64 [rows]."""
        free_slots = np.setdiff1d(np.arange(self.slots), self._slot)
        slots = free_slots[: len(rows)]
        self._row = np.concatenate([self._row, rows])
        self._slot = np.concatenate([self._slot, slots])
        self._stale[slots] = True
        prompts = self._rows.prompt_of_row[rows]
        self._position[slots] = self._lengths[prompts] + self._written.length[rows]
        return slots

    def _is_open(self, prompt: int) -> bool:
        """Whether rows of this prompt, which is being fed, have not begun."""
        return bool(self._unbegun[self._rows.prompt_of_row == prompt].any())

    def _close_prompt(self) -> None:
        """Forget the open prompt if all of its rows have begun."""
        opened = self._open_prompt
        if opened is not None and not self._is_open(opened.prompt):
            self._open_prompt = None

    def _prefill(self, prompts: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> list[Tensor]:
        """Feed prompts, int64 [prompts], whose keys go to the slots of those of these
        rows that have them. Returns the logits after them, in parts.
        """
        logits: list[Tensor] = []
        prompt_of_row = self._rows.prompt_of_row[rows]
        for part in self._feeder.split_prompts(prompts):
            cache = Cache(prefix=self._feeder.prefix, prefixes=self._prefixes)
            part_logits = self._feeder.prefill(cache, part, 0)
            logits.append(part_logits)
            in_part = np.isin(prompt_of_row, part)
            order = np.argsort(part)
            groups = order[np.searchsorted(part, prompt_of_row[in_part], sorter=order)]
            self._memory.keys.store_prompts(
                cache, self._feeder.to_device(groups), self._feeder.to_device(slots[in_part])
            )
            if self._is_open(part[-1]):
                self._open_prompt = _OpenPrompt(
                    prompt=int(part[-1]),
                    cache=_copy_last_group(cache),
                    logits=part_logits[-1:].clone(),
                )
        return logits

    def _draw_first(self, rows: np.ndarray, logits: Tensor) -> StepTokens:
        """Draw from logits [rows, vocabulary], in one copy as each step."""
        draws = uniform(self._rows.seeds[rows], self._written.length[rows])
        packed = torch.zeros(NUMBERS * len(rows), dtype=torch.int32, device=logits.device)
        draw_packed(
            logits,
            torch.from_numpy(draws).to(logits.device),
            self._task.how,
            packed.view(NUMBERS, -1),
        )
        numbers = self._memory.copies.start(packed).read()
        return self._unpack(numbers.reshape(NUMBERS, -1), rows)

    # Steps.

    def advance(self) -> StepTokens:
        """Read the step that was started last time, or start one; and start the next before that.
        Rows that were admitted in between are in the next one.
        """
        launched = self._ahead or self._launch()
        self._ahead = self._launch() if self._goes_on() else None
        numbers = launched.copy.read().reshape(NUMBERS, -1)
        # A row may have ended with the step before, after this one was started.
        live = np.isin(launched.rows, self._row)
        self._counts.rows += int(live.sum())
        self._counts.padded += launched.width - int(live.sum())
        self._counts.slots += self.slots
        return self._unpack(numbers[:, launched.slots[live]], launched.rows[live])

    def _goes_on(self) -> bool:
        """Whether a live row has room for one more token than have been started."""
        prompts = self._lengths[self._rows.prompt_of_row[self._row]]
        next_index = self._position[self._slot] - prompts + 1
        return bool((next_index < self._written.limit[self._row]).any())

    def _launch(self) -> _LaunchedStep:
        """Start a step of all live rows."""
        memory = self._memory
        self._upload()
        width = round_up(int(self._slot.max()) + 1, FEWEST_ROWS)
        longest = round_up_keys(int(self._position[self._slot].max()) + 1, FEWEST_KEYS)
        memory.reserve(memory.keys.slots, longest)
        compute = partial(self._compute, width, longest)
        memory.steps.run((width, longest, self._task.how), compute, memory.state)
        self._position[self._slot] += 1
        copy = memory.copies.start(memory.packed[: NUMBERS * width])
        return _LaunchedStep(rows=self._row, slots=self._slot, width=width, copy=copy)

    def _compute(self, width: int, longest: int) -> None:
        """Feed a token of each of the first slots, draw the next, and move on: a graph holds it, so
        nothing here comes from the host or waits for it.
        """
        memory = self._memory
        ids, positions, indices, seeds, live = memory.state[:, :width].unbind()
        lengths = None
        if memory.reads_lengths:
            lengths = make_key_lengths(positions, memory.keys.length, longest)
        attention_pass = StaticDecode(
            keys=memory.keys,
            rows=width,
            longest=longest,
            slots=torch.arange(width, device=ids.device),
            positions=positions,
            lengths=lengths,
        )
        logits = self._feeder.forward(ids, positions, attention_pass)
        packed = memory.packed[: NUMBERS * width].view(NUMBERS, width)
        tokens = draw_packed(logits, draw_uniform(seeds, indices), self._task.how, packed)
        ids.copy_(tokens * live)
        positions.add_(1).mul_(live)
        indices.add_(live)

    def _upload(self) -> None:
        """Tell the device of the rows that it does not know, and of the slots that are free."""
        slots = np.flatnonzero(self._stale)
        if not len(slots):
            return
        row_of_slot = np.full(len(self._stale), -1)
        row_of_slot[self._slot] = self._row
        rows = row_of_slot[slots]
        live = rows >= 0
        live_rows = rows[live]
        lengths = self._written.length[live_rows].astype(np.int64)
        positions = self._lengths[self._rows.prompt_of_row[live_rows]] + lengths - 1
        self._position[slots[live]] = positions
        changes = np.zeros((LIVE + 2, len(slots)), np.int64)
        changes[ID, live] = self._written.tokens[live_rows, lengths - 1]
        changes[POSITION, live] = positions
        changes[INDEX, live] = lengths
        changes[SEED, live] = self._rows.seeds[live_rows].view(np.int64)
        changes[LIVE] = live
        changes[-1] = slots
        uploaded = self._copy_to_device(changes)
        self._memory.state[:, uploaded[-1]] = uploaded[:-1]
        self._stale[slots] = False

    def _copy_to_device(self, numbers: np.ndarray) -> Tensor:
        """Copy without waiting for the step that is under way."""
        tensor = torch.from_numpy(numbers)
        if self._feeder.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._feeder.device, non_blocking=True)

    def _unpack(self, numbers: np.ndarray, rows: np.ndarray) -> StepTokens:
        try:
            return unpack_rows(numbers, rows, truncates=self._task.how.truncates)
        except KernelError:
            # A hidden key of NaN still makes NaN of what it is multiplied with.
            self._memory.release()
            raise

    # Rows leave.

    def drop(self, ended_rows: np.ndarray) -> None:
        """Free these rows' slots. The others move together once half of the slots that a step
        computes hold them, unless waiting rows will fill these.
        """
        ended = np.isin(self._row, ended_rows)
        self._stale[self._slot[ended]] = True
        self._row, self._slot = self._row[~ended], self._slot[~ended]
        self._leave_out_ahead()
        if len(self._row) and not self._unbegun.any():
            self._move_together()

    def _leave_out_ahead(self) -> None:
        """Leave rows that have ended out of the step that was started: what it draws for them is
        not theirs, even where they are live again by the time that it is read.
        """
        ahead = self._ahead
        if ahead is None:
            return
        live = np.isin(ahead.rows, self._row)
        self._ahead = None
        if live.any():
            self._ahead = replace(ahead, rows=ahead.rows[live], slots=ahead.slots[live])

    def _move_together(self) -> None:
        width = round_up(len(self._row), FEWEST_ROWS)
        moving = self._slot >= width
        if not moving.any():
            return
        source = self._slot[moving]
        target = np.setdiff1d(np.arange(width), self._slot)[: len(source)]
        length = int(self._position[self._slot].max())
        moves = self._copy_to_device(np.stack([source, target]))
        self._memory.keys.move(moves[0], moves[1], length)
        self._memory.state[:, moves[1]] = self._memory.state[:, moves[0]]
        self._position[target] = self._position[source]
        self._stale[target] = self._stale[source]
        self._stale[source] = True
        # `drop` has just made this array: a step that was started has another.
        self._slot[moving] = target

    # New weights.

    def renew(self) -> int:
        """Compute the keys of the prompts again, then those of what the rows have written."""
        prompts = np.unique(self._rows.prompt_of_row[self._row])
        if self._open_prompt is not None:
            opened = self._open_prompt.prompt
            prompts = np.append(prompts[prompts != opened], opened)
        waiting = self._rows.list_prompts()
        if self._has_joined and len(waiting):
            # Prompts that had not the same beginning may have left.
            self._feeder.find_prefix(waiting)
        self._ahead, self._open_prompt, self._prefixes = None, None, {}
        self._prefill(prompts, self._row, self._slot)
        # The last token of each row is fed by the next step.
        written = self._written.length[self._row].astype(np.int64) - 1
        contexts = self._lengths[self._rows.prompt_of_row[self._row]] + written
        # Copying a row's keys costs far less than feeding its tokens.
        cost = np.maximum(written, contexts // 4)
        for part in self._feeder.split(np.arange(len(written)), cost):
            if written[part].any():
                rows, slots, nothing = self._row[part], self._slot[part], np.zeros_like(part)
                self._feeder.fill(*self._lay_out_own(rows, slots, nothing, written[part]))
        self._stale[:] = True
        return int(self._lengths[prompts].sum() + written.sum())

    def _lay_out_own(
        self, rows: np.ndarray, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, StaticAgain]:
        """Lay out tokens begins .. ends - 1, int64 [rows], of the completions of these rows, which
        are in these slots: their ids and positions, int64 [tokens], and the pass over them.
        """
        to_device, lengths = self._feeder.to_device, ends - begins
        prompts = self._lengths[self._rows.prompt_of_row[rows]]
        width = int(lengths.max())
        segment, within = lay_out_segments(lengths)
        index = begins[segment] + within
        positions = prompts[segment] + index
        first_positions = prompts + begins
        again = StaticAgain(
            keys=self._memory.keys,
            slots=to_device(slots),
            positions=to_device(first_positions[:, None] + np.arange(width)),
            longest=int((prompts + ends).max()),
            token_slots=to_device(slots[segment]),
            token_positions=to_device(positions),
            place=to_device(segment * width + within),
        )
        return self._written.tokens[rows[segment], index], positions, again


def _copy_last_group(cache: Cache) -> Cache:
    """A cache of the last prompt of another one."""
    last_group = Cache(prefix=cache.prefix, prefixes=cache.prefixes)
    for layer, level in cache.prompts.items():
        last_group.prompts[layer] = Level(level.keys[-1:].clone(), level.values[-1:].clone())
    return last_group
