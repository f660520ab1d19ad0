"""`python -m tests.process.links.slow_names`: frames go to one peer while the name of another is being looked up.

To be run where no name server answers. Prints whether the lookup was still under way when the frame had arrived.
"""

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import PeerAddress
from deltaserve.process.links.links import Links
from deltaserve.process.links.name_contexts import look_up
from tests.process.links.frames import DECODE, PREFILL, address, envelope, receive


def main() -> None:
    listener, dialer = Links(), Links()
    port = listener.listen("127.0.0.1", 0)
    under_way = look_up("slow.example.org")
    dialer.dial(PeerAddress(name=PeerName("slow"), url="tcp://slow.example.org:8998"))
    dialer.dial(PeerAddress(name=PeerName("here"), url=f"tcp://localhost:{port}"))
    dialer.dial(address(PREFILL, port))
    for peer in (PREFILL, PeerName("here")):
        assert dialer.send(peer, envelope(DECODE))
        assert [each.src for each in receive(listener)] == [DECODE]
    print("under way" if not under_way.done() else f"over: {under_way.result()}", flush=True)
    dialer.close()


if __name__ == "__main__":
    main()
