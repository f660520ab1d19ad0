"""Everything a front knows about a model's text side: encode, chat prompts, decode, stop ids, defaults."""

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer

from deltaserve.core.errors import ConfigError, DeltaserveError
from deltaserve.core.sampling import SamplingSource
from deltaserve.model.answer_grammars import AnswerVocabulary
from deltaserve.model.checkpoint_config import spec_of
from deltaserve.model.fields import shown
from deltaserve.model.open_source import open_source
from deltaserve.server.text.answers.answer_choice import Parsers, choose
from deltaserve.server.text.answers.answer_reader import PromptEnd
from deltaserve.server.text.answers.answer_syntax import Thinking
from deltaserve.server.text.answers.call_grammar import MarkerTokens
from deltaserve.server.text.byte_coverage import check_coverage
from deltaserve.server.text.conversation import LeftOut, left_out, marked_end, new_short_id, shaped
from deltaserve.server.text.detokenize import Detokenizer, TokenBytes, decode_all
from deltaserve.server.text.end_tokens import control_ids, end_ids
from deltaserve.server.text.library_errors import library_errors
from deltaserve.server.text.quoting_tokenizer import QuotingTokenizer, fast_ids
from deltaserve.server.text.stop_filter import HiddenStops
from deltaserve.server.text.template import PLAIN_CHAT, ChatTemplate, Rendered, split_quoted
from deltaserve.server.text.template_needs import Message, TemplateError
from deltaserve.server.text.text_files import TemplateSource, TextFiles, read_files, read_template
from deltaserve.server.text.tokenizer_fit import Fitted, fitted

_log = logging.getLogger(__name__)
MAX_VOCAB = 1 << 22
_END_TOKENS = 24
"""Tokens at the end of a prompt that may spell a marker and white space behind it."""


_SPACES = [*" \t\r\n", *map("".join, product(" \t\r\n", repeat=2))]
"""White space that may stand before a marker, as far as a token may be it."""


class TooManyTokens(DeltaserveError):
    """A conversation that has at least this many tokens, which is more than were allowed."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


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
        parsers: Parsers | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.defaults = defaults or SamplingDefaults()
        self.has_chat_template = template is not None
        self.shows_tools = template is not None and template.needs.shows_tools
        """Whether the template tells the model of tools."""
        self._tokenizer = tokenizer
        self._added = self.encode("")
        """What a text gets in front and behind."""
        self._template = template
        self._table = TokenBytes(tokenizer, vocab_size)
        self._quoting = QuotingTokenizer(tokenizer)
        self.control_ids: Mapping[str, int] = control_ids(tokenizer)
        """Control tokens of the tokenizer |-> their ids."""
        self.answers = choose(self.control_ids, template, parsers or Parsers())
        """How chats are answered."""
        self.marker_tokens = self._marker_tokens()
        """What their grammars must know of the vocabulary."""

    @staticmethod
    def load(
        model: Path,
        overrides: str | None = None,
        sampling: SamplingSource = "model",
        template: Path | None = None,
        parsers: Parsers | None = None,
    ) -> "TextCodec":
        """Read a model folder or GGUF file. `overrides`: of its configuration, as for the model's weights (`spec_of`);
        `template`: file of a chat template in place of the model's own.

        Raises ConfigError naming the file and what is wrong with it.
        """
        text = _read(model, overrides, template)
        recommended = _sampling_defaults(text.files.generation)
        defaults = recommended if sampling == "model" else SamplingDefaults()
        with library_errors(f"{model.name}: not a usable tokenizer"):
            codec = TextCodec(text.fit.tokenizer, text.vocab_size, text.ends, text.chat, defaults, parsers)
            check_coverage(text.fit.tokenizer, codec._table, text.vocab_size, model.name)
        if text.files.template is not None:
            _check_chat(codec, text.files.template, text.fit.left_out)
        return codec

    def _marker_tokens(self) -> MarkerTokens:
        formats = (self.answers.calls, self.answers.reasoning)
        markers = sorted(frozenset[str]().union(*(each.markers for each in formats if each is not None)))
        added = {each.content: token for token, each in self._tokenizer.get_added_tokens_decoder().items()}
        spelled = [self.encode(text, add_special_tokens=False) for text in _SPACES]
        return MarkerTokens(
            control={text: self.control_ids[text] for text in markers if text in self.control_ids},
            whole={text: added[text] for text in markers if text in added},
            ends=self.eos_ids,
            spaces=sorted({ids[0] for ids in spelled if len(ids) == 1}),
        )

    def vocabulary(self) -> AnswerVocabulary:
        """What the tokens spell, as grammars need it."""
        return AnswerVocabulary(self._tokenizer.to_str(), self.vocab_size, self.eos_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw prompt. Control tokens in it are parsed: the caller owns the template."""
        return tuple(fast_ids(self._tokenizer, text, add_special_tokens=add_special_tokens))

    def begins_twice(self, tokens: Sequence[int]) -> bool:
        """Whether the token that the tokenizer puts in front of a text was written there as well."""
        return len(tokens) > 1 and tokens[0] == tokens[1] and tokens[:1] == self._added[:1]

    def encode_chat(
        self, messages: Sequence[Message], options: Mapping[str, object], most_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Ids of a conversation up to where the assistant speaks. Message text never becomes a control token.

        Raises TemplateError when the template refuses the messages, TooManyTokens when it is clear before tokenizing
        that they are more than `most_tokens`.
        """
        assert self._template is not None, "checked by has_chat_template"
        return self._ids(self._template.render(shaped(messages, self._template.needs), options), most_tokens)

    def encode_open_chat(
        self, messages: Sequence[Message], options: Mapping[str, object], most_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Ids of a conversation up to the end of its last message's text, which is to be gone on with. Raises as
        `encode_chat` does."""
        assert self._template is not None, "checked by has_chat_template"
        shown, end = marked_end(messages)
        shaped_messages = shaped(shown, self._template.needs)
        rendered = self._template.render(shaped_messages, {**options, "add_generation_prompt": False})
        text, *behind = rendered.text.split(end)
        if len(behind) != 1:
            raise TemplateError("the chat template does not show the last message as it is: it cannot be gone on with")
        return self._ids(Rendered(text, rendered.quoted), most_tokens)

    def _ids(self, rendered: Rendered, most_tokens: int | None) -> tuple[int, ...]:
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

    def new_call_id(self) -> str:
        """An id for a call, which nobody can guess, and which the template takes back."""
        is_short = self._template is not None and self._template.needs.short_ids
        return new_short_id() if is_short else f"call_{secrets.token_hex(12)}"

    def prompt_end(self, tokens: Sequence[int], thinking: Thinking) -> PromptEnd:
        """Whether a prompt ends inside reasoning, or behind it."""
        end = self.decode(tokens[-_END_TOKENS:]).rstrip()
        if end.endswith(thinking.begin):
            return PromptEnd.INSIDE
        return PromptEnd.BEHIND if end.endswith(thinking.end) else PromptEnd.BEFORE

    def least_tokens(self, text: str) -> int:
        """No fewer ids than this can spell `text`: a bound that needs no tokenizing (normalization is not foreseen)."""
        return -(-len(text) // self._table.longest)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a complete list of ids, invalid UTF-8 replaced."""
        return decode_all(self._table, tokens, self._hidden(skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one output."""
        return Detokenizer(self._table, self._hidden(skip_special_tokens))

    def stops(self, stops: Sequence[str], *, skip_special_tokens: bool) -> HiddenStops:
        """Stop strings as a text without, or with, the control tokens is looked through for them."""
        return HiddenStops(stops, self.control_ids if skip_special_tokens else {}, self._quoting.control)

    def token_bytes(self, token: int) -> bytes:
        """Bytes one id stands for."""
        return self._table.of(token)

    def token_label(self, token: int) -> str:
        r"""Printable name of one id: its text, or `bytes:\xe4` when it is part of a character."""
        return self._table.label(token)

    def _hidden(self, skip_special_tokens: bool) -> frozenset[int]:
        return self._table.special_ids if skip_special_tokens else frozenset()


@dataclass(frozen=True, slots=True)
class _ModelText:
    """What a model's files say of its text."""

    fit: Fitted
    files: TextFiles
    vocab_size: int
    chat: ChatTemplate | None
    ends: set[int]


def _read(model: Path, overrides: str | None, template: Path | None) -> _ModelText:
    source = open_source(model)
    spec = spec_of(source, overrides)
    files = read_files(source, model)
    with library_errors(f"{model.name}: not a usable tokenizer"):
        fit = fitted(files.tokenizer, spec.vocab_size)
    files = replace(files, tokenizer=fit.tokenizer)
    if template is not None:
        files = replace(files, template=read_template(template))
    chat = _load_template(files)
    return _ModelText(fit, files, spec.vocab_size, chat, end_ids(spec.eos_token_ids, files, chat))


def read_vocabulary(model: Path, overrides: str | None = None) -> AnswerVocabulary:
    """What the tokens of a model spell, without the tables of a codec: those take most of its time. Raises ConfigError
    as `TextCodec.load` does."""
    text = _read(model, overrides, None)
    return AnswerVocabulary(text.fit.tokenizer.to_str(), text.vocab_size, tuple(sorted(text.ends)))


def _check_chat(codec: TextCodec, source: TemplateSource, left_out: Sequence[str]) -> None:
    """A template may render what the tokenizer cannot take. `left_out`: tokens that the model has no embedding of."""
    assert codec._template is not None, "loaded from this source"
    with library_errors(f"{source.where}: the tokenizer fails on what the chat template makes of one plain message"):
        rendered = codec._template.render(shaped(PLAIN_CHAT, codec._template.needs), {}).text
        codec.encode_chat(PLAIN_CHAT, {})
    unknown = next((token for token in left_out if token in rendered), None)
    if unknown is not None:
        found = f"the chat template writes {unknown[:60]!r}, of which the model has no embedding"
        raise ConfigError(f"{source.where}: {found}; {source.remedy}")


_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 2.0),
}
"""What a request may ask for."""


def _sampling_defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    """The author's recommendation, brought into the allowed range or left out: no reason not to serve."""
    values = {name: _recommended(generation, name, *limits) for name, limits in _RANGES.items()}
    top_k = _recommended(generation, "top_k", -1.0, MAX_VOCAB)
    if top_k is not None and not top_k.is_integer():
        _log.warning("recommended sampling: top_k %s is not a whole number: it is ignored", top_k)
        top_k = None
    known = {name: value for name, value in values.items() if value is not None}
    return SamplingDefaults(**known, top_k=int(top_k) if top_k is not None and top_k > 0 else None)  # -1 and 0: off


def _recommended(generation: Mapping[str, object], name: str, low: float, high: float) -> float | None:
    value = generation.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        _log.warning("recommended sampling: %s %s is no number: it is ignored", name, shown(value))
        return None
    used = float(min(max(value, low), high))
    if used != value:
        _log.warning("recommended sampling: %s %s is used as %g", name, shown(value), used)
    return used


def _load_template(files: TextFiles) -> ChatTemplate | None:
    source = files.template
    if source is None:
        return None
    control = [added.content for added in files.tokenizer.get_added_tokens_decoder().values() if added.special]
    try:
        return ChatTemplate(source.text, control, files.special_names)
    except ConfigError as error:
        raise ConfigError(f"{source.where}: {error}; {source.remedy}") from error
