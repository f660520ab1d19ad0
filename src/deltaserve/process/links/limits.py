"""Bounds of one process's links, and what was counted about them."""

from dataclasses import dataclass, fields

from deltaserve.core.wire.codec import LARGE_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Per link, unless said otherwise. What exceeds a bound is dropped and counted: nothing ever blocks."""

    outbox_frames: int = 1000
    outbox_bytes: int = 8 << 20
    """Most bytes of frames of at least 64 KiB that have not left yet. One frame may exceed it when nothing else
    waits."""
    redial_s: float = 1.0
    """Age from which on a dialled connection that takes no frame any more is given up and dialled anew."""
    silence_s: float = 6.0
    """Silence after which a refused connection is dialled anew: longer than a handshake and the pause before it may
    take."""
    max_frame_bytes: int = LARGE_FRAME_BYTES
    """A longer one closes the connection before it is read."""
    frames_per_turn: int = 256
    """Frames taken from one socket before the others get their turn."""
    max_names: int = 1024
    """Peers (and bad links) remembered on the listener."""


@dataclass(slots=True)
class LinkStats:
    """Counts since the start of the process, in frames."""

    received: int = 0
    sent: int = 0
    dropped_full: int = 0
    """Frames dropped because the outbox was full."""
    dropped_no_link: int = 0
    """Frames dropped because there is no link to that peer, or its connection is gone."""
    dropped_oversize: int = 0
    """Frames of ours dropped because they exceeded the limit of their type."""
    malformed: int = 0
    ignored: int = 0
    """Frames from a link that is ignored after too many malformed ones."""
    refused_dials: int = 0
    redialled: int = 0
    """Connections (not frames) given up because they took none, or were refused and not tried again."""

    def as_metrics(self) -> dict[str, float]:
        """The counts by their Prometheus name."""
        return {f'deltaserve_link_frames_total{{kind="{f.name}"}}': float(getattr(self, f.name)) for f in fields(self)}
