"""Graphs as JSON, and back: what a run folder keeps, and what `diff` and the page read.

Owns: the format and its version, and how functions, classes and operators are found again
by path. Does not own: plans (engine), nor what a graph may be (check.py).

    {"format": 1, "name": ..., "states": [...], "nodes": [...], "sinks": [node numbers]}

Nodes are in the graph's order and name each other by number. Plain JSON values stand for
themselves; all else is an object of one key that says what it is: {"tuple": [...]},
{"function": "module:qualname"}, {"record": "module:Class", "fields": {...}}, ...
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.errors import Fault, GraphError, Origin, nearest
from dataflow.graph import Graph
from dataflow.loss import LossDeclaration, LossFunction
from dataflow.model import Buffer, State
from dataflow.node import Node, importable
from dataflow.operator import Operator
from dataflow.user import OperatorDeclaration

FORMAT = 1

_LOST = "local"
"""The key of a function or class that no other process can find: written with its name and place, never read."""


def to_json(graph: Graph) -> str:
    """The graph as JSON text, two spaces deep, ending in a newline.

    Raises GraphError for a parameter of a kind that has no written form, naming the node.
    """
    writer = _Writer(graph)
    document = {
        "format": FORMAT,
        "name": graph.name,
        "origin": _origin(graph.origin),
        "states": [writer.state(state) for state in graph.states],
        "nodes": [writer.node(node) for node in graph.nodes],
        "sinks": [writer.numbers[id(sink)] for sink in graph.sinks],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def from_json(text: str, where: str = "snapshot") -> Graph:
    """The graph again: equal to the one written, origins included. where: what the text is called in an error.

    Raises GraphError where the text is no snapshot, is of a newer format, or names functions, classes or operators that
    are not found; all such faults at once, each with its node.
    """
    document = _document(text, where)
    faults = [fault for entry in document["nodes"] for fault in _lost(entry, entry["operator"], entry["name"])]
    if faults:
        raise GraphError(faults)
    return _Reader(document).graph()


def fingerprint(graph: Graph) -> str:
    """A digest that another process computes too: of the snapshot, source lines left out.

    Functions that no other process can import count by their name, so it is weaker than `Graph.digest` there.
    """
    return hashlib.blake2b(json.dumps(_placeless(json.loads(to_json(graph)))).encode(), digest_size=16).hexdigest()


def _placeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _placeless(part) for key, part in value.items() if key not in ("origin", "file", "line")}
    return [_placeless(part) for part in value] if isinstance(value, list) else value


def _origin(origin: Origin | None) -> dict[str, Any] | None:
    return None if origin is None else {"file": origin.file, "line": origin.line}


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.numbers = {id(node): i for i, node in enumerate(graph.nodes)}
        self.states = {state: i for i, state in enumerate(graph.states)}

    def state(self, state: State) -> dict[str, Any]:
        where = f"{type(state).__name__} {state.name!r}"
        fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        fields |= {"origin": _Plain(_origin(fields["origin"]))} if "origin" in fields else {}
        if isinstance(state, Buffer):
            fields["writer"] = _Plain(self.numbers[id(state.writer)])
        elif fields.get("follows") is not None:
            fields["follows"] = _Plain(self.states[fields["follows"]])
        return {"kind": type(state).__name__, **{k: encode(v, where) for k, v in fields.items()}}

    def node(self, node: Node) -> dict[str, Any]:
        where = f"node {node.name!r}"
        operator = {_LOST: node.operator.path.partition("@")[0]} if "@" in node.operator.path else node.operator.path
        if isinstance(operator, dict) and node.operator.function is not None:
            operator |= _place(node.operator.function)
        return {
            "name": node.name,
            "operator": operator,
            "origin": _origin(node.origin),
            "states": {key: self.states[state] for key, state in node.states.items()},
            "inputs": {key: [self.numbers[id(port.node)], port.index] for key, port in node.inputs.items()},
            "params": {key: encode(value, f"{where}, parameter {key!r}") for key, value in node.params.items()},
            "schemas": [encode(schema, where) for schema in node.schemas],
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Plain:
    """JSON already."""

    value: Any


def encode(value: Any, where: str) -> Any:
    """A value as JSON that `decode` turns back into an equal one of the same type. Raises GraphError for others."""
    if isinstance(value, _Plain):
        return value.value
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    for known, written in _FORMS:
        if isinstance(value, known):
            return written(value, where)
    if dataclasses.is_dataclass(value):  # before functions: some dataclasses can be called
        return _record(value, where)
    if callable(value):
        return _function(value)
    problem = f"a {type(value).__name__} has no written form"
    fix = "numbers, text, lists, tuples, dicts, functions of a module, and frozen dataclasses of these can be kept"
    raise GraphError(Fault(rule="snapshot", where=where, problem=problem, fix=fix))


def _arrow(kind: pa.DataType, where: str) -> dict[str, Any]:
    schema = pa.schema([pa.field("", kind)])
    return {"arrow": base64.b64encode(schema.serialize()).decode(), "reads": str(kind)}


def _numpy(value: np.generic, where: str) -> dict[str, Any]:
    return {"numpy": value.dtype.str, "value": encode(value.item(), where)}


def _items(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    return {"dict": [[encode(k, where), encode(v, where)] for k, v in value.items()]}


def _tuple(value: Sequence[Any], where: str) -> dict[str, Any]:
    return {"tuple": [encode(item, where) for item in value]}


def _list(value: Sequence[Any], where: str) -> list[Any]:
    return [encode(item, where) for item in value]


def _class(value: type, where: str) -> dict[str, Any]:
    path = f"{value.__module__}:{value.__qualname__}"
    return {_LOST: path} if "<" in path or value.__module__ == "__main__" else {"class": path}


_FORMS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    (np.generic, _numpy),
    (np.dtype, lambda value, where: {"dtype": value.str}),
    (pa.DataType, _arrow),
    (list, _list),
    (tuple, _tuple),
    (dict, _items),
    (type, _class),
)
"""Tried in this order; whatever comes later is a function or a dataclass."""


def _record(value: Any, where: str) -> dict[str, Any]:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, LossFunction):
        fields["fn"] = fields["fn"] if importable(fields["fn"]) else _Plain(_function(fields["fn"]))
    kind = _class(type(value), where)
    return (
        kind if _LOST in kind else {"record": kind["class"], "fields": {k: encode(v, where) for k, v in fields.items()}}
    )


def _function(value: Callable[..., Any]) -> dict[str, Any]:
    if hasattr(value, "__qualname__") and importable(value):
        return {"function": f"{value.__module__}:{value.__qualname__}"}
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return {_LOST: f"{getattr(value, '__module__', '?')}:{name}", **_place(value)}


def _place(value: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(value, "__code__", None)
    return {"at": f"{code.co_filename}:{code.co_firstlineno}"} if code else {}


def _document(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _unread(f"expected JSON, found {error}", "give the graph.json of a run folder", where) from None
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, int) or not {"nodes", "states", "sinks", "name"} <= document.keys():
        raise _unread(
            "expected a graph with its format number, found other JSON", "give the graph.json of a run folder", where
        )
    if found > FORMAT:
        fix = "read it with the dataflow-rl that wrote it, or a newer one"
        raise _unread(f"it has format {found}, and this version reads up to {FORMAT}", fix, where)
    return document


def _unread(problem: str, fix: str, where: str = "snapshot") -> GraphError:
    return GraphError(Fault(rule="snapshot", where=where, problem=problem, fix=fix))


def _lost(entry: Any, operator: Any, name: str) -> Iterator[Fault]:
    """A fault for each function or class of a node's entry that is only there by name."""
    if isinstance(entry, dict):
        if _LOST in entry:
            path, at = entry[_LOST], entry.get("at", "")
            what = "its operator" if entry is operator else "it holds"
            place = f" ({at.rsplit('/', 1)[-1]})" if at else ""
            problem = f"{what} {path.rpartition(':')[2]!r}{place}, which no other process can import"
            fix = "a def or class at the top level of a module (a file that is not run as a script)"
            yield Fault(rule="snapshot", where=f"node {name!r}", problem=problem, fix=fix)
        for value in entry.values():
            yield from _lost(value, operator, name)
    elif isinstance(entry, list):
        for value in entry:
            yield from _lost(value, operator, name)


class _Reader:
    """Nodes are made in order; a State when a node first asks for it, since a Buffer stands on its writer."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.nodes: list[Node] = []
        self.states: dict[int, State] = {}

    def graph(self) -> Graph:
        for entry in self.document["nodes"]:
            self.nodes.append(self._node(entry))
        sinks = [self.nodes[i] for i in self.document["sinks"]]
        return Graph(self.document["name"], *sinks, origin=_read_origin(self.document["origin"]))

    def _node(self, entry: Mapping[str, Any]) -> Node:
        where = f"node {entry['name']!r}"
        return Node(
            _operator(entry["operator"], where),
            entry["name"],
            states={key: self._state(i) for key, i in entry["states"].items()},
            inputs={key: self.nodes[i].port(index) for key, (i, index) in entry["inputs"].items()},
            params={key: decode(value, where) for key, value in entry["params"].items()},
            schemas=tuple(decode(schema, where) for schema in entry["schemas"]),
            origin=_read_origin(entry["origin"]),
        )

    def _state(self, number: int) -> State:
        if number not in self.states:
            fields = dict(self.document["states"][number])
            kind = _find("dataflow.model:" + fields.pop("kind"), f"state {fields['name']!r}")
            where = f"{kind.__name__} {fields['name']!r}"
            own: dict[str, Any] = {"origin": _read_origin(fields.pop("origin"))} if "origin" in fields else {}
            if "writer" in fields:
                own["writer"] = self.nodes[fields.pop("writer")]
            if fields.get("follows") is not None:
                own["follows"] = self._state(fields.pop("follows"))
            self.states[number] = kind(**{key: decode(value, where) for key, value in fields.items()}, **own)
        return self.states[number]


def _read_origin(entry: Mapping[str, Any] | None) -> Origin | None:
    return None if entry is None else Origin(file=entry["file"], line=entry["line"])


def decode(value: Any, where: str) -> Any:
    """What `encode` wrote. Raises GraphError where it names something that is not found."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value))
    if key not in _READERS:
        raise _unread(f"expected a written value, found an object with {key!r}", "do not edit snapshots by hand", where)
    return _READERS[key](value, where)


def _read_record(entry: Mapping[str, Any], where: str) -> Any:
    kind = _find(entry["record"], where)
    fields = {key: decode(value, where) for key, value in entry["fields"].items()}
    known = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if not isinstance(kind, type) or not fields.keys() <= known:
        raise _unread(f"{entry['record']} has other fields now", "write the snapshot anew", where)
    return kind(**fields)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    "float": lambda entry, where: float(entry["float"]),
    "numpy": lambda entry, where: np.dtype(entry["numpy"]).type(decode(entry["value"], where)),
    "dtype": lambda entry, where: np.dtype(entry["dtype"]),
    "arrow": lambda entry, where: pa.ipc.read_schema(pa.py_buffer(base64.b64decode(entry["arrow"]))).field(0).type,
    "tuple": lambda entry, where: tuple(decode(item, where) for item in entry["tuple"]),
    "dict": lambda entry, where: {decode(k, where): decode(v, where) for k, v in entry["dict"]},
    "class": lambda entry, where: _find(entry["class"], where),
    "function": lambda entry, where: _read_function(entry["function"], where),
    "record": _read_record,
}


def _read_function(path: str, where: str) -> Any:
    found = _find(path, where)
    return found.fn if isinstance(found, (LossDeclaration, OperatorDeclaration)) else found


def _operator(path: str, where: str) -> Operator:
    found = _find(path, where)
    found = found.operator if isinstance(found, OperatorDeclaration) else found
    if not isinstance(found, Operator):
        raise _unread(f"expected an operator at {path}, found {type(found).__name__}", "write the snapshot anew", where)
    return found


def _find(path: str, where: str) -> Any:
    """The object at module:qualname. Raises GraphError naming the nearest that there is."""
    module_name, _, qualname = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        problem = f"{path} is not found: no module {error.name!r}"
        raise _unread(problem, f"put the file of {module_name!r} where Python finds it", where) from None
    for part in qualname.split("."):
        if not hasattr(found, part):
            near = nearest(part, (name for name in vars(found) if not name.startswith("__")))
            fix = f"{near!r} is there" if near else f"give {module_name!r} what the graph was made with"
            raise _unread(f"{path} is not found: {module_name!r} has no {part!r}", fix, where)
        found = getattr(found, part)
    return found
