"""A whole controller on a real cluster with two clouds: one starts workloads again, the other cannot.

The pools have the clouds' names: ``again`` and ``once``. Each test has a namespace of its own.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from app.api import keys
from hack.controller import Controller
from tests.support.clouds import FakeCloud
from tests.support.cluster import Kubectl

Obj = dict[str, Any]
DEADLINE_S = 60.0
POOLS = ("again", "once")


@dataclass(slots=True, kw_only=True)
class Owners:
    """What a test has. ``clouds`` by name; all their machines count, so a test looks at its own Pods'."""

    kubectl_: Kubectl
    controller: Controller
    clouds: dict[str, FakeCloud]
    namespace: str = field(default_factory=lambda: f"owners-{uuid4().hex[:8]}")

    async def kubectl(self, *args: str, stdin: Any = None) -> str:
        text = None if stdin is None else json.dumps(stdin)
        return await asyncio.to_thread(self.kubectl_, "-n", self.namespace, *args, stdin=text)

    async def fails(self, *args: str, stdin: Any = None) -> str:
        """What kubectl says when it does not succeed."""
        text = None if stdin is None else json.dumps(stdin)
        done = await asyncio.to_thread(self.kubectl_.run, "-n", self.namespace, *args, stdin=text)
        assert done.returncode != 0, done.stdout
        return str(done.stderr)

    async def get(self, *args: str) -> Obj:
        found: Obj = json.loads(await self.kubectl("get", *args, "-o", "json"))
        return found

    async def pods(self) -> list[Obj]:
        items: list[Obj] = (await self.get("pods"))["items"]
        return sorted(items, key=lambda pod: pod["metadata"]["creationTimestamp"])

    async def create(self, kind: str, name: str, spec: Obj, *, api: str = "batch/v1") -> None:
        await self.kubectl(
            "create",
            "-f",
            "-",
            stdin={"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec},
        )

    async def until(self, holds: Callable[[list[Obj]], Any], *, what: str = "") -> Any:
        """What ``holds`` says of the Pods, once it is true."""
        pods: list[Obj] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    pods = await self.pods()
                    if held := holds(pods):
                        return held
                    await asyncio.sleep(0.1)
        except TimeoutError:
            shown = [(pod["metadata"]["name"], pod["status"]) for pod in pods]
            raise AssertionError(f"{what or holds} did not come true: {shown}") from None

    async def ready(self, count: int = 1) -> list[Obj]:
        """The Ready Pods that nobody deletes, once there are so many."""
        found: list[Obj] = await self.until(
            lambda pods: (
                [pod for pod in pods if is_ready(pod)] if sum(map(is_ready, pods)) == count else None
            ),
            what=f"{count} Ready",
        )
        return found

    async def machines(self) -> list[Obj]:
        """Every machine that was ever made for this namespace, oldest first, with its cloud."""
        claimed: list[Obj] = []
        for name, cloud in self.clouds.items():
            claimed += [
                one | {"cloud": name}
                for one in await cloud.machines()
                if one["image"] == self.image and not one["phantom"]
            ]
        return sorted(claimed, key=lambda one: str(one["created_at"]))

    async def alive(self) -> list[Obj]:
        return [one for one in await self.machines() if one["state"] != "gone"]

    async def until_machines(self, holds: Callable[[list[Obj]], Any], *, what: str) -> Any:
        machines: list[Obj] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (held := holds(machines := await self.machines())):
                    await asyncio.sleep(0.1)
                return held
        except TimeoutError:
            raise AssertionError(f"{what} did not come true: {machines}") from None

    async def until_none_alive(self) -> None:
        await self.until_machines(
            lambda all_: all(one["state"] == "gone" for one in all_), what="no machine is left"
        )

    async def exit(self, pod: Obj, *, code: int) -> None:
        """The workload of a running Pod ends by itself."""
        await self.cloud_of(pod).exit(instance_of(pod), code=code)

    async def preempt(self, pod: Obj) -> None:
        await self.cloud_of(pod).preempt(instance_of(pod))

    def cloud_of(self, pod: Obj) -> FakeCloud:
        return self.clouds[pod["spec"]["nodeName"].removeprefix("nebula-")]

    @property
    def image(self) -> str:
        """Tells this test's machines apart from all others in the clouds' books."""
        return f"work:{self.namespace}"

    def template(
        self, pool: str, *, policy: str | None = None, env: dict[str, str] | None = None, **spec: Any
    ) -> Obj:
        """A Pod template with one T4."""
        labels = {
            keys.ENABLED_LABEL: "true",
            keys.NODE_POOL_LABEL: pool,
            keys.ACCELERATOR_TYPE_LABEL: "T4",
            "app": "owners",
        }
        container = {
            "name": "work",
            "image": self.image,
            "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
            "resources": {"limits": {keys.GPU_RESOURCE: "1"}},
        }
        more = {} if policy is None else {"restartPolicy": policy}
        return {"metadata": {"labels": labels}, "spec": {"containers": [container]} | more | spec}

    async def deployment(self, name: str, pool: str, *, replicas: int = 1, **template: Any) -> None:
        spec = {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "owners"}},
            "template": self.template(pool, **template),
        }
        await self.create("Deployment", name, spec, api="apps/v1")

    async def job(self, name: str, pool: str, *, policy: str = "Never", **changes: Any) -> None:
        template = changes.pop("template", {})
        spec = {"template": self.template(pool, policy=policy, **template)} | changes
        await self.create("Job", name, spec)


def is_ready(pod: Obj) -> bool:
    conditions = pod["status"].get("conditions", [])
    return "deletionTimestamp" not in pod["metadata"] and any(
        each["type"] == "Ready" and each["status"] == "True" for each in conditions
    )


def instance_of(pod: Obj) -> str:
    return str(pod["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION])


def condition_of(pod: Obj, kind: str) -> Obj | None:
    conditions = pod["status"].get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), None)


def restarts_of(pod: Obj) -> int:
    return int((pod["status"].get("containerStatuses") or [{}])[0].get("restartCount", 0))


def is_gated(pod: Obj) -> bool:
    return bool(pod["spec"].get("schedulingGates"))
