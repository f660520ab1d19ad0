"""One half of a request, where a router of another project sends each to a prefill and a decode worker at once.

The dialect is SGLang's: any generating body may carry `bootstrap_host`, `bootstrap_port` and `bootstrap_room`, or lists
of them, one for each prompt or answer. Host and port are those of the prefill worker's links, the room is a number that
only this request has. Both halves make the same `Room` of them. Decode answers the client and has the prompt computed
by the worker that is named; prefill's answer says that its part is done, and nobody reads more of it.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count

import msgspec

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Role, Room
from deltaserve.core.wire.messages import PeerAddress
from deltaserve.server.api_errors import Json, excerpt, from_failure, invalid
from deltaserve.server.jobs import Job, Sample
from deltaserve.server.settings import Half
from deltaserve.server.usage import Counted
from deltaserve.settings.worker_list import is_host, name_of

_HOST, _PORT, _ROOM = FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_MOST = {_PORT: 65535, _ROOM: 2**64 - 1}
_LEAST = {_PORT: 1, _ROOM: 0}
_WAY_OUT = {
    _HOST: "this worker answers one half of a request, and a router sends both (docs/deploy.md)",
    _PORT: "the router must be told prefill's --disaggregation-bootstrap-port (--prefill URL PORT)",
    _ROOM: "this worker answers one half of a request, and a router sends both (docs/deploy.md)",
}
_PARTNER: Mapping[tuple[Role, FailReason], str] = {
    (Role.DECODE, FailReason.NO_PEER): f"the prefill worker that {_HOST} and {_PORT} name does not answer, or does not "
    "fit this one",
    (Role.PREFILL, FailReason.NO_PEER): f"no decode worker has asked for {_ROOM}: its half of the request did not come",
    (
        Role.PREFILL,
        FailReason.DEADLINE,
    ): f"no decode worker has asked for {_ROOM}, or it did not take the pages, before the deadline",
    (Role.PREFILL, FailReason.ROOM_IN_USE): f"{_ROOM} is another request's",
    (Role.DECODE, FailReason.ROOM_IN_USE): f"{_ROOM} is another request's",
}
"""What a half is told of the other one."""


@dataclass(frozen=True, slots=True)
class RoomPlace:
    """One prefill worker and room, as a request names them."""

    host: str
    port: int
    number: int


@dataclass(frozen=True, slots=True)
class RoomPlaces:
    """What a body says of its other half."""

    each: tuple[RoomPlace, ...]
    is_list: bool
    """One for each prompt, or for each answer; else one for all of them."""
    addresses: Mapping[str, str]
    """Host |-> where decode dials it; empty on prefill."""

    def bound(self, job: Job, half: Half) -> Job:
        """The job as this half does it. Raises ApiError 400 where the lists do not fit its prompts."""
        samples = tuple(
            self._bound(sample, place, number, half)
            for sample, (place, number) in zip(job.samples, self._of(job.samples), strict=True)
        )
        is_streamed = job.is_streamed and half.role is Role.DECODE
        return replace(job, samples=samples, is_streamed=is_streamed, half=half.role)

    def _of(self, samples: tuple[Sample, ...]) -> list[tuple[RoomPlace, int]]:
        """Place of each sample, and its number among those that share it."""
        if not self.is_list:
            return [(self.each[0], sample.index) for sample in samples]
        if len(self.each) == len(samples):
            return [(place, 0) for place in self.each]
        num_prompts = sum(sample.is_first for sample in samples)
        if len(self.each) != num_prompts:
            sizes = f"{num_prompts} prompts and {len(samples)} answers"
            raise invalid(_ROOM, f"{_ROOM} has {len(self.each)} entries, the request has {sizes}")
        found: list[tuple[RoomPlace, int]] = []
        places, numbers = iter(self.each), count()
        for sample in samples:
            if sample.is_first:
                place, numbers = next(places), count()
            found.append((place, next(numbers)))
        return found

    def _bound(self, sample: Sample, place: RoomPlace, number: int, half: Half) -> Sample:
        generation = sample.generation
        key = msgspec.json.encode([generation.namespace, place.host, place.port, place.number, number])
        room = Room(blake2b(key, digest_size=16).digest())
        if half.role is Role.PREFILL:
            sampling = msgspec.structs.replace(generation.sampling, max_tokens=1, prompt_logprobs=None)
            return replace(sample, generation=replace(generation, room=room, sampling=sampling))
        name = name_of(Role.PREFILL, f"{place.host}:{place.port}")
        prefill = PeerAddress(name=name, url=f"tcp://{self.addresses[place.host]}:{place.port}")
        return replace(sample, generation=replace(generation, room=room, prefill=prefill))


async def take_places(raw: dict[str, object], half: Half) -> RoomPlaces:
    """What the body says of its other half, and is not to be read any more. Raises ApiError 400."""
    given = {name: raw.pop(name, None) for name in FIELDS}
    values = {name: _values(name, value) for name, value in given.items()}
    lengths = {len(values[name]) for name, value in given.items() if isinstance(value, list)}
    if len(lengths) > 1:
        raise invalid(_ROOM, f"{', '.join(FIELDS)} are lists of different lengths")
    num = next(iter(lengths), 1)
    columns = [value if isinstance(given[name], list) else value * num for name, value in values.items()]
    each = tuple(_place(host, port, room) for host, port, room in zip(*columns, strict=True))
    return RoomPlaces(each, bool(lengths), await _addresses(each, half))


def _place(host: object, port: object, room: object) -> RoomPlace:
    assert isinstance(host, str) and isinstance(port, int) and isinstance(room, int)  # see _values
    return RoomPlace(host, port, room)


def _values(name: str, value: object) -> list[object]:
    """One or several values of a field, checked."""
    if value is None or value == []:
        raise invalid(name, f"{name} is missing: {_WAY_OUT[name]}")
    items = value if isinstance(value, list) else [value]
    if name == _HOST:
        for item in items:
            if not isinstance(item, str) or not is_host(item):
                raise invalid(name, f"{name} is {excerpt(item)}, expected is a host name or an IPv4 address")
        return items
    for item in items:
        if type(item) is not int or not _LEAST[name] <= item <= _MOST[name]:  # true is an int
            allowed = f"a number of {_LEAST[name]}..{_MOST[name]}: {_WAY_OUT[name]}"
            raise invalid(name, f"{name} is {excerpt(item)}, expected is {allowed}")
    return items


async def _addresses(each: tuple[RoomPlace, ...], half: Half) -> dict[str, str]:
    """Host |-> IPv4 address on the trusted network, of what decode is to dial. Raises ApiError 400."""
    if half.role is Role.PREFILL:
        own = half.host, half.port
        for place in each:
            if (place.host, place.port) != own:
                named = f"{place.host}:{place.port}"
                raise invalid(
                    _HOST,
                    f"{_HOST} and {_PORT} name {named[:80]}, and this prefill worker is known as {own[0]}:{own[1]}: "
                    "tell the router that, or start the worker with --advertise",
                )
        return {}
    return {host: await _address(host, half.network) for host in {place.host for place in each}}


async def _address(host: str, network: str) -> str:
    try:
        address = str(ipaddress.IPv4Address(host))
    except ValueError:
        address = await _looked_up(host)
    if ipaddress.IPv4Address(address) not in ipaddress.IPv4Network(network, strict=False):
        raise invalid(_HOST, f"{_HOST} {excerpt(host)} is at {address}, not on --trusted-data-network {network}")
    return address


async def _looked_up(host: str) -> str:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise invalid(_HOST, f"{_HOST} {excerpt(host)} cannot be resolved: {error.strerror}") from error
    return min(str(address[0]) for *_, address in found)


def partner_words(half: Role, error: RequestFailed) -> str:
    """What a half is told of a failure."""
    return _PARTNER.get((half, error.reason), from_failure(error).message)


def prefill_body(job: Job, counted: Counted) -> Json | list[Json]:
    """Prefill's answer: no text, and in SGLang's form what it is about. Routers look at its status, and add its
    `input_token_logprobs`, if there were any, to those of decode's answer, which has all of them."""
    bodies: list[Json] = [
        {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": job.id,
                "finish_reason": {"type": "length", "length": 0},
                "prompt_tokens": len(sample.prompt.tokens),
                "completion_tokens": 0,
                "cached_tokens": report.prefill_cached_len if (report := counted[sample.index].report) else 0,
            },
        }
        for sample in job.samples
    ]
    return bodies if len(bodies) > 1 else bodies[0]
