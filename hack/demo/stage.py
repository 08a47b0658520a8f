"""What a scene plays on: a cluster, a Postgres, three simulated clouds and a controller, and looks at them.

Everything is started here and ended here, whatever a scene does. Waits are for conditions, each with a bound.
"""

import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import orjson

from app import processes
from app.api import keys
from app.api.reasons import PLACED_CONDITION
from app.store.devserver import DevPostgres
from hack.cluster import Cluster, ControlPlane, obtain
from hack.controller import Controller

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "docs" / "samples"
NAMESPACE = "nebula-demo"
CLOUDS = {"modal": "fake", "aws": "fake", "runpod": "runpod"}  # by name, the simulator of each
RUNPOD_KEY = {"RUNPOD_API_KEY": "any"}  # the simulated one asks for none in particular
RUNNING = ("modal",)  # clouds whose machines run their command as a local process
POOLS = ("gpu", "cheapest", "capped", "patient", "modal-only", "aws-only", "anywhere")


class Unmet(AssertionError):
    """Something that the demo promises was not so."""


class Cloud:
    """One simulated cloud, its state in ``folder``."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._log = folder / "simulator.log"
        scenario = SAMPLES / "scenarios" / f"{name}.yaml"
        if name in RUNNING and sys.platform == "linux":
            own = folder / "scenario.yaml"
            own.write_text(scenario.read_text() + "processes: {}\n")
            scenario = own
        argv = [sys.executable, "-m", "app.cli", "simulate", CLOUDS[name]]
        argv += ["--scenario", str(scenario), "--state", str(folder)]
        self._process = processes.spawn(argv, log=self._log)
        self.url = self._listening()

    def _listening(self) -> str:
        until = time.monotonic() + 30
        while time.monotonic() < until and self._process.poll() is None:
            said = self._log.read_text() if self._log.exists() else ""
            for line in said.splitlines():
                if line.startswith("listening on "):
                    return line.removeprefix("listening on ").strip()
            time.sleep(0.05)
        raise Unmet(f"the cloud {self.name} did not start:\n{processes.tail(self._log)}")

    def close(self) -> None:
        processes.stop(self._process, grace_s=5)

    def truth(self) -> dict[str, Any]:
        """The cloud's own books, which no fault can touch."""
        books: dict[str, Any] = self._call("GET", "/sim/truth")
        return books

    def machines(self) -> list[dict[str, Any]]:
        """Every machine that ever was."""
        return [machine for machine in self.truth()["machines"] if not machine["phantom"]]

    def alive(self) -> list[dict[str, Any]]:
        return [machine for machine in self.machines() if machine["state"] != "gone"]

    def bill_usd(self) -> Decimal:
        return Decimal(self.truth()["bill_usd"])

    def run_out(self, accelerator: str) -> None:
        for tier in ("Spot", "OnDemand"):
            self.has(accelerator, units=0, tier=tier)

    def has(self, accelerator: str, *, units: int, tier: str = "Spot", region: str = "") -> None:
        """So many GPUs are there from now on, those that are rented included."""
        body = {"units": units, "tier": tier, "accelerator": accelerator, "region": region}
        self._call("POST", "/sim/capacity", body)

    def asks(self, accelerator: str, *, usd_per_hour: str, tier: str = "Spot", region: str = "") -> None:
        """The price of one GPU from now on."""
        body = {"usd_per_hour": usd_per_hour, "tier": tier, "accelerator": accelerator, "region": region}
        self._call("POST", "/sim/price", body)

    def times_asked(self) -> int:
        """How often it was asked what it offers."""
        calls: dict[str, int] = self.truth()["calls"]
        return calls.get("offers", 0)

    def reclaim(self, machine_id: str) -> None:
        self._call("POST", f"/sim/machines/{machine_id}/preempt")

    def made_since(self, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The machines that were made after these."""
        old = {machine["id"] for machine in before}
        return [machine for machine in self.machines() if machine["id"] not in old]

    def plant(self, name: str) -> str:
        """A person's own machine, made in the console; its id."""
        body = {"name": name, "accelerator": "H100", "tier": "OnDemand"}
        return str(self._call("POST", "/sim/machines", body)["id"])

    def end(self, machine_id: str) -> None:
        """Its owner ends it in the console."""
        self._call("POST", f"/sim/machines/{machine_id}/remove")

    def hold_answers(self) -> str:
        """Creates take effect, and nobody hears of it."""
        return str(self._call("POST", "/sim/pause", {"verb": "create", "when": "after"})["id"])

    def let_go(self, held: str) -> None:
        self._call("DELETE", f"/sim/faults/{held}")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else orjson.dumps(body)
        request = Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=20) as answer:
            content = answer.read()
        return orjson.loads(content) if content else None


class Stage:
    """Handed to each scene."""

    def __init__(
        self, cluster: Cluster, controller: Controller, clouds: dict[str, Cloud], database: str
    ) -> None:
        self.cluster, self.controller, self.clouds, self.database = cluster, controller, clouds, database

    def say(self, text: str) -> None:
        print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)

    def show(self, *args: str) -> None:
        """A kubectl command and what it prints."""
        print(f"$ kubectl {' '.join(args)}", flush=True)
        print(self.kubectl(*args).rstrip(), flush=True)

    def show_nebula(self, *args: str, code: int = 0) -> None:
        """A command of ours and what it prints; ``code`` is what it must end with."""
        print(f"$ nebula {' '.join(args)}", flush=True)
        print(self.nebula(*args, code=code), flush=True)

    def nebula(self, *args: str, code: int | None = 0) -> str:
        """A command of ours, on this stage's database and clouds, and what it says; None: any end will do."""
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", *args],
            env={
                **os.environ,
                "KUBECONFIG": str(self.cluster.kubeconfig),
                "NEBULA_DATABASE_URL": self.database,
                "NEBULA_PROVIDERS": self.controller.providers,
                "NEBULA_PROFILE": "fast",
                **RUNPOD_KEY,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if code is not None and done.returncode != code:
            raise Unmet(f"nebula {' '.join(args)} ended with {done.returncode}: {done.stderr.strip()}")
        return (done.stdout or done.stderr).rstrip()

    def make(self, *objects: dict[str, Any]) -> None:
        """Make objects that stand in no file of ours."""
        for obj in objects:
            metadata = obj["metadata"]
            print(f"$ kubectl apply: {obj['kind']} {metadata['name']}", flush=True)
            self.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=orjson.dumps(obj).decode())

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        done = subprocess.run(
            [self.cluster.kubectl, *args],
            input=stdin,
            env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        if done.returncode:
            raise Unmet(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, sample: str) -> None:
        """One of the samples in ``docs``."""
        self.show("apply", "-n", NAMESPACE, "-f", str((SAMPLES / sample).relative_to(ROOT)))

    def until_prices_are_known(self) -> None:
        """Until each cloud was asked for its offers, and the answer is in use: the question after it came."""
        before = {cloud.name: cloud.times_asked() for cloud in self.clouds.values()}
        for cloud in self.clouds.values():
            self.until(
                f"Nebula asks {cloud.name} for its prices",
                functools.partial(_asked_since, cloud, before[cloud.name] + 2),
            )

    def why(self, pod: str) -> None:
        """What ``nebula why`` says."""
        if importlib.util.find_spec("app.cli.why") is not None:
            self.show_nebula("why", pod, "-n", NAMESPACE)

    def placed_condition(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Why a Pod is still gated, in short; empty for one that never waited."""
        conditions = pod["status"].get("conditions") or ()
        return next((each for each in conditions if each["type"] == PLACED_CONDITION), {})

    def objects(self, kind: str) -> list[dict[str, Any]]:
        found = orjson.loads(self.kubectl("get", kind, "-n", NAMESPACE, "-o", "json"))
        items: list[dict[str, Any]] = found["items"]
        return items

    def pods(self, phase: str | None = None) -> list[dict[str, Any]]:
        """The demo's Pods that are not being deleted."""
        pods = [pod for pod in self.objects("pods") if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in pods if phase is None or pod["status"].get("phase") == phase]

    def ready_on(self, provider: str) -> list[dict[str, Any]]:
        node = keys.node_name(provider)
        return [
            pod
            for pod in self.pods("Running")
            if pod["spec"].get("nodeName") == node
            and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
        ]

    def until(self, what: str, holds: Callable[[], bool], *, within_s: float = 45) -> None:
        """Wait for what must come true."""
        until = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > until:
                raise Unmet(f"after {within_s:g} s it was still not so: {what}")
            time.sleep(0.2)

    def check(self, what: str, holds: bool) -> None:
        """One promise, kept or not."""
        if not holds:
            raise Unmet(what)
        print(f"  checked: {what}", flush=True)


def _asked_since(cloud: Cloud, times: int) -> bool:
    return cloud.times_asked() >= times


@contextmanager
def set_up(folder: Path) -> Iterator[Stage]:
    """Bring everything up, with a line for each part; all of it is ended afterwards."""
    with ExitStack() as stack:
        began = time.monotonic()

        def step(text: str) -> None:
            print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)

        step("Kubernetes: etcd, API server, controller manager, scheduler")
        cluster = stack.enter_context(obtain(control_plane=ControlPlane()))
        step("Postgres")
        server = stack.enter_context(DevPostgres(durable=False))
        step(f"three clouds that cost nothing: {', '.join(CLOUDS)}")
        clouds = {}
        for name in CLOUDS:
            clouds[name] = Cloud(name, folder / name)
            stack.callback(clouds[name].close)
        controller = Controller(
            folder / "controller",
            kubeconfig=cluster.kubeconfig,
            database_url=server.url,
            clouds={name: cloud.url for name, cloud in clouds.items() if CLOUDS[name] == "fake"},
            others=[f"runpod,url={clouds['runpod'].url},list_every_s=0.2,calls_per_s=50"],
            webhook_url=cluster.webhook_url,
            options=RUNPOD_KEY,
        )
        stage = Stage(cluster, controller, clouds, server.url)
        step("Nebula's kinds, and its controller")
        for crd in sorted((ROOT / "crds").glob("*.yaml")):
            stage.kubectl("apply", "-f", str(crd))
        stage.kubectl("wait", "--for=condition=Established", "crd", *_crd_names(), "--timeout=30s")
        for namespace in (keys.SYSTEM_NAMESPACE, NAMESPACE):
            _ensure_namespace(stage, namespace)
        if not cluster.ours:
            stack.callback(_tidy, stage)
        stack.callback(controller.stop)
        controller.start()
        for name in CLOUDS:
            stage.until(f"the node of {name} is Ready", functools.partial(_node_ready, stage, name))
        step("ready")
        yield stage


def _crd_names() -> list[str]:
    return [
        f"{plural}.{keys.GROUP}" for plural in (keys.NODE_POOLS, keys.NODE_CLAIMS, keys.CLOUD_POD_BINDINGS)
    ]


def _ensure_namespace(stage: Stage, name: str) -> None:
    if f"namespace/{name}" not in stage.kubectl("get", "namespaces", "-o", "name").split():
        stage.kubectl("create", "namespace", name)


def _node_ready(stage: Stage, provider: str) -> bool:
    names = stage.kubectl("get", "nodes", "-o", "name").split()
    if f"node/{keys.node_name(provider)}" not in names:
        return False
    path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    return stage.kubectl("get", "node", keys.node_name(provider), "-o", path) == "True"


def _tidy(stage: Stage) -> None:
    """Leave somebody's own cluster as it was, but for the CRDs."""
    stage.kubectl(
        "delete", "mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION, "--ignore-not-found"
    )
    stage.kubectl(
        "delete",
        "validatingwebhookconfiguration",
        keys.VALIDATING_WEBHOOK_CONFIGURATION,
        "--ignore-not-found",
    )
    stage.kubectl("delete", "node", *(keys.node_name(name) for name in CLOUDS), "--ignore-not-found")
    stage.kubectl("delete", "nodepool", *POOLS, "--ignore-not-found")
    stage.kubectl("delete", "namespace", NAMESPACE, keys.SYSTEM_NAMESPACE, "--ignore-not-found")
