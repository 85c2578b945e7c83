"""Turns as ids that are only appended to, under the chat templates of the families of models."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from dataflow.errors import DataError
from operators.kernels.text import Tokenizer
from operators.kernels.turn_rendering import TurnRenderer
from tests.kit.chat_templates import FAMILIES, family_tokenizer
from tests.kit.models import character_tokenizer

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
ASK = {"role": "user", "content": "2+2?"}
RETRY = {"role": "user", "content": "Sure?"}
FOUR, FIVE = {"role": "tool", "content": "four"}, {"role": "tool", "content": "five"}
WITH_TOOLS = ("qwen2", "qwen3", "llama3", "mistral", "deepseek", "harmony", "glm")
WITHOUT_TOOLS = ("gemma", "phi3", "phi4_mini")
NONE = np.zeros(0, np.int32)


def ids_of(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode([text], special=False)[0], np.int32)


def shown(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.inner.decode(ids.tolist())  # type: ignore[return-value]


def behind(family: str, written: str, *replies: Any) -> str:
    """What stands between a turn and the next one, as text."""
    tokenizer = family_tokenizer(family)
    ids = TurnRenderer(tokenizer).between(ids_of(tokenizer, written), replies, raw=False)
    return shown(tokenizer, ids)


def without_reasoning(text: str) -> str:
    """Nobody wrote any in these tests: templates put empty ones in."""
    text = re.sub(r"<think>\s*</think>\s*", "", text)
    return text.replace("<think>\n", "")


# --- what stands between turns --------------------------------------------------------------------

HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"


@pytest.mark.parametrize("family, replies, expected", [
    ("qwen2", [RETRY], "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen2", [FOUR, FIVE], "<|im_end|>\n<|im_start|>user\n<tool_response>\nfour\n</tool_response>"
     "\n<tool_response>\nfive\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", [RETRY], "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
     "<think>\n"),
    ("llama3", [RETRY], f"<|eot_id|>{HEADER.format('user')}Sure?<|eot_id|>"
     f"{HEADER.format('assistant')}"),
    ("llama3", [FOUR, FIVE], f'<|eot_id|>{HEADER.format("ipython")}"four"<|eot_id|>'
     f'{HEADER.format("ipython")}"five"<|eot_id|>{HEADER.format("assistant")}'),
    ("mistral", [FOUR, FIVE], '</s>[TOOL_RESULTS] {"content": "four", "call_id": "000000000"}'
     '[/TOOL_RESULTS][TOOL_RESULTS] {"content": "five", "call_id": "000000001"}[/TOOL_RESULTS]'),
    ("mistral", [RETRY], "</s>[INST] Sure?[/INST]"),
    ("gemma", [RETRY], "<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n"
     "<start_of_turn>model\n"),
    ("llama2", [RETRY], " </s><s>[INST] Sure? [/INST]"),
    ("phi3", [RETRY], "<|end|>\n<|user|>\nSure?<|end|>\n<|assistant|>\n"),
    ("deepseek", [FOUR], "<｜end▁of▁sentence｜><｜tool▁output▁begin｜>four<｜tool▁output▁end｜>"),
    ("harmony", [RETRY], "<|end|><|start|>user<|message|>Sure?<|end|><|start|>assistant"),
    ("glm", [FOUR], "<|observation|>\n<tool_response>\nfour\n</tool_response><|assistant|>"),
    ("glm", [RETRY], "<|user|>\nSure?<|assistant|>"),
    ("qwen2", [], "<|im_end|>\n<|im_start|>assistant\n"),
])  # fmt: skip
def test_the_end_of_turn_the_replies_and_where_the_assistant_begins_are_appended(
    family: str, replies: list[Any], expected: str
) -> None:
    assert behind(family, "4", *replies) == expected


@pytest.mark.parametrize("family, end, left_out", [
    ("qwen2", "<|im_end|>", "<|im_end|>"), ("qwen2", "<|endoftext|>", "<|im_end|>"),
    ("llama3", "<|eot_id|>", "<|eot_id|>"), ("harmony", "<|return|>", "<|end|>"),
    ("glm", "<|user|>", "<|user|>"), ("glm", "<|endoftext|>", ""), ("phi3", "<|end|>", "<|end|>"),
    ("llama2", "</s>", " </s>"), ("llama2", " </s>", " </s>"),
])  # fmt: skip
def test_an_end_that_the_model_wrote_takes_the_place_of_the_templates(
    family: str, end: str, left_out: str
) -> None:
    """GLM's next turn begins with its header, which another end does not replace."""
    open_turn = behind(family, "4", RETRY)
    assert open_turn.startswith(left_out)
    assert behind(family, f"4{end}", RETRY) == open_turn[len(left_out) :]


def test_an_id_that_the_template_puts_behind_a_whole_conversation_is_no_end_of_turn() -> None:
    """Phi's, where generation_config.json names the eos token alone."""
    phi = family_tokenizer("phi3")
    tokenizer = Tokenizer("phi3", phi.inner, frozenset({phi.eos()}))
    renderer = TurnRenderer(tokenizer)
    last_alone = "{%- for message in messages %}{{- '<|' + message['role'] + '|>' +"
    last_alone += " message['content'] }}{%- if loop.last %}{{- eos_token }}{%- endif %}"
    last_alone += "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    written = ids_of(tokenizer, "4<eos>")
    shown_turn = "\n<|user|>\nSure?<|end|>\n<|assistant|>\n"
    assert shown(tokenizer, renderer.between(written, [RETRY], raw=False)) == shown_turn
    assert behind("phi3", "4", RETRY) == f"<|end|>{shown_turn}"
    phi.inner.chat_template = last_alone
    ids = TurnRenderer(tokenizer).between(written, [RETRY], raw=False)
    assert shown(tokenizer, ids) == "<|user|>Sure?<eos><|assistant|>"


def test_a_template_that_shows_no_end_of_turn_adds_none() -> None:
    tokenizer = Tokenizer("tiny", character_tokenizer(), frozenset({96}))  # type: ignore[arg-type]
    renderer = TurnRenderer(tokenizer)
    renderer.check([])
    for written in (NONE, ids_of(tokenizer, "4<eos>")):
        assert shown(tokenizer, renderer.between(written, [RETRY], raw=False)) == "\nu:Sure?\na:"
    with pytest.raises(DataError, match="shows the environment's tools, found no 'add'"):
        renderer.check(TOOLS)


def test_tools_are_named_by_the_calls_that_were_written() -> None:
    tokenizer = family_tokenizer("harmony")
    renderer = TurnRenderer(tokenizer)
    written = ids_of(tokenizer, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}')
    expected = '<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"four"'
    turn = renderer.parse(written, raw=False)
    for given_turn in (turn, None):
        ids = renderer.between(written, [FOUR], raw=False, turn=given_turn)
        assert shown(tokenizer, ids).startswith(expected)


def test_each_rows_tools_are_named_by_its_own_calls() -> None:
    tokenizer = family_tokenizer("harmony")
    renderer = TurnRenderer(tokenizer)
    rows: list[np.ndarray] = []
    for name in ("add", "sub"):
        call = f" to=functions.{name}<|channel|>commentary json<|message|>{{}}"
        rows.append(ids_of(tokenizer, call))
    turns = [renderer.parse(written, raw=False) for written in rows]
    parts = renderer.between_all(rows, [[FOUR], [FOUR]], raw=False, turns=turns)
    named = [shown(tokenizer, ids).partition(" to=")[0] for ids in parts]
    assert named == ["<|call|><|start|>functions.add", "<|call|><|start|>functions.sub"]


def test_many_rows_get_what_each_gets_alone() -> None:
    tokenizer = family_tokenizer("qwen2")
    written = [ids_of(tokenizer, text) for text in ("4", "4<|im_end|>", "", "5<|im_end|>")]
    replies = [[RETRY], [RETRY], [FOUR, FIVE], []]
    rows = zip(written, replies, strict=True)
    alone = [TurnRenderer(tokenizer).between(*row, raw=False) for row in rows]
    renderer = TurnRenderer(tokenizer)
    for _ in range(2):  # the second time from what is kept
        together = renderer.between_all(written, replies, raw=False)
        assert [part.tolist() for part in together] == [part.tolist() for part in alone]
        assert {part.dtype for part in together} == {np.dtype(np.int32)}


# --- whole conversations --------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "x"}}}


def rounds(family: str) -> list[list[Any]]:
    """What environments reply, turn by turn."""
    if family in WITHOUT_TOOLS:
        return [[[RETRY], [RETRY]]]
    by_tools = [[[FOUR], [FOUR]]]
    if family not in ("llama3", "harmony"):  # which show one call alone
        by_tools.append([[FOUR, FIVE], [FOUR]])
    if family != "mistral":  # which moves its tools to the last user's turn
        by_tools += [[[RETRY], [FOUR], [RETRY]], [[FOUR], [RETRY], [FOUR]]]
    return by_tools


def written_by(tokenizer: Tokenizer, conversation: list[Any], turn: Any) -> str:
    """What a model would have written for the whole conversation to be as the template shows it."""
    after = tokenizer.render([[*conversation, turn]], generation=False, tools=[])[0]
    before = tokenizer.render([conversation], generation=True, tools=[])[0]
    before, after = without_reasoning(before), without_reasoning(after)
    assert after.startswith(before)
    written = after[len(before) :]
    for end in FAMILIES[tokenizer.base][1]:
        written = written.partition(end)[0]
    return written


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("family", [*WITH_TOOLS, *WITHOUT_TOOLS])
def test_what_is_appended_is_what_the_template_shows_of_the_whole(
    family: str, is_ended: bool
) -> None:
    """But for reasoning, which templates put into turns and take out of them again."""
    tokenizer = family_tokenizer(family)
    tools = [] if family in WITHOUT_TOOLS else TOOLS
    renderer = TurnRenderer(tokenizer)
    renderer.check(tools)
    for replies in rounds(family):
        readable = renderer._template.ends.readable
        conversation: list[Any] = [ASK]
        ids = renderer.first([conversation], [tools])[0]
        for index, answers in enumerate(replies):
            turn = {"role": "assistant", "content": f"turn {index}"}
            calls = [CALL for answer in answers if answer["role"] == "tool"]
            if calls:  # what stands before them is shown by most
                turn["tool_calls"] = calls
            text = written_by(tokenizer, readable(conversation), readable([turn])[0])
            written = ids_of(tokenizer, text)
            part = renderer.between(written, answers, raw=False)
            if is_ended:
                end = part[:1]
                written = np.concatenate([written, end])
                part = renderer.between(written, answers, raw=False)
            before = len(ids)
            ids = np.concatenate([ids, written, part])
            assert ids[before : before + len(written)].tolist() == written.tolist()
            conversation = [*conversation, turn, *answers]
        whole = tokenizer.render([readable(conversation)], generation=True, tools=tools)[0]
        assert without_reasoning(shown(tokenizer, ids)) == without_reasoning(whole)


# --- templates that do not append -----------------------------------------------------------------


@pytest.mark.parametrize("family, tools, message", [
    ("deepseek_v3", TOOLS, r"deepseek_v3: the chat template changes what it rendered.*\(tool\)"
     r".*expected '.*tool▁outputs▁end.*found '.*Assistant.*Fix: another template"),
    ("phi4_mini", TOOLS, r"shows the environment's tools, found no 'add'.*Fix: a Model whose"),
    ("gemma", TOOLS, r"shows the environment's tools"),
])  # fmt: skip
def test_a_template_that_changes_turns_is_refused_by_name(
    family: str, tools: list[Any], message: str
) -> None:
    renderer = TurnRenderer(family_tokenizer(family))
    renderer.check([])
    with pytest.raises(DataError, match=message):
        renderer.check(tools)


def replaced(family: str, old: str, new: str) -> TurnRenderer:
    tokenizer = family_tokenizer(family)
    template = str(tokenizer.inner.chat_template)
    assert old in template
    tokenizer.inner.chat_template = template.replace(old, new)
    return TurnRenderer(tokenizer)


@pytest.mark.parametrize("old, new, message", [
    ("{{- '<|user|>", "{{- messages | length }}{{- '<|user|>", "changes what it rendered once"),
    ("{%- for message in messages %}", "{%- for message in messages[-2:] %}",
     "changes what it rendered once"),
    ("{%- for message in messages %}", "{%- for message in messages | reverse %}",
     "shows an answer and the user's next turn"),
    ("message['content'] +", "(message['content'] if loop.index < 4 else '') +",
     "shows|by the turns before"),
])  # fmt: skip
def test_counting_dropping_reordering_and_hiding_are_refused(
    old: str, new: str, message: str
) -> None:
    old = old.replace("'<|user|>", "'<|' + message['role']")
    with pytest.raises(DataError, match=message):
        replaced("phi3", old, new.replace("'<|user|>", "'<|' + message['role']")).check([])


def test_a_template_that_hides_what_tools_say_is_refused() -> None:
    renderer = replaced("qwen2", "message.content + '\\n</tool_response>'", "'\\n</tool_response>'")
    renderer.check([])
    with pytest.raises(DataError, match=r"shows each reply, found none of \{'role': 'tool'"):
        renderer.check(TOOLS)


def test_a_system_message_that_moves_is_refused_with_its_prompt() -> None:
    renderer = TurnRenderer(family_tokenizer("mistral"))
    renderer.check([])
    renderer.first([[ASK]], [[]])
    with pytest.raises(DataError, match=r"\(user\) follow: expected '.*stand-in system"):
        renderer.first([[{"role": "system", "content": "Add."}, ASK]], [[]])


def test_tools_that_move_to_a_users_reply_are_refused_where_it_comes() -> None:
    tokenizer = family_tokenizer("mistral")
    renderer = TurnRenderer(tokenizer)
    renderer.check(TOOLS)
    assert len(renderer.between(NONE, [FOUR], raw=False))
    with pytest.raises(DataError, match=r"\(user\) follow: expected '<s>\[AVAILABLE_TOOLS\]"):
        renderer.between(NONE, [RETRY], raw=False)


@pytest.mark.parametrize("family, reply, message", [
    ("gemma", FOUR, "Conversation roles must alternate"),
    ("qwen2", {"role": "assistant", "content": "4"}, "expected replies of a user or a tool"),
])  # fmt: skip
def test_a_reply_of_a_role_that_cannot_follow_is_refused(
    family: str, reply: Any, message: str
) -> None:
    renderer = TurnRenderer(family_tokenizer(family))
    renderer.check([])
    with pytest.raises(DataError, match=message):
        renderer.between(NONE, [reply], raw=False)


def test_a_template_that_takes_tools_for_the_assistant_is_refused() -> None:
    new = "{%- set role = message['role'] %}{%- if role == 'tool' %}{%- set role = 'assistant' %}"
    new += "{%- endif %}{{- '<|' + role"
    renderer = replaced("phi3", "{{- '<|' + message['role']", new)
    renderer.check([])
    with pytest.raises(DataError, match="shows what a tool said as the assistant's"):
        renderer.between(NONE, [FOUR], raw=False)


# --- first prompts, and raw text ------------------------------------------------------------------


def test_each_row_has_its_own_tools() -> None:
    tokenizer = family_tokenizer("qwen2")
    first = TurnRenderer(tokenizer).first([[ASK], [ASK]], [TOOLS, []])
    assert first.values.dtype == np.int32
    with_tools, without = (shown(tokenizer, first[row]) for row in range(2))
    assert '"name": "add"' in with_tools
    assert without == tokenizer.render([[ASK]], generation=True)[0]


def test_text_prompts_have_no_template_and_no_tools() -> None:
    tokenizer = family_tokenizer("qwen2")
    renderer = TurnRenderer(tokenizer)
    first = renderer.first(["2+2=", "3"], [[], []])
    assert first[0].tolist() == tokenizer.encode_prompts(["2+2="])[0].tolist()
    with pytest.raises(DataError, match="expected prompts that are messages, as the environment"):
        renderer.first(["2+2="], [TOOLS])


def test_raw_replies_are_their_contents_alone() -> None:
    tokenizer = family_tokenizer("qwen2")
    renderer = TurnRenderer(tokenizer)
    written = ids_of(tokenizer, "4<|im_end|>")
    ids = renderer.between(written, [RETRY, FOUR, {"role": "user", "content": None}], raw=True)
    assert shown(tokenizer, ids) == "Sure?four"
    assert renderer.parse(written, raw=True) == {"role": "assistant", "content": "4"}
    assert renderer.between(written, [], raw=True).dtype == np.int32
