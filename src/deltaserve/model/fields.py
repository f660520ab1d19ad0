"""Typed reading of config.json and the like: every error is one line that names the field."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltaserve.core.errors import ConfigError

_SHOWN_LEN = 60
_LARGEST = 1e18
"""No number of a model is larger, and no positive one below its inverse: products of two are finite in float32."""


def shown(value: object) -> str:
    """A value of a file, for a message."""
    found = repr(value)
    return found if len(found) <= _SHOWN_LEN else f"{found[:_SHOWN_LEN]}..."


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of a model folder. `where` leads every message, e.g. `config.json`."""

    values: dict[str, Any]
    where: str
    prefix: str = ""
    """What messages say before a name."""

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "a whole number")
        if not low <= value <= high:
            raise self.error(name, f"{low} .. {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._number(name, default)
        if not abs(value) <= _LARGEST:  # NaN is not, either
            raise self.error(name, f"a number between {-_LARGEST:g} and {_LARGEST:g}")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self._number(name, default)
        if not 1 / _LARGEST <= value <= _LARGEST:
            raise self.error(name, f"a positive number up to {_LARGEST:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, or one alone; empty when absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self.error(name, "whole numbers")
        return tuple(items)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A list of ids, or one alone; empty when absent. An author may have meant "2" or 2.0 as an id and -1 as none:
        what ends an answer is not guessed."""
        try:
            return self.integers(name)
        except ConfigError:
            raise self.error(name, "ids of tokens such as 2 or [2, 5]; correct it, or remove it") from None

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        items = self.values.get(name)
        if items is None:
            return ()
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self.error(name, "a list of strings")
        return tuple(items)

    def or_else(self, defaults: Mapping[str, Any]) -> "Fields":
        """The fields, with these where one is absent or null."""
        given = {name: value for name, value in self.values.items() if value is not None}
        return Fields({**defaults, **given}, self.where)

    def where_silent(self, defaults: Mapping[str, Any]) -> "Fields":
        """The fields, with these where one is absent; null stays."""
        return Fields({**defaults, **self.values}, self.where)

    def positives(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        items = self.values.get(name)
        if not isinstance(items, list) or len(items) != count:
            raise self.error(name, f"a list of {count} numbers")
        one_by_one = Fields({f"{name}[{index}]": item for index, item in enumerate(items)}, self.where)
        return tuple(one_by_one.positive(item) for item in one_by_one.values)

    def table(self, name: str) -> "Fields":
        """A nested object; empty when absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.prefix}{name} is {shown(self.values.get(name))}, expected {expected}")

    def _number(self, name: str, default: float | None) -> int | float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        return value

    def _get(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.where}: {self.prefix}{name} is missing")
        return default
