"""TopLogprobs: log-probs together with the most likely tokens at each place.

Owns: the schema, and its subclasses of one number of tokens each. Does not own: other schemas
(schema.py), who computes them (operators/forward.py).

How many tokens there are is part of a column's type, so each number k has a schema of its own:
`TopLogprobs.of(8)` is TopLogprobs8, the same class each time. A module finds it by that name, so
that snapshots and processes can name it.
"""

from __future__ import annotations

import functools
import re
from typing import ClassVar

import pyarrow as pa

from dataflow.schema import POLICY, Logprobs, column

LARGEST = 1 << 24
"""More tokens than any vocabulary has."""


class TopLogprobs(Logprobs):
    """Log-probs, and at each completion token the k most likely tokens with theirs, best first.

    Read as tensors both are [tokens, k]. Over the same distribution as `logprobs`: with k the whole
    vocabulary they are all of it.
    """

    k: ClassVar[int] = 0
    """How many; 0 if any number will do, as in what a reader declares."""
    top_ids = column(pa.list_(pa.int32()), "T", doc="the most likely tokens, best first")
    top_logprobs = column(
        pa.list_(pa.float32()), "T", doc="their log-probabilities", distribution=POLICY
    )

    @staticmethod
    def of(k: int) -> type[TopLogprobs]:
        """The schema of k tokens each."""
        return _make_schema(k)


@functools.cache
def _make_schema(k: int) -> type[TopLogprobs]:
    ids_doc = TopLogprobs.columns["top_ids"].doc
    logprobs_doc = TopLogprobs.columns["top_logprobs"].doc
    id_lists, number_lists = pa.list_(pa.int32(), k), pa.list_(pa.float32(), k)
    body = {
        "__module__": __name__,
        "__doc__": f"TopLogprobs of {k} tokens each.",
        "k": k,
        "top_ids": column(id_lists, "T", doc=ids_doc),
        "top_logprobs": column(number_lists, "T", doc=logprobs_doc, distribution=POLICY),
    }
    return type(f"TopLogprobs{k}", (TopLogprobs,), body)


def __getattr__(name: str) -> type[TopLogprobs]:
    """TopLogprobs8 and the like. Raises AttributeError for anything else."""
    match = re.fullmatch(r"TopLogprobs([1-9]\d{0,8})", name)
    if match is None or int(match[1]) > LARGEST:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return TopLogprobs.of(int(match[1]))
