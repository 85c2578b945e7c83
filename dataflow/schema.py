"""Schemas: named, typed columns of one kind of row.

Owns: the vocabulary of schemas that every operator speaks, and what a schema inherits. Does not
own: what a column is (column.py), rows (batch.py), which rows a port has (rows.py), tensors
(device.py, operators/kernels/tensors.py).

A Schema is a class and is never instantiated: it is the type argument of Port, so that a type
checker follows each wire. A subclass adds columns; one of several schemas has the columns of all. A
Rollout is a Completion, but not a Prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pyarrow as pa

from dataflow.calls import call_error
from dataflow.column import Axis as Axis
from dataflow.column import Column as Column
from dataflow.column import column as column


class Schema:
    """Base of all schemas. `row` says what one row stands for."""

    row: ClassVar[str] = "anything"
    columns: ClassVar[dict[str, Column]] = {}
    vocabulary: ClassVar[bool] = False
    """Whether the rows have token ids, and so belong to one tokenizer."""
    tokens: ClassVar[str] = ""
    """The column with a value for each token that counts for a row's length; empty if none does."""
    shown: ClassVar[tuple[str, ...]] = ()
    """The columns that samples record of a trained row, in this order."""
    inside: ClassVar[tuple[str, ...]] = ()
    """The columns that they also record where its tokens are looked at (`--samples full`)."""

    def __init_subclass__(cls) -> None:
        own_columns: dict[str, Column] = {}
        for name, attribute in vars(cls).items():
            if isinstance(attribute, Column):
                own_columns[name] = replace(attribute, name=name)
            elif isinstance(attribute, pa.DataType):
                problem = f"expected {name} to be a column, found the type {attribute}"
                raise call_error(f"schema {cls.__name__}", problem, f"{name} = column(...)")
        inherited = _inherited_columns([b for b in cls.__bases__ if issubclass(b, Schema)])
        for base in cls.__mro__[1:]:
            # Readers of any base look for a column where that base has it, not the nearest one.
            for name, base_column in getattr(base, "columns", {}).items():
                new_column = own_columns.get(name, inherited[name])
                _require_one_form(cls.__name__, base.__name__, base_column, new_column)
        cls.columns = dict(inherited)
        for name, own_column in own_columns.items():
            cls.columns[name] = _with_bounds(own_column, inherited.get(name))

    @classmethod
    def describe(cls) -> str:
        """`Advantage (advantage: float per completion token)`, the form used in messages."""
        columns = ", ".join(f"{each.name}: {_form(each)}" for each in cls.columns.values())
        return f"{cls.__name__} ({columns})" if columns else cls.__name__


def common_schema(schemas: Sequence[type[Schema]]) -> type[Schema]:
    """The nearest schema that rows of all of these are, or become with values of absent columns.

    Rollout and Completion: Completion. Rollout and TruncatedRollout: TruncatedRollout, as nothing
    truncated a Rollout. Schema itself, without columns, if they have nothing in common.
    """
    candidates: dict[type[Schema], None] = {}
    for schema in schemas:
        candidates |= dict.fromkeys(b for b in schema.__mro__ if issubclass(b, Schema))
    common = [each for each in candidates if all(_becomes(schema, each) for schema in schemas)]
    return next(each for each in common if not _has_subclass(each, common))


def _has_subclass(schema: type[Schema], others: Sequence[type[Schema]]) -> bool:
    return any(other is not schema and issubclass(other, schema) for other in others)


def _becomes(schema: type[Schema], other: type[Schema]) -> bool:
    """Whether rows of a schema have every column of the other, but for those with a value where
    they are absent.
    """
    for base in other.__mro__:
        if not issubclass(base, Schema) or issubclass(schema, base):
            continue
        added_columns = [each for each in vars(base).values() if isinstance(each, Column)]
        if any(each.absent is None for each in added_columns):
            return False
    return True


def _with_bounds(new: Column, inherited: Column | None) -> Column:
    """A column that is declared again, within the bounds of its base unless it names its own."""
    if inherited is None or new.name == "prompt":  # text in one schema, ids in another
        return new
    if new.least is None:
        new = replace(new, least=inherited.least)
    if new.most is None:
        new = replace(new, most=inherited.most)
    return new


def _inherited_columns(bases: list[type[Schema]]) -> dict[str, Column]:
    """The columns of several schemas; of two with one name the first."""
    columns: dict[str, Column] = {}
    for base in reversed(bases):
        # A base's own columns stand before those of the bases behind it.
        others = {name: each for name, each in columns.items() if name not in base.columns}
        columns = base.columns | others
    return columns


def _form(col: Column) -> str:
    """`float per completion token`, the form used in messages."""
    per = {"P": "prompt token", "T": "completion token", "K": "turn", None: "row"}[col.axis]
    place = " on its device" if col.device else ""
    return f"{_type_word(col.type)} per {per}{place}"


def _type_word(kind: pa.DataType) -> str:
    if pa.types.is_fixed_size_list(kind):
        return f"{kind.list_size} {_type_word(kind.value_type)}s"
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        return f"{_type_word(kind.value_type)}s"
    if pa.types.is_floating(kind):
        return "float"
    if pa.types.is_integer(kind):
        return "int"
    return "text" if pa.types.is_string(kind) else str(kind)


def _require_one_form(schema: str, base: str, base_column: Column, new: Column) -> None:
    """Raises GraphError for a column, declared again or inherited from another schema, whose place
    or type is not what readers of this base expect. A prompt may be text, messages or token ids,
    and a list of any length one of a fixed length.
    """
    has_same_form = new.axis == base_column.axis and _narrows(new.type, base_column.type)
    if new.device != base_column.device:
        place, other = ("a device", "the host") if new.device else ("the host", "a device")
        problem = (
            f"has {new.name!r} on {place}, and {base}, which it extends, on {other}, where its"
            " readers look"
        )
        fix = f"another name, or device={base_column.device}"
    elif new.name != "prompt" and not has_same_form:
        base_form = _form(base_column)
        problem = f"has {new.name!r} as {_form(new)}, and {base}, which it extends, as {base_form}"
        fix = f"another name for one of the two columns {new.name!r}"
    elif new.nullable and not base_column.nullable:
        problem = (
            f"has {new.name!r} with nulls, and the readers of {base}, which it extends, expect none"
        )
        fix = f"nullable=False, or another name than {new.name!r}"
    else:
        return
    raise call_error(f"schema {schema}", problem, fix)


def _narrows(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether all values of the one type are values of the other."""
    if kind == other:
        return True
    is_fixed = pa.types.is_fixed_size_list(kind) and pa.types.is_list(other)
    return is_fixed and kind.value_type == other.value_type


MESSAGE = pa.struct([pa.field("role", pa.utf8()), pa.field("content", pa.utf8())])
"""One chat message, OpenAI style."""


class Prompt(Schema):
    """A task to answer. Dataset columns of other names travel with it on request."""

    row = "prompt"
    shown = ("prompt",)
    prompt = column(
        pa.utf8(),
        doc="a string, a list of messages (then the column is list<struct<role, content>>) or, of"
        " data, of token ids (list<int32>)",
    )


class TokenPrompt(Prompt):
    """A prompt as token ids, which is answered as it is: no template, no tokenizer."""

    vocabulary = True
    prompt = column(pa.int32(), "P", least=0)
    prompt_text = column(pa.utf8(), doc="what the ids say, special tokens left out; for readers")


class Completion(Schema):
    """Token ids of a prompt and of its answer."""

    row = "completion"
    vocabulary = True
    tokens = "completion_ids"
    prompt_ids = column(pa.int32(), "P", least=0)
    completion_ids = column(pa.int32(), "T", least=0)
    completion_mask = column(
        pa.uint8(),
        "T",
        least=0,
        most=1,
        doc="1 where the model wrote the token and is trained on it",
    )
    completion = column(pa.utf8(), doc="the answer as text, special tokens left out")


POLICY = (
    "softmax(logits / temperature) over the whole vocabulary, before top-k and top-p; temperature 1"
    " where greedy"
)
"""The distribution of recorded log-probs. A forward pass over the finished row, which knows nothing
of top-k and top-p, computes the same numbers: so they are the `old` of a ratio, and comparable
between sampler and trainer.
"""


class Rollout(Completion):
    """A completion with what its sampler recorded."""

    shown = ("completion", "prompt_ids", "completion_ids", "completion_mask", "finish", "version")
    inside = ("sampler_logprobs", "sampler_mass")
    sampler_logprobs = column(
        pa.float32(),
        "T",
        most=0.0,
        doc="of the policy that sampled, at the sampling temperature",
        distribution=POLICY,
    )
    version = column(pa.int32(), "T", least=0, doc="version of the weights that made each token")
    finish = column(pa.utf8(), doc="stop, length, error or abort")


class TruncatedRollout(Rollout):
    """A Rollout whose sampler drew from a part of its distribution, as top-k or top-p cut the rest.

    sampler_logprobs - sampler_mass are the log-probs in that part, which the tokens were drawn
    from: the behaviour of an importance weight. Without truncation the mass is 1, and there is no
    such column.
    """

    sampler_mass = column(
        pa.float32(),
        "T",
        most=0.0,
        doc="log of the probability that top-k and top-p kept, <= 0",
        distribution=POLICY,
        absent=0.0,
    )


class Episode(Rollout):
    """A rollout of several turns: what the model wrote, and between that what it was answered.

    Tokens that the model did not write have mask 0, log-prob 0 and the version of the token before
    them. turn_end, turn_reward: an entry for each turn that the model wrote. finish: stop, length,
    turns or timeout; an episode that fails has no row.
    """

    shown = (
        *Rollout.shown,
        *("messages", "turn_end", "turn_reward", "final_reward", "environment_state"),
        *("model_seconds", "environment_seconds"),
    )
    inside = (*Rollout.inside, "turn")
    turn = column(pa.uint16(), "T", doc="from 0 on; an answer to a turn belongs to that turn")
    turn_end = column(
        pa.int32(), "K", least=1, doc="completion tokens up to the last one that the turn wrote"
    )
    turn_reward = column(pa.float32(), "K", nullable=True, doc="null where a turn has none")
    final_reward = column(pa.float32(), nullable=True, doc="for the episode as a whole")
    messages = column(pa.utf8(), doc="the whole conversation, a JSON list of messages")
    environment_state = column(pa.utf8(), doc="what the environment exported at its end, as JSON")
    model_seconds = column(
        pa.float32(), "K", least=0.0, measured=True, doc="until the turn was written"
    )
    environment_seconds = column(
        pa.float32(), "K", least=0.0, measured=True, doc="until the turn was answered"
    )


class TruncatedEpisode(Episode, TruncatedRollout):
    """An Episode whose sampler drew from a part of its distribution."""


class Segment(Episode):
    """A row of an episode that may have several, each with a prompt of its own.

    finish: `segment` of a row that another one goes on from, of an episode's last row as in
    Episode. messages: all of the conversation up to the row's end, whatever of it the row's prompt
    has. final_reward and environment_state: of the last row alone.
    """

    shown = (*Episode.shown, "episode", "segment")
    episode = column(pa.int32(), least=0, doc="which of its prompt's, from 0 on")
    segment = column(pa.int32(), least=0, doc="which of its episode's rows, from 0 on")


class TruncatedSegment(Segment, TruncatedEpisode):
    """A Segment whose sampler drew from a part of its distribution."""


class Reward(Schema):
    """A number for each row, and each function's own number under `reward/<function>`."""

    row = "completion"
    shown = ("reward",)
    reward = column(pa.float32())


class Transition(Rollout, Reward):
    """One turn of an episode: the prompt is all that stood before it, the completion what it wrote.

    The rows of an episode come one after another, in order: the state after a turn is the prompt of
    the next row, and after one that is `done` there is none. finish: of an episode's last turn that
    of the episode, of the others `stop`.
    """

    row = "turn"
    episode_id = column(pa.int64(), least=0, doc="the same for all turns of an episode")
    turn = column(pa.int32(), least=0, doc="from 0 on")
    done = column(pa.uint8(), least=0, most=1, doc="1 in an episode's last turn")


class TruncatedTransition(Transition, TruncatedRollout):
    """A Transition whose sampler drew from a part of its distribution."""


class TokenReward(Reward):
    """A reward spread over tokens; sums to `reward`."""

    token_reward = column(pa.float32(), "T", instead_of="reward")


class Logprobs(Schema):
    """Log-probability of each completion token under some Model."""

    row = "completion"
    inside = ("logprobs",)
    logprobs = column(pa.float32(), "T", most=0.0, distribution=POLICY)


class Values(Schema):
    """Expected return at each completion token, before the token is written."""

    row = "completion"
    values = column(pa.float32(), "T")


class Advantage(Schema):
    """How much better than expected each token was; 0 where the mask is 0."""

    row = "completion"
    shown = ("advantage",)
    advantage = column(pa.float32(), "T")


class Returns(Advantage):
    """An advantage together with the critic's target."""

    returns = column(pa.float32(), "T")


class Weight(Schema):
    """How much a row's generation is expected to take, in any unit: greater is more."""

    weight = column(pa.float32())


class RankTerms(Schema):
    """A row's share of a loss of the order of all rows, and how it changes with the row's score."""

    score = column(pa.float32(), doc="of the row, at which term and slope were computed")
    term = column(pa.float32(), least=0.0, doc="the row's share of the loss")
    slope = column(pa.float32(), doc="derivative by the row's score of the sum of all terms")


class Keep(Schema):
    """Which rows stay."""

    row = "completion"
    keep = column(pa.uint8(), least=0, most=1)


class Preference(Keep):
    """Two rows of a group, one chosen (+1) and one rejected (-1)."""

    sign = column(pa.int8(), least=-1, most=1)
