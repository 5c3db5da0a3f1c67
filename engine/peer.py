"""Who is at the other end of a unix socket."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Protocol

_SO_PEERCRED = 17
_LOCAL_PEERCRED = 1
_SOL_LOCAL = 0


class HasOptions(Protocol):
    """A connected unix socket, or asyncio's view of one."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """As `socket.socket.getsockopt` with a buffer size."""
        ...


def peer_uid(connection: HasOptions) -> int:
    """The user id of the process at the other end. Raises OSError when the system does not tell."""
    if sys.platform == "linux":
        data = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERCRED, struct.calcsize("3i"))
        _pid, uid, _gid = struct.unpack("3i", data)
    else:
        # macOS and the BSDs: struct xucred starts with its version and the user id.
        data = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76)
        _version, uid = struct.unpack_from("=II", data)
    return int(uid)
