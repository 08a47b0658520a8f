"""A whole controller, a cloud whose machines run processes, and kubectl through the real API server."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import termios
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pytest_postgresql.executors import NoopExecutor

from app.api import keys
from app.api.crds import load_crds
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from hack.controller import Controller
from tests.support import postgres
from tests.support.clouds import SMALL, FakeCloud
from tests.support.cluster import Kubectl
from tests.support.composed import until

Obj = dict[str, Any]
DEADLINE_S = 40.0
LEASE = {"NEBULA_LEASE_DURATION_S": "20", "NEBULA_LEASE_DEADLINE_S": "15"}
CLOUDS: dict[str, Obj] = {
    "runs": SMALL | {"account": "acct-runs", "processes": {}},
    "mute": SMALL | {"account": "acct-mute"},
}


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: bytes
    err: str


@dataclass(slots=True)
class Terminal:
    """A kubectl on a terminal of its own."""

    process: asyncio.subprocess.Process
    main: int
    other: int
    said: bytes = b""

    async def until(self, words: bytes, *, typing: bytes = b"") -> None:
        """Wait for these words; ``typing`` is what asks for them, again and again."""

        async def says() -> bool:
            if typing:
                self.type(typing)
                await asyncio.sleep(0.2)
            with contextlib.suppress(OSError):
                self.said += os.read(self.main, 65536)
            return words in self.said

        await until(says, what=f"{words!r} on the terminal")

    def type(self, words: bytes) -> None:
        os.write(self.main, words)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


@dataclass(slots=True, kw_only=True)
class Bench:
    """What a test has: a namespace of its own in a cluster that all share."""

    cluster: Cluster
    controller: Controller
    clouds: dict[str, FakeCloud]
    database: str
    namespace: str = field(default_factory=lambda: f"kubelet-{uuid4().hex[:8]}")
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def cloud(self) -> FakeCloud:
        return self.clouds["runs"]

    async def start(self, *args: str, stdin: bool = False, **env: str) -> asyncio.subprocess.Process:
        """A kubectl that goes on; it ends with the test."""
        process = await asyncio.create_subprocess_exec(
            str(self.cluster.kubectl),
            "-n",
            self.namespace,
            *args,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            limit=1 << 20,
            env=os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)} | env,
        )
        self.started.append(process)
        return process

    async def run(
        self, *args: str, stdin: bytes | None = None, within_s: float = DEADLINE_S, **env: str
    ) -> Done:
        process = await self.start(*args, stdin=stdin is not None, **env)
        async with asyncio.timeout(within_s):
            out, err = await process.communicate(stdin)
        assert process.returncode is not None
        return Done(process.returncode, out, err.decode(errors="replace"))

    @contextlib.asynccontextmanager
    async def terminal(self, *args: str, columns: int, rows: int) -> AsyncIterator[Terminal]:
        """A kubectl on a terminal of this size."""
        main, other = os.openpty()
        os.set_blocking(main, False)
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        process = await asyncio.create_subprocess_exec(
            str(self.cluster.kubectl),
            *("-n", self.namespace, *args),
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env=os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)},
        )
        self.started.append(process)
        try:
            yield Terminal(process, main, other)
        finally:
            os.close(main)
            os.close(other)

    async def ok(self, *args: str, stdin: bytes | None = None) -> bytes:
        done = await self.run(*args, stdin=stdin)
        assert done.code == 0, f"kubectl {' '.join(args)}: {done.code} {done.err}"
        return done.out

    async def pod(
        self,
        name: str,
        command: Sequence[str],
        *,
        cloud: str = "runs",
        policy: str = "Never",
        wait: str = "Ready",
        ports: Sequence[int] = (),
        **container: Any,
    ) -> None:
        """A Pod whose container runs this command on that cloud; returns once it is so."""
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {
                    keys.ENABLED_LABEL: "true",
                    keys.NODE_POOL_LABEL: cloud,
                    keys.ACCELERATOR_TYPE_LABEL: "T4",
                    "app": "bench",
                },
            },
            "spec": {
                "restartPolicy": policy,
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {
                        "name": "work",
                        "image": "work:1",
                        "command": list(command),
                        "resources": {"limits": {keys.GPU_RESOURCE: "1"}},
                        "ports": [{"containerPort": port} for port in ports],
                        **container,
                    }
                ],
            },
        }
        await self.ok("create", "-f", "-", stdin=json.dumps(body).encode())
        if wait == "Ready":
            await self.ok("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=30s")
        elif wait:
            await self.ok("wait", f"pod/{name}", f"--for=jsonpath={{.status.phase}}={wait}", "--timeout=30s")

    async def shell(self, name: str, script: str, **pod: Any) -> None:
        await self.pod(name, ["sh", "-c", script], **pod)

    async def machine(self, pod: str) -> Obj:
        found = json.loads(await self.ok("get", "pod", pod, "-o", "json"))
        wanted = found["metadata"]["annotations"][keys.INSTANCE_ID_ANNOTATION]
        (machine,) = [one for one in await self.cloud.machines() if one["id"] == wanted]
        return machine

    async def close(self) -> None:
        for process in self.started:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture(scope="package")
async def whole(
    cluster: Cluster,
    kubectl: Kubectl,
    postgres_server: DevPostgres,
    database_template: NoopExecutor,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Bench]:
    if cluster.webhook_url is not None:
        pytest.skip("a cluster of somebody's own cannot reach an endpoint on the loopback interface")
    folder: Path = tmp_path_factory.mktemp("kubelet")
    with postgres.clone(postgres_server, database_template) as url:
        for crd in load_crds():
            kubectl("apply", "-f", "-", stdin=json.dumps(crd))
            name = f"crd/{crd['metadata']['name']}"
            kubectl("wait", "--for=condition=Established", name, "--timeout=30s")
        kubectl.run("create", "namespace", keys.SYSTEM_NAMESPACE)
        clouds = {name: FakeCloud(folder / name, scenario=scenario) for name, scenario in CLOUDS.items()}
        controller: Controller | None = None
        try:
            for cloud in clouds.values():
                await cloud.start()
            controller = Controller(
                folder / "controller",
                kubeconfig=cluster.kubeconfig,
                database_url=url,
                clouds={name: cloud.url for name, cloud in clouds.items()},
                options=LEASE,
            )
            for name in clouds:
                pool = {
                    "apiVersion": keys.API_VERSION,
                    "kind": keys.NODE_POOL,
                    "metadata": {"name": name},
                    "spec": {"providers": [{"name": name}], "failover": {"blocklistTTL": "1s"}},
                }
                kubectl("apply", "-f", "-", stdin=json.dumps(pool))
            await asyncio.to_thread(controller.start)
            yield Bench(cluster=cluster, controller=controller, clouds=clouds, database=url)
        finally:
            if controller is not None:
                await asyncio.to_thread(controller.stop)
            _tidy(kubectl)
            for cloud in clouds.values():
                await cloud.close()


@pytest.fixture
async def bench(whole: Bench, kubectl: Kubectl) -> AsyncIterator[Bench]:
    mine = Bench(
        cluster=whole.cluster, controller=whole.controller, clouds=whole.clouds, database=whole.database
    )
    await asyncio.to_thread(kubectl, "create", "namespace", mine.namespace)
    yield mine
    await mine.close()
    for cloud in mine.clouds.values():
        await cloud.clear_faults()
    await mine.run("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
    await mine.run("delete", "namespace", mine.namespace, "--wait=false")


def _tidy(kubectl: Kubectl) -> None:
    """What keeps objects from going is taken off: nobody is there any more to do it."""
    for kind, name in (
        ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
        ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
        *(("node", keys.node_name(name)) for name in CLOUDS),
    ):
        kubectl.run("delete", kind, name, "--ignore-not-found")
    for name in kubectl("get", "nodeclaims", "-o", "name").split():
        kubectl.run("patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        kubectl.run("delete", name, "--ignore-not-found", "--wait=false")
    for name in CLOUDS:
        kubectl.run("delete", "nodepool", name, "--ignore-not-found", "--wait=false")
        kubectl.run("patch", "nodepool", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
