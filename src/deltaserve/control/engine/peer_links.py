"""Handshakes, boots and heartbeats of one instance, towards fronts and towards the other half of its pairs.

Who dials sends the first Hello. Between decode and prefill a Hello carries transport metadata, so each side opens its
endpoint before it can answer:

    decode  OpenEndpoint ............ Hello(metadata) -> | prefill  OpenEndpoint(metadata): opened and attached
    decode  AttachEndpoint <- Hello(metadata) .......... |          READY
            READY
A Hello is repeated with every heartbeat until it is answered; a repeated one gets the same answer and changes nothing.
Heartbeats between the two name the sender's endpoint, so that neither stays attached to one that is no more.
Links to fronts carry no data and are ready with the Hello itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from deltaserve.control.engine.addresses import Addresses
from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.checks import Refusal, are_pair, may_say
from deltaserve.control.engine.own_hello import OwnHello, digest
from deltaserve.control.engine.peer_endpoints import PeerEndpoints
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.handshake import NOT_READY, Handshake, Received, Reception
from deltaserve.control.peer.link import Dial, HangUp, SendFrame
from deltaserve.control.peer.table import Patience, Peer, PeerEvent, PeerState, PeerTable
from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    EndpointAttached,
    EndpointFailed,
    EndpointOpened,
)
from deltaserve.control.transfer.receiver import Receiver
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import Boot, PeerName, Role
from deltaserve.core.wire.messages import (
    Envelope,
    Facts,
    Heartbeat,
    Hello,
    Message,
    PeerAddress,
)

_MAX_PEERS = 1024
_FAREWELLS = 60
"""Heartbeats with which those who knew the former engine hear that it is over, unless they are heard of."""
_STRANGER_S = 60.0
"""A peer that is not there and was not dialled is forgotten after so long."""


class FromPeer(NamedTuple):
    """What a frame turned out to be."""

    peer: Peer
    message: Message | None
    """Message for the instance to handle; None when the frame was about the link itself, or not current. A Hello is a
    front's, which wants a snapshot."""
    is_gone: bool = False
    """The peer's former life or endpoint is over: everything held for it must fail first."""


class Farewell:
    """Who knew the engine before this one, and the links that it, or one before it, had dialled.

    They may keep what they remember of that one for ever, until they hear that it is over.
    """

    def __init__(self, boots: Mapping[PeerName, Boot] = MappingProxyType({}), hang_up: Sequence[PeerName] = ()) -> None:
        """`boots`: of those who knew it. `hang_up`: over these links they hear of its end."""
        self._boots = boots
        self._hang_up = list(hang_up)
        self._num_beats = 0

    def of_successor(self, table: PeerTable, dialled: Iterable[PeerName]) -> "Farewell":
        """The farewell that is left to the engine which takes over: `table` and `dialled` are of the one that ends."""
        boots = {peer.name: peer.boot for peer in table if peer.boot is not None}
        return Farewell(boots, [*self._hang_up, *dialled])

    def unheard(self, table: PeerTable) -> list[tuple[PeerName, Boot]]:
        """Who of them was not heard of since, and their boot."""
        return [(name, boot) for name, boot in self._boots.items() if table.get(name).boot is None]

    def goes_on(self) -> bool:
        """Whether it is said once more, with this heartbeat."""
        self._num_beats += 1
        return self._num_beats <= _FAREWELLS

    def take_hang_ups(self) -> list[PeerName]:
        names, self._hang_up = self._hang_up, []
        return names


class PeerLinks:
    """All links of one instance."""

    def __init__(
        self,
        config: InstanceConfig,
        facts: Facts,
        lost_s: float,
        receiver: Receiver,
        former: "PeerLinks | None" = None,
    ) -> None:
        """`lost_s`: silence after which a peer is given up while its connection stands. `former`: of the engine that
        this one takes over from: see `farewells`."""
        self.config = config
        self.table = PeerTable(config.name, Boot(config.boot), Patience(lost_s, config.options.peer_suspect_s))
        self._handshake = Handshake(self.table)
        self._receiver = receiver
        self._next_beat: float | None = None
        self._own = OwnHello(config, facts)
        self.dialled = Addresses()
        self.endpoints = PeerEndpoints()
        self.farewell: Farewell = (
            Farewell() if former is None else former.farewell.of_successor(former.table, former.dialled)
        )
        self._named: dict[PeerName, set[PeerName]] = {}
        """Front |-> the prefill workers that it may name to us."""
        self.refusals: dict[PeerName, Refusal] = {}
        """Why pages will not move between us and a peer, however long one waits; both values are named. One that is
        refused for its role alone may take up another."""

    @property
    def stale_frames(self) -> int:
        return self._handshake.num_ignored

    def ignore(self) -> None:
        """A frame is not looked at."""
        self._handshake.ignore()

    def misfits(self) -> dict[PeerName, str]:
        """Peers whose configuration differs |-> how. A role that does not fit yet is none."""
        return {name: words for name, (reason, words) in self.refusals.items() if reason is FailReason.INCOMPATIBLE}

    # ------------------------------------------------------------ sending

    def send(self, peer: PeerName, message: Message, turn: EngineTurn) -> None:
        boot = self.table.get(peer).boot
        mark = 1 if boot is None else self._receiver.closed_below(peer, boot)
        turn.do(SendFrame(peer, self.table.seal(peer, message, mark)))

    def _frame_to(self, name: PeerName, boot: Boot, message: Message) -> SendFrame:
        """A frame for a peer that had this boot, which is not, or no longer, the one in the table."""
        return SendFrame(name, Envelope(src=self.config.name, src_boot=self.config.boot, dst_boot=boot, body=message))

    def is_ready(self, name: PeerName) -> bool:
        """Whether pages can move between us."""
        peer = self.table.get(name)
        return peer.is_ready and are_pair(self.config.role, peer.role)

    def tell_fronts(self, message: Message, turn: EngineTurn) -> None:
        for peer in self.table:
            if peer.is_ready and peer.role == Role.FRONT.value:
                self.send(peer.name, message, turn)

    # ------------------------------------------------------------ handshake

    def dial(self, address: PeerAddress, turn: EngineTurn) -> None:
        """Connect and send Hello, unless that is under way or done, or it is us, or no other half of a pair."""
        name = PeerName(address.name)
        peer = self.table.get(name)
        if name == self.config.name or (peer.role and not are_pair(self.config.role, peer.role)):
            return
        if self.dialled.is_news(address, peer.is_ready, turn.now):
            self.refusals.pop(name, None)  # it was of whoever was at the other address
            turn.do(Dial(address))
            self.greet(name, turn)

    def on_prefills(self, front: PeerName, addresses: Iterable[PeerAddress], turn: EngineTurn) -> None:
        """A front told of all prefill workers that it knows: those that are new are dialled."""
        known = tuple(addresses)
        self._named[front] = {PeerName(address.name) for address in known}
        for address in known:
            self.dial(address, turn)

    def on_prefill(self, front: PeerName, address: PeerAddress, turn: EngineTurn) -> None:
        """A front told of one prefill worker, with a room for it."""
        self._named.setdefault(front, set()).add(PeerName(address.name))
        self.dial(address, turn)

    def unnamed(self) -> list[PeerName]:
        """Peers that we dial, and that no front knows any more: they have left."""
        known = set().union(*self._named.values())
        return [name for name in self.dialled if name not in known]

    def let_go(self, name: PeerName, turn: EngineTurn) -> None:
        """Dial a peer no more. Precondition: nothing is under way between us."""
        self.fence(name, turn)
        self.dialled.drop(name)
        self.refusals.pop(name, None)
        turn.do(HangUp(name))

    def greet(self, name: PeerName, turn: EngineTurn) -> None:
        """Open an endpoint for a dialled peer; the Hello follows when it is open."""
        peer = self.table.get(name)
        if name not in self.dialled or peer.state is PeerState.REFUSED:
            return
        self.table.move(peer, PeerEvent.GREET)
        peer.last_heard = turn.now
        self.endpoints.open(name, turn)

    def receive(self, envelope: Envelope, turn: EngineTurn) -> FromPeer:
        """Deal with what a frame says about the link; what else it says is the instance's."""
        name = PeerName(envelope.src)
        if len(self.table) >= _MAX_PEERS and name not in self.table:
            self.ignore()
            return FromPeer(Peer(name), None)
        received = self._handshake.receive(envelope, turn.now)
        if received.reception is Reception.CURRENT and self._has_other_ends(received.peer, envelope.body):
            self.fence(name, turn)
            self.greet(name, turn)
            return FromPeer(received.peer, None, is_gone=True)
        if received.reception is Reception.CURRENT:
            return FromPeer(received.peer, envelope.body if may_say(received.peer.role, envelope.body) else None)
        if received.is_new:  # another start may have another configuration, and has another endpoint
            if received.is_gone and received.former_role != Role.FRONT.value:
                self.endpoints.end(name, turn)
            self.refusals.pop(name, None)
        if isinstance(envelope.body, Hello) and received.reception is Reception.HELLO:
            return self._on_hello(received.peer, envelope.body, turn, received.is_gone)
        is_over = self._answer(received, Boot(envelope.src_boot), turn)
        return FromPeer(received.peer, None, received.is_gone or is_over)

    def _has_other_ends(self, peer: Peer, message: Message) -> bool:
        """Whether a peer that we are ready with tells of other endpoints than those that we have attached to."""
        greeting = self.endpoints.greetings.get(peer.name)
        if not isinstance(message, Heartbeat) or not message.ends or greeting is None or greeting.theirs is None:
            return False
        return message.ends != digest(greeting.theirs.ends)

    def _heartbeat(self, name: PeerName) -> Heartbeat:
        """For a peer that we are ready with."""
        greeting = self.endpoints.greetings.get(name)
        return Heartbeat() if greeting is None or not greeting.ours else Heartbeat(ends=digest(greeting.ours))

    def _answer(self, received: Received, boot: Boot, turn: EngineTurn) -> bool:
        """Tell a peer how it stands with us; whether what was agreed with it is over."""
        name = received.peer.name
        is_dialled = name in self.dialled
        match received.reception:
            case Reception.MISADDRESSED:
                turn.do(self._frame_to(name, boot, Heartbeat()))  # it hears who is here now
            case Reception.UNGREETED | Reception.BOTH_UNREADY if is_dialled:
                if received.is_gone:
                    self.greet(name, turn)
            case Reception.UNGREETED:
                self.send(name, NOT_READY, turn)
            case Reception.LEFT if received.peer.role != Role.FRONT.value:  # one that dials us has let us go
                self.fence(name, turn)
                self.greet(name, turn)
                return True
        return False

    def _on_hello(self, peer: Peer, hello: Hello, turn: EngineTurn, is_gone: bool) -> FromPeer:
        if hello.role == Role.FRONT.value and peer.name not in self.dialled:
            peer.hello = hello
            self.table.move(peer, PeerEvent.HELLO)
            self.send(peer.name, self._own.hello((), hello), turn)
            return FromPeer(peer, hello, is_gone)
        if hello.answers and peer.name not in self.dialled:  # of when we were another engine, which had dialled
            return FromPeer(peer, None, is_gone)
        if self._refuses(peer, hello, turn):
            return FromPeer(peer, None, is_gone)
        if peer.name in self.dialled:
            return self._on_answer(peer, hello, is_gone, turn)
        known = self.endpoints.greetings.get(peer.name)
        if peer.is_ready and peer.hello == hello and known is not None and known.ours:
            self.send(peer.name, self._own.hello(known.ours, hello), turn)
            return FromPeer(peer, None, is_gone)
        if known is not None and known.theirs == hello and not is_gone:
            return FromPeer(peer, None)  # its endpoint is being opened
        if peer.is_ready:
            is_gone = True
            self._end_life(peer, turn)
            self.table.move(peer, PeerEvent.GREET)  # nothing is current until the new endpoint is attached
        self.endpoints.open(peer.name, turn, hello, self._own.terms_of(hello))
        return FromPeer(peer, None, is_gone)

    def _on_answer(self, peer: Peer, hello: Hello, is_gone: bool, turn: EngineTurn) -> FromPeer:
        greeting = self.endpoints.greetings.get(peer.name)
        is_answer = greeting is not None and greeting.is_answered_by(hello)
        if greeting is not None and is_answer and greeting.theirs is None and not is_gone:
            greeting.theirs = hello
            self.table.move(peer, PeerEvent.GREET)  # of a new boot it was UNKNOWN, which a heartbeat greets anew
            turn.do(AttachEndpoint(peer.name, greeting.number, hello.ends, self._own.terms_of(hello)))
        elif peer.is_ready and not (greeting is not None and is_answer and greeting.has_ends_of(hello)):
            # it has attached to an endpoint that is no more, or has made another one since
            is_gone = True
            self.fence(peer.name, turn)
        if is_gone:
            self.greet(peer.name, turn)
        return FromPeer(peer, None, is_gone)

    def _refuses(self, peer: Peer, hello: Hello, turn: EngineTurn) -> bool:
        refusal = self._own.refusal(hello)
        if refusal is None:
            self.refusals.pop(peer.name, None)
            return False
        if peer.name not in self.dialled:
            self.send(
                peer.name, self._own.hello((), hello), turn
            )  # so that the other side can name both values as well
        self.refusals[peer.name] = refusal
        self.table.move(peer, PeerEvent.REFUSE)
        if peer.name in self.endpoints.greetings:
            self.endpoints.end(peer.name, turn)  # the one that was opened for its Hello
        if refusal[0] is FailReason.NO_PEER and self.dialled.drop(peer.name):
            self.table.move(peer, PeerEvent.LOSE)
            turn.do(HangUp(peer.name))  # whoever needs it in a role that fits says where it is: see `dial`
        return True

    # ------------------------------------------------------------ another engine takes over

    def leave(self, turn: EngineTurn) -> None:
        """End every endpoint, also one that is being opened; hang up whom we dialled."""
        for peer in self.table:
            if peer.role != Role.FRONT.value:
                self.endpoints.end(peer.name, turn)
                self.lose(peer.name)

    def farewells(self) -> list[SendFrame]:
        """What those hear who knew the engine before this one, and of whom nothing was heard since."""
        return [self._frame_to(name, boot, NOT_READY) for name, boot in self.farewell.unheard(self.table)]

    # ------------------------------------------------------------ reports and time

    def on_endpoint(self, report: EndpointOpened | EndpointAttached | EndpointFailed, turn: EngineTurn) -> None:
        """Go on with a handshake: send our Hello, or be ready."""
        peer = self.table.get(report.peer)
        greeting = self.endpoints.greetings.get(report.peer)
        if greeting is None or greeting.number != report.greeting:
            return  # of an endpoint that was given up before it was there
        if isinstance(report, EndpointFailed):
            self.lose(report.peer)
            return
        if isinstance(report, EndpointOpened):
            greeting.ours = report.ends
            if report.peer in self.dialled:
                self.send(report.peer, self._own.hello(report.ends), turn)
            return
        if greeting.theirs is None:
            return
        peer.hello = greeting.theirs
        self.table.move(peer, PeerEvent.HELLO)
        if report.peer not in self.dialled and greeting.ours:
            self.send(report.peer, self._own.hello(greeting.ours, greeting.theirs), turn)

    def beat(self, turn: EngineTurn) -> list[Peer]:
        """Repeat unanswered Hellos, send heartbeats to data peers; returns data peers that fell silent."""
        if self._next_beat is not None:
            self.table.discount_pause(max(0.0, turn.now - self._next_beat), turn.now)
        self._next_beat = turn.now + self.config.options.heartbeat_s
        silent = self._silent(turn.now)
        self._forget_strangers(turn.now)
        self._go_on_with_farewell(turn)
        for peer in self.table:
            if (address := self.dialled.elsewhere(peer, turn.now)) is not None:
                turn.do(Dial(address))
            if peer.name in self.dialled:
                self._beat_dialled(peer, turn)
            elif peer.is_ready and peer.role != Role.FRONT.value:
                self.send(peer.name, self._heartbeat(peer.name), turn)
        return silent

    def _silent(self, now: float) -> list[Peer]:
        """Data peers that fell silent. A front may come back: see is_deserted."""
        silent = []
        for peer in self.table.silent(now):
            if peer.role == Role.FRONT.value:
                self.lose(peer.name)
            elif peer.is_ready:
                silent.append(peer)
        return silent

    def _go_on_with_farewell(self, turn: EngineTurn) -> None:
        if self.farewell.goes_on():
            turn.actions += self.farewells()
            return
        for name in self.farewell.take_hang_ups():
            if name not in self.dialled:
                turn.do(HangUp(name))

    def _beat_dialled(self, peer: Peer, turn: EngineTurn) -> None:
        match peer.state:
            case PeerState.READY if peer.role != Role.FRONT.value:
                self.send(peer.name, self._heartbeat(peer.name), turn)
            case PeerState.GREETING:
                self._greet_again(peer, turn)
            case PeerState.LOST | PeerState.UNKNOWN:
                self.greet(peer.name, turn)
            case PeerState.REFUSED:
                self.send(peer.name, Heartbeat(), turn)  # its answer tells when it has been started anew

    def _greet_again(self, peer: Peer, turn: EngineTurn) -> None:
        greeting = self.endpoints.greetings.get(peer.name)
        if greeting is None:
            self.greet(peer.name, turn)
        elif greeting.theirs is not None:
            self.send(peer.name, Heartbeat(), turn)  # it has attached; our transfer thread may be busy with a fence
        elif greeting.ours:
            self.send(peer.name, self._own.hello(greeting.ours), turn)

    def is_deserted(self, front: PeerName, now: float) -> bool:
        """Whether a front has been silent for so long that it will not come back for its rooms."""
        return now - self.table.get(front).last_heard >= self.config.options.front_grace_s

    def _forget_strangers(self, now: float) -> None:
        away = (PeerState.UNKNOWN, PeerState.LOST, PeerState.REFUSED)
        for peer in self.table:
            if peer.state in away and now - peer.last_heard > _STRANGER_S and peer.name not in self.dialled:
                self.table.forget(peer.name)
                self._named.pop(peer.name, None)
                self.endpoints.greetings.pop(peer.name, None)
                self.refusals.pop(peer.name, None)

    def _end_life(self, peer: Peer, turn: EngineTurn) -> None:
        """Whatever was agreed with the peer is over: before anything new, nothing old may land or leave."""
        if peer.boot is not None and peer.role != Role.FRONT.value:
            self.endpoints.end(peer.name, turn)

    def fence(self, name: PeerName, turn: EngineTurn) -> None:
        """End the peer's endpoint here; a dialled peer gets a new Hello with the next beat."""
        self._end_life(self.table.get(name), turn)
        self.lose(name)

    def died(self, name: PeerName, turn: EngineTurn) -> None:
        """The peer's process is over: frames it left behind are ignored from now on."""
        self.fence(name, turn)
        self.table.bury(self.table.get(name))

    def lose(self, name: PeerName) -> None:
        """The peer is not there any more, for whatever reason; a dialled one gets a new Hello with the next beat."""
        peer = self.table.get(name)
        self.endpoints.greetings.pop(name, None)
        if peer.state in (PeerState.READY, PeerState.GREETING):
            self.table.move(peer, PeerEvent.LOSE)
