"""The thread that checks the keys of members may die: of a lack of memory, say."""

import subprocess
import sys
from collections.abc import Callable
from threading import Thread

import pytest

from deltaserve.process.children.exits import Exit
from deltaserve.process.links import security
from deltaserve.process.links.links import Links
from deltaserve.process.links.rank_link import RankSockets
from deltaserve.process.links.security import LinkSecurity
from tests.patience import PATIENCE_S
from tests.process.links.dead_authenticator import NoMemory
from tests.process.links.frames import PREFILL, address


def test_its_death_ends_the_process_with_the_stack() -> None:
    command = [sys.executable, "-m", "tests.process.links.dead_authenticator"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == Exit.THREAD_DIED
    assert "in callback" in ended.stderr
    assert "the authenticator of worker links died" in ended.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("make", [Links, RankSockets])
def test_links_close_without_it(
    make: Callable[[LinkSecurity], Links | RankSockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = LinkSecurity.from_cluster_key(b"k" * 32)
    dialer = Links(key)
    with monkeypatch.context() as dying:
        dying.setattr(security, "_Members", NoMemory)
        dying.setattr(security, "start_thread", lambda *_: None)  # this process is to go on
        listener = make(key)
    if isinstance(listener, Links):
        end, port = None, listener.listen("127.0.0.1", 0)
    else:
        end = listener.bind("tcp://127.0.0.1:*")
        port = int(end.url.rpartition(":")[2])
    dialer.dial(address(PREFILL, port))
    assert listener._authenticator is not None
    listener._authenticator.thread.join(PATIENCE_S)
    if end is not None:
        end.close()
    closing = Thread(target=listener.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    dialer.close()


def test_one_that_lives_ends_with_its_links() -> None:
    links = Links(LinkSecurity.from_cluster_key(b"k" * 32))
    assert links._authenticator is not None
    thread = links._authenticator.thread
    links.close()
    assert not thread.is_alive()
