"""What the steps of ``hack.e2e.steps`` are told with: kubectl, Helm, waiting, and what a user can see.

A step waits for conditions, never for time, and every wait is bounded: ``Failed`` says which one did not come
true. Durations are seconds.
"""

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.api import keys
from hack.cluster import ControlPlane
from hack.e2e.node import Node

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "chart"
NAMESPACE = "nebula-system"
RELEASE = "nebula"
VIRTUAL_NODE = "nebula-fake"
CONTROLLER = "app.kubernetes.io/component=controller"
WITHIN_S = 180.0

POOL = """\
apiVersion: nebula.inftyai.com/v1alpha1
kind: NodePool
metadata: {name: first}
spec: {providers: [{name: fake}], capacityTypes: [OnDemand], strategy: Ordered}
"""

# Machines that run their command, so that there is something to log and to exec into.
SCENARIO = {
    "cloud": "fake",
    "regions": ["fake-1"],
    "offers": [{"usd_per_hour": {"Spot": "0.04", "OnDemand": "0.10"}}],
    "processes": {},
}

Obj = dict[str, Any]


class Failed(RuntimeError):
    """A step did not come out as a user must see it; the message says what was seen instead."""


@dataclass(slots=True, kw_only=True)
class Story:
    """One telling. ``home`` is a folder for Helm's own caches and for what is kept of a failure.

    ``other_helm`` is the other major version, for a release of its own. ``previous_chart`` is of the code
    before, whose image the node has under ``previous_tag``; ``image`` is the name of today's.
    """

    plane: ControlPlane
    node: Node
    helm_program: Path
    other_helm: Path
    previous_chart: Path
    previous_tag: str
    image: str
    home: Path
    figures: dict[str, str] = field(default_factory=dict)

    def tell(
        self, steps: "Mapping[str, Callable[[Story], None]]", *, until: str | None, skip: Sequence[str]
    ) -> None:
        """Run the steps in order.

        Raises:
            Failed: see there.
        """
        for number, (name, step) in enumerate(steps.items(), start=1):
            if name in skip:
                self.say(f"-- {number}/{len(steps)} {name}: left out")
                continue
            about = (step.__doc__ or "").splitlines()[0]
            self.say(f"== {number}/{len(steps)} {name}: {about}")
            began_s = time.monotonic()
            try:
                step(self)
            except subprocess.TimeoutExpired as error:
                raise Failed(f"{name}: {error}") from error
            except Failed as error:
                raise Failed(f"{name}: {error}") from error
            self.say(f"   ok, {time.monotonic() - began_s:.1f} s")
            self.node.check()
            self.plane.check()
            if name == until:
                break

    def tell_figures(self) -> None:
        self.say("figures:")
        for name, value in self.figures.items():
            self.say(f"   {name}: {value}")

    def describe(self) -> None:
        """Keep what a person needs to understand a failure, and show its most telling part."""
        asked = (
            "get all,pvc,pv,nodes,nodeclaims,nodepools,cloudpodbindings -A -o wide",
            "get events -A --sort-by=.lastTimestamp",
            f"describe pods -n {NAMESPACE}",
            f"logs -n {NAMESPACE} -l {CONTROLLER} --all-containers --prefix --tail=400",
            f"logs -n {NAMESPACE} -l app.kubernetes.io/component=postgres --prefix --tail=200",
            f"logs -n {NAMESPACE} -l app.kubernetes.io/component=fake-cloud --prefix --tail=200",
            f"logs -n {NAMESPACE} -l app.kubernetes.io/component=uninstall --prefix --tail=200",
            f"logs -n {NAMESPACE} -l app.kubernetes.io/component=test --prefix --tail=200",
        )
        with (self.home / "failure.txt").open("w") as file:
            for line in asked:
                done = self.run(self.plane.kubectl, *line.split())
                file.write(f"\n##### kubectl {line}\n{done.stdout}{done.stderr}")
        for line in asked[:2]:
            shown = self.run(self.plane.kubectl, *line.split()).stdout.splitlines()
            self.say("\n".join(shown[-40:]))

    # --- tools ---

    @staticmethod
    def say(text: str) -> None:
        print(text, flush=True)

    def show(self, text: str) -> None:
        for line in text.rstrip().splitlines():
            self.say(f"   | {line}")

    def run(
        self, program: Path, *argv: str, stdin: str | None = None, within_s: float = 1.2 * WITHIN_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with the admin's kubeconfig."""
        return subprocess.run(
            [program, *argv],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
            env={
                "KUBECONFIG": str(self.plane.kubeconfig),
                "HOME": str(self.home),
                "PATH": "/usr/bin:/bin",
            },
        )

    def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        done = self.run(self.plane.kubectl, *argv, stdin=stdin)
        if done.returncode != 0:
            raise Failed(f"kubectl {' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def got(self, *argv: str) -> Obj:
        """An object or list, as the API has it."""
        found: Obj = json.loads(self.kubectl("get", *argv, "-o", "json"))
        return found

    def items(self, *argv: str) -> list[Obj]:
        return list(self.got(*argv)["items"])

    def helm(
        self, *argv: str, fails: bool = False, within_s: float = WITHIN_S, program: Path | None = None
    ) -> str:
        """Run Helm in our namespace and return all that it says."""
        done = self.run(program or self.helm_program, *argv, "--namespace", NAMESPACE, within_s=within_s)
        if (done.returncode != 0) is not fails:
            raise Failed(
                f"helm {' '.join(argv)} {'passed' if fails else 'failed'}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout + done.stderr

    def upgrade(self, **values: object) -> None:
        sets = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
        self.helm("upgrade", RELEASE, str(CHART), "--reuse-values", *sets)
        self.rolled_out()

    def rolled_out(self) -> None:
        """Wait until every workload of the release is what its template says, and ready."""
        for each in self.items("deployment,statefulset", "-n", NAMESPACE):
            name = f"{each['kind'].lower()}/{each['metadata']['name']}"
            self.kubectl("rollout", "status", name, "-n", NAMESPACE, f"--timeout={WITHIN_S:.0f}s")

    def until(self, what: str, holds: Callable[[], object], *, within_s: float = WITHIN_S) -> float:
        """Wait until it holds; returns how long that took.

        Raises:
            Failed: it did not in time.
        """
        began_s = time.monotonic()
        while not holds():
            if time.monotonic() - began_s > within_s:
                raise Failed(f"not within {within_s:.0f} s: {what}")
            time.sleep(0.3)
        return time.monotonic() - began_s

    # --- what is there ---

    def controllers(self) -> list[Obj]:
        return self.items("pods", "-n", NAMESPACE, "-l", CONTROLLER)

    def leader(self) -> str:
        lease = self.items("lease", "-n", NAMESPACE)
        holders = [each["spec"].get("holderIdentity") or "" for each in lease]
        return next((name for name in holders if name), "")

    def claims(self) -> dict[str, str]:
        """Instance ids of live claims by Pod name."""
        return {
            each["spec"]["podRef"]["name"]: (each.get("status") or {}).get("instanceID") or ""
            for each in self.items("nodeclaims")
        }

    def phase(self, pod: str) -> str:
        return self.kubectl("get", "pod", pod, "-o", "jsonpath={.status.phase}", "--ignore-not-found")

    def start_pod(self, name: str, *, secret: str = "") -> None:
        """Create a Pod that opts in, says its name and sleeps; ``secret`` is its environment."""
        container: Obj = {
            "name": name,
            "image": name,
            "command": ["sh", "-c", f"echo {name} runs; exec sleep infinity"],
        }
        if secret:
            container["envFrom"] = [{"secretRef": {"name": secret}}]
        labels = {keys.ENABLED_LABEL: keys.ENABLED, keys.NODE_POOL_LABEL: "first"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        self.kubectl("create", "-f", "-", stdin=json.dumps(pod))

    def delete_pods(self) -> None:
        """Delete the user's Pods and wait until nothing is rented any more."""
        self.kubectl("delete", "pods", "--all", "--wait=false")
        self.until("the Pods are gone", lambda: not self.items("pods"))
        self.until("the claims are gone", lambda: not self.items("nodeclaims"))

    def machines(self, *cloud: str) -> list[str]:
        """The ids of the machines that the fake cloud itself says it runs; by default the release's own."""
        script = (
            "import json, urllib.request as r; "
            "print(json.dumps(json.load(r.urlopen('http://127.0.0.1:9090/v1/machines?region=fake-1'))))"
        )
        place = cloud or ("-n", NAMESPACE, "deployment/nebula-fake-cloud")
        page = json.loads(self.kubectl("exec", *place, "--", "python", "-c", script))
        if page.get("next"):
            raise Failed("the fake cloud's list has more than one page: the story has grown")
        return [each["id"] for each in page["items"] if each["end"] is None]

    def psql(self, query: str, *, role: str) -> str:
        """Ask the bundled database over its socket's host line, as that role."""
        pod = f"{RELEASE}-postgres-0"
        argv = ("psql", "-X", "-A", "-t", "-h", "/run/postgresql", "-U", role, "-d", "nebula", "-c", query)
        return self.kubectl("exec", "-n", NAMESPACE, pod, "-c", "postgres", "--", *argv).strip()

    def readyz(self, pod: str) -> str:
        """What a replica says about itself, asked through the API server."""
        at = f"/api/v1/namespaces/{NAMESPACE}/pods/http:{pod}:8081/proxy/readyz"
        return self.run(self.plane.kubectl, "get", "--raw", at).stdout

    def nebula(self, *argv: str) -> str:
        """A command of the image in the controller's Pod, as docs/install.md says."""
        place = ("-n", NAMESPACE, f"deployment/{RELEASE}", "-c", "controller")
        return self.kubectl("exec", *place, "--", "nebula", *argv)

    # --- what must hold ---

    def kept(self, before: dict[str, str]) -> None:
        """Every claim of before has the same machine, and its Pod runs."""
        now = self.claims()
        if moved := {
            pod: (instance, now.get(pod)) for pod, instance in before.items() if now.get(pod) != instance
        }:
            raise Failed(f"machines changed: {moved}")
        for pod in before:
            if (phase := self.phase(pod)) != "Running":
                raise Failed(f"Pod {pod} is {phase}")

    def one_machine_each(self, *cloud: str) -> None:
        """The cloud's own list against the claims: none missing, none twice, none of nobody."""

        def agree() -> bool:
            return sorted(self.machines(*cloud)) == sorted(self.claims().values())

        try:
            self.until("the cloud's machines are those of the claims", agree, within_s=60)
        except Failed:
            raise Failed(
                f"the cloud runs {sorted(self.machines(*cloud))}, the claims are {self.claims()}"
            ) from None

    def uids(self, kind: str) -> dict[str, str]:
        """UIDs by name."""
        return {each["metadata"]["name"]: each["metadata"]["uid"] for each in self.items(kind)}

    def crd_uids(self) -> dict[str, str]:
        return {name: uid for name, uid in self.uids("crd").items() if name.endswith("nebula.inftyai.com")}
