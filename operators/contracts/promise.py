"""Promises: what is tested, and how a broken one is told.

Owns: the value, and the exception with which a test says what it found. Does not own: any promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from hypothesis import reject

import dataflow
from dataflow.errors import DataError, GraphError

S = TypeVar("S")


class Broken(Exception):
    """A promise does not hold; the text says what was found, without a full stop."""

    def __init__(self, promise: str, problem: str) -> None:
        super().__init__(problem)
        self.promise = promise


_LANGUAGE = str(Path(dataflow.__file__).parent)


def refuse_case(error: Exception) -> None:
    """If an operator or a loss refuses its rows or parameters by a DataError or GraphError of its
    own, they are no case for it: it is tested on others.
    """
    if not isinstance(error, (DataError, GraphError)):
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(_LANGUAGE):
        reject()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise(Generic[S]):
    """says: what is promised, a clause. test: of a subject and generated rows, raises Broken.
    unless: why a subject does not promise it; empty if it does. rests_on: without these it is not
    judged. rows: how its rows are generated (generate.RowKind).
    """

    name: str
    says: str
    fix: str
    test: Callable[[S, Any], None]
    unless: Callable[[S], str] = lambda subject: ""
    rests_on: tuple[str, ...] = ()
    rows: Mapping[str, Any] = field(default_factory=dict)
