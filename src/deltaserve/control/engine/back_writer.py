"""Decode's half of the way back: prefill may have pages that only decode has, of an answer or of an offered prompt.

    answered -> WriteBack         \
                                   -> (Grant -> all pages in one chunk) | nothing
    offered  -> Offer.held_len    /

A prompt that prefill is to compute may begin with pages that it lacks and decode has, an answer's that did not return
or has left its tree since: the offer says so, and prefill may pull them before it computes the rest.
Nothing is held for an answer that prefill was told of: its pages stay in the tree, to be evicted like others, and those
that a grant finds there are pinned from the post on. Of windows and states goes what continuing at the end needs. Where
they are not there any more the end is an earlier one, the last at which this tree could go on itself. With them
prefill's tree reaches as far into a conversation as decode's, so either side can compute what the next turn brings.

Where both compute on the same cores, and what is computed decides where (near.py), a prompt that decode computed
stays there with its answer: so will the next turn, and copying would take cores from steps.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import lcm

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.checks import grant_fits
from deltaserve.control.engine.next_turn import NextTurns
from deltaserve.control.engine.outflow import Outflow
from deltaserve.control.engine.parts import Parts, facts_of
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.rooms import DecodeRoom
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.page_fit import may_write_back
from deltaserve.control.peer.table import Peer
from deltaserve.control.sched.request import Request
from deltaserve.control.transfer.commands import OpenGate
from deltaserve.control.transfer.sender import GrantVerdict
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import Attempt, Boot, PageId, PeerName, PoolId, Room
from deltaserve.core.keys import KEY_BYTES, extend_keys
from deltaserve.core.layout.prompt_pages import PromptPages
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.core.wire.messages import Envelope, Facts, Failed, Grant, Message, Revoke, Sent, WriteBack

_TOLD_S = 5.0
"""A grant that comes later than that finds nothing."""
_MAX_TOLD = 256
"""Paths that prefill was told of and has not asked for; of more the oldest are forgotten."""
_ALL_SENT = b""
"""Payload of the only chunk: there is no first token to go with it."""


@dataclass(frozen=True, slots=True)
class _Path:
    """A prompt with its answer, or what is held of a prompt, as far as whole pages of both sides go."""

    attempt: Attempt
    request: Request
    """Whose it is; it may be over."""
    num_tokens: int
    until: float

    @property
    def tokens(self) -> bytes:
        return bytes(self.request.tokens[: self.num_tokens * TOKEN_BYTES])


@dataclass(frozen=True, slots=True)
class _Held:
    """Pages of one pool, from page index `first` of a path to its end."""

    first: int
    pages: tuple[PageId, ...]

    def of(self, indexes: range) -> tuple[PageId, ...]:
        return self.pages[indexes.start - self.first : indexes.stop - self.first]


class BackWriter:
    """What prefill workers were told of. Tickets and their ends are the outflow's, as those of prompts are."""

    def __init__(self, config: InstanceConfig, parts: Parts, links: PeerLinks, outflow: Outflow) -> None:
        self._config = config
        self._parts = parts
        self._links = links
        self._outflow = outflow
        self._facts = facts_of(config)
        self._told: OrderedDict[tuple[PeerName, Room], _Path] = OrderedDict()
        self._next_turns = NextTurns()
        self._num_told = self._num_sent = 0

    def begun(self, room: DecodeRoom) -> None:
        """A room was opened: it may be the next turn of a conversation that is known here. A prompt that is made ready
        is none: its turn is yet to come."""
        if self._config.options.writes_back and not room.request.hints.prefetch:
            room.num_turns = 1 + self._next_turns.turns_before(room.request.keys)

    def answered(self, room: DecodeRoom, turn: EngineTurn) -> None:
        """Tell the prefill worker that was named for a room of its prompt and answer, if it may lack pages of them, and
        a next turn may come."""
        named = room.submit.prefill
        if not self._config.options.writes_back or named is None or turn.is_draining:
            return
        if room.request.hints.done or not self._parts.scheduler.running.uses_tree(room.request):
            return
        if not room.request.hints.prefetch:  # else the turn that was prepared would count twice
            self._await_next(room.request, room.num_turns, turn.now)
        if room.prefill is None and self._config.options.weighs_work:
            return
        name = PeerName(named.name)
        facts = self._facts_of(name)
        if facts is None:
            return
        whole = lcm(facts.page_size, self._config.cache.page_size)
        num_tokens = (room.request.num_tokens - 1) // whole * whole  # nothing was computed of the last token
        has_len = room.attempt_len // whole * whole if room.prefill == name else 0
        if num_tokens > has_len and (num_tokens := self._reach(room.request, num_tokens)) > has_len:
            self._tell(name, room, num_tokens, turn)

    def may_be_asked(self, room: DecodeRoom) -> bool:
        """Whether prefill could use pages of a room's prompt that are here."""
        named = room.submit.prefill
        is_kept = self._config.options.writes_back and self._parts.scheduler.running.shares_prompt(room.request)
        return is_kept and named is not None and self._facts_of(PeerName(named.name)) is not None

    def offered(self, room: DecodeRoom, name: PeerName, matched_len: int, turn: EngineTurn) -> int:
        """A prompt is about to be offered to a prefill worker: how many of its tokens that may ask for, of so many that
        this tree has."""
        facts = self._facts_of(name)
        if facts is None or turn.is_draining or not self.may_be_asked(room):
            return 0
        whole, request = lcm(facts.page_size, self._config.cache.page_size), room.request
        num_tokens = matched_len // whole * whole
        if num_tokens and (num_tokens := self._reach(request, num_tokens) // whole * whole):
            self._keep(name, room, num_tokens, turn)
        return num_tokens

    def _facts_of(self, name: PeerName) -> Facts | None:
        """What a prefill worker is that can take pages of this tree."""
        hello = self._links.table.get(name).hello if self._links.is_ready(name) else None
        return hello.facts if hello is not None and may_write_back(self._facts, hello.facts) else None

    def _await_next(self, request: Request, num_turns: int, now: float) -> None:
        """Nothing was computed of the last token, so its page may be full of it in no tree."""
        num_pages = (request.num_tokens - 1) // self._config.cache.page_size
        self._next_turns.answered(bytes(request.keys[: num_pages * KEY_BYTES]), num_turns, now)

    def _reach(self, request: Request, num_tokens: int) -> int:
        """Up to where, of so many tokens, this tree has all that going on there needs."""
        if self._config.cache.keeps_all:
            return num_tokens
        return self._parts.cache.match(request.namespace, request.tokens, request.keys, num_tokens).num_tokens

    def _tell(self, name: PeerName, room: DecodeRoom, num_tokens: int, turn: EngineTurn) -> None:
        request = room.request
        self._keep(name, room, num_tokens, turn)
        self._num_told += 1
        hints = request.hints
        chance = 1.0 if hints.retain_ms or hints.prefetch else self._next_turns.chance(room.num_turns)
        told = WriteBack(
            room=room.room,
            attempt=room.attempt,
            tokens=bytes(request.tokens[: num_tokens * TOKEN_BYTES]),
            namespace=request.namespace,
            next_turn_chance=chance,
        )
        self._links.send(name, told, turn)

    def _keep(self, name: PeerName, room: DecodeRoom, num_tokens: int, turn: EngineTurn) -> None:
        """A grant may come for so many tokens."""
        self._told.pop((name, room.room), None)
        self._told[name, room.room] = _Path(room.attempt, room.request, num_tokens, turn.now + _TOLD_S)
        if len(self._told) > _MAX_TOLD:
            self._told.popitem(last=False)

    def tick(self, now: float) -> None:
        self._next_turns.tick(now)
        while self._told and now >= next(iter(self._told.values())).until:
            self._told.popitem(last=False)

    # ------------------------------------------------------------ frames

    def on_frame(self, peer: Peer, envelope: Envelope, message: Message | None, turn: EngineTurn) -> None:
        """`message`: the envelope's body, if it may be acted on."""
        self._outflow.hear_mark(peer, envelope)
        if peer.boot is None:
            return
        match message:
            case Grant():
                self._on_grant(peer, peer.boot, message, turn)
            case Revoke():
                self._outflow.revoke(peer, peer.boot, message, turn)

    def _on_grant(self, peer: Peer, boot: Boot, grant: Grant, turn: EngineTurn) -> None:
        if self._outflow.sender.was_sent(peer.name, boot, grant.ticket):
            self._links.send(peer.name, Sent(ticket=grant.ticket), turn)
            return
        path = self._told.get((peer.name, Room(grant.room)))
        if path is not None and path.attempt == grant.attempt and self._send(peer, boot, grant, path, turn):
            return
        reason, text = FailReason.CANCELLED, "these pages are not here any more"
        failed = Failed(room=grant.room, attempt=grant.attempt, reason=reason, message=text)
        self._links.send(peer.name, failed, turn)

    def _send(self, peer: Peer, boot: Boot, grant: Grant, path: _Path, turn: EngineTurn) -> bool:
        """Post all that is granted of a path, once. False where the tree has it no more."""
        if peer.hello is None:
            return False
        facts = peer.hello.facts
        prompt = PromptPages(path.num_tokens, self._config.cache.page_size, facts.page_size)
        pages = self._pages(path)
        if pages is None or not grant_fits(self._config, facts.pool_pages, grant, prompt):
            return False
        ticket, verdict = self._outflow.sender.accept(peer.name, boot, grant, prompt)
        if verdict is GrantVerdict.OPENED and ticket is not None:
            turn.do(OpenGate(peer.name, ticket.id, tuple(map(len, ticket.pages))))
            sources = [ticket.sources(PoolId(pool), prompt.num_pages) for pool in range(len(pages))]
            source_pages = [held.of(indexes) for held, indexes in zip(pages, sources, strict=True)]
            ends = [prompt.num_pages] * len(pages)
            turn.do(self._outflow.sender.post(ticket, ends, source_pages, _ALL_SENT))
            self._num_sent += 1
        return verdict is not GrantVerdict.CLOSED

    def _pages(self, path: _Path) -> tuple[_Held, ...] | None:
        """What the tree has of each pool for going on at a path's end; None where some of it is gone."""
        cache, namespace, tokens = self._parts.cache, path.request.namespace, path.tokens
        keys = extend_keys(self._config.seed_of(namespace), tokens, cache.page_size)
        match = cache.match(namespace, tokens, keys)
        if match.num_tokens < path.num_tokens:
            return None
        lease = cache.lease(match)
        pages = tuple(_Held(lease.first_page(pool), lease.pages(pool)) for pool in range(len(cache.pools)))
        cache.release(lease)  # the post pins them
        return pages

    # ------------------------------------------------------------ endings

    def drop_peer(self, peer: PeerName, turn: EngineTurn) -> None:
        """The peer's process or endpoint is over."""
        for key in [key for key in self._told if key[0] == peer]:
            del self._told[key]
        self._outflow.drop_peer(peer, turn)

    def may_let_go(self, peer: PeerName) -> bool:
        """Whether nothing is written to a peer, and it needs no answer any more about what was. It says so with its
        next heartbeat; one that is not there is not waited for."""
        sender = self._outflow.sender
        return not sender.of_peer(peer) and not (sender.num_tombstones_of(peer) and self._links.is_ready(peer))

    def metrics(self) -> dict[str, float]:
        return {
            "deltaserve_write_backs_told_total": self._num_told,
            "deltaserve_write_backs_sent_total": self._num_sent,
        }
