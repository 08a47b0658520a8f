"""Keeps our webhook configurations as they should be: created when missing, patched only where they differ.

What we do not name is left alone: defaults of the server, labels of whoever installed us, and match
expressions that a cloud's own admission control adds to selectors (it would add them again, for ever).
A ``caBundle`` that trusts more than ours is kept: another replica may have read a newer one.

A cluster has one installation. The configurations name its namespace, and as long as its Secret is there,
nobody else writes them: two would point every Pod at each other's webhooks in turn.
"""

import asyncio
import base64
import binascii
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from app.api import keys
from app.kube import paths, pki
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict, Exists, KubeError, Replaced
from app.kube.installation import INSTALLATION_SECRET, installation_of

log = structlog.get_logger()

REFRESH_S = 60.0
_ADDED_TO = "matchExpressions"  # the lists that others may add to

_COLLECTIONS: dict[str, tuple[Callable[[], str], Callable[[str], str]]] = {
    "MutatingWebhookConfiguration": (paths.mutating_webhooks, paths.mutating_webhook),
    "ValidatingWebhookConfiguration": (paths.validating_webhooks, paths.validating_webhook),
}


class OtherInstallation(Exception):
    """The cluster has another installation already, in another namespace; the message says where."""


async def other_installation(kube: Kube, *, namespace: str) -> str | None:
    """Why an installation in ``namespace`` must not start: the cluster has one elsewhere. None: it may.

    Raises:
        KubeError: the server did not tell.
    """
    for name, (_, path_of) in (
        (keys.MUTATING_WEBHOOK_CONFIGURATION, _COLLECTIONS["MutatingWebhookConfiguration"]),
        (keys.VALIDATING_WEBHOOK_CONFIGURATION, _COLLECTIONS["ValidatingWebhookConfiguration"]),
    ):
        found = await kube.find(path_of(name))
        if found is not None and (why := await _belongs_elsewhere(kube, found, namespace=namespace)):
            return why
    return None


async def _belongs_elsewhere(kube: Kube, configuration: Obj, *, namespace: str) -> str | None:
    there = _namespace_of(configuration)
    if there in (None, namespace):
        return None
    installation = await installation_of(kube, namespace=there)
    if installation is None:  # it was removed, and has left this behind
        return None
    return (
        f"this cluster has an installation of Nebula already, {installation} in namespace {there}, and can"
        f" have only one: use it (--namespace {there}), or uninstall it and then delete its Secret"
        f" {there}/{INSTALLATION_SECRET}"
    )


def _namespace_of(configuration: Obj) -> str | None:
    """Of the installation that wrote it; None where neither a note of ours nor a Service tells."""
    noted = (configuration["metadata"].get("annotations") or {}).get(keys.NAMESPACE_ANNOTATION)
    if noted:
        return str(noted)
    for hook in configuration.get("webhooks") or ():
        if service := hook["clientConfig"].get("service"):
            return str(service["namespace"])
    return None


class WebhookKeeper:
    """Keeps ``configurations``, given without caBundle; ``ca_bundle`` gives the PEM text of the moment."""

    def __init__(
        self,
        kube: Kube,
        configurations: Sequence[Obj],
        *,
        namespace: str,
        ca_bundle: Callable[[], bytes],
        refresh_s: float = REFRESH_S,
    ) -> None:
        """``namespace`` is the installation's own."""
        self.applied = asyncio.Event()  # set each time that everything was found, or made, right
        self.in_place = False  # whether the last look found, or left, everything right
        self._kube = kube.room("webhooks")
        self._namespace = namespace
        self._configurations = [_noted(configuration, namespace) for configuration in configurations]
        self._ca_bundle = ca_bundle
        self._refresh_s = refresh_s
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look at once: the bundle has changed."""
        self._woken.set()

    async def apply(self) -> None:
        """Make the server's configurations right. Safe to repeat, and to run on several replicas.

        Raises:
            OtherInstallation: they are another installation's.
            KubeError: the server did not let us.
        """
        self.in_place = False
        for configuration in self._configurations:
            await self._apply_one(configuration)
        self.in_place = True
        self.applied.set()

    async def missing(self) -> str | None:
        """What keeps the API server from asking a replica with our bundle; None when nothing does.

        For replicas that stand by: whose address the configurations name is their writer's to say.

        Raises:
            KubeError: the server did not tell.
        """
        for configuration in self._configurations:
            name = configuration["metadata"]["name"]
            current = await self._kube.find(_COLLECTIONS[configuration["kind"]][1](name))
            if current is None:
                return f"{name} is not there yet: the leader makes it once it has seen its database"
            if elsewhere := await _belongs_elsewhere(self._kube, current, namespace=self._namespace):
                return elsewhere
            bundles = [
                _decoded(hook["clientConfig"].get("caBundle")) for hook in current.get("webhooks") or ()
            ]
            ours = pki.fingerprints(self._ca_bundle())
            if not bundles or not all(ours <= pki.fingerprints(bundle) for bundle in bundles):
                return f"{name} does not trust our certificate yet: the leader mends that"
        return None

    async def run(self) -> None:
        """Apply at once, at each `wake`, and every ``refresh_s``.

        Raises:
            OtherInstallation: the cluster has another one: nothing may be done here.
        """
        while True:
            self._woken.clear()
            try:
                await self.apply()
            except OtherInstallation as error:  # both have started at the same moment, or one was moved
                log.critical("the cluster has another installation", error=str(error))
                raise
            except KubeError as error:
                log.warning("webhook configurations not kept", error=str(error))
            try:
                async with asyncio.timeout(self._refresh_s * random.uniform(0.8, 1.2)):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def remove(self) -> None:
        """Delete the configurations, so that no Pod waits for a webhook that is not there any more."""
        for configuration in self._configurations:
            _, path_of = _COLLECTIONS[configuration["kind"]]
            try:
                await self._kube.delete(path_of(configuration["metadata"]["name"]))
            except Replaced:
                continue

    async def _apply_one(self, configuration: Obj) -> None:
        collection, path_of = _COLLECTIONS[configuration["kind"]]
        path = path_of(configuration["metadata"]["name"])
        for _ in range(5):
            wanted = with_bundle(configuration, self._ca_bundle())
            current = await self._kube.find(path)
            if current is not None:
                elsewhere = await _belongs_elsewhere(self._kube, current, namespace=self._namespace)
                if elsewhere is not None:
                    raise OtherInstallation(elsewhere)
            try:
                if current is None:
                    await self._kube.create(collection(), wanted)
                elif patch := difference(current, wanted):
                    patch["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
                    await self._kube.patch(path, patch, kind="merge", metadata_only=True)
                else:
                    return
                log.info("webhook configuration written", name=configuration["metadata"]["name"])
                return
            except (Conflict, Exists, Replaced):
                continue
        raise KubeError(409, reason="Conflict", message=f"{path} keeps changing")


def _noted(configuration: Obj, namespace: str) -> Obj:
    """A copy that names the installation that it belongs to."""
    noted = copy.deepcopy(configuration)
    noted["metadata"].setdefault("annotations", {})[keys.NAMESPACE_ANNOTATION] = namespace
    return noted


def with_bundle(configuration: Obj, bundle: bytes) -> Obj:
    """A copy in which every webhook trusts ``bundle`` (PEM)."""
    wanted = copy.deepcopy(configuration)
    for webhook in wanted["webhooks"]:
        webhook["clientConfig"]["caBundle"] = base64.b64encode(bundle).decode()
    return wanted


def difference(current: Obj, wanted: Obj) -> Obj | None:
    """A merge patch that brings ``current`` to ``wanted``; None when it is there."""
    metadata: Obj = {}
    for field in ("labels", "annotations"):
        held = current["metadata"].get(field) or {}
        values = wanted["metadata"].get(field) or {}
        if changed := {key: value for key, value in values.items() if held.get(key) != value}:
            metadata[field] = changed
    webhooks = current.get("webhooks") or []
    same = [hook["name"] for hook in webhooks] == [hook["name"] for hook in wanted["webhooks"]] and all(
        _covers(held, hook) for held, hook in zip(webhooks, wanted["webhooks"], strict=True)
    )
    if same and not metadata:
        return None
    return {"metadata": metadata} if same else {"metadata": metadata, "webhooks": wanted["webhooks"]}


def _covers(held: Any, wanted: Any, *, field: str = "") -> bool:
    """Whether ``held`` says all that ``wanted`` says."""
    if field == "caBundle":
        return pki.fingerprints(_decoded(wanted)) <= pki.fingerprints(_decoded(held))
    if isinstance(wanted, dict):
        return isinstance(held, dict) and all(
            _covers(held.get(key), value, field=key) for key, value in wanted.items()
        )
    if isinstance(wanted, list) and isinstance(held, list):
        if field == _ADDED_TO:
            return all(element in held for element in wanted)
        return len(held) == len(wanted) and all(map(_covers, held, wanted))
    return bool(held == wanted)


def _decoded(text: str | None) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except binascii.Error:
        return b""
