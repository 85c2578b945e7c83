"""Texts of many rows of token ids, in one call of the tokenizer.

Owns: when the library below transformers can decode for it. Does not own: what is decoded (text.py,
turn_parsing.py).

transformers decodes row by row, and looks at each id before: for a thousand rows that takes longer
than all else that is done with a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode_rows(
    inner: PreTrainedTokenizerBase, rows: Sequence[list[int]], *, special: bool
) -> list[str]:
    """The text of each row; special: with the texts of special tokens."""
    if _decodes_plainly(inner):
        return inner.backend_tokenizer.decode_batch(  # type: ignore[attr-defined]
            list(rows), skip_special_tokens=not special
        )
    texts: list[str] = []
    for ids in rows:
        text: str = inner.decode(  # type: ignore[assignment]
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        texts.append(text)
    return texts


def _decodes_plainly(inner: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer's text is that of the library below it: its class may do more to it."""
    from transformers import PreTrainedTokenizerFast  # type: ignore[attr-defined]

    if not isinstance(inner, PreTrainedTokenizerFast):
        return False
    kind = type(inner)
    usual = PreTrainedTokenizerFast
    return kind.decode is usual.decode and kind._decode is usual._decode
