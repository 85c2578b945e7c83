"""Graphs as JSON, and back: what a run folder keeps, and what `diff` and the page read.

Owns: the document and its version. Does not own: the written form of values (json_values.py),
declarations of a user's own parts (declarations.py), plans (engine), valid graphs (check.py).

    {"format": 3, "dialect": ..., "name": ..., "states": [...], "nodes": [...],
     "sinks": [node numbers], "declared": {...}}

Nodes are in the graph's order and refer to each other by number. A dialect that a node or a loss
leaves to the graph is null there and the graph's at the top: read again, it still follows the
graph, and both mean what they meant. Format 1 had no declarations, format 2 no dialect of a graph:
each node named its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dataflow.convention import DIALECTS
from dataflow.declarations import DeclaredParts, declarations
from dataflow.dialect import with_dialects
from dataflow.errors import Fault, GraphError, Origin
from dataflow.graph import Graph
from dataflow.json_values import (
    LOST,
    Imported,
    Parts,
    Plain,
    decode,
    encode,
    encode_operator,
    is_own_module,
    snapshot_error,
)
from dataflow.model import Buffer, Model, State, Table
from dataflow.node import Node
from dataflow.standins import made

__all__ = ["FORMAT", "decode", "encode", "fingerprint", "from_json", "modules", "to_json"]

FORMAT = 3
_FIX = "give the graph.json of a run folder"
_KINDS: dict[str, type[State]] = {"Model": Model, "Buffer": Buffer, "Table": Table}


def to_json(graph: Graph) -> str:
    """The graph as JSON text, two spaces deep, ending in a newline.

    Raises GraphError, naming the node, for a parameter of a kind that has no written form.
    """
    return json.dumps(graph_document(graph), indent=2, allow_nan=False) + "\n"


def graph_document(graph: Graph) -> dict[str, Any]:
    """What `to_json` writes, as values of JSON."""
    head = {"format": FORMAT, "dialect": graph.dialect}
    return head | _document_of(graph) | {"declared": declarations(graph)}


def _document_of(graph: Graph) -> dict[str, Any]:
    writer = _Writer(graph)
    return {
        "name": graph.name,
        "origin": origin_document(graph.origin),
        "states": [writer.state(state) for state in graph.states],
        "nodes": [writer.node(node) for node in graph.nodes],
        "sinks": [writer.numbers[id(sink)] for sink in graph.sinks],
    }


def from_json(text: str, where: str = "snapshot", *, imports: bool = True) -> Graph:
    """The graph again: equal to the one written, including origins. where: the text's name in
    errors.

    imports: import the user's functions, operators, losses and schemas, so that the graph can run:
    the writer of the text decides what is imported. False: they are represented by their
    declarations, nothing that the text names is imported or called, and the graph can be drawn,
    compared, checked and planned.

    Raises GraphError if the text is no snapshot, has a newer format, or names functions, classes or
    operators that are not found; all that no process can import at once, each with its node.
    """
    return graph_of(parsed(text, where), where, imports=imports)


def graph_of(document: Any, where: str, *, imports: bool) -> Graph:
    """The graph of what `graph_document` made. Raises as `from_json`."""
    _require_document(document, where)
    try:
        faults = list(_unimportable(document)) if imports else []
        if faults:
            raise GraphError(faults)
        return _Reader(
            document, Imported() if imports else DeclaredParts(document.get("declared") or {})
        ).graph()
    except RecursionError:
        raise snapshot_error(
            "expected a graph, found JSON that is nested too deep", _FIX, where
        ) from None


def modules(text: str) -> tuple[str, ...]:
    """The modules, sorted, that `from_json` imports besides this project's own."""
    return modules_of(parsed(text, "snapshot"))


def modules_of(document: Any) -> tuple[str, ...]:
    """The same, of what `graph_document` made."""
    _require_document(document, "snapshot")
    paths = {path for path in _paths(document["nodes"]) if ":" in path}
    return tuple(
        sorted({m for m in (path.partition(":")[0] for path in paths) if not is_own_module(m)})
    )


def _paths(entry: Any) -> Iterator[str]:
    if isinstance(entry, dict):
        for key, value in entry.items():
            if key in ("operator", "function", "class", "record") and isinstance(value, str):
                yield value
            else:
                yield from _paths(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from _paths(value)


def fingerprint(graph: Graph) -> str:
    """A digest that another process computes, too: of the snapshot without source lines and
    declarations, with the dialect of each node and term, whether its own or the graph's.

    Functions that no other process can import count by name, so for them it is weaker than
    `Graph.digest`.
    """
    document = {
        "format": 1,
        **_document_of(with_dialects(graph)),
    }  # the nodes' form is that of format 1, and so is the digest
    return digest_of(document)


def digest_of(document: Any) -> str:
    """A digest of a document without its source lines."""
    return hashlib.blake2b(json.dumps(_placeless(document)).encode(), digest_size=16).hexdigest()


def _placeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _placeless(part)
            for key, part in value.items()
            if key not in ("origin", "file", "line", "conventions")
        }
    return [_placeless(part) for part in value] if isinstance(value, list) else value


def origin_document(origin: Origin | None) -> dict[str, Any] | None:
    return None if origin is None else {"file": origin.file, "line": origin.line}


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.numbers = {id(node): i for i, node in enumerate(graph.nodes)}
        self.states = {state: i for i, state in enumerate(graph.states)}

    def state(self, state: State) -> dict[str, Any]:
        where = f"{type(state).__name__} {state.name!r}"
        fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        fields |= {"origin": Plain(origin_document(fields["origin"]))} if "origin" in fields else {}
        if isinstance(state, Buffer):
            fields["writer"] = Plain(self.numbers[id(state.writer)])
        elif fields.get("follows") is not None:
            fields["follows"] = Plain(self.states[fields["follows"]])
        return {"kind": type(state).__name__, **{k: encode(v, where) for k, v in fields.items()}}

    def node(self, node: Node) -> dict[str, Any]:
        where = f"node {node.name!r}"
        return {
            "name": node.name,
            "operator": encode_operator(node.operator),
            "origin": origin_document(node.origin),
            "states": {key: self.states[state] for key, state in node.states.items()},
            "inputs": {
                key: [self.numbers[id(port.node)], port.index] for key, port in node.inputs.items()
            },
            "params": {
                key: encode(value, f"{where}, parameter {key!r}")
                for key, value in node.params.items()
            },
            "schemas": [encode(schema, where) for schema in node.schemas],
        }


def parsed(text: str, where: str) -> Any:
    """The JSON of a text. Raises GraphError if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise snapshot_error(f"expected JSON, found {error}", _FIX, where) from None
    except (
        RecursionError,
        ValueError,
    ) as error:  # nested too deep; a number of thousands of digits
        raise snapshot_error(
            f"expected a graph, found JSON that cannot be read: {error}", _FIX, where
        ) from None


def _require_document(document: Any, where: str) -> None:
    """Raise GraphError unless it has a graph's keys and a known format."""
    if isinstance(document, dict) and "phases" in document:
        problem = "expected one graph, found a Program of several"
        raise snapshot_error(problem, "a command that takes Programs", where)
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, int) or not {"nodes", "states", "sinks", "name"} <= document.keys():
        raise snapshot_error(
            "expected a graph with its format number, found other JSON", _FIX, where
        )
    if found > FORMAT:
        fix = "read it with the dataflow-rl that wrote it, or a newer one"
        raise snapshot_error(
            f"it has format {found}, and this version reads up to {FORMAT}", fix, where
        )
    for key, kind in (("nodes", list), ("states", list), ("sinks", list), ("name", str)):
        if not isinstance(document[key], kind):
            raise snapshot_error(
                f"expected {key} to be a {kind.__name__}, found {document[key]!r:.60}", _FIX, where
            )


def _unimportable(document: Mapping[str, Any]) -> Iterator[Fault]:
    for entry in document["nodes"]:
        needed(entry, "node", name=str)
        yield from _lost(entry, entry.get("operator"), entry["name"])


def _lost(entry: Any, operator: Any, name: str) -> Iterator[Fault]:
    """A fault for each function or class in a node's entry that is there only by name."""
    if isinstance(entry, dict):
        if LOST in entry:
            path, at = str(entry[LOST]), str(entry.get("at", ""))
            what = "its operator" if entry is operator else "it holds"
            place = f" ({at.rsplit('/', 1)[-1]})" if at else ""
            problem = (
                f"{what} {path.rpartition(':')[2]!r}{place}, which no other process can import"
            )
            fix = (
                "a def or class at the top level of a module (a file that is not run as a script),"
                " by its own name; or graph= of resume and rerun in Python"
            )
            yield Fault(rule="snapshot", where=f"node {name!r}", problem=problem, fix=fix)
        for value in entry.values():
            yield from _lost(value, operator, name)
    elif isinstance(entry, list):
        for value in entry:
            yield from _lost(value, operator, name)


def needed(entry: Any, where: str, **kinds: type | tuple[type, ...]) -> Mapping[str, Any]:
    """An entry: an object with these keys, of these kinds. Raises GraphError."""
    for key, kind in kinds.items():
        if not isinstance(entry, dict) or key not in entry or not isinstance(entry[key], kind):
            found = repr(entry.get(key, "nothing")) if isinstance(entry, dict) else repr(entry)
            raise snapshot_error(
                f"expected an entry with its {key}, found {found:.60}", _FIX, where
            )
    return entry


def _at(number: Any, there: list[Any], where: str) -> Any:
    """The element with this number among those read so far. Raises GraphError."""
    if type(number) is not int or not 0 <= number < len(there):
        raise snapshot_error(
            f"expected a number below {len(there)}, found {number!r:.60}", _FIX, where
        )
    return there[number]


class _Reader:
    """Makes nodes in order; a State when a node first needs it, as a Buffer needs its writer."""

    def __init__(self, document: Mapping[str, Any], parts: Parts) -> None:
        self.document = document
        self.parts = parts
        self.nodes: list[Node] = []
        self.states: dict[int, State] = {}
        self.making: set[int] = set()

    def graph(self) -> Graph:
        for entry in self.document["nodes"]:
            self.nodes.append(self._node(entry))
        sinks = [_at(i, self.nodes, "sinks") for i in self.document["sinks"]]
        dialect = self.document.get("dialect", "trl")
        if dialect not in DIALECTS:
            expected = f"expected a dialect of {', '.join(DIALECTS)}"
            raise snapshot_error(f"{expected}, found {dialect!r:.60}", _FIX, "dialect")
        origin = read_origin(self.document.get("origin"))
        return Graph(self.document["name"], *sinks, dialect=dialect, origin=origin)

    def _node(self, entry: Any) -> Node:
        needed(entry, "node", name=str)
        where = f"node {entry['name']!r:.60}"
        needed(
            entry, where, operator=(str, dict), states=dict, inputs=dict, params=dict, schemas=list
        )
        schemas = tuple(decode(schema, where, self.parts) for schema in entry["schemas"])
        if not all(isinstance(schema, type) and hasattr(schema, "columns") for schema in schemas):
            raise snapshot_error(f"expected schemas, found {schemas!r:.60}", _FIX, where)
        return Node(
            self.parts.operator(entry["operator"], where),
            entry["name"],
            states={key: self._state(i) for key, i in entry["states"].items()},
            inputs={key: self._port(place, where) for key, place in entry["inputs"].items()},
            params={
                key: decode(value, where, self.parts) for key, value in entry["params"].items()
            },
            schemas=schemas,
            origin=read_origin(entry.get("origin")),
        )

    def _port(self, place: Any, where: str) -> Any:
        if not isinstance(place, list) or len(place) != 2:
            raise snapshot_error(
                f"expected a node's number and its output's, found {place!r:.60}", _FIX, where
            )
        return _at(place[1], list(_at(place[0], self.nodes, where).ports), where)

    def _state(self, number: Any) -> State:
        entry = _at(number, self.document["states"], "states")
        if number in self.making:
            raise snapshot_error("it follows itself", _FIX, f"state {number}")
        if number not in self.states:
            self.making.add(number)
            self.states[number] = self._made(
                dict(needed(entry, f"state {number}", kind=str, name=str))
            )
            self.making.discard(number)
        return self.states[number]

    def _made(self, fields: dict[str, Any]) -> State:
        where = f"{fields['kind']} {fields['name']!r:.60}"
        kind = _KINDS.get(fields.pop("kind"))
        if kind is None:
            raise snapshot_error(f"expected a kind of {', '.join(_KINDS)}", _FIX, where)
        own: dict[str, Any] = (
            {"origin": read_origin(fields.pop("origin"))} if "origin" in fields else {}
        )
        if "writer" in fields:
            own["writer"] = _at(fields.pop("writer"), self.nodes, where)
        if fields.get("follows") is not None:
            own["follows"] = self._state(fields.pop("follows"))
        return made(
            kind,
            {key: decode(value, where, self.parts) for key, value in fields.items()} | own,
            where,
        )


def read_origin(entry: Any) -> Origin | None:
    return None if entry is None else Origin(**needed(entry, "origin", file=str, line=int))
