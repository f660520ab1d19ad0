"""The rotary embedding a config.json asks for."""

import math

from deltaserve.model.fields import Fields
from deltaserve.model.layers.layer_spec import RopeKind, RopeSpec

_KINDS = {kind.value: kind for kind in RopeKind}


def rotary_dim(fields: Fields, head_dim: int) -> int:
    """Channels of a head that turn, where `partial_rotary_factor` (or, before it, `rotary_dim`) may say so."""
    holder, name = _factor_holder(fields), "partial_rotary_factor"
    dim = head_dim * holder.number(name, 1.0)
    if fields.has("rotary_dim"):
        holder, name = fields, "rotary_dim"
        dim = fields.integer(name, 2, head_dim)
    if not 2.0 <= dim <= head_dim or int(dim) % 2:
        raise holder.error(name, f"an even number of the {head_dim} channels")
    return int(dim)


def refuse_partial_rotary(fields: Fields) -> None:
    """Refuse partial rotation for a family whose heads are rotated whole."""
    holder = _factor_holder(fields)
    if holder.number("partial_rotary_factor", 1.0) != 1.0:
        raise holder.error("partial_rotary_factor", "1.0 for this family")


def rope_spec(fields: Fields, max_position: int, dim: int) -> RopeSpec:
    """The embedding of `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before). `dim`: rotated
    channels."""
    table = _table(fields)
    theta = table.positive("rope_theta") if table.has("rope_theta") else fields.positive("rope_theta", 10000.0)
    name = _kind_name(table)
    if name not in _KINDS:
        raise table.error("rope_type" if table.has("rope_type") else "type", "one of " + ", ".join(_KINDS))
    kind = _KINDS[name]
    if kind is RopeKind.DEFAULT:
        return RopeSpec(kind, theta, dim)
    if kind is RopeKind.FACTORS:
        return RopeSpec(kind, theta, dim, factors=table.positives("factors", dim // 2))
    factor = table.positive("factor")
    if kind is RopeKind.LINEAR:
        return RopeSpec(kind, theta, dim, factor)
    original = table.integer("original_max_position_embeddings", 1, 2**26, default=max_position)
    if kind is RopeKind.LLAMA3:
        low, high = table.positive("low_freq_factor"), table.positive("high_freq_factor")
        if low >= high:
            raise table.error("high_freq_factor", f"more than low_freq_factor {low}")
        return RopeSpec(kind, theta, dim, factor, original, low_freq_factor=low, high_freq_factor=high)
    if theta <= 1.0:
        raise table.error("rope_theta", "more than 1 where the embedding is scaled by yarn")
    return RopeSpec(
        kind,
        theta,
        dim,
        factor,
        original,
        beta_fast=table.positive("beta_fast", 32.0),
        beta_slow=table.positive("beta_slow", 1.0),
        truncate=table.flag("truncate", True),
        attention_factor=_yarn_attention_factor(table, factor),
    )


def softmax_correction(fields: Fields) -> float:
    """What DeepSeek multiplies the scale of the softmax by where a scaled embedding names `mscale_all_dim`."""
    table = _table(fields)
    all_dim = table.number("mscale_all_dim", 0.0)
    if not all_dim or _kind_name(table) == RopeKind.DEFAULT.value:
        return 1.0
    return _checked(table, "mscale_all_dim", _mscale(table.positive("factor"), all_dim) ** 2)


def _table(fields: Fields) -> Fields:
    return fields.table("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _kind_name(table: Fields) -> str:
    return table.text("rope_type", table.text("type", "default"))


def _factor_holder(fields: Fields) -> Fields:
    table = _table(fields)
    return table if table.has("partial_rotary_factor") else fields


def _yarn_attention_factor(table: Fields, factor: float) -> float:
    if table.has("attention_factor"):
        return table.positive("attention_factor")
    mscale, all_dim = table.number("mscale", 0.0), table.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        divisor = _checked(table, "mscale_all_dim", _mscale(factor, all_dim))
        return _checked(table, "mscale", _mscale(factor, mscale) / divisor)
    return _mscale(factor, 1.0)


def _checked(table: Fields, name: str, scale: float) -> float:
    """Raises ConfigError for a scale that no model has, and that 16 bits could not bear."""
    if not 1e-3 < scale < 1e3:
        raise table.error(name, f"a value that scales by 0.001 .. 1000, not by {scale:g}")
    return scale


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
