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
from dataflow.rules.context import Context, fault_at, name_node, node_models

PortId = tuple[int, int]
ModelsByPort = dict[PortId, tuple[Model, ...]]
"""The Models whose tokenizers made the ids of a port."""


def check_vocabularies(context: Context) -> Iterator[Fault]:
    """Models that read or train on ids of another tokenizer."""
    made_by: ModelsByPort = {}
    for node in context.graph.nodes:
        if _reads_ids(node):
            for model in node_models(node):
                yield from _check_reader(context, node, model, made_by)
        if node.operator.decodes:
            yield from _check_decoder(node, made_by)
        if node.operator.traits.generates:
            for index, model in enumerate(node_models(node)):
                made_by[id(node), index] = (model,)
        elif node.operator.tokenises:
            made_by |= _find_tokenizers(context, node, made_by)
        else:
            made_by |= _pass_on(node, made_by)


def _reads_ids(node: Node) -> bool:
    """Whether a node's Model is fed token ids; a generation is, if its prompts are ids."""
    reads = node.operator.work in ("forward", "train") or node.operator.traits.generates
    return reads and not node.operator.reads_text


def _port_id(port: Port) -> PortId:
    return (id(port.node), port.index)


def _find_tokenizers(context: Context, node: Node, made_by: ModelsByPort) -> ModelsByPort:
    """Texts of the data are tokenised for the first Model that reads the ids; prompts may be ids of
    another.
    """
    models: list[Model] = []
    reader = reader_of(context.graph, node)
    if reader is not None:
        models += node_models(reader)[:1]
    for port in node.inputs.values():
        models += made_by.get(_port_id(port), ())
    if not models:
        return {}
    token_ports = [port for port in node.ports if port.schema.vocabulary]
    return {_port_id(port): tuple(models) for port in token_ports}


def _pass_on(node: Node, made_by: ModelsByPort) -> ModelsByPort:
    """A port of token ids has those of the inputs that it was made from: for select, of the same
    index, else of all.
    """
    passed_on: ModelsByPort = {}
    for index, schema in enumerate(node.schemas):
        if not schema.vocabulary:
            continue
        ports = list(node.inputs.values())
        if (port := node.inputs.get(f"port{index}")) is not None:
            ports = [port]
        makers: dict[Model, None] = {}
        for source in ports:
            makers |= dict.fromkeys(made_by.get(_port_id(source), ()))
        if makers:
            passed_on[id(node), index] = tuple(makers)
    return passed_on


def _check_reader(
    context: Context, node: Node, model: Model, made_by: ModelsByPort
) -> Iterator[Fault]:
    token_ports = [w.port for w in context.wires[id(node)] if w.port.schema.vocabulary]
    for rows in row_sets(node).values() or token_ports[:1]:
        for maker in made_by.get(_port_id(rows), ()):
            yield from _check_tokenizers(node, model, maker, rows)


def _check_tokenizers(node: Node, model: Model, maker: Model, rows: Port) -> Iterator[Fault]:
    """model: what reads these rows; maker: the one whose tokenizer made their ids."""
    problem = _describe_difference(model, maker, rows.label)
    if not problem:
        return
    fix = f"a {model.name} of the same tokenizer as {maker.name!r}"
    if "reads" in node.params:
        fix += ', or scores(..., reads="text")'
    elif node.operator.traits.generates:
        fix += ", or prompts that are text"
    where = name_node(node) if node.operator.work != "train" else f"train {model.name!r}"
    yield Fault(rule="vocabulary", where=where, problem=problem, fix=fix, origin=node.origin)


def _describe_difference(model: Model, maker: Model, rows: str) -> str:
    """What is wrong with a Model that reads the token ids of another; empty if nothing is known."""
    if maker.base == model.base:
        return ""
    vocabulary, other = digest_tokenizer(model.base), digest_tokenizer(maker.base)
    if vocabulary is None or other is None or vocabulary == other:
        return ""
    digest, count = vocabulary
    other_digest, other_count = other
    differs = f"vocabulary {digest[:4]} ({count:,} tokens) differs from {rows}'s {other_digest[:4]}"
    return f"{differs} ({other_count:,}): its token ids mean other words there"


def _check_decoder(node: Node, made_by: ModelsByPort) -> Iterator[Fault]:
    """A node that reads token ids as text does so with one tokenizer."""
    makers = made_by.get(_port_id(node.inputs[node.operator.decodes]), ())
    for other in makers[1:]:
        problem = _describe_difference(makers[0], other, f"Model {other.name!r}")
        if problem:
            fix = f"{node.operator.name} on the rows of each Model by itself"
            yield fault_at(node, "vocabulary", f"Model {makers[0].name!r}: {problem}", fix)


def digest_tokenizer(base: str) -> tuple[str, int] | None:
    """(digest, tokens) of the tokenizer in a model directory; None if `base` is none."""
    file = Path(base).expanduser() / TOKENIZER
    if not file.is_file():
        return None
    stat = file.stat()
    try:
        return _digest_file(str(file), stat.st_mtime_ns, stat.st_size)
    except DataError:  # a broken file is a fault of its Model (bases.py)
        return None


@lru_cache(maxsize=32)
def _digest_file(file: str, modified: int, size: int) -> tuple[str, int]:
    """A digest of each token's id, whatever else the file says. modified, size: what tells a
    changed file from the one that is cached.
    """
    ids = token_ids(Path(file))
    in_order = sorted(ids.items(), key=lambda token_and_id: token_and_id[1])
    text = json.dumps(in_order, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), len(ids)
