"""Special tokens that files beside tokenizer.json name: put into the tokenizer, as transformers does.

Folders have them as strings or objects, in tokenizer_config.json, special_tokens_map.json (older ones) and
added_tokens.json (older still); a tokenizer.json need not say all of it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from deltaserve.base.errors import ConfigError
from deltaserve.models.fields import shown

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_ID = re.compile(r"[0-9]{1,9}")
_Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenMaps:
    """The files' contents; empty where there is no such file."""

    config: _Values
    """tokenizer_config.json"""
    special: _Values
    """special_tokens_map.json"""
    added: _Values
    """added_tokens.json: token |-> id."""

    def names(self) -> dict[str, str]:
        """bos_token, eos_token, ... as plain strings, for the template. Raises ConfigError naming file and field.

        special_tokens_map.json counts where tokenizer_config.json does not list the added tokens, too.
        """
        names = _names(self.config, "tokenizer_config.json")
        if "added_tokens_decoder" in self.config:
            return _names(self.special, "special_tokens_map.json") | names
        return names | _names(self.special, "special_tokens_map.json")

    def complete(self, tokenizer: Tokenizer) -> None:
        """In place: adds tokens that tokenizer.json lacks, and marks those that are special by their role.

        Raises ConfigError for one that would get another id than its file says.
        """
        for token_id, token, file in self._stated():
            if tokenizer.token_to_id(token.content) is None:
                (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
                found = tokenizer.token_to_id(token.content)
                if found != token_id:
                    stated = f"{file}: {token.content[:60]!r} has id {shown(token_id)}"
                    raise ConfigError(f"{stated}, but {found} follows in tokenizer.json")
            elif token.special:
                tokenizer.add_special_tokens([token])
        lacking = [name for name in self._listed() if tokenizer.token_to_id(name) is None]
        tokenizer.add_special_tokens([_token(name) for name in (*self.names().values(), *lacking)])

    def _stated(self) -> list[tuple[int, AddedToken, str]]:
        """Tokens with their ids, in the order of those, and the file that says so."""
        found: dict[int, tuple[AddedToken, str]] = {}
        for name, token_id in self.added.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ConfigError(f"added_tokens.json: {name[:60]!r} is {shown(token_id)}, expected an id")
            token = AddedToken(whole(name, f"added_tokens.json: {shown(name)}"), special=False, normalized=False)
            found[token_id] = token, "added_tokens.json"
        where = "tokenizer_config.json: added_tokens_decoder"
        stated = self.config.get("added_tokens_decoder") or {}
        if not isinstance(stated, dict):
            raise ConfigError(f"{where} is {shown(stated)}, expected an object")
        for key, value in stated.items():
            if not _ID.fullmatch(key) or not isinstance(value, dict):
                raise ConfigError(f"{where} has {shown(key)}: {shown(value)}, expected an id and its token")
            content = value.get("content")
            if not isinstance(content, str):
                raise ConfigError(f"{where}: {key} has no content")
            flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value}
            token = AddedToken(whole(content, f"{where}: {key}"), special=bool(value.get("special")), **flags)
            found[int(key)] = token, "tokenizer_config.json"
        return [(token_id, *found[token_id]) for token_id in sorted(found)]

    def _listed(self) -> Iterator[str]:
        for file, values in (("special_tokens_map.json", self.special), ("tokenizer_config.json", self.config)):
            for name in _LISTS:
                tokens = values.get(name) or []
                if not isinstance(tokens, dict | list):
                    raise ConfigError(f"{file}: {name} is {shown(tokens)}, expected a list of tokens")
                for token in tokens.values() if isinstance(tokens, dict) else tokens:
                    content = token.get("content") if isinstance(token, dict) else token
                    if isinstance(content, str):
                        yield whole(content, f"{file}: {name}")


def _token(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)


def _names(values: _Values, file: str) -> dict[str, str]:
    names = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            names[key] = whole(value, f"{file}: {key[:40]}")
        elif key in _NAMES and value is not None:
            raise ConfigError(f"{file}: {key} is {str(value)[:40]!r}, a string is expected")
    return names


def whole(text: str, where: str) -> str:
    """The text itself. JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half a surrogate pair") from None
    return text
