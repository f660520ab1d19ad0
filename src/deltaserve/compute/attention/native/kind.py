"""The entry of this backend: see `AttentionKind`."""

from collections.abc import Iterator

from deltaserve.compute.attention.registry import AttentionKind
from deltaserve.compute.attention.scratch_limits import part_bytes
from deltaserve.compute.native.native_library import NativeLibrary, NativeUnavailable
from deltaserve.core.findings import Level, Line


def _checks() -> Iterator[Line]:
    try:
        sets = ", ".join(found.name for found in NativeLibrary().instruction_sets)
    except NativeUnavailable as error:
        yield Line(Level.WARN, "library", f"no native kernels, torch computes in their place, more slowly: {error}")
    else:
        yield Line(Level.OK, "library", f"native kernels for {sets}")


KIND = AttentionKind(
    name="native",
    devices=("cpu",),
    module="deltaserve.compute.attention.native.native_attention",
    needs="native library",
    with_library=True,
    scratch=part_bytes,
    checks=_checks,
)
