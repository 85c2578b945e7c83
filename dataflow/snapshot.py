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
from dataflow.standins import make_instance

__all__ = ["FORMAT", "decode", "encode", "fingerprint", "from_json", "modules", "to_json"]

FORMAT = 3
_FIX = "give the graph.json of a run folder"
_KINDS: dict[str, type[State]] = {"Model": Model, "Buffer": Buffer, "Table": Table}


def to_json(graph: Graph) -> str:
    """Write the graph as JSON text, two spaces deep, ending in a newline.

    Raises GraphError, naming the node, for a parameter of a kind that has no written form.
    """
    return json.dumps(graph_document(graph), indent=2, allow_nan=False) + "\n"


def graph_document(graph: Graph) -> dict[str, Any]:
    """What `to_json` writes, as values of JSON."""
    head = {"format": FORMAT, "dialect": graph.dialect}
    return head | _content_document(graph) | {"declared": declarations(graph)}


def _content_document(graph: Graph) -> dict[str, Any]:
    """What every format has: the name, the origin, the States, the nodes and the sinks."""
    writer = _Writer(graph)
    return {
        "name": graph.name,
        "origin": origin_document(graph.origin),
        "states": [writer.state(state) for state in graph.states],
        "nodes": [writer.node(node) for node in graph.nodes],
        "sinks": [writer.numbers[id(sink)] for sink in graph.sinks],
    }


def from_json(text: str, where: str = "snapshot", *, imports: bool = True) -> Graph:
    """Read the graph again: equal to the one written, including origins. where: the text's name in
    errors.

    imports: import the user's functions, operators, losses and schemas, so that the graph can run:
    the writer of the text decides what is imported. False: they are represented by their
    declarations, nothing that the text names is imported or called, and the graph can be drawn,
    compared, checked and planned.

    Raises GraphError if the text is no snapshot, has a newer format, or names functions, classes or
    operators that are not found; all that no process can import at once, each with its node.
    """
    return graph_of(parse_json(text, where), where, imports=imports)


def graph_of(document: Any, where: str, *, imports: bool) -> Graph:
    """The graph of what `graph_document` made. Raises as `from_json`."""
    _require_document(document, where)
    try:
        if imports:
            # Before anything is imported: all that no process can import is reported at once.
            faults = list(_find_unimportable(document))
            if faults:
                raise GraphError(faults)
            parts: Parts = Imported()
        else:
            parts = DeclaredParts(document.get("declared") or {})
        return _Reader(document, parts).graph()
    except RecursionError:
        raise snapshot_error(
            "expected a graph, found JSON that is nested too deep", _FIX, where
        ) from None


def modules(text: str) -> tuple[str, ...]:
    """The modules, sorted, that `from_json` imports besides this project's own."""
    return modules_of(parse_json(text, "snapshot"))


def modules_of(document: Any) -> tuple[str, ...]:
    """The same, of what `graph_document` made."""
    _require_document(document, "snapshot")
    names: set[str] = set()
    for path in _list_paths([document["nodes"], document["states"]]):
        module, colon, _ = path.partition(":")
        if colon and not is_own_module(module):
            names.add(module)
    return tuple(sorted(names))


def _list_paths(entry: Any) -> Iterator[str]:
    """The paths that an entry names, at any depth."""
    if isinstance(entry, dict):
        for key, part in entry.items():
            if key in ("operator", "function", "class", "record") and isinstance(part, str):
                yield part
            else:
                yield from _list_paths(part)
    elif isinstance(entry, list):
        for part in entry:
            yield from _list_paths(part)


def fingerprint(graph: Graph) -> str:
    """A digest that another process computes, too: of the snapshot without source lines and
    declarations, with the dialect of each node and term, whether its own or the graph's.

    Functions that no other process can import count by name, so for them it is weaker than
    `Graph.digest`.
    """
    # With a dialect at each node its form is that of format 1, and so is the digest.
    document = {"format": 1, **_content_document(with_dialects(graph))}
    return digest_of(document)


def digest_of(document: Any) -> str:
    """A digest of a document without its source lines."""
    text = json.dumps(_without_lines(document))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _without_lines(entry: Any) -> Any:
    """The same entry without source lines, and without what only describes a declaration."""
    if isinstance(entry, dict):
        left_out = ("origin", "file", "line", "conventions")
        return {key: _without_lines(part) for key, part in entry.items() if key not in left_out}
    if isinstance(entry, list):
        return [_without_lines(part) for part in entry]
    return entry


def origin_document(origin: Origin | None) -> dict[str, Any] | None:
    """An origin as it is written, which `read_origin` reads."""
    return None if origin is None else {"file": origin.file, "line": origin.line}


class _Writer:
    """Writes States and nodes, which refer to each other by their numbers."""

    def __init__(self, graph: Graph) -> None:
        self.numbers = {id(node): i for i, node in enumerate(graph.nodes)}
        self.states = {state: i for i, state in enumerate(graph.states)}

    def state(self, state: State) -> dict[str, Any]:
        """One entry of `states`."""
        where = f"{type(state).__name__} {state.name!r}"
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        if fields.get("adapter", LOST) is None:
            # A Model without one has the digest that it had before there were any.
            del fields["adapter"]
        if "origin" in fields:
            fields["origin"] = Plain(origin_document(fields["origin"]))
        if isinstance(state, Buffer):
            fields["writer"] = Plain(self.numbers[id(state.writer)])
        elif fields.get("follows") is not None:
            fields["follows"] = Plain(self.states[fields["follows"]])
        entry: dict[str, Any] = {"kind": type(state).__name__}
        for name, field_value in fields.items():
            entry[name] = encode(field_value, where)
        return entry

    def node(self, node: Node) -> dict[str, Any]:
        """One entry of `nodes`."""
        where = f"node {node.name!r}"
        inputs: dict[str, list[int]] = {}
        for name, port in node.inputs.items():
            inputs[name] = [self.numbers[id(port.node)], port.index]
        params: dict[str, Any] = {}
        for name, param in node.params.items():
            params[name] = encode(param, f"{where}, parameter {name!r}")
        return {
            "name": node.name,
            "operator": encode_operator(node.operator),
            "origin": origin_document(node.origin),
            "states": {name: self.states[state] for name, state in node.states.items()},
            "inputs": inputs,
            "params": params,
            "schemas": [encode(schema, where) for schema in node.schemas],
        }


def parse_json(text: str, where: str) -> Any:
    """Parse a snapshot's JSON. Raises GraphError if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise snapshot_error(f"expected JSON, found {error}", _FIX, where) from None
    except (RecursionError, ValueError) as error:
        # It is nested too deep, or has a number of thousands of digits.
        problem = f"expected a graph, found JSON that cannot be read: {error}"
        raise snapshot_error(problem, _FIX, where) from None


def _require_document(document: Any, where: str) -> None:
    """Raise GraphError unless it has a graph's keys and a known format."""
    if isinstance(document, dict) and "phases" in document:
        problem = "expected one graph, found a Program of several"
        raise snapshot_error(problem, "a command that takes Programs", where)
    format_number = document.get("format") if isinstance(document, dict) else None
    keys = {"nodes", "states", "sinks", "name"}
    if not isinstance(format_number, int) or not keys <= document.keys():
        raise snapshot_error(
            "expected a graph with its format number, found other JSON", _FIX, where
        )
    if format_number > FORMAT:
        problem = f"it has format {format_number}, and this version reads up to {FORMAT}"
        fix = "read it with the dataflow-rl that wrote it, or a newer one"
        raise snapshot_error(problem, fix, where)
    for key, kind in (("nodes", list), ("states", list), ("sinks", list), ("name", str)):
        if not isinstance(document[key], kind):
            problem = f"expected {key} to be a {kind.__name__}, found {document[key]!r:.60}"
            raise snapshot_error(problem, _FIX, where)


def _find_unimportable(document: Mapping[str, Any]) -> Iterator[Fault]:
    """A fault for all that no process can import, node by node."""
    for entry in document["nodes"]:
        require_keys(entry, "node", name=str)
        yield from _find_lost(entry, entry.get("operator"), f"node {entry['name']!r}")
    for entry in document["states"]:
        require_keys(entry, "state", kind=str, name=str)
        yield from _find_lost(entry, None, f"{entry['kind']} {entry['name']!r}")


def _find_lost(entry: Any, operator: Any, where: str) -> Iterator[Fault]:
    """A fault for each function or class in the entry of a node or a State of which only the name
    was written. operator: the entry of a node's operator.
    """
    if isinstance(entry, dict):
        if LOST in entry:
            what = "its operator" if entry is operator else "it holds"
            yield _lost_fault(entry, what, where)
        for part in entry.values():
            yield from _find_lost(part, operator, where)
    elif isinstance(entry, list):
        for part in entry:
            yield from _find_lost(part, operator, where)


def _lost_fault(entry: Mapping[str, Any], what: str, where: str) -> Fault:
    qualname = str(entry[LOST]).rpartition(":")[2]
    at = str(entry.get("at", ""))
    place = f" ({at.rsplit('/', 1)[-1]})" if at else ""
    problem = f"{what} {qualname!r}{place}, which no other process can import"
    fix = (
        "a def or class at the top level of a module (a file that is not run as a script),"
        " by its own name; or graph= of resume and rerun in Python"
    )
    return Fault(rule="snapshot", where=where, problem=problem, fix=fix)


def require_keys(entry: Any, where: str, **kinds: type | tuple[type, ...]) -> Mapping[str, Any]:
    """The entry itself, if it is an object with these keys, of these kinds. Raises GraphError."""
    for key, kind in kinds.items():
        if not isinstance(entry, dict) or key not in entry or not isinstance(entry[key], kind):
            content = entry.get(key, "nothing") if isinstance(entry, dict) else entry
            problem = f"expected an entry with its {key}, found {content!r:.60}"
            raise snapshot_error(problem, _FIX, where)
    return entry


def _pick(number: Any, elements: list[Any], where: str) -> Any:
    """The element with this number among those read so far. Raises GraphError."""
    if type(number) is not int or not 0 <= number < len(elements):
        raise snapshot_error(
            f"expected a number below {len(elements)}, found {number!r:.60}", _FIX, where
        )
    return elements[number]


class _Reader:
    """Makes nodes in order; a State when a node first needs it, as a Buffer needs its writer.
    making: the numbers of States that are being made, so that one that follows itself is refused.
    """

    def __init__(self, document: Mapping[str, Any], parts: Parts) -> None:
        self.document = document
        self.parts = parts
        self.nodes: list[Node] = []
        self.states: dict[int, State] = {}
        self.making: set[int] = set()

    def graph(self) -> Graph:
        """Read all of the document."""
        for entry in self.document["nodes"]:
            self.nodes.append(self._read_node(entry))
        sinks = [_pick(number, self.nodes, "sinks") for number in self.document["sinks"]]
        dialect = self.document.get("dialect", "trl")
        if dialect not in DIALECTS:
            expected = f"expected a dialect of {', '.join(DIALECTS)}"
            raise snapshot_error(f"{expected}, found {dialect!r:.60}", _FIX, "dialect")
        origin = read_origin(self.document.get("origin"))
        return Graph(self.document["name"], *sinks, dialect=dialect, origin=origin)

    def _read_node(self, entry: Any) -> Node:
        require_keys(entry, "node", name=str)
        where = f"node {entry['name']!r:.60}"
        require_keys(
            entry, where, operator=(str, dict), states=dict, inputs=dict, params=dict, schemas=list
        )
        schemas = tuple(decode(schema, where, self.parts) for schema in entry["schemas"])
        if not all(isinstance(schema, type) and hasattr(schema, "columns") for schema in schemas):
            raise snapshot_error(f"expected schemas, found {schemas!r:.60}", _FIX, where)
        operator = self.parts.operator(entry["operator"], where)
        states = {name: self._read_state(number) for name, number in entry["states"].items()}
        inputs = {name: self._read_port(place, where) for name, place in entry["inputs"].items()}
        params = self._decode_fields(entry["params"], where)
        origin = read_origin(entry.get("origin"))
        return Node(
            operator,
            entry["name"],
            states=states,
            inputs=inputs,
            params=params,
            schemas=schemas,
            origin=origin,
        )

    def _read_port(self, place: Any, where: str) -> Any:
        if not isinstance(place, list) or len(place) != 2:
            problem = f"expected a node's number and its output's, found {place!r:.60}"
            raise snapshot_error(problem, _FIX, where)
        node: Node = _pick(place[0], self.nodes, where)
        return _pick(place[1], list(node.ports), where)

    def _read_state(self, number: Any) -> State:
        entry = _pick(number, self.document["states"], "states")
        if number in self.making:
            raise snapshot_error("it follows itself", _FIX, f"state {number}")
        if number not in self.states:
            self.making.add(number)
            fields = dict(require_keys(entry, f"state {number}", kind=str, name=str))
            self.states[number] = self._make_state(fields)
            self.making.discard(number)
        return self.states[number]

    def _make_state(self, fields: dict[str, Any]) -> State:
        where = f"{fields['kind']} {fields['name']!r:.60}"
        kind = _KINDS.get(fields.pop("kind"))
        if kind is None:
            raise snapshot_error(f"expected a kind of {', '.join(_KINDS)}", _FIX, where)
        # These refer to other entries; only the rest are values.
        references: dict[str, Any] = {}
        if "origin" in fields:
            references["origin"] = read_origin(fields.pop("origin"))
        if "writer" in fields:
            references["writer"] = _pick(fields.pop("writer"), self.nodes, where)
        if fields.get("follows") is not None:
            references["follows"] = self._read_state(fields.pop("follows"))
        return make_instance(kind, self._decode_fields(fields, where) | references, where)

    def _decode_fields(self, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {name: decode(part, where, self.parts) for name, part in entry.items()}


def read_origin(entry: Any) -> Origin | None:
    """The origin that `origin_document` wrote. Raises GraphError."""
    if entry is None:
        return None
    return Origin(**require_keys(entry, "origin", file=str, line=int))
