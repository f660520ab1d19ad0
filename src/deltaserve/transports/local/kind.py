"""The entry of this transport: see `TransportKind`."""

import importlib
from pathlib import Path

from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Evidence, Sharing, Transport, TransportError
from deltaserve.transports.cuda_driver import CudaError, CudaLibrary
from deltaserve.transports.local.checks import check
from deltaserve.transports.local.memory import machine_problem
from deltaserve.transports.local.memory_access import MemoryAccess
from deltaserve.transports.local.transport import LocalTransport, host_access
from deltaserve.transports.registry import TransportKind, TransportOptions


def _access_to(device: str) -> MemoryAccess:
    """Torch and Triton are loaded where pages of a GPU move. Raises TransportError."""
    if not device.startswith("cuda:"):
        return host_access(device)
    try:
        module = importlib.import_module("deltaserve.transports.local.cuda_access")
    except Exception as error:  # whatever a package raises that is missing, broken, or of another version
        raise TransportError(f"copies on a GPU need torch and Triton: {type(error).__name__}: {error}") from None
    access: MemoryAccess = module.CudaAccess(device)
    return access


def _gpu_problem(num_gpus: int) -> str | None:
    """A reader copies from the writer's GPU."""
    pairs = [(gpu, other) for gpu in range(num_gpus) for other in range(num_gpus) if gpu != other]
    try:
        library = CudaLibrary() if pairs else None
        cut_off = [pair for pair in pairs if library is not None and not library.reaches(*pair)]
    except CudaError as error:
        return str(error)
    return f"cuda:{cut_off[0][0]} does not reach the memory of cuda:{cut_off[0][1]}" if cut_off else None


def _make(me: PeerName, boot: Boot, options: TransportOptions) -> Transport:
    return LocalTransport(Path(options.folder), _access_to)


KIND = TransportKind(
    name="local",
    sharing=Sharing.READERS,
    evidence=Evidence.COMPLETION,
    tls={"cpu": "", "cuda": ""},
    window_bytes={"cuda": 256 << 20},  # a third of a millisecond, at 800 GB/s
    limits="only between workers of one `deltaserve serve`, on x86-64, and between GPUs that reach each other",
    is_for_one_serve=True,
    hint="is for workers of one `deltaserve serve` on x86-64, whose GPUs reach each other's memory",
    make=_make,
    checks=check,
    machine_problem=machine_problem,
    gpu_problem=_gpu_problem,
)
