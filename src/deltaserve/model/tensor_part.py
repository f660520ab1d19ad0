"""One tensor of a checkpoint: its shape, what of it a rank holds, how files have it."""

from collections.abc import Mapping
from dataclasses import dataclass

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.shard import Shard
from deltaserve.model.shard_rules import REPLICATED, Divided, FirstRank, Shape, ShardRule, TensorPiece

FLOAT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor of a checkpoint."""

    shape: Shape
    covers: tuple[str, ...]
    """Parts it fills: itself, or for a tensor that fuses several (experts), all of those."""
    rule: ShardRule = REPLICATED
    """What of it a rank holds."""
    added: float = 0.0
    """Number added to its values when they are loaded: in float32, and kept so."""
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    """Types that files may have it in."""

    def shape_on(self, shard: Shard) -> Shape:
        return self.rule.shape(self.shape, shard)

    def pieces(self, shard: Shard) -> tuple[TensorPiece, ...]:
        """What a rank reads of it; empty where it holds nothing."""
        return self.rule.pieces(self.shape, shard)


Entry = tuple[Shape, ShardRule]


def named_parts(entries: Mapping[str, Entry], prefix: str = "") -> dict[str, TensorPart]:
    """Canonical name |-> tensor, of names that stand below `prefix`."""
    before = prefix and f"{prefix}."
    return {f"{before}{name}": TensorPart(shape, (f"{before}{name}",), rule) for name, (shape, rule) in entries.items()}


def biases(weights: Mapping[str, Entry]) -> dict[str, Entry]:
    """Biases of these linear maps: divided as the rows of the matrix are, held once where its columns are divided."""
    return {
        name.replace("weight", "bias"): (
            shape[:1],
            FirstRank() if isinstance(rule, Divided) and rule.axis == 1 else rule,
        )
        for name, (shape, rule) in weights.items()
    }


def share(name: str, value: int, shard: Shard) -> int:
    """A rank's part of `value`. Raises ConfigError naming it where it does not divide."""
    if value % shard.size:
        raise cannot_divide(name, value, shard)
    return value // shard.size


def cannot_divide(name: str, value: int, shard: Shard) -> ConfigError:
    return ConfigError(f"{name} is {value}, which does not divide over {shard.size} tensor-parallel ranks")
