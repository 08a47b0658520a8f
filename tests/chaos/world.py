"""The whole system for tests that break it: a cluster, a Postgres, a cloud, and controllers as processes.

Each test has a namespace, an installation (a Lease and Secret of its own) and a database of its own; cluster,
server and cloud are shared. What is asserted comes from the cloud's own books, from live reads of the API
server, and from rows. A wait is for a condition, with a bound; meanwhile a controller that ended by itself,
as a starved leader does, is started again, as a cluster would.
"""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from app.api import keys
from app.inventory.identity import parse
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.errors import Exists, KubeError, Replaced
from app.kube.lease import EPOCH
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from hack.controller import Controller
from tests.chaos import bounds
from tests.support.clouds import FakeCloud

PROVIDER = "fake"
NODE = keys.node_name(PROVIDER)
POOL = "gpu"
TEMPLATE = "chaos_template"
WITHIN_S = 90.0
EVERY_S = 0.1
# What a database that is away, or is killed in the middle of a word, raises at us.
DATABASE_AWAY = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
ENDS_BY_ITSELF = (1, 70)  # a duty failed, or a leader could not stop in time: a cluster starts it again

# The fast profile, but for the Lease and for what a machine under load could be late with; and the ledger and
# the offers, which nothing here waits for, less often: they are most of what an idle leader costs.
PATIENT = {
    "NEBULA_LEDGER_EVERY_S": "1",
    "NEBULA_OFFERS_EVERY_S": "5",
    "NEBULA_LEASE_DURATION_S": "15",
    "NEBULA_LEASE_DEADLINE_S": "10",
    "NEBULA_LEASE_RENEW_S": "1",
    "NEBULA_UNBOUND_AFTER_S": "60",
}
# For tests about leadership: a Lease that is taken over in seconds.
QUICK = PATIENT | {
    "NEBULA_LEASE_DURATION_S": "5",
    "NEBULA_LEASE_DEADLINE_S": "4",
    "NEBULA_LEASE_RENEW_S": "0.5",
}

CLOUD: dict[str, Any] = {
    "cloud": PROVIDER,
    "account": "acct-1",
    "life": {"boot_s": 0},
    "lag": {"list_create_s": 1.0, "get_create_s": 1.0, "list_terminate_s": 0.5},
    "offers": [{"accelerator": "H100", "counts": [1], "usd_per_hour": {"OnDemand": "4.00"}}],
}
TOKENS = {**CLOUD, "idempotent_for_s": 60}


@dataclass(slots=True, kw_only=True)
class World:
    """One test's part of it. ``kept`` are the controllers started again if they end by themselves."""

    kube: Kube
    cluster: Cluster
    postgres: DevPostgres
    cloud: FakeCloud
    folder: Path
    namespace: str
    system: str
    database: str
    webhook: str  # the address of the webhook server that both replicas' configurations name
    account_options: str = ""  # further options of the account, as ``,NAME=VALUE``
    controllers: list[Controller] = field(default_factory=list)
    kept: list[Controller] = field(default_factory=list)
    tending: asyncio.Lock = field(default_factory=asyncio.Lock)

    # --- controllers ------------------------------------------------------------------------------

    def controller(
        self,
        name: str = "one",
        *,
        webhook: str | None = None,
        options: dict[str, str] = PATIENT,
        cloud: FakeCloud | None = None,
        url: str | None = None,
        kubeconfig: Path | None = None,
    ) -> Controller:
        """A replica. The first serves the webhooks at the address that the configurations name.

        ``webhook``: another address to listen on, while the configurations still name the common one.
        ``cloud``, ``url`` and ``kubeconfig``: another cloud, or way to the database or API server, than the
        others'.
        """
        cloud = cloud or self.cloud
        other = f"{PROVIDER}={cloud.simulator},url={cloud.url},list_every_s=0.2,calls_per_s=100"
        other += self.account_options
        made = Controller(
            self.folder / name,
            kubeconfig=kubeconfig or self.cluster.kubeconfig,
            database_url=url or self.postgres.url_of(self.database),
            clouds={PROVIDER: cloud.url} if cloud.simulator == "fake" else {},
            others=[other] if cloud.simulator != "fake" else [],
            options={
                **options,
                "RUNPOD_API_KEY": "any",
                "NEBULA_NAMESPACE": self.system,
                "NEBULA_IDENTITY": name,
                "NEBULA_WEBHOOK_BIND": webhook or self.webhook,
                "NEBULA_WEBHOOK_URL": options.get("NEBULA_WEBHOOK_URL", f"https://{self.webhook}"),
            },
        )
        self.controllers.append(made)
        return made

    async def start(self, controller: Controller, *, keep: bool = True, **how: Any) -> None:
        """Start it; ``keep``: again, too, when it ends by itself. ``how`` is that of `Controller.start`."""
        await asyncio.to_thread(controller.start, **how)
        if keep:
            self.kept.append(controller)

    async def kill(self, controller: Controller) -> None:
        """SIGKILL, and the Lease is free at once, as if its time had passed: nobody is left to hold it."""
        self.unkeep(controller)
        await asyncio.to_thread(controller.kill)
        await self.free_lease()

    async def stop(self, controller: Controller) -> None:
        self.unkeep(controller)
        await asyncio.to_thread(controller.stop)

    async def died(self, controller: Controller) -> None:
        """It was killed by the step that it was told to die at, not by anything else."""
        code = await asyncio.to_thread(controller.await_end)
        assert code == -signal.SIGKILL, f"ended with {code}, not at its step; see {controller.log}"
        await self.free_lease()

    def unkeep(self, controller: Controller) -> None:
        if controller in self.kept:
            self.kept.remove(controller)

    async def tend(self) -> None:
        """Start again whatever ended by itself."""
        async with self.tending:
            for controller in list(self.kept):
                if not controller.running and controller in self.kept:
                    code = await asyncio.to_thread(controller.await_end)
                    assert code in ENDS_BY_ITSELF, f"ended with {code}; see {controller.log}"
                    await asyncio.to_thread(controller.start, wait=False)

    async def stood_still(self, controller: Controller) -> None:
        """It has stopped itself at its step."""
        process = psutil.Process(controller.pid)
        await self.until("the process stands still", lambda: process.status() == psutil.STATUS_STOPPED)

    # --- the Lease --------------------------------------------------------------------------------

    @property
    def _lease(self) -> str:
        return paths.lease(self.system, keys.LEASE_NAME)

    async def free_lease(self) -> None:
        with suppress(Replaced):  # nobody has led yet
            await self.kube.patch(self._lease, {"spec": {"holderIdentity": ""}}, kind="merge")

    async def leads(self, controller_name: str) -> bool:
        lease = await self.kube.find(self._lease)
        holder = ((lease or {}).get("spec") or {}).get("holderIdentity") or ""
        return holder.startswith(f"{controller_name}_")

    async def lease_epoch(self) -> int:
        lease = await self.kube.get(self._lease)
        return int(lease["metadata"]["annotations"][EPOCH])

    async def epoch_is_settled(self) -> bool:
        """Whether Lease and store carry one epoch."""
        rows = await self.rows("select epoch from installation")
        return [row["epoch"] for row in rows] == [await self.lease_epoch()]

    # --- objects ----------------------------------------------------------------------------------

    async def create_pod(self, name: str, *, owned: bool = True, **spec: Any) -> None:
        """A Pod that asks for one H100; repeated while the webhook that must see it is away.

        ``owned``: by something that makes no other. One that nobody owns is rented for while it is gated.
        ``spec``: further fields of its spec.
        """
        metadata: Obj = {"name": name, "labels": _LABELS}
        if owned:
            metadata["ownerReferences"] = [await self._owner()]
        await self.create(
            paths.pods(self.namespace),
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _SPEC | spec},
        )

    async def _owner(self) -> Obj:
        """A ConfigMap: it is there, so that nobody collects the Pods as garbage."""
        path = f"/api/v1/namespaces/{self.namespace}/configmaps"
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
        with suppress(Exists):
            await self.kube.create(path, body)
        found = await self.kube.get(f"{path}/owner")
        ref = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": found["metadata"]["uid"]}
        return ref | {"controller": True}

    async def create_pods(self, *names: str) -> None:
        await asyncio.gather(*(self.create_pod(name) for name in names))

    async def create_deployment(self, *, replicas: int) -> None:
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "work"},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": _LABELS},
                "template": {"metadata": {"labels": _LABELS}, "spec": _SPEC},
            },
        }
        await self.create(self._deployments, body)

    async def scale(self, replicas: int) -> None:
        body = {"spec": {"replicas": replicas}}
        await self.kube.patch(f"{self._deployments}/work", body, kind="merge")

    @property
    def _deployments(self) -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/deployments"

    async def delete_pods(self, *names: str) -> None:
        for name in names:
            with suppress(Replaced):
                await self.kube.delete(paths.pod(self.namespace, name))

    async def create(self, path: str, body: Obj) -> None:
        """Create it; repeated while the webhook that must see it is away."""

        async def accepted() -> bool:
            try:
                await self.kube.create(path, body)
            except Exists:
                return True  # an earlier try was answered too late
            except KubeError as error:
                if "webhook" in str(error):
                    return False
                raise
            return True

        await self.until("the webhooks answer", accepted)

    async def pods(self) -> list[Obj]:
        return await self._list(paths.pods(self.namespace))

    async def pod(self, name: str) -> Obj:
        return await self.kube.get(paths.pod(self.namespace, name))

    async def ready(self) -> set[str]:
        """The names of the Pods that are Ready and stay."""
        return {
            pod["metadata"]["name"]
            for pod in await self.pods()
            if "deletionTimestamp" not in pod["metadata"]
            and any(
                c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ()
            )
        }

    async def claims(self) -> list[Obj]:
        found = await self._list(paths.nodeclaims())
        return [claim for claim in found if claim["spec"]["podRef"]["namespace"] == self.namespace]

    async def claim_of(self, pod: str) -> Obj:
        (claim,) = [one for one in await self.claims() if one["spec"]["podRef"]["name"] == pod]
        return claim

    async def _list(self, path: str) -> list[Obj]:
        return [item async for page in self.kube.list_pages(path) for item in page["items"]]

    # --- rows -------------------------------------------------------------------------------------

    async def rows(self, query: str) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self._dsn(self.database))
        try:
            return list(await connection.fetch(query))
        finally:
            await connection.close()

    async def copy_database(self, name: str) -> str:
        """A copy of the database as it is now, while nobody uses it; its URL."""
        copied = f"{self.database}_{name}"
        await self.administer(f'create database "{copied}" template "{self.database}"')
        return copied

    async def empty_database(self) -> str:
        """A new database with nothing in it; its name."""
        made = f"{self.database}_empty"
        await self.administer(f'create database "{made}"')
        return made

    async def put_back(self, copied: str) -> None:
        """The database becomes what the copy is, under whoever works with it."""
        await self.administer(
            f'drop database "{self.database}" with (force)',
            f'create database "{self.database}" template "{copied}"',
        )

    async def administer(self, *statements: str) -> None:
        """Run statements beside all databases."""
        connection = await asyncpg.connect(self._dsn(DevPostgres.database))
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    @property
    def postgres_address(self) -> str:
        """The Unix socket that the server listens at."""
        return f"{self.postgres.host}/.s.PGSQL.{self.postgres.port}"

    def _dsn(self, database: str) -> str:
        return self.postgres.url_of(database).replace("postgresql+asyncpg", "postgresql")

    # --- what must be true ------------------------------------------------------------------------

    async def until(
        self, what: str, holds: Callable[[], bool | Awaitable[bool]], *, within_s: float = WITHIN_S
    ) -> None:
        """Wait for what must come true. An API server that is away is only slow.

        Raises:
            AssertionError: it did not; with the ends of the controllers' logs.
        """
        deadline = time.monotonic() + within_s
        while True:
            await self.tend()
            with suppress(KubeError):
                held = holds()
                if await held if isinstance(held, Awaitable) else held:
                    return
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within_s:g} s: {what}\n{await self.told()}")
            await asyncio.sleep(EVERY_S)

    async def until_ready(self, *names: str, within_s: float = WITHIN_S) -> None:
        async def holds() -> bool:
            return await self.ready() >= set(names)

        await self.until(f"Ready: {', '.join(names)}", holds, within_s=within_s)

    async def until_ready_count(self, count: int, *, within_s: float = WITHIN_S) -> None:
        async def holds() -> bool:
            return len(await self.ready()) == count

        await self.until(f"{count} Pods Ready", holds, within_s=within_s)

    async def until_gone(self, *names: str) -> None:
        """The Pods are deleted, and their machines gone by the cloud's own books."""
        uids = {
            one["metadata"]["uid"] for one in await self.claims() if one["spec"]["podRef"]["name"] in names
        }

        async def holds() -> bool:
            left = {pod["metadata"]["name"] for pod in await self.pods()} & set(names)
            return not left and not uids & set(claim_uids(await self.cloud.alive()))

        await self.until(f"gone: {', '.join(names)}", holds)

    async def one_machine_for_each_pod(self, *, ever: int | None = None) -> None:
        """By the cloud's books: one machine for each claim, one claim for each Pod, and (``ever``) none more.

        No identity was ever given to two machines.
        """
        machines, claims = await self.cloud.machines(), await self.claims()
        alive = sorted(claim_uids(machine for machine in machines if machine["state"] != "gone"))
        assert alive == sorted(claim["metadata"]["uid"] for claim in claims)
        pods = {pod["metadata"]["uid"] for pod in await self.pods()}
        assert sorted(claim["spec"]["podRef"]["uid"] for claim in claims) == sorted(pods)
        names = [machine["name"] for machine in machines]
        assert len(names) == len(set(names))
        if ever is not None:
            assert len(machines) == ever

    async def each_attempt_was_sent_once(self) -> None:
        """For a cloud whose tokens mean nothing: a second send would be a second machine."""
        creates = await self.cloud.creates()
        assert set(creates.values()) <= {1}, creates

    async def until_nothing_is_left(self) -> None:
        """No Pod, claim or machine; and the rows say so too. (Bindings go with their claims, by the cluster's
        own garbage collection.)"""

        since = await bounds.now(self.rows)

        async def holds() -> bool:
            return not await self.pods() and not await self.claims()

        await self.until("no Pod and no claim", holds)
        # The finalizers have gone: by then every machine was gone, and the rows had said so.
        assert await self.cloud.alive() == []
        assert await self.rows("select claim_name, state from rental where state <> 'ended'") == []
        assert await self.rows("select resource_id from run where gone_at is null") == []
        assert await self.rows("select claim_uid from provision_attempt where outcome is null") == []
        await bounds.nobody_was_forgotten(self.rows, since=since)

    async def told(self) -> str:
        """What a failed wait shows: objects, the cloud, and how the logs end."""
        lines = []
        with suppress(KubeError):
            for pod in await self.pods():
                conditions = pod["status"].get("conditions") or []
                lines.append(f"pod {pod['metadata']['name']}: {pod['status'].get('phase')} {conditions}")
            for claim in await self.claims():
                lines.append(f"claim {claim['metadata']['name']}: {json.dumps(claim.get('status'))}")
        with suppress(Exception):
            lines += [f"machine {m['name']}: {m['state']}" for m in await self.cloud.machines()]
        for controller in self.controllers:
            if controller.log.exists():
                tail = controller.log.read_text(errors="replace").splitlines()[-40:]
                lines += [f"--- {controller.log} (running: {controller.running})", *tail]
        return "\n".join(lines)

    # --- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the controllers, and take away what a failed test has left."""
        for controller in self.controllers:
            if controller.running:
                with suppress(ProcessLookupError):
                    controller.go_on()
            await asyncio.to_thread(controller.kill)
        with suppress(Replaced):
            await self.kube.delete(f"{self._deployments}/work")
        await self.purge()
        await self.take_away(paths.nodepool(POOL))
        for path in (
            paths.mutating_webhook(keys.MUTATING_WEBHOOK_CONFIGURATION),
            paths.validating_webhook(keys.VALIDATING_WEBHOOK_CONFIGURATION),
        ):
            with suppress(Replaced):
                await self.kube.delete(path)

    async def purge(self) -> None:
        """Take away the namespace's claims and Pods, whatever state they are in."""
        for claim in await self.claims():
            await self.take_away(paths.nodeclaim(claim["metadata"]["name"]))
        for pod in await self.pods():
            with suppress(Replaced):
                await self.kube.delete(paths.pod(self.namespace, pod["metadata"]["name"]), grace_s=0)

    async def take_away(self, path: str) -> None:
        """Delete it now, finalizers or not."""
        with suppress(Replaced):
            await self.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
            await self.kube.delete(path)


_LABELS = {
    keys.ENABLED_LABEL: keys.ENABLED,
    keys.NODE_POOL_LABEL: POOL,
    keys.ACCELERATOR_TYPE_LABEL: "h100",
}
_SPEC: Obj = {
    "containers": [
        {
            "name": "workload",
            "image": "nvidia/cuda:12.4.1-base-ubuntu22.04",
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        }
    ]
}


def claim_uids(machines: Iterable[dict[str, Any]]) -> list[str]:
    """The claims that the machines' identities name."""
    identities = [parse(machine["name"]) for machine in machines]
    assert None not in identities, "a machine that nobody here ordered"
    return [str(identity.claim_uid) for identity in identities if identity is not None]


def the_pool() -> Obj:
    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": POOL},
        "spec": {"providers": [{"name": PROVIDER}], "capacityTypes": ["OnDemand"], "strategy": "Ordered"},
    }
