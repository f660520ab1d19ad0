"""Seeded chance for the simulator. Own arithmetic, so that a kept seed means the same on every Python version.

SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

import math
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

import xxhash

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_Item = TypeVar("_Item")


class Chance:
    """A stream of draws. Equal (seed, purpose) gives an equal stream; purposes do not disturb each other."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, purpose: str) -> None:
        self._state = xxhash.xxh3_64_intdigest(f"{seed}/{purpose}".encode())

    def bits(self) -> int:
        """64 random bits."""
        self._state = z = (self._state + _GAMMA) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def random(self) -> float:
        """A number in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53

    def hits(self, probability: float) -> bool:
        return probability > 0 and self.random() < probability

    def below(self, n: int) -> int:
        """A whole number in [0, n)."""
        return self.bits() % n

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + self.bits() % (high - low + 1)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def log_uniform(self, low: float, high: float) -> float:
        """Every order of magnitude equally likely."""
        return low * math.exp(math.log(high / low) * self.random())

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.random())

    def choose(self, items: Sequence[_Item]) -> _Item:
        return items[self.bits() % len(items)]

    def shuffle(self, items: MutableSequence[_Item]) -> None:
        for last in range(len(items) - 1, 0, -1):
            other = self.bits() % (last + 1)
            items[last], items[other] = items[other], items[last]
