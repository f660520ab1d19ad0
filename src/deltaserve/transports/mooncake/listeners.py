"""Closes the library's listeners to all but one address: it binds every interface and has no setting for that.

A socket filter on a listening socket sees each packet that would open a connection, and the sockets it accepts inherit
it. Packets to another local address than ours are dropped there, as if nobody listened.
"""

import os
import socket
import stat
import struct
from ctypes import addressof, create_string_buffer

_SO_ATTACH_FILTER = 26
_SO_LOCK_FILTER = 44
_INSTRUCTION = struct.Struct("HBBI")
_NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF: offsets from here on count from the IP header."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_PASS, _DROP = 0xFFFFFFFF, 0
_DESTINATION = 16
"""Where the destination address lies in an IPv4 header."""


def close_listeners(host: str) -> int:
    """Restrict this process' TCP listeners to connections to `host`; returns how many listeners there are.

    Connections that were taken before are ended. Raises OSError.
    """
    listeners = 0
    for fd in _socket_fds():
        with socket.socket(fileno=os.dup(fd)) as listener:
            if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
                continue
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _attach(listener, host)
                listeners += 1
            else:
                listener.shutdown(socket.SHUT_RDWR)
    return listeners


def _attach(listener: socket.socket, host: str) -> None:
    address = int.from_bytes(socket.inet_aton(host), "big")
    program = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_EQUAL, 0, 3, 4),  # IP version 4
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _DESTINATION),
        (_JUMP_EQUAL, 0, 1, address),
        (_RETURN, 0, 0, _PASS),
        (_RETURN, 0, 0, _DROP),
    ]
    code = create_string_buffer(b"".join(_INSTRUCTION.pack(*line) for line in program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), addressof(code)))
    listener.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


def _socket_fds() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                fds.append(int(name))
        except OSError:  # closed by the library meanwhile, or that of the listing itself
            continue
    return fds
