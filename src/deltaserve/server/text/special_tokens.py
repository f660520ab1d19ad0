"""Special tokens that files beside tokenizer.json name: put into the tokenizer, as transformers does.

Folders have them as strings or objects, in tokenizer_config.json, special_tokens_map.json (older ones) and
added_tokens.json (older still); a tokenizer.json need not say all of it.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import shown

_log = logging.getLogger(__name__)
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_ID = re.compile(r"[0-9]{1,9}")
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenMaps:
    """The files' contents; empty where there is no such file."""

    config: _Values
    """Content of tokenizer_config.json."""
    special: _Values
    """Content of special_tokens_map.json."""
    added: _Values
    """Content of added_tokens.json: token |-> id."""

    def names(self) -> dict[str, str]:
        """bos_token, eos_token, ... as plain strings, for the template. Raises ConfigError naming file and field."""
        return {name: token.content for name, token in self._named().items()}

    def _named(self) -> dict[str, AddedToken]:
        """special_tokens_map.json counts where tokenizer_config.json does not list the added tokens, too."""
        config, special = _named(self.config, _CONFIG), _named(self.special, _MAP)
        return special | config if "added_tokens_decoder" in self.config else config | special

    def complete(self, tokenizer: Tokenizer) -> None:
        """Add in place the tokens that tokenizer.json lacks, and mark those that are special by their role.

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
        lacking = [token for token in self._listed() if tokenizer.token_to_id(token.content) is None]
        known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        roles = self._named()
        named = [_as_special(known.get(token.content, token)) for token in roles.values()]
        new = {token.content: role for role, token in roles.items() if tokenizer.token_to_id(token.content) is None}
        tokenizer.add_special_tokens([*named, *lacking])
        if new:
            told = ", ".join(f"{role} {shown(name)} as {tokenizer.token_to_id(name)}" for name, role in new.items())
            _log.warning("tokenizer.json lacks %s: added so, as by transformers; a model knows it if trained so", told)

    def _stated(self) -> list[tuple[int, AddedToken, str]]:
        """Tokens with their ids, in the order of those, and the file that says so."""
        found: dict[int, tuple[AddedToken, str]] = {}
        for name, token_id in self.added.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ConfigError(f"{_ADDED}: {name[:60]!r} is {shown(token_id)}, expected an id")
            token = AddedToken(whole(name, f"{_ADDED}: {shown(name)}"), special=False, normalized=False)
            found[token_id] = token, _ADDED
        where = f"{_CONFIG}: added_tokens_decoder"
        stated = self.config.get("added_tokens_decoder") or {}
        if not isinstance(stated, dict):
            raise ConfigError(f"{where} is {shown(stated)}, expected an object")
        for key, value in stated.items():
            if not _ID.fullmatch(key) or not isinstance(value, dict):
                raise ConfigError(f"{where} has {shown(key)}: {shown(value)}, expected an id and its token")
            stated_token = _token(value, f"{where}: {key}", is_special=_flag(value, "special", f"{where}: {key}"))
            if stated_token is None:
                raise ConfigError(f"{where} has token {key} without content")
            found[int(key)] = stated_token, _CONFIG
        return [(token_id, *found[token_id]) for token_id in sorted(found)]

    def _listed(self) -> Iterator[AddedToken]:
        """Raises ConfigError for an entry that is no token: it may be one that the model's answers end with."""
        for file, values in ((_MAP, self.special), (_CONFIG, self.config)):
            for name in _LISTS:
                tokens = values.get(name) or []
                if not isinstance(tokens, dict | list):
                    raise ConfigError(f"{file}: {name} is {shown(tokens)}, expected a list of tokens")
                for entry in tokens.values() if isinstance(tokens, dict) else tokens:
                    yield _required(entry, f"{file}: {name}", "holds")


def _named(values: _Values, file: str) -> dict[str, AddedToken]:
    """Tokens that have a role, and those that a file gives a name of its own."""
    named = {}
    for key, value in values.items():
        if key in _ROLES and value is not None:
            named[key] = _required(value, f"{file}: {key}", "is")
        elif key.endswith("_token") and isinstance(value, str | dict):
            token = _token(value, f"{file}: {key[:40]}")
            named |= {} if token is None else {key: token}
        elif key in _LISTS and isinstance(value, dict):
            named |= {name: _required(entry, f"{file}: {key}", "holds") for name, entry in value.items()}
    return named


def _required(value: object, where: str, holds: str) -> AddedToken:
    token = _token(value, where)
    if token is None:
        raise ConfigError(f"{where} {holds} {shown(value)}, expected a token: a string, or an object with its content")
    return token


def _token(value: object, where: str, *, is_special: bool = True) -> AddedToken | None:
    """The token that a string or an object describes; None: it is no token."""
    if isinstance(value, str):
        return AddedToken(whole(value, where), special=is_special, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(content, str):
        return None
    flags = {flag: _flag(value, flag, where) for flag in _FLAGS if flag in value}
    return AddedToken(whole(content, where), special=is_special, **flags)


def _as_special(token: AddedToken) -> AddedToken:
    flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
    return AddedToken(token.content, special=True, normalized=token.normalized, **flags)


def _flag(values: _Values, name: str, where: str) -> bool:
    """The flag's value; False when absent."""
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is {shown(value)}, expected true or false")
    return value


def whole(text: str, where: str) -> str:
    """The text itself. JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half a surrogate pair") from None
    return text
