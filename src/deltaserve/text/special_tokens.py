"""Special tokens that files beside tokenizer.json name: put into the tokenizer, as transformers does.

Folders have them as strings or objects, in tokenizer_config.json, special_tokens_map.json (older ones) and
added_tokens.json (older still); a tokenizer.json need not say all of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from deltaserve.base.errors import ConfigError
from deltaserve.models.fields import shown

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
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
        for token_id, token in self._stated():
            if tokenizer.token_to_id(token.content) is None:
                (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
                found = tokenizer.token_to_id(token.content)
                if found != token_id:
                    name = token.content[:60]
                    raise ConfigError(
                        f"tokenizer_config.json: {name!r} has id {token_id}, but {found} follows in tokenizer.json"
                    )
            elif token.special:
                tokenizer.add_special_tokens([token])
        lacking = [name for name in self._listed() if tokenizer.token_to_id(name) is None]
        tokenizer.add_special_tokens([_token(name) for name in (*self.names().values(), *lacking)])

    def _stated(self) -> list[tuple[int, AddedToken]]:
        """Tokens with their ids, in the order of those."""
        found: dict[int, AddedToken] = {}
        for name, token_id in self.added.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ConfigError(f"added_tokens.json: {name[:60]!r} is {shown(token_id)}, expected an id")
            found[token_id] = AddedToken(name, special=False, normalized=False)
        stated = self.config.get("added_tokens_decoder") or {}
        for key, value in stated.items() if isinstance(stated, dict) else ():
            if not key.isascii() or not key.isdigit() or not isinstance(value, dict):
                raise ConfigError(f"tokenizer_config.json: added_tokens_decoder has {shown(key)}: {shown(value)}")
            content = value.get("content")
            if not isinstance(content, str):
                raise ConfigError(f"tokenizer_config.json: added_tokens_decoder: {key[:20]} has no content")
            flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value}
            found[int(key)] = AddedToken(content, special=bool(value.get("special")), **flags)
        return sorted(found.items(), key=lambda entry: entry[0])

    def _listed(self) -> Iterator[str]:
        for values in (self.special, self.config):
            for name in _LISTS:
                tokens = values.get(name) or ()
                for token in tokens.values() if isinstance(tokens, dict) else tokens:
                    content = token.get("content") if isinstance(token, dict) else token
                    if isinstance(content, str):
                        yield whole(content, name)


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
