"""The webhook's CA and serving certificate: one Secret, shared by all replicas, kept by whoever comes first.

Writes are on condition of the Secret's resourceVersion; a loser reads what the winner wrote. A new CA is
trusted before it signs: it is put into the bundle (``ca-next.*`` in the Secret) and takes over only
``overlap`` later, by when every replica has read the bundle and the webhook configurations carry it; the old
one stays in the bundle until it ends. So no replica ever serves what the API server does not trust.

A deleted Secret is written again from memory, with the same CA. A Secret that holds a serving certificate but
no CA key is somebody else's (cert-manager, a person): it is loaded, and never written.
"""

import asyncio
import base64
import binascii
import os
import random
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from app.kube import paths, pki
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict, Exists, KubeError, Replaced

log = structlog.get_logger()

SECRET = "nebula-webhook-server-cert"
CA_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=365)
OVERLAP = timedelta(hours=1)
REFRESH_S = 60.0
NAMES = 32  # a serving certificate collects at most so many names of older configurations


class BadCertificates(Exception):
    """The Secret is not ours to write and its content cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What the Secret holds. ``trusted``: every CA that may sign now, has signed, or will sign next."""

    trusted: bytes
    leaf: pki.Pair
    ca: pki.Pair | None  # None: somebody else's, only to be read
    next_ca: pki.Pair | None = None


def mint(*, names: Sequence[str], now: datetime, ca_life: timedelta, leaf_life: timedelta) -> Material:
    """Everything new."""
    ca = pki.mint_ca(now=now, life=ca_life)
    return Material(
        trusted=ca.certificate, ca=ca, leaf=pki.mint_leaf(ca, names=names, now=now, life=leaf_life)
    )


def renewed(
    material: Material,
    *,
    names: Sequence[str],
    now: datetime,
    ca_life: timedelta,
    leaf_life: timedelta,
    overlap: timedelta,
) -> Material:
    """``material`` with the next step of renewal that is due; the very same when none is.

    A name that another replica asked for is kept, so that replicas of two configurations do not take turns.
    """
    if material.ca is None:
        return material
    all_names = [*names, *sorted(pki.names(material.leaf.certificate) - set(names))][:NAMES]

    def leaf_by(ca: pki.Pair) -> pki.Pair:
        return pki.mint_leaf(ca, names=all_names, now=now, life=leaf_life)

    if now >= pki.ends(material.ca.certificate):  # nobody was there to renew in time: nothing to overlap with
        return mint(names=all_names, now=now, ca_life=ca_life, leaf_life=leaf_life)
    step = material
    if step.next_ca is None and now >= pki.due(material.ca.certificate):
        next_ca = pki.mint_ca(now=now, life=ca_life)
        trusted = [*pki.split(step.trusted), next_ca.certificate]
        step = replace(step, next_ca=next_ca, trusted=pki.bundle(trusted, now=now))
    elif step.next_ca is not None and now >= pki.begun(step.next_ca.certificate) + overlap:
        trusted = [step.next_ca.certificate, *pki.split(step.trusted)]
        return Material(ca=step.next_ca, leaf=leaf_by(step.next_ca), trusted=pki.bundle(trusted, now=now))
    missing = set(names) - pki.names(material.leaf.certificate)
    if missing or now >= _leaf_due(material):
        living = pki.bundle(pki.split(step.trusted), now=now)  # without those that have ended
        step = replace(step, leaf=leaf_by(material.ca), trusted=living)
    return step


def _leaf_due(material: Material) -> datetime:
    """A leaf that ends with its CA cannot be bettered by that CA: the next one will sign a new one."""
    assert material.ca is not None
    leaf_ends = pki.ends(material.leaf.certificate)
    if leaf_ends >= pki.ends(material.ca.certificate):
        return leaf_ends
    return pki.due(material.leaf.certificate)


class Certificates:
    """The serving certificate of this replica. ``context`` is for the server; it is reloaded in place."""

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        names: Sequence[str],
        secret: str = SECRET,
        ca_life: timedelta = CA_LIFE,
        leaf_life: timedelta = LEAF_LIFE,
        overlap: timedelta = OVERLAP,
        refresh_s: float = REFRESH_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``names``: DNS names and addresses that clients use. ``overlap`` must be several ``refresh_s``."""
        if overlap.total_seconds() < 2 * refresh_s:
            raise ValueError("a new CA must be trusted for at least two refreshes before it signs")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._kube = kube.room("certificates")
        self._namespace, self._secret = namespace, secret
        self._names = list(names)
        self._lives = {"ca_life": ca_life, "leaf_life": leaf_life}
        self._overlap, self._refresh_s, self._now = overlap, refresh_s, now
        self._material: Material | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def ready(self) -> bool:
        """Whether there is a certificate to serve with that has not ended."""
        return self._material is not None and self.expires_at > self._now()

    @property
    def ca_bundle(self) -> bytes:
        """PEM of every CA that clients must trust. Empty before the first `refresh`."""
        return self._material.trusted if self._material else b""

    @property
    def expires_at(self) -> datetime:
        """When the serving certificate ends; `refresh` must have succeeded once."""
        assert self._material is not None
        return pki.ends(self._material.leaf.certificate)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the bundle or the certificate has changed."""
        self._listeners.append(listener)

    async def refresh(self) -> None:
        """Read the Secret, make or renew what is due, and load the result into ``context``.

        Raises:
            BadCertificates: the Secret is somebody else's and unusable.
            KubeError: the server did not let us.
        """
        for _ in range(5):
            try:
                material = await self._read_or_renew()
            except (Conflict, Exists, Replaced):
                continue  # another replica was quicker: read what it wrote
            self._use(material)
            return
        raise KubeError(409, reason="Conflict", message=f"Secret {self._secret} keeps changing")

    async def run(self) -> None:
        """Refresh for ever. The last good certificate is served through every failure."""
        while True:
            await asyncio.sleep(self._refresh_s * random.uniform(0.8, 1.2))
            try:
                await self.refresh()
            except Exception as error:
                log.warning(
                    "certificates not refreshed",
                    secret=self._secret,
                    error=f"{type(error).__name__}: {error}",
                )

    async def _read_or_renew(self) -> Material:
        secret = await self._kube.find(paths.secret(self._namespace, self._secret))
        held = _unpacked(secret) if secret else self._material
        if secret is None and held is not None and held.ca is None:
            return held  # its owner will write it again
        if held is None:
            if secret and _foreign(secret):
                raise BadCertificates(f"Secret {self._secret} has no usable tls.crt, tls.key and ca.crt")
            held = mint(names=self._names, now=self._now(), **self._lives)
            wanted = held
        else:
            wanted = renewed(held, names=self._names, now=self._now(), overlap=self._overlap, **self._lives)
            if secret and wanted is held:
                return held
        await self._write(secret, wanted)
        log.info(
            "certificates written", secret=self._secret, ends=pki.ends(wanted.leaf.certificate).isoformat()
        )
        return wanted

    async def _write(self, secret: Obj | None, material: Material) -> None:
        data = _packed(material)
        if secret is None:
            new = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": self._secret,
                    "namespace": self._namespace,
                    "labels": {"app.kubernetes.io/managed-by": "nebula"},
                },
                "type": "kubernetes.io/tls",
                "data": data,
            }
            await self._kube.create(paths.secrets(self._namespace), new)
        else:
            changed = secret | {"data": (secret.get("data") or {}) | data}
            await self._kube.replace(paths.secret(self._namespace, self._secret), changed)

    def _use(self, material: Material) -> None:
        before, self._material = self._material, material
        if before == material:
            return
        if before is None or before.leaf != material.leaf:
            _load(self.context, material.leaf)
        for listener in self._listeners:
            listener()


def _packed(material: Material) -> dict[str, str]:
    """The Secret's data. Keys that are not needed any more are emptied, since a merge keeps them."""
    ca, next_ca = material.ca, material.next_ca
    fields = {
        "ca.crt": material.trusted,
        "ca.key": ca.key if ca else b"",
        "ca-next.crt": next_ca.certificate if next_ca else b"",
        "ca-next.key": next_ca.key if next_ca else b"",
        "tls.crt": material.leaf.certificate,
        "tls.key": material.leaf.key,
    }
    return {name: base64.b64encode(value).decode() for name, value in fields.items()}


def _unpacked(secret: Obj) -> Material | None:
    """What the Secret holds; None when it is empty or makes no sense."""
    data = secret.get("data") or {}

    def field(name: str) -> bytes:
        try:
            return base64.b64decode(data.get(name) or "", validate=True)
        except binascii.Error:
            return b""

    leaf = pki.Pair(field("tls.crt"), field("tls.key"))
    trusted = pki.split(field("ca.crt"))
    if not trusted or not pki.belongs(leaf):
        return None
    if not field("ca.key"):
        return Material(trusted=field("ca.crt"), leaf=leaf, ca=None)
    pairs = (pki.Pair(one, field("ca.key")) for one in trusted)
    ca = next((pair for pair in pairs if pki.belongs(pair)), None)
    if ca is None or not pki.signed_by(leaf.certificate, ca.certificate):
        return None
    next_ca = pki.Pair(field("ca-next.crt"), field("ca-next.key"))
    return Material(
        trusted=field("ca.crt"), leaf=leaf, ca=ca, next_ca=next_ca if pki.belongs(next_ca) else None
    )


def _foreign(secret: Obj) -> bool:
    data = secret.get("data") or {}
    return bool(data.get("tls.crt")) and not data.get("ca.key")


def _load(context: ssl.SSLContext, pair: pki.Pair) -> None:
    """Load a pair that is only in memory: the library takes files only. New connections use it at once."""
    content = pair.certificate + pair.key
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("serving-certificate")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return
    with tempfile.TemporaryDirectory() as folder:  # private to us, and gone at the end of the block
        path = Path(folder, "pair.pem")
        path.write_bytes(content)
        context.load_cert_chain(path)
