"""Exit code 0 while the deltaserve of this container lives: the API answers, or a worker takes links.

For HEALTHCHECK of Docker and Podman; Kubernetes has probes of its own. Ports other than the defaults are arguments:
healthcheck.py [API [LINKS]].
"""

import http.client
import socket
import sys

_PATIENCE_S = 4.0


def is_front_alive(port: int) -> bool | None:
    """None: nobody listens there, so this container is none of a front."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status == http.client.OK
    except ConnectionRefusedError:
        return None
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def takes_links(port: int) -> bool:
    """A worker listens once all of its ranks have loaded, and ends by itself when it stands still."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S).close()
    except OSError:
        return False
    return True


def main(argv: list[str]) -> int:
    ports = [int(word) for word in argv] + [30000, 8998][len(argv) :]
    alive = is_front_alive(ports[0])
    return 0 if (takes_links(ports[1]) if alive is None else alive) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
