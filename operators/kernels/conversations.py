"""Conversations as token ids, in which what the assistant says is trained.

Owns: where each of the assistant's turns begins and ends in what a chat template renders, and the
mask. Does not own: rendering and tokens (text.py), which turn is the first of the completion.

Most templates render a longer conversation as a continuation of a shorter one; then each turn is
what the next rendering adds (`_growing_stretches`). Others render the last answer otherwise than
earlier ones: Qwen3's leaves the reasoning of earlier turns out, Phi's puts a second end behind the
last. There the turns are found in the whole conversation (`_cut_stretches`), and trained as it
shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.kernels.text import Pairs, Tokenizer, masked_pairs

_MARKS = ("first", "other")
"""Contents that differ in their first and last letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a rendered conversation. end: of an answer, at which end token of the stretch it is
    over, from 0 on; -1 for the last one.
    """

    text: str
    spoken: bool
    end: int = -1


def encode_conversations(
    tokenizer: Tokenizer,
    turns: Sequence[Sequence[Message]],
    first: Sequence[int],
    assistant_only: bool,
    place: Callable[[int], str] | None = None,
) -> Pairs:
    """Conversations; message `first[i]` is the first of the completion. place: of a row, in errors.

    The prompt has the ids that generation would see there. Each later stretch is tokenized by
    itself, as an episode would append it. The mask is 1 on assistant turns up to their end token;
    with assistant_only=False on all turns. Raises DataError for a conversation that the template
    cannot render, and where it does not show an answer as generation begins it.
    """
    prompts: list[list[int]] = []
    completions: list[list[int]] = []
    masks: list[list[int]] = []
    for index, (conversation, begin) in enumerate(zip(turns, first, strict=True)):
        try:
            prompt, completion, mask = _encode(tokenizer, list(conversation), begin, assistant_only)
        except DataError as error:
            if place is None:
                raise
            raise DataError(f"{place(index)}: {error}") from error
        prompts.append(prompt)
        completions.append(completion)
        masks.append(mask)
    return masked_pairs(prompts, completions, masks)


def _encode(
    tokenizer: Tokenizer, turns: list[Message], first: int, assistant_only: bool
) -> tuple[list[int], list[int], list[int]]:
    """Encode one conversation: the ids of its prompt, those of its completion, and the mask."""
    stretches = _growing_stretches(tokenizer, turns, first)
    if not stretches:
        stretches = _cut_stretches(tokenizer, turns, first)
    prompt, *parts = tokenizer.encode([stretch.text for stretch in stretches], special=False)
    ids: list[int] = []
    mask: list[int] = []
    for part, stretch in zip(parts, stretches[1:], strict=True):
        trained = _answer_length(part, stretch, tokenizer.eos_ids)
        if trained > 1 and part[trained - 1] == part[trained - 2] in tokenizer.eos_ids:
            # The message ends in the end token's text already, and the template adds it again.
            part = [*part[: trained - 1], *part[trained:]]
            trained -= 1
        ids += part
        untrained = 0 if assistant_only else 1
        mask += [1] * trained + [untrained] * (len(part) - trained)
    end = _length_to_last_end(ids, tokenizer.eos_ids)
    if not end or ids[end - 1] not in tokenizer.eos_ids:
        return prompt, [*ids, tokenizer.eos()], [*mask, 1]
    return prompt, ids[:end], mask[:end]


def _answer_length(ids: Sequence[int], stretch: Stretch, eos_ids: frozenset[int]) -> int:
    """How many tokens of a stretch the assistant wrote."""
    if not stretch.spoken:
        return 0
    if stretch.end < 0:
        return _length_to_last_end(ids, eos_ids)
    return _end_positions(ids, eos_ids)[stretch.end] + 1


def _length_to_last_end(ids: Sequence[int], eos_ids: frozenset[int]) -> int:
    """How many tokens there are up to and including the last end; all if there is none."""
    ends = _end_positions(ids, eos_ids)
    return ends[-1] + 1 if ends else len(ids)


def _end_positions(ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    return [index for index, token in enumerate(ids) if token in eos_ids]


# --- each rendering continues the one before ------------------------------------------------------


def _growing_stretches(tokenizer: Tokenizer, turns: list[Message], first: int) -> list[Stretch]:
    """What each turn adds to the rendering of those before; nothing if a turn changes them."""
    renderings = _renderings(tokenizer, turns, first)
    before, _ = next(renderings)
    stretches = [Stretch(text=before, spoken=False)]
    for text, spoken in renderings:
        if not text.startswith(before):
            return []
        if len(text) > len(before):
            stretches.append(Stretch(text=text[len(before) :], spoken=spoken))
        before = text
    return stretches


def _renderings(
    tokenizer: Tokenizer, turns: list[Message], first: int
) -> Iterator[tuple[str, bool]]:
    """The conversation up to each place where somebody begins or ends, and whether the assistant
    wrote what is new.
    """
    for index in range(first, len(turns)):
        spoken = _is_answer(turns[index])
        if spoken or index == first:
            yield _render(tokenizer, turns[:index], generation=spoken), False
        yield _render(tokenizer, turns[: index + 1]), spoken


# --- turns in the whole conversation --------------------------------------------------------------


def _cut_stretches(tokenizer: Tokenizer, turns: list[Message], first: int) -> list[Stretch]:
    """Cut the rendering of the whole conversation where the assistant begins.

    Raises DataError if an answer does not begin as generation begins it, or if it is not known
    where it ends.
    """
    rendered = _render(tokenizer, turns)
    answers = [index for index in range(first, len(turns)) if _is_answer(turns[index])]
    cut_turns = {first, *answers}
    starts = {index: _find_start(tokenizer, turns, rendered, index, answers) for index in cut_turns}
    order = sorted(starts)
    bounds = [*(starts[index] for index in order), len(rendered)]
    stretches = [Stretch(text=rendered[: bounds[0]], spoken=False)]
    for index, (start, stop) in zip(order, pairwise(bounds), strict=True):
        end = -1
        if index in answers and index < len(turns) - 1:
            end = _find_end_token(tokenizer, turns, rendered, index, range(start, stop))
        spoken = index in answers
        stretches.append(Stretch(text=rendered[start:stop], spoken=spoken, end=end))
    return stretches


def _find_start(
    tokenizer: Tokenizer, turns: list[Message], rendered: str, index: int, answers: Sequence[int]
) -> int:
    """Find where a turn begins: behind what generation would see, or else at its content.

    The last answer has to begin as generation begins it. Earlier ones may not: reasoning that is
    left out of them is left out with its beginning.
    """
    before = _render(tokenizer, turns[:index], generation=index in answers)
    if rendered.startswith(before):
        return len(before)
    start, _ = _content_span(tokenizer, turns, rendered, index)
    if start is None or index == max(answers, default=index):
        raise DataError(_begun_otherwise(tokenizer, turns, rendered, index, before))
    return start


def _find_end_token(
    tokenizer: Tokenizer, turns: list[Message], rendered: str, index: int, stretch: range
) -> int:
    """Find which of a stretch's end tokens is the first behind the content of its answer.

    Raises DataError if the content of the turn or of the next one cannot be found, or if no end
    token stands between them.
    """
    _, stop = _content_span(tokenizer, turns, rendered, index)
    following, _ = _content_span(tokenizer, turns, rendered, index + 1)
    if stop is None or following is None or stop < stretch.start:
        raise DataError(
            f"{tokenizer.base}: expected a chat template that shows the content of each turn, found"
            f" none of {turns[index]!r:.120} or of the turn behind it. Fix: a row for each answer,"
            " or another template."
        )
    answer = rendered[stretch.start : stop]
    rest = rendered[stop : min(following, stretch.stop)]
    within, behind = tokenizer.encode([answer, rest], special=False)
    if not any(token in tokenizer.eos_ids for token in behind):
        raise DataError(
            f"{tokenizer.base}: expected a token that ends the answer {answer!r:.60}, one of"
            f" {sorted(tokenizer.eos_ids)}, found {rest!r:.60} behind it. Fix: eos_token_id in"
            " generation_config.json with the id that ends a turn, or a row for each answer."
        )
    return sum(token in tokenizer.eos_ids for token in within)


def _content_span(
    tokenizer: Tokenizer, turns: list[Message], rendered: str, index: int
) -> tuple[int | None, int | None]:
    """Where the content of a turn begins and ends, by what changes with it; None where the content
    itself changes what is around it.
    """
    one, other = (_render(tokenizer, _replace_content(turns, index, content)) for content in _MARKS)
    if one == other:
        return None, None
    before = one[: count_same_beginning(one, other)]
    same_end = count_same_beginning(one[::-1], other[::-1])
    behind = one[len(one) - same_end :]
    start = stop = None
    if rendered.startswith(before):
        start = len(before)
    if rendered.endswith(behind):
        stop = len(rendered) - len(behind)
    return start, stop


def count_same_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count how many letters of two texts, or elements of two lists, are the same from their
    beginning on.
    """
    most = min(len(one), len(other))
    differing = (index for index in range(most) if one[index] != other[index])
    return next(differing, most)


def _replace_content(turns: list[Message], index: int, content: str) -> list[Message]:
    turn = {**turns[index], "content": content}
    return [*turns[:index], turn, *turns[index + 1 :]]


def _begun_otherwise(
    tokenizer: Tokenizer, turns: list[Message], rendered: str, index: int, generated: str
) -> str:
    """The error for an answer whose beginning is not what generation would see, `generated`."""
    same = count_same_beginning(generated, rendered)
    plain = _render(tokenizer, turns[:index])
    what = "renders earlier turns differently once an answer follows"
    if same >= len(plain):
        what = "begins an answer that is to be generated otherwise than one that it is given"
    fix = "prompt and completion as texts, rendered as they are to be trained, or another template"
    shown_from = max(0, same - 20)
    return (
        f"{tokenizer.base}: the chat template {what}: expected {generated[shown_from:]!r:.80},"
        f" found {rendered[shown_from:]!r:.80}. What is trained would not be what is"
        f" generated. Fix: {fix}."
    )


def _render(tokenizer: Tokenizer, turns: list[Message], *, generation: bool = False) -> str:
    return tokenizer.render([turns], generation=generation)[0]


def _is_answer(turn: Message) -> bool:
    return turn["role"] == "assistant"
