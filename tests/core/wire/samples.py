"""One frame of every message, and a hypothesis strategy for each message type, both made from the types themselves.

`python -m tests.core.wire.samples > tests/core/wire/golden_v1.json` writes the golden file anew: only together with a
new PROTOCOL_VERSION once a version has been released.
"""

import json
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from deltaserve.core.wire.codec import encode
from deltaserve.core.wire.messages import Envelope, Message

MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = get_args(Message)
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bytes: st.binary(max_size=40),
    str: st.text(max_size=20),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as deep as it goes."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if part is type(None) else values_of(part) for part in arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(part) for part in arguments))
    if issubclass(annotation, Enum):
        return st.sampled_from(list(annotation))
    return messages_of(annotation)


def messages_of(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(struct, **{name: values_of(hint) for name, hint in get_type_hints(struct).items()})


envelopes = st.builds(
    Envelope,
    src=st.text(max_size=20),
    src_boot=st.integers(0, 2**64 - 1),
    dst_boot=st.none() | st.integers(0, 2**64 - 1),
    closed_below=st.integers(1, 2**63 - 1),
    body=st.one_of(*(messages_of(struct) for struct in MESSAGE_TYPES)),
)


# ---------------------------------------------------------------- one fixed sample of each


def sample(struct: type[msgspec.Struct]) -> Envelope:
    """Every field filled, each number different from its neighbours."""
    numbers = iter(range(1, 1000))

    def number() -> int:
        return next(numbers)

    body: Any = _sample_struct(struct, number)
    return Envelope(src="decode-0", src_boot=2**63 + 1, dst_boot=2**64 - 1, closed_below=7, body=body)


def _sample_struct(struct: type[msgspec.Struct], number: Callable[[], int]) -> msgspec.Struct:
    return struct(**{name: _sample_value(hint, number) for name, hint in get_type_hints(struct).items()})


def _sample_value(annotation: Any, number: Callable[[], int]) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _sample_value(next(part for part in arguments if part is not type(None)), number)
    if origin is dict:
        return {f"key{number()}": _sample_value(arguments[1], number)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return (_sample_value(arguments[0], number),)
    if origin is tuple:
        return tuple(_sample_value(part, number) for part in arguments)
    if annotation is bool:
        return True
    if annotation is int:
        return number()
    if annotation is float:
        return number() + 0.5
    if annotation is bytes:
        return bytes([number() % 256]) * 16
    if annotation is str:
        return f"text {number()}"
    if issubclass(annotation, Enum):
        return list(annotation)[-1]
    return _sample_struct(annotation, number)


def golden() -> dict[str, str]:
    """Message name |-> hex of its sample's frame."""
    return {struct.__name__: encode(sample(struct)).hex() for struct in MESSAGE_TYPES}


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
