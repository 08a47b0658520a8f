"""Keeps our webhook configurations as they should be: created when missing, patched only where they differ.

What we do not name is left alone: defaults of the server, labels of whoever installed us, and match
expressions that a cloud's own admission control adds to selectors (it would add them again, for ever).
A ``caBundle`` that trusts more than ours is kept: another replica may have read a newer one.
"""

import asyncio
import base64
import binascii
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from app.kube import paths, pki
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict, Exists, KubeError, Replaced

log = structlog.get_logger()

REFRESH_S = 60.0
_ADDED_TO = "matchExpressions"  # the lists that others may add to

_COLLECTIONS: dict[str, tuple[Callable[[], str], Callable[[str], str]]] = {
    "MutatingWebhookConfiguration": (paths.mutating_webhooks, paths.mutating_webhook),
    "ValidatingWebhookConfiguration": (paths.validating_webhooks, paths.validating_webhook),
}


class WebhookKeeper:
    """Keeps ``configurations``, given without caBundle; ``ca_bundle`` gives the PEM text of the moment."""

    def __init__(
        self,
        kube: Kube,
        configurations: Sequence[Obj],
        *,
        ca_bundle: Callable[[], bytes],
        refresh_s: float = REFRESH_S,
    ) -> None:
        self.applied = asyncio.Event()  # set each time that everything was found, or made, right
        self.in_place = False  # whether the last look found, or left, everything right
        self._kube = kube.room("webhooks")
        self._configurations = list(configurations)
        self._ca_bundle = ca_bundle
        self._refresh_s = refresh_s
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look at once: the bundle has changed."""
        self._woken.set()

    async def apply(self) -> None:
        """Make the server's configurations right. Safe to repeat, and to run on several replicas.

        Raises:
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
            bundles = [
                _decoded(hook["clientConfig"].get("caBundle")) for hook in current.get("webhooks") or ()
            ]
            ours = pki.fingerprints(self._ca_bundle())
            if not bundles or not all(ours <= pki.fingerprints(bundle) for bundle in bundles):
                return f"{name} does not trust our certificate yet: the leader mends that"
        return None

    async def run(self) -> None:
        """Apply at once, at each `wake`, and every ``refresh_s``."""
        while True:
            self._woken.clear()
            try:
                await self.apply()
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
