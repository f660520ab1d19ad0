"""Everything a front knows about a model's text side: encode, chat prompts, decode, stop ids, defaults."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tokenizers import Tokenizer

from deltaserve.base.errors import ConfigError, DeltaserveError
from deltaserve.base.sampling import SamplingSource
from deltaserve.models.fields import shown
from deltaserve.models.files import find_gguf
from deltaserve.text.conversation import LeftOut, left_out, shaped
from deltaserve.text.detokenize import Detokenizer, TokenBytes, decode_all
from deltaserve.text.gguf_text import read_gguf
from deltaserve.text.quoting_tokenizer import QuotingTokenizer, fast_ids
from deltaserve.text.template import PLAIN_CHAT, ChatTemplate, split_quoted
from deltaserve.text.template_needs import Message
from deltaserve.text.text_files import TextFiles, read_folder

MAX_VOCAB = 1 << 22


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
    """What a request that names nothing gets: what the model's files recommend, else these neutral values."""

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
        self._tokenizer = tokenizer
        self._template = template
        self._table = TokenBytes(tokenizer, vocab_size)
        self._quoting = QuotingTokenizer(tokenizer)

    @staticmethod
    def load(
        model: Path,
        broken_template: BrokenTemplate = BrokenTemplate.REFUSE,
        sampling: SamplingSource = "model",
    ) -> "TextCodec":
        """Read a model folder or GGUF file. Raises ConfigError naming the file and what is wrong with it."""
        gguf = find_gguf(model)
        files = read_folder(model) if gguf is None else read_gguf(gguf)
        vocab_size = _vocab_size(files.config, files.tokenizer)
        template = _load_template(files, broken_template)
        recommended = _sampling_defaults(files.generation)
        defaults = recommended if sampling == "model" else SamplingDefaults()
        codec = TextCodec(files.tokenizer, vocab_size, _eos_ids(files, vocab_size), template, defaults)
        _check_chat(codec)
        return codec

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw prompt. Control tokens in it are parsed: the caller owns the template."""
        return tuple(fast_ids(self._tokenizer, text, add_special_tokens=add_special_tokens))

    def encode_chat(
        self, messages: Sequence[Message], options: Mapping[str, object], most_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Ids of a conversation up to where the assistant speaks. Message text never becomes a control token.

        Raises TemplateError when the template refuses the messages, TooManyTokens when it is clear before tokenizing
        that they are more than `most_tokens`.
        """
        assert self._template is not None, "checked by has_chat_template"
        rendered = self._template.render(shaped(messages, self._template.needs), options)
        pieces = split_quoted(rendered, self._quoting.control)
        least = -(-sum(len(text) for text, _ in pieces) // self._table.longest)
        if most_tokens is not None and least > most_tokens:
            raise TooManyTokens(least)
        if not rendered.quoted:
            return self.encode(rendered.text, add_special_tokens=False)
        return self._quoting.encode(pieces)

    def left_out(self, messages: Sequence[Message], options: Mapping[str, object]) -> list[LeftOut]:
        """What of a conversation that `encode_chat` took the template does not show."""
        template = self._template
        assert template is not None, "checked by has_chat_template"
        return left_out(messages, template.needs, lambda shown: template.render(shown, options).text)

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


def _eos_ids(files: TextFiles, vocab_size: int) -> set[int]:
    """Every id that any file of the folder calls an end of sequence."""
    text_config, eos_token = files.config.get("text_config"), files.special_names.get("eos_token")
    sources: dict[str, object] = {
        "generation_config.json": files.generation.get("eos_token_id"),
        "config.json": files.config.get("eos_token_id"),
        "config.json text_config": text_config.get("eos_token_id") if isinstance(text_config, dict) else None,
        "tokenizer_config.json": files.tokenizer.token_to_id(eos_token) if eos_token else None,
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


def _load_template(files: TextFiles, broken: BrokenTemplate) -> ChatTemplate | None:
    source, names = files.template, files.special_names
    if source is None:
        return None
    control = [added.content for added in files.tokenizer.get_added_tokens_decoder().values() if added.special]
    try:
        return ChatTemplate(source, control, names)
    except ConfigError:
        if broken is BrokenTemplate.REFUSE:
            raise
        return None
