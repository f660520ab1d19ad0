"""Which models have steps that can be recorded and replayed (step_graphs.py, step_pieces.py), and of how many tokens.
No torch: the launcher asks."""

from deltaserve.model.model_spec import ModelSpec

_MOST_TOKENS = 2048
_BUSY_PRODUCTS = 1 << 37
"""Multiplications of a layer that keep a GPU busy for longer than a host needs to launch its kernels one by one: 0.6 ms
of an H100 (reckoned), against some 0.4 ms from Python."""
_LEAST_STEP = 32
"""Up to here, and a few times more, a product reads its matrix for longer than it multiplies: rows in vain cost
nothing."""


def why_not_recordable(spec: ModelSpec) -> str | None:
    """The reason in words for an operator; None: its decode steps have no size that depends on what it computes."""
    reasons = [*(layer.mlp.unrecordable for layer in spec.layers), *(layer.mixer.unrecordable for layer in spec.layers)]
    return next((reason for reason in reasons if reason is not None), None)


def why_no_guesses(spec: ModelSpec) -> str | None:
    """Why steps that verify guesses are not recorded of a model whose decode steps are; None: they are."""
    return "its recurrent states wait for the guesses that prove right" if spec.recurrent else None


def why_no_pieces(spec: ModelSpec) -> str | None:
    """Why steps with prompts are not recorded in pieces of a model whose decode steps are; None: they are."""
    return None if spec.draft is None else "its draft head reads what pieces of later layers overwrite"


def token_bucket(num_tokens: int) -> int:
    """The number of tokens that so many are computed as: multiples of 32, from 512 on sixteenths of a power of two, so
    that there at most an eighth is computed in vain."""
    step = max(_LEAST_STEP, (1 << (num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // step) * step


def token_buckets(most: int) -> list[int]:
    """All of them up to `most`, which is one, the largest first."""
    return sorted({token_bucket(number) for number in range(1, most + 1)}, reverse=True)


def most_piece_tokens(spec: ModelSpec, step_len: int) -> int:
    """Tokens of the largest step whose pieces are worth recording: no more than steps have, and behind it the card is
    busy for longer than the host, so that what is computed in vain would make it late.

    A token's products are counted as its hidden size times the numbers that a layer needs in passing. So many are those
    of a dense layer; of experts it is more than they are (a token's row stands there once for each of its experts), as
    their matrices, which all are read, keep the card busy, too."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    inner = max(layer.mlp.scratch_floats(spec.hidden_size) for layer in spec.layers)
    busy = _BUSY_PRODUCTS // (spec.hidden_size * (heads + inner))
    return token_bucket(max(1, min(_MOST_TOKENS, busy, step_len)))
