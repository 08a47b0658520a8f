"""What a user does with a release, step by step: install, rent, break, upgrade, leave, come back.

Each step is one function, in the order of ``NAMES``, and says what it saw. A step waits for conditions, never
for time, and every wait is bounded: ``Failed`` says which one did not come true. Durations are seconds.
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hack.cluster import ControlPlane, certificates
from hack.e2e import measure
from hack.e2e import rights as audit
from hack.e2e.node import Node

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "chart"
NAMESPACE = "nebula-system"
RELEASE = "nebula"
CONTROLLER = "app.kubernetes.io/component=controller"
REPORTERS = "nebula-reporter"
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
    """One telling. ``home`` is a folder for Helm's own caches and for what is kept of a failure."""

    plane: ControlPlane
    node: Node
    helm_program: Path
    home: Path
    figures: dict[str, str] = field(default_factory=dict)

    def tell(self, *, until: str | None, skip: Sequence[str]) -> None:
        """Run the steps in order.

        Raises:
            Failed: see there.
        """
        for number, (name, step) in enumerate(STEPS.items(), start=1):
            if name in skip:
                self.say(f"-- {number}/{len(STEPS)} {name}: left out")
                continue
            about = (step.__doc__ or "").splitlines()[0]
            self.say(f"== {number}/{len(STEPS)} {name}: {about}")
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

    def helm(self, *argv: str, fails: bool = False, within_s: float = WITHIN_S) -> str:
        """Run Helm in our namespace and return all that it says."""
        done = self.run(self.helm_program, *argv, "--namespace", NAMESPACE, within_s=within_s)
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

    def until(self, what: str, holds: Callable[[], bool], *, within_s: float = WITHIN_S) -> float:
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

    def start_pod(self, name: str) -> None:
        labels = "nebula.inftyai.com/enabled=true,nebula.inftyai.com/nodepool=first"
        says = ("sh", "-c", f"echo {name} runs; exec sleep infinity")
        self.kubectl(
            "run", name, f"--image={name}", "--restart=Never", "-l", labels, "--command", "--", *says
        )

    def machines(self) -> list[str]:
        """The ids of the machines that the fake cloud itself says it runs."""
        script = (
            "import json, urllib.request as r; "
            "print(json.dumps(json.load(r.urlopen('http://127.0.0.1:9090/v1/machines?region=fake-1'))))"
        )
        place = ("-n", NAMESPACE, "deployment/nebula-fake-cloud")
        page = json.loads(self.kubectl("exec", *place, "--", "python", "-c", script))
        if page.get("next"):
            raise Failed("the fake cloud's list has more than one page: the story has grown")
        return [each["id"] for each in page["items"] if each["end"] is None]

    def psql(self, query: str, *, role: str) -> str:
        """Ask the bundled database over its socket's host line, as that role."""
        pod = f"{RELEASE}-postgres-0"
        argv = ("psql", "-X", "-A", "-t", "-h", "/run/postgresql", "-U", role, "-d", "nebula", "-c", query)
        return self.kubectl("exec", "-n", NAMESPACE, pod, "-c", "postgres", "--", *argv).strip()


# --- the steps ---


def install(story: Story) -> None:
    """helm install with zero values, in a namespace that enforces restricted Pods: ready, and no provider"""
    story.kubectl("create", "namespace", NAMESPACE)
    story.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    began_s = time.monotonic()
    notes = story.helm("install", RELEASE, str(CHART))
    story.rolled_out()
    took_s = time.monotonic() - began_s
    story.figures["install to ready"] = f"{took_s:.1f} s"
    story.show(story.kubectl("get", "pods,pvc", "-n", NAMESPACE))
    if "NONE. Nothing can be rented yet" not in notes:
        raise Failed(f"the notes do not say that there is no provider:\n{notes}")
    if len(story.controllers()) != 2 or not story.leader():
        raise Failed("there are not two replicas with one leader")
    if len(story.items("nodes")) != 1 or story.items("nodeclaims"):
        raise Failed("without a provider there is a virtual node or a claim")


def idle(story: Story) -> None:
    """An idle controller: its memory, and its share of a core over twenty seconds"""
    used = measure.idle(
        [each["metadata"]["uid"] for each in story.controllers()], cgroup=story.node.cgroup, over_s=20
    )
    for number, (memory_bytes, cores) in enumerate(used):
        story.figures[f"idle replica {number}"] = f"{memory_bytes / 2**20:.0f} MiB, {cores:.2%} of a core"


def refusals(story: Story) -> None:
    """A typo, a contradiction, a second release: refused, with a sentence"""
    wrong = {
        ("--set", "controler.replicas=3"): "controler",
        ("--set", "database.mode=external"): "/database/external/host",
        ("--set", "metrics.serviceMonitor.enabled=true"): "Prometheus operator",
    }
    for argv, says in wrong.items():
        said = story.helm("upgrade", RELEASE, str(CHART), *argv, fails=True)
        if says not in said:
            raise Failed(f"helm upgrade {' '.join(argv)} does not name {says}: {said}")
    done = story.run(
        story.helm_program, "install", "second", str(CHART), "--namespace", "second", "--create-namespace"
    )
    if done.returncode == 0 or "there is a release of Nebula in this cluster already" not in done.stderr:
        raise Failed(f"a second release was not refused: {done.stdout}{done.stderr}")
    story.show(done.stderr)


def fake_cloud(story: Story) -> None:
    """providers.fake.enabled and the report role, by an upgrade: a virtual node comes"""
    values = {"enabled": True, "scenario": SCENARIO}
    story.upgrade(**{"providers.fake": values, "database.reportRole.enabled": True})
    story.until("a virtual node is ready", lambda: len(story.items("nodes")) == 2)


def workload(story: Story) -> None:
    """The sample workload of docs/install.md runs on a rented machine"""
    story.kubectl("apply", "-f", "-", stdin=POOL)
    began_s = time.monotonic()
    story.start_pod("first")
    story.until("the Pod runs", lambda: story.phase("first") == "Running")
    story.figures["kubectl run to Running"] = f"{time.monotonic() - began_s:.1f} s"
    story.show(story.kubectl("get", "pods,nodepools,nodeclaims,cloudpodbindings"))
    if not story.claims().get("first"):
        raise Failed("the claim names no instance")


def streams(story: Story) -> None:
    """kubectl logs and exec reach the machine through a replica's kubelet endpoint"""
    story.until("kubectl logs shows it", lambda: "first runs" in story.kubectl("logs", "first"), within_s=30)
    story.show(story.kubectl("logs", "first"))
    said = story.kubectl("exec", "first", "--", "sh", "-c", "echo from the machine")
    if said.strip() != "from the machine":
        raise Failed(f"exec said {said!r}")


def helm_test(story: Story) -> None:
    """helm test: API, database, admission, a Pod's whole life, its cost, a clean audit"""
    said = story.helm("test", RELEASE, "--timeout", "4m", within_s=300)
    if "Succeeded" not in said:
        raise Failed(f"helm test does not say that it succeeded:\n{said}")


def cost(story: Story) -> None:
    """A cost query through psql as the report role; what is not a report is refused to it"""
    query = "select namespace, name, round(cost, 6) from pod_receipt"
    story.until("the ledger knows the Pod", lambda: "|first|" in story.psql(query, role=REPORTERS))
    story.show(story.psql(query, role=REPORTERS))
    story.show(story.psql("select * from cost_by_namespace limit 5", role=REPORTERS))
    asked = ("exec", "-n", NAMESPACE, f"{RELEASE}-postgres-0", "-c", "postgres", "--", "psql", "-X", "-h")
    done = story.run(
        story.plane.kubectl,
        *asked,
        "/run/postgresql",
        "-U",
        REPORTERS,
        "-d",
        "nebula",
        "-c",
        "select * from run",
    )
    if "permission denied" not in done.stderr:
        raise Failed(f"the report role may read the table run: {done.stdout}{done.stderr}")


def leader_killed(story: Story) -> None:
    """The leader's Pod is killed: the other one leads, nothing is rented twice, the next Pod is placed"""
    before, old = story.claims(), story.leader()
    pod = next(
        each["metadata"]["name"] for each in story.controllers() if old.startswith(each["metadata"]["name"])
    )
    began_s = time.monotonic()
    story.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--grace-period=0", "--force")
    story.until("another replica leads", lambda: story.leader() not in ("", old))
    story.figures["leader killed to next leader"] = f"{time.monotonic() - began_s:.1f} s"
    story.start_pod("second")
    story.until("the next Pod runs", lambda: story.phase("second") == "Running")
    story.rolled_out()
    _kept(story, before)
    _one_machine_each(story)


def postgres_killed(story: Story) -> None:
    """Postgres is killed in the middle of renting: every Pod gets exactly one machine"""
    before = story.claims()
    names = [f"storm-{number}" for number in range(4)]
    for name in names:
        story.start_pod(name)
    pod = f"{RELEASE}-postgres-0"
    story.until("a claim for the first of them", lambda: names[0] in story.claims())
    # SIGKILL to the server, then its Pod goes. Not --force: two servers might then share a volume.
    crash = "kill -9 $(head -1 /data/pgdata/postmaster.pid)"
    story.kubectl("exec", "-n", NAMESPACE, pod, "-c", "postgres", "--", "sh", "-c", crash)
    story.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--now", "--wait=false")
    took_s = story.until(
        "all of them run", lambda: all(story.phase(name) == "Running" for name in names), within_s=240
    )
    story.figures["Postgres killed while renting 4, to all Running"] = f"{took_s:.1f} s"
    story.rolled_out()
    _kept(story, before)
    _one_machine_each(story)
    for name in names:
        story.kubectl("delete", "pod", name, "--wait=false")
    story.until("their claims go", lambda: not set(names) & set(story.claims()))
    _one_machine_each(story)


def eviction(story: Story) -> None:
    """With one replica nothing blocks a drain: its Pod is evicted, and another one comes"""
    story.upgrade(**{"controller.replicas": 1})
    story.until("one replica", lambda: len(story.controllers()) == 1)
    (old,) = story.controllers()
    began_s = time.monotonic()
    story.kubectl(
        "drain",
        certificates.NODE_NAME,
        "--pod-selector",
        CONTROLLER,
        "--timeout=90s",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
    )
    story.figures["one replica evicted"] = f"{time.monotonic() - began_s:.1f} s"
    story.kubectl("uncordon", certificates.NODE_NAME)
    story.rolled_out()
    (new,) = story.controllers()
    if new["metadata"]["uid"] == old["metadata"]["uid"]:
        raise Failed("the Pod was not evicted")
    story.upgrade(**{"controller.replicas": 2})


def upgrade(story: Story) -> None:
    """An upgrade and a rollback with live claims: the same machines, before, between and after"""
    before = story.claims()
    crds = _crd_uids(story)
    password = story.got("secret", f"{RELEASE}-postgres", "-n", NAMESPACE)["data"]
    history = json.loads(story.helm("history", RELEASE, "-o", "json"))
    # Every replica is another one then. Not by the image: the fake cloud would end, its workloads with it.
    story.upgrade(**{"controller.podAnnotations": {"example.org/release": "next"}})
    _kept(story, before)
    story.start_pod("third")
    story.until("a Pod runs after the upgrade", lambda: story.phase("third") == "Running")
    before = story.claims()
    story.helm("rollback", RELEASE, str(history[-1]["revision"]))
    story.rolled_out()
    _kept(story, before)
    story.start_pod("fourth")
    story.until("a Pod runs after the rollback", lambda: story.phase("fourth") == "Running")
    if _crd_uids(story) != crds:
        raise Failed("a CRD was made anew")
    if story.got("secret", f"{RELEASE}-postgres", "-n", NAMESPACE)["data"] != password:
        raise Failed("the database's password changed")
    _one_machine_each(story)


def uninstall_refused(story: Story) -> None:
    """helm uninstall with live claims stops, and says what runs and what it costs; nothing has changed"""
    before = story.claims()
    said = story.helm("uninstall", RELEASE, fails=True, within_s=240)
    job = story.kubectl("logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=uninstall", "--tail=-1")
    story.show(job)
    if "USD an hour" not in job or "Machines are still rented. Nothing was changed." not in job:
        raise Failed(f"the guard does not say what it costs:\n{said}\n{job}")
    story.rolled_out()
    _kept(story, before)
    story.start_pod("fifth")
    story.until("a Pod runs after it", lambda: story.phase("fifth") == "Running")


def drained(story: Story) -> None:
    """Policy drain: Pods are evicted, machines are proven gone, the release goes; CRDs and volume stay"""
    # The refused uninstall has marked the release: a rollback to its own revision makes it deployed again.
    history = json.loads(story.helm("history", RELEASE, "-o", "json"))
    story.helm("rollback", RELEASE, str(history[-1]["revision"]))
    story.upgrade(**{"installation.uninstallPolicy": "drain"})
    recorded = story.psql("select id from installation", role="nebula")
    runs = int(story.psql("select count(*) from run", role="nebula"))
    (story.home / "recorded.json").write_text(json.dumps({"id": recorded, "runs": runs}))
    began_s = time.monotonic()
    story.helm("uninstall", RELEASE, within_s=600)
    story.figures["uninstall with drain"] = f"{time.monotonic() - began_s:.1f} s"
    if left := story.items("nodeclaims"):
        raise Failed(f"{len(left)} claims are left")
    names = [each["metadata"]["name"] for each in story.items("nodes")]
    if names != [certificates.NODE_NAME]:
        raise Failed(f"virtual nodes are left: {names}")
    hooks = story.items("mutatingwebhookconfigurations,validatingwebhookconfigurations")
    if left := [each["metadata"]["name"] for each in hooks if "nebula" in each["metadata"]["name"]]:
        raise Failed(f"webhook configurations are left: {left}")
    if len(_crd_uids(story)) != 3:
        raise Failed("the CRDs are gone")
    volumes = [each["metadata"]["name"] for each in story.items("pvc", "-n", NAMESPACE)]
    if f"data-{RELEASE}-postgres-0" not in volumes:
        raise Failed(f"the database's volume is gone; left: {volumes}")
    story.until("the Pods are gone", lambda: not story.items("pods", "-n", NAMESPACE))
    # Ordinary Pods start while nothing of ours is there.
    story.kubectl("run", "ordinary", "--image=docker.io/nebula/pause:1", "--restart=Never")
    story.until("an ordinary Pod runs", lambda: story.phase("ordinary") == "Running")
    story.kubectl("delete", "pod", "ordinary", "--wait=false")


def adopts(story: Story) -> None:
    """Reinstalled on the old volume: the same installation with its history, and Pods are placed again"""
    old = json.loads((story.home / "recorded.json").read_text())
    fake = json.dumps({"enabled": True, "scenario": SCENARIO})
    story.helm("install", RELEASE, str(CHART), f"--set-json=providers.fake={fake}")
    story.rolled_out()
    if (now := story.psql("select id from installation", role="nebula")) != old["id"]:
        raise Failed(f"installation {now}, before {old['id']}")
    if int(story.psql("select count(*) from run", role="nebula")) < old["runs"]:
        raise Failed("runs of before are not in the ledger")
    story.kubectl("delete", "pods", "--all", "--wait=false")
    story.until("old Pods are gone", lambda: not story.items("pods"))
    story.start_pod("again")
    story.until("a Pod runs", lambda: story.phase("again") == "Running")
    _one_machine_each(story)


def rights(story: Story) -> None:
    """No request of the controller was forbidden in all this; which rights it never needed"""
    account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
    found = audit.used(story.plane.audit_log, account=account)
    if found.forbidden:
        raise Failed(
            f"{len(found.forbidden)} requests of the controller were forbidden: {found.forbidden[:5]}"
        )
    roles = [story.got("clusterrole", "nebula-controller")]
    roles.append(story.got("role", RELEASE, "-n", NAMESPACE))
    roles.append(story.got("role", "nebula-node-leases", "-n", "kube-node-lease"))
    given = audit.granted(roles)
    story.say(f"   {len(given)} rights given, {len(given & found.rights)} used")
    for group, resource, verb in sorted(given - found.rights):
        story.say(f"   never used in this story: {verb} {resource}{'.' if group else ''}{group}")


def _kept(story: Story, before: dict[str, str]) -> None:
    now = story.claims()
    if moved := {
        pod: (instance, now.get(pod)) for pod, instance in before.items() if now.get(pod) != instance
    }:
        raise Failed(f"machines changed: {moved}")
    for pod in before:
        if (phase := story.phase(pod)) != "Running":
            raise Failed(f"Pod {pod} is {phase}")


def _one_machine_each(story: Story) -> None:
    """The cloud's own list against the claims: none missing, none twice, none of nobody."""

    def agree() -> bool:
        return sorted(story.machines()) == sorted(story.claims().values())

    try:
        story.until("the cloud's machines are those of the claims", agree, within_s=60)
    except Failed:
        raise Failed(f"the cloud runs {sorted(story.machines())}, the claims are {story.claims()}") from None


def _crd_uids(story: Story) -> dict[str, str]:
    found = (each["metadata"] for each in story.items("crd"))
    return {each["name"]: each["uid"] for each in found if each["name"].endswith("nebula.inftyai.com")}


STEPS: dict[str, Callable[[Story], None]] = {
    "install": install,
    "idle": idle,
    "refusals": refusals,
    "fake-cloud": fake_cloud,
    "workload": workload,
    "streams": streams,
    "helm-test": helm_test,
    "cost": cost,
    "leader-killed": leader_killed,
    "postgres-killed": postgres_killed,
    "eviction": eviction,
    "upgrade": upgrade,
    "uninstall-refused": uninstall_refused,
    "drained": drained,
    "adopts": adopts,
    "rights": rights,
}
NAMES = tuple(STEPS)
