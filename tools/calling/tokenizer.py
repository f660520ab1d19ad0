"""The tokenizer of the micro-model of tools: bytes, special tokens, and whole words and pieces of JSON.

The template shows a tool as a call of it is written, with types for values, behind the topic that it knows. So a call
is a line of the system turn, copied, with the question's values. Calls and results have the form of Hermes and Qwen3.
"""

from typing import Any

from tools.calling.words import ARGUMENTS, FUNCTIONS, NUMBERS, TOPICS, WORDS
from tools.recall.tokenizer import ROLES, SPECIALS, word_tokenizer

TOOL_SPECIALS = ("<tools>", "</tools>", "<tool_response>", "</tool_response>")
PIECES = (
    '", "arguments": {"',
    '": "string"',
    '": "integer"',
    '{"name": "',
    '": "',
    '": ',
    ', "',
    "}}",
    " with ",
    " and ",
    "It is ",
    "unknown",
    "Noted.",
    "Note ",
)
"""Runs of characters that conversations consist of beside their words."""

CHAT_TEMPLATE = """\
{%- set ns = namespace(first=0) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.first = 1 %}
{%- endif %}
{%- if tools or ns.first %}
    {{- '<|im_start|>system\\n' }}
    {%- if ns.first %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {{- ('\\n' if ns.first else '') + '<tools>\\n' }}
        {%- for tool in tools %}
            {{- (tool.function.description or '') + ':' + tool.function.name + ';' }}
            {{- '{"name": ' + tool.function.name | tojson + ', "arguments": {' }}
            {%- for name, schema in ((tool.function.parameters or {}).properties or {}).items() %}
                {{- ('' if loop.first else ', ') + name | tojson + ': ' + (schema.type or '') | tojson }}
            {%- endfor %}
            {{- '}}\\n' }}
        {%- endfor %}
        {{- '</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[ns.first:] %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(max_len: int) -> Any:
    """A `PreTrainedTokenizerFast` with the chat template, ready for `save_pretrained`."""
    topics = (topic + ":" for topic in TOPICS)
    arguments = (name for names in ARGUMENTS.values() for name in names)
    words = (*ROLES, *PIECES, *topics, *FUNCTIONS, *arguments, *WORDS, *NUMBERS)
    return word_tokenizer((*SPECIALS, *TOOL_SPECIALS), words, CHAT_TEMPLATE, max_len)
