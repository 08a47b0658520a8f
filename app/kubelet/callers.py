"""Who calls the endpoint, and whether they may: as a kubelet asks it of the API server.

A client shows a certificate that the API server's client CA has signed (the API server itself does), or a
bearer token that a TokenReview knows. What they may do is asked by a SubjectAccessReview on the node: ``get``
for reading, ``create`` for everything that runs or connects, whatever the HTTP method. What cannot be asked
is refused.
"""

import asyncio
import hashlib
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog

from app.kube import paths, pki
from app.kube.client import Kube
from app.kube.errors import KubeError

log = structlog.get_logger()
CA_NAMESPACE, CA_CONFIGMAP, CA_KEY = "kube-system", "extension-apiserver-authentication", "client-ca-file"
TOKEN_S, ALLOWED_S, DENIED_S = 120.0, 300.0, 30.0
CA_REFRESH_S = 300.0
_CACHED_MAX = 4096


class NobodyKnown(Exception):
    """There is no CA by which the API server could be known: the endpoint cannot be served."""


class Unanswered(Exception):
    """The API server was asked about a caller and did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """``source`` is ``certificate`` or ``token``."""

    name: str
    groups: tuple[str, ...]
    source: str
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Cache(Generic[K, V]):
    """Answers for a while; the oldest go first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K) -> V | None:
        held = self._held.get(key)
        return held[1] if held is not None and held[0] > self._clock() else None

    def put(self, key: K, value: V, *, for_s: float) -> V:
        self._held[key] = (self._clock() + for_s, value)
        self._held.move_to_end(key)
        if len(self._held) > _CACHED_MAX:
            self._held.popitem(last=False)
        return value


class Callers:
    """Asks the API server, and remembers for a few minutes."""

    def __init__(self, kube: Kube, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube.room("kubelet")
        self._tokens: _Cache[bytes, Caller | str] = _Cache(clock)
        self._rights: _Cache[tuple[Caller, str, str, str], bool] = _Cache(clock)

    async def known(self, certificate: dict[str, Any] | None, authorization: str) -> Caller | None:
        """The caller; None for nobody.

        Raises:
            Unanswered: a token could not be reviewed.
        """
        if certificate is not None:
            return of_certificate(certificate)
        kind, _, token = authorization.partition(" ")
        token = token.strip()
        if kind.lower() != "bearer" or not token:
            return None
        key = hashlib.sha256(token.encode()).digest()
        held = self._tokens.get(key)
        if held is None:
            held = self._tokens.put(key, await self._review(token) or "", for_s=TOKEN_S)
        return held if isinstance(held, Caller) else None

    async def may(self, caller: Caller, *, verb: str, subresource: str, node: str = "") -> bool:
        """Whether the caller may do it on the node ("" for every one).

        Raises:
            Unanswered: it could not be asked.
        """
        key = (caller, verb, subresource, node)
        held = self._rights.get(key)
        if held is None:
            allowed = await self._ask(caller, verb=verb, subresource=subresource, node=node)
            held = self._rights.put(key, allowed, for_s=ALLOWED_S if allowed else DENIED_S)
        return held

    async def _review(self, token: str) -> Caller | None:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        try:
            status = (await self._kube.create(paths.token_reviews(), body)).get("status") or {}
        except KubeError as error:
            raise Unanswered(f"TokenReview: {error}") from error
        user = status.get("user") or {}
        if not status.get("authenticated") or not user.get("username"):
            return None
        extra = user.get("extra") or {}
        return Caller(
            name=user["username"],
            groups=tuple(user.get("groups") or ()),
            source="token",
            extra=tuple((name, tuple(values)) for name, values in sorted(extra.items())),
        )

    async def _ask(self, caller: Caller, *, verb: str, subresource: str, node: str) -> bool:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": caller.name,
                "groups": list(caller.groups),
                "extra": {name: list(values) for name, values in caller.extra},
                "resourceAttributes": {
                    "verb": verb,
                    "version": "v1",
                    "resource": "nodes",
                    "subresource": subresource,
                    "name": node,
                },
            },
        }
        try:
            review = await self._kube.create(paths.subject_access_reviews(), body)
        except KubeError as error:
            raise Unanswered(f"SubjectAccessReview: {error}") from error
        return bool((review.get("status") or {}).get("allowed"))


def of_certificate(certificate: dict[str, Any]) -> Caller | None:
    """The user of a certificate that was verified: its common name, in each of its organisations."""
    pairs = [pair for part in certificate.get("subject") or () for pair in part]
    name = next((value for key, value in pairs if key == "commonName"), "")
    groups = tuple(value for key, value in pairs if key == "organizationName")
    return Caller(name=name, groups=groups, source="certificate") if name else None


class ClientAuthority:
    """The CA by which client certificates are verified, loaded into the server's TLS context."""

    def __init__(self, kube: Kube, context: ssl.SSLContext, *, file: str | None) -> None:
        self._kube, self._context, self._file = kube.room("kubelet"), context, file
        self._loaded: set[str] = set()

    @property
    def where(self) -> str:
        """Where it comes from, for people."""
        return self._file or f"ConfigMap {CA_NAMESPACE}/{CA_CONFIGMAP}, key {CA_KEY}"

    async def load(self) -> None:
        """Trust what is there now. A CA that went is trusted until the next start.

        Raises:
            NobodyKnown: there is none; the message says what to do.
            KubeError: the API server did not answer.
        """
        bundle = await self._read()
        found = pki.fingerprints(bundle)
        if not found:
            raise NobodyKnown(
                f"the kubelet endpoint cannot know its callers: {self.where} holds no certificate; give"
                " --kubelet-client-ca-file the CA of the API server's kubelet client, or leave"
                " --kubelet-address empty to go without kubectl logs and exec"
            )
        if found - self._loaded:
            self._context.load_verify_locations(cadata=bundle.decode())
            self._loaded |= found
        self._context.verify_mode = ssl.CERT_OPTIONAL
        if gone := self._loaded - found:
            log.warning("a client CA has gone and is trusted until the next start", certificates=len(gone))

    async def run(self) -> None:
        """Look again now and then, for ever."""
        while True:
            await asyncio.sleep(CA_REFRESH_S)
            try:
                await self.load()
            except (KubeError, NobodyKnown) as error:
                log.warning("client CA not read again", error=str(error))

    async def _read(self) -> bytes:
        if self._file is not None:
            try:
                return await asyncio.to_thread(Path(self._file).read_bytes)
            except OSError as error:
                raise NobodyKnown(f"--kubelet-client-ca-file {self._file}: {error.strerror}") from error
        found = await self._kube.find(paths.configmap(CA_NAMESPACE, CA_CONFIGMAP))
        return str(((found or {}).get("data") or {}).get(CA_KEY, "")).encode()


STREAM_VERB: Final = "create"
"""Running a command is no reading, although a WebSocket begins with a GET."""
