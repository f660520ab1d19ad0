"""A model that thinks and calls tools: its template, answers of the oracle, and one conversation in three dialects."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltaserve.control.front.client import Generation
from deltaserve.core.tokens import unpack_u32
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID
from tests.server.oracle import Answer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEMPLATE = """{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""

SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}{% endfor %}" + TEMPLATE
)
"""As that of Qwen3.5."""

SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: Mapping[str, Any] = {"name": "find", "description": "Looks up", "parameters": SCHEMA}
THOUGHT, TEXT = "hm, well", "It is warm."
CALLS = '<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "find", "arguments": {"city": "Rom"}}\n</tool_call>'
ANSWERS: Mapping[str, str] = {
    "text": TEXT,
    "nothing": "",
    "thought and text": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}",
    "a call": CALLS,
    "thought, text, two calls": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{CALLS}\n{SECOND}",
}


def agents_codec(model_folder: Path, folder: Path, template: str = TEMPLATE) -> TextCodec:
    """The tiny model's, with the template above."""
    path = folder / "agents.jinja"
    path.write_text(template)
    return TextCodec.load(model_folder, template=path)


def prompts_of(codec: TextCodec, opened: Sequence[Generation]) -> list[str]:
    """What the engine was to go on with."""
    return [codec.decode(unpack_u32(generation.prompt)) for generation in opened]


def saying(codec: TextCodec, text: str) -> Answer:
    """An engine's answer: `text`, and its end."""

    def answer(generation: Generation) -> Sequence[int]:
        tokens = (*codec.encode(text, add_special_tokens=False), EOS_ID)
        return tokens[: generation.sampling.max_tokens]

    return answer


CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CHAT_BODY: Mapping[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Oslo and Rom?"},
        {
            "role": "assistant",
            "reasoning_content": THOUGHT,
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}},
                {"id": "c2", "type": "function", "function": {"name": "find", "arguments": '{"city": "Rom"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7 C"},
        {"role": "tool", "tool_call_id": "c2", "content": "20 C"},
        {"role": "user", "content": "And?"},
    ],
    "chat_template_kwargs": {"enable_thinking": True},
    **CHAT_TOOLS,
}
RESPONSES_BODY: Mapping[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Oslo and Rom?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": THOUGHT}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "find", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "find", "arguments": '{"city": "Rom"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "7 C"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "20 C"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ],
    "tools": [{"type": "function", "strict": None, **FUNCTION}],
    "chat_template_kwargs": {"enable_thinking": True},
}
_CACHED = {"cache_control": {"type": "ephemeral"}}
MESSAGES_TOOL = {"name": "find", "description": "Looks up", "input_schema": SCHEMA}
MESSAGES_BODY: Mapping[str, Any] = {
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief.", **_CACHED}],
    "messages": [
        {"role": "user", "content": "Oslo and Rom?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": THOUGHT, "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "find", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "c2", "name": "find", "input": {"city": "Rom"}, **_CACHED},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "7 C"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "20 C"}], **_CACHED},
                {"type": "text", "text": "And?", **_CACHED},
            ],
        },
    ],
    "tools": [{**MESSAGES_TOOL, **_CACHED}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
CONVERSATION = {CHAT: CHAT_BODY, RESPONSES: RESPONSES_BODY, MESSAGES: MESSAGES_BODY}
"""The same conversation in each dialect."""


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, JSON) of the events of a complete stream; each says its own name."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append((body["type"], body))
    return found
