"""Everything the front knows about a model folder's text side: encode, chat prompts, decode, stop ids, defaults."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tokenizers import Tokenizer

from deltaserve.base.errors import ConfigError, DeltaserveError
from deltaserve.models.fields import shown
from deltaserve.models.fingerprint import MAX_FILE_BYTES
from deltaserve.models.regular_file import read_if_there
from deltaserve.server.detokenize import Detokenizer, TokenBytes, decode_all
from deltaserve.server.template import PLAIN_CHAT, ChatTemplate, Message, split_quoted

MAX_VOCAB = 1 << 22
_MAX_JSON_BYTES = 16 << 20
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TooManyTokens(DeltaserveError):
    """A conversation that has at least this many tokens, which is more than were allowed."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class BrokenTemplate(Enum):
    """What a chat template that cannot be used means for start-up."""

    REFUSE = "refuse"
    SERVE_COMPLETIONS = "serve_completions"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that names nothing gets: the model author's generation_config.json, else neutral values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TextCodec:
    """Text <-> token ids of one model. Immutable, usable from any thread; holds no code from the model folder."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Iterable[int],
        template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.defaults = defaults or SamplingDefaults()
        self.has_chat_template = template is not None
        self._tokenizer, self._plain = tokenizer, _plain_copy(tokenizer)
        self._template = template
        self._table = TokenBytes(tokenizer, vocab_size)
        self._control = {
            added.content: (token, added.lstrip, added.rstrip)
            for token, added in tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        self._control_pattern = _any_of(self._control)

    @staticmethod
    def load(folder: Path, broken_template: BrokenTemplate = BrokenTemplate.REFUSE) -> "TextCodec":
        """Read a Hugging Face model folder. Raises ConfigError naming the file and what is wrong with it."""
        config = _read_json(folder / "config.json", required=True)
        generation = _read_json(folder / "generation_config.json", required=False)
        tokenizer_config = _read_json(folder / "tokenizer_config.json", required=False)
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        vocab_size = _vocab_size(config, tokenizer)
        names = _special_names(tokenizer_config)
        eos_ids = _eos_ids(config, generation, tokenizer, names.get("eos_token"), vocab_size)
        template = _load_template(folder, tokenizer_config, tokenizer, names, broken_template)
        codec = TextCodec(tokenizer, vocab_size, eos_ids, template, _sampling_defaults(generation))
        _check_chat(codec)
        return codec

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw prompt. Control tokens in it are parsed: the caller owns the template."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(
        self, messages: Sequence[Message], options: Mapping[str, object], most_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Ids of a conversation up to where the assistant speaks. Message text never becomes a control token.

        Raises TemplateError when the template refuses the messages, TooManyTokens when it is clear before tokenizing
        that they are more than `most_tokens`.
        """
        assert self._template is not None, "checked by has_chat_template"
        rendered = self._template.render(messages, options)
        pieces = split_quoted(rendered, self._control_pattern)
        least = -(-sum(len(text) for text, _ in pieces) // self._table.longest)
        if most_tokens is not None and least > most_tokens:
            raise TooManyTokens(least)
        if not rendered.quoted:
            return self.encode(rendered.text, add_special_tokens=False)
        return self._encode_quoted(pieces)

    def _encode_quoted(self, pieces: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
        """The template's control tokens by id, everything between them as plain text."""
        ids: list[int] = []
        for index, (text, is_control) in enumerate(pieces):
            if is_control:
                ids.append(self._control[text][0])
                continue
            if index and self._control[pieces[index - 1][0]][2]:
                text = text.lstrip()
            if index + 1 < len(pieces) and self._control[pieces[index + 1][0]][1]:
                text = text.rstrip()
            ids += self._plain.encode(text, add_special_tokens=False).ids
        return tuple(ids)

    def least_tokens(self, text: str) -> int:
        """No fewer ids than this can spell `text`: a bound that needs no tokenizing (normalization is not foreseen)."""
        return -(-len(text) // self._table.longest)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a complete list of ids, invalid UTF-8 replaced."""
        return decode_all(self._table, tokens, self._hidden(skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one output."""
        return Detokenizer(self._table, self._hidden(skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """Bytes one id stands for."""
        return self._table.of(token)

    def token_label(self, token: int) -> str:
        r"""Printable name of one id: its text, or `bytes:\xe4` when it is part of a character."""
        return self._table.label(token)

    def _hidden(self, skip_special_tokens: bool) -> frozenset[int]:
        return self._table.special_ids if skip_special_tokens else frozenset()


def _check_chat(codec: TextCodec) -> None:
    """A template may render what the tokenizer cannot take."""
    if not codec.has_chat_template:
        return
    try:
        codec.encode_chat(PLAIN_CHAT, {})
    except Exception as error:  # the tokenizer raises plain Exception
        raise ConfigError(f"chat template fails on one plain message: {str(error)[:200]}") from error


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _plain_copy(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, reading special tokens in a text as ordinary characters."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    return plain


def _read_file(path: Path, max_bytes: int) -> bytes | None:
    """None when nothing has this name."""
    try:
        return read_if_there(path, max_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _read_json(path: Path, *, required: bool) -> dict[str, object]:
    content = _read_file(path, _MAX_JSON_BYTES)
    if content is None:
        if required:
            raise ConfigError(f"{path.name} is missing in {path.parent}")
        return {}
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: an object is expected, found {type(value).__name__}")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    content = _read_file(path, MAX_FILE_BYTES)
    if content is None:
        raise ConfigError(f"{path.name} is missing in {path.parent}; only fast tokenizers are supported")
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception for every kind of damage
        raise ConfigError(f"{path}: not a tokenizer: {str(error)[:200]}") from error
    try:
        tokenizer.encode("hello", add_special_tokens=True)
    except Exception as error:
        raise ConfigError(f"{path}: cannot encode a plain word: {str(error)[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _vocab_size(config: Mapping[str, object], tokenizer: Tokenizer) -> int:
    """Rows of the model's embedding. Every id of the tokenizer must have one."""
    text_config = config.get("text_config")
    value = text_config.get("vocab_size") if isinstance(text_config, dict) else None
    value = config.get("vocab_size", value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_VOCAB:
        raise ConfigError(f"config.json: vocab_size is {shown(value)}, allowed is 1..{MAX_VOCAB}")
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= value:
        raise ConfigError(f"tokenizer.json: id {largest} is outside the model's vocabulary of {value}")
    return value


def _special_names(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, ... as plain strings, for the template."""
    names = {}
    for key, value in tokenizer_config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            names[key] = _whole(value, f"tokenizer_config.json: {key[:40]}")
        elif key in SPECIAL_NAMES and value is not None:
            raise ConfigError(f"tokenizer_config.json: {key} is {str(value)[:40]!r}, a string is expected")
    return names


def _whole(text: str, where: str) -> str:
    """The text itself. JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half a surrogate pair") from None
    return text


def _eos_ids(
    config: Mapping[str, object],
    generation: Mapping[str, object],
    tokenizer: Tokenizer,
    eos_token: str | None,
    vocab_size: int,
) -> set[int]:
    """Every id that any file of the folder calls an end of sequence."""
    text_config = config.get("text_config")
    sources: dict[str, object] = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": config.get("eos_token_id"),
        "config.json text_config": text_config.get("eos_token_id") if isinstance(text_config, dict) else None,
        "tokenizer_config.json": tokenizer.token_to_id(eos_token) if eos_token else None,
    }
    ids: set[int] = set()
    for name, value in sources.items():
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ConfigError(f"{name}: eos_token_id {shown(token)} is outside 0..{vocab_size - 1}")
            ids.add(token)
    return ids


def _sampling_defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    neutral = SamplingDefaults()
    top_k = _default(generation, "top_k", 0.0, 0, MAX_VOCAB)
    if not top_k.is_integer():
        raise ConfigError(f"generation_config.json: top_k is {top_k}, a whole number is expected")
    return SamplingDefaults(
        temperature=_default(generation, "temperature", neutral.temperature, 0.0, 2.0),
        top_p=_default(generation, "top_p", neutral.top_p, 1e-9, 1.0),
        top_k=int(top_k) or None,
        min_p=_default(generation, "min_p", neutral.min_p, 0.0, 1.0),
        repetition_penalty=_default(generation, "repetition_penalty", neutral.repetition_penalty, 1e-9, 2.0),
    )


def _default(generation: Mapping[str, object], name: str, neutral: float, low: float, high: float) -> float:
    value = generation.get(name)
    if value is None:
        return neutral
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"generation_config.json: {name} is {shown(value)}, allowed is {low:g}..{high:g}")
    return float(value)


def _load_template(
    folder: Path,
    tokenizer_config: Mapping[str, object],
    tokenizer: Tokenizer,
    names: Mapping[str, str],
    broken: BrokenTemplate,
) -> ChatTemplate | None:
    source = _template_source(folder, tokenizer_config)
    if source is None:
        return None
    control = [added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special]
    try:
        return ChatTemplate(source, control, names)
    except ConfigError:
        if broken is BrokenTemplate.REFUSE:
            raise
        return None


def _template_source(folder: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """chat_template.jinja, else the entry of chat_template.json or tokenizer_config.json.

    An entry is a string, or a list with one named `default`; one that is neither is refused even where it is not used.
    """
    entries = {
        "chat_template.json": _read_json(folder / "chat_template.json", required=False),
        "tokenizer_config.json": tokenizer_config,
    }
    given = [_template_entry(name, values.get("chat_template")) for name, values in entries.items()]
    path = folder / "chat_template.jinja"
    content = _read_file(path, _MAX_JSON_BYTES)
    if content is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: {error.__class__.__name__}") from error
    return given[0] if given[0] is not None else given[1]


def _template_entry(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, list):
        value = next((e.get("template") for e in value if isinstance(e, dict) and e.get("name") == "default"), None)
    if not isinstance(value, str):
        raise ConfigError(f"{name}: chat_template is neither a string nor a list with a default")
    return _whole(value, f"{name}: chat_template")
