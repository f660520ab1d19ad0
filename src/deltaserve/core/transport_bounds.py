"""Checks every adapter makes before anything is posted: spans lie inside regions, both sides are equally long."""

from collections.abc import Mapping, Sequence

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import (
    MAX_METADATA_BYTES,
    MAX_NOTIFICATION_BYTES,
    RemoteRank,
    RemoteRegion,
    TransportError,
)


def check_write(
    peer: PeerName,
    copies: Sequence[Copy],
    notification: bytes | None,
    local: Mapping[RegionId, Region],
    remote: Mapping[RegionId, RemoteRegion],
) -> None:
    """Raises TransportError naming the first copy that is not wholly inside the regions of its side."""
    if notification is None and not copies:
        raise TransportError(f"write to {peer}: neither copies nor a notification")
    if notification is not None and not 0 < len(notification) <= MAX_NOTIFICATION_BYTES:
        raise TransportError(
            f"write to {peer}: notification of {len(notification)} bytes, allowed are 1 to {MAX_NOTIFICATION_BYTES}"
        )
    for index, (src, dst) in enumerate(copies):
        if src.num_bytes != dst.num_bytes:
            raise TransportError(f"write to {peer}: copy {index} moves {src.num_bytes} bytes to {dst.num_bytes}")
        ours, theirs = local.get(src.region), remote.get(dst.region)
        if ours is None or not _inside(src, ours.num_bytes):
            raise TransportError(f"write to {peer}: copy {index}: source {_text(src)} is outside our regions")
        if theirs is None or not _inside(dst, theirs.num_bytes):
            raise TransportError(f"write to {peer}: copy {index}: target {_text(dst)} is outside the peer's regions")


def check_ranks(peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
    """Raises TransportError for no ranks, metadata of an impossible size, or one endpoint given for two ranks."""
    if not ranks:
        raise TransportError(f"attach to {peer}: it announced no endpoint")
    for rank in ranks:
        if not 0 < len(rank.metadata) <= MAX_METADATA_BYTES:
            text = f"metadata of {len(rank.metadata)} bytes, allowed are 1 to {MAX_METADATA_BYTES}"
            raise TransportError(f"attach to {peer}: {text}")
    if len({rank.metadata for rank in ranks}) != len(ranks):
        raise TransportError(f"attach to {peer}: two of its ranks have the same endpoint")


def index_remote(peer: PeerName, regions: Sequence[RemoteRegion]) -> dict[RegionId, RemoteRegion]:
    """Regions by id. Raises TransportError for two of one id and for impossible addresses or sizes."""
    table = {RegionId(region.id): region for region in regions}
    if len(table) != len(regions):
        raise TransportError(f"attach to {peer}: two regions have the same id")
    for region in regions:
        if region.base < 0 or region.num_bytes <= 0 or region.base + region.num_bytes > 1 << 64:
            raise TransportError(f"attach to {peer}: region {region.id} has an impossible address or size")
    return table


def _inside(span: Span, num_bytes: int) -> bool:
    return span.offset >= 0 and span.num_bytes > 0 and span.offset + span.num_bytes <= num_bytes


def _text(span: Span) -> str:
    return f"region {span.region} [{span.offset}, +{span.num_bytes})"
