"""The sampling fields shared by every endpoint, and what they resolve to."""

import hashlib
import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from deltaserve.core.sampling import MAX_BAD_TOKENS, NEVER, SamplingParams
from deltaserve.server.api_errors import invalid
from deltaserve.server.body_fields import Body, Items, at_most
from deltaserve.server.text.text_codec import TextCodec

MAX_LOGPROBS = 20
MAX_STOPS = 1024
MAX_STOP_CHARS = 1024
"""Most characters of one stop string."""
MAX_STOPS_CHARS = 16 * 1024
"""Most characters of all stop strings together: every piece of text is compared with every beginning of theirs."""
MAX_STOP_IDS = 1024
MAX_LOGIT_BIAS = 300
INT64 = 1 << 63
UINT64_MASK = (1 << 64) - 1
RANDOM_SEED = -1
"""A seed that is none, as clients of llama.cpp write it."""

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class SamplingFields(Body):
    """OpenAI's sampling fields and the common extensions. None means: not given."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-9, le=2.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: Items[int] | None = None
    """vLLM's: no other token is drawn, an end neither."""
    bad_words: Items[str] | None = None
    """vLLM's: words that an answer must not have, in the tokens that the tokenizer makes of them."""
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


@dataclass(frozen=True, slots=True)
class EndpointFields:
    """What one endpoint read on its own and the shared fields do not say."""

    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """Non-empty strings, within the limits above. Raises ApiError 400."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string has {len(stop)} characters, allowed is 1..{MAX_STOP_CHARS}")
    num_chars = sum(map(len, stops))
    if num_chars > MAX_STOPS_CHARS:
        raise invalid("stop", f"stop strings have {num_chars} characters, allowed are {MAX_STOPS_CHARS} in all")
    return tuple(dict.fromkeys(stops))


def resolve(
    fields: SamplingFields, asked: EndpointFields, codec: TextCodec, vocab_size: int, grammar: str | None = None
) -> SamplingParams:
    """Complete sampling parameters of sample 0. Raises ApiError 400 naming the field.

    `grammar`: what the answer must be. Where it ends nothing may follow, so the answer ends whatever `ignore_eos` says.
    """
    defaults = codec.defaults
    if fields.min_tokens is not None and fields.min_tokens > max(1, asked.max_tokens):
        raise invalid("min_tokens", f"min_tokens {fields.min_tokens} is above max_tokens {asked.max_tokens}")
    stop_ids = _stop_ids(fields.stop_token_ids or [], vocab_size)
    ignores_ends = bool(fields.ignore_eos) and grammar is None
    top_k = 1 if fields.top_p == 0 else defaults.top_k if fields.top_k is None else fields.top_k
    bad_words = _bad_words(fields, codec)
    ends = stop_ids if ignores_ends else tuple(sorted({*stop_ids, *codec.eos_ids}))
    return SamplingParams(
        max_tokens=max(1, asked.max_tokens),  # 0 only scores the prompt: the token that comes with it is not shown
        seed=secrets.randbits(63) if fields.seed in (None, RANDOM_SEED) else fields.seed & UINT64_MASK,
        temperature=_given(fields.temperature, defaults.temperature),
        top_p=_given(fields.top_p, defaults.top_p) or 1.0,  # 0 leaves one token: the likeliest
        top_k=top_k if top_k is not None and top_k > 0 else None,
        min_p=_given(fields.min_p, defaults.min_p),
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_biases(fields, bad_words, vocab_size, ends),
        bad_words=tuple(sorted(word for word in bad_words if len(word) > 1)),
        stop_token_ids=ends,
        min_tokens=fields.min_tokens or 0,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        grammar=grammar,
    )


def derive_seed(seed: int, sample: int) -> int:
    """Seed of sample `sample` of a request: sample 0 keeps the seed, the others get independent ones."""
    if sample == 0:
        return seed
    data = seed.to_bytes(8, "little") + sample.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _stop_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_IDS:
        raise invalid("stop_token_ids", f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_IDS} are allowed")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise invalid("stop_token_ids", f"an id is outside 0..{vocab_size - 1}")
    return tuple(ids)


def _biases(
    fields: SamplingFields, bad_words: Collection[tuple[int, ...]], vocab_size: int, ends: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """What is added to logits, by token. `ends`: tokens that end the answer; a grammar allows them all."""
    bad = (word[0] for word in bad_words if len(word) == 1)
    pairs = _logit_bias(fields.logit_bias or {}, vocab_size) | dict.fromkeys(bad, NEVER)
    if fields.allowed_token_ids is not None:
        allowed = _allowed(fields.allowed_token_ids, vocab_size)
        pairs |= dict.fromkeys((token for token in ends if token not in allowed), NEVER)
    return tuple(sorted(pairs.items()))


def _allowed(ids: list[int], vocab_size: int) -> frozenset[int]:
    if not ids or not all(0 <= token < vocab_size for token in ids):
        raise invalid("allowed_token_ids", f"allowed_token_ids must be one or more ids in 0..{vocab_size - 1}")
    return frozenset(ids)


def _bad_words(fields: SamplingFields, codec: TextCodec) -> set[tuple[int, ...]]:
    """The tokens of each bad word, and those of the word after a space. Raises ApiError 400."""
    words, found, num_tokens = fields.bad_words or [], set[tuple[int, ...]](), 0
    if len(words) > MAX_LOGIT_BIAS:
        raise invalid("bad_words", f"bad_words has {len(words)} words, at most {MAX_LOGIT_BIAS} are allowed")
    for index, word in enumerate(words):
        if not 0 < len(word) <= MAX_STOP_CHARS:
            raise invalid(f"bad_words[{index}]", f"a word has {len(word)} characters, allowed is 1..{MAX_STOP_CHARS}")
        for text in (word, f" {word.lstrip()}"):
            tokens = tuple(codec.encode(text, add_special_tokens=False))
            num_tokens += len(tokens)
            if num_tokens > MAX_BAD_TOKENS:
                raise invalid(
                    "bad_words", f"bad_words have more than {MAX_BAD_TOKENS} tokens, after a space and without"
                )
            found.add(tokens)
    return found - {()}


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else vocab_size
        if token >= vocab_size:
            raise invalid("logit_bias", f"a key is not a token id in 0..{vocab_size - 1}")
        if token in pairs:
            raise invalid("logit_bias", f"token {token} is named twice")
        if not math.isfinite(value) or not -100 <= value <= 100:
            raise invalid("logit_bias", "a value is outside -100..100")
        pairs[token] = float(value)
    return pairs
