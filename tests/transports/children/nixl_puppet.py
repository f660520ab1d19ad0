"""A puppet (puppet.py) over NIXL.

    nixl_puppet.py NAME BOOT NUM_BYTES TLS NET_DEVICES PROGRESS_DELAY_US

Commands starting with `raw_` reach past the adapter on purpose: they do what the adapter must never do, to show what
the library makes of it.
"""

import sys

from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import WriteId
from deltaserve.transports.nixl.library import load_bindings
from deltaserve.transports.nixl.options import NixlOptions
from deltaserve.transports.nixl.transport import NixlTransport
from tests.transports.children.puppet import Puppet, perform
from tests.transports.children.puppet_memory import PrivateMemory


class NixlPuppet(Puppet):
    """Its memory is its own."""

    def __init__(self, num_bytes: int, transport: NixlTransport) -> None:
        super().__init__(PrivateMemory(num_bytes), transport)
        self._nixl = transport

    def raw_release(self, write: int) -> str:
        peer, posted = self._nixl._writes[WriteId(write)]
        handle, posted.handle = posted.handle, None  # a second release at the fence would be a use after free
        assert handle is not None
        return str(self._nixl._endpoints[peer]._live().releaseXferReq(handle))

    def raw_forget_peer(self, peer: str) -> str:
        endpoint = self._nixl._endpoints[PeerName(peer)]
        return str(endpoint._live().invalidateRemoteMD(endpoint.ranks[0].agent))

    def raw_deregister(self, peer: str) -> str:
        endpoint = self._nixl._endpoints[PeerName(peer)]
        descriptors = [(self._memory.base, len(self._bytes), 0, "")]
        lib = load_bindings()
        dlist = lib.nixlRegDList(lib.DRAM_SEG, descriptors)
        return str(endpoint._live().deregisterMem(dlist, [endpoint._backend]))


def main() -> None:
    name, boot, num_bytes, tls, net_devices, delay_us = sys.argv[1:]
    options = NixlOptions(tls, net_devices, int(delay_us))
    perform(lambda: NixlPuppet(int(num_bytes), NixlTransport(PeerName(name), Boot(int(boot)), options)))


if __name__ == "__main__":
    main()
