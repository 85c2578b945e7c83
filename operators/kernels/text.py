"""Text to token ids and back, with the tokenizer of a Model's directory.

Owns: chat templates, special tokens, and the hash that identifies a vocabulary. Does not own: which
tokens of a conversation are trained (conversations.py), what is generated. transformers is imported
at the first load.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Keys, Ragged, as_ragged
from dataflow.errors import DataError
from dataflow.model_files import ends_of, read_object
from dataflow.prompt_types import Message, is_messages, is_token_ids, messages_of
from operators.kernels.row_texts import decode_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IN_TEMPLATES = (
    *(ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What a template's own expressions raise; ValueError also where it drops the unfinished turn."""


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
        """Token ids of each text; special: add the tokenizer's special tokens, but none at the
        beginning of a text that begins with them itself.
        """
        if not texts:
            return []
        encoding = self.inner(
            list(texts),
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        ids: list[list[int]] = encoding["input_ids"]  # type: ignore[assignment]
        return self._without_second_begin(ids) if special else ids

    def encode_behind(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that follow others: without special tokens, and without the space that
        some tokenizers put before a text.
        """
        mark = _mark_of_begin(self)
        rows = self.encode([f"{mark}{text}" for text in texts], special=False)
        if not mark:
            return rows
        return [row[1:] for row in rows]

    def encode_prompts(self, prompts: Sequence[str] | Sequence[Sequence[Message]]) -> Ragged:
        """int32 ids of prompts, ready to be continued.

        Strings get the tokenizer's special tokens, but none behind them; message lists get the
        chat template with its generation prompt or, where the last turn is the assistant's, up to
        the end of what it said. Raises DataError for a prompt without tokens, and for messages if
        there is no chat template.
        """
        ids = self._prompt_ids(prompts)
        for index, row in enumerate(ids):
            if not row:
                raise DataError(f"prompt {index} of {len(ids)} has no tokens: {prompts[index]!r}.")
        return to_ragged(ids)

    def _prompt_ids(self, prompts: Sequence[str] | Sequence[Sequence[Message]]) -> list[list[int]]:
        if len(prompts) and not isinstance(prompts[0], str):
            texts = [self.render_prompt(list(prompt)) for prompt in prompts]  # type: ignore[arg-type]
            return self.encode(texts, special=False)
        return self._without_added_end(self.encode(prompts, special=True))  # type: ignore[arg-type]

    def encode_column(self, column: pa.Array) -> Ragged:
        """int32 ids of a column of prompts: token ids as they are, others as by encode_prompts. A
        prompt may have none.
        """
        if not is_token_ids(column.type):
            return to_ragged(self._prompt_ids(prompts_of(column)))
        ids = as_ragged(column)
        return Ragged(ids.values.astype(np.int32, copy=False), ids.offsets.astype(np.int64))

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
        rows = zip(prompts, answers, strict=True)
        if plain and not self.inner.chat_template:
            texts = [f"{prompt}{answer}" for prompt, answer in rows]
            ids = self.encode(texts, special=True)
        else:
            conversations = [append_answer(_messages(prompt), answer) for prompt, answer in rows]
            texts = self.render(conversations, generation=False)
            ids = self.encode(texts, special=False)
        for index, row in enumerate(ids):
            if not row:
                raise DataError(f"row {index} of {len(ids)} has no tokens: {prompts[index]!r:.80}.")
        return to_ragged(ids)

    def decode(self, ids: Ragged) -> list[str]:
        """The text of each row, without special tokens."""
        tokens = ids.values.tolist()
        offsets = ids.offsets.tolist()
        rows = [tokens[start:stop] for start, stop in itertools.pairwise(offsets)]
        return decode_rows(self.inner, rows, special=False)

    def text(self, ids: Sequence[int]) -> str:
        """The text of one row, without special tokens."""
        return self.inner.decode(  # type: ignore[return-value]
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def render_prompt(self, turns: list[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """A conversation, with tools, up to where the assistant is to write: after its last turn,
        if that is the last.
        """
        if not turns or turns[-1]["role"] != "assistant":
            return self.render([turns], generation=True, tools=tools)[0]
        begun = turns[-1].get("content")
        if begun is None:
            raise DataError(
                f"{self.base}: expected text in the assistant's turn that is to be continued, found"
                f" {turns[-1]!r:.80}. Fix: content, or end the prompt with another role's turn."
            )
        if not begun:
            return self.render([turns[:-1]], generation=True, tools=tools)[0]
        return self.render([turns], generation=False, unfinished=True, tools=tools)[0]

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        generation: bool,
        unfinished: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[str]:
        """Conversations by the chat template; generation: ending where the assistant begins;
        unfinished: ending with the content of the last message; tools: what the assistant may call.
        """
        if not self.inner.chat_template:
            raise DataError(
                f"{self.base}: message lists need a chat template, and its tokenizer has none. "
                "Fix: prompts that are strings, or a Model with a chat template."
            )
        from jinja2 import TemplateError  # transformers renders templates with it

        messages = [list(conversation) for conversation in conversations]
        if _reads_parts_alone(self):
            messages = [list(map(_in_parts, turns)) for turns in messages]
        try:
            texts = self.inner.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=generation,
                continue_final_message=unfinished,
                tools=[dict(tool) for tool in tools] or None,
            )
        except (TemplateError, *_IN_TEMPLATES) as error:
            problem = f"{error}"
            if not isinstance(error, (TemplateError, ValueError)):
                problem = f"{type(error).__name__}: {error}"
            raise DataError(
                f"{self.base}: expected a chat template that renders these messages, found:"
                f" {problem.rstrip('.'):.300}. Fix: the template, or messages with the roles that"
                " it knows."
            ) from error
        return texts  # type: ignore[return-value]

    def encode_pairs(self, prompts: Sequence[str] | Ragged, completions: Sequence[str]) -> Pairs:
        """Prompts by encode_prompts, ids as they are; completions without special tokens, plus eos
        unless they end with an end token themselves; mask all 1.
        """
        ids = [self._with_one_end(row) for row in self.encode(completions, special=False)]
        prompt_ids = prompts if isinstance(prompts, Ragged) else self.encode_prompts(prompts)
        return masked_pairs(prompt_ids, ids, _ones_for(ids))

    def encode_texts(self, texts: Sequence[str]) -> Pairs:
        """Plain texts: the first token (bos, if there is one) is the prompt: none predicts it."""
        ids = self._without_added_end(self.encode(texts, special=True))
        answers = [self._with_one_end(row[1:]) for row in ids]
        prompts = to_ragged([row[:1] for row in ids])
        return masked_pairs(prompts, answers, _ones_for(answers))

    def eos(self) -> int:
        """The id that ends a demonstration."""
        if not isinstance(self.inner.eos_token_id, int):
            raise DataError(
                f"{self.base}: its tokenizer has no eos token. Fix: eos_token in"
                " tokenizer_config.json."
            )
        return self.inner.eos_token_id

    def strip_ends(self, texts: Sequence[str]) -> list[str]:
        """Strip the end tokens that texts end with."""
        names = [self.inner.convert_ids_to_tokens(token) for token in sorted(self._end_ids())]
        ends = tuple(name for name in names if isinstance(name, str) and name)
        plain: list[str] = []
        for text in texts:
            while text.endswith(ends):
                end = next(end for end in ends if text.endswith(end))
                text = text.removesuffix(end)
            plain.append(text)
        return plain

    def _end_ids(self) -> frozenset[int]:
        return self.eos_ids | {self.eos()}

    def _with_one_end(self, ids: list[int]) -> list[int]:
        """With one end token as the last, the text's own if it has one."""
        ends = self._end_ids()
        while len(ids) > 1 and ids[-1] in ends and ids[-2] in ends:
            ids = ids[:-1]
        if ids and ids[-1] in ends:
            return ids
        return [*ids, self.eos()]

    def _without_added_end(self, rows: list[list[int]]) -> list[list[int]]:
        """Without the eos that some tokenizers add to every text."""
        _, end = _added_tokens(self)
        size = len(end)
        return [row[: len(row) - size] for row in rows]

    def _without_second_begin(self, rows: list[list[int]]) -> list[list[int]]:
        """Rows with special tokens, without those of the tokenizer where the text has them, too."""
        begin, _ = _added_tokens(self)
        if not begin:
            return rows
        size = len(begin)
        twice = [*begin, *begin]
        changed_rows: list[list[int]] = []
        for row in rows:
            if row[: 2 * size] == twice:
                row = row[size:]
            changed_rows.append(row)
        return changed_rows


def _ones_for(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """A mask under which every token is trained."""
    return [[1] * len(row) for row in rows]


@lru_cache(maxsize=16)
def _added_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and behind a text, such as bos."""
    plain: Any = tokenizer.inner("a", add_special_tokens=False)["input_ids"]
    whole: Any = tokenizer.inner("a", add_special_tokens=True)["input_ids"]
    size = len(plain)
    for start in range(len(whole) - size + 1):
        if whole[start : start + size] == plain:
            return whole[:start], whole[start + size :]
    return [], []


@lru_cache(maxsize=16)
def _mark_of_begin(tokenizer: Tokenizer) -> str:
    """A special token that takes the place of the space before a text; empty where there is none to
    be taken, or nothing takes it.
    """
    [plain] = tokenizer.encode(["a"], special=False)
    for mark in tokenizer.inner.all_special_tokens[:4]:
        [marked] = tokenizer.encode([f"{mark}a"], special=False)
        is_one_token = marked[:1] == [tokenizer.inner.convert_tokens_to_ids(mark)]
        if is_one_token and marked[1:] != plain:
            return mark
    return ""


def load_tokenizer(base: str) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or hub name. Raises DataError for anything
    else.
    """
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception for a broken file
        lines = [line for line in str(error).splitlines() if line.strip()]
        problem = lines[0] if lines else type(error).__name__
        raise DataError(
            f"{base}: expected a directory with a tokenizer, found: {problem:.240}. Fix: tokenizer"
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


def require_embedded_ids(node: str, model: str, ids: Ragged, keys: Keys, vocabulary: int) -> None:
    """Raise DataError for a row with a token id for which the Model has no embedding."""
    beyond = np.flatnonzero((ids.values >= vocabulary) | (ids.values < 0))
    if len(beyond):
        first = beyond[0]
        row = int(np.searchsorted(ids.offsets, first, side="right")) - 1
        raise DataError(
            f"{node}: row {keys.rows()[row]}: expected token ids below the {vocabulary} that Model"
            f" {model!r} knows, found {int(ids.values[first])}. Fix: the tokenizer that belongs"
            " to the Model."
        )


def vocabulary_hash(base: str) -> str:
    """16 hex digits, the same for tokenizers whose ids mean the same tokens."""
    vocabulary = load_tokenizer(base).inner.get_vocab()
    text = json.dumps(sorted(vocabulary.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def append_answer(prompt: Sequence[Message], answer: str) -> list[Message]:
    """Append an answer to a conversation: to its last turn if that is the assistant's, else as a
    turn of its own.
    """
    if prompt and prompt[-1]["role"] == "assistant":
        beginning = prompt[-1]["content"] or ""
        turn = {**prompt[-1], "content": f"{beginning}{answer}"}
        return [*prompt[:-1], turn]
    return [*prompt, {"role": "assistant", "content": answer}]


def prompts_of(column: pa.Array) -> list[str] | list[list[Message]]:
    """A prompt column that is not token ids as Python: strings, or lists of messages."""
    return messages_of(column) if is_messages(column.type) else column.to_pylist()


def to_ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """int32 rows of any lengths, packed."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    tokens = itertools.chain.from_iterable(rows)
    values = np.fromiter(tokens, dtype=np.int32, count=int(offsets[-1]))
    return Ragged(values, offsets)


def masked_pairs(
    prompt: Ragged | Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
) -> Pairs:
    """Rows of prompts, completions, and the masks of these."""
    if not isinstance(prompt, Ragged):
        prompt = to_ragged(prompt)
    completion = to_ragged(completions)
    mask = to_ragged(masks).values.astype(np.uint8)
    return Pairs(prompt=prompt, completion=completion, mask=completion.like(mask))


@lru_cache(maxsize=16)
def _reads_parts_alone(tokenizer: Tokenizer) -> bool:
    """Whether its chat template loses a content that is a text, and shows one in parts."""
    probe: Message = {"role": "user", "content": "probe"}
    return not _shows(tokenizer, probe) and _shows(tokenizer, _in_parts(probe))


def _shows(tokenizer: Tokenizer, probe: Message) -> bool:
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.inner.apply_chat_template([probe], tokenize=False)
        return "probe" in str(rendered)
    except (TemplateError, *_IN_TEMPLATES):  # it wants other roles, or another content
        return False


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _messages(prompt: str | Sequence[Message]) -> Sequence[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def _generation_eos(base: str) -> set[int]:
    """eos_token_id of generation_config.json: one id, several, or none."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        base,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return set()
    settings = read_object(Path(path))
    return set(ends_of(settings.get("eos_token_id"), path))
