"""Conversations as token ids, in which what the assistant says is trained.

Owns: where each of the assistant's turns begins and ends in what a chat template renders, and the
mask. Does not own: rendering and tokens (text.py), which turn is the first of the completion.

Most templates render a longer conversation as a continuation of a shorter one; then each turn is
what the next rendering adds (`_growing`). Others render the last answer otherwise than earlier
ones: Qwen3's leaves the reasoning of earlier turns out, Phi's puts a second end behind the last.
There the turns are found in the whole conversation (`_whole`), and trained as it shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    rows = []
    for index, (conversation, begin) in enumerate(zip(turns, first, strict=True)):
        try:
            rows.append(_encoded(tokenizer, list(conversation), begin, assistant_only))
        except DataError as error:
            if place is None:
                raise
            raise DataError(f"{place(index)}: {error}") from error
    prompts, completions, masks = ([row[part] for row in rows] for part in range(3))
    return masked_pairs(prompts, completions, masks)


def _encoded(
    tokenizer: Tokenizer, turns: list[Message], first: int, assistant_only: bool
) -> tuple[list[int], list[int], list[int]]:
    stretches = _growing(tokenizer, turns, first) or _whole(tokenizer, turns, first)
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
    ends = [index for index, token in enumerate(ids) if token in eos_ids]
    return ends[stretch.end] + 1


def _length_to_last_end(ids: Sequence[int], eos_ids: frozenset[int]) -> int:
    """How many tokens there are up to and including the last end; all if there is none."""
    ends = [index for index, token in enumerate(ids) if token in eos_ids]
    return ends[-1] + 1 if ends else len(ids)


# --- each rendering continues the one before ------------------------------------------------------


def _growing(tokenizer: Tokenizer, turns: list[Message], first: int) -> list[Stretch]:
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
            yield tokenizer.render([turns[:index]], generation=spoken)[0], False
        yield tokenizer.render([turns[: index + 1]], generation=False)[0], spoken


# --- turns in the whole conversation --------------------------------------------------------------


def _whole(tokenizer: Tokenizer, turns: list[Message], first: int) -> list[Stretch]:
    """The whole conversation, cut where the assistant begins.

    Raises DataError if an answer does not begin as generation begins it, or if it is not known
    where it ends.
    """
    shown = tokenizer.render([turns], generation=False)[0]
    answers = [index for index in range(first, len(turns)) if _is_answer(turns[index])]
    cuts = {index: _start(tokenizer, turns, shown, index, answers) for index in {first, *answers}}
    order = sorted(cuts)
    bounds = [*(cuts[index] for index in order), len(shown)]
    stretches = [Stretch(text=shown[: bounds[0]], spoken=False)]
    for index, (start, stop) in zip(order, pairwise(bounds), strict=True):
        end = -1
        if index in answers and index < len(turns) - 1:
            end = _end_token(tokenizer, turns, shown, index, range(start, stop))
        spoken = index in answers
        stretches.append(Stretch(text=shown[start:stop], spoken=spoken, end=end))
    return stretches


def _start(
    tokenizer: Tokenizer, turns: list[Message], shown: str, index: int, answers: Sequence[int]
) -> int:
    """Where a turn begins: behind what generation would see, or else at its content.

    The last answer has to begin as generation begins it. Earlier ones may not: reasoning that is
    left out of them is left out with its beginning.
    """
    asked = tokenizer.render([turns[:index]], generation=index in answers)[0]
    if shown.startswith(asked):
        return len(asked)
    start, _ = _content_span(tokenizer, turns, shown, index)
    if start is None or index == max(answers, default=index):
        raise DataError(_begun_otherwise(tokenizer, turns, shown, index, asked))
    return start


def _end_token(
    tokenizer: Tokenizer, turns: list[Message], shown: str, index: int, stretch: range
) -> int:
    """Which of the end tokens of a stretch is the first behind the content of its answer."""
    _, stop = _content_span(tokenizer, turns, shown, index)
    following, _ = _content_span(tokenizer, turns, shown, index + 1)
    if stop is None or following is None or stop < stretch.start:
        raise DataError(
            f"{tokenizer.base}: expected a chat template that shows the content of each turn, found"
            f" none of {turns[index]!r:.120} or of the turn behind it. Fix: a row for each answer,"
            " or another template."
        )
    answer, rest = shown[stretch.start : stop], shown[stop : min(following, stretch.stop)]
    within, behind = tokenizer.encode([answer, rest], special=False)
    if not any(token in tokenizer.eos_ids for token in behind):
        raise DataError(
            f"{tokenizer.base}: expected a token that ends the answer {answer!r:.60}, one of"
            f" {sorted(tokenizer.eos_ids)}, found {rest!r:.60} behind it. Fix: eos_token_id in"
            " generation_config.json with the id that ends a turn, or a row for each answer."
        )
    return sum(token in tokenizer.eos_ids for token in within)


def _content_span(
    tokenizer: Tokenizer, turns: list[Message], shown: str, index: int
) -> tuple[int | None, int | None]:
    """Where the content of a turn begins and ends, by what changes with it; None where the content
    itself changes what is around it.
    """
    one, other = (
        tokenizer.render([_replaced(turns, index, mark)], generation=False)[0] for mark in _MARKS
    )
    if one == other:
        return None, None
    before = one[: _same_letters(one, other)]
    behind = one[len(one) - _same_letters(one[::-1], other[::-1]) :]
    start = len(before) if shown.startswith(before) else None
    stop = len(shown) - len(behind) if shown.endswith(behind) else None
    return start, stop


def _same_letters(one: str, other: str) -> int:
    """How many letters two texts have in common at their beginning."""
    most = min(len(one), len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)


def _replaced(turns: list[Message], index: int, content: str) -> list[Message]:
    return [*turns[:index], {**turns[index], "content": content}, *turns[index + 1 :]]


def _begun_otherwise(
    tokenizer: Tokenizer, turns: list[Message], shown: str, index: int, asked: str
) -> str:
    """Why the rows before an answer are not what generation would see."""
    same = _same_letters(asked, shown)
    plain = tokenizer.render([turns[:index]], generation=False)[0]
    what = "renders earlier turns differently once an answer follows"
    if same >= len(plain):
        what = "begins an answer that is to be generated otherwise than one that it is given"
    fix = "prompt and completion as texts, rendered as they are to be trained, or another template"
    return (
        f"{tokenizer.base}: the chat template {what}: expected {asked[max(0, same - 20) :]!r:.80},"
        f" found {shown[max(0, same - 20) :]!r:.80}. What is trained would not be what is"
        f" generated. Fix: {fix}."
    )


def _is_answer(turn: Message) -> bool:
    return turn["role"] == "assistant"
