"""All virtual nodes of a leader: one for each provider account, started when its account opens.

A node that exists already is looked after from the start, even while its cloud does not answer: a restart in
the middle of a provider's outage must not make running Pods look lost. Everything here shares one watch of
opted-in Pods and one of claims; each node adds a watch of the foreign Pods bound to it, and one of itself.
"""

import asyncio
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from app.api import keys
from app.inventory.accounts import Accounts
from app.inventory.rounds import AccountKey
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError
from app.kube.events import Recorder
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.vnode.lifecycle import CLAIMS_BY_POD, Lifecycle
from app.vnode.node import NodeKeeper, announce
from app.vnode.retire import Retirement
from providers.base import ClaimUid

log = structlog.get_logger()
NOT_OPTED_IN = f"{keys.ENABLED_LABEL}!={keys.ENABLED}"


class VirtualNodes:
    """For one term of leadership; made anew for the next. ``pods`` are the opted-in ones.

    The caches are run by the caller, and must keep spec and status of Pods whole.
    """

    def __init__(
        self,
        *,
        kube: Kube,
        pods: Cache,
        claims: Cache,
        pools: Cache,
        provisioning: Provisioning,
        accounts: Accounts,
        settings: Settings,
        events: Recorder,
        installation: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._kube, self._pods, self._claims, self._pools = kube, pods, claims, pools
        self._provisioning, self._accounts = provisioning, accounts
        self._settings, self._events, self._installation = settings, events, installation
        self._now, self._clock, self._rng = now, clock, rng or random.Random()
        self._lives: dict[str, Lifecycle] = {}
        self._started: set[AccountKey] = set()
        self._opened = asyncio.Event()
        claims.add_index(CLAIMS_BY_POD, lambda claim: (claim["spec"]["podRef"]["uid"],))
        pods.on_change(self._pod_changed)
        claims.on_change(self._claim_changed)
        pools.on_change(lambda _old, _new: self._pools_changed())
        provisioning.on_change(self._machine_changed)
        accounts.on_open(lambda _account: self._opened.set())

    async def run(self) -> None:
        """Start each node when it may be, and keep all of them, until cancelled."""
        names = (_node_name(entry.key) for entry in self._settings.providers)
        await announce(self._kube, self._settings, [name for name in names if name is not None])
        for cache in (self._claims, self._pools, self._pods):
            await cache.synced()
        async with asyncio.TaskGroup() as nodes:
            retirement = Retirement(
                kube=self._kube,
                claims=self._claims,
                settings=self._settings,
                installation=self._installation,
            )
            nodes.create_task(retirement.run(), name="nodes of former providers")
            for key in await self._existing():
                self._start(nodes, key)
            while True:
                self._opened.clear()
                for account in self._accounts:
                    self._start(nodes, account.key)
                await self._opened.wait()

    async def _existing(self) -> list[AccountKey]:
        """The configured accounts whose node an earlier run has made."""
        configured = [entry.key for entry in self._settings.providers]
        while True:
            try:
                names = {
                    node["metadata"]["name"]
                    async for page in self._kube.list_pages(
                        paths.nodes(), labelSelector=f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}"
                    )
                    for node in page["items"]
                }
            except KubeError as error:
                log.warning("virtual nodes not listed", error=str(error))
                await asyncio.sleep(self._settings.backoff_base_s)
            else:
                return [key for key in configured if _node_name(key) in names]

    def _start(self, nodes: asyncio.TaskGroup, key: AccountKey) -> None:
        if key not in self._started:
            self._started.add(key)
            if (name := _node_name(key)) is not None:
                nodes.create_task(self._run_node(name, key), name=f"virtual node {name}")

    async def _run_node(self, name: str, key: AccountKey) -> None:
        """Look after the node's Pods first, then say that it is Ready."""
        foreign = Cache(
            self._kube.room("vnode"),
            paths.pods(),
            label_selector=NOT_OPTED_IN,
            field_selector=f"spec.nodeName={name}",
        )
        keeper = NodeKeeper(
            provider=key[0],
            account=key[1],
            kube=self._kube,
            settings=self._settings,
            installation=self._installation,
            now=self._now,
            clock=self._clock,
        )
        life = self._lives[name] = Lifecycle(
            node=name,
            address=keeper.address,
            key=key,
            kube=self._kube,
            pods=self._pods,
            foreign=foreign,
            claims=self._claims,
            pools=self._pools,
            provisioning=self._provisioning,
            settings=self._settings,
            events=self._events,
            now=self._now,
            clock=self._clock,
            rng=self._rng,
        )
        foreign.on_change(self._pod_changed)
        for pod in self._pods:
            self._pod_changed(None, pod)
        self._provisioning.inventory.on_round(keeper.hearing.take)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(foreign.run(), name=f"watch foreign Pods of {name}")
            tasks.create_task(life.run(), name=f"Pods of {name}")
            await foreign.synced()
            tasks.create_task(keeper.run(), name=f"keep {name}")

    def kill(self, pod_uid: str, message: str, grace_s: float | None = None) -> None:
        """A probe has found the Pod's workload dead. See `Lifecycle.kill`."""
        for life in self._lives.values():
            life.kill(pod_uid, message, grace_s)

    # --- what has changed ---

    def _pod_changed(self, old: Obj | None, new: Obj | None) -> None:
        pod = new or old
        if pod is not None and (life := self._lives.get(pod["spec"].get("nodeName", ""))) is not None:
            life.touch(pod["metadata"]["uid"])

    def _claim_changed(self, old: Obj | None, new: Obj | None) -> None:
        """Only coming, leaving and going matter: the status of claims is written after what we say."""
        claim = new or old
        if claim is None or (old and new and _leaving(old) == _leaving(new)):
            return
        pod_uid = claim["spec"]["podRef"]["uid"]
        if (pod := self._pods.by_uid(pod_uid)) is not None:
            self._pod_changed(None, pod)
        elif (life := self._life_of(claim)) is not None:
            life.touch(pod_uid)

    def _machine_changed(self, uid: ClaimUid) -> None:
        claim = self._claims.by_uid(uid)
        if claim is not None and (life := self._life_of(claim)) is not None:
            life.nudge(claim["spec"]["podRef"]["uid"])

    def _pools_changed(self) -> None:
        for life in self._lives.values():
            life.pools_changed()

    def _life_of(self, claim: Obj) -> Lifecycle | None:
        name = _node_name((claim["spec"]["provider"], claim["spec"].get("account") or keys.DEFAULT_ACCOUNT))
        return self._lives.get(name) if name is not None else None


def _leaving(obj: Obj) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def _node_name(key: AccountKey) -> str | None:
    try:
        return keys.node_name(*key)
    except ValueError as error:
        log.error("no virtual node", provider=key[0], account=key[1], error=str(error))
        return None
