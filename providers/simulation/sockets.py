"""Where a simulated cloud listens: on loopback, at one address, or at every one of every family."""

import socket

LOOPBACK = "127.0.0.1"
EVERYWHERE = "*"


def listening(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at ``host``, at a free port where ``port`` is 0.

    Raises:
        OSError: the port is taken, or the address is not ours.
    """
    if host == EVERYWHERE:
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except (OSError, ValueError):  # a machine without IPv6
            host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
