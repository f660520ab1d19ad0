"""I34: what a front sends keeps to one revision, by what workers have told it and clients have got.

A decode worker is offered prefill workers of its own revision only, and keys of its own model; a room goes on where it
began. Checked on what goes out, beside the books by which the front chooses.
"""

from deltaserve.control.front.front_core import FrontCore
from deltaserve.control.peer.page_fit import unequal_fields
from deltaserve.control.peer.revision import identity
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.wire.messages import Hello, Message, PeerAddress, PromptLogprobs, Submit, Tokens


class OneRevision:
    """What the rooms of one front have got, and from where."""

    def __init__(self, core: FrontCore, secret: bytes) -> None:
        self._core = core
        self._secret = secret
        self._began: dict[Room, str] = {}
        """Room |-> fingerprint of the model that computed the first of what its client has."""

    def delivered(self, room: Room, src: PeerName, message: Message) -> None:
        """Something of the room was handed to its client when `src` had said `message`."""
        hello = self._hello(src)
        if hello is not None and isinstance(message, Tokens | PromptLogprobs):
            self._began.setdefault(room, hello.compat["fingerprint"])

    def check(self, to: PeerName, message: Message) -> None:
        """Raises IntegrityError where the message would mix two revisions."""
        hello = self._hello(to)
        if hello is None:
            return
        match message:
            case Hello(peers=peers):
                self._check_fellows(to, hello, peers)
            case Submit():
                self._check_fellows(to, hello, () if message.prefill is None else (message.prefill,))
                self._check_submit(to, hello, message)

    def _check_fellows(self, to: PeerName, hello: Hello, peers: tuple[PeerAddress, ...]) -> None:
        for peer in peers:
            other = self._hello(PeerName(peer.name))
            if other is not None and unequal_fields(identity(hello), identity(other)):
                raise IntegrityError(f"I34: {to} is told of {peer.name}, which is of another revision")

    def _check_submit(self, to: PeerName, hello: Hello, submit: Submit) -> None:
        fingerprint, room = hello.compat["fingerprint"], Room(submit.room)
        if self._began.get(room, fingerprint) != fingerprint:
            raise IntegrityError(f"I34: a room that began on {self._began[room]} goes on at {to}, on {fingerprint}")
        live = self._core.rooms.get(room)
        if live is not None:
            generation, page_size = live.sample.generation, hello.facts.page_size
            seed = seed_key(self._secret, fingerprint, page_size, generation.namespace)
            if submit.keys != extend_keys(seed, generation.prompt, page_size):
                raise IntegrityError(f"I34: {to} gets keys of another model than {fingerprint}")

    def _hello(self, name: PeerName) -> Hello | None:
        """What it has said in its present life; None: nothing."""
        worker = self._core.workers.get(name)
        return None if worker is None else worker.peer.hello
