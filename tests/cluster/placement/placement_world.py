"""A cluster with providers that exist only as virtual nodes and offerings, and placement running in-process.

The API server, the scheduler and Postgres are real. `Wire` stands between placement and the API server, notes
each write, and can break off at one of them, before or after the server has carried it out, for good: what
the process had in memory is then lost with it, as in a crash.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import Replaced, Unreachable
from app.kube.events import Recorder
from app.placement.controller import Placement
from app.settings import Settings, load
from catalog.offerings import Offerings
from providers.base import Accelerator, Offering, Tier, Traits

DEADLINE_S = 20.0
INSTALLATION = "testtestaa"
H100X8 = Accelerator(type="H100", count=8)
FAST = load({"profile": "fast"}, {})
UNTIL_CALLED = 600.0  # seconds that no test lives


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What ``condition`` gives once it is true; fails if it never is."""
    async with asyncio.timeout(DEADLINE_S):
        while not (held := await condition()):
            await asyncio.sleep(0.02)
        return held


@dataclass(slots=True)
class ATerm:
    """Leadership as the manager would hand it out."""

    epoch: int | None
    leads: bool = True
    asked: int = 0

    def valid(self) -> bool:
        self.asked += 1
        return self.leads

    async def was_asked(self) -> bool:
        return self.asked > 0


class Wire:
    """In front of a client's transport: notes writes as ``POST nodeclaims``, and breaks when told to."""

    def __init__(self, kube: Kube) -> None:
        self.writes: list[str] = []
        self.broken = asyncio.Event()
        self._transport = kube._transport
        self._break_at: int | None = None
        self._after_effect = False
        self.kube = kube.room("wired")
        self.kube._transport = self  # type: ignore[assignment]

    def break_at(self, nth: int, *, after_effect: bool) -> None:
        """Break off at the ``nth`` write from now on, and answer nothing from then on."""
        self._break_at, self._after_effect = len(self.writes) + nth, after_effect

    async def send(self, method: str, path: str, **request: Any) -> bytes:
        if self.broken.is_set():
            raise Unreachable("broken off")
        if method == "GET":
            return await self._transport.send(method, path, **request)
        self.writes.append(f"{method} {_what(path)}")
        if len(self.writes) != self._break_at:
            return await self._transport.send(method, path, **request)
        if self._after_effect:
            await self._transport.send(method, path, **request)
        self.broken.set()
        raise Unreachable("broken off")

    def lines(self, *args: Any, **kwargs: Any) -> Any:
        return self._transport.lines(*args, **kwargs)


def _what(path: str) -> str:
    """``pods/status`` of ``/api/v1/namespaces/x/pods/y/status``."""
    parts = path.partition("?")[0].strip("/").split("/")
    kinds = ("pods", "nodeclaims", "cloudpodbindings")
    kind = next(part for part in parts if part in kinds)
    return f"{kind}/status" if parts[-1] == "status" else kind


@dataclass(slots=True, kw_only=True)
class Running:
    """One replica's placement."""

    placement: Placement
    wire: Wire
    term: ATerm


@dataclass(slots=True, kw_only=True)
class World:
    """What a test has, under names that no other test uses."""

    kube: Kube
    engine: AsyncEngine
    namespace: str
    epoch: int
    pool: str = field(default_factory=lambda: f"pool-{uuid4().hex[:8]}")
    offerings: Offerings = field(default_factory=Offerings)
    providers: list[str] = field(default_factory=list)
    extra_namespaces: list[str] = field(default_factory=list)

    # --- what there is ---------------------------------------------------------------------------

    async def provider(self, *regions: str, traits: Traits | None = None) -> str:
        """A new provider that offers eight H100 in both tiers, with its virtual node, Ready and untainted."""
        name = f"p-{uuid4().hex[:8]}"
        self.providers.append(name)
        rows = [
            Offering(
                provider=name,
                account="default",
                region=region,
                tier=tier,
                accelerator=H100X8,
                shape="h100x8",
                meters=(),
            )
            for region in regions or ("",)
            for tier in Tier
        ]
        traits = traits or Traits(tiers=frozenset(Tier))
        self.offerings.put(name, "default", traits=traits, offerings=rows)
        await self._node(name)
        return name

    async def _node(self, provider: str) -> None:
        node = keys.node_name(provider)
        taint = {"key": keys.TAINT_KEY, "value": provider, "effect": keys.TAINT_EFFECT}
        await self.kube.create(
            paths.nodes(),
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node, "labels": keys.placement_labels(provider)},
                "spec": {"taints": [taint]},
            },
        )
        amounts = {"cpu": "100", "memory": "1Ti", "pods": "100", keys.GPU_RESOURCE: "100"}
        ready = {"type": "Ready", "status": "True", "reason": "Test"}
        status = {"conditions": [ready], "capacity": amounts, "allocatable": amounts}
        await self.kube.patch(paths.node_status(node), {"status": status}, kind="strategic")

        async def untainted() -> bool:
            spec = (await self.kube.get(paths.node(node)))["spec"]
            return spec.get("taints") == [taint]

        await until(untainted)

    async def make_pool(self, *providers: str | Obj, **spec: Any) -> Obj:
        entries = [{"name": entry} if isinstance(entry, str) else entry for entry in providers]
        return await self.kube.create(
            paths.nodepools(),
            {
                "apiVersion": keys.API_VERSION,
                "kind": keys.NODE_POOL,
                "metadata": {"name": self.pool},
                "spec": {"providers": entries, "capacityTypes": ["Spot", "OnDemand"]} | spec,
            },
        )

    async def pod(
        self,
        name: str,
        *,
        namespace: str | None = None,
        gates: tuple[str, ...] = (keys.SCHEDULING_GATE,),
        owner: Obj | None = None,
        labels: Obj | None = None,
        cpu: str = "1",
        **spec: Any,
    ) -> Obj:
        """A Pod as admission leaves it."""
        metadata: Obj = {
            "name": name,
            "labels": {
                keys.ENABLED_LABEL: keys.ENABLED,
                keys.NODE_POOL_LABEL: self.pool,
                keys.ACCELERATOR_TYPE_LABEL: "h100",
            }
            | (labels or {}),
        }
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        toleration = {"key": keys.TAINT_KEY, "operator": "Exists", "effect": keys.TAINT_EFFECT}
        limits = {keys.GPU_RESOURCE: "8", "cpu": cpu}
        container = {"name": "workload", "image": "example", "resources": {"limits": limits}}
        return await self.kube.create(
            paths.pods(namespace or self.namespace),
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata,
                "spec": {
                    "schedulingGates": [{"name": gate} for gate in gates],
                    "tolerations": [toleration],
                    "containers": [container],
                    "automountServiceAccountToken": False,
                }
                | spec,
            },
        )

    # --- what is seen ----------------------------------------------------------------------------

    async def read(self, pod: Obj) -> Obj:
        return await self.kube.get(path_of(pod))

    async def claims_of(self, pod: Obj) -> list[Obj]:
        page = await self.kube.get(paths.nodeclaims())
        return [claim for claim in page["items"] if claim["spec"]["podRef"]["uid"] == uid_of(pod)]

    async def claim_of(self, pod: Obj) -> Obj:
        """The one claim of the Pod."""
        (claim,) = await self.claims_of(pod)
        return claim

    async def bindings_of(self, pod: Obj) -> list[Obj]:
        page = await self.kube.get(paths.cloudpodbindings(pod["metadata"]["namespace"]))
        return [binding for binding in page["items"] if binding["spec"]["podRef"]["uid"] == uid_of(pod)]

    async def lifted(self, pod: Obj) -> Obj:
        """The Pod once our gate is off."""

        async def ungated() -> Obj | None:
            living = await self.read(pod)
            gates = [gate["name"] for gate in living["spec"].get("schedulingGates") or ()]
            return living if keys.SCHEDULING_GATE not in gates else None

        found: Obj = await until(ungated)
        return found

    async def told(self, pod: Obj, reason: str) -> Obj:
        """Our condition on the Pod once it gives this reason."""

        async def said() -> Obj | None:
            conditions = (await self.read(pod)).get("status", {}).get("conditions") or ()
            return next((each for each in conditions if each["reason"] == reason), None)

        found: Obj = await until(said)
        return found

    async def release(self, claim: Obj) -> None:
        """What the claims controller does at the end: the finalizer goes, and so does the claim."""
        path = paths.nodeclaim(claim["metadata"]["name"])
        with contextlib.suppress(Replaced):
            await self.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
            await self.kube.delete(path, uid=uid_of(claim))

    # --- who acts --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def placing(
        self, *, settings: Settings = FAST, engine: AsyncEngine | None = None, everywhere: bool = False
    ) -> AsyncIterator[Running]:
        """Placement of this test's namespace, with caches of its own, for as long as the block lasts."""
        wire = Wire(self.kube)
        term = ATerm(self.epoch)
        selector = f"{keys.ENABLED_LABEL}={keys.ENABLED}"
        caches = {
            "pods": Cache(
                self.kube, paths.pods(None if everywhere else self.namespace), label_selector=selector
            ),
            "pools": Cache(self.kube, paths.nodepools()),
            "claims": Cache(self.kube, paths.nodeclaims()),
            "nodes": Cache(self.kube, paths.nodes()),
        }
        recorder = Recorder(self.kube)
        placement = Placement(
            kube=wire.kube,
            engine=engine or self.engine,
            offerings=self.offerings,
            settings=settings,
            installation=INSTALLATION,
            term=term,
            events=recorder,
            **caches,
        )
        duties = [*(cache.run() for cache in caches.values()), recorder.run(), placement.run()]
        tasks = [asyncio.ensure_future(duty) for duty in duties]
        try:
            yield Running(placement=placement, wire=wire, term=term)
            for task in tasks:
                assert not task.done(), task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        page = await self.kube.get(paths.nodeclaims())
        for claim in page["items"]:
            if claim["spec"]["provider"] in self.providers:
                await self.release(claim)
        with contextlib.suppress(Replaced):
            await self.kube.delete(paths.nodepool(self.pool))
        for provider in self.providers:
            with contextlib.suppress(Replaced):
                await self.kube.delete(paths.node(keys.node_name(provider)))
        for namespace in (self.namespace, *self.extra_namespaces):
            for pod in (await self.kube.get(paths.pods(namespace)))["items"]:
                with contextlib.suppress(Replaced):
                    await self.kube.delete(path_of(pod), grace_s=0)
            await self.kube.delete(paths.namespace(namespace))


def path_of(pod: Obj) -> str:
    return paths.pod(pod["metadata"]["namespace"], pod["metadata"]["name"])


def uid_of(obj: Obj) -> str:
    uid: str = obj["metadata"]["uid"]
    return uid
