"""Chat templates of the families of models, as short as keeps what they do between turns."""

from __future__ import annotations

from pathlib import Path

from operators.kernels.text import Tokenizer
from tests.kit.models import character_tokenizer, save_tiny

QWEN2 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen.' }}
    {%- endif %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nReturn <tool_call>json</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
        (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN3_THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tool_call>' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages | length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.seeking and message.role == 'user' %}
        {%- set ns.seeking = false %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
"""The template opens the reasoning (Qwen3.5, Thinking-2507), and leaves that of old turns out."""

QWEN3 = QWEN3_THINKING.replace(
    "loop.index0 > ns.last_query", "loop.index0 > ns.last_query and (loop.last or reasoning)"
).replace("assistant\\n<think>\\n' }}{%- endif %}", "assistant\\n' }}{%- endif %}")
"""The model opens the reasoning; the last answer has an empty one where it has none."""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is defined and tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- if tools is defined and tools %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Respond with {"name": , "parameters": }.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or message.tool_calls) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user/assistant/user/...') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- '<s>' }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson }}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be strings with length 9!') }}
        {%- endif %}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

LLAMA2 = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<s>[INST] ' + message.content | trim + ' [/INST]' }}
    {%- else %}{{- ' ' + message.content | trim + ' </s>' }}{%- endif %}
{%- endfor %}
"""
"""A space stands before the end of turn, which a model writes or not."""

GEMMA = """\
{{- '<bos>' }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

PHI4_MINI = """\
{%- for message in messages %}
    {%- if message['role'] == 'system' and message['tools'] %}
        {{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}
        {{- '<|end|>' }}
    {%- else %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}
"""
"""Tools are a field of the system message, which apply_chat_template does not fill."""

DEEPSEEK_V3 = """\
{%- set ns = namespace(is_tool=false) %}
{{- '<｜begin▁of▁sentence｜>' }}{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.is_tool = false %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set ns.is_tool = false %}
        {{- '<｜Assistant｜>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {%- if not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {%- if ns.is_tool %}
            {{- '<｜tool▁outputs▁end｜>' + message.content + '<｜end▁of▁sentence｜>' }}
            {%- set ns.is_tool = false %}
        {%- else %}
            {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] }}
            {{- '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if not ns.is_tool %}{{- '<｜tool▁outputs▁begin｜>' }}{%- else %}{{- '\\n' }}{%- endif %}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
"""V3 and R1: arguments have to be text. A call behind what tools said takes their end away."""

DEEPSEEK = """\
{%- set ns = namespace(is_tool=false, after_user=false, system='') %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = message.content %}
{%- endfor %}
{{- '<｜begin▁of▁sentence｜>' + ns.system }}{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.is_tool = false %}{%- set ns.after_user = true %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- if ns.after_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.after_user = false %}{%- set ns.is_tool = false %}
        {{- (message.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {%- if ns.after_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.after_user = false %}{%- set ns.is_tool = false %}
        {{- message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {%- set ns.after_user = false %}{%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.after_user and not ns.is_tool %}
    {{- '<｜Assistant｜></think>' }}
{%- endif %}
"""
"""V3.1: no header follows what tools said."""

HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT. ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- if tools %}{{- tools | tojson }}{%- endif %}{{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(call=none, final=false) %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set ns.final = false %}
        {%- for later in messages[loop.index:] %}
            {%- if later.role == 'assistant' and not later.tool_calls %}
                {%- set ns.final = true %}
            {%- endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking and not ns.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' }}{{- call.arguments | tojson }}{{- '<|call|>' }}
        {%- set ns.call = call.name %}
    {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- set ns.call = none %}
    {%- elif message.role == 'tool' %}
        {%- if ns.call is none %}
            {{- raise_exception('Message has tool role, but there was no previous call!') }}
        {%- endif %}
        {{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\n# Tools' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n<tool_call>name\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- set reasoning = '' %}{%- set content = m.content %}
        {%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_user and reasoning %}
            {{- '\\n<think>' + reasoning.strip() + '</think>' }}
        {%- else %}{{- '\\n<think></think>' }}{%- endif %}
        {%- if content.strip() %}{{- '\\n' + content.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
                {{- v if v is string else v | tojson }}{{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|observation|>' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- elif m.role == 'system' %}{{- '<|system|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""No token of its own ends a turn: the header of the next one does."""

SPECIAL_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|python_tag|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<|system|>", "<|observation|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>", "[gMASK]", "<sop>"),
    *("<|tool_call|>", "<|/tool_call|>"),
)

FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2": (QWEN2, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": (QWEN3_THINKING, ("<|im_end|>", "<|endoftext|>")),
    "llama3": (LLAMA3, ("<|eot_id|>",)),
    "mistral": (MISTRAL, ("</s>",)),
    "llama2": (LLAMA2, ("</s>",)),
    "gemma": (GEMMA, ("<end_of_turn>",)),
    "phi3": (PHI3, ("<|end|>", "<|endoftext|>")),
    "phi4_mini": (PHI4_MINI, ("<|end|>", "<|endoftext|>")),
    "deepseek_v3": (DEEPSEEK_V3, ("<｜end▁of▁sentence｜>",)),
    "deepseek": (DEEPSEEK, ("<｜end▁of▁sentence｜>",)),
    "harmony": (HARMONY, ("<|return|>", "<|call|>", "<|endoftext|>")),
    "glm": (GLM, ("<|endoftext|>", "<|user|>", "<|observation|>")),
}
"""Of each family its template, and the tokens that end what it generates."""


def family_tokenizer(family: str) -> Tokenizer:
    """A token for each character and each special token, and the template of a family."""
    template, ends = FAMILIES[family]
    inner = character_tokenizer()
    inner.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    inner.chat_template = template
    end_ids = {inner.convert_tokens_to_ids(end) for end in ends}
    return Tokenizer(family, inner, frozenset(end_ids))  # type: ignore[arg-type]


def save_family(directory: Path, family: str) -> str:
    """A random model with the tokenizer and template of a family; returns where."""
    tokenizer = family_tokenizer(family)
    end = min(tokenizer.eos_ids)
    save_tiny(directory, vocab_size=len(tokenizer.inner), eos_token_id=end)
    tokenizer.inner.save_pretrained(directory)
    return str(directory)
