"""Nodes and Ports: uses of operators, and the typed values between them.

Owns: content equality (a digest over everything a node means, including its name) and rebuilding a
node on other inputs. Does not own: reachability (graph.py), any rule.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import pyarrow as pa

from dataflow.errors import Fault, GraphError, Origin
from dataflow.importable_names import is_importable_by_name
from dataflow.model import Buffer, Model, State, Table
from dataflow.operator import Operator, call_site
from dataflow.schema import Schema

S_co = TypeVar("S_co", bound=Schema, covariant=True)


class Node:
    """One use of an operator. Immutable; equal to another with the same content, including names.

    states, inputs and params are ordered as declared. `schemas`: of its outputs. `origin` is the
    user's line and does not count for equality.
    """

    __slots__ = ("digest", "inputs", "name", "operator", "origin", "params", "schemas", "states")

    def __init__(
        self,
        operator: Operator,
        name: str,
        *,
        states: Mapping[str, State] | None = None,
        inputs: Mapping[str, Port[Any]] | None = None,
        params: Mapping[str, Any] | None = None,
        schemas: tuple[type[Schema], ...] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.operator = operator
        self.name = name
        self.states: dict[str, State] = dict(states or {})
        self.inputs: dict[str, Port[Any]] = dict(inputs or {})
        self.params: dict[str, Any] = dict(params or {})
        self.schemas = operator.outputs if schemas is None else schemas
        self.origin = origin or call_site()
        if not isinstance(name, str):
            problem = f"expected name to be text, found {type(name).__name__} {name!r:.60}"
            raise self._call_error(operator.name, problem, f'name="{operator.name}"')
        for key, port in self.inputs.items():
            _require_port(self, key, port)
        for param, state in self.states.items():
            _require_state(self, param, state)
        self.digest = _digest(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Node({self.name!r}: {self.operator.name})"

    def port(self, index: int = 0) -> Port[Any]:
        """One output."""
        return Port(self, index)

    @property
    def ports(self) -> tuple[Port[Any], ...]:
        """All outputs."""
        return tuple(Port(self, i) for i in range(len(self.schemas)))

    @property
    def parents(self) -> tuple[Node, ...]:
        """The nodes that this one needs: those of its inputs, then the writers of Buffers that it
        reads.
        """
        producers = [port.node for port in self.inputs.values()]
        writers = [state.writer for state in self.states.values() if isinstance(state, Buffer)]
        return (*producers, *writers)

    def rebuilt(
        self, inputs: Mapping[str, Port[Any]], states: Mapping[str, State] | None = None
    ) -> Node:
        """This node on other inputs; the same object if nothing changed."""
        new_states = self.states if states is None else dict(states)
        # Equal nodes may differ in their origins, so that the same inputs are the same objects.
        has_same_nodes = all(port.node is self.inputs[key].node for key, port in inputs.items())
        if has_same_nodes and dict(inputs) == self.inputs and new_states == self.states:
            return self
        return Node(
            self.operator,
            self.name,
            states=new_states,
            inputs=inputs,
            params=self.params,
            schemas=self.schemas,
            origin=self.origin,
        )

    def changed(self, **fields: Any) -> Node:
        """This node with other inputs, params, states, schemas or name."""
        names = ("states", "inputs", "params", "schemas", "origin")
        present_fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        operator = fields.pop("operator", self.operator)
        name = fields.pop("name", self.name)
        return Node(operator, name, **(present_fields | fields))

    def _call_error(self, where: str, problem: str, fix: str) -> GraphError:
        """The error of a call that makes no such node, at its line."""
        fault = Fault(rule="call", where=where, problem=problem, fix=fix, origin=self.origin)
        return GraphError(fault)


class Port(Generic[S_co]):
    """A value in the language: the output of a node, typed by its Schema."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int = 0) -> None:
        self.node = node
        self.index = index

    @property
    def schema(self) -> type[Schema]:
        """The Schema of its rows."""
        return self.node.schemas[self.index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Port) and other.index == self.index and other.node == self.node

    def __hash__(self) -> int:
        return hash((self.node.digest, self.index))

    def __repr__(self) -> str:
        return f"Port[{self.schema.__name__}]({self.label})"

    @property
    def label(self) -> str:
        """The node's name, with the output's number if there are several."""
        return self.node.name if len(self.node.schemas) == 1 else f"{self.node.name}.{self.index}"

    def _covariant(self) -> S_co:  # only makes type checkers use the parameter; never called
        raise TypeError("a Port holds no rows")


def _require_port(node: Node, key: str, port: object) -> None:
    if not isinstance(port, Port):
        schema = "Schema"
        if _declares(node.operator, key):
            schema = node.operator.input(key).schema.__name__
        problem = (
            f"expected Port[{schema}], the output of an operator, found"
            f" {type(port).__name__} {port!r:.60}"
        )
        fix = f"pass what an operator returned as {key}"
        raise node._call_error(f"{node.operator.name}.{key}", problem, fix)


def _require_state(node: Node, param: str, state: object) -> None:
    if not isinstance(state, (Model, Buffer, Table)):
        kind, fix = "Model", f'Model("{param}", "path/to/model")'
        if param == "table":
            kind, fix = "Table", f'Table("{param}")'
        problem = f"expected a {kind}, found {type(state).__name__} {state!r:.60}"
        raise node._call_error(f"{node.operator.name}.{param}", problem, fix)


def _declares(operator: Operator, key: str) -> bool:
    return operator.variadic is not None or any(i.name == key for i in operator.inputs)


def _digest(node: Node) -> str:
    schemas = [schema.__name__ for schema in node.schemas]
    texts = [f"{node.operator.path}|{node.name}|{schemas}"]
    texts += map(content, (node.operator.function, node.states, node.params))
    for key, port in node.inputs.items():
        texts.append(f"{key}={port.node.digest}.{port.index};")
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        # A name from a broken encoding has halves of characters.
        digest.update(text.encode(errors="surrogatepass"))
    return digest.hexdigest()


def content(value: Any) -> str:
    """Write a text that is equal for two values exactly if they mean the same.

    Functions and classes count by module:qualname if that leads to them; all others by identity,
    since two of them can share a name and differ.
    """
    if isinstance(value, Node):
        return f"node:{value.digest}"
    if isinstance(value, type):
        return f"type:{_name_of(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return _name_of(value)
    if dataclasses.is_dataclass(value):
        return _content_of_fields(value)
    if isinstance(value, Mapping):
        parts = [f"{key}:{content(part)}" for key, part in value.items()]
        return f"{{{','.join(parts)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(content, value))}]"
    if isinstance(value, _BY_VALUE):
        return f"{type(value).__name__}:{value!r}"
    return f"{type(value).__qualname__}@{id(value):x}"


_BY_VALUE = (pa.DataType, type(None), bool, int, float, str)


def _content_of_fields(record: Any) -> str:
    names = [field.name for field in dataclasses.fields(record) if field.compare]
    parts = [f"{name}={content(getattr(record, name))}" for name in names]
    return f"{type(record).__qualname__}({','.join(parts)})"


def _name_of(thing: Any) -> str:
    """Of a function or a class: where it is found, or its identity if it is not found there."""
    name = f"{getattr(thing, '__module__', '?')}:{thing.__qualname__}"
    return name if is_importable_by_name(thing) else f"{name}@{id(thing):x}"
