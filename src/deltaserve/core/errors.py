"""Errors that cross a package border, and the closed list of reasons a request may fail for."""

from enum import Enum


class DeltaserveError(Exception):
    """Root of all errors raised on purpose. The message is one line a user can act on."""


class ConfigError(DeltaserveError):
    """A flag, key, environment value or model folder is wrong. The command line exits 2 with the message."""


ENDS_THE_CALLER = (GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends a caller from outside. Any other BaseException is a failure: a library in Rust panics with one."""

_HEAD, _TAIL = 240, 140


def one_line(error: object) -> str:
    """A message as it is printed at last: names in it come from files, and could be long, or move the cursor."""
    words = " ".join(str(error).split())
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


class ProtocolError(DeltaserveError):
    """A frame from a peer is malformed or not allowed now. Never caused by a request's content."""


class StateError(DeltaserveError):
    """An event has no cell in a transition table: a bug in this process, never bad input."""


class IntegrityError(DeltaserveError):
    """`check_integrity()` found two counts that disagree. The worker reports it and drains."""


class FailReason(Enum):
    """Why a request ended without a complete answer. Carried on the wire; the server maps each to one HTTP status."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline_exceeded"
    TRANSFER_FAILED = "transfer_failed"
    PEER_LOST = "peer_lost"
    PEER_FENCED = "peer_fenced"
    INCOMPATIBLE = "incompatible"
    ROOM_IN_USE = "room_in_use"
    BAD_EXTENT = "bad_extent"
    TOO_LONG = "context_length_exceeded"
    OVERLOADED = "overloaded"
    DRAINING = "not_ready"
    NO_PEER = "no_peer"
    NUMERICAL = "numerical_error"
    COMPUTE_FAILED = "compute_failed"
    """The step it was in could not be computed."""
    GRAMMAR_FAILED = "grammar_failed"
    """Its grammar allows no token behind the output so far, or needs more time or memory than one may take."""
    INTERNAL = "internal_error"


class RequestFailed(DeltaserveError):
    """A request ended without a complete answer."""

    def __init__(self, reason: FailReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class DeadlineTooShort(RequestFailed):
    """Refused because it would be over before its turn comes. The client chose the deadline, so it is told both."""

    def __init__(self, deadline_s: float, wait_s: float) -> None:
        message = f"the request's deadline is {deadline_s:g} s, and the estimated wait for its turn {wait_s:.1f} s"
        super().__init__(FailReason.OVERLOADED, message)
