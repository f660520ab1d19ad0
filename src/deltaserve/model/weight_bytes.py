"""The memory that a rank's weights take. No torch: the launcher counts with it."""

from collections.abc import Mapping
from math import prod

from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.model.code_plan import CODE_RULES, CodeRules, code_bytes, draft_rules, plan_codes
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.tensor_part import TensorPart
from deltaserve.model.tensors import EMBEDDING, HEAD, draft_parts, tensor_parts

_EXACT = CODE_RULES["none"]


def rank_weight_bytes(
    stored: ModelSpec,
    dtype: DType,
    shard: Shard,
    kinds: Mapping[str, str] | None = None,
    rules: CodeRules = _EXACT,
    device: str = "cpu",
) -> int:
    """Bytes of the weights that one rank loads on a kind of device. `stored`: see `as_stored`; `kinds`: see
    `stored_kinds`, none where None."""
    parts = tensor_parts(stored)
    tied = EMBEDDING if stored.tied_embeddings else None
    forms = plan_codes(parts, kinds or {}, shard, tied).forms

    def num_bytes(name: str, part: TensorPart, rules: CodeRules = rules) -> int:
        shape = part.shape_on(shard)
        codes = None if name == EMBEDDING else code_bytes(name, shape, forms.get(name), rules)
        return prod(shape) * dtype.itemsize if codes is None else codes

    total = sum(num_bytes(name, part) for name, part in parts.items() if part.covers == (name,))
    if stored.draft is not None and stored.draft.folder is not None:
        own = draft_parts(stored.draft)
        by = draft_rules(rules)
        total += sum(num_bytes(name, part, by) for name, part in own.items() if part.covers == (name,))
    if stored.tied_embeddings:
        shape = parts[EMBEDDING].shape_on(shard)
        codes = code_bytes(HEAD, shape, forms.get(EMBEDDING), rules)
        # On most CPUs a tied output matrix is packed into a second copy (compute/weights/packing.py); GPUs have none.
        packed = 0 if device != "cpu" or dtype is DType.FLOAT16 else prod(shape) * dtype.itemsize
        total += packed if codes is None else codes
    return total
