"""One leader's parts put together as the manager does, on a real API server, a real Postgres and fake clouds.

`composed` runs everything below the controllers; the test adds the controllers it is about. Entering it again
with the same installation is a restart without memory. `a_claim` and `a_pod` are what placement and users
would have made.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.api.crds import load_crds
from app.api.nodeclaim import NodeClaim
from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.kube import paths
from app.kube.cache import Cache
from app.kube.claims import ClaimDoor, claim_spec
from app.kube.client import Kube, Obj
from app.kube.errors import Exists, Replaced
from app.kube.events import Recorder
from app.placement.objects import binding_of
from app.provisioning.model import Outcome, Policy, Rented, Waiting
from app.provisioning.service import Provisioning
from app.settings import Settings, load
from app.store.engine import begin
from app.store.installation import get_or_create, next_epoch
from catalog.offerings import Offerings
from catalog.refresh import follow
from providers.base import Accelerator, Workload
from tests.support.clouds import FakeCloud

DEADLINE_S = 30.0
IMAGE = "nvidia/cuda:12.4.1-base-ubuntu22.04"
WORKLOAD = Workload(image=IMAGE, accelerator=Accelerator(type="H100", count=1))


async def until(
    condition: Callable[[], Any | Awaitable[Any]], *, within_s: float = DEADLINE_S, what: str = ""
) -> Any:
    """What ``condition`` gives (or its awaitable does) once it is true.

    Raises:
        AssertionError: it never was.
    """
    held: Any = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                held = condition()
                if isinstance(held, Awaitable):
                    held = await held
                if held:
                    return held
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what or condition}") from None


@dataclass(slots=True)
class Leader:
    """Leadership that a test hands out and takes away."""

    epoch: int | None = None
    leads: bool = True

    def valid(self) -> bool:
        return self.leads


@dataclass(slots=True, kw_only=True)
class Composed:
    """The parts of one term. The caches run; ``pods`` holds opted-in Pods of all namespaces."""

    kube: Kube
    engine: AsyncEngine
    settings: Settings
    installation: str
    leader: Leader
    accounts: Accounts
    offerings: Offerings
    provisioning: Provisioning
    events: Recorder
    pods: Cache
    pools: Cache
    claims: Cache
    bindings: Cache
    group: asyncio.TaskGroup
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    watches: dict[Cache, asyncio.Task[Any]] = field(default_factory=dict)

    def start(self, duty: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a duty until this term ends; one that fails fails the test."""
        task = self.group.create_task(duty)
        self.tasks.append(task)
        return task

    def blind(self, cache: Cache) -> None:
        """The cache hears nothing any more; what it holds stays."""
        self.watches[cache].cancel()

    @property
    def door(self) -> ClaimDoor:
        return ClaimDoor(self.kube.room("test"))

    async def ensure(self, claim: Obj, *, ttl_s: float = 30.0) -> Outcome:
        """Rent for the claim as the virtual node would: again until the answer is final."""
        spec = claim_spec(claim)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                outcome = await self.provisioning.ensure(
                    spec, WORKLOAD, port=self.door, policy=Policy(block_ttl_s=ttl_s)
                )
                if not isinstance(outcome, Waiting):
                    return outcome
                await asyncio.sleep(min(outcome.after_s, 0.2))

    async def rent(self, claim: Obj) -> str:
        """The id of the machine that `ensure` has rented.

        Raises:
            AssertionError: nothing was rented.
        """
        outcome = await self.ensure(claim)
        assert isinstance(outcome, Rented), outcome
        return outcome.ref.resource_id


def settings_for(clouds: Mapping[str, FakeCloud], **changes: Any) -> Settings:
    """The fast profile with each cloud under its name."""
    providers = " ".join(f"{name}=fake,url={cloud.url}" for name, cloud in clouds.items())
    return load({"profile": "fast", "providers": providers, **changes}, {})


@asynccontextmanager
async def composed(
    kube: Kube,
    engine: AsyncEngine,
    *,
    clouds: Mapping[str, FakeCloud],
    installation: str,
    epoch: bool = True,
    **changes: Any,
) -> AsyncIterator[Composed]:
    """A new leader. ``epoch`` False: one whose store is away, so that it may not rent."""
    settings = settings_for(clouds, **changes)
    accounts, offerings, leader = Accounts(settings, installation), Offerings(), Leader()
    if epoch:
        async with begin(engine) as conn:
            await get_or_create(conn, new_id=installation)
            leader.epoch = await next_epoch(conn, 0)
    cache = kube.room("cache")
    async with asyncio.TaskGroup() as group:
        made = Composed(
            kube=kube,
            engine=engine,
            settings=settings,
            installation=installation,
            leader=leader,
            accounts=accounts,
            offerings=offerings,
            provisioning=Provisioning(
                accounts=accounts,
                offerings=offerings,
                engine=engine,
                settings=settings,
                installation=installation,
                leadership=leader,
                port=ClaimDoor(kube.room("provisioning")),
            ),
            events=Recorder(kube.room("events")),
            pods=Cache(cache, paths.pods(), label_selector=f"{keys.ENABLED_LABEL}={keys.ENABLED}"),
            pools=Cache(cache, paths.nodepools()),
            claims=Cache(cache, paths.nodeclaims()),
            bindings=Cache(cache, paths.cloudpodbindings()),
            group=group,
        )
        caches = (made.pods, made.pools, made.claims, made.bindings)
        for each in caches:
            made.watches[each] = made.start(each.run())
        for duty in (made.events.run(), accounts.run(), made.provisioning.run()):
            made.start(duty)

        def offer(account: Account) -> None:
            turn = account.budget.take
            provider, name = account.provider, account.account
            made.start(follow(offerings, provider=provider, account=name, turn=lambda: turn(Urgency.LIST)))

        accounts.on_open(offer)
        try:
            for each in caches:
                await each.synced()
            for name in clouds:
                await until(lambda name=name: (row := offerings.get(name, "default")) and row.offerings)
            yield made
        finally:
            for task in made.tasks:
                task.cancel()


async def serve_our_kinds(kube: Kube) -> None:
    """Our CRDs are applied and served."""
    for crd in load_crds():
        await kube.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")
    for crd in load_crds():

        async def established(name: str = crd["metadata"]["name"]) -> bool:
            held = await kube.get(paths.crd(name))
            states = {each["type"]: each["status"] for each in held["status"].get("conditions", ())}
            return states.get("Established") == "True"

        await until(established)


async def purge_claims(kube: Kube) -> None:
    """Every claim goes, whatever its finalizer: what an earlier test left is nothing to this one."""
    async for page in kube.list_pages(paths.nodeclaims()):
        for item in page["items"]:
            name = item["metadata"]["name"]
            try:
                await kube.patch(paths.nodeclaim(name), {"metadata": {"finalizers": []}}, kind="merge")
                await kube.delete(paths.nodeclaim(name))
            except Replaced:
                continue


async def a_namespace(kube: Kube, prefix: str) -> str:
    """The name of a new namespace."""
    name = f"{prefix}-{uuid4().hex[:8]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await kube.create(paths.namespaces(), body)
    return name


async def a_node(kube: Kube, name: str) -> None:
    """The node that Pods are bound to by hand: without it the garbage collector takes them after 40 s."""
    with suppress(Exists):
        await kube.create(paths.nodes(), {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})


async def a_pod(kube: Kube, namespace: str, *, name: str, node: str | None = None, pool: str = "gpu") -> Obj:
    """An opted-in Pod as admission leaves it: gated, or with ``node`` bound there."""
    spec: Obj = {
        "containers": [{"name": "workload", "image": IMAGE}],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "serviceAccountName": "default",
    }
    if node is None:
        spec["schedulingGates"] = [{"name": keys.SCHEDULING_GATE}]
    else:
        spec["nodeName"] = node
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {keys.ENABLED_LABEL: keys.ENABLED, keys.NODE_POOL_LABEL: pool},
        },
        "spec": spec,
    }

    async def created() -> Obj | None:
        try:
            return await kube.create(paths.pods(namespace), body)
        except Exception as error:  # the namespace's service account comes a moment after it
            if "serviceaccount" not in str(error):
                raise
            return None

    pod: Obj = await until(created)
    return pod


async def a_claim(
    kube: Kube,
    pod: Obj,
    *,
    installation: str,
    provider: str,
    name: str | None = None,
    bound: bool = True,
    **spec: Any,
) -> Obj:
    """The claim of a Pod, and with ``bound`` its CloudPodBinding, as placement makes them."""
    metadata = pod["metadata"]
    pool = metadata["labels"][keys.NODE_POOL_LABEL]
    labels = keys.claim_labels(pool=pool, provider=provider, account="default", installation=installation)
    body = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_CLAIM,
        "metadata": {
            "name": name or keys.claim_name(metadata["namespace"], metadata["name"]),
            "labels": labels,
            "finalizers": [keys.CLAIM_FINALIZER],
        },
        "spec": {
            "podRef": {field: metadata[field] for field in ("namespace", "name", "uid")},
            "poolRef": pool,
            "provider": provider,
            "region": "r1",
            "capacityType": "OnDemand",
            "accelerator": "H100:1",
            **spec,
        },
    }
    claim = await kube.create(paths.nodeclaims(), body)
    if bound:
        binding = binding_of(NodeClaim.model_validate(claim), installation=installation)
        await kube.create(paths.cloudpodbindings(metadata["namespace"]), binding)
    return claim
