"""Vocabulary: token ids mean the same words to every reader (L12).

Owns: which Model's tokenizer made the ids of each port, and comparing tokenizer files on this
machine. Does not own: hub names, whose files the Workers compare at open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from dataflow.errors import DataError, Fault
from dataflow.loss_terms import row_sets
from dataflow.model import Model
from dataflow.model_files import TOKENIZER, token_ids
from dataflow.node import Node, Port
from dataflow.rows import reader_of
from dataflow.rules.context import Context, fault_at, place

PortId = tuple[int, int]


def check(context: Context) -> Iterator[Fault]:
    """Models that read or train on ids of another tokenizer."""
    made_by: dict[PortId, tuple[Model, ...]] = {}
    for node in context.graph.nodes:
        for model in _models(node) if _reads_ids(node) else ():
            yield from _compare(context, node, model, made_by)
        if node.operator.decodes:
            yield from _one_tokenizer(node, made_by)
        if node.operator.traits.generates:
            made_by |= {(id(node), i): (m,) for i, m in enumerate(_models(node))}
        elif node.operator.tokenises:
            made_by |= _tokenised(context, node, made_by)
        else:
            made_by |= _handed_on(node, made_by)


def _reads_ids(node: Node) -> bool:
    """Whether a node's Model is fed token ids; a generation is, if its prompts are ids."""
    reads = node.operator.work in ("forward", "train") or node.operator.traits.generates
    return reads and not node.operator.reads_text


def _models(node: Node) -> list[Model]:
    return [s for s in node.states.values() if isinstance(s, Model)]


def _key(port: Port) -> PortId:
    return (id(port.node), port.index)


def _tokenised(
    context: Context, node: Node, made_by: dict[PortId, tuple[Model, ...]]
) -> dict[PortId, tuple[Model, ...]]:
    """Texts of the data are tokenised for the first Model that reads the ids; prompts may be ids of
    another.
    """
    reader = reader_of(context.graph, node)
    asked = [m for port in node.inputs.values() for m in made_by.get(_key(port), ())]
    made_for = (*(_models(reader)[:1] if reader is not None else ()), *asked)
    return {_key(p): made_for for p in node.ports if p.schema.vocabulary and made_for}


def _handed_on(
    node: Node, made_by: dict[PortId, tuple[Model, ...]]
) -> dict[PortId, tuple[Model, ...]]:
    """A port of token ids has those of the inputs that it was made from: for select, of the same
    index, else of all.
    """
    handed = {}
    for index, schema in enumerate(node.schemas):
        if schema.vocabulary:
            port = node.inputs.get(f"port{index}")
            ports = [port] if port is not None else node.inputs.values()
            makers = tuple(dict.fromkeys(m for p in ports for m in made_by.get(_key(p), ())))
            if makers:
                handed[(id(node), index)] = makers
    return handed


def _compare(
    context: Context, node: Node, model: Model, made_by: dict[PortId, tuple[Model, ...]]
) -> Iterator[Fault]:
    first = [w.port for w in context.wires[id(node)] if w.port.schema.vocabulary][:1]
    for rows in row_sets(node).values() or first:
        yield from _of_makers(node, model, rows, made_by.get(_key(rows), ()))


def _of_makers(node: Node, model: Model, rows: Port, makers: tuple[Model, ...]) -> Iterator[Fault]:
    for maker in makers:
        problem = _difference(model, maker, rows.label)
        if not problem:
            continue
        fix = f"a {model.name} of the same tokenizer as {maker.name!r}"
        if "reads" in node.params:
            fix += ', or scores(..., reads="text")'
        elif node.operator.traits.generates:
            fix += ", or prompts that are text"
        where = place(node) if node.operator.work != "train" else f"train {model.name!r}"
        yield Fault(rule="vocabulary", where=where, problem=problem, fix=fix, origin=node.origin)


def _difference(model: Model, maker: Model, rows: str) -> str:
    """What is wrong with a Model that reads the token ids of another; empty if nothing is known."""
    mine, theirs = fingerprint(model.base), fingerprint(maker.base)
    if maker.base == model.base or mine is None or theirs is None or mine == theirs:
        return ""
    differs = f"vocabulary {mine[0][:4]} ({mine[1]:,} tokens) differs from {rows}'s {theirs[0][:4]}"
    return f"{differs} ({theirs[1]:,}): its token ids mean other words there"


def _one_tokenizer(node: Node, made_by: dict[PortId, tuple[Model, ...]]) -> Iterator[Fault]:
    """A node that reads token ids as text does so with one tokenizer."""
    makers = made_by.get(_key(node.inputs[node.operator.decodes]), ())
    for other in makers[1:]:
        if problem := _difference(makers[0], other, f"Model {other.name!r}"):
            fix = f"{node.operator.name} on the rows of each Model by itself"
            yield fault_at(node, "vocabulary", f"Model {makers[0].name!r}: {problem}", fix)


def fingerprint(base: str) -> tuple[str, int] | None:
    """(digest, tokens) of the tokenizer in a model directory; None if `base` is none."""
    file = Path(base).expanduser() / TOKENIZER
    if not file.is_file():
        return None
    stat = file.stat()
    try:
        return _fingerprint(str(file), stat.st_mtime_ns, stat.st_size)
    except DataError:  # a broken file is a fault of its Model (bases.py)
        return None


@lru_cache(maxsize=32)
def _fingerprint(file: str, modified: int, size: int) -> tuple[str, int]:
    """A digest of each token's id, whatever else the file says; modified and size: cache keys."""
    ids = token_ids(Path(file))
    text = json.dumps(sorted(ids.items(), key=lambda item: item[1]), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), len(ids)
