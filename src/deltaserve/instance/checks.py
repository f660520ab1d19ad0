"""Range checks of what peers ask for, against this worker's sizes. What passes can be served, some time."""

from collections.abc import Sequence

from deltaserve.base.errors import FailReason
from deltaserve.base.keys import key_at
from deltaserve.base.tokens import TOKEN_BYTES, token_len, unpack_u32
from deltaserve.instance.api import InstanceConfig
from deltaserve.wire.messages import Component, Grant, Offer, Submit

Refusal = tuple[FailReason, str]


def refuse_submit(config: InstanceConfig, submit: Submit) -> Refusal | None:
    """Why decode can never serve a Submit, or None."""
    problem = _prompt_problem(config, submit.prompt)
    if problem is not None:
        return FailReason.BAD_EXTENT, problem
    if submit.sampling.max_tokens < 1:
        return FailReason.BAD_EXTENT, "max_tokens below 1"
    return _size_problem(config, token_len(submit.prompt) + submit.sampling.max_tokens)


def refuse_offer(config: InstanceConfig, offer: Offer) -> Refusal | None:
    """Why prefill can never serve an Offer, or None."""
    problem = _prompt_problem(config, offer.prompt)
    num_tokens = token_len(offer.prompt)
    if problem is not None or not 0 < offer.prompt_len <= num_tokens:
        return FailReason.BAD_EXTENT, problem or "the prompt's length is not inside the prompt"
    prefix_pages, beyond = divmod(offer.prefix_len, config.cache.page_size)
    if beyond or not 0 <= offer.prefix_len <= num_tokens:
        return FailReason.BAD_EXTENT, "decode's prefix is not a page multiple inside the prompt"
    if prefix_pages and key_at(offer.keys, prefix_pages - 1) != offer.prefix_key:
        return FailReason.PREFIX_MISMATCH, "decode's prefix has another key here"
    return _size_problem(config, num_tokens)


def grant_fits(config: InstanceConfig, pool_pages: Sequence[int], grant: Grant, num_tokens: int, keys: bytes) -> bool:
    """Whether a grant's coverage is exactly what is missing of a prompt of `num_tokens` tokens, in every pool.

    `pool_pages`: sizes of decode's pools, as it announced them.
    """
    num_pages = config.cache.num_pages(num_tokens)
    prefix_pages, beyond = divmod(grant.prefix_len, config.cache.page_size)
    if beyond or not 0 <= prefix_pages <= num_pages or grant.prefix_len > num_tokens:
        return False
    if prefix_pages and key_at(keys, prefix_pages - 1) != grant.prefix_key:
        return False
    num_pools = config.cache.num_pools
    if sorted(c.pool for c in grant.coverage) != list(range(num_pools)) or len(pool_pages) != num_pools:
        return False
    return all(_names_pages(c, num_pages - prefix_pages, pool_pages[c.pool]) for c in grant.coverage)


def _names_pages(component: Component, count: int, arena_pages: int) -> bool:
    """Whether a component names `count` different pages of an arena, each with a generation."""
    if not len(component.pages) == len(component.generations) == count * TOKEN_BYTES:
        return False
    pages = unpack_u32(component.pages)
    return len(set(pages)) == count and all(page < arena_pages for page in pages)


def _prompt_problem(config: InstanceConfig, prompt: bytes) -> str | None:
    if not prompt or len(prompt) % TOKEN_BYTES:
        return "the prompt is not a list of token ids"
    if max(unpack_u32(prompt)) >= config.vocab_size:
        return "token id beyond the vocabulary"
    return None


def _size_problem(config: InstanceConfig, num_tokens: int) -> Refusal | None:
    if num_tokens > config.max_context_len:
        return FailReason.TOO_LONG, f"{num_tokens} tokens, context of {config.max_context_len}"
    if any(config.cache.num_pages(num_tokens) > n for n in config.num_pages):
        return FailReason.TOO_LONG, f"{num_tokens} tokens exceed the pool of {config.role.value}"
    return None
