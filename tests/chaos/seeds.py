"""One seed: random workloads under random faults, and then the books. `test_seeds` says how many are run.

All seeds share a cluster, a Postgres, a cloud and two replicas of the controller; each has a namespace. What
a seed does is drawn from its number alone, so a failing one is run again with ``SEED=n``. When the faults
have stopped, everything must come to rest by itself; when the workloads are deleted, nothing may be left, and
every machine of the cloud's books must stand in ours, with its beginning, its price and its end.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from app.api import keys
from app.inventory.identity import Identity, parse
from app.kube import paths
from app.kube.client import Obj
from app.kube.errors import KubeError, Replaced
from hack.controller import Controller
from providers.base import ClaimUid
from tests.chaos.world import EVERY_S, World

POOLS = {"gpu": "Replace", "gpu-reserve": "Reserve"}
CLOCKS = timedelta(milliseconds=50)  # the cloud's clock and Postgres's are the same machine's
REST_S = 90.0
STRANGER_UID = ClaimUid("00000000-0000-4000-8000-00000000000a")


@dataclass(frozen=True, slots=True)
class Planted:
    """Machines of other people in our account: none of them may ever be touched."""

    ids: frozenset[str]

    @classmethod
    async def into(cls, world: World) -> "Planted":
        """A plain one, another installation's, one that only looks like ours, and one in another account."""
        installation = (await world.rows("select id from installation"))[0]["id"]
        ours = Identity(installation=installation, claim_uid=STRANGER_UID, attempt=1, sequence=1)
        theirs = Identity(installation="aaaaaaaaaa", claim_uid=STRANGER_UID, attempt=1, sequence=1)
        names = ("training-7", str(theirs), f"{ours}x", str(ours)[:-1] + "1")
        machines = [await world.cloud.plant(name=name) for name in names]
        machines.append(await world.cloud.plant(name=str(theirs), account="acct-2"))
        return cls(frozenset(machine["id"] for machine in machines))

    def untouched(self, machines: list[Obj]) -> bool:
        mine = [machine for machine in machines if machine["id"] in self.ids]
        return len(mine) == len(self.ids) and all(
            machine["state"] == "running" and not machine["terminates"] and not machine["stops"]
            for machine in mine
        )


@dataclass(slots=True)
class Seed:
    """One number's namespace, run to its end. ``story`` is what was done, for whoever has to look at it."""

    number: int
    world: World
    replicas: dict[str, Controller]
    planted: Planted
    story: list[str] = field(default_factory=list)
    wanted: dict[str, Obj] = field(default_factory=dict)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.number)

    async def run(self) -> None:
        """Raises AssertionError with the story in it."""
        try:
            await self._begin()
            for _ in range(self.rng.randint(3, 6)):
                await self._do(self.rng.choice(self._faults()))
                if self.rng.random() < 0.6:
                    await self._do(self.rng.choice(self._users()))
                await self._moment()
            await self._calm()
            await self._await("all is at rest", self._at_rest)
            await self._delete_all()
            await self._await("nothing is left", self._nothing_left)
            await self._await("every run has its end", self._runs_ended)
            await self._books()
        except AssertionError as error:
            told = [f"SEED={self.number}", *self.story, *await self._warnings(), str(error)]
            raise AssertionError("\n".join(told)) from error

    async def _warnings(self) -> list[str]:
        """What the cluster itself complains of."""
        with suppress(KubeError):
            found = await self.world.kube.get(f"/api/v1/namespaces/{self.world.namespace}/events")
            return [
                f"event {one.get('lastTimestamp')} {one['involvedObject'].get('name')} {one['message'][:200]}"
                for one in found["items"]
                if one.get("type") == "Warning"
            ]
        return []

    async def _await(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        began_s = time.monotonic()
        await self.world.until(what, holds, within_s=REST_S)
        self.story.append(f"-- {what} after {time.monotonic() - began_s:.1f} s")

    # --- the workloads ----------------------------------------------------------------------------

    async def _begin(self) -> None:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.world.namespace}}
        await self.world.kube.create(paths.namespaces(), body)
        for index in range(self.rng.randint(1, 3)):
            await self._do(self._create(self.rng.choice(sorted(_KINDS)), index))

    def _create(self, kind: str, index: int) -> Callable[[], Awaitable[str]]:
        pool, count = self.rng.choice(sorted(POOLS)), self.rng.randint(1, 3)
        ends = self.rng.random() < 0.5

        async def create() -> str:
            name = f"{kind.lower()}-{index}"
            image = image_of(self.world.namespace)
            body = _KINDS[kind](name, image=image, pool=pool, count=count, ends=ends)
            path = self._path(kind)
            await self.world.create(path, body)
            self.wanted[name] = body
            return f"create {name} x{count} in {pool}"

        return create

    def _path(self, kind: str) -> str:
        namespace = self.world.namespace
        return {
            "Deployment": f"/apis/apps/v1/namespaces/{namespace}/deployments",
            "StatefulSet": f"/apis/apps/v1/namespaces/{namespace}/statefulsets",
            "Job": f"/apis/batch/v1/namespaces/{namespace}/jobs",
            "Pod": paths.pods(namespace),
        }[kind]

    # --- what is done to them ---------------------------------------------------------------------

    async def _do(self, what: Callable[[], Awaitable[str]]) -> None:
        try:
            self.story.append(await what())
        except Replaced:
            self.story.append("(it was gone)")

    async def _moment(self) -> None:
        """Some calls of the cloud, or half a second: a moment in events dies at as many places."""
        calls = await self._calls() + self.rng.randint(1, 8)
        async with asyncio.timeout(10):
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rng.random() * 0.8):
                    while await self._calls() < calls:
                        await asyncio.sleep(EVERY_S)

    async def _calls(self) -> int:
        return sum((await self.world.cloud.truth())["calls"].values())

    def _faults(self) -> list[Callable[[], Awaitable[str]]]:
        """The cloud goes wrong most often; what stops a process or a server takes seconds each."""
        cloud = [self._cloud_fault] * 12
        machines = [self._preempt, self._exit, self._vanish]
        return [*cloud, *machines, self._kill, self._kill, self._term, self._pause, self._database, self._api]

    def _users(self) -> list[Callable[[], Awaitable[str]]]:
        return [self._delete_pod, self._delete_pod, self._force_pod, self._scale, self._delete_workload]

    async def _cloud_fault(self) -> str:
        rng = self.rng
        kind = rng.choice(
            [
                "lost",
                "lost",
                "cut",
                "status",
                "status",
                "error_body",
                "garbage",
                "throttle",
                "hide",
                "truncate",
                "foreign",
                "refuse",
                "expired",
                "ignored",
                "slow",
                "phantom",
            ]
        )
        verb = {
            "hide": "list",
            "truncate": "list",
            "foreign": "list",
            "ignored": "terminate",
            "refuse": "create",
            "phantom": "create",
        }.get(kind) or rng.choice(["create", "create", "list", "get", "terminate", "terminate"])
        fields: dict[str, Any] = {"verb": verb, "times": rng.randint(1, 4)}
        if kind == "status":
            fields |= {"when": rng.choice(["before", "after"]), "status": rng.choice([500, 502, 503])}
        if kind == "throttle":
            fields |= {"retry_after_s": 0.2}
        if kind == "slow":
            fields |= {"delay_s": rng.choice([0.5, 3.0])}
        if kind == "refuse":
            fields |= {"code": rng.choice(["capacity", "quota"])}
        if kind in ("lost", "status"):
            fields |= {"skip": rng.randint(0, 2)}
        await self.world.cloud.add_fault(kind, **fields)
        return f"cloud: {kind} {fields}"

    async def _some_machine(self) -> Obj | None:
        running = [one for one in await self._machines() if one["state"] == "running"]
        return self.rng.choice(sorted(running, key=lambda one: str(one["id"]))) if running else None

    async def _preempt(self) -> str:
        machine = await self._some_machine()
        if machine is not None:
            await self.world.cloud.preempt(machine["id"])
        return f"preempt {machine and machine['id']}"

    async def _exit(self) -> str:
        machine, code = await self._some_machine(), self.rng.choice([0, 1, 137])
        if machine is not None:
            await self.world.cloud.exit(machine["id"], code=code)
        return f"exit {machine and machine['id']} {code}"

    async def _vanish(self) -> str:
        """Only a machine that our rows have: of one that nobody ever heard of, nobody can tell."""
        known = {row["resource_id"] for row in await self._runs()}
        machine = await self._some_machine()
        if machine is None or machine["id"] not in known:
            return "vanish nothing"
        await self.world.cloud.remove(machine["id"])
        return f"vanish {machine['id']}"

    async def _leader(self) -> str:
        """The name of the replica that leads, or of any where nobody can tell."""
        with suppress(KubeError):
            for name in self.replicas:
                if await self.world.leads(name):
                    return name
        return next(iter(self.replicas))

    async def _kill(self) -> str:
        name = await self._leader()
        await self.world.kill(self.replicas[name])
        await self.world.start(self.replicas[name], wait=False)
        return f"kill {name}"

    async def _term(self) -> str:
        name = await self._leader()
        await self.world.stop(self.replicas[name])
        await self.world.start(self.replicas[name], wait=False)
        return f"SIGTERM {name}"

    async def _pause(self) -> str:
        """Past its Lease, so that the other one leads when it wakes up; or only for a moment."""
        name, for_s = await self._leader(), self.rng.choice([0.5, 6.0])
        replica = self.replicas[name]
        if not replica.running:
            return "pause nobody"
        replica.pause()
        await asyncio.sleep(for_s)  # the fault itself is a length of time
        replica.go_on()
        return f"pause {name} for {for_s} s"

    async def _database(self) -> str:
        for_s = self.rng.choice([0.0, 2.0])
        await asyncio.to_thread(self.rng.choice([self.world.postgres.stop, self.world.postgres.kill]))
        await asyncio.sleep(for_s)  # as above
        await asyncio.to_thread(self.world.postgres.start)
        return f"Postgres away for {for_s} s"

    async def _api(self) -> str:
        plane = self.world.cluster.control_plane
        assert plane is not None
        await asyncio.to_thread(plane.stop_apiserver)
        await asyncio.to_thread(plane.start_apiserver)
        return "API server restarted"

    async def _some_pod(self) -> str | None:
        names = sorted(pod["metadata"]["name"] for pod in await self.world.pods())
        return self.rng.choice(names) if names else None

    async def _delete_pod(self) -> str:
        name = await self._some_pod()
        if name is not None:
            await self.world.kube.delete(paths.pod(self.world.namespace, name))
            self.wanted.pop(name, None)
        return f"delete Pod {name}"

    async def _force_pod(self) -> str:
        name = await self._some_pod()
        if name is not None:
            await self.world.kube.delete(paths.pod(self.world.namespace, name), grace_s=0)
            self.wanted.pop(name, None)
        return f"force-delete Pod {name}"

    async def _scale(self) -> str:
        scalable = sorted(name for name, body in self.wanted.items() if "replicas" in body["spec"])
        if not scalable:
            return "scale nothing"
        name, replicas = self.rng.choice(scalable), self.rng.randint(0, 3)
        body = self.wanted[name]
        await self.world.kube.patch(
            f"{self._path(body['kind'])}/{name}", {"spec": {"replicas": replicas}}, kind="merge"
        )
        body["spec"]["replicas"] = replicas
        return f"scale {name} to {replicas}"

    async def _delete_workload(self) -> str:
        if len(self.wanted) < 2:
            return "delete no workload"
        name = self.rng.choice(sorted(self.wanted))
        await self._delete(name)
        return f"delete {name}"

    async def _delete(self, name: str) -> None:
        body = self.wanted.pop(name)
        path = f"{self._path(body['kind'])}/{name}?propagationPolicy=Background"
        with suppress(Replaced):
            await self.world.kube.delete(path)

    # --- the end ----------------------------------------------------------------------------------

    async def _calm(self) -> None:
        await self.world.cloud.clear_faults()
        self.story.append("-- the faults stop")

    async def _delete_all(self) -> None:
        for name in list(self.wanted):
            await self._delete(name)
        for pod in await self.world.pods():
            with suppress(Replaced):
                await self.world.kube.delete(paths.pod(self.world.namespace, pod["metadata"]["name"]))
        self.story.append("-- all is deleted")

    async def _machines(self) -> list[Obj]:
        """Those of this namespace, by the claims that their names carry; and any that nobody knows."""
        image = image_of(self.world.namespace)
        return [one for one in await self.world.cloud.machines() if one["image"] == image]

    async def _runs(self) -> list[Any]:
        return await self.world.rows(
            f"select * from run where pod_namespace = '{self.world.namespace}' order by id"
        )

    async def _at_rest(self) -> bool:
        """Every workload has what it asked for; each machine is one live claim's, and none is doubled."""
        pods = await self.world.pods()
        if any("deletionTimestamp" in pod["metadata"] for pod in pods):
            return False
        if not all(_is_ready(pod) or _is_over(pod) for pod in pods):
            return False
        for name, body in self.wanted.items():
            mine = [pod for pod in pods if pod["metadata"]["labels"].get("app") == name]
            ready = sum(_is_ready(pod) for pod in mine)
            if "replicas" in body["spec"] and ready != body["spec"]["replicas"]:
                return False
            if body["kind"] == "Job" and not await self._job_is_over(name):
                return False
            if body["kind"] == "Pod" and not mine:
                return False
        claims = [one for one in await self.world.claims() if "deletionTimestamp" not in one["metadata"]]
        running = {pod["metadata"]["uid"] for pod in pods if not _is_over(pod)}
        claimed = {one["metadata"]["uid"] for one in claims if one["spec"]["podRef"]["uid"] in running}
        alive = [parse(one["name"]) for one in await self._machines() if one["state"] != "gone"]
        uids = sorted(str(identity.claim_uid) for identity in alive if identity)
        return uids == sorted(claimed) and len(running) == len(claimed)

    async def _job_is_over(self, name: str) -> bool:
        job = await self.world.kube.get(f"{self._path('Job')}/{name}")
        states = {one["type"]: one["status"] for one in job["status"].get("conditions") or ()}
        return states.get("Complete") == "True" or states.get("Failed") == "True"

    async def _nothing_left(self) -> bool:
        if await self.world.pods() or await self.world.claims():
            return False
        return all(one["state"] == "gone" for one in await self._machines())

    async def _runs_ended(self) -> bool:
        return all(row["gone_at"] is not None for row in await self._runs())

    async def _books(self) -> None:
        """The cloud's bill against our rows, machine by machine."""
        machines = {str(one["id"]): one for one in await self._machines()}
        runs = {row["resource_id"]: row for row in await self._runs() if row["resource_id"] in machines}
        assert machines.keys() == runs.keys(), f"not in our rows: {machines.keys() - runs.keys()}"
        names = [one["name"] for one in machines.values()]
        assert len(names) == len(set(names)), "one identity, two machines"
        for machine_id, machine in machines.items():
            run, states = runs[machine_id], {one["state"]: _time(one["at"]) for one in machine["history"]}
            began, gone = _time(machine["created_at"]), states["gone"]
            assert run["provider_created_at"] == began, f"{machine_id}: began {began}, {dict(run)}"
            assert run["gone_at"] >= gone - CLOCKS, f"{machine_id}: gone {gone}, {dict(run)}"
            assert run["usd_per_hour"] == Decimal("4.00"), f"{machine_id}: {dict(run)}"
            if machine["terminates"] and run["terminate_asked_at"] is not None:
                assert run["terminate_asked_at"] <= run["gone_at"]
        left = await self.world.rows(
            "select claim_name, state from rental where state <> 'ended'"
            f" and pod_namespace = '{self.world.namespace}'"
        )
        assert left == [], left
        assert self.planted.untouched(await self.world.cloud.machines()), (
            "somebody else's machine was touched"
        )


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _is_ready(pod: Obj) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _is_over(pod: Obj) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def image_of(namespace: str) -> str:
    """Tells a seed's machines apart in the cloud's books."""
    return f"work:{namespace}"


# --- what is created ------------------------------------------------------------------------------


def _template(name: str, *, image: str, pool: str, env: dict[str, str], policy: str | None = None) -> Obj:
    container: Obj = {
        "name": "workload",
        "image": image,
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    labels = {
        "app": name,
        keys.ENABLED_LABEL: keys.ENABLED,
        keys.NODE_POOL_LABEL: pool,
        keys.ACCELERATOR_TYPE_LABEL: "h100",
    }
    spec: Obj = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"metadata": {"labels": labels}, "spec": spec | ({"restartPolicy": policy} if policy else {})}


def _replicated(kind: str) -> Callable[..., Obj]:
    def make(name: str, *, image: str, pool: str, count: int, ends: bool) -> Obj:
        extra: Obj = {"serviceName": name} if kind == "StatefulSet" else {}
        return {
            "apiVersion": "apps/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": {
                "replicas": count,
                "selector": {"matchLabels": {"app": name}},
                "template": _template(name, image=image, pool=pool, env={}),
                **extra,
            },
        }

    return make


def _job(name: str, *, image: str, pool: str, count: int, ends: bool) -> Obj:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": count,
            "parallelism": count,
            "backoffLimit": 20,
            "template": _template(
                name, image=image, pool=pool, env={"FAKE_EXIT_AFTER_S": "0.5"}, policy="Never"
            ),
        },
    }


def _pod(name: str, *, image: str, pool: str, count: int, ends: bool) -> Obj:
    env = {"FAKE_EXIT_AFTER_S": "0.5"} if ends else {}
    template = _template(name, image=image, pool=pool, env=env, policy="Never")
    metadata = {"name": name, **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


_KINDS: dict[str, Callable[..., Obj]] = {
    "Deployment": _replicated("Deployment"),
    "StatefulSet": _replicated("StatefulSet"),
    "Job": _job,
    "Pod": _pod,
}
