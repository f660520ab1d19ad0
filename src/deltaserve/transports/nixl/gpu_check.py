"""A process that registers a page of GPU memory, as a worker registers its arenas: exit code 0, or a line on stderr.

python -m deltaserve.transports.nixl.gpu_check TLS DEVICES
"""

import ctypes
import sys

import torch

from deltaserve.core.extents import Region
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import TransportError
from deltaserve.transports.nixl.library import runtime_in_use
from deltaserve.transports.probing import REGION
from deltaserve.transports.registry import TransportOptions, transport_kind

_PAGE_BYTES = 1 << 21


def register_page(options: TransportOptions) -> None:
    """Raises TransportError, which names the library that is missing."""
    try:
        memory = torch.zeros(_PAGE_BYTES, dtype=torch.uint8, device="cuda:0")
    except (RuntimeError, AssertionError) as error:
        raise TransportError(f"torch has no memory of cuda:0: {error}") from None
    transport = transport_kind("nixl").make(PeerName("doctor"), Boot(1), options)
    try:
        transport.register(Region(REGION, memory.data_ptr(), _PAGE_BYTES, "cuda:0"))
        transport.open(PeerName("nobody"))  # here the library registers
    except TransportError as error:
        missing = lacking(runtime_in_use())
        raise (error if missing is None else TransportError(f"{missing}; {error}")) from None
    finally:
        transport.close()


def lacking(runtime: str) -> str | None:
    """What UCX has to load to see that memory is a GPU's, and does not find; None: it is there."""
    try:
        ctypes.CDLL(runtime)
    except OSError:
        major = runtime.rpartition(".")[2]
        return f"UCX's part for GPUs asks for {runtime}, which is not found (pip install nvidia-cuda-runtime-cu{major})"
    return None


if __name__ == "__main__":
    try:
        register_page(TransportOptions(tls=sys.argv[1], devices=sys.argv[2]))
    except TransportError as problem:
        print(" ".join(str(problem).split()), file=sys.stderr, flush=True)
        sys.exit(1)
