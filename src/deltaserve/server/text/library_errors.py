"""Errors of the tokenizer's library while a model's text side is loaded: one line, whatever it raises.

The library raises plain Exception for every kind of damage. Where it panics it raises a BaseException that is no
Exception, and the file that made it panic is bad input like any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from deltaserve.core.errors import ENDS_THE_CALLER, ConfigError

_SAYS_NOTHING = "Cannot instantiate Tokenizer from buffer: "


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Within: an error becomes a ConfigError: `what` (reason). A ConfigError says enough already."""
    try:
        yield
    except (ConfigError, *ENDS_THE_CALLER):
        raise
    except BaseException as error:
        found = " ".join(str(error).removeprefix(_SAYS_NOTHING).split()) or error.__class__.__name__
        raise ConfigError(f"{what} ({found[:200]})") from error
