"""Tool calls in what a model wrote, in the formats of its family.

Owns: the formats, which of them a chat template asks for, and what is wrong with a call that cannot
be read. Does not own: tokens and reasoning (turn_parsing.py), whether there is such a tool.

A format is a function from text to a CallReading. Nothing that a model writes is an exception: a
call that cannot be read becomes an error text, and the calls beside it count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from operators.kernels.call_reading import CallReading, ParameterKinds, read_json

JSON_CALL = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A way to write calls. markers: a chat template that has one of them asks for this format."""

    name: str
    markers: tuple[str, ...]
    read: Callable[[str, ParameterKinds], CallReading]


def find_tool_format(template: str) -> ToolFormat | None:
    """Find the first format of FORMATS with a marker in a chat template; None where none is."""
    for tool_format in FORMATS:
        if any(marker in template for marker in tool_format.markers):
            return tool_format
    return None


# --- one object between two tags ------------------------------------------------------------------


def _read_hermes(text: str, kinds: ParameterKinds) -> CallReading:
    """Hermes, Qwen2.5, Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    outside, blocks = _split_blocks(text, "<tool_call>", "</tool_call>")
    reading = CallReading(content=outside)
    for block in blocks:
        reading.add_json(block, f"{JSON_CALL} between <tool_call> and </tool_call>")
    return reading


def _read_phi(text: str, kinds: ParameterKinds) -> CallReading:
    """Phi-4-mini: <|tool_call|>[{...}, ...]<|/tool_call|>."""
    outside, blocks = _split_blocks(text, "<|tool_call|>", "<|/tool_call|>")
    reading = CallReading(content=outside)
    for block in blocks:
        reading.add_json(block, f"[{JSON_CALL}] behind <|tool_call|>")
    return reading


def _read_llama(text: str, kinds: ParameterKinds) -> CallReading:
    """Llama 3.x: the whole turn is {"name": ..., "parameters": {...}}, or several with `;`."""
    call = text.strip()
    has_tag = call.startswith("<|python_tag|>")
    call = call.removeprefix("<|python_tag|>").strip()
    reading = CallReading()
    if not has_tag and not _begins_llama_call(call):
        reading.content = text
        return reading
    expected = '{"name": ..., "parameters": {...}} and nothing else'
    for part in _split_objects(call):
        reading.add_json(part, expected)
    return reading


def _begins_llama_call(text: str) -> bool:
    begin = "".join(text[:60].split())
    return begin.startswith(('{"name":', '{"type":"function"'))


def _split_objects(text: str) -> list[str]:
    """Split `{...}; {...}` where a semicolon stands between objects."""
    parts = text.replace("};", "}\0").split("\0")
    if any(read_json(part) is None for part in parts):
        return [text]
    return parts


# --- parameters in tags ---------------------------------------------------------------------------


def _read_coder(text: str, kinds: ParameterKinds) -> CallReading:
    """Qwen3-Coder: <function=NAME><parameter=KEY>text</parameter></function>."""
    outside, blocks = _split_blocks(text, "<tool_call>", "</tool_call>")
    if not blocks and "<function=" in text:  # the outer tag is often left out
        begin = text.index("<function=")
        outside, blocks = text[:begin], [text[begin:]]
    reading = CallReading(content=outside)
    for block in blocks:
        _add_coder_call(reading, block, kinds)
    return reading


def _add_coder_call(reading: CallReading, block: str, kinds: ParameterKinds) -> None:
    _, tag, call = block.partition("<function=")
    name, closed, body = call.partition(">")
    if not tag or not closed or "</function>" not in body:
        reading.add_error("<function=NAME><parameter=KEY>...</parameter></function>", block)
        return
    arguments: dict[str, str] = {}
    body = body.partition("</function>")[0]
    for part in body.split("<parameter=")[1:]:
        key, _, rest = part.partition(">")
        shown, ended, _ = rest.partition("</parameter>")
        if not ended:
            reading.add_error("</parameter> behind each <parameter=KEY>", block)
            return
        arguments[key.strip()] = shown.removeprefix("\n").removesuffix("\n")
    reading.add_texts(name.strip(), arguments, kinds)


def _read_glm(text: str, kinds: ParameterKinds) -> CallReading:
    """GLM 4.5 on: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>text</arg_value></tool_call>."""
    outside, blocks = _split_blocks(text, "<tool_call>", "</tool_call>")
    reading = CallReading(content=outside)
    for block in blocks:
        name, *parts = block.split("<arg_key>")
        arguments: dict[str, str] = {}
        is_whole = bool(name.strip())
        for part in parts:
            key, _, rest = part.partition("</arg_key>")
            _, begun, rest = rest.partition("<arg_value>")
            shown, ended, _ = rest.partition("</arg_value>")
            is_whole = is_whole and bool(begun) and bool(ended)
            arguments[key.strip()] = shown
        if is_whole:
            reading.add_texts(name.strip(), arguments, kinds)
        else:
            reading.add_error(
                "NAME, and <arg_key>, <arg_value> of each argument, all closed", block
            )
    return reading


# --- a name, then an object -----------------------------------------------------------------------


def _read_mistral(text: str, kinds: ParameterKinds) -> CallReading:
    """Mistral: [TOOL_CALLS] [{...}, ...], or [TOOL_CALLS]NAME[ARGS]{...} for each."""
    content, *blocks = text.split("[TOOL_CALLS]")
    reading = CallReading(content=content)
    for block in blocks:
        name, has_arguments, arguments = block.partition("[ARGS]")
        if has_arguments and not name.lstrip().startswith(("[", "{")):
            name = name.partition("[CALL_ID]")[0]
            reading.add_named(name.strip(), arguments, "NAME[ARGS]{...} behind [TOOL_CALLS]")
        else:
            reading.add_json(block, f"[{JSON_CALL}] behind [TOOL_CALLS]")
    return reading


def _read_deepseek(text: str, kinds: ParameterKinds) -> CallReading:
    """DeepSeek: NAME<｜tool▁sep｜>{...}; before V3.1 function<｜tool▁sep｜>NAME, and a json fence
    with the arguments.
    """
    text = text.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    outside, blocks = _split_blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    reading = CallReading(content=outside)
    for block in blocks:
        name, _, arguments = block.partition("<｜tool▁sep｜>")
        if "```json" in arguments:
            name, _, arguments = arguments.partition("```json")
            arguments = arguments.rpartition("```")[0]
        reading.add_named(name.strip(), arguments, "NAME<｜tool▁sep｜>{...}")
    return reading


def _read_kimi(text: str, kinds: ParameterKinds) -> CallReading:
    """Kimi K2: functions.NAME:0<|tool_call_argument_begin|>{...}, in a section of calls."""
    for tag in ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"):
        text = text.replace(tag, "")
    outside, blocks = _split_blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>")
    reading = CallReading(content=outside)
    for block in blocks:
        name, _, arguments = block.partition("<|tool_call_argument_begin|>")
        call_id = name.strip()
        name = call_id.removeprefix("functions.").partition(":")[0]
        expected = "functions.NAME:0<|tool_call_argument_begin|>{...}"
        reading.add_named(name, arguments, expected, call_id)
    return reading


# --- channels -------------------------------------------------------------------------------------


def _read_harmony(text: str, kinds: ParameterKinds) -> CallReading:
    """gpt-oss: messages with a channel and a recipient; `analysis` is the reasoning."""
    reading = CallReading()
    for part in text.split("<|start|>"):
        header, has_body, body = part.partition("<|message|>")
        for end in ("<|end|>", "<|call|>", "<|return|>"):
            body = body.partition(end)[0]
        _, is_call, recipient = header.partition("to=functions.")
        if not has_body:
            reading.content += _without_role(header)
        elif is_call:
            name = recipient.partition("<|")[0].split(" ")[0]
            reading.add_named(name, body, "to=functions.NAME ...<|message|>{...}")
        elif "<|channel|>analysis" in header:
            reading.reasoning += body
        else:
            reading.content += body
    return reading


def _without_role(header: str) -> str:
    """What stands where no message was begun; a role and a channel alone say nothing."""
    return header.partition("<|channel|>")[0].removeprefix("assistant")


# --- which format ---------------------------------------------------------------------------------


def _split_blocks(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """What stands outside of tags, and what stands inside of each pair; the last may be open."""
    outside, *parts = text.split(begin)
    blocks: list[str] = []
    for part in parts:
        block, _, behind = part.partition(end)
        blocks.append(block)
        outside += behind
    return outside, blocks


FORMATS = (
    ToolFormat(name="harmony", markers=("<|channel|>",), read=_read_harmony),
    ToolFormat(name="deepseek", markers=("<｜tool▁call▁begin｜>",), read=_read_deepseek),
    ToolFormat(name="kimi", markers=("<|tool_call_begin|>",), read=_read_kimi),
    ToolFormat(name="mistral", markers=("[TOOL_CALLS]",), read=_read_mistral),
    ToolFormat(name="phi", markers=("<|tool_call|>",), read=_read_phi),
    ToolFormat(name="coder", markers=("<function=",), read=_read_coder),
    ToolFormat(name="glm", markers=("<arg_key>",), read=_read_glm),
    ToolFormat(name="hermes", markers=("<tool_call>",), read=_read_hermes),
    ToolFormat(name="llama", markers=("<|python_tag|>", "ipython"), read=_read_llama),
)
"""In order of precedence: those whose markers are parts of other templates come last."""
