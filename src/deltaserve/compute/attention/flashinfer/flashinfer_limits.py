"""What FlashInfer's prefill kernels over pages cannot compute. Does not import flashinfer.

Read from the sources of flashinfer-python 0.6.0 and 0.7.2.post1.
"""

from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout

HEAD_DIMS = (64, 128, 256)
"""Channels of a head for which its kernels are built for every type of pages."""


def flashinfer_refusal(layout: KvLayout) -> str | None:
    """Why pages of this layout are not for FlashInfer, in words for an operator; None: they are."""
    group = layout.group
    if group.planes != 2:
        return "it computes over keys and values, and this model keeps one latent that serves as both"
    if group.head_dim not in HEAD_DIMS:
        return f"it has no kernels for heads of {group.head_dim} channels, only for {', '.join(map(str, HEAD_DIMS))}"
    if group.dtype is DType.FLOAT32:
        return "it computes in float16 and bfloat16, and pages are kept in float32"
    return None
