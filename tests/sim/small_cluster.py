"""Small clusters of the simulator: one front, its workers, links by a policy, and what they must answer."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from deltaserve.control.front.client import Generation
from deltaserve.core.ids import Namespace, PeerName
from deltaserve.core.lifetime import KEEP_ALL, Retention
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.codec import encode
from deltaserve.core.wire.messages import CacheUse, Envelope
from deltaserve.sim.chance import Chance
from deltaserve.sim.cluster import Shape, front_config, held_by, member_of, room_of, url_of, worker_config
from deltaserve.sim.faults import LinkFaults
from deltaserve.sim.loopback import Fabric
from deltaserve.sim.oracle import DEFAULT_NAMESPACE, oracle_answer
from deltaserve.sim.process import SimFront, SimWorker
from deltaserve.sim.trace import Trace
from deltaserve.sim.world import World

LinkPolicy = Callable[[PeerName, PeerName, Envelope], Sequence[float]]
"""(from, to, frame) |-> delays of the copies that arrive; none: the frame is lost. Connections keep order."""


def reliable(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float]:
    """The policy of a healthy link: once, soon."""
    return (0.0005,)


class LinkWorld(World):
    """A policy says what becomes of each frame, nothing is drawn."""

    def __init__(self, link: LinkPolicy = reliable, fabric: Fabric | None = None) -> None:
        super().__init__(LinkFaults({}, Chance(0, "links"), Counter()), fabric or Fabric(), Trace())
        self._link = link

    def send(self, src: PeerName, dst: PeerName, envelope: Envelope) -> None:
        if self.reaches(src, dst):
            frame = encode(envelope)
            for delay in self._link(src, dst, envelope):
                self.carry(src, dst, frame, delay)


class Cluster:
    """The processes of a Shape, in a World."""

    def __init__(self, shape: Shape, link: LinkPolicy = reliable, fabric: Fabric | None = None) -> None:
        self.shape = shape
        self.world = LinkWorld(link, fabric)
        self.lives: dict[PeerName, int] = {}
        self.num_rooms = 0
        self.roles = shape.roles()
        for name in self.roles:
            self.start(name)
        members = [member_of(name, role) for name, role in self.roles.items()]
        self.front = SimFront(self.world, front_config(shape, members, 1))

    def start(self, name: PeerName, **changes: Any) -> SimWorker:
        """A process of that name starts, with a boot of its own. `changes`: fields of its configuration."""
        self.lives[name] = self.lives.get(name, 0) + 1
        config = replace(worker_config(self.shape, name, self.roles[name], self.lives[name]), **changes)
        return SimWorker(self.world, config, url_of(name), plane=self.shape.plane(self.roles[name]))

    def warm_up(self) -> None:
        """Run until the front is ready."""
        self.world.run(until=self.world.now + 5.0, done=lambda: self.front.core.ready() is None)
        assert self.front.core.ready() is None, self.front.core.ready()

    def generation(
        self, prompt: Sequence[int], max_tokens: int, namespace: str = "", cache: CacheUse = CacheUse.NORMAL
    ) -> Generation:
        self.num_rooms += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=self.num_rooms, temperature=0.0)
        room = room_of(self.num_rooms)
        return Generation(room, pack_u32(prompt), Namespace(namespace), sampling, deadline_s=3600.0, cache=cache)

    def is_quiet(self) -> bool:
        """Nobody holds anything for a request."""
        return all(held_by(worker) == 0 for worker in self.world.workers.values())

    def check(self) -> None:
        for worker in self.world.workers.values():
            worker.instance.check_integrity()
        self.front.core.check_integrity()


def oracle_output(
    prompt: bytes,
    num_output: int,
    vocab_size: int,
    pools: tuple[Retention, ...] = (KEEP_ALL,),
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> tuple[int, ...]:
    """The tokens alone, of a request that asks for nothing else."""
    sampling = SamplingParams(max_tokens=num_output, seed=0)
    return oracle_answer(prompt, sampling, vocab_size, pools, namespace).tokens
