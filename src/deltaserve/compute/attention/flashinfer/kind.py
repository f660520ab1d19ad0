"""The entry of this backend: see `AttentionKind`. Does not import flashinfer.

What its prefill kernels over pages cannot compute was read from the sources of flashinfer-python 0.6.0 and 0.7.2.post1.
"""

from deltaserve.compute.attention.registry import AttentionKind
from deltaserve.compute.attention.scratch_limits import part_bytes
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout
from deltaserve.model.model_spec import ModelSpec
from deltaserve.settings.resolve import StepSizes

HEAD_DIMS = (64, 128, 256)
"""Channels of a head for which its kernels are built for every type of pages."""
WRAPPER_BYTES = 2 * (10 << 20)
"""Bytes of the two wrappers of a page group: plans of 8 MiB, lengths of requests, and a workspace of 1 MiB."""


def _scratch(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of its wrappers, and no more partial results than others have, with their queries beside them, both in 16
    bits."""
    return part_bytes(spec, sizes) + len(spec.windows) * WRAPPER_BYTES


def _refuse(device: str, dtype: str, kv_dtype: str) -> str | None:
    if device != "cuda":
        return f"it computes on GPUs, and the device is {device}"
    if dtype == "float32":
        return "it computes in float16 and bfloat16, and --dtype is float32"
    if kv_dtype not in (dtype, "fp8_e4m3"):
        return f"--kv-cache-dtype has to be --dtype, here {dtype}, or fp8_e4m3, and is {kv_dtype}"
    return None


def _refuse_pages(layout: KvLayout) -> str | None:
    group = layout.group
    if group.planes != 2:
        return "it computes over keys and values, and this model keeps one latent that serves as both"
    if group.head_dim not in HEAD_DIMS:
        return f"it has no kernels for heads of {group.head_dim} channels, only for {', '.join(map(str, HEAD_DIMS))}"
    if group.dtype is DType.FLOAT32:
        return "it computes in float16 and bfloat16, and pages are kept in float32"
    return None


KIND = AttentionKind(
    name="flashinfer",
    devices=("cuda",),
    module="deltaserve.compute.attention.flashinfer.flashinfer_attention",
    needs="flashinfer",
    install="pip install 'deltaserve[flashinfer]'",
    scratch=_scratch,
    refuse=_refuse,
    refuse_pages=_refuse_pages,
)
