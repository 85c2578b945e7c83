"""The tables of `dataflow top` of Steps that are trained in parts, and of rows that wait.

Owns: their columns and cells. Does not own: the other tables (flow_tables.py), widths (table.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from rich.text import Text

from dataflow.safe_text import one_line
from engine.keep.flow.records import Flow
from engine.protocol.progress import PartState, StreamProgress
from engine.watch.top.table import TableColumn, table_lines


def stream_table(flow: Flow, width: int) -> Iterator[Text]:
    """The watermark of each streamed source, its rows that have ended, and its parts."""
    sources: list[str] = []
    ended: list[str] = []
    watermarks: list[str] = []
    waiting: list[str] = []
    training: list[str] = []
    parts: list[str] = []
    for source, stream in flow.streams.items():
        sources.append(one_line(source))
        ended.append(f"{stream.ended_rows:,}/{stream.rows:,}")
        watermarks.append(f"{stream.watermark:,}")
        waiting.append(f"{stream.waiting_tokens:,}")
        training.append(_tokens_in_training(stream))
        parts.append(_parts(stream))
    name_column = TableColumn(title="", cells=sources)
    ended_column = TableColumn(title="ended", cells=ended)
    watermark_column = TableColumn(title="watermark", cells=watermarks)
    waiting_column = TableColumn(title="tokens waiting", cells=waiting, rank=3)
    training_column = TableColumn(title="in training", cells=training, rank=2)
    parts_column = TableColumn(title="parts", cells=parts, right=False, rank=1)
    columns = [
        name_column,
        ended_column,
        watermark_column,
        waiting_column,
        training_column,
        parts_column,
    ]
    return table_lines(columns, width)


def _parts(stream: StreamProgress) -> str:
    """`2 summed, 1 training, 3 ready`."""
    counts = Counter(part.state for part in stream.parts)
    words: list[str] = []
    for state in reversed(get_args(PartState)):
        if counts[state]:
            words.append(f"{counts[state]} {state}")
    return ", ".join(words) or "-"


def _tokens_in_training(stream: StreamProgress) -> str:
    """`part 3, 4,096`: its number, and tokens of its answers."""
    for number, part in enumerate(stream.parts, start=1):
        if part.state == "training":
            return f"part {number}, {part.tokens:,}"
    return "-"


def pool_table(flow: Flow, width: int) -> Iterator[Text]:
    """Rows that wait with the coordinator, and those that each replica has under way."""
    nodes: list[str] = []
    waiting: list[str] = []
    under_way: list[str] = []
    credits: list[str] = []
    for node, pool in flow.pools.items():
        for worker, rows in pool.under_way.items():
            nodes.append(one_line(f"{node} {worker}"))
            waiting.append(f"{pool.waiting_rows:,}")
            under_way.append(f"{rows:,}/{pool.slots:,}")
            credits.append(f"{pool.credit:,}")
    name_column = TableColumn(title="", cells=nodes)
    rows_column = TableColumn(title="under way/slots", cells=under_way)
    credit_column = TableColumn(title="credit", cells=credits, rank=2)
    waiting_column = TableColumn(title="waiting", cells=waiting, rank=1)
    columns = [name_column, rows_column, credit_column, waiting_column]
    return table_lines(columns, width)
