"""Prompts from a file, for a head that is to learn from what its model answers to them. Each line is a JSON object:

{"messages": [{"role": "user", "content": ".."}, ..]}, {"prompt": "text"} or {"prompt": [ids of tokens]}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltaserve.core.errors import ConfigError, DeltaserveError
from deltaserve.server.text.text_codec import TextCodec

Prompt = tuple[int, ...]


def read_prompts(file: Path, model: Path, vocab_size: int) -> list[Prompt]:
    """Each once. Raises ConfigError for a line that holds none, by its number."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.name}: {error}") from None
    prompts = dict.fromkeys(_encoded(file.name, lines, TextCodec.load(model), vocab_size))
    if not prompts:
        raise ConfigError(f"{file.name}: no prompts in it")
    return list(prompts)


def _encoded(name: str, lines: list[str], codec: TextCodec, vocab_size: int) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(json.loads(line), codec)
        except (ValueError, KeyError, TypeError, DeltaserveError) as error:
            raise ConfigError(f"{name}, line {number}: no prompt: {error}") from None
        if not prompt or not all(isinstance(token, int) and 0 <= token < vocab_size for token in prompt):
            raise ConfigError(f"{name}, line {number}: expected tokens from 0 to {vocab_size - 1}")
        yield prompt


def _prompt(line: Any, codec: TextCodec) -> Prompt:
    if "messages" in line:
        if not codec.has_chat_template:
            raise ValueError("the model has no chat template for messages")
        return codec.encode_chat(line["messages"], {})
    prompt = line["prompt"]
    return codec.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
