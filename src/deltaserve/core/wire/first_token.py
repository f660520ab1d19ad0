"""What prefill tells decode besides KV: the payload of a transfer's last notification."""

import msgspec

from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.codec import decoded


class DraftHandover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a draft head goes on from behind a prompt."""

    group: str
    """Page group of its keys and values, which have come with the others where both sides keep it."""
    features: bytes
    """What it reads of the prompt's last token, in the dtype of the computation."""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The token drawn from the prompt's last position."""

    token: int
    logprobs: TokenLogprobs | None = None
    cached_len: int = 0
    """Prompt tokens prefill took from its own tree."""
    loaded_len: int = 0
    """What of these came from the file under the tree."""
    pulled_len: int = 0
    """What of these was pulled from its reader for this prompt."""
    held_ms: float = 0.0
    """Milliseconds from the Offer to the draw, on prefill's clock: what its reader waited besides was the hand-over."""
    sent_bytes: int = 0
    """Bytes of the prompt's pages that had arrived at the draw."""
    draft: DraftHandover | None = None
    """What a draft head hands over; None: prefill has none."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FirstToken)


def encode_first_token(first: FirstToken) -> bytes:
    return _encoder.encode(first)


def decode_first_token(data: bytes) -> FirstToken:
    """The first token that the bytes encode. Raises ProtocolError."""
    return decoded(_decoder, data, "first token")
