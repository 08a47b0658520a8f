"""A whole controller in one process, but for admission, before two clouds: what Reserve is about.

API server, scheduler, Postgres and the clouds are real and apart. A term of leadership is `World.leading`;
leaving and entering it again is a restart without memory. `Wire` stands between placement and the API server:
it notes each write, and can break off at one of them, before or after the server has carried it out.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.claims.controller import Claims
from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced, Unreachable
from app.placement.constraints import node_view
from app.placement.controller import Placement
from app.vnode.controller import VirtualNodes
from tests.support import composed
from tests.support.clouds import FakeCloud
from tests.support.composed import Composed, until

TIERS = ("Spot", "OnDemand")


class Wire:
    """In front of a client's transport: notes writes as ``POST nodeclaims``, and breaks off when told to."""

    def __init__(self, kube: Kube) -> None:
        self.writes: list[str] = []
        self.broken = asyncio.Event()
        self._transport = kube._transport
        self._break_at: tuple[str, int, bool] | None = None
        self.kube = kube.room("wired")
        self.kube._transport = self  # type: ignore[assignment]

    def break_at(self, what: str, *, nth: int = 1, after_effect: bool) -> None:
        """Break off at the ``nth`` such write from now on, and answer nothing from then on."""
        self._break_at = (what, self.writes.count(what) + nth, after_effect)

    async def send(self, method: str, path: str, **request: Any) -> bytes:
        if self.broken.is_set():
            raise Unreachable("broken off")
        if method == "GET":
            return await self._transport.send(method, path, **request)
        what = f"{method} {_what(path)}"
        self.writes.append(what)
        if self._break_at is None or (what, self.writes.count(what)) != self._break_at[:2]:
            return await self._transport.send(method, path, **request)
        if self._break_at[2]:
            await self._transport.send(method, path, **request)
        self.broken.set()
        raise Unreachable("broken off")

    def lines(self, *args: Any, **kwargs: Any) -> Any:
        return self._transport.lines(*args, **kwargs)


def _what(path: str) -> str:
    parts = path.partition("?")[0].strip("/").split("/")
    kind = next(part for part in parts if part in ("pods", "nodeclaims", "cloudpodbindings"))
    return f"{kind}/status" if parts[-1] == "status" else kind


@dataclass(slots=True, kw_only=True)
class Leading:
    """One term."""

    term: Composed
    wire: Wire


@dataclass(slots=True, kw_only=True)
class World:
    """One test's part of it. The pool lists ``first`` before ``second``, on demand only."""

    kube: Kube
    engine: AsyncEngine
    namespace: str
    clouds: tuple[FakeCloud, FakeCloud]
    installation: str = field(default_factory=new_installation)
    pool: str = field(default_factory=lambda: f"pool-{uuid4().hex[:8]}")
    first: str = field(default_factory=lambda: f"a{uuid4().hex[:8]}")
    second: str = field(default_factory=lambda: f"b{uuid4().hex[:8]}")
    owner: Obj | None = None

    @property
    def one(self) -> FakeCloud:
        return self.clouds[0]

    @property
    def two(self) -> FakeCloud:
        return self.clouds[1]

    # --- what there is ---------------------------------------------------------------------------

    async def make_pool(self, *providers: str, mode: str = "Replace", **failover: str) -> Obj:
        names = providers or (self.first, self.second)
        return await self.kube.create(
            paths.nodepools(),
            {
                "apiVersion": keys.API_VERSION,
                "kind": keys.NODE_POOL,
                "metadata": {"name": self.pool},
                "spec": {
                    "providers": [{"name": name, "regions": ["r1"]} for name in names],
                    "capacityTypes": ["OnDemand"],
                    "failover": {"mode": mode, "blocklistTTL": "600s", **failover},
                },
            },
        )

    async def edit_pool(self, **spec: Any) -> None:
        await self.kube.patch(paths.nodepool(self.pool), {"spec": spec}, kind="merge")

    async def pod(
        self,
        name: str,
        *,
        owned: bool = False,
        gates: tuple[str, ...] = (keys.SCHEDULING_GATE,),
        finalizers: tuple[str, ...] = (),
        **container: Any,
    ) -> Obj:
        """A Pod for one H100 as admission leaves it; ``owned``: by something that makes no other."""
        labels = {
            keys.ENABLED_LABEL: keys.ENABLED,
            keys.NODE_POOL_LABEL: self.pool,
            keys.ACCELERATOR_TYPE_LABEL: "h100",
        }
        metadata: Obj = {"name": name, "labels": labels, "finalizers": list(finalizers)}
        if owned:
            metadata["ownerReferences"] = [await self._owner()]
        spec = {
            "schedulingGates": [{"name": gate} for gate in gates],
            "tolerations": [dict(keys.TOLERATION)],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "workload",
                    "image": composed.IMAGE,
                    "resources": {"limits": {keys.GPU_RESOURCE: "1"}},
                    **container,
                }
            ],
        }
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        return await self.kube.create(paths.pods(self.namespace), body)

    async def _owner(self) -> Obj:
        if self.owner is None:
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
            made = await self.kube.create(f"/api/v1/namespaces/{self.namespace}/configmaps", body)
            ref = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid_of(made)}
            self.owner = ref | {"controller": True}
        return self.owner

    async def sell_out(self, *clouds: FakeCloud) -> None:
        for cloud in clouds:
            await self.set_capacity(cloud, 0)

    async def set_capacity(self, cloud: FakeCloud, units: int | None) -> None:
        for tier in TIERS:
            await cloud.set_capacity(units, tier=tier, accelerator="H100", region="r1")

    # --- what is seen ----------------------------------------------------------------------------

    async def read(self, pod: Obj) -> Obj:
        return await self.kube.get(path_of(pod))

    async def claims_of(self, pod: Obj) -> list[Obj]:
        page = await self.kube.get(paths.nodeclaims())
        own = [claim for claim in page["items"] if claim["spec"]["podRef"]["uid"] == uid_of(pod)]
        return sorted(own, key=lambda claim: claim["metadata"]["creationTimestamp"])

    async def is_gated(self, pod: Obj) -> bool:
        gates = (await self.read(pod))["spec"].get("schedulingGates") or ()
        return keys.SCHEDULING_GATE in [gate["name"] for gate in gates]

    async def until_running(self, pod: Obj) -> Obj:
        async def running() -> Obj | None:
            living = await self.read(pod)
            phase = living.get("status", {}).get("phase")
            assert phase in ("Pending", "Running"), living["status"]
            return living if phase == "Running" else None

        return await until(running, what=f"{pod['metadata']['name']} runs")

    async def until_told(self, pod: Obj, reason: str, *words: str) -> str:
        """What our condition says, once it gives this reason and has these words."""

        async def said() -> str | None:
            for each in (await self.read(pod)).get("status", {}).get("conditions") or ():
                if each.get("reason") == reason and all(word in each["message"] for word in words):
                    return str(each["message"])
            return None

        return await until(said, what=f"{reason} {words}")

    async def until_event(self, pod: Obj, reason: str) -> None:
        async def there() -> bool:
            page = await self.kube.get(paths.events(self.namespace))
            return any(
                each["reason"] == reason and each["involvedObject"].get("uid") == uid_of(pod)
                for each in page["items"]
            )

        await until(there, what=f"Event {reason}")

    async def until_no_claim(self, pod: Obj) -> None:
        async def none() -> bool:
            return not await self.claims_of(pod)

        await until(none, what="no claim of the Pod is left")

    async def until_called(self, cloud: FakeCloud, verb: str, *, times: int = 1) -> None:
        await cloud.until(lambda truth: truth["calls"].get(verb, 0) >= times, what=f"{times} {verb}")

    async def rows(self, query: str, **values: Any) -> list[Any]:
        async with self.engine.connect() as conn:
            return list(await conn.execute(text(query), values))

    # --- who acts --------------------------------------------------------------------------------

    @asynccontextmanager
    async def leading(self, *, ahead: timedelta = timedelta(0), **changes: Any) -> AsyncIterator[Leading]:
        """A term. ``ahead``: how far placement's clock of the day is ahead of everybody's."""
        clouds = {self.first: self.one, self.second: self.two}
        wire = Wire(self.kube)
        async with composed.composed(
            self.kube, self.engine, clouds=clouds, installation=self.installation, **changes
        ) as term:
            own = f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}"
            seen_nodes = Cache(self.kube, paths.nodes(), label_selector=own)
            namespaces = Cache(self.kube, paths.namespaces())
            placement = Placement(
                kube=wire.kube,
                pods=term.pods,
                pools=term.pools,
                claims=term.claims,
                nodes=seen_nodes,
                namespaces=namespaces,
                engine=self.engine,
                offerings=term.offerings,
                provisioning=term.provisioning,
                settings=term.settings,
                installation=self.installation,
                term=term.leader,
                events=term.events,
                now=lambda: datetime.now(UTC) + ahead,
            )
            keeper = Claims(
                kube=self.kube,
                claims=term.claims,
                bindings=term.bindings,
                pods=term.pods,
                pools=term.pools,
                provisioning=term.provisioning,
                accounts_names=term.accounts.names,
                settings=term.settings,
                events=term.events,
            )
            vnodes = VirtualNodes(
                kube=self.kube,
                pods=term.pods,
                claims=term.claims,
                pools=term.pools,
                provisioning=term.provisioning,
                accounts=term.accounts,
                settings=term.settings,
                events=term.events,
                installation=self.installation,
            )
            for duty in (seen_nodes.run(), namespaces.run(), placement.run(), keeper.run(), vnodes.run()):
                term.start(duty)
            await until(lambda: all(_ready(seen_nodes, name) for name in clouds), what="Ready nodes")
            yield Leading(term=term, wire=wire)

    async def close(self) -> None:
        for pod in (await self.kube.get(paths.pods(self.namespace)))["items"]:
            with contextlib.suppress(Replaced):
                await self.kube.patch(path_of(pod), {"metadata": {"finalizers": None}}, kind="merge")
                await self.kube.delete(path_of(pod), grace_s=0)
        page = await self.kube.get(paths.nodeclaims())
        for claim in page["items"]:
            if claim["spec"]["podRef"]["namespace"] == self.namespace:
                await self._take_away(paths.nodeclaim(claim["metadata"]["name"]))
        await self._take_away(paths.nodepool(self.pool))
        for provider in (self.first, self.second):
            with contextlib.suppress(KubeError):
                await self.kube.delete(paths.node(keys.node_name(provider)))
        await self.kube.delete(paths.namespace(self.namespace))

    async def _take_away(self, path: str) -> None:
        with contextlib.suppress(Replaced):
            await self.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
            await self.kube.delete(path)


def _ready(nodes: Cache, provider: str) -> bool:
    node = nodes.get("", keys.node_name(provider))
    if node is None:
        return False
    view = node_view(node)  # a new node carries taints of the cluster's own for a moment
    return view.ready and {taint.key for taint in view.taints} == {keys.TAINT_KEY}


def path_of(pod: Obj) -> str:
    return paths.pod(pod["metadata"]["namespace"], pod["metadata"]["name"])


def uid_of(obj: Obj) -> str:
    return str(obj["metadata"]["uid"])


def leaving(obj: Obj) -> bool:
    return "deletionTimestamp" in obj["metadata"]
