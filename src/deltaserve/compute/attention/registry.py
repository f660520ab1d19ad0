"""What an attention backend is known by: each has an entry (`AttentionKind`) in its folder, imported when it is asked
for. No torch: the launcher asks too.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from deltaserve.core.branches import ATTENTION, automatic
from deltaserve.core.files.branch_code import load_branch
from deltaserve.core.findings import Line
from deltaserve.core.layout.kv import KvLayout
from deltaserve.model.model_spec import ModelSpec
from deltaserve.settings.resolve import StepSizes


def refuse_nothing(device: str, dtype: str, kv_dtype: str) -> str | None:
    """Any types suit; on which device it computes is seen where it is opened."""
    return None


def refuse_no_pages(layout: KvLayout) -> str | None:
    """Any pages suit."""
    return None


def check_nothing() -> Iterator[Line]:
    """Nothing to find on a machine before a model is there."""
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """One attention backend, and all that the rest of the server must know of it before it is there."""

    name: str
    devices: Collection[str]
    """Devices that it computes on: cpu, cuda."""
    module: str
    """Has `open_attention`, from PagesInUse to an AttentionBackend, and imports its packages; see opening.py."""
    needs: str = ""
    """What it computes with that a machine may lack, for log lines."""
    install: str = ""
    """What to do where its packages are missing."""
    with_library: bool = False
    """Whether the native library computes norms and products beside it."""
    scratch: Callable[[ModelSpec, StepSizes], int]
    """Most bytes of scratch memory that a step needs."""
    refuse: Callable[[str, str, str], str | None] = refuse_nothing
    """(device, type of weights, type of KV) |-> why it does not compute so; None: it does."""
    refuse_pages: Callable[[KvLayout], str | None] = refuse_no_pages
    """Why it has no kernels for such pages, in words for an operator; None: it has."""
    checks: Callable[[], Iterator[Line]] = check_nothing
    """Findings of `deltaserve doctor`: whether it can compute here."""


def attention_kind(name: str) -> AttentionKind:
    """The backend of this name, one of core/branches.py. What it computes with is not loaded."""
    kind: AttentionKind = load_branch(ATTENTION[name]).KIND
    return kind


def attention_kinds() -> dict[str, AttentionKind]:
    """All that there are by name, the one that is preferred first."""
    return {name: attention_kind(name) for name in ATTENTION}


def automatic_kinds(device: str) -> Iterator[AttentionKind]:
    """What an automatic choice tries on this device, one after the other."""
    return (kind for kind in map(attention_kind, automatic(ATTENTION)) if device in kind.devices)
