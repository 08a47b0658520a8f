"""One seed: random workloads under random faults, and then the books. `flock` runs them, side by side.

All seeds share a cluster, a Postgres, a cloud and two replicas of the controller; each has a namespace. Its
schedule is drawn from its number alone, before anything happens; which machine or Pod a step takes depends on
what is there. When the faults have stopped, everything must come to rest by itself; when the workloads are
deleted, nothing may be left; and every machine of the cloud's books must stand in ours, with its beginning,
its price, its end, and its bill to the last digit.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar
from uuid import uuid4

from app.api import keys
from app.inventory.identity import Identity, parse
from app.kube import paths
from app.kube.client import Obj
from app.kube.errors import Exists, Replaced
from app.ledger.rules import dollars
from providers.base import ClaimUid
from tests.chaos.cloud_faults import cloud_fault
from tests.chaos.disasters import Disasters
from tests.chaos.workloads import KINDS, image_of, is_over, is_ready
from tests.chaos.world import DATABASE_AWAY, EVERY_S, World

POOLS = {"gpu": "Replace", "gpu-reserve": "Reserve"}
CLOCKS = timedelta(milliseconds=50)  # the cloud's clock and Postgres's are the same machine's
UNHEARD = timedelta(seconds=5)  # what ends so soon after a restore may have been seen by nobody since
STRANGER_UID = ClaimUid("00000000-0000-4000-8000-00000000000a")
JOB_PATIENCE = 3
ORPHANS = 2  # at one time: more than the sweep ends unasked would wait for a person

Step = Callable[[random.Random], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Seen:
    """The cluster at one moment, by namespace: one look for all seeds."""

    pods: dict[str, list[Obj]]
    claims: dict[str, list[Obj]]

    @classmethod
    async def now(cls, world: World) -> "Seen":
        seen = cls({}, {})
        async for page in world.kube.list_pages(paths.pods()):
            for pod in page["items"]:
                seen.pods.setdefault(pod["metadata"]["namespace"], []).append(pod)
        async for page in world.kube.list_pages(paths.nodeclaims()):
            for claim in page["items"]:
                seen.claims.setdefault(claim["spec"]["podRef"]["namespace"], []).append(claim)
        return seen


@dataclass(frozen=True, slots=True)
class Planted:
    """Machines of other people in our account: none of them may ever be touched."""

    ids: frozenset[str]
    installation: str

    @classmethod
    async def into(cls, world: World) -> "Planted":
        """A plain one, another installation's, one that only looks like ours, and one in another account."""
        installation = (await world.rows("select id from installation"))[0]["id"]
        ours = Identity(installation=installation, claim_uid=STRANGER_UID, attempt=1, sequence=1)
        theirs = Identity(installation="aaaaaaaaaa", claim_uid=STRANGER_UID, attempt=1, sequence=1)
        names = ("training-7", str(theirs), f"{ours}x", str(ours)[:-1] + "1")
        machines = [await world.cloud.plant(name=name) for name in names]
        machines.append(await world.cloud.plant(name=str(theirs), account="acct-2"))
        return cls(frozenset(machine["id"] for machine in machines), installation)

    def untouched(self, machines: list[Obj]) -> bool:
        mine = [machine for machine in machines if machine["id"] in self.ids]
        return len(mine) == len(self.ids) and all(
            machine["state"] == "running" and not machine["terminates"] and not machine["stops"]
            for machine in mine
        )


@dataclass(slots=True)
class Seed:
    """One number's namespace, from its beginning to its end. ``story`` is what was done, for whoever has to
    look at it. The class's facts are those of the fake cloud: another cloud's seeds say otherwise."""

    usd_per_hour: ClassVar[Decimal] = Decimal("4.00")
    tells_bills: ClassVar[bool] = True

    number: int
    world: World
    disasters: Disasters
    planted: Planted
    story: list[str] = field(default_factory=list)
    wanted: dict[str, Obj] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)
    torn: set[str] = field(default_factory=set)  # UIDs of claims whose finalizer was taken off by hand
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.number)

    @property
    def namespace(self) -> str:
        return self.world.namespace

    @property
    def _image(self) -> str:
        return image_of(self.namespace)

    def tell(self, what: str) -> None:
        self.story.append(what)

    async def begin(self) -> None:
        """Its workloads are created."""
        rng = self.rng
        drawn = [
            (rng.choice(sorted(KINDS)), rng.choice(sorted(POOLS)), rng.randint(1, 3), rng.random() < 0.5)
            for _ in range(rng.randint(1, 3))
        ]
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        await self._insist(lambda: self.world.kube.create(paths.namespaces(), body))
        for index, (kind, pool, count, ends) in enumerate(drawn):
            name = f"{kind.lower()}-{index}"
            made = self._dressed(KINDS[kind](name, image=self._image, pool=pool, count=count, ends=ends))
            await self.world.create(self._path(kind), made)
            self.wanted[name] = made
            self.tell(f"create {name} x{count} in {pool}")

    async def disturb(self) -> None:
        """Its three to six faults, with what users do in between."""
        rng = self.rng
        steps: list[tuple[Step, int]] = []
        for _ in range(rng.randint(3, 6)):
            steps.append((rng.choice(self._faults()), rng.randrange(1 << 30)))
            if rng.random() < 0.6:
                steps.append((rng.choice(self._users()), rng.randrange(1 << 30)))
        for step, number in steps:
            self.tell(await step(own := random.Random(number)))
            await self._moment(own)

    def _dressed(self, body: Obj) -> Obj:
        """The workload as its cloud needs it."""
        return body

    def _path(self, kind: str) -> str:
        return {
            "Deployment": f"/apis/apps/v1/namespaces/{self.namespace}/deployments",
            "StatefulSet": f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets",
            "Job": f"/apis/batch/v1/namespaces/{self.namespace}/jobs",
            "Pod": paths.pods(self.namespace),
        }[kind]

    async def _insist(self, call: Callable[[], Awaitable[Any]]) -> bool:
        """Ask until the API server has answered; False: what it was about is not there, or is another."""
        there = True

        async def answered() -> bool:
            nonlocal there
            try:
                await call()
            except Replaced:
                there = False
            except Exists:
                pass
            return True

        await self.world.until("the API server answers", answered)
        return there

    async def _moment(self, rng: random.Random) -> None:
        """Some calls of the cloud, or half a second: a moment in events dies at as many places."""
        calls = await self._calls() + rng.randint(1, 8)
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.8):
                while await self._calls() < calls:
                    await asyncio.sleep(EVERY_S)

    async def _calls(self) -> int:
        told = await self.world.cloud.truth(image="of nobody")
        return sum(told["calls"].values())

    # --- faults -----------------------------------------------------------------------------------

    def _faults(self) -> list[Step]:
        """The cloud goes wrong most often; a disaster is everybody's, and takes seconds."""
        machines: list[Step] = [self._preempt, self._exit, self._vanish, self._orphan]
        return [*[self._cloud_fault] * 9, *machines, self.disasters.strike]

    async def _cloud_fault(self, rng: random.Random) -> str:
        kind, fields = cloud_fault(rng)
        await self.world.cloud.add_fault(kind, **fields)
        return f"cloud: {kind} {fields}"

    async def _some_machine(self, rng: random.Random) -> str | None:
        """One that runs, and that our rows have: of one that nobody ever heard of, nobody can tell."""
        known = {row["resource_id"] for row in await self._runs_if_any()}
        running = sorted(
            str(one["id"])
            for one in await self.machines()
            if one["state"] == "running" and one["id"] in known
        )
        return rng.choice(running) if running else None

    async def _runs_if_any(self) -> list[Any]:
        with suppress(*DATABASE_AWAY):
            return await self._runs()
        return []

    async def _preempt(self, rng: random.Random) -> str:
        machine = await self._some_machine(rng)
        if machine is not None:
            await self.world.cloud.preempt(machine)
        return f"preempt {machine}"

    async def _exit(self, rng: random.Random) -> str:
        machine, code = await self._some_machine(rng), rng.choice([0, 1, 137])
        if machine is not None:
            await self.world.cloud.exit(machine, code=code)
        return f"exit {machine} {code}"

    async def _vanish(self, rng: random.Random) -> str:
        machine = await self._some_machine(rng)
        if machine is not None:
            await self.world.cloud.remove(machine)
        return f"vanish {machine}"

    async def _orphan(self, _rng: random.Random) -> str:
        """A machine of ours that no claim and no row speaks for: as lost claims and lost rows leave one."""
        if self.disasters.orphans >= ORPHANS:
            return "no orphan: there are some"
        self.disasters.orphans += 1
        name = Identity(
            installation=self.planted.installation, claim_uid=ClaimUid(str(uuid4())), attempt=1, sequence=1
        )
        made = await self.world.cloud.plant(name=str(name), image=self._image, accelerator="H100")
        self.orphans.add(str(made["id"]))
        return f"an orphan appears: {made['id']}"

    # --- users ------------------------------------------------------------------------------------

    def _users(self) -> list[Step]:
        pods = [self._delete_pod, self._delete_pod, self._force_pod, self._unlabel]
        workloads = [self._scale, self._delete_workload]
        return [*pods, *workloads, self._lie, self._unfinalize, self._tear, self._delete_claim, self._unbind]

    async def _pods(self, rng: random.Random, *, bound: bool = False) -> str | None:
        """The name of one, or of a ``bound`` one."""

        async def names() -> bool:
            nonlocal found
            pods = await self.world.pods()
            found = sorted(
                pod["metadata"]["name"]
                for pod in pods
                if not bound or (pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"])
            )
            return True

        found: list[str] = []
        await self.world.until("the API server answers", names)
        return rng.choice(found) if found else None

    async def _delete_pod(self, rng: random.Random) -> str:
        name = await self._pods(rng)
        if name is not None:
            await self._insist(lambda: self.world.kube.delete(paths.pod(self.namespace, name)))
            self.wanted.pop(name, None)
        return f"delete Pod {name}"

    async def _force_pod(self, rng: random.Random) -> str:
        name = await self._pods(rng)
        if name is not None:
            await self._insist(lambda: self.world.kube.delete(paths.pod(self.namespace, name), grace_s=0))
            self.wanted.pop(name, None)
        return f"force-delete Pod {name}"

    async def _unlabel(self, rng: random.Random) -> str:
        """A bound one: a gated one would wait for ever, as its owner has asked."""
        name = await self._pods(rng, bound=True)
        if name is not None:
            body = {"metadata": {"labels": {keys.ENABLED_LABEL: None}}}
            path = paths.pod(self.namespace, name)
            await self._insist(lambda: self.world.kube.patch(path, body, kind="merge"))
        return f"take the label off Pod {name}"

    async def _scale(self, rng: random.Random) -> str:
        scalable = sorted(name for name, body in self.wanted.items() if "replicas" in body["spec"])
        if not scalable:
            return "scale nothing"
        name, replicas = rng.choice(scalable), rng.randint(0, 3)
        body = self.wanted[name]
        path, wish = f"{self._path(body['kind'])}/{name}", {"spec": {"replicas": replicas}}
        await self._insist(lambda: self.world.kube.patch(path, wish, kind="merge"))
        body["spec"]["replicas"] = replicas
        return f"scale {name} to {replicas}"

    async def _delete_workload(self, rng: random.Random) -> str:
        if len(self.wanted) < 2:
            return "delete no workload"
        name = rng.choice(sorted(self.wanted))
        await self._delete(name)
        return f"delete {name}"

    async def _delete(self, name: str) -> None:
        body = self.wanted.pop(name)
        path = f"{self._path(body['kind'])}/{name}?propagationPolicy=Background"
        await self._insist(lambda: self.world.kube.delete(path))

    async def _claims_now(self) -> list[Obj]:
        found: list[Obj] = []

        async def answered() -> bool:
            nonlocal found
            found = await self.world.claims()
            return True

        await self.world.until("the API server answers", answered)
        return found

    async def _some_claim(self, rng: random.Random) -> str | None:
        found = sorted(claim["metadata"]["name"] for claim in await self._claims_now())
        return rng.choice(found) if found else None

    async def _lie(self, rng: random.Random) -> str:
        """The mark stays: whoever forges that speaks for the rows themselves."""
        name = await self._some_claim(rng)
        if name is not None:
            lie = {"status": {"phase": "Provisioning", "instanceID": "i-of-somebody"}}
            path = f"{paths.nodeclaim(name)}/status"
            await self._insist(lambda: self.world.kube.patch(path, lie, kind="merge"))
        return f"write a lie into the status of claim {name}"

    async def _unfinalize(self, rng: random.Random) -> str:
        name = await self._some_claim(rng)
        if name is not None:
            await self._take_finalizer(name)
        return f"take the finalizer off claim {name}"

    async def _take_finalizer(self, name: str) -> None:
        none = {"metadata": {"finalizers": None}}
        self.torn |= {
            one["metadata"]["uid"] for one in await self._claims_now() if one["metadata"]["name"] == name
        }
        await self._insist(lambda: self.world.kube.patch(paths.nodeclaim(name), none, kind="merge"))

    async def _tear(self, rng: random.Random) -> str:
        name = await self._some_claim(rng)
        if name is not None:
            await self._take_finalizer(name)
            await self._insist(lambda: self.world.kube.delete(paths.nodeclaim(name)))
        return f"tear claim {name} out, finalizer and all"

    async def _delete_claim(self, rng: random.Random) -> str:
        name = await self._some_claim(rng)
        if name is not None:
            await self._insist(lambda: self.world.kube.delete(paths.nodeclaim(name)))
        return f"delete claim {name}"

    async def _unbind(self, rng: random.Random) -> str:
        name = await self._some_claim(rng)
        if name is not None:
            path = paths.cloudpodbinding(self.namespace, name)
            await self._insist(lambda: self.world.kube.delete(path))
        return f"delete binding {name}"

    # --- the end ----------------------------------------------------------------------------------

    async def delete_all(self) -> None:
        for name in list(self.wanted):
            await self._delete(name)
        for pod in await self.world.pods():
            path = paths.pod(self.namespace, pod["metadata"]["name"])
            await self._insist(lambda path=path: self.world.kube.delete(path))
        self.tell("-- all is deleted")

    async def machines(self) -> list[Obj]:
        """Those of this namespace, by what they run."""
        return await self.world.cloud.machines(image=self._image)

    async def _runs(self) -> list[Any]:
        return await self.world.rows(f"select * from run where pod_namespace = '{self.namespace}'")

    async def is_at_rest(self, seen: Seen) -> bool:
        """Every workload has what it asked for; each machine is one live claim's, and none is doubled."""
        pods = seen.pods.get(self.namespace, [])
        if any("deletionTimestamp" in pod["metadata"] for pod in pods):
            return False
        if not all(is_ready(pod) or is_over(pod) for pod in pods):
            return False
        for name, body in self.wanted.items():
            mine = [pod for pod in pods if pod["metadata"]["labels"].get("app") == name]
            if "replicas" in body["spec"] and sum(map(is_ready, mine)) != body["spec"]["replicas"]:
                return False
            if body["kind"] == "Job" and not await self._job_rests(name, mine):
                return False
            if body["kind"] == "Pod" and not mine:
                return False
        claims = [
            one for one in seen.claims.get(self.namespace, []) if "deletionTimestamp" not in one["metadata"]
        ]
        running = {pod["metadata"]["uid"] for pod in pods if not is_over(pod)}
        claimed = {one["metadata"]["uid"] for one in claims if one["spec"]["podRef"]["uid"] in running}
        alive = [
            parse(one["name"])
            for one in await self.machines()
            if one["state"] != "gone" and one["id"] not in self.orphans
        ]
        uids = sorted(str(identity.claim_uid) for identity in alive if identity)
        return uids == sorted(claimed) and len(running) == len(claimed)

    async def _job_rests(self, name: str, pods: list[Obj]) -> bool:
        """It is over, or between two Pods: after its third that failed its own controller waits for 40 s and
        more before it makes the next."""
        job = await self.world.kube.get(f"{self._path('Job')}/{name}")
        states = {one["type"]: one["status"] for one in job["status"].get("conditions") or ()}
        if states.get("Complete") == "True" or states.get("Failed") == "True":
            return True
        return job["status"].get("failed", 0) >= JOB_PATIENCE and all(map(is_over, pods))

    async def is_nothing_left(self, seen: Seen) -> bool:
        """No Pod, claim or machine, an orphan's neither; and the rows say so too."""
        if seen.pods.get(self.namespace) or seen.claims.get(self.namespace):
            return False
        if any(one["state"] != "gone" for one in await self.machines()):
            return False
        left = await self.world.rows(
            f"select 1 from rental where state <> 'ended' and pod_namespace = '{self.namespace}'"
            f" union all select 1 from run where gone_at is null and pod_namespace = '{self.namespace}'"
        )
        return not left

    async def left(self) -> str:
        """Its rows that are not closed, and what is said of its orphans, for whoever looks at a failure."""
        with suppress(*DATABASE_AWAY):
            rows = await self.world.rows(
                f"select * from rental where state <> 'ended' and pod_namespace = '{self.namespace}'"
            )
            runs = [run for run in await self._runs() if run["gone_at"] is None]
            there = [one["id"] for one in await self.machines() if one["state"] != "gone"]
            orphans = [
                row
                for row in await self.world.rows("select * from orphan_finding")
                if row["resource_id"] in there
            ]
            return "\n".join(str(dict(row)) for row in (*rows, *runs, *orphans))
        return "the rows cannot be read"

    async def is_billed(self, _seen: Seen) -> bool:
        """The cloud's bill was compared with every run, if it tells one."""
        if not self.tells_bills:
            return True
        rows = await self.world.rows(
            "select r.resource_id, l.billed_at from run r left join ledger_run l on l.run_id = r.id"
            f" where r.pod_namespace = '{self.namespace}'"
        )
        missing = {one["id"] for one in await self.machines() if self._was_torn(one) and self._cost(one)}
        missing -= {*self.orphans, *(row["resource_id"] for row in rows)}
        return all(row["billed_at"] for row in rows) and missing <= (await self._strays()).keys()

    async def books(self) -> None:
        """The cloud's books against our rows, machine by machine, and its bill against our ledger."""
        told = await self.world.cloud.truth(image=self._image)
        machines = {str(one["id"]): one for one in told["machines"] if one["id"] not in self.orphans}
        runs = {row["resource_id"]: row for row in await self._runs()}
        missing = [
            one
            for id_, one in machines.items()
            if id_ not in runs and not one["phantom"] and not self._was_lost(one)
        ]
        if self.tells_bills and self.disasters.beside and self.torn:
            # Whoever had seen it could not write it down, nor have its claim remember it, ended it, and died:
            # the cloud's bill still tells.
            strays = await self._strays()
            missing = [
                one
                for one in missing
                if not self._was_torn(one) or strays.get(one["id"]) != Decimal(one["bill_usd"])
            ]
        assert not missing, f"not in our rows: {missing}"
        assert runs.keys() <= machines.keys(), f"not in the cloud's books: {runs.keys() - machines.keys()}"
        names = [one["name"] for one in machines.values() if not one["phantom"]]
        assert len(names) == len(set(names)), "one identity, two machines"
        costs = await self._costs()
        for machine_id, run in runs.items():
            machine = machines[machine_id]
            began, gone = _time(machine["created_at"]), _gone_at(machine)
            assert run["provider_created_at"] == began, f"{machine_id}: began {began}, {dict(run)}"
            assert run["gone_at"] >= gone - CLOCKS, f"{machine_id}: gone {gone}, {dict(run)}"
            if not machine["phantom"]:  # nobody has told the price of what never was
                assert run["usd_per_hour"] == self.usd_per_hour, f"{machine_id}: {dict(run)}"
            if machine["terminates"] and run["terminate_asked_at"] is not None:
                assert run["terminate_asked_at"] <= run["gone_at"], f"{machine_id}: {dict(run)}"
            bill, cost = Decimal(machine["bill_usd"]), costs.get(machine_id, Decimal(0))
            if self.tells_bills:
                assert cost == bill, f"{machine_id}: its bill is {bill}, the ledger has {cost}: {dict(run)}"
        for orphan in self.orphans:
            found = await self.world.rows(f"select 1 from orphan_finding where resource_id = '{orphan}'")
            assert found or self.disasters.restores, f"{orphan} was ended, and nobody was told"

    def _was_lost(self, machine: Obj) -> bool:
        """Whether a restore has taken its rows: it ended before anybody could see it again."""
        gone, made = _gone_at(machine), _time(machine["created_at"])
        lost = self.disasters.restores
        return any(one.of - UNHEARD < gone < one.at + UNHEARD and made < one.at for one in lost)

    def _was_torn(self, machine: Obj) -> bool:
        """Whether its claim may have been gone before its machine: no finalizer has waited for the rows."""
        identity = parse(machine["name"])
        return identity is not None and identity.claim_uid in self.torn and not self._was_lost(machine)

    @staticmethod
    def _cost(machine: Obj) -> bool:
        """Whether the cloud charges anything for it."""
        return not machine["phantom"] and Decimal(machine["bill_usd"]) != 0

    async def _strays(self) -> dict[str, Decimal]:
        """Dollars in the ledger for machines that only the cloud's bill knows."""
        rows = await self.world.rows(
            "select key, dollar_seconds from billing_adjustment where key like 'bill:%'"
        )
        return {row["key"].rsplit(":", 1)[1]: dollars(row["dollar_seconds"]) for row in rows}

    async def _costs(self) -> dict[str, Decimal]:
        """Dollars in the ledger, by machine: divided once, as a cloud bills a machine. Unpriced is none."""
        rows = await self.world.rows(
            "select r.resource_id, coalesce(sum(c.billed_dollar_seconds), 0) as sum"
            " from run r join charge_between('2020-01-01', '2100-01-01') c on c.run_id = r.id"
            f" where r.pod_namespace = '{self.namespace}' group by 1"
        )
        return {row["resource_id"]: dollars(row["sum"]) for row in rows}

    async def orphan_took_s(self, since: datetime) -> float:
        """How long the last of its orphans was there, from when nothing stood in the way of its end."""
        told = {one["id"]: one for one in await self.machines()}
        times = [_gone_at(told[id_]) - max(since, _time(told[id_]["created_at"])) for id_ in self.orphans]
        return max((one.total_seconds() for one in times), default=0.0)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _gone_at(machine: Obj) -> datetime:
    return {one["state"]: _time(one["at"]) for one in machine["history"]}["gone"]
