"""What a run is made of (parameters of nodes, data, models, the user's source files), and changes.

Owns: the record in every cut, its comparison, the accepted changes. Does not own: digests of files
(content_digests.py), what to do about a difference (engine/session/run_beginning.py).

Paths, source lines, names of graphs and our own version are not compared. A user's source file
counts if it defines a function or class of the graph, or is imported by such a file. Installed
packages (site-packages) are in versions.json.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataflow.dialect import with_dialects
from dataflow.graph import Graph, Phase
from dataflow.json_values import LOST
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node
from dataflow.program import AnyGraph, numbered_name, numbered_phases
from dataflow.scripts import MAIN
from dataflow.snapshot import encode
from engine.keep.checkpoint.content_digests import CONTENT, Files, data_content, model_content
from engine.keep.checkpoint.user_sources import sources_of

PHASE = "phase "
"""Prefix of what a phase of a Program is; no node's name has a space."""
_SHOWN, _NAMED = 80, 5
_NAMES = ({"function"}, {"class"}, {LOST}, {LOST, "at"})
"""The keys of a written name, which is its first value."""

Values = Mapping[str, str]
"""Parameter -> its value as text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """nodes, models: by name. sources: module, or `__main__:function`, -> digest of its code.
    places (of files), parts (digests of what a content is made of) and version (of this package)
    are not compared.
    """

    nodes: Mapping[str, Values]
    models: Mapping[str, Values]
    sources: Values
    trains: tuple[str, ...]
    places: Values
    version: str
    parts: Mapping[str, Values] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceDifference:
    """where: node, model or source file; what: its part. old, new: as text, empty for none. parts:
    of a content, the files, functions or classes that differ, as far as that is known.
    """

    where: str
    what: str
    old: str
    new: str
    place: str = ""
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.place:
            place = f" ({self.place})"
        else:
            place = ""
        change = f"{_short(self.old)} -> {_short(self.new)}"
        if self.old.startswith(CONTENT) and self.new.startswith(CONTENT):
            change = f"its content changed{_list_parts(self.parts)}"
        return f"{self.where}: {as_set(self.what)}{place}: {change}"


def _list_parts(parts: Sequence[str]) -> str:
    if len(parts) > _NAMED:
        more = f" and {len(parts) - _NAMED} more"
    else:
        more = ""
    if parts:
        return f": {', '.join(parts[:_NAMED])}{more}"
    return ""


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
    """What a cut says of its run: what it is made of now, and earlier changes."""

    made_of: Provenance
    changes: tuple[AcceptedChange, ...] = ()


def provenance(graph: AnyGraph, *, script: str = "") -> Provenance:
    """A graph's provenance, of its files now; a Program's is that of all phases, whose nodes and
    models have their phase's number before their names. script: the module's name by which other
    processes import the script that this one runs, if they can (dataflow/scripts.py). Raises
    DataError for missing data, and GraphError.
    """
    nodes: dict[str, Values] = {}
    models: dict[str, Values] = {}
    sources: dict[str, str] = {}
    trains: list[str] = []
    places: dict[str, str] = {}
    parts: dict[str, Values] = {}
    for number, phase in numbered_phases(graph):
        phase_record = _of_graph(phase.graph, script)
        if number:
            nodes[f"{PHASE}{number}"] = _phase(phase)
        for name, values in phase_record.nodes.items():
            nodes[numbered_name(number, name)] = values
        for name, values in phase_record.models.items():
            models[numbered_name(number, name)] = values
        sources |= phase_record.sources
        trains += [numbered_name(number, name) for name in phase_record.trains]
        for name, place in phase_record.places.items():
            places[_number_phase(name, number)] = place
        for name, part in phase_record.parts.items():
            parts[_number_phase(name, number)] = part
    version = _version()
    return Provenance(
        nodes=nodes,
        models=models,
        sources=sources,
        trains=tuple(trains),
        places=places,
        version=version,
        parts=parts,
    )


def _version() -> str:
    from importlib import metadata  # here: no Worker needs it

    return metadata.version("dataflow-rl")


def _number_phase(name: str, phase: int) -> str:
    """`node 2/rollout data` for `node rollout data`; of a source file, the name alone."""
    if not phase:
        return name
    return re.sub(r"^(node|model) ", rf"\g<1> {phase}/", name)


def _phase(phase: Phase) -> dict[str, str]:
    """What a phase is besides its graph."""
    until, optimizers = phase.until, ", ".join(phase.optimizers)
    if phase.steps is None:
        steps = ""
    else:
        steps = str(phase.steps)
    return {"steps": steps, "until": str(until or ""), "optimizers": optimizers}


def _of_graph(graph: Graph, script: str) -> Provenance:
    files = Files()
    graph = with_dialects(graph)
    nodes = {node.name: _node(node, files) for node in graph.nodes}
    models: dict[str, dict[str, str]] = {}
    for state in graph.states:
        if isinstance(state, Model):
            models[state.name] = _model(state, files)
    if script:
        nodes = {name: _rename_values(values, script) for name, values in nodes.items()}
        models = {name: _rename_values(values, script) for name, values in models.items()}
    return Provenance(
        nodes=nodes,
        models=models,
        sources=sources_of(graph, files, script),
        trains=tuple(sink.name for sink in graph.sinks),
        places=files.places,
        version=_version(),
        parts=files.parts,
    )


def _rename_values(values: Mapping[str, str], script: str) -> dict[str, str]:
    return {key: text.replace(f"{MAIN}:", f"{script}:") for key, text in values.items()}


def differences(old: Provenance, new: Provenance) -> list[ProvenanceDifference]:
    """What differs, in the order of nodes, models, source files."""
    return [
        *_of_groups("node", old.nodes, new.nodes, (old, new)),
        *_of_groups("model", old.models, new.models, (old, new)),
        *_of_sources(old, new),
        *_of_sinks(old.trains, new.trains),
    ]


def _differing(records: tuple[Provenance, Provenance], name: str) -> tuple[str, ...]:
    """The parts of a content that differ; none where a record has none, or all are the same."""
    before, now = (record.parts.get(name, {}) for record in records)
    if not before or not now:
        return ()
    return tuple(part for part in _names(before, now) if before.get(part) != now.get(part))


def _of_sources(old: Provenance, new: Provenance) -> Iterator[ProvenanceDifference]:
    places = {**old.places, **new.places}
    for name, before in old.sources.items():  # added and removed files show in what names them
        now, key = new.sources.get(name), f"source {name}"
        if before and now and before != now:
            yield ProvenanceDifference(
                where="source file",
                what=name,
                old=before,
                new=now,
                place=places.get(key, ""),
                parts=_differing((old, new), key),
            )


def _of_sinks(old: Sequence[str], new: Sequence[str]) -> Iterator[ProvenanceDifference]:
    if old != new and set(old) == set(new):
        before, now = ", ".join(old), ", ".join(new)
        yield ProvenanceDifference(where="graph", what="order of its sinks", old=before, new=now)


def _of_groups(
    kind: str,
    old: Mapping[str, Values],
    new: Mapping[str, Values],
    records: tuple[Provenance, Provenance],
) -> Iterator[ProvenanceDifference]:
    for name in _names(old, new):
        if name not in old or name not in new:
            before, now = ("there", "not there") if name in old else ("not there", "there")
            yield ProvenanceDifference(where=kind, what=name, old=before, new=now)
            continue
        if name.startswith(PHASE):
            where = name
        else:
            where = f"{kind} {name}"
        for key in _names(old[name], new[name]):
            before, now = old[name].get(key, ""), new[name].get(key, "")
            if before != now:
                label = f"{where} {key}"
                yield ProvenanceDifference(
                    where=where,
                    what=key,
                    old=before,
                    new=now,
                    place=records[1].places.get(label, ""),
                    parts=_differing(records, label),
                )


def _names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


def as_set(what: str) -> str:
    """A parameter's name as --set takes it, without its node: `clipped_policy_loss.clip`."""
    return what.removeprefix("loss.")


def in_python(text: str) -> str:
    """A parameter's text as one writes it in Python, `(0.2, 0.28)`; any other text as it is. It
    may come from a changes.json that others wrote: nothing that it names is imported.
    """
    written = text.startswith(("{", "[")) or text in ("true", "false", "null")
    try:
        if written:
            return _call(json.loads(text))
        return text
    except ValueError:  # a user's own text
        return text


def _call(written: Any) -> str:
    if isinstance(written, dict):
        elements = written.get("tuple")
    else:
        elements = written
    if isinstance(elements, list):
        inside = ", ".join(map(_call, elements))
        if elements is written:
            return f"[{inside}]"
        return f"({inside}{',' * (len(elements) == 1)})"
    if isinstance(written, dict):
        fields = written.get("fields")
    else:
        fields = None
    if isinstance(fields, dict):
        arguments = ", ".join(f"{name}={_call(field)}" for name, field in fields.items())
        return f"{str(written.get('record')).rpartition(':')[2]}({arguments})"
    if isinstance(written, dict):
        return json.dumps(written)
    return repr(written)


def _short(text: str) -> str:
    text = in_python(text)
    return (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...") or "nothing"


def _node(node: Node, files: Files) -> dict[str, str]:
    texts = {"operator": node.operator.path.partition("@")[0]}
    texts |= {f"input {key}": port.label for key, port in node.inputs.items()}
    texts |= {f"model {key}": state.name for key, state in node.states.items()}
    texts |= parameters(node)
    data_place = node.params.get("data")
    if node.operator.data_files and isinstance(data_place, str):
        texts["data"] = _data(node, data_place, files)
    return texts


def parameters(node: Node) -> dict[str, str]:
    """A node's parameters as texts, those of a loss term by term; data by its place."""
    texts: dict[str, str] = {}
    for key, parameter in node.params.items():
        texts |= _leaves(key, parameter, f"node {node.name!r}, parameter {key!r}")
    return texts


def _data(node: Node, data_place: str, files: Files) -> str:
    module, _, name = node.operator.data_files.partition(":")
    files.places[f"node {node.name} data"] = data_place
    files_read = getattr(importlib.import_module(module), name)(
        data_place, node.params.get("split")
    )
    if files_read:
        return files.content(f"node {node.name} data", data_place, data_content(files_read))
    return data_place


def _model(model: Model, files: Files) -> dict[str, str]:
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.compare}
    fields["follows"] = model.follows.name if model.follows else None
    content, name = model_content(fields.pop("base")), f"model {model.name} base"
    files.places[name] = model.base
    texts = {"base": files.content(name, model.base, content) if content else model.base}
    for key in (key for key in fields if key != "name"):
        texts |= _leaves(key, fields[key], f"model {model.name!r}")
    return texts


def _leaves(key: str, parameter: Any, where: str) -> dict[str, str]:
    """A parameter as texts, a loss term by term."""
    if not isinstance(parameter, Loss):
        return {key: _text(parameter, where)}
    texts = {}
    for term in parameter.terms:
        label = f"{key}.{term.label or term.function.name}"
        texts[label] = term.function.path.partition("@")[0]
        texts[f"{label}.weight"] = _text(term.weight, where)
        texts |= {f"{label}.{name}": _text(argument, where) for name, argument in term.params}
        if term.now:
            texts[f"{label}.now"] = ", ".join(term.now)
    return texts


def _text(parameter: Any, where: str) -> str:
    written = _placeless(encode(parameter, where))
    if isinstance(written, str):
        return written
    return json.dumps(written)


def _placeless(written: Any) -> Any:
    if isinstance(written, dict):
        if written.keys() in _NAMES:
            return next(iter(written.values()))
        return {
            key: _placeless(part) for key, part in written.items() if key not in ("origin", "at")
        }
    if isinstance(written, list):
        return [_placeless(part) for part in written]
    return written
