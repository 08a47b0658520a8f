"""The keys of rented machines: derived from one secret of the installation and a machine's identity.

Nothing is stored: a controller that begins anew, and every replica, makes the same key again, and no two
machines share one. Whoever has the secret may enter every machine; it lives in a Secret beside the Lease.
"""

import base64
import hashlib
import struct
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from providers.base import Access

SECRET_BYTES: Final = 32
_BLOCK_BYTES, _LINE = 8, 70
_USER, _HOST = b"nebula ssh user key 1", b"nebula ssh host key 1"


def access(secret: bytes, identity: str) -> Access | None:
    """What a create hands to its machine; None where the installation has no secret."""
    if not secret:
        return None
    public = _key(secret, _USER, identity).public_key()
    line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return Access(ssh_public_key=f"{line} nebula", host_key=_pem(_key(secret, _HOST, identity)))


def private_key(secret: bytes, identity: str) -> str:
    """The key that enters that machine, in OpenSSH's own format. Never to be logged or stored."""
    return _pem(_key(secret, _USER, identity))


def _key(secret: bytes, use: bytes, identity: str) -> Ed25519PrivateKey:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=use + b"\0" + identity.encode())
    return Ed25519PrivateKey.from_private_bytes(derived.derive(secret))


def _pem(key: Ed25519PrivateKey) -> str:
    """In OpenSSH's own format. The library's writer puts chance into it; a replay must be the same bytes."""
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    private = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    kind = _field(b"ssh-ed25519")
    check = hashlib.sha256(public).digest()[:4]
    secret = check + check + kind + _field(public) + _field(private + public) + _field(b"")
    secret += bytes(range(1, 1 + -len(secret) % _BLOCK_BYTES))
    head = b"openssh-key-v1\0" + _field(b"none") + _field(b"none") + _field(b"") + struct.pack(">I", 1)
    text = base64.b64encode(head + _field(kind + _field(public)) + _field(secret)).decode()
    lines = [text[start : start + _LINE] for start in range(0, len(text), _LINE)]
    return "\n".join(["-----BEGIN OPENSSH PRIVATE KEY-----", *lines, "-----END OPENSSH PRIVATE KEY-----", ""])


def _field(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value
