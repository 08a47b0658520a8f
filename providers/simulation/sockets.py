"""Where a simulated cloud listens: on loopback, at one address, or at every one of every family."""

import os
import socket

LOOPBACK = "127.0.0.1"
EVERYWHERE = "*"


def listening(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at ``host``, at a free port where ``port`` is 0.

    Raises:
        OSError: the port is taken, or the address is not ours.
    """
    sock = _bound(host, port, backlog=backlog)
    # Whatever is accepted has it from here. An answer's head and body are two packets, and without this the
    # second waits 40 ms for a late acknowledgement: asyncio sets it only on sockets of a named protocol. A
    # bench asks for it; a cloud that takes its 40 ms is nearer to a real one.
    if os.environ.get("NEBULA_SIMULATOR_NODELAY") == "1":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _bound(host: str, port: int, *, backlog: int | None) -> socket.socket:
    if host == EVERYWHERE:
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except (OSError, ValueError):  # a machine without IPv6
            host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
