"""Text to token ids and back, with the tokenizer of a Model's directory.

Owns: chat templates, special tokens, cutting a conversation into prompt and completion, and the
hash that identifies a vocabulary. Does not own: what is generated or trained. transformers is
imported at the first load.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Keys, Ragged, ragged
from dataflow.errors import DataError
from dataflow.model_files import ends_of, read_object
from dataflow.prompt_types import is_messages, is_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IN_TEMPLATES = (
    *(ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What a template's own expressions raise; ValueError also where it drops the unfinished turn."""

Message = dict[str, Any]
"""OpenAI style: role, content and whatever else a template reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Prompts and completions as token ids, row by row. mask: uint8 on the completions' offsets."""

    prompt: Ragged
    completion: Ragged
    mask: Ragged


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A transformers tokenizer, and the ids that end an answer."""

    base: str
    inner: PreTrainedTokenizerBase
    eos_ids: frozenset[int]

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Token ids of each text; special: add the tokenizer's special tokens."""
        if not texts:
            return []
        made = self.inner(
            list(texts),
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return made["input_ids"]  # type: ignore[return-value]

    def encode_prompts(self, prompts: Sequence[str] | Sequence[Sequence[Message]]) -> Ragged:
        """int32 ids of prompts, ready to be continued.

        Strings get the tokenizer's special tokens, but no eos at the end; message lists get the
        chat template with its generation prompt or, where the last turn is the assistant's, up to
        the end of what it said. Raises DataError for a prompt without tokens, and for messages if
        there is no chat template.
        """
        if len(prompts) and not isinstance(prompts[0], str):
            texts = [self._asked(list(prompt)) for prompt in prompts]  # type: ignore[arg-type]
            ids = self.encode(texts, special=False)
        else:
            ids = [self._open_ended(row) for row in self.encode(prompts, special=True)]  # type: ignore[arg-type]
        for index, row in enumerate(ids):
            if not row:
                raise DataError(f"prompt {index} of {len(ids)} has no tokens: {prompts[index]!r}.")
        return to_ragged(ids)

    def encode_column(self, column: pa.Array) -> Ragged:
        """int32 ids of a column of prompts: token ids as they are, others by encode_prompts."""
        if not is_token_ids(column.type):
            return self.encode_prompts(prompts_of(column))
        ids = ragged(column)
        return Ragged(ids.values.astype(np.int32, copy=False), ids.offsets.astype(np.int64))

    def encode_turn(self, said: str) -> list[int]:
        """The ids from the end of an assistant's answer, its end of turn included, over the user's
        next turn to where the assistant begins again.

        The turn is rendered behind a conversation of two short turns and tokenised by itself, as
        `encode_conversations` does with what follows an answer. Raises DataError if there is no
        chat template, or one that does not show the answer unchanged.
        """
        answer = "answer"
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        turns.append({"role": "user", "content": said})
        shown = self.render([turns], generation=True)[0]
        _, found, rest = shown.partition(answer)
        if not found or said.strip() not in rest:
            raise DataError(
                f"{self.base}: expected a chat template that shows an answer and the user's next"
                f" turn as they are, found {shown!r:.200}. Fix: another template, or leave then="
                " out."
            )
        return self.encode([rest], special=False)[0]

    def encode_answered(
        self, prompts: Sequence[str] | Sequence[Sequence[Message]], answers: Sequence[str]
    ) -> Ragged:
        """int32 ids of prompts with their answers, as a reward model reads them.

        With a chat template: a conversation that ends in the assistant's answer, in which a prompt
        that is text is the user's turn. Without one, text prompts are followed by their answer, as
        one text with the tokenizer's special tokens. Raises DataError for a row without tokens, and
        for messages if there is no chat template.
        """
        plain = not len(prompts) or isinstance(prompts[0], str)
        if plain and not self.inner.chat_template:
            texts = [f"{p}{a}" for p, a in zip(prompts, answers, strict=True)]
            ids = self.encode(texts, special=True)
        else:
            rows = zip(prompts, answers, strict=True)
            spoken = [answered(_messages(prompt), answer) for prompt, answer in rows]
            ids = self.encode(self.render(spoken, generation=False), special=False)
        for index, row in enumerate(ids):
            if not row:
                raise DataError(f"row {index} of {len(ids)} has no tokens: {prompts[index]!r:.80}.")
        return to_ragged(ids)

    def decode(self, ids: Ragged) -> list[str]:
        """The text of each row, without special tokens."""
        values, offsets = ids.values.tolist(), ids.offsets.tolist()
        rows = [values[a:b] for a, b in itertools.pairwise(offsets)]
        return self.inner.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def text(self, ids: Sequence[int]) -> str:
        """The text of one row, without special tokens."""
        return self.inner.decode(  # type: ignore[return-value]
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _asked(self, turns: list[Message]) -> str:
        """A conversation up to where the assistant is to write: after its last turn, if that is the
        last.
        """
        if not turns or turns[-1]["role"] != "assistant":
            return self.render([turns], generation=True)[0]
        begun = turns[-1].get("content")
        if begun is None:
            raise DataError(
                f"{self.base}: expected text in the assistant's turn that is to be continued, found"
                f" {turns[-1]!r:.80}. Fix: content, or end the prompt with another role's turn."
            )
        if not begun:
            return self.render([turns[:-1]], generation=True)[0]
        return self.render([turns], generation=False, unfinished=True)[0]

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        generation: bool,
        unfinished: bool = False,
    ) -> list[str]:
        """Conversations by the chat template; generation: ending where the assistant begins;
        unfinished: ending with the content of the last message.
        """
        if not self.inner.chat_template:
            raise DataError(
                f"{self.base}: message lists need a chat template, and its tokenizer has none. "
                "Fix: prompts that are strings, or a Model with a chat template."
            )
        from jinja2 import TemplateError  # transformers renders templates with it

        try:
            made = self.inner.apply_chat_template(
                [list(c) for c in conversations],
                tokenize=False,
                add_generation_prompt=generation,
                continue_final_message=unfinished,
            )
        except (TemplateError, *_IN_TEMPLATES) as error:
            plain = isinstance(error, (TemplateError, ValueError))
            said = f"{error}" if plain else f"{type(error).__name__}: {error}"
            raise DataError(
                f"{self.base}: expected a chat template that renders these messages, found:"
                f" {said.rstrip('.'):.300}. Fix: the template, or messages with the roles that it"
                " knows."
            ) from error
        return made  # type: ignore[return-value]

    def encode_pairs(self, prompts: Sequence[str] | Ragged, completions: Sequence[str]) -> Pairs:
        """Prompts by encode_prompts, ids as they are; completions without special tokens, plus eos;
        mask all 1.
        """
        ids = [[*row, self.eos()] for row in self.encode(completions, special=False)]
        asked = prompts if isinstance(prompts, Ragged) else self.encode_prompts(prompts)
        return _pairs(asked, ids, [[1] * len(row) for row in ids])

    def encode_texts(self, texts: Sequence[str]) -> Pairs:
        """Plain texts: the first token (bos, if there is one) is the prompt: none predicts it."""
        ids = [self._open_ended(row) for row in self.encode(texts, special=True)]
        answers = [[*row[1:], self.eos()] for row in ids]
        return _pairs(
            to_ragged([row[:1] for row in ids]), answers, [[1] * len(row) for row in answers]
        )

    def encode_conversations(
        self, turns: Sequence[Sequence[Message]], first: Sequence[int], assistant_only: bool
    ) -> Pairs:
        """Conversations; message `first[i]` is the first of the completion.

        The prompt has the ids that generation would see there. Each later stretch is tokenized by
        itself, as an episode would append it. The mask is 1 on assistant turns up to their eos;
        with assistant_only=False on all turns. Raises DataError if the template does not render a
        longer conversation as a continuation of a shorter one.
        """
        rows = [
            self._conversation(list(t), f, assistant_only)
            for t, f in zip(turns, first, strict=True)
        ]
        return _pairs(to_ragged([r[0] for r in rows]), [r[1] for r in rows], [r[2] for r in rows])

    def eos(self) -> int:
        """The id that ends a demonstration."""
        if not isinstance(self.inner.eos_token_id, int):
            raise DataError(
                f"{self.base}: its tokenizer has no eos token. Fix: eos_token in"
                " tokenizer_config.json."
            )
        return self.inner.eos_token_id

    def _open_ended(self, ids: list[int]) -> list[int]:
        """Without the eos that some tokenizers add to every text."""
        return ids[:-1] if ids and ids[-1] == self.inner.eos_token_id else ids

    def _conversation(
        self, turns: list[Message], first: int, assistant_only: bool
    ) -> tuple[list[int], ...]:
        stretches = self._stretches(turns, first)
        parts = self.encode([text for text, _ in stretches], special=False)
        ids: list[int] = []
        mask: list[int] = []
        for part, (_, spoken) in zip(parts[1:], stretches[1:], strict=True):
            trained = self._up_to_eos(part) if spoken else 0
            ids += part
            mask += (
                [1] * len(part)
                if not assistant_only
                else [1] * trained + [0] * (len(part) - trained)
            )
        end = self._up_to_eos(ids)
        if not end or ids[end - 1] not in self.eos_ids:
            return parts[0], [*ids, self.eos()], [*mask, 1]
        return parts[0], ids[:end], mask[:end]

    def _stretches(self, turns: list[Message], first: int) -> list[tuple[str, bool]]:
        """The rendered text cut at assistant turns, each part with whether the assistant spoke."""
        parts: list[tuple[str, bool]] = []
        done = ""
        for index in range(first, len(turns)):
            spoken = turns[index]["role"] == "assistant"
            if spoken or index == first:
                done = self._cut(
                    parts, done, self.render([turns[:index]], generation=spoken)[0], False
                )
            done = self._cut(
                parts, done, self.render([turns[: index + 1]], generation=False)[0], spoken
            )
        return parts

    def _cut(self, parts: list[tuple[str, bool]], done: str, text: str, spoken: bool) -> str:
        if not text.startswith(done):
            raise DataError(
                f"{self.base}: the chat template renders earlier turns differently once later ones"
                " follow, so a conversation cannot be cut into turns. Fix: one assistant turn a"
                " row, or another template."
            )
        if len(text) > len(done) or not parts:
            parts.append((text[len(done) :], spoken))
        return text

    def _up_to_eos(self, ids: list[int]) -> int:
        """How many tokens there are up to and including the last eos; all if there is none."""
        ends = [i for i, token in enumerate(ids) if token in self.eos_ids]
        return ends[-1] + 1 if ends else len(ids)


def load_tokenizer(base: str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or hub name. Raises DataError for anything else."""
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception for a broken file
        said = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise DataError(
            f"{base}: expected a directory with a tokenizer, found: {said:.240}. Fix: tokenizer"
            " files that belong together, as save_pretrained writes them."
        ) from error
    ends = _generation_eos(base) or {inner.eos_token_id} - {None}
    return Tokenizer(base, inner, frozenset(ends))


def require_ends(
    node: str, model: str, tokenizer: Tokenizer, vocabulary: int, *, stops: bool
) -> None:
    """Raise DataError unless an answer can end, by an id that the Model can write or a stop string.

    vocabulary: the Model knows the ids below this number.
    """
    ends = tokenizer.eos_ids
    if not ends and not stops:
        raise DataError(
            f"{node}: Model {model!r}: expected a token that ends an answer, found no eos_token in"
            f" {tokenizer.base}. Fix: eos_token in tokenizer_config.json, or stop=."
        )
    if ends and not any(0 <= end < vocabulary for end in ends):
        raise DataError(
            f"{node}: Model {model!r}: expected an end of sequence below its vocabulary of"
            f" {vocabulary}, found {sorted(ends)} in {tokenizer.base}. Fix: eos_token_id in"
            " generation_config.json."
        )


def require_known(node: str, model: str, ids: Ragged, keys: Keys, vocabulary: int) -> None:
    """Raise DataError for a row with a token id for which the Model has no embedding."""
    beyond = np.flatnonzero((ids.values >= vocabulary) | (ids.values < 0))
    if len(beyond):
        row = int(np.searchsorted(ids.offsets, beyond[0], side="right")) - 1
        raise DataError(
            f"{node}: row {keys.rows()[row]}: expected token ids below the {vocabulary} that Model"
            f" {model!r} knows, found {int(ids.values[beyond[0]])}. Fix: the tokenizer that belongs"
            " to the Model."
        )


def vocabulary_hash(base: str) -> str:
    """16 hex digits, the same for tokenizers whose ids mean the same tokens."""
    pairs = sorted(load_tokenizer(base).inner.get_vocab().items())
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=8).hexdigest()


def answered(prompt: Sequence[Message], answer: str) -> list[Message]:
    """The conversation after an answer, which goes on with the last turn if that is the
    assistant's.
    """
    if prompt and prompt[-1]["role"] == "assistant":
        said = prompt[-1]["content"] or ""
        return [*prompt[:-1], {**prompt[-1], "content": f"{said}{answer}"}]
    return [*prompt, {"role": "assistant", "content": answer}]


def prompts_of(column: pa.Array) -> list[str] | list[list[Message]]:
    """A prompt column that is not token ids as Python: strings, or lists of messages."""
    values = column.to_pylist()
    if not is_messages(column.type):
        return values
    return [[_without_nulls(message) for message in row] for row in values]


def to_ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """int32 rows of any lengths, packed."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.fromiter(
        itertools.chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1])
    )
    return Ragged(values, offsets)


def _pairs(
    prompt: Ragged, completions: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
) -> Pairs:
    completion = to_ragged(completions)
    return Pairs(
        prompt=prompt,
        completion=completion,
        mask=completion.like(to_ragged(masks).values.astype(np.uint8)),
    )


def _messages(prompt: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _without_nulls(message: Message) -> Message:
    """Arrow gives every message the fields of all messages; a template must see only its own."""
    return {
        name: value
        for name, value in message.items()
        if value is not None or name in ("role", "content")
    }


def _generation_eos(base: str) -> set[int]:
    """eos_token_id of generation_config.json: one id, several, or none."""
    from transformers.utils.hub import cached_file

    found = cached_file(
        base,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return set()
    return set(ends_of(read_object(Path(found)).get("eos_token_id"), found))
