"""The key that clients send, of a file in the server's form."""

from pathlib import Path

from deltaserve.commands.client.bearer_key import authorization
from deltaserve.process.front.secrets import read_api_keys


def test_what_the_server_reads_clients_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("".join(f"{index:040d} tenant-{index}\n" for index in range(1000)))
    assert authorization(path) == {"Authorization": f"Bearer {read_api_keys(path)[0].secret}"}
