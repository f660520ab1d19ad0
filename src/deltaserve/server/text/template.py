"""Chat templates: rendered as transformers does, with user text kept apart from the template's own control tokens.

A template is as trusted as the weights beside it: no request brings one. Jinja's sandbox keeps it from Python's inside.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.template_needs import Message, TemplateError, find_needs

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_OUTPUT_CHARS = 16 * 1024 * 1024

MAX_REASON_CHARS = 300
"""Most characters of what a template says about messages that it refuses."""

PLAIN_CHAT: Sequence[Message] = ({"role": "user", "content": "hello"},)
"""What every template must be able to render."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. Each key of `quoted` stands in it for user text that spells a control token."""

    text: str
    quoted: Mapping[str, str]


def _refuse(message: object) -> str:
    raise _Refused(str(message))


class _Refused(Exception):
    """What the template says of the messages."""


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of transformers; Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks what training is to learn. Here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The body of the tag, in a scope of its own."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _strftime_now(pattern: object) -> str:
    return time.strftime(str(pattern)[:64])


class ChatTemplate:
    """A model folder's template, compiled once."""

    def __init__(self, source: str, control_tokens: Iterable[str], names: Mapping[str, str]) -> None:
        """`control_tokens`: strings that become special ids. `names`: bos_token and the like.

        Raises ConfigError when the template is too large, does not compile, or fails on one plain message.
        """
        num_bytes = len(source.encode(errors="surrogatepass"))
        if num_bytes > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"the chat template has {num_bytes} bytes, at most {MAX_TEMPLATE_BYTES} are allowed")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self.source = source
        self._names = dict(names)
        self._quote = _Quoter(control_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not compile (line {error.lineno}: {error.message})") from error
        except Exception as error:  # nested too deeply, a number too long: Jinja and Python's compiler raise any type
            raise ConfigError(f"the chat template does not compile ({error.__class__.__name__})") from error
        try:
            self.needs = find_needs(lambda chat, **options: self.render(chat, options, "one plain message").text)
        except TemplateError as error:
            raise ConfigError(str(error)) from error

    def render(
        self, messages: Sequence[Message], options: Mapping[str, object], called: str = "these messages"
    ) -> Rendered:
        """The prompt that ends where the assistant's turn begins. Raises TemplateError, which says what they are
        `called`."""
        quoted: dict[str, str] = {}
        variables = {
            "add_generation_prompt": True,
            "tools": None,  # unless the options have some
            "documents": None,
            **self._names,
            **{name: self._quote(value, quoted) for name, value in options.items()},
            "messages": [self._quote_message(message, quoted) for message in messages],
        }
        try:
            return Rendered(_checked(self._run(variables, called), called), quoted)
        except _Refused as refused:
            reason = f"the chat template refuses {called}: {_reason(refused, quoted)}"
        except TemplateError:
            raise
        except Exception as error:  # a template can raise any type: it runs Python operators on user values
            reason = f"{error.__class__.__name__}: {_reason(error, quoted)}"
            reason = f"the chat template fails on {called} ({reason})"
        raise TemplateError(reason)

    def _quote_message(self, message: Message, quoted: dict[str, str]) -> dict[str, object]:
        return {name: value if name == "role" else self._quote(value, quoted) for name, value in message.items()}

    def _run(self, variables: Mapping[str, object], called: str) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise TemplateError(f"the chat template makes more than {MAX_OUTPUT_CHARS} characters of {called}")
        return "".join(pieces)


def _reason(error: Exception, quoted: Mapping[str, str]) -> str:
    """What it says, in one line, in the user's own words."""
    text = _restorer(quoted)(str(error)[: 10 * MAX_REASON_CHARS])
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= MAX_REASON_CHARS else line[:MAX_REASON_CHARS] + " ..."


def _checked(text: str, called: str) -> str:
    """The text itself; half a surrogate pair is no character, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(f"the chat template makes half a surrogate pair of {called}") from error
    return text


class _Quoter:
    """Replaces every control token spelled in user text by a stand-in that no user can guess.

    A text's end that could begin a control token is replaced as well, so that nothing the template appends completes
    one. The rest of the text is untouched: templates look into it (`'</think>' in content`).
    """

    def __init__(self, control_tokens: Iterable[str]) -> None:
        tokens = sorted({token for token in control_tokens if token}, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._heads = frozenset(token[:size] for token in tokens for size in range(1, len(token)))
        self._longest_head = max(map(len, self._heads), default=0)

    def __call__(self, value: object, quoted: dict[str, str]) -> object:
        if isinstance(value, str):
            return self._text(value, quoted)
        if isinstance(value, Mapping):
            return {self._text(str(key), quoted): self(inner, quoted) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self(inner, quoted) for inner in value]
        return value

    def _text(self, text: str, quoted: dict[str, str]) -> str:
        if self._whole is None:
            return text
        text = self._whole.sub(lambda match: _stand_in(match[0], quoted), text)
        body = text.rstrip()
        for size in range(min(self._longest_head, len(body)), 0, -1):
            if body[-size:] in self._heads:
                return body[:-size] + _stand_in(body[-size:], quoted) + text[len(body) :]
        return text


def _stand_in(text: str, quoted: dict[str, str]) -> str:
    key = f"\ue000{secrets.token_hex(12)}\ue001"
    quoted[key] = text
    return key


def split_quoted(rendered: Rendered, control: re.Pattern[str]) -> list[tuple[str, bool]]:
    """(text, is control token) pieces of a rendered prompt, in order, user text restored."""
    restore = _restorer(rendered.quoted)
    pieces: list[tuple[str, bool]] = []
    at = 0
    for match in control.finditer(rendered.text):
        pieces += [(restore(rendered.text[at : match.start()]), False), (match[0], True)]
        at = match.end()
    pieces.append((restore(rendered.text[at:]), False))
    return [piece for piece in pieces if piece[0]]


def _restorer(quoted: Mapping[str, str]) -> Callable[[str], str]:
    pattern = re.compile("\ue000[0-9a-f]{24}\ue001")
    return lambda text: pattern.sub(lambda match: quoted.get(match[0], match[0]), text)
