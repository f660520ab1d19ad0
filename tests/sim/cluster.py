"""Small simulated clusters for tests: one front, P prefill and D decode workers, the stamp model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from deltaserve.base.ids import Namespace, PeerName, Role, Room
from deltaserve.base.sampling import SamplingParams
from deltaserve.base.tokens import pack_u32
from deltaserve.instance.api import InstanceConfig
from deltaserve.request.client import Generation
from deltaserve.routing.api import FrontConfig, WorkerSpec
from deltaserve.sim.oracle import STAMP_BYTES, stamp_spec
from deltaserve.sim.world import LinkPolicy, SimFront, SimWorker, World, boot_of, reliable
from deltaserve.transport.loopback import Fabric
from deltaserve.wire.messages import CacheUse, PeerAddress

VOCAB = 97
SECRET = b"s" * 32
FINGERPRINT = "stamp model"


@dataclass(frozen=True)
class Shape:
    """Sizes of a simulated cluster."""

    num_prefill: int = 1
    num_decode: int = 1
    num_unified: int = 0
    page_size: int = 4
    num_pools: int = 1
    prefill_pages: int = 64
    decode_pages: int = 64
    max_running: int = 8
    chunk_len: int = 8
    context_len: int = 200
    reserve_len: int = 4
    extend_len: int = 4
    park_fraction: float = 0.3
    radix_cache: bool = True
    options: dict[str, float] = field(default_factory=dict)


class Cluster:
    """The processes of a Shape, in a World."""

    def __init__(self, shape: Shape, link: LinkPolicy = reliable, fabric: Fabric | None = None) -> None:
        self.shape = shape
        self.world = World(link, fabric)
        self.lives: dict[PeerName, int] = {}
        self.num_rooms = 0
        names = [(PeerName(f"prefill-{i}"), Role.PREFILL) for i in range(shape.num_prefill)]
        names += [(PeerName(f"decode-{i}"), Role.DECODE) for i in range(shape.num_decode)]
        names += [(PeerName(f"unified-{i}"), Role.UNIFIED) for i in range(shape.num_unified)]
        self.roles = dict(names)
        for name, _ in names:
            self.start(name)
        specs = tuple(WorkerSpec(PeerAddress(name=name, url=f"sim://{name}"), role) for name, role in names)
        config = FrontConfig(
            PeerName("front"),
            boot_of("front", 1),
            specs,
            SECRET,
            FINGERPRINT,
            kv_bytes_per_token=STAMP_BYTES * shape.num_pools,
        )
        self.front = SimFront(self.world, config)

    def start(self, name: PeerName) -> SimWorker:
        """A process of that name starts, with a boot of its own."""
        self.lives[name] = self.lives.get(name, 0) + 1
        return SimWorker(self.world, self.config(name))

    def config(self, name: PeerName) -> InstanceConfig:
        shape, role = self.shape, self.roles[name]
        pages = shape.prefill_pages if role is Role.PREFILL else shape.decode_pages
        return InstanceConfig(
            name=name,
            role=role,
            boot=boot_of(name, self.lives[name]),
            cache=stamp_spec(shape.page_size, shape.num_pools),
            num_pages=(pages,) * shape.num_pools,
            num_aux_slots=shape.max_running * 2,
            max_running_requests=shape.max_running,
            max_context_len=shape.context_len,
            vocab_size=VOCAB,
            compat=(("model", FINGERPRINT),),
            cluster_secret=SECRET,
            fingerprint=FINGERPRINT,
            transport="loopback",
            regions=(),
            chunked_prefill_size=shape.chunk_len,
            max_prefill_tokens=shape.chunk_len * 4,
            attention_split_tokens=shape.page_size * 2,
            num_reserved_decode_tokens=shape.reserve_len,
            decode_extend_tokens=shape.extend_len,
            park_fraction=shape.park_fraction,
            radix_cache=shape.radix_cache,
            verify_checksums=True,
        )

    def warm_up(self) -> None:
        """Run until the front is ready."""
        self.world.run(until=self.world.now + 5.0, done=lambda: self.front.core.ready() is None)
        assert self.front.core.ready() is None, self.front.core.ready()

    def generation(
        self, prompt: Sequence[int], max_tokens: int, namespace: str = "", cache: CacheUse = CacheUse.NORMAL
    ) -> Generation:
        self.num_rooms += 1
        room = Room(self.num_rooms.to_bytes(16, "little"))
        sampling = SamplingParams(max_tokens=max_tokens, seed=self.num_rooms, temperature=0.0)
        return Generation(room, pack_u32(prompt), Namespace(namespace), sampling, deadline_s=3600.0, cache=cache)

    def is_quiet(self) -> bool:
        """Nobody holds anything for a request."""
        return all(not w.instance.transfer_active() and self.held(w) == 0 for w in self.world.workers.values())

    @staticmethod
    def held(worker: SimWorker) -> float:
        metrics = worker.instance.metrics()
        busy = ("owned", "granted", "quarantined")
        pages = sum(v for k, v in metrics.items() if k.startswith("deltaserve_pages{") and any(s in k for s in busy))
        return pages + metrics["deltaserve_leases"] + metrics["deltaserve_tickets_open"]

    def check(self) -> None:
        for worker in self.world.workers.values():
            worker.instance.check_integrity()
        self.front.core.check_integrity()
