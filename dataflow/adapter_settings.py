"""Settings of adapters: `MODEL.adapter.FIELD=VALUE`, as `policy.adapter.rank=32`.

Owns: which fields of which Models may be set, reading a value, the graph with other adapters. Does
not own: texts of nodes' parameters (set_expressions.py), what an adapter may be (adapters.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, get_type_hints

from dataflow.adapters import Adapter, Lora, lora
from dataflow.errors import GraphError, nearest_or_all
from dataflow.graph import Graph, Inputs, States
from dataflow.model import Model, State
from dataflow.node import Node
from dataflow.parameters import NodeParameter, find_description
from dataflow.program import AnyGraph, Program
from dataflow.setting_errors import setting_error, settings_error
from dataflow.side_module import Side, side
from dataflow.value_parser import AcceptedValues

Source = TypeVar("Source", Graph, Program, AnyGraph)

_BETWEEN = ".adapter."
"""Between a Model's name and a field's."""


class _Path(NamedTuple):
    model: str
    field: str


def is_adapter_setting(source: AnyGraph, text: str) -> bool:
    """Whether a text is meant for the adapter of a Model."""
    path = _find_path(text)
    return path is not None and path.model in find_models(source)


def with_adapter_settings(source: Source, texts: Sequence[str]) -> Source:
    """The graph whose Models have adapters with these fields, and their followers too. Raises
    GraphError for a Model without an adapter of its own, and for what an adapter does not take.
    """
    if not texts:
        return source
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    models = find_models(source)
    for text in texts:
        path = _find_path(text)
        assert path is not None
        if path.field in changes[path.model]:
            raise setting_error(text, f"{path.model}{_BETWEEN}{path.field} is set twice", _ONCE)
        changes[path.model][path.field] = _read_field(models[path.model], path, text)
    adapters: dict[str, Adapter] = {}
    for name, fields in changes.items():
        try:
            adapters[name] = _change_adapter(models[name], fields)
        except GraphError as error:
            own_texts = [text for text in texts if text.startswith(f"{name}.")]
            raise settings_error(own_texts, error) from error
    graphs = [_with_adapters(phase.graph, adapters) for phase in source.phases]
    return source.with_graphs(graphs)


def find_models(source: AnyGraph) -> dict[str, Model]:
    """The Models of all phases, by name."""
    models: dict[str, Model] = {}
    for phase in source.phases:
        for state in phase.graph.states:
            if isinstance(state, Model):
                models.setdefault(state.name, state)
    return models


def adapter_parameters(adapter: Lora | Side) -> Iterator[NodeParameter]:
    """The fields of an adapter, as parameters that text can give: of a side module those of the
    function that makes it.
    """
    if isinstance(adapter, Side):
        yield from _list_side_parameters(adapter)
        return
    hints = get_type_hints(lora)
    for name in _FIELDS:
        yield NodeParameter(
            name=name,
            value=getattr(adapter, name),
            accepted=AcceptedValues(hint=hints[name]),
            about=find_description(lora.__doc__ or "", name),
        )


def _list_side_parameters(adapter: Side) -> Iterator[NodeParameter]:
    settings = dict(adapter.params)
    for name, parameter in adapter.parameters().items():
        hint = Any if parameter.annotation is parameter.empty else parameter.annotation
        yield NodeParameter(
            name=name,
            value=settings.get(name, parameter.default),
            accepted=AcceptedValues(hint=hint),
            about=find_description(adapter.build.__doc__ or "", name),
        )
    yield NodeParameter(
        name=_START,
        value=adapter.start,
        accepted=AcceptedValues(hint=str | None),
        about=find_description(side.__doc__ or "", _START),
    )


def _find_path(text: str) -> _Path | None:
    """What a text names, if it has the form `MODEL.adapter.FIELD=VALUE`."""
    start, equals, _ = text.partition("=")
    model, between, field = start.strip().rpartition(_BETWEEN)
    if not equals or not between or not model:
        return None
    return _Path(model, field)


def _read_field(model: Model, path: _Path, text: str) -> Any:
    """Read the value of a field. Raises GraphError."""
    words = text.partition("=")[2]
    if model.adapter is None:
        problem = f"Model {path.model!r} has no adapter"
        raise setting_error(text, problem, f"--adapter 'lora({path.field}={words})'")
    if model.follows is not None:
        leader = model.follows.name
        problem = f"Model {path.model!r} has the adapter of {leader!r}, which it follows"
        raise setting_error(text, problem, f"{leader}{_BETWEEN}{path.field}={words}")
    parameters = {parameter.name: parameter for parameter in adapter_parameters(model.adapter)}
    if path.field not in parameters:
        problem = f"an adapter has no field {path.field!r}"
        near = _PEERS.get(path.field) or nearest_or_all(path.field, list(parameters))
        raise setting_error(text, problem, f"{path.model}{_BETWEEN}{near}={words}")
    try:
        return parameters[path.field].accepted.read(words)
    except ValueError as error:
        raise setting_error(text, f"for {path.field} {error}", "a value of that kind") from None


def _change_adapter(model: Model, fields: Mapping[str, Any]) -> Lora | Side:
    if isinstance(model.adapter, Side):
        return model.adapter.with_params(fields)
    arguments = {name: getattr(model.adapter, name) for name in _FIELDS}
    arguments |= fields
    return lora(
        rank=arguments["rank"],
        alpha=arguments["alpha"],
        targets=arguments["targets"],
        start=arguments["start"],
        scale=arguments["scale"],
    )


def _with_adapters(graph: Graph, adapters: Mapping[str, Adapter]) -> Graph:
    """The graph with these adapters, by Model; the same one if nothing changes."""

    def make(node: Node, inputs: Inputs, states: States) -> Node:
        new_states: dict[str, State] = {}
        for param, state in states.items():
            new_states[param] = _change_state(state, adapters)
        return node.rebuilt(inputs, new_states)

    return graph.remade(make)


def _change_state(state: State, adapters: Mapping[str, Adapter]) -> State:
    if not isinstance(state, Model):
        return state
    if state.follows is not None:
        leader = _change_state(state.follows, adapters)
        assert isinstance(leader, Model)
        if leader == state.follows:
            return state
        return replace(state, follows=leader, adapter=leader.adapter)
    adapter = adapters.get(state.name, state.adapter)
    return state if adapter == state.adapter else replace(state, adapter=adapter)


_START = "start"
_FIELDS = ("rank", "alpha", "targets", "start", "scale")
_PEERS = {
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "lora_target_modules": "targets",
    "use_rslora": "scale",
    "lora_adapter_path": "start",
}
"""TRL's, peft's and verl's names."""
_ONCE = "leave one out"
