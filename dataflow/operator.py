"""Operators: declarations of what a node may be.

Owns: what an operator declares (inputs, outputs, rows, scope, States, kernels). Does not own: how
it is called (calls.py), a use of an operator (node.py), a user's own operators (user.py), anything
that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from dataflow.calls import call_site as call_site
from dataflow.calls import declares as declares
from dataflow.calls import refuse_unknown as refuse_unknown
from dataflow.convention import Convention
from dataflow.limits import Limit
from dataflow.needs import Needs
from dataflow.schema import Schema

Work = Literal[
    "source",
    "tokenise",
    "host",
    "decode",
    "forward",
    "train",
    "evaluate",
    "select",
    "store",
    "replay",
    "record",
]
"""What a node's kernel does; the planner sizes it and the coordinator schedules it by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a kind of work means to the check, the planner and a run; they look at nothing else.

    computes: with a Model, so that it takes cores or a device. steps: runs once in a Step, on its
    rows, and writes a State: what it has then is the next version. generates: samples tokens with
    a Model, at its parameter `temperature`. writes_tokens: its rows' token ids are its own, not an
    ancestor's. moves_rows: has columns of its own; otherwise readers fetch from the nodes above.
    chunked: runs on chunks of rows, whenever they are ready.
    """

    computes: bool = False
    generates: bool = False
    writes_tokens: bool = False
    moves_rows: bool = True
    chunked: bool = True
    steps: bool = False


TRAITS: Mapping[Work, Traits] = MappingProxyType(
    {
        "source": Traits(writes_tokens=True),
        "tokenise": Traits(writes_tokens=True),
        "host": Traits(),
        "decode": Traits(computes=True, generates=True, writes_tokens=True),
        "forward": Traits(computes=True),
        "train": Traits(computes=True, chunked=False, steps=True),
        "evaluate": Traits(chunked=False),
        "select": Traits(moves_rows=False),
        "store": Traits(),
        "replay": Traits(),
        "record": Traits(chunked=False, steps=True),
    }
)

Scope = Literal["row", "group", "batch"]
"""The smallest set of rows that a kernel must see at once."""

Keeps = Literal["rows", "groups", "pairs"]
"""What a selection leaves of a group: any rows, all or none, or two."""


@dataclass(frozen=True, slots=True)
class Same:
    """Output rows are those of an input."""

    of: str


@dataclass(frozen=True, slots=True)
class Expand:
    """Each row of an input becomes n rows of its own; n is the name of a parameter. times: of one
    by which that is multiplied, empty for none.

    This also holds for n=1: another answer to the same prompt is another row. The input's rows, and
    those above, are read by key (an input declared `parent`); only `mean_over` leads from these
    rows back up.
    """

    of: str
    n: str
    times: str = ""


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of the input's rows; made by `select` only."""

    of: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """The rows of the input `to`, ancestors of those of `of`: each is made from its remaining
    descendants.
    """

    of: str
    to: str


@dataclass(frozen=True, slots=True)
class Concat:
    """The rows of all inputs: for each prompt those of the first, then those of the second, and so
    on; made by `concat` only.
    """


@dataclass(frozen=True, slots=True)
class Fresh:
    """Rows of its own: a source, or a draw from a Buffer. Each position has `per` rows."""

    per: int = 1


@dataclass(frozen=True, slots=True)
class Nothing:
    """A sink: no rows come out."""


Rows = Same | Expand | Subset | Reduce | Concat | Fresh | Nothing


EVERY_COLUMN = "*"
"""Among columns that a reader asks for: all of the dataset."""
DATA_ROW = "data/row"
"""Among these: which row of the data a row stands on, int64 from 0 on. Its source makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A data input of an operator, or of a loss.

    rows: `rows` (the same rows as the first input) or `parent` (an ancestor's rows, looked up by
    key). columns: those that are read; None means all that the schema declares. ancestors: columns
    read from any ancestor (dataset columns, the prompt); `ancestors_from` names a parameter that
    lists more of them, `*` for all, and `required_from` one that lists those without which the node
    cannot work. readable: a prompt is read as text or messages, so of one made of token ids
    `prompt_text` in place of `prompt`. engine_names: module:function of the node's params that
    returns the names under which its functions get the engine's own values, and so no dataset
    column of that name. entries_of: a column of JSON objects; where the port has it, a name of
    `ancestors_from` that no column has may be an entry of these, which only the run knows.
    """

    name: str
    schema: type[Schema]
    rows: Literal["rows", "parent"] = "rows"
    optional: bool = False
    columns: tuple[str, ...] | None = None
    ancestors: tuple[str, ...] = ()
    ancestors_from: str = ""
    required_from: str = ""
    readable: bool = False
    engine_names: str = ""
    entries_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A declaration. `path` is module:attribute, where a snapshot finds it again."""

    path: str
    name: str
    work: Work
    rows: Rows
    scope: Scope = "row"
    inputs: tuple[Input, ...] = ()
    variadic: Input | None = None
    """Any number of further inputs of this kind, named `<name>0`, `<name>1`, ..."""
    outputs: tuple[type[Schema], ...] = ()
    reads: tuple[str, ...] = ()
    """State parameters that it reads."""
    writes: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Kernel name -> module:Class, in order of preference."""
    needs: Mapping[str, Needs] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Kernel name -> what it needs; by default nothing."""
    keeps: Keeps | None = None
    """For an operator that selects rows: what it leaves of a group; the kernel verifies it."""
    schedulable: tuple[str, ...] = ()
    """Parameters that may be a schedule of the Step."""
    limits: Mapping[str, Limit] = field(default_factory=lambda: MappingProxyType({}))
    """Parameter -> the values it takes; the check refuses others."""
    fixed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Parameter -> why it cannot change between two Steps of a run. All others can: what is made
    from the next Step on is made with the new value.
    """
    data_columns: str = ""
    """For a source that reads its parameter `data`: module:function of (data, split) that returns
    the file's columns.
    """
    data_overlap: str = ""
    """For such a source: module:function of (data, split, other data, other split) that tells
    whether the two can share rows.
    """
    data_rows: str = ""
    """For such a source: module:function of (data, split) that returns its number of rows; None if
    that cannot be known without reading them.
    """
    data_longest: str = ""
    """For a source of prompts: module:function of (data, split) that returns the most tokens that a
    prompt can have; None if that is not known.
    """
    data_tokens: str = ""
    """For such a source: module:function of (data, split, base) that counts the tokens of some
    rows by the tokenizer of a Model's base: TokenCounts, or NotCounted, which says why.
    """
    data_files: str = ""
    """For such a source: module:function of (data, split) that returns its files, in order, or
    digests (text) of rows that are in no file of the user's.
    """
    data_optional: tuple[str, ...] = ()
    """For such a source: columns of its data that it can do without."""
    repeats: tuple[str, ...] = ()
    """Parameters that repeat those of the generation of its first input's rows."""
    whole_episodes: bool = False
    """Whether it takes each row for all of an episode: segments of one are refused."""
    normalises: Literal["", "group", "batch"] = ""
    """For an operator on advantages: the rows over which it makes them comparable."""
    log_probs: bool = False
    """Whether it recomputes its rows' log-probs under its Model, at its parameter `temperature` (if
    None, at that of their generation).
    """
    reads_text: bool = False
    """Whether it reads its rows as text, and tokenises them with the tokenizer of its own Model:
    their token ids mean nothing to it.
    """
    decodes: str = ""
    """The input whose token ids it reads as text, by the tokenizer of the Model that wrote them."""
    replayed: str = ""
    """For an operator that samples tokens: the kernel, module:Class, that computes the log-probs of
    its recorded rows with its Model, at its parameter `temperature`.
    """
    parts: str = ""
    """The columns besides its schema's, one for each user function in its parameter `fns`
    (`reward/*`).
    """
    part_names: str = ""
    """For such an operator: module:function of its params that returns the functions' names. Where
    another node has one of the same name, the plan gives the node the parameter `part_names`.
    """
    conventions: Mapping[str, Convention] = field(
        default_factory=lambda: MappingProxyType({}), compare=False
    )
    """For an operator with a parameter `dialect`: what it does in each."""
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """A user operator's own function."""

    @property
    def traits(self) -> Traits:
        """What its kind of work means."""
        return TRAITS[self.work]

    @property
    def built_in(self) -> bool:
        """Whether this project declares it; the inputs of other operators are unknown."""
        return self.path.startswith("operators.")

    @property
    def tokenises(self) -> bool:
        """Whether it makes token ids of the data's texts, with the tokenizer of the Model that
        reads them.
        """
        makes = self.work in ("source", "tokenise")
        return makes and any(schema.vocabulary for schema in self.outputs)

    def input(self, name: str) -> Input:
        """The declared input of that name (numbered ones are the variadic's)."""
        for declared in self.inputs:
            if declared.name == name:
                return declared
        if self.variadic is None:
            raise KeyError(name)
        return self.variadic


def list_columns(params: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """List the columns that a parameter names: one, several, or none if the operator has no such
    parameter. name: the parameter's; may be empty.
    """
    if not name:
        return ()
    param = params.get(name, ())
    names = param if isinstance(param, (list, tuple)) else (param,)
    return tuple(each for each in names if isinstance(each, str))
