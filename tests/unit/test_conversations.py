"""Which tokens of a conversation are trained, under chat templates that treat turns unlike."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from dataflow.errors import DataError
from operators.kernels.conversations import encode_conversations
from operators.kernels.text import Tokenizer
from tests.kit.chat_templates import PHI3, PHI4_MINI, QWEN3
from tests.kit.models import character_tokenizer

R1 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|User|>' +"
    " message['content'] }}{% else %}{{ '<|Assistant|>' +"
    " message['content'].split('</think>')[-1] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content + ' ' %}"
    "{% elif message.role == 'user' %}{{ '[INST]' }}"
    "{% if loop.index0 >= messages | length - 2 %}{{ ns.system }}{% endif %}"
    "{{ message.content + '[/INST]' }}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
"""The system's text is in the last turn of the user, as in Mistral's."""

ENDS = ("<|im_end|>", "<|end|>")
ASK, AGAIN = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}
THINK = "<think>\nadd\n</think>\n\n"


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def speaking(template: str, ends: tuple[str, ...] = ENDS) -> Tokenizer:
    """A token for each character and each mark; the eos token ends texts, and so do `ends`."""
    inner = character_tokenizer()
    inner.add_tokens([*ENDS, "<|im_start|>"], special_tokens=True)
    inner.chat_template = template
    ids = {inner.convert_tokens_to_ids(mark) for mark in ("<eos>", *ends)}
    return Tokenizer("tiny", inner, frozenset(ids))  # type: ignore[arg-type]


def encoded(tokenizer: Tokenizer, turns: list[Any], first: int = 1, **settings: Any) -> list[str]:
    """A row as text: its prompt, and its completion cut where the mask changes."""
    pairs = encode_conversations(tokenizer, [turns], [first], **{"assistant_only": True} | settings)
    ids, mask = pairs.completion[0].tolist(), pairs.mask[0].tolist()
    spans = [list(span) for _, span in groupby(range(len(ids)), lambda at: mask[at])]
    parts = [pairs.prompt[0].tolist(), *([ids[at] for at in span] for span in spans)]
    assert mask[0] == 1, "in these rows, the assistant has the first word"
    return [tokenizer.inner.decode(part) for part in parts]  # type: ignore[misc]


PLAIN, THOUGHT = said("4"), said(f"{THINK}4")
ASKED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("turns, parts", [
    ([ASK, PLAIN], [ASKED, f"{EMPTY}4<|im_end|>"]),
    ([ASK, THOUGHT], [ASKED, f"{THINK}4<|im_end|>"]),
    ([ASK, PLAIN, AGAIN, PLAIN], [ASKED, "4<|im_end|>", BETWEEN, f"{EMPTY}4<|im_end|>"]),
    ([ASK, THOUGHT, AGAIN, THOUGHT], [ASKED, "4<|im_end|>", BETWEEN, f"{THINK}4<|im_end|>"]),
    (
        [ASK, THOUGHT, AGAIN, THOUGHT, AGAIN, said("No", reasoning_content="hm")],
        [ASKED, *["4<|im_end|>", BETWEEN] * 2, "<think>\nhm\n</think>\n\nNo<|im_end|>"],
    ),
    ([ASK, said("a<|im_end|>b"), AGAIN, PLAIN],
     [ASKED, "a<|im_end|>b<|im_end|>", BETWEEN, f"{EMPTY}4<|im_end|>"]),
    ([ASK, PLAIN, AGAIN], [ASKED, "4<|im_end|>", "\n<|im_start|>user\nSure?<|im_end|>"]),
], ids=["one", "one with reasoning", "two", "two with reasoning", "three", "an end inside",
        "the user has the last word"])  # fmt: skip
def test_earlier_answers_are_trained_without_the_reasoning_that_the_template_drops(
    turns: list[Any], parts: list[str]
) -> None:
    """Qwen3's: the last answer has its reasoning, or an empty one; earlier answers have none."""
    tokenizer = speaking(QWEN3)
    assert encoded(tokenizer, turns) == parts
    whole = tokenizer.render([turns], generation=False)[0]
    assert "".join(parts) == whole.removesuffix("\n"), "what is trained is what is rendered"


def test_tools_that_answer_one_after_another_are_one_turn_of_qwen3s_template() -> None:
    call, tool = {"name": "add", "arguments": {"a": 2}}, {"role": "tool", "content": "4"}
    turns = [ASK, said("", tool_calls=[{"function": call}]), tool, tool, PLAIN]
    [asked, calls, results, answer] = encoded(speaking(QWEN3), turns)
    shown = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert (asked, calls, answer) == (ASKED, shown, f"{EMPTY}4<|im_end|>")
    assert results.count("<tool_response>\n4\n</tool_response>") == 2


@pytest.mark.parametrize("template, line", [(PHI3, "\n"), (PHI4_MINI, "")], ids=["3", "4-mini"])
def test_an_extra_end_behind_the_last_turn_is_no_end_of_the_others(
    template: str, line: str
) -> None:
    """Phi's: <|end|> ends each turn, and a whole conversation has the eos token behind it."""
    asked = f"<|user|>{line}2+2?<|end|>{line}<|assistant|>{line}"
    between = f"{line}<|user|>{line}Sure?<|end|>{line}<|assistant|>{line}"
    last = f"4<|end|>{line}<eos>"
    assert encoded(speaking(template), [ASK, PLAIN]) == [asked, last]
    twice = [ASK, PLAIN, AGAIN, PLAIN]
    assert encoded(speaking(template), twice) == [asked, "4<|end|>", between, last]
    answers = encoded(speaking(template), [*twice, AGAIN, PLAIN])
    assert answers == [asked, *["4<|end|>", between] * 2, last]
    everything = encoded(speaking(template), twice, assistant_only=False)
    assert everything == [asked, f"4<|end|>{between}{last}"]


def test_a_prompt_that_changes_with_later_turns_is_taken_as_the_whole_shows_it() -> None:
    turns = [{"role": "system", "content": "Add."}, ASK, PLAIN, AGAIN, PLAIN]
    parts = encoded(speaking(LAST_SYSTEM), turns, 2)
    assert parts == ["[INST]2+2?[/INST]", "4<|im_end|>", "[INST]Add. Sure?[/INST]", "4<|im_end|>"]


def test_an_answer_that_generation_begins_otherwise_is_refused_with_its_row() -> None:
    """R1's: generation begins with <think>, which rendered answers do not have."""
    rows = [[ASK, PLAIN]]
    message = (
        r"^d\.jsonl:1: tiny: the chat template begins an answer that is to be generated otherwise"
        r".*expected '.*<think>\\n', found '.*4<\|im_end\|>'.*Fix: prompt and completion as texts"
    )
    for turns in (rows, [[*rows[0], AGAIN, PLAIN]]):
        with pytest.raises(DataError, match=message) as refusal:
            encode_conversations(speaking(R1), turns, [1], True, lambda row: f"d.jsonl:{row + 1}")
        assert "one assistant turn" not in str(refusal.value)


def test_a_template_that_counts_the_turns_is_refused_for_what_it_does() -> None:
    counting = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"renders earlier turns differently.*'12\+2\?', found '22"):
        encode_conversations(speaking(counting), [[ASK, PLAIN]], [1], True)


def test_an_answer_without_an_end_that_is_known_is_refused() -> None:
    message = r"expected a token that ends the answer '4', one of \[97\], found '<\|end\|>"
    with pytest.raises(
        DataError, match=rf"{message}.*Fix: eos_token_id in generation_config\.json"
    ):
        encoded(speaking(PHI3, ends=()), [ASK, PLAIN, AGAIN, PLAIN])


def test_a_template_that_hides_a_turn_is_refused_where_its_end_is_needed() -> None:
    hiding = PHI3.replace("message['content']", "('' if loop.index0 == 1 else message['content'])")
    with pytest.raises(DataError, match="expected a chat template that shows the content of each"):
        encoded(speaking(hiding), [ASK, PLAIN, AGAIN, PLAIN])


@pytest.mark.parametrize("turns, answers", [
    ([ASK, said("4<|im_end|>")], [f"{EMPTY}4<|im_end|>"]),
    ([ASK, said("4<|im_end|>"), AGAIN, PLAIN], ["4<|im_end|>", f"{EMPTY}4<|im_end|>"]),
])  # fmt: skip
def test_a_message_that_ends_in_the_end_tokens_text_has_one_end(
    turns: list[Any], answers: list[str]
) -> None:
    assert encoded(speaking(QWEN3), turns)[1::2] == answers
