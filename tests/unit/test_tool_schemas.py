"""What a model is told of a function, as transformers writes it; arguments of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Dict, List, Literal, Optional, Tuple, Union  # noqa: UP035

import hypothesis.strategies as st
import pytest
from hypothesis import given
from transformers.utils import get_json_schema

from operators.kernels.environments.child.tool_arguments import (
    convert_arguments,
    find_argument_problem,
)
from operators.kernels.environments.child.tool_schemas import ToolSchemaError, describe_tool


class Colour(Enum):
    """What a tool may be asked for."""

    RED = "red"
    BLUE = "blue"


def plain(text: str, count: int, share: float, is_on: bool) -> str:
    """Does something plain.

    Args:
        text: The text,
            over two lines.
        count: How many: at most 3.
        share: Which part.
        is_on: Whether it is on.

    Returns:
        The same text.
    """
    return text * count


def optional(
    text: str | None,
    number: Optional[int] = None,  # noqa: UP045 - as many write it
    flag: bool | None = True,
) -> None:
    """Takes what may be absent.

    Args:
        text: A text.
        number: A number.
        flag: A flag.
    """


def chosen(unit: Literal["C", "F"], level: Literal[1, 2, None], colour: Colour = Colour.RED) -> int:
    """Chooses.

    Args:
        unit: Of temperature.
        level: How much.
        colour: Which one.
    """
    return 0


def nested(
    names: list[str],
    sizes: dict[str, list[int]],
    pair: tuple[int, str],
    colours: list[Colour] | None = None,
    anything: list = [],  # noqa: B006 - a signature, never called
    table: dict = {},  # noqa: B006
) -> dict[str, Any]:
    """Takes nested things.

    It says more
    about itself.

    Args:
        names: Names.
        sizes: Sizes.
        pair: Two.
        colours: Colours.
        anything: Anything.
        table: A table.

    Raises:
        ValueError: never.
    """
    return {}


def united(
    either: int | str,
    several: Union[int, float, None],  # noqa: UP007 - as many write it
    mixed: list[int] | str,
    free: Any,
) -> Sequence[str]:
    """Takes one of several. Args of no kind.

    Args:
        either: One.
        several: Several.
        mixed: Mixed.
        free: Free.

    Returns:
        Nothing that JSON has.
    """
    return ()


def older(
    many: List,  # noqa: UP006 - as many write it
    table: Dict,  # noqa: UP006
    pair: Tuple,  # noqa: UP006
    texts: List[str],  # noqa: UP006
) -> None:
    """Has types of typing.

    Args:
        many: Many.
        table: A table.
        pair: A pair.
        texts: Texts.
    """


def offered(drink: str) -> str:
    """Offers.

    Args:
        drink: What to drink (choices: ["tea", "coffee "])
    """
    return drink


def silent() -> None:
    """Takes nothing."""


class Shelf:
    """A class with a method."""

    def put(self, book: str, copies: int = 1) -> str:
        """Puts a book.

        Args:
            book: Its title.
            copies: How many.
        """
        return book

    @staticmethod
    def count(self_name: str) -> int:
        """Counts.

        Args:
            self_name: A name.
        """
        return 1


FUNCTIONS = [
    plain,
    optional,
    chosen,
    nested,
    united,
    older,
    offered,
    silent,
    Shelf.put,
    Shelf().put,
]


@pytest.mark.parametrize("function", [*FUNCTIONS, Shelf.count])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    assert describe_tool(function) == get_json_schema(function)


def test_an_argument_may_lack_a_description() -> None:
    def short(word: str) -> str:
        """Does little."""
        return word

    parameters = describe_tool(short)["function"]["parameters"]
    assert parameters["properties"] == {"word": {"type": "string"}}


def undocumented(word: str) -> str:
    return word


def untyped(word) -> str:  # type: ignore[no-untyped-def]
    """Has no type."""
    return word


def strange(word: complex) -> str:
    """Has a type that JSON has not."""
    return str(word)


def spread(*words: str) -> str:
    """Takes any number."""
    return ""


@pytest.mark.parametrize(
    "function, problem",
    [
        (undocumented, "docstring"),
        (untyped, "type hint"),
        (strange, "complex"),
        (spread, "a name each"),
    ],
)
def test_functions_without_a_schema_are_refused(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ToolSchemaError, match=problem):
        describe_tool(function)
    with pytest.raises(ToolSchemaError, match="Fix:"):
        describe_tool(function)


@pytest.mark.parametrize(
    "function, arguments, problem",
    [
        (plain, {"text": "a", "count": 1, "share": 1, "is_on": True}, None),
        (plain, {"text": "a", "count": 2.0, "share": 0.5, "is_on": False}, None),
        (plain, {"text": "a", "count": 1, "share": 1}, "'is_on' is missing"),
        (plain, {"texts": "a"}, "no argument 'texts'; the arguments are: text, count"),
        (plain, {"text": 1, "count": 1, "share": 1, "is_on": True}, "text to be string, found 1"),
        (plain, {"text": "a", "count": True, "share": 1, "is_on": True}, "count to be integer"),
        (plain, {"text": "a", "count": 1.5, "share": 1, "is_on": True}, "found 1.5"),
        (plain, {"text": "a", "count": 1, "share": "1", "is_on": True}, "share to be number"),
        (plain, "text", "expected arguments to be an object"),
        (optional, {"text": None, "number": None}, None),
        (chosen, {"unit": "K", "level": 1}, 'one of "C", "F", found "K"'),
        (chosen, {"unit": "C", "level": None, "colour": "blue"}, None),
        (nested, {"names": ["a", 1], "sizes": {}, "pair": [1, "b"]}, "names to be with parts"),
        (nested, {"names": [], "sizes": {"a": ["b"]}, "pair": [1, "b"]}, "sizes"),
        (nested, {"names": [], "sizes": {}, "pair": [1]}, "a list of 2"),
        (united, {"either": "a", "several": 2.5, "mixed": [1], "free": {}}, None),
        (united, {"either": 0.5, "several": 1, "mixed": "a", "free": 1}, "integer or string"),
        (offered, {"drink": "milk"}, 'one of "tea", "coffee"'),
    ],
)
def test_arguments_are_checked(
    function: Callable[..., Any], arguments: Any, problem: str | None
) -> None:
    schema = describe_tool(function)["function"]["parameters"]
    answer = find_argument_problem(schema, arguments)
    assert answer is None if problem is None else problem in (answer or "")


def test_arguments_become_what_annotations_say() -> None:
    arguments = {"names": ["a"], "sizes": {"b": [1.0]}, "pair": [1, "c"], "colours": ["blue"]}
    converted = convert_arguments(nested, arguments)
    assert converted["pair"] == (1, "c")
    assert converted["colours"] == [Colour.BLUE]
    assert type(converted["sizes"]["b"][0]) is int
    assert convert_arguments(chosen, {"colour": "red"}) == {"colour": Colour.RED}
    assert convert_arguments(optional, {"text": None, "number": 2.0}) == {"text": None, "number": 2}


TEXTS = st.sampled_from(["red", "blue", "", "a"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | TEXTS
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
NESTED = st.fixed_dictionaries(
    {
        "names": st.lists(TEXTS, max_size=2) | JSON_VALUES,
        "sizes": st.dictionaries(TEXTS, st.lists(st.integers(), max_size=2)) | JSON_VALUES,
        "pair": st.tuples(st.integers(), TEXTS).map(list) | JSON_VALUES,
        "colours": st.lists(st.sampled_from(["red", "blue"]), max_size=2) | JSON_VALUES,
    }
)


@given(NESTED)
def test_what_fits_can_be_converted(arguments: dict[str, Any]) -> None:
    schema = describe_tool(nested)["function"]["parameters"]
    if find_argument_problem(schema, arguments) is None:
        converted = convert_arguments(nested, arguments)
        colours = [colour.value for colour in converted["colours"] or []]
        assert colours == (arguments["colours"] or [])
        assert list(converted["pair"]) == arguments["pair"]
        assert converted["sizes"] == arguments["sizes"]
