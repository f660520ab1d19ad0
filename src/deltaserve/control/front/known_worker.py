"""One worker as a front knows it: what it said of itself, how loaded it is, what this front put there."""

from dataclasses import dataclass, field

from deltaserve.control.front.events import Member
from deltaserve.control.front.load import LoadReport, Unseen
from deltaserve.control.front.wellness import Wellness
from deltaserve.control.peer.revision import Revision
from deltaserve.control.peer.table import Peer, PeerState
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.wire.messages import ChangeRole, Facts, PeerAddress, Status

STATE_WORDS = {
    PeerState.UNKNOWN: "not connected",
    PeerState.GREETING: "starting or unreachable",
    PeerState.READY: "ready",
    PeerState.REFUSED: "refused",
    PeerState.LOST: "lost",
}
"""A worker's link, as users are told of it."""


@dataclass(slots=True)
class Worker:
    """One configured worker, and what this front put there."""

    member: Member
    peer: Peer
    refusal: str | None = None
    """Why it is not used, both values named."""
    status: Status | None = None
    status_at: float = 0.0
    num_reports: int = 0
    """Reports so far, in all its lives."""
    wellness: Wellness = field(default_factory=Wellness)
    complaint: str | None = None
    """What its last report says is wrong with it."""
    unseen: Unseen = field(default_factory=Unseen)
    """Load placed there since `status_at`."""
    rate_at: float = 0.0
    """When `status.prefill_tokens_per_s` was last another than before: it is measured while prompts are computed."""
    step_at: float = 0.0
    """The same of `status.decode_step_s`."""
    way_at: float = 0.0
    """The same of what hand-overs to it take."""
    own_tokens: int = 0
    """Tokens to compute of rooms placed here that have no first token."""
    own_rooms: int = 0
    """Rooms placed here; on prefill only until their first token."""
    own_output_tokens: int = 0
    """What rooms placed here for decoding are expected to produce."""
    away_since: float | None = None
    """When the worker, in the same life, began to take us for lost: it may still have our rooms. None: it does not."""
    expected_until: float | None = None
    """Time until which it is expected back, should it not be there. None: not at all."""
    last_facts: Facts | None = None
    """Facts of the life in which it was in use last; None: it never was."""
    revision: Revision | None = None
    """What it said last, be it in a former life; None: it has said nothing yet."""
    told: tuple[PeerAddress, ...] = ()
    """Prefill workers that its present life was told of."""
    next_hello: float = 0.0
    hello_pause_s: float = 0.0
    role: Role = field(init=False)
    """Configured role, until its Hello says that it was changed since."""
    asked: ChangeRole | None = None
    """What it is to become: repeated until it has."""
    leaves_at: float | None = None
    """It is to leave: when its rooms are moved elsewhere. None: it stays."""

    def __post_init__(self) -> None:
        self.role = self.member.role

    @property
    def name(self) -> PeerName:
        return self.peer.name

    @property
    def is_found(self) -> bool:
        """Whether it is known where it listens."""
        return self.member.url is not None

    @property
    def is_ready(self) -> bool:
        return self.peer.is_ready

    @property
    def takes_rooms(self) -> bool:
        """Ready, and not about to leave."""
        is_staying = self.status is None or (self.status.ready and not self.status.draining)
        is_free = self.complaint is None and self.asked is None and self.leaves_at is None
        return self.is_ready and is_staying and is_free

    def is_expected(self, now: float) -> bool:
        """Whether it takes no rooms now, and will soon."""
        if self.peer.state is PeerState.REFUSED or self.leaves_at is not None:
            return False
        if self.is_ready:
            return self.asked is not None
        return self.expected_until is not None and now < self.expected_until

    @property
    def next_role(self) -> Role:
        """What it is, or is about to be."""
        return self.role if self.asked is None else self.asked.role

    @property
    def facts(self) -> Facts:
        """Facts of its present life, or of the former one while a new one has not told; empty before its first
        Hello."""
        return self.peer.hello.facts if self.peer.hello else self.last_facts or Facts()

    @property
    def fingerprint(self) -> str:
        """Fingerprint of its model, empty before its first Hello: it seeds the keys of its pages."""
        return "" if self.revision is None else self.revision.fingerprint

    @property
    def pool_tokens(self) -> int:
        """Tokens of the pool that keeps every page, the first; 0 while the worker tells of none."""
        return next(iter(self.facts.pool_pages), 0) * self.facts.page_size

    @property
    def group(self) -> str | None:
        """Name of its expert group, whose members compute all steps together; None: it is in none. As whoever started
        it says, or the worker itself where its group is on several machines."""
        return self.member.group or self.facts.group or None

    def take(self, status: Status, now: float) -> None:
        """Its report: what was placed there before counts in it."""
        former = self.status
        if former is None or former.prefill_tokens_per_s != status.prefill_tokens_per_s:
            self.rate_at = now
        if former is None or former.decode_step_s != status.decode_step_s:
            self.step_at = now
        if former is None or (former.handover_s, former.byte_s) != (status.handover_s, status.byte_s):
            self.way_at = now
        self.status, self.status_at, self.unseen = status, now, Unseen()
        self.num_reports += 1
        self.complaint = self.wellness.hear(status, now)

    def report(self, now: float) -> LoadReport:
        return LoadReport(
            worker=self.name,
            status=self.status,
            age_s=now - self.status_at,
            pool_tokens=self.pool_tokens,
            max_running=self.facts.max_running,
            own_tokens=self.own_tokens,
            own_rooms=self.own_rooms,
            own_output_tokens=self.own_output_tokens,
            unseen=self.unseen,
            group=self.group,
            rate_age_s=now - self.rate_at,
            step_age_s=now - self.step_at,
            way_age_s=now - self.way_at,
        )

    def describe(self) -> str:
        """One clause for `ready()`: why this worker takes no rooms."""
        if self.leaves_at is not None:
            return f"{self.name}: leaving"
        if self.refusal is not None:
            return f"{self.name}: {self.refusal}"
        if not self.is_found:
            return f"{self.name}: not started yet"
        if not self.is_ready:
            return f"{self.name}: {STATE_WORDS[self.peer.state]}"
        if self.asked is not None:
            return f"{self.name}: changing from {self.role.value} to {self.asked.role.value}"
        return f"{self.name}: {self.complaint or ('draining' if self.status and self.status.draining else 'not ready')}"
