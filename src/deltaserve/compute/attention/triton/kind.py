"""The entry of this backend: see `AttentionKind`. Does not import triton."""

from deltaserve.compute.attention.registry import AttentionKind
from deltaserve.compute.attention.scratch_limits import part_bytes

KIND = AttentionKind(
    name="triton",
    devices=("cuda",),
    module="deltaserve.compute.attention.triton.triton_attention",
    needs="triton",
    install="pip install 'deltaserve[triton]'",
    scratch=part_bytes,
)
