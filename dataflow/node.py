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
            fault = Fault(
                rule="call",
                where=operator.name,
                problem=problem,
                fix=f'name="{operator.name}"',
                origin=self.origin,
            )
            raise GraphError(fault)
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
        writers = [s.writer for s in self.states.values() if isinstance(s, Buffer)]
        return (*(port.node for port in self.inputs.values()), *writers)

    def rebuilt(
        self, inputs: Mapping[str, Port[Any]], states: Mapping[str, State] | None = None
    ) -> Node:
        """This node on other inputs; the same object if nothing changed."""
        new_states = self.states if states is None else dict(states)
        same_inputs = all(port.node is self.inputs[key].node for key, port in inputs.items())
        if same_inputs and dict(inputs) == self.inputs and new_states == self.states:
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
        given: dict[str, Any] = {
            k: getattr(self, k) for k in ("states", "inputs", "params", "schemas", "origin")
        }
        name = fields.pop("name", self.name)
        return Node(fields.pop("operator", self.operator), name, **(given | fields))


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
        schema = (
            node.operator.input(key).schema.__name__ if _declares(node.operator, key) else "Schema"
        )
        raise GraphError(
            Fault(
                rule="call",
                where=f"{node.operator.name}.{key}",
                problem=(
                    f"expected Port[{schema}], the output of an operator, found"
                    f" {type(port).__name__} {port!r:.60}"
                ),
                fix=f"pass what an operator returned as {key}",
                origin=node.origin,
            )
        )


def _require_state(node: Node, param: str, state: object) -> None:
    if not isinstance(state, (Model, Buffer, Table)):
        where = f"{node.operator.name}.{param}"
        problem = f"expected a Model, found {type(state).__name__} {state!r:.60}"
        fix = f'Model("{param}", "path/to/model")'
        raise GraphError(
            Fault(rule="call", where=where, problem=problem, fix=fix, origin=node.origin)
        )


def _declares(operator: Operator, key: str) -> bool:
    return operator.variadic is not None or any(i.name == key for i in operator.inputs)


def _digest(node: Node) -> str:
    h = hashlib.blake2b(digest_size=16)
    h.update(
        f"{node.operator.path}|{node.name}|{[s.__name__ for s in node.schemas]}".encode(
            errors="surrogatepass"
        )
    )
    for part in (node.operator.function, node.states, node.params):
        h.update(content(part).encode(errors="surrogatepass"))
    for key, port in node.inputs.items():
        h.update(f"{key}={port.node.digest}.{port.index};".encode(errors="surrogatepass"))
    return h.hexdigest()


def content(value: Any) -> str:
    """A text that is equal for two values exactly if they mean the same.

    Functions and classes count by module:qualname if that leads to them; all others by identity,
    since two of them can share a name and differ.
    """
    if isinstance(value, Node):
        return f"node:{value.digest}"
    if isinstance(value, type):
        return f"type:{_name(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    if dataclasses.is_dataclass(value):
        return _content_of_fields(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{k}:{content(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(content, value))}]"
    if isinstance(value, _BY_VALUE):
        return f"{type(value).__name__}:{value!r}"
    return f"{type(value).__qualname__}@{id(value):x}"


_BY_VALUE = (pa.DataType, type(None), bool, int, float, str)


def _content_of_fields(value: Any) -> str:
    fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare]
    return f"{type(value).__qualname__}({','.join(f'{k}={content(v)}' for k, v in fields)})"


def _name(value: Any) -> str:
    name = f"{getattr(value, '__module__', '?')}:{value.__qualname__}"
    return name if is_importable_by_name(value) else f"{name}@{id(value):x}"
