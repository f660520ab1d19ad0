"""Which attention backend computes: the one that was asked for by name, or the first of those that an automatic choice
tries which is there and passes its self-test (registry.py).
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from deltaserve.compute.attention.attention_backend import AttentionBackend, BackendUnavailable, PagesInUse
from deltaserve.compute.attention.opening import in_a_line
from deltaserve.compute.attention.registry import AttentionKind, attention_kind, automatic_kinds
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.native.native_library import NativeContext, NativeLibrary, NativeUnavailable
from deltaserve.core.errors import ConfigError
from deltaserve.core.rounding import Rounding

log = logging.getLogger(__name__)


def open_native(
    choice: str, device: torch.device, num_threads: int, rounding: Rounding = Rounding.OF_QUERY
) -> NativeContext | None:
    """What this process computes with natively, with the fastest instruction set; None: with torch, or on a GPU.

    Raises ConfigError where a backend was asked for that needs it, and it cannot be had.
    """
    if device.type != "cpu" if choice == "auto" else not attention_kind(choice).with_library:
        return None
    try:
        if device.type != "cpu":
            raise NativeUnavailable(f"it computes on the CPU, and the pages are on {device}")
        library = NativeLibrary()
        return NativeContext(library, library.instruction_sets[-1], num_threads, rounding)
    except NativeUnavailable as error:
        if choice != "auto":
            raise ConfigError(f"--attention-backend {choice}: {error}") from None
        return None


def make_attention(
    choice: str,
    native: NativeContext | None,
    pool: KvPool,
    tables: PageTable,
    query_heads: Sequence[int],
) -> AttentionBackend:
    """`native`: of open_native. `query_heads`: of each page group, on this rank. Raises ConfigError where what was
    asked for cannot be had."""
    pages = PagesInUse(pool, tables, query_heads, native)
    missing: list[str] = []
    for kind in automatic_kinds(pages.device.type) if choice == "auto" else [attention_kind(choice)]:
        try:
            backend = _opened(kind, pages)
        except BackendUnavailable as error:
            if choice != "auto":
                raise ConfigError(f"--attention-backend {choice}: {error}") from None
            missing.append(f"no {kind.needs}: {error}")
            continue
        if missing:
            log.info("attention: %s (%s)", kind.name, "; ".join(missing))
        return backend
    raise ConfigError(f"--attention-backend auto: none computes on {pages.device}")


def _opened(kind: AttentionKind, pages: PagesInUse) -> AttentionBackend:
    """Raises BackendUnavailable."""
    for arena in pages.pool.page_arenas:
        refusal = kind.refuse_pages(arena.layout)
        if refusal is not None:
            raise BackendUnavailable(refusal)
    try:
        module: Any = importlib.import_module(kind.module)
    except ImportError as error:
        raise BackendUnavailable("; ".join(filter(None, (str(error), kind.install)))) from None
    except Exception as problem:  # a package that does not fit its other half, or this machine's CUDA
        raise BackendUnavailable(f"importing it ends with {in_a_line(problem)}") from problem
    backend: AttentionBackend = module.open_attention(pages)
    return backend
