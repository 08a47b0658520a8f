"""Which login pulls an image: the ``auths`` of image pull Secrets, matched as a kubelet matches them. Pure.

Passwords are in no error and no ``repr``.
"""

import base64
import binascii
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from providers.base import RegistryLogin

DEFAULT_REGISTRY: Final = "docker.io"
_DEFAULT_NAMES = ("index.docker.io", "registry-1.docker.io")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[\w][\w.-]{{0,127}})?(?:@[A-Za-z][A-Za-z0-9+._-]*:[0-9a-fA-F]{{32,}})?",
    re.ASCII,
)
_IMAGE_CHARS = 500
_TYPES: Final = {
    "kubernetes.io/dockerconfigjson": ".dockerconfigjson",
    "kubernetes.io/dockercfg": ".dockercfg",
}


class BadPullSecret(ValueError):
    """A Secret that should hold registry logins and does not. Nothing of its content is in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One login as a Secret holds it, for images below ``host`` (it may have wild cards) and ``path``."""

    host: str
    path: str
    login: RegistryLogin


def is_image(image: str) -> bool:
    """Whether it can be the name of an image at all: no node could pull another."""
    return len(image) <= _IMAGE_CHARS and _IMAGE.fullmatch(image) is not None


def entries(secret: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The logins in a pull Secret; those without user name and password are passed over.

    Raises:
        BadPullSecret: it is of another type, or cannot be read.
    """
    key = _TYPES.get(secret.get("type") or "")
    if key is None:
        raise BadPullSecret(f"is of type {secret.get('type')}, not kubernetes.io/dockerconfigjson")
    encoded = (secret.get("data") or {}).get(key)
    if encoded is None:
        raise BadPullSecret(f"has no key {key}")
    try:
        told = orjson.loads(base64.b64decode(encoded, validate=True))
        auths = told.get("auths", {}) if key == ".dockerconfigjson" else told
        return tuple(entry for where, auth in auths.items() if (entry := _entry(where, auth)) is not None)
    except (binascii.Error, ValueError, AttributeError, TypeError):
        raise BadPullSecret(f"has a key {key} that cannot be read") from None


def login_for(image: str, known: Iterable[Entry]) -> RegistryLogin | None:
    """The login for an image: of the longest path that matches, the first in order."""
    host, path = _split(image)
    fitting = [entry for entry in known if _matches(entry, host, path)]
    if not fitting:
        return None
    best = max(fitting, key=lambda entry: (len(entry.path), "*" not in entry.host))  # max keeps the first
    return RegistryLogin(server=host, username=best.login.username, password=best.login.password)


def _entry(where: str, auth: Mapping[str, Any]) -> Entry | None:
    username, password = auth.get("username") or "", auth.get("password") or ""
    if encoded := auth.get("auth"):
        both = base64.b64decode(encoded, validate=True).decode().rstrip("\0")
        username, _, password = both.partition(":")
    if not username or not password:
        return None
    bare = where.removeprefix("https://").removeprefix("http://").strip("/")
    host, _, path = bare.partition("/")
    if host in _DEFAULT_NAMES:
        host = DEFAULT_REGISTRY
    if path in ("v1", "v2"):
        path = ""
    login = RegistryLogin(server=host, username=str(username), password=str(password))
    return Entry(host=host.lower(), path=path, login=login)


def _split(image: str) -> tuple[str, str]:
    """Host and path; a first part without dot, port or the name localhost belongs to the path."""
    bare = image.partition("@")[0]
    first, slash, rest = bare.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, path = first.lower(), rest
        if host in _DEFAULT_NAMES:
            host = DEFAULT_REGISTRY
    else:
        host, path = DEFAULT_REGISTRY, bare if slash else f"library/{bare}"
    name, colon, tag = path.rpartition(":")
    return host, name if colon and "/" not in tag else path


def _matches(entry: Entry, host: str, path: str) -> bool:
    wanted, _, wanted_port = entry.host.partition(":")
    found, _, found_port = host.partition(":")
    if wanted_port != found_port:
        return False
    labels, patterns = found.split("."), wanted.split(".")
    if len(labels) != len(patterns):
        return False
    if not all(fnmatch.fnmatchcase(label, pattern) for label, pattern in zip(labels, patterns, strict=True)):
        return False
    return not entry.path or path == entry.path or path.startswith(entry.path.rstrip("/") + "/")
