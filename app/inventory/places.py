"""Where the ports of a machine are reached, out of what its cloud tells. Pure."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from providers.base import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one port of a workload is reached. ``base``: the URL of a cloud's proxy, "" without one."""

    host: str
    port: int
    base: str = ""

    def url(self, path: str, *, scheme: str) -> str:
        """An address on it; ``path`` begins with a slash."""
        if self.base:
            return self.base.rstrip("/") + path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{path}"


def place_of(machine: Machine, port: int) -> Place | None:
    """Where a port is reached, as far as the cloud has told; None: nowhere yet."""
    if machine.ports:
        address = next((each.address for each in machine.ports if each.port == port), None)
        return _place(address, None) if address else None
    return _place(machine.endpoint, port) if machine.endpoint else None


def _place(address: str, port: int | None) -> Place | None:
    """``port`` None: the address names it, or is the URL of a proxy for it."""
    if port is not None and _is_ip(address):
        return Place(host=address, port=port)
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, number = parts.hostname, port or parts.port
    except ValueError:
        return None
    if not host:
        return None
    if parts.scheme and port is None:
        return Place(host=host, port=number or (443 if parts.scheme == "https" else 80), base=address)
    return Place(host=host, port=number) if number else None


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
