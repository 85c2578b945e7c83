"""Graphs by their declarations alone: equal to what was written; nothing named is imported."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.check import check
from dataflow.diff import diff
from dataflow.draw import draw
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.node import Port
from dataflow.schema import Reward, Rollout, column
from dataflow.snapshot import fingerprint, from_json, modules, to_json
from dataflow.user import Columns, operator
from engine.api import plan
from engine.keep.untrusted_files import list_imports, reading
from engine.plan.explain import explain
from graphs.grpo import grpo
from operators.losses import clipped_policy_loss
from operators.reward import reward
from tests.kit.graphs import compared, graph_of, sampled
from tests.kit.rewards import exact
from tests.kit.turns import example_count
from tests.right_graphs import RIGHT

Change = Callable[[dict[str, Any]], Any]
"""Of a written graph."""


def _columns(data: str, split: str | None) -> dict[str, pa.DataType]:
    return dict.fromkeys(("prompt", "answer", "completion"), pa.utf8())


@pytest.mark.long
@pytest.mark.parametrize("make", RIGHT)
def test_every_right_graph_is_the_same_by_its_declarations(make: Callable[[], Graph]) -> None:
    graph = make()
    written = to_json(graph)
    read = from_json(written, imports=False)
    assert read == graph
    assert hash(read) == hash(graph)
    assert to_json(read) == written
    for form in ("text", "mermaid", "dot", "svg"):
        assert draw(read, form) == draw(graph, form)
    known, looked = check(graph, _columns), check(read, _columns)
    assert known.describe() == looked.describe()
    planned = plan(known)
    assert explain(planned) == explain(plan(looked))
    assert planned.digest == fingerprint(graph)
    assert not diff(graph, read).nodes


class NotedReward(Reward):
    """A user's own schema, which another extends."""

    row = "completion"
    note = column(pa.utf8())


class Twice(NotedReward):
    second = column(pa.list_(pa.float32(), 4), "T", device=True)


@operator(scope="group", reads={"rollout": ["answer"]})
def noted(
    rollout: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1, word: str = "x"
) -> Columns[Twice]:
    raise AssertionError("it is only looked at")


@dataclass(frozen=True)
class Rule:
    """A reward that is a value."""

    weight: float

    def __call__(self, completions: list[str]) -> list[float]:
        raise AssertionError("it is only looked at")


def _trained(rollout: Port[Rollout], score: Port[Reward]) -> Graph:
    return graph_of(rollout, clipped_policy_loss(compared(rollout, score)))


def _own_parts(*fns: Any, word: str = "y") -> Graph:
    rollout = sampled()
    return _trained(rollout, noted(rollout, reward(list(fns), rollout), word=word))


def _read(graph: Graph) -> Graph:
    """The graph by its declarations, which are drawn and written as the graph is."""
    written = to_json(graph)
    read = from_json(written, imports=False)
    assert (draw(read), to_json(read)) == (draw(graph), written)
    return read


def test_user_schemas_operators_and_rewards_stand_in_for_themselves() -> None:
    graph = _own_parts(exact, Rule(0.5))
    read = _read(graph)
    (schema,) = read.node("noted").schemas
    assert schema is not Twice
    assert issubclass(schema, Reward)
    assert schema.describe() == Twice.describe()
    assert schema is _read(graph).node("noted").schemas[0]
    with pytest.raises(GraphError, match="read without being imported, and cannot be called"):
        read.node("reward").params["fns"][0](completions=[])
    assert diff(read, _read(_own_parts(exact, Rule(0.5), word="z"))).nodes


def test_a_graph_of_local_functions_can_be_looked_at() -> None:
    @operator()
    def halved(score: Columns[Reward]) -> Columns[Reward]:
        return score

    rollout = sampled()
    score = halved(reward([exact, lambda completions: [1.0 for _ in completions]], rollout))
    graph = _trained(rollout, score)
    assert check(_read(graph), _columns).describe() == check(graph, _columns).describe()


def _forged(change: Change, graph: Graph | None = None) -> str:
    document = json.loads(to_json(graph or _own_parts(exact)))
    change(document)
    return json.dumps(document)


def _looked_at(text: str) -> None:
    """As the command line does it: drawn and checked, or refused by one error."""
    with contextlib.suppress(GraphError), reading("graph.json"):
        graph = from_json(text, imports=False)
        draw(graph)
        check(graph, _columns)


LOUD = "tests_loud_module"


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that records that it ran, where an import of its name finds it."""
    (tmp_path / f"{LOUD}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "ran"


def _param(node: int, key: str, value: Any) -> Change:
    return lambda d: d["nodes"][node]["params"].update({key: value})


def _node(number: int, **fields: Any) -> Change:
    return lambda d: d["nodes"][number].update(fields)


def _state(**fields: Any) -> Change:
    return lambda d: d["states"][0].update(fields)


def _first(kind: str, document: dict[str, Any]) -> dict[str, Any]:
    """What a file declares first of this kind."""
    return next(iter(document["declared"][kind].values()))


def _declared_operator(d: dict[str, Any]) -> None:
    d["nodes"][3].update(operator=f"{LOUD}:f")
    d["declared"]["operators"][f"{LOUD}:f"] = _first("operators", d)


INNER = {"dict": [["host", f"{LOUD}.inner:K"]]}
CHANGES: dict[str, Change] = {
    "operator": _node(1, operator=f"{LOUD}:f"),
    "declared operator": _declared_operator,
    "reader of data": lambda d: _first("operators", d)["fields"].update(data_columns=f"{LOUD}:f"),
    "function": _param(2, "fns", {"tuple": [{"function": f"{LOUD}:f"}]}),
    "class": _param(2, "timeout", {"class": f"{LOUD}:C"}),
    "record": _param(2, "timeout", {"record": f"{LOUD}:C", "fields": {"a": 1}}),
    "schema": _node(1, schemas=[{"class": f"{LOUD}:C"}]),
    "kernel": lambda d: _first("operators", d)["fields"].update(kernels=INNER),
    "base of a schema": lambda d: _first("schemas", d).update(bases=[f"{LOUD}:C"]),
    "state": _state(kind=f"../{LOUD}:C"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_that_a_file_names_is_imported(name: str, loud: Path) -> None:
    _looked_at(_forged(CHANGES[name]))
    assert not loud.exists()
    assert LOUD not in sys.modules


PATHS = """
operators.data:importlib operators.kernels.host:ColumnFunction dataflow.shipping:pickle
operators.data_files:os dataflow.operator:functools operators.no_such:f operators:data
dataflow.errors.:GraphError dataflow.__init__:Graph dataflow./../../x:f
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_of_this_project_only_what_a_module_defines_itself_is_found(path: str) -> None:
    text = _forged(lambda d: d["nodes"][0].update(operator=path))
    with pytest.raises(GraphError, match=r"node 'prompts': .*Fix: "):
        from_json(text, imports=False)


def _loss(**fields: Any) -> Change:
    return _param(5, "loss", {"record": "dataflow.loss_terms:Loss", "fields": fields})


UNDECLARED = r"is not declared in it, and nothing is imported to look at a graph"
NO_ENTRY = r"expected an entry with its inputs, found 'nothing'"
NO_NUMBER = r"expected a number of NumPy, found 'V9'"


@pytest.mark.parametrize("change, message", [
    (_loss(terms=5), r"expected Loss.terms to be"),
    (_loss(), r"Loss needs terms, which are not there"),
    (_loss(a=5), r"Loss has no field 'a'"),
    (_param(5, "lr", {"numpy": "V9", "value": 10**12}), NO_NUMBER),
    (_param(5, "lr", {}), r"expected a written value, found an object with 'nothing'"),
    (_node(1, inputs={"prompt": [-1, 0]}), r"expected a number below 1, found -1"),
    (_node(1, inputs={"prompt": [0, 7]}), r"expected a number below 1, found 7"),
    (_node(1, inputs={"prompt": [True, 0]}), r"expected a number below 1, found True"),
    (_node(1, states={"model": 9}), r"expected a number below 1, found 9"),
    (_state(follows=0), r"it follows itself"),
    (_state(base=7), r"expected Model.base to be str, found 7"),
    (_state(kind="Schedule"), r"expected a kind of Model, Buffer, Table"),
    (lambda d: d.update(sinks=["a"]), r"sinks: expected a number below 6, found 'a'"),
    (lambda d: d.update(declared={}), UNDECLARED),
    (lambda d: d.update(declared={"schemas": 5}), r"expected declarations by path"),
    (lambda d: d["nodes"].append(5), r"node: expected an entry with its name, found 5"),
    (lambda d: d["nodes"][2].pop("inputs"), NO_ENTRY),
])  # fmt: skip
def test_what_no_run_writes_is_refused(change: Change, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        from_json(_forged(change), imports=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda j: st.lists(j, max_size=3) | st.dictionaries(st.text(max_size=8), j, max_size=3),
    max_leaves=6,
)


@settings(max_examples=example_count(40))
@given(st.data())
def test_any_part_may_be_anything(data: st.DataObject) -> None:
    """It becomes a graph, or an error of the family or one that `received.reading` makes one."""
    document = json.loads(to_json(_own_parts(exact, Rule(1.0))))
    at = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(at[key], (dict, list)) and at[key] and data.draw(st.integers(0, 9))):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    _looked_at(json.dumps(document))


def test_deep_and_gigantic_json_is_refused() -> None:
    _looked_at("[" * 100_000)
    _looked_at('{"format": 1' + "0" * 5000 + "}")
    _looked_at(_forged(lambda d: d).replace('"x8"', "1e999"))
    deep = 1
    for _ in range(400):
        deep = {"tuple": [deep]}
    with pytest.raises(GraphError, match="nested too deep"):
        from_json(_forged(_param(2, "timeout", deep)), imports=False)


def test_a_snapshot_of_format_1_is_read_where_it_names_nothing_of_the_users() -> None:
    def older(document: dict[str, Any]) -> None:
        document["format"] = 1
        del document["declared"]

    sft = RIGHT[3]()
    assert from_json(_forged(older, sft), imports=False) == sft
    assert from_json(_forged(older)) == _own_parts(exact)
    with pytest.raises(GraphError, match=r"is not declared in it.*Fix: write the snapshot anew"):
        from_json(_forged(older), imports=False)


def test_the_modules_that_a_run_of_it_imports_are_known_before() -> None:
    assert modules(to_json(_own_parts(exact, Rule(1.0)))) == (__name__, "tests.kit.rewards")
    assert modules(to_json(grpo("m", "d", exact))) == ("tests.kit.rewards",)


def test_what_is_imported_is_said_with_its_place_and_nothing_is_imported_for_it(
    loud: Path, tmp_path: Path
) -> None:
    file, behind = tmp_path / "graph.json", tmp_path / "behind"
    file.write_text(_forged(CHANGES["function"], grpo("m", "d", exact)))
    assert list_imports(file) == [f"imports {LOUD} from {tmp_path / LOUD}.py"]
    behind.mkdir()
    (tmp_path / f"{LOUD}.py").rename(behind / f"{LOUD}.py")
    assert list_imports(file) == [f"imports {LOUD} from nowhere: it is not found"]
    assert list_imports(file, [str(behind)]) == [
        f"imports {LOUD} from {behind / LOUD}.py",
        f"what these import is also looked for in {behind}",
    ]
    assert not loud.exists()


def test_a_stand_in_schema_has_no_column_of_a_name_that_means_something() -> None:
    written = {"bases": ["dataflow.schema:Reward"], "body": {"__slots__": 1}}
    text = _forged(lambda d: d["declared"]["schemas"].update({f"{__name__}:Twice": written}))
    with pytest.raises(GraphError, match="expected names of columns, found '__slots__'"):
        from_json(text, imports=False)
