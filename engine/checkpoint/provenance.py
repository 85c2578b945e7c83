"""What a run is made of (parameters of nodes, data, models, the user's source files), and changes.

Owns: the record in every cut, its comparison, the accepted changes. Does not own: digests of files
(contents.py), what to do about a difference (engine/resuming.py).

Paths, source lines, names of graphs and our own version are not compared. A user's source file
counts if it defines a function or class of the graph, or is imported by such a file. Installed
packages (site-packages) are in versions.json.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import dataflow
from dataflow.dialect import with_dialects
from dataflow.graph import Graph
from dataflow.loss import Loss, LossFunction
from dataflow.model import Model
from dataflow.node import Node
from dataflow.program import Phase, Program
from dataflow.snapshot import encode
from engine.checkpoint.contents import code_digest, data_digest, model_digest

CONTENT = "content "
"""Prefix of a file's value."""
PHASE = "phase "
"""Prefix of what a phase of a Program is; no node's name has a space."""
_FOLDERS = sysconfig.get_paths()
_INSTALLED = tuple(_FOLDERS[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_ROOT = Path(dataflow.__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("dataflow", "operators", "graphs", "engine"))
_SHOWN = 60

Values = Mapping[str, str]
"""Parameter -> its value as text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """nodes, models: by name. sources: module, or `__main__:function`, -> digest of its code.
    places (of files) and version (of this package) are not compared.
    """

    nodes: Mapping[str, Values]
    models: Mapping[str, Values]
    sources: Values
    trains: tuple[str, ...]
    places: Values
    version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceDifference:
    """where: node, model or source file; what: its part. old, new: as text, empty for none."""

    where: str
    what: str
    old: str
    new: str
    place: str = ""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        change = f"{_short(self.old)} -> {_short(self.new)}"
        if self.old.startswith(CONTENT) and self.new.startswith(CONTENT):
            change = "its content changed"
        return f"{self.where}: {self.what}{place}: {change}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedChange:
    """A difference that was accepted, valid from this Step on."""

    step: int
    where: str
    what: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceRecord:
    """In a cut: what the run is made of now, and earlier changes."""

    made_of: Provenance
    changes: tuple[AcceptedChange, ...] = ()


def provenance(graph: Graph | Program) -> Provenance:
    """A graph's provenance, of its files now; a Program's is that of all phases, whose nodes and
    models have their phase's number before their names. Raises DataError for missing data, and
    GraphError.
    """
    return _of_program(graph) if isinstance(graph, Program) else _of_graph(graph)


def _of_program(program: Program) -> Provenance:
    nodes: dict[str, Values] = {}
    models: dict[str, Values] = {}
    sources: dict[str, str] = {}
    trains: list[str] = []
    places: dict[str, str] = {}
    for number, phase in enumerate(program.phases, start=1):
        own = _of_graph(phase.graph)
        nodes[f"{PHASE}{number}"] = _phase(phase)
        nodes |= {f"{number}/{name}": values for name, values in own.nodes.items()}
        models |= {f"{number}/{name}": values for name, values in own.models.items()}
        sources |= own.sources
        trains += [f"{number}/{name}" for name in own.trains]
        numbered = f"\\1 {number}/"
        places |= {re.sub(r"^(node|model) ", numbered, k): v for k, v in own.places.items()}
    version = metadata.version("dataflow-rl")
    return Provenance(
        nodes=nodes,
        models=models,
        sources=sources,
        trains=tuple(trains),
        places=places,
        version=version,
    )


def _phase(phase: Phase) -> dict[str, str]:
    """What a phase is besides its graph."""
    until, optimizers = phase.until, ", ".join(phase.optimizers)
    steps = "" if phase.steps is None else str(phase.steps)
    return {"steps": steps, "until": str(until or ""), "optimizers": optimizers}


def _of_graph(graph: Graph) -> Provenance:
    places: dict[str, str] = {}
    graph = with_dialects(graph)
    models = [state for state in graph.states if isinstance(state, Model)]
    return Provenance(
        nodes={node.name: _node(node, places) for node in graph.nodes},
        models={model.name: _model(model, places) for model in models},
        sources=_sources(graph, places),
        trains=tuple(sink.name for sink in graph.sinks),
        places=places,
        version=metadata.version("dataflow-rl"),
    )


def differences(old: Provenance, new: Provenance) -> list[ProvenanceDifference]:
    """What differs, in the order of nodes, models, source files."""
    return [
        *_of_groups("node", old.nodes, new.nodes, new.places),
        *_of_groups("model", old.models, new.models, new.places),
        *_of_sources(old, new),
        *_of_sinks(old.trains, new.trains),
    ]


def _of_sources(old: Provenance, new: Provenance) -> Iterator[ProvenanceDifference]:
    places, where = {**old.places, **new.places}, "source file"
    for name, before in old.sources.items():  # added and removed files show in what names them
        now, place = new.sources.get(name), places.get(f"source {name}", "")
        if before and now and before != now:
            yield ProvenanceDifference(where=where, what=name, old=before, new=now, place=place)


def _of_sinks(old: Sequence[str], new: Sequence[str]) -> Iterator[ProvenanceDifference]:
    if old != new and set(old) == set(new):
        before, now = ", ".join(old), ", ".join(new)
        yield ProvenanceDifference(where="graph", what="order of its sinks", old=before, new=now)


def _of_groups(
    kind: str, old: Mapping[str, Values], new: Mapping[str, Values], places: Values
) -> Iterator[ProvenanceDifference]:
    for name in _names(old, new):
        if name not in old or name not in new:
            before, now = ("there", "not there") if name in old else ("not there", "there")
            yield ProvenanceDifference(where=kind, what=name, old=before, new=now)
            continue
        where = name if name.startswith(PHASE) else f"{kind} {name}"
        for key in _names(old[name], new[name]):
            before, now = old[name].get(key, ""), new[name].get(key, "")
            if before != now:
                place = places.get(f"{where} {key}", "")
                yield ProvenanceDifference(where=where, what=key, old=before, new=now, place=place)


def _names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


def _short(value: str) -> str:
    return (value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...") or "nothing"


def _node(node: Node, places: dict[str, str]) -> dict[str, str]:
    found = {"operator": node.operator.path.partition("@")[0]}
    found |= {f"input {key}": port.label for key, port in node.inputs.items()}
    found |= {f"model {key}": state.name for key, state in node.states.items()}
    for key, value in node.params.items():
        if key == "data" and node.operator.data_files and isinstance(value, str):
            found[key] = _data(node, value)
            places[f"node {node.name} data"] = value
        else:
            found |= _leaves(key, value, f"node {node.name!r}, parameter {key!r}")
    return found


def _data(node: Node, data: str) -> str:
    module, _, name = node.operator.data_files.partition(":")
    files = getattr(importlib.import_module(module), name)(data, node.params.get("split"))
    return f"{CONTENT}{data_digest(files)}" if files else data


def _model(model: Model, places: dict[str, str]) -> dict[str, str]:
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.compare}
    fields["follows"] = model.follows.name if model.follows else None
    digest = model_digest(fields.pop("base"))
    places[f"model {model.name} base"] = model.base
    found = {"base": f"{CONTENT}{digest}" if digest is not None else model.base}
    for key in (key for key in fields if key != "name"):
        found |= _leaves(key, fields[key], f"model {model.name!r}")
    return found


def _leaves(key: str, value: Any, where: str) -> dict[str, str]:
    """A parameter as texts, a loss term by term."""
    if not isinstance(value, Loss):
        return {key: _text(value, where)}
    found = {}
    for term in value.terms:
        label = f"{key}.{term.label or term.function.name}"
        found[label] = term.function.path.partition("@")[0]
        found[f"{label}.weight"] = _text(term.weight, where)
        found |= {f"{label}.{name}": _text(given, where) for name, given in term.params}
        if term.now:
            found[f"{label}.now"] = ", ".join(term.now)
    return found


def _text(value: Any, where: str) -> str:
    written = _placeless(encode(value, where))
    return written if isinstance(written, str) else json.dumps(written)


def _placeless(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and "function" in value:
            return value["function"]
        return {key: _placeless(part) for key, part in value.items() if key not in ("origin", "at")}
    return [_placeless(part) for part in value] if isinstance(value, list) else value


def _sources(graph: Graph, places: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    modules: dict[str, ModuleType] = {}
    for thing in _things(graph):
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        if module is not None and _is_users(module):
            modules.setdefault(module.__name__, module)
        elif _stands_alone(thing, module):
            text = _source(thing)
            digest = f"{CONTENT}{code_digest(text)}" if text else ""
            found[f"__main__:{thing.__qualname__}"] = digest
    for name, module in _with_imports(modules).items():
        path = Path(module.__file__ or "")
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        found[name] = f"{CONTENT}{code_digest(text)}"
        places[f"source {name}"] = path.name
    return dict(sorted(found.items()))


def _things(graph: Graph) -> Iterator[Any]:
    """Every function and class that a graph names."""
    for node in graph.nodes:
        if node.operator.function is not None:
            yield node.operator.function
        yield from node.schemas
        for value in node.params.values():
            yield from _within(value)


def _within(value: Any) -> Iterator[Any]:
    parts = _parts(value)
    yield from _definitions(value) if parts is None else ()
    for part in parts or ():
        yield from _within(part)


def _parts(value: Any) -> Iterable[Any] | None:
    """A value's parts; None for one that is not taken apart."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, (LossFunction, type)):
        return None
    if dataclasses.is_dataclass(value):
        return type(value), *(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else None


def _definitions(value: Any) -> Iterable[Any]:
    """The functions and classes that define a value without parts."""
    if isinstance(value, LossFunction):
        return (value.fn,)
    if inspect.ismethod(value):
        return value.__func__, type(value.__self__)
    if isinstance(value, type) or inspect.isroutine(value):
        return (inspect.unwrap(value) if callable(value) else value,)
    return (type(value),) if callable(value) else ()


def _is_users(module: ModuleType) -> bool:
    """Whether it is the user's: not installed, not ours, not the script that starts the run."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or not isinstance(file, str) or not file.endswith(".py"):
        return False
    resolved = str(Path(file).resolve())
    return not file.startswith(_INSTALLED) and not resolved.startswith((*_INSTALLED, *_OURS))


def _stands_alone(thing: Any, module: ModuleType | None) -> bool:
    """Whether only its own text defines it, in the script or a notebook."""
    own = getattr(thing, "__qualname__", None) is not None
    return own and (module is None or module.__name__ == "__main__")


def _source(thing: Any) -> str:
    """Its source; empty if unknown, which is not compared."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""


def _with_imports(modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """These modules, and the user's modules that they import, or import something from."""
    found, left = dict(modules), list(modules.values())
    while left:
        importer = left.pop()
        for value in list(vars(importer).values()):
            module = value if isinstance(value, ModuleType) else sys.modules.get(_module_of(value))
            if module is None or module.__name__ in found or not _is_users(module):
                continue
            if module is value and module.__name__.startswith(f"{importer.__name__}."):
                continue  # importing a submodule anywhere adds its name to the package
            found[module.__name__] = module
            left.append(module)
    return found


def _module_of(value: Any) -> str:
    named = isinstance(value, type) or inspect.isroutine(value)
    name = getattr(value, "__module__", None) if named else None
    return name if isinstance(name, str) else ""
