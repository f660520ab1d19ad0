"""Page keys: a hash chain over the pages of a prompt, computed once for each page size that is in use.

    key_0 = blake2b(model fingerprint, page size, namespace), keyed by the cluster's secret, 128 bits
    key_i = blake2b(key_{i-1} || uint32 ids of page i), 128 bits          i = 1, 2, ...

Two prompts have equal i-th keys iff (hash collisions apart) their first i pages hold equal tokens in the same
namespace on the same model. Trees use keys as an index only and compare full token ids before they share a page. The
file under a tree (control/cache/tier.py) finds pages by key alone: so it is a hash of which nobody who chooses prompts
can find collisions, and not a quicker one (1 us a page in place of 0.1).
A front that serves several revisions of a model keeps a chain for each.
Keys of a prompt are packed: 16 bytes for each full page, one after the other.
"""

import hashlib
from collections.abc import Callable

from deltaserve.core.ids import Namespace
from deltaserve.core.tokens import TOKEN_BYTES

KEY_BYTES = 16


def seed_key(secret: bytes, fingerprint: str, page_size: int, namespace: Namespace) -> bytes:
    """key_0: where every chain of this (cluster, model, page size, namespace) starts. Keyed, so not guessable."""
    parts = (fingerprint.encode(), str(page_size).encode(), namespace.encode())
    body = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.blake2b(body, digest_size=KEY_BYTES, key=secret[:64]).digest()


def seed_check(secret: bytes, fingerprint: str) -> bytes:
    """What processes show each other (`Facts.keys_seed_check`) to find unequal secrets; it opens no chain."""
    return seed_key(secret, fingerprint, 0, Namespace(""))


def extend_keys(last_key: bytes, tokens: bytes | bytearray, page_size: int) -> bytes:
    """Keys of the full pages of `tokens`, packed. `last_key`: of the page before them, or the seed key."""
    stride = page_size * TOKEN_BYTES
    view = memoryview(tokens)
    keys, key = [], last_key
    for offset in range(0, len(tokens) - stride + 1, stride):
        key = hashlib.blake2b(key + view[offset : offset + stride], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return b"".join(keys)


class PromptKeys:
    """The chains of one prompt, one for each model and page size that is asked for, computed once."""

    __slots__ = ("_chains", "_prompt", "_seed")

    def __init__(self, seed: Callable[[str, int], bytes], prompt: bytes) -> None:
        """`seed`: (fingerprint of the model, page size) |-> key_0."""
        self._seed = seed
        self._prompt = prompt
        self._chains: dict[tuple[str, int], bytes] = {}

    def of(self, fingerprint: str, page_size: int) -> bytes:
        """Packed keys of the prompt's full pages on that model; none where no page size is known."""
        if page_size < 1:
            return b""
        keys = self._chains.get((fingerprint, page_size))
        if keys is None:
            keys = extend_keys(self._seed(fingerprint, page_size), self._prompt, page_size)
            self._chains[fingerprint, page_size] = keys
        return keys


def num_keys(keys: bytes | bytearray | memoryview) -> int:
    """Number of page keys in a packed chain."""
    return len(keys) // KEY_BYTES


def unpack_keys(keys: bytes) -> list[bytes]:
    """Keys of a packed chain, one by one."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def common_keys(ours: bytes | bytearray, theirs: bytes | bytearray | memoryview, guess: int = 0) -> int:
    """Number of leading keys that two chains have in common; chained, so bisection finds it. `guess` is tried first."""
    low, high = 0, min(len(ours), len(theirs)) // KEY_BYTES
    middle = min(guess, high - 1)
    while low < high:
        at = middle * KEY_BYTES
        if ours[at : at + KEY_BYTES] == theirs[at : at + KEY_BYTES]:
            low = middle + 1
        else:
            high = middle
        middle = guess - 1 if high == guess > low else (low + high) // 2
    return low


def key_at(keys: bytes | bytearray | memoryview, page_index: int) -> bytes:
    """Key of the page at `page_index` of a packed chain."""
    return bytes(keys[page_index * KEY_BYTES : (page_index + 1) * KEY_BYTES])
