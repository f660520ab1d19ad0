"""Grammars of answers, compiled by llguidance for a model's vocabulary, in threads of their own.

The front checks a grammar before it takes the request, the worker that draws compiles it: both here, under the same
limits, so what the front takes the worker can draw by. A compiled grammar stays, by its text; rows get copies.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from threading import Lock, Thread, stack_size
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from deltaserve.core.errors import DeltaserveError
from deltaserve.model.endless_schemas import endless_schema
from deltaserve.model.grammar_schemas import GrammarSchema, with_schemas
from deltaserve.model.member_counts import loose_count
from deltaserve.model.number_bounds import loose_bound
from deltaserve.model.object_names import exact_names

_MOST_KEPT, _MOST_KEPT_BYTES = 32, 4 << 20
"""Compiled grammars, and bytes of their texts, that are kept. One grows to some thirty megabytes before it meets its
limits."""

MAX_LEXER_STATES = 20_000
"""Most states of one grammar, by all that its rows have read: an answer that needs more ends with an error."""
_MOST_MULTIPLES = 100_000
"""Sum of all `multipleOf`, and their least common multiple: llguidance builds a state for each remainder, of which
100,000 take a third of a second and 30 MB, and no limit of its own is about those."""
_MOST_DIGITS = 12
_FEW = 1000
_STACK_BYTES = 256 << 20
"""Stack on which a grammar is compiled, taken as far as it is used: llguidance follows references by recursion, and a
chain of a thousand ran over the usual one, which ended the process. The longest ones that fit into a grammar need a
sixth."""
_starting = Lock()
"""Held while a thread of such a stack is started: the size is one of the process."""


class GrammarError(DeltaserveError):
    """A grammar that cannot be used, or only beyond the limits."""


@dataclass(frozen=True, slots=True)
class AnswerVocabulary:
    """What the tokens of a model spell."""

    tokenizer: str
    """The tokenizer, as tokenizer.json has it."""
    vocab_size: int
    """Rows of the embedding; ids that the tokenizer has not are allowed nowhere."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer, allowed where the grammar may end."""


Compiled = Future[LLMatcher]
"""The matcher before any token; not to be changed. Its error is a GrammarError."""


class AnswerGrammars:
    """The grammars of one model. Any thread may ask."""

    def __init__(self, vocabulary: Callable[[], AnswerVocabulary], num_threads: int = 1) -> None:
        """`vocabulary`: read when the first grammar comes; it may raise what it likes."""
        self._vocabulary = cache(vocabulary)
        self._tokenizer: LLTokenizer | None = None
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._lock = Lock()
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._kept_bytes = 0

    def compile(self, grammar: str) -> Compiled:
        """What is kept of this grammar, or is compiled now."""
        with self._lock:
            compiled = self._kept.get(grammar)
            if compiled is None:
                compiled = self._kept[grammar] = self._threads.submit(self._compile, grammar)
                self._kept_bytes += len(grammar)
            self._kept.move_to_end(grammar)
            while len(self._kept) > 1 and (len(self._kept) > _MOST_KEPT or self._kept_bytes > _MOST_KEPT_BYTES):
                self._drop(next(iter(self._kept)))
        return compiled

    def renew(self, grammar: str, worn: Compiled) -> None:
        """Have it compiled anew, unless that was done since: copies share a lexer, which grows with all that they see,
        and when it meets its limits none of them goes on."""
        with self._lock:
            if self._kept.get(grammar) is worn:
                self._drop(grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher before any token. Waits where it is not compiled yet. Raises GrammarError."""
        return self.copy(self.compile(grammar))

    def copy(self, compiled: Compiled) -> LLMatcher:
        """A new matcher before any token. Waits where it is not compiled yet. Raises GrammarError."""
        matcher = compiled.result()
        with self._lock:
            return matcher.deep_copy()

    def _drop(self, grammar: str) -> None:
        del self._kept[grammar]
        self._kept_bytes -= len(grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        found = _on_deep_stack(partial(self._outcome, grammar))
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def _outcome(self, grammar: str) -> LLMatcher | str:
        """The matcher, or why there is none: an error that is kept would keep the matcher that it came of."""
        try:
            return self._compile_or_raise(grammar)
        except GrammarError as error:
            return str(error)
        except BaseException as error:  # a library in Rust panics with one
            return f"it cannot be compiled: {error}"

    def _compile_or_raise(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._read_tokenizer(), exact_grammar(grammar), limits=_limits(), log_level=0)
        if not matcher.is_error() and (warnings := matcher.get_grammar_warnings()):
            raise GrammarError(warnings[0])  # the grammar would say less than what was asked
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()  # its first tokens: most of the lexer's work
        if matcher.is_error():
            raise GrammarError(error_of(matcher))
        if not any(mask):
            raise GrammarError("nothing at all is allowed by it")
        _check_first_token(matcher, mask)
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        """Only on the grammars' own threads; two of them may both read it."""
        if self._tokenizer is None:
            found = self._vocabulary()
            if not found.eos_ids:
                raise GrammarError("the model has no token that ends an answer")
            try:
                tokenizer = without_merges(found.tokenizer)
                self._tokenizer = LLTokenizer(tokenizer, found.vocab_size, list(found.eos_ids))
            except ValueError as error:
                raise GrammarError(f"the model's tokenizer cannot be used for grammars: {error}") from error
        return self._tokenizer


def _on_deep_stack(call: Callable[[], LLMatcher | str]) -> LLMatcher | str:
    """What `call` returns, which raises nothing, on a thread of its own with a stack of `_STACK_BYTES`. The thread ends
    with the call: limits of memory (`ulimit -d`, `-v`) count all of a stack. Raises GrammarError where they allow
    none."""
    found: list[LLMatcher | str] = []
    thread = Thread(target=lambda: found.append(call()), name="compiles a grammar")
    with _starting:
        usual = stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise GrammarError(f"there is no memory to compile it in: {error}") from error
        finally:
            stack_size(usual)
    thread.join()
    return found[0]


def without_merges(tokenizer: str) -> str:
    """The same tokens, and no way to find them in a text: a mask is about what tokens spell, and reading the merges of
    a large vocabulary takes a third of the time, under the interpreter lock."""
    try:
        parts = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(parts["model"], type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, KeyError):
        return tokenizer  # it is refused by who reads it
    if "merges" not in model:
        return tokenizer
    model["merges"] = msgspec.Raw(b"[]")
    parts["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(parts).decode()


_SPELLED_FREELY = json.dumps({"name": "spelled_freely", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: "a"'})
"""An option that is one for all parts of a grammar: a text that must come may be spelled in any tokens. Otherwise
llguidance allows the tokens alone that the tokenizer finds in it: without merges one for each letter, and for the
spelling of a control token that token, which no text has."""


def exact_grammar(grammar: str) -> str:
    """The grammar as it is handed to llguidance, so that it allows what was asked for and no more. Raises GrammarError
    where a schema asks for what would be allowed too loosely, would take too many states or would never end."""
    checked: list[GrammarSchema] = []

    def check(root: Any) -> Any:
        schema = GrammarSchema(root)
        checked.append(schema)
        if (fault := loose_bound(schema) or loose_count(schema) or endless_schema(schema)) is not None:
            raise GrammarError(fault)
        return exact_names(schema)

    exact = with_schemas(grammar, check, _SPELLED_FREELY)
    check_multiples(checked)
    return exact


def check_multiples(schemas: Sequence[GrammarSchema]) -> None:
    """Raises GrammarError where `multipleOf`, all of it together, asks for too many remainders."""
    given = [part["multipleOf"] for schema in schemas for part in schema.parts if "multipleOf" in part]
    values = [abs(Decimal(str(value))) for value in given if _is_finite(value)]
    for value in values:
        exponent = value.as_tuple().exponent
        is_small = isinstance(exponent, int) and exponent >= -_MOST_DIGITS and value.adjusted() < _MOST_DIGITS
        if not is_small:
            raise GrammarError(f"multipleOf {value:.6g} is not supported: it has too many digits")
    places = max((_places(value) for value in values), default=0)
    common = Decimal(math.lcm(*{int(value.scaleb(places)) for value in values if value})).scaleb(-places)
    if max(_num_states(common), sum(map(_num_states, values))) > _MOST_MULTIPLES:
        raise GrammarError(
            f"multipleOf is not supported for more than {_MOST_MULTIPLES} remainders, all of it together"
        )


def _places(value: Decimal) -> int:
    """Digits behind the point."""
    return max(0, -int(value.normalize().as_tuple().exponent))


def _num_states(value: Decimal) -> int:
    """Zeros behind a small number cost nothing."""
    digits = int("".join(map(str, value.normalize().as_tuple().digits)))
    return digits if digits <= _FEW else int(value.scaleb(_places(value)))


def _is_finite(value: object) -> bool:
    """Whether it is a number. What else stands there is refused by who compiles it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def error_of(matcher: LLMatcher) -> str:
    """Why a matcher is of no use, in one line."""
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(text.split())


def _check_first_token(matcher: LLMatcher, mask: bytes) -> None:
    """Raises GrammarError where a token that is allowed cannot be consumed."""
    first = next(place for place, byte in enumerate(mask) if byte)
    token = 8 * first + (mask[first] & -mask[first]).bit_length() - 1
    behind = matcher.deep_copy()
    if not behind.consume_token(token):
        raise GrammarError(f"it is too large: {error_of(behind)}")


def _limits() -> LLParserLimits:
    """Bounds of one grammar: about 50 ms for its lexer, as much for each mask, some thirty megabytes of its states and
    of the expressions that they come from. `initial_lexer_fuel` is for the latter: 4,096 choices need half of it, and
    llguidance's own default lets a pattern of sixteen characters take 150 MB and a second. Its size is bounded since
    the time of an object grows with the square of its properties; a row holds four items for each of a thousand."""
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=20_000,
        max_items_in_row=10_000,
        verbose_errors=False,
    )
