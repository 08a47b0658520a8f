"""Webhooks of ours in front of the session's API server, and Pods to try them with."""

import asyncio
import base64
import contextlib
import inspect
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import orjson
from aiohttp import web

from app.admission.configurations import certificate_names
from app.admission.server import Admission
from app.kube import paths
from app.kube.certificates import Certificates
from app.kube.client import Kube
from app.kube.errors import KubeError, Replaced
from app.settings import Settings
from catalog.catalogue import load
from catalog.offerings import Offerings
from catalog.stock import Stock
from hack.cluster import Cluster

DEADLINE_S = 30.0
GROUP = "nebula.inftyai.com"
DEED = "deed.example.com"  # annotation of a Pod
GATE = {"name": f"{GROUP}/provider-selection"}
ENABLED = {f"{GROUP}/enabled": "true"}
TROUBLES = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for what other processes do; the deadline is only for failures."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            held = condition()
            if inspect.isawaitable(held):
                held = await held
            if held:
                return
            await asyncio.sleep(0.02)


def a_pod(*containers: dict[str, Any], labels=None, annotations=None, **spec) -> dict[str, Any]:
    """An opted-in Pod; a test names only what it is about."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "try-",
            "labels": ENABLED if labels is None else labels,
            "annotations": annotations or {},
        },
        "spec": {"containers": list(containers) or [a_container()], **spec},
    }


def a_container(**changes) -> dict[str, Any]:
    return {"name": "main", "image": "app:1", **changes}


def gated(pod: dict[str, Any]) -> bool:
    return GATE in pod["spec"].get("schedulingGates", [])


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A namespace for Pods, and one for the webhooks' Secret."""

    cluster: Cluster
    kube: Kube
    namespace: str
    system: str
    offerings: Offerings = field(default_factory=Offerings)

    @property
    def stock(self) -> Stock:
        """Two accounts, of which the offers are not known unless a test puts them into ``offerings``."""
        configured = frozenset({("aws", "default"), ("modal", "default")})
        return Stock(offerings=self.offerings, catalogue=load(), configured=configured)

    async def create(self, pod: dict[str, Any], *, dry: bool = False) -> dict[str, Any]:
        params = {"dryRun": "All"} if dry else None
        return await self.kube.create(paths.pods(self.namespace), pod, params=params)

    async def refused(self, pod: dict[str, Any]) -> str:
        """What a client is told of a Pod that must not be created."""
        try:
            await self.create(pod)
        except KubeError as error:
            return str(error)
        raise AssertionError("the Pod was created")

    def settings(self, *, port: int = 0, system: str | None = None) -> Settings:
        """For webhooks by URL: ours on loopback, or where somebody's cluster reaches this machine."""
        namespace = system or self.system
        if self.cluster.webhook_url:
            bind = f":{urlsplit(self.cluster.webhook_url).port or 443}"
            return Settings(namespace=namespace, webhook_bind=bind, webhook_url=self.cluster.webhook_url)
        return Settings(
            namespace=namespace,
            webhook_bind=f"127.0.0.1:{port}",
            webhook_url=f"https://127.0.0.1:{port}",
            backoff_base_s=0.05,
            backoff_max_s=0.2,
        )

    def admission(
        self, settings: Settings | None = None, *, certificates: Certificates | None = None
    ) -> Admission:
        return Admission(
            kube=self.kube,
            settings=settings or self.settings(),
            stock=self.stock,
            certificates=certificates,
        )

    def certificates(self, **changes: Any) -> Certificates:
        settings = self.settings()
        names = certificate_names(namespace=self.system, url=settings.webhook_url, service="")
        return Certificates(self.kube, namespace=self.system, names=names, **changes)

    async def asked(self) -> None:
        """Return once the API server asks the webhooks about new Pods: it learns of them by a watch."""

        async def answers() -> bool:
            try:
                return gated(await self.create(a_pod(), dry=True))
            except KubeError:
                return False

        async def judges() -> bool:
            try:
                await self.create(a_pod(hostNetwork=True), dry=True)
            except KubeError as error:
                return "spec.hostNetwork" in str(error)
            return False

        await until(answers)
        await until(judges)


@asynccontextmanager
async def world(cluster: Cluster, kube: Kube) -> AsyncIterator[World]:
    names = [f"{use}-{uuid4().hex[:8]}" for use in ("admission", "admission-system")]
    for name in names:
        await kube.create(
            paths.namespaces(), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
    # Pods are refused before it is there, whatever webhooks say.
    account = f"/api/v1/namespaces/{names[0]}/serviceaccounts/default"
    await until(lambda: _exists(kube, account))
    made = World(cluster=cluster, kube=kube, namespace=names[0], system=names[1])
    try:
        yield made
    finally:
        for name in names:
            await kube.delete(paths.namespace(name))


@asynccontextmanager
async def served(admission: Admission) -> AsyncIterator[Admission]:
    """``admission`` runs inside the block; its configurations stay behind, as they do in a cluster."""
    running = asyncio.create_task(led(admission))
    try:
        ready = asyncio.create_task(admission.wait_ready())
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), await running
        yield admission
    finally:
        await stopped(running)


async def led(admission: Admission) -> None:
    """Run it as the replica that leads."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(admission.run())
        tasks.create_task(admission.keep())


async def stopped(running: asyncio.Task[None]) -> None:
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@asynccontextmanager
async def unconfigured_after(kube: Kube) -> AsyncIterator[None]:
    """Whatever happened inside, no other test's Pods are sent to webhooks of ours afterwards."""
    try:
        yield
    finally:
        for path in (
            paths.mutating_webhook("nebula-mutating-webhook-configuration"),
            paths.validating_webhook("nebula-validating-webhook-configuration"),
        ):
            with contextlib.suppress(Replaced):
                await kube.delete(path)


@asynccontextmanager
async def another_webhook(world: World, ours: Admission, *, patches: dict[str, Any]) -> AsyncIterator[None]:
    """Somebody else's mutating webhook: applies to a Pod the patch that its annotation `DEED` names."""
    patches = patches | {"mark": [{"op": "add", "path": "/metadata/annotations/marked", "value": "yes"}]}

    async def review(request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())["request"]
        deed = asked["object"]["metadata"].get("annotations", {}).get(DEED)
        response = {"uid": asked["uid"], "allowed": True}
        if deed is not None:
            patch = base64.b64encode(orjson.dumps(patches[deed])).decode()
            response |= {"patchType": "JSONPatch", "patch": patch}
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def marks() -> bool:
        pod = await world.create(a_pod(labels={}, annotations={DEED: "mark"}), dry=True)
        return "marked" in pod["metadata"]["annotations"]

    async def is_silent() -> bool:
        return not await marks()

    app = web.Application()
    app.router.add_post("/", review)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    host = urlsplit(ours.url).hostname
    await web.TCPSite(runner, host, 0, ssl_context=ours.certificates.context).start()
    webhook = {
        "name": "else.example.com",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {
            "url": f"https://{host}:{runner.addresses[0][1]}/",
            "caBundle": base64.b64encode(ours.certificates.ca_bundle).decode(),
        },
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
        ],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "zz-somebody-else"},  # they are called in the order of their names
        "webhooks": [webhook],
    }
    await world.kube.create(paths.mutating_webhooks(), configuration)
    try:
        await until(marks)
        yield
    finally:
        await world.kube.delete(paths.mutating_webhook("zz-somebody-else"))
        await until(is_silent)
        await runner.cleanup()


async def certificate_at(port: int, *, trusted: bytes) -> bytes:
    """The certificate that a client meets there, which must be signed by one of ``trusted``."""
    context = ssl.create_default_context(cadata=trusted.decode())
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        presented = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
        await writer.wait_closed()
    assert presented is not None
    return presented


async def _exists(kube: Kube, path: str) -> bool:
    return await kube.find(path) is not None
