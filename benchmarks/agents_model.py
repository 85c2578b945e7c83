"""The model of the benchmark of agents: its chat template, and how it was taught.

Owns: a small Qwen2 model that calls a tool in every turn, and its tokenizer. Does not own: where
they are kept (agents_settings.py), the environment (agents_environment.py).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.chat_template_utils import get_json_schema

from benchmarks.agents_environment import NUMBERS, NumberSearch
from benchmarks.settings import TEXT_TOKENS, character_tokenizer, small_config

MARKS = ("<|im_start|>", "<tool_call>", "</tool_call>")
TOKENS = (*TEXT_TOKENS, *MARKS)
POSITIONS = 1024
TAUGHT_TURNS = 6

TEMPLATE = (
    "{% if tools %}<|im_start|>system{{ '\\n' }}"
    "You may call tools between <tool_call> and </tool_call>:{{ '\\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}<eos>{{ '\\n' }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}<eos>{% endgeneration %}"
    "{% else %}{{ message.content }}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
"""In Qwen's form: tools as JSON schemas in a system turn, calls as JSON between two marks."""

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}
"""How both sides read a turn: TRL's description of Qwen3's turns, without its reasoning."""


def question(row: int) -> dict[str, Any]:
    """The user's message."""
    return {"role": "user", "content": f"Game {row:04}: find the hidden number."}


def agent_tokenizer() -> Qwen2Tokenizer:
    """One token per character or mark, with the template and the description of a turn."""
    tokenizer = character_tokenizer(TOKENS)
    tokenizer.add_tokens(list(MARKS))
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE  # type: ignore[attr-defined]
    return tokenizer


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """An episode as the model is taught it."""
    search = NumberSearch()
    search.reset(number=rng.choice(NUMBERS))
    messages = [question(rng.randrange(1024))]
    for _ in range(TAUGHT_TURNS):
        number = rng.choice(NUMBERS)
        function = {"name": "guess", "arguments": {"number": number}}
        calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "name": "guess", "content": search.guess(number)})
    return messages


def make_model(path: Path, steps: int) -> None:
    """Teach a model on episodes of random guesses, and save it with its tokenizer."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    tokenizer = agent_tokenizer()
    model = Qwen2ForCausalLM(small_config(TOKENS, POSITIONS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    rng = random.Random(1)
    for _ in range(steps):
        ids, labels = make_examples(tokenizer, [conversation(rng) for _ in range(4)])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slower.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_examples(
    tokenizer: Qwen2Tokenizer, conversations: list[list[dict[str, Any]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, -100 outside what the model writes; each [rows, longest], padded behind."""
    encoded = tokenizer.apply_chat_template(
        conversations,
        tools=[get_json_schema(NumberSearch.guess)],
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding=True,
        return_tensors="pt",
    )
    ids: torch.Tensor = encoded["input_ids"]  # type: ignore[call-overload,assignment]
    written = torch.as_tensor(encoded["assistant_masks"])  # type: ignore[call-overload]
    labels = torch.where(written == 1, ids, -100)
    return ids, labels
