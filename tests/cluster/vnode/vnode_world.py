"""A cluster with one virtual node and its cloud; everything but placement and the claims room runs.

API server, scheduler, controller manager, Postgres and cloud are real and apart. What those two rooms would
do is done by hand here: a Pod is made gated, its claim with its UID, then the gate goes. `Wire` stands
between the virtual nodes and the API server and notes each write; it can also let something happen right
before one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.inventory.rounds import Judged
from app.kube import paths
from app.kube.cache import Cache
from app.kube.claims import ClaimDoor
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError
from app.kube.events import Recorder
from app.provisioning.service import Provisioning
from app.settings import Settings, load
from app.store.engine import create_engine
from app.store.installation import get_or_create, next_epoch
from app.vnode.controller import VirtualNodes
from catalog.offerings import Offerings
from catalog.refresh import follow
from tests.support.clouds import FakeCloud

DEADLINE_S = 30.0
GATE = "tests/hold"


@dataclass(slots=True)
class Leader:
    """Leadership as the manager would hand it out."""

    epoch: int | None = None
    leads: bool = True

    def valid(self) -> bool:
        return self.leads


class Wire:
    """In front of a client's transport: notes writes as ``PATCH pods/status``, and what was read of a user's.

    ``before`` and ``before_read`` may let something happen first, or raise what the server could have said.
    """

    def __init__(self, kube: Kube) -> None:
        self.writes: list[tuple[str, str]] = []  # what, and the object's name
        self.reads: list[str] = []  # ``secrets/NAME`` and ``configmaps/NAME``
        self.before: Callable[[str, str], Awaitable[None]] | None = None
        self.before_read: Callable[[str], None] | None = None
        self._transport = kube._transport
        self.kube = kube.room("wired")
        self.kube._transport = self  # type: ignore[assignment]

    def about(self, name: str) -> list[str]:
        """The writes to Pods, claims and Events of this name (that of an Event begins with its object's)."""
        return [
            what
            for what, whose in self.writes
            if (whose == name or whose.startswith(f"{name}.")) and what.split()[1] != "leases"
        ]

    async def send(self, method: str, path: str, **request: Any) -> bytes:
        if method != "GET":
            what, name = _what(path)
            if not name and request.get("data"):
                name = _name_in(request["data"])
            if self.before is not None:
                await self.before(f"{method} {what}", name)
            self.writes.append((f"{method} {what}", name))
        elif (read := "/".join(path.partition("?")[0].split("/")[-2:])).startswith(
            ("secrets/", "configmaps/")
        ):
            self.reads.append(read)
            if self.before_read is not None:
                self.before_read(read)
        return await self._transport.send(method, path, **request)

    def lines(self, *args: Any, **kwargs: Any) -> Any:
        return self._transport.lines(*args, **kwargs)


def _what(path: str) -> tuple[str, str]:
    parts = path.partition("?")[0].strip("/").split("/")
    kinds = ("pods", "nodeclaims", "events", "nodes", "leases")
    at = next(index for index, part in enumerate(parts) if part in kinds)
    name = parts[at + 1] if len(parts) > at + 1 else ""
    return (f"{parts[at]}/status" if parts[-1] == "status" else parts[at]), name


def _name_in(data: bytes) -> str:
    import orjson

    return str(orjson.loads(data)["metadata"].get("name", ""))


@dataclass(slots=True, kw_only=True)
class World:
    """One test's surroundings, under names that no other test uses."""

    kube: Kube
    engine: AsyncEngine
    cloud: FakeCloud
    installation: str
    namespace: str
    pool: str
    provider: str = field(default_factory=lambda: f"v{uuid4().hex[:8]}")
    leader: Leader = field(default_factory=Leader)
    wire: Wire = field(init=False)
    provisioning: Provisioning = field(init=False)
    vnodes: VirtualNodes = field(init=False)
    made_claims: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wire = Wire(self.kube)

    @property
    def node(self) -> str:
        return keys.node_name(self.provider)

    # --- what placement would do -----------------------------------------------------------------

    async def pod(
        self,
        *,
        name: str = "",
        owner: Obj | None = None,
        finalizers: tuple[str, ...] = (),
        claim: dict[str, Any] | None = None,
        claimed: bool = True,
        labels: dict[str, str] | None = None,
        **spec: Any,
    ) -> Obj:
        """A Pod on its way to the virtual node, with its claim, which ``claim`` changes."""
        metadata: Obj = {
            "name": name or f"pod-{uuid4().hex[:8]}",
            "labels": {keys.ENABLED_LABEL: keys.ENABLED} if labels is None else labels,
            "finalizers": list(finalizers),
        }
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {
                "nodeSelector": keys.placement_labels(self.provider),
                "schedulingGates": [{"name": GATE}],
                "tolerations": [dict(keys.TOLERATION)],
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 30,
                "containers": [{"name": "workload", "image": "nvidia/cuda:12.4.1-base-ubuntu22.04"}],
                **spec,
            },
        }
        pod = await self.kube.create(paths.pods(self.namespace), body)
        if claimed:
            await self.claim(pod, **(claim or {}))
        path = paths.pod(self.namespace, pod["metadata"]["name"])
        return await self.kube.patch(path, {"spec": {"schedulingGates": []}}, kind="merge")

    async def claim(self, pod: Obj, *, pod_uid: str | None = None, **spec: Any) -> Obj:
        metadata = pod["metadata"]
        name = keys.claim_name(metadata["namespace"], metadata["name"])
        body = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_CLAIM,
            "metadata": {"name": name, "finalizers": [keys.CLAIM_FINALIZER]},
            "spec": {
                "podRef": {
                    "namespace": metadata["namespace"],
                    "name": metadata["name"],
                    "uid": pod_uid or metadata["uid"],
                },
                "poolRef": self.pool,
                "provider": self.provider,
                "region": "r1",
                "capacityType": "OnDemand",
                "accelerator": "H100:1",
                **spec,
            },
        }
        self.made_claims.append(name)
        return await self.kube.create(paths.nodeclaims(), body)

    # --- looking ---------------------------------------------------------------------------------

    async def see(self, pod: Obj) -> Obj | None:
        """The very Pod as it is now; None when it is gone."""
        found = await self.kube.find(paths.pod(self.namespace, pod["metadata"]["name"]))
        same = found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"]
        return found if same else None

    async def until(self, pod: Obj, holds: Callable[[Obj], bool]) -> Obj:
        """The Pod, once ``holds`` is true of it."""
        last: Obj | None = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (last := await self.see(pod)) is None or not holds(last):
                    await asyncio.sleep(0.03)
                return last
        except TimeoutError:
            raise AssertionError(f"it did not come true; the Pod is {last and last['status']}") from None

    async def until_ready(self, pod: Obj) -> Obj:
        return await self.until(pod, is_ready)

    async def until_reason(self, pod: Obj, reason: str) -> Obj:
        return await self.until(pod, lambda seen: seen["status"].get("reason") == reason)

    async def until_gone(self, pod: Obj) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while await self.see(pod) is not None:
                    await asyncio.sleep(0.03)
        except TimeoutError:
            raise AssertionError(f"the Pod is still there: {await self.see(pod)}") from None

    async def machine_of(self, pod: Obj) -> str:
        """The id of the Pod's machine, as the ready Pod tells it."""
        ready = await self.until_ready(pod)
        return str(ready["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION])

    async def events(self, pod: Obj) -> list[str]:
        """The reasons of the Pod's Events that we wrote."""
        found = await self.kube.get(
            paths.events(self.namespace),
            fieldSelector=f"involvedObject.uid={pod['metadata']['uid']}",
        )
        return [item["reason"] for item in found["items"] if item["source"].get("component") == "nebula"]

    async def until_event(self, pod: Obj, reason: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while reason not in await self.events(pod):
                await asyncio.sleep(0.05)

    async def until_true(self, holds: Callable[[], Awaitable[Any]]) -> Any:
        """What ``holds`` gives once it is true."""
        async with asyncio.timeout(DEADLINE_S):
            while not (held := await holds()):
                await asyncio.sleep(0.03)
            return held

    async def unknown_rounds(self, number: int) -> None:
        """Wait until so many rounds of our account have come to nothing."""
        await self.rounds(number, whole=False)

    async def rounds(self, number: int, *, whole: bool = True) -> None:
        """Wait for so many rounds of our account, whole ones or such that came to nothing."""
        seen, enough = 0, asyncio.Event()

        def count(judged: Judged) -> None:
            nonlocal seen
            if judged.place.provider == self.provider and (judged.unknown is None) is whole:
                seen += 1
                if seen >= number:
                    enough.set()

        self.provisioning.inventory.on_round(count)
        await asyncio.wait_for(enough.wait(), DEADLINE_S)

    # --- a process -------------------------------------------------------------------------------

    def settings(self, **changes: Any) -> Settings:
        flags = {"profile": "fast", "providers": f"{self.provider}=fake,url={self.cloud.url}"}
        return load(flags, {}).model_copy(update=changes)

    @asynccontextmanager
    async def running(
        self, *, store: bool = True, pods_after: asyncio.Event | None = None, **changes: Any
    ) -> AsyncIterator["World"]:
        """One process's worth; enter again for a restart without memory. ``store``: is there one.

        The watch of Pods begins with ``pods_after``.
        """

        async def watch_pods() -> None:
            if pods_after is not None:
                await pods_after.wait()
            await pods.run()

        settings, kube = self.settings(**changes), self.wire.kube
        engine = self.engine if store else create_engine("postgresql://nobody@127.0.0.1:1/none")
        accounts, offerings = Accounts(settings, self.installation), Offerings()
        self.provisioning = Provisioning(
            accounts=accounts,
            offerings=offerings,
            engine=engine,
            settings=settings,
            installation=self.installation,
            leadership=self.leader,
            port=ClaimDoor(kube),
        )
        if store:
            async with self.engine.begin() as conn:
                await get_or_create(conn, new_id=self.installation)
                self.leader.epoch = await next_epoch(conn, self.leader.epoch or 0)
        else:
            self.leader.epoch = None  # it is written to the store, or it is none
        selector = f"{keys.ENABLED_LABEL}={keys.ENABLED}"
        pods = Cache(kube, paths.pods(), label_selector=selector)
        claims, pools = Cache(kube, paths.nodeclaims()), Cache(kube, paths.nodepools())
        events = Recorder(kube)
        self.vnodes = VirtualNodes(
            kube=kube,
            pods=pods,
            claims=claims,
            pools=pools,
            provisioning=self.provisioning,
            accounts=accounts,
            settings=settings,
            events=events,
            installation=self.installation,
        )
        async with asyncio.TaskGroup() as duties:
            tasks: list[asyncio.Task[None]] = []

            def offer(account: Account) -> None:
                following = follow(
                    offerings,
                    provider=account.provider,
                    account=account.account,
                    turn=lambda: account.budget.take(Urgency.LIST),
                )
                tasks.append(duties.create_task(following))

            accounts.on_open(offer)
            works = [watch_pods(), *(cache.run() for cache in (claims, pools))]
            works += [events.run(), accounts.run(), self.provisioning.run(), self.vnodes.run()]
            tasks += [duties.create_task(work) for work in works]
            try:
                yield self
                await events.flush()
            finally:
                for task in tasks:
                    task.cancel()

    async def clean(self) -> None:
        for name in self.made_claims:
            try:
                await self.kube.patch(paths.nodeclaim(name), {"metadata": {"finalizers": None}}, kind="merge")
                await self.kube.delete(paths.nodeclaim(name))
            except KubeError:
                continue  # gone already
        page = await self.kube.get(paths.pods(self.namespace))
        for pod in page["items"]:
            path = paths.pod(self.namespace, pod["metadata"]["name"])
            try:
                await self.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
                await self.kube.delete(path, grace_s=0)
            except KubeError:
                continue
        for path in (paths.node(self.node), paths.nodepool(self.pool), paths.namespace(self.namespace)):
            try:
                await self.kube.delete(path)
            except KubeError:
                continue


def is_ready(pod: Obj) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def condition_of(pod: Obj, kind: str) -> Obj | None:
    conditions = pod["status"].get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), None)


def state_of(pod: Obj) -> Obj:
    """The state of the one container."""
    state: Obj = pod["status"]["containerStatuses"][0]["state"]
    return state
