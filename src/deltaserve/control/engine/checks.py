"""Range checks of what peers ask for, against this worker's sizes. What passes can be served, some time."""

from collections.abc import Mapping, Sequence

import numpy as np

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.sched.plan import ItemOutcome
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import Namespace, Role
from deltaserve.core.keys import KEY_BYTES, extend_keys
from deltaserve.core.layout.prompt_pages import PromptPages
from deltaserve.core.sampling import sampling_problem
from deltaserve.core.tokens import TOKEN_BYTES, token_len, unpack_u32
from deltaserve.core.wire.messages import (
    Ask,
    AskLogprobs,
    AskTree,
    Cancel,
    ChangeRole,
    Component,
    Drained,
    Draining,
    Failed,
    Finish,
    Flush,
    Grant,
    Hello,
    Message,
    Offer,
    PromptLogprobs,
    Queued,
    Revoke,
    Sent,
    Starting,
    Submit,
    WriteBack,
)

Refusal = tuple[FailReason, str]
STEP_FAILURES: Mapping[ItemOutcome, Refusal] = {
    ItemOutcome.NOT_FINITE: (FailReason.NUMERICAL, "the model's output is not finite"),
    ItemOutcome.FAILED: (FailReason.COMPUTE_FAILED, "the step could not be computed"),
    ItemOutcome.NO_GRAMMAR: (
        FailReason.GRAMMAR_FAILED,
        "the grammar allows nothing behind the output so far, or met a limit",
    ),
}
"""What ends a request whose item was not computed."""
_TICKETS = 1 << 63
_DECODES = (Role.DECODE.value, Role.UNIFIED.value)
_OF_WRITERS = frozenset({Failed, Draining, Sent, Drained})
"""Either writes: prefill prompts, decode answers."""
_ORDERS: Mapping[str, frozenset[type]] = {
    Role.FRONT.value: frozenset({Submit, Cancel, Finish, Flush, ChangeRole, AskTree, Hello}),
    Role.PREFILL.value: _OF_WRITERS | {Queued, Starting, PromptLogprobs, Grant, Revoke},
    **dict.fromkeys(_DECODES, _OF_WRITERS | {Offer, Ask, AskLogprobs, Grant, Revoke, Cancel, WriteBack}),
}
"""Role |-> what a worker takes from it. Pages move between prefill and decode only: a front has no endpoint here."""


def may_say(role: str, message: Message) -> bool:
    """Whether a message is one that peers of this role send to workers."""
    return type(message) in _ORDERS.get(role, ())


def are_pair(ours: Role, theirs: str) -> bool:
    """Whether pages move between two such instances."""
    return theirs in _DECODES if ours is Role.PREFILL else theirs == Role.PREFILL.value


def refuse_submit(config: InstanceConfig, submit: Submit) -> Refusal | None:
    """Why decode can never serve a Submit, or None."""
    problem = _request_problem(config, submit)
    if problem is None and (len(submit.keys) % KEY_BYTES or not page_keys(config, submit).startswith(submit.keys)):
        problem = "the keys are not those of the prompt's full pages"  # a tree with them would refuse the right ones
    if problem is not None:
        return FailReason.BAD_EXTENT, problem
    if not 0 <= token_len(submit.prompt) - submit.prompt_len < submit.sampling.max_tokens:
        return FailReason.BAD_EXTENT, "the delivered output leaves nothing to generate"
    return _size_problem(config, submit.prompt_len + submit.sampling.max_tokens)


def refuse_offer(config: InstanceConfig, offer: Offer) -> Refusal | None:
    """Why prefill can never serve an Offer, or None."""
    problem = _request_problem(config, offer)
    if problem is None and not 0 <= offer.held_len <= token_len(offer.prompt):
        problem = "what decode holds of the prompt is longer than it, or less than nothing"
    if problem is not None:
        return FailReason.BAD_EXTENT, problem
    return _size_problem(config, token_len(offer.prompt))


def refuse_write_back(config: InstanceConfig, told: WriteBack) -> Refusal | None:
    """Why what decode tells of an answer can be none of this worker's, or None."""
    problem = _tokens_problem(config, told.tokens)
    if problem is None and len(told.tokens) % (config.cache.page_size * TOKEN_BYTES):
        problem = "the tokens do not fill whole pages"
    if problem is None and not 0.0 <= told.next_turn_chance <= 1.0:
        problem = "the chance of a next turn is no share"
    if problem is not None:
        return FailReason.BAD_EXTENT, problem
    return _size_problem(config, token_len(told.tokens))


def grant_fits(config: InstanceConfig, pool_pages: Sequence[int], grant: Grant, prompt: PromptPages) -> bool:
    """Whether a grant's coverage is, in every pool, an end of the prompt, in decode's pages.

    `pool_pages`: sizes of decode's pools, as it announced them.
    """
    if not 0 < grant.ticket < _TICKETS:
        return False
    num_pages, num_pools = prompt.num_pages, config.cache.num_pools
    if sorted(c.pool for c in grant.coverage) != list(range(num_pools)) or len(pool_pages) != num_pools:
        return False
    needed = [kept.first_needed(prompt.num_tokens, prompt.reader_size) for kept in config.cache.pools]
    return all(c.first >= needed[c.pool] and _is_end(c, num_pages, pool_pages[c.pool]) for c in grant.coverage)


def _is_end(component: Component, num_pages: int, arena_pages: int) -> bool:
    """Whether a component names different pages of an arena, for the prompt's pages from `first` to the end."""
    count = num_pages - component.first
    if component.first < 0 or count < 0 or len(component.pages) != count * TOKEN_BYTES:
        return False
    pages = unpack_u32(component.pages)
    return not pages or (len(set(pages)) == count and max(pages) < arena_pages)


def _request_problem(config: InstanceConfig, asked: Submit | Offer) -> str | None:
    if (problem := _tokens_problem(config, asked.prompt)) is not None:
        return problem
    if not 0 < asked.prompt_len <= token_len(asked.prompt):
        return "the prompt's length is not inside the prompt"
    return sampling_problem(asked.sampling, config.vocab_size)


def _tokens_problem(config: InstanceConfig, tokens: bytes) -> str | None:
    if not tokens or len(tokens) % TOKEN_BYTES:
        return "the prompt is not a list of token ids"
    if np.frombuffer(tokens, np.dtype("<u4")).max() >= config.vocab_size:  # no object per token: it may be long
        return "token id beyond the vocabulary"
    return None


def page_keys(config: InstanceConfig, asked: Submit | Offer) -> bytes:
    """Packed keys of the full pages of the prompt, in this worker's page size."""
    return extend_keys(config.seed_of(Namespace(asked.namespace)), asked.prompt, config.cache.page_size)


def _size_problem(config: InstanceConfig, num_tokens: int) -> Refusal | None:
    if num_tokens > config.max_context_len:
        return FailReason.TOO_LONG, f"{num_tokens} tokens, context of {config.max_context_len}"
    size, ahead = config.cache.page_size, config.options.sched.chunk_len
    most = [kept.most_pages(num_tokens, ahead, size) for kept in config.cache.pools]
    if any(count > num_pages for count, num_pages in zip(most, config.num_pages, strict=True)):
        return FailReason.TOO_LONG, f"{num_tokens} tokens exceed the pool of {config.role.value}"
    return None
