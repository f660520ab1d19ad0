"""Announced pages, whose checksums are compared with the writer's as long as bytes may be on their way."""

from dataclasses import dataclass

from deltaserve.control.transfer.commands import PageCheck, PagesVerified, TicketId, TransferReport, VerifyPages
from deltaserve.control.transfer.endpoint_config import EndpointConfig, Memory
from deltaserve.core.ids import PeerName
from deltaserve.core.layout.copy_plan import CachePlan
from deltaserve.core.layout.prompt_pages import PromptPages, tokens_before
from deltaserve.core.transport import Evidence

WRONG_CONTENTS = "checksum of pages"
"""How a verdict about pages begins."""
_LANDING_S = 2.0
"""Where completions prove nothing: announced pages are looked at again for so long before they count as wrong."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05
"""Pause between two looks at pages that have not landed: ever longer, a look costs as much as reading them."""


@dataclass(slots=True)
class _Landing:
    """Announced pages whose checksums are not right yet."""

    command: VerifyPages
    plan: CachePlan
    """What the ranks of the peer send ours."""
    checks: list[PageCheck]
    """Checks that failed when the pages were last looked at."""
    give_up_at: float
    look_at: float
    pause_s: float = _FIRST_LOOK_S

    def look_later(self, now: float) -> None:
        self.look_at = min(now + self.pause_s, self.give_up_at)
        self.pause_s = min(2 * self.pause_s, _LONGEST_LOOK_S)


class Landings:
    """All tickets whose pages are being verified on a rank that reads."""

    def __init__(self, config: EndpointConfig, memory: Memory, evidence: Evidence) -> None:
        self._cache = config.cache
        self._memory = memory
        self._patience_s = _LANDING_S if evidence is Evidence.CONTENTS else 0.0
        """Where completions prove nothing, what is not right yet may be on its way."""
        self._landings: dict[TicketId, _Landing] = {}

    def __len__(self) -> int:
        return len(self._landings)

    def verify(self, command: VerifyPages, plan: CachePlan | None, now: float) -> list[TransferReport]:
        """The answer, if there is one already. `plan`: what the peer sends; None: it was fenced meanwhile."""
        if plan is None:
            return [PagesVerified(command.ticket, f"{command.peer} was fenced")]
        landing = _Landing(command, plan, list(command.checks), now + self._patience_s, now)
        self._landings[command.ticket] = landing
        return self._look(landing, now)

    def poll(self, now: float) -> list[TransferReport]:
        """Look again at what is due."""
        due = [landing for landing in self._landings.values() if now >= landing.look_at]
        return [report for landing in due for report in self._look(landing, now)]

    def drop_peer(self, peer: PeerName) -> None:
        """The peer was fenced: that answers for its tickets."""
        self._landings = {ticket: of for ticket, of in self._landings.items() if of.command.peer != peer}

    def _look(self, landing: _Landing, now: float) -> list[TransferReport]:
        landing.checks = [check for check in landing.checks if not self._is_right(landing, check)]
        problem = None
        if landing.checks:
            if now < landing.give_up_at:
                landing.look_later(now)
                return []
            problem = f"{WRONG_CONTENTS} in pool {landing.checks[0].pool} differs from the writer's"
        del self._landings[landing.command.ticket]
        return [PagesVerified(landing.command.ticket, problem)]

    def _is_right(self, landing: _Landing, check: PageCheck) -> bool:
        """The prompt's last page may have been written in part: as far as the writer's last one goes."""
        routes = [landing.plan.route(group.name, *check.pair) for group in self._cache.groups_of(check.pool)]
        src, dst = routes[0].src.page_size, routes[0].dst.page_size
        end = PromptPages(landing.command.num_tokens, src, dst).end
        written = tokens_before(end, check.first, len(check.pages), dst)
        num_whole = written.count(dst)
        sums = self._memory.checksums(check.pool, check.pages[:num_whole], [route.dst_slices for route in routes])
        for page, num_written in zip(check.pages[num_whole:], written[num_whole:], strict=True):
            slices = [route.arriving(num_written) for route in routes]
            sums += self._memory.checksums(check.pool, (page,), slices)
        return sums == check.checksums
